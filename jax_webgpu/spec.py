"""A kernel folder's manifest, checked whole and turned into a `Spec`.

Nothing here knows an operator. Every error gives the file and the JSON path. The format is the
published WebGPU-kernel manifest's, spec 2.1.
"""

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jax_webgpu import dtypes, expressions, templates
from jax_webgpu.errors import ExpressionError, SpecError
from jax_webgpu.expressions import Expression
from jax_webgpu.helpers import HELPERS
from jax_webgpu.templates import Template
from jax_webgpu.values import UNDEFINED

SCOPE_NAMES = frozenset(
    "derive DISPATCH_FOLD_WIDTH dtypes logicalDtypes tensorDtypes ranks shapes present args attrs "
    "tunables device f16Ok".split()
) | frozenset(HELPERS)

# An expression, a scalar, or lists and objects of these.
Value = Any


@dataclass(frozen=True)
class Port:
    """An input or an output of the operator."""

    name: str
    dtype: str
    """A type variable or a logical dtype."""
    optional: bool
    shape: Value | None
    storage: str | None
    narrowing: str | None
    onnx: str | None
    description: str
    rank: Value | None = None


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
    struct: tuple[StructField, ...]
    struct_name: str


@dataclass(frozen=True)
class Dispatch:
    """Workgroup counts x, y, z; or a number of threads or workgroups to be folded."""

    x: Value = None
    y: Value = 1
    z: Value = 1
    threads: Value = None
    workgroup_size: Value = None
    workgroups: Value = None


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

    def variant(self, id: str) -> Variant:
        return next(variant for variant in self.variants if variant.id == id)


def load(manifest: Path, shaders: Path | None = None) -> Spec:
    """Loads a manifest and the templates it names.

    Args:
      manifest: the JSON file.
      shaders: the folder of the templates, by default the manifest's own.

    Raises:
      SpecError: the file is not in the format; the message gives file and JSON path.
    """
    try:
        data = manifest.read_bytes()
    except OSError as error:
        raise SpecError(f"{manifest}: {error.strerror or error}") from None
    return loads(data, manifest, shaders or manifest.parent)


def loads(data: bytes, manifest: Path, shaders: Path) -> Spec:
    """As `load`, from the manifest's bytes; `manifest` is only the name in messages."""
    try:
        document = json.loads(data, object_pairs_hook=_members, parse_constant=_constant)
    except (ValueError, RecursionError) as error:
        raise SpecError(f"{manifest}: {error}") from None
    return _Reader(data, manifest, shaders).spec(_Node(document, "$", manifest))


def _members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice!r} stands twice in one object")
    return result


def _constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


@dataclass(frozen=True)
class _Node:
    """A JSON value that knows where it stands."""

    value: Any
    path: str
    file: Path

    def fail(self, message: str) -> SpecError:
        return SpecError(f"{self.file}: {self.path}: {message}")

    def wrong(self, expected: str) -> SpecError:
        kind = {dict: "an object", list: "a list", str: "a string", bool: "a boolean"}
        found = kind.get(type(self.value), "null" if self.value is None else "a number")
        return self.fail(f"expected {expected}, got {found}")

    def object(self, *keys: str) -> dict[str, "_Node"]:
        """The members of an object that has no others than `keys`."""
        members = self.members()
        for key, node in members.items():
            if key not in keys:
                raise node.fail(f"unknown key {key!r}; known here: {', '.join(sorted(keys))}")
        return members

    def members(self) -> dict[str, "_Node"]:
        """The members of an object, whatever their names."""
        if not isinstance(self.value, dict):
            raise self.wrong("an object")
        return {
            key: _Node(value, f"{self.path}.{key}", self.file)
            for key, value in self.value.items()
            if key != "$comment"
        }

    def elements(self) -> list["_Node"]:
        if not isinstance(self.value, list):
            raise self.wrong("a list")
        return [
            _Node(value, f"{self.path}[{index}]", self.file)
            for index, value in enumerate(self.value)
        ]

    def text(self, *choices: str) -> str:
        if not isinstance(self.value, str):
            raise self.wrong("a string")
        if choices and self.value not in choices:
            raise self.fail(f"expected one of {', '.join(choices)}, got {self.value!r}")
        return self.value

    def boolean(self) -> bool:
        if not isinstance(self.value, bool):
            raise self.wrong("a boolean")
        return self.value

    def number(self) -> float:
        if isinstance(self.value, bool) or not isinstance(self.value, int | float):
            raise self.wrong("a number")
        return self.value

    def integer(self) -> int:
        if isinstance(self.value, bool) or not isinstance(self.value, int):
            raise self.wrong("a whole number")
        return self.value

    def scalar(self) -> Any:
        if isinstance(self.value, dict | list):
            raise self.wrong("a scalar")
        return self.value

    def plain(self) -> Any:
        """A value without expressions: lists become tuples."""
        if isinstance(self.value, list):
            return tuple(element.plain() for element in self.elements())
        return self.scalar()

    def expression(self, names: frozenset[str]) -> Expression:
        """Parses the text; `names` are those in scope besides the format's own."""
        try:
            parsed = expressions.parse(self.text())
        except ExpressionError as error:
            raise self.fail(str(error)) from None
        unknown = sorted(parsed.names - SCOPE_NAMES - names)
        if unknown:
            raise self.fail(f"unknown name {', '.join(unknown)} in `{parsed.text}`")
        return parsed

    def derived(self, names: frozenset[str]) -> Value:
        """An expression for each string; lists and objects recurse."""
        match self.value:
            case str():
                return self.expression(names)
            case list():
                return tuple(element.derived(names) for element in self.elements())
            case dict():
                return {key: node.derived(names) for key, node in self.members().items()}
        return self.value


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


_NONE = frozenset[str]()


@dataclass
class _Reader:
    """Reads one manifest. Methods stand in the order in which the format's keys nest."""

    data: bytes
    manifest: Path
    shaders: Path
    ports: dict[str, Port] = field(default_factory=dict)
    variables: dict[str, tuple[str, ...]] = field(default_factory=dict)
    arguments: dict[str, Argument] = field(default_factory=dict)
    handles: dict[str, _Node] = field(default_factory=dict)
    names: frozenset[str] = _NONE
    templates: dict[str, Template] = field(default_factory=dict)

    def spec(self, node: _Node) -> Spec:
        top = node.object(
            *"$schema domain name description conformance sinceVersion inputs outputs args "
            "attributes attributeConstraints typeConstraints tunables derive when requires "
            "bindings variants onnx".split()
        )
        for key in ("name", "outputs", "variants"):
            if key not in top:
                raise node.fail(f"the key {key!r} is missing")
        self.variables = {
            name: tuple(each.text(*dtypes.TABLE) for each in allowed.elements())
            for name, allowed in _members_of(top, "typeConstraints")
        }
        inputs = {name: self.port(name, port) for name, port in _members_of(top, "inputs")}
        self.ports = dict(inputs)
        self.arguments = {name: self.argument(name, a) for name, a in _members_of(top, "args")}
        attributes = self.attributes(top)
        tunables = {name: _tunable(tunable) for name, tunable in _members_of(top, "tunables")}
        derive = dict(self.derive(top.get("derive"), _NONE))
        self.names = frozenset(derive)
        outputs = {name: self.port(name, port) for name, port in _members_of(top, "outputs")}
        for name in inputs.keys() & outputs.keys():
            if inputs[name].dtype != outputs[name].dtype:
                raise top["outputs"].fail(f"the in-out port {name} has two dtypes")
        self.ports = {**inputs, **outputs}
        self.handles = dict(_members_of(top, "bindings"))
        variants = tuple(self.variant(each) for each in top["variants"].elements())
        self.check_variants(top["variants"], variants)
        return Spec(
            domain=top["domain"].text() if "domain" in top else "ai.onnx",
            name=top["name"].text(),
            since_version=top["sinceVersion"].integer() if "sinceVersion" in top else None,
            description=top["description"].text() if "description" in top else "",
            inputs=inputs,
            outputs=outputs,
            args=self.arguments,
            attributes=attributes,
            type_constraints=self.variables,
            tunables=tunables,
            derive=derive,
            when=self.clauses(top.get("when"), self.names),
            requires=_requires(top.get("requires")),
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
        keys = node.object(
            *"description onnx dtype rank optional layout shape storage narrowing".split()
        )
        if "dtype" not in keys:
            raise node.fail("the key 'dtype' is missing")
        dtype = keys["dtype"].text()
        if dtype not in self.variables and dtype not in dtypes.TABLE:
            known = ", ".join([*self.variables, *dtypes.TABLE])
            raise keys["dtype"].fail(f"{dtype!r} is no type; known here: {known}")
        storage = keys["storage"].text(*dtypes.NARROW) if "storage" in keys else None
        if storage and self.allowed(dtype) != ("int64",):
            raise keys["storage"].fail(f"only an int64 port has a storage, and {name} is {dtype}")
        narrowing = keys["narrowing"].text("checked", "saturating") if "narrowing" in keys else None
        return Port(
            name=name,
            dtype=dtype,
            optional="optional" in keys and keys["optional"].boolean(),
            shape=keys["shape"].derived(self.names) if "shape" in keys else None,
            storage=storage,
            narrowing=narrowing,
            onnx=keys["onnx"].text() if "onnx" in keys else None,
            description=keys["description"].text() if "description" in keys else "",
            rank=keys["rank"].derived(self.names) if "rank" in keys else None,
        )

    def allowed(self, dtype: str) -> tuple[str, ...]:
        """The logical dtypes that a port's dtype admits."""
        return self.variables.get(dtype, (dtype,))

    def argument(self, name: str, node: _Node) -> Argument:
        keys = node.object(*"description kind required oneOf onnx".split())
        if "kind" not in keys:
            raise node.fail("the key 'kind' is missing")
        return Argument(
            name=name,
            kind=keys["kind"].text("u32", "i32", "f32", "bool", "string"),
            required=keys["required"].boolean() if "required" in keys else True,
            one_of=tuple(each.scalar() for each in _elements_of(keys, "oneOf")),
        )

    def attributes(self, top: dict[str, _Node]) -> dict[str, Attribute]:
        given = dict(_members_of(top, "attributes"))
        constraints = dict(_members_of(top, "attributeConstraints"))
        for name, node in constraints.items():
            if name not in given:
                raise node.fail(f"{name} is no attribute")
        result = {}
        for name, node in given.items():
            keys = node.object("default", "description")
            rule = constraints[name].object("required", "values") if name in constraints else {}
            result[name] = Attribute(
                name=name,
                default=keys["default"].plain() if "default" in keys else UNDEFINED,
                required="required" in rule and rule["required"].boolean(),
                values=tuple(value.plain() for value in rule["values"].elements())
                if "values" in rule
                else None,
                description=keys["description"].text() if "description" in keys else "",
            )
        return result

    def derive(self, node: _Node | None, names: frozenset[str]) -> Iterator[tuple[str, Value]]:
        """Each value sees the earlier ones."""
        for name, value in node.members().items() if node else ():
            yield name, value.derived(names)
            names |= {name}

    def clauses(self, node: _Node | None, names: frozenset[str]) -> tuple[Expression, ...]:
        return tuple(each.expression(names) for each in (node.elements() if node else ()))

    def variant(self, node: _Node) -> Variant:
        keys = node.object(
            *"id description priority when demoteWhen supersededBy requires tunables derive "
            "intermediates passes".split()
        )
        for key in ("id", "passes"):
            if key not in keys:
                raise node.fail(f"the key {key!r} is missing")
        derive = tuple(self.derive(keys.get("derive"), self.names))
        names = self.names | {name for name, _ in derive}
        intermediates = tuple(
            self.intermediate(each, names) for each in _elements_of(keys, "intermediates")
        )
        scratch = {each.id: each for each in intermediates}
        return Variant(
            id=keys["id"].text(),
            priority=keys["priority"].number() if "priority" in keys else 0,
            when=self.clauses(keys.get("when"), self.names),
            demote_when=self.clauses(keys.get("demoteWhen"), self.names),
            superseded_by=tuple(each.text() for each in _elements_of(keys, "supersededBy")),
            requires=_requires(keys.get("requires")),
            tunables=tuple((n, _tunable(each)) for n, each in _members_of(keys, "tunables")),
            derive=derive,
            intermediates=intermediates,
            passes=self.passes(keys["passes"], names, scratch),
        )

    def check_variants(self, node: _Node, variants: tuple[Variant, ...]) -> None:
        ids = [variant.id for variant in variants]
        for index, (each, variant) in enumerate(zip(node.elements(), variants, strict=True)):
            if variant.id in ids[:index]:
                raise each.fail(f"the id {variant.id!r} is taken already")
            for other in variant.superseded_by:
                if other not in ids:
                    raise each.fail(f"supersededBy names {other!r}, which is no variant")

    def intermediate(self, node: _Node, names: frozenset[str]) -> Intermediate:
        keys = node.object("id", "dtype", "shape", "zeroInit")
        for key in ("id", "dtype", "shape"):
            if key not in keys:
                raise node.fail(f"the key {key!r} is missing")
        return Intermediate(
            id=keys["id"].text(),
            dtype=keys["dtype"].text(*dtypes.TABLE),
            shape=keys["shape"].derived(names),
            zero_init="zeroInit" in keys and keys["zeroInit"].boolean(),
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
        keys = node.object("id", "repeat", "passes")
        rule = keys["repeat"].object("count", "index")
        for key, where in (("count", rule), ("index", rule), ("passes", keys)):
            if key not in where:
                raise node.fail(f"the key {key!r} is missing")
        index = rule["index"].text()
        inside = names | {"repeat", index, f"{index}_count"}
        return Repeat(
            id=keys["id"].text() if "id" in keys else "repeat",
            count=rule["count"].derived(names),
            index=index,
            passes=self.passes(keys["passes"], inside, scratch),
        )

    def pass_(
        self, node: _Node, index: int, names: frozenset[str], scratch: dict[str, Intermediate]
    ) -> Pass:
        keys = node.object(
            *"id name shader derive bindings dispatch profile subgroupCollectivesWidth "
            "submitAfter viewAlias".split()
        )
        for key in ("shader", "bindings", "dispatch"):
            if key not in keys:
                raise node.fail(f"the key {key!r} is missing")
        derive = tuple(self.derive(keys.get("derive"), names))
        names = names | {name for name, _ in derive}
        bindings = tuple(self.binding(each, names, scratch) for each in keys["bindings"].elements())
        wgsl_names = [binding.name for binding in bindings]
        for each, name in zip(keys["bindings"].elements(), wgsl_names, strict=True):
            if wgsl_names.count(name) > 1:
                raise each.fail(f"two bindings are named {name}")
        id = keys["id"].text() if "id" in keys else f"pass_{index}"
        return Pass(
            id=id,
            name=keys["name"].text() if "name" in keys else id,
            shader=self.template(keys["shader"]),
            derive=derive,
            bindings=bindings,
            dispatch=_dispatch(keys["dispatch"], names),
            view_alias=tuple(_alias(each, wgsl_names) for each in _elements_of(keys, "viewAlias")),
        )

    def template(self, node: _Node) -> str:
        name = node.text()
        if name not in self.templates:
            if Path(name).name != name:
                raise node.fail(f"{name!r} is not the name of a file beside the manifest")
            try:
                text = (self.shaders / name).read_text("utf-8")
            except (OSError, ValueError) as error:
                raise node.fail(f"cannot read the template {name}: {error}") from None
            try:
                self.templates[name] = templates.parse(name, text)
            except ExpressionError as error:
                raise node.fail(str(error)) from None
        return name

    def binding(
        self, node: _Node, names: frozenset[str], scratch: dict[str, Intermediate]
    ) -> Binding:
        handle = node.value if isinstance(node.value, str) else ""
        if handle and handle not in self.handles:
            if handle not in self.ports and handle not in scratch:
                known = ", ".join([*self.handles, *self.ports, *scratch])
                raise node.fail(f"{handle!r} is no binding, port or intermediate: {known}")
            keys: dict[str, _Node] = {}
        else:
            keys = self.handles.get(handle, node).object(
                *"buffer name arg scratch elementType length structName struct".split()
            )
        own = keys["name"].text() if "name" in keys else ""
        arg = keys["arg"].text() if "arg" in keys else ""
        scratch_name = keys["scratch"].text() if "scratch" in keys else ""
        name = own or handle or arg or scratch_name
        if not name:
            raise node.fail("a binding needs a name, an arg or a struct's name")
        struct = tuple(self.struct_field(each, names) for each in _elements_of(keys, "struct"))
        source = "" if struct else scratch_name or arg or name
        if source and source not in self.ports and source not in scratch:
            known = ", ".join([*self.ports, *scratch])
            raise node.fail(f"{source!r} is no port or intermediate: {known}")
        kinds = ("uniform", "storage", "read-only-storage")
        return Binding(
            name=name,
            source=source,
            buffer=keys["buffer"].text(*kinds) if "buffer" in keys else None,
            element_type=keys["elementType"].text() if "elementType" in keys else None,
            length=keys["length"].derived(names) if "length" in keys else None,
            struct=struct,
            struct_name=keys["structName"].text() if "structName" in keys else "Params",
        )

    def struct_field(self, node: _Node, names: frozenset[str]) -> StructField:
        keys = node.object(*"name type value required internal default".split())
        for key in ("name", "type"):
            if key not in keys:
                raise node.fail(f"the key {key!r} is missing")
        name = keys["name"].text()
        if "value" not in keys and name not in self.arguments and "default" not in keys:
            raise node.fail(f"{name} has no value, no default, and is no arg")
        return StructField(
            name=name,
            type=keys["type"].text("u32", "i32", "f32"),
            value=keys["value"].derived(names) if "value" in keys else None,
            default=keys["default"].scalar() if "default" in keys else UNDEFINED,
            required=keys["required"].boolean() if "required" in keys else True,
        )


def _members_of(keys: dict[str, _Node], key: str) -> list[tuple[str, _Node]]:
    return list(keys[key].members().items()) if key in keys else []


def _elements_of(keys: dict[str, _Node], key: str) -> list[_Node]:
    return keys[key].elements() if key in keys else []


def _tunable(node: _Node) -> Any:
    keys = node.object("default", "description")
    if "default" not in keys:
        raise node.fail("the key 'default' is missing")
    return keys["default"].scalar()


def _requires(node: _Node | None) -> Requires:
    if node is None:
        return Requires()
    keys = node.object("features", "limits", "subgroupMinSize", "subgroupMatrixConfigs")
    return Requires(
        features=tuple(each.text() for each in _elements_of(keys, "features")),
        limits=tuple((name, each.integer()) for name, each in _members_of(keys, "limits")),
        subgroup_min_size=keys["subgroupMinSize"].integer() if "subgroupMinSize" in keys else None,
        subgroup_matrix_configs="subgroupMatrixConfigs" in keys,
    )


def _dispatch(node: _Node, names: frozenset[str]) -> Dispatch:
    keys = node.object("x", "y", "z", "threads", "workgroupSize", "workgroups")
    forms = ({"x"}, {"threads", "workgroupSize"}, {"workgroups"})
    if not any(form <= keys.keys() <= form | {"y", "z"} for form in forms) or (
        "x" not in keys and keys.keys() & {"y", "z"}
    ):
        raise node.fail("expected {x, y, z}, {threads, workgroupSize} or {workgroups}")
    values = {key: value.derived(names) for key, value in keys.items()}
    if "workgroupSize" in values:
        values["workgroup_size"] = values.pop("workgroupSize")
    return Dispatch(**values)


def _alias(node: _Node, names: list[str]) -> tuple[str, str]:
    keys = node.object("input", "output")
    pair = []
    for key in ("input", "output"):
        if key not in keys or keys[key].text() not in names:
            raise node.fail(f"{key} must be one of the pass's bindings: {', '.join(names)}")
        pair.append(keys[key].text())
    return pair[0], pair[1]


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
