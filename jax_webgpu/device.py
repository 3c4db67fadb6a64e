"""The one module that knows wgpu: adapters, the device, pipelines, buffers, submission.

The device is made at first use, once a process. wgpu's names of features and limits become
WebGPU's here. Nothing in this module waits for JAX, so its lock may be held over a whole call.
"""

import functools
import os
import threading
import warnings
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from jax_webgpu import config
from jax_webgpu.capabilities import FLOOR_LIMITS, Capabilities
from jax_webgpu.errors import AdapterError, DeviceError, ShaderError
from jax_webgpu.plan import Bound, Buffer, PassPlan, Plan

if TYPE_CHECKING:
    import wgpu

# Features that a kernel or this module can use; others stay off.
_FEATURES = ("shader-f16", "subgroup", "timestamp-query")

# How many of each are kept. A pipeline takes 0.4 MB of lavapipe's memory, and a manifest may write
# a call's shape into the WGSL: then each shape has its own.
MAX_PIPELINES = 256
MAX_UNIFORMS = 1024
# Bytes of idle buffers that are kept for the next call.
MAX_IDLE_BYTES = 1 << 30
# Bytes that one read-back maps at a time.
_STAGING_BYTES = 64 << 20

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


def check_process() -> None:
    """Raises `DeviceError` in a forked child of a process that has used the GPU."""
    if _pid is not None and _pid != os.getpid():
        raise DeviceError(
            "this process was forked from one that had used WebGPU already, and a GPU does not "
            "survive a fork; start it with multiprocessing's 'spawn' method instead"
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
            _devices.extend((found[info.index], info, None) for info in _fleet(found))
        adapter, adapter_info, device = _devices[place % len(_devices)]
        if device is None or device.lost:
            device = Device(adapter, adapter_info)
            _devices[place % len(_devices)] = adapter, adapter_info, device
        return device


def count() -> int:
    """How many adapters `get` counts round."""
    get()
    return len(_devices)


def info() -> AdapterInfo:
    """The adapter that `get` uses."""
    return get().info


def clear_caches() -> None:
    """Gives back the idle buffers, pipelines and uniforms of every device of this process.

    The next call makes anew what it needs. `jax.clear_caches` is JAX's own, of jitted functions.

    Raises:
      DeviceError: the process was forked from one that had used the GPU.
    """
    check_process()
    with _lock:
        made = [device for *_, device in _devices if device is not None]
    for device in made:
        device.clear()


_lock = threading.Lock()
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
        return list(_wgpu().gpu.enumerate_adapters_sync())
    except (RuntimeError, OSError) as error:
        raise AdapterError(f"wgpu cannot list adapters: {error}\n{_REMEDIES}") from error


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
        return [chosen]
    same = [info for info in infos if (info.kind, info.backend) == (chosen.kind, chosen.backend)]
    return [chosen, *(info for info in same if info is not chosen)]


class _Recent(OrderedDict[Any, Any]):
    """A cache that forgets what was not used for longest; `forget` is called with it."""

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


class _Pool:
    """Buffers for reuse, by usage and size class; holds at most `MAX_IDLE_BYTES`."""

    def __init__(self, device: "wgpu.GPUDevice", largest: int):
        self.device = device
        self.largest = largest
        self.idle: OrderedDict[int, wgpu.GPUBuffer] = OrderedDict()
        self.classes: dict[tuple[int, int], list[int]] = {}
        self.idle_bytes = 0
        self.made = 0

    def acquire(self, size: int, usage: int, label: str) -> "wgpu.GPUBuffer":
        size = self.rounded(size)
        free = self.classes.get((size, usage))
        if free:
            buffer = self.idle.pop(free.pop())
            self.idle_bytes -= size
            return buffer
        self.made += 1
        return self.device.create_buffer(label=label, size=size, usage=usage)

    def release(self, buffer: "wgpu.GPUBuffer") -> None:
        key = id(buffer)
        self.idle[key] = buffer
        self.classes.setdefault((buffer.size, buffer.usage), []).append(key)
        self.idle_bytes += buffer.size
        while self.idle_bytes > MAX_IDLE_BYTES:
            oldest, victim = self.idle.popitem(last=False)
            self.classes[victim.size, victim.usage].remove(oldest)
            self.idle_bytes -= victim.size
            victim.destroy()

    def rounded(self, size: int) -> int:
        """The size class: at most a quarter larger, so that similar shapes share buffers."""
        step = max(256, 1 << max(0, size.bit_length() - 3))
        return max(size, min(-(-size // step) * step, self.largest // 4 * 4))

    def clear(self) -> None:
        for buffer in self.idle.values():
            buffer.destroy()
        self.idle.clear()
        self.classes.clear()
        self.idle_bytes = 0


class Device:
    """A WebGPU device with its caches. `run` may be called from any thread.

    Attributes:
      info: the adapter.
      capabilities: what plans are made for.
      counters: how often something was done or made, by name.
    """

    def __init__(self, adapter: "wgpu.GPUAdapter", info: AdapterInfo):
        wgpu = _wgpu()
        features = [name for name in _FEATURES if name in adapter.features]
        try:
            self._device = adapter.request_device_sync(
                label="jax_webgpu", required_features=features
            )
        except (RuntimeError, wgpu.GPUError) as error:
            raise AdapterError(f"{info} gives no device: {error}") from error
        self.info = info
        self.capabilities = self._probed(info.capabilities)
        self.counters: Counter[str] = Counter()
        self.lost = False
        self._lock = threading.Lock()
        self._pipelines = _Recent(MAX_PIPELINES)
        self._uniforms = _Recent(MAX_UNIFORMS)
        self._pool = _Pool(self._device, self.capabilities.limit("maxBufferSize"))
        usage = wgpu.BufferUsage
        self._storage_usage = usage.STORAGE | usage.COPY_SRC | usage.COPY_DST
        self._staging_usage = usage.MAP_READ | usage.COPY_DST

    def run(self, plan: Plan, inputs: Sequence[np.ndarray], outputs: Sequence[np.ndarray]) -> None:
        """Runs a plan and waits for it.

        Args:
          plan: made for `capabilities`.
          inputs: one C-contiguous array for each of `plan.inputs`, in its storage dtype.
          outputs: one writable C-contiguous array for each of `plan.outputs`, likewise; filled.

        Raises:
          DeviceError: wgpu or the driver failed.
        """
        if not plan.passes:
            return
        wgpu = _wgpu()
        held: list[Any] = []
        with self._lock:
            try:
                self._run(plan, inputs, outputs, held)
            except (wgpu.GPUError, RuntimeError) as error:
                if isinstance(error, DeviceError):
                    raise
                self.lost |= "lost" in str(error).lower()
                raise DeviceError(f"{plan.label} on {self.info.name}: {error}") from error
            finally:
                for buffer in held:  # not empty only after an error, when the GPU may use them
                    buffer.destroy()

    def _run(
        self,
        plan: Plan,
        inputs: Sequence[np.ndarray],
        outputs: Sequence[np.ndarray],
        held: list[Any],
    ) -> None:
        pipelines = [self._pipeline(each) for each in plan.passes]
        buffers = self._acquire(plan, held)
        queue = self._device.queue
        for array, data in zip(plan.inputs, inputs, strict=True):
            if data.size:
                queue.write_buffer(buffers[array.name], 0, _whole_words(data))
        encoder = self._device.create_command_encoder(label=plan.label)
        for array in plan.intermediates:
            if array.zero_init:
                encoder.clear_buffer(buffers[array.name])
        compute = encoder.begin_compute_pass(label=plan.label)
        for each, (pipeline, layout) in zip(plan.passes, pipelines, strict=True):
            compute.set_pipeline(pipeline)
            compute.set_bind_group(0, self._bind_group(each, layout, buffers))
            compute.dispatch_workgroups(*each.workgroups)
        compute.end()
        self.counters["dispatches"] += len(plan.passes)
        wanted = [
            (buffers[array.name], data)
            for array, data in zip(plan.outputs, outputs, strict=True)
            if data.size
        ]
        self._read_back(encoder, wanted, held)
        while held:
            self._pool.release(held.pop())

    def measure(
        self, plan: Plan, inputs: Sequence[np.ndarray], *, sets: int, runs: int, rounds: int
    ) -> list[float]:
        """The device's own time for a plan, by timestamps, in seconds a run.

        Args:
          plan: made for `capabilities`.
          inputs: as for `run`.
          sets: of buffers, taken in turn, so that no run finds its data in the cache.
          runs: of the plan in one submission: a single one on an idle device reads far too long.
          rounds: measured after one that is not.

        Raises:
          DeviceError: the device has no timestamps, or wgpu or the driver failed.
        """
        if "timestamp-query" not in self.capabilities.features:
            raise DeviceError(f"{self.info.name} has no timestamp-query")
        wgpu = _wgpu()
        held: list[Any] = []
        with self._lock:
            pipelines = [self._pipeline(each) for each in plan.passes]
            queries = self._device.create_query_set(type="timestamp", count=2)
            ticks = self._device.create_buffer(
                size=16, usage=wgpu.BufferUsage.QUERY_RESOLVE | wgpu.BufferUsage.COPY_SRC
            )
            try:
                groups = []
                for _ in range(sets):
                    buffers = self._acquire(plan, held)
                    for array, data in zip(plan.inputs, inputs, strict=True):
                        self._device.queue.write_buffer(buffers[array.name], 0, _whole_words(data))
                    self._device.queue.submit([])
                    groups.append(
                        [
                            self._bind_group(each, layout, buffers)
                            for each, (_, layout) in zip(plan.passes, pipelines, strict=True)
                        ]
                    )
                times = []
                for _ in range(1 + rounds):
                    encoder = self._device.create_command_encoder(label=plan.label)
                    compute = encoder.begin_compute_pass(
                        timestamp_writes={
                            "query_set": queries,
                            "beginning_of_pass_write_index": 0,
                            "end_of_pass_write_index": 1,
                        }
                    )
                    for run in range(runs):
                        for each, (pipeline, _), group in zip(
                            plan.passes, pipelines, groups[run % sets], strict=True
                        ):
                            compute.set_pipeline(pipeline)
                            compute.set_bind_group(0, group)
                            compute.dispatch_workgroups(*each.workgroups)
                    compute.end()
                    encoder.resolve_query_set(queries, 0, 2, ticks, 0)
                    self._device.queue.submit([encoder.finish()])
                    begin, end = np.frombuffer(self._device.queue.read_buffer(ticks), np.uint64)
                    times.append(float(end - begin) * 1e-9 / runs)
                return times[1:]
            finally:
                for buffer in held:
                    buffer.destroy()

    def _acquire(self, plan: Plan, held: list[Any]) -> "dict[str, wgpu.GPUBuffer]":
        """A buffer for each array of a plan; all are also put into `held`."""
        buffers = {}
        for array in (*plan.inputs, *plan.outputs, *plan.intermediates):
            size = self._bound_size(plan, array)
            buffers[array.name] = self._pool.acquire(size, self._storage_usage, array.name)
            held.append(buffers[array.name])
        return buffers

    def _read_back(
        self,
        encoder: "wgpu.GPUCommandEncoder",
        wanted: "Sequence[tuple[wgpu.GPUBuffer, np.ndarray]]",
        held: list[Any],
    ) -> None:
        """Submits, and copies the buffers to the arrays through mapped staging memory."""
        for batch in _batches(wanted):
            total = max(offset + size for *_, offset, size in batch)
            staging = self._pool.acquire(total, self._staging_usage, "read-back")
            held.append(staging)
            for buffer, _, start, offset, size in batch:
                encoder.copy_buffer_to_buffer(buffer, start, staging, offset, size)
            self._device.queue.submit([encoder.finish()])
            self.counters["submissions"] += 1
            staging.map_sync("READ", 0, -(-total // 8) * 8)
            try:
                for _, target, start, offset, size in batch:
                    flat = target.reshape(-1).view(np.uint8)[start : start + size]
                    mapped = staging.read_mapped(offset, size, copy=False)
                    flat[:] = np.frombuffer(mapped, np.uint8)[: flat.size]
            finally:
                staging.unmap()
            held.remove(staging)
            self._pool.release(staging)
            encoder = self._device.create_command_encoder(label="read-back")

    def _bound_size(self, plan: Plan, array: Buffer) -> int:
        """The bytes that any pass binds of an array: never 0."""
        sizes = [b.size for each in plan.passes for b in each.bindings if b.source == array.name]
        return max([16, array.size, *sizes])

    def _bind_group(
        self,
        each: PassPlan,
        layout: "wgpu.GPUBindGroupLayout",
        buffers: "dict[str, wgpu.GPUBuffer]",
    ) -> "wgpu.GPUBindGroup":
        entries = []
        for index, bound in enumerate(each.bindings):
            buffer = buffers[bound.source] if bound.source else self._uniform(bound, each.label)
            resource = {"buffer": buffer, "offset": 0, "size": bound.size}
            entries.append({"binding": index, "resource": resource})
        return self._device.create_bind_group(label=each.label, layout=layout, entries=entries)

    def _pipeline(
        self, each: PassPlan
    ) -> "tuple[wgpu.GPUComputePipeline, wgpu.GPUBindGroupLayout]":
        kinds = tuple(bound.buffer for bound in each.bindings)
        key = (each.wgsl, kinds)
        found = self._pipelines.find(key)
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
                f"{each.label}: wgpu {wgpu.__version__} refuses the shader: {error}\n"
                f"{_numbered(each.wgsl)}"
            ) from error
        self.counters["pipelines"] += 1
        return self._pipelines.keep(key, (pipeline, layout))

    def _uniform(self, bound: Bound, label: str) -> "wgpu.GPUBuffer":
        """A buffer that is never written again, so that equal contents can share it."""
        usage = _wgpu().BufferUsage
        buffer = self._uniforms.find((bound.buffer, bound.data))
        if buffer is None:
            kind = usage.UNIFORM if bound.buffer == "uniform" else usage.STORAGE
            buffer = self._device.create_buffer_with_data(
                label=f"{label}.{bound.name}", data=bound.data, usage=kind
            )
            self._uniforms.keep((bound.buffer, bound.data), buffer)
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
            self._pool.clear()
            self._pipelines.clear()
            self._uniforms.clear()


def _whole_words(data: np.ndarray) -> np.ndarray:
    """The bytes, padded to a multiple of 4, as `GPUQueue.writeBuffer` needs them."""
    if data.nbytes % 4 == 0:
        return data
    padded = np.zeros(-(-data.nbytes // 4) * 4, np.uint8)
    padded[: data.nbytes] = data.reshape(-1).view(np.uint8)
    return padded


def _batches(
    wanted: "Sequence[tuple[wgpu.GPUBuffer, np.ndarray]]",
) -> "Iterator[list[tuple[wgpu.GPUBuffer, np.ndarray, int, int, int]]]":
    """Pieces (buffer, array, start in it, offset in staging, bytes) of one mapping at a time."""
    batch: list[tuple[wgpu.GPUBuffer, np.ndarray, int, int, int]] = []
    used = 0
    for buffer, data in wanted:
        nbytes = -(-data.nbytes // 4) * 4
        for start in range(0, nbytes, _STAGING_BYTES):
            size = min(_STAGING_BYTES, nbytes - start)
            if used + size > _STAGING_BYTES:
                yield batch
                batch, used = [], 0
            batch.append((buffer, data, start, used, size))
            used += -(-size // 8) * 8
    if batch:
        yield batch


def _numbered(wgsl: str) -> str:
    return "\n".join(f"{n:4} | {line}" for n, line in enumerate(wgsl.splitlines(), start=1))
