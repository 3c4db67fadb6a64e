"""The one table of calls that are measured. `tests/test_benchmarks.py` runs it scaled down.

A case is a row of the tests' own kinds of table, `RotaryCase` and `SplitCase`, by a name. Their
inputs are random and seeded, and no positions are in order.
"""

import fnmatch
import functools
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import numpy as np

import jax_webgpu

# Before this folder, which has a `cases` too where a script of it runs.
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import oracle
from cases import RotaryCase, SplitCase

MIB = 1 << 20

# So many elements of a result are checked; of a larger one, so many of tokens drawn by chance.
_MOST_CHECKED = 1 << 22


@dataclass(frozen=True)
class Case:
    """One call.

    Attributes:
      name: for people and for `--only`.
      call: its sizes, attributes and inputs.
      large: it needs gigabytes of memory.
    """

    name: str
    call: RotaryCase | SplitCase
    large: bool = False

    @property
    def rotary(self):
        """Whether it is a call of `rotary_embedding`."""
        return isinstance(self.call, RotaryCase)

    @property
    def function(self):
        """The public function, of the arrays alone."""
        function = jax_webgpu.rotary_embedding if self.rotary else jax_webgpu.split
        return functools.partial(function, **self.call.keywords)

    @functools.cached_property
    def inputs(self):
        """The arrays of the call."""
        call = self.call
        if self.rotary or math.prod(call.shape) < MIB:
            return call.inputs()
        # Of many elements `any_bits` takes long.
        size = math.prod(call.shape) * np.dtype(call.dtype).itemsize
        bits = np.frombuffer(np.random.default_rng(18).bytes(size), np.uint8)
        bits = bits & 1 if call.dtype == "bool" else bits
        return (bits.view(call.dtype).reshape(call.shape),)

    @functools.cached_property
    def jax_inputs(self):
        """The same on JAX's CPU device."""
        on = jax.local_devices(backend="cpu")[0]
        return jax.block_until_ready(jax.device_put(self.inputs, on))

    @property
    def outputs(self):
        """Shape and dtype of each result."""
        shapes = self.call.shapes
        wanted = ["x"] if self.rotary else [name for name in shapes if name != "input"]
        return [(shapes[name], np.dtype(self.call.dtype)) for name in wanted]

    @property
    def touched(self):
        """Bytes that any implementation must read and write, each once.

        Of the caches those are the rows that some position names.
        """
        x = nbytes(self.outputs)
        if not self.rotary:
            return 2 * x
        cos = self.call.shapes["cos"]
        row = cos[-1] * np.dtype(self.call.dtype).itemsize
        if self.call.cache_rows is None:
            return 2 * x + 2 * math.prod(cos[:-1]) * row
        tokens = self.call.batch * self.call.sequence
        # Each batch starts one further along than the one before.
        rows = min(self.call.cache_rows, self.call.sequence + self.call.batch - 1)
        return 2 * x + 2 * rows * row + tokens * 4

    @property
    def whole(self):
        """Bytes of all inputs and outputs."""
        return sum(array.nbytes for array in self.inputs) + nbytes(self.outputs)

    def small(self):
        """The same kind of call with few elements."""
        call = self.call
        if self.rotary:
            rows = call.cache_rows and min(call.cache_rows, 11)
            sizes = {"heads": min(call.heads, 3), "sequence": min(call.sequence, 5)}
            return replace(self, call=replace(call, cache_rows=rows, **sizes), large=False)
        # Rows and parts shrink in proportion, so that what is whole vec4s stays so.
        axis = call.axis % len(call.shape)
        shape = [min(size, 3) for size in call.shape]
        parts = call.sizes if max(call.sizes) <= 16 else [size // 16 for size in call.sizes]
        shape[axis] = sum(parts)
        if axis != len(shape) - 1:
            shape[-1] = min(call.shape[-1], 8)
        return replace(
            self, call=replace(call, shape=tuple(shape), sizes=tuple(parts)), large=False
        )

    def scaled(self, mib):
        """The same call with a batch or with rows for about so many MiB of `touched`."""
        if self.rotary:
            one = replace(self, call=replace(self.call, batch=1))
            batch = max(1, round(mib * MIB / one.touched))
            return replace(self, call=replace(self.call, batch=batch))
        axis = self.call.axis % len(self.call.shape)
        rest = self.call.shape[axis:]
        size = math.prod(rest) * np.dtype(self.call.dtype).itemsize
        rows = max(1, round(mib * MIB / 2 / size))
        return replace(self, call=replace(self.call, shape=(rows, *rest), axis=1))

    def check(self, results: Sequence[np.ndarray]):
        """Raises `AssertionError` where results are not the oracle's.

        A rotation may be computed in the case's own dtype, as some of the subjects do: two
        products and a sum, each rounded.
        """
        if not self.rotary:
            oracle.assert_split(tuple(results), *self.inputs, self.call.sizes, self.call.axis)
            return
        (y,) = results
        assert (y.shape, y.dtype) == (self.outputs[0][0], self.outputs[0][1]), (y.shape, y.dtype)
        tokens, true, bound = self._expected
        with np.errstate(invalid="ignore"):  # the part that is copied may be anything
            actual = self._at(y, tokens).astype(np.float64)
            right = abs(actual - true) <= bound
        right |= (actual == true) | (np.isnan(actual) & np.isnan(true))
        wrong = np.argwhere(~right)
        assert not len(wrong), (
            f"{len(wrong)} of {right.size} are wrong; the first, at {tuple(wrong[0].tolist())}, "
            f"is {actual[tuple(wrong[0])]}, expected {true[tuple(wrong[0])]}"
        )

    @functools.cached_property
    def _expected(self):
        """Tokens, the true results there, and how far from these a result may be."""
        x, cos, sin, *positions = self.inputs
        tokens = np.arange(self.call.sequence)
        most = max(1, _MOST_CHECKED * self.call.sequence // x.size)
        if len(tokens) > most:
            tokens = np.sort(np.random.default_rng(0).choice(tokens, most, replace=False))
        caches = [cos, sin] if positions else [cos[:, tokens], sin[:, tokens]]
        positions = [each[:, tokens] for each in positions]
        part = self._at(x, tokens)
        with np.errstate(invalid="ignore"):
            true, bound = oracle.rotary_embedding(part, *caches, *positions, **self.call.keywords)
        kind = np.finfo(x.dtype) if x.dtype.kind == "f" else _BFLOAT16
        # The oracle's is 2**-23 of the products.
        return tokens, true, bound * 2**24 * float(kind.eps) + float(kind.tiny) * (bound > 0)

    def _at(self, a, tokens):
        return a[:, :, tokens] if a.ndim == 4 else a[:, tokens]


class _BFLOAT16:
    eps, tiny = 2.0**-7, 2.0**-126


def nbytes(tensors):
    """Bytes of arrays by shape and dtype."""
    return sum(math.prod(shape) * dtype.itemsize for shape, dtype in tensors)


def _rotary(name, batch, heads, sequence, size, rows, *, rank=4, dim=0, dtype="float32", **flags):
    interleaved = flags.get("interleaved", False)
    call = RotaryCase(None, rank, batch, heads, sequence, size, dim, interleaved, dtype, rows)
    return Case(name, call, flags.get("large", False))


def _split(name, shape, axis, sizes, dtype="float32", large=False):
    return Case(name, SplitCase(None, shape, axis, sizes, dtype), large)


CASES = (
    _rotary("rotary-tiny", 1, 8, 1, 64, 16),
    _rotary("decode-1-of-128", 1, 32, 1, 128, 128),
    _rotary("decode-1-of-131072", 1, 32, 1, 128, 131_072),
    _rotary("decode-8-of-128", 8, 32, 1, 128, 128),
    _rotary("decode-8-of-131072", 8, 32, 1, 128, 131_072),
    _rotary("rotary", 1, 32, 1024, 128, 1024),
    _rotary("rotary-rank3", 1, 32, 1024, 128, 1024, rank=3),
    _rotary("rotary-no-positions", 1, 32, 1024, 128, None),
    _rotary("rotary-interleaved", 1, 32, 1024, 128, 1024, interleaved=True),
    # Phi-2's heads, of which less than half is rotated.
    _rotary("rotary-partial", 1, 32, 1024, 80, 1024, dim=32),
    # GPT-J's.
    _rotary("rotary-partial-interleaved", 1, 16, 1024, 256, 1024, dim=64, interleaved=True),
    # Heads of whole vec4s whose halves are not, OpenLLaMA-3B's; and of no whole vec4s.
    _rotary("rotary-100", 1, 32, 1024, 100, 1024),
    _rotary("rotary-90", 1, 32, 1024, 90, 1024),
    _rotary("rotary-90-interleaved", 1, 32, 1024, 90, 1024, interleaved=True),
    _rotary("rotary-float16", 1, 32, 1024, 128, 1024, dtype="float16"),
    _rotary("rotary-bfloat16", 1, 32, 1024, 128, 1024, dtype="bfloat16"),
    _rotary("rotary-large", 4, 32, 4096, 128, 4096, large=True),
    _split("split-tiny", (2, 12), 1, (4, 4, 4)),
    _split("split-3", (1024, 3072), 1, (1024, 1024, 1024)),
    _split("split-5-uneven", (1024, 2304), 1, (256, 512, 768, 512, 256)),
    _split("split-3-odd", (1024, 3072), 1, (1023, 1022, 1027)),
    _split("split-12", (1024, 3072), 1, (256,) * 12),
    _split("split-first-axis", (3072, 1024), 0, (1024, 1024, 1024)),
    _split("split-3-float16", (1024, 3072), 1, (1024, 1024, 1024), "float16"),
    _split("split-3-int8", (1024, 3072), 1, (1024, 1024, 1024), "int8"),
    _split("split-3-bool", (1024, 3072), 1, (1024, 1024, 1024), "bool"),
    _split("split-large-last-axis", (8, 4096, 4096), 2, (2048, 2048), large=True),
    _split("split-large-first-axis", (8, 4096, 4096), 0, (4, 4), large=True),
)


def _kernel_cases():
    """Those of the table that fill a device, and a call for each kind of kernel beside them."""
    yield from (each for each in CASES if not each.large and "tiny" not in each.name)
    for dtype in ("float32", "float16"):
        for interleaved in (False, True):
            kind = {"dtype": dtype, "interleaved": interleaved}
            name = f"kernel-{dtype}-{'interleaved' if interleaved else 'halves'}"
            yield _rotary(f"{name}-128", 1, 32, 2048, 128, 2048, **kind)
            yield _rotary(f"{name}-64-rank3", 1, 32, 2048, 64, None, rank=3, **kind)
            yield _rotary(f"{name}-32-of-128", 1, 32, 2048, 128, 2048, dim=32, **kind)
            yield _rotary(f"{name}-6", 1, 32, 2048, 6, 2048, **kind)
            yield _rotary(f"{name}-100-rank3", 1, 32, 2048, 100, 2048, rank=3, **kind)
            yield _rotary(f"{name}-20-of-80", 1, 32, 2048, 80, 2048, dim=20, **kind)
        yield _rotary(f"kernel-{dtype}-halves-20", 1, 32, 2048, 20, 2048, dtype=dtype)
        yield _rotary(f"kernel-{dtype}-halves-100", 1, 32, 2048, 100, None, dtype=dtype)
    for sizes in (
        (4096,),
        (1024, 1024),
        (256, 512, 768, 512),
        (255, 514),
        (255, 514, 77, 99),
        (255, 511, 769, 1024, 513),
    ):
        name = f"kernel-split-{'+'.join(map(str, sizes))}"
        yield _split(name, (1024, sum(sizes)), 1, sizes)
    yield _split("kernel-split-odd-int16", (1024, 3072), 1, (1023, 1022, 1027), "int16")
    yield _split("kernel-split-odd-uint8", (1024, 12), 1, (7, 5), "uint8")


KERNEL_CASES = tuple(_kernel_cases())


def chosen(cases, pattern):
    """The cases whose names fit a pattern of the shell's, or have a text in them."""
    if not pattern:
        return list(cases)
    if not set(pattern) & set("*?["):
        pattern = f"*{pattern}*"
    return [case for case in cases if fnmatch.fnmatchcase(case.name, pattern)]
