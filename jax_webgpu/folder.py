"""A kernel folder's files as bytes, checked before anything in them is parsed.

A published folder's ``metadata.json`` holds the sha256 digest of every other file, in base64. Each
file is read once: the bytes that were hashed are the bytes that are handed on to be parsed.

The digests are looked for under the top-level keys ``digest``, ``digests``, ``sha256`` and
``files``, of which one may have them, in any of these forms; what the Hub's tools write is the
first, under ``digest``::

    {"algorithm": "sha256", "files": {"manifest.json": "RBNvo1Wz…4o="}}
    {"manifest.json": "RBNvo1Wz…4o="}
    {"manifest.json": {"sha256": "RBNvo1Wz…4o="}}
    [{"path": "manifest.json", "sha256": "RBNvo1Wz…4o="}]

A list may say ``name`` for ``path``, a digest may begin with ``sha256-``, and each of the last
three forms may also stand as the first's ``files``. Other keys are ignored.

A folder that was fetched is what its metadata lists, and nothing else. A local one may have no
metadata, or files that it does not list: they are the user's own, and only what is listed is
checked. The digests show damage and mixed versions; they do not show who wrote the kernel.
"""

import base64
import binascii
import hashlib
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jax_webgpu import files
from jax_webgpu.errors import SpecError

MANIFEST = "manifest.json"
METADATA = "metadata.json"
KEYS = ("digest", "digests", "sha256", "files")

# Manifests run to 300 KiB and templates to 50; the rest is room for a `test.json` with its arrays.
MAX_BYTES = 64 * 2**20
MAX_FILES = 256
MAX_METADATA = 2**20


@dataclass(frozen=True)
class Folder:
    """The files of a folder, of which those in `digests` were read and found right."""

    path: Path
    fetched: bool
    """Whether nothing but what `digests` has may be read."""
    digests: Mapping[str, bytes]
    """The sha256 of each file that the metadata lists; empty where it lists none."""
    checked: Mapping[str, bytes] = field(repr=False)
    """The contents of those of them that exist."""

    def find(self, name: str) -> bytes | None:
        """The contents of a file, None if there is none; raises as `read_bytes` does."""
        if name in self.digests or self.fetched:
            return self.checked.get(name)
        check_name(name, self.path)
        return _contents(self.path, name, MAX_BYTES, links=False)

    def read_bytes(self, name: str) -> bytes:
        """The contents of a file.

        Raises:
          SpecError: it is missing, may not be read, or is not listed in a folder that was fetched.
        """
        data = self.find(name)
        if data is not None:
            return data
        if name in self.digests:
            raise SpecError(f"{self.path}: {name} is missing, and {METADATA} lists it")
        if self.fetched:
            raise SpecError(f"{self.path}: {METADATA} does not list {name}: it is not verified")
        raise SpecError(f"{self.path}: {name} is missing")


def read(path: Path, *, fetched: bool = False) -> Folder:
    """Reads a folder's metadata and all the files it lists, and checks their digests.

    Args:
      path: the folder.
      fetched: whether it comes from elsewhere: it must then have digests, nothing but what they
        list is read, and links are followed, of which the Hub's cache is made.

    Raises:
      SpecError: a file is not the one that the metadata lists, with the digest that was expected
        and the one that was found; or the metadata cannot be made out; or a name, a link or a
        size is refused.
    """
    if not path.is_dir():
        raise SpecError(f"{path}: not a folder")
    metadata = _contents(path, METADATA, MAX_METADATA, links=fetched)
    if metadata is None and fetched:
        raise SpecError(f"{path}: {METADATA} is missing: nothing here can be verified")
    digests = {} if metadata is None else parse(metadata, path / METADATA)
    if not digests and fetched:
        raise SpecError(f"{path / METADATA}: no sha256 digests: nothing here can be verified")
    checked, left = {}, MAX_BYTES
    for name, expected in digests.items():
        data = _contents(path, name, left, links=fetched)
        if data is None:  # an error only where the file is needed
            continue
        found = hashlib.sha256(data).digest()
        if found != expected:
            cure = "remove {0} and load again" if fetched else "after a change of yours remove {1}"
            raise SpecError(
                f"{path}: {name} is not the file that {METADATA} lists: expected sha256 "
                f"{_base64(expected)}, found {_base64(found)} "
                f"({cure.format((path / name).resolve(), METADATA)})"
            )
        checked[name], left = data, left - len(data)
    return Folder(path, fetched, digests, checked)


def parse(metadata: bytes, where: object) -> dict[str, bytes]:
    """The digest of each file that a ``metadata.json`` lists, none if it has no digests.

    Raises:
      SpecError: it is not a JSON object, has digests in two places, one that is not a sha256 in
        base64, or a name that is no file's in the folder; the message begins with `where`.
    """
    try:
        document = json.loads(metadata, object_pairs_hook=_members)
        if not isinstance(document, dict):
            raise SpecError("expected an object")
        tables = {key: _table(document.get(key)) for key in KEYS}
        places = [key for key, table in tables.items() if table]
        if len(places) > 1:
            raise SpecError(f"digests under both {' and '.join(places)}")
        table = tables[places[0]] if places else {}
        if len(table) > MAX_FILES:
            raise SpecError(f"{len(table)} files; at most {MAX_FILES} are read")
        return {check_name(name, places[0]): _digest(name, text) for name, text in table.items()}
    except RecursionError:
        raise SpecError(f"{where}: nested too deeply") from None
    except ValueError as error:  # not JSON, or one of those above
        raise SpecError(f"{where}: {error}") from None


def check_name(name: str, where: object) -> str:
    """The name itself if it is a path that stays in its folder, else a `SpecError`."""
    right = name.isprintable() and not {*name} & {*"\\:"}
    if not right or any(part in ("", ".", "..") for part in name.split("/")):
        raise SpecError(f"{where}: {name!r} is not the name of a file in the folder")
    return name


def _members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """What a JSON object or a list names, each once."""
    result = dict(pairs)
    if len(result) < len(pairs):
        ((twice, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise SpecError(f"{twice!r} stands twice")
    return result


def _table(value: Any) -> dict[str, Any]:
    """File names with the text of their digests; empty if this is something else."""
    if isinstance(value, dict) and isinstance(value.get("files"), dict | list):
        algorithm = value.get("algorithm", "sha256")
        if algorithm not in ("sha256", "SHA256"):
            raise SpecError(f"the digests' algorithm is {algorithm!r}; expected 'sha256'")
        value = value["files"]
    pairs: list[tuple[str, Any]] = []
    if isinstance(value, dict):
        pairs = [*value.items()]
    elif isinstance(value, list):
        entries = [each for each in value if isinstance(each, dict)]
        pairs = [(str(each.get("path", each.get("name", ""))), each) for each in entries]
    texts = [(n, each.get("sha256") if isinstance(each, dict) else each) for n, each in pairs]
    # One value that is a digest tells digests from, say, sizes or paths.
    return _members(texts) if any(_decoded(text) for _, text in texts) else {}


def _decoded(text: Any) -> bytes | None:
    try:
        data = base64.b64decode(text.removeprefix("sha256-"), validate=True)
    except (AttributeError, ValueError, binascii.Error):
        return None
    return data if len(data) == 32 else None


def _digest(name: str, text: Any) -> bytes:
    data = _decoded(text)
    if data is None:
        raise SpecError(f"{text!r} of {name!r} is not a sha256 digest in base64")
    return data


def _base64(digest: bytes) -> str:
    return base64.b64encode(digest).decode()


def _contents(folder: Path, name: str, limit: int, *, links: bool) -> bytes | None:
    """The bytes of a file, None where there is none."""
    try:
        return files.read(folder, name, limit, links=links)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise SpecError(f"{folder}: cannot read {name}: {error.strerror or error}") from None
    except ValueError as error:
        raise SpecError(f"{folder}: cannot read {name}: {error}") from None
