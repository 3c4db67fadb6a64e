"""The example kernels as JAX functions: calls against NumPy; and the arguments of `load_kernel`."""

import contextlib
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import kernel_oracle
import numpy as np
from hypothesis import strategies as st
from poison import poisoned

import jax_webgpu
from fuzz import corpus
from fuzz.arrays import DTYPES, decode, described, odd
from fuzz.models import Judge, Refused, modelled
from fuzz.targets import RIGHT, Target, Wrong, documented
from jax_webgpu import device
from jax_webgpu.errors import (
    CallError,
    DeviceError,
    DTypeError,
    HubError,
    MissingExtraError,
    SpecError,
)

NAMES = ("add", "gelu", "matmul", "rms_norm", "scan", "softmax")
INPUTS = {name: ("x",) for name in NAMES}
INPUTS |= {"add": ("a", "b"), "matmul": ("a", "b"), "rms_norm": ("x", "weight")}
ATTRIBUTES = {
    "gelu": {"approximate": ["none", "tanh"]},
    "rms_norm": {"axis": [-1, 0, 1, -2], "epsilon": [1e-5, 0.1], "stash_type": [1]},
    "scan": {"axis": [0, -1, 1], "exclusive": [0, 1], "reverse": [0, 1]},
    "softmax": {"axis": [-1, 0, 1]},
}
KINDS = (CallError, DTypeError, DeviceError, TypeError)
REALS = ("float32", "float16")
NUMBERS = (*REALS, "int32", "uint32")


@functools.cache
def kernel(name: str) -> Any:
    return jax_webgpu.load_kernel(corpus.EXAMPLES / name)


# ---- calls --------------------------------------------------------------------------------------


@st.composite
def calls(draw: Any) -> dict[str, Any]:
    name = draw(st.sampled_from(NAMES))
    shape = tuple(draw(st.lists(st.sampled_from([1, 2, 3, 4, 8, 0, 40]), max_size=4)))
    while math.prod(shape) > 1 << 12:
        shape = shape[1:]
    shapes = [shape, shape]
    if name == "add":
        shapes = [_repeated(draw, shape), _repeated(draw, shape)]
    if name == "rms_norm":
        shapes = [shape, _repeated(draw, shape)]
    if name == "matmul":
        n, k, m = (draw(st.sampled_from([1, 2, 3, 33, 64])) for _ in range(3))
        batch = shape[:2]
        shapes = [(*_repeated(draw, batch), n, k), (*_repeated(draw, batch), k, m)]
        if draw(st.integers(0, 5)) == 0:
            shapes[draw(st.integers(0, 1))] = (k,)
    dtype = draw(st.sampled_from(NUMBERS if name in ("add", "matmul", "scan") else REALS))
    arguments: dict[str, Any] = {}
    for port, each in zip(INPUTS[name], shapes, strict=False):
        own = draw(st.sampled_from(REALS)) if port == "weight" else dtype
        arguments[port] = draw(described(each, own, st.sampled_from(["normal", "eighths"])))
    for attribute, likely in ATTRIBUTES.get(name, {}).items():
        if draw(st.booleans()):
            arguments[attribute] = draw(st.sampled_from(likely))
    for _ in range(draw(st.sampled_from([0, 0, 0, 1, 2]))):
        _change(draw, name, arguments)
    return {
        "kernel": name,
        "arguments": arguments,
        "how": draw(st.sampled_from(["eager", "jit", "vmap", "closed"])),
        "callback": draw(st.sampled_from([None, None, "pure"])),
    }


def _repeated(draw: Any, shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape that broadcasts to the given one."""
    sizes = tuple(draw(st.sampled_from([1, size, size])) for size in shape)
    return sizes[draw(st.sampled_from([0, 0, *range(len(shape) + 1)])) :]


def _change(draw: Any, name: str, arguments: dict[str, Any]) -> None:
    known = [*INPUTS[name], *ATTRIBUTES.get(name, {}), "outputs", "other"]
    key = draw(st.sampled_from(known))
    own = arguments.get(key)
    match draw(st.integers(0, 4)):
        case 0:
            arguments.pop(key, None)
        case 1 if isinstance(own, dict) and "array" in own:
            arguments[key] = own | {"array": draw(st.sampled_from(DTYPES))}
        case 2 if isinstance(own, dict) and "array" in own:
            shape = [*own["shape"], draw(st.sampled_from([1, 2, 3, 0]))]
            arguments[key] = own | {"shape": tuple(draw(st.permutations(shape))[:5])}
        case 3 if key == "outputs":
            arguments[key] = draw(
                st.sampled_from(["y", ["y"], ["z"], {"y": (2, 2)}, {"y": None}, {"y": -1}, 5, []])
            )
        case _:
            arguments[key] = draw(odd())


def run(value: Any) -> str:
    return _load(value) if "load" in value else _call(value)


def _call(value: dict[str, Any]) -> str:
    name, how = value["kernel"], value["how"]
    arguments = {key: decode(each) for key, each in value["arguments"].items()}
    wanted, check = MODELS[name]({key: decode(each) for key, each in value["arguments"].items()})
    own = [
        key
        for key, each in value["arguments"].items()
        if key in INPUTS[name] and isinstance(each, dict) and "array" in each
    ]
    moving = {}
    if how != "eager" and how != "closed":
        for key in own:
            with contextlib.suppress(TypeError, ValueError):
                moving[key] = jnp.asarray(arguments[key])
    fixed = {key: each for key, each in arguments.items() if key not in moving}

    def call(moving: dict[str, Any]) -> Any:
        return kernel(name)(**fixed, **moving)

    names = (*INPUTS[name], *ATTRIBUTES.get(name, {}), "output", "outputs", "shape", *arguments)
    try:
        with jax_webgpu.configure(callback=value["callback"]), poisoned():
            if how == "vmap" and moving:
                twice = {key: jnp.stack([each, each]) for key, each in moving.items()}
                found = jax.block_until_ready(jax.vmap(call)(twice))
            elif how == "eager":
                found = jax.block_until_ready(call(moving))
            else:
                found = jax.block_until_ready(jax.jit(call)(moving))
    except Exception as error:
        label = documented(error, KINDS, names)
        if wanted is True and (has_halves() or not _halves(value)):
            raise Wrong(f"refused, and it is right: {error}") from error
        return label
    for each in found if how == "vmap" and moving else [found]:
        check(each)
    if wanted is False:
        raise Wrong(f"taken, and it is wrong: {str(found)[:200]}")
    return RIGHT


@functools.cache
def has_halves() -> bool:
    return device.get().capabilities.has("shader-f16")


def _halves(value: dict[str, Any]) -> bool:
    """Whether a call has arrays that not every device computes with."""
    given = value["arguments"].values()
    return any(isinstance(each, dict) and each.get("array") == "float16" for each in given)


def _of(name: str, dtypes: tuple[str, ...]) -> Any:
    """The model of a kernel, whose inputs have one of the dtypes."""

    @modelled
    def model(arguments: Mapping[str, Any], judge: Judge) -> Callable[[Any], None]:
        own = ATTRIBUTES.get(name, {})
        judge.known(arguments, " ".join(INPUTS[name]), " ".join([*own, "outputs"]))
        _outputs(arguments.get("outputs"), judge)
        values = [arguments[port] for port in INPUTS[name]]
        if name == "rms_norm":  # each of a dtype of its own
            arrays = [array for value in values for array in _inputs([value], dtypes, judge)]
        else:
            arrays = _inputs(values, dtypes, judge)
        for array in arrays:
            judge.need(array.dtype.name in dtypes)
        if name != "rms_norm":
            judge.need(len({array.dtype.name for array in arrays}) == 1)
        given = {key: arguments[key] for key in own if arguments.get(key) is not None}
        exact, error, dtype = _exact(name, arrays, given, judge)
        # WGSL leaves open what NaNs and infinities give, and so does what overflows on the way.
        moderate = all((abs(array) < 1e4).all() for array in arrays if array.dtype.kind == "f")
        moderate &= 0 < given.get("epsilon", 1) < 1e4

        def check(found: Any) -> None:
            if (str(found.dtype), found.shape) != (dtype, exact.shape):
                raise Wrong(f"{found.dtype}{found.shape}, expected {dtype}{exact.shape}")
            if moderate:
                kernel_oracle.check(np.asarray(found), exact, error)

        return check

    return model


def _inputs(values: list[Any], dtypes: tuple[str, ...], judge: Judge) -> list[np.ndarray]:
    """The arrays; a number, and an array whose type is weak, has the dtype of the others."""
    for value in values:  # a key is no array of its words
        judge.need(not jnp.issubdtype(getattr(value, "dtype", None), jax.dtypes.prng_key))
    arrays = [None if _is_weak(value) else judge.array(value) for value in values]
    weak = [np.asarray(value) for value in values if _is_weak(value)]
    judge.doubtful |= bool(weak)
    whole = "int32" in dtypes and not any(each.dtype.kind == "f" for each in weak)
    natural = np.dtype("int32" if whole else "float32")
    dtype = next((each.dtype for each in arrays if each is not None), natural)
    for at, value in enumerate(values):
        if arrays[at] is None:
            try:
                arrays[at] = np.asarray(value, dtype)
            except (OverflowError, TypeError):
                raise Refused from None
    return [each for each in arrays if each is not None]


def _is_weak(value: Any) -> bool:
    if isinstance(value, np.generic | np.ndarray):
        return False
    return isinstance(value, bool | int | float) or getattr(value, "weak_type", False)


def is_key(value: Any) -> bool:
    return jnp.issubdtype(getattr(value, "dtype", None), jax.dtypes.prng_key)


def _outputs(value: Any, judge: Judge) -> None:
    """The one output may be named, and nothing else."""
    is_name = isinstance(value, str) and "y" in value
    is_list = isinstance(value, list) and any(isinstance(each, str) for each in value)
    judge.doubtful |= value is not None and not (is_name or (is_list and "y" in value))


def _integer(value: Any, judge: Judge) -> int:
    judge.need(not is_key(value))
    if isinstance(value, np.generic) and isinstance(value.item(), float):
        value = value.item()  # of bfloat16 too
    if isinstance(value, bool | np.bool_ | float | np.floating) and float(value).is_integer():
        judge.doubtful = True
        return int(value)
    if isinstance(value, np.ndarray | jax.Array) and value.ndim == 0:
        judge.doubtful = True
        return _integer(value.item(), judge)
    if isinstance(value, np.generic) and "int" in value.dtype.name:  # of fewer bits than a byte too
        judge.doubtful = True
        return int(value)
    judge.need(isinstance(value, int))
    judge.doubtful |= type(value) is not int
    return int(value)


def _exact(
    name: str, arrays: list[np.ndarray], given: dict[str, Any], judge: Judge
) -> tuple[np.ndarray, Any, str]:
    x, dtype = arrays[0], arrays[-1].dtype.name
    for key in ("axis", "exclusive", "reverse", "stash_type"):
        if key in given:
            given[key] = _integer(given[key], judge)
    axis = given.get("axis", {"scan": 0}.get(name, -1))
    if name in ("softmax", "scan", "rms_norm"):
        judge.need(-x.ndim <= axis < x.ndim)
    judge.need({given.get("exclusive", 0), given.get("reverse", 0)} <= {0, 1})
    judge.need(given.pop("stash_type", 1) == 1)
    if "approximate" in given:
        judge.need(isinstance(given["approximate"], str))
        judge.need(given["approximate"] in ("none", "tanh"))
    if "epsilon" in given:
        epsilon = given["epsilon"]
        judge.need(not is_key(epsilon) and not isinstance(epsilon, str | list | tuple))
        judge.doubtful |= type(epsilon) is not float or not 0 < epsilon < 1
        try:
            given["epsilon"] = float(epsilon)
        except OverflowError:
            given["epsilon"] = math.inf
        except (TypeError, ValueError):
            raise Refused from None
    if name == "rms_norm":
        judge.need(arrays[1].ndim <= x.ndim)
        try:
            judge.need(np.broadcast_shapes(x.shape, arrays[1].shape) == x.shape)
        except ValueError:
            raise Refused from None
    try:
        with np.errstate(all="ignore"):
            exact, error = getattr(kernel_oracle, name)(*arrays, **given)
    except ValueError:  # shapes that do not go together
        raise Refused from None
    return exact, error, dtype


MODELS = {
    name: _of(name, NUMBERS if name in ("add", "matmul", "scan") else REALS) for name in NAMES
}


# ---- load_kernel --------------------------------------------------------------------------------

OPTIONS = {
    "version": st.none() | odd(),
    "revision": st.none() | odd() | st.just("0" * 40),
    "vmap_axis": st.none() | st.integers(-3, 3) | odd() | st.sampled_from([{"x": 0, "y": 0}, {}]),
    "vmap_method": st.none()
    | st.sampled_from(["sequential", "expand_dims", "broadcast_all", "legacy"])
    | odd(),
    "tunables": st.none()
    | odd()
    | st.sampled_from([{"WORKGROUP_SIZE": 32}, {"WORKGROUP_SIZE": "a"}, {"OTHER": 1}, {1: 2}]),
}


@st.composite
def loads(draw: Any) -> dict[str, Any]:
    source = draw(
        st.sampled_from(
            [*NAMES, *NAMES, *NAMES, "nowhere", "make.py", "", ".", "a/b", "a/b/c", "\0"]
        )
        | odd()
    )
    options = {key: draw(each) for key, each in OPTIONS.items() if draw(st.integers(0, 4)) == 0}
    return {"load": source, "options": options}


def _load(value: dict[str, Any]) -> str:
    source = value["load"]
    known = isinstance(source, str) and source in NAMES
    where = corpus.EXAMPLES / source if known or source == "make.py" else decode(source)
    options = {key: decode(each) for key, each in value["options"].items()}
    kinds = (CallError, DTypeError, SpecError, HubError, MissingExtraError)
    names = ("source", *OPTIONS, "folder", "repository", "manifest.json", "tunable")
    names += ("WORKGROUP_SIZE",)
    try:
        loaded = jax_webgpu.load_kernel(where, **options)
    except Exception as error:
        label = documented(error, kinds, names)
        if known and not options:
            raise Wrong("refused, and it is right") from error
        return label
    if not known and source not in ("", "."):
        raise Wrong(f"taken, and there is no such folder: {loaded!r}")
    repr(loaded)
    help_text = loaded.__doc__
    if not isinstance(help_text, str) or not isinstance(loaded.__name__, str):
        raise Wrong("no name, or no documentation")
    return RIGHT


def inputs() -> st.SearchStrategy[Any]:
    every = calls()
    return every | every | every | loads()


TARGET = Target("kernels", 8, inputs, run)
