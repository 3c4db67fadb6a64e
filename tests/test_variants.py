"""Which variant is chosen, and what is said when none is."""

import dataclasses

import pytest
from cases import CASES
from engine import (
    ROTARY,
    SPECS,
    SPLIT,
    Tensor,
    operator,
    resolve,
    resolved,
    rotary,
    split,
    step,
    variant,
)

from jax_webgpu import capabilities, variants
from jax_webgpu.capabilities import IDEAL, PRESETS
from jax_webgpu.errors import CallError, DeviceError
from jax_webgpu.resolve import extend, scope

FLOOR = PRESETS["floor"]


def chosen(call, device=FLOOR):
    return variants.select(call, device).variant.id


def small(*choices, device=FLOOR, shape=(2, 3), **keys):
    """The variant that a small manifest with these variants chooses."""
    spec = operator(variants=list(choices), **keys)
    return chosen(resolve(spec, {"x": Tensor(shape, "float32")}), device)


# --- the rules ----------------------------------------------------------------------------------


def test_priority_comes_first_and_then_the_manifest_s_order():
    assert small(variant("a"), variant("b", priority=5), variant("c", priority=5)) == "b"
    assert small(variant("a", priority=-1), variant("b"), variant("c", priority=0)) == "b"
    assert small(variant("a", priority=0.5), variant("b", priority=0.25)) == "a"


@pytest.mark.parametrize(
    ("clauses", "holds"),
    [
        ([], True),
        (["true"], True),
        (["ranks.x == 2", "dim(shapes.x, 1) > 2"], True),
        (["true", "false"], False),
        (["1"], False),  # true is asked for, not what passes for true
        (["'yes'"], False),
        (["shapes.x"], False),
        (["1 and true"], True),
        (["true and 1"], False),
        (["none"], False),
        (["attrs.nothing"], False),
        (["attrs.nothing < 1"], False),  # an error refuses
        (["true", "dim(shapes.z, 0) == 1"], False),
    ],
)
def test_every_clause_must_be_strictly_true(clauses, holds):
    assert small(variant("a", when=clauses, priority=1), variant("b")) == "ba"[holds]


def test_the_manifest_s_clauses_hold_for_every_variant():
    assert small(variant("a"), when=["ranks.x == 2"]) == "a"
    for clause in ("ranks.x == 3", "ranks.x", "attrs.nothing < 1"):
        with pytest.raises(DeviceError, match="no variant of Small takes this call on floor"):
            small(variant("a"), variant("b"), when=[clause])


def test_clauses_see_the_manifest_s_derived_values_and_tunables_and_not_the_variant_s():
    keys = {"derive": {"big": "numel(shapes.x) > 5"}, "tunables": {"SIZE": {"default": 4}}}
    own = {"tunables": {"SIZE": {"default": 8}, "OWN": {"default": 1}}}
    assert small(variant("a", when=["big", "derive.big"]), **keys) == "a"
    assert small(variant("a", when=["tunables.SIZE == 4"], **own), variant("b"), **keys) == "a"
    assert small(variant("a", when=["tunables.OWN == 1"], **own), variant("b"), **keys) == "b"


def test_a_derived_value_that_raises_fails_the_call():
    with pytest.raises(DeviceError) as caught:
        small(variant("a"), derive={"good": 1, "bad": "shapes.z[0]"})
    assert str(caught.value) == (
        "Small(x = float32[2,3]) -> y float32[2,3]: derive.bad: cannot look up 0 in undefined "
        "in `shapes.z[0]`"
    )
    with pytest.raises(CallError):
        small(variant("a"), derive={"bad": "1 < 'a'"}, device=IDEAL)
    # An undefined one does not.
    assert small(variant("a"), derive={"none": "dim([], 0)"}) == "a"


def test_a_demoted_variant_comes_last():
    always, never, error = ["true"], ["false", "1"], ["attrs.nothing < 1"]
    assert small(variant("a", demoteWhen=always, priority=9), variant("b")) == "b"
    assert small(variant("a", demoteWhen=never, priority=9), variant("b")) == "a"
    assert small(variant("a", demoteWhen=error, priority=9), variant("b")) == "a"
    assert small(variant("a", demoteWhen=["false", "true"], priority=9), variant("b")) == "b"
    # If there is no other, the best of the demoted.
    both = variant("a", demoteWhen=always), variant("b", demoteWhen=always, priority=1)
    assert small(*both) == "b"
    assert small(*both, variant("c", when=["false"])) == "b"


def test_a_superseded_variant_gives_way_to_one_that_applies_and_is_not_demoted():
    a = variant("a", supersededBy=["b"], priority=9)
    assert small(a, variant("b"), variant("c", priority=1)) == "c"
    assert small(a, variant("b")) == "b"
    assert small(a, variant("b", when=["false"])) == "a"
    assert small(a, variant("b", demoteWhen=["true"])) == "a"
    with pytest.raises(DeviceError) as caught:
        small(a, variant("b", supersededBy=["a"]))
    assert str(caught.value).splitlines()[1:] == ["  a: b supersedes it", "  b: a supersedes it"]


def test_what_is_superseded_supersedes_others_all_the_same():
    # a is worse than b, and b than c: where all apply a does not come back because b is refused.
    a, b, c = (variant("a", supersededBy=["b"], priority=9),
               variant("b", supersededBy=["c"], priority=5), variant("c"))  # fmt: skip
    assert small(a, b, c) == "c"
    assert small(a, b, c | {"when": ["false"]}) == "b"
    assert small(a, b, c | {"demoteWhen": ["true"]}) == "b"
    assert small(a, b | {"when": ["false"]}, c) == "a"
    assert small(a | {"supersededBy": ["c"]}, b, c) == "c"
    # One that names itself can never run.
    assert small(variant("a", supersededBy=["a"], priority=9), variant("b")) == "b"


def test_a_demoted_variant_may_be_superseded_too():
    demoted = variant("a", demoteWhen=["true"], supersededBy=["b"])
    assert small(demoted, variant("b", demoteWhen=["true"], priority=-1)) == "a"
    assert small(demoted, variant("b", priority=-1)) == "b"


DEVICE = capabilities.make(
    "test",
    ("shader-f16",),
    {"subgroupMinSize": 16},
    maxComputeInvocationsPerWorkgroup=512,
    maxStorageBuffersPerShaderStage=4,
    maxUniformBuffersPerShaderStage=1,
)


@pytest.mark.parametrize(
    ("requires", "reason"),
    [
        ({}, None),
        ({"features": ["shader-f16"]}, None),
        ({"features": ["shader-f16", "subgroups"]}, "it needs the feature subgroups"),
        ({"limits": {"maxComputeInvocationsPerWorkgroup": 512}}, None),
        ({"limits": {"maxComputeInvocationsPerWorkgroup": 513}},
         "it needs maxComputeInvocationsPerWorkgroup of at least 513; the device has 512"),
        ({"limits": {"maxFutureLimit": 1}},
         "it needs maxFutureLimit of at least 1; the device has 0"),
        ({"subgroupMinSize": 16}, None),
        ({"subgroupMinSize": 32}, "it needs subgroups of at least 32; the device's have 16"),
        ({"subgroupMatrixConfigs": [{}]},
         "it needs subgroup matrices, which WebGPU does not have yet"),
    ],
)  # fmt: skip
def test_requirements(requires, reason):
    needy = variant("a", priority=1, requires=requires)
    assert small(needy, variant("b"), device=DEVICE) == ("a" if reason is None else "b")
    # The manifest's hold for every variant.
    if reason is not None:
        with pytest.raises(DeviceError) as caught:
            small(variant("a"), variant("b"), device=DEVICE, requires=requires)
        assert str(caught.value).splitlines()[1] == f"  a, b: {reason}"
    assert small(needy, variant("b"), device=IDEAL, requires=requires) == "a"


def test_requirements_of_manifest_and_variant_merge():
    limit = "maxComputeInvocationsPerWorkgroup"
    manifest = {"limits": {limit: 500, "maxBindGroups": 1}, "subgroupMinSize": 8}
    manifest |= {"features": ["shader-f16"]}
    for own, fits in ((400, True), (512, True), (600, False)):
        needy = variant("a", priority=1, requires={"limits": {limit: own}, "subgroupMinSize": 4})
        choices = (needy, variant("b"))
        assert small(*choices, device=DEVICE, requires=manifest) == ("a" if fits else "b")


def test_bindings_are_counted_against_the_limits_of_a_stage():
    port = {"dtype": "T", "shape": []}
    keys = {
        "outputs": {f"y{index}": port for index in range(4)},
        "bindings": {
            "params": {"struct": [{"name": "n", "type": "u32", "value": 1}]},
            "more": {"struct": [{"name": "n", "type": "u32", "value": 1}]},
            "stored": {"struct": [{"name": "n", "type": "u32", "value": 1}], "buffer": "storage"},
            "uniform_y": {"name": "y2", "buffer": "uniform"},
        },
    }
    names = ("x", "y0", "y1", "y2")

    def fits(*bindings, device=DEVICE):
        with_them = variant("a", passes=[step(), step(bindings=list(bindings))], priority=1)
        other = variant("b", passes=[step(bindings=["x"])])
        with_them["passes"][0]["bindings"] = ["x"]
        return small(with_them, other, device=device, **keys) == "a"

    assert fits(*names) and fits(*names, "params")
    assert not fits(*names, "y3")
    assert not fits(*names, "params", "more")
    assert not fits(*names, "stored")
    assert fits("x", "y0", "y1", "stored")
    assert fits("x", "y0", "y1", "y3", "uniform_y")
    assert not fits("x", "y0", "params", "uniform_y")
    assert fits(*names, "y3", "params", "more", device=IDEAL)


def test_an_empty_list_of_subgroup_matrices_asks_for_none():
    assert small(variant("a", requires={"subgroupMatrixConfigs": []})) == "a"


# --- what no device could run -------------------------------------------------------------------
#
# While JAX traces, the ideal device has every feature and every limit. What fails there may still
# hold on a device that lacks a feature, or that says more of itself.


@pytest.mark.parametrize(
    "clause",
    [
        "not device.features.has('subgroups')",
        "device.limits.maxComputeWorkgroupStorageSize < 1000",
        "device.adapterInfo.subgroupMinSize >= 32",  # an error: the ideal device does not say
        "device.adapterInfo.vendor == 'apple'",
        "device.wgslLanguageFeatures.has('packed_4x8_integer_dot_product')",
        "not f16Ok('f16')",
        "portable",
        "derive.portable",
        "derive['port' ~ 'able']",
        "contract",
        "ranks.x == 2 and contract",
        "width > 8",
        "doubled > 8",
        "portable == true or ranks.x == 3",
    ],
)
def test_a_clause_that_asks_the_device_rules_nothing_out_while_tracing(clause):
    derive = {
        "portable": "not device.features.has('subgroups')",
        "contract": "numel(shapes.x) > 5 and portable",
        "width": "device.adapterInfo.subgroupMinSize * 2",  # raises there
        "doubled": "width * 2",
    }
    only = variant("a", when=[clause])
    assert small(only, device=IDEAL, derive=derive) == "a"
    assert small(variant("a"), device=IDEAL, derive=derive, when=[clause]) == "a"
    # One that applies on the ideal device comes first.
    assert small(only | {"priority": 9}, variant("b"), device=IDEAL, derive=derive) == "b"
    # On a device it is what it is.
    info = {"vendor": "apple", "subgroupMinSize": 32}
    told = capabilities.make("told", (), info, maxComputeWorkgroupStorageSize=512)
    told = dataclasses.replace(
        told, wgsl_language_features=frozenset({"packed_4x8_integer_dot_product"})
    )
    assert small(only, device=told, derive=derive) == "a"


@pytest.mark.parametrize(
    "clause",
    [
        "ranks.x == 3",
        "ranks.x == 3 and not device.features.has('subgroups')",
        "not device.features.has('subgroups') and ranks.x == 3",
        "contract",
        "ranks.x == 2 and contract",
        "1 < 'a'",
        "not device.features.has('subgroups') and 1",
    ],
)
def test_a_clause_that_fails_on_every_device_refuses_while_tracing(clause):
    derive = {
        "portable": "not device.features.has('subgroups')",
        "contract": "portable and numel(shapes.x) > 6",
    }
    with pytest.raises(CallError, match="no variant of Small takes this call on any device"):
        small(variant("a", when=[clause]), device=IDEAL, derive=derive)
    with pytest.raises(CallError, match="no variant of Small takes this call on any device"):
        small(variant("a"), device=IDEAL, derive=derive, when=[clause])


def test_a_name_of_the_format_that_is_derived_anew_rules_nothing_out():
    # When `contract` was derived the rank was 2, and it failed for what the device lacked.
    derive = {
        "contract": "not device.features.has('subgroups') and ranks.x == 2",
        "ranks": "{'x': 9}",
    }
    assert small(variant("a", when=["contract"]), device=IDEAL, derive=derive) == "a"
    assert small(variant("a", when=["contract"]), derive=derive) == "a"


def test_a_derived_value_that_asks_no_device_fails_the_call_while_tracing():
    derive = {"width": "device.adapterInfo.subgroupMinSize * 2", "bad": "1 < 'a'"}
    with pytest.raises(CallError, match=r"derive\.bad: cannot compare"):
        small(variant("a"), device=IDEAL, derive=derive)


def test_bindings_of_repeated_passes_count():
    inner = {"repeat": {"count": 0, "index": "i"}, "passes": [step(bindings=["x", "y"])]}
    tight = capabilities.make("tight", maxStorageBuffersPerShaderStage=1)
    a, b = variant("a", passes=[inner], priority=1), variant("b", passes=[])
    assert small(a, b, device=tight) == "b"
    assert small(a, b) == "a"


# --- the manifests: every variant on every device that can --------------------------------------


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
@pytest.mark.parametrize("device", PRESETS)
def test_a_call_takes_the_variant_of_the_table(case, device):
    device = PRESETS[device]
    if case.dtype == "float16" and not device.has("shader-f16"):
        with pytest.raises(DeviceError, match=r"`f16Ok\(dtypes\.T\)` with dtypes\.T = \"f16\""):
            chosen(resolved(case), device)
    else:
        assert chosen(resolved(case), device) == case.variant
    assert chosen(resolved(case), IDEAL) == case.variant


def test_the_table_reaches_every_variant_on_every_device():
    every = {variant.id for spec in SPECS.values() for variant in spec.variants}
    assert len(every) == 21
    for device in PRESETS.values():
        fits = [case for case in CASES if case.dtype != "float16" or device.has("shader-f16")]
        assert {case.variant for case in fits} == every


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        # Models as they are: Llama, GPT-NeoX's partial rotation, Phi-2's, and a head size of 100.
        (rotary((1, 32, 4096, 128), (131072, 64), None, (1, 4096)), "rank4_cache2_pos_quad"),
        (rotary((1, 4096, 4096), (131072, 64), None, (1, 4096), num_heads=32),
         "rank3_cache2_pos_quad"),
        (rotary((1, 64, 2048, 96), (2048, 12), None, (1, 2048), rotary_embedding_dim=24),
         "rank4_cache2_pos_quad"),
        (rotary((1, 32, 2048, 80), (2048, 10), None, (1, 2048), rotary_embedding_dim=20),
         "rank4_cache2_pos_output_vec4"),
        (rotary((1, 8, 16, 100), (1, 16, 50)), "rank4_cache3_output_vec4"),
        (rotary((1, 8, 16, 100), (1, 16, 50), interleaved=1), "rank4_cache3"),
        (rotary((0, 8, 16, 64), (0, 16, 32)), "rank4_cache3_quad"),
        # A projection of queries, keys and values, split.
        (split((1, 512, 3072), (1, 512, 2048), (1, 512, 512), (1, 512, 512), axis=2),
         "three_outputs_block_vec4"),
        (split((1, 512, 3072), (1, 512, 2048), (1, 512, 512), (1, 512, 512), axis=-1),
         "three_outputs_block_vec4"),
        (split((512, 6), (512, 3), (512, 3), axis=1), "two_outputs"),
        (split((6, 512), (3, 512), (3, 512)), "two_outputs_block_vec4"),
        (split((6, 512), (3, 512), (3, 512), dtype="int64"), "two_outputs"),
    ],
    ids=str,
)  # fmt: skip
def test_calls_of_real_models(call, expected):
    for device in (*PRESETS.values(), IDEAL):
        assert chosen(call, device) == expected


def test_a_device_s_limits_may_decide():
    # No device in use has so few workgroups: 20² groups of 256 are 102,400 pairs or quads.
    tiny = capabilities.make("tiny", maxComputeWorkgroupsPerDimension=20)
    assert chosen(rotary((1, 1, 100_000, 8), (1, 100_000, 4)), tiny) == "rank4_cache3_quad"
    with pytest.raises(DeviceError, match="quadDispatchOk: `ceilDiv"):
        chosen(rotary((1, 1, 200_000, 8), (1, 200_000, 4)), tiny)


# --- refusals: each clause of each contract violated alone --------------------------------------
#
# For each clause a call that breaks it, whatever else that breaks behind it, and what is said of
# the variant that is asked for. The changes are to the call above the table.


def reason_of(call, id, device=IDEAL):
    names = extend(scope(call, device), call.spec.derive.items())
    found = {each.variant: each.reason for each in variants.refusals(call, device, names)}
    return found[id]


ROTARY_BASES = {
    "rank3Contract": {"x": (2, 5, 24), "cos": (2, 5, 4), "num_heads": 3},
    "rank4Contract": {"x": (2, 3, 5, 8), "cos": (2, 5, 4)},
    "rank3PosContract": {"x": (2, 5, 24), "cos": (11, 4), "positions": (2, 5), "num_heads": 3},
    "rank4PosContract": {"x": (2, 3, 5, 8), "cos": (11, 4), "positions": (2, 5)},
}
ROTARY_VARIANTS = {
    "rank3Contract": "rank3_cache3",
    "rank4Contract": "rank4_cache3",
    "rank3PosContract": "rank3_cache2_pos",
    "rank4PosContract": "rank4_cache2_pos",
}
ROTARY_CLAUSES = [
    # contract, clause, changes, the rest of the message
    *(
        (contract, "f16Ok(dtypes.T)", {"dtype": "float16"}, ' with dtypes.T = "f16"')
        for contract in ROTARY_BASES
    ),
    *(
        (contract, "ranks.x == 3", {"x": (10, 24)}, ": 2, expected 3 with ranks.x = 2")
        for contract in ("rank3Contract", "rank3PosContract")
    ),
    *(
        (contract, "ranks.x == 4", {"x": (2, 5, 24)}, ": 3, expected 4 with ranks.x = 3")
        for contract in ("rank4Contract", "rank4PosContract")
    ),
    *(
        (contract, f"ranks.{name} == 3", changes, f": 2, expected 3 with ranks.{name} = 2")
        for contract in ("rank3Contract", "rank4Contract")
        for name, changes in (
            ("cos", {"cos": (5, 4), "sin": (2, 5, 4)}),
            ("sin", {"sin": (5, 4)}),
        )
    ),
    *(
        (contract, f"ranks.{name} == 2", changes, f": 3, expected 2 with ranks.{name} = 3")
        for contract in ("rank3PosContract", "rank4PosContract")
        for name, changes in (
            ("cos", {"cos": (2, 5, 4), "sin": (11, 4)}),
            ("sin", {"sin": (2, 5, 4)}),
        )
    ),
    *(
        (contract, "ranks.y == 3", {"y": (10, 24)}, ": 2, expected 3 with ranks.y = 2")
        for contract in ("rank3Contract", "rank3PosContract")
    ),
    *(
        (contract, "ranks.y == 4", {"y": (10, 24)}, ": 2, expected 4 with ranks.y = 2")
        for contract in ("rank4Contract", "rank4PosContract")
    ),
    *(
        (contract, "sameShape(shapes.x, shapes.y)", {"y": (5, 2, 24)},
         " with shapes.x = [2, 5, 24], shapes.y = [5, 2, 24]")
        for contract in ("rank3Contract", "rank3PosContract")
    ),
    *(
        (contract, "sameShape(shapes.x, shapes.y)", {"y": (2, 5, 3, 8)},
         " with shapes.x = [2, 3, 5, 8], shapes.y = [2, 5, 3, 8]")
        for contract in ("rank4Contract", "rank4PosContract")
    ),
    *(
        row
        for contract, axis in (("rank3Contract", 2), ("rank3PosContract", 1))
        for row in (
            (contract, "attrs.num_heads is defined", {"num_heads": None},
             " with attrs.num_heads = undefined"),
            (contract, "attrs.num_heads >= 1", {"num_heads": -1}, " with attrs.num_heads = -1"),
            (contract, "dim(shapes.x, 2) % attrs.num_heads == 0", {"num_heads": 5},
             ": 4, expected 0 with shapes.x = [2, 5, 24], attrs.num_heads = 5"),
            (contract, "rank3HeadSize % 2 == 0", {"num_heads": 8},
             ": 1, expected 0 with rank3HeadSize = 3"),
            (contract,
             "attrs.rotary_embedding_dim == 0 or attrs.rotary_embedding_dim <= rank3HeadSize",
             {"rotary_embedding_dim": 10},
             " with attrs.rotary_embedding_dim = 10, rank3HeadSize = 8"),
            (contract,
             f"dim(shapes.cos, {axis}) * 2 == (attrs.rotary_embedding_dim if "
             "attrs.rotary_embedding_dim != 0 else rank3HeadSize)",
             {"rotary_embedding_dim": 6},
             f": 8, expected 6 with shapes.cos = {list(ROTARY_BASES[contract]['cos'])}, "
             "attrs.rotary_embedding_dim = 6, rank3HeadSize = 8"),
        )
    ),
    *(
        row
        for contract, axis in (("rank4Contract", 2), ("rank4PosContract", 1))
        for row in (
            (contract, "dim(shapes.x, 3) % 2 == 0", {"x": (2, 3, 5, 7)},
             ": 1, expected 0 with shapes.x = [2, 3, 5, 7]"),
            (contract,
             "attrs.rotary_embedding_dim == 0 or attrs.rotary_embedding_dim <= dim(shapes.x, 3)",
             {"rotary_embedding_dim": 10},
             " with attrs.rotary_embedding_dim = 10, shapes.x = [2, 3, 5, 8]"),
            (contract,
             f"dim(shapes.cos, {axis}) * 2 == (attrs.rotary_embedding_dim if "
             "attrs.rotary_embedding_dim != 0 else dim(shapes.x, 3))",
             {"x": (2, 3, 5, 16)},
             f": 8, expected 16 with shapes.cos = {list(ROTARY_BASES[contract]['cos'])}, "
             "attrs.rotary_embedding_dim = 0, shapes.x = [2, 3, 5, 16]"),
        )
    ),
    ("rank4Contract", "dim(shapes.sin, 2) == dim(shapes.cos, 2)", {"sin": (2, 5, 8)},
     ": 8, expected 4 with shapes.sin = [2, 5, 8], shapes.cos = [2, 5, 4]"),
    ("rank3Contract", "sameShape(shapes.cos, shapes.sin)", {"sin": (2, 6, 4)},
     " with shapes.cos = [2, 5, 4], shapes.sin = [2, 6, 4]"),
    *(
        (contract, "sameShape(shapes.cos, shapes.sin)", {"sin": (10, 4)},
         " with shapes.cos = [11, 4], shapes.sin = [10, 4]")
        for contract in ("rank3PosContract", "rank4PosContract")
    ),
    ("rank3Contract", "dim(shapes.cos, 0) == dim(shapes.x, 0)", {"cos": (1, 5, 4)},
     ": 1, expected 2 with shapes.cos = [1, 5, 4], shapes.x = [2, 5, 24]"),
    ("rank3Contract", "dim(shapes.cos, 1) == dim(shapes.x, 1)", {"cos": (2, 6, 4)},
     ": 6, expected 5 with shapes.cos = [2, 6, 4], shapes.x = [2, 5, 24]"),
    ("rank4Contract", "dim(shapes.cos, 0) == dim(shapes.x, 0)",
     {"cos": (1, 5, 4), "sin": (2, 5, 4)},
     ": 1, expected 2 with shapes.cos = [1, 5, 4], shapes.x = [2, 3, 5, 8]"),
    ("rank4Contract", "dim(shapes.sin, 0) == dim(shapes.x, 0)", {"sin": (1, 5, 4)},
     ": 1, expected 2 with shapes.sin = [1, 5, 4], shapes.x = [2, 3, 5, 8]"),
    ("rank4Contract", "dim(shapes.cos, 1) == dim(shapes.x, 2)",
     {"cos": (2, 3, 4), "sin": (2, 5, 4)},
     ": 3, expected 5 with shapes.cos = [2, 3, 4], shapes.x = [2, 3, 5, 8]"),
    ("rank4Contract", "dim(shapes.sin, 1) == dim(shapes.x, 2)", {"sin": (2, 3, 4)},
     ": 3, expected 5 with shapes.sin = [2, 3, 4], shapes.x = [2, 3, 5, 8]"),
    *(
        (contract, "not present.positionIds", {"positions": (2, 5)},
         " with present.positionIds = true")
        for contract in ("rank3Contract", "rank4Contract")
    ),
    *(
        row
        for contract, axis in (("rank3PosContract", 1), ("rank4PosContract", 2))
        for row in (
            (contract, "present.positionIds", {"positions": None},
             " with present.positionIds = false"),
            (contract, "ranks.positionIds == 2", {"positions": (5,)},
             ": 1, expected 2 with ranks.positionIds = 1"),
            (contract, "dim(shapes.positionIds, 0) == dim(shapes.x, 0)", {"positions": (1, 5)},
             ": 1, expected 2 with shapes.positionIds = [1, 5], shapes.x = "
             f"{list(ROTARY_BASES[contract]['x'])}"),
            (contract, f"dim(shapes.positionIds, 1) == dim(shapes.x, {axis})",
             {"positions": (2, 4)},
             ": 4, expected 5 with shapes.positionIds = [2, 4], shapes.x = "
             f"{list(ROTARY_BASES[contract]['x'])}"),
        )
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    ("contract", "clause", "changes", "rest"),
    ROTARY_CLAUSES,
    ids=[f"{contract}-{clause[:50]}" for contract, clause, _, _ in ROTARY_CLAUSES],
)
def test_each_clause_of_rotary_embedding_s_contracts(contract, clause, changes, rest):
    base, id = ROTARY_BASES[contract], ROTARY_VARIANTS[contract]
    assert chosen(rotary(**base), IDEAL).startswith(id)
    call = rotary(**base | changes)
    device = FLOOR if "dtype" in changes else IDEAL
    assert reason_of(call, id, device) == f"{contract}: `{clause}`{rest}"
    # No other contract takes the call either. It is the caller's mistake, or the device's.
    if device is IDEAL:
        with pytest.raises(CallError, match="no variant of RotaryEmbedding takes this call on any"):
            chosen(call, IDEAL)
    else:
        assert chosen(call, IDEAL).startswith(id)
        with pytest.raises(DeviceError, match="takes this call on floor"):
            chosen(call, FLOOR)


def test_no_clause_of_rotary_embedding_is_left_out():
    for contract in ROTARY_BASES:
        clauses = [each.text for each in ROTARY.derive[contract].conjuncts]
        assert sorted(clauses) == sorted(row[1] for row in ROTARY_CLAUSES if row[0] == contract)


COUNTS = ["one", "two", "three", "four", "five"]


def parts(count, size=4):
    return [(3, size)] * count


def sum_of(count):
    return " + ".join(f"dim(shapes.y{index}, attrs.axis)" for index in range(count))


def dims(count):
    shown = ", ".join(f"shapes.y{index} = [3, 4]" for index in range(count))
    return f"shapes.input = [3, 21], attrs.axis = 1, {shown}"


def outputs_contract(count):
    return f"{COUNTS[count - 1]}OutputContract"


SPLIT_CLAUSES = [
    # contract, clause, input, outputs, attributes and dtype, the rest of the message
    *(
        row
        for count in range(1, 6)
        for row in (
            (outputs_contract(count), "baseContract: `ranks.input >= 1`", (), [()] * count,
             {}, " with ranks.input = 0"),
            (outputs_contract(count), "baseContract: `axis >= 0`", (3, 20), parts(count),
             {"axis": -3}, " with axis = -1"),
            (outputs_contract(count), "baseContract: `axis < ranks.input`", (3, 20), parts(count),
             {"axis": 2}, " with axis = 2, ranks.input = 2"),
            (outputs_contract(count),
             "baseContract: numOutputsContract: `not has(attrs, \"num_outputs\") or "
             "attrs.num_outputs == outputCount`", (3, 4 * count), parts(count),
             {"axis": 1, "num_outputs": 6},
             f" with attrs = {{axis, num_outputs}}, attrs.num_outputs = 6, outputCount = {count}"),
            (outputs_contract(count), "baseContract: `f16Ok(dtypes.T)`", (3, 4 * count),
             parts(count), {"axis": 1, "dtype": "float16"}, ' with dtypes.T = "f16"'),
            *(
                (outputs_contract(count), f"`present.y{index}`", (3, 4 * index), parts(index),
                 {"axis": 1}, f" with present.y{index} = false")
                for index in range(1, count)
            ),
            *(
                (outputs_contract(count), f"`not present.y{index}`", (3, 4 * index + 4),
                 [(3, 4)] + [(3, 4) if one == index or index == count else None
                             for one in range(1, index + 1)],
                 {"axis": 1}, f" with present.y{index} = true")
                for index in range(count, 5 if count == 1 else min(count + 1, 5))
            ),
        )
    ),
    ("oneOutputContract", "`sameShape(shapes.input, shapes.y0)`", (3, 4), [(4, 3)], {},
     " with shapes.input = [3, 4], shapes.y0 = [4, 3]"),
    *(
        row
        for count in range(2, 6)
        for row in (
            *(
                (outputs_contract(count), f"`ranks.input == ranks.y{index}`", (3, 4 * count),
                 [*parts(index), (3, 4, 1), *parts(count - index - 1)], {"axis": 1},
                 f": 2, expected 3 with ranks.input = 2, ranks.y{index} = 3")
                for index in range(count)
            ),
            (outputs_contract(count), f"`dim(shapes.input, attrs.axis) == {sum_of(count)}`",
             (3, 21), parts(count), {"axis": 1},
             f": 21, expected {4 * count} with {dims(count)}"),
        )
    ),
]  # fmt: skip


def split_(x, outputs, changes):
    shapes = {f"y{index}": shape for index, shape in enumerate(outputs) if shape is not None}
    attributes = dict(changes)
    inputs = {"input": Tensor(x, attributes.pop("dtype", "float32"))}
    return resolve(SPLIT, inputs, attributes=attributes, outputs=shapes)


@pytest.mark.parametrize(
    ("contract", "clause", "x", "outputs", "changes", "rest"),
    SPLIT_CLAUSES,
    ids=[f"{row[0]}-{row[1][:60]}" for row in SPLIT_CLAUSES],
)
def test_each_clause_of_split_s_contracts(contract, clause, x, outputs, changes, rest):
    # The plain variant of each number of outputs asks for nothing but the contract.
    count = COUNTS.index(contract.removesuffix("OutputContract")) + 1
    id = "one_output_copy" if count == 1 else f"{COUNTS[count - 1]}_outputs"
    call = split_(x, outputs, changes)
    device = FLOOR if "dtype" in changes else IDEAL
    assert reason_of(call, id, device) == f"{contract}: {clause}{rest}"
    assert contract == SPLIT.variant(id).when[0].text and len(SPLIT.variant(id).when) == 1


def test_no_clause_of_split_is_left_out():
    tested = {}
    for contract, clause, *_ in SPLIT_CLAUSES:
        name, _, inner = clause.rpartition(": `")
        tested.setdefault(contract, set()).add((inner or clause).strip("`"))
        assert name in ("", "baseContract", "baseContract: numOutputsContract")
    base = {each.text for each in SPLIT.derive["baseContract"].conjuncts}
    base = base - {"numOutputsContract"} | {SPLIT.derive["numOutputsContract"].text}
    for count in range(1, 6):
        contract = outputs_contract(count)
        clauses = {each.text for each in SPLIT.derive[contract].conjuncts}
        assert tested.pop(contract) == clauses - {"baseContract"} | base
    assert tested == {}


# What the block variants ask for besides: the other dimensions of every output are the input's.
BLOCKS = [
    (count, index, part)
    for count in (2, 3, 4)
    for index in range(count)
    for part in ("outer", "inner")
]


@pytest.mark.parametrize(("count", "index", "part"), BLOCKS)
def test_each_clause_of_split_s_block_contracts(count, index, part):
    good, bad = (2, 4, 3), ((3, 4, 3) if part == "outer" else (2, 4, 2))
    outputs = [good] * index + [bad] + [good] * (count - index - 1)
    call = split((2, 4 * count, 3), *outputs, axis=1)
    got, expected = (3, 2) if part == "outer" else (2, 3)
    contract, id = f"{COUNTS[count - 1]}BlockContract", f"{COUNTS[count - 1]}_outputs_block_vec4"
    clause = f"{part}(shapes.y{index}, attrs.axis) == {part}(shapes.input, attrs.axis)"
    assert reason_of(call, id) == (
        f"{contract}: `{clause}`: {got}, expected {expected} with shapes.y{index} = {list(bad)}, "
        f"attrs.axis = 1, shapes.input = [2, {4 * count}, 3]"
    )
    assert clause in [each.text for each in SPLIT.derive[contract].conjuncts]
    # A call with so many other outputs is refused by what the contract builds on.
    call = split((3, 4), (3, 4), axis=1)
    inside = f"{contract}: {outputs_contract(count)}: `present.y1` with present.y1 = false"
    assert reason_of(call, id) == inside


DISPATCH = (
    "ceilDiv(numel(shapes.x) / {per}, {size}) <= min(device.limits."
    "maxComputeWorkgroupsPerDimension, 65535) * min(device.limits."
    "maxComputeWorkgroupsPerDimension, 65535)"
)
HUGE = rotary((2**20, 2**10, 2**10, 8), (2**20, 2**10, 4))
HUGE_ODD = rotary((2**20, 2**10, 2**12, 12), (2**20, 2**12, 6))


def dispatch_clause(call, per, size, value):
    x = list(dict(call.inputs)["x"].shape)
    limit = "device.limits.maxComputeWorkgroupsPerDimension"
    return (
        f"`{DISPATCH.format(per=per, size=size)}` with shapes.x = {x}, {size} = {value}, "
        f"{limit} = 65535"
    )


@pytest.mark.parametrize(
    ("call", "id", "reason"),
    [
        # RotaryEmbedding.
        (rotary((2, 3, 5, 12), (2, 5, 6)), "rank4_cache3_quad",
         "quadOk: `quad3Ok if ranks.x == 3 else quad4Ok` with ranks.x = 4, quad3Ok = false, "
         "quad4Ok = false"),
        (rotary((2, 5, 12), (2, 5, 2), num_heads=3), "rank3_cache3_quad",
         "quadOk: `quad3Ok if ranks.x == 3 else quad4Ok` with ranks.x = 3, quad3Ok = false, "
         "quad4Ok = false"),
        (rotary((2, 3, 5, 0), (2, 5, 0)), "rank4_cache3_output_vec4",
         "`headElements > 0` with headElements = 0"),
        (rotary((2, 3, 5, 6), (2, 5, 3)), "rank4_cache3_output_vec4",
         "`headElements % 4 == 0`: 2, expected 0 with headElements = 6"),
        (rotary((2, 3, 5, 8), (2, 5, 4)), "rank4_cache3_output_vec4",
         "`rotationPairs % 4 != 0` with rotationPairs = 4"),
        (rotary((2, 3, 5, 12), (2, 5, 6), interleaved=1), "rank4_cache3_output_vec4",
         "`attrs.interleaved == 0`: 1, expected 0 with attrs.interleaved = 1"),
        (HUGE.with_tunables(WORKGROUP_SIZE=1), "rank4_cache3_quad",
         "quadDispatchOk: " + dispatch_clause(HUGE, 8, "tunables.WORKGROUP_SIZE", 1)),
        (HUGE.with_tunables(WORKGROUP_SIZE=1), "rank4_cache3",
         "pairDispatchOk: " + dispatch_clause(HUGE, 2, "tunables.WORKGROUP_SIZE", 1)),
        (HUGE_ODD.with_tunables(WORKGROUP_SIZE=1), "rank4_cache3_output_vec4",
         dispatch_clause(HUGE_ODD, 4, "rotaryOutputWg", 1)),
        # Split.
        (split((3, 8), (3, 4), (3, 4), axis=1, dtype="int64"), "two_outputs_block_vec4",
         '`dtypes.T != "vec2<u32>"` with dtypes.T = "vec2<u32>"'),
        (split((3, 9), (3, 5), (3, 4), axis=1), "two_outputs_block_vec4",
         "`dim(shapes.y0, attrs.axis) * inner(shapes.y0, attrs.axis) % 4 == 0`: 1, expected 0 "
         "with shapes.y0 = [3, 5], attrs.axis = 1"),
        (split((3, 9), (3, 4), (3, 5), axis=1), "two_outputs_block_vec4",
         "`dim(shapes.y1, attrs.axis) * inner(shapes.y1, attrs.axis) % 4 == 0`: 1, expected 0 "
         "with shapes.y1 = [3, 5], attrs.axis = 1"),
        (split((3, 9), (3, 4), (3, 0), (3, 5), axis=1), "three_outputs_block_scalar_x4",
         "`dim(shapes.y1, attrs.axis) > 0` with shapes.y1 = [3, 0], attrs.axis = 1"),
        (split((3, 9), (3, 3), (3, 3), (3, 3), axis=1), "three_outputs_block_scalar_x4",
         "`max(numel(shapes.y0), numel(shapes.y1), numel(shapes.y2)) >= 16` with shapes.y0 = "
         "[3, 3], shapes.y1 = [3, 3], shapes.y2 = [3, 3]"),
        # Applies, and is outdone.
        (split((3, 8), (3, 4), (3, 4), axis=1), "two_outputs",
         "applies too, but two_outputs_block_vec4 comes first"),
    ],
    ids=lambda each: each[:60] if isinstance(each, str) and " " in each else "",
)  # fmt: skip
def test_clauses_of_single_variants(call, id, reason):
    assert reason_of(call, id) == reason


# --- the report ---------------------------------------------------------------------------------


def test_the_report_groups_equal_reasons_and_puts_the_nearest_first():
    with pytest.raises(CallError) as caught:
        chosen(rotary((2, 3, 5, 6), (2, 5, 4)), IDEAL)
    assert str(caught.value).splitlines() == [
        "no variant of RotaryEmbedding takes this call on any device: RotaryEmbedding(x = "
        "float32[2,3,5,6], cos = float32[2,5,4], sin = float32[2,5,4], interleaved = 0, "
        "rotary_embedding_dim = 0) -> y float32[2,3,5,6]",
        "  rank4_cache3, rank4_cache3_quad, rank4_cache3_output_vec4: rank4Contract: "
        "`dim(shapes.cos, 2) * 2 == (attrs.rotary_embedding_dim if attrs.rotary_embedding_dim != "
        "0 else dim(shapes.x, 3))`: 8, expected 6 with shapes.cos = [2, 5, 4], "
        "attrs.rotary_embedding_dim = 0, shapes.x = [2, 3, 5, 6]",
        "  rank4_cache2_pos, rank4_cache2_pos_quad, rank4_cache2_pos_output_vec4: "
        "rank4PosContract: `ranks.cos == 2`: 3, expected 2 with ranks.cos = 3",
        "  rank3_cache3, rank3_cache3_quad, rank3_cache3_output_vec4: rank3Contract: "
        "`ranks.x == 3`: 4, expected 3 with ranks.x = 4",
        "  rank3_cache2_pos, rank3_cache2_pos_quad, rank3_cache2_pos_output_vec4: "
        "rank3PosContract: `ranks.x == 3`: 4, expected 3 with ranks.x = 4",
    ]


def test_the_report_of_a_device_names_it():
    call = rotary((2, 3, 5, 8), (2, 5, 4), dtype="float16")
    assert chosen(call, IDEAL) == chosen(call, PRESETS["apple-m"]) == "rank4_cache3_quad"
    with pytest.raises(DeviceError) as caught:
        chosen(call, FLOOR)
    head, first, *_ = str(caught.value).splitlines()
    assert head.startswith("no variant of RotaryEmbedding takes this call on floor: Rotary")
    assert first == (
        "  rank4_cache3_quad, rank4_cache3, rank4_cache3_output_vec4: rank4Contract: "
        '`f16Ok(dtypes.T)` with dtypes.T = "f16"'
    )


def test_all_variants_are_in_the_report():
    for spec, call in ((ROTARY, rotary((2,), (3,))), (SPLIT, split((), ()))):
        with pytest.raises(CallError) as caught:
            chosen(call, IDEAL)
        for each in spec.variants:
            assert each.id in str(caught.value)


WRONG = "; `when` expects true or false, got "


@pytest.mark.parametrize(
    ("clause", "reason"),
    [
        # `a and b` has b's value where a passes for true: only the last must be true itself.
        ("shapes.x and ranks.x == 3", "`ranks.x == 3`: 2, expected 3 with ranks.x = 2"),
        (
            "ranks.x == 2 and shapes.x",
            f"`shapes.x` with shapes.x = [2, 3]{WRONG}[2, 3]",
        ),
        ("rows and ranks.x == 3", "`ranks.x == 3`: 2, expected 3 with ranks.x = 2"),
        ("rows", f"rows: `dim(shapes.x, 0)` with shapes.x = [2, 3]{WRONG}2"),
        ("ok", f"ok: `attrs.size` with attrs.size = undefined{WRONG}undefined"),
        ("ok and false", "ok: `attrs.size` with attrs.size = undefined"),
        ("all", "all: ok: `attrs.size` with attrs.size = undefined"),
        ("list", f"`list` with list = [2]{WRONG}[2]"),
        ("ranks.x == 2 and attrs.size < 3", "`attrs.size < 3`: cannot compare undefined < 3"),
    ],
)
def test_reasons(clause, reason):
    derive = {
        "rows": "dim(shapes.x, 0)",
        "ok": "rows and attrs.size",
        "all": "ok and rows",
        "list": ["rows"],
    }
    with pytest.raises(DeviceError) as caught:
        small(variant("a", when=[clause]), derive=derive)
    assert str(caught.value).splitlines()[1] == f"  a: {reason}"


def test_a_derived_value_may_have_one_of_the_format_s_names_and_be_made_from_it():
    with pytest.raises(DeviceError, match=r"  a: ranks: `ranks` with ranks = {x, y}; `when`"):
        small(variant("a", when=["ranks"]), derive={"ranks": "ranks"})


def test_refusals_of_a_call_that_runs():
    call = split((3, 8), (3, 4), (3, 4), axis=1)
    found = variants.refusals(call, FLOOR, variants.select(call, FLOOR).scope)
    assert len(found) == len(SPLIT.variants) - 1
    assert found[0] == variants.Refusal(
        "two_outputs", "applies too, but two_outputs_block_vec4 comes first", 0
    )
    assert [each.misses for each in found] == sorted(each.misses for each in found)
