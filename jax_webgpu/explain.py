"""`explain`: what the operators in a JAX function would do on a device, as text; nothing is run."""

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jax_webgpu import device as devices
from jax_webgpu import group, primitive
from jax_webgpu.capabilities import PRESETS, Capabilities
from jax_webgpu.errors import CallError, LimitError
from jax_webgpu.fuse import group_of, is_group
from jax_webgpu.group import Group, Linked, Operation, bytes_of
from jax_webgpu.plan import Plan
from jax_webgpu.primitive import Call, Registered
from jax_webgpu.resolve import Resolved, Tensor
from jax_webgpu.runtime import Operator, may_need_pieces


def explain(f: Callable[..., Any], *args: Any, device: str | None = None, **kwargs: Any) -> "Plans":
    """The plans of the operators that `f(*args, **kwargs)` would run; nothing is run.

    Of functions that `jax_webgpu.fuse` made also the groups: what is in each, the bytes that cross
    to the device and back with it and without, and which arrays share the device's memory.

    Args:
      f: any function that JAX can trace.
      *args: arrays, or `jax.ShapeDtypeStruct`s, in pytrees.
      device: ``"floor"``, ``"apple-m"``, ``"swiftshader"``, ``"lavapipe"`` or ``"h200"``; by
        default the adapter of this machine. With a name, no GPU is needed.
      **kwargs: as `args`; numbers, booleans and strings stay what they are.

    Returns:
      A tuple of plans in the order of the program, which prints as text. Of each, `variant` is
      the variant that was chosen. Its `groups` are those of fused functions. A call whose arrays
      the device cannot bind whole has a plan for each kind of piece that it is cut into; its
      `pieces` say how many there are.

    Raises:
      ValueError: `device` is unknown.
      LimitError: a call needs more than the device's limits, and cannot be cut into pieces.
      DeviceError: the device cannot run one of the calls.
    """
    capabilities = on_device(device)
    static = {
        key: value for key, value in kwargs.items() if isinstance(value, bool | int | float | str)
    }
    traced = {key: value for key, value in kwargs.items() if key not in static}
    jaxpr = jax.make_jaxpr(functools.partial(f, **static))(*args, **traced)
    found = [*_found(jaxpr.jaxpr, capabilities)]
    return Plans(found)


def on_device(name: str | None) -> Capabilities:
    """The capabilities of a preset, or of this machine's device; see `explain`."""
    if name is None:
        return devices.get().capabilities
    if name not in PRESETS:
        raise CallError(f"device is {name!r}; expected one of {', '.join(PRESETS)}, or None")
    return PRESETS[name]


class Plans(tuple[Plan, ...]):
    """Plans that print as text.

    Attributes:
      groups: those of fused functions; the plans of what runs in them are among the plans.
      pieces: the calls that run in pieces, but for those in groups; likewise.
    """

    groups: "tuple[Grouped, ...]"
    pieces: "tuple[Pieces, ...]"

    def __new__(cls, found: "Sequence[Plan | Pieces | Grouped]") -> "Plans":
        """Of plans, calls in pieces and groups in the program's order."""
        made = super().__new__(
            cls,
            [plan for each in found for plan in ([each] if isinstance(each, Plan) else each.plans)],
        )
        made.groups = tuple(each for each in found if isinstance(each, Grouped))
        made.pieces = tuple(each for each in found if isinstance(each, Pieces))
        return made

    def __str__(self) -> str:
        return "\n\n".join(each.describe() for each in (*self.groups, *self.pieces, *self))


@dataclass(frozen=True)
class Pieces:
    """A call that runs in pieces, because the device cannot bind its arrays whole.

    Attributes:
      resolved: the whole call.
      capabilities: the device's.
      plans: of the pieces, equal ones once.
      counts: how many pieces each plan is of.
    """

    resolved: Resolved
    capabilities: Capabilities
    plans: tuple[Plan, ...]
    counts: tuple[int, ...]

    def describe(self) -> str:
        """The pieces as text for a person."""
        most = self.capabilities.most_bound
        lines = [
            f"call      {self.resolved}",
            f"device    {self.capabilities.name}",
            f"pieces    {sum(self.counts)}, of arrays of at most {most:,} bytes",
        ]
        for plan, count in zip(self.plans, self.counts, strict=True):
            lines.append(f"  {count} × {plan.resolved}")
        return "\n".join(lines)


def _planned(operator: Operator, resolved: Resolved, capabilities: Capabilities) -> Plan | Pieces:
    """The plan of a call, or those of the pieces that the host cuts it into."""
    found = Counter[Plan]()
    for piece in _cut(operator, resolved, capabilities):
        found[operator.plan(piece, capabilities)] += 1
        whole = piece is resolved
    if whole:
        return next(iter(found))
    return Pieces(resolved, capabilities, tuple(found), tuple(found.values()))


def _cut(operator: Operator, resolved: Resolved, capabilities: Capabilities) -> Iterator[Resolved]:
    """The calls that a call is run as: as `runtime` cuts it, of arrays that take no memory."""
    try:
        operator.plan(resolved, capabilities)
    except LimitError:
        most = capabilities.most_bound
        if operator.pieces is None or not may_need_pieces(resolved, most):
            raise
        outputs = operator.parts(resolved) if operator.parts else [t for _, t in resolved.outputs]
        arrays = [_hollow(tensor) for _, tensor in resolved.inputs]
        targets = [_hollow(tensor) for tensor in outputs]
        for piece, *_ in operator.pieces(resolved, arrays, targets, most):
            if piece == resolved:
                raise
            yield from _cut(operator, piece, capabilities)
    else:
        yield resolved


def _hollow(tensor: Tensor) -> np.ndarray:
    """An array of this shape without bytes; of whole numbers one zero, which may be an index."""
    if np.dtype(tensor.dtype).kind in "iu":
        return np.broadcast_to(np.int8(0), tensor.shape)
    return np.empty(tensor.shape, "V0")


@dataclass(frozen=True)
class Grouped:
    """A group of a fused function on one kind of device."""

    group: Group
    capabilities: Capabilities
    linked: Linked | None
    """None where its steps run one by one: see `group.link`."""

    @property
    def plans(self) -> list[Plan]:
        """Of the operators that the device runs."""
        if self.linked is None:
            found = [
                _planned(step.operator, step.resolved, self.capabilities)
                for step in self.group.operations
            ]
            return [*Plans(found)]
        return [call.plan for call in self.linked.calls if isinstance(call.plan, Plan)]

    @property
    def bytes_alone(self) -> int:
        """What would cross if each operator crossed on its own."""
        tensors = self.group.tensors
        return sum(
            bytes_of(tensors[number])
            for step in self.group.operations
            for number in (*step.operands, *step.results)
        )

    @property
    def bytes_together(self) -> int:
        """What crosses to the device and back."""
        if self.linked is None:
            return self.bytes_alone
        tensors = self.group.tensors
        crossing = (*(number for number, _ in self.linked.uploads), *self.linked.downloads)
        return sum(bytes_of(tensors[number]) for number in crossing)

    def describe(self) -> str:
        """The group as text for a person."""
        return "\n".join(_lines(self))


def _lines(grouped: Grouped) -> Iterator[str]:
    linked, labels = grouped.linked, _labels(grouped.group)
    members = [
        step.operator.name if isinstance(step, Operation) else step.name
        for step in grouped.group.steps
    ]
    yield f"group     {', '.join(members)}"
    yield f"device    {grouped.capabilities.name}"
    if linked is None:
        yield "crosses   step by step: the device cannot bind or keep all its arrays as they are"
        return
    yield f"crosses   {grouped.bytes_together:,} bytes; alone {grouped.bytes_alone:,}"
    for step in linked.views:
        parts = ", ".join(labels[number] for number in step.results)
        yield f"host      {parts}: views of {labels[step.operands[0]]}"
    for joined in linked.joined.values():
        parts = ", ".join(labels[number] for number in joined.arrays)
        yield f"host      {labels[joined.result]}: put together from {parts}"
    for number, call in enumerate(linked.calls):
        read = ", ".join(_label(linked, labels, array) for array in call.inputs)
        made = ", ".join(labels[array] for array in call.outputs)
        yield f"run {number:<6}{call.plan.label}: {read} -> {made}"
    for index, size in enumerate(linked.program.sizes):
        lives = ", ".join(_label(linked, labels, array) for array in _lives(linked, index))
        yield f"memory    buffer {index}, {size:,} bytes: {lives}"


def _labels(of: Group) -> list[str]:
    """What a person calls the arrays of a group."""
    labels = [""] * len(of.tensors)
    for at, number in enumerate(of.inputs):
        labels[number] = f"input {at}"
    for at, step in enumerate(of.steps):
        if isinstance(step, Operation):
            for (name, _), number in zip(step.resolved.outputs, step.results, strict=True):
                labels[number] = f"{step.operator.name}.{at}.{name}"
        else:
            labels[step.result] = f"{step.name}.{at}"
    return labels


def _label(linked: Linked, labels: Sequence[str], array: int) -> str:
    return labels[array if array < len(labels) else linked.uploads[array - len(labels)][0]]


def _lives(linked: Linked, buffer: int) -> list[int]:
    """The arrays that are in a buffer, in their order."""
    found: dict[int, None] = {}
    launches = iter(linked.program.launches)
    for call in linked.calls:
        ports = (*call.plan.inputs, *call.plan.outputs)
        arrays = dict(
            zip((port.name for port in ports), (*call.inputs, *call.outputs), strict=True)
        )
        for each in call.plan.passes:
            for bound, place in zip(each.bindings, next(launches).places, strict=True):
                if place is not None and place.buffer == buffer and bound.source in arrays:
                    found[arrays[bound.source]] = None
    return list(found)


def _found(jaxpr: Any, capabilities: Capabilities) -> Iterator[Plan | Pieces | Grouped]:
    """What there is in a jaxpr and in those inside it, in the program's order."""
    for equation in jaxpr.eqns:
        if is_group(equation):
            own = group_of(equation)
            yield Grouped(own, capabilities, group.link(own, capabilities))
            continue
        registered = primitive.registered(equation)
        if registered is not None:
            call = equation.params["call"]
            call, tensors = _narrowed(registered, call, primitive.own(call, equation.invars))
            yield _planned(registered.operator, registered.resolve(call, tensors), capabilities)
        for parameter in equation.params.values():
            for inner in parameter if isinstance(parameter, list | tuple) else [parameter]:
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from _found(inner, capabilities)


def _narrowed(
    registered: Registered, call: Call, operands: Sequence[Any]
) -> tuple[Call, tuple[Tensor, ...]]:
    """`Rules.narrow` of operands of which only the types are known."""
    calls = []

    def narrow(*operands: Any) -> Sequence[Any]:
        narrower, narrowed = registered.rules.narrow(call, *operands)
        calls.append(narrower)
        return narrowed

    shapes = [jax.ShapeDtypeStruct(each.aval.shape, each.aval.dtype) for each in operands]
    narrowed = jax.eval_shape(narrow, *shapes)
    return calls[0], primitive.tensors_of(narrowed)
