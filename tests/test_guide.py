"""`docs/writing-a-kernel.md` is run from its first block to its last, and its tables are checked.

Of its fenced blocks, one whose fence names a file is that file. Blocks of `python` run in one
namespace; what one prints, and the error that it ends in, is the `text` that follows it. A
`console` block holds calls of `python -m jax_webgpu`, each with what it prints. In what is printed
`…` stands for any text, and where it is alone on a line for any lines.
"""

import json
import re
import shlex
import traceback
from dataclasses import dataclass
from pathlib import Path

import pytest

from jax_webgpu import (
    SpecError,
    cli,
    dtypes,
    expressions,
    folder,
    helpers,
    load_kernel,
    plan,
    spec,
    templates,
    values,
)

GUIDE = Path(__file__).parents[1] / "docs" / "writing-a-kernel.md"
TEXT = GUIDE.read_text()


@dataclass(frozen=True)
class Block:
    """A fenced block: what stands behind the fence, the text, and the line where that begins."""

    language: str
    file: str
    text: str
    line: int

    def __str__(self):
        return f"{GUIDE.name}:{self.line}"


def blocks():
    for found in re.finditer(r"^```(\w+) ?(\S*)\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL):
        line = TEXT.count("\n", 0, found.start(3)) + 1
        yield Block(found[1], found[2], found[3], line)


# ---- the blocks ---------------------------------------------------------------------------------


def test_the_guide_as_it_stands(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    namespace, printed = {"__name__": "__main__"}, ""
    for block in [*blocks(), Block("end", "", "", 0)]:
        if block.language != "text":
            assert printed == "", f"before {block} something is printed that the guide does not say"
        match block.language:
            case "json" | "wgsl":
                path = tmp_path / block.file
                path.parent.mkdir(exist_ok=True)
                path.write_text(block.text)
            case "python":
                source = compile("\n" * (block.line - 1) + block.text, GUIDE.name, "exec")
                printed = outcome(capsys, lambda source=source: exec(source, namespace))
            case "text":
                check(block, block.text, printed)
                printed = ""
            case "console":
                for line, expected in re.findall(r"^\$ (.*)\n((?:[^$].*\n|\n)*)", block.text, re.M):
                    command = shlex.split(line)
                    assert command[:3] == ["python", "-m", "jax_webgpu"], block
                    check(block, expected, outcome(capsys, lambda c=command: cli.main(c[3:])))
            case language:
                assert language == "end", f"{block}: nobody runs {language}"


def outcome(capsys, call):
    """What a call prints, with the error that it ends in as a traceback's last lines have it."""
    capsys.readouterr()
    ending = ""
    try:
        call()
    except Exception as error:
        ending = "".join(traceback.format_exception_only(error))
    return capsys.readouterr().out + ending


def check(block, expected, printed):
    """Line by line; what lines end in, and blank ones at the end, do not count."""
    lines = [line.rstrip() for line in expected.rstrip().splitlines()]
    pattern = "".join(
        r"(?:.*\n)*?" if line == "…" else re.escape(line).replace("…", ".*") + r"\n"
        for line in lines
    )
    text = "".join(line.rstrip() + "\n" for line in printed.rstrip().splitlines())
    if not re.fullmatch(pattern, text):
        pytest.fail(f"{block} expects\n{expected}\nand this is printed\n{printed}")


# ---- the tables ---------------------------------------------------------------------------------


def table(heading):
    """The rows below a heading of the reference, of all tables there, as lists of cells."""
    (section,) = re.findall(rf"^## {heading}\n(.*?)(?=^## |\Z)", TEXT, re.MULTILINE | re.DOTALL)
    rows = re.findall(r"^\|(.*)\|$", section, re.MULTILINE)
    cells = [[cell.strip() for cell in re.split(r"(?<!\\)\|", row)] for row in rows]
    return [row for row in cells if any(row) and not set("".join(row)) <= {"-"}]


def quoted(cell):
    """The texts in a cell that are in backticks."""
    return re.findall(r"`([^`]*)`", cell.replace(r"\|", "|"))


# For each object of a manifest: a key that it does not have, where it may stand.
OBJECTS = {
    "manifest": {"none": 0},
    "port": {"inputs": {"x": {"none": 0}}},
    "arg": {"args": {"n": {"none": 0}}},
    "attribute": {"attributes": {"a": {"none": 0}}},
    "attribute constraint": {"attributes": {"a": {}}, "attributeConstraints": {"a": {"none": 0}}},
    "tunable": {"tunables": {"t": {"none": 0}}},
    "requires": {"requires": {"none": 0}},
    "variant": {"variants": [{"none": 0}]},
    "intermediate": {"variants": [{"id": "v", "intermediates": [{"none": 0}], "passes": []}]},
    "pass": {"variants": [{"id": "v", "passes": [{"none": 0}]}]},
    "repeat group": {"variants": [{"id": "v", "passes": [{"repeat": {}, "none": 0}]}]},
    "binding": {"bindings": {"b": {"none": 0}}},
    "struct field": {"bindings": {"b": {"struct": [{"none": 0}]}}},
}


def test_every_key_is_in_the_table(tmp_path):
    listed, needed = {}, {}
    for name, keys, *_ in table("Keys of a manifest")[1:]:
        current = name or current
        listed.setdefault(current, []).extend(quoted(keys))
        needed.setdefault(current, []).extend(re.findall(r"\*\*`(\w+)`\*\*", keys))
    assert listed.keys() == OBJECTS.keys()
    for name, wrong in OBJECTS.items():
        document = {"name": "K", "variants": []} | wrong
        (tmp_path / "manifest.json").write_text(json.dumps(document))
        with pytest.raises(SpecError, match="unknown key 'none'; known here: ") as error:
            load_kernel(tmp_path)
        known = str(error.value).partition("known here: ")[2].split(", ")
        assert sorted(listed[name]) == sorted(known), name
        text = json.dumps(document).replace('"none": 0', "").replace(", }", "}")
        (tmp_path / "manifest.json").write_text(text)
        for key in needed[name]:  # the first that is missed, in the order of the alphabet
            with pytest.raises(SpecError, match=r"the key '\w+' is missing") as error:
                load_kernel(tmp_path)
            break
