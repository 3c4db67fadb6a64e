"""The node tests that the ONNX project publishes for the two operators, through our functions."""

import functools
import warnings

import numpy as np
import onnx
import oracle
import pytest
from onnx.backend.test.case.node import collect_testcases

import jax_webgpu

# By name, so that the suite of all operators, which takes seconds to make, is made by a test.
ROTARY_EMBEDDING = (
    "test_rotary_embedding",
    "test_rotary_embedding_3d_input",
    "test_rotary_embedding_interleaved",
    "test_rotary_embedding_no_position_ids",
    "test_rotary_embedding_no_position_ids_interleaved",
    "test_rotary_embedding_no_position_ids_rotary_dim",
    "test_rotary_embedding_with_interleaved_rotary_dim",
    "test_rotary_embedding_with_rotary_dim",
)
SPLIT = (
    "test_split_1d_uneven_split_opset18",
    "test_split_2d_uneven_split_opset18",
    "test_split_equal_parts_1d_opset18",
    "test_split_equal_parts_2d",
    "test_split_equal_parts_default_axis_opset18",
    "test_split_variable_parts_1d_opset18",
    "test_split_variable_parts_2d_opset18",
    "test_split_variable_parts_default_axis_opset18",
    "test_split_zero_size_splits_opset18",
)


@functools.cache
def published():
    """The suite's models whose one node is one of our operators, at our opset, by name."""
    with warnings.catch_warnings(action="ignore"):  # the generator divides by zero, and more
        cases = collect_testcases()
    return {
        case.name: case
        for case in cases
        if "_expanded" not in case.name
        and [node.op_type for node in case.model.graph.node] in (["RotaryEmbedding"], ["Split"])
        and case.model.opset_import[0].version >= 18
    }


def load(name):
    """A model's attributes, input arrays and output arrays."""
    case = published()[name]
    (node,), ((inputs, outputs),) = case.model.graph.node, case.data_sets
    attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    return attributes, inputs, outputs


def split_sizes(attributes, x, sizes=None):
    """The sizes a model of Split asks for, and the axis: its second input, if any, is static."""
    axis = attributes.get("axis", 0)
    if sizes is None:
        return oracle.split_sizes(x.shape[axis], attributes["num_outputs"]), axis
    return tuple(sizes.tolist()), axis


def test_number_of_models():
    assert (len(ROTARY_EMBEDDING), len(SPLIT)) == (8, 9)
    assert sorted(published()) == sorted(ROTARY_EMBEDDING + SPLIT)


@pytest.mark.parametrize("name", ROTARY_EMBEDDING)
def test_oracle_of_rotary_embedding(name):
    attributes, inputs, (expected,) = load(name)
    oracle.assert_rotary_embedding(expected, *inputs, **attributes)


@pytest.mark.parametrize("name", SPLIT)
def test_oracle_of_split(name):
    attributes, inputs, expected = load(name)
    oracle.assert_split(tuple(expected), inputs[0], *split_sizes(attributes, *inputs))


@pytest.mark.parametrize("name", ROTARY_EMBEDDING)
def test_rotary_embedding(name, run):
    attributes, inputs, (expected,) = load(name)
    y = run(functools.partial(jax_webgpu.rotary_embedding, **attributes), *inputs)
    oracle.assert_rotary_embedding(y, *inputs, **attributes)
    # Both are float32 computations within the bound, so they differ by two bounds at most.
    _, bound = oracle.rotary_embedding(*inputs, **attributes)
    assert np.all(abs(np.asarray(y, np.float64) - expected) <= 2 * bound)


@pytest.mark.parametrize("name", SPLIT)
def test_split(name, run):
    attributes, (x, *sizes), expected = load(name)
    given = {"split": sizes[0].tolist()} if sizes else {}
    parts = run(functools.partial(jax_webgpu.split, **attributes, **given), x)
    assert isinstance(parts, tuple)
    for part, published_part in zip(parts, expected, strict=True):
        oracle.assert_same_bits(part, published_part)
