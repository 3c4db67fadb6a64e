"""What the tests of transformations share: calls as functions of arrays, exact data, counting."""

from functools import partial

import jax
import numpy as np
from cases import RotaryCase

import jax_webgpu
from jax_webgpu import device


def public_function(case):
    """The call of a case, as a function of its arrays alone."""
    rotary = isinstance(case, RotaryCase)
    return partial(jax_webgpu.rotary_embedding if rotary else jax_webgpu.split, **case.keywords)


def eighths(rng, shape, dtype="float32"):
    """Odd numbers of eighths between -1 and 1.

    Few of them multiplied and added are exact in every dtype, whatever the order and whether or
    not a compiler contracts: results compare bit for bit.
    """
    return ((2 * rng.integers(-4, 4, shape) + 1) / 8).astype(dtype)


def exact_inputs(case):
    """The inputs of a `RotaryCase`, the floats among them eighths."""
    rng = np.random.default_rng(31)
    x, cos, sin, *position_ids = case.inputs()
    return *(eighths(rng, a.shape, a.dtype) for a in (x, cos, sin)), *position_ids


def counted(f, *args):
    """The result of a call, and the number of dispatches that it took."""
    before = device.get().counters["dispatches"]
    result = jax.block_until_ready(f(*args))
    return result, device.get().counters["dispatches"] - before


def names(jaxpr):
    """The names of the primitives in a jaxpr and in those inside it, in the program's order."""
    found = []
    for equation in jaxpr.eqns:
        found.append(equation.primitive.name)
        for parameter in equation.params.values():
            for inner in parameter if isinstance(parameter, list | tuple) else [parameter]:
                inner = getattr(inner, "jaxpr", inner)
                found += names(inner) if hasattr(inner, "eqns") else []
    return found


def ulp(value, dtype):
    """The distance of neighbouring numbers of a dtype at a value, also among subnormal ones."""
    info = jax.numpy.finfo(dtype)
    _, exponent = np.frexp(np.maximum(abs(value), float(info.smallest_normal)))
    return np.ldexp(1.0, exponent - 1 - info.nmant)
