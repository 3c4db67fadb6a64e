"""Writes what is derived in these folders: each kernel's `test.json`, then its `metadata.json`.

    python examples/kernels/make.py

Run it after every change to a manifest or a template. The expected values are worked out here in
float64 by the ONNX operators' texts (https://onnx.ai/onnx/operators/), from inputs that are seeded
and rounded to the case's dtype; the result is rounded to it once. `metadata.json` holds the sha256
digest of each file of a folder in base64, as published folders do.
"""

import base64
import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

FOLDER = Path(__file__).parent

# Each kernel's contract: a caller's code breaks only where this number changes.
VERSION = 1

Document = dict[str, Any]

# Rounding f32 to f16 may go to either neighbour, which are 0.001 of a value apart.
_F16 = 1e-3


def _numbers(array: np.ndarray) -> list[Any]:
    """The elements as JSON has them, with the fewest digits that give the same value back."""

    def number(value: Any) -> Any:
        if not np.isfinite(value):
            return {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}[str(value)]
        real = float(str(value))
        is_short = real.is_integer() and abs(real) < 1e9 and (real or math.copysign(1, real) > 0)
        return int(value) if is_short or array.dtype.kind in "iu" else real

    return [number(value) for value in array.reshape(-1)]


def _array(array: np.ndarray) -> Document:
    data = {"kind": "values", "values": _numbers(array)}
    return {"dtype": str(array.dtype), "shape": list(array.shape), "data": data}


def _case(
    name: str,
    expected: Callable[..., Any],
    inputs: Mapping[str, np.ndarray],
    *,
    tunables: Mapping[str, Any] | None = None,
    dtype: str | None = None,
    tolerance: float | None = None,
    **attributes: Any,
) -> Document:
    """A case of a kernel whose output is `y`.

    Args:
      name: for people.
      expected: the operator, from float64 arrays (exact integers as they are) and attributes.
      inputs: by port.
      tunables: by name.
      dtype: the output's, by default that of the first input.
      tolerance: what the output may be off by, where not what its dtype has by default.
      **attributes: by name.
    """
    wide = [each.astype(np.float64) if each.dtype.kind == "f" else each for each in inputs.values()]
    with np.errstate(all="ignore"):  # some cases are there for their infinities and NaNs
        y = np.asarray(expected(*wide, **attributes)).astype(
            dtype or next(iter(inputs.values())).dtype
        )
    output = _array(y)
    if y.dtype.kind == "f":
        output["tolerance"] = _F16 if y.dtype == np.float16 else tolerance or 1e-5
        if np.isnan(y).any():
            output["allowNaN"] = True
    document: Document = {"name": name}
    if attributes:
        document["attributes"] = attributes
    if tunables:
        document["tunables"] = dict(tunables)
    document["inputs"] = {port: _array(each) for port, each in inputs.items()}
    document["outputs"] = {"y": output}
    return document


class _Draw:
    """Seeded arrays of short numbers."""

    def __init__(self, seed: int):
        self.generator = np.random.default_rng(seed)

    def __call__(self, *shape: int, dtype: str = "float32", scale: float = 2.0) -> np.ndarray:
        if np.dtype(dtype).kind in "iu":
            whole = np.iinfo(dtype)
            return self.generator.integers(whole.min, whole.max, shape, dtype, endpoint=True)
        return np.round(scale * self.generator.standard_normal(shape), 2).astype(dtype)


# ---- the operators ------------------------------------------------------------------------------

_erf = np.vectorize(math.erf, otypes=[np.float64])


def gelu(x: np.ndarray, approximate: str = "none") -> np.ndarray:
    if approximate == "tanh":
        return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return 0.5 * x * (1 + _erf(x / math.sqrt(2)))


def rms_norm(
    x: np.ndarray, weight: np.ndarray, axis: int = -1, epsilon: float = 1e-5
) -> np.ndarray:
    axes = tuple(range(axis % x.ndim, x.ndim))
    mean = np.sum(x * x, axis=axes, keepdims=True) / np.float64(math.prod(x.shape[axes[0] :]))
    return x / np.sqrt(mean + epsilon) * weight


def softmax(x: np.ndarray, axis: int = -1) -> np.ndarray:
    powers = np.exp(x - np.max(x, axis=axis, keepdims=True, initial=-np.inf))
    return powers / np.sum(powers, axis=axis, keepdims=True)


def cumsum(x: np.ndarray, axis: int = 0, exclusive: int = 0, reverse: int = 0) -> np.ndarray:
    x = np.flip(x, axis) if reverse else x
    if exclusive and x.shape[axis]:
        shifted = np.roll(x, 1, axis)
        np.moveaxis(shifted, axis, 0)[0] = 0
        x = shifted
    sums = np.cumsum(x, axis, x.dtype)
    return np.flip(sums, axis) if reverse else sums


# ---- the cases ----------------------------------------------------------------------------------


def _gelu_cases() -> Iterator[Document]:
    draw = _Draw(20)
    steep = [0.0, -0.0, 1e-30, -1e-6, 0.5, -0.5, 3.0, -3.0, -5.5, 9.0, -9.0, -13.9, -14.1, 40.0]
    far = [1e9, -1e9, 1e30, -1e30, 3e38, -3e38]
    for approximate in ("none", "tanh"):
        options: Document = {"approximate": approximate, "tolerance": 1e-6}

        def case(name: str, x: np.ndarray, options: Document = options) -> Document:
            return _case(f"{options['approximate']}, {name}", gelu, {"x": x}, **options)

        yield case("vec4", draw(3, 8))
        yield case("vec4, rank 4", draw(2, 1, 3, 4))
        yield case("scalar", draw(5, 3))
        yield case("one element of rank 0", draw())
        yield case("small and large", np.array(steep + far, np.float32))
        yield case("small and large, scalar", np.array(steep + far[:5], np.float32))
        yield case("float16 vec4", draw(4, 4, dtype="float16"))
        yield case("float16 scalar", draw(7, dtype="float16"))
        yield case("float16 large", np.array([65504, -65504, 11, -11, 6e-8], np.float16))
        yield case("NaN and infinity", np.array([np.nan, np.inf, 1], np.float32))
        yield case("empty", draw(2, 0, 3))


def _add_cases() -> Iterator[Document]:
    draw = _Draw(14)

    def add(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return a + b

    def case(name: str, a: np.ndarray, b: np.ndarray, **keywords: Any) -> Document:
        return _case(name, add, {"a": a, "b": b}, **keywords)

    for dtype in ("float32", "float16", "int32", "uint32"):
        shapes: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
            "same shape, vec4": ((2, 3, 4), (2, 3, 4)),
            "same shape, odd": ((3, 5), (3, 5)),
            "number on the right": ((2, 6), ()),
            "number on the left, odd": ((1,), (7,)),
            "row, vec4": ((3, 8), (8,)),
            "column": ((3, 4), (3, 1)),
            "outer": ((5, 1), (1, 3)),
        }
        for name, (a, b) in shapes.items():
            yield case(f"{dtype}, {name}", draw(*a, dtype=dtype), draw(*b, dtype=dtype))
    shapes = {
        "one element each, of other ranks": ((1, 1), (1, 1, 1)),
        "number of higher rank": ((1, 1, 1), (4,)),
        "axes in turn": ((2, 1, 3, 1), (1, 4, 1, 5)),
        "axes in turn, vec4": ((4, 1, 8), (1, 3, 8)),
        "inner axis, vec4": ((2, 3, 1, 4), (1, 3, 2, 4)),
        "missing axes": ((3, 1), (2, 4, 1, 5)),
        "rank 8": ((2, 1, 1, 2, 1, 3, 1, 2), (1, 2, 1, 1, 2, 3, 1, 1)),
        "rank 8, one side of rank 2": ((2, 1, 2, 1, 2, 1, 3, 4), (3, 1)),
        "empty": ((0,), (0,)),
        "empty and a number": ((2, 0), ()),
        "empty and a size of 1": ((0, 3), (1, 3)),
        "size of 1 and empty": ((2, 1, 3), (0, 1)),
    }
    for name, (a, b) in shapes.items():
        yield case(name, draw(*a), draw(*b))
    infinity, nan = np.inf, np.nan
    left = [infinity, infinity, -infinity, nan, 3e38, 1e30, -0.0, 1e-3]
    right = [1, -infinity, -1, 1, 1e38, -1e30, 0, 1e9]
    yield case("not finite and large", np.array(left, np.float32), np.array(right, np.float32))
    ends = np.array([2**31 - 1, -(2**31), -1], np.int32)
    yield case("int32 wraps around", ends, np.array([1, -1, 1], np.int32))
    yield case("uint32 wraps around", np.array([2**32 - 1, 0], np.uint32), np.array(2, np.uint32))


def _rms_norm_cases() -> Iterator[Document]:
    draw = _Draw(23)

    def case(name: str, x: np.ndarray, weight: np.ndarray, **keywords: Any) -> Document:
        inputs = {"x": x, "weight": weight}
        return _case(name, rms_norm, inputs, dtype=str(weight.dtype), **keywords)

    yield case("vec4", draw(3, 8), draw(8))
    yield case("scalar", draw(3, 7), draw(7))
    yield case("rows of a matrix, vec4", draw(2, 3, 4), draw(3, 4), axis=1)
    yield case("rows of a matrix", draw(2, 3, 5), draw(3, 5), axis=-2)
    yield case("all one row", draw(3, 5), draw(3, 5), axis=0)
    yield case("all one row, vec4", draw(6, 2), draw(6, 2), axis=-2)
    yield case("rank 1", draw(9), draw(9), axis=0)
    yield case("one weight", draw(2, 4), draw())
    yield case("weight of a size of 1", draw(2, 3, 4), draw(3, 1), axis=1)
    yield case("weight with an axis in front", draw(2, 8), draw(1, 8))
    yield case("weight of each element", draw(2, 8), draw(2, 8))
    yield case("weight along the rows' axis", draw(3, 2, 4), draw(3, 1, 1), axis=-1)
    yield case("longer than a workgroup", draw(2, 301), draw(301), axis=1)
    for size in (1, 6, 8):
        small = {"WORKGROUP_SIZE": size}
        yield case(f"workgroup of {size}", draw(2, 37), draw(37), tunables=small)
        yield case(f"workgroup of {size}, vec4", draw(2, 52), draw(52), tunables=small)
    yield case("epsilon", draw(2, 4), draw(4), epsilon=0.5)
    yield case("zeros", draw(2, 4, scale=0), draw(4))
    yield case("large", draw(2, 8) * np.float32(1e17), draw(8))
    yield case("small", draw(2, 8) * np.float32(1e-4), draw(8))
    for x, weight in (("float16", "float16"), ("float16", "float32"), ("float32", "float16")):
        yield case(f"{x} by {weight}, vec4", draw(2, 8, dtype=x), draw(8, dtype=weight))
        yield case(f"{x} by {weight}", draw(2, 5, dtype=x), draw(5, dtype=weight))
    yield case("float16 large", draw(3, 8, dtype="float16", scale=2e4), draw(8, dtype="float16"))
    yield case("no rows", draw(0, 4), draw(4))
    yield case("rows of nothing", draw(3, 0), draw(0))
    infinite = np.array([[np.nan, 1, 2, 3], [1, 2, 3, 4]], np.float32)
    yield case("NaN stays in its row", infinite, draw(4))


def _softmax_cases() -> Iterator[Document]:
    draw = _Draw(13)
    long = {"SHORT": 1}

    def case(name: str, x: np.ndarray, **keywords: Any) -> Document:
        return _case(name, softmax, {"x": x}, tolerance=1e-6, **keywords)

    yield case("line an invocation", draw(3, 5))
    yield case("line a workgroup", draw(3, 37))
    yield case("longer than a workgroup", draw(2, 300), axis=1)
    for size in (1, 6, 8):
        tunables = {"WORKGROUP_SIZE": size, **long}
        yield case(f"workgroup of {size}", draw(3, 29), tunables=tunables)
        yield case(
            f"invocations in groups of {size}", draw(7, 3), tunables={"WORKGROUP_SIZE": size}
        )
    for axis in (0, 1, 2, -1, -2, -3):
        yield case(f"axis {axis}", draw(2, 3, 4), axis=axis)
    yield case("long axis in the middle", draw(2, 35, 2), axis=1)
    yield case("long axis in front", draw(35, 3), axis=0)
    yield case("long lines side by side", draw(5, 40), axis=0)
    yield case("rank 1", draw(6), axis=0)
    yield case("lines of one", draw(4, 1))
    yield case("float16", draw(3, 5, dtype="float16"))
    yield case("float16, line a workgroup", draw(2, 40, dtype="float16"))
    largest = np.float32(3e38)
    infinity, nan = np.inf, np.nan
    special = np.array(
        [
            [1000, 1001, 999, -1000, 0],
            [largest, -largest, largest, 0, 1],
            [-largest, -largest, -largest, -largest, -largest],
            [-infinity, 1, 2, -infinity, 3],
            [-infinity, -infinity, -infinity, -infinity, 0],
            [-infinity, -infinity, -infinity, -infinity, -infinity],
            [1, nan, 2, 3, 4],
            [1, infinity, 2, 3, 4],
            [1e-30, 0, -1e-30, -0.0, 1e-20],
        ],
        np.float32,
    )
    yield case("large and not finite", special)
    yield case("large and not finite, line a workgroup", special, tunables=long)
    yield case("large and not finite, down", special.T, axis=0)
    yield case("float16 large", np.array([[65504, 65504, -65504], [6e4, 0, 1]], np.float16))
    yield case("no lines", draw(0, 3))
    yield case("lines of nothing", draw(3, 0))


def _matmul_cases() -> Iterator[Document]:
    draw = _Draw(9)

    def case(name: str, a: np.ndarray, b: np.ndarray, **keywords: Any) -> Document:
        return _case(name, np.matmul, {"a": a, "b": b}, **keywords)

    shapes: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
        "simple": ((3, 5), (5, 2)),
        "vector by vector": ((7,), (7,)),
        "vector by matrix": ((3,), (3, 5)),
        "matrix by vector": ((4, 3), (3,)),
        "matrices by vector": ((2, 3, 4), (4,)),
        "vector by matrices": ((3,), (2, 3, 4)),
        "batch": ((3, 2, 4), (3, 4, 5)),
        "batch by matrix": ((3, 2, 4), (4, 5)),
        "matrix by batch": ((2, 4), (3, 4, 2)),
        "batches in turn": ((2, 1, 2, 3), (1, 3, 3, 2)),
        "batches of other ranks": ((3, 2, 2), (2, 1, 2, 3)),
        "rank 6": ((2, 1, 1, 2, 2, 3), (3, 1, 1, 3, 2)),
        "row by column": ((1, 6), (6, 1)),
        "column by row": ((4, 1), (1, 3)),
        "depth of 0": ((2, 0), (0, 3)),
        "vectors of nothing": ((0,), (0,)),
        "no rows": ((0, 3), (3, 2)),
        "no columns": ((2, 3), (3, 0)),
        "no batch": ((0, 2, 3), (3, 2)),
        "tiled": ((33, 17), (17, 34)),
    }
    for name, (a, b) in shapes.items():
        yield case(name, draw(*a), draw(*b))
    # Tiles of 16 x 16 elements in place of 64 x 64.
    small = {"TILE": 4}
    shapes = {
        "one tile": ((16, 8), (8, 16)),
        "part of a tile": ((9, 5), (5, 10)),
        "several tiles": ((18, 6), (6, 35)),
        "batch": ((2, 8, 4), (2, 4, 9)),
        "batches in turn": ((2, 1, 8, 4), (3, 4, 8)),
    }
    for name, (a, b) in shapes.items():
        yield case(f"small tiles, {name}", draw(*a), draw(*b), tunables=small)
    for dtype in ("float16", "int32", "uint32"):
        yield case(f"{dtype}, simple", draw(2, 5, dtype=dtype), draw(5, 3, dtype=dtype))
        operands = draw(10, 6, dtype=dtype), draw(6, 9, dtype=dtype)
        yield case(f"{dtype}, tiled", *operands, tunables=small)
    yield case("workgroup of 6", draw(3, 4), draw(4, 5), tunables={"WORKGROUP_SIZE": 6})
    yield case("large", draw(2, 3) * np.float32(1e18), draw(3, 2) * np.float32(1e18))
    sixties = np.full((1, 64), 60, np.float16)
    yield case("float16, sum beyond its exact integers", sixties, np.ones((64, 1), np.float16))
    infinite = np.array([[1, np.inf], [np.nan, 0], [2, 1]], np.float32)
    yield case("not finite", infinite, np.array([[1, 2], [3, 4]], np.float32))
    left, right = draw(2, 8, 6), draw(2, 6, 8)
    left[:, 5, 0] = right[1, 0, 2] = np.inf
    yield case("infinities beside the edge of a tile", left, right, tunables=small)


def _scan_cases() -> Iterator[Document]:
    draw = _Draw(11)

    def case(name: str, x: np.ndarray, **keywords: Any) -> Document:
        return _case(name, cumsum, {"x": x}, **keywords)

    for length in (1, 2, 3, 4, 5, 8, 9, 17, 33, 65):
        yield case(f"length {length}", draw(length))
    for exclusive in (0, 1):
        for reverse in (0, 1):
            options = {"exclusive": exclusive, "reverse": reverse}
            name = f"exclusive {exclusive}, reverse {reverse}"
            yield case(f"{name}, axis in the middle", draw(2, 5, 3), axis=1, **options)
            for dtype in ("float32", "float16", "int32", "uint32"):
                x = draw(2, 7, dtype=dtype)
                yield case(f"{name}, {dtype}", x, axis=-1, **options)
            yield case(f"{name}, length 1", draw(1), **options)
    for axis in (0, 1, 2, -1, -2, -3):
        yield case(f"axis {axis}", draw(2, 3, 4), axis=axis)
    for size in (1, 6):
        yield case(f"workgroup of {size}", draw(3, 5), axis=1, tunables={"WORKGROUP_SIZE": size})
    ones = np.full(5, 2**30, np.int32)
    yield case("int32 wraps around", ones)
    yield case("float16, sum beyond its exact integers", np.full(40, 60, np.float16))
    yield case("large", np.array([1e30, 1e8, -1e30, 3e37], np.float32))
    infinite = np.array([1, np.inf, 2, -np.inf, 3], np.float32)
    yield case("not finite", infinite)
    yield case("not finite, exclusive", infinite, exclusive=1, reverse=1)
    yield case("empty", draw(0))
    yield case("no lines", draw(0, 3), axis=1)
    yield case("lines of nothing", draw(3, 0), axis=1)


CASES: Mapping[str, Callable[[], Iterator[Document]]] = {
    "add": _add_cases,
    "gelu": _gelu_cases,
    "matmul": _matmul_cases,
    "rms_norm": _rms_norm_cases,
    "scan": _scan_cases,
    "softmax": _softmax_cases,
}


# ---- the files ----------------------------------------------------------------------------------


def tests(name: str) -> bytes:
    """The `test.json` of a folder, a case a line."""
    cases = ",\n".join(json.dumps(case, separators=(",", ":")) for case in CASES[name]())
    return f'{{"cases": [\n{cases}\n]}}\n'.encode()


def metadata(folder: Path) -> bytes:
    """The `metadata.json` of a folder, of its other files as they are."""
    manifest = json.loads((folder / "manifest.json").read_bytes())
    files = sorted(path for path in folder.iterdir() if path.name != "metadata.json")
    digests = {
        path.name: base64.b64encode(hashlib.sha256(path.read_bytes()).digest()).decode()
        for path in files
    }
    document = {
        "name": f"{manifest['domain']}.{manifest['name']}",
        "version": VERSION,
        "digest": {"algorithm": "sha256", "files": digests},
    }
    return f"{json.dumps(document, indent=2)}\n".encode()


def main() -> None:
    """Writes both files of each folder."""
    for name in CASES:
        folder = FOLDER / name
        (folder / "test.json").write_bytes(tests(name))
        (folder / "metadata.json").write_bytes(metadata(folder))


if __name__ == "__main__":
    main()
