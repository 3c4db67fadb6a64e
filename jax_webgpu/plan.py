"""`Plan`: all that a device needs to run one call, and nothing that needs a device to make.

Passes with their WGSL, bindings, uniform bytes and workgroup counts, checked against the limits of
the device it is made for. A plan can be printed and tested on a machine without a GPU.
"""

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

from jax_webgpu import dtypes, uniforms, variants, wgsl
from jax_webgpu.capabilities import Capabilities
from jax_webgpu.document import Value
from jax_webgpu.errors import CallError, DeviceError, ExpressionError, LimitError
from jax_webgpu.expressions import EVERY
from jax_webgpu.helpers import ceil_div
from jax_webgpu.resolve import DISPATCH_FOLD_WIDTH, Resolved, Tensor, derive, extend, scalars
from jax_webgpu.spec import (
    Binding,
    Dispatch,
    Pass,
    Repeat,
    StructField,
    evaluate,
    reads,
    sizes,
    whole,
)
from jax_webgpu.templates import Template
from jax_webgpu.values import UNDEFINED, counted, is_sequence, need_unicode, show

# More passes than this are a mistake of a repeat count, and so are more turns, with passes that
# have no work, or with none.
MAX_PASSES = 4096
MAX_TURNS = 16384

# The largest buffers that the intermediates of a call may take together.
MAX_BUFFERS = 16

T = TypeVar("T")

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


# Tuples, because a call may have thousands of these, and frozen dataclasses take thrice as long.
class Bound(NamedTuple):
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
    fields: tuple[uniforms.Field, ...] = ()
    """The members of a struct, padding included."""


class PassPlan(NamedTuple):
    """One dispatch."""

    label: str
    wgsl: str
    bindings: tuple[Bound, ...]
    workgroups: tuple[int, int, int]
    view_alias: tuple[tuple[str, str], ...] = ()
    template: str = ""
    """The file that the WGSL was rendered from; empty where none was."""
    workgroup_size: Any = None
    """What `dispatch` says that the template declares; of a strict plan alone."""


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

    def check_written(self) -> None:
        """Raises `CallError` where some output would be what its memory happens to hold."""
        if self.unwritten:
            raise CallError(f"{self.label}: no pass writes {', '.join(self.unwritten)}")

    def describe(self, *, wgsl: bool = True) -> str:
        """The plan as text for a person."""
        return "\n".join(_describe(self, wgsl))


def make(resolved: Resolved, capabilities: Capabilities) -> Plan:
    """Plans a call for a device; equal calls give the same object, or the same refusal.

    Raises:
      CallError: no variant takes the call on any device, or a value of the manifest is not exact.
      DeviceError: no variant takes it on this device.
      LimitError: the chosen variant needs more than a limit of the device.
    """
    made = _made(resolved, capabilities)
    if isinstance(made, Plan):
        return made
    raise type(made)(*made.args)  # another: the traceback of one that is kept would only grow


@functools.lru_cache(maxsize=1024)
def _made(resolved: Resolved, capabilities: Capabilities) -> Plan | CallError | DeviceError:
    try:
        return anew(resolved, capabilities)
    except (CallError, DeviceError) as error:
        return error.with_traceback(None)


def cache_info() -> Any:
    """How many plans are kept and were made, as `functools.lru_cache` tells it."""
    return _made.cache_info()


def forget() -> None:
    """Gives back the memory of the plans that were made."""
    _made.cache_clear()


def fitted(
    resolved: Resolved, capabilities: Capabilities, better: Mapping[str, Any] | None = None
) -> Resolved:
    """A call with tunables for a device, as far as it does not set them itself.

    WORKGROUP_SIZE is no larger than the device can run.

    Args:
      resolved: the call.
      capabilities: the device's.
      better: values for it in place of the manifest's defaults, where the manifest has any.
    """
    own, set_ = resolved.spec.tunables, dict(resolved.tunables)
    chosen = {n: v for n, v in (better or {}).items() if n in own and n not in set_}
    size = chosen.get("WORKGROUP_SIZE", own.get("WORKGROUP_SIZE"))
    _, most = largest_workgroup(capabilities)
    if isinstance(size, int) and size > most and "WORKGROUP_SIZE" not in set_:
        chosen["WORKGROUP_SIZE"] = most
    return resolved.with_tunables(**chosen) if chosen else resolved


def check_workgroup_size(resolved: Resolved, capabilities: Capabilities) -> None:
    """Raises `LimitError` where a call sets a WORKGROUP_SIZE that the device cannot run."""
    size = dict(resolved.tunables).get("WORKGROUP_SIZE")
    if isinstance(size, int):
        limit, _ = largest_workgroup(capabilities)
        _check(capabilities, f"{resolved.spec.name}: WORKGROUP_SIZE is", size, limit)


def is_refused_for_tunables(resolved: Resolved, make: Callable[[Resolved], Plan]) -> bool:
    """Whether a call that `make` refuses would be planned without the tunables that it sets."""
    if not resolved.tunables:
        return False
    try:
        make(replace(resolved, tunables=()))
    except (CallError, DeviceError):
        return False
    return True


def largest_workgroup(capabilities: Capabilities) -> tuple[str, int]:
    """The most invocations in a row that a workgroup may have, and the limit that says so."""
    limits = ("maxComputeInvocationsPerWorkgroup", "maxComputeWorkgroupSizeX")
    name = min(limits, key=capabilities.limit)
    return name, capabilities.limit(name)


def anew(resolved: Resolved, capabilities: Capabilities, *, strict: bool = False) -> Plan:
    """As `make`, but nothing is kept; `strict` as in `Template.render`."""
    selection = variants.select(resolved, capabilities)
    variant, spec = selection.variant, resolved.spec
    names = dict(selection.scope)
    if "tunables" not in spec.derive:
        tunables = dict(spec.tunables) | dict(variant.tunables) | dict(resolved.tunables)
        names["tunables"] = tunables
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
        for each in scratch:
            what = f"{where}: the intermediate {each.name} in bytes:"
            _check(capabilities, what, each.size, "maxBufferSize")
        _check_total(capabilities, where, sum(each.size for each in scratch))
        arrays |= {each.name: each for each in scratch}
        planner = _Planner(resolved, capabilities, where, names, arrays, strict)
        passes: tuple[PassPlan, ...] = ()
        if any(math.prod(tensor.shape) for _, tensor in resolved.outputs):
            passes = tuple(planner.passes(variant.passes))
    except ExpressionError as error:
        raise CallError(f"{where}: {error}") from None
    return Plan(
        resolved=resolved,
        capabilities=capabilities,
        variant=variant.id,
        inputs=tuple(arrays[name] for name, _ in resolved.inputs),
        outputs=tuple(arrays[name] for name, _ in resolved.outputs),
        intermediates=scratch,
        passes=passes,
    )


def declarations(bindings: Sequence[Bound]) -> str:
    """The WGSL of a pass's resources: the structs, then a variable a line."""
    structs = {}
    for bound in bindings:
        if bound.fields:
            members = ", ".join(f"{name}: {type}" for name, type, _ in bound.fields)
            structs[bound.type] = f"struct {bound.type} {{ {members} }}"
    access = {
        "uniform": "uniform",
        "storage": "storage, read_write",
        "read-only-storage": "storage, read",
    }
    return "\n".join(
        [
            *structs.values(),
            *(
                f"@group(0) @binding({index}) var<{access[bound.buffer]}> {bound.name}: "
                f"{bound.type};"
                for index, bound in enumerate(bindings)
            ),
        ]
    )


def render(
    template: Template,
    bindings: Sequence[Bound],
    names: Mapping[str, Any],
    capabilities: Capabilities,
    *,
    strict: bool = False,
) -> tuple[str, str]:
    """The WGSL of a pass, and what it is without comments.

    `names` is the pass's whole scope, `strict` as in `Template.render`.
    """
    declared = {"resourceDeclarations": declarations(bindings)}
    env = {"wgsl": declared, "device": capabilities.as_scope()}
    text = need_unicode(template.render({**names, "env": env}, strict=strict))
    code = wgsl.code(text)
    return "enable f16;\n" + text if wgsl.lacks_f16(code) else text, code


class _Planner:
    """Makes the passes of one variant for one call."""

    def __init__(
        self,
        resolved: Resolved,
        capabilities: Capabilities,
        where: str,
        names: dict[str, Any],
        arrays: dict[str, Buffer],
        strict: bool,
    ):
        self.resolved = resolved
        self.strict = strict
        self.capabilities = capabilities
        self.where = where
        self.names = names
        self.arrays = arrays
        # Of the call itself, whatever the manifest derives under the same names.
        self.scalars = scalars(resolved)
        self.args = dict(resolved.args)

    def passes(self, entries: tuple[Pass | Repeat, ...]) -> Iterator[PassPlan]:
        """The dispatches of a list of passes, its repeat groups unrolled."""
        steps = dict[int, _Step]()
        turns = planned = 0
        for each, loops in self._unrolled(entries, {}):
            turns += 1
            if turns > MAX_TURNS:
                raise ExpressionError(f"repeat groups of more than {MAX_TURNS} turns")
            if each is None:
                continue
            step = steps.get(id(each))
            if step is None:
                step = steps[id(each)] = _Step(self, each, loops)
            ready = step.plan(loops)
            if ready is not None:
                planned += 1
                if planned > MAX_PASSES:
                    raise ExpressionError(f"more than {MAX_PASSES} passes")
                yield ready

    def _unrolled(
        self, entries: tuple[Pass | Repeat, ...], loops: dict[str, Any]
    ) -> Iterator[tuple[Pass | None, dict[str, Any]]]:
        """Each pass with the names of the groups around it; None for each turn of a group."""
        for entry in entries:
            if isinstance(entry, Pass):
                yield entry, loops
                continue
            value = evaluate(entry.count, {**self.names, **loops})
            count = _whole(value, f"{entry.id}: the repeat count")
            if count > MAX_PASSES:
                raise ExpressionError(f"{entry.id}: more than {MAX_PASSES} passes")
            around = {**loops, f"{entry.index}_count": count}
            for index in range(count):
                yield None, loops
                inside = {**around, "repeat": {"index": index, "count": count}, entry.index: index}
                yield from self._unrolled(entry.passes, inside)

    def bind(self, binding: Binding, names: Mapping[str, Any]) -> Bound:
        """A binding of an array."""
        if binding.source not in self.arrays:
            raise ExpressionError(
                f"the binding {binding.name} needs {binding.source}, which is absent"
            )
        array, spec = self.arrays[binding.source], self.resolved.spec
        element = self._element_type(binding, names, array)
        try:
            least = dtypes.wgsl_bytes(element)
        except ValueError as error:
            raise ExpressionError(f"the binding {binding.name}: {error}") from None
        if array.size // least > _U32:
            raise LimitError(
                f"{array.name} has {counted(array.size // least)} elements of {element}; WGSL "
                f"counts them in u32, up to {_U32:,}"
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

    def _element_type(self, binding: Binding, names: Mapping[str, Any], array: Buffer) -> str:
        wanted, spec = binding.element_type, self.resolved.spec
        if wanted is None:
            port = spec.outputs.get(binding.source) or spec.inputs.get(binding.source)
            own = port is None or port.storage is not None or port.dtype in dtypes.TABLE
            return array.dtype.wgsl if port is None or own else self.scalars[port.dtype]
        if not wanted.startswith("$"):
            return wanted
        name = wanted[1:]
        value = self.scalars.get(name, names["derive"].get(name, UNDEFINED))
        if value is UNDEFINED and name in dtypes.TABLE:
            value = dtypes.TABLE[name].wgsl
        if not isinstance(value, str):
            raise ExpressionError(f"the element type {wanted} of {binding.name} is {show(value)}")
        return value


class _Step:
    """A pass of the manifest, and what its dispatches share.

    In a repeat group it is planned once a turn, of which there may be hundreds. What reads nothing
    that differs from an earlier turn is not made again.
    """

    def __init__(self, planner: _Planner, step: Pass, loops: Mapping[str, Any]):
        self.planner = planner
        self.step = step
        self.label = f"{planner.where}.{step.id}"
        self.template = planner.resolved.spec.templates[step.shader]
        self.changing = {*loops}
        """The names that may have another value in another turn."""
        names = [name for name, _ in step.derive]
        # Whether each derived value has a name of its own, which those before it do not read.
        self.plain = planner.names.keys().isdisjoint([*names, *loops]) and not any(
            reads(value) & {*names[at:]} for at, (_, value) in enumerate(step.derive)
        )
        self.derived = [each for each in step.derive if self._differs(*each) or not self.plain]
        """What is derived in every turn, the rest only once."""
        self.names = extend(planner.names, [e for e in step.derive if e not in self.derived])
        self.watched = dict[object, tuple[str, ...]]()
        self.made = dict[object, Any]()
        self.structs = dict[str, uniforms.Struct]()
        self.bound = dict[str, Bound]()
        self.rebound = list(step.bindings)
        """The bindings that may be another than in the last turn."""
        self.last: PassPlan | None = None
        self.types: tuple[str, ...] = ()
        self.retyped = True
        """Whether the types of the bindings may be others than in the last turn."""

    def _differs(self, name: str, value: Value) -> bool:
        """Whether a derived value may be another in another turn; notes it if so."""
        differs = self.changes(reads(value))
        if differs or not self.plain:
            self.changing.add(name)
        return differs

    def changes(self, names: frozenset[str]) -> bool:
        """Whether what reads these names may differ from turn to turn."""
        return bool(self.changing) and not (self.changing.isdisjoint(names) and EVERY not in names)

    def plan(self, loops: Mapping[str, Any]) -> PassPlan | None:
        """The dispatch in one turn of the groups around it; None if there is nothing to do."""
        step, same = self.step, self.last is not None
        self._enter(loops)
        workgroups = self._once("", step.dispatch.reads, self._workgroups)
        if 0 in workgroups or step.is_view:
            return None
        for each in self.rebound:
            if self.last is not None and each.struct is not None:
                bound = self._bind(each)  # to look whether it was filled so before takes as long
            else:
                bound = self._once(each.name, each.reads, self._bind, each)
            same = same and bound is self.bound[each.name]
            self.bound[each.name] = bound
        bindings = tuple(self.bound.values())
        if self.retyped:
            self.types = tuple([bound.type for bound in bindings])
            self.rebound = [each for each in self.rebound if self.watched[each.name]]
            self.retyped = any(each.struct is None for each in self.rebound)
        code = self._once(self.types, self.template.reads, self._render, bindings)
        last = self.last
        if last and same and last.wgsl is code and last.workgroups == workgroups:
            return last
        size = None
        if self.planner.strict and step.dispatch.workgroup_size is not None:
            size = evaluate(step.dispatch.workgroup_size, self.names)
        self.last = PassPlan(
            self.label, code, bindings, workgroups, step.view_alias, self.template.name, size
        )
        return self.last

    def _enter(self, loops: Mapping[str, Any]) -> None:
        """Makes the scope that of a turn: the last turn's, if nothing of that can show."""
        if not self.plain:
            self.names = extend(self.planner.names, ())
        self.names.update(loops)
        if self.derived:
            derive(self.names, self.derived)

    def _once(self, what: object, reads: frozenset[str], make: Callable[..., T], *given: Any) -> T:
        """What `make` gives, or gave before with the same values in all that it reads.

        `what` tells apart what is made: the dispatch, a binding by its name, WGSL by its types.
        """
        watched = self.watched.get(what)
        if watched is None:
            every = self.changing if EVERY in reads else self.changing & reads
            watched = self.watched[what] = tuple(every)
        key = what
        if watched:
            names = self.names
            key = (what, *[_frozen(names.get(name)) for name in watched])
        found = self.made.get(key)
        if found is None:
            found = self.made[key] = make(*given)
        return found

    def _workgroups(self) -> tuple[int, int, int]:
        workgroups = _workgroups(self.step.dispatch, self.names)
        for axis, groups in zip("xyz", workgroups, strict=True):
            self._check(f"workgroups in {axis}:", groups, "maxComputeWorkgroupsPerDimension")
        return workgroups

    def _bind(self, binding: Binding) -> Bound:
        if binding.struct is not None:
            bound = self._bind_struct(binding, binding.struct)
            if self.last is not None:  # as large as in the last turn
                return bound
        else:
            bound = self.planner.bind(binding, self.names)
        kind = "Uniform" if bound.buffer == "uniform" else "Storage"
        what = f"the binding {bound.name} in bytes:"
        self._check(what, bound.size, f"max{kind}BufferBindingSize", "maxBufferSize")
        return bound

    def _bind_struct(self, binding: Binding, declared: tuple[StructField, ...]) -> Bound:
        """A struct; of its fields only those that may differ are evaluated again."""
        known = self.structs.get(binding.name)
        if known is None:
            known = self.structs[binding.name] = uniforms.Struct(
                declared,
                lambda each: self.changes(reads(each.value)),
                self.names,
                self.planner.args,
            )
        fields, data = known.filled(self.names)
        kind, type_ = binding.buffer or "uniform", binding.struct_name or ""
        return Bound(binding.name, kind, type_, "", len(data), data, fields)

    def _render(self, bindings: tuple[Bound, ...]) -> str:
        planner = self.planner
        text, code = render(
            self.template, bindings, self.names, planner.capabilities, strict=planner.strict
        )
        self._check_workgroup(wgsl.workgroup_size(code))
        return text

    def _check_workgroup(self, declared: Sequence[int]) -> None:
        """The size that the WGSL declares, by the tunable's name where the caller set that."""
        invocations = math.prod(declared)
        _, most = largest_workgroup(self.planner.capabilities)
        if invocations > most:
            check_workgroup_size(self.planner.resolved, self.planner.capabilities)
        for axis, size in zip("XYZ", declared, strict=False):
            self._check("workgroup size", size, f"maxComputeWorkgroupSize{axis}")
        self._check("invocations a workgroup:", invocations, "maxComputeInvocationsPerWorkgroup")

    def _check(self, what: str, need: int, *limits: str) -> None:
        _check(self.planner.capabilities, f"{self.label}: {what}", need, *limits)


def _frozen(value: Any, depth: int = 0) -> Any:
    """A value as something that is equal to another one's only if no template could tell."""
    kind = value.__class__
    if kind is int or kind is str:
        return kind, value
    is_list = is_sequence(value)
    if not is_list and not isinstance(value, Mapping):
        return value.__class__, value
    if depth > 2 or len(value) > 64:  # to look at all of it might have no end
        return _Identity(value)
    if is_list:
        return list, tuple(_frozen(each, depth + 1) for each in value)
    return dict, tuple((key, _frozen(each, depth + 1)) for key, each in value.items())


@dataclass(frozen=True, eq=False)
class _Identity:
    """A value that only itself is equal to, and that lives as long as this does."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


def _check_total(capabilities: Capabilities, where: str, need: int) -> None:
    """WebGPU has no limit for this; but a device has no more memory than a few largest buffers."""
    most = MAX_BUFFERS * capabilities.limit("maxBufferSize")
    if need > most:
        raise LimitError(
            f"{where}: the intermediates in bytes: {counted(need)}; {MAX_BUFFERS} times the "
            f"maxBufferSize of {capabilities.name} is {most:,}"
        )


def _check(capabilities: Capabilities, what: str, need: int, *limits: str) -> None:
    for limit in limits:
        if need > capabilities.limit(limit):
            raise LimitError(
                f"{what} {counted(need)}; {limit} of {capabilities.name} is "
                f"{capabilities.limit(limit):,}"
            )


def _workgroups(dispatch: Dispatch, names: Mapping[str, Any]) -> tuple[int, int, int]:
    if dispatch.x is not None:
        x, y, z = (evaluate(value, names) for value in (dispatch.x, dispatch.y, dispatch.z))
        return _whole(x, "dispatch.x"), _whole(y, "dispatch.y"), _whole(z, "dispatch.z")
    if dispatch.workgroups is not None:
        groups = _whole(evaluate(dispatch.workgroups, names), "dispatch.workgroups")
    else:
        threads = evaluate(dispatch.threads, names)
        size = _whole(evaluate(dispatch.workgroup_size, names), "dispatch.workgroupSize")
        groups = _whole(ceil_div(threads, size), "dispatch.threads / workgroupSize")
    return folded(groups)


def folded(groups: int) -> tuple[int, int, int]:
    """Counts in x and y of at least so many workgroups, of which x alone has too few places."""
    return min(groups, DISPATCH_FOLD_WIDTH), -(-groups // DISPATCH_FOLD_WIDTH), 1


def _whole(value: Any, what: str, least: int = 0) -> int:
    """An exact whole number, never one that was rounded."""
    result = whole(value)
    if result is None or result < least:
        raise ExpressionError(f"{what} comes out as {show(value)}")
    return result


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
