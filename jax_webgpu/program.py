"""`Program`: plans that run in one submission and hand each other arrays in device memory.

A plan knows its own arrays. A program knows which of them are the same, which come from the host
and go there, and which stay on the device; of these, arrays whose lives do not overlap share a
buffer. Like a plan it needs no device to make.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from jax_webgpu.plan import PassPlan, Plan

# A buffer's least size: WebGPU binds nothing that is empty, and maps multiples of 8.
_LEAST = 16


@dataclass(frozen=True)
class Call:
    """One plan of a program. Arrays are named by numbers of the caller's choice."""

    plan: Plan
    inputs: tuple[int, ...]
    """The array behind each of the plan's inputs; they may repeat."""
    outputs: tuple[int, ...]
    """The array that each of the plan's outputs becomes; each is new."""


@dataclass(frozen=True)
class Launch:
    """One dispatch of a program."""

    dispatch: PassPlan
    buffers: tuple[int | None, ...]
    """For each binding the index of the program's buffer; None where it holds data of its own."""
    cleared: tuple[int, ...] = ()
    """The buffers that are zeroed before it."""


@dataclass(frozen=True, eq=False)
class Program:
    """The dispatches of one submission and the buffers that they share.

    Attributes:
      label: for people.
      launches: in order.
      sizes: bytes of each buffer, never 0.
      inputs: the buffer of each array that comes from the host.
      outputs: the buffer of each array that goes to the host. No other array is kept in one of
        these or of `inputs`.
    """

    label: str
    launches: tuple[Launch, ...]
    sizes: tuple[int, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


def link(
    label: str, calls: Sequence[Call], inputs: Sequence[int], outputs: Sequence[int]
) -> Program:
    """Makes plans into a program.

    Args:
      label: for people.
      calls: in an order in which each array is made before it is read.
      inputs: the arrays that come from the host, each once.
      outputs: the arrays that go to the host, each once and each made by a call.
    """
    memory = _Memory()
    home = {array: memory.take(_LEAST) for array in (*inputs, *outputs)}
    last = {array: at for at, call in enumerate(calls) for array in (*call.inputs, *call.outputs)}
    launches: list[Launch] = []
    for at, call in enumerate(calls):
        plan = call.plan
        names = dict(zip((buffer.name for buffer in plan.inputs), call.inputs, strict=True))
        names |= zip((buffer.name for buffer in plan.outputs), call.outputs, strict=True)
        bound = {
            name: max([_LEAST, buffer.size, *_bound_sizes(plan, name)])
            for buffer in (*plan.inputs, *plan.outputs, *plan.intermediates)
            if (name := buffer.name)
        }
        own = {}
        for buffer in (*plan.outputs, *plan.intermediates):
            array = names.get(buffer.name)
            if array in home:
                continue
            taken = memory.take(bound[buffer.name])
            if array is None:
                own[buffer.name] = taken
            else:
                home[array] = taken
        at_home = own | {name: home[array] for name, array in names.items()}
        for name, size in bound.items():
            memory.grow(at_home[name], size)
        cleared = tuple(at_home[array.name] for array in plan.intermediates if array.zero_init)
        for each in plan.passes:
            buffers = tuple(at_home[b.source] if b.source else None for b in each.bindings)
            launches.append(Launch(each, buffers, cleared))
            cleared = ()
        for buffer_index in own.values():
            memory.give_back(buffer_index)
        for array in {*call.inputs, *call.outputs} - {*inputs, *outputs}:
            if last[array] == at:
                memory.give_back(home[array])
    return Program(
        label,
        tuple(launches),
        tuple(memory.sizes),
        tuple(home[array] for array in inputs),
        tuple(home[array] for array in outputs),
    )


@lru_cache(maxsize=1024)
def alone(plan: Plan) -> Program:
    """The program of one plan: its inputs come from the host and its outputs go there."""
    inputs = tuple(range(len(plan.inputs)))
    outputs = tuple(range(len(inputs), len(inputs) + len(plan.outputs)))
    return link(plan.label, [Call(plan, inputs, outputs)], inputs, outputs)


def _bound_sizes(plan: Plan, name: str) -> list[int]:
    return [b.size for each in plan.passes for b in each.bindings if b.source == name]


class _Memory:
    """Buffers that are taken and given back; a free one grows if that wastes least."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.free: list[int] = []

    def take(self, size: int) -> int:
        fitting = [index for index in self.free if self.sizes[index] >= size]
        if fitting:
            index = min(fitting, key=self.sizes.__getitem__)
        elif self.free:
            index = max(self.free, key=self.sizes.__getitem__)
        else:
            self.sizes.append(size)
            return len(self.sizes) - 1
        self.free.remove(index)
        self.grow(index, size)
        return index

    def grow(self, index: int, size: int) -> None:
        self.sizes[index] = max(self.sizes[index], size)

    def give_back(self, index: int) -> None:
        self.free.append(index)
