"""RotaryEmbedding of ONNX opset 23: https://onnx.ai/onnx/operators/onnx__RotaryEmbedding.html.

Rotary position embedding is from Su et al., RoFormer, https://arxiv.org/abs/2104.09864.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from jax_webgpu import primitive
from jax_webgpu.errors import CallError, DTypeError
from jax_webgpu.ops.common import array, fit_workgroup_size, integer, is_concrete
from jax_webgpu.primitive import Call
from jax_webgpu.resolve import Resolved, Tensor, resolve
from jax_webgpu.runtime import Operator

DTYPES = ("float32", "float16")
POSITION_DTYPES = ("int32", "uint32", "int64")


def rotary_embedding(
    x: ArrayLike,
    cos_cache: ArrayLike,
    sin_cache: ArrayLike,
    position_ids: ArrayLike | None = None,
    *,
    interleaved: bool = False,
    rotary_embedding_dim: int = 0,
    num_heads: int | None = None,
) -> jax.Array:
    """Rotates pairs of elements of each head by angles that depend on the position (RoPE).

    With `r` the rotary dimension (`rotary_embedding_dim`, or the head size where that is 0), the
    pair `i` of a head, `0 <= i < r/2`, at a position with cache row `p`::

        y[a] = x[a] * cos[p, i] - x[b] * sin[p, i]
        y[b] = x[a] * sin[p, i] + x[b] * cos[p, i]

    where `a, b = i, i + r/2`, or `2*i, 2*i + 1` if interleaved. Elements from `r` on are copied
    bit for bit. The rotation is computed in float32 and rounded once.

    Args:
      x: float32 or float16, (batch, num_heads, sequence, head_size); or (batch, sequence,
        num_heads * head_size) with `num_heads`. The head size is even. An array of (batch,
        sequence, num_heads, head_size), as Flax and Hugging Face's Flax models have it, is not
        refused where its sizes happen to fit: transpose it with `jnp.swapaxes(x, 1, 2)` first.
      cos_cache: cosines, in x's dtype: (rows, r/2) with `position_ids`, else (batch, sequence,
        r/2). Half the width of the caches that repeat each angle.
      sin_cache: sines, likewise. See `rotary_cache`.
      position_ids: the cache row of each position, int32, uint32 or int64 of (batch, sequence).
        Every value is checked against the rows: concrete ones before anything runs.
      interleaved: False pairs the first half of a head with the second, as GPT-NeoX and Hugging
        Face's models do (Llama's too, whose weights are permuted for it); True pairs neighbours,
        as RoFormer and Meta's own Llama code do.
      rotary_embedding_dim: how many of a head's elements are rotated; 0 means all.
      num_heads: needed where `x` has rank 3; for rank 4 it must be x's own if it is given.

    Returns:
      An array of x's shape and dtype.

    Raises:
      ValueError: a shape, an attribute or a position does not fit; the message names it. Under
        `jax.jit` positions are checked when the call runs, and the sentence arrives in a
        `jax.errors.JaxRuntimeError`.
      TypeError: a dtype is not admitted.
      jax_webgpu.DeviceError: the device cannot run the call (inside a `JaxRuntimeError`).
    """
    x, cos, sin = array(x, "x"), array(cos_cache, "cos_cache"), array(sin_cache, "sin_cache")
    attributes = _attributes(x, interleaved, rotary_embedding_dim, num_heads)
    _check_dtypes(x, cos, sin)
    _check_shapes(x, cos, sin, position_ids, attributes)
    positions = [] if position_ids is None else [_positions(x, cos, position_ids)]
    (y,) = _rotary.bind([x, cos, sin, *positions], attributes=tuple(attributes.items()))
    return y


def rotary_cache(
    max_positions: int, rotary_dim: int, *, base: float = 10000.0, dtype: DTypeLike = jnp.float32
) -> tuple[jax.Array, jax.Array]:
    """The caches of `rotary_embedding`: cosines and sines of `p * base**(-2*i/rotary_dim)`.

    Computed in float64 and rounded once, on the host: not traceable, and the same everywhere.

    Args:
      max_positions: the number of rows; row `p` is for position `p`.
      rotary_dim: how many elements of a head are rotated; even.
      base: of the geometric sequence of angles, RoFormer's 10000 by default.
      dtype: of the result.

    Returns:
      cos, sin: arrays of (max_positions, rotary_dim/2).

    Raises:
      ValueError: `max_positions` is negative, or `rotary_dim` odd or negative, or `base` not
        positive.
      TypeError: a number is no integer, or `dtype` no float type.
    """
    rows, width = integer(max_positions, "max_positions"), integer(rotary_dim, "rotary_dim")
    if rows < 0:
        raise CallError(f"max_positions is {rows}; expected 0 or more")
    if width < 0 or width % 2:
        raise CallError(f"rotary_dim is {width}; expected an even number, 0 or more")
    if not base > 0:
        raise CallError(f"base is {base}; expected a positive number")
    if not jnp.issubdtype(dtype, jnp.floating):
        raise DTypeError(f"dtype is {np.dtype(dtype)}; expected a float type such as float32")
    frequencies = float(base) ** (-np.arange(0, width, 2, dtype=np.float64) / max(width, 1))
    angles = np.arange(rows, dtype=np.float64)[:, None] * frequencies
    return jnp.asarray(np.cos(angles), dtype), jnp.asarray(np.sin(angles), dtype)


# ---- checks -------------------------------------------------------------------------------------


def _attributes(
    x: jax.Array, interleaved: Any, rotary_embedding_dim: Any, num_heads: Any
) -> dict[str, int]:
    """The attributes in ONNX's form, each checked alone and against x."""
    if isinstance(interleaved, jax.core.Tracer):
        raise DTypeError("interleaved must be static, got a traced value")
    if interleaved not in (0, 1):
        raise CallError(f"interleaved is {interleaved!r}; expected True or False")
    width = integer(rotary_embedding_dim, "rotary_embedding_dim")
    attributes = {"interleaved": int(interleaved), "rotary_embedding_dim": width}
    if x.ndim not in (3, 4):
        raise CallError(
            f"x has shape {x.shape}; expected rank 3, (batch, sequence, num_heads * head_size), or "
            "rank 4, (batch, num_heads, sequence, head_size)"
        )
    if x.ndim == 3:
        if num_heads is None:
            raise CallError(f"num_heads is needed where x has rank 3, as here: {x.shape}")
        attributes["num_heads"] = heads = integer(num_heads, "num_heads")
        if heads < 1 or x.shape[2] % heads:
            raise CallError(
                f"num_heads is {heads}; expected a positive divisor of {x.shape[2]}, the last "
                f"dimension of x {x.shape}"
            )
    elif num_heads is not None and integer(num_heads, "num_heads") != x.shape[1]:
        raise CallError(f"num_heads is {num_heads}; expected {x.shape[1]}, that of x {x.shape}")
    size = _head_size(x.shape, attributes)
    if size % 2:
        raise CallError(f"x {x.shape} has a head size of {size}; expected an even number")
    if width % 2 or not 0 <= width <= size:
        raise CallError(
            f"rotary_embedding_dim is {width}; expected an even number from 0 to {size}, the head "
            f"size of x {x.shape}"
        )
    return attributes


def _head_size(shape: tuple[int, ...], attributes: Mapping[str, int]) -> int:
    return shape[3] if len(shape) == 4 else shape[2] // attributes["num_heads"]


def _check_dtypes(x: jax.Array, cos: jax.Array, sin: jax.Array) -> None:
    if str(x.dtype) not in DTYPES:
        raise DTypeError(f"x has dtype {x.dtype}; expected float32 or float16")
    for name, cache in (("cos_cache", cos), ("sin_cache", sin)):
        if cache.dtype != x.dtype:
            raise DTypeError(f"{name} has dtype {cache.dtype}; expected {x.dtype}, the dtype of x")


def _check_shapes(
    x: jax.Array, cos: jax.Array, sin: jax.Array, positions: Any, attributes: Mapping[str, int]
) -> None:
    batch, sequence = x.shape[0], x.shape[-2] if x.ndim == 4 else x.shape[1]
    rotary, of = attributes["rotary_embedding_dim"], "rotary_embedding_dim"
    if rotary == 0:
        rotary, of = _head_size(x.shape, attributes), "the head size"
    half = rotary // 2
    if positions is not None and cos.ndim != 2:
        raise CallError(
            f"cos_cache has shape {cos.shape}; expected rank 2, (rows, {half}), with position_ids"
        )
    if positions is None and cos.ndim != 3:
        raise CallError(
            f"cos_cache has shape {cos.shape}; expected rank 3, ({batch}, {sequence}, {half}), "
            "without position_ids"
        )
    if cos.shape[-1] == rotary != half:
        raise CallError(
            f"cos_cache has shape {cos.shape}, the full width of {rotary}; expected half the "
            f"width, {half}: pass cos_cache[..., :{half}], or cos_cache[..., ::2] where each value "
            "stands twice in a row"
        )
    if cos.shape[-1] != half:
        raise CallError(
            f"cos_cache has shape {cos.shape}; expected a last dimension of {half}, half of {of}, "
            f"{rotary}"
        )
    if positions is None and cos.shape != (batch, sequence, half):
        raise CallError(
            f"cos_cache has shape {cos.shape}; expected ({batch}, {sequence}, {half}) to fit x "
            f"{x.shape}"
        )
    if cos.shape != sin.shape:
        raise CallError(f"sin_cache has shape {sin.shape}; expected that of cos_cache, {cos.shape}")


def _positions(x: jax.Array, cos: jax.Array, position_ids: Any) -> jax.Array:
    """The positions as a JAX array; concrete values are checked at their full width."""
    if not isinstance(position_ids, jax.Array | np.ndarray | np.generic):
        array(position_ids, "position_ids")
    batch, sequence = x.shape[0], x.shape[-2] if x.ndim == 4 else x.shape[1]
    if str(position_ids.dtype) not in POSITION_DTYPES:
        raise DTypeError(
            f"position_ids has dtype {position_ids.dtype}; expected int32, uint32 or int64"
        )
    if position_ids.shape != (batch, sequence):
        raise CallError(
            f"position_ids has shape {position_ids.shape}; expected ({batch}, {sequence}), batch "
            f"and sequence of x {x.shape}"
        )
    if is_concrete(position_ids):
        _check_positions(np.asarray(position_ids), cos.shape[0])
    return jnp.asarray(position_ids)


def _check_positions(positions: np.ndarray, rows: int) -> None:
    """Every position is a row of the cache; NumPy only, since it also runs in the callback."""
    if positions.size == 0 or (positions.min() >= 0 and positions.max() < rows):
        return
    at = np.argwhere((positions < 0) | (positions >= rows))[0]
    index = ", ".join(map(str, at))
    raise CallError(
        f"position_ids[{index}] = {positions[tuple(at)]}; expected 0 to {rows - 1}, since the "
        f"caches have {rows} rows"
    )


def _check_values(resolved: Resolved, arrays: Mapping[str, np.ndarray]) -> None:
    if "positionIds" in arrays:
        _check_positions(arrays["positionIds"], arrays["cos"].shape[0])


# ---- primitive ----------------------------------------------------------------------------------

OPERATOR = Operator(
    "rotary_embedding", "ai.onnx.RotaryEmbedding.json", _check_values, fit_workgroup_size
)


def _resolve(call: Call, tensors: tuple[Tensor, ...]) -> Resolved:
    inputs = dict(zip(("x", "cos", "sin", "positionIds"), tensors, strict=False))
    if "positionIds" in inputs:
        # The manifest knows int64 alone; any integer array is checked on its way to u32.
        inputs["positionIds"] = Tensor(inputs["positionIds"].shape, "int64")
    return resolve(
        OPERATOR.spec,
        inputs,
        attributes=dict(call.attributes),
        tunables=dict(call.settings.tunables),
    )


_rotary = primitive.register(OPERATOR, _resolve)
