"""Each thing a caller can get wrong, alone: the error names it, what was expected and what came.

Eager and jitted alike the error is raised while the call is traced, as a ``ValueError`` or a
``TypeError``: one that was raised in the callback would arrive as a ``JaxRuntimeError``.
"""

import itertools
import pathlib
import re
from contextlib import contextmanager
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

import jax_webgpu


def array(*shape, dtype="float32"):
    return np.ones(shape, jnp.dtype(dtype))


def ids(*shape, dtype="int32"):
    return np.arange(np.prod(shape)).reshape(shape).astype(dtype)


@contextmanager
def refused(error, *patterns):
    with pytest.raises(error) as info:
        yield
    for pattern in patterns:
        assert re.search(pattern, str(info.value)), pattern


def bad_calls(table):
    """A table of: id, changes to the good call, error, and patterns all found in its message."""
    return pytest.mark.parametrize(
        ("changes", "error", "patterns"), [pytest.param(*row[1:], id=row[0]) for row in table]
    )


# --- rotary_embedding ---------------------------------------------------------------------------

# Two batches, three heads, five tokens, heads of eight; caches of eleven rows.
ROTARY = {
    "x": array(2, 3, 5, 8),
    "cos_cache": array(11, 4),
    "sin_cache": array(11, 4),
    "position_ids": ids(2, 5),
}
RANK_3 = {"x": array(2, 5, 24), "num_heads": 3}
CACHES_BY_TOKEN = {
    "cos_cache": array(2, 5, 4),
    "sin_cache": array(2, 5, 4),
    "position_ids": None,
}


def rotary_embedding(run, changes):
    keywords = ROTARY | changes
    names = ["x", "cos_cache", "sin_cache", "position_ids"]
    arrays = [a for a in map(keywords.pop, names) if a is not None]
    return run(partial(jax_webgpu.rotary_embedding, **keywords), *arrays)


@pytest.mark.parametrize("changes", [{}, RANK_3, CACHES_BY_TOKEN, RANK_3 | CACHES_BY_TOKEN])
def test_what_is_changed_below_is_good(changes, run):
    assert rotary_embedding(run, changes).shape == (ROTARY | changes)["x"].shape


@bad_calls(
    [
        ("x-rank-2", {"x": array(6, 8)}, ValueError, [r"\bx\b", r"\b3\b.*\b4\b", r"\(6, 8\)"]),
        (
            "x-rank-5",
            {"x": array(2, 3, 5, 8, 1)},
            ValueError,
            [r"\bx\b", r"\b3\b.*\b4\b", r"\(2, 3, 5, 8, 1\)"],
        ),
        (
            "odd-head_size",
            {"x": array(2, 3, 5, 7)},
            ValueError,
            [r"\bx\b", r"head.size", r"\b7\b", "even"],
        ),
        (
            "odd-head_size-rank-3",
            {"x": array(2, 5, 21), "num_heads": 3},
            ValueError,
            [r"\bx\b", r"head.size", r"\b7\b", "even"],
        ),
    ]
)
def test_x(changes, error, patterns, run):
    with refused(error, *patterns):
        rotary_embedding(run, changes)


@bad_calls(
    [
        (
            "missing",
            RANK_3 | {"num_heads": None},
            ValueError,
            [r"\bnum_heads\b", r"\(2, 5, 24\)"],
        ),
        ("zero", RANK_3 | {"num_heads": 0}, ValueError, [r"\bnum_heads\b", r"\b0\b"]),
        ("negative", RANK_3 | {"num_heads": -3}, ValueError, [r"\bnum_heads\b", r"-3\b"]),
        (
            "not-dividing",
            RANK_3 | {"num_heads": 5},
            ValueError,
            [r"\bnum_heads\b", r"\b5\b", r"\b24\b"],
        ),
        ("float", RANK_3 | {"num_heads": 3.0}, TypeError, [r"\bnum_heads\b", r"\bint", r"\b3\.0"]),
        (
            "not-what-rank-4-says",
            {"num_heads": 6},
            ValueError,
            [r"\bnum_heads\b", r"\b6\b", r"\b3\b"],
        ),
    ]
)
def test_num_heads(changes, error, patterns, run):
    with refused(error, *patterns):
        rotary_embedding(run, changes)


@bad_calls(
    [
        (
            "odd",
            {"rotary_embedding_dim": 5},
            ValueError,
            [r"\brotary_embedding_dim\b", r"\b5\b", "even"],
        ),
        (
            "negative",
            {"rotary_embedding_dim": -4},
            ValueError,
            [r"\brotary_embedding_dim\b", r"-4\b"],
        ),
        (
            "over-head_size",
            {
                "rotary_embedding_dim": 10,
                "cos_cache": array(11, 5),
                "sin_cache": array(11, 5),
            },
            ValueError,
            [r"\brotary_embedding_dim\b", r"\b10\b", r"head.size", r"\b8\b"],
        ),
        (
            "float",
            {"rotary_embedding_dim": 8.0},
            TypeError,
            [r"\brotary_embedding_dim\b", r"\bint", r"\b8\.0"],
        ),
    ]
)
def test_rotary_embedding_dim(changes, error, patterns, run):
    with refused(error, *patterns):
        rotary_embedding(run, changes)


def test_interleaved(run):
    for value in (2, np.array(2), jnp.array(2)):
        with refused(ValueError, r"\binterleaved\b", r"\b2\b"):
            rotary_embedding(run, {"interleaved": value})


@bad_calls(
    [
        (
            "full-width",
            {"cos_cache": array(11, 8), "sin_cache": array(11, 8)},
            ValueError,
            [r"\bcos_cache\b", r"\b8\b", r"\bhalf\b", r"\b4\b"],
        ),
        (
            "full-width-of-rotary_embedding_dim",
            {"rotary_embedding_dim": 6, "cos_cache": array(11, 6), "sin_cache": array(11, 6)},
            ValueError,
            [r"\bcos_cache\b", r"\b6\b", r"\bhalf\b", r"\b3\b"],
        ),
        (
            "full-width-by-token",
            CACHES_BY_TOKEN | {"cos_cache": array(2, 5, 8), "sin_cache": array(2, 5, 8)},
            ValueError,
            [r"\bcos_cache\b", r"\b8\b", r"\bhalf\b", r"\b4\b"],
        ),
        (
            "other-width",
            {"cos_cache": array(11, 3), "sin_cache": array(11, 3)},
            ValueError,
            [r"\bcos_cache\b", r"\b3\b", r"\b4\b"],
        ),
        (
            "not-for-rotary_embedding_dim",
            {"rotary_embedding_dim": 6},
            ValueError,
            [r"\bcos_cache\b", r"\b4\b", r"\b3\b", r"\brotary_embedding_dim\b"],
        ),
        (
            "sin-of-other-rows",
            {"sin_cache": array(10, 4)},
            ValueError,
            [r"\bsin_cache\b", r"\(10, 4\)", r"\bcos_cache\b", r"\(11, 4\)"],
        ),
        (
            "sin-of-other-width",
            {"sin_cache": array(11, 2)},
            ValueError,
            [r"\bsin_cache\b", r"\(11, 2\)", r"\bcos_cache\b", r"\(11, 4\)"],
        ),
        (
            "rank-3-with-position_ids",
            CACHES_BY_TOKEN | {"position_ids": ids(2, 5)},
            ValueError,
            [r"\bcos_cache\b", r"\bposition_ids\b", r"\b2\b", r"\(2, 5, 4\)"],
        ),
        (
            "rank-2-without-position_ids",
            {"position_ids": None},
            ValueError,
            [r"\bcos_cache\b", r"\bposition_ids\b", r"\b3\b", r"\(11, 4\)"],
        ),
        (
            "rank-1",
            {"cos_cache": array(4), "sin_cache": array(4)},
            ValueError,
            [r"\bcos_cache\b", r"\b2\b", r"\(4,\)"],
        ),
        (
            "other-batch",
            CACHES_BY_TOKEN | {"cos_cache": array(3, 5, 4), "sin_cache": array(3, 5, 4)},
            ValueError,
            [r"\bcos_cache\b", r"\(3, 5, 4\)", r"\(2, 5, 4\)"],
        ),
        (
            "other-sequence",
            CACHES_BY_TOKEN | {"cos_cache": array(2, 6, 4), "sin_cache": array(2, 6, 4)},
            ValueError,
            [r"\bcos_cache\b", r"\(2, 6, 4\)", r"\(2, 5, 4\)"],
        ),
        (
            "other-sequence-rank-3",
            RANK_3 | CACHES_BY_TOKEN | {"cos_cache": array(2, 3, 4), "sin_cache": array(2, 3, 4)},
            ValueError,
            [r"\bcos_cache\b", r"\(2, 3, 4\)", r"\(2, 5, 4\)"],
        ),
    ]
)
def test_caches(changes, error, patterns, run):
    with refused(error, *patterns):
        rotary_embedding(run, changes)


@pytest.mark.parametrize("shape", [(2, 6), (1, 5), (5, 2), (5,), (2, 5, 1)])
def test_shape_of_position_ids(shape, run):
    with refused(ValueError, r"\bposition_ids\b", re.escape(str(shape)), r"\(2, 5\)"):
        rotary_embedding(run, {"position_ids": ids(*shape)})


@pytest.mark.parametrize("dtype", ["float32", "int16", "bool"])
def test_dtype_of_position_ids(dtype, run):
    with refused(TypeError, r"\bposition_ids\b", r"\bint32\b", r"\bint64\b", rf"\b{dtype}\b"):
        rotary_embedding(run, {"position_ids": ids(2, 5, dtype=dtype)})


@pytest.mark.parametrize("dtype", ["float64", "float8_e4m3fn", "int32"])
def test_dtype_of_x(dtype, run):
    with (
        jax.enable_x64(True),
        refused(TypeError, r"\bx\b", r"\bfloat32\b", r"\bfloat16\b", rf"\b{dtype}\b"),
    ):
        rotary_embedding(run, {"x": array(2, 3, 5, 8, dtype=dtype)})


@pytest.mark.parametrize("name", ["cos_cache", "sin_cache"])
def test_dtype_of_caches(name, run):
    with refused(TypeError, rf"\b{name}\b", r"\bfloat16\b", r"\bfloat32\b", r"\bint32\b"):
        rotary_embedding(run, {name: array(11, 4, dtype="int32")})


# --- values of position_ids, which are known while tracing only where they are concrete ---------

BAD_POSITIONS = pytest.mark.parametrize(
    ("dtype", "value"),
    [
        ("int32", 11),
        ("int32", 50),
        ("int32", -1),
        ("uint32", 2**31 + 7),
        ("int64", -1),
        ("int64", 2**32 + 3),  # a good one once it is cut down to 32 bits
    ],
)


def position_with(dtype, value):
    """Position ids of which one is bad, and the sentence that says so."""
    position_ids = ids(2, 5, dtype=dtype)
    position_ids[1, 2] = value
    return position_ids, rf"position_ids\[1, 2\] = {value}\b.*\b11 rows"


@BAD_POSITIONS
def test_position_in_eager_mode(dtype, value):
    position_ids, sentence = position_with(dtype, value)
    with refused(ValueError, sentence):
        jax_webgpu.rotary_embedding(*(ROTARY | {"position_ids": position_ids}).values())


@BAD_POSITIONS
def test_position_closed_over(dtype, value):
    position_ids, sentence = position_with(dtype, value)
    f = jax.jit(partial(jax_webgpu.rotary_embedding, position_ids=position_ids))
    with refused(ValueError, sentence):
        f(ROTARY["x"], ROTARY["cos_cache"], ROTARY["sin_cache"])


@pytest.mark.parametrize("callback", ["pure", "buffer"])
@BAD_POSITIONS
def test_position_under_jit(dtype, value, callback):
    x, cos, sin, good = ROTARY.values()
    bad, sentence = position_with(dtype, value)
    f = jax.jit(jax_webgpu.rotary_embedding)
    with jax.enable_x64(dtype == "int64"), jax_webgpu.configure(callback=callback):
        with refused(jax.errors.JaxRuntimeError, sentence):
            jax.block_until_ready(f(x, cos, sin, bad))
        # The next call of the same executable is none the worse for it.
        y = f(x, cos, sin, good.astype(dtype))
        oracle.assert_rotary_embedding(y, x, cos, sin, good)


# --- split --------------------------------------------------------------------------------------


@bad_calls(
    [
        (
            "both",
            {"split": (3, 4), "num_outputs": 2},
            ValueError,
            [r"\bsplit\b", r"\bnum_outputs\b"],
        ),
        ("neither", {}, ValueError, [r"\bsplit\b", r"\bnum_outputs\b"]),
        ("int", {"split": 2}, TypeError, [r"\bsplit\b", r"num_outputs=2\b"]),
        ("floats", {"split": (3.0, 4.0)}, TypeError, [r"\bsplit\b", r"\bint", r"\b3\.0"]),
        ("negative", {"split": (9, -2)}, ValueError, [r"\bsplit\b", r"-2\b"]),
        ("none", {"split": ()}, ValueError, [r"\bsplit\b"]),
        ("set", {"split": {3, 4}}, TypeError, [r"\bsplit\b", "sequence", r"\bset\b"]),
        ("positions", {"split": (1, 3)}, ValueError, [r"\bsplit\b", "jnp.split", r"\(1, 2, 4\)"]),
        ("rank-0", {"split": np.array(7)}, TypeError, [r"\bsplit\b", "sequence", r"\bndarray\b"]),
        ("endless", {"split": itertools.repeat(1)}, ValueError, [r"\bsplit\b", r"65,536 sizes"]),
        ("sum", {"split": (3, 5)}, ValueError, [r"\bsplit\b", r"\b8\b", r"\b7\b", r"\baxis\b"]),
    ]
)
def test_split(changes, error, patterns, run):
    with refused(error, *patterns):
        run(partial(jax_webgpu.split, axis=1, **changes), array(4, 7))


def test_traced_split():
    with refused(TypeError, r"\bsplit\b", r"\bstatic\b"):
        jax.jit(partial(jax_webgpu.split, axis=1))(array(4, 7), np.array([3, 4], np.int32))


@bad_calls(
    [
        ("zero", {"num_outputs": 0}, ValueError, [r"\b0\b"]),
        ("negative", {"num_outputs": -2}, ValueError, [r"-2\b"]),
        ("too-many", {"num_outputs": 2**31}, ValueError, [r"\b2147483648\b", r"\b65,536\b"]),
        ("float", {"num_outputs": 2.0}, TypeError, [r"\bint", r"\b2\.0"]),
    ]
)
def test_num_outputs(changes, error, patterns, run):
    with refused(error, r"\bnum_outputs\b", *patterns):
        run(partial(jax_webgpu.split, **changes), array(4, 7))


@bad_calls(
    [
        ("over", {"axis": 5}, ValueError, [r"\b5\b", r"-2\D+1\b"]),
        ("under", {"axis": -6}, ValueError, [r"-6\b", r"-2\D+1\b"]),
        ("float", {"axis": 1.0}, TypeError, [r"\bint", r"\b1\.0"]),
    ]
)
def test_axis(changes, error, patterns, run):
    with refused(error, r"\baxis\b", *patterns):
        run(partial(jax_webgpu.split, num_outputs=2, **changes), array(4, 7))


def test_scalar(run):
    with refused(ValueError, r"\bx\b", "scalar|rank 0"):
        run(partial(jax_webgpu.split, num_outputs=1), array())


# --- rotary_cache -------------------------------------------------------------------------------


@bad_calls(
    [
        ("odd", {"rotary_dim": 7}, ValueError, [r"\brotary_dim\b", r"\b7\b", "even"]),
        ("negative", {"rotary_dim": -8}, ValueError, [r"\brotary_dim\b", r"-8\b"]),
        ("positions", {"max_positions": -1}, ValueError, [r"\bmax_positions\b", r"-1\b"]),
        ("base", {"base": -1.0}, ValueError, [r"\bbase\b", r"-1\.0"]),
        ("endless", {"base": np.inf}, ValueError, [r"\bbase\b", "inf"]),
        ("huge", {"base": 10**400}, ValueError, [r"\bbase\b", "positive"]),
        ("text", {"base": "1"}, TypeError, [r"\bbase\b", "number", r"\bstr\b"]),
        ("dtype", {"dtype": "int32"}, TypeError, [r"\bdtype\b", r"\bfloat32\b", r"\bint32\b"]),
        ("no-dtype", {"dtype": array(2)}, TypeError, [r"\bdtype\b", r"\bfloat32\b", "array"]),
        ("no-python", {"dtype": "01"}, TypeError, [r"\bdtype\b", r"\bfloat32\b", "01"]),
        ("swapped", {"dtype": ">f4"}, TypeError, [r"\bdtype\b", r"\bfloat32\b", ">f4"]),
        ("scalar", {"dtype": np.float32(1)}, TypeError, [r"\bdtype\b", r"\bfloat32\b"]),
        ("memory", {"max_positions": 2**50}, ValueError, [r"\bmax_positions\b", "memory"]),
        ("sizes", {"max_positions": 2**62}, ValueError, [r"\bmax_positions\b", "memory"]),
        ("wrapped", {"max_positions": 2**63}, ValueError, [r"\bmax_positions\b", "memory"]),
    ]
)
def test_rotary_cache(changes, error, patterns):
    with refused(error, *patterns):
        jax_webgpu.rotary_cache(**{"max_positions": 11, "rotary_dim": 8} | changes)


# --- what makes functions, and settings ---------------------------------------------------------

SOFTMAX = pathlib.Path(__file__).parents[1] / "examples" / "kernels" / "softmax"


@bad_calls(
    [
        ("source", {"source": 5}, TypeError, [r"\bsource\b", r"\bint\b"]),
        ("bytes", {"source": b"softmax"}, TypeError, [r"\bsource\b", r"\bbytes\b"]),
        ("empty", {"source": ""}, ValueError, [r"\bsource\b"]),
        ("null", {"source": "a\0b"}, ValueError, [r"\bsource\b"]),
        ("tunables", {"tunables": 3}, ValueError, [r"\btunables\b", r"\b3\b", "mapping"]),
        ("names", {"tunables": {1: 2}}, ValueError, [r"\btunables\b", "names"]),
        ("method", {"vmap_method": array(2)}, ValueError, [r"\bvmap_method\b", "sequential"]),
        (
            "both",
            {"vmap_method": "sequential", "vmap_axis": 0},
            ValueError,
            ["vmap_axis is 0", "vmap_method 'sequential'", "at most one"],
        ),
        ("version", {"version": 1}, ValueError, ["version is 1", "softmax is a folder here"]),
        ("revision", {"revision": "0" * 40}, ValueError, ["revision is '0{40}'", "folder here"]),
    ]
)
def test_load_kernel(changes, error, patterns):
    with refused(error, *patterns):
        jax_webgpu.load_kernel(**{"source": SOFTMAX} | changes)


@pytest.mark.parametrize("outputs", [5, array(2), jnp.ones(2)], ids=type)
def test_outputs_of_a_kernel(outputs):
    softmax = jax_webgpu.load_kernel(SOFTMAX)
    with refused(TypeError, r"\boutputs\b", type(outputs).__name__):
        softmax(array(2, 3), outputs=outputs)


@bad_calls(
    [
        ("f", {"f": [1]}, TypeError, [r"\bf\b", r"\blist\b"]),
        ("number", {"static_argnums": "x"}, TypeError, [r"\bstatic_argnums\b", "x"]),
        ("name", {"static_argnames": 1}, TypeError, [r"\bstatic_argnames\b", r"\b1\b"]),
    ]
)
def test_fuse(changes, error, patterns):
    with refused(error, *patterns):
        jax_webgpu.fuse(**{"f": lambda x: x} | changes)


@pytest.mark.parametrize("name", ["callback", "implementation", "overlays", "tunables"])
@pytest.mark.parametrize("value", [array(2), np.zeros(2, [("a", "f4")]), 5], ids=str)
def test_settings(name, value):
    before = jax_webgpu.config.settings()
    with refused(ValueError, rf"\b{name}\b"):
        jax_webgpu.configure(**{name: value})
    assert jax_webgpu.config.settings() == before
