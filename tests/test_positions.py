"""A position that no row of the caches has: refused in the same words, wherever the call stands.

No result comes of it, so no other row is ever read; and the next call is none the worse for it.
In plain JAX, where nothing can be checked under `jax.jit`, such a token is NaNs.
"""

import re
import signal
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from poison import poisoned

import jax_webgpu
from jax_webgpu import device, rotary_embedding

pytestmark = pytest.mark.promise("positions")

BATCH, TOKENS, SIZE = 4, 3, 8
RNG = np.random.default_rng(29)
X = RNG.standard_normal((BATCH, 2, TOKENS, SIZE)).astype(np.float32)
GOOD = RNG.integers(0, 5, (BATCH, TOKENS))

# Fewer rows than tokens: the caches cross whole. More: the rows that are named are gathered first.
ROWS = (5, 40)


def caches(rows):
    angles = np.arange(rows * SIZE // 2, dtype=np.float64).reshape(rows, -1)
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def bad_positions(rows, dtype):
    """Just beyond each end, far beyond, and what is a row once it is cut down or wrapped."""
    values = [rows, rows + 1, 2**31 - 1]
    if dtype != "uint32":
        values += [-1, -rows, -(2**31)]
    if dtype == "uint32":
        values += [2**31, 2**32 - 1]
    if dtype == "int64":
        values += [2**32, 2**32 + 3, -(2**32) + 3, 2**63 - 1, -(2**63)]
    return values


# --- where a call may stand ---------------------------------------------------------------------
#
# Each is given a call of x and the positions, x, and positions of which those in batch 2, token 1
# are wrong. It also says which index the message has.

WHERE = {}


def place(index="2, 1"):
    def named(f):
        WHERE[f.__name__] = pytest.param(f, index, id=f.__name__)
        return f

    return named


@place()
def jitted(call, x, ids):
    return jax.jit(call)(x, ids)


@place()
def ahead_of_time(call, x, ids):
    return jax.jit(call).lower(x, ids).compile()(x, ids)


@place()
def scan(call, x, ids):
    """The second turn of two, of which the first is right."""

    def body(carry, ids):
        y = call(carry, ids)
        return y, y

    turns = jnp.stack([jnp.zeros_like(ids), ids])
    return jax.lax.scan(body, x, turns)


@place()
def loop(call, x, ids):
    def body(turn, y):
        return call(y, jnp.where(turn == 1, ids, 0))

    return jax.jit(lambda x: jax.lax.fori_loop(0, 3, body, x))(x)


@place()
def branch(call, x, ids):
    return jax.jit(lambda p: jax.lax.cond(p, call, lambda x, _: x, x, ids))(True)


@place()
def remat(call, x, ids):
    return jax.jit(jax.grad(lambda x: jax.checkpoint(call)(x, ids).sum()))(x)


@place()
def gradient(call, x, ids):
    return jax.jit(jax.grad(lambda x: call(x, ids).sum()))(x)


@place()
def jvp(call, x, ids):
    return jax.jit(lambda x: jax.jvp(lambda x: call(x, ids), (x,), (x,)))(x)


@place("1, 2, 1")
def vmap(call, x, ids):
    both = jnp.stack([jnp.zeros_like(ids), ids])
    return jax.jit(jax.vmap(call))(jnp.stack([x, x]), both)


@place()
def vmap_of_x_alone(call, x, ids):
    return jax.jit(jax.vmap(call, (1, None), 1))(jnp.stack([x, x], 1), ids)


@place("2, 1, 1")
def vmap_along_another_axis(call, x, ids):
    both = jnp.stack([jnp.zeros_like(ids), ids], 1)
    return jax.jit(jax.vmap(call, (None, 1)))(x, both)


@place("1, 0, 2, 1")
def vmap_of_vmap(call, x, ids):
    four = jnp.stack([jnp.zeros_like(ids), ids])[:, None]
    return jax.jit(jax.vmap(jax.vmap(call, (None, 0)), (None, 0)))(x, four)


@place()
def fuse(call, x, ids):
    def f(x, ids):
        first, second = jax_webgpu.split(x, (1, 1), axis=1)
        return call(jnp.concatenate([second * 2, first], 1), ids)

    return jax_webgpu.fuse(f)(x, ids)


@place()
def fuse_with_positions_made_inside(call, x, ids):
    def f(x, ids):
        first, second = jax_webgpu.split(x, (1, 1), axis=1)
        return call(jnp.concatenate([first, second], 1), (ids - ids[:1]) + ids[:1])

    return jax_webgpu.fuse(f)(x, ids)


@place()
def scan_of_fuse(call, x, ids):
    return scan(jax_webgpu.fuse(lambda x, ids: -call(-x, ids)), x, ids)


def mesh(kind):
    return jax.make_mesh((4,), ("data",), axis_types=(kind,), devices=jax.devices()[:4])


# Each of four devices has one batch of four: the index is that of the shard.


@place("0, 1")
def shard_map(call, x, ids):
    spec = P("data")
    sharded = jax.shard_map(call, mesh=mesh(AxisType.Auto), in_specs=(spec, spec), out_specs=spec)
    return jax.jit(sharded)(x, ids)


@place("0, 1")
def shard_map_of_scan(call, x, ids):
    spec = P("data")
    sharded = jax.shard_map(
        lambda x, ids: scan(call, x, ids)[1],
        mesh=mesh(AxisType.Auto),
        in_specs=(spec, spec),
        out_specs=P(None, "data"),
    )
    return jax.jit(sharded)(x, ids)


@place("0, 1")
def shard_map_of_fuse(call, x, ids):
    return shard_map(jax_webgpu.fuse(lambda x, ids: call(x * 2, ids)), x, ids)


@place("0, 1")
def explicit_axes(call, x, ids):
    sharding = jax.sharding.NamedSharding(mesh(AxisType.Explicit), P("data"))
    with jax.set_mesh(sharding.mesh):
        return jax.jit(call)(*(jax.device_put(each, sharding) for each in (x, ids)))


@place("0, 1")
def per_shard(call, x, ids):
    with jax.set_mesh(mesh(AxisType.Auto)):
        return jax.jit(jax_webgpu.per_shard(call, P("data"), P("data")))(x, ids)


@place()
def automatic_axes(call, x, ids):  # over `pure` see SHARED
    sharding = jax.sharding.NamedSharding(mesh(AxisType.Auto), P("data"))
    return jax.jit(call)(*(jax.device_put(each, sharding) for each in (x, ids)))


# --- the table ----------------------------------------------------------------------------------


def call_with(rows):
    cos, sin = map(jnp.asarray, caches(rows))
    return lambda x, ids: rotary_embedding(x, cos, sin, ids)


def refused(f, call, x, ids):
    """The message of a call that gives no result, and dispatches nothing for the bad positions."""
    with pytest.raises((jax.errors.JaxRuntimeError, ValueError)) as caught, poisoned():
        jax.block_until_ready(f(call, x, ids))
    return str(caught.value)


def sentence(index, value, rows):
    return re.escape(
        f"position_ids[{index}] = {value}; expected 0 to {rows - 1}, since the caches have {rows} "
        "rows"
    )


EVERYWHERE = [
    pytest.param(callback, *where.values, id=f"{name}-{callback}")
    for name, where in WHERE.items()
    for callback in ("buffer", "pure")
    if (name, callback) != ("automatic_axes", "pure")
]


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("callback", "f", "index"), EVERYWHERE)
def test_the_message_is_the_same_everywhere(callback, f, index, rows, record_property):
    ids = GOOD.astype(np.int32)
    with jax_webgpu.configure(callback=callback):
        x, good = jax.block_until_ready((jnp.asarray(X), jnp.asarray(ids)))
        for value in (rows, -1):
            ids[2, 1] = value
            message = refused(f, call_with(rows), x, jax.block_until_ready(jnp.asarray(ids)))
            assert re.search(sentence(index, value, rows), message)
        record_property("calls refused", 2)
        f(call_with(rows), x, good)  # the next call works
        y = jax.jit(call_with(rows))(x, good)
        oracle.assert_rotary_embedding(y, X, *caches(rows), GOOD)


# Of four devices one refuses, and the others wait for what it was to give: XLA ends the process,
# after a minute if it is not told another time, or it raises the error.
SHARED = """
import os
os.environ["XLA_FLAGS"] = (
    "--xla_force_host_platform_device_count=4"
    " --xla_cpu_collective_call_warn_stuck_timeout_seconds=1"
    " --xla_cpu_collective_call_terminate_timeout_seconds=2"
)
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
import jax_webgpu

mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
cos = np.ones((5, 4), np.float32)
ids = np.zeros((4, 3), np.int32)
ids[2, 1] = 7
x, ids = (
    jax.device_put(each, NamedSharding(mesh, P("data")))
    for each in (np.ones((4, 2, 3, 8), np.float32), ids)
)

def call(x, ids):
    return jax_webgpu.rotary_embedding(x, cos, cos, ids)

def summed(call):
    spec = P("data")
    f = lambda x, ids: jax.lax.psum(call(x, ids), "data")
    return jax.shard_map(f, mesh=mesh, in_specs=(spec, spec), out_specs=P())

f = {f}
print(jax.block_until_ready(jax.jit(f)(x, ids)))
"""


@pytest.mark.parametrize(
    ("f", "callback", "index"),
    [
        ("lambda x, ids: call(x, ids) * 2", "pure", "2, 1"),
        ("summed(call)", "pure", "0, 1"),
        ("summed(call)", "buffer", "0, 1"),
        ("summed(jax_webgpu.fuse(lambda x, ids: call(x * 2, ids)))", "buffer", "0, 1"),
    ],
)
def test_it_is_told_where_other_devices_wait(f, callback, index, run_snippet, record_property):
    done = run_snippet(SHARED.format(f=f), JAX_WEBGPU_CALLBACK=callback, NPROC="16")
    assert done.returncode in (1, -signal.SIGABRT), done.stderr
    assert done.stdout == ""
    assert re.search(sentence(index, 7, 5), done.stderr)
    record_property("calls refused", 1)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("callback", ["buffer", "pure"])
@pytest.mark.parametrize("dtype", ["int32", "uint32", "int64"])
def test_every_position_that_is_no_row(dtype, callback, rows, record_property):
    with jax_webgpu.configure(callback=callback), jax.enable_x64(dtype == "int64"):
        call = jax.jit(call_with(rows))
        for value in bad_positions(rows, dtype):
            ids = GOOD.astype(dtype)
            ids[2, 1] = value
            x, given = jax.block_until_ready((jnp.asarray(X), jnp.asarray(ids)))
            before = device.get().counters["dispatches"]
            assert re.search(sentence("2, 1", value, rows), refused(jitted, call, x, given))
            assert device.get().counters["dispatches"] == before
            with pytest.raises(ValueError, match=sentence("2, 1", value, rows)):
                rotary_embedding(X, *caches(rows), ids)
    record_property("calls refused", 2 * len(bad_positions(rows, dtype)))


@pytest.mark.parametrize("rows", ROWS)
def test_in_plain_jax_such_a_token_is_nans_and_no_other_row(rows):
    with jax_webgpu.configure(implementation="reference"), jax.enable_x64(True):
        for dtype in ("int32", "uint32", "int64"):
            for value in bad_positions(rows, dtype):
                ids = GOOD.astype(dtype)
                ids[2, 1] = value
                y = np.asarray(jax.jit(call_with(rows))(X, ids))
                lost = np.zeros((BATCH, TOKENS), bool)
                lost[2, 1] = True
                assert np.isnan(y.transpose(0, 2, 1, 3)[lost]).all()
                kept = np.where(lost, 0, ids).astype(np.int64)
                x = np.where(lost[:, None, :, None], 0, X)
                y = np.where(lost[:, None, :, None], 0, y)
                oracle.assert_rotary_embedding(y, x, *caches(rows), kept)


def test_caches_without_rows_have_no_position(run):
    cos = np.zeros((0, SIZE // 2), np.float32)
    f = partial(rotary_embedding, cos_cache=cos, sin_cache=cos)
    with pytest.raises((ValueError, jax.errors.JaxRuntimeError), match=r"position_ids\[0, 0\] = 0"):
        run(lambda x, ids: f(x, position_ids=ids), X, np.zeros((BATCH, TOKENS), np.int32))
