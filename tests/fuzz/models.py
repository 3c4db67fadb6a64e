"""What the public functions must do with their arguments, from their documentation alone.

A model says whether a call must be right (True), must be refused (False), or may be either (None),
as with objects that merely behave like what is asked for; and what is right, as a function that
checks a result.
"""

import operator
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from calls import ulp

from fuzz.targets import Wrong

Model = tuple[bool | None, Callable[[Any], None]]


class Refused(Exception):
    """The documentation does not admit an argument."""


def modelled(model: Callable[[Mapping[str, Any], "Judge"], Callable[[Any], None]]) -> Any:
    """A model that says what it refuses by raising, and what is doubtful to a judge."""

    def judged(arguments: Mapping[str, Any]) -> Model:
        judge = Judge()
        try:
            check = model(arguments, judge)
        except Refused:
            return (None if judge.doubtful else False), none_is_right
        return (None if judge.doubtful else True), check

    return judged


def none_is_right(result: Any) -> None:
    if all(each.size == 0 for each in jax.tree.leaves(result)):
        return  # nothing that could be wrong
    raise Wrong(f"nothing is right here, and something came: {str(result)[:200]}")


class Judge:
    """Takes arguments for what the documentation asks for, and notes what it does not speak of."""

    def __init__(self) -> None:
        self.doubtful = False

    def need(self, holds: bool) -> None:
        if not holds:
            raise Refused

    def known(self, arguments: Mapping[str, Any], needed: str, others: str) -> None:
        self.need({*needed.split()} <= {*arguments} <= {*needed.split(), *others.split()})

    def array(self, value: Any) -> np.ndarray:
        """The array as NumPy has it, of the dtype that JAX gives it."""
        self.need(isinstance(value, jax.Array | np.ndarray | np.generic))
        if isinstance(value, jax.Array):
            if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
                return np.asarray(jax.random.key_data(value))
            return np.asarray(value)
        if type(value) is not np.ndarray or not value.dtype.isnative:
            self.doubtful = True
        try:
            return np.asarray(jnp.asarray(np.asarray(value)))
        except (TypeError, ValueError):
            raise Refused from None

    def integer(self, value: Any) -> int:
        if type(value) is int:
            return value
        self.need(not isinstance(value, bool | np.bool_ | jax.core.Tracer))
        try:
            found = operator.index(value)
        except TypeError:
            raise Refused from None
        self.doubtful = True
        return found


def same_bits(actual: Any, expected: np.ndarray) -> None:
    actual = np.asarray(actual)
    if (actual.shape, actual.dtype) != (expected.shape, expected.dtype):
        raise Wrong(f"{actual.dtype}{actual.shape}, expected {expected.dtype}{expected.shape}")
    found, wanted = (np.ascontiguousarray(each).tobytes() for each in (actual, expected))
    if found != wanted:
        raise Wrong(f"other bits: {str(actual)[:200]}, expected {str(expected)[:200]}")


# ---- split --------------------------------------------------------------------------------------


@modelled
def split(arguments: Mapping[str, Any], judge: Judge) -> Callable[[Any], None]:
    judge.known(arguments, "x", "split axis num_outputs")
    x = judge.array(arguments["x"])
    is_key = jnp.issubdtype(arguments["x"].dtype, jax.dtypes.prng_key)
    rank = x.ndim - is_key
    axis = judge.integer(arguments.get("axis", 0))
    judge.need(-rank <= axis < rank)
    axis %= rank
    given, number = arguments.get("split"), arguments.get("num_outputs")
    judge.need((given is None) != (number is None))
    size = x.shape[axis]
    if given is None:
        parts = judge.integer(number)
        judge.need(1 <= parts <= 65536)
        each = -(-size // parts)
        sizes = [max(0, min(each, size - at * each)) for at in range(parts)]
    else:
        judge.need(not isinstance(given, str | bytes | set | dict | int | np.integer))
        judge.doubtful |= not isinstance(given, list | tuple)
        try:
            sizes = [judge.integer(each) for each in given]
        except TypeError:
            raise Refused from None
        judge.need(bool(sizes) and min(sizes) >= 0 and sum(sizes) == size)
    expected = np.split(x, np.cumsum(sizes)[:-1], axis)

    def check(parts: Any) -> None:
        if not isinstance(parts, tuple) or len(parts) != len(expected):
            raise Wrong(f"{type(parts).__name__} of {len(parts)}, expected {len(expected)} parts")
        for part, wanted in zip(parts, expected, strict=True):
            same_bits(jax.random.key_data(part) if is_key else part, wanted)

    return check


# ---- rotary_embedding ---------------------------------------------------------------------------


@modelled
def rotary_embedding(arguments: Mapping[str, Any], judge: Judge) -> Callable[[Any], None]:
    judge.known(
        arguments,
        "x cos_cache sin_cache",
        "position_ids interleaved rotary_embedding_dim num_heads",
    )
    x, cos, sin = (judge.array(arguments[name]) for name in ("x", "cos_cache", "sin_cache"))
    floats = ("float32", "float16", "bfloat16")
    judge.need(x.dtype.name in floats)
    judge.need({cos.dtype.name, sin.dtype.name} <= {*floats, "float64"})
    interleaved = arguments.get("interleaved", False)
    judge.need(not jnp.issubdtype(getattr(interleaved, "dtype", None), jax.dtypes.prng_key))
    judge.need(np.ndim(interleaved) == 0 and not isinstance(interleaved, jax.core.Tracer))
    if isinstance(interleaved, jax.Array):  # JAX does not compare a boolean to a number
        interleaved = judge.array(interleaved)
    judge.need(interleaved in (0, 1))
    judge.doubtful |= type(interleaved) not in (bool, int)
    width = judge.integer(arguments.get("rotary_embedding_dim", 0))
    given = arguments.get("num_heads")
    judge.need(x.ndim in (3, 4))
    if x.ndim == 3:
        judge.need(given is not None)
        heads = judge.integer(given)
        judge.need(heads >= 1 and x.shape[2] % heads == 0)
        tokens = x.reshape(*x.shape[:2], heads, x.shape[2] // heads)
    else:
        judge.need(given is None or judge.integer(given) == x.shape[1])
        tokens = x.transpose(0, 2, 1, 3)
    batch, sequence, _, size = tokens.shape
    judge.need(size % 2 == 0 and width % 2 == 0 and 0 <= width <= size)
    half = (width or size) // 2
    judge.need(cos.shape == sin.shape)
    positions = arguments.get("position_ids")
    if positions is None:
        judge.need(cos.shape in ((batch, sequence, half), (1, sequence, half)))
    else:
        judge.need(isinstance(positions, jax.Array | np.ndarray | np.generic))
        judge.need(positions.dtype in (np.int32, np.uint32, np.int64))
        judge.doubtful |= type(positions) is np.ndarray and not positions.dtype.isnative
        positions = np.asarray(positions)
        judge.need(cos.shape[1:] == (half,) and positions.shape == (batch, sequence))
        out = (positions < 0) | (positions >= len(cos))
        judge.need(not out.any())
        cos, sin = cos[positions], sin[positions]
    cos, sin = (np.broadcast_to(each, (batch, sequence, half)) for each in (cos, sin))

    def check(y: Any) -> None:
        y = np.asarray(y)
        if (y.shape, y.dtype) != (x.shape, x.dtype):
            raise Wrong(f"{y.dtype}{y.shape}, expected {x.dtype}{x.shape}")
        found = y.reshape(tokens.shape) if x.ndim == 3 else y.transpose(0, 2, 1, 3)
        tail = np.s_[..., 2 * half :]
        same_bits(found[tail], tokens[tail])
        _check_rotation(found, tokens, cos, sin, half, bool(interleaved))

    return check


def _check_rotation(
    found: np.ndarray, x: np.ndarray, cos: np.ndarray, sin: np.ndarray, half: int, interleaved: bool
) -> None:
    """Of the products and sums of finite numbers; WGSL leaves open what infinities and NaNs give.

    It also leaves open whether a subnormal number is one, or zero.
    """
    pairs = np.s_[..., 0 : 2 * half : 2], np.s_[..., 1 : 2 * half : 2]
    if not interleaved:
        pairs = np.s_[..., :half], np.s_[..., half : 2 * half]
    with np.errstate(all="ignore"):
        a, b = (x[each].astype(np.float32).astype(np.float64) for each in pairs)
        c, s = (each.astype(np.float32).astype(np.float64)[:, :, None] for each in (cos, sin))
        largest = np.maximum.reduce([*map(abs, np.broadcast_arrays(a, b, c, s))])
        tiny = float(jnp.finfo(x.dtype).smallest_normal)
        if {x.dtype.name, cos.dtype.name, sin.dtype.name} & {"float16"}:
            tiny = 2.0**-14
        for part, true, size in (
            (pairs[0], a * c - b * s, abs(a * c) + abs(b * s)),
            (pairs[1], a * s + b * c, abs(a * s) + abs(b * c)),
        ):
            bound = 2**-23 * size
            if x.dtype != np.float32:
                bound = bound + ulp(true, x.dtype)
            small = np.minimum.reduce([*map(abs, np.broadcast_arrays(a, b, c, s))]) < tiny
            # Of two products and their sum each may be a subnormal number.
            bound = bound + np.where(small, tiny * (4 * largest + 4), 3 * 2.0**-126)
            top = float(jnp.finfo(x.dtype).max) * 0.99
            sure = np.isfinite(largest) & (size < min(top, 1e38))
            wrong = sure & ~(abs(found[part].astype(np.float64) - true) <= bound)
            if wrong.any():
                at = tuple(np.argwhere(wrong)[0])
                raise Wrong(
                    f"{wrong.sum()} wrong, first (batch, token, head, pair) {at}: "
                    f"{found[part][at]}, expected {true[at]} ± {bound[at]}"
                )


# ---- rotary_cache -------------------------------------------------------------------------------


@modelled
def rotary_cache(arguments: Mapping[str, Any], judge: Judge) -> Callable[[Any], None]:
    judge.known(arguments, "max_positions rotary_dim", "base dtype")
    rows, width = (judge.integer(arguments[name]) for name in ("max_positions", "rotary_dim"))
    judge.need(rows >= 0 and width >= 0 and width % 2 == 0)
    judge.need(rows * max(width, 1) < 2**40)  # what no machine has room for
    base = arguments.get("base", 10000.0)
    judge.need(isinstance(base, int | float | np.number))
    judge.doubtful |= type(base) not in (int, float)
    judge.need(bool(0 < base < 1e308))
    dtype = arguments.get("dtype", "float32")
    judge.need(not isinstance(dtype, jax.Array | np.ndarray | np.generic))
    judge.doubtful |= not isinstance(dtype, str) or dtype not in ("float32", "float16", "bfloat16")
    try:
        judge.need(jnp.issubdtype(dtype, jnp.floating))
    except (TypeError, ValueError, SyntaxError):  # the last of what NumPy reads as Python
        raise Refused from None

    def check(caches: Any) -> None:
        if not isinstance(caches, tuple) or len(caches) != 2:
            raise Wrong(f"expected two arrays, got {caches}")
        # One by one, and in another order than the library's.
        for index, cache in enumerate(caches):
            if cache.shape != (rows, width // 2):
                raise Wrong(f"shape {cache.shape}, expected {(rows, width // 2)}")
            if not cache.size:
                continue
            for p, i in {(0, 0), (rows - 1, width // 2 - 1), (rows // 2, width // 4)}:
                angle = p * float(base) ** (-2 * i / width)
                if not np.isfinite(angle) or abs(angle) > 1e9:
                    continue
                wanted = (np.cos, np.sin)[index](angle)
                if not abs(float(cache[p, i]) - wanted) <= float(jnp.finfo(cache.dtype).eps):
                    raise Wrong(f"[{p}, {i}] is {cache[p, i]}, expected {wanted}")

    return check
