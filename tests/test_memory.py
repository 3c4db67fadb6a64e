"""What is kept between calls: not more with time, not more than was set, and nothing if asked."""

import numpy as np
import pytest
from launches import KINDS, assert_split_runs, planned
from stress import CALLS, LONG, PATIENCE, figures

import jax_webgpu
from jax_webgpu import config, program

# --- over many calls ----------------------------------------------------------------------------

# What JAX keeps for a shape, 1.4 MiB, is there after the first round. Then the process idles.
FLAT = """
import json, pathlib, time
from jax_webgpu import device

def resident():
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) / 1024

def held():
    # Bytes on the device, and what wgpu-native counts: buffers, pipelines, bind groups.
    from wgpu.backends.wgpu_native._helpers import generate_report
    hub = generate_report()["hub"]
    kept = [hub[kind]["kept"] for kind in ("buffers", "computePipelines", "bindGroups")]
    pool = device.get()._pool
    return [sum(each.size for each in pool.idle.values()), *kept]

shapes = [(name, 128 * (100 + 3 * n)) for n in range({shapes}) for name in OPERATORS]
jitted = {{name: jax.jit(f) for name, f in OPERATORS.items()}}

def call(n):
    name, size = shapes[n % len(shapes)]
    x = np.arange(size, dtype=np.float32)
    f = jitted[name] if n // len(shapes) % 2 else OPERATORS[name]
    y = f(x)
    assert n % 50 or right(name, y, x)
    jax.block_until_ready(y)

for n in range(3 * len(shapes)):
    call(n)
before, on_device = resident(), held()
for n in range({calls}):
    call(n)
grown, later = resident() - before, held()
assert grown < {most}, f"{{grown:.1f}} MiB more after {calls} calls"
assert later == on_device, (on_device, later)

busy, began = time.process_time(), time.monotonic()
time.sleep(5)
busy = time.process_time() - busy
assert busy < 0.1, f"{{busy:.2f}} s of CPU in {{time.monotonic() - began:.1f}} idle ones"
print(json.dumps({{"calls": {calls}, "most shapes": len(shapes),
    "most MiB grown": round(max(0, grown), 1), "most ms of CPU in idle 5 s": round(1e3 * busy)}}))
"""


@pytest.mark.promise("memory")
@pytest.mark.promise("idle")
@pytest.mark.parametrize("callback", ["buffer", "pure"][: 1 + LONG])
def test_memory_is_flat_and_idling_is_cheap(callback, run_snippet, record_property):
    shapes, calls = (100, 5000) if LONG else (8, 400)
    source = CALLS + FLAT.format(shapes=shapes, calls=calls, most=16)
    done = run_snippet(source, timeout=PATIENCE, JAX_WEBGPU_CALLBACK=callback, NPROC="16")
    figures(done, record_property)


# --- bounds -------------------------------------------------------------------------------------


@pytest.fixture
def environment(monkeypatch):
    """Sets an environment variable of ours, which is read once, for a test."""

    def set_(name, value):
        monkeypatch.setenv(name, value)
        config.environment.cache_clear()

    yield set_
    monkeypatch.undo()
    config.environment.cache_clear()


@pytest.mark.promise("bounds")
@pytest.mark.parametrize("unified", [True, False])
@pytest.mark.parametrize("most", [0, 1024, 64 << 10])
def test_the_pool_keeps_no_more_than_its_setting(most, unified, environment, fresh, spied):
    environment("JAX_WEBGPU_POOL_BYTES", str(most))
    gpu = fresh(_UNIFIED=KINDS if unified else ())
    for _ in range(2):
        assert_split_runs(gpu)
        for size in (200, 2000, 20_000):
            x = np.arange(size, dtype=np.uint32)
            plan = planned(lambda x: jax_webgpu.split(x, [7, x.size - 7]), x)
            parts = [np.empty(7, np.uint32), np.empty(size - 7, np.uint32)]
            gpu.run(program.alone(plan), [x[None]], parts)
            np.testing.assert_array_equal(np.concatenate(parts), x)
        gone = {id(each) for each in spied.destroyed}
        alive = [each.size for each in spied.buffers if id(each) not in gone]
        assert sum(alive) == gpu._pool.idle_bytes <= most
    assert bool(alive) == (most > 0)


@pytest.mark.parametrize("text", ["much", "-1", "1.5"])
def test_a_wrong_setting(text, environment):
    environment("JAX_WEBGPU_POOL_BYTES", text)
    expected = f"JAX_WEBGPU_POOL_BYTES is '{text}'; expected a whole number of bytes, 0 or more"
    with pytest.raises(ValueError, match=expected):
        config.settings()
        config.environment()


CLEARED = """
import gc, json
from jax_webgpu import device, plan, program
from wgpu.backends.wgpu_native._helpers import generate_report

KINDS = "buffers computePipelines bindGroups bindGroupLayouts pipelineLayouts shaderModules".split()

def kept():
    gc.collect()
    device.get()._driver.check()
    return [generate_report()["hub"][kind]["kept"] for kind in KINDS]

def resident():
    (line,) = (line for line in open("/proc/self/status") if line.startswith("VmRSS"))
    return int(line.split()[1]) << 10

first = kept()
for size in (1 << 12, 1 << 16):
    x = np.arange(size, dtype=np.float32) % 1000
    for name, f in OPERATORS.items():
        for f in (f, jax.jit(f), jax_webgpu.fuse(f)):
            assert right(name, f(x), x)
large = np.zeros(1 << 24, np.float32)
jax.block_until_ready(split(large))
idle, before, made = device.get()._pool.idle_bytes, resident(), kept()
assert idle >= 2 * large.nbytes and all(now > then for now, then in zip(made[:4], first)), made
jax_webgpu.clear_caches()
assert kept() == first, (first, made, kept())
if jax_webgpu.device_info().kind == "CPU":  # its memory is the host's
    # wgpu keeps a block of memory for buffers that are smaller than these.
    assert before - resident() > 2 * large.nbytes * 0.9, (before, resident(), idle)
caches = [plan, program.alone, jax_webgpu.primitive.Registered.resolve]
assert [cache.cache_info().currsize for cache in caches] == [0, 0, 0]
assert not device.get().linked
for name, f in OPERATORS.items():
    assert right(name, f(x), x)
print(json.dumps({"MiB given back": idle >> 20}))
"""


@pytest.mark.promise("bounds")
def test_clear_caches_gives_all_back(run_snippet, record_property):
    figures(run_snippet(CALLS + CLEARED), record_property)
