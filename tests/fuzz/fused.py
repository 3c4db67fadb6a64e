"""`fuse`, `per_shard`, `configure`: programs of several operations, and what surrounds a call."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from poison import poisoned

import jax_webgpu
from fuzz.arrays import decode, described, odd
from fuzz.targets import RIGHT, Target, Wrong, documented
from jax_webgpu import config
from jax_webgpu.errors import CallError, DTypeError

# ---- programs -----------------------------------------------------------------------------------

# An operation takes the arrays that there are, by number, and two numbers for what else it needs.
STEPS = (
    *("split", "split", "rotary", "rotary", "add", "sub", "mul", "neg", "abs", "max"),
    *("reshape", "transpose", "reverse", "concatenate", "slice", "pad", "astype", "broadcast"),
    *("scale", "sort", "where"),
)
SHAPES = [(2, 8), (4, 6), (1, 2, 4, 8), (2, 3, 2, 4), (12,), (1, 1, 1, 2), (3, 1, 4)]


def programs() -> st.SearchStrategy[Any]:
    number = st.integers(0, 99)
    array = described(
        st.sampled_from(SHAPES),
        st.sampled_from(["float32", "float32", "float16", "bfloat16", "int32"]),
        "eighths",
        "jax",
    )
    return st.fixed_dictionaries(
        {
            "kind": st.just("program"),
            "arrays": st.lists(array, min_size=1, max_size=3),
            "steps": st.lists(
                st.tuples(st.sampled_from(STEPS), number, number, number), min_size=1, max_size=8
            ),
            "how": st.sampled_from(["eager", "jit", "vmap", "scan", "grad"]),
            "callback": st.sampled_from([None, None, "pure"]),
            "overlays": st.booleans(),
        }
    )


def perform(steps: Sequence[Any], arrays: Sequence[Any]) -> list[Any]:
    """All arrays of a program, its own first."""
    known = list(arrays)
    for name, *numbers in steps:
        at, p, q = numbers
        known += PERFORMED[name](known, known[at % len(known)], p, q)
    return known


def _split(known: list[Any], x: Any, p: int, q: int) -> list[Any]:
    if x.ndim == 0:
        return []
    axis = p % x.ndim
    if q % 2:
        return list(jax_webgpu.split(x, num_outputs=1 + q % 4, axis=axis))
    cut = q % (x.shape[axis] + 1)
    return list(jax_webgpu.split(x, (cut, x.shape[axis] - cut), axis=axis))


def _rotary(known: list[Any], x: Any, p: int, q: int) -> list[Any]:
    if x.ndim != 4 or x.shape[3] % 2 or x.dtype == jnp.int32:
        return []
    batch, _, sequence, size = x.shape
    rows = max(1, sequence + p % 3)
    angles = (jnp.arange(rows * (size // 2), dtype=jnp.float32) % 5 - 2) / 4
    cos = angles.reshape(rows, size // 2).astype(x.dtype)
    ids = (jnp.arange(batch * sequence, dtype=jnp.int32) * (1 + q % 3)) % rows
    ids = ids.reshape(batch, sequence)
    return [jax_webgpu.rotary_embedding(x, cos, -cos[::-1], ids, interleaved=bool(q % 2))]


def _same(known: list[Any], x: Any, p: int) -> Any:
    """Another array of the shape and dtype, which may be the same."""
    alike = [each for each in known if (each.shape, each.dtype) == (x.shape, x.dtype)]
    return alike[p % len(alike)]


def _concatenated(known: list[Any], x: Any, p: int, q: int) -> list[Any]:
    if x.ndim == 0:
        return []
    return [jnp.concatenate([x, _same(known, x, p)], q % x.ndim)]


def _sliced(known: list[Any], x: Any, p: int, q: int) -> list[Any]:
    if x.ndim == 0 or x.shape[p % x.ndim] == 0:
        return []
    axis = p % x.ndim
    start = q % x.shape[axis]
    return [jax.lax.slice_in_dim(x, start, x.shape[axis], 1 + q % 2, axis)]


def _reshaped(known: list[Any], x: Any, p: int, q: int) -> list[Any]:
    shapes = [(x.size,), (1, *x.shape), (x.size, 1)]
    shapes += [(1, 1, -1, 2)] * (x.size % 2 == 0 and x.size > 0)
    return [x.reshape(shapes[p % len(shapes)])]


def _cast(known: list[Any], x: Any, p: int, q: int) -> list[Any]:
    return [x.astype(["float32", "float16", "bfloat16"][p % 3])]


PERFORMED: dict[str, Callable[[list[Any], Any, int, int], list[Any]]] = {
    "split": _split,
    "rotary": _rotary,
    "add": lambda known, x, p, q: [x + _same(known, x, p)],
    "sub": lambda known, x, p, q: [x - _same(known, x, p)],
    "mul": lambda known, x, p, q: [x * _same(known, x, p)] if q % 2 else [],
    "neg": lambda known, x, p, q: [-x],
    "abs": lambda known, x, p, q: [jnp.abs(x)],
    "max": lambda known, x, p, q: [jnp.maximum(x, _same(known, x, p))],
    "reshape": _reshaped,
    "transpose": lambda known, x, p, q: [x.transpose(tuple(np.roll(range(x.ndim), p)))],
    "reverse": lambda known, x, p, q: [jnp.flip(x, p % x.ndim)] if x.ndim else [],
    "concatenate": _concatenated,
    "slice": _sliced,
    "pad": lambda known, x, p, q: [jnp.pad(x, [(p % 2, q % 2)] * x.ndim)],
    "astype": _cast,
    "broadcast": lambda known, x, p, q: [jnp.broadcast_to(x, (1 + p % 3, *x.shape))],
    "scale": lambda known, x, p, q: [x * np.asarray(2, x.dtype)],
    "sort": lambda known, x, p, q: [jnp.sort(x, -1)] if x.ndim else [],
    "where": lambda known, x, p, q: [jnp.where(x > np.asarray(0, x.dtype), x, -x)],
}
MOVES = {*STEPS} - {"rotary", "add", "sub", "mul", "scale", "where", "max", "astype"}


def _program(value: dict[str, Any]) -> str:
    """The same as unfused in plain JAX: bit for bit where nothing is computed."""
    arrays = [decode(each) for each in value["arrays"]]
    steps, how = value["steps"], value["how"]

    def program(*arrays: Any) -> Any:
        made = perform(steps, arrays)
        small = [each for each in made if each.size <= 1 << 14]
        return small[len(arrays) :] or [arrays[0] + arrays[0]]

    wanted = _under(how, program, "reference", value)(*arrays)
    found = _under(how, jax_webgpu.fuse(program), None, value)(*arrays)
    moved = {step[0] for step in steps} <= MOVES and how != "grad"
    if len(found) != len(wanted):
        raise Wrong(f"{len(found)} arrays, expected {len(wanted)}")
    for at, (one, other) in enumerate(zip(found, wanted, strict=True)):
        _near(at, np.asarray(one), np.asarray(other), exactly=moved)
    return RIGHT


def _under(
    how: str, f: Callable[..., Any], implementation: str | None, value: dict[str, Any]
) -> Callable[..., Any]:
    settings: dict[str, Any] = {"implementation": implementation or "webgpu"}
    if implementation is None:
        settings |= {"callback": value["callback"], "overlays": value["overlays"]}

    def gradient(*arrays: Any) -> Any:
        def total(*floats: Any) -> Any:
            kinds = iter(floats)
            every = [next(kinds) if a.dtype != jnp.int32 else a for a in arrays]
            made = f(*every)
            return sum(
                (each.astype(jnp.float32) / 8).sum() for each in made if each.dtype != jnp.int32
            ) + jnp.float32(0)

        floats = [each for each in arrays if each.dtype != jnp.int32]
        if not floats:
            return f(*arrays)
        return list(jax.grad(total, argnums=tuple(range(len(floats))))(*floats))

    def scanned(*arrays: Any) -> Any:
        def body(carry: Any, _: Any) -> Any:
            return carry, f(*arrays)

        return [each[-1] for each in jax.lax.scan(body, 0, None, length=2)[1]]

    def mapped(*arrays: Any) -> Any:
        twice = [jnp.stack([each, each]) for each in arrays]
        return jax.vmap(f)(*twice)

    chosen = {"jit": jax.jit(f), "vmap": mapped, "scan": scanned, "grad": gradient}.get(how, f)

    def call(*arrays: Any) -> list[Any]:
        with jax_webgpu.configure(**settings), poisoned():
            return list(jax.block_until_ready(chosen(*arrays)))

    return call


def _near(at: int, found: np.ndarray, wanted: np.ndarray, *, exactly: bool) -> None:
    if (found.shape, found.dtype) != (wanted.shape, wanted.dtype):
        raise Wrong(f"array {at}: {found.dtype}{found.shape} for {wanted.dtype}{wanted.shape}")
    if exactly or found.dtype == np.int32:
        if found.tobytes() != wanted.tobytes():
            raise Wrong(f"array {at}: other bits: {str(found)[:200]}, expected {str(wanted)[:200]}")
        return
    real, exact = found.astype(np.float64), wanted.astype(np.float64)
    # In a program of 16-bit floats each step rounds, and each may round the other way.
    epsilon = {"float32": 2**-9, "float16": 2**-6, "bfloat16": 2**-3}[str(wanted.dtype)]
    size = np.abs(exact[np.isfinite(exact)]).max(initial=1)
    wrong = ~((abs(real - exact) <= epsilon * size) | (real == exact))
    wrong &= np.isfinite(exact)
    if wrong.any():
        first = tuple(np.argwhere(wrong)[0])
        raise Wrong(f"array {at}{first}: {real[first]}, expected {exact[first]}; {wrong.sum()} so")


# ---- fuse, configure and per_shard themselves ---------------------------------------------------

SETTINGS = {
    "callback": st.sampled_from([None, "pure", "buffer", "other", "PURE"]) | odd(),
    "tunables": st.none()
    | st.sampled_from([{}, {"WORKGROUP_SIZE": 64}, {"WORKGROUP_SIZE": True}, {"other": 1}, {1: 1}])
    | st.dictionaries(st.sampled_from(["WORKGROUP_SIZE", "ON_CPU", "é"]), odd(), max_size=2)
    | odd(),
    "implementation": st.sampled_from(["webgpu", "reference", None, "cuda"]) | odd(),
    "overlays": st.booleans() | odd(),
}


def _configure(value: dict[str, Any]) -> str:
    """Takes what is documented, says what is wrong with the rest, and leaves no trace."""
    given = {name: decode(each) for name, each in value["given"].items()}
    tunables = given.get("tunables")
    before = config.settings()
    tunable = {"WORKGROUP_SIZE": int, "ON_CPU": bool}
    right = (
        {*given} <= {*SETTINGS}
        and given.get("callback") in (None, "pure", "buffer")
        and given.get("implementation", "webgpu") in ("webgpu", "reference")
        and isinstance(given.get("overlays", True), bool)
        and (
            tunables is None
            or (
                isinstance(tunables, dict)
                and all(type(each) is tunable.get(name) for name, each in tunables.items())
            )
        )
        if all(isinstance(each, str | bool | dict | None) for each in given.values())
        else None
    )
    try:
        with jax_webgpu.configure(**given):
            hash(config.settings())
    except Exception as error:
        if right:
            raise Wrong(f"refused, and it is right: {error}") from error
        return documented(error, (CallError, DTypeError, TypeError), (*SETTINGS, *given, "tunable"))
    finally:
        if config.settings() != before:
            raise Wrong(f"left {config.settings()}, expected {before}")
    if right is False:
        raise Wrong(f"taken, and it is wrong: {given}")
    return RIGHT


def _fuse(value: dict[str, Any]) -> str:
    """`fuse` of something that is no function, or with arguments that are no numbers."""
    given = {name: decode(each) for name, each in value["given"].items()}
    given.setdefault("f", lambda x, n=2: jax_webgpu.split(x, num_outputs=2, axis=1)[0])
    plain = {*given} == {"f"} and "f" not in value["given"]
    try:
        f = jax_webgpu.fuse(**given)
    except Exception as error:
        if plain:
            raise Wrong(f"refused, and it is right: {error}") from error
        return documented(error, (DTypeError, TypeError), tuple(given))
    try:
        found = f(jnp.ones((2, 4)))
    except Exception as error:  # as under `jax.jit`, and in its words
        if "f" in value["given"] and isinstance(error, TypeError):  # of what is no such function
            return "TypeError"
        return documented(error, (DTypeError, TypeError, ValueError))
    if np.asarray(found).shape != (2, 2):
        raise Wrong(f"{found}")
    return RIGHT


def _sharded(value: dict[str, Any]) -> str:
    """Whatever the mesh and the specs, the result is that of one device; or JAX's own refusal."""
    shape, axis = value["shape"], value["axis"]
    kinds = [AxisType.Auto if each else AxisType.Explicit for each in value["auto"]]
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=tuple(kinds))
    spec = P(*[tuple(names) if names else None for names in value["spec"][: len(shape)]])
    x = jnp.arange(math.prod(shape), dtype=jnp.float32).reshape(shape)
    names = [name for dimension in value["spec"][: len(shape)] for name in dimension]
    fits = len(names) == len({*names}) and all(
        size % 2 ** len(dims) == 0 for size, dims in zip(shape, value["spec"], strict=False)
    )
    if not fits:
        return "unfit"

    def call(x: Any) -> Any:
        return jax_webgpu.split(x, num_outputs=2, axis=axis % len(shape))

    wanted = call(x)
    with jax.set_mesh(mesh):
        placed = jax.device_put(x, jax.sharding.NamedSharding(mesh, spec))
        f = jax_webgpu.per_shard(call, spec) if value["per_shard"] else call
        found = jax.block_until_ready(jax.jit(f)(placed))
    for one, other in zip(found, wanted, strict=True):
        if not np.array_equal(np.asarray(one), np.asarray(other)):
            raise Wrong(f"{one}, expected {other}")
    try:
        jax_webgpu.per_shard(call, spec)(x)
    except Exception as error:
        documented(error, (CallError,), ("mesh",))
    else:
        raise Wrong("per_shard ran without a mesh")
    return RIGHT


def _meshes() -> st.SearchStrategy[Any]:
    names = st.sampled_from([[], [], ["a"], ["b"], ["a", "b"]])
    return st.fixed_dictionaries(
        {
            "kind": st.just("sharded"),
            "shape": st.lists(st.sampled_from([1, 2, 4, 6, 8]), min_size=1, max_size=3),
            "axis": st.integers(0, 3),
            "auto": st.lists(st.booleans(), min_size=2, max_size=2),
            "spec": st.lists(names, min_size=3, max_size=3),
            "per_shard": st.booleans(),
        }
    )


def inputs() -> st.SearchStrategy[Any]:
    given = st.fixed_dictionaries({}, optional={**SETTINGS, "other": st.just(1)})
    settings = st.fixed_dictionaries({"kind": st.just("configure"), "given": given})
    numbers = odd() | st.sampled_from([0, 1, (0,), "n", ["n"]])
    own = st.fixed_dictionaries(
        {}, optional={"f": odd(), "static_argnums": numbers, "static_argnames": numbers}
    )
    fuse = st.fixed_dictionaries({"kind": st.just("fuse"), "given": own})
    return st.integers(0, 9).flatmap(
        lambda n: [settings, settings, fuse, _meshes()][n] if n < 4 else programs()
    )


def run(value: Any) -> str:
    kinds = {"program": _program, "configure": _configure, "fuse": _fuse, "sharded": _sharded}
    return kinds[value["kind"]](value)


TARGET = Target("fused", 4, inputs, run, chunk=25)
