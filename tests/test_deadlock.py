"""Programs in which calls and JAX wait for each other. Each in a process of its own, watched.

That `pure` hangs where it may is never asserted: `docs/crossings.md` tells when it was seen.
"""

import pytest
from stress import CALLS, LONG, PATIENCE, SCALE, figures

# The crossing, and what the program needs for it.
DEFAULT = {"JAX_WEBGPU_CALLBACK": ""}
PURE = {"JAX_WEBGPU_CALLBACK": "pure"}
PURE_WITH_THREADS = PURE | {"NPROC": "16"}


def over_both(*promises):
    """A test that holds promises over the default crossing, and over `pure` the one of that."""
    held = [pytest.mark.promise(each) for each in promises]
    pure = pytest.mark.promise("pure")
    rows = [
        pytest.param(1, DEFAULT, marks=held, id="default-one_core"),
        pytest.param(2, DEFAULT, marks=held, id="default-two_cores"),
        pytest.param(2, PURE_WITH_THREADS, marks=pure, id="pure-two_cores"),
        pytest.param(1, PURE_WITH_THREADS, marks=pure, id="pure-one_core"),
    ]
    return pytest.mark.parametrize(("cores", "crossing"), rows if LONG else rows[:3])


# What is before a call, the call itself and what is after it are eager or jitted. No result is
# awaited before all calls are made, unless arguments are to be ready.
QUEUE = """
def wrap(jitted, f):
    return jax.jit(f) if jitted else f

calls = 0
for size, count in sizes:
    x = np.arange(size, dtype=np.float32) % 1000
    start = jnp.asarray(x)
    for name, f in OPERATORS.items():
        for before, call, after in kinds:
            first = wrap(before, lambda x, i: x * i)
            then = wrap(call, f)
            last = wrap(after, lambda y: jax.tree.map(jnp.negative, y))
            results = []
            for i in range(count):
                argument = first(start, np.float32(i))
                if ready:
                    jax.block_until_ready(argument)
                results.append(last(then(argument)))
                if ready:
                    jax.block_until_ready(results[-1])
            for i, y in enumerate(results):
                assert right(name, jax.tree.map(jnp.negative, y), x * i), (name, size, i)
            calls += count
"""
SIZES = [(1 << 12, 30), (98_304, 30), (1 << 22, 30 if LONG else 2)] + [(1 << 16, 30)] * LONG
KINDS = [(0, 1, 0), (1, 0, 1)] + [(0, 0, 0), (1, 1, 1)] * LONG

# Another user has a device of its own, and waits for it by wgpu's promises and their thread.
COMPANY = """
import threading
from concurrent.futures import ThreadPoolExecutor
import wgpu

WGSL = '''
@group(0) @binding(0) var<storage, read_write> data: array<u32>;
@compute @workgroup_size(64) fn main(@builtin(global_invocation_id) id: vec3<u32>) {
  data[id.x] = data[id.x] + 1u;
}'''

def use_the_gpu():
    device = wgpu.gpu.request_adapter_sync().request_device_sync()
    usage = wgpu.BufferUsage.STORAGE | wgpu.BufferUsage.COPY_SRC | wgpu.BufferUsage.COPY_DST
    module = device.create_shader_module(code=WGSL)
    pipeline = device.create_compute_pipeline(
        layout="auto", compute={"module": module, "entry_point": "main"})
    rounds = 0
    while not over.is_set():
        before = np.arange(4096, dtype=np.uint32) + rounds
        buffer = device.create_buffer_with_data(data=before, usage=usage)
        group = device.create_bind_group(layout=pipeline.get_bind_group_layout(0), entries=[
            {"binding": 0, "resource": {"buffer": buffer, "offset": 0, "size": buffer.size}}])
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

jitted = {name: jax.jit(f) for name, f in OPERATORS.items()}

def work(thread):
    for i in range(each):
        size = (1 << 12, 1 << 16, 98_304)[(thread + i) % 3]
        name = ("split", "rotary")[i % 2]
        x = (np.arange(size, dtype=np.float32) + thread) % 1000
        f = OPERATORS[name] if i % 4 < 2 else jitted[name]
        assert right(name, f(jnp.asarray(x) * i), x * i), (thread, i)
    return each

over = threading.Event()
with ThreadPoolExecutor(9) as pool:
    other = pool.submit(use_the_gpu)
    try:
        for threads in (2, 4, 8):
            calls += sum(pool.map(work, range(threads)))
    finally:
        over.set()
    rounds = other.result()
assert rounds
seen = {"most threads": threads, "submissions of another": rounds}
"""

SAYING = """
import json
print(json.dumps({"calls": calls} | seen))
"""


@over_both("queued calls", "company")
def test_queued_calls_and_company(cores, crossing, run_snippet, record_property):
    given = f"sizes, kinds, ready, each = {SIZES * SCALE}, {KINDS}, False, {8 * SCALE}\n"
    source = CALLS + given + QUEUE + COMPANY + SAYING
    done = run_snippet(source, cores=cores, timeout=PATIENCE, **crossing)
    figures(done, record_property)
    record_property("most queued", 30)
    assert "DeadlockWarning" not in done.stderr


@pytest.mark.promise("pure")
@pytest.mark.parametrize("operators", [["split"], ["rotary"]][: 1 + LONG])
def test_awaited_calls_over_pure(operators, run_snippet, record_property):
    """On two cores: on one the only thread is the callback's own, whatever is awaited."""
    given = f"OPERATORS = {{name: OPERATORS[name] for name in {operators}}}\n"
    given += f"sizes, kinds, ready, seen = {SIZES * SCALE}, {KINDS}, True, {{}}\n"
    done = run_snippet(CALLS + given + QUEUE + SAYING, cores=2, timeout=PATIENCE, **PURE)
    figures(done, record_property)


MESHES = """
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

calls = 0
for devices in (4, 8):
    mesh = jax.make_mesh((devices,), ("shard",), (AxisType.Auto,), devices=jax.devices()[:devices])
    for size, count in sizes:
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
seen = {"most devices": devices}
"""


@over_both("meshes")
def test_calls_of_many_devices(cores, crossing, run_snippet, record_property):
    given = f"sizes = {[(1 << 16, 10 * SCALE), (1 << 20, 10 if LONG else 1)]}\n"
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    source = CALLS + given + MESHES + SAYING
    done = run_snippet(source, cores=cores, timeout=PATIENCE, **crossing | flags)
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
def test_pure_warns_where_it_can_hang(run_snippet):
    """Once a process, when something is lowered that crosses so."""
    done = run_snippet(WARNED, cores=2, JAX_WEBGPU_CALLBACK="", NPROC="")
    assert done.stdout.split() == ["0", "1", "1", "True", "True"], done.stderr
