"""`Plan`: all that a device needs to run one call, and nothing that needs a device to make.

Passes with their WGSL, bindings, uniform bytes and workgroup counts, checked against the limits of
the device it is made for. A plan can be printed and tested on a machine without a GPU.
"""

import functools
import math
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from jax_webgpu import dtypes, variants
from jax_webgpu.capabilities import Capabilities
from jax_webgpu.errors import CallError, ExpressionError, LimitError
from jax_webgpu.helpers import ceil_div
from jax_webgpu.resolve import DISPATCH_FOLD_WIDTH, Resolved, Tensor, extend
from jax_webgpu.spec import (
    Binding,
    Dispatch,
    Pass,
    Repeat,
    StructField,
    evaluate,
    sizes,
    whole,
)
from jax_webgpu.templates import Template
from jax_webgpu.values import UNDEFINED, is_number, show

# More passes than this are a mistake of a repeat count.
MAX_PASSES = 4096

_U32 = 2**32


@dataclass(frozen=True)
class Buffer:
    """An array in device memory: a port's or an intermediate's."""

    name: str
    tensor: Tensor
    dtype: dtypes.DType
    """How it lies in the buffer: the port's `storage` type where it has one."""
    narrowing: str | None = None
    zero_init: bool = False

    @property
    def size(self) -> int:
        """Bytes, rounded up to 4."""
        return -(-math.prod(self.tensor.shape) * self.dtype.bytes // 4) * 4


@dataclass(frozen=True)
class Bound:
    """One entry of a pass's bind group and the declaration that belongs to it."""

    name: str
    buffer: str
    """``uniform``, ``storage`` or ``read-only-storage``, as in ``GPUBufferBindingType``."""
    type: str
    """The WGSL type of the variable."""
    source: str
    """The `Buffer` behind it; empty where `data` is."""
    size: int
    """Bytes that are bound, never 0: an empty array is bound as one element."""
    data: bytes = b""
    fields: tuple[tuple[str, str, Any], ...] = ()
    """Name, WGSL type and value of each member of a struct, padding included."""


@dataclass(frozen=True)
class PassPlan:
    """One dispatch."""

    label: str
    wgsl: str
    bindings: tuple[Bound, ...]
    workgroups: tuple[int, int, int]
    view_alias: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, eq=False)
class Plan:
    """The dispatches of one call on one kind of device. Passes that have no work are left out."""

    resolved: Resolved
    capabilities: Capabilities
    variant: str
    inputs: tuple[Buffer, ...]
    outputs: tuple[Buffer, ...]
    intermediates: tuple[Buffer, ...]
    passes: tuple[PassPlan, ...]

    @property
    def label(self) -> str:
        return f"{self.resolved.spec.name}.{self.variant}"

    @functools.cached_property
    def unwritten(self) -> tuple[str, ...]:
        """The outputs that have elements, are no inputs too, and that no pass binds."""
        bound = {bound.source for each in self.passes for bound in each.bindings}
        bound |= {name for name, _ in self.resolved.inputs}
        return tuple(
            name
            for name, tensor in self.resolved.outputs
            if math.prod(tensor.shape) and name not in bound
        )

    def describe(self, *, wgsl: bool = True) -> str:
        """The plan as text for a person."""
        return "\n".join(_describe(self, wgsl))


@functools.lru_cache(maxsize=1024)
def make(resolved: Resolved, capabilities: Capabilities) -> Plan:
    """Plans a call for a device; equal calls give the same object.

    Raises:
      CallError: no variant takes the call on any device, or a value of the manifest is not exact.
      DeviceError: no variant takes it on this device.
      LimitError: the chosen variant needs more than a limit of the device.
    """
    selection = variants.select(resolved, capabilities)
    variant, spec = selection.variant, resolved.spec
    names = dict(selection.scope)
    names["tunables"] = {
        **spec.tunables,
        **dict(variant.tunables),
        **dict(resolved.tunables),
    }
    where = f"{spec.name}.{variant.id}"
    try:
        names = extend(names, variant.derive)
        ports = {**spec.inputs, **spec.outputs}
        arrays = {
            name: Buffer(name, tensor, resolved.storage(ports[name]), ports[name].narrowing)
            for name, tensor in resolved.inputs + resolved.outputs
        }
        scratch = tuple(
            Buffer(
                each.id,
                Tensor(sizes(each.shape, names, each.id), each.dtype),
                dtypes.TABLE[each.dtype],
                zero_init=each.zero_init,
            )
            for each in variant.intermediates
        )
        arrays |= {each.name: each for each in scratch}
        planned: list[PassPlan] = []
        if any(math.prod(tensor.shape) for _, tensor in resolved.outputs):
            for each, inside in _unrolled(variant.passes, names):
                planned += _pass(resolved, capabilities, where, each, inside, arrays)
                if len(planned) > MAX_PASSES:
                    raise ExpressionError(f"more than {MAX_PASSES} passes")
    except ExpressionError as error:
        raise CallError(f"{where}: {error}") from None
    return Plan(
        resolved=resolved,
        capabilities=capabilities,
        variant=variant.id,
        inputs=tuple(arrays[name] for name, _ in resolved.inputs),
        outputs=tuple(arrays[name] for name, _ in resolved.outputs),
        intermediates=scratch,
        passes=tuple(planned),
    )


def declarations(bindings: tuple[Bound, ...]) -> str:
    """The WGSL of a pass's resources: the structs, then a variable a line."""
    lines = []
    for bound in bindings:
        if bound.fields:
            members = ", ".join(f"{name}: {type}" for name, type, _ in bound.fields)
            lines.append(f"struct {bound.type} {{ {members} }}")
    access = {
        "uniform": "uniform",
        "storage": "storage, read_write",
        "read-only-storage": "storage, read",
    }
    for index, bound in enumerate(bindings):
        space = access[bound.buffer]
        lines.append(f"@group(0) @binding({index}) var<{space}> {bound.name}: {bound.type};")
    return "\n".join(lines)


def render(
    template: Template, bindings: tuple[Bound, ...], names: dict[str, Any], *, strict: bool = False
) -> str:
    """The WGSL of a pass; `names` is its whole scope, `strict` as in `Template.render`."""
    wgsl = {"resourceDeclarations": declarations(bindings)}
    env = {"wgsl": wgsl, "device": names["device"]}
    text = template.render({**names, "env": env}, strict=strict)
    code = re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.DOTALL)
    if re.search(r"\bf16\b", code) and not re.search(r"\benable\b[^;]*\bf16\b", code):
        text = "enable f16;\n" + text
    return text


def _unrolled(
    entries: tuple[Pass | Repeat, ...], names: dict[str, Any]
) -> Iterator[tuple[Pass, dict[str, Any]]]:
    for entry in entries:
        if isinstance(entry, Pass):
            yield entry, names
            continue
        count = _whole(evaluate(entry.count, names), f"{entry.id}: the repeat count")
        if count > MAX_PASSES:
            raise ExpressionError(f"{entry.id}: more than {MAX_PASSES} passes")
        for index in range(count):
            inside = {
                **names,
                "repeat": {"index": index, "count": count},
                entry.index: index,
                f"{entry.index}_count": count,
            }
            yield from _unrolled(entry.passes, inside)


def _pass(
    resolved: Resolved,
    capabilities: Capabilities,
    where: str,
    each: Pass,
    names: dict[str, Any],
    arrays: dict[str, Buffer],
) -> Iterator[PassPlan]:
    names = extend(names, each.derive)
    workgroups = _workgroups(each.dispatch, names)
    if 0 in workgroups:
        return
    label = f"{where}.{each.id}"
    bindings = tuple(_bind(resolved, binding, names, arrays) for binding in each.bindings)
    wgsl = render(resolved.spec.templates[each.shader], bindings, names)
    _check_limits(capabilities, label, wgsl, bindings, workgroups)
    yield PassPlan(label, wgsl, bindings, workgroups, each.view_alias)


def _workgroups(dispatch: Dispatch, names: dict[str, Any]) -> tuple[int, int, int]:
    if dispatch.x is not None:
        x, y, z = (evaluate(value, names) for value in (dispatch.x, dispatch.y, dispatch.z))
        return _whole(x, "dispatch.x"), _whole(y, "dispatch.y"), _whole(z, "dispatch.z")
    if dispatch.workgroups is not None:
        groups = _whole(evaluate(dispatch.workgroups, names), "dispatch.workgroups")
    else:
        threads = evaluate(dispatch.threads, names)
        size = _whole(evaluate(dispatch.workgroup_size, names), "dispatch.workgroupSize")
        groups = _whole(ceil_div(threads, size), "dispatch.threads / workgroupSize")
    return min(groups, DISPATCH_FOLD_WIDTH), -(-groups // DISPATCH_FOLD_WIDTH), 1


def _whole(value: Any, what: str, least: int = 0) -> int:
    """An exact whole number, never one that was rounded."""
    result = whole(value)
    if result is None or result < least:
        raise ExpressionError(f"{what} comes out as {show(value)}")
    return result


def _bind(
    resolved: Resolved, binding: Binding, names: dict[str, Any], arrays: dict[str, Buffer]
) -> Bound:
    if binding.struct is not None:
        fields = [_field(each, names) for each in binding.struct]
        padding = -len(fields) % 4 if fields else 4
        fields += [(f"_pad{index}", "u32", 0) for index in range(padding)]
        data = b"".join(_packed(*each) for each in fields)
        kind = binding.buffer or "uniform"
        return Bound(binding.name, kind, binding.struct_name, "", len(data), data, tuple(fields))
    if binding.source not in arrays:
        raise ExpressionError(f"the binding {binding.name} needs {binding.source}, which is absent")
    array, spec = arrays[binding.source], resolved.spec
    element = _element_type(binding, names, array)
    try:
        least = dtypes.wgsl_bytes(element)
    except ValueError as error:
        raise ExpressionError(f"the binding {binding.name}: {error}") from None
    if array.size // least > _U32:
        raise LimitError(
            f"{array.name} has {array.size // least:,} elements of {element}; WGSL counts them in "
            f"u32, up to {_U32:,}"
        )
    read_only = binding.source in spec.inputs and binding.source not in spec.outputs
    type_ = f"array<{element}>"
    if binding.length is not None:
        length = _whole(evaluate(binding.length, names), f"the length of {binding.name}", 1)
        type_, least = f"array<{element}, {length}>", least * length
    return Bound(
        name=binding.name,
        buffer=binding.buffer or ("read-only-storage" if read_only else "storage"),
        type=type_,
        source=binding.source,
        size=max(array.size, -(-least // 4) * 4),
    )


def _element_type(binding: Binding, names: dict[str, Any], array: Buffer) -> str:
    wanted = binding.element_type
    if wanted is None:
        return array.dtype.wgsl
    if not wanted.startswith("$"):
        return wanted
    name = wanted[1:]
    value = names["dtypes"].get(name, names["derive"].get(name, UNDEFINED))
    if not isinstance(value, str):
        raise ExpressionError(f"the element type {wanted} of {binding.name} is {show(value)}")
    return value


def _field(field: StructField, names: dict[str, Any]) -> tuple[str, str, Any]:
    value: Any = UNDEFINED
    if field.value is not None:
        value = evaluate(field.value, names)
    elif field.name in names["args"]:
        value = names["args"][field.name]
    if value is UNDEFINED:
        value = field.default
    if value is UNDEFINED and not field.required:
        value = 0
    if isinstance(value, bool):
        value = int(value)
    if not is_number(value):
        raise ExpressionError(f"the field {field.name} comes out as {show(value)}")
    if field.type == "f32":
        if math.isnan(value):
            raise ExpressionError(f"the field {field.name} comes out as NaN")
        return field.name, field.type, float(value)
    low, high = (0, 2**32 - 1) if field.type == "u32" else (-(2**31), 2**31 - 1)
    exact = whole(value)
    if exact is None or not low <= exact <= high:
        raise ExpressionError(
            f"the field {field.name} comes out as {show(value)}; expected a whole number "
            f"from {low} to {high} ({field.type})"
        )
    return field.name, field.type, exact


def _packed(name: str, type_: str, value: Any) -> bytes:
    try:
        return struct.pack({"u32": "<I", "i32": "<i", "f32": "<f"}[type_], value)
    except OverflowError:
        raise ExpressionError(f"the field {name} comes out as {value}, beyond f32") from None


def _check_limits(
    capabilities: Capabilities,
    label: str,
    wgsl: str,
    bindings: tuple[Bound, ...],
    workgroups: tuple[int, int, int],
) -> None:
    def check(what: str, need: int, *limits: str) -> None:
        for limit in limits:
            if need > capabilities.limit(limit):
                raise LimitError(
                    f"{label}: {what} {need:,}; {limit} of {capabilities.name} is "
                    f"{capabilities.limit(limit):,}"
                )

    for axis, count in zip("xyz", workgroups, strict=True):
        check(f"workgroups in {axis}:", count, "maxComputeWorkgroupsPerDimension")
    for bound in bindings:
        kind = "Uniform" if bound.buffer == "uniform" else "Storage"
        what = f"the binding {bound.name} in bytes:"
        check(what, bound.size, f"max{kind}BufferBindingSize", "maxBufferSize")
    declared = re.search(r"@workgroup_size\(([\d\s,u]*)\)", wgsl)
    if declared:
        sizes = [int(size.strip().rstrip("u")) for size in declared[1].split(",") if size.strip()]
        for axis, size in zip("XYZ", sizes, strict=False):
            check("workgroup size", size, f"maxComputeWorkgroupSize{axis}")
        check("invocations a workgroup:", math.prod(sizes), "maxComputeInvocationsPerWorkgroup")


def _describe(plan: Plan, wgsl: bool) -> Iterator[str]:
    yield f"call      {plan.resolved}"
    yield f"device    {plan.capabilities.name}"
    yield f"variant   {plan.variant}"
    if plan.resolved.tunables:
        yield "tunables  " + ", ".join(f"{k} = {show(v)}" for k, v in plan.resolved.tunables)
    if not plan.passes:
        yield "nothing to dispatch: every output is empty"
    for each in plan.passes:
        groups = " × ".join(map(str, each.workgroups))
        yield f"pass      {each.label}: {groups} workgroups"
        for index, bound in enumerate(each.bindings):
            if bound.fields:
                shown = ", ".join(f"{name} = {value}" for name, _, value in bound.fields)
                yield f"  @binding({index}) {bound.name}: {bound.buffer}, {shown}"
            else:
                kind = f"{bound.type}, {bound.buffer}, {bound.size:,} bytes of {bound.source}"
                yield f"  @binding({index}) {bound.name}: {kind}"
        if wgsl:
            yield from (f"  | {line}".rstrip() for line in each.wgsl.splitlines())
