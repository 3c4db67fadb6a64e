"""The one module that knows wgpu: adapters, the device, pipelines, buffers, submission.

The device is made at first use, once a process. wgpu's names of features and limits become
WebGPU's here. Nothing in this module waits for JAX, so its lock may be held over a whole call.
"""

import functools
import os
import re
import threading
import time
import traceback
import warnings
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain, cycle, islice
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import numpy as np

from jax_webgpu import config, plan
from jax_webgpu.capabilities import FLOOR_LIMITS, Capabilities, worse
from jax_webgpu.driver import Commands, Driver, NativeDriver, NoAnswerError, cut
from jax_webgpu.errors import AdapterError, DeviceError, DeviceLostError, ShaderError
from jax_webgpu.plan import Bound, PassPlan
from jax_webgpu.program import Launch, Program, alone

if TYPE_CHECKING:
    import wgpu

# Features that a kernel or this module can use; others stay off.
_FEATURES = ("shader-f16", "subgroup", "timestamp-query")
# A feature of wgpu's own: buffers that kernels bind may be mapped too.
_MAPPABLE = "mappable-primary-buffers"
# WebGPU's names, where wgpu has others.
_WEBGPU_NAMES = {"subgroup": "subgroups"}

# How many programs are kept, with their pipelines, uniforms and bind groups. A pipeline takes
# 0.4 MB of lavapipe's memory, and WGSL may hold a call's sizes: then each shape has its own.
MAX_PROGRAMS = 256
# Of one program: other sets of buffers come in turn only where calls of other shapes are between.
MAX_BIND_GROUPS = 4
# Bytes of idle buffers that are kept for the next call, unless JAX_WEBGPU_POOL_BYTES says how many.
MAX_IDLE_BYTES = 1 << 30
# Where the host cannot see the device's memory arrays go through mapped pieces, of so many bytes
# and so many in turn, so that one is filled while another is copied.
_PIECE_BYTES = 8 << 20
_PIECES = 4
# Up to so many bytes `writeBuffer`, which copies twice, costs less than mapping does.
_WRITE_BYTES = 64 << 10

# The kinds of adapters whose memory is the host's.
_UNIFIED = ("CPU", "IntegratedGPU")

_TYPE_ORDER = ("DiscreteGPU", "IntegratedGPU", "Unknown", "CPU")

_REMEDIES = """\
  - Linux: install the GPU vendor's Vulkan driver and the Vulkan loader (libvulkan1); without a
    GPU the software driver (Debian: mesa-vulkan-drivers) will do
  - macOS and Windows need nothing but a supported version (Metal, Direct3D 12)
  - in a container, pass the GPU through (for NVIDIA with the graphics capability)
  - VK_ICD_FILENAMES or VK_DRIVER_FILES, if set, must name a driver that exists"""


class SoftwareAdapterWarning(UserWarning):
    """Only an adapter that runs on the CPU was found."""


@dataclass(frozen=True)
class AdapterInfo:
    """One adapter of this machine."""

    index: int
    name: str
    kind: str
    """``DiscreteGPU``, ``IntegratedGPU``, ``CPU`` or ``Unknown``."""
    backend: str
    """``Vulkan``, ``Metal``, ``D3D12`` or ``OpenGL``."""
    driver: str
    capabilities: Capabilities = field(repr=False)

    def __str__(self) -> str:
        return f"{self.name} ({self.kind}, {self.backend}, {self.driver})"


def adapters() -> list[AdapterInfo]:
    """All adapters of this machine, in wgpu's order, which is that of JAX_WEBGPU_ADAPTER."""
    return [_describe(index, adapter) for index, adapter in enumerate(_enumerate())]


def is_forked() -> bool:
    """Whether this process was forked from one that had used the GPU."""
    return _pid is not None and _pid != os.getpid()


def check_process() -> None:
    """Raises `DeviceError` in a forked child of a process that has used the GPU."""
    if is_forked():
        raise DeviceError(
            "this process was forked from one that had used WebGPU already, and neither a GPU nor "
            "JAX's threads survive a fork; start it with multiprocessing's 'spawn' method instead"
        )


def get(place: int = 0) -> "Device":
    """A device of this process; made at the first call.

    Args:
      place: the adapters that are as good as the best one are numbered from 0 and counted round,
        unless the environment names one, which is then the only one.

    Raises:
      AdapterError: there is no adapter, or not the one that the environment names.
      DeviceError: the process was forked from one that had made it.
    """
    check_process()
    with _lock:
        if not _devices:
            found = _enumerate()
            _devices.extend([(found[info.index], info, None) for info in _fleet(found)])
        adapter, adapter_info, device = _devices[place % len(_devices)]
        if device is None or device.lost:
            device = Device(adapter, adapter_info)
            _devices[place % len(_devices)] = adapter, adapter_info, device
        return device


def on_device(run: Callable[["Device"], None], place: int = 0) -> None:
    """Calls `run` with a device of this process; if that is lost, once more with a new one.

    Raises:
      DeviceLostError: the new one was lost too.
      AdapterError, DeviceError: as `get` does.
    """
    try:
        run(get(place))
    except DeviceLostError:
        run(get(place))


def count() -> int:
    """How many adapters `get` counts round."""
    get()
    return len(_devices)


def info() -> AdapterInfo:
    """The adapter that `get` uses."""
    return get().info


def clear_caches() -> None:
    """Gives back what every device of this process keeps for the next call, and the plans.

    Raises:
      DeviceError: the process was forked from one that had used the GPU.
    """
    check_process()
    with _lock:
        made = [device for *_, device in _devices if device is not None]
    for device in made:
        device.clear()
    plan.forget()
    alone.cache_clear()


_lock = threading.Lock()
# Both until the process ends: what wgpu-native may yet come back to, and devices that it must not
# drop.
_kept: list[Any] = []
_lost: "list[wgpu.GPUDevice]" = []
_devices: "list[tuple[wgpu.GPUAdapter, AdapterInfo, Device | None]]" = []
_pid: int | None = None


@functools.cache
def _wgpu() -> Any:
    """wgpu, imported at first use: importing this package must not touch a GPU."""
    global _pid
    try:
        import wgpu
    except Exception as error:  # a missing native library is an OSError, a bad one anything
        raise AdapterError(f"wgpu cannot be loaded: {error}") from error
    _pid = os.getpid()
    return wgpu


def _enumerate() -> "list[wgpu.GPUAdapter]":
    check_process()
    try:
        wgpu, instance = _wgpu(), object()
        # Where another thread uses wgpu first at the same time each may make an instance, and the
        # one that stays must be that of the adapters.
        while instance is not _instance():
            instance = _instance()
            found = wgpu.gpu.enumerate_adapters_sync()
        # One of OpenGL that is dropped on another thread than it came on ends the process.
        _kept.extend(each for each in found if each.info["backend_type"] == "OpenGL")
        return list(found)
    except (RuntimeError, OSError) as error:
        raise AdapterError(f"wgpu cannot list adapters: {error}\n{_REMEDIES}") from error


def _instance() -> Any:
    """What wgpu-native keeps its devices in; None where this wgpu does not show it."""
    try:
        from wgpu.backends.wgpu_native._helpers import get_wgpu_instance
    except ImportError:
        return None
    return get_wgpu_instance()


def _camel(dashed: str) -> str:
    head, *rest = dashed.split("-")
    return head + "".join(part[0].upper() + part[1:] for part in rest)


def _describe(index: int, adapter: "wgpu.GPUAdapter") -> AdapterInfo:
    raw = adapter.info
    limits = {_camel(name): value for name, value in adapter.limits.items()}
    software = raw["adapter_type"] == "CPU"
    details = {
        "vendor": raw["vendor"],
        "architecture": raw["architecture"],
        "device": raw["device"],
        "description": raw["description"],
        "subgroupMinSize": raw.get("stackgroup_min_size"),
        "subgroupMaxSize": raw.get("stackgroup_max_size"),
        "isFallbackAdapter": software,
    }
    features = {name for name in adapter.features if name in _FEATURES and name != "subgroup"}
    capabilities = Capabilities(
        name=raw["device"] or raw["description"],
        features=frozenset(features),
        limits=tuple(sorted((name, limits[name]) for name in FLOOR_LIMITS if name in limits)),
        adapter_info=tuple(sorted((k, v) for k, v in details.items() if v not in (None, ""))),
    )
    return AdapterInfo(
        index=index,
        name=capabilities.name,
        kind=raw["adapter_type"],
        backend=raw["backend_type"],
        driver=raw["description"],
        capabilities=capabilities,
    )


def choose(found: Sequence[AdapterInfo], wanted: str | None) -> AdapterInfo:
    """Hardware before software, OpenGL last; or the adapter that `wanted` names.

    Args:
      found: the adapters there are.
      wanted: an index, or part of a name in any case.

    Raises:
      AdapterError: there is none, or none of that name.
    """
    if not found:
        raise AdapterError(f"no WebGPU adapter was found\n{_REMEDIES}")
    ranked = sorted(found, key=_rank)
    if wanted is None:
        return ranked[0]
    listing = "\n".join(f"  {adapter.index}: {adapter}" for adapter in found)
    for adapter in found:
        if wanted == str(adapter.index):
            return adapter
    for adapter in ranked:
        # One or two digits are an index, though a driver's version may hold them.
        if wanted.lower() in str(adapter).lower() and not (wanted.isdecimal() and len(wanted) < 3):
            return adapter
    raise AdapterError(f"JAX_WEBGPU_ADAPTER is {wanted!r}, and the adapters are:\n{listing}")


def _rank(adapter: AdapterInfo) -> tuple[bool, int]:
    kind = adapter.kind if adapter.kind in _TYPE_ORDER else "Unknown"
    return adapter.backend == "OpenGL", _TYPE_ORDER.index(kind)


def _fleet(found: "Sequence[wgpu.GPUAdapter]") -> list[AdapterInfo]:
    """The adapters to use: the chosen one, and after it those of its kind and backend."""
    environment = config.environment()
    infos = [_describe(index, adapter) for index, adapter in enumerate(found)]
    chosen = choose(infos, environment.adapter)
    if chosen.kind == "CPU":
        if environment.require_gpu:
            raise AdapterError(
                f"JAX_WEBGPU_REQUIRE_GPU is set, and the best adapter is a CPU: {chosen}\n"
                f"{_REMEDIES}"
            )
        if environment.adapter is None:
            # Often this runs in a callback, where no line of the user's is on the stack.
            warnings.warn_explicit(
                f"no GPU was found, so jax_webgpu uses a CPU adapter: {chosen}",
                SoftwareAdapterWarning,
                "jax_webgpu",
                0,
            )
    if environment.adapter is not None or chosen.kind == "CPU":
        return [_held(chosen)]
    same = [info for info in infos if (info.kind, info.backend) == (chosen.kind, chosen.backend)]
    return [_held(info) for info in [chosen, *(info for info in same if info is not chosen)]]


def _held(info: AdapterInfo) -> AdapterInfo:
    """The adapter with no more features and limits than the environment leaves it."""
    environment, own = config.environment(), info.capabilities
    limits = dict(own.limits)
    for name, value in environment.limits:
        if value not in (FLOOR_LIMITS[name], worse(name, value, limits.get(name, value))):
            raise AdapterError(
                f"JAX_WEBGPU_LIMITS sets {name} to {value:,}, and {info} has {limits[name]:,}"
            )
    held = own.held_to(environment.features, dict(environment.limits))
    return replace(info, capabilities=held)


def _usable(adapter: "wgpu.GPUAdapter") -> list[str]:
    """Features of the adapter that this module knows and the environment leaves it."""
    left = config.environment().features
    return [
        name
        for name in (*_FEATURES, _MAPPABLE)
        if name in adapter.features and (left is None or _WEBGPU_NAMES.get(name, name) in left)
    ]


class _Recent(OrderedDict[Any, Any]):
    """A cache that forgets what was not used for longest."""

    def __init__(self, size: int):
        super().__init__()
        self.size = size

    def find(self, key: Any) -> Any:
        value = self.get(key)
        if value is not None:
            self.move_to_end(key)
        return value

    def keep(self, key: Any, value: Any) -> Any:
        self[key] = value
        while len(self) > self.size:
            self.popitem(last=False)
        return value


def _driver(device: "wgpu.GPUDevice") -> Driver:
    """The faster one, unless this wgpu has not what it needs."""
    try:
        from wgpu.backends.wgpu_native import ffi, lib
        from wgpu.backends.wgpu_native._api import libf

        instance = _instance()
        if instance is None:
            return Driver(device)
        native = SimpleNamespace(ffi=ffi, lib=lib, raising=libf, instance=instance, kept=_kept)
        return NativeDriver(device, native)
    except (ImportError, AttributeError, KeyError, TypeError):
        return Driver(device)


class _Memory:
    """A buffer, and what is known of its mapping. Of memory to upload from, idle means mapped."""

    def __init__(self, buffer: "wgpu.GPUBuffer", usage: int, driver: Driver):
        self.buffer = buffer
        self.usage = usage
        self.size: int = buffer.size
        self._driver = driver
        self._asked: Any = None

    def map(self, mode: str, size: int | None = None) -> None:
        """Asks for a mapping; what uses it waits for it."""
        self._asked = self._driver.ask(self.buffer, mode, size)

    def write(self, data: np.ndarray, offset: int) -> None:
        self._wait()
        self._driver.write(self.buffer, data, offset)

    def read(self, size: int) -> np.ndarray:
        """The first bytes, not copied: they are gone with the mapping."""
        self._wait()
        return self._driver.read(self.buffer, size)

    def unmap(self) -> None:
        self._wait()
        self._driver.unmap(self.buffer)

    def destroy(self) -> None:
        """Gives the memory back, as soon as the device has done what it was given before."""
        self._driver.forget(self._asked)
        self.buffer.destroy()

    def _wait(self) -> None:
        if self._asked is not None:
            asked, self._asked = self._asked, None
            self._driver.wait(asked)


class _Pool:
    """Memory for reuse, by usage and size class; idle, at most so many bytes."""

    def __init__(self, driver: Driver, largest: int):
        self.driver = driver
        self.largest = largest
        given = config.environment().pool_bytes
        self.most = MAX_IDLE_BYTES if given is None else given
        self.idle: OrderedDict[int, _Memory] = OrderedDict()
        self.classes: dict[tuple[int, int], list[int]] = {}
        self.idle_bytes = 0

    def acquire(self, size: int, usage: int, *, mapped: bool = False) -> _Memory:
        """At least `size` bytes; new memory is mapped if asked for.

        What was released last comes first: a call that comes again gets the memory that it had,
        and with it its bind groups.
        """
        size = self.rounded(size)
        free = self.classes.get((size, usage))
        if free:
            memory = self.idle.pop(free.pop())
            self.idle_bytes -= size
            return memory
        buffer = self.driver.device.create_buffer(
            label="jax_webgpu", size=size, usage=usage, mapped_at_creation=mapped
        )
        return _Memory(buffer, usage, self.driver)

    def release(self, memory: _Memory) -> None:
        if memory.size > self.most:  # and push nothing else out
            memory.destroy()
            return
        key = id(memory)
        self.idle[key] = memory
        self.classes.setdefault((memory.size, memory.usage), []).append(key)
        self.idle_bytes += memory.size
        while self.idle_bytes > self.most:
            oldest, victim = self.idle.popitem(last=False)
            self.classes[victim.size, victim.usage].remove(oldest)
            self.idle_bytes -= victim.size
            victim.destroy()

    def rounded(self, size: int) -> int:
        """The size class: at most a sixteenth larger, so that similar shapes share memory."""
        step = max(256, 1 << max(0, size.bit_length() - 5))
        return max(size, min(-(-size // step) * step, self.largest // 4 * 4))

    def clear(self) -> None:
        idle, self.idle, self.classes = self.idle, OrderedDict(), {}
        self.idle_bytes = 0
        for memory in idle.values():
            memory.destroy()


@dataclass(frozen=True)
class _Pipeline:
    compute: "wgpu.GPUComputePipeline"
    layout: "wgpu.GPUBindGroupLayout"


@dataclass(frozen=True)
class _Ready:
    """A launch with all that the device keeps for it."""

    launch: Launch
    pipeline: _Pipeline
    uniforms: "Sequence[wgpu.GPUBuffer | None]"
    """For each binding the buffer with its data, if it has any."""


@dataclass(frozen=True)
class _Kept:
    """What the device keeps of a program."""

    launches: Sequence[_Ready]
    groups: _Recent
    """Bind groups by the ids of the memories, which are kept too, so that the ids stay theirs."""


@dataclass(frozen=True)
class _Copy:
    """Bytes of an array, uint8, and where in memory they go or come from."""

    memory: _Memory
    data: np.ndarray
    """All in one row; or in equal rows, with gaps between them on the host alone."""
    start: int


@dataclass(frozen=True)
class _Landing:
    """Memory that the host maps, and what goes from there to arrays."""

    memory: _Memory
    copies: Sequence[_Copy]

    @property
    def size(self) -> int:
        return _aligned(self.copies[-1].start + self.copies[-1].data.nbytes, 8)

    def copy_out(self) -> None:
        """Waits for the mapping, copies, and ends it."""
        source = self.memory.read(self.size)
        try:
            for copy in self.copies:
                data = source[copy.start : copy.start + copy.data.nbytes]
                copy.data[:] = data.reshape(copy.data.shape)
        finally:
            self.memory.unmap()


class Device:
    """A WebGPU device with its caches. `run` may be called from any thread.

    Attributes:
      info: the adapter.
      capabilities: what plans are made for.
      counters: how often something was done or made, and how many bytes went in and out, by name.
      linked: what else is kept for the device, by what it is kept for.
      lost: it runs nothing any more, and `get` makes another.
    """

    def __init__(self, adapter: "wgpu.GPUAdapter", info: AdapterInfo):
        wgpu = _wgpu()
        # Where the device's memory is the host's, kernels bind what the host maps; else the host
        # maps pieces that the device copies.
        usable = _usable(adapter)
        self._unified = _MAPPABLE in usable and info.kind in _UNIFIED
        try:
            self._device = adapter.request_device_sync(
                label="jax_webgpu",
                required_features=[n for n in usable if n != _MAPPABLE or self._unified],
                # The adapter's own, unless the environment holds them down.
                required_limits=dict(info.capabilities.limits),
            )
            self.capabilities = self._probed(info.capabilities)
            self._driver = _driver(self._device)
            self._pool = _Pool(self._driver, self.capabilities.limit("maxBufferSize"))
        except (RuntimeError, wgpu.GPUError) as error:
            raise AdapterError(f"{info} gives no device: {error}{_after_losses()}") from error
        self.info = info
        self.counters: Counter[str] = Counter()
        self.linked = WeakKeyDictionary[Any, Any]()
        self.lost = False
        self._lock = threading.Lock()
        self._programs = _Recent(MAX_PROGRAMS)
        # Programs share these, and keep them alive.
        self._pipelines = WeakValueDictionary[Any, _Pipeline]()
        self._uniforms = WeakValueDictionary[Any, Any]()
        usage = wgpu.BufferUsage
        self._inner = usage.STORAGE | usage.COPY_SRC | usage.COPY_DST
        bound = self._inner if self._unified else 0
        self._upload_usage = usage.MAP_WRITE | usage.COPY_SRC | bound
        self._download_usage = usage.MAP_READ | usage.COPY_DST | bound

    def run(
        self, program: Program, inputs: Sequence[np.ndarray], outputs: Sequence[np.ndarray]
    ) -> None:
        """Runs a program and waits for it.

        Args:
          program: of plans made for `capabilities`.
          inputs: one array for each of `program.inputs`, in its storage dtype: C-contiguous, or a
            matrix whose rows are.
          outputs: one writable array for each of `program.outputs`, likewise; filled.

        Raises:
          DeviceLostError: the device is lost; a new one could run the program.
          DeviceError: wgpu or the driver failed.
        """
        if not program.launches:
            return
        held: list[_Memory] = []
        with self._lock:
            if self.lost:
                raise DeviceLostError(f"{program.label} on {self.info.name}: the device is lost")
            try:
                try:
                    self._run(program, inputs, outputs, held)
                except (_wgpu().GPUError, RuntimeError) as error:
                    if not _lacks_memory(error):
                        raise
                    _forget_frames(error)
                    _destroy(held)
                    self._clear()  # what is kept for other calls may be what is missing
                    self._run(program, inputs, outputs, held)
            except Exception as error:
                _forget_frames(error)
                self._tell(error, f"{program.label} on {self.info.name}")
                raise
            except BaseException as error:  # of a signal, which may come in the middle of anything
                self._clear()
                _forget_frames(error)
                raise
            finally:
                _destroy(held)  # not empty only after an error, when the GPU may use it

    def _tell(self, error: Exception, where: str) -> None:
        """Raises an error as the caller is to see it, unless that is the error itself."""
        wgpu = _wgpu()
        if isinstance(error, NoAnswerError):
            self._abandon()  # it may answer yet, and write to what is used otherwise by then
            raise DeviceError(f"{where}: {error}") from error
        if self._is_lost():
            self._abandon()
            raise DeviceLostError(f"{where}: {error}") from error
        if isinstance(error, wgpu.GPUError | RuntimeError) and not isinstance(error, DeviceError):
            raise DeviceError(f"{where}: {error}") from error

    def _is_lost(self) -> bool:
        try:
            self._driver.check()
        except (_wgpu().GPUError, RuntimeError) as error:
            _forget_frames(error)
            return True
        return False

    def _abandon(self) -> None:
        """Gives the device up.

        Its memory goes back, but it is kept: wgpu-native ends the process when it drops a device
        that the driver lost, and waits for one that does not answer.
        """
        wgpu_device = self._device
        _lost.append(wgpu_device)  # first: a signal may come
        self.lost = True
        self._clear()
        wgpu_device.destroy()
        wgpu_device.queue._internal = wgpu_device._internal = None

    def _run(
        self,
        program: Program,
        inputs: Sequence[np.ndarray],
        outputs: Sequence[np.ndarray],
        held: list[_Memory],
    ) -> None:
        kept = self._keep(program)
        memories = self._acquire(program, held)
        self._upload(program, memories, inputs, held)
        commands = self._driver.commands(program.label)
        self._encode(commands, kept, memories)
        landings, rest = self._stage_first(commands, program, memories, outputs, held)
        self._submit(commands)
        for memory in memories:
            if memory.usage == self._upload_usage:
                memory.map("WRITE")  # for the next call: one wait serves this and the read-back
        self._land(landings, rest, held)
        while held:
            self._pool.release(held.pop())
        self.counters["bytes in"] += sum(data.nbytes for data in inputs)
        self.counters["bytes out"] += sum(data.nbytes for data in outputs)

    def _take(self, size: int, usage: int, held: list[_Memory]) -> _Memory:
        """Memory from the pool. It is put into `held`, from where it goes back."""
        memory = self._pool.acquire(size, usage, mapped=usage == self._upload_usage)
        held.append(memory)
        return memory

    def _give(self, memory: _Memory, held: list[_Memory]) -> None:
        held.remove(memory)
        self._pool.release(memory)

    def _acquire(self, program: Program, held: list[_Memory]) -> list[_Memory]:
        usages = [self._inner] * len(program.sizes)
        if self._unified:
            for place in program.inputs:
                if program.sizes[place.buffer] > _WRITE_BYTES:
                    usages[place.buffer] = self._upload_usage
            for place in program.outputs:
                usages[place.buffer] = self._download_usage
        sized = zip(program.sizes, usages, strict=True)
        return [self._take(size, usage, held) for size, usage in sized]

    def _submit(self, commands: Commands) -> None:
        commands.submit()
        self.counters["submissions"] += 1

    # ---- host to device

    def _upload(
        self,
        program: Program,
        memories: Sequence[_Memory],
        inputs: Sequence[np.ndarray],
        held: list[_Memory],
    ) -> None:
        for buffer, own in program.homes:
            memory, size = memories[buffer], program.sizes[buffer]
            if size <= _WRITE_BYTES:
                whole = np.zeros(_aligned(size, 4), np.uint8)
                for number, start in own:
                    data = inputs[number]
                    whole[start : start + data.nbytes] = _bytes(data).reshape(-1)
                self._driver.send(memory.buffer, whole)
                continue
            copies = [c for n, start in own for c in _whole_words(memory, inputs[n], start)]
            if memory.usage == self._upload_usage:
                _fill(memory, copies)
            else:
                self._upload_in_pieces(copies, held)

    def _upload_in_pieces(self, copies: Sequence[_Copy], held: list[_Memory]) -> None:
        """The device copies one piece while the host fills the next."""
        size = min(_PIECE_BYTES, copies[0].memory.size)
        pieces = [self._take(size, self._upload_usage, held) for _ in range(_PIECES)]
        for piece, batch in zip(cycle(pieces), _batches(copies), strict=False):
            offsets = _packed(batch)
            _fill(piece, [_Copy(piece, c.data, at) for c, at in zip(batch, offsets, strict=True)])
            commands = self._driver.commands("upload")
            for copy, offset in zip(batch, offsets, strict=True):
                commands.copy(
                    piece.buffer, offset, copy.memory.buffer, copy.start, copy.data.nbytes
                )
            self._submit(commands)
            piece.map("WRITE")
        for piece in reversed(pieces):
            self._give(piece, held)

    # ---- dispatches

    def _encode(self, commands: Commands, kept: _Kept, memories: Sequence[_Memory]) -> None:
        key = tuple(map(id, memories))
        found = kept.groups.find(key)
        if found is None:
            groups = [self._bind_group(ready, memories) for ready in kept.launches]
            found = kept.groups.keep(key, (groups, memories))
        for ready, group in zip(kept.launches, found[0], strict=True):
            for index in ready.launch.cleared:
                commands.clear(memories[index].buffer)
            for source, target, size in ready.launch.copied:
                commands.copy(
                    memories[source.buffer].buffer,
                    source.offset,
                    memories[target.buffer].buffer,
                    target.offset,
                    size,
                )
            workgroups = ready.launch.dispatch.workgroups
            commands.dispatch(ready.pipeline.compute, group, workgroups)
        self.counters["dispatches"] += len(kept.launches)

    def _bind_group(self, ready: _Ready, memories: Sequence[_Memory]) -> "wgpu.GPUBindGroup":
        dispatch = ready.launch.dispatch
        entries = []
        for index, bound in enumerate(dispatch.bindings):
            place = ready.launch.places[index]
            buffer = memories[place.buffer].buffer if place else ready.uniforms[index]
            offset = place.offset if place else 0
            resource = {"buffer": buffer, "offset": offset, "size": bound.size}
            entries.append({"binding": index, "resource": resource})
        self.counters["bind groups"] += 1
        return self._device.create_bind_group(
            label=dispatch.label, layout=ready.pipeline.layout, entries=entries
        )

    def _keep(self, program: Program) -> _Kept:
        found: _Kept | None = self._programs.find(program)
        if found is not None:
            return found
        launches = []
        for launch in program.launches:
            dispatch = launch.dispatch
            pipeline = self._pipeline(dispatch)
            uniforms = [
                None if bound.source else self._uniform(bound, dispatch.label)
                for bound in dispatch.bindings
            ]
            launches.append(_Ready(launch, pipeline, uniforms))
        kept: _Kept = self._programs.keep(program, _Kept(launches, _Recent(MAX_BIND_GROUPS)))
        return kept

    # ---- device to host

    def _stage_first(
        self,
        commands: Commands,
        program: Program,
        memories: Sequence[_Memory],
        outputs: Sequence[np.ndarray],
        held: list[_Memory],
    ) -> "tuple[deque[_Landing], Iterator[Sequence[_Copy]]]":
        """What can be mapped after the next submission, and the copies that wait for their turn."""
        by_memory = (
            [_Copy(memories[b], _bytes(outputs[n]), start) for n, start in own if outputs[n].size]
            for b, own in program.ends
        )
        if self._unified:
            return deque(_Landing(own[0].memory, own) for own in by_memory if own), iter(())
        batches = _batches(list(chain.from_iterable(by_memory)))
        first = deque(self._stage(commands, each, held) for each in islice(batches, _PIECES))
        return first, batches

    def _stage(self, commands: Commands, batch: Sequence[_Copy], held: list[_Memory]) -> _Landing:
        """Encodes the copies of a batch to memory that can be mapped."""
        offsets = _packed(batch)
        size = offsets[-1] + _aligned(batch[-1].data.nbytes, 8)
        memory = self._take(size, self._download_usage, held)
        for copy, offset in zip(batch, offsets, strict=True):
            commands.copy(
                copy.memory.buffer,
                copy.start,
                memory.buffer,
                offset,
                _aligned(copy.data.nbytes, 4),
            )
        targets = [_Copy(memory, c.data, at) for c, at in zip(batch, offsets, strict=True)]
        return _Landing(memory, targets)

    def _land(
        self,
        landings: deque[_Landing],
        rest: Iterator[Sequence[_Copy]],
        held: list[_Memory],
    ) -> None:
        """Copies to the arrays; the device makes the next pieces meanwhile."""
        for landing in landings:
            landing.memory.map("READ", landing.size)
        while landings:
            landing = landings.popleft()
            landing.copy_out()
            if self._unified:
                continue
            self._give(landing.memory, held)
            for batch in islice(rest, 1):
                commands = self._driver.commands("read-back")
                landings.append(self._stage(commands, batch, held))
                self._submit(commands)
                landings[-1].memory.map("READ", landings[-1].size)

    def measure(
        self,
        program: Program,
        inputs: Sequence[np.ndarray],
        *,
        sets: int,
        runs: int,
        rounds: int,
        warm: float = 0,
    ) -> list[float]:
        """The device's own time for a program, by timestamps, in seconds a run.

        Args:
          program: of plans made for `capabilities`, with no array that is cleared.
          inputs: as for `run`.
          sets: of buffers, taken in turn, so that no run finds its data in the cache.
          runs: of the program in one submission: a single one on an idle device reads far too long.
          rounds: that are measured, after one that is not.
          warm: seconds that such rounds take together, at least: an idle device has low clocks.

        Raises:
          DeviceError: the device has no timestamps, or wgpu or the driver failed.
        """
        if "timestamp-query" not in self.capabilities.features:
            raise DeviceError(f"{self.info.name} has no timestamp-query")
        wgpu = _wgpu()
        held: list[_Memory] = []
        with self._lock:
            launches = self._keep(program).launches
            queries = self._device.create_query_set(type="timestamp", count=2)
            ticks = self._device.create_buffer(
                size=16, usage=wgpu.BufferUsage.QUERY_RESOLVE | wgpu.BufferUsage.COPY_SRC
            )
            try:
                groups = []
                for _ in range(sets):
                    memories = [self._take(size, self._inner, held) for size in program.sizes]
                    self._upload(program, memories, inputs, held)
                    groups.append([self._bind_group(each, memories) for each in launches])
                times = list[float]()
                warmed, start = False, time.perf_counter()
                while len(times) < rounds:
                    encoder = self._device.create_command_encoder(label=program.label)
                    compute = encoder.begin_compute_pass(
                        timestamp_writes={
                            "query_set": queries,
                            "beginning_of_pass_write_index": 0,
                            "end_of_pass_write_index": 1,
                        }
                    )
                    for run in range(runs):
                        for ready, group in zip(launches, groups[run % sets], strict=True):
                            compute.set_pipeline(ready.pipeline.compute)
                            compute.set_bind_group(0, group)
                            compute.dispatch_workgroups(*ready.launch.dispatch.workgroups)
                    compute.end()
                    encoder.resolve_query_set(queries, 0, 2, ticks, 0)
                    self._driver.check()
                    self._device.queue.submit([encoder.finish()])
                    begin, end = np.frombuffer(self._device.queue.read_buffer(ticks), np.uint64)
                    if warmed:
                        times.append(float(end - begin) * 1e-9 / runs)
                    warmed = time.perf_counter() - start >= warm
                return times
            finally:
                _destroy(held)

    def compile(self, passes: Sequence[PassPlan]) -> None:
        """Makes the pipelines of a plan's passes, and runs nothing.

        Raises:
          ShaderError: wgpu refuses a shader.
        """
        with self._lock:
            for each in passes:
                self._pipeline(each)

    def _pipeline(self, each: PassPlan) -> _Pipeline:
        kinds = tuple(bound.buffer for bound in each.bindings)
        key = (each.wgsl, kinds)
        found = self._pipelines.get(key)
        if found is not None:
            return found
        wgpu = _wgpu()
        try:
            module = self._device.create_shader_module(label=each.label, code=each.wgsl)
            layout = self._device.create_bind_group_layout(
                label=each.label,
                entries=[
                    {
                        "binding": index,
                        "visibility": wgpu.ShaderStage.COMPUTE,
                        "buffer": {"type": kind},
                    }
                    for index, kind in enumerate(kinds)
                ],
            )
            pipeline = self._device.create_compute_pipeline(
                label=each.label,
                layout=self._device.create_pipeline_layout(bind_group_layouts=[layout]),
                compute={"module": module, "entry_point": "main"},
            )
        except (wgpu.GPUError, RuntimeError) as error:
            raise ShaderError(
                f"{each.label}: wgpu {wgpu.__version__} refuses the shader{_origin(each, error)}: "
                f"{error}\n{_numbered(each.wgsl)}"
            ) from error
        self.counters["pipelines"] += 1
        made = self._pipelines[key] = _Pipeline(pipeline, layout)
        return made

    def _uniform(self, bound: Bound, label: str) -> "wgpu.GPUBuffer":
        """A buffer that is never written again, so that equal contents can share it."""
        usage = _wgpu().BufferUsage
        buffer = self._uniforms.get((bound.buffer, bound.data))
        if buffer is None:
            kind = usage.UNIFORM if bound.buffer == "uniform" else usage.STORAGE
            buffer = self._device.create_buffer_with_data(
                label=f"{label}.{bound.name}", data=bound.data, usage=kind
            )
            self._uniforms[bound.buffer, bound.data] = buffer
            self.counters["uniforms"] += 1
        return buffer

    def _probed(self, capabilities: Capabilities) -> Capabilities:
        """Adds features that wgpu names and whose WGSL it may still refuse."""
        if "subgroup" not in self._device.features:
            return capabilities
        wgpu = _wgpu()
        code = "enable subgroups;\n@compute @workgroup_size(1) fn main() { _ = subgroupAdd(1u); }"
        try:
            self._device.create_shader_module(label="probe", code=code)
        except (wgpu.GPUError, RuntimeError):
            return capabilities
        return Capabilities(
            name=capabilities.name,
            features=capabilities.features | {"subgroups"},
            limits=capabilities.limits,
            adapter_info=capabilities.adapter_info,
            wgsl_language_features=capabilities.wgsl_language_features,
        )

    def clear(self) -> None:
        """Gives back the memory of every cache."""
        with self._lock:
            self._clear()

    def _clear(self) -> None:
        self._pool.clear()
        self._driver.forget_all()
        self._programs.clear()
        self.linked.clear()


def _lacks_memory(error: Exception) -> bool:
    # wgpu-native calls that of a buffer a validation error.
    return isinstance(error, _wgpu().GPUOutOfMemoryError) or "Not enough memory" in str(error)


def _forget_frames(error: BaseException) -> None:
    """Drops what is in the frames of an error: memory that was mapped, XLA's arrays, views of both.

    They would outlive the call, since an error of wgpu's is in a cycle with its own frame; and
    Python's collector, up to 3.11.7, crashes on a memoryview that cffi exports, as `write_buffer`
    has one.
    """
    each: BaseException | None = error
    while each is not None:  # and not `__context__`: the caller may be in a handler of its own
        traceback.clear_frames(each.__traceback__)
        each = each.__cause__


def _destroy(held: list[_Memory]) -> None:
    while held:
        held.pop().destroy()


def _aligned(size: int, to: int) -> int:
    return -(-size // to) * to


def _bytes(array: np.ndarray) -> np.ndarray:
    """The bytes of an array: in one row, or in as many as it has, where there are gaps between."""
    return (array.reshape(-1) if array.flags.c_contiguous else array).view(np.uint8)


def _whole_words(memory: _Memory, array: np.ndarray, start: int) -> list[_Copy]:
    """Copies of whole words, as WebGPU wants them: the last bytes go alone, padded with zeros."""
    flat = _bytes(array)
    if flat.ndim == 2:
        if flat.nbytes % 8 == 0 and flat.shape[1] <= _PIECE_BYTES:
            return [_Copy(memory, flat, start)]
        flat = flat.reshape(-1)
    whole = flat.size // 8 * 8
    copies = [_Copy(memory, flat[:whole], start)] if whole else []
    if whole < flat.size:
        tail = np.zeros(_aligned(flat.size - whole, 4), np.uint8)
        tail[: flat.size - whole] = flat[whole:]
        copies.append(_Copy(memory, tail, start + whole))
    return copies


def _fill(memory: _Memory, copies: Sequence[_Copy]) -> None:
    """Writes to mapped memory, and ends the mapping."""
    for copy in copies:
        memory.write(copy.data, copy.start)
    memory.unmap()


def _batches(copies: Sequence[_Copy]) -> Iterator[list[_Copy]]:
    """Copies of at most `_PIECE_BYTES` together."""
    batch, used = list[_Copy](), 0
    for copy in copies:
        for start, data in cut(copy.data, _PIECE_BYTES):
            if used + data.nbytes > _PIECE_BYTES:
                yield batch
                batch, used = [], 0
            batch.append(_Copy(copy.memory, data, copy.start + start))
            used += _aligned(data.nbytes, 8)
    if batch:
        yield batch


def _packed(batch: Sequence[_Copy]) -> list[int]:
    """Offsets at which the copies of a batch lie behind each other."""
    ends = accumulate((_aligned(copy.data.nbytes, 8) for copy in batch), initial=0)
    return list(ends)[:-1]


def _after_losses() -> str:
    """Why a driver may give no device: some give a process no more than so many."""
    if not _lost:
        return ""
    return (
        f"\nThis process has lost {len(_lost)} device(s), which it has to keep, and a driver may "
        "give a process only so many: another process gets one"
    )


def _origin(dispatch: PassPlan, error: Exception) -> str:
    """The template that WGSL was rendered from, and the line of it that an error is about."""
    line = re.search(r"\bwgsl:(\d+):\d+", str(error))
    place = f" (rendered line {line[1]})" if line else ""
    return f" made of {dispatch.template}{place}" if dispatch.template else ""


def _numbered(wgsl: str) -> str:
    return "\n".join(f"{n:4} | {line}" for n, line in enumerate(wgsl.splitlines(), start=1))
