"""Both operators inside JAX's control flow and under what else wraps a function or a call."""

import copy
import pickle
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from calls import counted, eighths, exact_inputs, names
from cases import RotaryCase
from jax.ad_checkpoint import checkpoint_name

import jax_webgpu
from jax_webgpu.ops import rotary_embedding as rotary_module
from jax_webgpu.ops import split as split_module

CASE = RotaryCase(None, 4, 2, 2, 3, 8, 4, False, "float32", 4)
X, COS, SIN, POSITIONS = exact_inputs(CASE)
SPLIT_3_5 = partial(jax_webgpu.split, split=(3, 5), axis=-1)

same = np.testing.assert_array_equal
# Of gradients, whose sums XLA may order in another way than a loop does; they are near 1.
near = partial(np.testing.assert_allclose, rtol=2e-6, atol=2e-6)


def rotate(x, cos=COS, sin=SIN, positions=POSITIONS, **keywords):
    return jax_webgpu.rotary_embedding(x, cos, sin, positions, **(CASE.keywords | keywords))


def rotated(x, cos=COS, sin=SIN, positions=POSITIONS, **keywords):
    """In NumPy; exact for eighths, also when they were rotated before."""
    attributes = CASE.keywords | keywords
    return oracle.rotary_embedding(x, cos, sin, positions, **attributes)[0].astype(np.float32)


# --- loops --------------------------------------------------------------------------------------

STEPS = np.stack([POSITIONS, (POSITIONS + 1) % 4, (POSITIONS + 2) % 4])


def step(carry, positions):
    """Rotates, and puts the halves of each head in the other order."""
    x, cos, sin = carry
    first, second = jax_webgpu.split(rotate(x, cos, sin, positions), num_outputs=2, axis=-1)
    return (jnp.concatenate([second, first], axis=-1), cos, sin), first


def unrolled(x, cos, sin):
    firsts = []
    for positions in STEPS:
        (x, *_), first = step((x, cos, sin), positions)
        firsts.append(first)
    return x, jnp.stack(firsts)


def scanned(x, cos, sin, **keywords):
    (x, *_), firsts = jax.lax.scan(step, (x, cos, sin), STEPS, **keywords)
    return x, firsts


def loss_of(f):
    def loss(*arrays):
        return sum(jnp.sum(result) for result in f(*arrays))

    return loss


@pytest.fixture(scope="module")
def gradient_of_unrolled():
    return jax.jit(jax.grad(loss_of(unrolled), argnums=(0, 1, 2)))(X, COS, SIN)


def true_steps():
    x, firsts = X, []
    for positions in STEPS:
        y = rotated(x, positions=positions)
        x = np.concatenate([y[..., 4:], y[..., :4]], axis=-1)
        firsts.append(y[..., :4])
    return x, np.stack(firsts)


@pytest.mark.parametrize("keywords", [{}, {"unroll": 2}], ids=str)
def test_scan(keywords, run):
    results, dispatches = counted(run, partial(scanned, **keywords), X, COS, SIN)
    jax.tree.map(same, results, true_steps())
    assert dispatches == 2 * len(STEPS)


def test_scan_in_reverse(run):
    def backwards(x):
        return jax.lax.scan(lambda x, ids: (rotate(x, positions=ids), None), x, STEPS, reverse=True)

    expected = X
    for positions in STEPS[::-1]:
        expected = rotated(expected, positions=positions)
    same(run(backwards, X)[0], expected)


def test_gradient_of_scan(run, gradient_of_unrolled):
    actual, dispatches = counted(run, jax.grad(loss_of(scanned), argnums=(0, 1, 2)), X, COS, SIN)
    jax.tree.map(near, actual, gradient_of_unrolled)
    # Each step rotates and splits, rotates back, and its split goes back without a dispatch.
    assert dispatches == 3 * len(STEPS)


def test_forward_derivative_of_scan(run):
    tangents = [eighths(np.random.default_rng(5), a.shape) for a in (X, COS, SIN)]
    actual = run(lambda *a: jax.jvp(scanned, a, tuple(tangents)), X, COS, SIN)
    expected = jax.jit(lambda *a: jax.jvp(unrolled, a, tuple(tangents)))(X, COS, SIN)
    jax.tree.map(near, actual, expected)


def test_vmap_of_scan(run):
    """One dispatch a step and operator, not one an example."""
    x = np.stack([X, X / 2, X * 2])
    f = jax.vmap(scanned, in_axes=(0, None, None))
    (y, firsts), dispatches = counted(run, f, x, COS, SIN)
    true_y, true_firsts = true_steps()
    for example, factor in enumerate((1, 0.5, 2)):
        same(y[example], true_y * np.float32(factor))
        same(firsts[example], true_firsts * np.float32(factor))
    assert dispatches == 2 * len(STEPS)


def test_while_loop(run):
    """As often as a value says that is known only as the program runs."""

    def turned(x, times):
        def body(carry):
            index, x = carry
            return index + 1, rotate(x)

        return jax.lax.while_loop(lambda carry: carry[0] < times, body, (0, x))[1]

    expected = X
    for times in range(3):
        y, dispatches = counted(run, turned, X, times)
        same(y, expected)
        assert dispatches == times
        expected = rotated(expected)
    # Forward derivatives pass a loop without a fixed length: of a linear loop, the loop itself.
    _, dy = run(lambda x: jax.jvp(lambda x: turned(x, 2), (x,), (x,)), X)
    same(dy, rotated(rotated(X)))


def test_fori_loop(run):
    def turned(x, times):
        return jax.lax.fori_loop(0, times, lambda _, x: rotate(x), x)

    same(run(turned, X, 2), rotated(rotated(X)))
    # Of a fixed length it has a gradient; of sum(x), the transposed rotation of ones, twice.
    gradient = run(jax.grad(lambda x: turned(x, 2).sum()), X)
    same(gradient, rotated(rotated(np.ones_like(X), sin=-SIN), sin=-SIN))


def test_map_and_associative_scan(run):
    x = np.stack([X, X / 2])
    same(run(lambda x: jax.lax.map(rotate, x), x), np.stack([rotated(X), rotated(X / 2)]))

    def sums_of_halves(a, b):
        first, second = jax_webgpu.split(a + b, (4, 4), axis=-1)
        return jnp.concatenate([first, second], axis=-1)

    actual = run(lambda x: jax.lax.associative_scan(sums_of_halves, x), np.stack([X] * 5))
    same(actual, np.stack([X * n for n in range(1, 6)]))


# --- branches -----------------------------------------------------------------------------------


def test_cond(run):
    """Only the branch that is taken is dispatched."""

    def f(turn, x):
        return jax.lax.cond(turn, rotate, lambda x: x, x)

    for turn, expected in ((True, rotated(X)), (False, X)):
        y, dispatches = counted(run, f, turn, X)
        same(y, expected)
        assert dispatches == turn
    gradient = run(jax.grad(lambda x, turn: f(turn, x).sum()), X, True)
    same(gradient, rotated(np.ones_like(X), sin=-SIN))
    # Of a batch both branches are run, once each, and chosen from.
    turns = np.array([True, False])
    y, dispatches = counted(run, jax.vmap(f), turns, np.stack([X, X]))
    same(y, np.stack([rotated(X), X]))
    assert dispatches == 1


def test_switch(run):
    def shifted(x):
        first, second = SPLIT_3_5(x)
        return jnp.concatenate([second, first], axis=-1)

    branches = [rotate, partial(rotate, interleaved=True), shifted]
    results = [rotated(X), rotated(X, interleaved=True), np.roll(X, 5, axis=-1)]
    for index, expected in enumerate(results):
        y, dispatches = counted(run, lambda i, x: jax.lax.switch(i, branches, x), index, X)
        same(y, expected)
        assert dispatches == 1


@pytest.mark.parametrize("callback", ["buffer", "pure"])
def test_crossings(callback, run):
    with jax_webgpu.configure(callback=callback):
        test_while_loop(run)
        test_cond(run)
        test_donated_argument()
        test_equal_calls_are_lowered_once()


# --- checkpoints and rules of the user's own ----------------------------------------------------


def squares(x):
    """Its gradient needs the rotated array, or rotates x once more for it."""
    y = checkpoint_name(rotate(x), "rotated")
    first, second = SPLIT_3_5(y * y)
    return first.sum() + 2 * second.sum()


def true_gradient_of_squares():
    weights = np.array([1] * 3 + [2] * 5, np.float32)
    return rotated(2 * weights * rotated(X), sin=-SIN)


# Which policy, and how often a gradient rotates: forward, once more where the rotated array was
# not kept, and back.
POLICIES = {
    "nothing_saveable": (jax.checkpoint_policies.nothing_saveable, 3),
    "everything_saveable": (jax.checkpoint_policies.everything_saveable, 2),
    "names": (jax.checkpoint_policies.save_only_these_names("rotated"), 2),
}


@pytest.mark.parametrize("policy", POLICIES)
def test_checkpoint(policy, run):
    policy, rotations = POLICIES[policy]
    f = jax.value_and_grad(jax.checkpoint(squares, policy=policy))
    assert names(jax.make_jaxpr(f)(X).jaxpr).count("rotary_embedding") == rotations
    (value, gradient), dispatches = counted(run, f, X)
    near(value, squares(X))
    same(gradient, true_gradient_of_squares())
    # The split is one more. XLA, on the CPU, may see that to rotate again gives the same.
    assert 3 <= dispatches <= rotations + 1


def test_checkpoint_of_scan(run, gradient_of_unrolled):
    @jax.checkpoint
    def body(carry, positions):
        return step(carry, positions)

    def f(x, cos, sin):
        (x, *_), firsts = jax.lax.scan(body, (x, cos, sin), STEPS)
        return x, firsts

    actual = run(jax.grad(loss_of(f), argnums=(0, 1, 2)), X, COS, SIN)
    jax.tree.map(near, actual, gradient_of_unrolled)


def test_custom_vjp(run):
    """The user's rule replaces ours, and may call the operators itself."""

    @partial(jax.custom_vjp, nondiff_argnums=(1,))
    def f(x, times):
        return rotate(x) * times

    def forward(x, times):
        return f(x, times), SPLIT_3_5(x)

    def backward(times, parts, ct):
        return (rotate(ct, sin=-SIN) + jnp.concatenate(parts, axis=-1),)  # not the derivative

    f.defvjp(forward, backward)
    same(run(lambda x: f(x, 2.0), X), 2 * rotated(X))
    ct = eighths(np.random.default_rng(5), X.shape)
    actual = run(lambda x, ct: jax.vjp(lambda x: f(x, 2.0), x)[1](ct)[0], X, ct)
    same(actual, rotated(ct, sin=-SIN) + X)


def test_custom_jvp(run):
    @jax.custom_jvp
    def f(x):
        return rotate(x)

    @f.defjvp
    def rule(primals, tangents):
        (x,), (dx,) = primals, tangents
        return f(x), 2 * rotate(dx)  # twice the derivative

    dx = eighths(np.random.default_rng(5), X.shape)
    y, dy = run(lambda x, dx: jax.jvp(f, (x,), (dx,)), X, dx)
    same(y, rotated(X))
    same(dy, 2 * rotated(dx))
    # In reverse it is transposed, by our rule.
    same(run(jax.grad(lambda x: f(x).sum()), X), 2 * rotated(np.ones_like(X), sin=-SIN))


# --- arguments and modes ------------------------------------------------------------------------


def test_donated_argument():
    """XLA may give the memory of an argument to the result: the host must not mind."""
    f = jax.jit(rotate, donate_argnums=0)
    x = y = jnp.array(X)
    for _ in range(3):  # as a decoding loop does
        y = f(y)
    same(y, rotated(rotated(rotated(X))))
    assert x.is_deleted()


def test_donated_argument_of_split():
    """No part can take its place, and JAX says so."""
    x = jnp.array(X)
    with pytest.warns(UserWarning, match="donated buffers were not usable"):
        parts = jax.jit(SPLIT_3_5, donate_argnums=0)(x)
    oracle.assert_split(parts, X, (3, 5), -1)


def test_disable_jit(run):
    with jax.disable_jit():
        same(run(rotate, X), rotated(X))
        oracle.assert_split(run(SPLIT_3_5, X), X, (3, 5), -1)
        jax.tree.map(same, run(scanned, X, COS, SIN), true_steps())
        same(run(jax.grad(squares), X), true_gradient_of_squares())
        same(run(jax.vmap(rotate), np.stack([X, X])), np.stack([rotated(X)] * 2))


def test_debug_nans(run):
    with jax.debug_nans(True):
        same(run(rotate, X), rotated(X))
        same(run(jax.grad(squares), X), true_gradient_of_squares())
        bits = np.full((2, 4), 0x7FC00000, np.int32)  # would be NaNs if they were floats
        oracle.assert_split(run(partial(jax_webgpu.split, split=(1, 1)), bits), bits, (1, 1), 0)
        spoilt = X.copy()
        spoilt[0, 0, 0, 0] = np.nan
        with pytest.raises(FloatingPointError, match="nan"):
            run(rotate, spoilt)
        with pytest.raises(FloatingPointError, match="nan"):
            run(SPLIT_3_5, spoilt)
        # Made by the operator itself: the difference of two infinities.
        one = np.ones_like(COS)
        with pytest.raises(FloatingPointError, match="nan"):
            run(lambda x: rotate(x, one, one), np.full_like(X, np.inf))


# --- what is traced, lowered and kept -----------------------------------------------------------


def text_of(f, *args):
    return " ".join(str(jax.make_jaxpr(f)(*args)).split())


def test_jaxpr_is_readable():
    x = np.ones((2, 3, 24), np.float32)
    keywords = {"num_heads": 3, "interleaved": True}
    caches = [np.ones((2, 3, 4), np.float32)] * 2
    with jax_webgpu.configure(callback=None):  # whatever the environment says
        text = text_of(lambda *arrays: rotate(*arrays), X, COS, SIN, POSITIONS)
        at_rank_3 = text_of(partial(jax_webgpu.rotary_embedding, **keywords), x, *caches)
        of_split = text_of(SPLIT_3_5, X)
    assert text == (
        "{ lambda ; a:f32[2,2,3,8] b:f32[4,2] c:f32[4,2] d:i32[2,3]. let "
        "e:f32[2,2,3,8] = rotary_embedding[ call=(interleaved=0, rotary_embedding_dim=4) ] "
        "a b c d in (e,) }"
    )
    assert "[ call=(interleaved=1, rotary_embedding_dim=0, num_heads=3) ]" in at_rank_3
    assert "split[call=(axis=3, sizes=(3, 5))] a" in of_split
    with jax_webgpu.configure(callback="pure", tunables={"WORKGROUP_SIZE": 64}):
        of_split = text_of(SPLIT_3_5, X)
    assert "call=(axis=3, sizes=(3, 5), callback=pure, WORKGROUP_SIZE=64)" in of_split


def test_the_primitives_are_named_after_the_functions():
    assert names(jax.make_jaxpr(scanned)(X, COS, SIN).jaxpr) == [
        *("scan", "rotary_embedding", "split", "concatenate")
    ]


@pytest.fixture
def looked_at(monkeypatch):
    """The calls whose results were worked out: once to trace each, and once to lower it."""
    calls = []
    for rules in (rotary_module.Rules, split_module.Rules):

        def results(call, tensors, own=rules.results):
            calls.append(call)
            return own(call, tensors)

        monkeypatch.setattr(rules, "results", staticmethod(results))
    return calls


def callbacks(lowered):
    """The numbers of the callbacks in a lowered program, in order; one lowering makes one."""
    return re.findall(r"custom_call @\w*callback.*?index = (\d+)", lowered.as_text())


def test_equal_calls_are_lowered_once():
    lowered = jax.jit(lambda x: rotate(rotate(rotate(x)))).lower(X)
    assert len(callbacks(lowered)) == 3 and len(set(callbacks(lowered))) == 1
    lowered = jax.jit(lambda x: rotate(rotate(x), interleaved=True)).lower(X)
    assert len(callbacks(lowered)) == len(set(callbacks(lowered))) == 2


def test_equal_calls_are_lowered_once_by_our_rule(looked_at):
    traced = jax.jit(lambda x: [SPLIT_3_5(x + n) for n in range(4)]).trace(X)
    looked_at.clear()
    traced.lower()
    assert len(looked_at) == 1


def test_equal_calls_of_equal_arrays_run_once():
    """XLA may do so, since the operators have no effects and their parameters are equal."""
    y, dispatches = counted(jax.jit(lambda x: rotate(x) + rotate(x)), X)
    same(y, 2 * rotated(X))
    assert dispatches == 1


def test_results_that_nothing_uses_are_not_computed():
    def f(x):
        SPLIT_3_5(x)
        return rotate(x) if x.ndim == 3 else 2 * x

    assert counted(jax.jit(f), X)[1] == 0


@pytest.fixture
def compiled():
    """The events of tracing, lowering and compiling, as they come."""
    events = []

    def listen(event, duration, **_):
        if event.startswith("/jax/core/compile/"):
            events.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield events
    jax.monitoring.unregister_event_duration_listener(listen)


def test_equal_calls_are_traced_once(run, looked_at, compiled):
    x = np.ones((7, 3, 5), np.float32)  # met by no other test, which would have traced it

    def f(x):
        return jax_webgpu.split(x, (2, 3), axis=-1)

    run(f, x)
    assert looked_at and compiled
    looked_at.clear()
    compiled.clear()
    run(f, x + 1)
    assert (looked_at, compiled) == ([], [])


def test_calls_that_mean_the_same_are_traced_once(looked_at, compiled):
    """However the static arguments are spelt."""
    x, caches = np.ones((2, 3, 24), np.float32), [np.ones((2, 3, 2), np.float32)] * 2
    rotate = partial(jax_webgpu.rotary_embedding, x, *caches)
    split = partial(jax_webgpu.split, x)
    rotate(num_heads=3, rotary_embedding_dim=4)
    split((6, 12, 6), axis=2)
    split((1, 1))
    three = jnp.int32(3)
    looked_at.clear()
    compiled.clear()
    rotate(num_heads=np.int64(3), rotary_embedding_dim=np.uint8(4), interleaved=False)
    rotate(num_heads=three, rotary_embedding_dim=4, interleaved=np.bool_(False))
    rotate(num_heads=3, rotary_embedding_dim=4, interleaved=0)
    split([6, 12, 6], axis=-1)
    split(np.array([6, 12, 6]), axis=np.int32(2))
    split((6, np.int64(12), np.uint8(6)), axis=2)
    split(num_outputs=2)
    split(num_outputs=np.int8(2), axis=0)
    assert (looked_at, compiled) == ([], [])


# --- functions as values ------------------------------------------------------------------------

FUNCTIONS = (jax_webgpu.rotary_embedding, jax_webgpu.split, jax_webgpu.rotary_cache)


@pytest.mark.parametrize("f", FUNCTIONS, ids=lambda f: f.__name__)
def test_public_functions_are_values(f):
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        assert pickle.loads(pickle.dumps(f, protocol)) is f
    assert copy.deepcopy(f) is f and copy.copy(f) is f
    assert len({f, copy.deepcopy(f), pickle.loads(pickle.dumps(f))}) == 1


@pytest.mark.parametrize(
    "again", [copy.copy, copy.deepcopy, lambda f: pickle.loads(pickle.dumps(f))]
)
@pytest.mark.parametrize("kind", [partial, jax.tree_util.Partial])
def test_partials_are_values(kind, again, run):
    f = kind(jax_webgpu.split, split=(3, 5), axis=-1)
    copied = again(f)
    assert copied.func is f.func and copied.keywords == f.keywords
    assert hash(copied) == hash(copied)
    oracle.assert_split(run(copied, X), X, (3, 5), -1)
    f = kind(jax_webgpu.rotary_embedding, **CASE.keywords, cos_cache=COS, sin_cache=SIN)
    same(run(lambda x: again(f)(x, position_ids=POSITIONS), X), rotated(X))


def test_functions_as_arguments(compiled):
    """A public function as a static argument; a `Partial` of one, with its arrays, as a pytree."""
    apply = jax.jit(lambda f, *args: f(*args), static_argnums=0)
    arguments = (X[..., :4], COS, SIN, POSITIONS)
    whole = rotated(*arguments, rotary_embedding_dim=0)
    same(apply(jax_webgpu.rotary_embedding, *arguments), whole)
    compiled.clear()
    same(apply(copy.deepcopy(jax_webgpu.rotary_embedding), *arguments), whole)
    assert compiled == []
    with_arrays = jax.tree_util.Partial(jax_webgpu.rotary_embedding, X, COS, SIN, POSITIONS)
    same(jax.jit(lambda f: f(rotary_embedding_dim=4))(with_arrays), rotated(X))


def test_pickled_for_another_process(run_snippet):
    f = partial(jax_webgpu.split, split=(1, 2), axis=0)
    source = f"""
    import pickle
    import warnings

    import jax
    import numpy as np

    warnings.simplefilter("ignore")  # of a software adapter
    f = pickle.loads({pickle.dumps(f)!r})
    print([part.tolist() for part in jax.jit(f)(np.arange(3))])
    """
    done = run_snippet(source)
    assert done.stdout.strip() == "[[0], [1, 2]]", done.stderr
