"""Plans: the golden ones of every variant on every preset, then each rule on small manifests."""

import math
import os
import re
import struct
import traceback
from pathlib import Path

import pytest
from cases import LARGE_CASES, RotaryCase, SplitCase
from engine import SPECS, operator, resolved, rotary, split, step, variant

from jax_webgpu import plan, variants
from jax_webgpu.capabilities import IDEAL, PRESETS, make
from jax_webgpu.errors import CallError, DeviceError, LimitError, SpecError
from jax_webgpu.resolve import Tensor, resolve

FLOOR = PRESETS["floor"]


def planned(template="fn main() {}", *, shape=(2, 3), device=FLOOR, call=None, **keys):
    """The plan of a call of a small manifest with these keys."""
    inputs = {"x": Tensor(shape, "float32")}
    return plan.make(resolve(operator(template, **keys), inputs, **call or {}), device)


def one_pass(template="fn main() {}", *, into=None, **keys):
    """The only pass of such a plan; `into` changes the pass of the manifest."""
    ready = planned(template, variants=[variant("only", passes=[step(**(into or {}))])], **keys)
    (only,) = ready.passes
    return only


def refused(message, error=CallError):
    return pytest.raises(error, match=f"^{re.escape(message)}")


# --- golden plans -------------------------------------------------------------------------------
#
# A file for each variant: its call in f32, with the WGSL, and in f16. Devices that have the same
# plan stand together.

GOLDEN = Path(__file__).parent / "golden"
UPDATE = "JAX_WEBGPU_UPDATE_GOLDEN"

GOLDEN_CASES = [
    *(
        RotaryCase(
            f"rank{rank}_{cache}{rest}", rank, 2, 3, 5, *sizes, rest in interleaved, "", rows
        )
        for rank, interleaved in ((3, [""]), (4, ["_quad"]))
        for cache, rows in (("cache2_pos", 13), ("cache3", None))
        for rest, sizes in (("", (6, 4)), ("_output_vec4", (12, 4)), ("_quad", (24, 16)))
    ),
    SplitCase("one_output_copy", (3, 7), 1, (7,), ""),
    SplitCase("two_outputs", (3, 7), 1, (4, 3), ""),
    SplitCase("two_outputs_block_vec4", (3, 5, 8), 1, (2, 3), ""),
    SplitCase("three_outputs", (3, 7), 1, (0, 4, 3), ""),
    SplitCase("three_outputs_block_scalar_x4", (3, 20), 1, (7, 6, 7), ""),
    SplitCase("three_outputs_block_vec4", (3, 24), 1, (4, 8, 12), ""),
    SplitCase("four_outputs", (3, 11), 1, (4, 4, 1, 2), ""),
    SplitCase("four_outputs_block_vec4", (3, 24), 1, (4, 12, 0, 8), ""),
    SplitCase("five_outputs", (3, 20), 1, (4, 1, 0, 8, 7), ""),
]


def golden_text(case):
    """What the golden file of a variant holds."""
    sections = []
    for dtype in ("float32", "float16"):
        devices = {}
        for device in PRESETS.values():
            call = resolved(type(case)(**vars(case) | {"dtype": dtype}))
            try:
                text = plan.make(call, device).describe(wgsl=dtype == "float32")
            except DeviceError as error:
                text = f"call      {call}\ndevice\nrefused {str(error).splitlines()[1]}"
            devices.setdefault(re.sub("(?m)^device.*", "device    {}", text), []).append(device)
        for text, same in devices.items():
            named = ", ".join(device.name for device in same)
            sections.append(text.replace("device    {}", f"device    {named}"))
    return "\n\n".join(sections) + "\n"


def test_every_variant_has_a_golden_plan():
    every = sorted(variant.id for spec in SPECS.values() for variant in spec.variants)
    assert sorted(case.variant for case in GOLDEN_CASES) == every and len(every) == 21
    if UPDATE in os.environ:
        GOLDEN.mkdir(exist_ok=True)
        for path in GOLDEN.glob("*.txt"):
            path.unlink()
        for case in GOLDEN_CASES:
            (GOLDEN / f"{case.variant}.txt").write_text(golden_text(case), encoding="utf-8")
    assert sorted(path.stem for path in GOLDEN.iterdir()) == every


@pytest.mark.parametrize("case", GOLDEN_CASES, ids=lambda case: case.variant)
def test_golden_plan(case):
    path = GOLDEN / f"{case.variant}.txt"
    assert golden_text(case) == path.read_text(encoding="utf-8"), (
        f"{path.name} no longer holds; if the change is meant, run the tests once with {UPDATE}=1"
    )


# --- dispatch -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dispatch", "workgroups"),
    [
        ({"x": 7}, (7, 1, 1)),
        ({"x": "dim(shapes.x, 0)", "y": "dim(shapes.x, 1)", "z": 4}, (2, 3, 4)),
        ({"x": "8 / 2"}, (4, 1, 1)),
        ({"workgroups": 1}, (1, 1, 1)),
        ({"workgroups": 65535}, (65535, 1, 1)),
        ({"workgroups": 65536}, (65535, 2, 1)),
        ({"workgroups": "65535 * 3"}, (65535, 3, 1)),
        ({"threads": 256, "workgroupSize": 256}, (1, 1, 1)),
        ({"threads": 257, "workgroupSize": 256}, (2, 1, 1)),
        ({"threads": "numel(shapes.x) / 4", "workgroupSize": 1}, (2, 1, 1)),  # of 1.5 threads
        ({"threads": "65535 * 64 + 1", "workgroupSize": "32 * 2"}, (65535, 2, 1)),
    ],
)
def test_dispatch_forms(dispatch, workgroups):
    assert one_pass(into={"dispatch": dispatch}).workgroups == workgroups


@pytest.mark.parametrize(
    ("dispatch", "message"),
    [
        ({"x": 1.5}, "dispatch.x comes out as 1.5"),
        ({"x": 1, "y": -1}, "dispatch.y comes out as -1"),
        ({"x": 1, "z": "1 / 0"}, "dispatch.z comes out as Infinity"),
        ({"x": "0 / 0"}, "dispatch.x comes out as NaN"),
        ({"x": "'2'"}, 'dispatch.x comes out as "2"'),
        ({"x": "true"}, "dispatch.x comes out as true"),
        ({"x": "attrs.size"}, "dispatch.x comes out as undefined"),
        ({"x": "attrs.size + 1"}, "cannot add undefined + 1"),
        ({"workgroups": 2.5}, "dispatch.workgroups comes out as 2.5"),
        ({"workgroups": -1}, "dispatch.workgroups comes out as -1"),
        ({"threads": 8, "workgroupSize": 0}, "dispatch.threads / workgroupSize comes out as Inf"),
        ({"threads": 8, "workgroupSize": 1.5}, "dispatch.workgroupSize comes out as 1.5"),
        ({"threads": -9, "workgroupSize": 2}, "dispatch.threads / workgroupSize comes out as -4"),
        ({"threads": "'8'", "workgroupSize": 2}, "ceilDiv takes a number"),
    ],
)
def test_dispatches_that_are_refused(dispatch, message):
    with refused(f"Small.only: {message}"):
        one_pass(into={"dispatch": dispatch})


@pytest.mark.parametrize(
    "dispatch",
    [
        {"x": 0},
        {"x": 5, "y": 0},
        {"x": 1, "z": "numel([0])"},
        {"workgroups": 0},
        {"threads": 0, "workgroupSize": 64},
    ],
)
def test_a_pass_without_workgroups_is_skipped(dispatch):
    passes = [step(id="gone", dispatch=dispatch), step(id="kept")]
    ready = planned(variants=[variant("only", passes=passes)])
    assert [each.label for each in ready.passes] == ["Small.only.kept"]


def test_a_skipped_pass_is_not_even_rendered():
    passes = [step(dispatch={"x": 0}, derive={"bad": 1})]
    assert planned("{{ 1 < 'a' }}", variants=[variant("only", passes=passes)]).passes == ()


def test_no_passes_where_all_outputs_are_empty():
    assert planned("{{ 1 < 'a' }}", shape=(2, 0)).passes == ()
    call = rotary((0, 3, 5, 8), (0, 5, 4))
    ready = plan.make(call, FLOOR)
    assert ready.passes == () and ready.variant == "rank4_cache3_quad"
    assert ready.describe().splitlines()[-1] == "nothing to dispatch: every output is empty"
    assert plan.make(split((3, 0), (3, 0), (3, 0), axis=1), FLOOR).passes == ()
    # One that is not empty is enough.
    assert len(plan.make(split((3, 4), (3, 0), (3, 4), axis=1), FLOOR).passes) == 1


@pytest.mark.parametrize("case", LARGE_CASES, ids=lambda case: case.id)
def test_large_dispatches_fold_or_stride(case):
    """Past 65,535 workgroups a dispatch goes on in y, or its invocations walk on in a loop."""
    (only,) = plan.make(resolved(case, WORKGROUP_SIZE=1), PRESETS["h200"]).passes
    x, y, z = only.workgroups
    assert (x, z) == (65535, 1)
    if "gid.y" in only.wgsl:
        fields = {name: value for name, _, value in only.bindings[-1].fields}
        needed = max(value for name, value in fields.items() if name.endswith("Count"))
        assert y == math.ceil(needed / 65535) > 1
        assert "gid.x + gid.y * 65535u" in only.wgsl
    else:
        assert y == 1 and "num_workgroups" in only.wgsl


# --- limits -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("axis", "dispatch"),
    [("x", {"x": 70000}), ("y", {"x": 1, "y": 70000}), ("z", {"x": 1, "z": 7e4})],
)
def test_limit_of_workgroups(axis, dispatch):
    with refused(
        f"Small.only.pass_0: workgroups in {axis}: 70,000; maxComputeWorkgroupsPerDimension of "
        "floor is 65,535",
        LimitError,
    ):
        one_pass(into={"dispatch": dispatch})


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ("256", None),
        ("16, 16u", None),
        ("4, 4, 16,", None),
        ("257", "workgroup size 257; maxComputeWorkgroupSizeX of floor is 256"),
        ("1, 257", "workgroup size 257; maxComputeWorkgroupSizeY of floor is 256"),
        ("1, 1, 65u", "workgroup size 65; maxComputeWorkgroupSizeZ of floor is 64"),
        (
            "16, 17",
            "invocations a workgroup: 272; maxComputeInvocationsPerWorkgroup of floor is 256",
        ),
    ],
)
def test_limits_of_a_workgroup(sizes, message):
    template = f"@compute @workgroup_size({sizes}) fn main() {{}}"
    if message is None:
        assert one_pass(template)
        return
    with refused(f"Small.only.pass_0: {message}", LimitError):
        one_pass(template)
    assert one_pass(template, device=IDEAL)


def test_a_caller_s_workgroup_size_over_the_limit():
    call = rotary((2, 3, 5, 8), (2, 5, 4)).with_tunables(WORKGROUP_SIZE=512)
    with refused(
        "RotaryEmbedding: WORKGROUP_SIZE is 512; maxComputeInvocationsPerWorkgroup of floor is 256",
        LimitError,
    ):
        plan.make(call, FLOOR)
    assert "@workgroup_size(512)" in plan.make(call, PRESETS["h200"]).passes[0].wgsl


def test_tunables_are_fitted_to_a_device():
    call = rotary((2, 3, 5, 8), (2, 5, 4))
    small = make("small", maxComputeInvocationsPerWorkgroup=16)
    size = call.spec.tunables["WORKGROUP_SIZE"]
    own = call.with_tunables(WORKGROUP_SIZE=64)
    for given, device, better, expected in [
        (call, FLOOR, {}, {}),
        (call, small, {}, {"WORKGROUP_SIZE": 16}),
        (call, FLOOR, {"WORKGROUP_SIZE": size // 2, "OTHER": 1}, {"WORKGROUP_SIZE": size // 2}),
        (call, FLOOR, {"WORKGROUP_SIZE": 1024}, {"WORKGROUP_SIZE": 256}),
        (own, FLOOR, {"WORKGROUP_SIZE": 128}, {"WORKGROUP_SIZE": 64}),
        (own, small, {"WORKGROUP_SIZE": 128}, {"WORKGROUP_SIZE": 64}),
    ]:
        assert dict(plan.fitted(given, device, better).tunables) == expected


def test_limits_of_a_binding_s_size():
    most = 134217728 // 4
    assert one_pass(shape=(most,)).bindings[0].size == most * 4
    with refused(
        "Small.only.pass_0: the binding x in bytes: 134,217,732; maxStorageBufferBindingSize of "
        "floor is 134,217,728",
        LimitError,
    ):
        one_pass(shape=(most + 1,))
    small_buffers = make("small buffers", maxBufferSize=1000)
    with refused(
        "Small.only.pass_0: the binding x in bytes: 1,004; maxBufferSize of small buffers is 1,000",
        LimitError,
    ):
        one_pass(shape=(251,), device=small_buffers)


def test_limit_of_the_elements_that_wgsl_can_count():
    assert one_pass(shape=(2**32,), device=IDEAL)
    with refused("x has 4,294,967,297 elements of f32; WGSL counts them in u32", LimitError):
        one_pass(shape=(2**32 + 1,), device=IDEAL)


def test_limit_of_a_uniform_binding_s_size():
    fields = [{"name": f"n{index}", "type": "u32", "value": index} for index in range(5)]
    keys = {"bindings": {"params": {"struct": fields}}, "into": {"bindings": ["x", "params"]}}
    assert one_pass(**keys).bindings[1].size == 32
    with refused(
        "Small.only.pass_0: the binding params in bytes: 32; maxUniformBufferBindingSize of tight "
        "is 16",
        LimitError,
    ):
        one_pass(device=make("tight", maxUniformBufferBindingSize=16), **keys)


# --- uniforms -----------------------------------------------------------------------------------


def params(*fields, **keys):
    """The bound struct with these fields, the only binding of a pass."""
    bindings = {"params": {"struct": list(fields)}}
    return one_pass(bindings=bindings, into={"bindings": ["params"]}, **keys).bindings[0]


def field(name="n", type="u32", **keys):
    return {"name": name, "type": type} | keys


def test_a_struct_is_packed_and_padded():
    bound = params(
        field("count", value="numel(shapes.x)"),
        field("shift", "i32", value=-3),
        field("scale", "f32", value="1 / 3"),
        field("most", value=4294967295),
        field("flag", value="ranks.x == 2"),
    )
    assert bound.data == struct.pack("<IifIIIII", 6, -3, 1 / 3, 4294967295, 1, 0, 0, 0)
    assert (bound.buffer, bound.type, bound.size, bound.source) == ("uniform", "Params", 32, "")
    assert [name for name, _, _ in bound.fields] == [
        *("count", "shift", "scale", "most", "flag", "_pad0", "_pad1", "_pad2")
    ]


@pytest.mark.parametrize(("count", "size"), [(0, 16), (1, 16), (3, 16), (4, 16), (5, 32), (8, 32)])
def test_a_struct_has_whole_rows_of_16_bytes_and_at_least_one(count, size):
    bound = params(*(field(f"n{index}", value=7) for index in range(count)))
    assert bound.size == len(bound.data) == size == 4 * len(bound.fields)
    assert bound.data == struct.pack("<I", 7) * count + bytes(size - 4 * count)


def test_a_field_s_value_is_its_own_or_an_arg_s_or_the_default():
    def value(given, **keys):
        declared = {"n": {"kind": "u32", "required": False}}
        return params(field(**keys), args=declared, call={"args": {"n": given}}).fields[0][2]

    assert value(7, value=5, default=6) == 5
    assert value(7, default=6) == value(7) == 7
    assert value(None, default=6) == value(7, value="attrs.size", default=6) == 6
    assert value(None, required=False) == 0
    with refused("Small.only: the field n comes out as undefined"):
        value(None)


@pytest.mark.parametrize(
    ("type", "value", "message"),
    [
        ("u32", "1.5", "1.5; expected a whole number from 0 to 4294967295 (u32)"),
        ("u32", "-1", "-1; expected a whole number from 0 to 4294967295 (u32)"),
        ("u32", "4294967296", "4294967296; expected a whole number from 0"),
        ("u32", "0 / 0", "NaN; expected a whole number"),
        ("u32", "1 / 0", "Infinity; expected a whole number"),
        ("i32", "2147483648", "2147483648; expected a whole number from -2147483648 to 2147483647"),
        ("i32", "-2147483649", "-2147483649; expected a whole number"),
        ("f32", "0 / 0", "NaN"),
        ("f32", "1e39", "1e+39, beyond f32"),
        ("u32", "'7'", '"7"'),
        ("u32", "[7]", "[7]"),
        ("u32", "none", "none"),
    ],
)
def test_values_that_are_not_exact_are_refused(type, value, message):
    with refused(f"Small.only: the field n comes out as {message}"):
        params(field(type=type, value=value))


@pytest.mark.parametrize(
    ("type", "value", "data"),
    [
        ("u32", "64 / 2", struct.pack("<I", 32)),
        ("u32", "4294967295", struct.pack("<I", 4294967295)),
        ("i32", "-2147483648", struct.pack("<i", -2147483648)),
        ("f32", "7", struct.pack("<f", 7)),
        ("f32", "-1 / 0", struct.pack("<f", -math.inf)),
        ("u32", "true", struct.pack("<I", 1)),
    ],
)
def test_values_that_are_exact(type, value, data):
    assert params(field(type=type, value=value)).data[:4] == data


def structs(*entries, **keys):
    """The declarations of structs with these keys, each of one field."""
    bindings = [{"struct": [field(value=1)], "name": name} | more for name, more in entries]
    only = one_pass("{{ env.wgsl.resourceDeclarations }}", into={"bindings": bindings, **keys})
    return re.findall(r"struct (\w+)|var<uniform> (\w+: \w+)", only.wgsl)


def test_structs_are_named():
    def names(*entries):
        return [struct or variable for struct, variable in structs(*entries)]

    assert names(("p", {})) == ["Params", "p: Params"]
    assert names(("p", {"structName": "Own"})) == ["Own", "p: Own"]
    # Two would be declared twice: each is named after its binding.
    assert names(("sizes", {}), ("params", {})) == (
        ["Sizes", "Params", "sizes: Sizes", "params: Params"]
    )
    # One with a name of its own leaves the other's be.
    two = ("sizes", {"structName": "S"}), ("p", {})
    assert names(*two) == ["S", "Params", "sizes: S", "p: Params"]
    # A type and a variable cannot have one name.
    assert names(("Params", {})) == ["Params_", "Params: Params_"]
    assert names(("a", {}), ("A", {})) == ["A_", "A__", "a: A_", "A: A__"]
    assert names(("x", {"structName": "Params"}), ("p", {})) == (
        ["Params", "Params_", "x: Params", "p: Params_"]
    )


def test_structs_of_one_name_are_one_type():
    two = ("a", {"structName": "S"}), ("b", {"structName": "S"})
    assert [struct or name for struct, name in structs(*two)] == ["S", "a: S", "b: S"]
    other = ("b", {"structName": "S", "struct": [field("m", value=1)]})
    with pytest.raises(SpecError, match=r"passes\[0\]\.bindings: two structs are named S"):
        structs(two[0], other)


def test_padding_takes_no_name_that_is_taken():
    bound = params(field("_pad0", value=7), field("_pad2", value=8))
    assert [name for name, _, _ in bound.fields] == ["_pad0", "_pad2", "_pad1", "_pad3"]


def test_a_struct_may_be_stored_and_have_a_name_of_its_own():
    bindings = {
        "params": {"struct": [field(value=1)], "buffer": "read-only-storage", "structName": "P"}
    }
    only = one_pass(
        "{{ env.wgsl.resourceDeclarations }}", bindings=bindings, into={"bindings": ["params"]}
    )
    assert only.wgsl == (
        "struct P { n: u32, _pad0: u32, _pad1: u32, _pad2: u32 }\n"
        "@group(0) @binding(0) var<storage, read> params: P;"
    )


# --- bindings -----------------------------------------------------------------------------------

PORTS = {
    "inputs": {
        "x": {"dtype": "T"},
        "ids": {"dtype": "int64", "storage": "uint32", "optional": True},
        "both": {"dtype": "T", "optional": True},
    },
    "outputs": {
        "y": {"dtype": "T", "shape": "shapes.x"},
        "flags": {"dtype": "bool", "shape": [3]},
        "both": {"dtype": "T", "shape": "shapes.x"},
    },
}


def bound(*entries, dtype="float16", shape=(2, 3), derive=None, **keys):
    """What the entries of a pass's `bindings` become."""
    spec = operator(
        variants=[
            variant(
                "only",
                derive=derive or {},
                intermediates=[{"id": "tmp", "dtype": "int32", "shape": ["ranks.x", 5]}],
                passes=[step(bindings=list(entries))],
            )
        ],
        **PORTS | keys,
    )
    inputs = {"x": Tensor(shape, dtype), "both": Tensor(shape, dtype), "ids": Tensor((4,), "int64")}
    (only,) = plan.make(resolve(spec, inputs), PRESETS["apple-m"]).passes
    return only.bindings


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        # name, buffer, type, source, bytes
        ("x", ("x", "read-only-storage", "array<f16>", "x", 12)),
        ("y", ("y", "storage", "array<f16>", "y", 12)),
        ("both", ("both", "storage", "array<f16>", "both", 12)),
        ("tmp", ("tmp", "storage", "array<i32>", "tmp", 40)),
        ("ids", ("ids", "read-only-storage", "array<u32>", "ids", 16)),
        ("flags", ("flags", "storage", "array<u32>", "flags", 12)),
        ({"arg": "x"}, ("x", "read-only-storage", "array<f16>", "x", 12)),
        ({"arg": "x", "name": "src"}, ("src", "read-only-storage", "array<f16>", "x", 12)),
        ({"name": "x", "buffer": "storage"}, ("x", "storage", "array<f16>", "x", 12)),
        ({"name": "x", "elementType": "u32"}, ("x", "read-only-storage", "array<u32>", "x", 12)),
        ({"name": "x", "elementType": "$T"}, ("x", "read-only-storage", "array<f16>", "x", 12)),
        ({"name": "x", "elementType": "$wide"},
         ("x", "read-only-storage", "array<vec4<f16>>", "x", 12)),
        ({"name": "x", "length": "1 + 2"}, ("x", "read-only-storage", "array<f16, 3>", "x", 12)),
        ({"name": "x", "length": 20}, ("x", "read-only-storage", "array<f16, 20>", "x", 40)),
        ({"scratch": "tmp"}, ("tmp", "storage", "array<i32>", "tmp", 40)),
        ({"scratch": "tmp", "name": "t"}, ("t", "storage", "array<i32>", "tmp", 40)),
        ({"name": "tmp", "elementType": "vec2<i32>"},
         ("tmp", "storage", "array<vec2<i32>>", "tmp", 40)),
        ({"name": "tmp", "elementType": "atomic<i32>"},
         ("tmp", "storage", "array<atomic<i32>>", "tmp", 40)),
        ({"name": "tmp", "elementType": "atomic<u32>", "length": 64},
         ("tmp", "storage", "array<atomic<u32>, 64>", "tmp", 256)),
        ({"name": "x", "elementType": "mat2x2<f16>"},
         ("x", "read-only-storage", "array<mat2x2<f16>>", "x", 12)),
        ({"name": "x", "elementType": "$float32"},
         ("x", "read-only-storage", "array<f32>", "x", 12)),
    ],
    ids=str,
)  # fmt: skip
def test_bindings(entry, expected):
    (one,) = bound(entry, derive={"wide": "'vec4<' ~ dtypes.T ~ '>'"})
    assert (one.name, one.buffer, one.type, one.source, one.size) == expected
    # A handle is the same as an entry in its place.
    if isinstance(entry, dict) and "name" in entry:
        handles = {"handle": {"arg": entry["name"]} | entry} if "scratch" not in entry else {}
        for same in bound(*handles, derive={"wide": "'vec4<' ~ dtypes.T ~ '>'"}, bindings=handles):
            assert same == one


@pytest.mark.parametrize(
    ("shape", "element", "size"),
    [
        ((0, 3), "f16", 4),
        ((0, 3), "vec4<f16>", 8),
        ((0, 3), "vec4<f32>", 16),
        ((0, 3), "vec3<f32>", 16),
        ((1, 3), "f16", 8),  # 6 bytes, rounded up
        ((), "f16", 4),
    ],
)
def test_what_is_bound_is_never_empty(shape, element, size):
    (one,) = bound({"name": "x", "elementType": element}, shape=shape)
    assert one.size == size


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"name": "x", "elementType": "$T2"}, "the element type $T2 of x is 5"),
        ({"name": "x", "elementType": "$none"}, "the element type $none of x is undefined"),
        (
            {"name": "x", "elementType": "$double"},
            "the binding x: 'f64' is not a WGSL scalar, vector, matrix or array",
        ),
        ({"name": "x", "length": 0}, "the length of x comes out as 0"),
        ({"name": "x", "length": "1.5"}, "the length of x comes out as 1.5"),
    ],
)
def test_bindings_that_are_refused(entry, message):
    with refused(f"Small.only: {message}"):
        bound(entry, derive={"T2": 5, "none": "attrs.size", "double": "'f64'"})


def test_a_port_that_is_absent_cannot_be_bound():
    with refused("Small.only: the binding ids needs ids, which is absent"):
        planned(inputs=PORTS["inputs"], variants=[variant("only", passes=[step(bindings=["ids"])])])


def test_declarations():
    bindings = {"params": {"struct": [field(value=1), field("scale", "f32", value=0.5)]}}
    only = one_pass(
        "{{ env.wgsl.resourceDeclarations }}\n// {{ env.device.limits.maxBindGroups }}",
        bindings=bindings,
        into={"bindings": ["params", "x", {"arg": "y", "name": "out", "elementType": "vec2<f32>"}]},
    )
    assert only.wgsl.splitlines() == [
        "struct Params { n: u32, scale: f32, _pad0: u32, _pad1: u32 }",
        "@group(0) @binding(0) var<uniform> params: Params;",
        "@group(0) @binding(1) var<storage, read> x: array<f32>;",
        "@group(0) @binding(2) var<storage, read_write> out: array<vec2<f32>>;",
        "// 4",
    ]


def test_view_aliases_are_kept():
    (only,) = plan.make(split((3, 4), (3, 4)), FLOOR).passes
    assert only.view_alias == (("src", "dst"),)


def test_a_pass_that_would_copy_an_array_to_itself_is_skipped():
    names = [{"arg": "both", "name": name} for name in ("a", "b")]
    names += ["x", {"arg": "x", "name": "same"}, "y"]

    def labels(*pairs):
        alias = [{"input": read, "output": written} for read, written in pairs]
        passes = [step(id="copy", bindings=names, viewAlias=alias), step(id="last")]
        keys = PORTS | {"variants": [variant("only", passes=passes)]}
        spec = operator("{{ id }}", **keys)
        inputs = {"x": Tensor((2, 3), "float32"), "both": Tensor((2, 3), "float32")}
        return [each.label for each in plan.make(resolve(spec, inputs), FLOOR).passes]

    assert labels(("a", "b")) == labels(("a", "b"), ("x", "same")) == ["Small.only.last"]
    assert labels() == labels(("x", "y")) == labels(("a", "b"), ("x", "y"))
    assert labels() == ["Small.only.copy", "Small.only.last"]


def test_a_type_variable_has_one_scalar_for_all_its_ports():
    # Where one of them is stored narrower `$M` is that scalar, and it is the default for all.
    ports = {"a": {"dtype": "M", "storage": "uint32"}, "b": {"dtype": "M"}, "c": {"dtype": "int64"}}
    spec = operator(
        typeConstraints={"M": ["int64"]},
        inputs=ports,
        outputs={"y": {"dtype": "int64", "storage": "int32", "shape": []}},
        variants=[variant("only", passes=[step(bindings=["a", "b", "c", "y"])])],
    )
    call = resolve(spec, {name: Tensor((3,), "int64") for name in "abc"})
    a, b, c, y = plan.make(call, FLOOR).passes[0].bindings
    assert [each.type for each in (a, b)] == ["array<u32>"] * 2
    assert [each.type for each in (c, y)] == ["array<vec2<u32>>", "array<i32>"]
    assert [each.size for each in (a, b, c, y)] == [12, 24, 24, 4]


def test_names_that_a_manifest_derives_anew_do_not_change_what_is_declared():
    derive = {name: "5" for name in ("dtypes", "args", "tunables", "device", "attrs", "shapes")}
    only = one_pass(
        "{{ dtypes }} {{ tunables }} {{ device }} {{ env.device.limits.maxBindGroups }}",
        derive=derive,
        args={"n": {"kind": "u32"}},
        call={"args": {"n": 3}},
        tunables={"SIZE": {"default": 1}},
        outputs={"y": {"dtype": "T", "shape": [1]}},
        bindings={"params": {"struct": [field()]}},
        into={"bindings": [{"name": "x", "elementType": "$T"}, "params"]},
    )
    assert only.bindings[0].type == "array<f32>" and only.bindings[1].data[0] == 3
    assert only.wgsl == "5 5 5 4"


# --- names in scope -----------------------------------------------------------------------------


def test_tunables_of_three_levels():
    keys = {
        "tunables": {"A": {"default": 1}, "B": {"default": 2}, "C": {"default": 3}},
        "variants": [
            variant(
                "only", tunables={"B": {"default": 20}, "C": {"default": 30}, "D": {"default": 4}}
            )
        ],
    }
    template = "{{ tunables.A }} {{ tunables.B }} {{ tunables.C }} {{ tunables.D }}"
    assert planned(template, **keys).passes[0].wgsl == "1 20 30 4"
    given = {"tunables": {"C": 300, "A": 10}}
    assert planned(template, **keys, call=given).passes[0].wgsl == "10 20 300 4"


def test_a_variant_s_and_then_a_pass_s_derived_values_are_in_scope():
    first = step(
        derive={"own": "shared + 1"},
        dispatch={"x": "own", "y": "derive.shared"},
        bindings=["x", {"name": "y", "elementType": "$kind"}, "params"],
    )
    second = step(derive={"own": "late is undefined", "late": "own"})
    ready = planned(
        "{{ base }} {{ shared }} {{ own }} {{ derive.own }} {{ kind }}",
        derive={"base": "ranks.x"},
        bindings={"params": {"struct": [field(value="own * 10")]}},
        variants=[
            variant("only", derive={"shared": "base + 1", "kind": "'u32'"}, passes=[first, second])
        ],
    )
    assert ready.passes[0].wgsl == "2 3 4 4 u32"
    assert ready.passes[0].workgroups == (4, 3, 1)
    assert ready.passes[0].bindings[1].type == "array<u32>"
    assert ready.passes[0].bindings[2].data[0] == 40
    assert ready.passes[1].wgsl == "2 3 true true u32"  # the first pass's are gone


def test_a_derived_value_that_raises_names_itself():
    with refused("Small.only: derive.bad: cannot compare undefined < 1"):
        planned(variants=[variant("only", derive={"bad": "attrs.size < 1"})])
    with refused("Small.only: t.wgsl.jinja:2: cannot print [2, 3]"):
        planned("\n{{ shapes.x }}")


# --- repeat groups and intermediates ------------------------------------------------------------


def tree(count):
    """A sum by halves: passes that read what the pass before wrote."""
    inner = [
        step(
            id="half",
            derive={"size": "ceilDiv(numel(shapes.x), pow(2, level + 1))"},
            dispatch={"threads": "size", "workgroupSize": 4},
            bindings=["tmp", "y"],
        )
    ]
    return variant(
        "only",
        intermediates=[
            {"id": "tmp", "dtype": "float16", "shape": ["halves", 3], "zeroInit": True},
            {"id": "unused", "dtype": "int64", "shape": "shapes.x"},
        ],
        passes=[
            step(id="first", bindings=["x", "tmp"]),
            {"id": "tree", "repeat": {"count": count, "index": "level"}, "passes": inner},
            step(bindings=["tmp", "y"]),
        ],
        derive={"halves": "ceilDiv(numel(shapes.x), 2)"},
    )


def test_a_repeat_group_is_unrolled():
    template = (
        "{% if level is defined %}{{ level }}/{{ level_count }} {{ repeat.index }}/"
        "{{ repeat.count }} {{ size }}{% endif %}"
    )
    ready = planned(template, shape=(5, 8), variants=[tree("log2ceil(5)")])
    assert [(each.label, each.workgroups, each.wgsl) for each in ready.passes] == [
        ("Small.only.first", (1, 1, 1), ""),
        ("Small.only.half", (5, 1, 1), "0/3 0/3 20"),
        ("Small.only.half", (3, 1, 1), "1/3 1/3 10"),
        ("Small.only.half", (2, 1, 1), "2/3 2/3 5"),
        ("Small.only.pass_2", (1, 1, 1), ""),
    ]


def test_intermediates():
    ready = planned(shape=(5, 8), variants=[tree(0)])
    tmp, unused = ready.intermediates
    assert (tmp.name, tmp.tensor, tmp.size, tmp.zero_init) == (
        *("tmp", Tensor((20, 3), "float16"), 120, True),
    )
    assert (unused.tensor, unused.size, unused.zero_init) == (Tensor((5, 8), "int64"), 320, False)
    assert [each.label for each in ready.passes] == ["Small.only.first", "Small.only.pass_2"]
    assert ready.passes[0].bindings[1].type == "array<f16>"
    with refused("Small.only: the shape of tmp comes out as [undefined]"):
        planned(variants=[variant("only", intermediates=[
            {"id": "tmp", "dtype": "float32", "shape": ["attrs.size"]}])])  # fmt: skip


def test_repeat_groups_nest():
    inner = {"repeat": {"count": "outer_ + 1", "index": "inner_"}, "passes": [step()]}
    outer = {"repeat": {"count": 3, "index": "outer_"}, "passes": [inner]}
    ready = planned(
        "{{ outer_ }}{{ inner_ }}{{ repeat.count }}", variants=[variant("only", passes=[outer])]
    )
    assert [each.wgsl for each in ready.passes] == ["001", "102", "112", "203", "213", "223"]


def test_nested_groups_may_name_their_index_alike():
    inner = {"repeat": {"count": "i + 1", "index": "i"}, "passes": [step()]}
    passes = [{"repeat": {"count": 2, "index": "i"}, "passes": [step(), inner, step()]}, step()]
    template = "{% if i is defined %}{{ i }}{{ i_count }}{{ repeat.index }}{% endif %}"
    ready = planned(template, variants=[variant("only", passes=passes)])
    assert [each.wgsl for each in ready.passes] == [
        *("020", "010", "020", "121", "020", "121", "121"),
        "",
    ]


def test_a_count_does_not_see_its_own_index():
    group = {"repeat": {"count": "i + 1", "index": "i"}, "passes": []}
    with pytest.raises(SpecError, match=r"repeat\.count: unknown name i in `i \+ 1`"):
        planned(variants=[variant("only", passes=[group])])
    group["repeat"] = {"count": 1, "index": "derive"}
    with pytest.raises(SpecError, match=r"repeat\.index: `derive` is the object of all"):
        planned(variants=[variant("only", passes=[group])])


def test_groups_of_no_turns():
    inner = {"repeat": {"count": "i", "index": "j"}, "passes": [step()]}
    outer = {"repeat": {"count": 2, "index": "i"}, "passes": [inner]}
    ready = planned("{{ i }}{{ j }}", variants=[variant("only", passes=[outer])])
    assert [each.wgsl for each in ready.passes] == ["10"]
    outer["repeat"]["count"] = "numel([])  - 1"
    assert planned("{{ i }}{{ j }}", variants=[variant("only", passes=[outer])]).passes == ()


def recurrent(count, **keys):
    """A repeat group whose uniform and dispatch change with the turn, and whose WGSL does not."""
    one = step(
        derive={"half": "i % 2", "width": "ranks.x * 4"},
        bindings=["x", "y", "sizes", "turn"],
        dispatch={"x": "half + 1"},
    )
    bindings = {
        "sizes": {"struct": [field(value="width")], "structName": "Sizes"},
        "turn": {"struct": [field("at", value="i"), field("of", value="i_count")]},
    }
    passes = [{"repeat": {"count": count, "index": "i"}, "passes": [one | keys]}]
    return {"bindings": bindings, "variants": [variant("only", passes=passes)]}


def test_turns_share_what_does_not_change(monkeypatch):
    rendered, packed = [], []
    render, bind = plan.render, plan._Step._bind
    monkeypatch.setattr(plan, "render", lambda *a, **k: rendered.append(a) or render(*a, **k))
    monkeypatch.setattr(plan._Step, "_bind", lambda *a: packed.append(a[1].name) or bind(*a))
    ready = planned("{{ width }} {{ env.wgsl.resourceDeclarations }}", **recurrent(300))
    assert len(ready.passes) == 300 and len(rendered) == 1
    assert {name: packed.count(name) for name in packed} == {
        **dict.fromkeys(("x", "y", "sizes"), 1),
        "turn": 300,
    }
    assert [each.workgroups[0] for each in ready.passes[:3]] == [1, 2, 1]
    for index, each in enumerate(ready.passes):
        assert each.bindings[3].data == struct.pack("<4I", index, 300, 0, 0)
        assert each.wgsl is ready.passes[0].wgsl and each.bindings[2].data[0] == 8


@pytest.mark.parametrize(
    ("template", "texts", "times"),
    [
        ("{{ half }}", "010101", 2),
        ("{{ derive.half }}", "010101", 2),
        ("{{ derive['ha' ~ 'lf'] }}", "010101", 6),  # which one is not known
        ("{% if half is defined %}{{ width }}{% endif %}", "888888", 2),
        ("{{ half | default(3) }}", "010101", 2),
        ("{{ repeat.index }}", "012345", 6),
        ("{{ i }}", "012345", 6),
        ("{{ i_count }}{{ repeat_ }}", "666666", 1),
        ("{% macro m(i) %}{{ i }}{% endmacro %}{{ m(1) }}", "111111", 6),  # might be the turn's
        ("{{ shapes.x[0] }}", "222222", 1),
    ],
)
def test_a_template_is_rendered_again_where_a_name_in_it_changes(
    template, texts, times, monkeypatch
):
    rendered, render = [], plan.render
    monkeypatch.setattr(plan, "render", lambda *a, **k: rendered.append(a) or render(*a, **k))
    passes = planned(template, **recurrent(6)).passes
    assert "".join(each.wgsl for each in passes) == texts
    assert len(rendered) == times


def test_equal_values_of_two_kinds_are_not_taken_for_each_other():
    one = step(derive={"a": "1 if i == 0 else (true if i == 1 else '1')"})
    group = {"repeat": {"count": 3, "index": "i"}, "passes": [one]}
    ready = planned("{{ a }}", variants=[variant("only", passes=[group])])
    assert [each.wgsl for each in ready.passes] == ["1", "true", "1"]
    one["derive"] = {"a": "[[1], {'b': i == 0}]"}
    group["passes"] = [one]
    ready = planned("{{ a[1].b }}{{ a[0][0] }}", variants=[variant("only", passes=[group])])
    assert [each.wgsl for each in ready.passes] == ["true1", "false1", "false1"]


def test_a_turn_does_not_see_what_the_last_one_derived():
    derive = {"first": "late is undefined", "base": "base + i", "late": "i"}
    group = {"repeat": {"count": 3, "index": "i"}, "passes": [step(derive=derive), step()]}
    ready = planned(
        "{{ first }}{{ base }}{{ late }}{{ derive.base }}",
        derive={"base": 10},
        variants=[variant("only", passes=[group])],
    )
    assert [each.wgsl for each in ready.passes] == [
        *("true10010", "1010", "true11111", "1010", "true12212", "1010"),
    ]


def test_turns_are_bounded_whatever_they_hold():
    empty = {"repeat": {"count": 4096, "index": "i"}, "passes": []}
    idle = {"repeat": {"count": 4096, "index": "i"}, "passes": [step(dispatch={"x": 0})] * 4}
    for group in (empty, idle):
        nested = {"repeat": {"count": 4096, "index": "j"}, "passes": [group]}
        with refused("Small.only: repeat groups of more than 16384 turns"):
            planned(variants=[variant("only", passes=[nested])])


@pytest.mark.parametrize(
    ("count", "message"),
    [
        (-1, "repeat: the repeat count comes out as -1"),
        (1.5, "repeat: the repeat count comes out as 1.5"),
        ("attrs.size", "repeat: the repeat count comes out as undefined"),
        (5000, "repeat: more than 4096 passes"),
        (4096, "more than 4096 passes"),  # of two each
    ],
)
def test_repeat_counts_that_are_refused(count, message):
    group = {"repeat": {"count": count, "index": "i"}, "passes": [step(), step()]}
    with refused(f"Small.only: {message}"):
        planned(variants=[variant("only", passes=[group])])


# --- enable f16; --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "enabled"),
    [
        ("var a: f16;", True),
        ("var a: vec4<f16>;", True),
        ("enable subgroups;\nvar a: f16;", True),
        ("var a: f32;", False),
        ("var my_f16: f32; var f16x: f32;", False),
        ("// f16\nvar a: f32;", False),
        ("/* in f16,\n not here */ var a: f32;", False),
        ("// enable f16;\nvar a: f16;", True),
        ("enable f16;\nvar a: f16;", False),
        ("enable subgroups, f16;\nvar a: f16;", False),
        ("  enable   f16 ;\nvar a: f16;", False),
    ],
)
def test_f16_is_enabled_where_it_is_used_and_not_enabled_yet(code, enabled):
    assert one_pass(code).wgsl == ("enable f16;\n" if enabled else "") + code


# --- the plan -----------------------------------------------------------------------------------


def test_hints_change_nothing():
    """How a pass is timed and submitted, and what width its template is written for."""
    hints = {"profile": "any", "submitAfter": True, "subgroupCollectivesWidth": 32}
    plain, hinted = one_pass("a"), one_pass("a", into=hints)
    assert plain == hinted


def test_a_pass_names_its_template():
    assert one_pass().template == "t.wgsl.jinja"


def test_a_refusal_is_kept_too(monkeypatch):
    select, asked = variants.select, []
    monkeypatch.setattr(variants, "select", lambda *a: asked.append(a) or select(*a))
    call = split((70_001, 3), (70_001, 3)).with_tunables(WORKGROUP_SIZE=4096)
    device = make("a device of its own", maxStorageBufferBindingSize=1000)
    errors = []
    for _ in range(3):
        with pytest.raises(LimitError, match="maxStorageBufferBindingSize of a device") as caught:
            plan.make(call, device)
        errors.append(caught.value)
    assert len(asked) == 1 and len({str(error) for error in errors}) == 1
    depths = [len(list(traceback.walk_tb(error.__traceback__))) for error in errors]
    assert len(set(depths)) == 1  # a traceback that is kept would grow


def test_limit_of_an_intermediate():
    scratch = {"id": "tmp", "dtype": "float32", "shape": ["pow(2, 44)"]}
    with refused(
        "Small.only: the intermediate tmp in bytes: 70,368,744,177,664; maxBufferSize of floor is "
        "268,435,456",
        LimitError,
    ):
        planned(variants=[variant("only", intermediates=[scratch])])


def test_equal_calls_share_a_plan():
    first, second = (plan.make(rotary((2, 3, 5, 8), (2, 5, 4)), FLOOR) for _ in range(2))
    assert first is second and first.label == "RotaryEmbedding.rank4_cache3_quad"
    assert plan.make(rotary((2, 3, 5, 8), (2, 5, 4)), PRESETS["lavapipe"]) is not first


def test_the_buffers_of_a_plan():
    ready = plan.make(rotary((2, 3, 5, 8), (11, 4), None, (2, 5)), FLOOR)
    ids = ready.inputs[3]
    assert (ids.name, ids.tensor, ids.dtype.name, ids.narrowing, ids.size) == (
        *("positionIds", Tensor((2, 5), "int64"), "uint32", "checked", 40),
    )
    assert [each.name for each in ready.inputs] == ["x", "cos", "sin", "positionIds"]
    assert [(each.name, each.size) for each in ready.outputs] == [("y", 960)]
    assert ready.intermediates == ()


def test_a_plan_that_no_device_can_have():
    call = rotary((2, 3, 5, 7), (2, 5, 4))
    with refused("no variant of RotaryEmbedding takes this call on any device"):
        plan.make(call, IDEAL)
    with refused("no variant of RotaryEmbedding takes this call on floor", DeviceError):
        plan.make(call, FLOOR)


def test_a_description():
    call = split((3, 7), (3, 4), (3, 3), axis=1).with_tunables(WORKGROUP_SIZE=64)
    assert plan.make(call, FLOOR).describe(wgsl=False).splitlines() == [
        "call      Split(input = float32[3,7], axis = 1) -> y0 float32[3,4], y1 float32[3,3]",
        "device    floor",
        "variant   two_outputs",
        "tunables  WORKGROUP_SIZE = 64",
        "pass      Split.two_outputs.main: 1 × 1 × 1 workgroups",
        "  @binding(0) input: array<f32>, read-only-storage, 84 bytes of input",
        "  @binding(1) y0: array<f32>, storage, 48 bytes of y0",
        "  @binding(2) y1: array<f32>, storage, 36 bytes of y1",
        "  @binding(3) params: uniform, y0Count = 12, y1Count = 9, _pad0 = 0, _pad1 = 0",
    ]
    wgsl = plan.make(call, FLOOR).describe().splitlines()[9:]
    assert wgsl[0].startswith("  | struct Params { y0Count: u32") and wgsl[-1] == "  | }"
