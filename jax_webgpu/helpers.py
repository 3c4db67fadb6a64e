"""The functions that the manifest format gives to expressions and templates, under its names.

Shapes and axes are lists of whole numbers and whole numbers; an axis wraps modulo the rank.
Every function is total over the format's values: it returns one of them or raises
`ExpressionError`.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

from jax_webgpu import dtypes
from jax_webgpu.errors import ExpressionError
from jax_webgpu.values import (
    MAX_LIST,
    UNDEFINED,
    divide,
    is_sequence,
    need_integer,
    need_list,
    need_number,
    need_text,
    number,
    show,
    truthy,
)


def _rounded(value: Any, what: str, rounding: Callable[[float], int]) -> int | float:
    value = need_number(value, what)
    return rounding(value) if math.isfinite(value) else value


def ceil(x: Any) -> int | float:
    return _rounded(x, "ceil", math.ceil)


def floor(x: Any) -> int | float:
    return _rounded(x, "floor", math.floor)


def ceil_div(a: Any, b: Any) -> int | float:
    a, b = need_number(a, "ceilDiv"), need_number(b, "ceilDiv")
    if isinstance(a, int) and isinstance(b, int) and b != 0:
        return -(-a // b)
    return ceil(divide(a, b))


def _numbers(values: tuple[Any, ...], what: str) -> list[int | float]:
    """The numbers; NaN alone where one is NaN."""
    numbers = [need_number(value, what) for value in values]
    return [math.nan] if any(value != value for value in numbers) else numbers


def minimum(*values: Any) -> int | float:
    return min(_numbers(values, "min"), default=math.inf)


def maximum(*values: Any) -> int | float:
    return max(_numbers(values, "max"), default=-math.inf)


def power(base: Any, exponent: Any) -> int | float:
    base, exponent = need_number(base, "pow"), need_number(exponent, "pow")
    if abs(base) == 1 and not math.isfinite(exponent):
        return math.nan
    try:
        return number(math.pow(base, exponent))
    except OverflowError:
        return -math.inf if base < 0 and exponent % 2 else math.inf
    except ValueError:
        return math.inf if base == 0 else math.nan


def log2ceil(x: Any) -> int:
    value = ceil(x)
    if value <= 1:
        return 0
    if not isinstance(value, int):
        raise ExpressionError(f"log2ceil takes a finite number, got {show(x)}")
    return (value - 1).bit_length()


def pow2ceil(x: Any) -> int | float:
    return number(1 << log2ceil(x))


def _shape(shape: Any, what: str) -> list[int]:
    return [need_integer(size, what) for size in need_list(shape, what)]


def _product(sizes: list[int]) -> int | float:
    product: int | float = 1
    for size in sizes:  # each product is rounded: whole numbers without end would take too long
        product = number(product * size)
    return product


def _axis(shape: list[int], axis: Any, what: str) -> int:
    axis = need_integer(axis, what)
    return axis % len(shape) if shape else 0


def numel(shape: Any) -> int | float:
    return _product(_shape(shape, "numel"))


def dim(shape: Any, axis: Any) -> Any:
    sizes = _shape(shape, "dim")
    return sizes[_axis(sizes, axis, "dim")] if sizes else UNDEFINED


def outer(shape: Any, axis: Any) -> int | float:
    sizes = _shape(shape, "outer")
    return _product(sizes[: _axis(sizes, axis, "outer")])


def inner(shape: Any, axis: Any) -> int | float:
    sizes = _shape(shape, "inner")
    return _product(sizes[_axis(sizes, axis, "inner") + 1 :])


def rows(shape: Any, axis: Any) -> int | float:
    sizes = _shape(shape, "rows")
    at = _axis(sizes, axis, "rows")
    return _product(sizes[:at] + sizes[at + 1 :])


def _count(n: Any, what: str) -> int:
    n = need_integer(n, what)
    if not 0 <= n <= MAX_LIST:
        raise ExpressionError(f"{what}: a length between 0 and {MAX_LIST} is needed, got {n}")
    return n


def prefix(shape: Any, n: Any) -> list[Any]:
    return list(need_list(shape, "prefix"))[: _count(n, "prefix")]


def suffix(shape: Any, n: Any) -> list[Any]:
    """The last `n` elements: a number of them, as in `prefix`, and not where they begin."""
    elements = list(need_list(shape, "suffix"))
    return elements[max(0, len(elements) - _count(n, "suffix")) :]


def fill(value: Any, n: Any) -> list[Any]:
    return [value] * _count(n, "fill")


def move_axis(shape: Any, source: Any, target: Any) -> list[int]:
    sizes = _shape(shape, "moveAxis")
    if sizes:
        size = sizes.pop(_axis(sizes, source, "moveAxis"))
        sizes.insert(need_integer(target, "moveAxis") % (len(sizes) + 1), size)
    return sizes


def permute_shape(shape: Any, permutation: Any) -> list[int]:
    sizes, order = _shape(shape, "permuteShape"), _shape(permutation, "permuteShape")
    if sorted(order) != list(range(len(sizes))):
        raise ExpressionError(f"permuteShape: {show(order)} is no permutation of {len(sizes)} axes")
    return [sizes[axis] for axis in order]


def reversed_axes(rank: Any) -> list[int]:
    return list(range(_count(rank, "reversedAxes")))[::-1]


def _broadcast(a: list[int], b: list[int], what: str) -> list[int]:
    rank = max(len(a), len(b))
    pairs = zip([1] * (rank - len(a)) + a, [1] * (rank - len(b)) + b, strict=True)
    result = []
    for left, right in pairs:
        if left != right and 1 not in (left, right):
            raise ExpressionError(f"{what}: {show(a)} and {show(b)} do not broadcast")
        result.append(right if left == 1 else left)
    return result


def broadcast_shape(a: Any, b: Any) -> list[int]:
    return _broadcast(_shape(a, "broadcastShape"), _shape(b, "broadcastShape"), "broadcastShape")


def broadcastable(a: Any, b: Any) -> bool:
    """Whether `a` broadcasts to `b` and leaves `b` as it is."""
    source, target = _shape(a, "broadcastable"), _shape(b, "broadcastable")
    if len(source) > len(target):
        return False
    tail = target[len(target) - len(source) :]
    return all(size in (1, wanted) for size, wanted in zip(source, tail, strict=True))


def matmul_shape(a: Any, b: Any) -> list[int]:
    left, right = _shape(a, "matmulShape"), _shape(b, "matmulShape")
    if not left or not right:
        raise ExpressionError("matmulShape: a scalar has no matrix product")
    rows_ = left[-2:-1]
    columns = right[-1:] if len(right) > 1 else []
    if left[-1] != (right[-2] if len(right) > 1 else right[0]):
        raise ExpressionError(f"matmulShape: {show(left)} and {show(right)} do not fit")
    return _broadcast(left[:-2], right[:-2], "matmulShape") + rows_ + columns


def same_shape(a: Any, b: Any) -> bool:
    return is_sequence(a) and is_sequence(b) and _shape(a, "sameShape") == _shape(b, "sameShape")


def _wrapped(axis: Any, rank: Any, what: str) -> int:
    rank = need_integer(rank, what)
    return need_integer(axis, what) % rank if rank else 0


def has_axis(axes: Any, axis: Any, rank: Any) -> bool:
    wanted = _wrapped(axis, rank, "hasAxis")
    return any(_wrapped(a, rank, "hasAxis") == wanted for a in need_list(axes, "hasAxis"))


def axis_value(values: Any, axes: Any, axis: Any, rank: Any, default: Any) -> Any:
    wanted = _wrapped(axis, rank, "axisValue")
    pairs = zip(need_list(axes, "axisValue"), need_list(values, "axisValue"), strict=False)
    return next((v for a, v in pairs if _wrapped(a, rank, "axisValue") == wanted), default)


def is_unique_int_list(values: Any, low: Any, high: Any, modulus: Any = 0) -> bool:
    """Whether the elements are whole numbers from `low` to `high`, both included, and differ.

    With a modulus they differ modulo it: as axes of a tensor of that rank.
    """
    if not is_sequence(values):
        return False
    low, high = need_number(low, "isUniqueIntList"), need_number(high, "isUniqueIntList")
    modulus = need_integer(modulus, "isUniqueIntList")
    if any(isinstance(v, bool) or not isinstance(v, int) or not low <= v <= high for v in values):
        return False
    return len({v % modulus if modulus else v for v in values}) == len(values)


def has(container: Any, key: Any) -> bool:
    return isinstance(container, Mapping) and isinstance(key, str) and key in container


def dtype_bytes(name: Any) -> int:
    if isinstance(name, str) and name in dtypes.TABLE:
        return dtypes.TABLE[name].bytes
    try:
        return dtypes.wgsl_bytes(need_text(name, "dtypeBytes"))
    except ValueError:
        raise ExpressionError(f"dtypeBytes: {show(name)} is no data type") from None


def onnx_dtype_code(name: Any) -> int:
    if need_text(name, "onnxDtypeCode") not in dtypes.ONNX_CODES:
        raise ExpressionError(f"onnxDtypeCode: {show(name)} is no ONNX data type")
    return dtypes.ONNX_CODES[name]


def pick(cases: Any, default: Any) -> Any:
    for case in need_list(cases, "pick"):
        if len(need_list(case, "pick")) != 2:
            raise ExpressionError(f"pick takes pairs of condition and value, got {show(case)}")
        if truthy(case[0]):
            return case[1]
    return default


HELPERS: dict[str, Callable[..., Any]] = {
    "ceil": ceil,
    "floor": floor,
    "min": minimum,
    "max": maximum,
    "pow": power,
    "ceilDiv": ceil_div,
    "pow2ceil": pow2ceil,
    "log2ceil": log2ceil,
    "numel": numel,
    "dim": dim,
    "outer": outer,
    "inner": inner,
    "rows": rows,
    "prefix": prefix,
    "suffix": suffix,
    "fill": fill,
    "moveAxis": move_axis,
    "permuteShape": permute_shape,
    "reversedAxes": reversed_axes,
    "broadcastShape": broadcast_shape,
    "broadcastable": broadcastable,
    "matmulShape": matmul_shape,
    "sameShape": same_shape,
    "hasAxis": has_axis,
    "axisValue": axis_value,
    "isUniqueIntList": is_unique_int_list,
    "has": has,
    "dtypeBytes": dtype_bytes,
    "onnxDtypeCode": onnx_dtype_code,
    "pick": pick,
}
"""By the format's name. `f16Ok` needs the device and joins them in the scope of a call."""
