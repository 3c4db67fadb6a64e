"""Arguments as literals: arrays, and objects that nobody should pass.

A dict with the key ``array`` is an array, one with ``odd`` an object of the table below, one with
``traced`` a value that comes as a tracer. Anything else is itself.
"""

import array as arrays_of_python
import decimal
import fractions
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from hypothesis import strategies as st

FLOATS = ("float32", "float16", "bfloat16")
DTYPES = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
    *("int2", "int4", "uint2", "uint4", "float4_e2m1fn", "float8_e3m4", "float8_e4m3"),
    *("float8_e4m3b11fnuz", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2"),
    *("float8_e5m2fnuz", "float8_e8m0fnu", "key"),
)
WIDE = ("int64", "uint64", "float64", "complex128")

# The values of an array of floats: of moderate size, exact ones, any bits at all.
FILLS = ("normal", "eighths", "bits", "zeros")
FORMS = ("jax", "numpy", "fortran", "strided", "readonly", "swapped")


def described(
    shape: Any, dtype: Any, fill: Any = None, form: Any = None
) -> st.SearchStrategy[dict[str, Any]]:
    """Strategies, or the things themselves, to a strategy of descriptions of arrays."""

    def strategy(value: Any) -> Any:
        return value if isinstance(value, st.SearchStrategy) else st.just(value)

    return st.fixed_dictionaries(
        {
            "array": strategy(dtype),
            "shape": strategy(shape),
            "fill": st.sampled_from(FILLS) if fill is None else strategy(fill),
            "form": st.sampled_from(("jax", *FORMS)) if form is None else strategy(form),
            "seed": st.integers(0, 99),
        }
    )


def _values(description: dict[str, Any]) -> np.ndarray:
    """The values of a description, as NumPy has them."""
    generator = np.random.default_rng(description["seed"])
    shape, name = tuple(description["shape"]), description["array"]
    dtype = jnp.dtype("uint32" if name == "key" else name)
    if "positions" in description:
        values = generator.integers(0, max(1, description["positions"]), shape).astype(dtype)
        for at, value in description.get("at", []):
            if values.size:
                values.reshape(-1)[at % values.size] = np.int64(value).astype(dtype)
        return values
    if description["fill"] == "bits":
        small = dtype.name in ("bool", "int2", "int4", "uint2", "uint4", "float4_e2m1fn")
        if small:
            low, high = (-2 if dtype.name.startswith("int") else 0), 2
            return generator.integers(low, high, shape).astype(dtype)
        count = int(np.prod(shape)) * dtype.itemsize
        return np.frombuffer(generator.bytes(count), np.uint8).view(dtype).reshape(shape)
    if description["fill"] == "zeros":
        return np.zeros(shape, dtype)
    if description["fill"] == "eighths":
        values = (2 * generator.integers(-4, 4, shape) + 1) / 8
    else:
        values = 3 * generator.standard_normal(shape)
    if dtype.kind in "iu" or "int" in dtype.name:
        values = np.abs(8 * values) % 2
    with np.errstate(all="ignore"):
        return values.astype(dtype)


def make(description: dict[str, Any]) -> Any:
    """The array of a description."""
    values = _values(description)
    if description["array"] == "key":
        return jax.random.wrap_key_data(np.stack([values, values], -1))
    match description["form"]:
        case "jax":
            return jnp.asarray(values)
        case "fortran":
            return np.asfortranarray(values)
        case "strided" if values.ndim:
            doubled = np.repeat(values, 2, axis=-1)
            return doubled[..., ::2]
        case "readonly":
            values = np.array(values)
            values.flags.writeable = False
        case "swapped" if values.dtype.kind in "iuf" and values.dtype.isbuiltin == 1:
            return values.astype(values.dtype.newbyteorder())
    return values


class _Index:
    def __index__(self) -> int:
        return 1


class _Like:
    """Has what an array has, and is none."""

    shape, dtype, ndim, size = (2, 4), np.dtype("float32"), 2, 8


class _Array:
    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return np.zeros((2, 4), dtype or np.float32)


class _Subclass(np.ndarray):
    pass


ODD: dict[str, Callable[[], Any]] = {
    "object": object,
    "index": _Index,
    "like an array": _Like,
    "with __array__": _Array,
    "generator": lambda: (number for number in (1, 2)),
    "range": lambda: range(3),
    "set": lambda: {1, 2},
    "dict": lambda: {"a": 1},
    "bytes": lambda: b"12",
    "bytearray": lambda: bytearray(b"12"),
    "memoryview": lambda: memoryview(b"12345678").cast("f"),
    "array of Python": lambda: arrays_of_python.array("f", [1, 2]),
    "slice": lambda: slice(1, 2),
    "ellipsis": lambda: ...,
    "not implemented": lambda: NotImplemented,
    "function": lambda: len,
    "type": lambda: int,
    "module": lambda: types,
    "nan": lambda: float("nan"),
    "infinity": lambda: float("inf"),
    "complex": lambda: 1 + 2j,
    "fraction": lambda: fractions.Fraction(4, 2),
    "decimal": lambda: decimal.Decimal(2),
    "huge": lambda: 10**400,
    "int64": lambda: np.int64(2),
    "uint8": lambda: np.uint8(2),
    "float64": lambda: np.float64(2),
    "bfloat16": lambda: ml_dtypes.bfloat16(2),
    "bool_": lambda: np.bool_(True),
    "array of rank 0": lambda: np.asarray(2),
    "JAX array of rank 0": lambda: jnp.asarray(2),
    "array of ints": lambda: np.asarray([1, 2]),
    "JAX array of ints": lambda: jnp.asarray([1, 2]),
    "array of objects": lambda: np.asarray([[object()] * 4] * 2),
    "array of strings": lambda: np.asarray([["a"] * 4] * 2),
    "array of dates": lambda: np.zeros((2, 4), "datetime64[s]"),
    "structured array": lambda: np.zeros((2, 4), [("a", "f4"), ("b", "i4")]),
    "masked array": lambda: np.ma.masked_equal(np.zeros((2, 4), np.float32), 0),
    "matrix": lambda: np.zeros((2, 4), np.float32).view(_Subclass),
    "long double": lambda: np.zeros((2, 4), np.longdouble),
    "shape": lambda: jax.ShapeDtypeStruct((2, 4), jnp.float32),
    "list of arrays": lambda: [np.zeros(4, np.float32)] * 2,
    "list of floats": lambda: [[0.5] * 4] * 2,
    "none in a list": lambda: [None],
    "dtype": lambda: np.dtype("float32"),
}


def odd() -> st.SearchStrategy[Any]:
    """Anything that one might pass, and should not."""
    return (
        st.sampled_from(sorted(ODD)).map(lambda name: {"odd": name})
        | st.sampled_from([None, True, False, 0, 1, -1, 2, 3, 2**31, 2**63, -(2**63), 1.5, 2.0])
        | st.text(max_size=4)
        | st.lists(st.integers(-2, 5) | st.just(1.5), max_size=4)
        | described(st.lists(st.sampled_from([0, 1, 2, 3, 8]), max_size=6), st.sampled_from(DTYPES))
    )


def decode(value: Any) -> Any:
    """The object that a literal describes; what is traced inside is its own description."""
    match value:
        case {"array": _}:
            return make(value)
        case {"odd": name}:
            return ODD[name]()
        case list():
            return [decode(each) for each in value]
        case tuple():
            return tuple(decode(each) for each in value)
    return value
