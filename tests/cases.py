"""One table of calls: for each, the variant that its manifest must choose, and seeded inputs.

The variants were worked out by hand, from the ``when`` lists and priorities in ``specs/``.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np


@dataclass(frozen=True)
class RotaryCase:
    """A call of ``rotary_embedding``.

    With ``cache_rows`` it has position ids and caches of that many rows; without, the caches have
    a row for each token of each batch.
    """

    variant: str | None  # None: drawn by a property test, whatever its variant
    rank: int
    batch: int
    heads: int
    sequence: int
    head_size: int
    rotary_embedding_dim: int
    interleaved: bool
    dtype: str
    cache_rows: int | None

    spec: ClassVar[str] = "ai.onnx.RotaryEmbedding"

    @property
    def id(self):
        sizes = f"{self.batch}x{self.heads}x{self.sequence}x{self.head_size}"
        order = "interleaved" if self.interleaved else "halves"
        return f"{self.variant}-{sizes}-dim{self.rotary_embedding_dim}-{order}-{self.dtype}"

    @property
    def shapes(self):
        """By the names of the spec's ports."""
        batch, sequence = self.batch, self.sequence
        half = (self.rotary_embedding_dim or self.head_size) // 2
        x = (batch, self.heads, sequence, self.head_size)
        if self.rank == 3:
            x = (batch, sequence, self.heads * self.head_size)
        if self.cache_rows is None:
            return {"x": x, "cos": (batch, sequence, half), "sin": (batch, sequence, half)}
        cache = (self.cache_rows, half)
        return {"x": x, "cos": cache, "sin": cache, "positionIds": (batch, sequence)}

    @property
    def attributes(self):
        """The spec's attributes, as numbers."""
        given = {
            "interleaved": int(self.interleaved),
            "rotary_embedding_dim": self.rotary_embedding_dim,
        }
        return given | ({"num_heads": self.heads} if self.rank == 3 else {})

    @property
    def keywords(self):
        """The keyword arguments of ``rotary_embedding``."""
        return self.attributes | {"interleaved": self.interleaved}

    def inputs(self):
        """The arrays of the call, in order."""
        rng = np.random.default_rng(23)
        shapes = self.shapes
        tokens = rng.standard_normal((self.batch, self.sequence, self.heads, self.head_size))
        tokens = tokens.astype(self.dtype)
        if self.rotary_embedding_dim:  # what is only copied may have any bits
            tail = tokens[..., self.rotary_embedding_dim :]
            tail[...] = any_bits(rng, tail.shape, self.dtype)
        if self.rank == 4:
            x = np.ascontiguousarray(tokens.transpose(0, 2, 1, 3))
        else:
            x = tokens.reshape(shapes["x"])
        # Not cosines and sines of one angle: a kernel may not rely on their squares' sum.
        cos, sin = (rng.uniform(-1.5, 1.5, shapes["cos"]).astype(self.dtype) for _ in range(2))
        if self.cache_rows is None:
            return x, cos, sin
        return x, cos, sin, self._position_ids(rng)

    def _position_ids(self, rng):
        """Each batch starts one further along a shuffle of the rows that starts at the last."""
        shuffled = np.concatenate([[self.cache_rows - 1], rng.permutation(self.cache_rows - 1)])
        start, step = np.ogrid[: self.batch, : self.sequence]
        return shuffled[(start + step) % self.cache_rows].astype(np.int32)


@dataclass(frozen=True)
class SplitCase:
    """A call of ``split``, by the sizes of its outputs or by their number."""

    variant: str | None  # None: drawn by a property test, whatever its variant
    shape: tuple[int, ...]
    axis: int
    sizes: tuple[int, ...]
    dtype: str
    by_number: bool = False

    spec: ClassVar[str] = "ai.onnx.Split"

    @property
    def id(self):
        shape, sizes = "x".join(map(str, self.shape)), "+".join(map(str, self.sizes))
        asked = "number" if self.by_number else "sizes"
        return f"{self.variant}-{shape}-axis{self.axis}-{sizes}-{self.dtype}-by_{asked}"

    @property
    def shapes(self):
        """By the names of the spec's ports, the outputs among them: they follow from the call."""
        axis = self.axis % len(self.shape)
        before, after = self.shape[:axis], self.shape[axis + 1 :]
        outputs = {f"y{i}": (*before, size, *after) for i, size in enumerate(self.sizes)}
        return {"input": self.shape} | outputs

    @property
    def attributes(self):
        """The spec's attributes, as numbers."""
        number = {"num_outputs": len(self.sizes)} if self.by_number else {}
        return {"axis": self.axis} | number

    @property
    def keywords(self):
        """The keyword arguments of ``split``."""
        return self.attributes | ({} if self.by_number else {"split": self.sizes})

    def inputs(self):
        """The arrays of the call: one."""
        return (any_bits(np.random.default_rng(18), self.shape, self.dtype),)


# Negative zero, the smallest and the largest subnormal number, both infinities, and three NaNs: a
# quiet one of each sign and a signalling one.
_FLOAT_BITS = {
    "float32": "80000000 00000001 807fffff 7f800000 ff800000 7fc12345 ffc00001 7f812345",
    "float16": "8000 0001 83ff 7c00 fc00 7e15 fe01 7d15",
}


def any_bits(rng, shape, dtype):
    """An array of random bits, where the values that a copy could spoil have their places."""
    dtype = np.dtype(dtype)
    if dtype.kind == "b":
        return rng.integers(0, 2, shape).astype(bool)
    if dtype.kind == "f":
        words = [int(word, 16) for word in _FLOAT_BITS[dtype.name].split()]
        special = np.array(words, f"u{dtype.itemsize}").view(dtype)
    else:
        special = np.array([np.iinfo(dtype).min, np.iinfo(dtype).max], dtype)
    size = int(np.prod(shape))
    array = np.frombuffer(rng.bytes(size * dtype.itemsize), dtype).copy()
    places = rng.permutation(size)[: len(special)]
    array[places] = special[: len(places)]
    return array.reshape(shape)


# The first part of a variant's id, the rank of x, and the rows of the caches.
_FAMILIES = (
    ("rank3_cache2_pos", 3, 13),
    ("rank3_cache3", 3, None),
    ("rank4_cache2_pos", 4, 13),
    ("rank4_cache3", 4, None),
)

# The rest of the id, which depends on the head size and the width w of the caches alone:
# `_output_vec4` where the heads are whole vec4s, w is not, and the pairs are halves; `_quad` where
# the heads are whole pairs of vec4s and w is whole vec4s; else `` (a pair an invocation).
_ROTARY_ROWS = (
    # rest, (batch, heads, sequence, head size), rotary_embedding_dim, interleaved, dtype
    ("", (2, 3, 5, 2), 0, False, "float32"),
    ("", (3, 2, 4, 6), 0, False, "float16"),
    ("", (2, 5, 3, 12), 8, False, "float32"),
    ("", (1, 3, 7, 20), 16, False, "float16"),
    ("", (2, 3, 5, 4), 0, True, "float32"),
    ("", (3, 1, 4, 10), 0, True, "float16"),
    ("", (2, 2, 7, 16), 4, True, "float32"),
    ("", (2, 3, 1, 64), 20, True, "float16"),
    ("_output_vec4", (2, 3, 5, 4), 0, False, "float32"),
    ("_output_vec4", (3, 2, 4, 12), 0, False, "float16"),
    ("_output_vec4", (2, 5, 7, 80), 20, False, "float32"),
    ("_output_vec4", (2, 3, 1, 8), 4, False, "float16"),
    ("_output_vec4", (1, 4, 3, 16), 6, False, "float32"),
    ("_output_vec4", (3, 2, 5, 20), 0, False, "float16"),
    ("_quad", (3, 2, 5, 8), 0, False, "float32"),
    ("_quad", (2, 5, 9, 128), 0, False, "float16"),
    ("_quad", (2, 3, 4, 64), 32, False, "float32"),
    ("_quad", (1, 5, 6, 16), 8, False, "float16"),
    ("_quad", (2, 3, 7, 24), 0, True, "float32"),
    ("_quad", (3, 2, 5, 96), 0, True, "float16"),
    ("_quad", (2, 1, 6, 80), 16, True, "float32"),
    ("_quad", (2, 4, 3, 128), 64, True, "float16"),
    ("_quad", (2, 3, 5, 8), 8, True, "float32"),
)

ROTARY_CASES = tuple(
    RotaryCase(family + rest, rank, *sizes, rotary_dim, interleaved, dtype, cache_rows)
    for family, rank, cache_rows in _FAMILIES
    for rest, sizes, rotary_dim, interleaved, dtype in _ROTARY_ROWS
)

SPLIT_DTYPES = (
    *("float32", "float16", "uint32", "int32", "int16", "uint8", "int8", "bool"),
    "int64",  # two words an element, so never in a vec4
)

SPLIT_CASES = (
    # A run is the elements of an output that lie together: its size along the axis, times all
    # that comes after. The `block_vec4` variants need runs of whole vec4s.
    SplitCase("one_output_copy", (9,), 0, (9,), "float16", by_number=True),
    SplitCase("one_output_copy", (3, 5, 7), -2, (5,), "bool"),
    SplitCase("one_output_copy", (2, 3, 1, 2, 2, 5), 5, (5,), "int64"),
    SplitCase("one_output_copy", (3, 0), 1, (0,), "int8"),
    SplitCase("two_outputs_block_vec4", (8,), 0, (4, 4), "float32", by_number=True),
    SplitCase("two_outputs_block_vec4", (3, 24), 1, (8, 16), "float16"),
    SplitCase("two_outputs_block_vec4", (7, 4), 0, (4, 3), "int16", by_number=True),
    SplitCase("two_outputs_block_vec4", (2, 12, 3), -2, (4, 8), "uint8"),
    SplitCase("two_outputs_block_vec4", (3, 8), -1, (0, 8), "int32"),
    SplitCase("two_outputs_block_vec4", (2, 1, 3, 5, 2, 2), 3, (3, 2), "float32"),
    SplitCase("two_outputs", (7,), 0, (4, 3), "uint32", by_number=True),
    SplitCase("two_outputs", (3, 8), 1, (4, 4), "int64", by_number=True),
    SplitCase("two_outputs", (2, 3, 5), -1, (5, 0), "float16"),
    SplitCase("two_outputs", (4, 5, 3), -2, (1, 4), "bool"),
    SplitCase("two_outputs", (2, 0, 7), 2, (3, 4), "int8"),
    SplitCase("three_outputs_block_vec4", (2, 24), 1, (4, 8, 12), "float32"),
    SplitCase("three_outputs_block_vec4", (10, 4), 0, (4, 4, 2), "int8", by_number=True),
    SplitCase("three_outputs_block_vec4", (3, 12), -1, (0, 8, 4), "uint32"),
    SplitCase("three_outputs_block_vec4", (3, 2, 6, 1, 2), 2, (2, 2, 2), "float16", by_number=True),
    # Some run is not whole vec4s, no output is empty, and the largest has at least 16 elements.
    SplitCase("three_outputs_block_scalar_x4", (3, 20), 1, (7, 6, 7), "float32"),
    SplitCase("three_outputs_block_scalar_x4", (2, 12), -1, (8, 3, 1), "uint8"),
    SplitCase("three_outputs_block_scalar_x4", (7, 6), 0, (3, 3, 1), "int16", by_number=True),
    SplitCase("three_outputs_block_scalar_x4", (2, 1, 3, 9, 1, 3), -3, (1, 2, 6), "bool"),
    SplitCase("three_outputs", (7, 5), 0, (3, 3, 1), "float32", by_number=True),
    SplitCase("three_outputs", (4, 20), 1, (0, 13, 7), "float16"),
    SplitCase("three_outputs", (3, 2, 24), -1, (12, 4, 8), "int64"),
    SplitCase("three_outputs", (2, 3, 0, 5), -1, (1, 1, 3), "int32"),
    SplitCase("four_outputs_block_vec4", (40,), 0, (4, 16, 8, 12), "float32"),
    SplitCase("four_outputs_block_vec4", (5, 4), 0, (2, 2, 1, 0), "int32", by_number=True),
    SplitCase("four_outputs_block_vec4", (2, 3, 9, 4), -2, (1, 0, 6, 2), "float16"),
    SplitCase("four_outputs_block_vec4", (3, 1, 2, 20, 1), 3, (4, 8, 4, 4), "bool"),
    SplitCase("four_outputs", (5, 3), 0, (2, 2, 1, 0), "uint32", by_number=True),
    SplitCase("four_outputs", (3, 11), -1, (4, 4, 1, 2), "float32"),
    SplitCase("four_outputs", (2, 3, 16), 2, (4, 4, 4, 4), "int64", by_number=True),
    SplitCase("four_outputs", (1, 2, 3, 1, 7, 2), -2, (0, 2, 1, 4), "int16"),
    SplitCase("five_outputs", (12, 5), 0, (3, 3, 3, 3, 0), "float32", by_number=True),
    SplitCase("five_outputs", (2, 3, 20), -1, (4, 1, 0, 8, 7), "float16"),
    SplitCase("five_outputs", (3, 20, 4), 1, (4, 4, 4, 4, 4), "int8", by_number=True),
    SplitCase("five_outputs", (2, 1, 13, 3), -2, (5, 1, 2, 4, 1), "int64"),
    SplitCase("five_outputs", (2, 2, 3, 1, 9), 4, (1, 2, 3, 2, 1), "uint8"),
    *(SplitCase("two_outputs", (3, 11), 1, (4, 7), dtype) for dtype in SPLIT_DTYPES),
    *(
        SplitCase("two_outputs_block_vec4", (3, 20), 1, (12, 8), dtype)
        for dtype in SPLIT_DTYPES
        if dtype != "int64"
    ),
)

CASES = ROTARY_CASES + SPLIT_CASES

# Small data that takes more than 65,535 workgroups when a workgroup is one invocation: the second
# row of a 2-D dispatch, or the second and third turn of a grid-stride loop.
LARGE_CASES = (
    RotaryCase("rank4_cache2_pos_quad", 4, 2, 4, 600, 128, 0, True, "float32", 701),
    RotaryCase("rank3_cache3_quad", 3, 2, 5, 512, 128, 64, False, "float16", None),
    RotaryCase("rank3_cache2_pos", 3, 2, 3, 2500, 10, 0, False, "float16", 3001),
    RotaryCase("rank4_cache3", 4, 3, 2, 2300, 12, 8, True, "float32", None),
    RotaryCase("rank4_cache2_pos_output_vec4", 4, 2, 3, 4000, 12, 0, False, "float32", 4001),
    RotaryCase("rank3_cache3_output_vec4", 3, 2, 7, 1100, 20, 12, False, "float16", None),
    SplitCase("one_output_copy", (3, 50_001), 1, (50_001,), "float32"),
    SplitCase("two_outputs_block_vec4", (7, 60_000), 1, (20_000, 40_000), "float32"),
    SplitCase("three_outputs_block_vec4", (3, 101_000), 1, (100_000, 600, 400), "uint32"),
    SplitCase("three_outputs_block_scalar_x4", (3, 100_003), 1, (90_007, 9_993, 3), "float32"),
    SplitCase("four_outputs_block_vec4", (4, 100_000), 1, (72_000, 4, 27_992, 4), "float16"),
    SplitCase("two_outputs", (3, 50_000), 1, (30_001, 19_999), "int16"),
    SplitCase("five_outputs", (70_007,), 0, (3, 70_000, 0, 1, 3), "bool"),
)
