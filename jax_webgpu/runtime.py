"""The host function that JAX calls: NumPy arrays in, NumPy arrays out, WebGPU between.

Nothing here knows an operator, and nothing here may touch JAX: inside a callback that deadlocks.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jax_webgpu import device, plan, program, resources, spec
from jax_webgpu.capabilities import Capabilities
from jax_webgpu.errors import CallError, LimitError
from jax_webgpu.plan import Buffer
from jax_webgpu.resolve import Pairs, Resolved, Tensor
from jax_webgpu.spec import Spec

Arrays = Sequence[np.ndarray]
Piece = tuple[Resolved, Arrays, Arrays]


@dataclass(frozen=True)
class Operator:
    """What an operator adds to its manifest. Equal and hashed by its name.

    Attributes:
      name: the public name.
      manifest: the file's name in `specs/`.
      check: looks at the values of a call's operands before anything is dispatched, and raises
        `ValueError`; it also gets what the operator keeps of the call.
      fit: adapts a call to a device before anything is derived: tunables, or a dtype that the
        device does not have.
      pieces: cuts a call whose arrays the device cannot bind whole into calls of at most so many
        bytes an array, each with its arrays and outputs, which are contiguous views of the whole
        ones or made for the piece.
      moves_bits: the kernels only move data, and resolved calls may see an array as another dtype
        and shape of as many bytes.
      parts: the outputs of a call for the host, where its only output may hold several, one behind
        the other.
      views: the outputs as views of the one input, where that is all that the operator does.
    """

    name: str
    manifest: str
    check: Callable[[Pairs, Sequence[np.ndarray]], None] | None = None
    fit: Callable[[Resolved, Capabilities], Resolved] | None = None
    pieces: Callable[[Resolved, Arrays, Arrays, int], Iterator[Piece]] | None = None
    moves_bits: bool = False
    parts: Callable[[Resolved], Sequence[Tensor]] | None = None
    views: Callable[[Resolved, np.ndarray], Arrays] | None = None

    @functools.cached_property
    def spec(self) -> Spec:
        """The manifest alone, loaded once."""
        return _load(resources.specs() / self.manifest, resources.shaders(), None)

    @functools.cached_property
    def overlaid(self) -> Spec:
        """The manifest with the faster variants of the overlay beside it, loaded once."""
        manifest = resources.specs() / self.manifest
        return _load(manifest, resources.shaders(), manifest.with_suffix(".overlay.json"))

    def plan(self, resolved: Resolved, capabilities: Capabilities) -> plan.Plan:
        """The plan of a call for a device; see `plan.make`."""
        if self.fit is not None:
            resolved = self.fit(resolved, capabilities)
        return plan.make(resolved, capabilities)


@functools.cache
def _load(manifest: Path, shaders: Path, overlay: Path | None) -> Spec:
    return spec.load(manifest, shaders, overlay)


@dataclass(frozen=True, eq=False)
class Dispatcher:
    """One call of an operator, to be run again and again; what a device runs for it is kept there.

    Attributes:
      operator: whose call it is.
      resolved: the call.
      static: what the operator keeps of the call.
    """

    operator: Operator
    resolved: Resolved
    static: Pairs = ()

    def __call__(
        self, arrays: Arrays, outputs: Arrays | None = None, place: int = 0
    ) -> tuple[np.ndarray, ...]:
        """Runs the call on a device of this process and waits for it.

        Args:
          arrays: one array for each input that is given, then those that `operator.check` alone
            sees.
          outputs: writable C-contiguous arrays to be filled, one for each output; made if not
            given.
          place: which of several adapters to use; counts on from the first again after the last.

        Returns:
          The outputs.

        Raises:
          ValueError: a value in `arrays` is not admitted.
          DeviceError: the device cannot run the call, or failed.
        """
        operator, resolved = self.operator, self.resolved
        if operator.check is not None:
            operator.check(self.static, arrays)
        arrays = arrays[: len(resolved.inputs)]
        if outputs is None:
            outputs = [np.empty(tensor.shape, tensor.dtype) for _, tensor in resolved.outputs]
        bits = operator.moves_bits
        arrays = [_viewed(a, t, bits) for a, (_, t) in zip(arrays, resolved.inputs, strict=True)]
        targets = [_viewed(out, part, bits) for out, part in zip(outputs, self._parts, strict=True)]
        device.on_device(lambda gpu: self._run(gpu, arrays, targets), place)
        return tuple(outputs)

    @functools.cached_property
    def _parts(self) -> Sequence[Tensor]:
        """The outputs for the host."""
        if self.operator.parts is not None:
            return self.operator.parts(self.resolved)
        return [tensor for _, tensor in self.resolved.outputs]

    def _run(self, gpu: device.Device, arrays: Arrays, outputs: Arrays) -> None:
        """Runs the call whole, or in pieces where its arrays are larger than a binding may be."""
        try:
            ready, linked = self._program(gpu, outputs)
        except LimitError:
            if self.operator.pieces is None:
                raise
            limits = ("maxStorageBufferBindingSize", "maxBufferSize")
            most = min(gpu.capabilities.limit(name) for name in limits)
            for resolved, *rest in self.operator.pieces(self.resolved, arrays, outputs, most):
                if resolved == self.resolved:
                    raise
                Dispatcher(self.operator, resolved)._run(gpu, *rest)
            return
        stored = [to_storage(a, buffer) for a, buffer in zip(arrays, ready.inputs, strict=True)]
        whole = ready.outputs * (len(outputs) if len(ready.outputs) == 1 else 1)
        landing = [
            out if out.dtype == buffer.dtype.storage else np.empty(out.shape, buffer.dtype.storage)
            for out, buffer in zip(outputs, whole, strict=True)
        ]
        gpu.run(linked, stored, landing)
        with np.errstate(all="ignore"):  # float16 without shader-f16: beyond its range is infinity
            for out, landed in zip(outputs, landing, strict=True):
                if out is not landed:
                    np.copyto(out, landed, casting="unsafe")

    def _program(self, gpu: device.Device, outputs: Arrays) -> tuple[plan.Plan, program.Program]:
        found: tuple[plan.Plan, program.Program] | None = gpu.linked.get(self)
        if found is None or found[0].capabilities != gpu.capabilities:
            ready = self.operator.plan(self.resolved, gpu.capabilities)
            if ready.unwritten:
                raise CallError(f"{ready.label}: no pass writes {', '.join(ready.unwritten)}")
            parts: tuple[int, ...] = ()
            if len(outputs) != len(ready.outputs):
                (whole,) = ready.outputs
                parts = tuple(output.size * whole.dtype.storage.itemsize for output in outputs)
            found = gpu.linked[self] = ready, program.alone(ready, parts)
        return found


def run(
    operator: Operator,
    resolved: Resolved,
    arrays: Arrays,
    outputs: Arrays | None = None,
    static: Pairs = (),
) -> tuple[np.ndarray, ...]:
    """One call that is not to come again; see `Dispatcher`."""
    return Dispatcher(operator, resolved, static)(arrays, outputs)


def _viewed(array: np.ndarray, tensor: Tensor, always: bool) -> np.ndarray:
    """The bytes of a C-contiguous array as the dtype and shape that the call has for them.

    Where the call is not one that only moves bits, those of a dtype that NumPy itself lacks.
    """
    if not always and array.dtype.kind != "V":
        return array
    flat = np.ascontiguousarray(array).reshape(-1)
    return flat.view(tensor.dtype).reshape(tensor.shape)


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
