"""Both operators through the public functions, against the NumPy oracles."""

import json
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from calls import counted, public_function
from cases import CASES, LARGE_CASES, ROTARY_CASES, SPLIT_CASES, SPLIT_DTYPES, RotaryCase, SplitCase
from hypothesis import given, settings
from hypothesis import strategies as st

import jax_webgpu
from jax_webgpu import device, runtime
from jax_webgpu.ops import rotary_embedding, split
from jax_webgpu.resolve import Tensor, resolve

SPECS = Path(__file__).parents[1] / "specs"


def assert_right(actual, case, inputs):
    if isinstance(case, RotaryCase):
        oracle.assert_rotary_embedding(actual, *inputs, **case.keywords)
    else:
        oracle.assert_split(actual, *inputs, case.sizes, case.axis)


def check(case, run):
    inputs = case.inputs()
    with jax.enable_x64(case.dtype == "int64"):
        assert_right(run(public_function(case), *inputs), case, inputs)


def by_id(cases):
    return pytest.mark.parametrize("case", cases, ids=lambda case: case.id)


# --- the table itself ---------------------------------------------------------------------------


def test_every_variant_has_a_case():
    variants = {
        (spec, variant["id"])
        for spec in (RotaryCase.spec, SplitCase.spec)
        for variant in json.loads((SPECS / f"{spec}.json").read_text())["variants"]
    }
    assert len(variants) == 21
    assert {(case.spec, case.variant) for case in CASES} == variants
    assert len({case.id for case in CASES + LARGE_CASES}) == len(CASES + LARGE_CASES)


def test_rotary_cases_cover():
    possible = {
        (variant, interleaved, dtype, partly)
        for variant in {case.variant for case in ROTARY_CASES}
        for interleaved in (False, True)
        for dtype in ("float32", "float16")
        for partly in (False, True)
        if not (interleaved and variant.endswith("_output_vec4"))  # which takes halves alone
    }
    assert possible == {
        (case.variant, case.interleaved, case.dtype, case.rotary_embedding_dim > 0)
        for case in ROTARY_CASES
    }
    head_sizes = {2, 4, 6, 8, 10, 12, 16, 20, 24, 64, 80, 96, 128}
    assert {case.head_size for case in ROTARY_CASES} == head_sizes


@by_id([case for case in ROTARY_CASES if case.cache_rows])
def test_position_ids_of_rotary_cases(case):
    *_, position_ids = case.inputs()
    assert len(np.unique(position_ids, axis=0)) == case.batch
    assert position_ids.max() == case.cache_rows - 1
    steps = np.diff(position_ids)
    assert case.sequence == 1 or ((steps < 0).any() and (steps > 0).any())


def test_split_cases_cover():
    assert {len(case.shape) for case in SPLIT_CASES} == {1, 2, 3, 4, 5, 6}
    assert {len(case.sizes) for case in SPLIT_CASES} == {1, 2, 3, 4, 5}
    assert {case.dtype for case in SPLIT_CASES} == set(SPLIT_DTYPES)
    spec = json.loads((SPECS / f"{SplitCase.spec}.json").read_text())
    assert set(spec["typeConstraints"]["T"]) == set(SPLIT_DTYPES)


@by_id([case for case in SPLIT_CASES + LARGE_CASES if isinstance(case, SplitCase)])
def test_sizes_of_split_cases(case):
    n = case.shape[case.axis]
    assert sum(case.sizes) == n
    assert not case.by_number or case.sizes == oracle.split_sizes(n, len(case.sizes))


@pytest.mark.parametrize(
    ("n", "sizes"), [(7, (3, 3, 1)), (5, (2, 2, 1, 0)), (12, (3, 3, 3, 3, 0)), (0, (0, 0))]
)
def test_split_sizes_of_the_oracle(n, sizes):
    assert oracle.split_sizes(n, len(sizes)) == sizes


# --- every variant ------------------------------------------------------------------------------


@by_id(CASES)
def test_case(case, run):
    check(case, run)


@by_id(CASES)
def test_case_of_the_overlays(case):
    """The faster variants beside the manifests, which a CPU adapter takes only when it is told."""
    f = public_function(case)
    with jax_webgpu.configure(tunables={"ON_CPU": True}), jax.enable_x64(case.dtype == "int64"):
        inputs = case.inputs()
        assert {plan.variant.split("_")[-1] for plan in jax_webgpu.explain(f, *inputs)} <= {"items"}
        assert_right(jax.jit(f)(*inputs), case, inputs)


# Kinds of heads: wide vectors, with a tail of even and of odd length; halves of words, of single
# elements, with a boundary, and a tail, in the middle of a vector.
HEADS = ((64, 0), (128, 32), (24, 16), (20, 0), (80, 20), (90, 0), (6, 0), (20, 6), (12, 4))


@pytest.mark.parametrize("heads", [3, 5, 8, 12])
@pytest.mark.parametrize(("size", "dim"), HEADS)
@pytest.mark.parametrize("interleaved", [False, True])
def test_heads_that_share_an_invocation(size, dim, heads, interleaved):
    """However many fit into one, which follows from their number and from BYTES_EACH."""
    for (rank, rows), dtype, most in zip(
        [(3, None), (4, 11), (3, 11), (4, None)],
        ["float32", "float16"] * 2,
        [1, 16, 64, 256],
        strict=True,
    ):
        case = RotaryCase(None, rank, 2, heads, 3, size, dim, interleaved, dtype, rows)
        f, inputs = public_function(case), case.inputs()
        with jax_webgpu.configure(tunables={"ON_CPU": True, "BYTES_EACH": most}):
            (plan,) = jax_webgpu.explain(f, *inputs)
            assert plan.variant.endswith("_items")
            assert_right(jax.jit(f)(*inputs), case, inputs)


@by_id(CASES)
def test_case_on_the_engine(case):
    """Below the public functions, which may choose another variant for the same bits."""
    rules = rotary_embedding.Rules if isinstance(case, RotaryCase) else split.Rules
    inputs = case.inputs()
    spec = rules.operator.spec
    resolved = resolve(
        spec,
        {
            name: Tensor(shape, "int64" if name == "positionIds" else case.dtype)
            for name, shape in case.shapes.items()
            if name in spec.inputs
        },
        attributes=case.attributes,
        outputs={n: shape for n, shape in case.shapes.items() if n in spec.outputs} or None,
    )
    assert rules.operator.plan(resolved, device.get().capabilities).variant == case.variant
    results = runtime.run(rules.operator, resolved, [each for each in inputs if each is not None])
    assert_right(results[0] if isinstance(case, RotaryCase) else results, case, inputs)


@by_id(LARGE_CASES)
def test_more_than_65535_workgroups(case, run):
    with jax_webgpu.configure(tunables={"WORKGROUP_SIZE": 1}):
        check(case, run)


# One call of each shader template, with both element sizes and an empty output among them.
CALLBACK_CASES = (
    RotaryCase("rank4_cache2_pos_quad", 4, 2, 3, 5, 64, 32, True, "float16", 13),
    RotaryCase("rank3_cache3", 3, 2, 3, 5, 10, 4, False, "float32", None),
    RotaryCase("rank3_cache2_pos_output_vec4", 3, 2, 5, 7, 12, 0, False, "float32", 13),
    SplitCase("one_output_copy", (3, 5), 0, (3,), "int8"),
    SplitCase("three_outputs_block_scalar_x4", (3, 20), -1, (7, 6, 7), "float16"),
    SplitCase("four_outputs", (3, 11), 1, (4, 0, 5, 2), "int64"),
)


@pytest.mark.parametrize("callback", ["pure", "buffer"])
@by_id(CALLBACK_CASES)
def test_callback(case, callback, run):
    inputs = case.inputs()
    with jax.enable_x64(case.dtype == "int64"), jax_webgpu.configure(callback=callback):
        # Arguments that are still being computed are what `pure` can deadlock on.
        arrays = jax.block_until_ready([jnp.asarray(array) for array in inputs])
        assert_right(run(public_function(case), *arrays), case, inputs)


# --- what the table does not vary ---------------------------------------------------------------


@by_id(CALLBACK_CASES)
def test_shapes_and_ahead_of_time(case):
    f, inputs = public_function(case), case.inputs()
    with jax.enable_x64(case.dtype == "int64"):
        actual = jax.jit(f).lower(*inputs).compile()(*inputs)
        assert_right(actual, case, inputs)
        for out, expected in zip(
            jax.tree.leaves(jax.eval_shape(f, *inputs)), jax.tree.leaves(actual), strict=True
        ):
            assert (out.shape, out.dtype) == (expected.shape, expected.dtype)


@pytest.mark.parametrize("dtype", ["int32", "uint32", "int64"])
def test_dtypes_of_position_ids(dtype, run):
    case = RotaryCase(None, 4, 2, 3, 5, 8, 0, False, "float32", 11)
    *arrays, position_ids = case.inputs()
    inputs = (*arrays, position_ids.astype(dtype))
    with jax.enable_x64(dtype == "int64"):
        assert_right(run(public_function(case), *inputs), case, inputs)


@pytest.mark.parametrize(
    "case",
    [
        RotaryCase(None, 4, 2, 3, 0, 8, 0, False, "float32", 11),
        RotaryCase(None, 3, 0, 3, 5, 10, 4, True, "float16", None),
    ],
    ids=["sequence", "batch"],
)
def test_rotary_embedding_of_nothing(case, run):
    check(case, run)


def test_num_heads_may_repeat_what_a_rank_4_shape_says(run):
    case = RotaryCase(None, 4, 2, 3, 5, 8, 0, True, "float32", 11)
    inputs = case.inputs()
    y = run(partial(public_function(case), num_heads=3), *inputs)
    assert_right(y, case, inputs)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("base", [10_000.0, 500_000.0])
def test_rotary_cache(base, dtype):
    caches = jax_webgpu.rotary_cache(5000, 12, base=base, dtype=dtype)
    # Of the published formula, p · base^(-2i/d) for pair i of d/2.
    angles = np.arange(5000)[:, None] / base ** (np.arange(0, 12, 2) / 12)
    for cache, expected in zip(caches, (np.cos(angles), np.sin(angles)), strict=True):
        assert (cache.shape, cache.dtype) == ((5000, 6), dtype)
        # Rounded once, to nearest; 1e-11 is for the angles, which are up to 5000, in float64.
        half_ulp = np.spacing(abs(np.asarray(cache))).astype(np.float64) / 2
        assert np.all(abs(np.asarray(cache, np.float64) - expected) <= half_ulp + 1e-11)


def test_rotary_cache_is_float32_with_base_10000_by_default():
    explicit = jax_webgpu.rotary_cache(7, 6, base=10_000.0, dtype=jnp.float32)
    for cache, expected in zip(jax_webgpu.rotary_cache(7, 6), explicit, strict=True):
        oracle.assert_same_bits(cache, expected)


# --- properties ---------------------------------------------------------------------------------

bounded = settings(max_examples=40, deadline=None, derandomize=True, database=None)


@st.composite
def rotary_cases(draw):
    head_size = 2 * draw(st.integers(1, 14))
    batch = draw(st.integers(1, 3))
    return RotaryCase(
        None,
        rank=draw(st.sampled_from([3, 4])),
        batch=batch,
        heads=draw(st.integers(1, 4)),
        sequence=draw(st.integers(1, 6)),
        head_size=head_size,
        rotary_embedding_dim=draw(st.sampled_from(range(0, head_size + 1, 2))),
        interleaved=draw(st.booleans()),
        dtype=draw(st.sampled_from(["float32", "float16"])),
        cache_rows=draw(st.none() | st.integers(1, 9)),
    )


@st.composite
def split_cases(draw):
    shape = draw(st.lists(st.integers(0, 6), min_size=1, max_size=6))
    axis = draw(st.integers(-len(shape), len(shape) - 1))
    by_number = draw(st.booleans())
    if by_number:
        shape[axis] = draw(st.integers(0, 24))
        sizes = oracle.split_sizes(shape[axis], draw(st.integers(1, 5)))
    else:
        sizes = tuple(draw(st.lists(st.integers(0, 9), min_size=1, max_size=5)))
        shape[axis] = sum(sizes)
    dtype = draw(st.sampled_from(SPLIT_DTYPES))
    return SplitCase(None, tuple(shape), axis, sizes, dtype, by_number)


@bounded
@given(case=rotary_cases())
def test_any_rotary_embedding(case, run):
    check(case, run)


@bounded
@given(case=split_cases())
def test_any_split(case, run):
    check(case, run)


@pytest.mark.parametrize("overlays", [True, False])
@pytest.mark.parametrize("dtype", ["int32", "uint8", "float16", "complex64"])
@pytest.mark.parametrize("count", [6, 12, 26, 31])
def test_more_outputs_than_the_manifest_has(count, dtype, overlays, run):
    """Any number of parts, uneven and empty ones among them: in one pass, or in groups."""
    rng = np.random.default_rng(count)
    sizes = tuple(int(size) for size in rng.integers(0, 4, count))
    x = rng.integers(0, 200, (3, sum(sizes), 3)).astype(dtype)
    with jax_webgpu.configure(overlays=overlays):
        split, dispatches = counted(run, partial(jax_webgpu.split, split=sizes, axis=1), x)
    oracle.assert_split(split, x, sizes, 1)
    assert (dispatches == 1) == overlays


@pytest.mark.parametrize(("shape", "axis"), [((4, 300), 1), ((300, 7), 0), ((2, 300, 4), 1)])
@pytest.mark.parametrize("count", [20, 100, 300])
def test_any_number_of_equal_outputs_takes_one_pass(count, shape, axis, run):
    x = np.random.default_rng(count).standard_normal(shape).astype(np.float32)
    split, dispatches = counted(run, partial(jax_webgpu.split, num_outputs=count, axis=axis), x)
    oracle.assert_split(split, x, (300 // count,) * count, axis)
    assert dispatches == 1


def test_more_unequal_outputs_than_one_pass_takes(run):
    sizes = tuple(1 + index % 3 for index in range(100))
    x = np.arange(2 * sum(sizes), dtype=np.int32).reshape(2, -1)
    oracle.assert_split(run(partial(jax_webgpu.split, split=sizes, axis=1), x), x, sizes, 1)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("shape", [(0, 3, 16), (2, 0, 16)])
def test_derivatives_of_nothing(shape, interleaved, run):
    """Arrays without elements, of which a part of each head would be rotated."""
    x, cache = jnp.zeros(shape), jnp.zeros((*shape[:2], 2))
    f = partial(
        jax_webgpu.rotary_embedding, num_heads=2, rotary_embedding_dim=4, interleaved=interleaved
    )
    y, moved = run(lambda *given: jax.jvp(f, given, given), x, cache, cache)
    assert y.shape == moved.shape == shape
    grads = run(jax.grad(lambda *given: f(*given).sum(), (0, 1, 2)), x, cache, cache)
    assert [each.shape for each in grads] == [shape, cache.shape, cache.shape]
    with jax_webgpu.configure(implementation="reference"):
        assert run(f, x, cache, cache).shape == shape


def test_explain_takes_the_operators_keywords():
    x, cache = jnp.ones((1, 3, 16)), jnp.ones((1, 3, 2))
    call = partial(jax_webgpu.explain, jax_webgpu.rotary_embedding, x, cache, cache)
    (plan,) = call(num_heads=2, rotary_embedding_dim=4, interleaved=True, device="lavapipe")
    assert plan.variant == "rank3_cache3"
