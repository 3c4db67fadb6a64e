"""Split of ONNX opset 18: https://onnx.ai/onnx/operators/onnx__Split.html."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.typing import ArrayLike

from jax_webgpu import primitive
from jax_webgpu.errors import CallError, DTypeError
from jax_webgpu.ops.common import array, fit_workgroup_size, integer
from jax_webgpu.primitive import Call
from jax_webgpu.resolve import Resolved, Tensor, resolve
from jax_webgpu.runtime import Operator


def split(
    x: ArrayLike,
    split: Sequence[int] | None = None,
    *,
    axis: int = 0,
    num_outputs: int | None = None,
) -> tuple[jax.Array, ...]:
    """Splits an array along one axis into parts, which are copied bit for bit.

    Args:
      x: an array of rank 1 or more.
      split: the sizes of the parts along `axis`, 0 or more each; their sum is x's size there.
        These are sizes, as in ONNX, not positions as in `jnp.split`.
      axis: from -rank to rank - 1.
      num_outputs: the number of parts in place of `split`: each has
        `ceil(size / num_outputs)` elements along `axis`, or what is left.

    Returns:
      The parts, in order; as many as `split` has sizes, or `num_outputs`.

    Raises:
      ValueError: both or neither of `split` and `num_outputs` are given, or sizes, axis or number
        do not fit; the message names what was expected.
      TypeError: a size or the axis is not a static integer, or x's dtype is not admitted.
      jax_webgpu.DeviceError: the device cannot run the call (inside a
        `jax.errors.JaxRuntimeError`).
    """
    x = array(x, "x")
    axis = _axis(x, axis)
    sizes = _sizes(x.shape[axis], split, num_outputs)
    _check_dtype(x)
    return tuple(_parts(x, axis, sizes))


# ---- checks -------------------------------------------------------------------------------------


def _axis(x: jax.Array, axis: Any) -> int:
    axis = integer(axis, "axis")
    if x.ndim == 0:
        raise CallError("x is a scalar; expected an array of rank 1 or more")
    if not -x.ndim <= axis < x.ndim:
        raise CallError(
            f"axis is {axis}; expected {-x.ndim} to {x.ndim - 1} for x of shape {x.shape}"
        )
    return axis % x.ndim


def _sizes(size: int, split: Any, num_outputs: Any) -> tuple[int, ...]:
    """The parts' sizes along an axis of `size` elements."""
    if (split is None) == (num_outputs is None):
        given = "neither" if split is None else "both"
        raise CallError(f"expected exactly one of split and num_outputs, got {given}")
    if split is None:
        return even_sizes(size, integer(num_outputs, "num_outputs"))
    if isinstance(split, jax.core.Tracer):
        raise DTypeError("split must be static sizes, got a traced value: make it a tuple of ints")
    if isinstance(split, int | np.integer):
        raise DTypeError(
            f"split must be a sequence of sizes, got the integer {split}; for that many parts "
            f"pass num_outputs={split}"
        )
    try:
        parts = list(split)
    except TypeError:
        kind = type(split).__name__
        raise DTypeError(f"split must be a sequence of sizes, got {kind}") from None
    sizes = tuple(integer(part, f"split[{index}]") for index, part in enumerate(parts))
    for index, part in enumerate(sizes):
        if part < 0:
            raise CallError(f"split[{index}] is {part}; expected 0 or more")
    if not sizes or sum(sizes) != size:
        raise CallError(
            f"split is {sizes}, together {sum(sizes)}; expected sizes that add up to {size}, the "
            "size of x along axis"
        )
    return sizes


def even_sizes(size: int, parts: int) -> tuple[int, ...]:
    """ONNX's rule for `num_outputs`: the last parts are smaller, or empty, where it must be."""
    if parts < 1:
        raise CallError(f"num_outputs is {parts}; expected 1 or more")
    chunk = -(-size // parts)
    return tuple(max(0, min(chunk, size - index * chunk)) for index in range(parts))


def _parts(x: jax.Array, axis: int, sizes: tuple[int, ...]) -> list[jax.Array]:
    """The parts; more than the manifest has outputs come from as many groups, each split again."""
    most = len(OPERATOR.spec.outputs)
    if len(sizes) <= most:
        return _split.bind([x], attributes=(("axis", axis),), sizes=sizes)
    length = -(-len(sizes) // most)
    groups = [sizes[start : start + length] for start in range(0, len(sizes), length)]
    pieces = _parts(x, axis, tuple(map(sum, groups)))
    return [
        part
        for piece, group in zip(pieces, groups, strict=True)
        for part in ([piece] if len(group) == 1 else _parts(piece, axis, group))
    ]


def _check_dtype(x: jax.Array) -> None:
    allowed = OPERATOR.spec.type_constraints["T"]
    if str(x.dtype) not in allowed:
        raise DTypeError(f"x has dtype {x.dtype}; expected one of {', '.join(allowed)}")


# ---- primitive ----------------------------------------------------------------------------------

OPERATOR = Operator("split", "ai.onnx.Split.json", fit=fit_workgroup_size)


def _resolve(call: Call, tensors: tuple[Tensor, ...]) -> Resolved:
    (x,) = tensors
    axis = dict(call.attributes)["axis"]
    shapes = {
        f"y{index}": (*x.shape[:axis], size, *x.shape[axis + 1 :])
        for index, size in enumerate(call.sizes)
    }
    return resolve(
        OPERATOR.spec,
        {"input": x},
        attributes=dict(call.attributes),
        outputs=shapes,
        tunables=dict(call.settings.tunables),
    )


_split = primitive.register(OPERATOR, _resolve)
