"""Whether a kernel gives for a batch in one call what it gives for each element alone.

How a batch may be put into one call is the user's word, since a manifest does not say what a kernel
mixes, and shapes do not show that the word is wrong: the softmax of vectors that are folded into
one long vector has the right shape. Nor do names: an attribute `axis` may only say along which axis
a scale lies, and a norm that starts at its `axis` mixes the later ones too. So the kernel is asked.
Before a batched call runs first it is made with two elements in turn, and compared with the two
calls that it stands for. That costs about what the call itself does, while JAX compiles it, and for
all sizes anew, since a kernel that works in blocks mixes what is no whole number of them. It finds
what a kernel mixes, and proves nothing of special values.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from jax_webgpu import dtypes, runtime
from jax_webgpu.errors import CallError, DeviceError
from jax_webgpu.resolve import Resolved, Tensor
from jax_webgpu.runtime import Operator

# How far a float of a batched call may be from that of a single one, in parts of the largest in the
# array: another variant may round otherwise. The two elements differ by far more.
_TOLERANCES = {"float32": 1e-2, "float16": 5e-2}


@dataclass(frozen=True)
class Batch:
    """What a call stands for.

    Attributes:
      single: the call of one element.
      size: how many elements there are.
      inputs: for each input that is given the axis along which they lie, one behind the other or
        each in a place of its own; None where they share it.
      outputs: the same for each output.
      within: what the single call stands for itself, of a batch of batches.
    """

    single: Resolved
    size: int
    inputs: tuple[int | None, ...]
    outputs: tuple[int, ...]
    within: "Batch | None" = None

    def __str__(self) -> str:
        return f"{self.size} of {self.single}"

    __repr__ = __str__


def check(operator: Operator, batch: Batch, whole: Resolved) -> None:
    """Tries a call that stands for a batch on this process's device.

    Raises:
      CallError: it is not what the single calls are together, or a single call cannot be made.
      DeviceError: there is no device, or it cannot run the call.
    """
    if batch.size > 1:
        _tried(operator, replace(batch, within=None), whole)
    if batch.within is not None:
        check(operator, batch.within, batch.single)


@functools.lru_cache(1024)
def _tried(operator: Operator, batch: Batch, whole: Resolved) -> None:
    elements = _elements(batch)
    try:
        alone = [runtime.run(operator, batch.single, arrays) for arrays in elements]
    except DeviceError as error:
        raise CallError(
            f"{batch.single.spec.name}: vmap puts a batch into one call, and a call of one element "
            f"cannot be made to compare it with: {error}"
        ) from None
    arrays = [
        pair[0].reshape(tensor.shape) if axis is None else _together(pair, batch.size, axis, tensor)
        for *pair, axis, (_, tensor) in zip(*elements, batch.inputs, whole.inputs, strict=True)
    ]
    results = runtime.run(operator, whole, arrays)
    for result, *pair, axis, (name, _) in zip(
        results, *alone, batch.outputs, whole.outputs, strict=True
    ):
        shape = pair[0].shape
        apart = result.reshape(*shape[:axis], batch.size, *shape[axis:])
        wrong = _wrong(np.moveaxis(apart, axis, 0), pair)
        if wrong:
            count = f"{wrong:,} of {result.size:,}"
            raise CallError(
                f"{batch.single.spec.name} mixes the elements of a batch that vmap puts along "
                f"{_where(batch)}: tried with numbers, {count} in {name} are not what "
                f"{batch.single} gives. For such calls load the kernel with another vmap_axis, or "
                "with vmap_method='sequential' and no vmap_axis"
            )


def _where(batch: Batch) -> str:
    names = [name for name, _ in batch.single.inputs]
    axes = [
        f"axis {axis} of {name}"
        for name, axis in zip(names, batch.inputs, strict=True)
        if axis is not None
    ]
    return " and ".join(axes)


def _elements(batch: Batch) -> list[list[np.ndarray]]:
    """The inputs of two single calls: numbers that few kernels cannot take, far from each other.

    Whole numbers beside arrays of another type are often indices or lengths: they stay small.
    """
    rng, spec = np.random.default_rng(0), batch.single.spec
    sizes = [size for _, tensor in batch.single.inputs for size in tensor.shape if size]
    alike = len({spec.inputs[name].dtype for name, _ in batch.single.inputs}) == 1
    least, most = (1, 8) if alike else (0, max(1, min([8, *sizes])))

    def array(tensor: Tensor, element: int) -> np.ndarray:
        dtype = dtypes.TABLE[tensor.dtype].numpy
        if dtype.kind == "f":
            low, high = [(0.25, 1), (1, 4)][element]
            numbers = rng.random(tensor.shape, np.float32)
            return (low + (high - low) * numbers).astype(dtype, copy=False)
        if dtype.kind == "b":
            return rng.integers(0, 1 + element, tensor.shape).astype(dtype)
        further = most * element if alike else 0
        return (further + rng.integers(least, most, tensor.shape)).astype(dtype)

    first = [array(tensor, 0) for _, tensor in batch.single.inputs]
    second = [
        own if axis is None else array(tensor, 1)
        for own, axis, (_, tensor) in zip(first, batch.inputs, batch.single.inputs, strict=True)
    ]
    return [first, second]


def _together(pair: Sequence[np.ndarray], size: int, axis: int, whole: Tensor) -> np.ndarray:
    """Two arrays in turn along an axis, in the shape that the batched call has for them."""
    return np.stack([pair[at % 2] for at in range(size)], axis).reshape(whole.shape)


def _wrong(results: np.ndarray, pair: Sequence[np.ndarray]) -> int:
    """How many numbers of a batch, whose elements lie along axis 0, are not what two gave alone."""
    count, own = 0, pair[0] != pair[1]
    for at, expected in enumerate(pair):
        found = results[at::2]
        differ = found != expected
        if expected.dtype.kind == "f" and differ.any():
            differ &= ~(np.isnan(found) & np.isnan(expected))
            wanted = np.broadcast_to(expected, found.shape)[differ].astype(np.float32)
            with np.errstate(invalid="ignore", over="ignore"):
                differ = ~(np.abs(found[differ] - wanted) <= _limit(expected, own))
        count += int(np.count_nonzero(differ))
    return count


def _limit(array: np.ndarray, own: np.ndarray) -> float:
    """How far off its numbers may be: in proportion to the largest of what is its `own`.

    What two elements have alike, such as the -1e38 of a mask, would let pass anything else.
    """
    finite = np.isfinite(array)
    numbers = array[finite & own]
    largest = np.abs(numbers if numbers.size else array[finite]).max(initial=0)
    return max(float(largest) * _TOLERANCES[array.dtype.name], float(np.finfo(array.dtype).tiny))
