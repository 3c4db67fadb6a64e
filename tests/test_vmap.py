"""`jax.vmap` of both operators: any arguments, any axes, and one dispatch for the whole batch."""

import itertools
from functools import partial

import jax
import numpy as np
import oracle
import pytest
from calls import counted, eighths, exact_inputs
from cases import RotaryCase, any_bits

import jax_webgpu

SIZE = 3


def mapped(array, axis, draw, size=SIZE):
    """`size` arrays like one, along an axis; the array as it is where the axis is None."""
    if axis is None:
        return array
    return np.stack([draw(array, example) for example in range(size)], axis)


def example(arrays, axes, index):
    """What `jax.vmap` hands to the function of one example."""
    return [
        array if axis is None else np.take(array, index, axis)
        for array, axis in zip(arrays, axes, strict=True)
    ]


def one_by_one(f, arrays, axes, size=SIZE):
    """The loop that `jax.vmap` stands for."""
    results = [f(*example(arrays, axes, index)) for index in range(size)]
    return jax.tree.map(lambda *each: np.stack(each), *results)


def assert_same_bits(actual, expected):
    jax.tree.map(oracle.assert_same_bits, actual, expected)


# --- rotary_embedding: which arguments, along which axes ----------------------------------------

CASES = {
    "rank3-positions": RotaryCase(None, 3, 2, 3, 5, 8, 4, False, "float32", 7),
    "rank3": RotaryCase(None, 3, 2, 3, 5, 8, 4, True, "float32", None),
    "rank4-positions": RotaryCase(None, 4, 2, 3, 5, 8, 4, True, "float32", 7),
    "rank4": RotaryCase(None, 4, 2, 3, 5, 8, 4, False, "float32", None),
}


def rotary_inputs(case, axes, size=SIZE):
    """Inputs of a case that are mapped along `axes`; each example has its own."""
    arrays = case.inputs()
    rng = np.random.default_rng(41)

    def draw(array, _):
        if array.dtype == np.int32:
            return rng.integers(0, case.cache_rows, array.shape, array.dtype)
        return eighths(rng, array.shape)

    # Eighths: the batch may run another variant, which may contract other operations.
    arrays = [draw(a, 0) if a.dtype == np.float32 else a for a in arrays]
    return [mapped(a, axis, draw, size) for a, axis in zip(arrays, axes, strict=True)]


def check_rotary_embedding(run, case, axes, *, size=SIZE, **vmap):
    f = partial(jax_webgpu.rotary_embedding, **case.keywords)
    arrays = rotary_inputs(case, axes, size)
    y, dispatches = counted(run, jax.vmap(f, in_axes=tuple(axes), **vmap), *arrays)
    expected = one_by_one(f, arrays, axes, size)
    out = vmap.get("out_axes", 0)
    oracle.assert_same_bits(y, np.moveaxis(expected, 0, out))
    assert dispatches == 1


def choices(rank_of_each):
    """Each set of arguments that can be mapped; their axes differ, and all are met."""
    turn = itertools.count()
    for given in itertools.product([False, True], repeat=len(rank_of_each)):
        if any(given):
            yield tuple(
                next(turn) % (rank + 1) if is_mapped else None
                for rank, is_mapped in zip(rank_of_each, given, strict=True)
            )


WHICH = [
    pytest.param(CASES[name], axes, id=f"{name}-{'-'.join(map(str, axes))}")
    for name, ranks in (
        ("rank3-positions", (3, 2, 2, 2)),
        ("rank3", (3, 3, 3)),
        ("rank4-positions", (4, 2, 2, 2)),
        ("rank4", (4, 3, 3)),
    )
    for axes in choices(ranks)
]


@pytest.mark.parametrize(("case", "axes"), WHICH)
def test_any_arguments(case, axes, run):
    check_rotary_embedding(run, case, axes)


X_AXES = [
    pytest.param(CASES[name], axis, id=f"{name}-{axis}")
    for name, axes in (("rank3-positions", range(-4, 4)), ("rank4", range(-5, 5)))
    for axis in axes
]


@pytest.mark.parametrize(("case", "axis"), X_AXES)
def test_any_axis_of_x(case, axis, run):
    check_rotary_embedding(run, case, [axis] + [None] * (len(case.shapes) - 1))


@pytest.mark.parametrize("out_axes", [0, 2, -1, 4])
def test_out_axes(out_axes, run):
    check_rotary_embedding(run, CASES["rank4"], (1, 0, 2), out_axes=out_axes)


def test_batch_of_one_folds_without_positions(run):
    """Where x alone is mapped and has a batch of 1, the batch joins the heads in place."""
    case = RotaryCase(None, 4, 1, 3, 5, 8, 0, False, "float32", None)
    check_rotary_embedding(run, case, (0, None, None))
    f = jax.vmap(partial(jax_webgpu.rotary_embedding, **case.keywords), (0, None, None))
    arrays = rotary_inputs(case, (0, None, None))
    assert "transpose" not in str(jax.make_jaxpr(f)(*arrays))
    (plan,) = jax_webgpu.explain(f, *arrays)
    assert dict(plan.resolved.inputs)["x"].shape == (1, SIZE * 3, 5, 8)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("only_x", [True, False])
def test_size_1(name, only_x, run):
    axes = [0] + [None if only_x else 0] * (len(CASES[name].shapes) - 1)
    check_rotary_embedding(run, CASES[name], axes, size=1)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("only_x", [True, False])
def test_size_0(name, only_x, run):
    """Nothing to dispatch; a loop over no example has no result, so the shapes are stated."""
    case = CASES[name]
    f = partial(jax_webgpu.rotary_embedding, **case.keywords)
    arrays = case.inputs()
    axes = [0] + [None if only_x else 0] * (len(arrays) - 1)
    arrays = [
        a if axis is None else np.empty((0, *a.shape), a.dtype)
        for a, axis in zip(arrays, axes, strict=True)
    ]
    y, dispatches = counted(run, jax.vmap(f, tuple(axes)), *arrays)
    assert (y.shape, y.dtype, dispatches) == ((0, *case.shapes["x"]), np.float32, 0)


@pytest.mark.parametrize("axes", [(0, None, None), (1, None, 0), (None, 2, 1), (2, 1, 1)], ids=str)
def test_caches_of_one_example_for_all(axes, run):
    """A batch inside the batch: the caches of each call serve all of its examples."""
    case = CASES["rank4"]
    f = partial(jax_webgpu.rotary_embedding, **case.keywords)
    inputs = [a if index == 0 else a[:1] for index, a in enumerate(exact_inputs(case))]
    draw = lambda array, example: array * np.float32(2**-example)  # noqa: E731
    arrays = [mapped(a, axis, draw) for a, axis in zip(inputs, axes, strict=True)]
    y, dispatches = counted(run, jax.vmap(f, axes), *arrays)
    oracle.assert_same_bits(y, one_by_one(f, arrays, axes))
    assert dispatches == 1


# --- nested -------------------------------------------------------------------------------------

# The axes of the outer call and of the inner one.
NESTED = (
    ((0, None, None, None), (0, None, None, None)),
    ((1, 0, 0, None), (0, None, None, 1)),
    ((None, 0, 1, None), (1, 1, 1, None)),
    ((0, None, None, 2), (None, 0, None, 0)),
    ((2, 1, 1, 1), (1, 0, 2, 2)),
    ((None, None, None, 0), (None, 1, 0, None)),
)


@pytest.mark.parametrize(("outer", "inner"), NESTED, ids=str)
def test_nested(outer, inner, run):
    case = CASES["rank4-positions"]
    f = partial(jax_webgpu.rotary_embedding, **case.keywords)
    rng = np.random.default_rng(43)

    def draw(array, _):
        if array.dtype == np.int32:
            return rng.integers(0, case.cache_rows, array.shape, array.dtype)
        return eighths(rng, array.shape)

    arrays = [draw(a, 0) for a in case.inputs()]
    arrays = [mapped(a, axis, draw, 2) for a, axis in zip(arrays, inner, strict=True)]
    arrays = [mapped(a, axis, draw, 3) for a, axis in zip(arrays, outer, strict=True)]
    y, dispatches = counted(run, jax.vmap(jax.vmap(f, inner), outer), *arrays)
    loop = partial(one_by_one, axes=outer, size=3)
    expected = loop(lambda *arrays: one_by_one(f, arrays, inner, 2), arrays)
    oracle.assert_same_bits(y, expected)
    assert dispatches == 1


def test_three_deep_and_axis_name(run):
    """The names of batch axes stay usable around the operator, for collectives among them."""
    case = CASES["rank4"]
    x, cos, sin = exact_inputs(case)
    x = np.stack([np.stack([np.stack([x, 2 * x])] * 2)] * 2)
    f = partial(jax_webgpu.rotary_embedding, cos_cache=cos, sin_cache=sin, **case.keywords)

    def summed(x):
        return jax.lax.psum(f(x), "last")

    y, dispatches = counted(run, jax.vmap(jax.vmap(jax.vmap(summed, axis_name="last"))), x)
    np.testing.assert_array_equal(y[1, 1, 0], 3 * f(x[0, 0, 0]))
    assert dispatches == 1


def test_spmd_axis_name(run):
    """A name of a mesh axis for the batch, as `jax.shard_map` inside would need it."""
    check_rotary_embedding(run, CASES["rank4"], (0, 1, None), spmd_axis_name="replica")
    x = any_bits(np.random.default_rng(3), (SIZE, 4, 6), "float32")
    split = partial(jax_webgpu.split, split=(2, 4), axis=1)
    parts = run(jax.vmap(split, spmd_axis_name="replica"), x)
    oracle.assert_split(parts, x, (2, 4), 2)


# --- positions out of range ---------------------------------------------------------------------


def out_of_range(run, f, *arrays):
    """The message of a call that is refused as it runs.

    JAX raises what a callback raised as a `JaxRuntimeError`; where an earlier call has left it a
    short way to the program, and this waits for the callback, as a `ValueError` of the same text.
    """
    with pytest.raises((jax.errors.JaxRuntimeError, ValueError)) as info:
        jax.block_until_ready(run(f, *arrays))
    return str(info.value)


# The positions' axes in nested calls, their shape, where in the array that the caller has the bad
# one is, and its value, which would be a row of another example's cache.
BAD = (
    ((0,), (SIZE, 2, 5), (1, 0, 3), 7),
    ((0,), (SIZE, 2, 5), (2, 1, 4), -1),
    ((1,), (2, SIZE, 5), (1, 2, 0), 13),
    ((2,), (2, 5, SIZE), (0, 4, 1), -7),
    ((None,), (2, 5), (1, 4), 7),
    ((0, 1), (SIZE, 2, SIZE, 5), (2, 1, 0, 4), 20),
    ((3, 0), (SIZE, 2, 5, SIZE), (0, 1, 2, 2), -1),
    ((None, 2), (2, 5, SIZE), (1, 1, 2), 7),
)


@pytest.mark.parametrize(("axes", "shape", "at", "bad"), BAD, ids=str)
def test_positions_out_of_range(axes, shape, at, bad, run):
    """Named by index and value as the caller gave them: never another example's row."""
    case = CASES["rank4-positions"]
    f = partial(jax_webgpu.rotary_embedding, **case.keywords)
    x, cos, sin, _ = case.inputs()
    caches = [np.broadcast_to(cache, (SIZE,) * len(axes) + cache.shape) for cache in (cos, sin)]
    for axis in reversed(axes):
        f = jax.vmap(f, (None, 0, 0, axis))
    positions = np.full(shape, 6, np.int32)
    assert run(f, x, *caches, positions).shape == (SIZE,) * len(axes) + x.shape
    positions[at] = bad
    index = ", ".join(map(str, at))
    message = out_of_range(run, f, x, *caches, positions)
    assert (
        f"position_ids[{index}] = {bad}; expected 0 to 6, since the caches have 7 rows" in message
    )
    positions[at] = 0  # and the next call works
    assert run(f, x, *caches, positions).shape == (SIZE,) * len(axes) + x.shape


def test_positions_out_of_range_where_x_alone_is_mapped(run):
    """These are the caller's own arrays, and refused before anything runs where it is eager."""
    case = CASES["rank4-positions"]
    f = jax.vmap(partial(jax_webgpu.rotary_embedding, **case.keywords), (1, None, None, None))
    x, cos, sin, positions = case.inputs()
    positions[1, 2] = 7
    message = out_of_range(run, f, np.stack([x, x], 1), cos, sin, positions)
    assert "position_ids[1, 2] = 7; expected 0 to 6" in message


def test_positions_out_of_range_in_a_gradient(run):
    case = CASES["rank4-positions"]
    f = partial(jax_webgpu.rotary_embedding, **case.keywords)
    x, cos, sin, positions = case.inputs()
    gradient = jax.vmap(jax.grad(lambda *a: f(*a).sum(), (0, 1)), (None, 0, 0, 1))
    positions = np.stack([positions, positions], 1)
    positions[1, 0, 4] = 7
    message = out_of_range(run, gradient, x, np.stack([cos, cos]), np.stack([sin, sin]), positions)
    assert "position_ids[1, 0, 4] = 7; expected 0 to 6" in message


# --- with differentiation -----------------------------------------------------------------------


@pytest.mark.parametrize("axes", [(0, None, None, 1), (2, 0, 1, None)], ids=str)
def test_vmap_of_grad(axes, run):
    """One dispatch forward and one back for the batch."""
    case = CASES["rank4-positions"]
    w = eighths(np.random.default_rng(5), case.shapes["x"])

    def loss(x, cos, sin, positions):
        y = jax_webgpu.rotary_embedding(x, cos, sin, positions, **case.keywords)
        return (w * y).sum()

    gradient = jax.grad(loss, argnums=(0, 1, 2))
    arrays = rotary_inputs(case, axes)
    actual, dispatches = counted(run, jax.vmap(gradient, axes), *arrays)
    expected = one_by_one(gradient, arrays, axes)
    jax.tree.map(np.testing.assert_array_equal, actual, expected)
    # The result's own value is used by neither, so that only the jitted call leaves it out.
    assert dispatches <= 2


@pytest.mark.parametrize("axes", [(0, None, None), (1, 0, 2)], ids=str)
def test_grad_of_vmap(axes, run):
    """Cotangents of what is not mapped are sums over the batch."""
    case = CASES["rank3"]
    arrays = rotary_inputs(case, axes)
    w = eighths(np.random.default_rng(5), (SIZE, *case.shapes["x"]))
    f = partial(jax_webgpu.rotary_embedding, **case.keywords)

    def loss(*arrays):
        return (w * jax.vmap(f, axes)(*arrays)).sum()

    actual, dispatches = counted(run, jax.grad(loss, argnums=(0, 1, 2)), *arrays)
    assert dispatches <= 2

    def loss_of(index, *arrays):
        return (w[index] * f(*arrays)).sum()

    for argnum, axis in enumerate(axes):
        gradients = [
            jax.grad(loss_of, argnums=1 + argnum)(index, *example(arrays, axes, index))
            for index in range(SIZE)
        ]
        expected = sum(gradients) if axis is None else np.stack(gradients, axis)
        np.testing.assert_array_equal(actual[argnum], expected)


def test_vmap_and_grad_of_split(run):
    x = eighths(np.random.default_rng(5), (SIZE, 4, 6))

    def loss(x):
        first, _, last = jax_webgpu.split(x, (1, 2, 3), axis=-1)
        return (first * first).sum() + last.sum()

    expected = np.concatenate([2 * x[..., :1], np.zeros((3, 4, 2)), np.ones((3, 4, 3))], axis=-1)
    np.testing.assert_array_equal(run(jax.vmap(jax.grad(loss)), x), expected)
    np.testing.assert_array_equal(
        run(jax.vmap(jax.grad(loss), 1, 1), np.swapaxes(x, 0, 1)), np.swapaxes(expected, 0, 1)
    )
    np.testing.assert_array_equal(run(jax.grad(lambda x: jax.vmap(loss)(x).sum()), x), expected)


# --- split --------------------------------------------------------------------------------------


def check_split(run, shape, in_axis, axis, sizes, dtype="float32", size=SIZE, **vmap):
    """`shape` is that of one example."""
    rng = np.random.default_rng(18)
    x = mapped(np.zeros(shape), in_axis, lambda a, _: any_bits(rng, a.shape, dtype), size)
    f = partial(jax_webgpu.split, split=sizes, axis=axis)
    parts, dispatches = counted(run, jax.vmap(f, in_axis, **vmap), x)
    expected = one_by_one(lambda x: oracle.split(x, sizes, axis), [x], [in_axis], size)
    out = vmap.get("out_axes", 0)
    assert_same_bits(parts, tuple(np.moveaxis(part, 0, out) for part in expected))
    return dispatches


@pytest.mark.parametrize("axis", [0, -2])
@pytest.mark.parametrize("in_axis", range(-4, 4))
def test_split_along_any_axis(in_axis, axis, run):
    assert check_split(run, (5, 5, 5), in_axis, axis, (2, 0, 3)) == 1


@pytest.mark.parametrize("sizes", [(8,), (4, 4), (1, 3, 4), (2, 2, 2, 2), (1, 2, 0, 4, 1)], ids=str)
@pytest.mark.parametrize("dtype", ["float16", "bool"])
def test_split_of_any_number(sizes, dtype, run):
    assert check_split(run, (3, 8), 1, 1, sizes, dtype) == 1


def test_split_of_many(run):
    """As many dispatches as for one example: groups of five at most, and the groups again."""
    rng = np.random.default_rng(5)
    sizes = tuple(int(n) for n in rng.integers(1, 4, 12))
    shape = (2, sum(sizes))
    x = any_bits(rng, shape, "int32")
    _, dispatches = counted(run, partial(jax_webgpu.split, split=sizes, axis=1), x)
    assert check_split(run, shape, 0, 1, sizes) == dispatches


@pytest.mark.parametrize("out_axes", [1, -1, (2, 0)], ids=str)
def test_out_axes_of_split(out_axes, run):
    x = any_bits(np.random.default_rng(18), (SIZE, 4, 6), "float32")
    f = partial(jax_webgpu.split, split=(2, 4), axis=1)
    parts = run(jax.vmap(f, out_axes=out_axes), x)
    each = out_axes if isinstance(out_axes, tuple) else (out_axes, out_axes)
    expected = oracle.split(x, (2, 4), 2)
    for part, true, out in zip(parts, expected, each, strict=True):
        oracle.assert_same_bits(part, np.moveaxis(true, 0, out))


@pytest.mark.parametrize("in_axis", [0, 2])
def test_split_size_1(in_axis, run):
    assert check_split(run, (4, 6), in_axis, 1, (1, 5), size=1) == 1


@pytest.mark.parametrize("in_axis", [0, 1, 2])
def test_split_size_0(in_axis, run):
    x = np.zeros(np.insert((4, 6), in_axis, 0), np.float32)
    f = jax.vmap(partial(jax_webgpu.split, split=(1, 5), axis=1), in_axis)
    parts, dispatches = counted(run, f, x)
    assert ([part.shape for part in parts], dispatches) == ([(0, 4, 1), (0, 4, 5)], 0)


@pytest.mark.parametrize(("outer", "inner"), [(0, 0), (1, 2), (3, 0), (-1, -1)])
@pytest.mark.parametrize("axis", [0, 1])
def test_split_nested(outer, inner, axis, run):
    shape = list(np.insert((5, 5), inner % 3, 2))
    x = any_bits(np.random.default_rng(18), tuple(np.insert(shape, outer % 4, 3)), "int32")
    f = partial(jax_webgpu.split, num_outputs=2, axis=axis)
    parts, dispatches = counted(run, jax.vmap(jax.vmap(f, inner), outer), x)
    in_front = np.moveaxis(np.moveaxis(x, outer, 0), inner if inner < 0 else inner + 1, 1)
    oracle.assert_split(parts, in_front, (3, 2), 2 + axis)
    assert dispatches == 1


def test_not_mapped(run):
    """A call that no batch axis reaches is made once."""
    x = any_bits(np.random.default_rng(18), (6,), "float32")

    def f(one, x):
        return one, jax_webgpu.split(x, (2, 4))

    (_, parts), dispatches = counted(run, jax.vmap(f, (0, None)), np.ones(4, np.float32), x)
    for part, expected in zip(parts, oracle.split(x, (2, 4), 0), strict=True):
        oracle.assert_same_bits(part, np.stack([expected] * 4))
    assert dispatches == 1


# --- crossings ----------------------------------------------------------------------------------


@pytest.mark.parametrize("callback", ["buffer", "pure"])
def test_crossings(callback, run):
    with jax_webgpu.configure(callback=callback):
        for axes in (0, None, None, None), (1, 0, 2, 1):
            check_rotary_embedding(run, CASES["rank4-positions"], axes)
        assert check_split(run, (4, 6), 1, 0, (1, 3), "float16") == 1
        test_positions_out_of_range((1,), (2, SIZE, 5), (1, 2, 0), 7, run)
