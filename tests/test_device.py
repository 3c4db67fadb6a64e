"""The device: which adapter is taken, what is cached and pooled, what an error leaves behind."""

import gc
import json
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import wgpu
from calls import public_function
from cases import CASES, RotaryCase, SplitCase
from launches import (
    KINDS,
    PARTS,
    X,
    assert_split_runs,
    constant,
    launched,
    planned,
    split_x,
    with_pass,
)
from test_operators import assert_right

import jax_webgpu
from jax_webgpu import capabilities, device, driver, runtime
from jax_webgpu.device import AdapterInfo, choose
from jax_webgpu.program import alone

# --- the choice, on made-up machines ------------------------------------------------------------


def adapter(index, name, kind, backend="Vulkan"):
    return AdapterInfo(index, name, kind, backend, "a driver 1.2", capabilities.make(name))


def machine(*rows):
    return [adapter(index, *row) for index, row in enumerate(rows)]


@pytest.mark.parametrize(
    ("rows", "chosen"),
    [
        ([("cpu", "CPU"), ("small", "IntegratedGPU"), ("large", "DiscreteGPU")], "large"),
        ([("cpu", "CPU"), ("small", "IntegratedGPU")], "small"),
        ([("cpu", "CPU"), ("odd", "Unknown"), ("small", "IntegratedGPU")], "small"),
        ([("cpu", "CPU"), ("odd", "Unknown")], "odd"),
        ([("cpu", "CPU"), ("new", "QuantumGPU"), ("small", "IntegratedGPU")], "small"),
        ([("cpu", "CPU"), ("new", "QuantumGPU")], "new"),
        ([("cpu", "CPU")], "cpu"),
        ([("first", "DiscreteGPU"), ("second", "DiscreteGPU")], "first"),
        ([("gl", "DiscreteGPU", "OpenGL"), ("vk", "DiscreteGPU")], "vk"),
        ([("gl", "DiscreteGPU", "OpenGL"), ("cpu", "CPU")], "cpu"),
        ([("gl cpu", "CPU", "OpenGL"), ("gl gpu", "DiscreteGPU", "OpenGL")], "gl gpu"),
        ([("gl", "Unknown", "OpenGL")], "gl"),
        ([("metal", "IntegratedGPU", "Metal")], "metal"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_hardware_comes_first_and_opengl_last(rows, chosen):
    assert choose(machine(*rows), None).name == chosen


LAPTOP = machine(
    ("Radiant 4090", "DiscreteGPU", "OpenGL"),
    ("llvmpipe", "CPU"),
    ("Radiant 4090", "DiscreteGPU"),
    ("Intelligent UHD 2", "IntegratedGPU"),
)


@pytest.mark.parametrize(
    ("wanted", "index"),
    [("0", 0), ("1", 1), ("3", 3), ("llvm", 1), ("LLVMPIPE", 1), ("uhd", 3), ("radiant", 2)],
)
def test_an_adapter_by_index_or_name(wanted, index):
    assert choose(LAPTOP, wanted).index == index


@pytest.mark.parametrize("wanted", ["4", "GeForce"])
def test_a_wrong_name_lists_what_there_is(wanted):
    with pytest.raises(jax_webgpu.AdapterError) as error:
        choose(LAPTOP, wanted)
    first, *listing = str(error.value).splitlines()
    assert "JAX_WEBGPU_ADAPTER" in first and repr(wanted) in first
    assert listing == [f"  {each.index}: {each}" for each in LAPTOP]
    assert "IntegratedGPU" in listing[3] and "OpenGL" in listing[0]


REMEDIES = ["mesa-vulkan-drivers", "libvulkan1", "Metal", "NVIDIA", "VK_ICD_FILENAMES"]


@pytest.mark.parametrize("wanted", [None, "0", "llvmpipe"])
def test_no_adapter_at_all(wanted):
    with pytest.raises(jax_webgpu.AdapterError, match="no WebGPU adapter") as error:
        choose([], wanted)
    assert all(remedy in str(error.value) for remedy in REMEDIES)


# --- the environment, each in a process of its own ----------------------------------------------

# The best adapter of this machine, shown as several; then what the caller sees.
PRETENDING = """
import dataclasses, json, os
import jax, numpy as np
import jax_webgpu
from jax_webgpu import device

best, describe = device.choose(device.adapters(), None), device._describe
adapter = device._enumerate()[best.index]
shown = json.loads(os.environ["SHOWN"])

def pretend(index, adapter):
    kind, name = shown[index]
    return dataclasses.replace(describe(index, adapter), kind=kind, name=name, backend="Vulkan")

device._enumerate, device._describe = lambda: [adapter] * len(shown), pretend

def outcome(f, *args):
    try:
        return str(jax.block_until_ready(f(*args)))
    except Exception as error:
        return f"{type(error).__name__}: {error}"

split = lambda x: jax_webgpu.split(x, [1, 2])[1]
calls = [outcome(split, np.arange(3)), outcome(jax.jit(split), np.arange(3.0))]
print(json.dumps([outcome(jax_webgpu.device_info), *calls]))
"""
RUNS = ["[1 2]", "[1. 2.]"]


@pytest.fixture
def pretending(run_snippet):
    """The adapter, or why there is none; what two calls gave; and the warnings that were shown."""

    def call(*shown, **environment):
        unset = {"JAX_WEBGPU_ADAPTER": "", "JAX_WEBGPU_REQUIRE_GPU": ""}
        given = {"SHOWN": json.dumps(shown), "PYTHONWARNINGS": "always"}
        done = run_snippet(PRETENDING, **unset | given | environment)
        assert done.returncode == 0, done.stderr
        info, *results = json.loads(done.stdout)
        return info, results, done.stderr.count("SoftwareAdapterWarning: ")

    return call


def test_environment_names_the_adapter(pretending):
    shown = ("DiscreteGPU", "Alpha"), ("CPU", "Beta Two")
    info, results, warned = pretending(*shown, JAX_WEBGPU_ADAPTER="beta")
    assert info.startswith("Beta Two (CPU, Vulkan, ")
    assert results == RUNS
    assert warned == 0  # it was asked for


def test_environment_names_no_adapter(pretending):
    shown = ("DiscreteGPU", "Alpha"), ("CPU", "Beta Two")
    info, results, _ = pretending(*shown, JAX_WEBGPU_ADAPTER="gamma")
    assert info.startswith("AdapterError: JAX_WEBGPU_ADAPTER is 'gamma'")
    for seen in [info, *results]:
        assert "0: Alpha (DiscreteGPU, Vulkan, " in seen and "1: Beta Two (CPU, Vulkan, " in seen
    assert all(result.startswith("JaxRuntimeError: ") for result in results)


def test_a_cpu_adapter_warns_once(pretending):
    info, results, warned = pretending(("CPU", "Beta"), JAX_WEBGPU_REQUIRE_GPU="0")
    assert info.startswith("Beta (CPU")
    assert (results, warned) == (RUNS, 1)


def test_a_gpu_is_required_and_there(pretending):
    shown = ("CPU", "Beta"), ("DiscreteGPU", "Alpha")
    info, results, warned = pretending(*shown, JAX_WEBGPU_REQUIRE_GPU="1")
    assert info.startswith("Alpha (DiscreteGPU")
    assert (results, warned) == (RUNS, 0)


def test_a_gpu_is_required_and_missing(pretending):
    info, results, warned = pretending(("CPU", "Beta"), JAX_WEBGPU_REQUIRE_GPU="1")
    assert info.startswith("AdapterError: JAX_WEBGPU_REQUIRE_GPU")
    for seen in [info, *results]:
        assert "Beta (CPU, Vulkan, " in seen and all(remedy in seen for remedy in REMEDIES)
    assert warned == 0


# --- this machine's adapter ---------------------------------------------------------------------


def test_capabilities_are_the_adapters_in_webgpus_spelling():
    info = jax_webgpu.device_info()
    raw = wgpu.gpu.enumerate_adapters_sync()[info.index]
    limits = dict(info.capabilities.limits)
    assert limits.keys() == capabilities.FLOOR_LIMITS.keys()
    dashed = {name.replace("-", "").lower(): value for name, value in raw.limits.items()}
    assert limits == {name: dashed[name.lower()] for name in limits}
    for name, floor in capabilities.FLOOR_LIMITS.items():
        assert limits[name] <= floor if name.startswith("min") else limits[name] >= floor

    known = {"shader-f16", "timestamp-query", "subgroups"}
    found = device.get().capabilities
    assert found.features <= known
    assert found.has("shader-f16") == ("shader-f16" in raw.features)
    assert found.limits == info.capabilities.limits

    details = dict(found.adapter_info)
    spelled = "vendor architecture device description subgroupMinSize subgroupMaxSize"
    assert details.keys() <= {*spelled.split(), "isFallbackAdapter"}
    assert details["isFallbackAdapter"] == (info.kind == "CPU")
    assert info.name and info.kind in str(info) and info.backend in str(info)


def test_the_device_has_the_limits_of_its_adapter():
    """And not WebGPU's default ones, which a device gets that asks for none."""
    most = device.get().capabilities.limit("maxComputeInvocationsPerWorkgroup")
    x = np.arange(3 * most + 1, dtype=np.uint32)
    with jax_webgpu.configure(tunables={"WORKGROUP_SIZE": most}):
        oracle.assert_split(jax_webgpu.split(x, [5, x.size - 5]), x, [5, x.size - 5], 0)


# What a callback raises arrives as the second, or, once a call of the same jitted function has
# succeeded, as the first: JAX's own fast path does that.
FROM_CALLBACK = ValueError, jax.errors.JaxRuntimeError


# --- caches -------------------------------------------------------------------------------------


def test_pipelines_are_cached_and_bounded(fresh):
    gpu = fresh(MAX_PROGRAMS=3)
    plan = planned(split_x, X)
    kinds = [with_pass(plan, wgsl=f"{plan.passes[0].wgsl}\n// {n}") for n in range(5)]

    def made(*which):
        before = gpu.counters["pipelines"]
        for n in which:
            np.testing.assert_array_equal(launched(gpu, kinds[n])[1], PARTS[1])
        return gpu.counters["pipelines"] - before

    assert made(0, 1, 2, 3, 4) == 5
    assert made(4, 3, 2) == 0
    assert made(0) == 1  # it was forgotten, and now 4 is
    assert made(3, 2, 0) == 0
    assert made(4) == 1


def test_uniforms_are_cached_and_bounded(fresh):
    gpu = fresh(MAX_PROGRAMS=2)

    def made(*sequences):
        before = gpu.counters["uniforms"]
        for sequence in sequences:
            x = np.ones((1, 1, sequence, 2), np.float32)
            cos, sin = np.ones((1, sequence, 1), np.float32), np.ones((1, sequence, 1), np.float32)
            y = np.empty_like(x)
            gpu.run(alone(planned(jax_webgpu.rotary_embedding, x, cos, sin)), [x, cos, sin], [y])
            np.testing.assert_array_equal(y, np.tile(np.float32([0, 2]), (1, 1, sequence, 1)))
        return gpu.counters["uniforms"] - before

    with jax_webgpu.configure(overlays=False):  # whose variants have none
        one = made(1)
        assert one > 0
        assert made(2, 3) == 2 * one
        assert made(3) == 0
        assert made(1) == one


def test_equal_labels_are_not_confused(fresh):
    gpu = fresh()
    for value in (1, 2, 1, 3, 2):
        first, _ = launched(gpu, constant(value))
        assert first.tolist() == [value] * 3
    assert gpu.counters["pipelines"] == 3
    assert_split_runs(gpu)


@pytest.mark.parametrize("callback", ["pure", "buffer"])
def test_a_second_call_makes_nothing(callback, run, spied):
    x = jnp.arange(11 * 12, dtype=jnp.float32).reshape(1, 11, 12)
    cos, sin = jax_webgpu.rotary_cache(11, 6)
    ids = np.arange(11, dtype=np.int32)[None]

    def rotate_and_split(x):
        y = jax_webgpu.rotary_embedding(x, cos, sin, ids, num_heads=2)
        return jax_webgpu.split(y, [3, 8], axis=1)

    def both():
        with jax_webgpu.configure(callback=callback):
            return jax.block_until_ready(run(rotate_and_split, x))

    counters = device.get().counters
    jax.block_until_ready([x, cos, sin])
    both()
    spied.made.clear()
    before = counters.copy()
    both()
    assert spied.made == []
    done = counters - before
    assert {name for name in done if "bytes" not in name} == {"dispatches", "submissions"}
    assert done["dispatches"] == done["submissions"] == 2


def test_buffers_are_pooled_and_bounded(fresh, spied):
    bound = 64 << 10
    gpu = fresh(MAX_IDLE_BYTES=bound)
    for size in (100, 3000, 90, 5000, 20_000, 100_000, 3, 7000, 50_000, 101):
        x = np.arange(size, dtype=np.uint32)
        plan = planned(lambda x: jax_webgpu.split(x, num_outputs=3), x)
        parts = oracle.split(x, oracle.split_sizes(size, 3), 0)
        actual = [np.empty_like(part) for part in parts]
        gpu.run(alone(plan), [x[None]], actual)
        for part, expected in zip(actual, parts, strict=True):
            np.testing.assert_array_equal(part, expected)
        gone = {id(buffer) for buffer in spied.destroyed}
        assert sum(buffer.size for buffer in spied.buffers if id(buffer) not in gone) <= bound
    assert len(gone) == len(spied.destroyed)  # none twice

    made = len(spied.buffers)
    for size in (101, 100, 99, 102):  # of one size class
        x = np.arange(size, dtype=np.uint32)
        sizes = [10, size - 10]
        actual = [np.empty(size, np.uint32) for size in sizes]
        plan = planned(lambda x, sizes=sizes: jax_webgpu.split(x, sizes), x)
        gpu.run(alone(plan), [x[None]], actual)
    assert len(spied.buffers) - made <= 2  # input, outputs


def test_clearing_gives_all_back(fresh, spied):
    gpu = fresh()
    assert_split_runs(gpu)
    gpu.clear()
    assert {id(buffer) for buffer in spied.buffers} == {id(buffer) for buffer in spied.destroyed}
    assert_split_runs(gpu)
    assert gpu.counters["pipelines"] == 2


def test_clear_caches_clears_the_devices_of_the_process(spied):
    def call():
        return np.concatenate(jax_webgpu.split(np.arange(10.0), [3, 7]))

    call()
    jax_webgpu.clear_caches()
    spied.made.clear()
    assert call().tolist() == list(range(10))
    assert {"create_compute_pipeline", "create_buffer"} <= {*spied.made}
    assert spied.buffers
    jax_webgpu.clear_caches()
    assert {id(buffer) for buffer in spied.buffers} <= {id(buffer) for buffer in spied.destroyed}


# The buffers of x and of the results are of 64 KiB or more: if each of 1,000 calls kept one, these
# would take 64 MiB. Measured: less than 1.
SAME_SHAPES = """
for _ in range(4):
    for shape in shapes:
        call(shape)
before = peak()
for index in range(1000):
    call(shapes[index % len(shapes)])
grown = peak() - before
assert grown < 16, f"{grown} MiB for 1,000 calls of {len(shapes)} shapes"
"""

# For a shape that never came before a plan is made and kept (20 KiB, of 1,024 at most), and for
# split a pipeline is made, which takes 400 KiB of lavapipe's memory: 150 would take 60 MiB.
# Measured: 5. JAX has no part in these calls, since it keeps 1.4 MiB for each shape.
NEW_SHAPES = """
def launch(index):
    (plan,) = jax_webgpu.explain(f, *new(index))
    inputs = [
        array.view(buffer.dtype.storage).reshape(buffer.tensor.shape)
        for array, buffer in zip(new(index), plan.inputs)
    ]
    gpu.run(alone(plan), inputs, [np.empty(b.tensor.shape, b.dtype.storage) for b in plan.outputs])

for index in range(50):
    launch(index)
before = peak()
for index in range(50, 200):
    launch(index)
grown = peak() - before
assert grown < 24, f"{grown} MiB for 150 new shapes"
"""

MEASURING = """
import resource, sys
import jax, numpy as np
import jax_webgpu
from jax_webgpu import device
from jax_webgpu.program import alone

device.MAX_PROGRAMS = 16  # so that 150 are many more than are kept
gpu = device.get()

def peak():
    unit = 1 << 20 if sys.platform == "darwin" else 1 << 10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit
"""

MEMORY = {
    "split": """
def f(x):
    return jax_webgpu.split(x, [64, x.shape[1] - 64], axis=1)

def new(index):
    return np.zeros((32, 512 + 4 * index), np.float32),

shapes = [(256 + 8 * n, 512) for n in range(10)]
jitted = jax.jit(f)
call = lambda shape: jax.block_until_ready(jitted(np.zeros(shape, np.float32)))
""",
    "rotary_embedding": """
f = jax_webgpu.rotary_embedding
cache = np.zeros((64, 8), np.float32)
positions = np.zeros((1, 64), np.int32)

def new(index):
    rows = np.zeros((1 + index % 2, 8), np.float32)
    return np.zeros((1, 2 + index // 2, 64, 16), np.float32), rows, rows, positions

shapes = [(1, 16 + n, 64, 16) for n in range(10)]
jitted = jax.jit(f)
call = lambda shape: jax.block_until_ready(
    jitted(np.zeros(shape, np.float32), cache, cache, positions))
""",
}


@pytest.mark.parametrize("operator", MEMORY)
def test_memory_is_flat(operator, run_snippet):
    source = MEASURING + MEMORY[operator] + SAME_SHAPES + NEW_SHAPES
    done = run_snippet(source)
    assert done.returncode == 0, done.stderr


# --- errors -------------------------------------------------------------------------------------

BROKEN = "@compute @workgroup_size(1)\nfn main() {\n  let x = missing;\n}"


def test_a_wgsl_error_shows_numbered_lines():
    gpu = device.get()
    with jax_webgpu.configure(overlays=False):  # a GPU's own variant has another template
        plan = planned(split_x, X)
    with pytest.raises(jax_webgpu.ShaderError) as error:
        launched(gpu, with_pass(plan, wgsl=BROKEN))
    message = str(error.value)
    assert message.startswith(
        f"{plan.passes[0].label}: wgpu {wgpu.__version__} refuses the shader made of "
        "split-n.wgsl.jinja (rendered line 3): "
    )
    assert plan.label in message and "missing" in message
    numbered = [f"{n:4} | {line}" for n, line in enumerate(BROKEN.splitlines(), start=1)]
    assert message.splitlines()[-4:] == numbered
    assert_split_runs(gpu)


def test_a_wgsl_error_reaches_the_caller(run, monkeypatch):
    plan = planned(split_x, X)
    with monkeypatch.context() as patch:
        broken = with_pass(plan, wgsl=BROKEN)
        patch.setattr(runtime.Operator, "plan", lambda *_: broken)
        with pytest.raises(FROM_CALLBACK, match=plan.label) as error:
            jax.block_until_ready(run(split_x, X))
    assert "   3 |   let x = missing;" in str(error.value)
    jax.clear_caches()  # what was lowered keeps its plan
    oracle.assert_split(run(split_x, X), X, [3, 4], 0)


def assert_all_destroyed(spied):
    assert {id(each) for each in spied.buffers} == {id(each) for each in spied.destroyed}


def test_an_error_of_the_driver(fresh, spied):
    gpu = fresh()
    plan = with_pass(planned(split_x, X), workgroups=(70_000, 1, 1))
    with pytest.raises(jax_webgpu.DeviceError, match="65535") as error:
        launched(gpu, plan)
    assert plan.label in str(error.value) and gpu.info.name in str(error.value)
    assert spied.buffers
    assert_all_destroyed(spied)
    assert_split_runs(gpu)


@pytest.mark.parametrize("unified", [True, False])
def test_a_mapping_that_fails(unified, fresh, spied, each_driver, monkeypatch):
    gpu = fresh(_UNIFIED=KINDS if unified else ())
    assert_split_runs(gpu)

    def no_mapping(*args):
        raise RuntimeError("no mapping")

    with monkeypatch.context() as patch:
        patch.setattr(gpu._driver, "wait", no_mapping)
        with pytest.raises(jax_webgpu.DeviceError, match="no mapping"):
            assert_split_runs(gpu)
    assert_split_runs(gpu)


@pytest.mark.parametrize("unified", [True, False])
@pytest.mark.parametrize("kind", [RuntimeError, MemoryError, KeyboardInterrupt])
def test_an_error_while_reading_back(kind, unified, fresh, spied, monkeypatch):
    gpu = fresh(_UNIFIED=KINDS if unified else ())

    def failing(*args, **kwargs):
        raise kind("in the middle")

    with monkeypatch.context() as patch:
        patch.setattr(device._Memory, "read", failing)
        expected = jax_webgpu.DeviceError if kind is RuntimeError else kind
        with pytest.raises(expected, match="in the middle"):
            launched(gpu, planned(split_x, X))
    assert len(spied.buffers) == (2 if unified else 3)  # input, outputs, read-back
    assert_all_destroyed(spied)
    assert_split_runs(gpu)


# --- sizes --------------------------------------------------------------------------------------

EMPTY = (
    SplitCase(None, (5, 0), 0, (2, 3), "float32"),
    SplitCase(None, (0,), 0, (0, 0, 0), "int8"),
    SplitCase(None, (3, 8), 1, (0, 8), "float32"),
    SplitCase(None, (3, 8), 1, (8, 0, 0), "float16"),
    SplitCase(None, (5, 4), 0, (2, 2, 1, 0), "int32", by_number=True),
    SplitCase(None, (12, 5), 0, (3, 3, 3, 3, 0), "uint8", by_number=True),
    RotaryCase(None, 4, 0, 3, 5, 8, 0, False, "float32", 13),
    RotaryCase(None, 4, 2, 3, 0, 8, 0, True, "float16", 13),
    RotaryCase(None, 3, 0, 3, 5, 8, 4, False, "float32", None),
    RotaryCase(None, 3, 2, 3, 0, 10, 0, True, "float32", None),
    RotaryCase(None, 4, 2, 0, 5, 12, 0, False, "float32", 13),
)


@pytest.mark.parametrize("case", EMPTY, ids=lambda case: case.id)
def test_an_empty_array_is_never_bound_as_such(case, run, spied):
    """A binding of size 0 aborts the process."""
    inputs = case.inputs()
    assert_right(run(public_function(case), *inputs), case, inputs)
    assert all(size > 0 for size in spied.bound)


ODD = (
    SplitCase(None, (7,), 0, (3, 4), "float16"),
    SplitCase(None, (3, 5), 1, (1, 1, 3), "float16"),
    SplitCase(None, (13,), 0, (5, 1, 7), "uint8"),
    SplitCase(None, (3, 3), 1, (2, 1), "bool"),
    SplitCase(None, (5,), 0, (1, 3, 1), "int16"),
    RotaryCase(None, 4, 1, 1, 1, 2, 0, False, "float16", 3),
    RotaryCase(None, 3, 3, 1, 5, 2, 0, True, "float16", None),
    RotaryCase(None, 4, 1, 3, 1, 6, 2, False, "float16", 1),
)


@pytest.mark.parametrize("case", ODD, ids=lambda case: case.id)
def test_bytes_that_are_not_whole_words(case, run):
    inputs = case.inputs()
    assert_right(run(public_function(case), *inputs), case, inputs)


@pytest.fixture(params=["native", "portable"])
def each_driver(request, monkeypatch):
    """By wgpu-native's functions, and where these are missing by wgpu's interface."""
    if request.param == "portable":
        monkeypatch.setattr(device, "_driver", driver.Driver)
    else:
        assert type(device.get()._driver) is driver.NativeDriver


@pytest.mark.parametrize("unified", [True, False])
@pytest.mark.parametrize("piece", [256, 1000, 4096])
def test_arrays_of_several_pieces(piece, unified, fresh, each_driver):
    """Whether the host maps what kernels bind or copies in pieces: up, down, and twice."""
    bounds = {"_PIECE_BYTES": piece, "_WRITE_BYTES": 64}
    gpu = fresh(**bounds, _UNIFIED=KINDS if unified else ())
    rng = np.random.default_rng(5)
    for words in ((700, 1, 299), (3, 7000, 298), (1, 63, 2), (1, 10_000), (5, 2, 9)) * 2:
        x = rng.integers(0, 2**32, sum(words), np.uint32)
        program = alone(planned(lambda x, words=words: jax_webgpu.split(x, words), x))
        parts = [np.empty(size, np.uint32) for size in words]
        before = gpu.counters.copy()
        gpu.run(program, [x[None]], parts)
        np.testing.assert_array_equal(np.concatenate(parts), x)
        done = gpu.counters - before
        assert done["bytes in"] == done["bytes out"] == x.nbytes
        pieces = 1 if unified else -(-x.nbytes // piece)
        assert done["submissions"] >= pieces
        assert (done["submissions"] == 1) == (unified or x.nbytes <= 64)


@pytest.mark.halves  # buffers whose elements are no whole words
@pytest.mark.parametrize("unified", [True, False])
@pytest.mark.parametrize("width", [3, 5, 6])
def test_rows_with_gaps_between_them(width, unified, fresh, each_driver):
    """Of 2 bytes an element: rows that are no whole words, of more than one piece."""
    gpu = fresh(
        _PIECE_BYTES=64, _BLOCK_BYTES=64, _WRITE_BYTES=16, _UNIFIED=KINDS if unified else ()
    )
    rng = np.random.default_rng(width)
    count = 48 * width
    wide_x = rng.standard_normal((48, width + 3)).astype(np.float16)
    x = wide_x[:, 1 : 1 + width]
    cos, sin = np.ones((2, 1, count // 2, 1), np.float16)
    wide_y = np.zeros((48, width + 4), np.float16)
    (plan,) = jax_webgpu.explain(
        jax_webgpu.rotary_embedding, x.reshape(1, 1, count // 2, 2), cos, sin
    )
    gpu.run(alone(plan), [x, cos, sin], [wide_y[:, 2 : 2 + width]])
    a, b = x.reshape(-1, 2).T
    turned = np.stack([a - b, a + b], -1).reshape(48, width)
    np.testing.assert_array_equal(wide_y[:, 2 : 2 + width], turned)
    assert not wide_y[:, :2].any() and not wide_y[:, 2 + width :].any()


@pytest.mark.halves  # buffers whose elements are no whole words
@pytest.mark.parametrize("unified", [True, False])
def test_bytes_of_an_array_that_end_within_a_word(unified, fresh, each_driver):
    gpu = fresh(_PIECE_BYTES=64, _WRITE_BYTES=16, _UNIFIED=KINDS if unified else ())
    rng = np.random.default_rng(6)
    for size in (6, 18, 70, 130, 190, 250):
        x = rng.standard_normal((1, 1, size // 2, 2)).astype(np.float16)
        cos, sin = np.ones((2, 1, size // 2, 1), np.float16)
        y = np.empty_like(x)
        program = alone(planned(jax_webgpu.rotary_embedding, x, cos, sin))
        gpu.run(program, [x, cos, sin], [y])
        turned = np.stack([x[..., 0] - x[..., 1], x[..., 1] + x[..., 0]], -1)
        np.testing.assert_array_equal(y, turned)


# --- every element is written -------------------------------------------------------------------

# A call of each variant that can be reached, and each dtype that a buffer holds otherwise.
POISONED = tuple({(case.variant, case.dtype): case for case in reversed(CASES)}.values())


@pytest.fixture
def poisoned(monkeypatch):
    """Fills with a byte what a call gets to write to: device memory, and the arrays outside."""
    byte = [0]
    acquire, launch = device._Pool.acquire, device.Device.run

    def acquire_poisoned(self, *args, **kwargs):
        memory = acquire(self, *args, **kwargs)
        poison = np.full(memory.size, byte[0], np.uint8)
        if memory.usage & wgpu.BufferUsage.MAP_WRITE:
            memory.write(poison, 0)
        else:
            self.driver.send(memory.buffer, poison)
        return memory

    def run_poisoned(self, plan, inputs, outputs):
        for output in outputs:
            output.reshape(-1).view(np.uint8)[:] = byte
        return launch(self, plan, inputs, outputs)

    monkeypatch.setattr(device._Pool, "acquire", acquire_poisoned)
    monkeypatch.setattr(device.Device, "run", run_poisoned)

    def fill(value):
        byte[0] = value

    return fill


@pytest.mark.parametrize("case", POISONED, ids=lambda case: case.id)
def test_no_poison_survives(case, poisoned):
    inputs = case.inputs()
    with jax.enable_x64(case.dtype == "int64"):
        for byte in (0xAB, 0x54, 0xFF):  # the last gives NaNs
            poisoned(byte)
            assert_right(public_function(case)(*inputs), case, inputs)


# --- threads ------------------------------------------------------------------------------------


@pytest.fixture
def hasty():
    """Threads take turns far more often than is usual."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(usual)


def test_eight_threads_of_calls():
    """Eager and jitted calls of both operators at once, most shapes in several threads."""
    cases = [case for case in CASES if case.dtype != "int64"]
    order = np.random.default_rng(8).permutation(len(cases))

    def calls(thread):
        for place in range(12):
            case = cases[order[(5 * thread + place) % len(order)]]
            f, inputs = public_function(case), case.inputs()
            f = jax.jit(f) if (thread + place) % 2 else f
            for _ in range(3):
                assert_right(f(*inputs), case, inputs)
        return thread

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(calls, range(8))) == list(range(8))


def test_eight_threads_on_one_device(hasty, fresh):
    """Of one plan, so that all want the same buffers."""
    gpu, plan = fresh(), planned(split_x, X)

    def launches(thread):
        x = X + np.uint32(1000 * thread)
        for _ in range(50):
            first, second = np.zeros(3, np.uint32), np.zeros(4, np.uint32)
            gpu.run(alone(plan), [x.reshape(plan.inputs[0].tensor.shape)], [first, second])
            assert [*first, *second] == x.tolist()
        return thread

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(launches, range(8))) == list(range(8))
    assert gpu.counters["dispatches"] == 8 * 50


def test_a_device_that_nothing_uses_is_dropped(each_driver, fresh):
    """Nothing that is kept for ever keeps it: a driver may give only some dozens at a time."""
    gpu = fresh()
    assert_split_runs(gpu)
    inner = weakref.ref(gpu._device)
    del gpu
    gc.collect()
    assert inner() is None
