"""JSON that knows where it stands: a manifest's document, read value by value.

Every error gives the file and the JSON path. What JSON's grammar would let pass, or almost, is an
error too, and so is a document that is larger or deeper than any manifest.
"""

import functools
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from jax_webgpu import expressions
from jax_webgpu.errors import ExpressionError, SpecError
from jax_webgpu.expressions import Expression
from jax_webgpu.helpers import HELPERS
from jax_webgpu.values import is_number, number

# Published manifests have up to 300 KiB, and some twenty thousand values.
MAX_BYTES = 4 << 20
MAX_VALUES = 200_000
MAX_DATA_BYTES = 32 << 20
MAX_NESTING = 64

# What every expression may name.
SCOPE_NAMES = frozenset(
    "derive DISPATCH_FOLD_WIDTH dtypes logicalDtypes tensorDtypes ranks shapes present args attrs "
    "tunables device f16Ok".split()
) | frozenset(HELPERS)

# An expression, a scalar, or lists and objects of these.
Value = Any

T = TypeVar("T")
D = TypeVar("D")


def parse(data: bytes, overlay: bytes, file: Path) -> "Node":
    """The manifest in `data` with the members of `overlay`; `file` is the name in messages.

    Raises:
      SpecError: it is not JSON, has flaws, or is too large.
    """
    return _parse([data, overlay], file, number, MAX_BYTES, MAX_VALUES)


def parse_data(data: bytes, file: Path) -> "Node":
    """As `parse`, of a file of arrays: integers of any size stay exact, and it may be larger.

    Raises:
      SpecError: it is not JSON, has flaws, or is too large.
    """
    return _parse([data], file, lambda value: value, MAX_DATA_BYTES, MAX_DATA_BYTES)


def _parse(
    parts: list[bytes], file: Path, numbers: Callable[[Any], Any], most: int, most_values: int
) -> "Node":
    try:
        if sum(map(len, parts)) > most:
            raise ValueError(f"more than {most:,} bytes")
        document, *overlays = (_document(part, numbers) for part in parts)
        for overlay in overlays:
            document = _overlaid(document, overlay)
        root = Node(document, file)
        _check(root, most_values)
        return root
    except SpecError:
        raise
    except ValueError as error:  # not JSON: the text gives line and column
        raise SpecError(f"{file}: {error}") from None
    except RecursionError:
        raise SpecError(f"{file}: $: nested too deeply") from None


def _overlaid(document: Any, overlay: Any) -> Any:
    """A manifest's document with an overlay's: more members, and more variants behind its own."""
    if not overlay or not isinstance(document, dict):
        return document
    result = dict(document)
    for key, value in overlay.items():
        own = document.get(key)
        if isinstance(value, dict) and isinstance(own, dict):
            result[key] = {**own, **value}
            for name in own.keys() & value.keys():
                result[key][name] = Flaw(f"{name!r} is in the manifest and in its overlay")
        elif isinstance(value, list) and isinstance(own, list):
            result[key] = [*own, *value]
        elif own is None or own == value:
            result[key] = value
        else:
            result[key] = Flaw("the manifest and its overlay differ")
    return result


@dataclass(frozen=True)
class Flaw:
    """Stands for a value that JSON's grammar would let pass, or almost."""

    text: str


def _document(data: bytes, numbers: Callable[[Any], Any]) -> Any:
    """The JSON value, with a `Flaw` for what is not JSON."""
    return json.loads(
        data,
        object_pairs_hook=_members,
        parse_constant=lambda name: Flaw(f"{name} is not JSON"),
        parse_float=lambda text: numbers(float(text)),
        parse_int=lambda text: numbers(int(text)),
    )


def _members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        for name, times in Counter(name for name, _ in pairs).items():
            if times > 1:
                result[name] = Flaw(f"the key {name!r} stands twice in one object")
    return result


def _check(root: "Node", most_values: int) -> None:
    """Raises for the first flaw, and for more values than are read."""
    count = 0
    for node, depth in _walk(root, 1):
        value = node.value
        if isinstance(value, Flaw):
            raise node.fail(value.text)
        if isinstance(value, str):
            raise node.fail("half of a surrogate pair is no text")
        if isinstance(value, dict | list):
            count += len(value)
        if count > most_values:
            raise root.fail(f"more than {most_values:,} values")
        if depth > MAX_NESTING:
            raise root.fail("nested too deeply")


def _walk(node: "Node", depth: int) -> "Iterator[tuple[Node, int]]":
    """Objects, lists and flaws, and texts that are none."""
    yield node, depth
    items: Iterator[tuple[str, Any]] = iter(())
    match node.value:
        case dict():
            items = ((f".{key}", value) for key, value in node.value.items())
        case list():
            items = ((f"[{index}]", value) for index, value in enumerate(node.value))
    for key, value in items:
        if isinstance(value, dict | list | Flaw):
            yield from _walk(node.inside(key, value), depth + 1)
        elif _SURROGATE.search(key) or (isinstance(value, str) and _SURROGATE.search(value)):
            yield node.inside(ascii(key), ""), depth


_SURROGATE = re.compile("[\ud800-\udfff]")


class Object(dict[str, "Node"]):
    """The members of a JSON object."""

    def read(self, key: str, how: Callable[["Node"], T], default: D) -> T | D:
        """A member read by a method of `Node`, or `default` where there is none."""
        return how(self[key]) if key in self else default

    def elements(self, key: str) -> list["Node"]:
        return self.read(key, Node.elements, [])

    def members(self, key: str) -> "Object":
        return self.read(key, Node.members, Object())


@dataclass(slots=True)
class Node:
    """A JSON value that knows where it stands."""

    value: Any
    file: Path
    key: str = "$"
    parent: "Node | None" = None

    @property
    def path(self) -> str:
        return (self.parent.path if self.parent else "") + self.key

    def inside(self, key: str, value: Any) -> "Node":
        return Node(value, self.file, key, self)

    def fail(self, message: str) -> SpecError:
        return SpecError(f"{self.file}: {self.path}: {message}")

    def wrong(self, expected: str) -> SpecError:
        kind = {dict: "an object", list: "a list", str: "a string", bool: "a boolean"}
        found = kind.get(type(self.value), "null" if self.value is None else "a number")
        return self.fail(f"expected {expected}, got {found}")

    def object(self, needed: str, others: str = "") -> Object:
        """The members of an object that has all of the `needed` keys, and at most the `others`."""
        members = self.members()
        known = _words(needed) | _words(others)
        if not members.keys() <= known:
            key, node = next(item for item in members.items() if item[0] not in known)
            raise node.fail(f"unknown key {key!r}; known here: {', '.join(sorted(known))}")
        for key in sorted(_words(needed) - members.keys()):
            raise self.fail(f"the key {key!r} is missing")
        return members

    def members(self) -> Object:
        """The members of an object, whatever their names."""
        if not isinstance(self.value, dict):
            raise self.wrong("an object")
        return Object(
            (key, self.inside(f".{key}", value))
            for key, value in self.value.items()
            if key != "$comment"
        )

    def elements(self) -> list["Node"]:
        if not isinstance(self.value, list):
            raise self.wrong("a list")
        return [self.inside(f"[{index}]", value) for index, value in enumerate(self.value)]

    def text(self, *choices: str) -> str:
        if not isinstance(self.value, str):
            raise self.wrong("a string")
        if choices and self.value not in choices:
            raise self.fail(f"expected one of {', '.join(choices)}, got {self.value!r}")
        return self.value

    def identifier(self) -> str:
        """A string that WGSL takes for a name."""
        self.check_identifier(self.text())
        return self.value

    def check_identifier(self, name: str) -> None:
        if not name.isidentifier() or name == "_" or name.startswith("__"):
            raise self.fail(f"{name[:80]!r} is no name in WGSL")

    def boolean(self) -> bool:
        if not isinstance(self.value, bool):
            raise self.wrong("a boolean")
        return self.value

    def number(self) -> float:
        if not is_number(self.value):
            raise self.wrong("a number")
        return self.value

    def integer(self) -> int:
        if isinstance(self.value, bool) or not isinstance(self.value, int):
            raise self.wrong("a whole number")
        return self.value

    def scalar(self) -> Any:
        if not isinstance(self.value, str | bool | int | float):
            raise self.wrong("a number, a string or a boolean")
        return self.value

    def plain(self) -> Any:
        """A value without expressions: lists become tuples."""
        if isinstance(self.value, list):
            return tuple(element.plain() for element in self.elements())
        return None if self.value is None else self.scalar()

    def expression(self, names: Set[str] | None) -> Expression:
        """Parses the text; `names` are those in scope besides the format's own, None for any."""
        try:
            parsed = expressions.parse(self.text())
        except ExpressionError as error:
            raise self.fail(str(error)) from None
        unknown = parsed.names - SCOPE_NAMES - names if names is not None else ()
        if unknown:
            raise self.fail(f"unknown name {', '.join(sorted(unknown))} in `{parsed.text}`")
        return parsed

    def derived(self, names: Set[str] | None) -> Value:
        """An expression for each string; lists and objects recurse."""
        match self.value:
            case str():
                return self.expression(names)
            case list():
                return tuple(element.derived(names) for element in self.elements())
            case dict():
                return {key: node.derived(names) for key, node in self.members().items()}
        return self.value

    def documented(self) -> Any:
        """What no rule of the format holds a call to: an expression if it is one, else itself."""
        try:
            return self.derived(None)
        except SpecError:
            return self.value

    def amount(self, names: Set[str] | None) -> Value:
        """An expression or a number."""
        if not isinstance(self.value, str) and not is_number(self.value):
            raise self.wrong("a number or an expression")
        return self.derived(names)

    def shape(self, names: Set[str] | None) -> Value:
        """An expression, or a list of expressions and numbers."""
        if isinstance(self.value, str):
            return self.expression(names)
        if not isinstance(self.value, list):
            raise self.wrong("an expression or a list")
        return tuple(element.amount(names) for element in self.elements())


@functools.cache
def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())
