"""Which nodes of a program run together: groups that are convex and that pay for themselves.

A group waits for all that it reads before any of it runs. So no path may leave a group and come
back: with the groups contracted to a node each, the graph must stay without cycles.
"""

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import inf
from typing import Any


@dataclass(frozen=True)
class Node:
    """One step of a program. Values are named by numbers.

    Attributes:
      kind: ``operator`` is what a group is made for, ``made`` can run in one, ``outside`` cannot.
        ``joined`` is made too, and costs nothing at the end of a group: it puts together arrays
        as they leave.
      reads: the values that it needs.
      writes: the values that it makes.
      after: nodes that it must follow though it reads nothing of theirs; all of them outside.
      setting: nodes of a group agree in it, where they have one.
    """

    kind: str
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    after: tuple[int, ...] = ()
    setting: object = None


def partition(
    nodes: Sequence[Node], sizes: Sequence[int], results: Iterable[int]
) -> list[tuple[int, ...]]:
    """Groups the nodes of a program.

    Of the nodes that are no operators those are taken with which the fewest bytes cross between
    the device and the rest, which is a minimum cut, and of equal cuts the one with the fewest
    nodes. The edges between what is taken follow by falling size: the two groups at the ends of
    each become one where the graph stays without cycles. Where cycles have kept groups apart, nodes
    at a border leave it unless fewer bytes cross with them. Then groups that do not wait for each
    other become one. A group stays if fewer bytes cross than if each of its operators crossed
    alone, or as many in fewer crossings.

    Args:
      nodes: in an order in which each value is written before it is read.
      sizes: bytes of each value.
      results: the values that the program returns.

    Returns:
      The groups, each in the program's order.
    """
    graph = _Graph(nodes, results)
    taken = _cut(graph, sizes)
    edges = [
        (-sizes[value], reader, writer)
        for value, writer in graph.writer.items()
        for reader in graph.readers.get(value, ())
        if writer in taken and reader in taken
    ]
    for _, reader, writer in sorted(edges):
        graph.merge(writer, reader)
    for group in graph.groups():
        for node in _border(graph, group, sizes):
            graph.leave(node)
    for node, each in enumerate(nodes):
        for writer in [graph.writer[value] for value in each.reads if value in graph.writer]:
            if each.kind == "joined" and graph.holds_operator(writer):
                graph.merge(writer, node)
    for one, other in combinations([group[0] for group in graph.groups()], 2):
        graph.merge(one, other)
    return [group for group in graph.groups() if _pays(graph, group, sizes)]


def order(nodes: Sequence[Node], groups: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """The program as groups and single nodes, in an order in which it can run."""
    unit_of = {node: group for group in groups for node in group}
    units = dict.fromkeys(unit_of.get(node, (node,)) for node in range(len(nodes)))
    writer = {value: node for node, each in enumerate(nodes) for value in each.writes}
    done: dict[tuple[int, ...], None] = {}
    stack = list(reversed(units))
    while stack:
        unit = stack[-1]
        before = {
            unit_of.get(node, (node,))
            for member in unit
            for node in (
                *(writer[value] for value in nodes[member].reads if value in writer),
                *nodes[member].after,
            )
        }
        waiting = sorted(other for other in before - {unit} if other not in done)
        if waiting:
            stack += reversed(waiting)
            continue
        done[stack.pop()] = None
    return list(done)


def crossing(
    nodes: Sequence[Node], sizes: Sequence[int], results: Iterable[int], group: Iterable[int]
) -> int:
    """Bytes that a group reads from outside and that it writes for outside."""
    return _crossing(_Graph(nodes, results), set(group), sizes)


class _Graph:
    """The nodes, and the groups that they are in, with who comes before and after whom.

    Sets of nodes are bits of integers: for a program of a thousand nodes that is quick enough.
    """

    def __init__(self, nodes: Sequence[Node], results: Iterable[int]):
        self.nodes = nodes
        self.results = frozenset(results)
        self.writer = {value: node for node, each in enumerate(nodes) for value in each.writes}
        self.readers: dict[int, list[int]] = {}
        for node, each in enumerate(nodes):
            for value in dict.fromkeys(each.reads):
                self.readers.setdefault(value, []).append(node)
        # Of each node, as bits: its group, what that waits for, and what waits for it.
        self.group = [1 << node for node in range(len(nodes))]
        self.before = [0] * len(nodes)
        self.behind = [0] * len(nodes)
        for node, each in enumerate(nodes):
            direct = {self.writer[value] for value in each.reads if value in self.writer}
            for earlier in {*direct, *each.after}:
                self.before[node] |= self.before[earlier] | 1 << earlier
            for earlier in _bits(self.before[node]):
                self.behind[earlier] |= 1 << node

    def merge(self, one: int, other: int) -> None:
        """Makes two groups one, unless some third node must run between them."""
        if self.group[one] & 1 << other or not self._agree(one, other):
            return
        between = self.before[one] & self.behind[other] | self.before[other] & self.behind[one]
        group = self.group[one] | self.group[other]
        if between & ~group:
            return
        before = (self.before[one] | self.before[other]) & ~group
        behind = (self.behind[one] | self.behind[other]) & ~group
        for node in _bits(group):
            self.group[node], self.before[node], self.behind[node] = group, before, behind
        for node in _bits(behind):
            self.before[node] |= before | group
        for node in _bits(before):
            self.behind[node] |= behind | group

    def _agree(self, one: int, other: int) -> bool:
        members = _bits(self.group[one] | self.group[other])
        settings = [self.nodes[node].setting for node in members]
        return len({each for each in settings if each is not None}) < 2

    def leave(self, node: int) -> None:
        """Takes a node at the border out of its group.

        What `before` and `behind` say of the others stays: it may name more than need be, which
        is safe.
        """
        rest = self.group[node] & ~(1 << node)
        direct = {self.writer[value] for value in self.nodes[node].reads if value in self.writer}
        first = not any(rest >> earlier & 1 for earlier in direct)
        for other in _bits(rest):
            self.group[other] = rest
            if first:
                self.before[other] |= 1 << node
            else:
                self.behind[other] |= 1 << node
        if first:
            self.behind[node] |= rest
        else:
            self.before[node] |= rest
        self.group[node] = 1 << node

    def holds_operator(self, node: int) -> bool:
        return any(self.nodes[each].kind == "operator" for each in _bits(self.group[node]))

    def groups(self) -> list[tuple[int, ...]]:
        """The groups that hold an operator."""
        distinct = dict.fromkeys(
            self.group[node] for node, each in enumerate(self.nodes) if each.kind == "operator"
        )
        return [tuple(_bits(group)) for group in distinct]


def _bits(number: int) -> list[int]:
    found = []
    while number:
        low = number & -number
        found.append(low.bit_length() - 1)
        number ^= low
    return found


def _crossing(graph: _Graph, group: set[int], sizes: Sequence[int]) -> int:
    group = group - {
        node
        for node in group
        if graph.nodes[node].kind == "joined"
        and not any(
            reader in group
            for value in graph.nodes[node].writes
            for reader in graph.readers.get(value, ())
        )
    }
    read = {value for node in group for value in graph.nodes[node].reads}
    written = {value for node in group for value in graph.nodes[node].writes}
    kept = {
        value
        for value in written
        if value in graph.results or not set(graph.readers.get(value, ())) <= group
    }
    return sum(sizes[value] for value in (read - written) | kept)


def _border(graph: _Graph, group: tuple[int, ...], sizes: Sequence[int]) -> list[int]:
    """The nodes that leave a group, in their order: with each as few bytes cross, or fewer."""
    inside, leaving = set(group), list[int]()
    waiting = True
    while waiting:
        waiting = False
        for node in sorted(inside):
            each = graph.nodes[node]
            if each.kind == "operator":
                continue
            first = not any(graph.writer.get(value) in inside for value in each.reads)
            last = not any(
                reader in inside for value in each.writes for reader in graph.readers.get(value, ())
            )
            if (first or last) and _crossing(graph, inside - {node}, sizes) <= _crossing(
                graph, inside, sizes
            ):
                inside.remove(node)
                leaving.append(node)
                waiting = True
    return leaving


def _pays(graph: _Graph, group: tuple[int, ...], sizes: Sequence[int]) -> bool:
    """Whether fewer bytes cross than if each operator crossed alone, or as many in fewer calls."""
    operators = [node for node in group if graph.nodes[node].kind == "operator"]
    alone = sum(_crossing(graph, {node}, sizes) for node in operators)
    together = _crossing(graph, set(group), sizes)
    return together < alone or (together == alone and len(operators) > 1)


def _cut(graph: _Graph, sizes: Sequence[int]) -> set[int]:
    """The nodes on the device's side of a minimum cut: all operators, none that must be outside.

    A value costs its size where some of its writer and readers are on one side and some on the
    other. In the flow network it is two points with an edge of its size between them, which each of
    those nodes reaches and is reached from.
    """
    device: Any
    rest: Any
    device, rest = "device", "rest"
    left: dict[Any, dict[Any, float]] = defaultdict(lambda: defaultdict(float))

    def point(node: int | None) -> Any:
        kind = "outside" if node is None else graph.nodes[node].kind
        return device if kind == "operator" else rest if kind == "outside" else node

    for value in {*graph.writer, *graph.readers}:
        ends = {point(graph.writer.get(value)), *map(point, graph.readers.get(value, ()))}
        if value in graph.results:
            ends.add(rest)
        if len(ends) > 1:
            left["in", value]["out", value] = sizes[value]
            for end in ends:
                left[end]["in", value] = left["out", value][end] = inf
    while True:
        # The way to each point that is reached, breadth first.
        came: dict[Any, Any] = {device: device}
        waiting = deque[Any]([device])
        while waiting and rest not in came:
            here = waiting.popleft()
            for there, capacity in left[here].items():
                if capacity > 0 and there not in came:
                    came[there] = here
                    waiting.append(there)
        if rest not in came:
            break
        steps, there = list[tuple[Any, Any]](), rest
        while there != device:
            steps.append((came[there], there))
            there = came[there]
        most = min(left[one][other] for one, other in steps)
        for one, other in steps:
            left[one][other] -= most
            left[other][one] += most
    return {
        node
        for node, each in enumerate(graph.nodes)
        if each.kind == "operator" or (each.kind != "outside" and node in came)
    }
