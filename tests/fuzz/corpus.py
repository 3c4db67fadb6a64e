"""What is valid here already: manifests with their templates, metadata, tests."""

import functools
import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import folders

from jax_webgpu import resources

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "kernels"


@dataclass(frozen=True)
class Seed:
    """A kernel folder's files."""

    name: str
    manifest: Any
    """As JSON has it."""
    templates: dict[str, bytes]
    others: dict[str, bytes]
    """`metadata.json` and `test.json`."""


@functools.cache
def seeds() -> dict[str, Seed]:
    """All of them, by name."""
    found = {}
    for path in sorted(EXAMPLES.iterdir()):
        if (path / "manifest.json").exists():
            found[path.name] = _read(path.name, path)
    with tempfile.TemporaryDirectory() as folder:
        for make in (folders.scale, folders.accumulate, folders.moments, folders.take):
            found[make.__name__] = _read(make.__name__, make(Path(folder)))
    shaders = {path.name: path.read_bytes() for path in resources.shaders().iterdir()}
    for path in sorted(resources.specs().glob("*.json")):
        manifest = json.loads(path.read_bytes())
        if "overlay" not in path.name:
            found[path.stem] = Seed(path.stem, manifest, shaders, {})
    return found


def _read(name: str, path: Path) -> Seed:
    files = {each.name: each.read_bytes() for each in sorted(path.iterdir())}
    manifest = json.loads(files.pop("manifest.json"))
    templates = {n: data for n, data in files.items() if n.endswith(".wgsl.jinja")}
    others = {n: data for n, data in files.items() if n.endswith(".json")}
    return Seed(name, manifest, templates, others)


def strings() -> Iterator[str]:
    """Every string in the manifests that is not a key."""

    def walk(value: Any) -> Iterator[str]:
        if isinstance(value, str):
            yield value
        elif isinstance(value, dict | list):
            for each in value.values() if isinstance(value, dict) else value:
                yield from walk(each)

    for seed in seeds().values():
        yield from walk(seed.manifest)
