"""What is suspicious in a kernel folder that loads, found in its text without device or call."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from jinja2 import nodes

from jax_webgpu import dtypes
from jax_webgpu.capabilities import FLOOR_LIMITS
from jax_webgpu.errors import ExpressionError
from jax_webgpu.expressions import Expression
from jax_webgpu.spec import Binding, Pass, Repeat, Spec, Value, Variant


@dataclass(frozen=True)
class Finding:
    """One thing that its author may not have meant."""

    place: str
    """A variant, pass or template, with its line."""
    message: str

    def __str__(self) -> str:
        return f"{self.place}: {self.message}"


def findings(spec: Spec, files: Iterable[str] = ()) -> Iterator[Finding]:
    """What looks wrong, in the manifest's order.

    Args:
      spec: the manifest.
      files: the names of the folder's files.
    """
    yield from _members(spec)
    yield from _unreachable(spec)
    yield from _unbound(spec)
    yield from _unused(spec)
    for name in sorted(files):
        if name.endswith(".jinja") and name not in spec.templates:
            yield Finding(name, "no pass names this template")


# ---- members that do not exist ------------------------------------------------------------------


def _members(spec: Spec) -> Iterator[Finding]:
    """`shapes.X` of an X that is no port, and the like: always undefined."""
    known = _known(spec)
    for place, value in _expressions(spec):
        for path in _unknown(value.node, known):
            yield Finding(place, f"`{path}` is never defined, in `{value.text}`")
    for name, template in spec.templates.items():
        for node in template.body:
            for each in node.find_all(nodes.Getattr):
                for path in _unknown(each, known, deep=False):
                    yield Finding(f"{name}:{each.lineno}", f"`{path}` is never defined")


def _known(spec: Spec) -> dict[str, frozenset[str]]:
    """The members of the objects in scope, by the object's name."""
    ports = frozenset({*spec.inputs, *spec.outputs})
    types = frozenset({*spec.type_constraints, *dtypes.TABLE})
    tunables = {*spec.tunables}.union(*(dict(each.tunables) for each in spec.variants))
    known = {
        **dict.fromkeys(("shapes", "ranks", "tensorDtypes"), ports),
        **dict.fromkeys(("dtypes", "logicalDtypes"), types),
        "present": ports | frozenset(spec.args),
        "attrs": frozenset(spec.attributes),
        "args": frozenset(spec.args),
        "tunables": frozenset(tunables),
        "device": frozenset(("features", "wgslLanguageFeatures", "limits", "adapterInfo")),
        "device.limits": frozenset((*FLOOR_LIMITS, *_OTHER_LIMITS)),
    }
    return {name: members for name, members in known.items() if name not in spec.derive}


# Of WebGPU's limits those that have nothing to do with compute passes.
_OTHER_LIMITS = (
    "maxBindGroupsPlusVertexBuffers maxColorAttachmentBytesPerSample maxColorAttachments "
    "maxDynamicStorageBuffersPerPipelineLayout maxDynamicUniformBuffersPerPipelineLayout "
    "maxInterStageShaderVariables maxSampledTexturesPerShaderStage maxSamplersPerShaderStage "
    "maxStorageTexturesPerShaderStage maxTextureArrayLayers maxTextureDimension1D "
    "maxTextureDimension2D maxTextureDimension3D maxVertexAttributes "
    "maxVertexBufferArrayStride maxVertexBuffers"
).split()


def _unknown(
    node: nodes.Node, known: Mapping[str, frozenset[str]], *, deep: bool = True
) -> Iterator[str]:
    each = [node, *node.find_all(nodes.Getattr)] if deep else [node]
    for member in each:
        if isinstance(member, nodes.Getattr):
            owner = _path(member.node)
            if owner in known and member.attr not in known[owner]:
                yield f"{owner}.{member.attr}"


def _path(node: nodes.Node) -> str:
    match node:
        case nodes.Name():
            return node.name
        case nodes.Getattr():
            return f"{_path(node.node)}.{node.attr}"
    return ""


# ---- variants -----------------------------------------------------------------------------------


def _unreachable(spec: Spec) -> Iterator[Finding]:
    for at, variant in enumerate(spec.ranked):
        place = f"variant {variant.id}"
        for clause in (*spec.when, *variant.when):
            if not clause.reads and not _is_true(clause):
                yield Finding(place, f"unreachable: `{clause.text}` is never true")
        if spec.requires.subgroup_matrix_configs or variant.requires.subgroup_matrix_configs:
            yield Finding(place, "unreachable: WebGPU has no subgroup matrices yet")
        for other in spec.ranked[:at]:
            if _covers(other, variant):
                yield Finding(place, f"unreachable: {other.id} comes first and takes all it does")
                break


def _is_true(clause: Expression) -> bool:
    try:
        return clause({}) is True
    except ExpressionError:
        return False


def _covers(first: Variant, second: Variant) -> bool:
    """Whether the first applies wherever the second does, and is not held back."""
    conjuncts = {each.text for clause in second.when for each in clause.conjuncts}
    clauses = {clause.text for clause in second.when}
    own = all(
        clause.text in clauses or {each.text for each in clause.conjuncts} <= conjuncts
        for clause in first.when
    )
    features = set(first.requires.features) <= set(second.requires.features)
    limits = dict(second.requires.limits)
    enough = all(limits.get(name, 0) >= least for name, least in first.requires.limits)
    size = (first.requires.subgroup_min_size or 0) <= (second.requires.subgroup_min_size or 0)
    fewer = all(count <= second.most_bound[kind] for kind, count in first.most_bound.items())
    held_back = first.demote_when or first.superseded_by
    return own and features and enough and size and fewer and not held_back


# ---- what nothing uses --------------------------------------------------------------------------


def _unbound(spec: Spec) -> Iterator[Finding]:
    for variant in spec.variants:
        bound = {binding.source for each in variant.every_pass for binding in each.bindings}
        for name, port in spec.outputs.items():
            if name not in bound and not port.optional and name not in spec.inputs:
                yield Finding(f"variant {variant.id}", f"no pass binds the output {name}")
        for scratch in variant.intermediates:
            if scratch.id not in bound:
                yield Finding(f"variant {variant.id}", f"no pass binds {scratch.id}")


def _unused(spec: Spec) -> Iterator[Finding]:
    used = {name for _, value in _expressions(spec) for name in value.reads}
    for template in spec.templates.values():
        used |= template.reads
    elements = {
        binding.element_type.removeprefix("$")
        for variant in spec.variants
        for each in variant.every_pass
        for binding in each.bindings
        if binding.element_type
    }
    used |= elements
    for name in spec.derive:
        if name not in used:
            yield Finding(f"derive.{name}", "nothing reads it")
    for variant in spec.variants:
        for name, _ in variant.derive:
            if name not in used:
                yield Finding(f"variant {variant.id}", f"nothing reads its derived value {name}")
    texts = [value.text for _, value in _expressions(spec)]
    texts += [template.source for template in spec.templates.values()]
    for name in spec.tunables:
        if not any(f"tunables.{name}" in text or f"[{name!r}]" in text for text in texts):
            yield Finding(f"tunables.{name}", "nothing reads it")


# ---- all expressions ----------------------------------------------------------------------------


def _expressions(spec: Spec) -> Iterator[tuple[str, Expression]]:
    """Each expression of a manifest, and where it stands."""
    for name, port in {**spec.inputs, **spec.outputs}.items():
        yield from _within(f"shape of {name}", port.shape)
    for name, value in spec.derive.items():
        yield from _within(f"derive.{name}", value)
    for clause in spec.when:
        yield "when", clause
    for variant in spec.variants:
        place = f"variant {variant.id}"
        for clause in (*variant.when, *variant.demote_when):
            yield f"{place}, when", clause
        for name, value in variant.derive:
            yield from _within(f"{place}, derive.{name}", value)
        for scratch in variant.intermediates:
            yield from _within(f"{place}, shape of {scratch.id}", scratch.shape)
        yield from _of_passes(place, variant.passes)


def _of_passes(place: str, passes: tuple[Pass | Repeat, ...]) -> Iterator[tuple[str, Expression]]:
    for each in passes:
        inside = f"{place}, {each.id}"
        if isinstance(each, Repeat):
            yield from _within(f"{inside}, count", each.count)
            yield from _of_passes(inside, each.passes)
            continue
        for name, value in each.derive:
            yield from _within(f"{inside}, derive.{name}", value)
        counts = each.dispatch
        for value in (counts.x, counts.y, counts.z, counts.threads, counts.workgroup_size):
            yield from _within(f"{inside}, dispatch", value)
        yield from _within(f"{inside}, dispatch", counts.workgroups)
        for binding in each.bindings:
            yield from _of_binding(f"{inside}, {binding.name}", binding)


def _of_binding(place: str, binding: Binding) -> Iterator[tuple[str, Expression]]:
    yield from _within(f"{place}, length", binding.length)
    for struct_field in binding.struct or ():
        yield from _within(f"{place}.{struct_field.name}", struct_field.value)


def _within(place: str, value: Value) -> Iterator[tuple[str, Expression]]:
    match value:
        case Expression():
            yield place, value
        case tuple():
            for each in value:
                yield from _within(place, each)
        case dict():
            for each in value.values():
                yield from _within(place, each)
