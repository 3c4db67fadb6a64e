"""`docs/writing-a-kernel.md` is run from its first block to its last, and its tables are checked.

Of its fenced blocks, one whose fence names a file is that file. Blocks of `python` run in one
namespace; what one prints, and the error that it ends in, is the `text` that follows it. A
`console` block holds calls of `python -m jax_webgpu`, each with what it prints. In what is printed
`…` stands for any text, and where it is alone on a line for any lines.
"""

import json
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

import pytest

from jax_webgpu import (
    SpecError,
    cli,
    document,
    dtypes,
    expressions,
    folder,
    grammar,
    helpers,
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
                    check(block, expected, outcome(capsys, lambda line=line: command(line)))
            case language:
                assert language == "end", f"{block}: nobody runs {language}"


def command(line):
    python, m, module, *arguments = shlex.split(line)
    assert (python, m, module) == ("python", "-m", "jax_webgpu")
    assert cli.main(arguments) == 0


def outcome(capsys, call):
    """What a call prints, with the error that it ends in as a traceback ends in it."""
    capsys.readouterr()
    ending = ""
    try:
        call()
    except Exception as error:
        ending = f"{type(error).__module__}.{type(error).__qualname__}: {error}"
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
    (section,) = re.findall(
        rf"^## {heading}\n(.*?)(?=^#{{1,2}} |\Z)", TEXT, re.MULTILINE | re.DOTALL
    )
    rows = re.findall(r"^\|(.*)\|$", section, re.MULTILINE)
    cells = [[cell.strip() for cell in re.split(r"(?<!\\)\|", row)] for row in rows]
    return [row for row in cells if any(row) and not set("".join(row)) <= {"-"}]


def quoted(cell):
    """The texts in a cell that are in backticks."""
    return re.findall(r"`([^`]*)`", cell.replace(r"\|", "|"))


# Each kind of object, in the smallest manifest that has one.
OBJECTS = {
    "manifest": lambda each: each,
    "port": lambda each: manifest(inputs={"x": each}),
    "arg": lambda each: manifest(args={"n": each}),
    "attribute": lambda each: manifest(attributes={"a": each}),
    "attribute constraint": lambda each: manifest(
        attributes={"a": {}}, attributeConstraints={"a": each}
    ),
    "tunable": lambda each: manifest(tunables={"t": each}),
    "requires": lambda each: manifest(requires=each),
    "variant": lambda each: manifest(variants=[each]),
    "intermediate": lambda each: manifest(
        variants=[{"id": "v", "intermediates": [each], "passes": []}]
    ),
    "pass": lambda each: manifest(variants=[{"id": "v", "passes": [each]}]),
    "repeat group": lambda each: manifest(
        variants=[{"id": "v", "passes": [{"repeat": {}} | each]}]
    ),
    "binding": lambda each: manifest(bindings={"b": each}),
    "struct field": lambda each: manifest(bindings={"b": {"struct": [each]}}),
}


def manifest(**keys):
    return {"name": "K", "outputs": {}, "variants": []} | keys


def refused(document):
    """Why a manifest is refused; nothing if it is not."""
    try:
        spec.loads(json.dumps(document).encode(), Path("manifest.json"), lambda name: b"")
    except SpecError as error:
        return str(error)
    return ""


def keys(wanted):
    """The cells with the keys of an object, whose name stands in the first row of its own."""
    current = ""
    for name, cell, _ in table("Keys of a manifest"):
        current = name or current
        if current == wanted:
            yield cell


@pytest.mark.parametrize("name", OBJECTS)
def test_keys(name):
    listed = [key for cell in keys(name) for key in quoted(cell)]
    known = refused(OBJECTS[name]({"none": 0})).partition("unknown key 'none'; known here: ")[2]
    assert sorted(listed) == known.split(", ")


@pytest.mark.parametrize("name", OBJECTS)
def test_needed_keys(name):
    bold = {key for cell in keys(name) for key in re.findall(r"\*\*`(\w+)`\*\*", cell)}
    found = {"repeat": {"count": 1, "index": "i"}} if name == "repeat group" else {}
    while missing := re.search(r"the key '(\w+)' is missing", refused(OBJECTS[name](found))):
        assert missing[1] not in found
        found[missing[1]] = None
    assert bold == {*found}


def test_objects():
    rows = table("Keys of a manifest")
    assert [row[0] for row in rows[1:] if row[0]] == [*OBJECTS]


def test_helpers():
    rows = table("Helpers")
    assert sorted(name for row in rows for name in quoted(row[0])) == sorted(helpers.HELPERS)
    for name, _, example in rows:
        assert quoted(example)[0].startswith(f"{quoted(name)[0]}(")
        check_example(example)


def test_values():
    for _, example in table("Numbers and other values"):
        check_example(example)


def check_example(cell):
    """`expression` is `value`."""
    expression, value = re.fullmatch(r"`(.*)` is `(.*)`", cell.replace(r"\|", "|")).groups()
    assert values.show(expressions.parse(expression)(helpers.HELPERS)) == value, expression


def test_names():
    rows = table("Names")
    ours = [name for row in rows[1:] for name in quoted(row[0])]
    named = {*ours[: ours.index("env")]} - {"repeat"}
    assert named == document.SCOPE_NAMES - helpers.HELPERS.keys()


def test_dtypes():
    rows = table("Dtypes on the device")[1:]
    told = {
        name: (quoted(wgsl)[0], int(size))
        for names, wgsl, size in rows
        if "storage" not in names
        for name in quoted(names)
    }
    assert told == {name: (row.wgsl, row.bytes) for name, row in dtypes.TABLE.items()}


def test_bounds():
    rows = table("What is refused")
    told = {
        what: [int(number.replace(",", "")) for number in re.findall(r"\d[\d,]*", most)]
        for what, most in rows[rows.index(["at most", ""]) + 1 :]
    }
    mib = 2**20
    assert templates.MAX_NESTING == templates.MAX_CALLS
    assert told == {
        "a folder": [folder.MAX_BYTES // mib, folder.MAX_FILES],
        "a manifest": [document.MAX_BYTES // mib, document.MAX_VALUES, spec.MAX_VARIANTS],
        "templates": [spec.MAX_TEMPLATE // mib, spec.MAX_TEMPLATES // mib],
        "an expression": [grammar.MAX_LENGTH, grammar.MAX_NESTING],
        "a template's blocks and macro calls": [templates.MAX_CALLS],
        "a list, a text": [values.MAX_LIST, values.MAX_TEXT],
        "evaluating a call": [values.MAX_WORK],
        "the passes of a call": [plan.MAX_PASSES, plan.MAX_TURNS],
    }


def test_examples():
    rows = [name for row in table("What the examples show") for name in quoted(row[0])]
    folders = GUIDE.parents[1].glob("examples/kernels/*/manifest.json")
    assert sorted(rows) == sorted(path.parent.name for path in folders)
