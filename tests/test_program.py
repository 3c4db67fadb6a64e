"""Programs: which arrays share a buffer, and that what they share is never needed twice at once."""

from dataclasses import replace
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

import jax_webgpu
from jax_webgpu import capabilities, device
from jax_webgpu.program import Call, Place, alone, link

X = np.random.default_rng(3).standard_normal((1, 2, 5, 8)).astype(np.float32)
COS, SIN = (np.random.default_rng(4 + n).standard_normal((1, 5, 4)).astype("f4") for n in (0, 1))


def rotation(name="lavapipe"):
    (plan,) = jax_webgpu.explain(jax_webgpu.rotary_embedding, X, COS, SIN, device=name)
    return plan


def halves(size=160):
    """A split of X, as the bytes it is, in two."""
    x = jnp.zeros(size, jnp.uint32)
    (plan,) = jax_webgpu.explain(lambda x: jax_webgpu.split(x, num_outputs=2), x, device="lavapipe")
    return plan


def chain(length):
    """Rotations one after the other: x, cos and sin are 0, 1 and 2, and the last is the result."""
    at = [0, *range(3, 3 + length)]
    calls = [Call(rotation(), (a, 1, 2), (b,)) for a, b in pairwise(at)]
    return link("chain", calls, [0, 1, 2], [at[-1]])


def test_one_plan():
    program = alone(rotation())
    assert program is alone(rotation())
    x, cos, sin = program.inputs
    assert (x, cos.buffer, sin.buffer) == (Place(0), 0, 0)
    assert (cos.offset, sin.offset) == (512, 768)  # 320 and 80 bytes, each from a multiple of 256
    assert program.outputs == (Place(1),)
    assert program.sizes == (768 + 80, 320)
    (launch,) = program.launches
    assert [place for place in launch.places if place] == [*program.inputs, *program.outputs]


@pytest.mark.parametrize(("length", "buffers"), [(1, 2), (2, 3), (3, 4), (4, 4), (10, 4)])
def test_a_chain_takes_two_buffers_within(length, buffers):
    program = chain(length)
    assert len(program.sizes) == buffers
    for launch in program.launches:
        *_, y = (place for place in launch.places if place)
        x = launch.places[0]
        assert x.buffer != y.buffer
    assert len({launch.places[0].buffer for launch in program.launches}) == min(length, 3)


def test_a_chain_runs():
    gpu = device.get()
    plan = jax_webgpu.explain(jax_webgpu.rotary_embedding, X, COS, SIN)[0]
    at = [0, *range(3, 13)]
    calls = [Call(plan, (a, 1, 2), (b,)) for a, b in pairwise(at)]
    y, before = np.empty_like(X), gpu.counters.copy()
    gpu.run(link("ten", calls, [0, 1, 2], [12]), [X, COS, SIN], [y])
    expected = X
    for _ in range(10):
        expected = jax_webgpu.rotary_embedding(expected, COS, SIN)
    np.testing.assert_array_equal(y, expected)
    done = gpu.counters - before
    assert done["submissions"] == 1 + 10  # ten of them alone
    assert done["bytes in"] == 11 * (X.nbytes + COS.nbytes + SIN.nbytes)


def test_an_output_that_is_read_again_has_a_buffer_of_its_own():
    """A dispatch may not bind a buffer to read and to write."""
    plan = rotation()
    calls = [Call(plan, (0, 1, 2), (3,)), Call(plan, (3, 1, 2), (4,))]
    program = link("both", calls, [0, 1, 2], [3, 4])
    first, second = program.outputs
    assert first.buffer != second.buffer
    once, twice = np.empty_like(X), np.empty_like(X)
    device.get().run(program, [X, COS, SIN], [once, twice])
    np.testing.assert_array_equal(once, jax_webgpu.rotary_embedding(X, COS, SIN))
    np.testing.assert_array_equal(twice, jax_webgpu.rotary_embedding(once, COS, SIN))


def test_outputs_share_a_buffer():
    program = alone(halves())
    assert program.outputs == (Place(1), Place(1, 512))
    assert program.sizes == (640, 512 + 320)


def test_buffers_are_no_larger_than_the_device_makes_them():
    small = capabilities.make("small", maxBufferSize=800)
    program = alone(replace(rotation(), capabilities=small))
    assert len({place.buffer for place in program.inputs}) == 3
    assert max(program.sizes) <= 800


def test_a_dead_output_gives_its_buffer_back():
    plan = halves()
    inner = halves(80)
    calls = [Call(plan, (0,), (1, 2)), Call(inner, (1,), (3, 4))]
    program = link("dead", calls, [0], [4])
    by_array = {n: program.launches[0].places[n] for n in (1, 2)}
    assert by_array[1].buffer != by_array[2].buffer
    # Array 2 is over when the second call begins: 3 takes its buffer, and none is added.
    assert program.launches[1].places[1].buffer == by_array[2].buffer


# --- what crosses -------------------------------------------------------------------------------


@pytest.mark.parametrize("callback", ["buffer", "pure"])
@pytest.mark.parametrize("rows", [16, 4096])
def test_only_the_rows_that_are_named_cross(rows, callback, run):
    rng = np.random.default_rng(rows)
    x = jnp.asarray(rng.standard_normal((3, 2, 4, 8)), jnp.float32)
    cos, sin = (jnp.asarray(rng.standard_normal((rows, 4)), jnp.float32) for _ in "cs")
    positions = jnp.asarray(rng.integers(0, rows, (3, 4)), jnp.int32)
    jax.block_until_ready([x, cos, sin, positions])
    counters = device.get().counters
    with jax_webgpu.configure(callback=callback):
        before = counters["bytes in"]
        y = jax.block_until_ready(run(jax_webgpu.rotary_embedding, x, cos, sin, positions))
        assert counters["bytes in"] - before == x.nbytes + 2 * 12 * 4 * 4
        beyond = positions.at[2, 1].set(rows)
        with pytest.raises((ValueError, jax.errors.JaxRuntimeError), match=r"position_ids\[2, 1\]"):
            jax.block_until_ready(run(jax_webgpu.rotary_embedding, x, cos, sin, beyond))
    oracle.assert_rotary_embedding(y, *map(np.asarray, (x, cos, sin, positions)))
