"""RotaryEmbedding of ONNX opset 23: https://onnx.ai/onnx/operators/onnx__RotaryEmbedding.html.

Rotary position embedding is from Su et al., RoFormer, https://arxiv.org/abs/2104.09864.
"""

import functools
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from jax_webgpu import primitive
from jax_webgpu.capabilities import Capabilities
from jax_webgpu.errors import CallError, DTypeError
from jax_webgpu.ops.common import array, fit_tunables, integer, is_concrete, is_key, tunables
from jax_webgpu.primitive import Call, Spec
from jax_webgpu.resolve import Pairs, Resolved, Tensor, resolve
from jax_webgpu.runtime import Arrays, Operator

DTYPES = ("float32", "float16", "bfloat16")
CACHE_DTYPES = (*DTYPES, "float64")
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

    where `a, b = i, i + r/2`, or `2*i, 2*i + 1` if interleaved. The rotation is computed in float32
    and rounded once. Elements from `r` on are copied bit for bit, signalling NaNs too. (What XLA
    itself converts before it comes here is out of reach: bfloat16 that is stacked, or gathered from
    several devices, on its CPU platform.)

    Args:
      x: float32, float16 or bfloat16, (batch, num_heads, sequence, head_size); or (batch, sequence,
        num_heads * head_size) with `num_heads`. The head size is even. An array of (batch,
        sequence, num_heads, head_size), as Flax and Hugging Face's Flax models have it, is not
        refused where its sizes happen to fit: transpose it with `jnp.swapaxes(x, 1, 2)` first.
      cos_cache: cosines, (rows, r/2) with `position_ids`, else (batch, sequence, r/2), where one
        example's, (1, sequence, r/2), serve for all. Half the width of the caches that repeat each
        angle. Of any of x's dtypes, or float64, which is rounded to float32 first.
      sin_cache: sines, likewise. See `rotary_cache`.
      position_ids: the cache row of each position, int32, uint32 or int64 of (batch, sequence).
        Every value is checked against the rows: concrete ones before anything runs. Where nothing
        can be checked, under `jax.jit` in plain JAX (see `configure`), one without a row gives
        NaNs; and a jitted call whose result has no elements XLA may leave out, with its check.
      interleaved: False pairs the first half of a head with the second, as GPT-NeoX and Hugging
        Face's models do (Llama's too, whose weights are permuted for it); True pairs neighbours,
        as RoFormer and Meta's own Llama code do.
      rotary_embedding_dim: how many of a head's elements are rotated; 0 means all.
      num_heads: needed where `x` has rank 3; for rank 4 it must be x's own if it is given.

    Returns:
      An array of x's shape and dtype.

    Raises:
      ValueError: a shape, an attribute or a position does not fit; the message names it. Under
        `jax.jit` positions are checked when the call runs, and the sentence arrives inside a
        `jax.errors.JaxRuntimeError`, or a `ValueError` that JAX makes of it.
      TypeError: a dtype is not admitted.
      jax_webgpu.DeviceError: the device cannot run the call (inside a `JaxRuntimeError`).
    """
    x, cos, sin = array(x, "x"), array(cos_cache, "cos_cache"), array(sin_cache, "sin_cache")
    attributes = _attributes(x, interleaved, rotary_embedding_dim, num_heads)
    own, dtype = _crossing_in(x, cos, sin)
    _check_shapes(x, cos, sin, position_ids, attributes)
    positions = [] if position_ids is None else [_positions(x, cos, position_ids)]
    if position_ids is None and cos.shape[0] == 1 != x.shape[0]:
        # One example's caches for all: as a table, whose rows every example names in order.
        cos, sin = cos[0], sin[0]
        batch, rows = x.shape[0], cos.shape[0]
        positions = [jnp.broadcast_to(jnp.arange(rows, dtype=np.int32), (batch, rows))]
    operands = [primitive.convert(x, own), cos.astype(dtype), sin.astype(dtype), *positions]
    (y,) = _rotary.bind(operands, tuple(attributes.items()))
    return primitive.convert(y, x.dtype)


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
        positive; or there is no memory for the caches.
      TypeError: a number is no integer, or `dtype` no float type.
    """
    rows, width = integer(max_positions, "max_positions"), integer(rotary_dim, "rotary_dim")
    if rows < 0:
        raise CallError(f"max_positions is {rows}; expected 0 or more")
    if width < 0 or width % 2:
        raise CallError(f"rotary_dim is {width}; expected an even number, 0 or more")
    _check_number(base, "base")
    try:
        radix = float(base)
    except OverflowError:  # an int
        radix = np.inf
    if not 0 < radix < np.inf:
        raise CallError(f"base is {base}; expected a positive number")
    kind = _float_type(dtype)
    try:
        if max(rows, width) > sys.maxsize:  # `arange` would wrap around, and give no rows
            raise MemoryError
        frequencies = radix ** (-np.arange(0, width, 2, dtype=np.float64) / max(width, 1))
        angles = np.arange(rows, dtype=np.float64)[:, None] * frequencies
    except (MemoryError, ValueError):  # the latter where the size itself is beyond NumPy's
        raise CallError(
            f"max_positions is {rows} and rotary_dim {width}: the caches do not fit into memory"
        ) from None
    return jnp.asarray(np.cos(angles), kind), jnp.asarray(np.sin(angles), kind)


# ---- checks -------------------------------------------------------------------------------------


def _check_number(value: Any, name: str) -> None:
    if isinstance(value, jax.core.Tracer) or not isinstance(
        value, int | float | np.integer | np.floating
    ):
        raise DTypeError(f"{name} must be a static number, got {type(value).__name__} {value!r}")


def _float_type(dtype: Any) -> np.dtype:
    if isinstance(dtype, jax.Array | np.ndarray | np.generic):  # NumPy takes these for their own
        raise DTypeError("dtype is an array; expected a float type such as float32: pass its dtype")
    try:
        found = jnp.dtype(dtype)
    except (TypeError, ValueError, SyntaxError):  # the last of what NumPy reads as Python
        raise DTypeError(f"dtype is {dtype!r}; expected a float type such as float32") from None
    is_jax = found.isnative and found.itemsize <= 8  # others JAX does not have
    if not (jnp.issubdtype(found, jnp.floating) and is_jax):
        raise DTypeError(f"dtype is {found}; expected a float type such as float32")
    return found


def _attributes(
    x: jax.Array, interleaved: Any, rotary_embedding_dim: Any, num_heads: Any
) -> dict[str, int]:
    """The attributes in ONNX's form, each checked alone and against x."""
    if isinstance(interleaved, jax.core.Tracer):
        raise DTypeError("interleaved must be static, got a traced value")
    if isinstance(interleaved, jax.Array) and not is_key(interleaved):
        interleaved = np.asarray(interleaved)  # a comparison would be traced too
    if is_key(interleaved) or np.ndim(interleaved) or interleaved not in (0, 1):
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
            raise CallError(
                f"x has shape {x.shape}; expected num_heads with rank 3, (batch, sequence, "
                "num_heads * head_size); if x lacks its batch axis, pass x[None]"
            )
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


def _crossing_in(x: jax.Array, cos: jax.Array, sin: jax.Array) -> tuple[str, str]:
    """The dtypes of x and of the caches for the call: of few kinds, as the kernels take them."""
    if str(x.dtype) not in DTYPES:
        raise DTypeError(f"x has dtype {x.dtype}; expected float32, float16 or bfloat16")
    for name, cache in (("cos_cache", cos), ("sin_cache", sin)):
        if str(cache.dtype) not in CACHE_DTYPES:
            raise DTypeError(f"{name} has dtype {cache.dtype}; expected {', '.join(CACHE_DTYPES)}")
    if x.dtype == jnp.bfloat16:
        return "bfloat16", "float32"
    all_half = {x.dtype, cos.dtype, sin.dtype} == {jnp.dtype("float16")}
    return ("float16", "float16") if all_half else ("float32", "float32")


def _check_shapes(
    x: jax.Array, cos: jax.Array, sin: jax.Array, positions: Any, attributes: Mapping[str, int]
) -> None:
    batch, sequence = x.shape[0], x.shape[-2] if x.ndim == 4 else x.shape[1]
    rotary, of = attributes["rotary_embedding_dim"], "rotary_embedding_dim"
    if rotary == 0:
        rotary, of = _head_size(x.shape, attributes), "the head size"
        if x.ndim == 3:
            of += f" with num_heads={attributes['num_heads']}"
    half = rotary // 2
    if positions is not None and cos.ndim != 2:
        raise CallError(
            f"cos_cache has shape {cos.shape}; expected rank 2, (rows, {half}), with position_ids"
        )
    if positions is None and cos.ndim != 3:
        raise CallError(
            f"cos_cache has shape {cos.shape}; expected rank 3, ({batch}, {sequence}, {half}), "
            "without position_ids: pass these, or cos_cache[positions]"
        )
    if cos.shape[-1] == rotary != half:
        raise CallError(
            f"cos_cache has shape {cos.shape}, the full width of {rotary}, {of}; expected half "
            f"the width, {half}: pass cos_cache[..., :{half}], or cos_cache[..., ::2] where each "
            "value stands twice in a row"
        )
    if cos.shape[-1] != half:
        raise CallError(
            f"cos_cache has shape {cos.shape}; expected a last dimension of {half}, half of "
            f"{rotary}, {of}; where less than the whole head is rotated, rotary_embedding_dim says "
            "how much"
        )
    if positions is None and cos.shape not in ((batch, sequence, half), (1, sequence, half)):
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
    shape = position_ids.shape
    if shape != (batch, sequence):
        hint = ""
        if shape in ((sequence,), (1, sequence)):
            hint = f": pass jnp.broadcast_to(position_ids, ({batch}, {sequence}))"
        elif x.ndim == 4 and shape == (batch, x.shape[1]):
            hint = "; if x is (batch, sequence, heads, size), pass jnp.swapaxes(x, 1, 2)"
        raise CallError(
            f"position_ids has shape {shape}; expected ({batch}, {sequence}), batch and sequence "
            f"of x {x.shape}{hint}"
        )
    if is_concrete(position_ids):
        _check_positions(np.asarray(position_ids), cos.shape[0])
    return array(position_ids, "position_ids")


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


# Bfloat16, which WGSL does not know, as words of two elements.
PACKED = Operator("rotary_embedding_packed", "jax_webgpu.RotaryEmbeddingPacked.json")


def _is_packed(call: Call, x: Any, cos: Any) -> bool:
    """Whether no pair, or both halves of two pairs, share words."""
    attributes = dict(call.attributes)
    return (
        str(x.dtype) == "bfloat16"
        and call.settings.overlays
        and bool(attributes["interleaved"] or cos.shape[-1] % 2 == 0)
    )


# ---- primitive ----------------------------------------------------------------------------------


class Rules:
    """Operands: x, cos, sin; with positions also these, and where they are not the caller's own,
    the caller's, which `rows` then belongs to. Beside caches of rank 3 positions are only checked.

    Rotation is bilinear: linear in x for given caches, and its rotated part linear in the caches
    for given x. With x's pair (a, b) and the row (c, s), y = (a*c - b*s, a*s + b*c).
    """

    @staticmethod
    def check(static: Pairs, operands: Sequence[np.ndarray]) -> None:
        """The positions, in the callback; NumPy only."""
        if len(operands) > 3:
            _check_positions(operands[-1], int(dict(static).get("rows", len(operands[1]))))

    @staticmethod
    def fit(resolved: Resolved, capabilities: Capabilities) -> Resolved:
        """Without shader-f16 in float32: what is computed is the same, and rounded once."""
        resolved = fit_tunables(resolved, capabilities)
        if capabilities.f16_ok("float16"):
            return resolved
        return resolved.with_dtype("float16", "float32")

    @staticmethod
    def pieces(
        resolved: Resolved, arrays: Arrays, outputs: Arrays, most: int
    ) -> Iterator[tuple[Resolved, Arrays, Arrays]]:
        """Halves of the batch, of the heads, of the sequence: what is cut is contiguous.

        Where positions name rows, these are gathered first: a piece needs few of a large table.
        """
        (y,), (x, cos, sin, *ids) = outputs, arrays
        if ids:
            cos, sin = cos[ids[0]], sin[ids[0]]
        axis = next((axis for axis in range(x.ndim - 1) if x.shape[axis] > 1), 0)
        tokens = x.ndim - 2  # the sequence's axis
        half = -(-x.shape[axis] // 2)
        for part in (slice(0, half), slice(half, None)):
            cut = (slice(None),) * axis + (part,)
            rows = {0: (part,), tokens: (slice(None), part)}.get(axis, ())
            shorter = [x[cut], cos[rows], sin[rows]]
            if shorter[0].size:
                tensors = dict(resolved.inputs)
                inputs = zip(("x", "cos", "sin"), shorter, strict=True)
                yield (
                    resolve(
                        resolved.spec,
                        {name: Tensor(a.shape, tensors[name].dtype) for name, a in inputs},
                        attributes=dict(resolved.attributes),
                        tunables=dict(resolved.tunables),
                    ),
                    shorter,
                    [y[cut]],
                )

    operator = Operator("rotary_embedding", "ai.onnx.RotaryEmbedding.json", check, fit, pieces)

    @staticmethod
    def resolve(call: Call, tensors: tuple[Tensor, ...]) -> Resolved:
        inputs = dict(zip(("x", "cos", "sin", "positionIds"), tensors, strict=False))
        if len(tensors[1].shape) == 3:
            inputs.pop("positionIds", None)
        if "positionIds" in inputs:
            # The manifest knows int64 alone; any integer array is checked on its way to u32.
            inputs["positionIds"] = Tensor(inputs["positionIds"].shape, "int64")
        x = inputs["x"]
        if _is_packed(call, x, inputs["cos"]):
            inputs["x"] = Tensor((*x.shape[:-1], x.shape[-1] // 2), "uint32")
            attributes = dict(call.attributes)
            del attributes["rotary_embedding_dim"]  # the caches tell
            own = {k: v for k, v in tunables(call.settings).items() if k in PACKED.spec.tunables}
            return resolve(PACKED.spec, inputs, attributes=attributes, tunables=own)
        if x.dtype == "bfloat16":
            inputs["x"] = Tensor(x.shape, "float32")
        return resolve(
            Rules.operator.overlaid if call.settings.overlays else Rules.operator.spec,
            inputs,
            attributes=dict(call.attributes),
            tunables=tunables(call.settings),
        )

    @staticmethod
    def results(call: Call, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tensors[:1]

    @staticmethod
    def narrow(call: Call, *operands: Any) -> tuple[Call, Sequence[Any]]:
        """Of a table with more rows than tokens, each token's row: a decoding step reads few.

        And bfloat16 that does not lie in words of two as float32.
        """
        x, cos, sin, *ids = operands
        if x.dtype == jnp.bfloat16 and not _is_packed(call, x, cos):
            x = primitive.convert(x, "float32")
        if not ids or cos.ndim == 3 or ids[0].size >= cos.shape[0]:
            return call, [x, cos, sin, *ids]
        rows = dict(call.static).get("rows", cos.shape[0])
        # Positions beyond the table are refused by the host: what is gathered for them is nothing.
        options = {"mode": "clip", "wrap_negative_indices": False}
        cos, sin = (cache.at[ids[0]].get(**options) for cache in (cos, sin))
        return call.with_static(rows=rows), [x, cos, sin, ids[-1]]

    @staticmethod
    def reference(call: Call, *operands: Any) -> Sequence[Any]:
        x, *caches = operands[:3]
        (a, b), tail = _pairs(call, primitive.convert(x, "float32"), _width(caches[0]))
        c, s = (_by_token(call, cache.astype(jnp.float32), operands[3:]) for cache in caches)
        rotated = _unpaired(call, (a * c - b * s, a * s + b * c))
        # Joined in float32: XLA converts bfloat16 for it, and back in its own way.
        whole = jnp.concatenate([rotated, tail], axis=-1).reshape(x.shape)
        return [primitive.convert(whole, x.dtype)]

    @staticmethod
    def partition(
        call: Call,
        shapes: Sequence[tuple[int, ...]],
        specs: Sequence[Spec],
        sizes: Mapping[str, int],
    ) -> tuple[Call, Sequence[Spec], Spec]:
        """Batch, sequence and heads may be sharded, as x is; a table of rows is on every shard."""
        x, ids = specs[0], specs[3:]
        out: Spec = (*x[:3], ())
        batch, tokens = x[0], x[-2]
        if len(x) == 3:
            heads = x[2]
            shards = math.prod(sizes[axis] for axis in heads)
            attributes = dict(call.attributes)
            if attributes["num_heads"] % shards:
                heads, shards = (), 1
            attributes["num_heads"] //= shards
            call, out = replace(call, attributes=tuple(attributes.items())), (batch, tokens, heads)
        cache: Spec = ((), ()) if ids else (batch, tokens, ())
        positions = [(batch, tokens)] * bool(ids) + [((),) * len(shapes[-1])] * (len(ids) > 1)
        return call, [out, cache, cache, *positions], out

    @staticmethod
    def batch(
        call: Call, operands: Sequence[Any], axes: Sequence[int | None], size: int
    ) -> tuple[Sequence[Any], Sequence[int]]:
        """One dispatch for the whole batch: the batch axis becomes part of ONNX's.

        Where only x of rank 4 is mapped, next to its heads, it joins the heads, and nothing is
        copied. Otherwise it joins the batch: mapped caches become one table, and the positions,
        small integers, say whose rows they mean; they are checked as the caller gave them.
        """
        x, cos, sin, *ids = operands
        if _only_heads(call, axes, x):
            leading = x.shape[1] if axes[0] == 0 else x.shape[0]
            folded = x.reshape(leading, math.prod(x.shape[:3]) // max(leading, 1), *x.shape[3:])
            (y,) = _rotary.apply(call, folded, *operands[1:])
            return [y.reshape(x.shape)], [axes[0] or 0]

        def front(operand: Any, axis: int | None) -> Any:
            if axis is None:
                return jnp.broadcast_to(operand, (size, *operand.shape))
            return jnp.moveaxis(operand, axis, 0)

        def merged(array: Any) -> Any:
            return array.reshape(array.shape[0] * array.shape[1], *array.shape[2:])

        mapped = axes[1] is not None or axes[2] is not None
        static = dict[str, Any]()
        asked: list[Any] = []
        if ids:
            positions = front(ids[0], axes[3])
            # With all batch axes where they are: a message names an index of the caller's.
            asked = ids[-1:]
            rows = cos.shape[0] if axes[1] is None else cos.shape[axes[1] == 0]
            static["rows"] = dict(call.static).get("rows", rows)
            if mapped:
                offsets = jnp.arange(size, dtype=positions.dtype) * rows
                positions = positions + offsets.reshape(size, 1, 1)
        elif not mapped:
            batch, tokens = cos.shape[:2]
            every = jnp.arange(batch * tokens, dtype=np.int32).reshape(batch, tokens)
            positions, cos, sin = front(every, None), merged(cos), merged(sin)
        else:
            positions = None
        x = front(x, axes[0])
        if mapped:
            cos, sin = (merged(front(cache, at)) for cache, at in ((cos, axes[1]), (sin, axes[2])))
        rest = [] if positions is None else [merged(positions), *asked]
        (y,) = _rotary.apply(call.with_static(**static), merged(x), cos, sin, *rest)
        return [y.reshape(x.shape)], [0]

    @staticmethod
    def jvp(call: Call, operands: Sequence[Any], tangents: Sequence[Any]) -> Sequence[Any]:
        """R(c, s) dx + R(dc, ds) x, of which the second is zero beyond the rotary dimension."""
        x, cos, sin, *ids = operands
        dx, dcos, dsin = tangents[:3]
        terms = []
        if dx is not None:
            terms += _rotary.apply(call, dx, cos, sin, *ids)
        if dcos is not None or dsin is not None:
            dcos = jnp.zeros_like(cos) if dcos is None else dcos
            dsin = jnp.zeros_like(sin) if dsin is None else dsin
            terms.append(_rotated_alone(call, x, dcos, dsin, ids))
        return [functools.reduce(jnp.add, terms) if terms else None]

    @staticmethod
    def transpose(call: Call, cotangents: Sequence[Any], operands: Sequence[Any]) -> Sequence[Any]:
        """In x, the transposed matrices, by the same kernel: R(c, s)^T = R(c, -s).

        It is not the inverse: c*c + s*s need not be 1. In the caches, the cotangent (u, v) of a
        pair gives dc = u*a + v*b and ds = v*a - u*b, summed over the heads and over all positions
        that name the row.
        """
        (ct,) = cotangents
        x, cos, sin, *ids = operands
        none = [None] * len(ids)
        if isinstance(x, jax.ShapeDtypeStruct):
            return [*_rotary.apply(call, ct, cos, -sin, *ids), None, None, *none]
        shape = next(c.shape for c in (cos, sin) if isinstance(c, jax.ShapeDtypeStruct))
        (a, b), _ = _pairs(call, x.astype(jnp.float32), shape[-1])
        (u, v), _ = _pairs(call, ct.astype(jnp.float32), shape[-1])
        results = [
            _to_rows(call, product, shape, ids).astype(cache.dtype)
            if isinstance(cache, jax.ShapeDtypeStruct)
            else None
            for cache, product in ((cos, u * a + v * b), (sin, v * a - u * b))
        ]
        return [None, *results, *none]


# The rules that are not the kernel's see x by pairs: two arrays of (batch, heads, sequence, width)
# or (batch, sequence, heads, width), and the tail beyond them.


def _width(cache: Any) -> int:
    return int(cache.shape[-1])


def _heads(call: Call, x: Any) -> Any:
    """X with an axis of its own for the heads: (..., head_size) of rank 4."""
    if x.ndim == 4:
        return x
    heads = dict(call.attributes)["num_heads"]
    return x.reshape(*x.shape[:2], heads, x.shape[2] // heads)


def _pairs(call: Call, x: Any, width: int) -> tuple[tuple[Any, Any], Any]:
    x = _heads(call, x)
    if dict(call.attributes)["interleaved"]:
        pairs = x[..., 0 : 2 * width : 2], x[..., 1 : 2 * width : 2]
    else:
        pairs = x[..., :width], x[..., width : 2 * width]
    return pairs, x[..., 2 * width :]


def _unpaired(call: Call, pairs: tuple[Any, Any]) -> Any:
    if dict(call.attributes)["interleaved"]:
        stacked = jnp.stack(pairs, axis=-1)
        return stacked.reshape(*pairs[0].shape[:-1], 2 * pairs[0].shape[-1])
    return jnp.concatenate(pairs, axis=-1)


def _head_axis(call: Call) -> int:
    return 2 if "num_heads" in dict(call.attributes) else 1


def _by_token(call: Call, cache: Any, ids: Sequence[Any]) -> Any:
    """The row of each token, with an axis of size 1 for the heads; NaNs where there is none."""
    if ids:
        rows = _rows_or_none(ids[0], cache.shape[0])
        cache = cache.at[rows].get(mode="fill", fill_value=jnp.nan)
    return jnp.expand_dims(cache, _head_axis(call))


def _rows_or_none(ids: Any, rows: int) -> Any:
    """The positions, with the number of rows, which is none's, for those that are no row.

    JAX itself takes negative ones from the end, and cuts int64 down to int32 before it compares.
    """
    return jnp.where((ids >= 0) & (ids < rows), ids, rows)


def _to_rows(call: Call, by_pair: Any, shape: tuple[int, ...], ids: Sequence[Any]) -> Any:
    """The transpose of `_by_token`: sums over the heads, and over the tokens of one row."""
    by_token = by_pair.sum(_head_axis(call))
    if ids and any(jax.typeof(by_token).sharding.spec):
        # Of one sharding with the positions, which a `vmap` over a sharded axis leaves apart.
        by_token = jax.sharding.reshard(by_token, jax.sharding.PartitionSpec())
    if not ids:
        return by_token
    rows = _rows_or_none(ids[0], shape[0])
    return jnp.zeros(shape, by_token.dtype).at[rows].add(by_token, mode="drop")


def _rotated_alone(call: Call, x: Any, cos: Any, sin: Any, ids: Sequence[Any]) -> Any:
    """The rotation of x with zeros in place of what lies beyond the rotary dimension."""
    split = _heads(call, x)
    rotary = 2 * _width(cos)
    part = split[..., :rotary]
    if x.ndim == 3:
        part = part.reshape(*x.shape[:-1], split.shape[2] * rotary)
    whole = replace(
        call, attributes=tuple({**dict(call.attributes), "rotary_embedding_dim": 0}.items())
    )
    (y,) = _rotary.apply(whole, part, cos, sin, *ids)
    tail = split.shape[-1] - rotary
    y = y.reshape(*split.shape[:-1], rotary)
    return jnp.pad(y, [(0, 0)] * (split.ndim - 1) + [(0, tail)]).reshape(x.shape)


def _only_heads(call: Call, axes: Sequence[int | None], x: Any) -> bool:
    """Whether x alone is mapped, has rank 4, and its batch axis can join the heads' in place."""
    at = axes[0]
    if at is None or any(axis is not None for axis in axes[1:]) or x.ndim != 5:
        return False
    if at == 2 and any(jax.typeof(x).sharding.spec[1:3]):
        return False  # an axis that is sharded, JAX merges only where it leads
    return at in (1, 2) or (at == 0 and x.shape[1] == 1)


_rotary = primitive.register(Rules)
