"""The device is lost or fails: what is recovered, what is told, what an error leaves behind."""

import json
import pathlib
import shutil
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import chain

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import wgpu
from launches import (
    KINDS,
    X,
    assert_split_runs,
    launched,
    nothing_kept,
    planned,
    split_x,
    with_pass,
)
from stress import CALLS, LONG, PATIENCE, SCALE, figures
from wgpu.backends.wgpu_native._api import libf

import jax_webgpu
from jax_webgpu import device, driver

# --- destroyed between calls and in them --------------------------------------------------------

SMALL, LARGE = np.arange(24, dtype=np.float32), np.arange(65_536, dtype=np.float32)


def split(x):
    return jax_webgpu.split(x, [8, x.size - 8])


def rotated(x):
    half = (1, x.size // 8, 4)
    cos, sin = np.zeros(half, np.float32), np.ones(half, np.float32)
    return jax_webgpu.rotary_embedding(x.reshape(1, 1, -1, 8), cos, sin)


def assert_right(f, results, x):
    if f is split:
        oracle.assert_split(results, x, [8, x.size - 8], 0)
    else:
        pairs = x.reshape(-1, 2, 4)
        turned = np.stack([-pairs[:, 1], pairs[:, 0]], 1).reshape(results.shape)
        np.testing.assert_array_equal(results, turned)


def destroy(gpu):
    """As it is lost: whoever uses it is not asked."""
    type(gpu._device).destroy(gpu._device)


@pytest.fixture
def made(monkeypatch):
    """The devices that are made from now on; the first call makes one.

    Lost ones are dropped here: a driver may give a process no more than some dozens, as NVIDIA's
    does, and their own driver has not lost them.
    """
    found, init, inner = [], device.Device.__init__, {}

    def drop_lost():
        for gpu in [gpu for gpu in inner if gpu.lost]:
            queue, own = inner.pop(gpu)
            with gpu._lock:  # another thread may be about to give it up
                device._lost.remove(gpu._device)
                libf.wgpuQueueRelease(queue)
                libf.wgpuDeviceRelease(own)

    def noting(self, *args):
        init(self, *args)
        drop_lost()
        found.append(self)
        inner[self] = self._device.queue._internal, self._device._internal

    device.get()
    monkeypatch.setattr(device.Device, "__init__", noting)
    fleet = [(adapter, info, None) for adapter, info, _ in device._devices]
    monkeypatch.setattr(device, "_devices", fleet)
    yield found
    drop_lost()


@pytest.mark.promise("loss")
@pytest.mark.parametrize("callback", ["buffer", "pure"])
@pytest.mark.parametrize("f", [split, rotated])
def test_a_device_that_is_lost_between_calls(f, callback, made, record_property):
    with jax_webgpu.configure(callback=callback):
        ways = [f, jax.jit(f), jax_webgpu.fuse(f)]
        for n, (way, x) in enumerate((way, x) for way in ways for x in (SMALL, LARGE, SMALL)):
            x = jax.block_until_ready(jnp.asarray(x))
            assert_right(f, way(x), np.asarray(x))
            assert len(made) == n + 1
            destroy(made[-1])
    record_property("losses", len(made))


def traced(line, act, call):
    """Calls, and acts before the line of that number of those of `device.py` and `driver.py`.

    Returns whether the call came that far.
    """
    left = line

    def trace(frame, event, _):
        nonlocal left
        if frame.f_code.co_filename not in (device.__file__, driver.__file__):
            return None
        if event == "line":
            left -= 1
            if left == -1:
                act()
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return left < 0


@pytest.mark.promise("loss")
@pytest.mark.parametrize("unified", [True, False])
def test_a_device_that_is_lost_before_each_line(unified, made, monkeypatch, record_property):
    """Of a call with several pieces up and down: it is made again, and right."""
    for name, value in {"_WRITE_BYTES": 16, "_PIECE_BYTES": 64}.items():
        monkeypatch.setattr(device, name, value)
    for name, value in {"NO_PAUSE": 0, "FIRST_PAUSE": 1e-3}.items():
        monkeypatch.setattr(driver, name, value)
    monkeypatch.setattr(device, "_UNIFIED", KINDS if unified else ())
    x, losses = jnp.arange(60, dtype=jnp.float32), 0
    jitted = jax.jit(split)

    def call():
        assert_right(split, jitted(x), np.asarray(x))

    call()
    # Each costs a device, so that the short form takes a few; an odd step meets all in turn.
    line, step = 0, 1 if LONG else 37
    while traced(line, lambda: destroy(made[-1]), call):
        call()
        line += step
        losses += 1
    assert line > 200
    assert losses <= len(made) - 1 <= losses + 1
    record_property("losses", losses)


@pytest.mark.promise("loss")
def test_a_device_that_is_lost_while_threads_call(made, record_property):
    """It is replaced by one, which all of them then use."""
    calls, losses = 60 * SCALE, 0
    done = threading.Semaphore(0)

    def work(thread):
        f = (split, rotated)[thread % 2]
        x = np.arange(8 * (thread + 3), dtype=np.float32)
        for n in range(calls):
            assert_right(f, (f, jax.jit(f))[n % 2](x), x)
            done.release()

    with ThreadPoolExecutor(4) as pool:
        threads = [pool.submit(work, thread) for thread in range(4)]
        for _ in range(4 * calls // 40 - 1):
            for _ in range(40):
                assert done.acquire(timeout=60)
            with device._lock:
                gpu = made[-1]
            with gpu._lock:
                destroy(gpu)
            losses += 1
        for thread in threads:
            thread.result()
    assert losses <= len(made) <= losses + 1
    record_property("losses", losses)
    record_property("most threads", 4)


def test_a_device_that_is_lost_again_and_again(made, monkeypatch):
    """Once more is tried, and no more than that; and the error says of what."""
    acquire = device._Pool.acquire

    def losing(self, *args, **kwargs):
        type(self.driver.device).destroy(self.driver.device)
        return acquire(self, *args, **kwargs)

    assert_right(split, split(SMALL), SMALL)
    with monkeypatch.context() as patch:
        patch.setattr(device._Pool, "acquire", losing)
        with pytest.raises(Exception, match="DeviceLostError") as error:
            jax.block_until_ready(jax.jit(lambda x: split(x) + split(-x))(SMALL))
        assert "Split" in str(error.value) and "lost" in str(error.value)
    assert len(made) == 2
    assert_right(split, split(SMALL), SMALL)
    assert len(made) == 3


def test_a_driver_that_gives_no_more_devices(made, monkeypatch):
    """As after dozens of losses: the error says what to do, each time, until it gives one again."""
    text = "Request device failed (3): Validation Error\n\nCaused by:\n  Parent device is lost"

    def refuses(self, **wanted):
        raise RuntimeError(text)

    assert_right(split, split(SMALL), SMALL)
    destroy(made[-1])
    told = r"gives no device: Request [\s\S]*This process has lost \d+ device\(s\), which"
    with monkeypatch.context() as patch:
        patch.setattr(type(device._devices[0][0]), "request_device_sync", refuses)
        for f in (split, jax.jit(split), split):
            with pytest.raises(Exception, match=told) as error:
                jax.block_until_ready(f(SMALL))
            assert "AdapterError" in str(error.value)
        with pytest.raises(jax_webgpu.AdapterError, match=told):
            jax_webgpu.device_info()
    assert_right(split, split(SMALL), SMALL)
    assert len(made) == 2


# --- errors of a device that lives --------------------------------------------------------------

BROKEN = "@compute @workgroup_size(1) fn main() { let x = missing; }"


def out_of_memory(patch, gpu):
    def create_buffer(**wanted):
        raise wgpu.GPUOutOfMemoryError("not enough memory")

    gpu.clear()  # so that something must be made
    patch.setattr(gpu._device, "create_buffer", create_buffer)
    return planned(split_x, X)


def refused_write(patch, gpu):
    """An error of wgpu's own, out of a frame in which cffi exports a memoryview."""
    write = gpu._device.queue.write_buffer
    patch.setattr(gpu._driver, "send", lambda buffer, data: write(buffer, 1, data))
    return planned(split_x, X)


def no_mapping(patch, gpu):
    def wait(asked):
        raise RuntimeError("no mapping")

    patch.setattr(gpu._driver, "wait", wait)
    return planned(split_x, X)


def memory_of_the_host(patch, gpu):
    def read(*_):
        raise MemoryError("no more of it")

    patch.setattr(device._Memory, "read", read)
    return planned(split_x, X)


# What goes wrong, and how it is told.
ERRORS = {
    "out of memory": (out_of_memory, jax_webgpu.DeviceError, "not enough memory"),
    "validation": (
        lambda patch, gpu: with_pass(planned(split_x, X), workgroups=(70_000, 1, 1)),
        jax_webgpu.DeviceError,
        "65535",
    ),
    "shader": (
        lambda patch, gpu: with_pass(planned(split_x, X), wgsl=BROKEN),
        jax_webgpu.ShaderError,
        "missing",
    ),
    "upload": (refused_write, jax_webgpu.DeviceError, "ALIGNMENT"),
    "mapping": (no_mapping, jax_webgpu.DeviceError, "no mapping"),
    "host": (memory_of_the_host, MemoryError, "no more of it"),
}


@pytest.mark.promise("errors")
@pytest.mark.parametrize("unified", [True, False])
@pytest.mark.parametrize("kind", ERRORS)
def test_an_error_leaves_nothing_behind(kind, unified, fresh, spied, monkeypatch, record_property):
    """Not even after many: every buffer is in the pool or gone, and the next call makes none.

    Nor arrays, which are XLA's.
    """
    gpu = fresh(_UNIFIED=KINDS if unified else ())
    prepare, expected, text = ERRORS[kind]
    for _ in range(5 * SCALE):
        with monkeypatch.context() as patch, nothing_kept():
            plan = prepare(patch, gpu)
            with pytest.raises(expected, match=text) as error:
                launched(gpu, plan)
            assert plan.label in str(error.value) or expected is MemoryError
            del error
        assert_split_runs(gpu)
        assert_all_pooled(gpu, spied)
        before = len(spied.buffers)
        assert_split_runs(gpu)
        assert len(spied.buffers) == before
    assert not gpu.lost
    record_property("errors", 5 * SCALE)


def assert_all_pooled(gpu, spied):
    gone = {id(each) for each in spied.destroyed}
    pool = gpu._pool
    kept = {id(each.buffer) for each in pool.idle.values()}
    assert {id(each) for each in spied.buffers if id(each) not in gone} == kept
    assert pool.idle_bytes == sum(each.size for each in pool.idle.values())
    assert sorted(pool.idle) == sorted(chain.from_iterable(pool.classes.values()))


@pytest.mark.promise("errors")
@pytest.mark.parametrize("unified", [True, False])
def test_idle_memory_is_given_up_for_a_call(unified, fresh, monkeypatch):
    """Where the device has too little: another shape's buffers may be what is missing."""
    gpu = fresh(_UNIFIED=KINDS if unified else ())
    assert_split_runs(gpu)
    idle = dict(gpu._pool.idle)
    create = gpu._device.create_buffer

    def create_buffer(**wanted):
        if gpu._pool.idle:
            raise wgpu.GPUOutOfMemoryError("not enough memory")
        return create(**wanted)

    monkeypatch.setattr(gpu._device, "create_buffer", create_buffer)
    x = np.arange(5000, dtype=np.uint32)
    program = jax_webgpu.program.alone(planned(lambda x: jax_webgpu.split(x, [1000, 4000]), x))
    parts = [np.empty(1000, np.uint32), np.empty(4000, np.uint32)]
    gpu.run(program, [x[None]], parts)
    np.testing.assert_array_equal(np.concatenate(parts), x)
    assert not idle.keys() & gpu._pool.idle.keys()


def test_nothing_is_returned_that_was_not_computed(run, monkeypatch):
    """Not in place of an error, and not by what waits for the result."""

    def fails(*_):
        raise jax_webgpu.DeviceError("it failed")

    f = lambda x: jax.tree.map(jnp.negative, split(x))  # noqa: E731 - one for each run
    with monkeypatch.context() as patch:
        patch.setattr(device.Device, "run", fails)
        with pytest.raises((ValueError, jax.errors.JaxRuntimeError), match="it failed"):
            jax.block_until_ready(run(f, jnp.asarray(LARGE)))
    assert_right(split, jax.tree.map(jnp.negative, run(f, jnp.asarray(LARGE))), LARGE)


# --- a device that does not answer --------------------------------------------------------------

# Longer than is waited. A software driver does the next call after that.
BUSY = """
import os, sys
sys.path.insert(0, {tests!r})
import launches
from jax_webgpu import config, device

gpu = device.get()
launches.assert_split_runs(gpu)
plan = launches.constant(1)
rounds = 20_000 * (1 if gpu.info.kind == "CPU" else 10_000)
store = next(line for line in plan.passes[0].wgsl.splitlines() if line.endswith("[0] = 1u;"))
busy = plan.passes[0].wgsl.replace(
    "@workgroup_size(1) fn main()",
    "@workgroup_size(64) fn main(@builtin(global_invocation_id) id: vec3<u32>)",
).replace(store, f'''
  var x = id.x;
  for (var i = 0u; i < {{rounds}}u; i++) {{{{ x = x * 1664525u + 1013904223u; }}}}
  {{store.replace("1u;", "x;")}}''')
assert busy != plan.passes[0].wgsl
try:
    launches.launched(gpu, launches.with_pass(plan, wgsl=busy, workgroups=(2000, 1, 1)))
except device.DeviceError as error:
    assert "no answer in 0.1 s (JAX_WEBGPU_TIMEOUT)" in str(error), error
    assert not isinstance(error, device.DeviceLostError)
    print("told", gpu.lost)
os.environ["JAX_WEBGPU_TIMEOUT"] = "60"
config.environment.cache_clear()
assert device.get() is not gpu
launches.assert_split_runs(device.get())
print("works")
"""


@pytest.mark.promise("errors")
def test_a_device_that_does_not_answer(run_snippet):
    source = BUSY.format(tests=str(pathlib.Path(__file__).parent))
    done = run_snippet(source, JAX_WEBGPU_TIMEOUT="0.1")
    assert (done.returncode, done.stdout) == (0, "told True\nworks\n"), done.stderr


@pytest.mark.parametrize("text", ["soon", "-1", "nan"])
def test_a_wrong_timeout(text, monkeypatch):
    monkeypatch.setenv("JAX_WEBGPU_TIMEOUT", text)
    with pytest.raises(ValueError, match=f"JAX_WEBGPU_TIMEOUT is '{text}'; expected a number"):
        jax_webgpu.config.environment.__wrapped__()


# --- a driver that fails ------------------------------------------------------------------------

FUNCTIONS = [
    "vkQueueSubmit",
    "vkWaitSemaphores",
    "vkGetSemaphoreCounterValue",
    "vkCreateBuffer",
    "vkCreateComputePipelines",
    "vkCreateDevice",
]
LOST, NO_MEMORY, NOT_NOW, NO_SHADER = -4, -2, -3, -1000012000
OFTEN = 1000

# Which functions fail, with what, how often; and what the call gives: its result, or the error.
# Not vkQueueSubmit: where that is the first to tell of a loss wgpu-native ends the process.
FAULTS = [
    ({"vkGetSemaphoreCounterValue": (LOST, OFTEN)}, "right"),
    ({"vkGetSemaphoreCounterValue": (LOST, OFTEN), "vkWaitSemaphores": (LOST, OFTEN)}, "right"),
    ({"vkCreateBuffer": (LOST, OFTEN)}, "right"),
    ({"vkCreateBuffer": (NO_MEMORY, 1)}, "right"),
    ({"vkCreateBuffer": (NO_MEMORY, OFTEN)}, "DeviceError: .*Not enough memory"),
    ({"vkCreateComputePipelines": (LOST, OFTEN)}, "right"),
    ({"vkCreateComputePipelines": (NO_MEMORY, OFTEN)}, "right"),  # which loses the device
    ({"vkCreateComputePipelines": (NO_SHADER, OFTEN)}, "right"),  # likewise
    (
        {"vkGetSemaphoreCounterValue": (LOST, OFTEN), "vkCreateDevice": (NOT_NOW, 1)},
        "AdapterError: .* gives no device",
    ),
]

FAULTY = """
import ctypes, json, re, sys
from jax_webgpu import device

driver = ctypes.CDLL({driver!r})
faults, left = ((ctypes.c_int * 8).in_dll(driver, name) for name in ("faults", "left"))
functions = {functions}

def outcome(f, x):
    try:
        return "right" if right(f.__name__, f(x), x) else "wrong"
    except Exception as error:
        return str(error)

seen = []
for round in range({rounds}):
    for which, (fault, wanted) in enumerate({faults}):
        for f in (split, rotary) if {rounds} > 1 else (split, rotary)[which % 2 :][:1]:
            x = np.arange(128 * (200 + 3 * (8 * round + which)), dtype=np.float32)
            small = np.arange(128, dtype=np.float32)
            before = outcome(f, small)
            assert before == "right", (fault, f, before)
            jax_webgpu.clear_caches()  # so that all is made anew
            for name, (result, often) in fault.items():
                faults[functions.index(name)], left[functions.index(name)] = result, often
            got = outcome(f, x)
            assert re.search(wanted, got, re.DOTALL), (fault, f, got)
            ctypes.memset(faults, 0, ctypes.sizeof(faults))
            after = outcome(f, x), outcome(f, small)
            assert after == ("right", "right"), (fault, f, after)
            seen.append(got)
print(json.dumps({{"faults": len(seen), "recovered": seen.count("right")}}))
"""


@pytest.fixture(scope="session")
def faulty(tmp_path_factory):
    """A Vulkan driver that fails on demand: its library, and the environment that names it."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    icds = sorted(pathlib.Path("/usr/share/vulkan/icd.d").glob("lvp_icd*.json"))
    if compiler is None or not icds:
        pytest.skip("there is no C compiler, or not Mesa's software driver")
    folder = tmp_path_factory.mktemp("driver")
    library, icd = folder / "libfaulty.so", folder / "icd.json"
    source = pathlib.Path(__file__).parent / "faults" / "driver.c"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    shown = json.loads(icds[0].read_text())
    real = shown["ICD"]["library_path"]
    shown["ICD"]["library_path"] = str(library)
    icd.write_text(json.dumps(shown))
    files = {"VK_DRIVER_FILES": str(icd), "VK_ICD_FILENAMES": str(icd)}
    return str(library), files | {"FAULTY_DRIVER": real, "JAX_WEBGPU_ADAPTER": ""}


@pytest.mark.software
@pytest.mark.promise("faults")
def test_a_driver_that_fails(faulty, run_snippet, record_property):
    library, environment = faulty
    source = CALLS + FAULTY.format(driver=library, functions=FUNCTIONS, faults=FAULTS, rounds=SCALE)
    figures(run_snippet(source, timeout=PATIENCE, **environment), record_property)
