"""The host function that JAX calls: NumPy arrays in, NumPy arrays out, WebGPU between.

Nothing here knows an operator, and nothing here may touch JAX: inside a callback that deadlocks.
"""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jax_webgpu import device, dtypes, plan, program, resources, spec, wgsl
from jax_webgpu.capabilities import Capabilities
from jax_webgpu.errors import CallError, DeviceError, LimitError, ShaderError
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
      manifest: the file's name in `specs/`; or one that is loaded already.
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
      early: looks at a call while JAX compiles it, if there is a device, and raises `ValueError`;
        it also gets what the operator keeps of the call.
    """

    name: str
    manifest: str | Spec
    check: Callable[[Pairs, Sequence[np.ndarray]], None] | None = None
    fit: Callable[[Resolved, Capabilities], Resolved] | None = None
    pieces: Callable[[Resolved, Arrays, Arrays, int], Iterator[Piece]] | None = None
    moves_bits: bool = False
    parts: Callable[[Resolved], Sequence[Tensor]] | None = None
    views: Callable[[Resolved, np.ndarray], Arrays] | None = None
    early: Callable[[Pairs, Resolved], None] | None = None

    @functools.cached_property
    def spec(self) -> Spec:
        """The manifest alone, loaded once."""
        if isinstance(self.manifest, Spec):
            return self.manifest
        return _load(resources.specs() / self.manifest, resources.shaders(), None)

    @functools.cached_property
    def overlaid(self) -> Spec:
        """The manifest with the faster variants of the overlay beside it, loaded once."""
        if isinstance(self.manifest, Spec):
            return self.manifest
        manifest = resources.specs() / self.manifest
        return _load(manifest, resources.shaders(), manifest.with_suffix(".overlay.json"))

    def plan(self, resolved: Resolved, capabilities: Capabilities) -> plan.Plan:
        """The plan of a call for a device; see `plan.make`."""
        if self.fit is not None:
            resolved = self.fit(resolved, capabilities)
        return plan.make(resolved, capabilities)


def compile_(planned: plan.Plan, gpu: device.Device) -> None:
    """Compiles the shaders of a plan, and runs nothing.

    Raises:
      ShaderError: wgpu refuses one; the text ends in the template, the line, and what is wrong.
      DeviceError: the device failed.
    """
    templates = planned.resolved.spec.templates
    for each in planned.passes:
        try:
            gpu.compile([each])
        except ShaderError as error:
            words, template = str(error.__cause__), templates[each.template]
            if not wgsl.is_refusal(words):
                raise DeviceError(str(error)) from error.__cause__
            who = str(error).partition(" refuses the shader")[0]
            told = wgsl.refusal(template.name, template.source, each.wgsl, words)
            raise ShaderError(f"{who} refuses this:\n{told}") from None


def may_need_pieces(resolved: Resolved, most: int) -> bool:
    """Whether some array of a call may take more than so many bytes on a device.

    There an element takes four times what it takes here, at most.
    """
    arrays = (tensor for _, tensor in (*resolved.inputs, *resolved.outputs))
    return any(4 * math.prod(t.shape) * dtypes.TABLE[t.dtype].bytes > most for t in arrays)


@functools.cache
def _load(manifest: Path, shaders: Path, overlay: Path | None) -> Spec:
    return spec.load(manifest, shaders, overlay, links=True)  # as installers may have made them


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
            most = gpu.capabilities.most_bound
            if self.operator.pieces is None or not may_need_pieces(self.resolved, most):
                raise
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
        if not linked.launches:
            _unchanged(ready, stored, landing)
        for buffer, out, landed in zip(whole, outputs, landing, strict=True):
            if out is not landed:
                from_storage(landed, out, buffer.name)

    def _program(self, gpu: device.Device, outputs: Arrays) -> tuple[plan.Plan, program.Program]:
        found: tuple[plan.Plan, program.Program] | None = gpu.linked.get(self)
        if found is None or found[0].capabilities != gpu.capabilities:
            ready = self.operator.plan(self.resolved, gpu.capabilities)
            ready.check_written()
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
    if array.dtype.kind in "iu" and not np.can_cast(array.dtype, target):
        low, high = np.iinfo(target).min, np.iinfo(target).max
        if buffer.narrowing == "saturating":
            array = np.clip(array, low, high)
        elif array.size and not (low <= array.min() and array.max() <= high):
            at = int(np.argmax((array < low) | (array > high)))
            index = ", ".join(map(str, np.unravel_index(at, array.shape)))
            raise CallError(
                f"{buffer.name}[{index}] = {array.reshape(-1)[at]}, outside of {low} to {high}"
            )
    stored = np.ascontiguousarray(array, target).reshape(array.shape)
    if array.dtype != target:
        _keep_nans(array, stored)
    return stored


def from_storage(landed: np.ndarray, out: np.ndarray, name: str) -> None:
    """Fills an output from what its buffer held.

    Raises:
      CallError: an integer does not fit the output, which is narrower without JAX's 64-bit mode.
    """
    narrower = out.dtype.kind in "iu" and not np.can_cast(landed.dtype, out.dtype)
    if narrower and out.dtype.itemsize == 4 and landed.size:
        low, high = np.iinfo(out.dtype).min, np.iinfo(out.dtype).max
        wrong = (landed < low) | (landed > high)
        if wrong.any():
            at = int(np.argmax(wrong))
            index = ", ".join(map(str, np.unravel_index(at, landed.shape)))
            raise CallError(
                f"{name}[{index}] comes out as {landed.reshape(-1)[at]}, outside of {low} to "
                f"{high}: enable JAX's 64-bit mode, jax_enable_x64"
            )
    with np.errstate(all="ignore"):  # float16 without shader-f16: beyond its range is infinity
        np.copyto(out, landed, casting="unsafe")
    _keep_nans(landed, out)


def _keep_nans(source: np.ndarray, target: np.ndarray) -> None:
    """Between float16 and float32, gives a converted array the NaNs of its source."""
    if {source.dtype.name, target.dtype.name} != {"float16", "float32"}:
        return
    nans = np.isnan(source)
    if nans.any():
        own, new = (np.dtype(f"u{each.dtype.itemsize}") for each in (source, target))
        bits = source[nans].view(own).astype(np.uint32)
        kept = dtypes.nan_bits(bits, source.dtype.name, target.dtype.name)
        target[nans] = kept.astype(new).view(target.dtype)


def _unchanged(ready: plan.Plan, stored: Arrays, landing: Arrays) -> None:
    """Where no pass has work, what is an input and an output at once stays what it is."""
    inputs = dict(zip((each.name for each in ready.inputs), stored, strict=True))
    for buffer, landed in zip(ready.outputs, landing, strict=False):
        if buffer.name in inputs:
            np.copyto(landed, inputs[buffer.name].reshape(landed.shape))
