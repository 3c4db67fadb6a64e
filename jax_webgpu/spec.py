"""A kernel folder's manifest, checked whole and turned into a `Spec`.

Nothing here knows an operator. Every error gives the file and the JSON path. The format is the
published WebGPU-kernel manifest's, spec 2.1.
"""

import contextlib
import functools
import gc
import hashlib
import math
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from jax_webgpu import document, dtypes, expressions, files, templates
from jax_webgpu.document import Node, Object
from jax_webgpu.document import Value as Value
from jax_webgpu.errors import ExpressionError, SpecError
from jax_webgpu.expressions import Expression
from jax_webgpu.templates import Template
from jax_webgpu.values import UNDEFINED, counted, is_sequence, show

Shaders = Path | Callable[[str], bytes]

# NumPy's most axes, and the numbers that are exact.
MAX_RANK = 64
MAX_ELEMENTS = 2**53

# Published templates have up to 50 KiB, and published manifests some sixty variants.
MAX_TEMPLATE = 1 << 20
MAX_TEMPLATES = 4 << 20
MAX_VARIANTS = 1024
MAX_DERIVED = 4096
MAX_FIELDS = 100_000

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
    """One dispatch, or one a turn in a repeat group."""

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
    """What a device must have."""

    features: tuple[str, ...] = ()
    limits: tuple[tuple[str, int], ...] = ()
    subgroup_min_size: int | None = None
    subgroup_matrix_configs: bool = False


@dataclass(frozen=True)
class Variant:
    """One way to compute the operator."""

    id: str
    priority: float
    when: tuple[Expression, ...]
    demote_when: tuple[Expression, ...]
    superseded_by: tuple[str, ...]
    requires: Requires
    """With what the manifest requires of every variant."""
    tunables: tuple[tuple[str, Any], ...]
    derive: tuple[tuple[str, Value], ...]
    intermediates: tuple[Intermediate, ...]
    passes: tuple[Pass | Repeat, ...]
    description: str = ""

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
    told: Mapping[str, str] = field(default_factory=dict)
    """The descriptions of tunables, those that only variants have among them."""

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


def load(
    manifest: Path,
    shaders: Path | None = None,
    overlay: Path | None = None,
    *,
    links: bool = False,
) -> Spec:
    """Loads a manifest and the templates it names; the same files again give the same `Spec`.

    Args:
      manifest: the JSON file.
      shaders: the folder of the templates, by default the manifest's own.
      overlay: a file in the same format whose variants, derived values, bindings and tunables
        join the manifest's.
      links: whether files may be links that lead out of their folder; in a folder that comes from
        a stranger they may not.

    Raises:
      SpecError: the file is not in the format; the message gives file and JSON path.
    """
    data, extra = (
        _read(path, links) if path is not None else b"{}" for path in (manifest, overlay)
    )
    folder = shaders or manifest.parent
    if not links:
        return loads(data, manifest, folder, extra)
    read = functools.partial(files.read, folder, limit=MAX_TEMPLATE, links=True)
    return loads(data, manifest, read, extra)


def _read(path: Path, links: bool) -> bytes:
    try:
        return files.read(path.parent, path.name, document.MAX_BYTES, links=links)
    except OSError as error:
        raise SpecError(f"{path}: {error.strerror or error}") from None
    except ValueError as error:
        raise SpecError(f"{path}: {error}") from None


def loads(data: bytes, manifest: Path, shaders: Shaders, overlay: bytes = b"{}") -> Spec:
    """As `load`, from the files' bytes; `manifest` is only the name in messages.

    `shaders` is the folder of the templates, or gives a template's bytes by its name.
    """
    read = shaders
    if isinstance(shaders, Path):
        read = functools.partial(files.read, shaders, limit=MAX_TEMPLATE)
    assert callable(read)
    key = hashlib.sha256(data).digest() + hashlib.sha256(overlay).digest()
    found = _kept.find(key, read)
    if found is None:
        reader = _Reader(data + overlay, manifest, read)
        try:
            with _uncollected():
                found = reader.spec(document.parse(data, overlay, manifest))
        except RecursionError:
            raise SpecError(f"{manifest}: $: nested too deeply") from None
        _kept.keep(key, found, reader.sources)
    return found if found.path == manifest else replace(found, path=manifest)


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Keeps Python from looking for garbage.

    So many objects are made, none of them in vain, that it would go through all of the process
    again and again; in one that has JAX this may take longer than loading itself.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


class _Kept:
    """The manifests loaded last, with the templates that they were loaded with."""

    def __init__(self, most: int):
        self.most = most
        self.entries = OrderedDict[bytes, tuple[Spec, dict[str, bytes]]]()
        self.lock = threading.Lock()

    def find(self, key: bytes, read: Callable[[str], bytes]) -> Spec | None:
        """The `Spec` of equal bytes, if its templates are now what they were."""
        with self.lock:
            found = self.entries.get(key)
        if found is None:
            return None
        spec, sources = found
        try:
            same = all(read(name) == source for name, source in sources.items())
        except (OSError, ValueError):  # told where the template is named
            return None
        return spec if same else None

    def keep(self, key: bytes, spec: Spec, sources: dict[str, bytes]) -> None:
        with self.lock:
            self.entries[key] = spec, sources
            self.entries.move_to_end(key)
            while len(self.entries) > self.most:
                self.entries.popitem(last=False)

    def clear(self) -> None:
        with self.lock:
            self.entries.clear()


_kept = _Kept(most=64)


def forget() -> None:
    """Forgets what was loaded and parsed, so that the next load begins anew."""
    _kept.clear()
    expressions.parse.cache_clear()


def evaluate(value: Value, scope: expressions.Scope) -> Any:
    """The value of a `Value`; raises `ExpressionError`."""
    if value.__class__ is Expression:
        return value(scope)
    match value:
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
        raise ExpressionError(
            f"the shape of {name} comes out as {show(found)}; expected a list of whole numbers, 0 "
            "or more"
        )
    known = tuple(size for size in shape if size is not None)
    if len(known) > MAX_RANK:
        raise ExpressionError(f"the shape of {name} has {len(known):,} axes; at most {MAX_RANK}")
    if math.prod(known) > MAX_ELEMENTS:
        count = counted(math.prod(known))
        raise ExpressionError(f"{name} has {count} elements; at most {MAX_ELEMENTS:,}")
    return known


# The keys of a binding and of a struct's field.
_BINDING = "buffer name arg scratch elementType length structName struct"
_FIELD = ("name type", "value required internal default")


@dataclass
class _Reader:
    """Reads one manifest. Methods stand in the order in which the format's keys nest."""

    data: bytes
    manifest: Path
    read: Callable[[str], bytes]
    ports: dict[str, Port] = field(default_factory=dict)
    variables: dict[str, tuple[str, ...]] = field(default_factory=dict)
    arguments: dict[str, Argument] = field(default_factory=dict)
    handles: dict[str, Node] = field(default_factory=dict)
    unused: set[str] = field(default_factory=set)
    """The handles that no pass has bound."""
    names: frozenset[str] = _NONE
    requires: Requires = Requires()
    templates: dict[str, Template] = field(default_factory=dict)
    sources: dict[str, bytes] = field(default_factory=dict)
    """The templates as they were read."""
    fields: int = 0
    """The fields of structs so far, of each pass that binds them."""

    def spec(self, node: Node) -> Spec:
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
        self.requires = _requires(top)
        found = top["variants"].elements()
        if len(found) > MAX_VARIANTS:
            raise top["variants"].fail(f"{len(found):,} variants; at most {MAX_VARIANTS:,}")
        variants = tuple(self.variant(each) for each in found)
        self.check_variants(top["variants"], variants)
        for handle in sorted(self.unused):
            _check_handle(self.handles[handle])
        return Spec(
            domain=top.read("domain", Node.text, "ai.onnx"),
            name=top["name"].text(),
            since_version=top.read("sinceVersion", Node.integer, None),
            description=top.read("description", Node.text, ""),
            inputs=inputs,
            outputs=outputs,
            args=self.arguments,
            attributes=attributes,
            type_constraints=self.variables,
            tunables=tunables,
            derive=derive,
            when=self.clauses(top, "when"),
            requires=self.requires,
            variants=variants,
            templates=self.templates,
            path=self.manifest,
            digest=self.digest(),
            told=_told([*found, node]),
        )

    def digest(self) -> str:
        """Of all that shapes a plan; the file's name does not."""
        hashed = hashlib.sha256(self.data)
        for name, template in sorted(self.templates.items()):
            hashed.update(f"\0{name}\0{template.source}".encode())
        return hashed.hexdigest()

    def port(self, name: str, node: Node) -> Port:
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
            optional=keys.read("optional", Node.boolean, False),
            shape=keys.read("shape", lambda each: each.shape(self.names), None),
            storage=storage,
            narrowing=keys.read("narrowing", lambda n: n.text("checked", "saturating"), narrowing),
            onnx=keys.read("onnx", Node.text, None),
            description=keys.read("description", Node.text, ""),
            rank=keys.read("rank", Node.documented, None),
        )

    def argument(self, name: str, node: Node) -> Argument:
        keys = node.object("kind", "required oneOf onnx")
        return Argument(
            name=name,
            kind=keys["kind"].text("u32", "i32", "f32", "bool", "string"),
            required=keys.read("required", Node.boolean, True),
            one_of=tuple(each.scalar() for each in keys.elements("oneOf")),
        )

    def attributes(self, top: Object) -> dict[str, Attribute]:
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
                default=keys.read("default", Node.plain, UNDEFINED),
                required=rule.read("required", Node.boolean, False),
                values=tuple(each.plain() for each in rule.elements("values"))
                if "values" in rule
                else None,
                description=keys.read("description", Node.text, ""),
            )
        return result

    def derive(self, keys: Object, names: Set[str]) -> Iterator[tuple[str, Value]]:
        """Each value sees the earlier ones."""
        members, names = keys.members("derive"), {*names}
        if len(members) > MAX_DERIVED:
            raise keys["derive"].fail(f"{len(members):,} values; at most {MAX_DERIVED:,}")
        for name, value in members.items():
            if name == "derive":
                raise value.fail("`derive` is the object of all derived values")
            yield name, value.derived(names)
            names.add(name)

    def clauses(self, keys: Object, key: str) -> tuple[Expression, ...]:
        return tuple(each.expression(self.names) for each in keys.elements(key))

    def variant(self, node: Node) -> Variant:
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
            priority=keys.read("priority", Node.number, 0),
            when=self.clauses(keys, "when"),
            demote_when=self.clauses(keys, "demoteWhen"),
            superseded_by=tuple(each.text() for each in keys.elements("supersededBy")),
            requires=merged(self.requires, _requires(keys)),
            tunables=tuple(_tunables(keys).items()),
            derive=derive,
            intermediates=tuple(scratch.values()),
            passes=self.passes(keys["passes"], names, scratch),
            description=_description(node),
        )

    def check_variants(self, node: Node, variants: tuple[Variant, ...]) -> None:
        ids, seen = {variant.id for variant in variants}, set[str]()
        for variant, each in zip(variants, node.elements(), strict=True):
            if variant.id in seen:
                raise each.fail(f"the id {variant.id!r} is taken already")
            seen.add(variant.id)
            for other in each.members().elements("supersededBy"):
                if other.value not in ids:
                    raise other.fail(f"{other.value!r} is no variant")

    def intermediate(self, node: Node, names: Set[str]) -> Intermediate:
        keys = node.object("id dtype shape", "zeroInit")
        return Intermediate(
            id=keys["id"].text(),
            dtype=keys["dtype"].text(*dtypes.TABLE),
            shape=keys["shape"].shape(names),
            zero_init=keys.read("zeroInit", Node.boolean, False),
        )

    def passes(
        self, node: Node, names: Set[str], scratch: dict[str, Intermediate]
    ) -> tuple[Pass | Repeat, ...]:
        return tuple(
            self.repeat(each, names, scratch)
            if isinstance(each.value, dict) and "repeat" in each.value
            else self.pass_(each, index, names, scratch)
            for index, each in enumerate(node.elements())
        )

    def repeat(self, node: Node, names: Set[str], scratch: dict[str, Intermediate]) -> Repeat:
        keys = node.object("repeat passes", "id")
        rule = keys["repeat"].object("count index")
        index = rule["index"].text()
        if index == "derive":
            raise rule["index"].fail("`derive` is the object of all derived values")
        inside = names | {"repeat", index, f"{index}_count"}
        return Repeat(
            id=keys.read("id", Node.text, "repeat"),
            count=rule["count"].amount(names),
            index=index,
            passes=self.passes(keys["passes"], inside, scratch),
        )

    def pass_(
        self, node: Node, index: int, names: Set[str], scratch: dict[str, Intermediate]
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
        id = keys.read("id", Node.text, f"pass_{index}")
        return Pass(
            id=id,
            name=keys.read("name", Node.text, id),
            shader=self.template(keys["shader"]),
            derive=derive,
            bindings=tuple(bindings.values()),
            dispatch=_dispatch(keys["dispatch"], names),
            view_alias=tuple(_alias(each, [*bindings]) for each in keys.elements("viewAlias")),
        )

    def template(self, node: Node) -> str:
        name = node.text()
        if name in self.templates:
            return name
        if name in (".", "..") or not re.fullmatch(r"[^/\\:\0]+", name):
            raise node.fail(f"{name!r} is not the name of a file beside the manifest")
        try:
            self.sources[name] = source = self.read(name)
            if sum(map(len, self.sources.values())) > MAX_TEMPLATES:
                raise ValueError(f"the templates have more than {MAX_TEMPLATES:,} bytes")
            self.templates[name] = templates.parse(name, source.decode("utf-8"))
        except ExpressionError as error:
            raise node.fail(str(error)) from None
        except (OSError, ValueError) as error:
            raise node.fail(f"cannot read the template {name}: {error}") from None
        return name

    def binding(self, node: Node, names: Set[str], scratch: dict[str, Intermediate]) -> Binding:
        handle = node.value if isinstance(node.value, str) else ""
        if not isinstance(node.value, str):
            keys = node.object("", _BINDING)
        elif handle in self.handles:
            self.unused.discard(handle)
            keys = self.handles[handle].object("", _BINDING)
        elif handle in self.ports or handle in scratch:
            keys = Object()
        else:
            known = ", ".join([*self.handles, *self.ports, *scratch])
            raise node.fail(f"{handle!r} is no binding, port or intermediate: {known}")
        arg = keys.read("arg", Node.text, "")
        scratch_name = keys.read("scratch", Node.text, "")
        name = keys.read("name", Node.identifier, "") or handle or arg or scratch_name
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
            struct_name=keys.read("structName", Node.identifier, None),
        )

    def element(self, node: Node, names: Set[str]) -> str:
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

    def struct_field(self, node: Node, names: Set[str]) -> StructField:
        self.fields += 1
        if self.fields > MAX_FIELDS:
            raise node.fail(f"more than {MAX_FIELDS:,} fields in the structs of all passes")
        keys = node.object(*_FIELD)
        name, required = keys["name"].identifier(), keys.read("required", Node.boolean, True)
        if required and name not in self.arguments and not keys.keys() & {"value", "default"}:
            raise node.fail(f"{name} has no value, no default, and is no arg")
        return StructField(
            name=name,
            type=keys["type"].text("u32", "i32", "f32"),
            value=keys.read("value", lambda each: each.derived(names), None),
            default=keys.read("default", Node.scalar, UNDEFINED),
            required=required,
        )


def _in_out(read: Port, written: Port, node: Node) -> tuple[Port, Port]:
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


def _with_struct_names(node: Node, bindings: dict[str, Binding]) -> dict[str, Binding]:
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


def _dtypes(node: Node) -> tuple[str, ...]:
    """The logical dtypes that a type variable admits."""
    allowed = tuple(each.text(*dtypes.TABLE) for each in node.elements())
    if not allowed:
        raise node.fail("a type variable needs at least one dtype")
    return allowed


def _check_handle(node: Node) -> None:
    """What can be checked of a binding that no pass has."""
    for each in node.object("", _BINDING).elements("struct"):
        each.object(*_FIELD).read("value", lambda value: value.derived(None), None)


def _tunables(keys: Object) -> dict[str, Any]:
    return {
        name: node.object("default", "description")["default"].scalar()
        for name, node in keys.members("tunables").items()
    }


def _told(nodes: Iterable[Node]) -> dict[str, str]:
    """The descriptions of the tunables of objects that were read, the last's before the others'."""
    every = [each.members().members("tunables").items() for each in nodes]
    return {name: text for each in every for name, node in each if (text := _description(node))}


def _description(node: Node) -> str:
    """The text of a key that only documents, whatever stands there."""
    text = node.members()["description"].value if "description" in node.members() else ""
    return text if isinstance(text, str) else ""


def _requires(keys: Object) -> Requires:
    if "requires" not in keys:
        return Requires()
    keys = keys["requires"].object("", "features limits subgroupMinSize subgroupMatrixConfigs")
    return Requires(
        features=tuple(each.text() for each in keys.elements("features")),
        limits=tuple((name, each.integer()) for name, each in keys.members("limits").items()),
        subgroup_min_size=keys.read("subgroupMinSize", Node.integer, None),
        subgroup_matrix_configs=keys.read("subgroupMatrixConfigs", lambda n: bool(n.value), False),
    )


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


def _dispatch(node: Node, names: Set[str]) -> Dispatch:
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


def _alias(node: Node, names: list[str]) -> tuple[str, str]:
    keys = node.object("input output")
    for each in keys.values():
        if each.value not in names:
            raise each.fail(f"expected one of the pass's bindings: {', '.join(names)}")
    return keys["input"].text(), keys["output"].text()


def whole(value: Any) -> int | None:
    """The int of a whole number, else None."""
    if value.__class__ is int:
        return int(value)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return int(value) if value == int(value) else None
