"""Steps that cross to the device together: NumPy arrays in and out, one submission between.

Like `runtime`, which runs one call, nothing here may touch JAX.
"""

import functools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from jax_webgpu import device, generate, program, runtime
from jax_webgpu.capabilities import Capabilities
from jax_webgpu.errors import LimitError
from jax_webgpu.generate import Constant, Step
from jax_webgpu.plan import Buffer, Plan
from jax_webgpu.program import Call, Program
from jax_webgpu.resolve import Pairs, Resolved, Tensor
from jax_webgpu.runtime import Arrays, Dispatcher, Operator


@dataclass(frozen=True)
class Operation:
    """A call of one of our operators. Arrays are named by numbers."""

    operator: Operator
    resolved: Resolved
    static: Pairs
    operands: tuple[int, ...]
    results: tuple[int, ...]

    @property
    def arrays(self) -> tuple[int, ...]:
        return self.operands

    @property
    def read(self) -> tuple[int, ...]:
        """The operands that go to the device; what is beyond them is checked alone."""
        return self.operands[: len(self.resolved.inputs)]


@dataclass(frozen=True)
class Group:
    """What runs together. Hashable; equal groups are equal.

    Attributes:
      tensors: of each array, by its number.
      steps: in order; a `generate.Step` named ``reshape`` costs nothing.
      inputs: the arrays that come from the host.
      outputs: the arrays that go there.
      place: which of the inputs is the place in a mesh, if one is.
    """

    tensors: tuple[Tensor, ...]
    steps: tuple[Operation | Step, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    place: int | None = None

    @functools.cached_property
    def homes(self) -> tuple[int, ...]:
        """For each array the one that has the same bytes: reshaping makes no new ones."""
        homes = list(range(len(self.tensors)))
        for step in self.steps:
            if isinstance(step, Step) and step.name == "reshape":
                (source,) = step.arrays
                homes[step.result] = homes[source]
        return tuple(homes)

    @property
    def operations(self) -> Iterator[Operation]:
        return (step for step in self.steps if isinstance(step, Operation))


@dataclass(frozen=True, eq=False)
class Linked:
    """A group on one kind of device.

    Attributes:
      program: what the device runs.
      views: what the host does as it copies: the results are views of an input.
      joined: likewise, by result: the operands are parts of an output.
      uploads: for each of the program's inputs the array, and the port that wants it in another
        dtype than it has, if one does.
      downloads: for each of the program's outputs the array.
      calls: of the program, in order.
    """

    program: Program
    views: tuple[Operation, ...]
    joined: Mapping[int, Step]
    uploads: tuple[tuple[int, Buffer | None], ...]
    downloads: tuple[int, ...]
    calls: tuple[Call, ...]


@dataclass(frozen=True, eq=False)
class Runner:
    """A group, to be run again and again; what a device runs for it is kept there."""

    group: Group

    def __call__(self, outputs: Arrays, inputs: Arrays) -> None:
        """Runs the group on a device of this process, waits for it, and fills the outputs.

        Raises:
          ValueError: an operator does not admit a value.
          DeviceError: the device cannot run it, or failed.
        """
        group = self.group
        arrays = dict(zip(group.inputs, inputs, strict=True))
        for step in group.operations:
            if step.operator.check is not None:
                shown = [_shown(group, arrays, number) for number in step.operands]
                step.operator.check(step.static, shown)
        place = 0 if group.place is None else int(inputs[group.place])

        def run(gpu: device.Device) -> None:
            if (kept := gpu.linked.get(self)) is None:
                kept = gpu.linked[self] = (link(group, gpu.capabilities),)
            (linked,) = kept
            if linked is None:
                _run_apart(group, arrays, outputs, place)
            else:
                _run(group, linked, gpu, arrays, outputs)

        device.on_device(run, place)


def _run(
    group: Group,
    linked: Linked,
    gpu: device.Device,
    arrays: Mapping[int, np.ndarray],
    outputs: Arrays,
) -> None:
    # Bytes from here on: in one row, or in several with gaps between them.
    known = {number: _raw(array) for number, array in arrays.items()}
    for view in linked.views:
        known |= zip(view.results, _views(view, known[group.homes[view.operands[0]]]), strict=True)
    targets = [
        target
        for number, output in zip(group.outputs, outputs, strict=True)
        for target in _targets(group, linked, number, _raw(output))
    ]
    landing: dict[int, np.ndarray] = {}
    for home, target in targets:
        landing.setdefault(home, target)
    uploads = [
        known[number] if port is None else runtime.to_storage(arrays[number], port)
        for number, port in linked.uploads
    ]
    gpu.run(linked.program, uploads, [landing[number] for number in linked.downloads])
    known = landing | known
    for home, target in targets:
        if known[home] is not target:
            target[...] = known[home].reshape(target.shape)


def _raw(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _views(view: Operation, raw: np.ndarray) -> list[np.ndarray]:
    assert view.operator.views is not None
    ((_, tensor),) = view.resolved.inputs
    source = raw.view(tensor.dtype).reshape(tensor.shape)
    return [each.view(np.uint8) for each in view.operator.views(view.resolved, source)]


def _targets(
    group: Group, linked: Linked, number: int, raw: np.ndarray
) -> Iterator[tuple[int, np.ndarray]]:
    """The arrays that an output is made of, and where their bytes go."""
    home = group.homes[number]
    if home not in linked.joined:
        yield home, raw
        return
    step = linked.joined[home]
    (axis,) = step.parameters
    rows, start = math.prod(group.tensors[home].shape[:axis]), 0
    matrix = raw.reshape(rows, -1)
    for part in step.arrays:
        width = bytes_of(group.tensors[part]) // rows
        yield group.homes[part], matrix[:, start : start + width]
        start += width


def link(group: Group, capabilities: Capabilities) -> Linked | None:
    """Plans a group for a device.

    Returns:
      None where the device must have it in pieces, or keeps an array in another dtype than JAX.
    """
    homes, tensors = group.homes, group.tensors
    steps = [step for step in group.steps if isinstance(step, Operation) or step.name != "reshape"]
    readers = Counter(homes[n] for step in steps for n in set(step.arrays))
    inputs, outputs = {*group.inputs}, {homes[number] for number in group.outputs}
    views = [
        step
        for step in steps
        if isinstance(step, Operation) and _is_view(step, homes, inputs, readers)
    ]
    joined = {
        step.result: step
        for step in steps
        if isinstance(step, Step) and _is_joined(step, outputs, readers)
    }
    on_host = inputs.union(*(view.results for view in views))
    steps = [
        step
        for step in steps
        if step not in views and (isinstance(step, Operation) or step.result not in joined)
    ]
    plans: list[Plan] = []
    stored = (outputs - {*joined}).union(homes[n] for step in joined.values() for n in step.arrays)
    downloads = stored - on_host
    for step in steps:
        if isinstance(step, Operation):
            own = _planned(step, tensors, homes, inputs, capabilities)
            if own is None:
                return None
            plans.append(own)
            stored |= {homes[number] for number in step.read}
    made = [step for step in steps if isinstance(step, Step)]
    kernels = generate.kernels(made, tensors, homes, stored - on_host, capabilities)
    if not all(_bindable(kernel, capabilities) for kernel in kernels.values()):
        return None
    planned = iter(plans)
    calls: list[Call] = []
    # Of what comes from the host, each dtype that a port wants it in is an array of its own.
    uploads: dict[tuple[int, Buffer | None], int] = {}

    def on_device(home: int, port: Buffer | None = None) -> int:
        if home not in on_host:
            return home
        return uploads.setdefault((home, port), len(tensors) + len(uploads))

    for step in steps:
        if isinstance(step, Operation):
            plan = next(planned)
            read = [
                on_device(homes[n], None if _as_it_is(tensors[n], port) else port)
                for n, port in zip(step.read, plan.inputs, strict=True)
            ]
            calls.append(Call(plan, tuple(read), step.results))
        elif step.result in kernels:
            kernel = kernels[step.result]
            read = [on_device(array) for array in kernel.reads]
            calls.append(Call(kernel, tuple(read), (step.result,)))
    ordered = tuple(sorted(downloads))
    return Linked(
        program.link("group", calls, list(uploads.values()), ordered),
        tuple(views),
        joined,
        tuple(uploads),
        ordered,
        tuple(calls),
    )


def _is_view(
    step: Operation, homes: Sequence[int], inputs: set[int], readers: Mapping[int, int]
) -> bool:
    """Whether a step only cuts an array that comes from the host, which nothing else reads."""
    source = homes[step.operands[0]]
    return step.operator.views is not None and source in inputs and readers[source] == 1


def _is_joined(step: Step, outputs: set[int], readers: Mapping[int, int]) -> bool:
    """Whether a step only puts an array together that leaves for the host."""
    return step.name == "concatenate" and step.result in outputs and not readers[step.result]


def _planned(
    step: Operation,
    tensors: Sequence[Tensor],
    homes: Sequence[int],
    inputs: set[int],
    capabilities: Capabilities,
) -> Plan | None:
    """The plan of an operation, if it can hand its arrays to others on the device."""
    try:
        plan = step.operator.plan(step.resolved, capabilities)
    except LimitError:
        return None
    plan.check_written()
    ports = [*zip(step.results, plan.outputs, strict=True)]
    ports += [
        (number, port)
        for number, port in zip(step.read, plan.inputs, strict=True)
        if homes[number] not in inputs
    ]
    return plan if all(_as_it_is(tensors[number], port) for number, port in ports) else None


def _as_it_is(tensor: Tensor, port: Buffer) -> bool:
    """Whether a port takes the bytes of an array that JAX has."""
    return bytes_of(tensor) == port.dtype.bytes * math.prod(port.tensor.shape)


def bytes_of(tensor: Tensor) -> int:
    """The bytes of an array as JAX has it."""
    return int(math.prod(tensor.shape) * np.dtype(tensor.dtype).itemsize)


def _bindable(kernel: generate.Kernel, capabilities: Capabilities) -> bool:
    return all(
        buffer.size <= capabilities.most_bound for buffer in (*kernel.inputs, *kernel.outputs)
    )


def _shown(group: Group, arrays: dict[int, np.ndarray], number: int) -> np.ndarray:
    """An operand for a check, which looks at the values of those alone that come from the host."""
    if number in arrays:
        return arrays[number]
    tensor = group.tensors[number]
    return np.broadcast_to(np.zeros((), tensor.dtype), tensor.shape)


def _run_apart(group: Group, arrays: dict[int, np.ndarray], outputs: Arrays, place: int) -> None:
    """Step by step: each operator crosses on its own, and NumPy does what is between."""
    arrays = dict(arrays)
    for step in group.steps:
        if isinstance(step, Operation):
            made = [
                np.empty(t.shape, t.dtype) for t in map(group.tensors.__getitem__, step.results)
            ]
            operands = [arrays[number] for number in step.operands]
            Dispatcher(step.operator, step.resolved, step.static)(operands, made, place)
            arrays |= zip(step.results, made, strict=True)
        else:
            values = [
                np.asarray(each.value, each.dtype) if isinstance(each, Constant) else arrays[each]
                for each in step.operands
            ]
            arrays[step.result] = generate.evaluate(step, values, group.tensors[step.result])
    for number, output in zip(group.outputs, outputs, strict=True):
        np.copyto(output, arrays[number])
