"""Both operators on meshes: 8 host devices in this process, and two processes of one each."""

import contextlib
import socket
import subprocess
import sys
import textwrap
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_webgpu
from jax_webgpu import device, runtime

BATCH, HEADS, TOKENS, SIZE, ROWS = 8, 4, 6, 16, 9


def mesh_of(kind):
    return jax.make_mesh(
        (4, 2), ("data", "model"), axis_types=(kind, kind), devices=jax.devices("cpu")
    )


@pytest.fixture(autouse=True)
def on_the_cpu():
    with jax.default_device(jax.devices("cpu")[0]):
        yield


@pytest.fixture
def shards(monkeypatch):
    """The shapes of x and the places of the calls that reach the host."""
    calls = []
    dispatch = runtime.Dispatcher.__call__

    def recorded(self, arrays, outputs, place=0):
        calls.append((arrays[0].shape, place))
        return dispatch(self, arrays, outputs, place)

    monkeypatch.setattr(runtime.Dispatcher, "__call__", recorded)
    return calls


def inputs(rank=4, by_token=False):
    rng = np.random.default_rng(7)
    shape = (BATCH, HEADS, TOKENS, SIZE) if rank == 4 else (BATCH, TOKENS, HEADS * SIZE)
    table = (BATCH, TOKENS, SIZE // 2) if by_token else (ROWS, SIZE // 2)
    arrays = [rng.standard_normal(each).astype(np.float32) for each in (shape, table, table)]
    return arrays if by_token else [*arrays, rng.integers(0, ROWS, (BATCH, TOKENS))]


def rotate(rank):
    return partial(jax_webgpu.rotary_embedding, num_heads=HEADS if rank == 3 else None)


def loss(f):
    def total(*arrays):
        return sum(jnp.sum(part**3) for part in jax.tree.leaves(f(*arrays)))

    return total


def assert_alike(actual, expected):
    for one, other in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.asarray(one), np.asarray(other), rtol=1e-5, atol=2e-4)


def gradients(f, arrays, run):
    return run(jax.grad(loss(f), (0, 1, 2)), *arrays)


# --- shard_map ----------------------------------------------------------------------------------

SPECS = pytest.mark.parametrize(
    "spec", [P("data", "model"), P(None, None, "model"), P(("data", "model")), P(None, "model")]
)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("by_token", [True, False])
@SPECS
def test_rotary_embedding_under_shard_map(spec, by_token, check_vma, run, shards):
    """Sharded x beside a replicated table, or caches that are sharded as x is."""
    arrays = inputs(by_token=by_token)
    f = rotate(4)
    by_batch = P(*(*spec, None, None)[:1], *(*spec, None, None)[2:3])
    rest = [by_batch] * 2 if by_token else [P(), P(), by_batch]
    sharded = jax.shard_map(
        f,
        mesh=mesh_of(AxisType.Auto),
        in_specs=(spec, *rest),
        out_specs=spec,
        check_vma=check_vma,
    )
    expected = f(*arrays)
    shards.clear()
    result = run(sharded, *arrays)
    assert np.array_equal(result, expected)
    assert sorted(place for _, place in shards) == list(range(8))
    # Without check_vma JAX itself does not sum the cotangents of what is replicated in the body,
    # but at its boundary; both ways the gradient is one device's.
    assert_alike(gradients(sharded, arrays, run), gradients(f, arrays, run))


@pytest.mark.parametrize("check_vma", [True, False])
def test_split_under_shard_map(check_vma, run):
    x = inputs(rank=3)[0]
    f = partial(jax_webgpu.split, split=(5, 7, 20), axis=-1)
    spec = P("data", None, "model")
    sharded = jax.shard_map(
        f, mesh=mesh_of(AxisType.Auto), in_specs=spec, out_specs=spec, check_vma=check_vma
    )
    halves = [jnp.split(half, (5, 12), axis=-1) for half in jnp.split(x, 2, axis=-1)]
    expected = [jnp.concatenate(pair, axis=-1) for pair in zip(*halves, strict=True)]
    for part, wanted in zip(run(sharded, x), expected, strict=True):
        assert np.array_equal(part, wanted)
    np.testing.assert_allclose(run(jax.grad(loss(sharded)), x), 3 * x**2, rtol=1e-6)


def test_positions_are_checked_on_each_shard():
    x, cos, sin, positions = inputs()
    positions[5, 2] = ROWS
    sharded = jax.shard_map(
        rotate(4),
        mesh=mesh_of(AxisType.Auto),
        in_specs=(P("data"), P(), P(), P("data")),
        out_specs=P("data"),
    )
    with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match=r"= 9; .* 9 rows"):
        jax.block_until_ready(jax.jit(sharded)(x, cos, sin, positions))


def test_partly_manual_mesh():
    """`buffer_callback` is right there; `pure_callback` raises, in one sentence of ours."""
    arrays = inputs()
    mesh = mesh_of(AxisType.Auto)
    partly = jax.jit(
        jax.shard_map(
            rotate(4),
            mesh=mesh,
            in_specs=(P("data"), P(), P(), P("data")),
            out_specs=P("data"),
            axis_names={"data"},
        )
    )
    with jax.set_mesh(mesh):
        assert np.array_equal(partly(*arrays), rotate(4)(*arrays))
        with (
            jax_webgpu.configure(callback="pure"),
            pytest.raises(ValueError, match="leaves mesh axes, model, automatic"),
        ):
            partly(*arrays)


# --- Explicit and automatic axes ----------------------------------------------------------------


@pytest.mark.parametrize("context", [True, False])
@pytest.mark.parametrize(
    ("rank", "spec", "kept", "shard"),
    [
        (4, P("data", "model"), P("data", "model"), (2, 2, 6, 16)),
        (4, P(None, None, "model"), P(None, None, "model"), (8, 4, 3, 16)),
        (4, P(None, None, None, "model"), P(), (8, 4, 6, 16)),
        (4, P(("data", "model")), P(("data", "model")), (1, 4, 6, 16)),
        (3, P("data", None, "model"), P("data", None, "model"), (2, 6, 32)),
        (3, P(None, None, ("data", "model")), P(), (8, 6, 64)),  # 8 shards of 4 heads: resharded
    ],
)
def test_rotary_embedding_with_explicit_axes(rank, spec, kept, shard, context, run, shards):
    """Each device rotates its shard; the output keeps the sharding where an axis can be split."""
    mesh = mesh_of(AxisType.Explicit)
    arrays = inputs(rank)
    f = rotate(rank)
    expected = f(*arrays)
    with jax.set_mesh(mesh) if context else contextlib.nullcontext():
        x = jax.device_put(arrays[0], NamedSharding(mesh, spec))
        shards.clear()
        y = run(f, x, *arrays[1:])
        assert np.array_equal(y, expected)
        assert jax.typeof(y).sharding.spec == P(*(*kept, None, None, None, None)[:rank])
        assert sorted(shards) == [(shard, place) for place in range(8)]
        if context:  # outside of one, JAX gives no gradient of a sharded array at all
            own = gradients(f, [x, *arrays[1:]], run)
    if context:
        assert_alike(own, gradients(f, arrays, run))


@pytest.mark.parametrize(
    ("axis", "spec", "kept"),
    [
        (1, P("data", None, "model"), P("data", None, "model")),
        (2, P("data", None, "model"), P("data", None, None)),
        (0, P("data", None, "model"), P(None, None, "model")),
    ],
)
def test_split_with_explicit_axes(axis, spec, kept, run):
    mesh = mesh_of(AxisType.Explicit)
    x = inputs(rank=3)[0]
    with jax.set_mesh(mesh):
        parts = run(
            partial(jax_webgpu.split, num_outputs=3, axis=axis),
            jax.device_put(x, NamedSharding(mesh, spec)),
        )
        for part, wanted in zip(parts, jax_webgpu.split(x, num_outputs=3, axis=axis), strict=True):
            assert np.array_equal(part, wanted)
            assert jax.typeof(part).sharding.spec == kept


def test_vmap_with_explicit_axes(run):
    mesh = mesh_of(AxisType.Explicit)
    x, *rest = inputs()
    two = np.stack([x, -x])
    with jax.set_mesh(mesh):
        sharded = jax.device_put(two, NamedSharding(mesh, P(None, "data", "model")))
        y = run(jax.vmap(rotate(4), (0, None, None, None)), sharded, *rest)
        assert np.array_equal(y[1], -np.asarray(y[0]))
        assert np.array_equal(y[0], rotate(4)(x, *rest))


@pytest.mark.parametrize("spec", [P("data", "model"), P("data"), P(None, "data", "model")])
@pytest.mark.parametrize("at", [0, 1, 2])
def test_vmap_over_a_sharded_axis(at, spec, run):
    """The mapped axis is sharded, or another, or both."""
    mesh = mesh_of(AxisType.Explicit)
    _, cos, sin, _ = inputs()
    rng = np.random.default_rng(at)
    x = rng.standard_normal((8, 4, 8, 4, 16)).astype(np.float32)
    mapped = jax.vmap(lambda x: jax_webgpu.split(rotate_rows(x), (4, 12), axis=-1), at, at)

    def rotate_rows(x):
        ids = np.arange(x.shape[0] * x.shape[2]).reshape(x.shape[0], -1) % ROWS
        return jax_webgpu.rotary_embedding(x, cos, sin, ids)

    expected = mapped(x)
    with jax.set_mesh(mesh):
        sharded = jax.device_put(x, NamedSharding(mesh, spec))
        assert_alike(run(mapped, sharded), expected)
        assert_alike(run(jax.grad(loss(mapped)), sharded), jax.grad(loss(mapped))(x))


def test_gradient_of_the_caches_through_vmap_over_a_sharded_axis(run):
    mesh = mesh_of(AxisType.Explicit)
    x, cos, sin, positions = inputs()
    four = np.stack([x, -x, 2 * x, x / 2])

    def f(four, cos):
        return jax.vmap(lambda x: jax_webgpu.rotary_embedding(x, cos, sin, positions))(four)

    expected = jax.grad(loss(f), (0, 1))(four, cos)
    with jax.set_mesh(mesh):
        sharded = jax.device_put(four, NamedSharding(mesh, P("data")))
        own = run(jax.grad(loss(f), (0, 1)), sharded, cos)
    for one, other in zip(own, expected, strict=True):
        np.testing.assert_allclose(np.asarray(one), np.asarray(other), rtol=1e-4, atol=1e-2)


def test_automatic_axes(shards):
    """Without help the whole array is run, on every device or on one; `per_shard` avoids it."""
    mesh = mesh_of(AxisType.Auto)
    x, cos, sin, positions = inputs()
    expected = rotate(4)(x, cos, sin, positions)
    placed = jax.device_put(x, NamedSharding(mesh, P("data", "model")))
    with jax.set_mesh(mesh):
        for callback, calls in (("buffer", 8), ("pure", 1)):
            with jax_webgpu.configure(callback=callback):
                shards.clear()
                assert np.array_equal(jax.jit(rotate(4))(placed, cos, sin, positions), expected)
                assert [shape for shape, _ in shards] == [x.shape] * calls
        f = jax_webgpu.per_shard(rotate(4), P("data", "model"), P(), P(), P("data"))
        shards.clear()
        y = jax.jit(f)(placed, cos, sin, positions)
        assert np.array_equal(y, expected)
        assert sorted(shards) == [((2, 2, TOKENS, SIZE), place) for place in range(8)]
        assert y.sharding.spec == P("data", "model")
    with pytest.raises(ValueError, match="set_mesh"):
        f(x, cos, sin, positions)


# --- several adapters and processes -------------------------------------------------------------


@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto])
def test_two_adapters(kind, monkeypatch):
    """The place in the mesh picks the adapter; here both are this machine's first one."""
    device.get()
    adapter, info, _ = device._devices[0]
    monkeypatch.setattr(device, "_devices", [(adapter, info, None), (adapter, info, None)])
    arrays = inputs()
    expected = rotate(4)(*arrays)
    first, second = (device.get(place) for place in range(2))
    assert device.count() == 2 and first is not second and device.get(5) is second
    before = first.counters["dispatches"]
    mesh = mesh_of(kind)
    specs = P("data", "model"), P(), P(), P("data")
    if kind == AxisType.Auto:
        f = jax.shard_map(rotate(4), mesh=mesh, in_specs=specs, out_specs=specs[0])
    else:
        f = rotate(4)
        arrays[0] = jax.device_put(arrays[0], NamedSharding(mesh, specs[0]))
    with jax.set_mesh(mesh):
        assert np.array_equal(jax.jit(f)(*arrays), expected)
    assert first.counters["dispatches"] - before == second.counters["dispatches"] == 4


PROCESS = """
    import sys
    import jax
    import numpy as np
    from jax.sharding import NamedSharding, PartitionSpec as P

    rank, port = int(sys.argv[1]), sys.argv[2]
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=2, process_id=rank)

    import jax_webgpu
    from jax_webgpu import runtime

    ran = []
    dispatch = runtime.Dispatcher.__call__
    runtime.Dispatcher.__call__ = lambda *a: ran.append((a[1][0].shape, a[-1])) or dispatch(*a)

    rng = np.random.default_rng(0)
    x = rng.standard_normal((4, 3, 5, 16)).astype(np.float32)
    cos, sin = (rng.standard_normal((9, 8)).astype(np.float32) for _ in "cs")
    ids = rng.integers(0, 9, (4, 5))
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices("cpu"))

    def put(array, spec):
        sharding = NamedSharding(mesh, spec)
        return jax.make_array_from_callback(array.shape, sharding, lambda at: array[at])

    by_batch, whole = P("data"), P()
    arrays = [put(x, by_batch), put(cos, whole), put(sin, whole), put(ids.astype("i4"), by_batch)]

    def loss(*arrays):
        y = jax_webgpu.rotary_embedding(*arrays)
        a, b = jax_webgpu.split(y, (2, 14), axis=-1)
        return (a**3).sum() + (b**2).sum(), y

    with jax.set_mesh(mesh):
        (value, y), grads = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(*arrays)
    assert {place for _, place in ran} == {rank}, ran
    assert all(shape[0] == 2 for shape, _ in ran if len(shape) == 4), ran

    c, s = cos[ids][:, None], sin[ids][:, None]
    a, b = x[..., :8], x[..., 8:]
    expected = np.concatenate([a * c - b * s, a * s + b * c], -1)
    np.testing.assert_allclose(y.addressable_data(0), expected[2 * rank :][:2], atol=1e-5)
    dy = np.concatenate([3 * expected[..., :2] ** 2, 2 * expected[..., 2:]], -1)
    u, v = dy[..., :8], dy[..., 8:]
    dx = np.concatenate([u * c + v * s, v * c - u * s], -1)
    np.testing.assert_allclose(grads[0].addressable_data(0), dx[2 * rank :][:2], atol=1e-3)
    dcos = np.zeros_like(cos)
    np.add.at(dcos, ids, (u * a + v * b).sum(1))
    np.testing.assert_allclose(grads[1].addressable_data(0), dcos, atol=1e-2)
    print("right")
"""


def test_two_processes():
    """Each process dispatches its own shard, and the gradient of the table is summed over both."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    command = [sys.executable, "-c", textwrap.dedent(PROCESS)]
    processes = [
        subprocess.Popen(
            [*command, str(rank), port], stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        for rank in range(2)
    ]
    try:
        for process in processes:
            out, err = process.communicate(timeout=120)
            assert (process.returncode, out.split()[-1:]) == (0, [b"right"]), err.decode()
    finally:
        for process in processes:
            process.kill()
