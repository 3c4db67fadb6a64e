"""Small calls of a kernel, tried one after the other to find one that each variant takes.

A manifest does not say what calls there are. The cases of its `test.json` come first; then follow
calls made of common shapes, the dtypes that the types admit, and the attributes' own values.
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from jax_webgpu import variants
from jax_webgpu.capabilities import Capabilities
from jax_webgpu.errors import JaxWebGPUError
from jax_webgpu.resolve import Resolved, Tensor, resolve
from jax_webgpu.spec import Spec
from jax_webgpu.values import UNDEFINED

# Made-up calls are tried on variants that have none yet, so often in all.
_TRIES = 6000

Shape = tuple[int, ...]

# The shapes of the first input, and for each what a second or third may have: its own, those that
# broadcast to it, its last size, and matrices that fit it.
_FIRST: tuple[Shape, ...] = (
    (4, 8),
    (3, 5),
    (2, 3, 4, 8),
    (2, 3, 5),
    (64, 64),
    (7,),
    (16,),
    (2, 4, 6, 16),
    (1, 2, 3, 5),
    (),
    (300, 260),
    (2, 3, 8, 8, 4),
)


def alone(spec: Spec, variant: str) -> Spec:
    """The manifest with one variant, so that no other is chosen in its place."""
    own = replace(spec.variant(variant), superseded_by=())
    return replace(spec, variants=(own,), digest=f"{spec.digest} {variant}")


def calls(
    spec: Spec, capabilities: Capabilities, first: Iterable[Resolved] = ()
) -> dict[str, Resolved]:
    """A call for each variant that takes one of those tried, of `alone`'s manifest.

    Args:
      spec: the manifest.
      capabilities: of the device.
      first: calls that are tried before the made-up ones.
    """
    wanted = {variant.id: alone(spec, variant.id) for variant in spec.variants}
    found = dict[str, Resolved]()
    made_up = itertools.islice(_made_up(spec), _TRIES // max(1, len(spec.variants)))
    for call in itertools.chain(first, made_up):
        for name in [*wanted]:
            own = replace(call, spec=wanted[name])
            try:
                variants.select(own, capabilities)
            except JaxWebGPUError:
                continue
            found[name] = own
            del wanted[name]
        if not wanted:
            break
    return found


def _made_up(spec: Spec) -> Iterator[Resolved]:
    ports = list(spec.inputs.values())
    required = [port.name for port in ports if not port.optional]
    optional = [port.name for port in ports if port.optional]
    presences = [(), tuple(optional)] + [(name,) for name in optional if len(optional) > 1]
    wanted = [name for name, port in spec.outputs.items() if not port.optional]
    more = [name for name, port in spec.outputs.items() if port.optional]
    counts = range(len(more) + 1)
    types = list(_types(spec))
    for shape, attributes, kind, present, count in itertools.product(
        _FIRST, _attributes(spec), types, dict.fromkeys(presences), counts
    ):
        names = [name for name in spec.inputs if name in (*required, *present)]
        for shapes in itertools.product(*[_beside(shape) for _ in names[1:]]):
            tensors = {
                name: Tensor(each, kind.get(spec.inputs[name].dtype, spec.inputs[name].dtype))
                for name, each in zip(names, (shape, *shapes), strict=True)
            }
            outputs = [*wanted, *more[:count]]
            yield from _resolved(spec, tensors, attributes, outputs, shape)


def _resolved(
    spec: Spec,
    tensors: Mapping[str, Tensor],
    attributes: Mapping[str, Any],
    outputs: list[str],
    shape: Shape,
) -> Iterator[Resolved]:
    unsaid = [name for name in outputs if spec.outputs[name].shape is None]
    parts = [shape]
    if len(unsaid) > 1 and shape:  # parts of the first input, along an axis
        axis = attributes.get("axis", 0)
        axis = axis if isinstance(axis, int) and -len(shape) <= axis < len(shape) else 0
        size, rest = divmod(shape[axis], len(unsaid))
        parts = [
            tuple(
                size + rest * (at == 0) if place == axis % len(shape) else each
                for place, each in enumerate(shape)
            )
            for at in range(len(unsaid))
        ]
    given = dict(itertools.zip_longest(unsaid, parts, fillvalue=shape)) if unsaid else {}
    args = {
        name: next(iter(each.one_of), {"bool": True, "string": ""}.get(each.kind, 1))
        for name, each in spec.args.items()
        if each.required
    }
    try:
        yield resolve(
            spec,
            tensors,
            attributes=attributes,
            args=args,
            outputs={name: given.get(name) for name in outputs},
        )
    except JaxWebGPUError:
        return


def _beside(shape: Shape) -> tuple[Shape, ...]:
    row, matrix = shape[-1:], (*shape[:-2], *shape[:-3:-1])
    ones = (*shape[:-1], 1) if shape else ()
    return tuple(dict.fromkeys([shape, row, matrix, ones, (), shape[-2:][::-1], (*row, 12)]))


def _types(spec: Spec) -> Iterator[dict[str, str]]:
    names = list(spec.type_constraints)
    for kinds in itertools.product(*spec.type_constraints.values()):
        yield dict(zip(names, kinds, strict=True))


def _attributes(spec: Spec) -> list[dict[str, Any]]:
    """The defaults, and with one attribute or two changed."""
    choices = dict[str, list[Any]]()
    for name, attribute in spec.attributes.items():
        if attribute.values is not None:
            others = list(attribute.values)
        elif attribute.default is UNDEFINED or isinstance(attribute.default, int | float):
            others = [1, -1, 0, 2]
        elif isinstance(attribute.default, tuple):
            others = [(0,), (1,), (0, 1), (1, 0)]
        else:
            others = []
        choices[name] = [each for each in others if each != attribute.default]
    required = {
        name: choices[name][0]
        for name, each in spec.attributes.items()
        if each.required and each.default is UNDEFINED and choices[name]
    }
    one = [{name: value} for name, values in choices.items() for value in values]
    two = [{**a, **b} for a, b in itertools.combinations(one, 2) if a.keys() != b.keys()]
    return [required] + [{**required, **each} for each in [*one, *two[:16]]]
