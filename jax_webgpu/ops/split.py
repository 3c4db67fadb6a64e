"""Split of ONNX opset 18: https://onnx.ai/onnx/operators/onnx__Split.html."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from itertools import islice
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jax_webgpu import config, primitive
from jax_webgpu.dtypes import TABLE
from jax_webgpu.errors import CallError, DTypeError
from jax_webgpu.ops.common import array, fit_tunables, integer, is_key, tunables
from jax_webgpu.primitive import Call, Spec
from jax_webgpu.resolve import Resolved, Tensor, resolve
from jax_webgpu.runtime import Arrays, Operator
from jax_webgpu.spec import Spec as Manifest

# Elements of less than a byte cross to the host as these, which hold each of their values.
_WIDER = {
    "int1": "int8",
    "int2": "int8",
    "int4": "int8",
    "uint1": "uint8",
    "uint2": "uint8",
    "uint4": "uint8",
    "float4_e2m1fn": "float32",
    "float6_e2m3fn": "float32",
    "float6_e3m2fn": "float32",
}


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
        `ceil(size / num_outputs)` elements along `axis`, or what is left. Of parts there are at
        most 65,536.

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
    if is_key(x):
        words = _parts(jax.random.key_data(x), axis, sizes)
        return tuple(jax.random.wrap_key_data(part, impl=jax.random.key_impl(x)) for part in words)
    wide = _WIDER.get(str(x.dtype), x.dtype)
    return tuple(part.astype(x.dtype) for part in _parts(x.astype(wide), axis, sizes))


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
    is_scalar = isinstance(split, jax.Array | np.ndarray) and not split.ndim
    kinds = (Set, Mapping, str, bytes)
    if is_scalar or not isinstance(split, Iterable) or isinstance(split, kinds) or is_key(split):
        raise DTypeError(f"split must be a sequence of sizes, got {type(split).__name__}")
    parts = tuple(islice(split, MOST_PARTS + 1))  # it may have no end
    if len(parts) > MOST_PARTS:
        raise CallError(f"split has more than {MOST_PARTS:,} sizes")
    sizes = tuple(integer(part, f"split[{index}]") for index, part in enumerate(parts))
    for index, part in enumerate(sizes):
        if part < 0:
            raise CallError(f"split[{index}] is {part}; expected 0 or more")
    if not sizes or sum(sizes) != size:
        hint = ""
        if list(sizes) == sorted(set(sizes)) and 0 < sum(sizes[-1:]) < size:
            meant = tuple(np.diff((0, *sizes, size)).tolist())
            hint = f"; as positions, which jnp.split takes, they mean the sizes {meant}"
        raise CallError(
            f"split is {sizes}, together {sum(sizes)}; expected sizes that add up to {size}, the "
            f"size of x along axis{hint}"
        )
    return sizes


def even_sizes(size: int, parts: int) -> tuple[int, ...]:
    """ONNX's rule for `num_outputs`: the last parts are smaller, or empty, where it must be."""
    if not 1 <= parts <= MOST_PARTS:
        raise CallError(f"num_outputs is {parts}; expected 1 to {MOST_PARTS:,}")
    chunk = -(-size // parts)
    return tuple(max(0, min(chunk, size - index * chunk)) for index in range(parts))


def _parts(x: jax.Array, axis: int, sizes: tuple[int, ...]) -> list[jax.Array]:
    """The parts; of more than a kernel takes, groups, each of which is split again."""
    most = MOST_PACKED if config.settings().overlays else len(Rules.operator.spec.outputs)
    if len(sizes) <= most or (len({*sizes}) == 1 and most == MOST_PACKED):
        return _split.bind([x], (("axis", axis),), (("sizes", sizes),))
    length = -(-len(sizes) // most)
    groups = [sizes[start : start + length] for start in range(0, len(sizes), length)]
    pieces = _parts(x, axis, tuple(map(sum, groups)))
    return [
        part
        for piece, group in zip(pieces, groups, strict=True)
        for part in ([piece] if len(group) == 1 else _parts(piece, axis, group))
    ]


# More are a mistake: each is an array of its own in the compiled program.
MOST_PARTS = 1 << 16
# Up to so many parts of unequal widths are found by as many comparisons in the kernel.
MOST_PACKED = 64

PACKED = Operator("split_packed", "jax_webgpu.SplitPacked.json")


def _is_packed(spec: Manifest) -> bool:
    """Whether it is the manifest of `PACKED`, which few calls need: this does not load it."""
    return spec.path.name == PACKED.manifest


# ---- primitive ----------------------------------------------------------------------------------


class Rules:
    """One operand, x. `axis` is an attribute, the sizes along it are static."""

    @staticmethod
    def pieces(
        resolved: Resolved, arrays: Arrays, outputs: Arrays, most: int
    ) -> Iterator[tuple[Resolved, Arrays, Arrays]]:
        """As many rows at a time as can be bound; of a row that cannot, each part by itself."""
        (x,) = arrays
        rows, columns = x.shape
        width = TABLE[resolved.inputs[0][1].dtype].bytes
        if columns * width <= most:
            step = most // (columns * width)
            for start in range(0, rows, step):
                parts = [output[start : start + step] for output in outputs]
                yield _matrix_call(resolved, x[start : start + step], parts)
            return
        step = most // width
        for row in range(rows):
            at = 0
            for output in outputs:
                for start in range(0, output.shape[1], step):
                    part = output[row : row + 1, start : start + step]
                    source = x[row : row + 1, at + start : at + start + part.shape[1]]
                    yield _matrix_call(resolved, source, [part])
                at += output.shape[1]

    @staticmethod
    def parts(resolved: Resolved) -> Sequence[Tensor]:
        """Of a packed call as of others: matrices."""
        if not _is_packed(resolved.spec):
            return [part for _, part in resolved.outputs]
        ((_, x),) = resolved.inputs
        return [
            Tensor((x.shape[0], width), x.dtype) for width in dict(resolved.attributes)["widths"]
        ]

    @staticmethod
    def views(resolved: Resolved, x: np.ndarray) -> Arrays:
        """The parts as columns of the matrix."""
        return np.split(x, np.cumsum([part.shape[1] for _, part in resolved.outputs])[:-1], 1)

    operator = Operator(
        "split",
        "ai.onnx.Split.json",
        fit=fit_tunables,
        pieces=pieces,
        moves_bits=True,
        parts=parts,
        views=views,
    )

    @staticmethod
    def resolve(call: Call, tensors: tuple[Tensor, ...]) -> Resolved:
        """Bits are moved, so the widest words are taken into which every part can be cut.

        A part is one run of bytes for each position before the axis. Where every run is whole
        32-bit words, x is a matrix of these; else of 16-bit or 8-bit integers, which the manifest
        stores one a word.
        """
        (x,) = tensors
        axis, sizes = dict(call.attributes)["axis"], dict(call.static)["sizes"]
        rows, inner = math.prod(x.shape[:axis]), math.prod(x.shape[axis + 1 :])
        itemsize = jnp.dtype(x.dtype).itemsize
        runs = [size * inner * itemsize for size in sizes]
        if all(run % 4 == 0 for run in runs):
            dtype, width = "uint32", 4
        else:
            dtype, width = ("int16", 2) if itemsize == 2 else ("uint8", 1)
        columns = [run // width for run in runs]
        operator = Rules.operator
        spec = operator.overlaid if call.settings.overlays else operator.spec
        return _matrix(spec, rows, columns, dtype, tunables(call.settings))

    @staticmethod
    def results(call: Call, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        (x,) = tensors
        axis = dict(call.attributes)["axis"]
        return tuple(
            Tensor((*x.shape[:axis], size, *x.shape[axis + 1 :]), x.dtype)
            for size in dict(call.static)["sizes"]
        )

    @staticmethod
    def narrow(call: Call, *operands: Any) -> tuple[Call, Sequence[Any]]:
        return call, operands

    @staticmethod
    def reference(call: Call, *operands: Any) -> Sequence[Any]:
        (x,) = operands
        sizes = dict(call.static)["sizes"]
        return jnp.split(x, np.cumsum(sizes)[:-1], dict(call.attributes)["axis"])

    @staticmethod
    def partition(
        call: Call,
        shapes: Sequence[tuple[int, ...]],
        specs: Sequence[Spec],
        sizes: Mapping[str, int],
    ) -> tuple[Call, Sequence[Spec], Spec]:
        """Any axis but the split one may be sharded."""
        (spec,) = specs
        axis = dict(call.attributes)["axis"]
        spec = (*spec[:axis], (), *spec[axis + 1 :])
        return call, [spec], spec

    @staticmethod
    def batch(
        call: Call, operands: Sequence[Any], axes: Sequence[int | None], size: int
    ) -> tuple[Sequence[Any], Sequence[int]]:
        """The batch axis stays where it is; the split axis is one further on if it lies behind."""
        (x,), (batch,) = operands, axes
        assert batch is not None
        axis = dict(call.attributes)["axis"]
        axis += axis >= batch
        parts = _split.apply(replace(call, attributes=(("axis", axis),)), x)
        return parts, [batch] * len(parts)

    @staticmethod
    def jvp(call: Call, operands: Sequence[Any], tangents: Sequence[Any]) -> Sequence[Any]:
        """Linear: the parts of the tangent."""
        (tangent,) = tangents
        if tangent is None:
            return [None] * len(dict(call.static)["sizes"])
        return _split.apply(call, tangent)

    @staticmethod
    def transpose(call: Call, cotangents: Sequence[Any], operands: Sequence[Any]) -> Sequence[Any]:
        """Concatenation, of zeros where a part was not used."""
        (x,) = operands
        axis, sizes = dict(call.attributes)["axis"], dict(call.static)["sizes"]
        like = next(cotangent for cotangent in cotangents if cotangent is not None)
        parts = [
            jax.lax.full_like(like, 0, shape=(*x.shape[:axis], size, *x.shape[axis + 1 :]))
            if cotangent is None
            else cotangent
            for cotangent, size in zip(cotangents, sizes, strict=True)
        ]
        return [jax.lax.concatenate(parts, axis)]


def _matrix(
    spec: Manifest, rows: int, columns: Sequence[int], dtype: str, tunables: Mapping[str, Any]
) -> Resolved:
    """The engine's call that cuts a matrix into parts of so many columns."""
    if len(columns) > len(spec.outputs) or _is_packed(spec):
        widths = tuple(columns)
        lanes = next(lanes for lanes in (4, 2, 1) if all(width % lanes == 0 for width in widths))
        return resolve(
            PACKED.spec,
            {"input": Tensor((rows, sum(columns)), dtype)},
            attributes={"widths": widths, "lanes": lanes},
            tunables={name: tunables[name] for name in tunables if name in PACKED.spec.tunables},
        )
    return resolve(
        spec,
        {"input": Tensor((rows, sum(columns)), dtype)},
        attributes={"axis": 1},
        outputs={f"y{index}": (rows, width) for index, width in enumerate(columns)},
        tunables=tunables,
    )


def _matrix_call(
    resolved: Resolved, x: np.ndarray, parts: Arrays
) -> tuple[Resolved, Arrays, Arrays]:
    columns = [part.shape[1] for part in parts]
    dtype = resolved.inputs[0][1].dtype
    return _matrix(resolved.spec, len(x), columns, dtype, dict(resolved.tunables)), [x], parts


_split = primitive.register(Rules)
