"""The one table of data types: logical name, NumPy dtype, WGSL storage element, bytes, feature.

The storage rule is the manifest format's: a tensor of 8- or 16-bit integers or of bools takes one
32-bit word an element, int64 travels as an opaque pair of words.
"""

from dataclasses import dataclass

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

WGSL_BYTES = {"f32": 4, "f16": 2, "i32": 4, "u32": 4}

# https://onnx.ai/onnx/api/mapping.html, TensorProto.DataType
ONNX_CODES = {
    name: code
    for code, name in enumerate(
        "float32 uint8 int8 uint16 int16 int32 int64 string bool float16 float64 uint32 uint64 "
        "complex64 complex128 bfloat16".split(),
        start=1,
    )
}


def wgsl_bytes(element: str) -> int:
    """Bytes of one array element of a WGSL scalar or vector type, padding of vec3 included."""
    if element in WGSL_BYTES:
        return WGSL_BYTES[element]
    head, _, rest = element.partition("<")
    scalar = rest.removesuffix(">")
    lanes = {"vec2": 2, "vec3": 4, "vec4": 4}.get(head)
    if lanes is None or scalar not in WGSL_BYTES or not rest.endswith(">"):
        raise ValueError(f"{element!r} is not a WGSL scalar or vector type of known size")
    return lanes * WGSL_BYTES[scalar]
