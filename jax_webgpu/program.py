"""`Program`: plans that run in one submission and hand each other arrays in device memory.

A plan knows its own arrays. A program knows which of them are the same, which come from the host
and go there, and which stay on the device; of these, arrays whose lives do not overlap share a
buffer. Like a plan it needs no device to make.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate

from jax_webgpu.generate import Kernel
from jax_webgpu.plan import PassPlan, Plan

# WebGPU binds nothing that is empty.
_LEAST = 16
# The largest that `minStorageBufferOffsetAlignment` may be.
_ALIGNMENT = 256


@dataclass(frozen=True)
class Call:
    """One plan of a program. Arrays are named by numbers of the caller's choice."""

    plan: Plan | Kernel
    inputs: tuple[int, ...]
    """The array behind each of the plan's inputs; they may repeat."""
    outputs: tuple[int, ...]
    """The array that each of the plan's outputs becomes; each is new."""


@dataclass(frozen=True)
class Place:
    """Where an array lies: a buffer of the program, and bytes from its start."""

    buffer: int
    offset: int = 0


@dataclass(frozen=True)
class Launch:
    """One dispatch of a program."""

    dispatch: PassPlan
    places: tuple[Place | None, ...]
    """Of each binding; None where it holds data of its own."""
    cleared: tuple[int, ...] = ()
    """The buffers that are zeroed before it."""
    copied: tuple[tuple[Place, Place, int], ...] = ()
    """What is copied before it: from where, to where and how many bytes, a multiple of 4."""


@dataclass(frozen=True, eq=False)
class Program:
    """The dispatches of one submission and the buffers that they share.

    Attributes:
      label: for people.
      launches: in order.
      sizes: bytes of each buffer, never 0.
      inputs: where each array lies that comes from the host.
      outputs: where each array lies that goes to the host. In a buffer of these or of `inputs`
        there is nothing else.
    """

    label: str
    launches: tuple[Launch, ...]
    sizes: tuple[int, ...]
    inputs: tuple[Place, ...]
    outputs: tuple[Place, ...]

    @cached_property
    def homes(self) -> "Homes":
        """The buffers of `inputs`, each with the numbers and offsets of those in it."""
        return _by_buffer(self.inputs)

    @cached_property
    def ends(self) -> "Homes":
        """The buffers of `outputs`, likewise."""
        return _by_buffer(self.outputs)


Homes = tuple[tuple[int, tuple[tuple[int, int], ...]], ...]


def _by_buffer(places: Sequence[Place]) -> Homes:
    found = defaultdict[int, list[tuple[int, int]]](list)
    for number, place in enumerate(places):
        found[place.buffer].append((number, place.offset))
    return tuple((buffer, tuple(own)) for buffer, own in found.items())


def link(
    label: str, calls: Sequence[Call], inputs: Sequence[int], outputs: Sequence[int]
) -> Program:
    """Makes plans into a program.

    Arrays that come from the host share a buffer, and those that go there, so that the host maps
    few: unless it would be too large, or a dispatch would read and write it at once. What is an
    input and an output at once is copied first.

    Args:
      label: for people.
      calls: in an order in which each array is made before it is read.
      inputs: the arrays that come from the host, each once.
      outputs: the arrays that go to the host, each once and each made by a call.
    """
    sizes = _bytes_bound(calls)
    most = min((call.plan.capabilities.limit("maxBufferSize") for call in calls), default=0)
    memory = _Memory()
    read = {array for call in calls for array in call.inputs}
    apart = _apart(calls)
    home = memory.pack({a: sizes.get(a, _LEAST) for a in inputs if a not in apart}, most)
    home |= {a: memory.take(sizes.get(a, _LEAST)) for a in inputs if a in apart}
    apart |= read
    home |= memory.pack({a: sizes[a] for a in outputs if a not in apart}, most)
    home |= {a: memory.take(sizes[a]) for a in outputs if a in apart}
    stays = {*home}
    last = {array: at for at, call in enumerate(calls) for array in (*call.inputs, *call.outputs)}
    launches: list[Launch] = []
    for at, call in enumerate(calls):
        plan = call.plan
        home |= {a: memory.take(sizes[a]) for a in call.outputs if a not in home}
        own = {each.name: memory.take(_bound(plan, each.name)) for each in plan.intermediates}
        before = {e.name: home[a] for e, a in zip(plan.inputs, call.inputs, strict=True)}
        after = {e.name: home[a] for e, a in zip(plan.outputs, call.outputs, strict=True)}
        both = (each for each in plan.outputs if each.name in before)
        copied = tuple((before[e.name], after[e.name], e.size) for e in both if e.size)
        places = own | before | after
        cleared = tuple(places[each.name].buffer for each in plan.intermediates if each.zero_init)
        for each in plan.passes:
            at_home = tuple(places[b.source] if b.source else None for b in each.bindings)
            launches.append(Launch(each, at_home, cleared, copied))
            cleared = copied = ()
        memory.give_back(own.values())
        over = {array for array in (*call.inputs, *call.outputs) if last[array] == at} - stays
        memory.give_back(home[array] for array in over)
    return Program(
        label,
        tuple(launches),
        tuple(memory.sizes),
        tuple(home[array] for array in inputs),
        tuple(home[array] for array in outputs),
    )


@lru_cache(maxsize=1024)
def alone(plan: Plan, parts: tuple[int, ...] = ()) -> Program:
    """The program of one plan: its inputs come from the host and its outputs go there.

    Args:
      plan: of any call.
      parts: where the only output goes to the host as several arrays, the bytes of each.
    """
    inputs = tuple(range(len(plan.inputs)))
    outputs = tuple(range(len(inputs), len(inputs) + len(plan.outputs)))
    program = link(plan.label, [Call(plan, inputs, outputs)], inputs, outputs)
    if not parts:
        return program
    (whole,) = program.outputs
    starts = accumulate(parts[:-1], initial=whole.offset)
    return replace(program, outputs=tuple(Place(whole.buffer, start) for start in starts))


def _apart(calls: Iterable[Call]) -> set[int]:
    """The inputs that some pass may write and the outputs that some pass only reads.

    A dispatch cannot bind one buffer both ways, whatever the ranges.
    """
    apart = set[int]()
    for call in calls:
        bound = [b for each in call.plan.passes for b in each.bindings]
        read = {b.source for b in bound if b.buffer != "storage"}
        written = {b.source for b in bound if b.buffer == "storage"}
        written -= {port.name for port in call.plan.outputs}  # of what is both, a copy is written
        inputs = zip(call.plan.inputs, call.inputs, strict=True)
        outputs = zip(call.plan.outputs, call.outputs, strict=True)
        apart |= {array for port, array in inputs if port.name in written}
        apart |= {array for port, array in outputs if port.name in read}
    return apart


def _bytes_bound(calls: Iterable[Call]) -> dict[int, int]:
    sizes = defaultdict[int, int](int)
    for call in calls:
        buffers = (*call.plan.inputs, *call.plan.outputs)
        for array, buffer in zip((*call.inputs, *call.outputs), buffers, strict=True):
            sizes[array] = max(sizes[array], buffer.size, _bound(call.plan, buffer.name))
    return sizes


def _bound(plan: Plan | Kernel, name: str) -> int:
    """The most bytes that a pass binds of one of a plan's arrays."""
    bound = (b.size for each in plan.passes for b in each.bindings if b.source == name)
    return max(_LEAST, *bound, 0)


class _Memory:
    """Buffers in which arrays are placed; one that is given back may be taken again, and grow."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.free: list[int] = []

    def take(self, size: int) -> Place:
        """A free buffer that is large enough, else the largest one, else a new one."""
        fitting = [index for index in self.free if self.sizes[index] >= size]
        if fitting:
            index = min(fitting, key=self.sizes.__getitem__)
        elif self.free:
            index = max(self.free, key=self.sizes.__getitem__)
        else:
            self.sizes.append(size)
            return Place(len(self.sizes) - 1)
        self.free.remove(index)
        self.sizes[index] = max(self.sizes[index], size)
        return Place(index)

    def pack(self, sizes: dict[int, int], most: int) -> dict[int, Place]:
        """One new buffer for several arrays, of at most `most` bytes; else one for each."""
        offsets, end = dict[int, int](), 0
        for array, size in sizes.items():
            offsets[array] = -(-end // _ALIGNMENT) * _ALIGNMENT
            end = offsets[array] + size
        if end > most:
            return {array: self.take(size) for array, size in sizes.items()}
        if sizes:
            self.sizes.append(end)
        return {array: Place(len(self.sizes) - 1, offset) for array, offset in offsets.items()}

    def give_back(self, places: Iterable[Place]) -> None:
        self.free.extend(place.buffer for place in places)
