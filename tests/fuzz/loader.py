"""The loader under bytes that atheris mutates, guided by what they reach.

The first byte says who reads the rest: a manifest's, a folder's metadata's, a folder's tests', a
template's or an expression's parser. Where atheris is not installed (it comes for Linux) the same
mutations are drawn without guidance.
"""

import importlib.util
import json
import os
import random
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from fuzz import corpus, mutation
from fuzz.targets import Target, Wrong, documented
from jax_webgpu import document, expressions, folder, grammar, spec, templates, trial, values
from jax_webgpu.errors import ExpressionError, SpecError

HAS_ATHERIS = importlib.util.find_spec("atheris") is not None
LONGEST = 64 << 10
_SHADER = b"{{ env.wgsl.resourceDeclarations }}\n@compute @workgroup_size(1)\nfn main() {}\n"


def _manifest(data: bytes) -> None:
    spec.loads(data, Path("f"), lambda name: _SHADER)


def _tests(data: bytes) -> None:
    trial.read(folder.Folder(Path(), False, {"test.json": b""}, {"test.json": data}))


def _template(data: bytes) -> None:
    templates.parse("f", data.decode("utf-8", "replace"))


def _expression(data: bytes) -> None:
    expressions.parse(data.decode("utf-8", "replace"))


READERS: tuple[Callable[[bytes], Any], ...] = (
    _manifest,
    lambda data: folder.parse(data, "f"),
    _tests,
    _template,
    _expression,
)


def run(value: bytes) -> str:
    """Reads the bytes, or says why not, and where."""
    if not value:
        return "read"
    reader = READERS[value[0] % len(READERS)]
    try:
        reader(value[1:])
    except Exception as error:
        label = documented(error, (SpecError, ExpressionError))
        if len(str(error)) > 2000 + 2 * len(value):
            raise Wrong(f"a message of {len(str(error))} characters") from error
        return label
    return "read"


def first() -> Iterator[bytes]:
    """What is valid, small first."""
    for seed in corpus.seeds().values():
        yield b"\0" + json.dumps(seed.manifest, separators=(",", ":")).encode()
        for name, data in seed.others.items():
            if name == "metadata.json":
                yield b"\1" + data
            else:  # one case of many
                document = json.loads(data)
                document["cases"] = document["cases"][:1]
                yield b"\2" + json.dumps(document).encode()
        for data in seed.templates.values():
            yield b"\3" + data
    for text in sorted({*corpus.strings()})[::7]:
        yield b"\4" + text.encode()


def mutated(data: bytes, generator: random.Random) -> bytes:
    """A document with other members, or other bytes."""
    if data[:1] in (b"\0", b"\1", b"\2") and generator.random() < 0.7:
        try:
            document = json.loads(data[1:])
        except (ValueError, RecursionError):
            return data
        if isinstance(document, dict):
            changed = mutation.apply(document, mutation.random_changes(generator))
            text = json.dumps(changed, ensure_ascii=False)
            return data[:1] + text.encode("utf-8", "surrogatepass")
    changed = bytearray(data)
    for _ in range(generator.randint(1, 4)):
        at = generator.randrange(len(changed) + 1)
        word = generator.choice(mutation.dictionary()).encode()
        end = at + generator.choice([0, 0, 1, len(word), 40])
        changed[at:end] = generator.choice([word, b"", generator.randbytes(2), changed[end:][:30]])
    return bytes(changed)


def inputs() -> st.SearchStrategy[bytes]:
    """Without guidance."""
    known = [data for data in first() if len(data) <= LONGEST]
    seeds = st.integers(0, 2**32)
    return st.tuples(st.sampled_from(known), seeds).map(
        lambda drawn: mutated(drawn[0], random.Random(drawn[1]))
    )


def guided(seed: int, probe: Callable[[bytes], None]) -> None:
    """Calls `probe` again and again; it has to end the process."""
    import atheris

    for module in (document, spec, folder, trial, templates, grammar, expressions, values):
        for name, each in vars(module).items():
            if getattr(each, "__module__", None) == module.__name__:
                _instrument(atheris, module, name, each)

    def mutate(data: bytes, largest: int, number: int) -> bytes:
        generator = random.Random(number)
        if data and generator.random() < 0.5:
            return mutated(bytes(data), generator)[:largest]
        found: bytes = atheris.Mutate(data, largest)
        return found

    here = Path(tempfile.mkdtemp(dir=os.getcwd()))
    known = here / "known"
    known.mkdir()
    for number, data in enumerate(first()):
        if len(data) <= LONGEST:
            (known / str(number)).write_bytes(data)
    words = here / "words"
    quoted = (json.dumps(word) for word in mutation.dictionary() if word)
    words.write_text("".join(f"{word}\n" for word in quoted if "\\u" not in word))
    options = {
        "seed": seed % (2**31) or 1,
        "max_len": LONGEST,
        "dict": words,
        "artifact_prefix": f"{here}/",
        "rss_limit_mb": 0,
        "timeout": 100_000,  # the watchdog sees to that
        "verbosity": 0,
    }
    arguments = [sys.argv[0], *(f"-{name}={value}" for name, value in options.items()), str(known)]
    atheris.Setup(arguments, lambda data: probe(bytes(data)), custom_mutator=mutate)
    atheris.Fuzz()


def _instrument(atheris: Any, module: Any, name: str, value: Any) -> None:
    """Counts what a function, or a class's methods, reach."""
    if isinstance(value, type):
        for own, method in vars(value).items():
            if callable(method) and hasattr(method, "__code__"):
                setattr(value, own, atheris.instrument_func(method))
    elif hasattr(value, "__code__"):
        setattr(module, name, atheris.instrument_func(value))


TARGET = Target("loader", 12, inputs, run, guided if HAS_ATHERIS else None)
