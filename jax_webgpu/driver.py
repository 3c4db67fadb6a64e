"""`Driver`: what every call does with a wgpu device: mappings, writes, command buffers.

Once by wgpu's interface, and once by wgpu-native's own functions, which take half as long: for a
call of few bytes that is more than the kernel does. `device` alone imports wgpu, and hands over
what these use.
"""

import threading
import time
from collections.abc import Iterator, Sequence
from itertools import count
from types import SimpleNamespace
from typing import Any, TypeAlias

import numpy as np

from jax_webgpu import config

# wgpu's objects, whose types `device` alone can name.
GPUDevice: TypeAlias = Any
GPUBuffer: TypeAlias = Any
GPUComputePipeline: TypeAlias = Any
GPUBindGroup: TypeAlias = Any

# Seconds for which a call looks without a pause whether the device is done; then between two looks,
# in proportion to what was waited already, so that a wait is about a twentieth too long at most.
NO_PAUSE = 200e-6
FIRST_PAUSE, LONGEST_PAUSE = 20e-6, 1e-3
PAUSE_GROWTH = 0.05
# Seconds that a call waits for the device, unless JAX_WEBGPU_TIMEOUT says how many.
TIMEOUT = 600.0
# Rows with gaps between them are first put together, so many bytes at a time: the cache holds them.
_BLOCK_BYTES = 256 << 10


class NoAnswerError(Exception):
    """The device did not answer in time."""


class Driver:
    """By wgpu's interface.

    Args:
      device: of wgpu's, with no other driver.
    """

    def __init__(self, device: GPUDevice):
        self.device = device

    def check(self) -> None:
        """Raises wgpu's own error if the device is lost."""
        self.device.create_command_encoder().finish()

    # ---- mappings

    def ask(self, buffer: GPUBuffer, mode: str, size: int | None) -> Any:
        """Asks for a mapping of the first `size` bytes; `wait` takes the result."""
        # wgpu's own word for "READ" without one more submission, which it makes since a mapping
        # could otherwise come before what is written. Ours comes after the submission of that.
        mode = "READ_NOSYNC" if mode == "READ" else mode
        return buffer.map_async(mode, 0, size)

    def wait(self, asked: Any) -> None:
        """Waits for a mapping that was asked for.

        Raises:
          NoAnswerError: it does not come in time.
          RuntimeError: it was refused.
        """
        asked.sync_wait()

    def forget(self, asked: Any) -> None:
        """Nobody is going to wait for this one."""

    def forget_all(self) -> None:
        """Nor for any other."""

    def write(self, buffer: GPUBuffer, data: np.ndarray, offset: int) -> None:
        """Copies to mapped memory."""
        # Rows with gaps go in blocks, which begin where WebGPU maps: at multiples of 8.
        blocks = data.ndim == 2 and data.shape[1] % 8 == 0
        for start, part in cut(data, _BLOCK_BYTES) if blocks else [(0, data)]:
            buffer.write_mapped(np.ascontiguousarray(part), offset + start)

    def read(self, buffer: GPUBuffer, size: int) -> np.ndarray:
        """The first bytes of mapped memory, not copied: they are gone with the mapping."""
        return np.frombuffer(buffer.read_mapped(0, size, copy=False), np.uint8)

    def unmap(self, buffer: GPUBuffer) -> None:
        buffer.unmap()

    # ---- the queue

    def send(self, buffer: GPUBuffer, data: np.ndarray) -> None:
        """Copies contiguous bytes, a multiple of 4, to the start of memory that is not mapped."""
        self.device.queue.write_buffer(buffer, 0, data)

    def commands(self, label: str) -> "Commands":
        """A command buffer to be filled and submitted."""
        return Commands(self, label)


class Commands:
    """A command buffer in the making; dispatches with nothing between them share a pass."""

    def __init__(self, driver: Driver, label: str):
        self._driver = driver
        self._encoder = driver.device.create_command_encoder(label=label)
        self._pass: Any = None

    def clear(self, buffer: GPUBuffer) -> None:
        """Zeroes a buffer."""
        self._end_pass()
        self._encoder.clear_buffer(buffer)

    def copy(
        self,
        source: GPUBuffer,
        start: int,
        target: GPUBuffer,
        at: int,
        size: int,
    ) -> None:
        """Copies bytes; all three numbers are multiples of 4."""
        self._end_pass()
        self._encoder.copy_buffer_to_buffer(source, start, target, at, size)

    def dispatch(
        self,
        pipeline: GPUComputePipeline,
        group: GPUBindGroup,
        workgroups: Sequence[int],
    ) -> None:
        self._pass = self._pass or self._encoder.begin_compute_pass()
        self._pass.set_pipeline(pipeline)
        self._pass.set_bind_group(0, group)
        self._pass.dispatch_workgroups(*workgroups)

    def submit(self) -> None:
        """Hands over what was recorded; nothing more can be."""
        self._end_pass()
        self._driver.check()
        self._driver.device.queue.submit([self._encoder.finish()])

    def _end_pass(self) -> None:
        if self._pass is not None:
            self._pass.end()
            self._pass = None


_interrupted = threading.local()


class NativeDriver(Driver):
    """By wgpu-native's own functions, on the thread that waits.

    wgpu's promises hand over to a thread of its own and back, which for a call of few bytes takes
    longer than all the rest. And where a device is lost wgpu-native ends the process: in a wait for
    that device, in a submission to it, and where it looks for the memory of a mapping. So there is
    no such wait here, and `check` comes before the others.

    Args:
      device: of wgpu's.
      native: `ffi` and `lib` as cffi has them; `raising`, the same functions, whose errors are
        raised; `instance`, that of the device; and `kept`, a list that lives until the process
        ends.
    """

    def __init__(self, device: GPUDevice, native: SimpleNamespace):
        super().__init__(device)
        self.ffi, self.lib, self.raising = ffi, lib, _ = native.ffi, native.lib, native.raising
        self._instance = native.instance
        self._probe = device.create_buffer(size=4, usage=lib.WGPUBufferUsage_CopyDst)
        self._nothing = ffi.new("char[1]")
        self._modes = {"READ": lib.WGPUMapMode_Read, "WRITE": lib.WGPUMapMode_Write}
        self._numbers = count(1)
        # None: not yet there. By itself, since what is kept for ever must not keep the device.
        answers = self._answers = dict[int, str | None]()
        self.encoder = ffi.new("WGPUCommandEncoderDescriptor *")
        self.compute = ffi.new("WGPUComputePassDescriptor *")
        self.finished = ffi.new("WGPUCommandBufferDescriptor *")

        def answer(status: Any, message: Any, number: Any, _: Any) -> None:
            text = ""
            if status != lib.WGPUMapAsyncStatus_Success:
                text = f"no mapping ({status})"
                if message.data != ffi.NULL and 0 < message.length < 4096:
                    text += f": {ffi.string(message.data, message.length).decode(errors='replace')}"
            asked = int(ffi.cast("uintptr_t", number))
            if asked in answers:
                answers[asked] = text

        def interrupted(kind: Any, error: BaseException, trace: Any) -> None:
            # By the handler of a signal: nothing that is raised in `answer` gets out of it.
            _interrupted.by = error
            given = trace.tb_frame.f_locals
            answer(given["status"], given["message"], given["number"], None)

        signature = "void(WGPUMapAsyncStatus, WGPUStringView, void *, void *)"
        self._answer = ffi.callback(signature, answer, onerror=interrupted)
        native.kept.append(self._answer)  # buffers may be gone before wgpu-native calls it
        mode = lib.WGPUCallbackMode_AllowProcessEvents
        self._info = ffi.new(
            "WGPUBufferMapCallbackInfo *", {"mode": mode, "callback": self._answer}
        )

    def check(self) -> None:
        self._look()  # a driver tells of a loss only when it is asked something
        self.raising.wgpuQueueWriteBuffer(
            self.device.queue._internal, self._probe._internal, 0, self._nothing, 0
        )

    # ---- mappings

    def ask(self, buffer: GPUBuffer, mode: str, size: int | None) -> Any:
        number = next(self._numbers)
        self._answers[number] = None
        self._info.userdata1 = self.ffi.cast("void *", number)
        self.lib.wgpuBufferMapAsync(
            buffer._internal, self._modes[mode], 0, size or buffer.size, self._info[0]
        )
        return number

    def wait(self, asked: Any) -> None:
        self.check()
        start = time.perf_counter()
        while self._answers[asked] is None and time.perf_counter() - start < NO_PAUSE:
            self._look()
        given = config.environment().timeout
        limit = TIMEOUT if given is None else given
        waited, pause = 0.0, FIRST_PAUSE
        while self._answers[asked] is None:
            if waited > limit:
                raise NoAnswerError(f"no answer in {limit:g} s (JAX_WEBGPU_TIMEOUT)")
            time.sleep(pause)
            waited += pause  # not by the clock, which runs on while the process is stopped
            pause = min(max(pause, waited * PAUSE_GROWTH), LONGEST_PAUSE)
            self.check()
        problem = self._answers.pop(asked)
        if problem:
            raise RuntimeError(problem)

    def forget(self, asked: Any) -> None:
        self._answers.pop(asked, None)

    def forget_all(self) -> None:
        self._answers.clear()

    def _look(self) -> None:
        """Hands over the answers that have come, to whichever thread waits for them."""
        self.lib.wgpuInstanceProcessEvents(self._instance)
        if (error := getattr(_interrupted, "by", None)) is not None:
            del _interrupted.by
            raise error

    def write(self, buffer: GPUBuffer, data: np.ndarray, offset: int) -> None:
        view = self._view(buffer, offset, data.nbytes)
        view.reshape(data.shape)[...] = data

    def read(self, buffer: GPUBuffer, size: int) -> np.ndarray:
        return self._view(buffer, 0, size)

    def unmap(self, buffer: GPUBuffer) -> None:
        self.lib.wgpuBufferUnmap(buffer._internal)

    def _view(self, buffer: GPUBuffer, offset: int, size: int) -> np.ndarray:
        self.check()
        start = self.lib.wgpuBufferGetMappedRange(buffer._internal, offset, size)
        if start == self.ffi.NULL:
            raise RuntimeError("the mapping is gone")
        return np.frombuffer(self.ffi.buffer(start, size), np.uint8)

    # ---- the queue

    def send(self, buffer: GPUBuffer, data: np.ndarray) -> None:
        address, _ = data.__array_interface__["data"]
        self.raising.wgpuQueueWriteBuffer(
            self.device.queue._internal,
            buffer._internal,
            0,
            self.ffi.cast("void *", address),
            data.nbytes,
        )

    def commands(self, label: str) -> "Commands":
        return _NativeCommands(self)


class _NativeCommands(Commands):
    """Without a label; what is wrong in it is told where it is finished."""

    _driver: NativeDriver

    def __init__(self, driver: NativeDriver):
        self._driver = driver
        self._pass = None
        self._lib = lib = driver.lib
        # What is collected is released, whatever ends a call.
        self._encoder = driver.ffi.gc(
            driver.raising.wgpuDeviceCreateCommandEncoder(driver.device._internal, driver.encoder),
            lib.wgpuCommandEncoderRelease,
        )

    def clear(self, buffer: GPUBuffer) -> None:
        self._end_pass()
        self._lib.wgpuCommandEncoderClearBuffer(
            self._encoder, buffer._internal, 0, self._lib.WGPU_WHOLE_SIZE
        )

    def copy(
        self,
        source: GPUBuffer,
        start: int,
        target: GPUBuffer,
        at: int,
        size: int,
    ) -> None:
        self._end_pass()
        self._lib.wgpuCommandEncoderCopyBufferToBuffer(
            self._encoder, source._internal, start, target._internal, at, size
        )

    def dispatch(
        self,
        pipeline: GPUComputePipeline,
        group: GPUBindGroup,
        workgroups: Sequence[int],
    ) -> None:
        lib, ffi = self._lib, self._driver.ffi
        if self._pass is None:
            begun = lib.wgpuCommandEncoderBeginComputePass(self._encoder, self._driver.compute)
            self._pass = ffi.gc(begun, lib.wgpuComputePassEncoderRelease)
        lib.wgpuComputePassEncoderSetPipeline(self._pass, pipeline._internal)
        lib.wgpuComputePassEncoderSetBindGroup(self._pass, 0, group._internal, 0, ffi.NULL)
        lib.wgpuComputePassEncoderDispatchWorkgroups(self._pass, *workgroups)

    def submit(self) -> None:
        self._end_pass()
        queue = self._driver.device.queue._internal
        submit = self._driver.raising.wgpuQueueSubmit
        self._driver.check()
        # `_finish` tells of a loss as `check` does, and there is nothing between it and this.
        submit(queue, 1, [self._finish()])

    def _finish(self) -> Any:
        finish, gc = self._driver.raising.wgpuCommandEncoderFinish, self._driver.ffi.gc
        release = self._lib.wgpuCommandBufferRelease
        return gc(finish(self._encoder, self._driver.finished), release)

    def _end_pass(self) -> None:
        if self._pass is not None:
            self._lib.wgpuComputePassEncoderEnd(self._pass)
            self._pass = None


def cut(data: np.ndarray, size: int) -> Iterator[tuple[int, np.ndarray]]:
    """Parts of at most `size` bytes, or of one row, and where each starts.

    At a multiple of 8 bytes, however long a row is, if there are as many rows to a part.
    """
    each = data.nbytes // len(data)
    step = max(1, size // each)
    step -= step % 8 if step >= 8 else 0
    for start in range(0, len(data), step):
        yield start * each, data[start : start + step]
