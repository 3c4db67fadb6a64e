"""A kernel folder's manifest, checked whole and turned into a `Spec`.

Nothing here knows an operator. Every error gives the file and the JSON path. The format is the
published WebGPU-kernel manifest's, spec 2.1.
"""

import functools
import hashlib
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from jax_webgpu import dtypes, expressions, templates
from jax_webgpu.errors import ExpressionError, SpecError
from jax_webgpu.expressions import Expression
from jax_webgpu.helpers import HELPERS
from jax_webgpu.templates import Template
from jax_webgpu.values import UNDEFINED, is_number, is_sequence, number, show

SCOPE_NAMES = frozenset(
    "derive DISPATCH_FOLD_WIDTH dtypes logicalDtypes tensorDtypes ranks shapes present args attrs "
    "tunables device f16Ok".split()
) | frozenset(HELPERS)

# An expression, a scalar, or lists and objects of these.
Value = Any

Shaders = Path | Callable[[str], bytes]

_NONE = frozenset[str]()


@dataclass(frozen=True)
class Port:
    """An input or an output of the operator."""

    name: str
    dtype: str
    """A type variable or a logical dtype."""
    optional: bool
    shape: Value | None
    storage: str | None
    """The 32-bit dtype that int64 has in a buffer, and other whole numbers too."""
    narrowing: str | None
    """What becomes of values that `storage` does not hold: ``checked`` or ``saturating``."""
    onnx: str | None
    description: str
    rank: Any = None
    """Documents; nothing holds a call to it."""


@dataclass(frozen=True)
class Argument:
    """A scalar that is given with each call."""

    name: str
    kind: str
    required: bool
    one_of: tuple[Any, ...]


@dataclass(frozen=True)
class Attribute:
    """`default` is `UNDEFINED` where the manifest gives none."""

    name: str
    default: Any
    required: bool
    values: tuple[Any, ...] | None
    description: str


@dataclass(frozen=True)
class StructField:
    """One 4-byte member of a uniform struct."""

    name: str
    type: str
    value: Value | None
    default: Any
    required: bool


@dataclass(frozen=True)
class Binding:
    """One `@group(0) @binding(i)` of a pass."""

    name: str
    """The WGSL name."""
    source: str
    """The port or intermediate behind it; empty for a struct."""
    buffer: str | None
    element_type: str | None
    length: Value | None
    struct: tuple[StructField, ...] | None
    struct_name: str | None
    """The WGSL type's name; None where there is no struct."""

    @property
    def is_uniform(self) -> bool:
        return self.buffer == "uniform" or (self.buffer is None and self.struct is not None)

    @functools.cached_property
    def reads(self) -> frozenset[str]:
        """The names that it may read."""
        values = [self.length, *(each.value for each in self.struct or ())]
        return reads(tuple(values)) | {(self.element_type or "").removeprefix("$")}


@dataclass(frozen=True)
class Dispatch:
    """Workgroup counts x, y, z; or a number of threads or workgroups to be folded."""

    x: Value = None
    y: Value = 1
    z: Value = 1
    threads: Value = None
    workgroup_size: Value = None
    workgroups: Value = None

    @functools.cached_property
    def reads(self) -> frozenset[str]:
        """The names that it may read."""
        sizes = (self.x, self.y, self.z, self.threads, self.workgroup_size, self.workgroups)
        return reads(sizes)


@dataclass(frozen=True)
class Pass:
    id: str
    name: str
    shader: str
    derive: tuple[tuple[str, Value], ...]
    bindings: tuple[Binding, ...]
    dispatch: Dispatch
    view_alias: tuple[tuple[str, str], ...]
    """Pairs of WGSL names; the pass is skipped when each pair is one buffer already."""

    @functools.cached_property
    def is_view(self) -> bool:
        """Whether every pair of `view_alias` is one array, so that nothing is left to do."""
        sources = {binding.name: binding.source for binding in self.bindings}
        pairs = [(sources[read], sources[written]) for read, written in self.view_alias]
        return bool(pairs) and all(read and read == written for read, written in pairs)


@dataclass(frozen=True)
class Repeat:
    """Passes that run `count` times."""

    id: str
    count: Value
    index: str
    passes: tuple["Pass | Repeat", ...]


@dataclass(frozen=True)
class Intermediate:
    """A buffer between passes."""

    id: str
    dtype: str
    shape: Value
    zero_init: bool


@dataclass(frozen=True)
class Requires:
    features: tuple[str, ...] = ()
    limits: tuple[tuple[str, int], ...] = ()
    subgroup_min_size: int | None = None
    subgroup_matrix_configs: bool = False


@dataclass(frozen=True)
class Variant:
    id: str
    priority: float
    when: tuple[Expression, ...]
    demote_when: tuple[Expression, ...]
    superseded_by: tuple[str, ...]
    requires: Requires
    tunables: tuple[tuple[str, Any], ...]
    derive: tuple[tuple[str, Value], ...]
    intermediates: tuple[Intermediate, ...]
    passes: tuple[Pass | Repeat, ...]

    @functools.cached_property
    def every_pass(self) -> tuple[Pass, ...]:
        """Each pass once, those of repeat groups too."""

        def walk(entries: tuple[Pass | Repeat, ...]) -> Iterator[Pass]:
            for entry in entries:
                if isinstance(entry, Repeat):
                    yield from walk(entry.passes)
                else:
                    yield entry

        return tuple(walk(self.passes))

    @functools.cached_property
    def most_bound(self) -> dict[str, int]:
        """The most bindings of each kind in any pass, by the name of the limit for it."""
        uniforms, others = [0], [0]
        for each in self.every_pass:
            uniforms.append(sum(binding.is_uniform for binding in each.bindings))
            others.append(len(each.bindings) - uniforms[-1])
        return {
            "maxStorageBuffersPerShaderStage": max(others),
            "maxUniformBuffersPerShaderStage": max(uniforms),
        }


@dataclass(frozen=True, eq=False)
class Spec:
    """A checked manifest with its templates. Equal and hashed by the bytes it was made from."""

    domain: str
    name: str
    since_version: int | None
    description: str
    inputs: Mapping[str, Port]
    outputs: Mapping[str, Port]
    args: Mapping[str, Argument]
    attributes: Mapping[str, Attribute]
    type_constraints: Mapping[str, tuple[str, ...]]
    tunables: Mapping[str, Any]
    derive: Mapping[str, Value]
    when: tuple[Expression, ...]
    requires: Requires
    variants: tuple[Variant, ...]
    templates: Mapping[str, Template]
    path: Path
    digest: str

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Spec) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        return f"{self.domain}.{self.name}"

    @functools.cached_property
    def of_device(self) -> frozenset[str]:
        """The names in scope whose values may differ from device to device."""
        found = {"device", "f16Ok", expressions.EVERY}
        for name, value in self.derive.items():
            if reads(value) & found:
                found.add(name)
        return frozenset(found)

    @functools.cached_property
    def ranked(self) -> tuple[Variant, ...]:
        """The variants by priority, the highest first, ties in the manifest's order."""
        return tuple(sorted(self.variants, key=lambda variant: -variant.priority))

    @functools.cached_property
    def _by_id(self) -> dict[str, Variant]:
        return {variant.id: variant for variant in self.variants}

    def variant(self, id: str) -> Variant:
        return self._by_id[id]


def load(manifest: Path, shaders: Path | None = None, overlay: Path | None = None) -> Spec:
    """Loads a manifest and the templates it names.

    Args:
      manifest: the JSON file.
      shaders: the folder of the templates, by default the manifest's own.
      overlay: a file in the same format whose variants, derived values, bindings and tunables
        join the manifest's.

    Raises:
      SpecError: the file is not in the format; the message gives file and JSON path.
    """
    try:
        data = manifest.read_bytes()
        extra = overlay.read_bytes() if overlay else b"{}"
    except OSError as error:
        raise SpecError(f"{error.filename}: {error.strerror or error}") from None
    return loads(data, manifest, shaders or manifest.parent, extra)


def loads(data: bytes, manifest: Path, shaders: Shaders, overlay: bytes = b"{}") -> Spec:
    """As `load`, from the files' bytes; `manifest` is only the name in messages.

    `shaders` is the folder of the templates, or gives a template's bytes by its name.
    """
    try:
        root = _Node(_overlaid(_document(data), _document(overlay)), manifest)
        data += overlay
        for flaw in _flaws(root):
            raise flaw.fail(flaw.value.text)
        return _Reader(data, manifest, shaders).spec(root)
    except SpecError:
        raise
    except ValueError as error:  # not JSON: the text gives line and column
        raise SpecError(f"{manifest}: {error}") from None
    except RecursionError:
        raise SpecError(f"{manifest}: $: nested too deeply") from None


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
                result[key][name] = _Flaw(f"{name!r} is in the manifest and in its overlay")
        elif isinstance(value, list) and isinstance(own, list):
            result[key] = [*own, *value]
        elif own is None or own == value:
            result[key] = value
        else:
            result[key] = _Flaw("the manifest and its overlay differ")
    return result


@dataclass(frozen=True)
class _Flaw:
    """Stands for a value that JSON's grammar would let pass, or almost."""

    text: str


def _document(data: bytes) -> Any:
    """The JSON value, its numbers as the format has them, with a `_Flaw` for what is not JSON."""
    return json.loads(
        data,
        object_pairs_hook=_members,
        parse_constant=lambda name: _Flaw(f"{name} is not JSON"),
        parse_float=lambda text: number(float(text)),
        parse_int=lambda text: number(int(text)),
    )


def _members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        names = [name for name, _ in pairs]
        for name in result:
            if names.count(name) > 1:
                result[name] = _Flaw(f"the key {name!r} stands twice in one object")
    return result


def _flaws(node: "_Node") -> "Iterator[_Node]":
    match node.value:
        case _Flaw():
            yield node
        case dict():
            for key, value in node.value.items():
                if isinstance(value, dict | list | _Flaw):
                    yield from _flaws(node.inside(f".{key}", value))
        case list():
            for index, value in enumerate(node.value):
                if isinstance(value, dict | list | _Flaw):
                    yield from _flaws(node.inside(f"[{index}]", value))


T = TypeVar("T")
D = TypeVar("D")


class _Object(dict[str, "_Node"]):
    """The members of a JSON object."""

    def read(self, key: str, how: Callable[["_Node"], T], default: D) -> T | D:
        """A member read by a method of `_Node`, or `default` where there is none."""
        return how(self[key]) if key in self else default

    def elements(self, key: str) -> list["_Node"]:
        return self.read(key, _Node.elements, [])

    def members(self, key: str) -> "_Object":
        return self.read(key, _Node.members, _Object())


@dataclass(slots=True)
class _Node:
    """A JSON value that knows where it stands."""

    value: Any
    file: Path
    key: str = "$"
    parent: "_Node | None" = None

    @property
    def path(self) -> str:
        return (self.parent.path if self.parent else "") + self.key

    def inside(self, key: str, value: Any) -> "_Node":
        return _Node(value, self.file, key, self)

    def fail(self, message: str) -> SpecError:
        return SpecError(f"{self.file}: {self.path}: {message}")

    def wrong(self, expected: str) -> SpecError:
        kind = {dict: "an object", list: "a list", str: "a string", bool: "a boolean"}
        found = kind.get(type(self.value), "null" if self.value is None else "a number")
        return self.fail(f"expected {expected}, got {found}")

    def object(self, needed: str, others: str = "") -> _Object:
        """The members of an object that has all of the `needed` keys, and at most the `others`."""
        members = self.members()
        known = _words(needed) | _words(others)
        if not members.keys() <= known:
            key, node = next(item for item in members.items() if item[0] not in known)
            raise node.fail(f"unknown key {key!r}; known here: {', '.join(sorted(known))}")
        for key in sorted(_words(needed) - members.keys()):
            raise self.fail(f"the key {key!r} is missing")
        return members

    def members(self) -> _Object:
        """The members of an object, whatever their names."""
        if not isinstance(self.value, dict):
            raise self.wrong("an object")
        return _Object(
            (key, self.inside(f".{key}", value))
            for key, value in self.value.items()
            if key != "$comment"
        )

    def elements(self) -> list["_Node"]:
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

    def expression(self, names: frozenset[str] | None) -> Expression:
        """Parses the text; `names` are those in scope besides the format's own, None for any."""
        try:
            parsed = expressions.parse(self.text())
        except ExpressionError as error:
            raise self.fail(str(error)) from None
        unknown = parsed.names - SCOPE_NAMES - names if names is not None else ()
        if unknown:
            raise self.fail(f"unknown name {', '.join(sorted(unknown))} in `{parsed.text}`")
        return parsed

    def derived(self, names: frozenset[str] | None) -> Value:
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

    def amount(self, names: frozenset[str] | None) -> Value:
        """An expression or a number."""
        if not isinstance(self.value, str) and not is_number(self.value):
            raise self.wrong("a number or an expression")
        return self.derived(names)

    def shape(self, names: frozenset[str] | None) -> Value:
        """An expression, or a list of expressions and numbers."""
        if isinstance(self.value, str):
            return self.expression(names)
        if not isinstance(self.value, list):
            raise self.wrong("an expression or a list")
        return tuple(element.amount(names) for element in self.elements())


def evaluate(value: Value, scope: expressions.Scope) -> Any:
    """The value of a `Value`; raises `ExpressionError`."""
    match value:
        case Expression():
            return value(scope)
        case tuple():
            return [evaluate(element, scope) for element in value]
        case dict():
            return {key: evaluate(element, scope) for key, element in value.items()}
    return value


def reads(value: Value) -> frozenset[str]:
    """All the names that the evaluation of a `Value` may read; see `Expression.reads`."""
    match value:
        case Expression():
            return value.reads
        case tuple():
            return _NONE.union(*map(reads, value))
        case dict():
            return _NONE.union(*map(reads, value.values()))
    return _NONE


def sizes(value: Value, scope: expressions.Scope, name: str) -> tuple[int, ...]:
    """The value of a shape: whole numbers of 0 or more, or an `ExpressionError`."""
    try:
        found = evaluate(value, scope)
    except ExpressionError as error:
        raise ExpressionError(f"the shape of {name}: {error}") from None
    shape = [whole(size) for size in found] if is_sequence(found) else [None]
    if any(size is None or size < 0 for size in shape):
        raise ExpressionError(f"the shape of {name} comes out as {show(found)}")
    return tuple(size for size in shape if size is not None)


@functools.cache
def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# The keys of a binding and of a struct's field.
_BINDING = "buffer name arg scratch elementType length structName struct"
_FIELD = ("name type", "value required internal default")


@dataclass
class _Reader:
    """Reads one manifest. Methods stand in the order in which the format's keys nest."""

    data: bytes
    manifest: Path
    shaders: Shaders
    ports: dict[str, Port] = field(default_factory=dict)
    variables: dict[str, tuple[str, ...]] = field(default_factory=dict)
    arguments: dict[str, Argument] = field(default_factory=dict)
    handles: dict[str, _Node] = field(default_factory=dict)
    unused: set[str] = field(default_factory=set)
    """The handles that no pass has bound."""
    names: frozenset[str] = _NONE
    templates: dict[str, Template] = field(default_factory=dict)

    def spec(self, node: _Node) -> Spec:
        top = node.object(
            "name outputs variants",
            "$schema domain description conformance sinceVersion inputs args attributes "
            "attributeConstraints typeConstraints tunables derive when requires bindings onnx",
        )
        self.variables = {n: _dtypes(each) for n, each in top.members("typeConstraints").items()}
        derive = dict(self.derive(top, _NONE))
        self.names = frozenset(derive)
        inputs = {name: self.port(name, each) for name, each in top.members("inputs").items()}
        outputs = {name: self.port(name, each) for name, each in top.members("outputs").items()}
        for name in inputs.keys() & outputs.keys():
            node = top.members("outputs")[name]
            inputs[name], outputs[name] = _in_out(inputs[name], outputs[name], node)
        self.ports = {**inputs, **outputs}
        self.arguments = {n: self.argument(n, each) for n, each in top.members("args").items()}
        attributes = self.attributes(top)
        tunables = _tunables(top)
        self.handles = top.members("bindings")
        self.unused = set(self.handles)
        variants = tuple(self.variant(each) for each in top["variants"].elements())
        self.check_variants(top["variants"], variants)
        for handle in sorted(self.unused):
            _check_handle(self.handles[handle])
        return Spec(
            domain=top.read("domain", _Node.text, "ai.onnx"),
            name=top["name"].text(),
            since_version=top.read("sinceVersion", _Node.integer, None),
            description=top.read("description", _Node.text, ""),
            inputs=inputs,
            outputs=outputs,
            args=self.arguments,
            attributes=attributes,
            type_constraints=self.variables,
            tunables=tunables,
            derive=derive,
            when=self.clauses(top, "when"),
            requires=_requires(top),
            variants=variants,
            templates=self.templates,
            path=self.manifest,
            digest=self.digest(),
        )

    def digest(self) -> str:
        """Of all that shapes a plan; the file's name does not."""
        hashed = hashlib.sha256(self.data)
        for name, template in sorted(self.templates.items()):
            hashed.update(f"\0{name}\0{template.source}".encode())
        return hashed.hexdigest()

    def port(self, name: str, node: _Node) -> Port:
        keys = node.object("dtype", "description onnx rank optional layout shape storage narrowing")
        dtype = keys["dtype"].text()
        if dtype not in self.variables and dtype not in dtypes.TABLE:
            known = ", ".join([*self.variables, *dtypes.TABLE])
            raise keys["dtype"].fail(f"{dtype!r} is no type; known here: {known}")
        storage = keys.read("storage", lambda each: each.text(*dtypes.NARROW), None)
        if storage and "int64" not in self.variables.get(dtype, (dtype,)):
            raise keys["storage"].fail(f"only an int64 port has a storage, and {name} is {dtype}")
        # A value that does not fit must not wrap silently: checked unless the manifest clamps.
        narrowing = "checked" if storage else None
        return Port(
            name=name,
            dtype=dtype,
            optional=keys.read("optional", _Node.boolean, False),
            shape=keys.read("shape", lambda each: each.shape(self.names), None),
            storage=storage,
            narrowing=keys.read("narrowing", lambda n: n.text("checked", "saturating"), narrowing),
            onnx=keys.read("onnx", _Node.text, None),
            description=keys.read("description", _Node.text, ""),
            rank=keys.read("rank", _Node.documented, None),
        )

    def argument(self, name: str, node: _Node) -> Argument:
        keys = node.object("kind", "required oneOf onnx")
        return Argument(
            name=name,
            kind=keys["kind"].text("u32", "i32", "f32", "bool", "string"),
            required=keys.read("required", _Node.boolean, True),
            one_of=tuple(each.scalar() for each in keys.elements("oneOf")),
        )

    def attributes(self, top: _Object) -> dict[str, Attribute]:
        given, constraints = top.members("attributes"), top.members("attributeConstraints")
        for name, node in constraints.items():
            if name not in given:
                raise node.fail(f"{name} is no attribute")
        result = {}
        for name, node in given.items():
            keys = node.object("", "default description")
            rule = constraints.read(name, lambda each: each.object("", "required values"), keys)
            result[name] = Attribute(
                name=name,
                default=keys.read("default", _Node.plain, UNDEFINED),
                required=rule.read("required", _Node.boolean, False),
                values=tuple(each.plain() for each in rule.elements("values"))
                if "values" in rule
                else None,
                description=keys.read("description", _Node.text, ""),
            )
        return result

    def derive(self, keys: _Object, names: frozenset[str]) -> Iterator[tuple[str, Value]]:
        """Each value sees the earlier ones."""
        for name, value in keys.members("derive").items():
            if name == "derive":
                raise value.fail("`derive` is the object of all derived values")
            yield name, value.derived(names)
            names |= {name}

    def clauses(self, keys: _Object, key: str) -> tuple[Expression, ...]:
        return tuple(each.expression(self.names) for each in keys.elements(key))

    def variant(self, node: _Node) -> Variant:
        keys = node.object(
            "id passes",
            "description priority when demoteWhen supersededBy requires tunables derive "
            "intermediates",
        )
        derive = tuple(self.derive(keys, self.names))
        names = self.names | {name for name, _ in derive}
        scratch: dict[str, Intermediate] = {}
        for each in keys.elements("intermediates"):
            intermediate = self.intermediate(each, names)
            if intermediate.id in scratch or intermediate.id in self.ports:
                raise each.fail(f"the id {intermediate.id!r} is taken already")
            scratch[intermediate.id] = intermediate
        return Variant(
            id=keys["id"].text(),
            priority=keys.read("priority", _Node.number, 0),
            when=self.clauses(keys, "when"),
            demote_when=self.clauses(keys, "demoteWhen"),
            superseded_by=tuple(each.text() for each in keys.elements("supersededBy")),
            requires=_requires(keys),
            tunables=tuple(_tunables(keys).items()),
            derive=derive,
            intermediates=tuple(scratch.values()),
            passes=self.passes(keys["passes"], names, scratch),
        )

    def check_variants(self, node: _Node, variants: tuple[Variant, ...]) -> None:
        ids = [variant.id for variant in variants]
        for index, each in enumerate(node.elements()):
            if ids[index] in ids[:index]:
                raise each.fail(f"the id {ids[index]!r} is taken already")
            for other in each.members().elements("supersededBy"):
                if other.value not in ids:
                    raise other.fail(f"{other.value!r} is no variant")

    def intermediate(self, node: _Node, names: frozenset[str]) -> Intermediate:
        keys = node.object("id dtype shape", "zeroInit")
        return Intermediate(
            id=keys["id"].text(),
            dtype=keys["dtype"].text(*dtypes.TABLE),
            shape=keys["shape"].shape(names),
            zero_init=keys.read("zeroInit", _Node.boolean, False),
        )

    def passes(
        self, node: _Node, names: frozenset[str], scratch: dict[str, Intermediate]
    ) -> tuple[Pass | Repeat, ...]:
        return tuple(
            self.repeat(each, names, scratch)
            if isinstance(each.value, dict) and "repeat" in each.value
            else self.pass_(each, index, names, scratch)
            for index, each in enumerate(node.elements())
        )

    def repeat(
        self, node: _Node, names: frozenset[str], scratch: dict[str, Intermediate]
    ) -> Repeat:
        keys = node.object("repeat passes", "id")
        rule = keys["repeat"].object("count index")
        index = rule["index"].text()
        if index == "derive":
            raise rule["index"].fail("`derive` is the object of all derived values")
        inside = names | {"repeat", index, f"{index}_count"}
        return Repeat(
            id=keys.read("id", _Node.text, "repeat"),
            count=rule["count"].amount(names),
            index=index,
            passes=self.passes(keys["passes"], inside, scratch),
        )

    def pass_(
        self, node: _Node, index: int, names: frozenset[str], scratch: dict[str, Intermediate]
    ) -> Pass:
        keys = node.object(
            "shader bindings dispatch",
            "id name derive profile subgroupCollectivesWidth submitAfter viewAlias",
        )
        derive = tuple(self.derive(keys, names))
        names = names | {name for name, _ in derive}
        bindings: dict[str, Binding] = {}
        for each in keys["bindings"].elements():
            binding = self.binding(each, names, scratch)
            if binding.name in bindings:
                raise each.fail(f"two bindings are named {binding.name}")
            bindings[binding.name] = binding
        bindings = _with_struct_names(keys["bindings"], bindings)
        id = keys.read("id", _Node.text, f"pass_{index}")
        return Pass(
            id=id,
            name=keys.read("name", _Node.text, id),
            shader=self.template(keys["shader"]),
            derive=derive,
            bindings=tuple(bindings.values()),
            dispatch=_dispatch(keys["dispatch"], names),
            view_alias=tuple(_alias(each, [*bindings]) for each in keys.elements("viewAlias")),
        )

    def template(self, node: _Node) -> str:
        name = node.text()
        if name in self.templates:
            return name
        if name in (".", "..") or not re.fullmatch(r"[^/\\:\0]+", name):
            raise node.fail(f"{name!r} is not the name of a file beside the manifest")
        try:
            self.templates[name] = templates.parse(name, self.shader(name))
        except ExpressionError as error:
            raise node.fail(str(error)) from None
        except (OSError, ValueError) as error:
            raise node.fail(f"cannot read the template {name}: {error}") from None
        return name

    def shader(self, name: str) -> str:
        folder = self.shaders
        data = (folder / name).read_bytes() if isinstance(folder, Path) else folder(name)
        return data.decode("utf-8")

    def binding(
        self, node: _Node, names: frozenset[str], scratch: dict[str, Intermediate]
    ) -> Binding:
        handle = node.value if isinstance(node.value, str) else ""
        if not isinstance(node.value, str):
            keys = node.object("", _BINDING)
        elif handle in self.handles:
            self.unused.discard(handle)
            keys = self.handles[handle].object("", _BINDING)
        elif handle in self.ports or handle in scratch:
            keys = _Object()
        else:
            known = ", ".join([*self.handles, *self.ports, *scratch])
            raise node.fail(f"{handle!r} is no binding, port or intermediate: {known}")
        arg = keys.read("arg", _Node.text, "")
        scratch_name = keys.read("scratch", _Node.text, "")
        name = keys.read("name", _Node.identifier, "") or handle or arg or scratch_name
        if not name:
            raise node.fail("a binding needs a name, an arg or a scratch")
        node.check_identifier(name)
        struct = None
        if "struct" in keys:
            struct = tuple(self.struct_field(each, names) for each in keys["struct"].elements())
        source = "" if struct is not None else scratch_name or arg or name
        if source and source not in self.ports and source not in scratch:
            known = ", ".join([*self.ports, *scratch])
            raise node.fail(f"{source!r} is no port or intermediate: {known}")
        kinds = ("uniform", "storage", "read-only-storage")
        return Binding(
            name=name,
            source=source,
            buffer=keys.read("buffer", lambda each: each.text(*kinds), None),
            element_type=keys.read("elementType", lambda each: self.element(each, names), None),
            length=keys.read("length", lambda each: each.amount(names), None),
            struct=struct,
            struct_name=keys.read("structName", _Node.identifier, None),
        )

    def element(self, node: _Node, names: frozenset[str]) -> str:
        """A WGSL type, or `$` and the name of a type variable or of a derived value."""
        wanted = node.text()
        if not wanted.startswith("$"):
            try:
                dtypes.wgsl_bytes(wanted)
            except ValueError as error:
                raise node.fail(str(error)) from None
        elif wanted[1:] not in {*self.variables, *dtypes.TABLE, *names}:
            raise node.fail(f"{wanted[1:]!r} is no type variable and no derived value")
        return wanted

    def struct_field(self, node: _Node, names: frozenset[str]) -> StructField:
        keys = node.object(*_FIELD)
        name, required = keys["name"].identifier(), keys.read("required", _Node.boolean, True)
        if required and name not in self.arguments and not keys.keys() & {"value", "default"}:
            raise node.fail(f"{name} has no value, no default, and is no arg")
        return StructField(
            name=name,
            type=keys["type"].text("u32", "i32", "f32"),
            value=keys.read("value", lambda each: each.derived(names), None),
            default=keys.read("default", _Node.scalar, UNDEFINED),
            required=required,
        )


def _in_out(read: Port, written: Port, node: _Node) -> tuple[Port, Port]:
    """The two sides of an in-out port: they are one array, and lie in one buffer."""
    if read.dtype != written.dtype:
        raise node.fail(f"the in-out port {read.name} has two dtypes")
    storage = read.storage or written.storage
    if written.storage not in (None, storage):
        raise node.fail(f"the in-out port {read.name} has two storages")
    narrowing = read.narrowing or written.narrowing
    return (
        replace(read, storage=storage, narrowing=narrowing),
        replace(written, storage=storage, narrowing=narrowing),
    )


def _with_struct_names(node: _Node, bindings: dict[str, Binding]) -> dict[str, Binding]:
    """Names the types of a pass's structs: `Params`, or after the binding where there are more.

    Types and variables share one scope in WGSL.
    """
    structs = [each for each in bindings.values() if each.struct is not None]
    named = dict[str, list[tuple[str, str]]]()
    for each in structs:
        members = [(field.name, field.type) for field in each.struct or ()]
        if each.struct_name and named.setdefault(each.struct_name, members) != members:
            raise node.fail(f"two structs are named {each.struct_name}")
    taken = {*bindings, *named}
    nameless = [each for each in structs if each.struct_name is None]
    result = dict(bindings)
    for each in nameless:
        name = "Params" if len(nameless) == 1 else each.name[0].upper() + each.name[1:]
        while name in taken:
            name += "_"
        taken.add(name)
        result[each.name] = replace(each, struct_name=name)
    return result


def _dtypes(node: _Node) -> tuple[str, ...]:
    """The logical dtypes that a type variable admits."""
    allowed = tuple(each.text(*dtypes.TABLE) for each in node.elements())
    if not allowed:
        raise node.fail("a type variable needs at least one dtype")
    return allowed


def _check_handle(node: _Node) -> None:
    """What can be checked of a binding that no pass has."""
    for each in node.object("", _BINDING).elements("struct"):
        each.object(*_FIELD).read("value", lambda value: value.derived(None), None)


def _tunables(keys: _Object) -> dict[str, Any]:
    return {
        name: node.object("default", "description")["default"].scalar()
        for name, node in keys.members("tunables").items()
    }


def _requires(keys: _Object) -> Requires:
    if "requires" not in keys:
        return Requires()
    keys = keys["requires"].object("", "features limits subgroupMinSize subgroupMatrixConfigs")
    return Requires(
        features=tuple(each.text() for each in keys.elements("features")),
        limits=tuple((name, each.integer()) for name, each in keys.members("limits").items()),
        subgroup_min_size=keys.read("subgroupMinSize", _Node.integer, None),
        subgroup_matrix_configs=keys.read("subgroupMatrixConfigs", lambda n: bool(n.value), False),
    )


def _dispatch(node: _Node, names: frozenset[str]) -> Dispatch:
    keys = node.object("", "x y z threads workgroupSize workgroups")
    given = frozenset(keys)
    if given not in ({"threads", "workgroupSize"}, {"workgroups"}) and not (
        {"x"} <= given <= {"x", "y", "z"}
    ):
        raise node.fail("expected {x, y, z}, {threads, workgroupSize} or {workgroups}")
    values = {key: value.amount(names) for key, value in keys.items()}
    if "workgroupSize" in values:
        values["workgroup_size"] = values.pop("workgroupSize")
    return Dispatch(**values)


def _alias(node: _Node, names: list[str]) -> tuple[str, str]:
    keys = node.object("input output")
    for each in keys.values():
        if each.value not in names:
            raise each.fail(f"expected one of the pass's bindings: {', '.join(names)}")
    return keys["input"].text(), keys["output"].text()


def merged(first: Requires, second: Requires) -> Requires:
    """A manifest's and a variant's requirements together; a limit takes the larger."""
    limits = dict(first.limits)
    for name, value in second.limits:
        limits[name] = max(value, limits.get(name, value))
    sizes = [s for s in (first.subgroup_min_size, second.subgroup_min_size) if s is not None]
    return Requires(
        features=tuple(dict.fromkeys(first.features + second.features)),
        limits=tuple(limits.items()),
        subgroup_min_size=max(sizes, default=None) if sizes else None,
        subgroup_matrix_configs=first.subgroup_matrix_configs or second.subgroup_matrix_configs,
    )


def whole(value: Any) -> int | None:
    """The int of a whole number, else None."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return int(value) if value == int(value) else None
