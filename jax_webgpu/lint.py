"""What is suspicious in a kernel folder that loads, found in its text without device or call."""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from jinja2 import nodes

from jax_webgpu import dtypes
from jax_webgpu.capabilities import FLOOR_LIMITS
from jax_webgpu.errors import ExpressionError
from jax_webgpu.expressions import Expression
from jax_webgpu.spec import Binding, Pass, Repeat, Spec, Value, Variant
from jax_webgpu.templates import Template
from jax_webgpu.values import show


@dataclass(frozen=True)
class Finding:
    """One thing that its author may not have meant."""

    place: str
    """A variant, pass or template, with its line."""
    message: str
    is_error: bool = False
    """Whether it cannot be meant."""

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
        asked = {path for node in _asked(value.node) for path, _ in _unknown(node, known)}
        for path, owner in _unknown(value.node, known):
            is_error = path not in asked and owner != "device.limits"  # of which there will be more
            yield Finding(place, f"`{path}` is never defined, in `{value.text}`", is_error)
        yield from _never_equal(spec, place, value)
        yield from _no_features(place, value)
    for name, template in spec.templates.items():
        for node in template.body:
            asked = {path for each in _asked(node) for path, _ in _unknown(each, known)}
            for each in node.find_all((nodes.Getattr, nodes.Getitem)):
                for path, owner in _unknown(each, known, deep=False):
                    is_error = path not in asked and owner != "device.limits"
                    yield Finding(f"{name}:{each.lineno}", f"`{path}` is never defined", is_error)


def _asked(node: nodes.Node) -> Iterator[nodes.Node]:
    """What an expression asks about: is it defined, and what else if it is not."""
    for each in _within_node(node, (nodes.Test, nodes.Filter)):
        if each.name in ("defined", "undefined", "default") and each.node is not None:
            yield each.node


def _within_node(node: nodes.Node, kinds: Any) -> Iterator[Any]:
    """The nodes of some kinds in a tree, its root among them."""
    if isinstance(node, kinds):
        yield node
    yield from node.find_all(kinds)


def _never_equal(spec: Spec, place: str, value: Expression) -> Iterator[Finding]:
    """`dtypes.T == "float32"`, which is "f32" there; `attrs.mode == "fats"` of other values."""
    for each in _within_node(value.node, nodes.Compare):
        sides = [each.expr, *(operand.expr for operand in each.ops)]
        if len(sides) != 2 or each.ops[0].op not in ("eq", "ne"):
            continue
        for side, other in (sides, sides[::-1]):
            admitted = _admitted(spec, _path(side))
            if admitted and isinstance(other, nodes.Const) and other.value not in admitted:
                known = " or ".join(map(show, admitted))
                message = f"`{_path(side)}` is never {show(other.value)}, but {known}"
                yield Finding(place, f"{message}, in `{value.text}`")


def _admitted(spec: Spec, path: str) -> tuple[str, ...]:
    """The strings that a member is one of; empty where it may be another, or more than a string."""
    owner, _, name = path.partition(".")
    if owner in spec.derive:
        return ()
    if owner == "attrs" and name in spec.attributes:
        values = spec.attributes[name].values or ()
        return tuple(values) if all(isinstance(each, str) for each in values) else ()
    if owner == "logicalDtypes":
        return spec.type_constraints.get(name, ())
    variable = name
    if owner == "tensorDtypes" and name in {**spec.inputs, **spec.outputs}:
        variable = ({**spec.outputs, **spec.inputs})[name].dtype
    ports = [each for each in (*spec.inputs.values(), *spec.outputs.values())]
    if owner not in ("dtypes", "tensorDtypes") or any(
        each.dtype == variable and each.storage for each in ports
    ):
        return ()
    rows = [dtypes.TABLE[each] for each in spec.type_constraints.get(variable, ())]
    made = (each.wgsl if owner == "dtypes" else each.storage.name for each in rows)
    return tuple(dict.fromkeys(made))


def _no_features(place: str, value: Expression) -> Iterator[Finding]:
    """`device.features.has("f16")`, of a feature that WebGPU does not have."""
    for each in _within_node(value.node, nodes.Call):
        if _path(each.node) == "device.features.has" and len(each.args) == 1:
            name = each.args[0].value if isinstance(each.args[0], nodes.Const) else None
            if isinstance(name, str) and name not in _FEATURES and "experimental" not in name:
                yield Finding(place, f"WebGPU has no feature {show(name)}, in `{value.text}`")


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
        "derive": frozenset(_derived(spec)),
        "device": frozenset(("features", "wgslLanguageFeatures", "limits", "adapterInfo")),
        "device.limits": frozenset((*FLOOR_LIMITS, *_OTHER_LIMITS)),
        "device.features": frozenset(["has"]),
        "device.wgslLanguageFeatures": frozenset(["has"]),
    }
    return {name: members for name, members in known.items() if name not in spec.derive}


def _derived(spec: Spec) -> Iterator[str]:
    """The names that are derived anywhere."""
    yield from spec.derive
    for variant in spec.variants:
        yield from (name for name, _ in variant.derive)
        for each in variant.every_pass:
            yield from (name for name, _ in each.derive)


# https://www.w3.org/TR/webgpu/#feature-index
_FEATURES = (
    "core-features-and-limits depth-clip-control depth32float-stencil8 texture-compression-bc "
    "texture-compression-bc-sliced-3d texture-compression-etc2 texture-compression-astc "
    "texture-compression-astc-sliced-3d timestamp-query indirect-first-instance shader-f16 "
    "rg11b10ufloat-renderable bgra8unorm-storage float32-filterable float32-blendable "
    "clip-distances dual-source-blending subgroups subgroup-size-control texture-formats-tier1 "
    "texture-formats-tier2 primitive-index texture-component-swizzle"
).split()

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
) -> Iterator[tuple[str, str]]:
    """The members that do not exist, each with its owner."""
    kinds = (nodes.Getattr, nodes.Getitem)
    members: Iterable[Any] = _within_node(node, kinds) if deep else [node]
    for member in members:
        owner, name = _path(member.node), _member(member)
        if owner in known and name is not None and name not in known[owner]:
            yield f"{owner}.{name}", owner


def _member(node: Any) -> str | None:
    if isinstance(node, nodes.Getattr):
        return node.attr
    is_text = isinstance(node.arg, nodes.Const) and isinstance(node.arg.value, str)
    return str(node.arg.value) if is_text else None


def _path(node: nodes.Node) -> str:
    match node:
        case nodes.Name():
            return node.name
        case nodes.Getattr():
            return f"{_path(node.node)}.{node.attr}"
    return ""


def is_certain(template: Template, problem: str) -> bool:
    """Whether a template prints a name that nothing gives a value.

    Args:
      template: which failed when it was rendered strictly.
      problem: with what message. A name that the template itself may set, or only asks about in a
        condition, may have been left undefined on purpose.
    """
    found = re.search(rf"{re.escape(template.name)}:\d+: unknown name (\w+)$", problem)
    if found is None:
        return False
    every = [each for node in template.body for each in _within_node(node, nodes.Node)]
    names = [each for each in every if isinstance(each, nodes.Name) and each.name == found[1]]
    made = any(each.ctx != "load" for each in names) or any(
        isinstance(each, nodes.Macro) and each.name == found[1] for each in every
    )
    outputs = (each for each in every if isinstance(each, nodes.Output))
    printed = (name for each in outputs for part in each.nodes for name in _printed(part))
    return not made and found[1] in printed


def _printed(node: nodes.Node) -> Iterator[str]:
    """The names whose values make the text of an output."""
    match node:
        case nodes.Name():
            yield node.name
        case nodes.CondExpr():
            yield from _printed(node.expr1)
            yield from _printed(node.expr2) if node.expr2 is not None else ()
        case nodes.And() | nodes.Or() | nodes.Not() | nodes.Compare() | nodes.Test():
            pass
        case nodes.Filter(name="default"):
            pass
        case _:
            for child in node.iter_child_nodes():
                yield from _printed(child)


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
