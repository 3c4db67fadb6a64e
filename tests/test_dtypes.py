"""Data types: rotation in each float type and their mixtures, and split of every JAX dtype."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from calls import eighths, exact_inputs, public_function, ulp
from cases import RotaryCase

import jax_webgpu
from jax_webgpu import device, primitive

FLOATS = ("float32", "float16", "bfloat16")


def wide(a):
    """Exact in float64; signalling NaNs among narrow floats are no accident here."""
    with np.errstate(invalid="ignore"):
        return np.asarray(a).astype(np.float64)


# --- rotary_embedding ---------------------------------------------------------------------------

# Each kind of kernel, both pairings, with a tail and without.
CASES = (
    RotaryCase("rank4_cache2_pos_quad", 4, 2, 3, 5, 16, 8, False, "float32", 7),
    RotaryCase("rank3_cache3_quad", 3, 2, 3, 5, 8, 0, True, "float32", None),
    RotaryCase("rank3_cache2_pos", 3, 2, 3, 5, 10, 4, True, "float32", 7),
    RotaryCase("rank4_cache3_output_vec4", 4, 2, 3, 5, 12, 0, False, "float32", None),
)


def by_id(cases):
    return pytest.mark.parametrize("case", cases, ids=lambda case: case.id)


def normal_inputs(case, x_dtype, cache_dtype):
    rng = np.random.default_rng(29)
    x, cos, sin, *position_ids = case.inputs()
    x = rng.standard_normal(x.shape).astype(jnp.dtype(x_dtype))
    cos, sin = (rng.uniform(-1.5, 1.5, cos.shape).astype(jnp.dtype(cache_dtype)) for _ in "cs")
    return x, cos, sin, *position_ids


def assert_rounded_once(y, x, cos, sin, *position_ids, **attributes):
    """Within float32's bound of the true result, and then rounded to the nearest of y's dtype.

    WGSL may round to float16 to either neighbour; nothing else is rounded by WGSL.
    """
    assert (y.shape, y.dtype) == (x.shape, x.dtype)
    if y.dtype == np.float32:
        oracle.assert_rotary_embedding(y, x, cos, sin, *position_ids, **attributes)
        return
    true, bound = oracle.rotary_embedding(
        wide(x), wide(cos), wide(sin), *position_ids, **attributes
    )
    last_place = ulp(np.maximum(abs(wide(y)), abs(true)), y.dtype)
    if cos.dtype != np.float16 or y.dtype != np.float16:
        last_place /= 2
    assert np.all(abs(wide(y) - true) <= bound + last_place * (bound > 0))


@by_id(CASES)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_narrow_floats(dtype, case, run):
    inputs = normal_inputs(case, dtype, dtype)
    f = public_function(case)
    y = run(f, *inputs)
    assert_rounded_once(y, *inputs, **case.keywords)
    # Eighths make products and sums that both dtypes hold: nothing is rounded.
    x, cos, sin, *position_ids = exact_inputs(case)
    x, cos, sin = (a.astype(jnp.dtype(dtype)) for a in (x, cos, sin))
    y = run(f, x, cos, sin, *position_ids)
    true, _ = oracle.rotary_embedding(x, cos, sin, *position_ids, **case.keywords)
    np.testing.assert_array_equal(wide(y), true)


@by_id(CASES[:1])
@pytest.mark.parametrize("cache_dtype", [*FLOATS, "float64"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_mixed_dtypes(dtype, cache_dtype, case, run):
    """The result has x's dtype; computed is in float16 where all are, else in float32.

    Bfloat16 is not widened for it: two elements are a word.
    """
    with jax.enable_x64(cache_dtype == "float64"):
        x, cos, sin, *position_ids = normal_inputs(case, dtype, cache_dtype)
        f = public_function(case)
        y = run(f, x, cos, sin, *position_ids)
        (plan,) = jax_webgpu.explain(f, x, cos, sin, *position_ids)
        assert jax.eval_shape(f, x, cos, sin, *position_ids).dtype == dtype
    if cache_dtype == "float64":
        cos, sin = cos.astype(np.float32), sin.astype(np.float32)
    assert_rounded_once(y, x, cos, sin, *position_ids, **case.keywords)
    computed = "float16" if dtype == cache_dtype == "float16" else "float32"
    crossing = "uint32" if dtype == "bfloat16" else computed
    tensors = dict(plan.resolved.inputs)
    assert [tensors[name].dtype for name in ("x", "cos", "sin")] == [crossing, computed, computed]


BFLOAT16 = (
    # Wide vectors, narrower ones, single words; a tail, an odd number of pairs, and one of these
    # with halves, which do not lie in words.
    *((4, *sizes, inter) for inter in (False, True) for sizes in ((64, 0), (24, 8), (20, 12))),
    *((3, *sizes, inter) for inter in (False, True) for sizes in ((6, 4), (14, 6), (6, 0))),
)


@pytest.mark.parametrize("rows", [None, 7, 200])
@pytest.mark.parametrize(("rank", "size", "dim", "interleaved"), BFLOAT16)
def test_bfloat16_crosses_two_elements_a_word(rank, size, dim, interleaved, rows, run):
    case = RotaryCase(None, rank, 2, 3, 5, size, dim, interleaved, "float32", rows)
    x, cos, sin, *position_ids = normal_inputs(case, "bfloat16", "bfloat16")
    f = public_function(case)
    counters = device.get().counters
    before = counters["bytes in"]
    y = run(f, x, cos, sin, *position_ids)
    assert_rounded_once(y, x, cos, sin, *position_ids, **case.keywords)
    rows_sent = cos.size if not position_ids else min(rows, 10) * cos.shape[1]
    ids = 40 * (rows == 7)
    widened = 1 if interleaved or cos.shape[-1] % 2 == 0 else 2
    assert counters["bytes in"] - before == x.nbytes * widened + 8 * rows_sent + ids


def test_bfloat16_of_the_manifest_alone(run):
    case = RotaryCase(None, 4, 2, 3, 5, 64, 0, False, "float32", None)
    inputs = normal_inputs(case, "bfloat16", "bfloat16")
    with jax_webgpu.configure(overlays=False):
        y = run(public_function(case), *inputs)
        (plan,) = jax_webgpu.explain(public_function(case), *inputs)
    assert_rounded_once(y, *inputs, **case.keywords)
    assert plan.variant == "rank4_cache3_quad"


@pytest.mark.parametrize(
    "dtypes", [("float32", "float16"), ("bfloat16", "float32"), ("float16", "bfloat16")], ids=str
)
def test_two_caches_of_different_dtypes(dtypes, run):
    case = CASES[1]
    x, cos, sin = normal_inputs(case, "float16", "float32")
    cos, sin = cos.astype(jnp.dtype(dtypes[0])), sin.astype(jnp.dtype(dtypes[1]))
    y = run(public_function(case), x, cos, sin)
    assert_rounded_once(y, x, wide(cos), wide(sin), **case.keywords)


def test_float64_caches_are_rounded_first(run):
    """In float32 the second angle's cosine is the first one's: so it must be here."""
    case = RotaryCase(None, 4, 1, 1, 2, 2, 0, False, "float32", None)
    x = np.array([[[[1, 1], [1, 1]]]], np.float32)
    with jax.enable_x64(True):
        cos = np.array([[[0.1], [np.float32(0.1)]]], np.float64)
        first, second = run(public_function(case), x, cos, cos)[0, 0]
    oracle.assert_same_bits(first, second)


def every_bit_pattern(dtype, dim):
    """A tail of each of the 65,536 numbers that 16 bits make, beside the elements to be rotated."""
    x = np.zeros((1, 1, 4096, dim + 16), np.uint16)
    x[..., dim:] = np.arange(65536).reshape(4096, 16)
    return x.view(jnp.dtype(dtype))


def mapped(f):
    """Of a batch that is broadcast: to stack bfloat16 XLA converts it."""
    return lambda x, *caches: jax.vmap(lambda x: f(x, *caches))(jnp.broadcast_to(x, (2, *x.shape)))


WAYS = {
    "alone": lambda f: f,
    "mapped": lambda f: lambda *arrays: mapped(f)(*arrays)[1],
    # The conversions are in the group too.
    "fused": lambda f: jax_webgpu.fuse(lambda x, *caches: jnp.flip(f(jnp.flip(x, 2), *caches), 2)),
}


@pytest.mark.parametrize("settings", [{}, {"overlays": False}, {"implementation": "reference"}])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dim", [4, 6])  # of bfloat16 only the first lies in words
@pytest.mark.parametrize(
    ("dtype", "cache_dtype"),
    [("float16", "float16"), ("float16", "float32"), ("bfloat16", "bfloat16")],
    ids=str,
)
def test_tail_of_narrow_floats(dtype, cache_dtype, dim, way, settings, run):
    """Copied bit for bit, also where x is converted on the way: signalling NaNs stay what they are.

    A conversion of NumPy's, of XLA's and of the processor's makes them quiet.
    """
    x = every_bit_pattern(dtype, dim)
    caches = [np.ones((1, 4096, dim // 2), jnp.dtype(cache_dtype))] * 2
    f = partial(jax_webgpu.rotary_embedding, rotary_embedding_dim=dim)
    with jax_webgpu.configure(**settings):
        y = np.asarray(run(WAYS[way](f), x, *caches))
    oracle.assert_same_bits(y[..., dim:], x[..., dim:])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_rotated_nan_stays_one(dtype, run):
    """Whatever its bits in float32 are, of which the narrower fraction has the leading ones."""
    bits = np.array([[0x7F800001, 0xFF800FFF, 0x7FC00000, 0xFFFFFFFF]], np.uint32)
    found = run(partial(primitive.convert, dtype=dtype), bits.view(np.float32))
    assert found.dtype == dtype and np.isnan(wide(found)).all()
    np.testing.assert_array_equal(np.signbit(wide(found)), [[False, True, False, True]])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_conversion_has_the_derivative_of_one(dtype, run):
    x = jnp.array([0.1, -3, 70], jnp.float32)
    for f in (lambda x: x.astype(dtype), lambda x: primitive.convert(x, dtype)):
        for g in (f, jax.vmap(f)):
            y, back = jax.vjp(g, x)
            assert (y.dtype, jax.jvp(g, [x], [x])[1].dtype) == (dtype, dtype)
            (ct,) = back(y)
            oracle.assert_same_bits(ct, x.astype(dtype).astype(np.float32))


# --- a device without shader-f16 ----------------------------------------------------------------


@pytest.fixture
def without_f16(monkeypatch):
    """The features of the device taken away, as far as plans know it."""
    found = device.get()
    bare = dataclasses.replace(found.capabilities, features=frozenset())
    monkeypatch.setattr(found, "capabilities", bare)


@by_id(CASES)
def test_float16_without_shader_f16(case, run, without_f16):
    """In float32, rounded once, to nearest: NumPy does it."""
    inputs = normal_inputs(case, "float16", "float16")
    f = public_function(case)
    (plan,) = jax_webgpu.explain(f, *inputs)
    assert plan.passes and not any("f16" in each.wgsl for each in plan.passes)
    y = run(f, *inputs)
    assert y.dtype == np.float16
    true, bound = oracle.rotary_embedding(*inputs, **case.keywords)
    last_place = ulp(np.maximum(abs(wide(y)), abs(true)), np.float16)
    assert np.all(abs(wide(y) - true) <= bound + last_place / 2 * (bound > 0))


@pytest.mark.halves
def test_float16_with_and_without_shader_f16(run, monkeypatch):
    """Where the device has it, its plan names f16; the results differ by one rounding at most."""
    case = CASES[0]
    inputs = normal_inputs(case, "float16", "float16")
    f = public_function(case)
    found = device.get()
    (plan,) = jax_webgpu.explain(f, *inputs)
    assert all("enable f16;" in each.wgsl for each in plan.passes)
    with_f16 = wide(run(f, *inputs))
    bare = dataclasses.replace(found.capabilities, features=frozenset())
    monkeypatch.setattr(found, "capabilities", bare)
    without = wide(run(f, *inputs))
    _, bound = oracle.rotary_embedding(*inputs, **case.keywords)
    assert np.all(abs(with_f16 - without) <= 2 * bound + ulp(with_f16, np.float16))


def test_float16_without_shader_f16_at_the_ends(run, without_f16):
    """Overflow gives infinities, quietly; a tail has the bits that it had."""
    x = np.array([[[[60000, 60000, 1, 1]]]], np.float16)
    x.view(np.uint16)[..., 2:] = [0x7D15, 0x0001]  # a signalling NaN, a subnormal number
    one = np.ones((1, 1, 1), np.float16)
    y = np.asarray(run(partial(jax_webgpu.rotary_embedding, rotary_embedding_dim=2), x, one, one))
    assert (y[0, 0, 0, 0], y[0, 0, 0, 1]) == (0, np.inf)
    oracle.assert_same_bits(y[..., 2:], x[..., 2:])


@pytest.mark.parametrize("dtype", ["float16", "bool", "int64"])
def test_split_without_features(dtype, run, without_f16):
    with jax.enable_x64(dtype == "int64"):
        x = np.arange(48).reshape(3, 16).astype(dtype)
        oracle.assert_split(run(lambda x: jax_webgpu.split(x, (7, 9), axis=1), x), x, (7, 9), 1)


# --- split: every JAX dtype ---------------------------------------------------------------------

# Bits of sign, exponent and fraction; the exponent of all ones is for infinities and NaNs.
IEEE = {"float64": (11, 52), "float32": (8, 23), "float16": (5, 10), "bfloat16": (8, 7)}
# Fewer bits than a byte; NumPy keeps each in a byte of its own.
SUB_BYTE = {"int2": 2, "uint2": 2, "int4": 4, "uint4": 4, "float4_e2m1fn": 4}
FLOAT8 = (
    *("float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz", "float8_e4m3fn", "float8_e4m3fnuz"),
    *("float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
)
INTEGERS = tuple(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))
DTYPES = ("bool", *INTEGERS, *SUB_BYTE, *FLOAT8, *IEEE, "complex64", "complex128")
# One of each width and kind.
ONE_OF_EACH = ("bool", "int4", "float4_e2m1fn", "float8_e5m2", "uint8", "int16", "bfloat16")
ONE_OF_EACH += ("float32", "int64", "complex64", "complex128")
X64 = ("int64", "uint64", "float64", "complex128")


def test_every_dtype_of_jax():
    """Those beyond the list are names that JAX 0.10 has, of arrays that it cannot make."""
    scalars = (kind for kind in vars(jnp).values() if hasattr(kind, "dtype"))
    known = {kind.dtype.name for kind in scalars if isinstance(kind, type(jnp.float32))}
    names = {"int1", "uint1", "float6_e2m3fn", "float6_e3m2fn"}
    assert set(DTYPES) <= known <= {*DTYPES, *names}


def special_bits(dtype):
    """The extremes as unsigned integers of as many bytes as an element, or as half of a complex."""
    if dtype in IEEE:
        exponent, fraction = IEEE[dtype]
        sign, infinity = 1 << (exponent + fraction), ((1 << exponent) - 1) << fraction
        quiet = infinity | 1 << (fraction - 1)
        magnitudes = (
            *(0, 1, (1 << fraction) - 1, 1 << fraction),  # zero, subnormal, the least normal
            *(infinity - 1, infinity, quiet, quiet | 5),  # the largest, infinity, quiet NaNs
            *(infinity | 1, infinity | 5),  # signalling NaNs
        )
        return [bits | s for bits in magnitudes for s in (0, sign)]
    bits = 8 * jnp.dtype(dtype).itemsize
    return [0, 1, (1 << bits) - 1, 1 << (bits - 1), (1 << (bits - 1)) - 1]


def all_bits(dtype, shape):
    """Random bits, with every extreme among them; where they are a byte, every pattern."""
    rng = np.random.default_rng(37)
    size = int(np.prod(shape))
    if dtype == "bool":
        return rng.integers(0, 2, shape).astype(bool)
    if jnp.dtype(dtype).itemsize == 1:
        patterns = rng.permutation(np.arange(size) % (1 << SUB_BYTE.get(dtype, 8))).astype(np.uint8)
        return patterns.view(jnp.dtype(dtype)).reshape(shape)
    part = {"complex64": "float32", "complex128": "float64"}.get(dtype, dtype)
    unsigned = f"u{jnp.dtype(part).itemsize}"
    count = size * jnp.dtype(dtype).itemsize // jnp.dtype(part).itemsize
    words = np.frombuffer(rng.bytes(count * jnp.dtype(part).itemsize), unsigned).copy()
    special = special_bits(part)
    words[rng.permutation(count)[: len(special)]] = special
    return words.view(jnp.dtype(dtype)).reshape(shape)


def in_bytes(a):
    """The bytes; of what is less than one, the low bits, the others being NumPy's own affair."""
    bits = SUB_BYTE.get(str(a.dtype), 8)
    return np.ascontiguousarray(np.asarray(a)).reshape(-1).view(np.uint8) & ((1 << bits) - 1)


def assert_parts(parts, x, sizes, axis):
    for part, expected in zip(parts, oracle.split(x, sizes, axis), strict=True):
        assert (part.shape, part.dtype) == (expected.shape, x.dtype)
        np.testing.assert_array_equal(in_bytes(part), in_bytes(expected))


# Of four elements and more at a time every run is whole words; of odd numbers only where an
# element is one.
ALIGNED, UNALIGNED = (16, 4, 12), (13, 8, 11)


@pytest.mark.parametrize("sizes", [ALIGNED, UNALIGNED], ids=["aligned", "unaligned"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_split_of_every_dtype(dtype, sizes, run):
    with jax.enable_x64(dtype in X64):
        x = all_bits(dtype, (9, 32))
        f = partial(jax_webgpu.split, split=sizes, axis=1)
        assert_parts(run(f, x), x, sizes, 1)
        (plan,) = jax_webgpu.explain(f, x)
    (moved,) = (tensor for _, tensor in plan.resolved.inputs)
    width = jnp.dtype(dtype).itemsize if dtype != "float4_e2m1fn" else 4  # which float32 holds
    if sizes == ALIGNED or width >= 4:
        assert moved.dtype == "uint32"
        assert plan.inputs[0].size == x.size * width  # no byte more
    else:
        assert moved.dtype == {1: "uint8", 2: "int16"}[width]
        assert plan.inputs[0].size == x.size * 4  # a word an element


@pytest.mark.parametrize("callback", ["buffer", "pure"])
def test_crossings(callback, run):
    with jax_webgpu.configure(callback=callback):
        for dtype in ONE_OF_EACH:
            with jax.enable_x64(dtype in X64):
                x = all_bits(dtype, (3, 11))
                parts = run(partial(jax_webgpu.split, split=(4, 7), axis=1), x)
                assert_parts(parts, x, (4, 7), 1)
        for dtype in FLOATS:
            inputs = normal_inputs(CASES[0], dtype, dtype)
            assert_rounded_once(
                run(public_function(CASES[0]), *inputs), *inputs, **CASES[0].keywords
            )


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_split_of_keys(impl, run):
    """Keys of a random generator, which are no numbers, stay keys of the same generator."""
    keys = jax.random.split(jax.random.key(5, impl=impl), (3, 7))
    for axis, sizes in ((1, (2, 5)), (0, (1, 0, 2)), (-1, (7,))):
        parts = run(partial(jax_webgpu.split, split=sizes, axis=axis), keys)
        data = oracle.split(np.asarray(jax.random.key_data(keys)), sizes, axis % 2)
        for part, expected in zip(parts, data, strict=True):
            assert part.dtype == keys.dtype and part.shape == expected.shape[:-1]
            assert jax.random.key_impl(part) == jax.random.key_impl(keys)
            oracle.assert_same_bits(jax.random.key_data(part), expected)
    mapped = run(jax.vmap(partial(jax_webgpu.split, split=(2, 5))), keys)
    assert [part.shape for part in mapped] == [(3, 2), (3, 5)]
    # What they were split for: the numbers drawn with them are the same.
    first = run(lambda keys: jax.random.uniform(jax_webgpu.split(keys[0], (1, 6))[1][0]), keys)
    np.testing.assert_array_equal(first, jax.random.uniform(keys[0, 1]))


@pytest.mark.parametrize("dtype", ONE_OF_EACH)
def test_arrays_of_no_and_of_one_element(dtype, run):
    with jax.enable_x64(dtype in X64):
        for shape, axis, sizes in (
            *(((0,), 0, (0, 0)), ((1,), 0, (0, 1))),
            *(((0, 3), 1, (1, 2)), ((1, 2), -1, (1, 1))),
        ):
            x = all_bits(dtype, (64,))[: int(np.prod(shape))].reshape(shape)
            parts = run(partial(jax_webgpu.split, split=sizes, axis=axis), x)
            assert_parts(parts, x, sizes, axis)


@pytest.mark.parametrize("dtype", FLOATS)
def test_rotation_of_no_and_of_one_pair(dtype, run):
    for shape in ((0, 1, 1, 2), (1, 0, 1, 2), (1, 1, 0, 2), (1, 1, 1, 2)):
        x = eighths(np.random.default_rng(3), shape, jnp.dtype(dtype))
        caches = [eighths(np.random.default_rng(5), (shape[0], shape[2], 1), x.dtype)] * 2
        y = run(jax_webgpu.rotary_embedding, x, *caches)
        assert (y.shape, y.dtype) == (shape, dtype)
        np.testing.assert_array_equal(wide(y), oracle.rotary_embedding(x, *caches)[0])


# --- NumPy's arrays and Python's numbers --------------------------------------------------------


def in_layouts(a):
    """The same numbers as NumPy may keep them."""
    spread = np.zeros([2 * n for n in a.shape], a.dtype)
    every_second = spread[tuple(slice(None, None, 2) for _ in a.shape)]
    every_second[...] = a
    backwards = np.ascontiguousarray(a[tuple(slice(None, None, -1) for _ in a.shape)])
    read_only = a.copy()
    read_only.flags.writeable = False
    return {
        "fortran": np.asfortranarray(a),
        "strided": every_second,
        "negative strides": backwards[tuple(slice(None, None, -1) for _ in a.shape)],
        "broadcast": np.broadcast_to(a, a.shape),
        "read-only": read_only,
    }


LAYOUTS = list(in_layouts(np.zeros((1, 1), np.float32)))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_of_split(layout, run):
    for dtype in ("float32", "int16", "int8"):
        x = np.random.default_rng(3).integers(0, 100, (3, 5, 4)).astype(dtype)
        laid_out = in_layouts(x)[layout]
        parts = run(partial(jax_webgpu.split, split=(2, 3), axis=1), laid_out)
        assert_parts(parts, x, (2, 3), 1)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_of_rotary_embedding(layout, run):
    x, cos, sin, position_ids = exact_inputs(CASES[0])
    f = public_function(CASES[0])
    expected, _ = oracle.rotary_embedding(x, cos, sin, position_ids, **CASES[0].keywords)
    given = [in_layouts(a)[layout] for a in (x, cos, sin, position_ids)]
    np.testing.assert_array_equal(run(f, *given), expected)


def test_transposed_jax_arrays(run):
    """Layouts of XLA's own choice reach the host in the order of the shape."""
    x = np.arange(60, dtype=np.float32).reshape(3, 5, 4)
    parts = run(lambda x: jax_webgpu.split(x.T, (1, 3)), x)
    oracle.assert_split(parts, np.ascontiguousarray(x.T), (1, 3), 0)


NOT_ARRAYS = {"int": 1, "float": 1.0, "bool": True, "complex": 1j, "list": [1.0, 2.0], "None": None}
NOT_ARRAYS |= {"nested list": [[1.0, 2.0]], "tuple": (1.0, 2.0), "str": "12"}


@pytest.mark.parametrize("kind", NOT_ARRAYS)
def test_what_is_not_an_array(kind):
    """Refused by name with the remedy, as `jax.numpy` does."""
    value = NOT_ARRAYS[kind]
    remedy = f"must be an array, got {type(value).__name__}: pass jnp.asarray"
    with pytest.raises(TypeError, match=rf"^x {remedy}\(x\)"):
        jax_webgpu.split(value, (1, 1))
    arrays = list(exact_inputs(CASES[0]))
    for index, name in enumerate(("x", "cos_cache", "sin_cache", "position_ids")):
        if name == "position_ids" and value is None:
            continue  # which means that there are none
        given = [*arrays[:index], value, *arrays[index + 1 :]]
        with pytest.raises(TypeError, match=rf"^{name} {remedy}\({name}\)"):
            jax_webgpu.rotary_embedding(*given, **CASES[0].keywords)


def test_numpy_scalars_are_arrays_without_axes(run):
    for scalar in (np.float32(1), np.int8(1), np.array(1.0, np.float32)):
        with pytest.raises(ValueError, match="x is a scalar; expected an array of rank 1 or more"):
            run(partial(jax_webgpu.split, split=(1,)), scalar)
    with pytest.raises(ValueError, match=r"x has shape \(\); expected rank 3"):
        run(jax_webgpu.rotary_embedding, np.float32(1), np.ones((1, 1)), np.ones((1, 1)))


@pytest.mark.parametrize("dtype", ["float64", "int32", "float8_e4m3fn", "complex64", "bool"])
def test_what_is_not_rotated(dtype, run):
    x = np.ones((1, 1, 1, 2), jnp.dtype(dtype))
    cache = np.ones((1, 1, 1), np.float32)
    with jax.enable_x64(dtype == "float64"):
        with pytest.raises(TypeError, match=f"x has dtype {dtype}; expected float32, float16 or"):
            run(jax_webgpu.rotary_embedding, x, cache, cache)
        if dtype != "float64":
            with pytest.raises(TypeError, match=f"sin_cache has dtype {dtype}; expected float32, "):
                run(jax_webgpu.rotary_embedding, np.ones((1, 1, 1, 2), np.float32), cache, x[0])
