"""`configure(implementation="reference")`: the same operators in plain JAX, and `jax.export`."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from calls import counted, eighths, exact_inputs, names, public_function
from cases import CASES, RotaryCase, SplitCase
from jax import export

import jax_webgpu

by_reference = partial(jax_webgpu.configure, implementation="reference")

ROTARY = RotaryCase("rank4_cache2_pos_quad", 4, 2, 3, 5, 16, 8, True, "float32", 7)
SPLIT = SplitCase("three_outputs", (4, 20), 1, (0, 13, 7), "float16")


def by_id(cases):
    return pytest.mark.parametrize("case", cases, ids=lambda case: case.id)


def assert_right(actual, case, inputs):
    if isinstance(case, RotaryCase):
        oracle.assert_rotary_embedding(actual, *inputs, **case.keywords)
    else:
        oracle.assert_split(tuple(actual), *inputs, case.sizes, case.axis)


# --- results ------------------------------------------------------------------------------------


@by_id(CASES)
def test_case(case, run):
    """All of the table within the bounds that the kernels are held to, and no dispatch."""
    inputs = case.inputs()
    with jax.enable_x64(case.dtype == "int64"), by_reference():
        actual, dispatches = counted(run, public_function(case), *inputs)
        assert_right(actual, case, inputs)
    assert dispatches == 0
