"""Arrays beyond the device's limits, and the end of u32 indexing."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from calls import counted

import jax_webgpu
from jax_webgpu import device
from jax_webgpu.capabilities import PRESETS
from jax_webgpu.ops.rotary_embedding import Rules
from jax_webgpu.resolve import Tensor, resolve


@pytest.fixture
def bind_at_most(monkeypatch):
    """Lowers the limits of the device."""

    def lower(most, limit="maxStorageBufferBindingSize"):
        gpu = device.get()
        limits = {**dict(gpu.capabilities.limits), limit: most}
        lowered = replace(gpu.capabilities, limits=tuple(sorted(limits.items())))
        monkeypatch.setattr(gpu, "capabilities", lowered)

    return lower


@pytest.mark.parametrize("limit", ["maxStorageBufferBindingSize", "maxBufferSize"])
@pytest.mark.parametrize("most", [128, 1000, 5000])
@pytest.mark.parametrize(
    ("shape", "heads"), [((3, 3, 5, 16), None), ((2, 7, 24), 2), ((1, 1, 9, 12), None)]
)
@pytest.mark.parametrize("named", [True, False])
def test_rotary_embedding_in_pieces(shape, heads, named, most, limit, bind_at_most, run):
    """Of a table of 200 rows, larger than any limit here, a piece takes the rows that it names."""
    bind_at_most(most, limit)
    rng = np.random.default_rng(most)
    x = rng.standard_normal(shape).astype(np.float32)
    tokens, half = shape[-2], shape[-1] // (heads or 1) // 2
    table = (200, half) if named else (shape[0], tokens, half)
    cos, sin = (rng.standard_normal(table).astype(np.float32) for _ in "cs")
    ids = rng.integers(0, 200, (shape[0], tokens)) if named else None
    f = partial(jax_webgpu.rotary_embedding, num_heads=heads)
    y, dispatches = counted(run, f, x, cos, sin, ids)
    oracle.assert_rotary_embedding(
        y, x, cos, sin, ids, interleaved=False, rotary_embedding_dim=0, num_heads=heads
    )
    explained = jax_webgpu.explain(f, x, cos, sin, ids)
    assert sum(sum(whole.counts) for whole in explained.pieces) in (dispatches, 0)
    assert bool(explained.pieces) == (dispatches > 1)


@pytest.mark.parametrize("most", [4096, 256, 64])
def test_many_parts_in_pieces(most, bind_at_most, run):
    """By rows, and where not even one row fits, part by part."""
    bind_at_most(most)
    x = np.random.default_rng(most).integers(0, 2**32, (20, 77), np.uint32)
    sizes = (1, 2, 3, 4, 5, 6, 7, 8, 9, 32)
    parts, dispatches = counted(run, partial(jax_webgpu.split, split=sizes, axis=1), x)
    oracle.assert_split(parts, x, sizes, 1)
    assert dispatches == {4096: 2, 256: 20 * 10, 64: 20 * 11}[most]
    (explained,) = jax_webgpu.explain(partial(jax_webgpu.split, split=sizes, axis=1), x).pieces
    assert sum(explained.counts) == dispatches


@pytest.mark.parametrize("most", [16, 100, 1000])
@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("dtype", ["int8", "int16", "float32"])
def test_split_in_pieces(dtype, axis, most, bind_at_most, run):
    bind_at_most(most)
    x = np.random.default_rng(most).integers(-128, 128, (7, 5, 6)).astype(dtype)
    sizes = oracle.split_sizes(x.shape[axis], 3)
    parts = run(partial(jax_webgpu.split, num_outputs=3, axis=axis), x)
    oracle.assert_split(parts, x, sizes, axis)


def test_what_cannot_be_cut_is_an_error(bind_at_most):
    """One token of one head is the smallest piece."""
    bind_at_most(32)
    cos, sin = jax_webgpu.rotary_cache(3, 16)
    with pytest.raises(jax.errors.JaxRuntimeError, match="maxStorageBufferBindingSize"):
        jax_webgpu.rotary_embedding(jnp.ones((1, 2, 3, 16)), cos[None], sin[None])


def test_300_mib(run):
    """Beyond the limit of 128 MiB that WebGPU guarantees, for real."""
    x = np.arange(300 << 18).reshape(5, 3, 1024, 5120).astype(np.float32)
    first, second = run(partial(jax_webgpu.split, split=(1000, 24), axis=2), x)
    assert np.array_equal(first, x[:, :, :1000])
    assert np.array_equal(second, x[:, :, 1000:])
    cos, sin = (np.full((1024, 64), value, np.float32) for value in (2, 0))
    cos[7] = 3
    backwards = np.tile(np.arange(1024)[::-1], (5, 1))
    rotate = partial(jax_webgpu.rotary_embedding, rotary_embedding_dim=128)
    y = np.asarray(run(rotate, x, cos, sin, backwards))
    factor = np.ones((1024, 5120), np.float32)
    factor[:, :128] = 2
    factor[1023 - 7, :128] = 3
    assert np.array_equal(y, x * factor)


# --- on paper ------------------------------------------------------------------------------------


def test_explain_shows_the_pieces():
    x = jax.ShapeDtypeStruct((4, 32, 32768, 128), np.float32)
    cache = jax.ShapeDtypeStruct((40000, 64), np.float32)
    ids = jax.ShapeDtypeStruct((4, 32768), np.int32)
    found = jax_webgpu.explain(jax_webgpu.rotary_embedding, x, cache, cache, ids, device="floor")
    (each,), (whole,) = found, found.pieces
    assert whole.plans == (each,) and whole.counts == (16,)
    assert dict(each.resolved.inputs)["x"] == Tensor((1, 8, 32768, 128), "float32")
    assert str(found).startswith("call      RotaryEmbedding(x = float32[4,32,32768,128], cos = ")
    assert "pieces    16, of arrays of at most 134,217,728 bytes\n  16 × Rotary" in str(found)


def test_what_explain_cannot_cut():
    """The tunable is too large for each piece as for the whole."""
    x = jax.ShapeDtypeStruct((2**27, 3), np.float32)
    f = partial(jax_webgpu.split, num_outputs=3, axis=1)
    settings = jax_webgpu.configure(tunables={"WORKGROUP_SIZE": 512})
    with settings, pytest.raises(jax_webgpu.LimitError, match="WORKGROUP_SIZE is 512"):
        jax_webgpu.explain(f, x, device="floor")


def plan(shape):
    """The plan of a call without positions on a device that could bind any array."""
    enough = {"maxStorageBufferBindingSize": 2**40, "maxBufferSize": 2**40}
    limits = {**dict(PRESETS["h200"].limits), **enough}
    capabilities = replace(PRESETS["h200"], limits=tuple(sorted(limits.items())))
    cache = Tensor((shape[0], shape[2], shape[3] // 2), "float32")
    inputs = {"x": Tensor(shape, "float32"), "cos": cache, "sin": cache}
    operator = Rules.operator
    return operator.plan(resolve(operator.spec, inputs), capabilities).passes[0]


def test_the_fold_into_y():
    """65,535 groups of 256 quads are 2**27 elements; one group more is folded."""
    assert plan((1, 65535, 1, 2048)).workgroups == (65535, 1, 1)
    assert plan((1, 65536, 1, 2048)).workgroups == (65535, 2, 1)


@pytest.mark.parametrize(
    ("shape", "items"), [((48, 32768, 1024, 2), 48 << 25), ((3, 1 << 19, 1 << 10, 8), 3 << 29)]
)
def test_beyond_2_to_the_31_elements(shape, items):
    x, y, _ = plan(shape).workgroups
    assert x == 65535
    assert (y - 1) * 65535 * 256 < items <= y * 65535 * 256


def test_the_end_of_u32():
    with pytest.raises(jax_webgpu.LimitError, match=r"x has .* elements of f32.* u32"):
        plan((1 << 12, 1 << 10, 1 << 10, 2))
