"""The host function that JAX calls: NumPy arrays in, NumPy arrays out, WebGPU between.

Nothing here knows an operator, and nothing here may touch JAX: inside a callback that deadlocks.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jax_webgpu import device, plan, resources, spec
from jax_webgpu.capabilities import Capabilities
from jax_webgpu.errors import CallError
from jax_webgpu.plan import Buffer
from jax_webgpu.resolve import Resolved
from jax_webgpu.spec import Spec


@dataclass(frozen=True)
class Operator:
    """What an operator adds to its manifest. Equal and hashed by its name.

    Attributes:
      name: the public name.
      manifest: the file's name in `specs/`.
      check: looks at the values of a call's arrays, by port, before anything is dispatched, and
        raises `ValueError`.
      fit: sets tunables for a device before anything is derived.
    """

    name: str
    manifest: str
    check: Callable[[Resolved, Mapping[str, np.ndarray]], None] | None = None
    fit: Callable[[Resolved, Capabilities], Resolved] | None = None

    @property
    def spec(self) -> Spec:
        """The manifest, loaded once."""
        return _load(resources.specs() / self.manifest, resources.shaders())

    def plan(self, resolved: Resolved, capabilities: Capabilities) -> plan.Plan:
        """The plan of a call for a device; see `plan.make`."""
        if self.fit is not None:
            resolved = self.fit(resolved, capabilities)
        return plan.make(resolved, capabilities)


@functools.cache
def _load(manifest: Path, shaders: Path) -> Spec:
    return spec.load(manifest, shaders)


def run(
    operator: Operator,
    resolved: Resolved,
    arrays: Sequence[np.ndarray],
    outputs: Sequence[np.ndarray] | None = None,
) -> tuple[np.ndarray, ...]:
    """Runs one call on this process's device and waits for it.

    Args:
      operator: whose call it is.
      resolved: the call; shapes and logical dtypes of `arrays` are those of its inputs.
      arrays: one array for each input that is given.
      outputs: writable C-contiguous arrays to be filled, one for each output; made if not given.

    Returns:
      The outputs.

    Raises:
      ValueError: a value in `arrays` is not admitted.
      DeviceError: the device cannot run the call, or failed.
    """
    named = dict(zip(dict(resolved.inputs), arrays, strict=True))
    if operator.check is not None:
        operator.check(resolved, named)
    gpu = device.get()
    ready = operator.plan(resolved, gpu.capabilities)
    if outputs is None:
        outputs = [np.empty(b.tensor.shape, b.tensor.dtype) for b in ready.outputs]
    stored = [to_storage(array, buffer) for array, buffer in zip(arrays, ready.inputs, strict=True)]
    landing = [
        out if out.dtype == buffer.dtype.storage else np.empty(out.shape, buffer.dtype.storage)
        for out, buffer in zip(outputs, ready.outputs, strict=True)
    ]
    gpu.run(ready, stored, landing)
    for out, landed in zip(outputs, landing, strict=True):
        if out is not landed:
            np.copyto(out, landed, casting="unsafe")
    return tuple(outputs)


def to_storage(array: np.ndarray, buffer: Buffer) -> np.ndarray:
    """An array as its buffer takes it: C-contiguous, widened or narrowed to the storage dtype.

    Raises:
      CallError: a value does not fit a port whose narrowing is checked.
    """
    target = buffer.dtype.storage
    if buffer.narrowing is not None and array.dtype != target:
        low, high = np.iinfo(target).min, np.iinfo(target).max
        if buffer.narrowing == "saturating":
            array = np.clip(array, low, high)
        elif array.size and not (low <= array.min() and array.max() <= high):
            at = int(np.argmax((array < low) | (array > high)))
            index = ", ".join(map(str, np.unravel_index(at, array.shape)))
            raise CallError(
                f"{buffer.name}[{index}] = {array.reshape(-1)[at]}, outside of {low} to {high}"
            )
    return np.ascontiguousarray(array, target).reshape(array.shape)
