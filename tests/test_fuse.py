"""`fuse`: the same results in fewer crossings, under every transformation."""

import math
import pathlib
from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from calls import eighths, names, public_function, ulp
from cases import CASES, RotaryCase
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jax_webgpu
from jax_webgpu import capabilities, device, generate, group
from jax_webgpu.generate import Constant, Step
from jax_webgpu.group import Group, Runner
from jax_webgpu.partition import Node, crossing, order, partition
from jax_webgpu.resolve import Tensor

HEADS, SIZE, SEQUENCE = 4, 16, 6
COS, SIN = jax_webgpu.rotary_cache(SEQUENCE, SIZE)
POSITIONS = np.array([[0, 3, 1, 5, 2, 4], [5, 4, 3, 2, 1, 0]], np.int32)


def rotate(x, cos=COS, sin=SIN, positions=POSITIONS):
    return jax_webgpu.rotary_embedding(x, cos, sin, positions, num_heads=x.shape[-1] // SIZE)


def qkv_front(qkv, cos=COS, sin=SIN, positions=POSITIONS):
    q, k, v = jax_webgpu.split(qkv, num_outputs=3, axis=-1)
    return rotate(q, cos, sin, positions), rotate(k, cos, sin, positions), v


def example(shape=(2, SEQUENCE, 3 * HEADS * SIZE), dtype="float32"):
    return jnp.asarray(eighths(np.random.default_rng(5), shape, dtype))


def counts(f, *args):
    """The result of a call, and what it added to the device's counters."""
    before = device.get().counters.copy()
    result = jax.block_until_ready(f(*args))
    return result, device.get().counters - before


def assert_same(found, expected):
    """Equal bit for bit, in shape, dtype and weak type too."""
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert one.aval.strip_weak_type() == other.aval.strip_weak_type()
        assert one.weak_type == other.weak_type
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


def assert_close(found, expected):
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


# ---- one crossing -------------------------------------------------------------------------------


def test_the_front_of_an_attention_layer(run):
    qkv = example()
    expected, alone = counts(qkv_front, qkv)
    found, together = counts(run, jax_webgpu.fuse(qkv_front), qkv)
    assert_same(found, expected)
    assert (alone["submissions"], together["submissions"]) == (3, 1)
    unit = qkv.nbytes // 3
    assert alone["bytes in"] + alone["bytes out"] >= 10 * unit
    # q and k each way. The six units have v, and v's part of the input, too: the host
    # copies the one to the other.
    small = COS.nbytes + SIN.nbytes + POSITIONS.nbytes
    assert together["bytes in"] + together["bytes out"] == 4 * unit + small


def test_a_chain_of_ten_rotations(run):
    def chain(x):
        for _ in range(10):
            x = rotate(x)
        return x

    x = example()
    found, counted = counts(run, jax_webgpu.fuse(chain), x)
    assert_same(found, chain(x))
    assert counted["submissions"] == 1
    assert counted["dispatches"] == 10
    ((of_ten,),) = [jax_webgpu.explain(jax_webgpu.fuse(chain), x).groups]
    # One buffer for all that is uploaded, one for the result, and two that take turns.
    assert len(of_ten.linked.program.sizes) == 4


def test_groups_are_one_equation():
    jaxpr = jax.make_jaxpr(jax_webgpu.fuse(qkv_front))(example())
    assert names(jaxpr.jaxpr)[:2] == ["jit", "webgpu_group"]


@pytest.mark.parametrize("callback", ["pure", "buffer"])
def test_both_crossings(callback):
    qkv = example()
    expected = qkv_front(qkv)
    with jax_webgpu.configure(callback=callback):
        found, counted = counts(jax_webgpu.fuse(qkv_front), qkv)
    assert_same(found, expected)
    assert counted["submissions"] == 1


def test_reference_has_no_groups():
    fused = jax_webgpu.fuse(qkv_front)
    with jax_webgpu.configure(implementation="reference"):
        found, counted = counts(fused, example())
        assert_same(found, jax.jit(qkv_front)(example()))
    assert not counted


def test_what_is_outside_splits_a_group():
    def f(x):
        return rotate(jnp.sort(rotate(rotate(x)))), rotate(x * 2)

    x = example()
    found, counted = counts(jax_webgpu.fuse(f), x)
    assert_same(found, f(x))
    assert counted["submissions"] == 2  # the last rotation goes with either


@pytest.mark.parametrize("case", [c for c in CASES if len(c.id) % 3 == 0], ids=lambda case: case.id)
def test_table(case):
    """Each operator twice, with data movement between."""
    call, inputs = public_function(case), [jnp.asarray(each) for each in case.inputs()]
    if isinstance(case, RotaryCase):

        def f(x, *rest):
            return call(jnp.flip(call(x, *rest), -1), *rest)

    else:

        def f(x):
            parts = call(x)
            return [jax_webgpu.split(jnp.flip(p, -1), num_outputs=2, axis=-1) for p in parts], parts

    assert_same(jax_webgpu.fuse(f)(*inputs), f(*inputs))


# ---- transformations ----------------------------------------------------------------------------


def loss(f):
    return lambda *args: sum(jnp.sum(jnp.sin(each)) for each in f(*args))


TRANSFORMED = {
    "grad": lambda f: jax.grad(loss(f)),
    "grad in all": lambda f: jax.grad(loss(f), (0, 1, 2)),
    "jvp": lambda f: lambda *args: jax.jvp(f, args, args),
    "forward over reverse": lambda f: jax.jacfwd(
        jax.grad(lambda cos: loss(f)(example(), cos, SIN)), 0
    ),
    "vmap": lambda f: lambda x, c, s: jax.vmap(f, (0, None, None))(jnp.stack([x, -x]), c, s),
    "vmap of all": lambda f: (
        lambda *args: jax.vmap(f, -1, (1, 0, 2))(*(jnp.stack([each, -each], -1) for each in args))
    ),
    "grad of vmap": lambda f: (
        lambda x, c, s: jax.grad(lambda x: loss(jax.vmap(lambda x: f(x, c, s)))(x))(
            jnp.stack([x, -x])
        )
    ),
    "checkpoint": lambda f: jax.grad(loss(jax.checkpoint(f))),
    "linear_transpose": lambda f: (
        lambda x, c, s: jax.linear_transpose(lambda x: f(x, c, s), x)(tuple(f(x, c, s)))
    ),
    "scan": lambda f: (
        lambda x, c, s: jax.lax.scan(
            lambda x, _: (jnp.concatenate(f(x, c, s), -1), None), x, length=3
        )
    ),
    "cond": lambda f: (
        lambda x, c, s: jax.lax.cond(x[0, 0, 0] > 0, f, lambda x, c, s: f(-x, c, s), x, c, s)
    ),
}


@pytest.mark.parametrize("name", TRANSFORMED)
def test_transformations(run, name):
    transform = TRANSFORMED[name]
    args = (example(), COS, SIN)
    if name == "forward over reverse":
        args = (COS,)
    found = run(transform(jax_webgpu.fuse(qkv_front)), *args)
    assert_close(found, transform(qkv_front)(*args))


def test_the_gradient_is_fused():
    qkv = example()
    _, alone = counts(jax.jit(jax.grad(loss(qkv_front))), qkv)
    _, together = counts(jax.jit(jax.grad(loss(jax_webgpu.fuse(qkv_front)))), qkv)
    assert (alone["submissions"], together["submissions"]) == (5, 2)


def test_a_fused_loop_has_fused_bodies():
    def loop(x):
        return jax.lax.fori_loop(0, 2, lambda _, x: rotate(jnp.swapaxes(rotate(x), 0, 1)), x)

    x = example((2, 2, HEADS * SIZE))
    (cos, sin), positions = jax_webgpu.rotary_cache(2, SIZE), np.array([[0, 1], [1, 0]], np.int32)

    def f(x):
        def body(_, x):
            turned = jnp.swapaxes(rotate(x, cos, sin, positions), 0, 1)
            return rotate(turned, cos, sin, positions)

        return jax.lax.fori_loop(0, 2, body, x)

    found, counted = counts(jax_webgpu.fuse(f), x)
    assert_same(found, f(x))
    assert counted["submissions"] == 2


def test_nested():
    inner = jax_webgpu.fuse(qkv_front)

    def twice(f, x):
        return f(jnp.concatenate(f(x), -1))

    x = example()
    found, counted = counts(jax_webgpu.fuse(partial(twice, jax.jit(inner))), x)
    assert_same(found, twice(qkv_front, x))
    assert counted["submissions"] == 1


@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map(check_vma):
    mesh = jax.make_mesh((2,), ("i",), axis_types=(AxisType.Auto,))

    def sharded(f):
        specs = (P("i"), P(), P(), P("i"))
        on_each = jax.shard_map(f, mesh=mesh, in_specs=specs, out_specs=P("i"), check_vma=check_vma)
        return jax.jit(lambda *args: on_each(*args, POSITIONS))

    fused, args = jax_webgpu.fuse(qkv_front), (example(), COS, SIN)
    found, counted = counts(sharded(fused), *args)
    assert_same(found, sharded(qkv_front)(*args))
    assert counted["submissions"] == 2
    gradient = jax.grad(loss(sharded(fused)), (0, 1, 2))(*args)
    assert_close(gradient, jax.grad(loss(sharded(qkv_front)), (0, 1, 2))(*args))


def test_explicit_axes():
    mesh = jax.make_mesh((2,), ("i",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        qkv = jax.device_put(example(), P("i"))
        assert_same(jax_webgpu.fuse(qkv_front)(qkv), qkv_front(qkv))


@jax.custom_jvp
def _three(x):
    return x * 3


_three.defjvp(lambda primals, tangents: (primals[0] * 3, tangents[0] * 7))


@jax.custom_vjp
def _four(x):
    return x * 4


_four.defvjp(lambda x: (x * 4, None), lambda _, ct: (ct * 5,))


@pytest.mark.parametrize("custom", [_three, _four])
def test_custom_rules_are_kept(run, custom):
    def f(x):
        return jnp.sum(jnp.sin(rotate(custom(rotate(x)))))

    x, fused = example(), jax_webgpu.fuse(f)
    assert counts(fused, x)[1]["submissions"] == 1
    assert_close(run(fused, x), f(x))
    assert_close(run(jax.grad(fused), x), jax.grad(f)(x))


# ---- arguments and results ----------------------------------------------------------------------


def test_arguments_and_results_of_any_kind():
    def f(tree, scale, *, heads, name):
        turned = jax_webgpu.rotary_embedding(tree["x"], COS, SIN, POSITIONS, num_heads=heads)
        again = jax_webgpu.rotary_embedding(turned, COS, SIN, POSITIONS, num_heads=heads)
        return {name: again, "twice": (again, turned, turned.reshape(-1), again), "x": tree["x"]}, (
            scale,
            3,
            jnp.zeros((0, 2)),
            None,
        )

    args, keywords = ({"x": example()}, 2.0), {"heads": 3 * HEADS, "name": "y"}
    static = ("heads", "name")
    found, counted = counts(partial(jax_webgpu.fuse(f, static_argnames=static), **keywords), *args)
    assert_same(found, jax.jit(f, static_argnames=static)(*args, **keywords))
    assert counted["submissions"] == 1


def test_effects_keep_their_order(capsys):
    @jax_webgpu.fuse
    def f(x):
        jax.debug.print("first {}", x[0, 0, 0], ordered=True)
        x = rotate(rotate(x))
        jax.debug.print("second", ordered=True)
        x = rotate(jnp.sort(x))
        jax.debug.print("third {}", x.shape[0], ordered=True)
        return x

    jax.block_until_ready(f(example()))
    jax.effects_barrier()
    printed = capsys.readouterr().out.split()
    assert [word for word in printed if word.isalpha()] == ["first", "second", "third"]


def test_references():
    def f(x):
        reference = jax.new_ref(x)
        reference[...] = rotate(rotate(reference[...]))
        reference[...] *= 2
        return rotate(rotate(reference[...]))

    assert_same(jax_webgpu.fuse(f)(example()), f(example()))


def test_positions_are_checked(run):
    def twice(x, positions):
        return rotate(rotate(x, positions=positions), positions=positions)

    beyond = jnp.asarray(POSITIONS).at[1, 2].set(SEQUENCE)
    with pytest.raises(Exception, match=r"position_ids\[1, 2\] = 6; expected 0 to 5"):
        jax.block_until_ready(run(jax_webgpu.fuse(twice), example(), beyond))
    assert_same(
        run(jax_webgpu.fuse(twice), example(), jnp.asarray(POSITIONS)),
        twice(example(), POSITIONS),
    )


def test_positions_that_are_computed_are_checked_too():
    def f(x, positions):
        mine, _ = jax_webgpu.split(positions, [SEQUENCE, 1], axis=1)
        return rotate(rotate(x, positions=mine), positions=mine + 1)

    positions = jnp.zeros((2, SEQUENCE + 1), jnp.int32)
    assert_same(jax_webgpu.fuse(f)(example(), positions), f(example(), positions))
    with pytest.raises(Exception, match=r"position_ids\[0, 0\] = 6; expected 0 to 5"):
        jax.block_until_ready(jax_webgpu.fuse(f)(example(), positions + SEQUENCE - 1))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_narrow_floats_cross_as_they_are(dtype):
    qkv = example(dtype=dtype)
    found, counted = counts(jax_webgpu.fuse(qkv_front), qkv)
    assert_same(found, qkv_front(qkv))
    small = COS.nbytes + SIN.nbytes + POSITIONS.nbytes
    assert counted["bytes in"] + counted["bytes out"] == 4 * qkv.nbytes // 3 + small


def test_a_table_with_more_rows_than_tokens_does_not_cross():
    (cos, sin), x = jax_webgpu.rotary_cache(4096, SIZE), example()
    found, counted = counts(jax_webgpu.fuse(qkv_front), x, cos, sin)
    assert_same(found, qkv_front(x, cos, sin))
    assert counted["bytes in"] < cos.nbytes


def test_step_by_step(monkeypatch):
    """As where an array is larger than a binding: each operator crosses, NumPy does the rest."""
    monkeypatch.setattr(group, "link", lambda *_: None)

    def f(x):
        q, k, v = qkv_front(x)
        return rotate(jnp.flip(q, 0) * 2), jnp.concatenate([k, v])

    found, counted = counts(jax_webgpu.fuse(f), example())
    monkeypatch.undo()
    assert_same(found, f(example()))
    assert counted["submissions"] == 4


def test_where_the_host_cannot_map_what_kernels_bind(monkeypatch):
    """Parts of an input and of an output go in pieces of whole rows."""
    monkeypatch.setattr(device, "_MAPPABLE", "no feature")
    info = device.info()
    apart = device.Device(device._enumerate()[info.index], info)
    monkeypatch.setattr(device, "get", lambda place=0: apart)
    monkeypatch.setattr(device, "_PIECE_BYTES", 1 << 14)
    monkeypatch.setattr(device, "_WRITE_BYTES", 1 << 10)

    def f(x):
        q, k, v = qkv_front(x)
        return q, jnp.concatenate([k, v, rotate(q)], -1)

    x = example((2, SEQUENCE, 3 * 64 * SIZE))
    found = jax.block_until_ready(jax_webgpu.fuse(f)(x))
    assert apart.counters["submissions"] > 2
    monkeypatch.undo()
    assert_same(found, f(x))


def test_where_a_group_cannot_be_whole():
    def group_of(f, *args, on):
        (found,) = jax_webgpu.explain(jax_webgpu.fuse(f), *args, device=on).groups
        return found

    half = jax.ShapeDtypeStruct((2, SEQUENCE, 3 * HEADS * SIZE), np.float16)
    caches = jax.ShapeDtypeStruct(COS.shape, np.float16)
    assert group_of(qkv_front, half, caches, caches, on="apple-m").linked is not None
    # Without shader-f16 float16 is computed with in float32.
    assert group_of(qkv_front, half, caches, caches, on="floor").linked is None
    large = jax.ShapeDtypeStruct((2, SEQUENCE, 3 * 2**18 * SIZE), np.float32)
    apart = group_of(qkv_front, large, on="floor")
    assert apart.linked is None
    assert {plan.resolved.spec.name for plan in apart.plans} == {"Split", "RotaryEmbedding"}
    arrays = [each for plan in apart.plans for each in (*plan.inputs, *plan.outputs)]
    assert max(each.size for each in arrays) <= 2**27


def test_a_tunable_that_is_too_large_is_told_while_jax_compiles():
    f = jax.jit(jax_webgpu.fuse(qkv_front))
    with (
        jax_webgpu.configure(tunables={"WORKGROUP_SIZE": 2**20}),
        pytest.raises(jax_webgpu.LimitError, match=r"WORKGROUP_SIZE is 1,048,576"),
    ):
        f.lower(example(), COS, SIN, POSITIONS).compile()


def test_explain():
    found = jax_webgpu.explain(
        jax_webgpu.fuse(qkv_front), example(), COS, SIN, POSITIONS, device="h200"
    )
    (only,) = found.groups
    unit = example().nbytes // 3
    small = COS.nbytes + SIN.nbytes + POSITIONS.nbytes
    assert only.bytes_alone == 10 * unit + 2 * small
    assert only.bytes_together == 4 * unit + small
    assert len(found) == 2  # what the device runs: the host splits
    text = str(found)
    assert text.startswith("group     split, rotary_embedding, rotary_embedding\n")
    assert f"crosses   {only.bytes_together:,} bytes; alone {only.bytes_alone:,}" in text
    assert "host      split.0.y0, split.0.y1, split.0.y2: views of input 0" in text
    assert "memory    buffer 1, " in text


# ---- what is between operators ------------------------------------------------------------------

MOVED = {
    "transpose": lambda x: jnp.swapaxes(x, 0, 2),
    "flip": lambda x: jnp.flip(x, (0, 2)),
    "slice": lambda x: x[:, ::2, 2:],
    "concatenate": lambda x: jnp.concatenate([x, x[:, :2], x], 1),
    "stack": lambda x: jnp.stack([x, x[::-1]], 1),
    "broadcast": lambda x: jnp.broadcast_to(x[:, None, :1], (*x.shape[:1], 3, 5, x.shape[2])),
    "tile": lambda x: jnp.tile(x, (2, 1, 3)),
    "repeat": lambda x: jnp.repeat(x, 3, axis=1),
    "pad": lambda x: jnp.pad(x, ((1, 0), (0, 2), (3, 1)), constant_values=2),
    "roll": lambda x: jnp.roll(x, 2, 1),
    "split": lambda x: jnp.concatenate(jnp.split(x, 2, -1)[::-1], -1),
    "reshape": lambda x: x.reshape(x.shape[0], -1).T.reshape(-1, 2, 3),
}


@pytest.mark.parametrize("dtype", [*generate.BYTES, "int8", "bool"])
@pytest.mark.parametrize("name", MOVED)
def test_movement_is_exact(name, dtype):
    def f(x):
        a, b = jax_webgpu.split(x, num_outputs=2)
        return jax_webgpu.split(MOVED[name](a), num_outputs=2), b

    x = example((4, 6, 8)).astype(dtype)
    found, counted = counts(jax_webgpu.fuse(f), x)
    assert_same(found, f(x))
    assert counted["submissions"] == (1 if dtype in generate.BYTES else 2)


@pytest.mark.parametrize(
    "middle",
    [
        lambda x: sum(jnp.flip(x * 2.0**n, 0) for n in range(-3, 9)),
        lambda x: jnp.concatenate([x * n for n in (1.0, 2.0, 4.0)] * 2, -1),
        lambda x: [x := jnp.flip(x, 0) * (2.0 if n % 2 else 0.5) for n in range(150)][-1],
        lambda x: [x := jnp.maximum(x, jnp.flip(x, 1)) for _ in range(30)][-1],
        lambda x: [x := jnp.concatenate([x, x], -1)[..., ::2] for _ in range(30)][-1],
    ],
    ids=["many terms", "many parts", "long", "diamonds", "doubles"],
)
def test_large_expressions(middle):
    """Cut into kernels, so that they are neither too deep nor exponentially long."""

    def f(x):
        return rotate(middle(rotate(x)))

    found, counted = counts(jax_webgpu.fuse(f), example())
    assert_same(found, f(example()))
    assert counted["submissions"] == 1


# Of results near y from operands near x: units in the last place of float32, and absolutely.
# WGSL, section "Floating Point Accuracy"; of logistic and powers, what follows for their parts.
BOUNDS = {
    "add": (lambda x: x + 0.3, lambda x: x + np.float64(np.float32(0.3)), lambda x: 0.5),
    "sub": (lambda x: 0.3 - x, lambda x: np.float64(np.float32(0.3)) - x, lambda x: 0.5),
    "mul": (lambda x: x * 0.3, lambda x: x * np.float64(np.float32(0.3)), lambda x: 0.5),
    "div": (lambda x: 0.3 / x, lambda x: np.float64(np.float32(0.3)) / x, lambda x: 2.5),
    "square": (jnp.square, np.square, lambda x: 0.5),
    "cube": (lambda x: x**3, lambda x: x**3, lambda x: 1.5),
    "inverse": (lambda x: x**-2, lambda x: x**-2.0, lambda x: 4),
    "sqrt": (lambda x: jnp.sqrt(abs(x)), lambda x: np.sqrt(abs(x)), lambda x: 5),
    "rsqrt": (lambda x: jax.lax.rsqrt(abs(x)), lambda x: 1 / np.sqrt(abs(x)), lambda x: 2),
    "exp": (jnp.exp, np.exp, lambda x: 3 + 2 * abs(x)),
    "log": (lambda x: jnp.log(abs(x)), lambda x: np.log(abs(x)), lambda x: 3),
    "logistic": (jax.nn.sigmoid, lambda x: 1 / (1 + np.exp(-x)), lambda x: 6.5 + 2 * abs(x)),
    "neg": (lambda x: -x, lambda x: -x, lambda x: 0),
    "abs": (jnp.abs, np.abs, lambda x: 0),
    "max": (lambda x: jnp.maximum(x, 0.1), lambda x: np.maximum(x, np.float32(0.1)), lambda x: 0),
    "min": (lambda x: jnp.minimum(x, 0.1), lambda x: np.minimum(x, np.float32(0.1)), lambda x: 0),
}
LOG_ABSOLUTE = 2.0**-21  # of arguments between a half and two


@pytest.mark.parametrize("name", BOUNDS)
def test_arithmetic_is_within_bounds(name):
    mine, exact, units = BOUNDS[name]
    one, zero = jnp.ones((SEQUENCE, SIZE // 2)), jnp.zeros((SEQUENCE, SIZE // 2))

    def f(x):
        return rotate(mine(rotate(x, one, zero)), one, zero)  # nothing is rotated

    rng = np.random.default_rng(3)
    x = np.concatenate([rng.uniform(-4, 4, 500), rng.uniform(-60, 60, 268)])
    x = x.reshape(2, SEQUENCE, HEADS * SIZE).astype(np.float32)
    found, counted = counts(jax_webgpu.fuse(f), x)
    assert counted["submissions"] == 1
    expected = exact(x.astype(np.float64))
    bound = units(x) * ulp(expected, "float32")
    if name == "log":
        bound = np.maximum(bound, np.where((abs(x) >= 0.5) & (abs(x) <= 2), LOG_ABSOLUTE, 0))
    # The nearest float32 of the bound may be half a unit further.
    assert np.all(abs(found - expected) <= bound + 0.5 * ulp(expected, "float32"))


def test_what_wgsl_leaves_open_stays_outside():
    """No useful bound, or another result for a NaN, an infinity or a zero."""
    kept = {
        "sin": jnp.sin,
        "tanh": jnp.tanh,
        "floor": jnp.floor,
        "is": lambda x: jnp.where(x > 0, x, -x),
    }
    for f in kept.values():
        fused = jax_webgpu.fuse(lambda x, f=f: rotate(f(rotate(x))))
        assert "webgpu_group" not in names(jax.make_jaxpr(fused)(example()).jaxpr)


def test_a_maximum_keeps_nan():
    @jax_webgpu.fuse
    def f(x):
        a, b = jax_webgpu.split(x, num_outputs=2)
        return jax_webgpu.split(jnp.maximum(jnp.flip(a), 1.0), num_outputs=1), b

    x = jnp.array([np.nan, 0, 2, 1, 1, 1], jnp.float32)
    np.testing.assert_array_equal(f(x)[0][0], [2, 1, np.nan])


SPECIAL = {
    "float32": np.concatenate(
        [
            np.array(
                [0.0, -0.0, 1, 65504, 65519.99, 65520, 7e4, 1e38, 3.4e38, 6e-8, 2.98e-8, 1e-9]
            ),
            np.float64([np.inf, -np.inf, np.nan, 6.1e-5, 6.097e-5, 3e-5, 2.0**-24, 2.0**-25]),
        ]
    ).astype(np.float32),
    "float16": np.arange(2**16, dtype=np.uint16).view(np.float16),
    "bfloat16": np.arange(2**16, dtype=np.uint16).view(ml_dtypes.bfloat16),
}


@pytest.mark.parametrize("source", SPECIAL)
@pytest.mark.parametrize("target", SPECIAL)
def test_conversions_are_exact(source, target):
    x = SPECIAL[source]
    if source == "float32":
        bits = np.random.default_rng(2).integers(0, 2**32, 60000, np.uint32)
        halfway = (bits & 0xFFFF0000) | 0x8000
        x = np.concatenate([x, bits.view(np.float32), halfway.view(np.float32)])
    steps = [Step("convert", (0,), 1)]
    if source == target:
        steps = [Step("reverse", (0,), 1, ((0,),))]
    of = Group((Tensor(x.shape, source), Tensor(x.shape, target)), tuple(steps), (0,), (1,))
    found = np.zeros(x.shape, target)
    Runner(of)([found], [x])
    if source == target:
        assert found.tobytes() == x[::-1].tobytes()
        return
    with np.errstate(all="ignore"):
        wide = x.astype(np.float32)
        expected = wide.astype(target)
        nan = np.isnan(wide)
        # A device may take a subnormal float32 for zero.
        normal = ~nan & ((abs(wide) >= np.finfo(np.float32).smallest_normal) | (wide == 0))
        assert np.isnan(found[nan].astype(np.float32)).all()
        if source != "float32" and target == "float32":  # and back
            back = np.zeros(x.shape, source)
            there = Group(of.tensors[::-1], tuple(steps), (0,), (1,))
            Runner(there)([back], [found])
            assert back.tobytes() == x.tobytes()
    assert found[normal].tobytes() == expected[normal].tobytes()


# ---- kernels ------------------------------------------------------------------------------------


@st.composite
def movements(draw):
    """A group of data movement alone, and its inputs."""

    def numbers(count, low, high):
        return tuple(draw(st.integers(low, high)) for _ in range(count))

    tensors, arrays = [], []
    for _ in range(draw(st.integers(1, 3))):
        dtype = draw(st.sampled_from(sorted(generate.BYTES)))
        shape = numbers(draw(st.integers(0, 4)), 1, 5)
        tensors.append(Tensor(shape, dtype))
        size = math.prod(shape) * np.dtype(dtype).itemsize
        bits = np.random.default_rng(draw(st.integers(0, 99))).bytes(size)
        arrays.append(np.frombuffer(bits, dtype).reshape(shape))
    inputs, steps = len(tensors), []
    for _ in range(draw(st.integers(1, 10))):
        at = draw(st.integers(0, len(tensors) - 1))
        tensor = tensors[at]
        shape, rank, operands = tensor.shape, len(tensor.shape), (at,)
        name = draw(st.sampled_from(sorted({*generate.MOVEMENT, "reshape"})))
        if name == "reshape":
            size = math.prod(shape)
            first = draw(st.sampled_from([n for n in range(1, size + 1) if size % n == 0]))
            new, parameters = (first, size // first), ()
        elif name == "transpose":
            axes = tuple(draw(st.permutations(range(rank))))
            new, parameters = tuple(shape[axis] for axis in axes), (axes,)
        elif name == "reverse":
            new, parameters = shape, (tuple(range(draw(st.integers(0, rank)))),)
        elif name == "concatenate":
            if not rank:
                continue
            axis, times = draw(st.integers(0, rank - 1)), draw(st.integers(1, 3))
            new, parameters = (*shape[:axis], times * shape[axis], *shape[axis + 1 :]), (axis,)
            operands *= times
        elif name == "tile":
            counted = numbers(rank, 1, 3)
            new = tuple(a * b for a, b in zip(shape, counted, strict=True))
            parameters = (counted,)
        elif name == "broadcast":
            onto = tuple(sorted(draw(st.permutations(range(rank + 2)))[:rank]))
            sizes = dict(zip(onto, shape, strict=True))
            new = tuple(sizes.get(axis, 3) for axis in range(rank + 2))
            new = tuple(2 if size == 1 and axis in onto else size for axis, size in enumerate(new))
            parameters = (onto,)
        elif name == "slice":
            starts = tuple(draw(st.integers(0, size - 1)) for size in shape)
            strides = numbers(rank, 1, 3)
            new = tuple(
                -(-(size - start) // stride)
                for size, start, stride in zip(shape, starts, strides, strict=True)
            )
            parameters = (starts, strides)
        else:
            low, high = numbers(rank, 0, 2), numbers(rank, 0, 2)
            new = tuple(sum(each) for each in zip(low, shape, high, strict=True))
            parameters, operands = (low,), (at, Constant(3, tensor.dtype))
        if math.prod(new) > 3000:
            continue
        steps.append(Step(name, operands, len(tensors), parameters))
        tensors.append(Tensor(new, tensor.dtype))
    outputs = draw(st.sets(st.integers(inputs, len(tensors)), max_size=3))
    outputs = tuple(sorted(outputs & set(range(inputs, len(tensors)))))
    return Group(tuple(tensors), tuple(steps), tuple(range(inputs)), outputs), arrays


def _outputs(of):
    return [np.zeros(of.tensors[at].shape, of.tensors[at].dtype) for at in of.outputs]


@given(movements())
@settings(max_examples=60, deadline=None, derandomize=True)
def test_kernels_move_data_as_numpy_does(drawn):
    of, arrays = drawn
    found, expected = _outputs(of), _outputs(of)
    Runner(of)(found, arrays)
    group._run_apart(of, dict(enumerate(arrays)), expected, 0)
    for one, other in zip(found, expected, strict=True):
        assert one.tobytes() == other.tobytes()


def test_many_workgroups():
    shape = (3, 11_000_003)
    tensors = (Tensor(shape, "bfloat16"), Tensor(shape[::-1], "bfloat16"))
    of = Group(tensors, (Step("transpose", (0,), 1, ((1, 0),)),), (0,), (1,))
    linked = group.link(of, device.get().capabilities)
    assert linked.calls[0].plan.passes[0].workgroups[1] > 0
    floor = capabilities.PRESETS["floor"]
    kernel = group.link(of, floor).calls[0].plan
    groups = kernel.passes[0].workgroups
    assert max(groups) <= 65535 and math.prod(groups) * 256 >= math.prod(shape) // 2


@st.composite
def programs(draw):
    """A function of one array: a random graph of operators, of what fuses, and of what does not."""
    choices = ["rotate", "split", "flip", "transpose", "neg", "max", "concatenate", "sort", "half"]
    kinds = draw(st.lists(st.sampled_from(choices), min_size=3, max_size=12))
    operands = [draw(st.tuples(*[st.integers(0, at)] * 2)) for at in range(len(kinds))]
    results = draw(st.sets(st.integers(0, len(kinds)), min_size=1, max_size=4))

    def program(x):
        values = [x]
        for kind, (one, other) in zip(kinds, operands, strict=True):
            a, b = values[one], values[other]
            values.append(
                {
                    "rotate": lambda a, b: rotate(a),
                    "split": lambda a, b: jax_webgpu.split(a, num_outputs=2, axis=-1)[1],
                    "flip": lambda a, b: jnp.flip(a, (0, 2)),
                    "transpose": lambda a, b: jnp.swapaxes(a.reshape(2, SEQUENCE, 2, -1), 2, 3),
                    "neg": lambda a, b: -a,
                    "max": lambda a, b: jnp.maximum(a, b[..., : SIZE // 2].max()),
                    "concatenate": lambda a, b: jnp.concatenate([a, b], -1),
                    "sort": lambda a, b: jnp.sort(a),
                    "half": lambda a, b: a * 0.5,
                }[kind](a, b).reshape(2, SEQUENCE, -1)
            )
            if values[-1].shape[-1] % (2 * SIZE) or values[-1].shape[-1] > 512:
                values[-1] = x
        return [values[at] for at in sorted(results)]

    return program


@given(programs())
@settings(max_examples=15, deadline=None, derandomize=True)
def test_random_programs(program):
    x = example((2, SEQUENCE, HEADS * SIZE))
    assert_same(jax_webgpu.fuse(program)(x), jax.jit(program)(x))


# ---- groups -------------------------------------------------------------------------------------


def graph(text):
    """Nodes from lines such as `operator a b -> c d`, sizes by value, and the numbers of names."""
    numbers, nodes = {}, []
    for line in text.split(";"):
        read, written = (side.split() for side in line.split("->"))
        kind, *read = read
        reads, writes = (
            tuple(numbers.setdefault(name, len(numbers)) for name in names)
            for names in (read, written)
        )
        nodes.append(Node(kind, reads, writes))
    return nodes, [8] * len(numbers), numbers


def test_a_group_is_convex():
    # Together the two operators would wait for what stands outside, and it for them.
    nodes, sizes, numbers = graph("operator x -> a; outside a -> b; operator a b -> c")
    assert partition(nodes, sizes, {numbers["c"]}) == []
    # The third operator can run with either, but the first and the second not together.
    text = "operator x -> a; outside a -> b; operator b -> c; operator a c -> d"
    nodes, sizes, numbers = graph(text)
    assert partition(nodes, sizes, {numbers["d"]}) == [(2, 3)]


def test_edges_that_carry_more_come_first():
    text = "operator x -> small large; outside small -> b; operator b -> c; operator large c -> d"
    nodes, sizes, numbers = graph(text)
    sizes[numbers["large"]] = 100
    assert partition(nodes, sizes, {numbers["d"]}) == [(2, 3)]


@pytest.mark.parametrize(
    ("text", "result", "expected"),
    [
        ("operator x -> a; made a -> b; operator b -> c", "c", [(0, 1, 2)]),
        ("made x -> a; operator a -> b; operator b -> c; made c -> d", "d", [(1, 2)]),
        ("made x y -> a; operator a -> b; operator b -> c", "c", [(1, 2)]),
        ("operator x -> a", "a", []),
        ("operator x -> a; operator y -> b; outside a b -> c", "c", [(0, 1)]),
        ("operator x -> a; operator x -> b; joined a b -> c", "c", [(0, 1, 2)]),
        ("operator x -> a; made a y -> b; made b z -> c; outside c -> d", "d", []),
    ],
)
def test_which_nodes_are_taken(text, result, expected):
    nodes, sizes, numbers = graph(text)
    assert partition(nodes, sizes, {numbers[result]}) == expected


def test_a_conversion_is_taken_where_it_saves_bytes():
    nodes, sizes, numbers = graph("made x -> a; operator a -> b; made b -> c")
    sizes[numbers["x"]] = sizes[numbers["c"]] = 4
    assert partition(nodes, sizes, {numbers["c"]}) == [(0, 1, 2)]


@given(st.data())
@settings(max_examples=200, deadline=None, derandomize=True)
def test_groups_of_random_graphs(data):
    count = data.draw(st.integers(1, 14))
    kinds = st.sampled_from(["operator", "operator", "made", "joined", "outside"])
    effect = ()
    nodes = []
    for at in range(count):
        reads = data.draw(st.lists(st.integers(0, at), min_size=1, max_size=3))
        kind = data.draw(kinds)
        ordered = kind == "outside" and data.draw(st.booleans())
        nodes.append(Node(kind, tuple(reads), (at + 1,), effect if ordered else ()))
        effect = (at,) if ordered else effect
    sizes = data.draw(st.lists(st.integers(1, 50), min_size=count + 1, max_size=count + 1))
    results = {count}
    groups = partition(nodes, sizes, results)
    members = [node for each in groups for node in each]
    assert len(members) == len(set(members))
    for each in groups:
        operators = [node for node in each if nodes[node].kind == "operator"]
        alone = sum(crossing(nodes, sizes, results, [node]) for node in operators)
        assert operators and crossing(nodes, sizes, results, each) <= alone
        assert all(nodes[node].kind != "outside" for node in each)
    made = {0}
    done = set()
    for unit in order(nodes, groups):  # each node once, and after all that it needs
        inside = {value for node in unit for value in nodes[node].writes}
        for node in unit:
            assert {*nodes[node].reads} <= made | inside
            assert {*nodes[node].after} <= done | {*unit}
        made |= inside
        done |= {*unit}
    assert done == set(range(count))


def test_the_gradient_where_a_rule_reduces(run):
    """What no tangent reaches is needed beside what one does, with XLA's sums between them."""
    kernels = pathlib.Path(__file__).parents[1] / "examples" / "kernels"
    softmax = jax_webgpu.load_kernel(kernels / "softmax")

    @softmax.defjvp
    def derivative(primals, tangents, *, axis):
        y, (t,) = softmax(*primals, axis=axis), tangents
        return y, y * (t - (y * t).sum(axis, keepdims=True))

    def loss(x):
        first, second = jax_webgpu.split(x, num_outputs=2, axis=-1)
        return (softmax(first, axis=-1) * second).sum()

    def plain(x):
        first, second = jnp.split(x, 2, -1)
        return (jax.nn.softmax(first) * second).sum()

    x = np.random.default_rng(5).standard_normal((3, 8)).astype("f4")
    for of in (jax.grad, lambda f: jax.vmap(jax.grad(lambda row: f(row[None])))):
        gradient = run(of(jax_webgpu.fuse(loss)), x)
        np.testing.assert_allclose(gradient, of(plain)(x), atol=1e-6)
        np.testing.assert_allclose(run(jax_webgpu.fuse(of(loss)), x), gradient, atol=1e-6)
    hessian = run(jax.hessian(jax_webgpu.fuse(loss)), x[:1])
    np.testing.assert_allclose(hessian, jax.hessian(plain)(x[:1]), atol=1e-5)
