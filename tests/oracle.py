"""What both operators must give, in NumPy, after the ONNX texts of RotaryEmbedding-23 and Split-18.

Written from these texts and not from a shader: a mistake made in both would pass every test.
"""

import numpy as np


def _by_token(a, num_heads):
    """Either layout of ``x``, seen as (batch, sequence, num_heads, head_size)."""
    if a.ndim == 4:
        return a.transpose(0, 2, 1, 3)
    return a.reshape(*a.shape[:2], num_heads, a.shape[2] // num_heads)


def _like_x(a, x):
    """The inverse of ``_by_token``."""
    return a.transpose(0, 2, 1, 3) if x.ndim == 4 else a.reshape(x.shape)


def rotary_embedding(
    x,
    cos,
    sin,
    position_ids=None,
    *,
    interleaved=False,
    rotary_embedding_dim=0,
    num_heads=None,
):
    """The true result and how far a float32 computation may be from it, both in float64.

    Two products and their sum, each rounded to nearest, err by less than 2**-23 times the sum of
    the products' magnitudes. What lies beyond ``rotary_embedding_dim`` is copied: its bound is 0.
    """
    with np.errstate(invalid="ignore"):  # the copied part may hold signalling NaNs
        y = _by_token(x, num_heads).astype(np.float64)
    rotary_dim = rotary_embedding_dim or y.shape[-1]
    if interleaved:
        first, second = np.s_[..., 0:rotary_dim:2], np.s_[..., 1:rotary_dim:2]
    else:
        first, second = np.s_[..., : rotary_dim // 2], np.s_[..., rotary_dim // 2 : rotary_dim]
    if position_ids is not None:
        cos, sin = cos[position_ids], sin[position_ids]
    c, s = (cache.astype(np.float64)[:, :, None, :] for cache in (cos, sin))

    a, b = y[first].copy(), y[second].copy()
    bound = np.zeros_like(y)
    y[first], bound[first] = a * c - b * s, 2**-23 * (abs(a * c) + abs(b * s))
    y[second], bound[second] = a * s + b * c, 2**-23 * (abs(a * s) + abs(b * c))
    return _like_x(y, x), _like_x(bound, x)


def _float16_ulp(value):
    """The distance of neighbouring float16 numbers at ``value``, also among the subnormal ones."""
    _, exponent = np.frexp(np.maximum(abs(value), 2.0**-14))
    return np.ldexp(1.0, exponent - 11)


def assert_rotary_embedding(actual, x, cos, sin, position_ids=None, **attributes):
    """The rotated part is within the bound, and the part beyond it has the bits of ``x``.

    In float16 the result is rounded once more, to either neighbour: WGSL leaves that open.
    """
    actual = np.asarray(actual)
    assert (actual.shape, actual.dtype) == (x.shape, x.dtype)
    y, bound = rotary_embedding(x, cos, sin, position_ids, **attributes)
    if x.dtype == np.float16:
        bound = bound + _float16_ulp(y)
    actual, copied, y, bound = (
        _by_token(a, attributes.get("num_heads")) for a in (actual, x, y, bound)
    )
    rotary_dim = attributes.get("rotary_embedding_dim") or y.shape[-1]
    rotated, tail = np.s_[..., :rotary_dim], np.s_[..., rotary_dim:]

    error = abs(actual[rotated].astype(np.float64) - y[rotated])
    wrong = np.argwhere(~(error <= bound[rotated]))  # written so that a NaN is wrong
    assert not wrong.size, (
        f"{len(wrong)} of {error.size} are out of bounds; the first, by (batch, sequence, head, "
        f"element), is {tuple(wrong[0].tolist())}: {actual[tuple(wrong[0])]}, "
        f"expected {y[tuple(wrong[0])]} ± {bound[tuple(wrong[0])]}"
    )
    assert_same_bits(actual[tail], copied[tail])


def split(x, sizes, axis):
    """The parts of ``x`` that have these sizes along ``axis``."""
    return tuple(np.split(x, np.cumsum(sizes)[:-1], axis))


def split_sizes(n, num_outputs):
    """``num_outputs`` equal sizes, but for the last ones: these get what is left, maybe nothing."""
    part = -(-n // num_outputs)
    return tuple(min(part, max(n - i * part, 0)) for i in range(num_outputs))


def assert_split(actual, x, sizes, axis):
    """A tuple of the right length, shapes, dtypes and bits."""
    assert isinstance(actual, tuple)
    for part, expected in zip(actual, split(x, sizes, axis), strict=True):
        assert_same_bits(part, expected)


def assert_same_bits(actual, expected):
    """Equal as integers: 0.0 is not -0.0, and a NaN is only the NaN of its own payload."""
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype)
    bits = f"u{expected.itemsize}"
    np.testing.assert_array_equal(
        np.ascontiguousarray(actual).view(bits), np.ascontiguousarray(expected).view(bits)
    )
