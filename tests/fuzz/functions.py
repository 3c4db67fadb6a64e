"""The public functions: arguments of all shapes, dtypes and kinds, eager and jitted."""

import contextlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st
from poison import poisoned

import jax_webgpu
from fuzz import models
from fuzz.arrays import DTYPES, FLOATS, decode, described, odd
from fuzz.targets import RIGHT, Target, Wrong, documented, inside
from jax_webgpu.errors import CallError, DeviceError, DTypeError, LimitError

ARRAYS = ("x", "cos_cache", "sin_cache", "position_ids")
NAMES = {
    "split": ("x", "split", "axis", "num_outputs"),
    "rotary_embedding": (*ARRAYS, "interleaved", "rotary_embedding_dim", "num_heads"),
    "rotary_cache": ("max_positions", "rotary_dim", "base", "dtype"),
}
SETTINGS = ("callback", "implementation", "overlays", "tunables", "WORKGROUP_SIZE", "BYTES_EACH")
KINDS = (CallError, DTypeError, DeviceError, LimitError, TypeError)

SIZES = st.sampled_from([0, 1, 1, 2, 2, 3, 4, 5, 7, 8, 12, 16, 33, 64, 100])


@st.composite
def split(draw: Any) -> dict[str, Any]:
    """Arguments that are right."""
    shape = draw(st.lists(SIZES, min_size=1, max_size=5))
    while np.prod(shape) > 1 << 16:
        shape = shape[1:]
    if draw(st.integers(0, 49)) == 0:
        shape = [1000, *shape[-1:]]
    dtype = draw(st.sampled_from(DTYPES) | st.sampled_from(FLOATS))
    axis = draw(st.integers(-len(shape), len(shape) - 1))
    arguments = {"x": draw(described(tuple(shape), dtype)), "axis": axis}
    if draw(st.booleans()):
        arguments["num_outputs"] = draw(st.sampled_from([1, 2, 3, 4, 5, 6, 9, 40, 70, 200]))
        return arguments
    number = draw(st.sampled_from([1, 1, 2, 3, 4, 5, 6, 12, 70]))
    cuts = sorted(draw(st.lists(st.integers(0, shape[axis]), min_size=number, max_size=number)))
    sizes = np.diff([0, *cuts, shape[axis]]).tolist()
    arguments["split"] = draw(st.sampled_from([sizes, tuple(sizes)]))
    return arguments


@st.composite
def rotary_embedding(draw: Any) -> dict[str, Any]:
    """Arguments that are right; one in eight has a position that is not."""
    batch, heads, sequence = (draw(st.sampled_from([0, 1, 1, 2, 3, 5, 8, 17])) for _ in range(3))
    size = 2 * draw(st.sampled_from([0, 1, 2, 3, 4, 6, 8, 10, 16, 32, 64]))
    width = draw(st.sampled_from([0, 0, 2, 4, 8, size]))
    width = width if width <= size else 0
    half = (width or size) // 2
    arguments: dict[str, Any] = {}
    x = (batch, heads, sequence, size)
    if draw(st.booleans()):
        heads = max(1, heads)
        x = (batch, sequence, heads * size)
        arguments["num_heads"] = heads
    elif draw(st.booleans()):
        arguments["num_heads"] = heads
    dtype = draw(st.sampled_from(FLOATS))
    dtypes = st.just(dtype) | st.sampled_from([*FLOATS, "float64"])
    rows = draw(st.sampled_from([1, 2, 5, 11, 300]))
    cache = draw(st.sampled_from([(batch, sequence, half), (1, sequence, half), (rows, half)]))
    arguments["x"] = draw(described(x, dtype))
    arguments["cos_cache"] = draw(described(cache, dtypes))
    arguments["sin_cache"] = draw(described(cache, dtypes))
    if len(cache) == 2:
        at = st.tuples(
            st.integers(0, 99),
            st.sampled_from([rows, -1, -rows, rows + 1, 2**31 - 1, 2**32 + rows, 2**31 + 7]),
        )
        arguments["position_ids"] = {
            "array": draw(st.sampled_from(["int32", "int64", "uint32"])),
            "shape": (batch, sequence),
            "form": draw(st.sampled_from(["jax", "numpy", "strided"])),
            "seed": draw(st.integers(0, 99)),
            "positions": rows,
            "at": draw(st.lists(at, max_size=1)) if draw(st.integers(0, 7)) == 0 else [],
        }
    if draw(st.booleans()):
        arguments["interleaved"] = draw(st.booleans())
    if width or draw(st.booleans()):
        arguments["rotary_embedding_dim"] = width
    return arguments


@st.composite
def rotary_cache(draw: Any) -> dict[str, Any]:
    """Arguments that are right."""
    arguments: dict[str, Any] = {
        "max_positions": draw(st.sampled_from([0, 1, 2, 5, 100, 2048])),
        "rotary_dim": 2 * draw(st.sampled_from([0, 1, 2, 5, 32, 64])),
    }
    if draw(st.booleans()):
        arguments["base"] = draw(st.sampled_from([10000.0, 500000, 1, 0.5, 1e-300, 1e300]))
    if draw(st.booleans()):
        arguments["dtype"] = draw(st.sampled_from(FLOATS))
    return arguments


RIGHT_ARGUMENTS = {
    "split": split(),
    "rotary_embedding": rotary_embedding(),
    "rotary_cache": rotary_cache(),
}


@st.composite
def changed(draw: Any, function: str) -> dict[str, Any]:
    """The arguments of a call, up to three of which are something else."""
    arguments = dict(draw(RIGHT_ARGUMENTS[function]))
    for _ in range(draw(st.sampled_from([0, 0, 0, 1, 1, 2, 3]))):
        name = draw(st.sampled_from(sorted({*arguments, *NAMES[function]})))
        kind = draw(st.integers(0, 9))
        own = arguments.get(name)
        is_array = isinstance(own, dict) and "array" in own and "positions" not in own
        if kind == 0:
            arguments.pop(name, None)
        elif kind == 1:
            arguments[draw(st.sampled_from(["y", "dtype_", "self", "call", "é"]))] = 1
        elif kind == 2 and name not in ARRAYS and function != "rotary_cache":
            arguments[name] = {"traced": own if isinstance(own, int) else 1}
        elif kind < 6 and is_array:
            shape = [*own["shape"]]
            at = draw(st.integers(0, len(shape)))
            match draw(st.integers(0, 4)):
                case 0 if at < len(shape):
                    shape[at] += draw(st.sampled_from([1, -1])) if shape[at] else 1
                case 1 if at < len(shape):
                    del shape[at]
                case 2:
                    shape.insert(at, draw(st.sampled_from([1, 2, 0])))
                case 3:
                    shape = draw(st.permutations(shape))
                case _:
                    shape = shape[::-1]
            arguments[name] = own | {"shape": tuple(shape)}
        elif kind == 6 and is_array:
            arguments[name] = own | {"array": draw(st.sampled_from(DTYPES))}
        elif kind == 7 and isinstance(own, int):
            arguments[name] = own + draw(st.sampled_from([1, -1, 2, 10, -10, 2**31, 2**63]))
        else:
            arguments[name] = draw(odd())
    if function == "rotary_cache":
        for name in ("max_positions", "rotary_dim"):
            own = arguments.get(name)
            if isinstance(own, int) and abs(own) > 2**20:
                # Of 2**31 rows a machine may have room for one, and then takes minutes to fill it.
                arguments[name] = own << 32
    return arguments


@st.composite
def calls(draw: Any) -> dict[str, Any]:
    function = draw(st.sampled_from(["split", "rotary_embedding"] * 4 + ["rotary_cache"]))
    settings: dict[str, Any] = {}
    if draw(st.integers(0, 3)) == 0:
        settings = draw(
            st.sampled_from(
                [
                    {"callback": "pure"},
                    {"callback": "buffer"},
                    {"overlays": False},
                    {"tunables": {"ON_CPU": True}},
                    {"tunables": {"WORKGROUP_SIZE": 1}},
                    {"tunables": {"WORKGROUP_SIZE": 100}},
                    {"tunables": {"WORKGROUP_SIZE": 2**31}},
                    {"tunables": {"WORKGROUP_SIZE": -1}},
                    {"tunables": {"BYTES_EACH": 64, "ON_CPU": True}},
                    {"implementation": "reference"},
                ]
            )
        )
    return {
        "function": function,
        "arguments": draw(changed(function)),
        "how": draw(st.sampled_from(["eager", "jit", "jit", "closed", "vmap", "explain"])),
        "x64": draw(st.integers(0, 2)) == 0,
        "settings": settings,
        "device": draw(st.sampled_from(["floor", "apple-m", "h200", None, "nothing"])),
    }


def _prepared(value: dict[str, Any]) -> tuple[dict[str, Any], set[str]]:
    """The arguments of a call, and which of them JAX traces: arrays, where arrays belong."""
    given, traced = value["arguments"], set()
    arguments = {}
    for name, each in given.items():
        if isinstance(each, dict) and "traced" in each:
            arguments[name] = np.int32(each["traced"] % 2**31)
            traced.add(name)
            continue
        arguments[name] = decode(each)
        own = isinstance(each, dict) and "array" in each
        if own and name in ARRAYS and value["how"] in ("jit", "vmap", "explain"):
            with contextlib.suppress(TypeError, ValueError):
                arguments[name] = jnp.asarray(arguments[name])
                traced.add(name)
    return arguments, traced


def run(value: dict[str, Any]) -> str:
    with jax.enable_x64(value["x64"]):
        return _run(value)


def _run(value: dict[str, Any]) -> str:
    name, how, settings = value["function"], value["how"], value["settings"]
    names = (*NAMES[name], *value["arguments"], *SETTINGS)
    arguments, traced = _prepared(value)
    wanted, check = _expected(value, traced)
    function = getattr(jax_webgpu, name)
    moving = {each: arguments[each] for each in traced}
    fixed = {each: given for each, given in arguments.items() if each not in traced}

    def call(moving: dict[str, Any]) -> Any:
        return function(**fixed, **moving)

    try:
        with jax_webgpu.configure(**settings), poisoned() as poison:
            if how == "explain" and name != "rotary_cache":
                str(jax_webgpu.explain(call, moving, device=value["device"]))
                return "explained"
            if name == "rotary_cache" or (how == "eager" and not traced):
                results = [call(moving)]
            elif how == "vmap" and "x" in moving:
                results = _mapped(call, moving, {"x", *traced} - {*ARRAYS[1:]})
            else:
                results = [jax.jit(call)(moving)]
            jax.block_until_ready(results)
    except Exception as error:
        label = documented(error, KINDS, (*names, "device") if how == "explain" else names)
        if wanted is True and how != "explain" and not _is_device_s(error):
            raise Wrong(f"refused, and it is right: {error}") from error
        return label
    for result in results:
        check(result)
        if name == "rotary_embedding" and poison.survives(result):
            raise Wrong(f"poison survives: {result}")
    if wanted is False:
        raise Wrong(f"taken, and it is wrong: {str(results)[:200]}")
    return RIGHT


def _mapped(
    call: Callable[[dict[str, Any]], Any], moving: dict[str, Any], names: set[str]
) -> list[Any]:
    """The results of a call for a batch of two that are the same, over the arguments named."""
    own = {name: moving[name] for name in names}
    # Broadcast and not stacked, and taken apart by NumPy: XLA's own way converts narrow floats.
    both = {name: jnp.broadcast_to(each, (2, *each.shape)) for name, each in own.items()}
    found = jax.vmap(lambda mapped: call({**moving, **mapped}))(both)
    return [jax.tree.map(lambda each, at=at: _at(each, at), found) for at in range(2)]


def _at(batch: jax.Array, at: int) -> jax.Array:
    if jnp.issubdtype(batch.dtype, jax.dtypes.extended):
        return batch[at]
    return jnp.asarray(np.asarray(batch)[at])


def _is_device_s(error: Exception) -> bool:
    """Whether the device stands in the way of a call that is right in itself."""
    found = inside(error)
    return isinstance(error, DeviceError) or (found is not None and found[0] == "LimitError")


def _expected(value: dict[str, Any], traced: set[str]) -> models.Model:
    """What the documentation says of a call, whose arguments are made anew: some are used up."""
    size = value["settings"].get("tunables", {}).get("WORKGROUP_SIZE", 1)
    if value["function"] != "rotary_cache" and size < 1:
        return None, models.split({})[1]
    static = traced - {*ARRAYS}
    if static:
        return False, models.split({})[1]
    arguments, _ = _prepared(value)
    found: models.Model = getattr(models, value["function"])(arguments)
    is_reference = value["settings"].get("implementation") == "reference"
    is_empty = np.size(arguments.get("x")) == 0
    if (is_reference or is_empty) and "position_ids" in traced and found[0] is False:
        # In plain JAX positions under `jit` are not checked: a row that is not there is NaNs. And
        # a call whose result has no elements is left out by XLA.
        return None, _nothing
    return found


def _nothing(result: Any) -> None:
    """There is no oracle."""


TARGET = Target("functions", 15, calls, run, chunk=50)
