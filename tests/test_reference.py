"""`configure(implementation="reference")`: the same operators in plain JAX, and `jax.export`."""

from functools import partial

import folders
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from calls import counted, eighths, exact_inputs, names, public_function
from cases import CASES, RotaryCase, SplitCase
from jax import export

import jax_webgpu

by_reference = partial(jax_webgpu.configure, implementation="reference")

ROTARY = RotaryCase("rank4_cache2_pos_quad", 4, 2, 3, 5, 16, 8, True, "float32", 7)
SPLIT = SplitCase("three_outputs", (4, 20), 1, (0, 13, 7), "float16")


def by_id(cases):
    return pytest.mark.parametrize("case", cases, ids=lambda case: case.id)


def assert_right(actual, case, inputs):
    if isinstance(case, RotaryCase):
        oracle.assert_rotary_embedding(actual, *inputs, **case.keywords)
    else:
        oracle.assert_split(tuple(actual), *inputs, case.sizes, case.axis)


# --- results ------------------------------------------------------------------------------------


def check(f, case):
    """Within the bounds that the kernels are held to, and without a dispatch."""
    inputs = case.inputs()
    with jax.enable_x64(case.dtype == "int64"), by_reference():
        actual, dispatches = counted(f, *inputs)
        assert_right(actual, case, inputs)
    assert dispatches == 0


@by_id(CASES)
def test_case(case):
    check(jax.jit(public_function(case)), case)


# Eager, JAX compiles the same program: one of each variant will do.
@by_id({case.variant: case for case in CASES}.values())
def test_eager_case(case):
    check(public_function(case), case)


def derivatives(f, *arrays):
    """The value, a tangent and the cotangents of a function of float arrays, for fixed directions.

    Of eighths, they are exact in both implementations.
    """
    rng = np.random.default_rng(5)
    tangents = tuple(eighths(rng, a.shape, a.dtype) for a in arrays)
    value, tangent = jax.jvp(f, arrays, tangents)
    _, pull_back = jax.vjp(f, *arrays)
    return value, tangent, pull_back(jax.tree.map(lambda y: jnp.full_like(y, 0.125), value))


def test_transformations_agree_with_the_kernels(run):
    case = RotaryCase(None, 3, 2, 3, 5, 8, 4, True, "float32", 7)
    x, cos, sin, ids = exact_inputs(case)
    rotate = partial(public_function(case), position_ids=ids)

    def f(x, cos, sin):
        first, second = jax_webgpu.split(rotate(x, cos, sin), num_outputs=2, axis=-1)
        return first, second * 2

    arrays, axes = (np.stack([x, x / 2]), cos, np.stack([sin, -sin])), (0, None, 0)
    calls = (partial(derivatives, f), (x, cos, sin)), (jax.vmap(f, axes), arrays)
    kernels = [run(call, *given) for call, given in calls]
    with by_reference():
        for (call, given), expected in zip(calls, kernels, strict=True):
            actual, dispatches = counted(run, call, *given)
            jax.tree.map(np.testing.assert_array_equal, actual, expected)
            assert dispatches == 0


@pytest.mark.parametrize("bad", [7, -1, 2**31 - 1])
def test_positions_without_a_row(bad, run):
    """Nothing can raise while plain JAX runs: no other row is taken, and the token is NaNs."""
    x, cos, sin, ids = exact_inputs(ROTARY)
    right = public_function(ROTARY)(x, cos, sin, ids)
    ids[1, 2] = bad
    with by_reference():
        with pytest.raises(ValueError, match=rf"position_ids\[1, 2\] = {bad}; expected 0 to 6"):
            public_function(ROTARY)(x, cos, sin, ids)
        y = run(jax.jit(public_function(ROTARY)), x, cos, sin, ids)
    rotated = y[1, :, 2, : ROTARY.rotary_embedding_dim]
    assert np.isnan(rotated).all() and np.isnan(y).sum() == rotated.size
    np.testing.assert_array_equal(np.where(np.isnan(y), right, y), right)


def test_it_needs_no_adapter(run_snippet):
    source = """
        import sys

        import jax
        import numpy as np

        import jax_webgpu

        jax_webgpu.configure(implementation="reference")
        x, cache = np.ones((1, 1, 3, 2), np.float32), np.ones((1, 3, 1), np.float32)
        f = lambda x: jax_webgpu.split(jax_webgpu.rotary_embedding(x, cache, cache), (1, 2), axis=2)
        print([part.tolist() for part in jax.jit(f)(x)], jax.grad(lambda x: f(x)[1].sum())(x).sum())
        print("wgpu" in sys.modules)
        """
    done = run_snippet(source, JAX_WEBGPU_ADAPTER="there is none of this name")
    assert done.stdout == "[[[[[0.0, 2.0]]]], [[[[0.0, 2.0], [0.0, 2.0]]]]] 4.0\nFalse\n", (
        done.stderr
    )


# --- changing over ------------------------------------------------------------------------------


def test_one_function_before_inside_and_after(run):
    """Also a function that was jitted before sees the change, and again the change back."""
    x, cos, sin, ids = exact_inputs(ROTARY)
    jitted = jax.jit(public_function(ROTARY))
    expected, _ = oracle.rotary_embedding(x, cos, sin, ids, **ROTARY.keywords)

    def dispatches(f):
        y, count = counted(run, f, x, cos, sin, ids)
        np.testing.assert_array_equal(y, expected)
        return count

    for f in (jitted, public_function(ROTARY)):
        assert dispatches(f) == 1
        with by_reference():
            assert dispatches(f) == 0
            with jax_webgpu.configure(implementation="webgpu"):
                assert dispatches(f) == 1
            assert dispatches(f) == 0
        assert dispatches(f) == 1


def test_what_is_compiled_inside_stays_plain():
    """A program that was compiled ahead of time is what it was compiled as."""
    x, cos, sin, ids = exact_inputs(ROTARY)
    with by_reference():
        compiled = jax.jit(public_function(ROTARY)).lower(x, cos, sin, ids).compile()
    y, dispatches = counted(compiled, x, cos, sin, ids)
    np.testing.assert_array_equal(y, public_function(ROTARY)(x, cos, sin, ids))
    assert dispatches == 0


def test_the_jaxpr_says_so():
    x, cos, sin, ids = exact_inputs(ROTARY)
    with by_reference():
        jaxpr = jax.make_jaxpr(public_function(ROTARY))(x, cos, sin, ids)
    assert names(jaxpr.jaxpr) == ["rotary_embedding"]
    assert "implementation=reference" in str(jaxpr)


# --- export -------------------------------------------------------------------------------------


def reloaded(exported, **keywords):
    """As another program would have it."""
    return export.deserialize(exported.serialize(**keywords))


@by_id([ROTARY, SPLIT])
def test_export(case, run):
    inputs = case.inputs()
    with by_reference():
        exported = export.export(jax.jit(public_function(case)))(*inputs)
    assert "custom_call" not in exported.mlir_module()
    for again in (exported, reloaded(exported)):
        # Outside the mode: what was exported is plain JAX for good.
        actual, dispatches = counted(run, again.call, *inputs)
        assert_right(actual, case, inputs)
        assert dispatches == 0


def test_export_of_derivatives(run):
    """An exported function is differentiated as often as it was serialised for."""
    x, cos, sin, ids = exact_inputs(ROTARY)
    f = public_function(ROTARY)
    with by_reference():
        exported = export.export(jax.jit(f))(x, cos, sin, ids)
        again = reloaded(exported, vjp_order=2)
    w = eighths(np.random.default_rng(5), x.shape)

    def loss(f):
        return lambda x, cos, sin: (w * f(x, cos, sin, ids)).sum()

    def gradients(f):
        return jax.grad(loss(f), argnums=(0, 1, 2))

    actual = run(gradients(again.call), x, cos, sin)
    jax.tree.map(np.testing.assert_array_equal, actual, gradients(f)(x, cos, sin))

    def second(f):
        return jax.grad(lambda x, cos: jnp.sum(w * jax.grad(loss(f))(x, cos, sin)), argnums=1)

    np.testing.assert_array_equal(run(second(again.call), x, cos), second(f)(x, cos))


def test_export_of_a_transformed_function(run):
    x, cos, sin, ids = exact_inputs(ROTARY)

    def f(x, cos, sin, ids):
        q, k = jax_webgpu.split(x, num_outputs=2, axis=-1)
        return (jax_webgpu.rotary_embedding(q, cos, sin, ids) * k).sum()

    mapped = jax.vmap(jax.value_and_grad(f), in_axes=(0, None, None, 0))
    x, ids = np.stack([x, x / 2]), np.stack([ids, ids[::-1]])
    with by_reference():
        again = reloaded(export.export(jax.jit(mapped))(x, cos, sin, ids))
    jax.tree.map(
        np.testing.assert_array_equal, run(again.call, x, cos, sin, ids), mapped(x, cos, sin, ids)
    )


def test_export_of_a_result_of_several_arrays(tmp_path, run_snippet):
    """In another process the type is there as soon as the kernel is loaded."""
    path = folders.moments(tmp_path)
    kernel = jax_webgpu.load_kernel(path)
    kernel.defreference(lambda x: (x.sum(1), x.sum(1) ** 2))
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    with by_reference():
        exported = export.export(jax.jit(kernel))(x)
        expected = kernel(x)
    result = reloaded(exported).call(x)
    assert type(result) is type(expected) and result._fields == ("total", "square")
    np.testing.assert_array_equal(result.square, [9, 144])
    written = tmp_path / "exported"
    written.write_bytes(exported.serialize())
    done = run_snippet(
        f"""
        import pathlib
        import jax, numpy as np
        import jax_webgpu
        jax_webgpu.load_kernel({str(path)!r})
        f = jax.export.deserialize(bytearray(pathlib.Path({str(written)!r}).read_bytes()))
        result = f.call(np.ones((2, 3), np.float32))
        assert type(result).__name__ == "Moments" and result.total.tolist() == [3, 3]
        """
    )
    assert done.returncode == 0, done.stderr


def test_export_for_other_platforms():
    """Also for those that have no callbacks at all."""
    inputs = ROTARY.inputs()
    with by_reference():
        f = jax.jit(public_function(ROTARY))
        exported = export.export(f, platforms=("cpu", "cuda", "rocm", "tpu"))(*inputs)
    assert exported.platforms == ("cpu", "cuda", "rocm", "tpu")
    assert_right(reloaded(exported).call(*inputs), ROTARY, inputs)


def test_export_with_symbolic_sizes(run):
    """One program for every batch, number of heads and sequence."""
    case = ROTARY
    x, cos, sin, ids = exact_inputs(case)
    batch, heads, sequence = export.symbolic_shape("batch, heads, sequence")

    def f(x, cos, sin, ids):
        y = public_function(case)(x, cos, sin, ids)
        return jax_webgpu.split(y, (7, 9), axis=-1)

    shapes = (batch, heads, sequence, case.head_size), cos.shape, sin.shape, (batch, sequence)
    dtypes = (np.float32, np.float32, np.float32, np.int32)
    with by_reference():
        structs = [jax.ShapeDtypeStruct(*each) for each in zip(shapes, dtypes, strict=True)]
        again = reloaded(export.export(jax.jit(f))(*structs), vjp_order=1)

    def check(x, ids):
        parts = run(again.call, x, cos, sin, ids)
        jax.tree.map(oracle.assert_same_bits, tuple(parts), f(x, cos, sin, ids))
        ours, exported = (
            run(jax.grad(lambda x, f=f: f(x, cos, sin, ids)[1].sum()), x) for f in (f, again.call)
        )
        oracle.assert_same_bits(exported, ours)

    check(x, ids)
    check(x[:1, :, :2], ids[:1, :2])


def test_export_with_symbolic_sizes_of_one_examples_caches(run):
    """Caches of a batch of 1 serve a batch of any size."""
    case = RotaryCase(None, 3, 2, 3, 5, 8, 4, True, "float32", None)
    x, cos, sin = exact_inputs(case)
    batch, sequence = export.symbolic_shape("batch, sequence")
    f = public_function(case)
    shapes = (batch, sequence, 24), (1, sequence, 2), (1, sequence, 2)
    with by_reference():
        structs = [jax.ShapeDtypeStruct(shape, np.float32) for shape in shapes]
        again = reloaded(export.export(jax.jit(f))(*structs))
    actual = run(again.call, x, cos[:1], sin[:1])
    oracle.assert_same_bits(actual, f(x, cos[:1], sin[:1]))


def test_symbolic_sizes_outside_the_mode(run):
    """A kernel is planned for sizes that are known; the error says what to do."""
    struct = jax.ShapeDtypeStruct(export.symbolic_shape("batch, 8"), np.float32)
    split = partial(jax_webgpu.split, split=(3, 5), axis=1)
    with pytest.raises(ValueError, match=r"float32\[batch,8\].*implementation='reference'"):
        export.export(jax.jit(partial(run, split)))(struct)


@pytest.mark.parametrize("callback", ["buffer", "pure"])
@by_id([ROTARY, SPLIT])
def test_export_outside_the_mode(case, callback):
    """JAX cannot serialise a callback; the error says what to do, and doing it helps."""
    inputs = case.inputs()
    with jax_webgpu.configure(callback=callback):
        f = jax.jit(public_function(case))
        with pytest.raises(NotImplementedError) as info:
            export.export(f)(*inputs)
        assert "configure(implementation='reference')" in str(info.value)
        with by_reference():
            assert_right(reloaded(export.export(f)(*inputs)).call(*inputs), case, inputs)
        # And the function runs on, on the device.
        actual, dispatches = counted(f, *inputs)
        assert_right(actual, case, inputs)
        assert dispatches == 1
