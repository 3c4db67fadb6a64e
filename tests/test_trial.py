"""The runner of a folder's `test.json`: what passes, what fails, and what is said of it."""

import json
import re

import numpy as np
import pytest
from folders import accumulate, scale, step, write

from jax_webgpu import spec, trial
from jax_webgpu.errors import SpecError
from jax_webgpu.folder import read as read_folder
from jax_webgpu.trial import Status


@pytest.fixture
def copy(tmp_path):
    """A kernel that gives its input back, in any dtype."""
    dtypes = ["float32", "float16", "int32", "uint32", "uint8", "bool", "int64"]
    return write(
        tmp_path,
        "copy",
        {"copy": "  y[i] = x[i];"},
        typeConstraints={"T": dtypes},
        inputs={"x": {"dtype": "T"}},
        outputs={"y": {"dtype": "T", "shape": "shapes.x"}},
        variants=[{"id": "only", "passes": [step("copy", ["x", "y"], "numel(shapes.x)")]}],
    )


def array(*values, dtype="float32", shape=None, **keys):
    """An array of a case."""
    shape = [len(values)] if shape is None else shape
    data = {"kind": "values", "values": list(values)}
    return {"dtype": dtype, "shape": shape, "data": data} | keys


def case(x, y, name="a case", **keys):
    """A case of one input and one output."""
    return {"name": name, "inputs": {"x": x}, "outputs": {"y": y}} | keys


def tell(folder, *cases, **keys):
    """Writes `test.json`; gives all results."""
    (folder / "test.json").write_text(json.dumps({"cases": cases} | keys))
    return list(trial.run(read_folder(folder)))


def outcome(folder, x, y, **keys):
    """The result of one case."""
    (result,) = tell(folder, case(x, y, **keys))
    return result


# ---- what is compared ---------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "float16", "int32", "uint8", "bool", "int64"])
def test_a_case_passes(copy, dtype):
    result = outcome(copy, array(1, 0, dtype=dtype), array(1, 0, dtype=dtype))
    assert result == trial.Result("a case", Status.PASSED, "", "only")
    assert str(result) == "a case: passed"


def test_the_first_wrong_element_is_named(copy):
    x, y = array(1, 2, 3, 4, 5, 6, shape=[2, 3]), array(1, 2, 3, 4, 7, 8.5, shape=[2, 3])
    result = outcome(copy, x, y)
    assert (result.status, result.variant) == (Status.FAILED, "only")
    assert result.detail == (
        "y[1, 1] is 5.0, expected 7.0 (tolerance 1e-05); 2 of 6 elements are wrong"
    )
    assert str(result) == f"a case: failed: {result.detail}"


def test_a_wrong_number_has_no_index(copy):
    result = outcome(copy, array(1, dtype="int32", shape=[]), array(2, dtype="int32", shape=[]))
    assert result.detail == "y is 1, expected 2; 1 of 1 elements are wrong"


@pytest.mark.parametrize(
    ("dtype", "value", "expected", "keys", "passes"),
    [
        # Of what is less than 1 the tolerance is absolute, of what is more relative.
        ("float32", 0, 0.9e-5, {}, True),
        ("float32", 0, 1.1e-5, {}, False),
        ("float32", 1000, 1000.009, {}, True),
        ("float32", 1000, 1000.011, {}, False),
        ("float32", -1000, -1000.011, {}, False),
        ("float32", -1000, 1000, {}, False),
        ("float16", 0, 0.009, {}, True),
        ("float16", 0, 0.011, {}, False),
        ("float32", 1, 1.25, {"tolerance": 0.25}, True),
        ("float32", 1, 1.25, {"tolerance": 0.1}, False),
        ("float32", 0, 1e-30, {"tolerance": 0}, False),
        ("float32", 0.5, 0.5, {"tolerance": 0}, True),
        ("int32", 1000000, 1000001, {}, False),
        ("int32", 1000000, 1000001, {"tolerance": 1e-5}, True),
        ("uint32", 0, 2**32 - 1, {"tolerance": 0.5}, False),
        ("bool", True, False, {}, False),
        ("int64", 2**53 + 1, 2**53, {}, False),
        ("int64", 2**53 + 1, 2**53 + 1, {}, True),
        # Nothing finite is near to an infinity.
        ("float32", 3e38, "Infinity", {}, False),
        ("float32", "Infinity", 3e38, {}, False),
        ("float32", "Infinity", "Infinity", {}, True),
        ("float32", "Infinity", "-Infinity", {}, False),
        ("float16", "-Infinity", "-Infinity", {"tolerance": 0}, True),
        ("float32", "NaN", "NaN", {}, False),
        ("float32", "NaN", "NaN", {"allowNaN": False}, False),
        ("float32", "NaN", "NaN", {"allowNaN": True}, True),
        ("float32", "NaN", 1, {"allowNaN": True}, False),
        ("float32", 1, "NaN", {"allowNaN": True}, False),
        ("int32", 1, 1, {"allowNaN": True}, True),
    ],
)
def test_tolerance(copy, dtype, value, expected, keys, passes):
    result = outcome(copy, array(value, dtype=dtype), array(expected, dtype=dtype, **keys))
    assert result.status == (Status.PASSED if passes else Status.FAILED)


def test_outputs_of_the_wrong_shape_or_dtype_fail(copy):
    result = outcome(copy, array(1, 2, 3), array(1, 2, 3, shape=[1, 3]))
    assert result.status == Status.FAILED
    assert result.detail == "y is float32[3], expected float32[1,3]"

    result = outcome(copy, array(1, 2, 3), array(1, 2, 3, dtype="int32"))
    assert result.status == Status.FAILED
    assert result.detail == "y is float32[3], expected int32[3]"


def test_an_output_without_values_is_not_compared_and_that_is_said(copy):
    result = outcome(copy, array(1, 2), {"dtype": "float32", "shape": [2]})
    assert result.status == Status.PASSED
    assert result.detail == "the case gives no values of y"
    assert outcome(copy, array(1, 2), {"dtype": "float32", "shape": [3]}).status == Status.FAILED


def test_fixtures_are_shared(copy):
    data = {"kind": "values", "values": {"$ref": "#/fixtureArrays/three"}}
    shared = {"dtype": "float32", "shape": [3], "data": data}
    good, bad = tell(
        copy,
        case(shared, shared, name="good"),
        case(shared, array(1, 2, 4), name="bad"),
        fixtureArrays={"three": [1, 2, 3]},
    )
    assert good.status == Status.PASSED
    assert bad.detail.startswith("y[2] is 3.0, expected 4.0")


def test_empty_arrays(copy):
    assert outcome(copy, array(shape=[2, 0]), array(shape=[2, 0])).status == Status.PASSED


# ---- what reaches the kernel --------------------------------------------------------------------


def test_attributes_and_optional_outputs(tmp_path):
    folder = scale(tmp_path)
    inputs = {"x": array(1, 2), "bias": array(0.5, 0.25)}
    outputs = {"y": array(3.5, 6.25), "twice": array(7, 12.5)}
    (plain, both, negated, other) = tell(
        folder,
        case(array(1, 2), array(2, 4)),
        {"name": "b", "inputs": inputs, "outputs": outputs, "attributes": {"factor": 3}},
        case(array(1, 2), array(-2, -4), name="c", attributes={"mode": "negated"}),
        case(array(1, 2), array(2, 4), name="d", attributes={"mode": "negated"}),
    )
    assert [each.status for each in (plain, both, negated)] == [Status.PASSED] * 3
    assert plain.variant == "bias_False_twice_False"
    assert both.variant == "bias_True_twice_True"
    assert other.detail.startswith("y[0] is -2.0, expected 2.0")


def test_args_and_ports_that_are_inputs_and_outputs(tmp_path):
    inputs = {"state": array(1, 2), "x": array(10, 20)}
    (result, missing) = tell(
        accumulate(tmp_path),
        {
            "name": "a",
            "args": {"amount": 0.5},
            "inputs": inputs,
            "outputs": {"state": array(6, 12)},
        },
        {"name": "b", "inputs": inputs, "outputs": {"state": array(6, 12)}},
    )
    assert result.status == Status.PASSED
    assert missing.status == Status.FAILED
    assert missing.detail == "Accumulate: the argument amount is missing"


def test_tunables_reach_the_plan(copy):
    result = outcome(copy, array(1), array(1), tunables={"WORKGROUP_SIZE": 10**6})
    assert result.status == Status.REFUSED
    assert "WORKGROUP_SIZE is 1,000,000; maxCompute" in result.detail


def test_a_shape_that_the_manifest_does_not_state_is_the_case_s(tmp_path):
    folder = write(
        tmp_path,
        "first",
        {"first": "  y[i] = x[i];"},
        inputs={"x": {"dtype": "T"}},
        outputs={"y": {"dtype": "T"}},
        variants=[{"id": "only", "passes": [step("first", ["x", "y"], "numel(shapes.y)")]}],
    )
    assert outcome(folder, array(1, 2, 3), array(1, 2)).status == Status.PASSED
    assert outcome(folder, array(1, 2, 3), array(1, 3)).status == Status.FAILED


# ---- what does not run --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("skip", "status", "detail"),
    [
        ("takes an hour", Status.SKIPPED, "takes an hour"),
        (True, Status.SKIPPED, "the case is not for GPUs"),
        (False, Status.FAILED, "y[0] is 1.0, expected 2.0 (tolerance 1e-05); 1 of 1 elements are "),
    ],
)
def test_cases_that_are_not_for_gpus(copy, skip, status, detail):
    result = outcome(copy, array(1), array(2), skipGpu=skip, provenance={"by": "hand"})
    assert result.status == status
    assert result.detail.startswith(detail)


@pytest.mark.parametrize("port", ["x", "y"])
def test_data_of_a_kind_that_is_not_public_is_not_run(copy, port):
    arrays = {"x": array(1, 2), "y": array(1, 2)}
    arrays[port]["data"] = {"kind": "ramp", "start": 0, "step": 0.5}
    result = outcome(copy, **arrays)
    assert (result.status, result.variant) == (Status.NOT_RUN, None)
    assert str(result) == "a case: not run: data kind 'ramp' is not public"


def variants(tmp_path, **keys):
    """As `copy`, with more keys of its only variant."""
    return write(
        tmp_path,
        "copy",
        {"copy": "  y[i] = x[i];"},
        inputs={"x": {"dtype": "T"}},
        outputs={"y": {"dtype": "T", "shape": "shapes.x"}},
        variants=[{"id": "only", "passes": [step("copy", ["x", "y"], "numel(shapes.x)")]} | keys],
    )


def test_what_this_device_lacks_is_a_refusal(tmp_path):
    folder = variants(tmp_path, requires={"features": ["no-such-feature"]})
    result = outcome(folder, array(1), array(1))
    assert (result.status, result.variant) == (Status.REFUSED, None)
    assert result.detail.endswith("only: it needs the feature no-such-feature")


def test_what_no_device_takes_is_a_failure_with_the_reasons(tmp_path):
    folder = variants(tmp_path, when=["ranks.x == 2"])
    result = outcome(folder, array(1), array(1))
    assert result.status == Status.FAILED
    assert "only: `ranks.x == 2`: 1, expected 2" in result.detail


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"attributes": {"axis": 0}}, "Copy has no attribute axis"),
        ({"args": {"n": 0}}, "Copy has no argument n"),
        ({"tunables": {"TILE": 0}}, "Copy has no tunable TILE"),
        ({"inputs": {}}, "the input x is missing"),
        ({"inputs": {"x": array(1), "z": array(1)}}, "Copy has no input z"),
        ({"outputs": {}}, "the output y is not optional"),
        ({"outputs": {"y": array(1), "z": array(1)}}, "Copy has no output z"),
    ],
)
def test_a_call_that_does_not_fit_the_manifest_fails(copy, keys, words):
    result = outcome(copy, array(1), array(1), **keys)
    assert result.status == Status.FAILED
    assert words in result.detail


def test_a_shader_that_is_refused_fails_and_the_next_case_runs(tmp_path):
    folder = scale(tmp_path)
    (folder / "scale.wgsl.jinja").write_text(
        "{% if attrs.factor == 2 %}fn main( {% else %}"
        + (folder / "scale.wgsl.jinja").read_text()
        + "{% endif %}"
    )
    (bad, good) = tell(
        folder,
        case(array(1), array(2)),
        case(array(1), array(3), name="good", attributes={"factor": 3}),
    )
    assert bad.status == Status.FAILED
    *shown, reason = bad.detail.splitlines()
    assert shown[0].endswith(" refuses this:") and ">    1 | fn main( " in shown
    assert re.match(r"scale\.wgsl\.jinja.*line 1 of the WGSL\)?: expected ", reason)
    assert good.status == Status.PASSED


def test_cases_run_one_by_one(copy, monkeypatch):
    (copy / "test.json").write_text(
        json.dumps({"cases": [case(array(n), array(n), name=str(n)) for n in range(3)]})
    )
    ran = []
    monkeypatch.setattr(trial, "attempt", lambda operator, case: ran.append(case.name))
    results = trial.run(read_folder(copy))
    assert ran == []
    next(results)
    assert ran == ["0"]


def test_arrays_are_of_their_dtype_and_shape(copy):
    x = array("NaN", -0.0, "Infinity", "-Infinity", 0.1, 1e-3, shape=[3, 2], dtype="float16")
    (copy / "test.json").write_text(json.dumps({"cases": [case(x, x, tunables={})]}))
    (read,) = trial.read(read_folder(copy))
    values = read.inputs["x"].values
    assert values.dtype == np.float16 and values.shape == (3, 2)
    np.testing.assert_array_equal(
        values, np.array([[np.nan, -0.0], [np.inf, -np.inf], [0.1, 1e-3]], np.float16)
    )
    assert np.signbit(values[0, 1])
    assert trial.attempt(spec.load(copy / "manifest.json"), read).status == Status.FAILED  # a NaN


# ---- what is not in the format ------------------------------------------------------------------


def changed(where, value):
    """A document with one place changed, or with one more key; `...` takes it out."""
    document = {"cases": [case(array(1, 2), array(1, 2))], "fixtureArrays": {"two": [1, 2]}}
    *path, last = where
    inside = document
    for key in path:
        inside = inside[key]
    if value is ...:
        del inside[last]
    else:
        inside[last] = value
    return document


X, Y = ("cases", 0, "inputs", "x"), ("cases", 0, "outputs", "y")


@pytest.mark.parametrize(
    ("where", "value", "message"),
    [
        (["cases"], ..., "$: the key 'cases' is missing"),
        (["cases"], {}, "$.cases: expected a list, got an object"),
        (["more"], 1, "$.more: unknown key 'more'; known here: $schema, cases, fixtureArrays"),
        (["fixtureArrays"], [], "$.fixtureArrays: expected an object, got a list"),
        (["cases", 0], 3, "$.cases[0]: expected an object, got a number"),
        (["cases", 0, "name"], ..., "$.cases[0]: the key 'name' is missing"),
        (["cases", 0, "name"], 7, "$.cases[0].name: expected a string, got a number"),
        (["cases", 0, "inputs"], ..., "$.cases[0]: the key 'inputs' is missing"),
        (["cases", 0, "outputs"], [], "$.cases[0].outputs: expected an object, got a list"),
        (["cases", 0, "when"], [], "$.cases[0].when: unknown key 'when'"),
        (["cases", 0, "skipGpu"], 1, "$.cases[0].skipGpu: expected a boolean or the reason, got 1"),
        (["cases", 0, "attributes"], [], "$.cases[0].attributes: expected an object, got a list"),
        ([*X, "data"], ..., "$.cases[0].inputs.x: the key 'data' is missing"),
        ([*X, "dtype"], ..., "$.cases[0].inputs.x: the key 'dtype' is missing"),
        ([*X, "dtype"], "f32", "$.cases[0].inputs.x.dtype: 'f32' is no dtype; known: float32, "),
        ([*X, "shape"], 2, "$.cases[0].inputs.x.shape: expected a list, got a number"),
        (
            [*X, "shape", 0],
            -1,
            "$.cases[0].inputs.x.shape[0]: expected a size of 0 or more, got -1",
        ),
        (
            [*X, "shape", 0],
            2.0,
            "$.cases[0].inputs.x.shape[0]: expected a whole number, got a number",
        ),
        (
            [*X, "shape", 0],
            True,
            "$.cases[0].inputs.x.shape[0]: expected a whole number, got a boolean",
        ),
        (
            [*X, "shape"],
            [2, 3],
            "$.cases[0].inputs.x.data.values: expected 6 values for float32[2,3], got 2",
        ),
        ([*X, "shape"], [1] * 65 + [2], "$.cases[0].inputs.x.data.values: maximum supported dim"),
        ([*X, "tolerance"], 1, "$.cases[0].inputs.x.tolerance: unknown key 'tolerance'"),
        ([*X, "data"], 3, "$.cases[0].inputs.x.data: expected an object, got a number"),
        ([*X, "data", "kind"], ..., "$.cases[0].inputs.x.data: the key 'kind' is missing"),
        ([*X, "data", "seed"], 1, "$.cases[0].inputs.x.data.seed: unknown key 'seed'"),
        ([*X, "data", "values"], ..., "$.cases[0].inputs.x.data: the key 'values' is missing"),
        (
            [*X, "data", "values"],
            "12",
            "$.cases[0].inputs.x.data.values: expected a list, got a string",
        ),
        (
            [*X, "data", "values", 1],
            "inf",
            "$.cases[0].inputs.x.data.values[1]: expected a number or one of NaN, Infinity, "
            "-Infinity, got a string",
        ),
        ([*X, "data", "values", 1], True, "$.cases[0].inputs.x.data.values[1]: expected a number"),
        ([*X, "data", "values", 1], None, "$.cases[0].inputs.x.data.values[1]: expected a number"),
        ([*X, "data", "values", 1], 10**400, "$.cases[0].inputs.x.data.values[1]: 1000"),
        (
            [*X, "data", "values"],
            {"$ref": "#/fixtureArrays/one"},
            '$.cases[0].inputs.x.data.values.$ref: "#/fixtureArrays/one" is no fixture; there are: '
            "#/fixtureArrays/two",
        ),
        ([*X, "data", "values"], {"$ref": "two"}, '$.cases[0].inputs.x.data.values.$ref: "two" is'),
        ([*X, "data", "values"], {"ref": 1}, "$.cases[0].inputs.x.data.values.ref: unknown key"),
        ([*Y, "tolerance"], -1, "$.cases[0].outputs.y.tolerance: expected a number of 0 or more"),
        ([*Y, "tolerance"], "1", "$.cases[0].outputs.y.tolerance: expected a number, got a string"),
        ([*Y, "allowNaN"], 1, "$.cases[0].outputs.y.allowNaN: expected a boolean, got a number"),
        ([*Y, "allow_nan"], 1, "$.cases[0].outputs.y.allow_nan: unknown key 'allow_nan'"),
    ],
)
def test_what_is_wrong_is_told_with_its_place(tmp_path, where, value, message):
    (tmp_path / "test.json").write_text(json.dumps(changed(where, value)))
    with pytest.raises(SpecError) as caught:
        trial.read(read_folder(tmp_path))
    assert str(caught.value).startswith(f"{tmp_path / 'test.json'}: {message}")


@pytest.mark.parametrize(
    ("dtype", "value", "expected"),
    [
        ("int32", 1.5, "a whole number from -2147483648 to 2147483647 (int32), got 1.5"),
        ("int32", 2**31, "a whole number from -2147483648 to 2147483647 (int32), got 2147483648"),
        ("uint8", -1, "a whole number from 0 to 255 (uint8), got -1"),
        ("uint32", "NaN", 'a whole number from 0 to 4294967295 (uint32), got "NaN"'),
        ("int32", True, "a whole number from -2147483648 to 2147483647 (int32), got true"),
        ("bool", 2, "a whole number from 0 to 1 (bool), got 2"),
    ],
)
def test_values_must_be_the_dtype_s(tmp_path, dtype, value, expected):
    document = {"cases": [case(array(0, value, dtype=dtype), array(0, 0, dtype=dtype))]}
    (tmp_path / "test.json").write_text(json.dumps(document))
    with pytest.raises(SpecError) as caught:
        trial.read(read_folder(tmp_path))
    assert str(caught.value).endswith(f"$.cases[0].inputs.x.data.values[1]: expected {expected}")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "Expecting value"),
        ('{"cases": [}', "Expecting value: line 1 column 12"),
        ('{"cases": [NaN]}', "$.cases[0]: NaN is not JSON"),
        ('{"cases": ' + 100_000 * "[", "$: nested too deeply"),
        (b"\xff", "'utf-8' codec can't decode"),
    ],
)
def test_what_is_not_json(tmp_path, text, message):
    (tmp_path / "test.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(SpecError) as caught:
        trial.read(read_folder(tmp_path))
    assert str(caught.value).startswith(f"{tmp_path / 'test.json'}: {message}")


def test_a_folder_without_tests(copy):
    with pytest.raises(SpecError, match=r"test\.json is missing"):
        trial.run(read_folder(copy))


def test_two_cases_of_one_name(copy):
    with pytest.raises(SpecError, match=r"\$\.cases\[1\]: the name 'a case' is taken already"):
        tell(copy, case(array(1), array(1)), case(array(2), array(2)))


def test_all_is_checked_before_anything_runs(copy):
    with pytest.raises(SpecError, match=r"\$\.cases\[1\]: the key 'inputs' is missing"):
        tell(copy, case(array(1), array(1)), {})


def test_comments_are_ignored(copy):
    x = array(1) | {"$comment": "one"}
    (result,) = tell(copy, case(x, array(1)) | {"$comment": "a case"}, **{"$comment": "all"})
    assert result.status == Status.PASSED
