"""Small calls of a kernel, tried one after the other to find one that each variant takes.

A manifest does not say what calls there are. The cases of its `test.json` come first. Then a search
starts from a common shape and changes one thing at a time, a shape, a dtype, an attribute, what is
present, so that fewer of the variant's conditions fail.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from jax_webgpu import variants
from jax_webgpu.capabilities import IDEAL
from jax_webgpu.errors import JaxWebGPUError
from jax_webgpu.resolve import Resolved, Tensor, extend, resolve, scope
from jax_webgpu.spec import Spec
from jax_webgpu.values import UNDEFINED

# Calls that are tried for a variant, at most.
MOST = 1500

Shape = tuple[int, ...]

# Of the first input. Even and odd, small and large enough for tiles, of every usual rank.
_STARTS: tuple[Shape, ...] = (
    (4, 8),
    (2, 3, 4, 8),
    (2, 4, 32),
    (2, 3, 5, 12),
    (2, 4, 24),
    (3, 5),
    (16,),
    (2, 3, 5),
    (64, 64),
    (2, 3, 5, 6),
    (7,),
    (300, 260),
    (),
    (2, 3, 8, 8, 4),
)


def alone(spec: Spec, variant: str) -> Spec:
    """The manifest with one variant, so that no other is chosen in its place."""
    own = replace(spec.variant(variant), superseded_by=())
    return replace(spec, variants=(own,), digest=f"{spec.digest} {variant}")


def calls(spec: Spec, first: Iterable[Resolved] = ()) -> dict[str, Resolved]:
    """A call for each variant that one is found for, of `alone`'s manifest.

    Args:
      spec: the manifest.
      first: calls that are tried before the made-up ones.
    """
    first = tuple(first)
    found = dict[str, Resolved]()
    for variant in spec.variants:
        own = alone(spec, variant.id)
        given = (replace(call, spec=own) for call in first)
        call = next((each for each in given if _misses(each) == 0), None) or _search(own)
        if call is not None:
            found[variant.id] = call
    return found


@dataclass(frozen=True)
class _Draft:
    """A call that may become one: what is None is left out."""

    shapes: tuple[Shape | None, ...]
    types: tuple[str, ...]
    attributes: tuple[Any, ...]
    outputs: int
    """How many of the optional ones."""


def _search(spec: Spec) -> Resolved | None:
    left = MOST
    for start in _STARTS:
        draft = _start(spec, start)
        best, seen = _tried(spec, draft), {draft}
        moved = True
        while moved and left > 0:
            moved = False
            for other in _near(spec, draft, start):
                if other in seen:
                    continue
                seen.add(other)
                left -= 1
                tried = _tried(spec, other)
                if tried[0] < best[0]:
                    draft, best, moved = other, tried, True
                if best[0] == 0:
                    return best[1]
    return None


def _start(spec: Spec, shape: Shape) -> _Draft:
    return _Draft(
        tuple(None if port.optional else shape for port in spec.inputs.values()),
        tuple(allowed[0] for allowed in spec.type_constraints.values()),
        tuple(each.default for each in spec.attributes.values()),
        0,
    )


def _near(spec: Spec, draft: _Draft, start: Shape) -> Iterator[_Draft]:
    """Drafts that differ in one thing."""
    for at, port in enumerate(spec.inputs.values()):
        for shape in [*_beside(start), *([None] if port.optional else [])]:
            yield replace(draft, shapes=(*draft.shapes[:at], shape, *draft.shapes[at + 1 :]))
    for one in {*draft.shapes[1:]} - {None}:  # tables often go in pairs
        for shape in _beside(start):
            pair = (shape if own == one else own for own in draft.shapes[1:])
            yield replace(draft, shapes=(draft.shapes[0], *pair))
    for at, attribute in enumerate(spec.attributes.values()):
        for value in _values(attribute.default, attribute.values):
            changed = (*draft.attributes[:at], value, *draft.attributes[at + 1 :])
            yield replace(draft, attributes=changed)
    for at, allowed in enumerate(spec.type_constraints.values()):
        for dtype in allowed:
            yield replace(draft, types=(*draft.types[:at], dtype, *draft.types[at + 1 :]))
    for count in range(1 + sum(port.optional for port in spec.outputs.values())):
        yield replace(draft, outputs=count)


def _beside(shape: Shape) -> tuple[Shape, ...]:
    """The shapes that inputs have beside one of a shape: its own, parts of it, tables."""
    if not shape:
        return ((),)
    half = shape[-1] // 2
    quarter = shape[-1] // 4
    found = [
        shape,
        shape[-1:],
        (*shape[:-1], 1),
        (),
        (*shape[:-2], *shape[:-3:-1]),
        (shape[-1], 12),
        shape[:-1],
    ]
    if len(shape) > 1:
        found += [shape[-2:][::-1], (shape[0], shape[-2])]
        found += [(shape[0], shape[-2], width) for width in (half, quarter)]
    return tuple(dict.fromkeys([*found, (9, half), (9, quarter), (shape[0], 3, 6)]))


def _values(default: Any, admitted: tuple[Any, ...] | None) -> tuple[Any, ...]:
    if admitted is not None:
        return (default, *admitted)
    if default is UNDEFINED or isinstance(default, int | float):
        return (default, 1, 2, 3, 4, 0, -1)
    if isinstance(default, tuple):
        return (default, (0,), (1,), (0, 1), (1, 0))
    return (default,)


def _tried(spec: Spec, draft: _Draft) -> tuple[float, Resolved | None]:
    """How many conditions fail, and the call."""
    types = dict(zip(spec.type_constraints, draft.types, strict=True))
    inputs = {
        name: Tensor(shape, types.get(port.dtype, port.dtype))
        for (name, port), shape in zip(spec.inputs.items(), draft.shapes, strict=True)
        if shape is not None
    }
    given = zip(spec.attributes, draft.attributes, strict=True)
    attributes = {name: value for name, value in given if value is not UNDEFINED}
    optional = [name for name, port in spec.outputs.items() if port.optional]
    asked = [n for n in spec.outputs if n not in optional or n in optional[: draft.outputs]]
    args = {
        name: next(iter(each.one_of), {"bool": True, "string": ""}.get(each.kind, 1))
        for name, each in spec.args.items()
        if each.required
    }
    try:
        call = resolve(
            spec,
            inputs,
            attributes=attributes,
            args=args,
            outputs=_shapes(spec, asked, draft.shapes[0] if draft.shapes else (), attributes),
        )
    except JaxWebGPUError:
        return float("inf"), None
    return _misses(call), call


def _shapes(
    spec: Spec, asked: list[str], shape: Shape | None, attributes: Mapping[str, Any]
) -> dict[str, Shape | None]:
    """Where the manifest gives no shapes, those of parts of the first input along an axis."""
    unsaid = [name for name in asked if spec.outputs[name].shape is None]
    parts = [shape or ()] * len(unsaid)
    axis = attributes.get("axis", 0)
    if shape and len(unsaid) > 1 and isinstance(axis, int) and -len(shape) <= axis < len(shape):
        axis %= len(shape)
        size, rest = divmod(shape[axis], len(unsaid))
        parts = [
            (*shape[:axis], size + rest * (at == 0), *shape[axis + 1 :])
            for at in range(len(unsaid))
        ]
    own = dict(zip(unsaid, parts, strict=True))
    return {name: own.get(name) for name in asked}


def _misses(call: Resolved) -> float:
    """How many conditions of its only variant a call fails on every device."""
    try:
        variants.select(call, IDEAL)
        return 0
    except JaxWebGPUError:
        pass
    try:
        names = extend(scope(call, IDEAL), call.spec.derive.items(), call.spec.of_device)
    except JaxWebGPUError:
        return float("inf")
    return sum(refusal.misses for refusal in variants.refusals(call, IDEAL, names))
