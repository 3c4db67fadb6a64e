"""What the kernels under examples/kernels must give, in NumPy.

Each function takes the arrays of a call and its attributes, and returns the exact result, in
float64 where the kernel's is a float, and how far off it may be before it is rounded.
"""

import math

import numpy as np


def wide(x):
    return x.astype(np.float64) if x.dtype.kind == "f" else x


def add(a, b):
    return a + b, 0.0


def gelu(x, approximate="none"):
    exact = wide(x)
    if approximate == "tanh":
        gate = 1 / (1 + np.exp(-2 * np.sqrt(2 / np.pi) * (exact + 0.044715 * exact**3)))
    else:
        gate = np.reshape([math.erfc(-z / math.sqrt(2)) / 2 for z in exact.flat], x.shape)
    # What is rounded in the exponential's argument, which grows like x^2 or, with tanh, x^3. The
    # gate has no fewer digits than float32's least normal number.
    relative = 1e-6 + 2e-7 * exact**2 * (1 + np.abs(exact) / 10)
    return exact * gate, relative * np.abs(exact * gate) + 2.0**-126 * np.abs(exact)


def rms_norm(x, weight, axis=-1, epsilon=1e-5):
    axes = tuple(range(axis % x.ndim, x.ndim))
    squares = np.sum(wide(x) ** 2, axes, keepdims=True)
    size = max(1, math.prod(x.shape[axis % x.ndim :]))
    exact = wide(x) / np.sqrt(squares / size + epsilon) * wide(weight)
    return exact, 2e-6 * np.abs(exact)


def softmax(x, axis=-1):
    shifted = wide(x) - wide(x).max(axis, keepdims=True, initial=-1e9)
    powers = np.exp(shifted)
    exact = powers / powers.sum(axis, keepdims=True)
    return exact, (2e-6 - shifted * 4e-7) * exact


def matmul(a, b):
    exact = np.asarray(np.matmul(wide(a), wide(b)))
    # Each of `depth` products and sums is rounded.
    error = (a.shape[-1] + 1) * 2.0**-24 * np.matmul(np.abs(wide(a)), np.abs(wide(b)))
    return exact, error


def scan(x, axis=0, exclusive=0, reverse=0):
    def sums(values):
        """Of the definition: a matrix of ones says which elements each sum has."""
        size = values.shape[axis]
        ones = np.tril(np.ones((size, size), values.dtype), -exclusive)
        ones = ones.T if reverse else ones
        return np.moveaxis(np.tensordot(ones, values, (1, axis)), 0, axis)

    return sums(wide(x)), 16 * 2.0**-24 * sums(np.abs(wide(x)))


_EPSILON = {"float32": 2.0**-24, "float16": 2.0**-11}


def check(actual, exact, error=0.0):
    """Compares a result with the exact one, off by at most `error` before it is rounded."""
    assert actual.shape == exact.shape, f"{actual.shape}, expected {exact.shape}"
    if actual.dtype.kind in "iu":
        np.testing.assert_array_equal(actual, exact)
        return
    # Rounding may go to either neighbour; what is subnormal may be flushed to zero.
    rounding = 2 * _EPSILON[str(actual.dtype)] * np.abs(exact) + np.finfo(actual.dtype).tiny
    wrong = ~(np.abs(actual.astype(np.float64) - exact) <= error + rounding)
    assert not wrong.any(), f"{actual[wrong][0]}, expected {exact[wrong][0]}; {wrong.sum()} wrong"
