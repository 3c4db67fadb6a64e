"""Differentiation of both operators, forward and reverse: values, dtypes, and what runs where."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from calls import counted, eighths, exact_inputs, names, public_function, ulp
from cases import ROTARY_CASES, SPLIT_CASES, RotaryCase, SplitCase
from jax.dtypes import float0
from jax.test_util import check_grads

import jax_webgpu

# The products of the golden tests and `eighths` are exact: they compare with `==`.
same = np.testing.assert_array_equal


def by_id(cases):
    return pytest.mark.parametrize("case", cases, ids=lambda case: case.id)


# --- numerical derivatives of second order ------------------------------------------------------

FAMILIES = (
    ("rank3_cache2_pos", 3, 4),
    ("rank3_cache3", 3, None),
    ("rank4_cache2_pos", 4, 4),
    ("rank4_cache3", 4, None),
)

# The rest of a variant's id, head size and rotary_embedding_dim: a whole head and a part of one.
# As many heads as tokens, and as many in all, so that JAX compiles few shapes.
ROWS = (("", 6, 0), ("", 6, 4), ("_output_vec4", 4, 0), ("_output_vec4", 8, 4))
ROWS += (("_quad", 8, 0), ("_quad", 16, 8))

SECOND_ORDER = tuple(
    RotaryCase(family + rest, rank, 2, 2, 2, size, dim, interleaved, "float32", rows)
    for family, rank, rows in FAMILIES
    for rest, size, dim in ROWS
    for interleaved in (False, True)
    if not (interleaved and rest == "_output_vec4")  # which takes halves alone
)


# With a tail and without, both pairings, both ranks, both kinds of cache, each kind of kernel; six
# tokens share four rows, so that some row is named more than once.
EXACT = (
    RotaryCase("rank4_cache2_pos", 4, 2, 2, 3, 8, 4, True, "float32", 4),
    RotaryCase("rank3_cache2_pos_output_vec4", 3, 2, 2, 3, 8, 4, False, "float32", 4),
    RotaryCase("rank4_cache3_quad", 4, 2, 2, 3, 8, 0, False, "float32", None),
    RotaryCase("rank3_cache3_quad", 3, 2, 2, 3, 8, 0, True, "float32", None),
)


def test_second_order_cases_cover_the_table():
    def kinds(cases):
        return {(case.variant, case.interleaved, case.rotary_embedding_dim > 0) for case in cases}

    assert kinds(SECOND_ORDER) == kinds(ROTARY_CASES)


def check_second_order(f, arrays):
    # The tolerances are JAX's own for float32. A longer step than its own loses less to rounding,
    # and little to truncation: the functions are polynomials of low degree.
    check_grads(f, arrays, order=2, modes=("fwd", "rev"), eps=3e-3)


def rotary_embedding_of(case):
    """A case as a function of x and the caches, and these."""
    x, cos, sin, *position_ids = exact_inputs(case)
    f = public_function(case)
    return lambda x, cos, sin: f(x, cos, sin, *position_ids), (x, cos, sin)


@by_id(SECOND_ORDER + EXACT)
def test_variants(case):
    f, arrays = rotary_embedding_of(case)
    (plan,) = jax_webgpu.explain(f, *arrays, device="lavapipe")
    assert plan.variant == case.variant


@by_id(SECOND_ORDER)
def test_rotary_embedding_to_second_order(case, run):
    f, arrays = rotary_embedding_of(case)
    check_second_order(partial(run, f), arrays)


SPLITS = tuple({case.variant: case for case in SPLIT_CASES if case.dtype == "float32"}.values())
SPLITS += (SplitCase("one_output_copy", (2, 5), 1, (5,), "float32"),)


def test_split_cases_cover_the_table():
    assert {case.variant for case in SPLITS} == {case.variant for case in SPLIT_CASES}


@by_id(SPLITS)
def test_split_to_second_order(case, run):
    x = eighths(np.random.default_rng(7), case.shape)
    check_second_order(partial(run, public_function(case)), (x,))


# --- exact derivatives, from the definition of the rotation -------------------------------------


def pairs_of(case):
    """For each batch, token, head and pair: the places of a and b in x, and of c in the caches."""
    rotary_dim = case.rotary_embedding_dim or case.head_size
    half = rotary_dim // 2

    def in_x(batch, token, head, element):
        if case.rank == 4:
            return batch, head, token, element
        return batch, token, head * case.head_size + element

    for batch, token, head, pair in np.ndindex(case.batch, case.sequence, case.heads, half):
        first, second = (2 * pair, 2 * pair + 1) if case.interleaved else (pair, pair + half)
        places = (in_x(batch, token, head, element) for element in (first, second))
        yield *places, (batch, token, pair)


def in_cache(place, position_ids):
    batch, token, pair = place
    return (position_ids[0][batch, token], pair) if position_ids else place


def true_tangent(case, x, cos, sin, *position_ids, dx, dcos, dsin):
    """For each pair: d(a·c - b·s) = da·c - db·s + a·dc - b·ds, and the other likewise."""
    dy = dx.astype(np.float64)  # the tail's own
    for a, b, place in pairs_of(case):
        at = in_cache(place, position_ids)
        dy[a] = dx[a] * cos[at] - dx[b] * sin[at] + x[a] * dcos[at] - x[b] * dsin[at]
        dy[b] = dx[a] * sin[at] + dx[b] * cos[at] + x[a] * dsin[at] + x[b] * dcos[at]
    return dy


def true_cotangents(case, x, cos, sin, *position_ids, ct):
    """The derivative of the sum of ct · y by each element: its factors, collected."""
    ct_x = ct.astype(np.float64)  # the tail's own
    ct_cos, ct_sin = np.zeros(cos.shape), np.zeros(sin.shape)
    for a, b, place in pairs_of(case):
        at = in_cache(place, position_ids)
        ct_x[a] = ct[a] * cos[at] + ct[b] * sin[at]
        ct_x[b] = ct[b] * cos[at] - ct[a] * sin[at]
        ct_cos[at] += ct[a] * x[a] + ct[b] * x[b]
        ct_sin[at] += ct[b] * x[a] - ct[a] * x[b]
    return ct_x, ct_cos, ct_sin


@by_id(EXACT)
def test_jvp(case, run):
    x, cos, sin, *ids = exact_inputs(case)
    rng = np.random.default_rng(5)
    dx, dcos, dsin = (eighths(rng, a.shape) for a in (x, cos, sin))

    def jvp(arrays, tangents):
        return jax.jvp(lambda *arrays: public_function(case)(*arrays, *ids), arrays, tangents)

    y, dy = run(jvp, (x, cos, sin), (dx, dcos, dsin))
    same(y, oracle.rotary_embedding(x, cos, sin, *ids, **case.keywords)[0])
    same(dy, true_tangent(case, x, cos, sin, *ids, dx=dx, dcos=dcos, dsin=dsin))


@by_id(EXACT)
def test_vjp(case, run):
    x, cos, sin, *ids = exact_inputs(case)
    ct = eighths(np.random.default_rng(5), x.shape)

    def pulled_back(ct, *arrays):
        return jax.vjp(lambda *arrays: public_function(case)(*arrays, *ids), *arrays)[1](ct)

    actual = run(pulled_back, ct, x, cos, sin)
    for each, true in zip(actual, true_cotangents(case, x, cos, sin, *ids, ct=ct), strict=True):
        same(each, true)


@by_id(EXACT[::3])
@pytest.mark.parametrize("argnum", [0, 1, 2])
def test_one_argument_at_a_time(case, argnum, run):
    """The others' tangents are symbolic zeros then."""
    x, cos, sin, *ids = exact_inputs(case)
    arrays = [x, cos, sin]
    w = eighths(np.random.default_rng(5), x.shape)

    def loss(array):
        given = [*arrays[:argnum], array, *arrays[argnum + 1 :]]
        return (w * public_function(case)(*given, *ids)).sum()

    true = true_cotangents(case, *arrays, *ids, ct=w)[argnum]
    same(run(jax.grad(loss), arrays[argnum]), true)
    # And forward: the derivative along the gradient is the gradient's square.
    direction = true.astype(np.float32)
    _, along = run(lambda a, da: jax.jvp(loss, (a,), (da,)), arrays[argnum], direction)
    np.testing.assert_allclose(along, (true * direction).sum(), rtol=1e-6)


@by_id(EXACT[2:])
def test_caches_of_one_example_for_all(case, run):
    """Their cotangents are sums over the batch."""
    x, cos, sin = exact_inputs(case)
    cos, sin = cos[:1], sin[:1]
    ct = eighths(np.random.default_rng(5), x.shape)
    every = [np.broadcast_to(cache, (case.batch, *cache.shape[1:])) for cache in (cos, sin)]
    ct_x, *expected = true_cotangents(case, x, *every, ct=ct)
    actual = run(
        lambda ct, *arrays: jax.vjp(public_function(case), *arrays)[1](ct), ct, x, cos, sin
    )
    same(actual[0], ct_x)
    for each, true in zip(actual[1:], expected, strict=True):
        same(each, true.sum(0, keepdims=True))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("which", ["cos", "sin", "both"])
def test_the_tail_has_no_tangent_from_the_caches(which, interleaved, run):
    """Running the operator on x and the caches' tangents would copy x's tail."""
    case = RotaryCase(None, 4, 2, 2, 3, 8, 4, interleaved, "float32", 4)
    x, cos, sin, ids = exact_inputs(case)
    x[..., 4:] = [np.inf, np.nan, -np.inf, 1.0]  # a product with zero would show, too
    tangents = [np.ones_like(cos) if which in (name, "both") else None for name in ("cos", "sin")]

    def jvp(x, cos, sin):
        given = [tangent is not None for tangent in tangents]

        def f(*varied):
            varied = iter(varied)
            caches = (
                next(varied) if is_given else cache
                for is_given, cache in zip(given, (cos, sin), strict=True)
            )
            return public_function(case)(x, *caches, ids)

        primals = [cache for is_given, cache in zip(given, (cos, sin), strict=True) if is_given]
        return jax.jvp(f, primals, [tangent for tangent in tangents if tangent is not None])[1]

    dy = run(jvp, x, cos, sin)
    same(dy[..., 4:], np.zeros((2, 2, 3, 4)))
    assert np.all(np.isfinite(dy)) and np.all(dy[..., :4].any(axis=-1))


# --- golden numbers, worked out by hand ---------------------------------------------------------


def pulled_back(run, x, cos, sin, ids, ct, **keywords):
    """The cotangents of x, cos and sin."""

    def f(ct, *arrays):
        call = partial(jax_webgpu.rotary_embedding, **keywords)
        return jax.vjp(lambda *arrays: call(*arrays, *ids), *arrays)[1](ct)

    return run(f, *(np.array(a, np.float32) for a in (ct, x, cos, sin)))


def test_golden_partial_rotation(run):
    # One head of 6 of which 4 are rotated, in halves: the pairs are (x0, x2) and (x1, x3), and x4
    # and x5 are copied. Row: c = (2, 3), s = (1, 5); so cos² + sin² is 5 and 34.
    # y  = (1·2 - 3·1, 2·3 - 4·5, 1·1 + 3·2, 2·5 + 4·3, 5, 6) = (-1, -14, 7, 22, 5, 6)
    x, cos, sin = [[[[1, 2, 3, 4, 5, 6]]]], [[[2, 3]]], [[[1, 5]]]
    f = partial(jax_webgpu.rotary_embedding, rotary_embedding_dim=4)
    y = run(f, *(np.array(a, np.float32) for a in (x, cos, sin)))
    same(y, [[[[-1, -14, 7, 22, 5, 6]]]])
    # With u = (7, 8, 9, 10, 11, 12) in the place of y:
    #   x0 = u0·c0 + u2·s0 = 7·2 + 9·1 = 23       x2 = u2·c0 - u0·s0 = 9·2 - 7·1 = 11
    #   x1 = u1·c1 + u3·s1 = 8·3 + 10·5 = 74      x3 = u3·c1 - u1·s1 = 10·3 - 8·5 = -10
    #   cos0 = u0·x0 + u2·x2 = 7·1 + 9·3 = 34     sin0 = u2·x0 - u0·x2 = 9·1 - 7·3 = -12
    #   cos1 = u1·x1 + u3·x3 = 8·2 + 10·4 = 56    sin1 = u3·x1 - u1·x3 = 10·2 - 8·4 = -12
    ct = [[[[7, 8, 9, 10, 11, 12]]]]
    ct_x, ct_cos, ct_sin = pulled_back(run, x, cos, sin, [], ct, rotary_embedding_dim=4)
    same(ct_x, [[[[23, 74, 11, -10, 11, 12]]]])
    same(ct_cos, [[[34, 56]]])
    same(ct_sin, [[[-12, -12]]])


def test_golden_interleaved(run):
    # The same head and row, its pairs now neighbours: (x0, x1) and (x2, x3).
    # y  = (1·2 - 2·1, 1·1 + 2·2, 3·3 - 4·5, 3·5 + 4·3, 5, 6) = (0, 5, -11, 27, 5, 6)
    x, cos, sin = [[[[1, 2, 3, 4, 5, 6]]]], [[[2, 3]]], [[[1, 5]]]
    keywords = {"interleaved": True, "rotary_embedding_dim": 4}
    f = partial(jax_webgpu.rotary_embedding, **keywords)
    y = run(f, *(np.array(a, np.float32) for a in (x, cos, sin)))
    same(y, [[[[0, 5, -11, 27, 5, 6]]]])
    # With u = (7, 8, 9, 10, 11, 12) in the place of y:
    #   x0 = u0·c0 + u1·s0 = 7·2 + 8·1 = 22       x1 = u1·c0 - u0·s0 = 8·2 - 7·1 = 9
    #   x2 = u2·c1 + u3·s1 = 9·3 + 10·5 = 77      x3 = u3·c1 - u2·s1 = 10·3 - 9·5 = -15
    #   cos0 = u0·x0 + u1·x1 = 7·1 + 8·2 = 23     sin0 = u1·x0 - u0·x1 = 8·1 - 7·2 = -6
    #   cos1 = u2·x2 + u3·x3 = 9·3 + 10·4 = 67    sin1 = u3·x2 - u2·x3 = 10·3 - 9·4 = -6
    ct = [[[[7, 8, 9, 10, 11, 12]]]]
    ct_x, ct_cos, ct_sin = pulled_back(run, x, cos, sin, [], ct, **keywords)
    same(ct_x, [[[[22, 9, 77, -15, 11, 12]]]])
    same(ct_cos, [[[23, 67]]])
    same(ct_sin, [[[-6, -6]]])


def test_golden_repeated_positions_and_heads(run):
    # One pair a head, two heads, three tokens at rows 2, 0 and 2 of three: row 1 is not used.
    # Rows: c = (1, 9, 2), s = (3, 9, 5).
    #   head 0: token 0 (1, 2), token 1 (3, 4), token 2 (5, 6)
    #   head 1: token 0 (7, 8), token 1 (9, 10), token 2 (11, 12)
    x = [[[[1, 2], [3, 4], [5, 6]], [[7, 8], [9, 10], [11, 12]]]]
    cos, sin, ids = [[1], [9], [2]], [[3], [9], [5]], np.array([[2, 0, 2]], np.int32)
    # y = (a·c - b·s, a·s + b·c), row 2 for tokens 0 and 2, row 0 for token 1:
    #   head 0: (1·2 - 2·5, 1·5 + 2·2) = (-8, 9), (3·1 - 4·3, 3·3 + 4·1) = (-9, 13),
    #           (5·2 - 6·5, 5·5 + 6·2) = (-20, 37)
    #   head 1: (7·2 - 8·5, 7·5 + 8·2) = (-26, 51), (9·1 - 10·3, 9·3 + 10·1) = (-21, 37),
    #           (11·2 - 12·5, 11·5 + 12·2) = (-38, 79)
    y = run(jax_webgpu.rotary_embedding, *(np.array(a, np.float32) for a in (x, cos, sin)), ids)
    same(y, [[[[-8, 9], [-9, 13], [-20, 37]], [[-26, 51], [-21, 37], [-38, 79]]]])
    # With (u, v) = (1, 0), (0, 1), (1, 1) for the tokens of head 0, (2, 0), (0, 2), (1, -1) of 1:
    #   of x, (u·c + v·s, v·c - u·s):
    #   head 0: (2, -5), (0·1 + 1·3, 1·1 - 0·3) = (3, 1), (2 + 5, 2 - 5) = (7, -3)
    #   head 1: (4, -10), (6, 2), (2 - 5, -2 - 5) = (-3, -7)
    ct = [[[[1, 0], [0, 1], [1, 1]], [[2, 0], [0, 2], [1, -1]]]]
    ct_x, ct_cos, ct_sin = pulled_back(run, x, cos, sin, [ids], ct)
    same(ct_x, [[[[2, -5], [3, 1], [7, -3]], [[4, -10], [6, 2], [-3, -7]]]])
    # Of cos, the sum of u·a + v·b: row 0, token 1 of both heads: 4 + 2·10 = 24
    #   row 2, tokens 0 and 2: head 0: 1 + (5 + 6) = 12; head 1: 2·7 + (11 - 12) = 13; 25
    same(ct_cos, [[24], [0], [25]])
    # Of sin, the sum of v·a - u·b: row 0: 3 + 2·9 = 21
    #   row 2: head 0: -2 + (5 - 6) = -3; head 1: -2·8 + (-11 - 12) = -39; -42
    same(ct_sin, [[21], [0], [-42]])


def test_golden_split(run):
    # Of the parts (x0), (x1, x2), (x3, x4, x5) only the second is used, and twice; the gradient of
    # (2·x1 + 2·x2)² / 4 = (x1 + x2)² is 2·(x1 + x2) = 2·(3 + 5) = 16 for both, and 0 for the rest.
    def f(x):
        _, second, _ = jax_webgpu.split(x, (1, 2, 3))
        return (second + second).sum() ** 2 / 4

    x = np.array([2, 3, 5, 7, 11, 13], np.float32)
    same(run(jax.grad(f), x), [0, 16, 16, 0, 0, 0])


# --- transposition ------------------------------------------------------------------------------


@by_id(EXACT)
def test_linear_transpose(case, run):
    x, cos, sin, *ids = exact_inputs(case)
    ct = eighths(np.random.default_rng(5), x.shape)

    def rotate(x):
        return public_function(case)(x, cos, sin, *ids)

    def transposed(ct):
        return jax.linear_transpose(rotate, x)(ct)[0]

    def twice(x):
        return jax.linear_transpose(transposed, ct)(x)[0]

    same(run(transposed, ct), true_cotangents(case, x, cos, sin, *ids, ct=ct)[0])
    oracle.assert_same_bits(run(twice, x), run(rotate, x))


@pytest.mark.parametrize("case", [EXACT[2], EXACT[3]], ids=lambda case: case.id)
def test_linear_transpose_of_the_caches(case, run):
    """Without a tail the rotation is linear in both caches together."""
    x, cos, sin = exact_inputs(case)
    ct = eighths(np.random.default_rng(5), x.shape)

    def transposed(ct):
        rotate = partial(public_function(case), x)
        return jax.linear_transpose(lambda cos, sin: rotate(cos, sin), cos, sin)(ct)

    _, *expected = true_cotangents(case, x, cos, sin, ct=ct)
    for actual, true in zip(run(transposed, ct), expected, strict=True):
        same(actual, true)


def test_linear_transpose_of_split(run):
    rng = np.random.default_rng(5)
    x, parts = eighths(rng, (3, 9, 2)), [eighths(rng, (3, n, 2)) for n in (4, 0, 5)]
    split = partial(jax_webgpu.split, split=(4, 0, 5), axis=1)

    def joined(parts):
        return jax.linear_transpose(split, x)(tuple(parts))[0]

    def twice(x):
        return jax.linear_transpose(joined, parts)(x)[0]

    oracle.assert_same_bits(run(joined, parts), np.concatenate(parts, axis=1))
    oracle.assert_split(tuple(run(twice, x)), x, (4, 0, 5), 1)


def test_hessian(run):
    """With w a weight, sum(w·y) is bilinear: all of its second derivatives mix x with a cache."""
    case = EXACT[0]
    x, cos, sin, ids = exact_inputs(case)
    w = eighths(np.random.default_rng(5), x.shape)

    def f(x, cos, sin):
        return (w * public_function(case)(x, cos, sin, ids)).sum()

    hessian = run(jax.hessian(f, argnums=(0, 1, 2)), x, cos, sin)
    by_cos, by_sin = np.zeros((*x.shape, *cos.shape)), np.zeros((*x.shape, *sin.shape))
    for a, b, place in pairs_of(case):
        at = in_cache(place, [ids])
        by_cos[(*a, *at)], by_cos[(*b, *at)] = w[a], w[b]
        by_sin[(*a, *at)], by_sin[(*b, *at)] = w[b], -w[a]
    same(hessian[0][0], np.zeros((*x.shape, *x.shape)))
    same(hessian[0][1], by_cos)
    same(hessian[0][2], by_sin)
    same(hessian[1][0], np.moveaxis(by_cos, [4, 5], [0, 1]))
    same(hessian[2][0], np.moveaxis(by_sin, [4, 5], [0, 1]))
    for i, j in np.ndindex(2, 2):
        same(hessian[1 + i][1 + j], np.zeros((*cos.shape, *cos.shape)))


def test_hessian_of_split(run):
    def f(x):
        _, second, _ = jax_webgpu.split(x, (1, 2, 3))
        return second.sum() ** 2 / 2

    block = np.zeros((6, 6))
    block[1:3, 1:3] = 1
    same(run(jax.hessian(f), np.arange(6, dtype=np.float32)), block)


@pytest.mark.parametrize("jacobian", [jax.jacfwd, jax.jacrev])
def test_jacobian_of_split(jacobian, run):
    x = eighths(np.random.default_rng(5), (7,))
    first, second = run(jacobian(partial(jax_webgpu.split, split=(3, 4))), x)
    same(first, np.eye(7)[:3])
    same(second, np.eye(7)[3:])


# --- what runs where ----------------------------------------------------------------------------


def test_the_kernel_rotates_gradients(run):
    case = EXACT[0]
    x, cos, sin, ids = exact_inputs(case)
    dx = eighths(np.random.default_rng(5), x.shape)

    def loss(x):
        return jnp.square(public_function(case)(x, cos, sin, ids)).sum()

    def along(x, dx):
        return jax.jvp(jax.grad(loss), (x,), (dx,))

    # Forward and back; for the second derivative each once more, for its tangent.
    assert names(jax.make_jaxpr(jax.grad(loss))(x).jaxpr).count("rotary_embedding") == 2
    assert names(jax.make_jaxpr(along)(x, dx).jaxpr).count("rotary_embedding") == 4
    assert counted(run, jax.grad(loss), x)[1] == 2
    assert counted(run, along, x, dx)[1] == 4


def test_the_transposed_call_is_the_same_primitive():
    case = EXACT[0]
    x, cos, sin, ids = exact_inputs(case)

    def transposed(ct, cos, sin):
        rotate = jax.linear_transpose(lambda x: public_function(case)(x, cos, sin, ids), x)
        return rotate(ct)[0]

    jaxpr = jax.make_jaxpr(transposed)(x, cos, sin)
    assert names(jaxpr.jaxpr) == ["neg", "rotary_embedding"]
    assert "interleaved=1, rotary_embedding_dim=4" in str(jaxpr)
    # As of any call, its plan can be looked at.
    (plan,) = jax_webgpu.explain(transposed, x, cos, sin, device="lavapipe")
    assert plan.variant == case.variant


def test_split_transposes_to_concatenation():
    x = np.ones((3, 8), np.float32)
    split = partial(jax_webgpu.split, split=(2, 6), axis=1)
    transposed = jax.linear_transpose(split, x)
    assert names(jax.make_jaxpr(transposed)(split(x)).jaxpr) == ["concatenate"]


# --- some of several outputs --------------------------------------------------------------------


@pytest.mark.parametrize("count", [2, 3, 4, 5, 12])
def test_some_outputs_of_split(count, run):
    """The others have no cotangent: zeros stand for them."""
    sizes = tuple(1 + index % 3 for index in range(count))
    x = eighths(np.random.default_rng(count), (2, sum(sizes)))
    used = range(1, count, 2)

    def f(x):
        parts = jax_webgpu.split(x, sizes, axis=1)
        return sum((parts[index] ** 2).sum() for index in used)

    bounds = np.cumsum([0, *sizes])
    expected = np.zeros(x.shape)
    for index in used:
        columns = slice(bounds[index], bounds[index + 1])
        expected[:, columns] = 2 * x[:, columns]
    same(run(jax.grad(f), x), expected)


def test_no_output_of_split(run):
    x = np.ones((2, 6), np.float32)

    def f(x):
        jax_webgpu.split(x, (2, 4), axis=1)
        return jnp.float32(3)

    same(run(jax.grad(f), x), np.zeros((2, 6)))


def test_empty_parts_have_gradients(run):
    def f(x):
        none, rest = jax_webgpu.split(x, (0, 3))
        return none.sum() + (rest * rest).sum()

    same(run(jax.grad(f), np.array([1, 2, 3], np.float32)), [2, 4, 6])


# --- integers -----------------------------------------------------------------------------------


def is_float0(a, shape):
    return a.dtype == float0 and a.shape == shape


@pytest.mark.parametrize("dtype", ["int32", "uint8", "bool"])
def test_split_of_integers(dtype, run):
    x = np.array([0, 1, 1, 0, 1], dtype)
    split = partial(jax_webgpu.split, split=(2, 3))
    parts, tangents = jax.jvp(partial(run, split), (x,), (np.zeros(5, float0),))
    oracle.assert_split(parts, x, (2, 3), 0)
    assert is_float0(tangents[0], (2,)) and is_float0(tangents[1], (3,))
    _, pull_back = jax.vjp(partial(run, split), x)
    (ct,) = pull_back((np.zeros(2, float0), np.zeros(3, float0)))
    assert is_float0(ct, (5,))

    def loss(x):
        return split(x)[1].astype(jnp.float32).sum()

    assert is_float0(jax.grad(partial(run, loss), allow_int=True)(x), (5,))


@pytest.mark.parametrize("dtype", ["int32", "uint32"])
def test_positions_have_no_derivative(dtype, run):
    case = RotaryCase(None, 4, 2, 2, 3, 8, 4, True, "float32", 4)
    x, cos, sin, ids = exact_inputs(case)
    ids = ids.astype(dtype)
    f = partial(run, public_function(case))

    def loss(*arrays):
        return f(*arrays).sum()

    with pytest.raises(TypeError, match="int"):
        jax.grad(loss, argnums=3)(x, cos, sin, ids)
    ct_x, ct_ids = jax.grad(loss, argnums=(0, 3), allow_int=True)(x, cos, sin, ids)
    same(ct_x, true_cotangents(case, x, cos, sin, ids, ct=np.ones_like(x))[0])
    assert is_float0(ct_ids, (2, 3))
    _, pull_back = jax.vjp(f, x, cos, sin, ids)
    assert is_float0(pull_back(x)[3], (2, 3))
    zero = np.zeros(ids.shape, float0)
    _, dy = jax.jvp(f, (x, cos, sin, ids), (x, cos, sin, zero))
    same(dy, true_tangent(case, x, cos, sin, ids, dx=x, dcos=cos, dsin=sin))


# --- both operators together --------------------------------------------------------------------


def mixed(rotary_embedding, split, qkv, cos, sin, ids):
    q, k, v = split(qkv)
    return (rotary_embedding(q, cos, sin, ids) * rotary_embedding(k, cos, sin, ids) * v).sum()


def plain_rotary_embedding(x, cos, sin, ids):
    c, s = (jnp.expand_dims(cache[ids], 1) for cache in (cos, sin))
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * c - b * s, a * s + b * c], axis=-1)


def test_derivatives_of_both(run):
    """First and second derivatives of a function of both operators, against plain JAX's."""
    rng = np.random.default_rng(5)
    arrays = [eighths(rng, shape) for shape in ((2, 6, 3, 8), (4, 4), (4, 4))]
    ids = rng.integers(0, 4, (2, 3)).astype(np.int32)
    tangents = [eighths(rng, a.shape) for a in arrays]

    def derivatives(rotary_embedding, split):
        f = partial(mixed, rotary_embedding, split)
        gradient = jax.grad(lambda arrays: f(*arrays, ids))
        return lambda arrays, tangents: jax.jvp(gradient, (arrays,), (tangents,))

    split = partial(jax_webgpu.split, num_outputs=3, axis=1)
    actual = run(derivatives(jax_webgpu.rotary_embedding, split), arrays, tangents)
    plain = derivatives(plain_rotary_embedding, partial(jnp.split, indices_or_sections=3, axis=1))
    jax.tree.map(same, actual, jax.jit(plain)(arrays, tangents))


# --- narrow floats, against plain JAX -----------------------------------------------------------

NARROW = [
    pytest.param(EXACT[index], dtype, id=f"{EXACT[index].id}-as-{dtype}")
    for index, dtype in ((1, "float16"), (1, "bfloat16"), (2, "bfloat16"))
]


def narrow_inputs(case, dtype, draw):
    """A cotangent, x and the caches as `draw` makes them, and the positions."""
    rng = np.random.default_rng(5)
    x, cos, sin, *ids = exact_inputs(case)
    return *(draw(rng, a.shape).astype(jnp.dtype(dtype)) for a in (x, x, cos, sin)), *ids


def normal(rng, shape):
    return rng.standard_normal(shape)


def value_and_cotangents(case, ct, x, cos, sin, *ids):
    rotate = public_function(case)
    y, pull_back = jax.vjp(lambda *arrays: rotate(*arrays, *ids), x, cos, sin)
    return y, *pull_back(ct)


@pytest.fixture(scope="module")
def by_reference():
    """Plain JAX's results, made in one go: a change of the settings clears JAX's caches."""
    with jax_webgpu.configure(implementation="reference"):
        return {
            (case, dtype, draw): jax.jit(partial(value_and_cotangents, case))(
                *narrow_inputs(case, dtype, draw)
            )
            for case, dtype in (param.values for param in NARROW)
            for draw in (eighths, normal)
        }


@pytest.mark.parametrize(("case", "dtype"), NARROW)
def test_exact_narrow_floats_like_the_reference(case, dtype, run, by_reference):
    """Where nothing is rounded, or an exact sum once, both implementations give the same bits."""
    actual = run(partial(value_and_cotangents, case), *narrow_inputs(case, dtype, eighths))
    for each, expected in zip(actual, by_reference[case, dtype, eighths], strict=True):
        assert each.dtype == dtype
        oracle.assert_same_bits(each, expected)


@pytest.mark.parametrize(("case", "dtype"), NARROW)
def test_narrow_floats_near_the_reference(case, dtype, run, by_reference):
    """Both compute in float32 and round once, so that they differ by one unit in the last place.

    And by what float32 loses of n products and their sum: each rounding is at most 2**-24 of the
    sum of magnitudes, and each implementation makes less than 2·n of them.
    """
    inputs = narrow_inputs(case, dtype, normal)
    actual = run(partial(value_and_cotangents, case), *inputs)
    ct, x, cos, sin = (abs(a).astype(np.float64).max() for a in inputs[:4])
    named = 2 * case.batch * case.heads * case.sequence  # by a row of the caches, at most
    # The number of products and the largest of them: of y, and of x's and the caches' cotangents.
    products = (2, x * max(cos, sin)), (2, ct * max(cos, sin)), (named, ct * x), (named, ct * x)
    expected = by_reference[case, dtype, normal]
    for each, reference, (n, largest) in zip(actual, expected, products, strict=True):
        assert each.dtype == dtype
        reference = np.asarray(reference, np.float64)
        error = abs(np.asarray(each, np.float64) - reference)
        assert np.all(error <= ulp(reference, dtype) + 4 * n * 2.0**-24 * n * largest)


@pytest.mark.parametrize("x64", [False, True])
def test_cotangents_have_the_dtypes_of_their_arguments(x64, run):
    with jax.enable_x64(x64):
        x, cos, sin = (jnp.ones(shape) for shape in ((2, 3, 5, 8), (2, 5, 4), (2, 5, 4)))
        x, sin = x.astype(jnp.bfloat16), sin.astype(jnp.float16)
        ct_x, ct_cos, ct_sin = run(
            jax.grad(
                lambda *a: jax_webgpu.rotary_embedding(*a).astype(jnp.float32).sum(), (0, 1, 2)
            ),
            *(x, cos, sin),
        )
    assert (ct_x.dtype, ct_sin.dtype) == (jnp.bfloat16, jnp.float16)
    assert ct_cos.dtype == (jnp.float64 if x64 else jnp.float32)
    # Of each row 3 heads: cos gets the sum of a + b, 6; sin gets b's cotangent less a's, 0.
    same(ct_x[..., :4], np.full((2, 3, 5, 4), 2, jnp.bfloat16))
    same(ct_x[..., 4:], np.zeros((2, 3, 5, 4), jnp.bfloat16))
    same(ct_cos, np.full((2, 5, 4), 6))
    same(ct_sin, np.zeros((2, 5, 4)))


# --- crossings ----------------------------------------------------------------------------------


@pytest.mark.parametrize("callback", ["buffer", "pure"])
def test_crossings(callback, run):
    with jax_webgpu.configure(callback=callback):
        test_golden_repeated_positions_and_heads(run)
        test_golden_split(run)
        test_linear_transpose(EXACT[1], run)
