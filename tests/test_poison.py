"""Every element of a result is written: memory is full of NaNs before each call, and none is left.

Each call is made twice, with other NaNs: it must give the same bits. See `poison`.
"""

from collections import Counter

import folders
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from calls import public_function
from cases import CASES
from fuzz import pool
from fuzz.worker import Chunk
from poison import poisoned
from stress import LONG, SCALE
from test_example_kernels import NAMES, ROOT
from test_operators import assert_right, by_id

import jax_webgpu
from jax_webgpu import config, device, folder, spec, trial

pytestmark = pytest.mark.promise("unwritten output")

X = (np.arange(60, dtype=np.float32) - 30).reshape(5, 12) / 8


@pytest.fixture
def twice(record_property):
    """The results of two calls under poison, which must be free of it and the same bit for bit."""
    counts = Counter()

    def call(f, *args):
        with poisoned() as poison:
            first, second = (jax.tree.map(np.asarray, f(*args)) for _ in range(2))
        assert poison.counts["device buffers"] or not any(a.size for a in jax.tree.leaves(first))
        for one, other in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
            oracle.assert_same_bits(one, other)
            assert not poison.survives(one)
        counts.update({"calls": 2, "fills": poison.counts.total()})
        for name, count in counts.items():
            record_property(name, count)
        return first

    return call


# --- the poison itself --------------------------------------------------------------------------


def test_poison_is_not_a_number_in_any_float_type():
    with poisoned() as poison:
        for dtype in (np.float32, np.float16, jnp.bfloat16):
            array = np.zeros((3, 4), dtype)
            poison.fill(array[:, ::2], "arrays")
            assert np.isnan(array[:, ::2].astype(np.float32)).all()
            assert not array[:, 1::2].any()
        assert len(set(poison.words)) == 3
    assert poison.survives(np.array([0, poison.words[1]], np.uint32))
    assert not poison.survives(np.zeros(4, np.uint32))


@pytest.mark.parametrize("callback", ["pure", "buffer"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_what_a_kernel_leaves_unwritten_is_seen(tmp_path, callback, dtype):
    """A kernel that skips every third element: what it returns there is poison, and none else."""
    half = jax_webgpu.load_kernel(
        folders.write(
            tmp_path,
            "half",
            {"half": "  if (i % 3 != 2) { y[i] = x[i]; }"},
            inputs={"x": {"dtype": "T"}},
            outputs={"y": {"dtype": "T", "shape": "shapes.x"}},
            variants=[
                {"id": "only", "passes": [folders.step("half", ["x", "y"], "numel(shapes.x)")]}
            ],
        )
    )
    x = X.astype(dtype)
    with jax_webgpu.configure(callback=callback), poisoned() as poison:
        first, second = (np.asarray(jax.jit(half)(x)) for _ in range(2))
    left = np.arange(x.size).reshape(x.shape) % 3 == 2
    np.testing.assert_array_equal(np.isnan(first), left)
    np.testing.assert_array_equal(first[~left], x[~left])
    bits = f"u{x.itemsize}"
    assert (first.view(bits) != second.view(bits))[left].all()
    assert poison.counts["device buffers"] >= 4 and poison.counts["results"] == 2
    assert poison.counts["host arrays"] == (2 if callback == "pure" else 0)


# --- the table of variants ----------------------------------------------------------------------


@by_id(CASES)
def test_case(case, twice):
    inputs = case.inputs()
    with jax.enable_x64(case.dtype == "int64"):
        assert_right(twice(jax.jit(public_function(case)), *inputs), case, inputs)


@by_id(CASES)
def test_case_of_the_overlays(case, twice):
    inputs = case.inputs()
    with jax_webgpu.configure(tunables={"ON_CPU": True}), jax.enable_x64(case.dtype == "int64"):
        assert_right(twice(jax.jit(public_function(case)), *inputs), case, inputs)


@pytest.mark.parametrize("callback", ["pure", "buffer"])
@by_id(CASES[::7])
def test_case_over_each_crossing_without_overlays(case, callback, twice):
    inputs = case.inputs()
    with (
        jax_webgpu.configure(callback=callback, overlays=False),
        jax.enable_x64(case.dtype == "int64"),
    ):
        arrays = jax.block_until_ready([jnp.asarray(each) for each in inputs])
        assert_right(twice(jax.jit(public_function(case)), *arrays), case, inputs)


# --- a device whose memory the host does not see ------------------------------------------------

APART = ",".join(name for name in config.FEATURES if name != "mappable-primary-buffers")


@pytest.fixture(scope="module")
def discrete():
    """Such a device, as discrete cards are: arrays are staged in pieces that the host maps."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_WEBGPU_FEATURES", APART)
        config.environment.cache_clear()
        patch.setattr(device, "_devices", [])
        gpu = device.get()
        fleet = device._devices
    config.environment.cache_clear()
    assert not gpu._unified
    return fleet


@pytest.fixture
def staged(discrete, monkeypatch):
    """The device of this process from now on, with pieces so small that a call has several."""
    monkeypatch.setattr(device, "_devices", discrete)
    monkeypatch.setattr(device, "_WRITE_BYTES", 64)
    monkeypatch.setattr(device, "_PIECE_BYTES", 2048)
    return device.get()


@by_id(CASES[:: 1 if LONG else 2])
def test_case_that_is_staged(case, staged, twice):
    inputs, before = case.inputs(), staged.counters["submissions"]
    with jax.enable_x64(case.dtype == "int64"):
        assert_right(twice(jax.jit(public_function(case)), *inputs), case, inputs)
    pieces = sum(np.asarray(each).nbytes for each in inputs) // 2048
    assert staged.counters["submissions"] >= before + 2 * (pieces > 1)


def test_fused_group_that_is_staged(staged, twice):
    assert_group(twice)


FUZZED = [("functions", 12), ("kernels", 6)] + [("fused", 8)] * LONG


@pytest.mark.parametrize(("target", "inputs"), FUZZED)
def test_fuzzed_calls_that_are_staged(target, inputs, monkeypatch, record_property):
    """Each is made under poison (`fuzz.functions` and its like), in a process of its own."""
    monkeypatch.setenv("JAX_WEBGPU_FEATURES", APART)
    result = pool.run([Chunk(target, 5, inputs * SCALE)], workers=1, limit=120)
    told = [f"{failure.input}\n{failure.text}" for failure in result.failures]
    assert not told, "\n\n".join(told)
    record_property("fuzzed", result.tried)


# --- kernels ------------------------------------------------------------------------------------

_KERNEL_CASES = [
    pytest.param(name, case, id=f"{name}-{case.name}")
    for name in NAMES
    for case in trial.read(folder.read(ROOT / name))
]


@pytest.mark.parametrize(("name", "case"), _KERNEL_CASES)
def test_case_of_an_example_kernel(name, case, record_property):
    with poisoned() as poison:
        result = trial.attempt(spec.load(ROOT / name / "manifest.json"), case)
    assert (result.status, result.detail) == (trial.Status.PASSED, "")
    is_empty = not all(case.outputs["y"].tensor.shape)
    assert is_empty or poison.counts["host arrays"]
    record_property("calls", 1)
    record_property("fills", poison.counts.total())


def test_port_that_goes_in_and_out(tmp_path, twice):
    accumulate = jax_webgpu.load_kernel(folders.accumulate(tmp_path))
    for shape in ((7,), (5, 12), (0, 3)):
        state, x = (np.resize(X, shape) * factor for factor in (1, 2))
        found = twice(jax.jit(lambda a, b: accumulate(a, b, amount=0.5)), state, x)
        np.testing.assert_array_equal(found, state + x / 2)


@pytest.mark.parametrize("size", [1, 3, 64, 1000])
def test_buffer_between_passes_that_begins_as_zeros(tmp_path, size, twice):
    """Sums by atomics, and then half of the buffer: what no pass writes must be 0."""
    counted = {
        "id": "only",
        "intermediates": [
            {"id": "sums", "dtype": "uint32", "shape": [size, 2], "zeroInit": True},
        ],
        "passes": [
            folders.step(
                "add",
                ["x", {"name": "sums", "scratch": "sums", "elementType": "atomic<u32>"}],
                "numel(shapes.x)",
            ),
            folders.step("write", [{"name": "sums", "scratch": "sums"}, "y"], "numel(shapes.y)"),
        ],
    }
    kernel = jax_webgpu.load_kernel(
        folders.write(
            tmp_path,
            "histogram",
            {
                "add": f"  atomicAdd(&sums[2u * (u32(x[i]) % {size}u)], 1u);",
                "write": "  y[i] = sums[i];",
            },
            typeConstraints={"T": ["int32"]},
            inputs={"x": {"dtype": "T"}},
            outputs={"y": {"dtype": "uint32", "shape": [size, 2]}},
            variants=[counted],
        )
    )
    x = (np.arange(500) * 7 % 1013).astype(np.int32)
    found = twice(jax.jit(kernel), x)
    np.testing.assert_array_equal(found[:, 0], np.bincount(x % size, minlength=size))
    assert not found[:, 1].any()


# --- groups -------------------------------------------------------------------------------------


def test_fused_group(twice):
    assert_group(twice)


def assert_group(twice):
    """Split, arithmetic, movement, rotation and concatenation, in one submission."""
    rng = np.random.default_rng(7)
    x = rng.standard_normal((2, 4, 3, 24)).astype(np.float32)
    cos, sin = (np.asarray(each) for each in jax_webgpu.rotary_cache(5, 8))
    ids = np.array([[0, 3, 4], [1, 2, 0]], np.int32)

    def f(x):
        q, k, v = jax_webgpu.split(x, num_outputs=3, axis=3)
        q, k = (jax_webgpu.rotary_embedding(each * 2, cos, sin, ids) for each in (q, k))
        return jnp.concatenate([q, k + v], 3), jnp.flip(v, 2).astype(jnp.float16)

    with jax_webgpu.configure(implementation="reference"):
        wanted = f(x)
    found = twice(jax_webgpu.fuse(f), x)
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, np.asarray(other), atol=1e-5, rtol=1e-3)


def test_empty_arrays_need_no_memory(twice):
    found = twice(lambda x: jax_webgpu.split(x, (0, 0), axis=1), np.zeros((3, 0), np.float32))
    assert [part.shape for part in found] == [(3, 0), (3, 0)]
