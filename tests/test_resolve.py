"""A call's names, types and shapes: what is bound, what is worked out, what is refused."""

import re

import numpy as np
import pytest
from engine import ROTARY, SPLIT, operator, rotary, split, variant

from jax_webgpu.capabilities import IDEAL, PRESETS
from jax_webgpu.errors import CallError, SpecError
from jax_webgpu.resolve import Tensor, extend, resolve, scope
from jax_webgpu.values import UNDEFINED

X = Tensor((2, 3), "float32")


def call(spec, **keywords):
    inputs = keywords.pop("inputs", {"x": X})
    return resolve(spec, inputs, **keywords)


def refused(message):
    return pytest.raises(CallError, match=f"^{re.escape(message)}")


# --- inputs and types ---------------------------------------------------------------------------


def test_a_call_in_words():
    assert str(rotary((2, 3, 5, 8), (2, 5, 4))) == (
        "RotaryEmbedding(x = float32[2,3,5,8], cos = float32[2,5,4], sin = float32[2,5,4], "
        "interleaved = 0, rotary_embedding_dim = 0) -> y float32[2,3,5,8]"
    )
    assert str(split((), (), (), dtype="bool")) == (
        "Split(input = bool[], axis = 0) -> y0 bool[], y1 bool[]"
    )


def test_inputs_stand_in_the_manifest_s_order():
    tensors = {"cos": X, "x": X, "positionIds": None, "sin": X}
    resolved = resolve(ROTARY, tensors)
    assert [name for name, _ in resolved.inputs] == ["x", "cos", "sin"]
    assert resolved.logical == (("T", "float32"),)


def test_unknown_and_missing_inputs():
    with refused("RotaryEmbedding has no input X; it has x, cos, sin, positionIds"):
        resolve(ROTARY, {"X": X})
    with refused("RotaryEmbedding: the input sin is missing"):
        resolve(ROTARY, {"x": X, "cos": X})


def test_a_type_variable_is_bound_once():
    x, cos = Tensor((2, 3), "float16"), Tensor((2, 3), "float32")
    with refused("RotaryEmbedding: cos has dtype float32; expected float16, the dtype of x"):
        resolve(ROTARY, {"x": x, "cos": cos, "sin": cos})


@pytest.mark.parametrize(
    ("name", "dtype", "message"),
    [
        ("x", "int32", "x has dtype int32; expected float32 or float16"),
        ("positionIds", "int32", "positionIds has dtype int32; expected int64"),
    ],
)
def test_a_type_variable_has_its_dtypes(name, dtype, message):
    tensors = {"x": X, "cos": X, "sin": X, "positionIds": Tensor((2, 3), "int64")}
    with refused(f"RotaryEmbedding: {message}"):
        resolve(ROTARY, tensors | {name: Tensor((2, 3), dtype)})


def test_a_port_may_have_a_concrete_dtype():
    spec = operator(inputs={"x": {"dtype": "int8"}}, outputs={"y": {"dtype": "bool", "shape": []}})
    resolved = call(spec, inputs={"x": Tensor((), "int8")})
    assert resolved.outputs == (("y", Tensor((), "bool")),)
    with refused("Small: x has dtype float32; expected int8"):
        call(spec)


# --- outputs ------------------------------------------------------------------------------------


def outputs_of(port, *, derive=None, asked=None, **keys):
    keys = {"derive": derive or {}, "outputs": {"y": {"dtype": "T"} | port}} | keys
    ((_, tensor),) = call(operator(**keys), outputs=asked).outputs
    return tensor


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ("shapes.x", (2, 3)),
        ("[dim(shapes.x, 1), 4 / 2, 1]", (3, 2, 1)),
        (["dim(shapes.x, 1)", 7, 2.0], (3, 7, 2)),
        ([], ()),
        ("moveAxis(shapes.x, 0, 1)", (3, 2)),
        ("prefix(shapes.x, 1) + [5]", (2, 5)),
        ("range_", (4, 3)),
        ("derive.range_", (4, 3)),
        ("derive['range_']", (4, 3)),
        ("[rows]", (4,)),
        ("[0, rows]", (0, 4)),
        ("rows > 3 and [1] or [2]", (1,)),
    ],
)
def test_output_shapes(shape, expected):
    derive = {
        "rows": "dim(shapes.x, 0) * 2",
        # Not read by any of the shapes: it needs the output, which has none yet.
        "size": "numel(shapes.y)",
        "range_": ["rows", "dim(shapes.x, 1)"],
    }
    assert outputs_of({"shape": shape}, derive=derive).shape == expected


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (
            "dim(shapes.x, 0)",
            "the shape of y comes out as 2; expected a list of whole numbers, 0 or more",
        ),
        (["dim(shapes.x, 0) - 5"], "the shape of y comes out as [-3]"),
        (["dim(shapes.x, 1) / 2"], "the shape of y comes out as [1.5]"),
        (["attrs.nothing"], "the shape of y comes out as [undefined]"),
        ("'ab'", 'the shape of y comes out as "ab"'),
        ([2, "true"], "the shape of y comes out as [2, true]"),
        (["1 / 0"], "the shape of y comes out as [Infinity]"),
        (["shapes.z[0]"], "the shape of y: cannot look up 0 in undefined"),
        (["rows"], "derive.rows: numel takes a list, got undefined"),
    ],
)
def test_output_shapes_that_are_none(shape, message):
    with refused(f"Small: {message}"):
        outputs_of({"shape": shape}, derive={"rows": "numel(shapes.z)"})


def test_an_output_without_a_shape_gets_it_from_the_caller():
    assert outputs_of({}, asked={"y": (4, 1)}).shape == (4, 1)
    for asked in (None, {"y": None}):
        with refused("Small: the manifest states no shape for y; one is needed"):
            outputs_of({}, asked=asked)
    with refused("Small: the shape of y comes out as [4, -1]"):
        outputs_of({}, asked={"y": (4, -1)})


def test_the_caller_s_shape_comes_before_the_manifest_s():
    # ... whose contract then tests it, as RotaryEmbedding's does.
    assert outputs_of({"shape": "shapes.x"}, asked={"y": [9]}).shape == (9,)


def test_an_output_s_shape_sees_which_outputs_are_asked_for_and_those_before_it():
    port = {"dtype": "T", "optional": True}
    outputs = {
        "y": {"dtype": "T", "shape": ["2 if present.z else 1", "4 if present.w else 3"]},
        "z": port | {"shape": "shapes.y + [ranks.y]"},
        "w": port | {"shape": []},
    }
    resolved = call(operator(outputs=outputs), outputs={"z": None, "y": None})
    assert [tensor.shape for _, tensor in resolved.outputs] == [(2, 3), (2, 3, 2)]
    assert call(operator(outputs=outputs)).outputs == (("y", Tensor((1, 3), "float32")),)


@pytest.mark.parametrize("shape", ["[big] if big is defined else [9]", "[derive['b' ~ 'ig']]"])
def test_what_an_output_s_shape_may_read_is_derived(shape):
    derive = {"size": "numel(shapes.y)", "big": "numel(shapes.x)"}
    assert outputs_of({"shape": shape}, derive=derive).shape == (6,)


def test_optional_outputs_exist_only_if_asked_for():
    shapes = {"y1": (2, 3), "y0": (1, 3)}
    resolved = resolve(SPLIT, {"input": X}, outputs=shapes)
    assert [name for name, _ in resolved.outputs] == ["y0", "y1"]
    present = scope(resolved, IDEAL)["present"]
    assert present == {"input": True, "split": False, "y0": True, "y1": True} | {
        name: False for name in ("y2", "y3", "y4")
    }
    with refused("Split: the output y0 is not optional"):
        resolve(SPLIT, {"input": X}, outputs={"y1": (2, 3)})
    with refused("Split has no output y5; it has y0, y1, y2, y3, y4"):
        resolve(SPLIT, {"input": X}, outputs={"y0": (2, 3), "y5": ()})


def test_output_dtypes():
    assert outputs_of({"shape": []}).dtype == "float32"  # as bound by an input
    assert outputs_of({"shape": [], "dtype": "int64"}).dtype == "int64"
    constraints = {"T": ["float32"], "O": ["uint8"], "P": ["int32", "uint32"]}
    keys = {"shape": [], "dtype": "O"}
    assert outputs_of(keys, typeConstraints=constraints).dtype == "uint8"  # the only one
    with refused("Small: no input decides the dtype of y"):
        outputs_of({"shape": [], "dtype": "P"}, typeConstraints=constraints)
    # ... and then the caller may, as for a cast.
    keys = {"port": {"shape": [], "dtype": "P"}, "typeConstraints": constraints}
    assert outputs_of(**keys, asked={"y": Tensor((), "uint32")}) == Tensor((), "uint32")
    with refused("Small: y has dtype uint8; expected int32 or uint32"):
        outputs_of(**keys, asked={"y": Tensor((), "uint8")})
    with refused("Small: y has dtype float16; expected float32, the dtype of x"):
        outputs_of({"shape": []}, asked={"y": Tensor((), "float16")})


def test_a_dtype_that_the_caller_decides_is_bound_for_all_outputs():
    port = {"dtype": "P", "shape": []}
    spec = operator(
        typeConstraints={"T": ["float32"], "P": ["int32", "uint32"]},
        outputs={"y": port, "z": port},
    )
    resolved = call(spec, outputs={"y": None, "z": Tensor((), "uint32")})
    assert [tensor.dtype for _, tensor in resolved.outputs] == ["uint32", "uint32"]
    assert scope(resolved, IDEAL)["logicalDtypes"] == {"T": "float32", "P": "uint32"}


# --- attributes, args, tunables -----------------------------------------------------------------

ATTRIBUTES = {
    "axis": {"default": -1},
    "mode": {"default": "sum"},
    "scale": {},
    "axes": {"default": [0, 1]},
    "keep": {"default": False},
    "size": {},
}
CONSTRAINTS = {
    "mode": {"values": ["sum", "mean"]},
    "scale": {"values": [0.1, 2, [0.1, 1]]},
    "size": {"required": True},
}


def attributes(**given):
    spec = operator(attributes=ATTRIBUTES, attributeConstraints=CONSTRAINTS)
    return dict(call(spec, attributes={"size": 1} | given).attributes)


def test_defaults_of_attributes():
    expected = {"axis": -1, "mode": "sum", "axes": (0, 1), "keep": False, "size": 1}
    assert attributes() == attributes(axis=None, scale=None) == expected
    assert attributes(axis=2, mode="mean", axes=[3])["axes"] == (3,)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"axi": 1}, "Small has no attribute axi; it has axis, mode, scale, axes, keep, size"),
        ({"size": None}, "Small: the attribute size is missing"),
        ({"mode": "max"}, 'Small: mode is "max"; expected one of "sum", "mean"'),
        ({"scale": 0.2}, "Small: scale is 0.2; expected one of 0.1, 2, [0.1, 1]"),
        ({"scale": [0.1]}, "Small: scale is [0.1]; expected one of 0.1, 2, [0.1, 1]"),
        ({"axis": np.arange(3)}, "Small: axis is a ndarray; expected a number, a string or a list"),
        ({"axis": True}, "Small: axis is true; expected a number"),
        ({"axis": [1]}, "Small: axis is [1]; expected a number"),
        ({"axes": 1}, "Small: axes is 1; expected a list of numbers"),
        ({"axes": ["x"]}, 'Small: axes is ["x"]; expected a list of numbers'),
        ({"axes": [True]}, "Small: axes is [true]; expected a list of numbers"),
        ({"keep": 1}, "Small: keep is 1; expected true or false"),
        ({"mode": 1}, "Small: mode is 1; expected a string"),
        ({"scale": "big"}, 'Small: scale is "big"; expected a number or a list of numbers'),
        ({"axes": [{}]}, "Small: axes is a dict; expected a number, a string or a list"),
    ],
)
def test_attributes_that_are_refused(given, message):
    with refused(message):
        attributes(**given)


@pytest.mark.parametrize(
    "scale", [0.1, float(np.float32(0.1)), 2, 2.0, [float(np.float32(0.1)), 1]]
)
def test_values_are_compared_after_rounding_to_f32(scale):
    assert "scale" in attributes(scale=scale)


def test_values_print_what_equal_calls_print():
    # Equal calls share one plan, and Python finds 1, 1.0 and True equal.
    assert repr(attributes(axis=2.0)["axis"]) == "2"
    assert repr(attributes(keep=True)["keep"]) == "True"
    free = operator(attributes={"any": {}})
    assert repr(dict(call(free, attributes={"any": True}).attributes)["any"]) == "1"


ARGS = {
    "count": {"kind": "u32"},
    "shift": {"kind": "i32", "required": False, "oneOf": [-1, 1]},
    "scale": {"kind": "f32", "required": False},
    "flag": {"kind": "bool", "required": False},
    "mode": {"kind": "string", "required": False},
}


def args(**given):
    return dict(call(operator(args=ARGS), args={"count": 1} | given).args)


def test_args():
    assert args() == {"count": 1}
    given = {"count": 3, "shift": -1, "scale": 0.5, "flag": True, "mode": "fast"}
    assert args(**given) == given
    assert repr(args(scale=2.0)["scale"]) == "2"
    resolved = call(operator(args=ARGS), args={"count": 1, "flag": False})
    assert scope(resolved, IDEAL)["present"] == {
        **{"x": True, "y": True, "count": True, "flag": True},
        **{"shift": False, "scale": False, "mode": False},
    }


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"counts": 1}, "Small has no argument counts; it has count, shift, scale, flag, mode"),
        ({"count": None}, "Small: the argument count is missing"),
        ({"count": 1.5}, "Small: count is 1.5; expected u32"),
        ({"count": True}, "Small: count is true; expected u32"),
        ({"count": -1}, "Small: count is -1; expected u32, from 0 to 4294967295"),
        ({"count": 2**32}, "Small: count is 4294967296; expected u32, from 0 to 4294967295"),
        ({"shift": 2**31}, "Small: shift is 2147483648; expected i32, from -2147483648 to 2147483"),
        ({"shift": 0}, "Small: shift is 0; expected one of -1, 1"),
        ({"scale": "1"}, 'Small: scale is "1"; expected f32'),
        ({"flag": 1}, "Small: flag is 1; expected bool"),
        ({"mode": 1}, "Small: mode is 1; expected string"),
        ({"scale": np.float32(1)}, "Small: scale is a float32; expected a number"),
    ],
)
def test_args_that_are_refused(given, message):
    with refused(message):
        args(**given)


TUNABLES = {
    "tunables": {"SIZE": {"default": 256}, "MODE": {"default": "fast"}},
    "variants": [
        variant("one", tunables={"SIZE": {"default": 64}, "LANES": {"default": 4}}),
        variant("two", tunables={"DEEP": {"default": True}}),
    ],
}


def test_tunables_of_a_call():
    resolved = call(operator(**TUNABLES), tunables={"SIZE": 32.0, "DEEP": False, "LANES": 2})
    assert resolved.tunables == (("DEEP", False), ("LANES", 2), ("SIZE", 32))
    # Outside of a variant there are the manifest's and the call's.
    expected = {"SIZE": 32, "MODE": "fast", "DEEP": False, "LANES": 2}
    assert scope(resolved, IDEAL)["tunables"] == expected
    assert scope(call(operator(**TUNABLES)), IDEAL)["tunables"] == {"SIZE": 256, "MODE": "fast"}
    assert resolved.with_tunables(SIZE=8).tunables[2] == ("SIZE", 8)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"SIZ": 1}, "Small has no tunable SIZ; it has DEEP, LANES, MODE, SIZE"),
        ({"SIZE": "64"}, 'Small: SIZE is "64"; expected a number'),
        ({"SIZE": True}, "Small: SIZE is true; expected a number"),
        ({"MODE": 1}, "Small: MODE is 1; expected a string"),
        ({"DEEP": 1}, "Small: DEEP is 1; expected a boolean"),
        ({"SIZE": [1]}, "Small: SIZE is [1]; expected a number"),
        ({"SIZE": None}, "Small: SIZE is a NoneType; expected a number"),
    ],
)
def test_tunables_that_are_refused(given, message):
    with refused(message):
        call(operator(**TUNABLES), tunables=given)


# --- scope --------------------------------------------------------------------------------------


def test_the_scope_of_a_call():
    resolved = rotary((2, 5, 24), (11, 4), None, (2, 5), num_heads=3, dtype="float16")
    names = scope(resolved, PRESETS["apple-m"])
    assert names["dtypes"] == {"T": "f16", "M": "u32"}  # M's port is stored as uint32
    assert names["logicalDtypes"] == {"T": "float16", "M": "int64"}
    assert names["tensorDtypes"] == {
        **dict.fromkeys(("x", "cos", "sin", "y"), "float16"),
        "positionIds": "uint32",
    }
    assert names["ranks"] == {"x": 3, "cos": 2, "sin": 2, "positionIds": 2, "y": 3}
    assert names["shapes"]["positionIds"] == (2, 5)
    assert names["attrs"] == {"interleaved": 0, "rotary_embedding_dim": 0, "num_heads": 3}
    assert names["tunables"] == {"WORKGROUP_SIZE": 256}
    assert names["DISPATCH_FOLD_WIDTH"] == 65535
    assert names["f16Ok"]("f16") and names["device"]["features"]["has"]("shader-f16")
    assert names["device"]["limits"]["maxStorageBuffersPerShaderStage"] == 10
    assert names["device"]["adapterInfo"]["vendor"] == "apple"


def test_what_is_not_bound_is_in_present_alone():
    names = scope(rotary((2, 3, 5, 8), (2, 5, 4)), PRESETS["floor"])
    for key in ("shapes", "ranks", "tensorDtypes"):
        assert "positionIds" not in names[key]
    assert names["present"] == {
        **dict.fromkeys(("x", "cos", "sin", "y"), True),
        "positionIds": False,
    }
    assert "M" not in names["dtypes"] and not names["f16Ok"]("float16")


@pytest.mark.parametrize(
    ("dtype", "wgsl", "storage"),
    [
        ("float32", "f32", "float32"),
        ("float16", "f16", "float16"),
        ("int32", "i32", "int32"),
        ("int16", "i32", "int32"),
        ("int8", "i32", "int32"),
        ("uint32", "u32", "uint32"),
        ("uint8", "u32", "uint32"),
        ("bool", "u32", "uint32"),
        ("int64", "vec2<u32>", "int64"),
    ],
)
def test_storage(dtype, wgsl, storage):
    names = scope(split((4,), (4,), dtype=dtype), IDEAL)
    assert names["dtypes"] == {"T": wgsl}
    assert names["logicalDtypes"] == {"T": dtype}
    assert names["tensorDtypes"] == {"input": storage, "y0": storage}


@pytest.mark.parametrize(
    ("dtype", "wgsl", "storage"),
    [
        ("int64", "i32", "int32"),
        ("int32", "i32", "int32"),
        ("uint8", "i32", "int32"),
        ("float32", "f32", "float32"),  # no whole number: it lies as it is
        ("bool", "u32", "uint32"),
    ],
)
def test_storage_of_a_type_variable_that_admits_more_than_int64(dtype, wgsl, storage):
    spec = operator(
        typeConstraints={"I": ["int64", "int32", "uint8", "float32", "bool"]},
        inputs={"x": {"dtype": "I", "storage": "int32"}},
        outputs={"y": {"dtype": "I", "shape": []}},
    )
    names = scope(call(spec, inputs={"x": Tensor((), dtype)}), IDEAL)
    assert names["dtypes"] == {"I": wgsl} and names["tensorDtypes"]["x"] == storage


def test_what_does_not_fit_a_storage_is_an_error_unless_the_manifest_says_otherwise():
    def narrowing(**port):
        return operator(inputs={"x": {"dtype": "int64"} | port}).inputs["x"].narrowing

    assert narrowing() is None
    assert narrowing(storage="int32") == narrowing(storage="uint32", narrowing="checked")
    assert narrowing(storage="int32") == "checked"
    assert narrowing(storage="int32", narrowing="saturating") == "saturating"


def test_a_concrete_dtype_is_a_key_too():
    spec = operator(
        inputs={"x": {"dtype": "int64", "storage": "int32"}, "z": {"dtype": "int64"}},
        outputs={"y": {"dtype": "bool", "shape": []}},
    )
    tensor = Tensor((), "int64")
    names = scope(call(spec, inputs={"x": tensor, "z": tensor}), IDEAL)
    assert names["dtypes"] == {"int64": "i32", "bool": "u32"}  # a port's storage comes first
    assert names["logicalDtypes"] == {"int64": "int64", "bool": "bool"}
    assert names["tensorDtypes"] == {"x": "int32", "z": "int64", "y": "uint32"}


def test_derived_values_see_the_earlier_ones():
    spec = operator(
        derive={
            "a": "dim(shapes.x, 0)",
            "b": ["a", {"c": "derive.a + 1"}, 5],
            "nothing": "attrs.nothing",
            "ranks": "{'x': 9}",
            "later": "ranks.x",
        }
    )
    names = extend(scope(call(spec), IDEAL), spec.derive.items())
    assert names["derive"]["b"] == names["b"] == [2, {"c": 3}, 5]
    assert names["nothing"] is UNDEFINED
    assert names["later"] == 9  # a derived name comes before the format's own


def test_extending_a_scope_leaves_it_alone():
    before = scope(call(operator()), IDEAL)
    spec = operator(derive={"a": 1})
    assert extend(before, spec.derive.items())["derive"] == {"a": 1}
    assert before["derive"] == {} and "a" not in before


def test_equal_calls_are_equal():
    one, two = (rotary((2, 3, 5, 8), (2, 5, 4), interleaved=1) for _ in range(2))
    assert one == two and hash(one) == hash(two)
    assert one != rotary((2, 3, 5, 8), (2, 5, 4), interleaved=0)
    assert one != rotary((2, 3, 5, 8), (2, 5, 4), interleaved=1).with_tunables(WORKGROUP_SIZE=8)
    assert len({one, two, split((4,), (4,))}) == 2
    assert hash(call(operator(attributes=ATTRIBUTES), attributes={"axes": [[1], [2]]}))


# --- in-out ports -------------------------------------------------------------------------------


def in_out(read, written, *, given=X, **keywords):
    """A call of a manifest whose port `x` is an input and an output."""
    variables = {"T": ["float32"], "I": ["int64", "int32"]}
    ports = {"inputs": {"x": read}, "outputs": {"x": written}}
    spec = operator(typeConstraints=variables, variants=[], **ports)
    return call(spec, inputs={"x": given}, **keywords)


def test_an_in_out_port_is_one_array():
    for written in ({}, {"shape": "shapes.x"}, {"shape": [2, "dim(shapes.x, -1)"]}):
        resolved = in_out({"dtype": "T"}, {"dtype": "T"} | written)
        assert resolved.inputs == resolved.outputs == (("x", X),)
        assert scope(resolved, IDEAL)["present"] == {"x": True}
    assert in_out({"dtype": "T"}, {"dtype": "T"}, outputs={"x": (2, 3)}).outputs == (("x", X),)


@pytest.mark.parametrize(
    ("written", "outputs"),
    [({"shape": [3, 2]}, None), ({}, {"x": (3, 2)}), ({"shape": "shapes.x"}, {"x": [3, 2]})],
)
def test_the_two_sides_of_an_in_out_port_agree(written, outputs):
    message = "Small: x goes in as float32[2,3] and out as float32[3,2]; an in-out port is one"
    with refused(message):
        in_out({"dtype": "T"}, {"dtype": "T"} | written, outputs=outputs)


def test_an_in_out_port_that_is_left_out_on_one_side():
    read, written = {"dtype": "T", "optional": True}, {"dtype": "T", "optional": True}
    resolved = in_out(read, written, outputs={})
    assert resolved.outputs == () and scope(resolved, IDEAL)["present"] == {"x": True}
    with refused("Small: the manifest states no shape for x; one is needed"):
        in_out(read, written, given=None, outputs={"x": None})
    resolved = in_out(read, written, given=None, outputs={"x": (4,)})
    assert (resolved.inputs, resolved.outputs) == ((), (("x", Tensor((4,), "float32")),))


@pytest.mark.parametrize(
    ("read", "written"),
    [({"storage": "int32"}, {}), ({}, {"storage": "int32"}), ({"storage": "int32"},) * 2],
)
def test_an_in_out_port_has_one_storage(read, written):
    resolved = in_out({"dtype": "I"} | read, {"dtype": "I"} | written, given=Tensor((2,), "int64"))
    for port in (resolved.spec.inputs["x"], resolved.spec.outputs["x"]):
        assert resolved.storage(port).name == port.storage == "int32"
        assert port.narrowing == "checked"


def test_an_in_out_port_with_two_storages_is_refused():
    with pytest.raises(SpecError, match=r"\$\.outputs\.x: the in-out port x has two storages"):
        in_out({"dtype": "I", "storage": "int32"}, {"dtype": "I", "storage": "uint32"})
