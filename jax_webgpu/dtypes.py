"""The one table of data types: logical name, NumPy dtype, WGSL storage element, bytes, feature.

The storage rule is the manifest format's: a tensor of 8- or 16-bit integers or of bools takes one
32-bit word an element, int64 travels as an opaque pair of words.
"""

import functools
import math
import re
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class DType:
    """A logical data type and how it is laid out in a storage buffer."""

    name: str
    numpy: np.dtype
    wgsl: str
    """WGSL type of one array element."""
    storage: np.dtype
    """NumPy dtype of one array element on its way to or from a buffer."""
    feature: str | None = None
    """WebGPU feature without which WGSL cannot name the element."""

    @property
    def bytes(self) -> int:
        """Bytes that one element takes in a storage buffer."""
        return self.storage.itemsize


def _row(name: str, wgsl: str, storage: str, feature: str | None = None) -> DType:
    return DType(name, np.dtype(name), wgsl, np.dtype(storage), feature)


TABLE = {
    row.name: row
    for row in (
        _row("float32", "f32", "float32"),
        _row("float16", "f16", "float16", "shader-f16"),
        _row("int32", "i32", "int32"),
        _row("int16", "i32", "int32"),
        _row("int8", "i32", "int32"),
        _row("uint32", "u32", "uint32"),
        _row("uint8", "u32", "uint32"),
        _row("bool", "u32", "uint32"),
        _row("int64", "vec2<u32>", "int64"),
    )
}

# The 32-bit types that an int64 port may name as its `storage`.
NARROW = ("int32", "uint32")

# What a port's `storage` applies to. The format gives it to int64; a type variable may admit
# others beside it, and of these only whole numbers can be stored as such.
WHOLE = frozenset({"int64", "int32", "int16", "int8", "uint32", "uint8"})

# https://onnx.ai/onnx/api/mapping.html, TensorProto.DataType
ONNX_CODES = {
    name: code
    for code, name in enumerate(
        "float32 uint8 int8 uint16 int16 int32 int64 string bool float16 float64 uint32 uint64 "
        "complex64 complex128 bfloat16".split(),
        start=1,
    )
}


# Bits of the exponent and of the fraction, of the floats that are converted to one another.
_FIELDS = {"float32": (8, 23), "float16": (5, 10), "bfloat16": (8, 7)}


def nan_bits(bits: Any, source: str, target: str) -> Any:
    """The bits of NaNs of one float type as another's, signalling where they were.

    A conversion, of NumPy's, XLA's or the processor's, makes NaNs quiet or all the same; what an
    operator merely moves is to come back as it was.

    Args:
      bits: uint32, an array of NumPy's or JAX's; of elements that are no NaN nothing comes.
      source: float32, and `target` float16 or bfloat16; or the other way round.
      target: see `source`.

    Returns:
      The sign, and of the fraction the leading bits; if none of these is set it is a quiet NaN.
    """
    narrow = target if source == "float32" else source
    exponent, fraction = _FIELDS[narrow]
    dropped, most = 23 - fraction, (1 << fraction) - 1
    if source == narrow:
        return (bits & 0x8000) << 16 | 0x7F800000 | (bits & most) << dropped
    rest = bits >> dropped & most
    quiet = (rest == 0).astype(np.uint32) << (fraction - 1)
    return bits >> 16 & 0x8000 | ((1 << exponent) - 1) << fraction | rest | quiet


_SCALARS = {"f32": 4, "f16": 2, "i32": 4, "u32": 4, "f": 4, "h": 2, "i": 4, "u": 4}

# Types that WGSL can share with the host: https://www.w3.org/TR/WGSL/#host-shareable-types, the
# predeclared aliases (`vec4f`) among them. A struct is not: only its template knows its size.
_ELEMENT = re.compile(
    r"(?P<scalar>f32|f16|i32|u32)|atomic<(?P<atomic>i32|u32)>"
    r"|vec(?P<lanes>[234])(?:<(?P<of>f32|f16|i32|u32)>|(?P<alias>[fhiu]))"
    r"|mat(?P<columns>[234])x(?P<rows>[234])(?:<(?P<real>f32|f16)>|(?P<short>[fh]))"
    r"|array<(?P<inner>.+),(?P<count>[1-9][0-9]{0,9})u?>"
)

# `array<array<...>>` goes deeper by a level each eight characters.
_LONGEST = 128


@functools.lru_cache(maxsize=1024)
def wgsl_bytes(element: str) -> int:
    """Bytes from one array element of a WGSL type to the next; `ValueError` if it is none."""
    text = re.sub(r"\s", "", element)
    found = _ELEMENT.fullmatch(text) if len(text) <= _LONGEST else None
    if found is None:
        raise ValueError(f"{element[:80]!r} is not a WGSL scalar, vector, matrix or array")
    if found["count"]:
        return wgsl_bytes(found["inner"]) * int(found["count"])
    scalar = next(filter(None, found.group("scalar", "atomic", "of", "alias", "real", "short")))
    # Three lanes take the room of four, in a vector as in a matrix's column.
    sizes = (2 if found[lanes] == "2" else 4 for lanes in ("lanes", "rows") if found[lanes])
    return _SCALARS[scalar] * math.prod(sizes) * int(found["columns"] or 1)
