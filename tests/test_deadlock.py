"""Programs in which calls and JAX wait for each other. Each in a process of its own, watched.

That `pure` hangs where it may is never asserted: `docs/crossings.md` tells when it was seen.
"""

import pytest
from stress import CALLS, LONG, SCALE, figures

ON_CORES = pytest.mark.parametrize("cores", [1, 2], ids=["one_core", "two_cores"])

# The crossing, and what the program needs for it.
DEFAULT = {"JAX_WEBGPU_CALLBACK": ""}
PURE = {"JAX_WEBGPU_CALLBACK": "pure"}
PURE_WITH_THREADS = PURE | {"NPROC": "16"}


def over_both(promise):
    """A test that holds a promise over the default crossing, and over `pure` the one of that."""
    return pytest.mark.parametrize(
        "crossing",
        [
            pytest.param(DEFAULT, marks=pytest.mark.promise(promise), id="default"),
            pytest.param(PURE_WITH_THREADS, marks=pytest.mark.promise("pure"), id="pure"),
        ],
    )


# What is before a call, the call itself and what is after it are eager or jitted. No result is
# awaited before all calls are made, unless arguments are to be ready.
QUEUE = """
import json
calls = 0
for size, count in {sizes}:
    x = np.arange(size, dtype=np.float32) % 1000
    start = jnp.asarray(x)
    for name, f in OPERATORS.items():
        for before, call, after in {kinds}:
            wrap = lambda jitted, f: jax.jit(f) if jitted else f
            steps = [
                wrap(before, lambda x, i: x * i),
                wrap(call, f),
                wrap(after, lambda y: jax.tree.map(jnp.negative, y)),
            ]
            results = []
            for i in range(count):
                argument = steps[0](start, np.float32(i))
                if {ready}:
                    jax.block_until_ready(argument)
                results.append(steps[2](steps[1](argument)))
                if {ready}:
                    jax.block_until_ready(results[-1])
            for i, y in enumerate(results):
                assert right(name, jax.tree.map(jnp.negative, y), x * i), (name, size, i)
            calls += count
print(json.dumps({{"calls": calls, "most queued": {sizes}[0][1]}}))
"""
SIZES = [(1 << 12, 30), (1 << 16, 30), (98_304, 30), (1 << 22, 30 if LONG else 2)]
KINDS = [(0, 1, 0), (1, 0, 1)] + [(0, 0, 0), (1, 1, 1)] * LONG


def queue(run_snippet, record_property, cores, ready, environment):
    source = CALLS + QUEUE.format(sizes=SIZES * SCALE, kinds=KINDS, ready=ready)
    done = run_snippet(source, cores=cores, timeout=60 * SCALE, **environment)
    figures(done, record_property)


@pytest.mark.promise("queued calls")
@ON_CORES
def test_queued_calls(cores, run_snippet, record_property):
    queue(run_snippet, record_property, cores, False, DEFAULT)


@pytest.mark.promise("pure")
@ON_CORES
def test_queued_calls_over_pure_with_threads(cores, run_snippet, record_property):
    queue(run_snippet, record_property, cores, False, PURE_WITH_THREADS)


@pytest.mark.promise("pure")
def test_awaited_calls_over_pure(run_snippet, record_property):
    """On two cores: on one the only thread is the callback's own, whatever is awaited."""
    queue(run_snippet, record_property, 2, True, PURE)


MESHES = """
import json
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

calls = 0
for devices in (4, 8):
    mesh = jax.make_mesh((devices,), ("shard",), (AxisType.Auto,), devices=jax.devices()[:devices])
    for size, count in {sizes}:
        x = np.arange(devices * size, dtype=np.float32) % 1000
        placed = jax.device_put(x, NamedSharding(mesh, P("shard")))
        for name, f in OPERATORS.items():
            f = jax.jit(jax.shard_map(f, mesh=mesh, in_specs=P("shard"), out_specs=P("shard")))
            results = [f(placed * i) for i in range(count)]
            for i, y in enumerate(results):
                parts = [np.split(np.asarray(part), devices) for part in jax.tree.leaves(y)]
                for n, shard in enumerate(np.split(x, devices)):
                    own = [part[n] for part in parts]
                    assert right(name, own if name == "split" else own[0], i * shard)
            calls += count * devices
print(json.dumps({{"calls": calls, "most devices": devices}}))
"""


@ON_CORES
@over_both("meshes")
def test_calls_of_many_devices(cores, crossing, run_snippet, record_property):
    sizes = [(1 << 16, 10 * SCALE), (1 << 20, 10 if LONG else 3)]
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    source = CALLS + MESHES.format(sizes=sizes)
    done = run_snippet(source, cores=cores, timeout=90 * SCALE, **crossing | flags)
    figures(done, record_property)


# Another user has a device of its own, and waits for it by wgpu's promises and their thread.
COMPANY = """
import json, threading
from concurrent.futures import ThreadPoolExecutor
import wgpu

WGSL = '''
@group(0) @binding(0) var<storage, read_write> data: array<u32>;
@compute @workgroup_size(64) fn main(@builtin(global_invocation_id) id: vec3<u32>) {{
  data[id.x] = data[id.x] + 1u;
}}'''

def use_the_gpu():
    device = wgpu.gpu.request_adapter_sync().request_device_sync()
    usage = wgpu.BufferUsage.STORAGE | wgpu.BufferUsage.COPY_SRC | wgpu.BufferUsage.COPY_DST
    module = device.create_shader_module(code=WGSL)
    pipeline = device.create_compute_pipeline(
        layout="auto", compute={{"module": module, "entry_point": "main"}})
    rounds = 0
    while not over.is_set():
        before = np.arange(4096, dtype=np.uint32) + rounds
        buffer = device.create_buffer_with_data(data=before, usage=usage)
        group = device.create_bind_group(layout=pipeline.get_bind_group_layout(0), entries=[
            {{"binding": 0, "resource": {{"buffer": buffer, "offset": 0, "size": buffer.size}}}}])
        encoder = device.create_command_encoder()
        compute = encoder.begin_compute_pass()
        compute.set_pipeline(pipeline)
        compute.set_bind_group(0, group)
        compute.dispatch_workgroups(64)
        compute.end()
        device.queue.submit([encoder.finish()])
        after = np.frombuffer(device.queue.read_buffer(buffer), np.uint32)
        assert np.array_equal(after, before + 1)
        rounds += 1
    return rounds

jitted = {{name: jax.jit(f) for name, f in OPERATORS.items()}}

def work(thread):
    for i in range({calls}):
        size = (1 << 12, 1 << 16, 98_304)[(thread + i) % 3]
        name = ("split", "rotary")[i % 2]
        x = (np.arange(size, dtype=np.float32) + thread) % 1000
        f = OPERATORS[name] if i % 4 < 2 else jitted[name]
        assert right(name, f(jnp.asarray(x) * i), x * i), (thread, i)
    return {calls}

# Two threads that use wgpu first can each make an instance of it, and one then waits for ever.
jax_webgpu.device_info()
calls, over = 0, threading.Event()
with ThreadPoolExecutor(9) as pool:
    other = pool.submit(use_the_gpu)
    try:
        for threads in (2, 4, 8):
            calls += sum(pool.map(work, range(threads)))
    finally:
        over.set()
    rounds = other.result()
assert rounds
print(json.dumps({{"calls": calls, "most threads": threads, "submissions of another": rounds}}))
"""


@ON_CORES
@over_both("company")
def test_other_threads_and_another_user(cores, crossing, run_snippet, record_property):
    source = CALLS + COMPANY.format(calls=8 * SCALE)
    done = run_snippet(source, cores=cores, timeout=90 * SCALE, **crossing)
    figures(done, record_property)


# --- the warning --------------------------------------------------------------------------------

WARNED = """
import warnings
import jax, numpy as np
import jax_webgpu

f = lambda x: jax_webgpu.split(x, [1, 2])
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    for callback in ("buffer", "pure", "pure"):
        with jax_webgpu.configure(callback=callback):
            jax.jit(f).lower(np.arange(3))
            jax.jit(f).lower(np.arange(3.0))
        print(sum(each.category is jax_webgpu.DeadlockWarning for each in seen))
for each in seen:
    if each.category is jax_webgpu.DeadlockWarning:
        print("callback=None" in str(each.message), "NPROC=16" in str(each.message))
"""


@pytest.mark.promise("pure")
@pytest.mark.parametrize(("threads", "printed"), [("2", "0 1 1 True True"), ("16", "0 0 0")])
def test_pure_warns_where_it_can_hang(threads, printed, run_snippet):
    """Once a process, when something is lowered that crosses so."""
    done = run_snippet(WARNED, cores=2, NPROC=threads, JAX_WEBGPU_CALLBACK="")
    assert done.stdout.split() == printed.split(), done.stderr
