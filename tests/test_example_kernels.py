"""The kernels under examples/kernels: their own tests, and random calls against NumPy.

They go through the engine without JAX. What each returns is compared with float64, within the
rounding that its sums and its dtype may cost.
"""

import base64
import functools
import hashlib
import importlib.util
import json
import math
import pathlib
import types

import kernel_oracle
import numpy as np
import pytest
from kernel_oracle import check, wide

from jax_webgpu import capabilities, device, folder, plan, runtime, spec, trial, variants
from jax_webgpu.errors import CallError, DeviceError
from jax_webgpu.resolve import Tensor, resolve

ROOT = pathlib.Path(__file__).parents[1] / "examples" / "kernels"
NAMES = ("add", "gelu", "matmul", "rms_norm", "scan", "softmax")
SPECS = {name: spec.load(ROOT / name / "manifest.json") for name in NAMES}
DEVICES = tuple(capabilities.PRESETS[name] for name in ("floor", "swiftshader", "apple-m"))

each_kernel = pytest.mark.parametrize("name", NAMES)


@functools.cache
def cases(name):
    """Those of a folder's `test.json`."""
    return trial.read(folder.read(ROOT / name))


def resolved(name, *arrays, tunables=None, **attributes):
    """A call by the arrays of its inputs, in order, or by their shapes for float32."""
    tensors = [
        Tensor(each, "float32") if isinstance(each, tuple) else Tensor(each.shape, str(each.dtype))
        for each in arrays
    ]
    inputs = dict(zip(SPECS[name].inputs, tensors, strict=True))
    return resolve(SPECS[name], inputs, attributes=attributes, tunables=tunables)


def run(name, *arrays, **keywords):
    """The one output, and the plan that made it."""
    call = resolved(name, *arrays, **keywords)
    operator = runtime.Operator(name, SPECS[name])
    (result,) = runtime.run(operator, call, arrays)
    return result, plan.make(call, device.get().capabilities)


# ---- the folders --------------------------------------------------------------------------------


@functools.cache
def make():
    """The script that writes what is derived."""
    description = importlib.util.spec_from_file_location("make_kernels", ROOT / "make.py")
    module = importlib.util.module_from_spec(description)
    description.loader.exec_module(module)
    return module


def test_every_folder_is_named():
    assert sorted(path.name for path in ROOT.iterdir() if (path / "manifest.json").exists()) == [
        *NAMES
    ]
    assert sorted(make().CASES) == [*NAMES]


@each_kernel
def test_folder_holds_what_its_manifest_names(name):
    files = {path.name for path in (ROOT / name).iterdir()}
    assert files == {"manifest.json", "metadata.json", "test.json", *SPECS[name].templates}


@each_kernel
def test_metadata_has_the_digest_of_each_file(name):
    folder = ROOT / name
    metadata = json.loads((folder / "metadata.json").read_bytes())
    others = [path for path in folder.iterdir() if path.name != "metadata.json"]

    assert metadata["name"] == repr(SPECS[name])
    assert metadata["version"] == 1
    assert metadata["digest"]["algorithm"] == "sha256"
    assert metadata["digest"]["files"] == {
        path.name: base64.b64encode(hashlib.sha256(path.read_bytes()).digest()).decode()
        for path in others
    }, "run examples/kernels/make.py"


@each_kernel
def test_tests_are_those_that_the_script_writes(name):
    assert (ROOT / name / "test.json").read_bytes() == make().tests(name)
    assert len(make().tests(name)) <= 60 * 1024


@each_kernel
def test_cases_pass_and_reach_every_variant(name):
    results = [trial.attempt(SPECS[name], case) for case in cases(name)]
    if "float16" not in floats():
        refused = [each for each in results if each.status == trial.Status.REFUSED]
        assert refused and all("f16Ok(dtypes" in each.detail for each in refused)
        results = [each for each in results if each not in refused]

    assert [str(each) for each in results if each.status != trial.Status.PASSED] == []
    assert [str(each) for each in results if each.detail] == []
    assert {each.variant for each in results} == {each.id for each in SPECS[name].variants}


@each_kernel
@pytest.mark.parametrize("preset", DEVICES, ids=lambda preset: preset.name)
def test_plans_of_devices_on_paper(name, preset, monkeypatch):
    """Each case is planned, its templates without undefined names; or needs f16 in vain."""
    monkeypatch.setattr(plan, "render", functools.partial(plan.render, strict=True))
    for case in cases(name):
        tensors = {port: array.tensor for port, array in case.inputs.items()}
        call = resolve(SPECS[name], tensors, attributes=case.attributes, tunables=case.tunables)
        arrays = [*case.inputs.values(), *case.outputs.values()]
        halves = any(array.tensor.dtype == "float16" for array in arrays)
        if halves and not preset.has("shader-f16"):
            with pytest.raises(DeviceError, match=r"f16Ok\(dtypes"):
                plan.anew(call, preset)
            continue
        planned = plan.anew(call, preset)  # past the cache
        assert planned.unwritten == ()
        assert bool(planned.passes) == all(case.outputs["y"].tensor.shape)
        for each in planned.passes:
            assert len(each.bindings) <= 8
            assert all(math.prod(each.workgroups) and size <= 65535 for size in each.workgroups)


# ---- random calls -------------------------------------------------------------------------------


class Draw:
    """Seeded draws of what a call is made of."""

    def __init__(self, seed):
        self.generator = np.random.default_rng(seed)

    def one(self, *choices):
        return choices[self.generator.integers(len(choices))]

    def sizes(self, rank, *choices):
        return tuple(self.one(*choices) for _ in range(rank))

    def array(self, shape, dtype):
        if np.dtype(dtype).kind in "iu":
            ends = np.iinfo(dtype)
            return self.generator.integers(ends.min, ends.max, shape, dtype, endpoint=True)
        return (3 * self.generator.standard_normal(shape)).astype(dtype)

    def workgroup_size(self):
        return {"WORKGROUP_SIZE": self.one(1, 2, 3, 7, 32, 64, 100, 256, 300, 4096)}

    def repeated(self, shape):
        """A shape that broadcasts to the given one."""
        shape = tuple(self.one(1, size, size) for size in shape)
        return shape[self.one(0, 0, *range(len(shape) + 1)) :]


def floats():
    """The dtypes that a kernel can have on this device."""
    halves = device.get().capabilities.has("shader-f16")
    return ("float32", "float16") if halves else ("float32",)


def draw_gelu(draw):
    shape = draw.sizes(draw.one(0, 1, 2, 3), 0, 1, 3, 4, 17, 40)
    x = draw.array(shape, draw.one(*floats()))
    approximate = draw.one("none", "tanh")
    actual, _ = run("gelu", x, approximate=approximate, tunables=draw.workgroup_size())
    check(actual, *kernel_oracle.gelu(x, approximate))


def draw_add(draw):
    shape = draw.sizes(draw.one(0, 1, 2, 3, 4, 5, 8), 1, 2, 3, 4)
    shape = draw.one(shape, shape, shape, shape, (*shape[:-1], 0), (*shape[:2], 64))
    dtype = draw.one(*floats(), "int32", "uint32")
    a, b = draw.array(draw.repeated(shape), dtype), draw.array(draw.repeated(shape), dtype)
    if draw.one(True, False):
        a = draw.array(shape, dtype)
    actual, _ = run("add", a, b, tunables=draw.workgroup_size())
    np.testing.assert_array_equal(actual, a + b, strict=True)


def draw_rms_norm(draw):
    rank = draw.one(1, 2, 3, 4)
    shape = draw.sizes(rank, 1, 2, 3, 4, 8, 13)
    shape = draw.one(shape, shape, shape, (*shape[:-1], 1100), (*shape[:-1], 0), (0, *shape[1:]))
    axis = int(draw.generator.integers(-rank, rank))
    row = shape[axis % rank :]
    dtypes = draw.one(*floats()), draw.one(*floats())
    x = draw.array(shape, dtypes[0])
    weight = draw.array(draw.one(row, row, draw.repeated(row), draw.repeated(shape)), dtypes[1])
    epsilon = draw.one(1e-5, 1e-6, 0.1)
    actual, _ = run(
        "rms_norm", x, weight, axis=axis, epsilon=epsilon, tunables=draw.workgroup_size()
    )
    assert str(actual.dtype) == dtypes[1]
    check(actual, *kernel_oracle.rms_norm(x, weight, axis, epsilon))


def draw_softmax(draw):
    rank = draw.one(1, 2, 3, 4)
    shape = draw.sizes(rank, 1, 2, 3, 8, 13, 40)
    shape = draw.one(shape, shape, shape, (*shape[:-1], 600), (*shape[:-1], 0))
    x = draw.array(shape, draw.one(*floats())) * np.float16(draw.one(1, 10, 100))
    axis = int(draw.generator.integers(-rank, rank))
    tunables = draw.workgroup_size() | {"SHORT": draw.one(1, 4, 32)}
    actual, _ = run("softmax", x, axis=axis, tunables=tunables)
    check(actual, *kernel_oracle.softmax(x, axis))


def draw_matmul(draw):
    rows, depth, columns = draw.sizes(3, 1, 2, 5, 8, 31, 32, 64, 70)
    depth = draw.one(depth, depth, depth, 0)
    batch = draw.sizes(draw.one(0, 0, 1, 2, 3), 1, 2, 3)
    dtype = draw.one(*floats(), "int32", "uint32")
    a = draw.array(draw.one((*draw.repeated(batch), rows, depth), (depth,)), dtype)
    b = draw.array(draw.one((*draw.repeated(batch), depth, columns), (depth,)), dtype)
    tunables = draw.workgroup_size() | {"TILE": draw.one(1, 2, 3, 5, 8, 16, 16, 64)}
    actual, _ = run("matmul", a, b, tunables=tunables)
    check(actual, *kernel_oracle.matmul(a, b))


def draw_scan(draw):
    rank = draw.one(1, 2, 3)
    shape = draw.sizes(rank, 1, 2, 3, 4, 7, 16, 33)
    shape = draw.one(shape, shape, shape, (*shape[:-1], 1500), (*shape[:-1], 0))
    x = draw.array(shape, draw.one(*floats(), "int32", "uint32"))
    axis, exclusive, reverse = draw.generator.integers((-rank, 0, 0), (rank, 2, 2)).tolist()
    options = {"axis": axis, "exclusive": exclusive, "reverse": reverse}
    actual, _ = run("scan", x, **options, tunables=draw.workgroup_size())
    check(actual, *kernel_oracle.scan(x, **options))


@pytest.mark.parametrize("seed", range(60))
@each_kernel
def test_random_calls(name, seed):
    globals()[f"draw_{name}"](Draw([seed, NAMES.index(name)]))


def test_gelu_keeps_its_digits_where_it_is_small():
    x = np.linspace(-14, -4, 101, dtype=np.float32)
    actual, _ = run("gelu", x)
    exact = np.array([z * math.erfc(-z / math.sqrt(2)) / 2 for z in x.tolist()])
    # `tail`, which is the result over x, may be flushed to zero where it is subnormal: so then is
    # the result.
    smallest = np.finfo(np.float32).tiny
    flushed = np.where(np.abs(exact / x) < smallest, np.abs(exact), 0)
    check(actual, exact, 3e-5 * np.abs(exact) + flushed)


# ---- sizes --------------------------------------------------------------------------------------

ONE = types.MappingProxyType({"WORKGROUP_SIZE": 1})  # so that small arrays need many workgroups
MANY = 65535 + 3


def run_afresh(name, *arrays, **keywords):
    """As `run`, in memory of zeros: what was used before may hold the very result."""
    device.clear_caches()
    return run(name, *arrays, **keywords)


def folded(planned):
    """Whether every pass of a plan has more workgroups than fit in one row."""
    return all(each.workgroups[0] == 65535 and each.workgroups[1] > 1 for each in planned.passes)


def ramp(*shape):
    """Numbers that tell each element from its neighbours and from the one a row of groups on."""
    return (np.arange(math.prod(shape)) % 1009 / 64).astype(np.float32).reshape(shape)


def test_gelu_in_more_workgroups_than_a_row_has():
    for size, variant in ((4 * MANY, "vec4"), (MANY, "scalar")):
        x = ramp(size)
        actual, planned = run_afresh("gelu", x, tunables=ONE)
        assert planned.variant == variant and folded(planned)
        exact = [z / 2 * (1 + math.erf(z / math.sqrt(2))) for z in x[:1009].tolist()]
        check(actual, np.resize(exact, size), 2e-6)


def test_add_in_more_workgroups_than_a_row_has():
    for a, b, variant in (
        ((4 * MANY,), (4 * MANY,), "same_shape_vec4"),
        ((MANY,), (), "scalar_operand"),
        ((5, MANY), (5, 1), "strided"),
    ):
        a, b = ramp(*a), 1 + ramp(*b)
        actual, planned = run_afresh("add", a, b, tunables=ONE)
        assert planned.variant == variant and folded(planned)
        np.testing.assert_array_equal(actual, a + b)


def test_rms_norm_of_more_rows_than_a_row_of_workgroups():
    for size, variant in ((4, "vec4"), (3, "scalar")):
        x, weight = 1 + ramp(MANY, size), 1 + ramp(size)
        actual, planned = run_afresh("rms_norm", x, weight)
        assert planned.variant == variant and folded(planned)
        exact = x / np.sqrt(np.mean(wide(x) ** 2, -1, keepdims=True) + 1e-5) * weight
        check(actual, exact, 2e-6 * exact)


@pytest.mark.parametrize(
    ("shape", "axis", "short", "variant"),
    [
        ((MANY, 3), 1, 32, "line_an_invocation"),
        ((MANY, 3), 1, 1, "line_a_workgroup"),
        ((3, MANY), 0, 32, "line_an_invocation"),
    ],
)
def test_softmax_of_more_lines_than_a_row_of_workgroups(shape, axis, short, variant):
    x = ramp(*shape)
    actual, planned = run_afresh("softmax", x, axis=axis, tunables=ONE | {"SHORT": short})
    assert planned.variant == variant and folded(planned)
    powers = np.exp(wide(x))
    exact = powers / powers.sum(axis, keepdims=True)
    check(actual, exact, 1e-5 * exact)


def test_matmul_in_more_workgroups_than_a_row_has():
    for tile, variant in ((1, "tiled"), (16, "simple")):
        a, b = ramp(MANY, 2, 1), 1 + ramp(1, 2)
        actual, planned = run_afresh("matmul", a, b, tunables=ONE | {"TILE": tile})
        assert planned.variant == variant and folded(planned)
        np.testing.assert_array_equal(actual, a * b)


def test_scan_in_more_workgroups_than_a_row_has():
    x = np.resize(np.arange(1009, dtype=np.int32), (5, MANY))
    actual, planned = run_afresh("scan", x, tunables=ONE)
    assert folded(planned) and len(planned.passes) == 2 + 2 * 2
    np.testing.assert_array_equal(actual, np.cumsum(x, 0, np.int32))


def test_scan_takes_a_pass_for_each_doubling():
    """Two by two, and one before and one after."""
    for length, rounds in ((1, 0), (2, 2), (4, 2), (5, 4), (16, 4), (17, 6), (1 << 20, 20)):
        planned = plan.make(resolved("scan", (length,)), capabilities.PRESETS["floor"])
        assert len(planned.passes) == 2 + rounds
        assert len({each.wgsl for each in planned.passes}) == (3 if rounds else 2)


@pytest.mark.parametrize(
    ("shapes", "variant"),
    [
        (((64, 64), (64, 64)), "tiled"),
        (((32, 16), (16, 32)), "tiled"),
        (((7, 1000, 17), (17, 33)), "tiled"),
        (((31, 64), (64, 64)), "simple"),
        (((64, 64), (64, 31)), "simple"),
        (((64, 15), (15, 64)), "simple"),
        (((64,), (64, 64)), "simple"),
    ],
)
def test_matmul_goes_by_shape(shapes, variant):
    for preset in DEVICES:
        assert plan.make(resolved("matmul", *shapes), preset).variant == variant


def test_matmul_tiles_only_where_a_workgroup_is_large_enough():
    small = capabilities.make("small", maxComputeWorkgroupStorageSize=8191)
    assert plan.make(resolved("matmul", (64, 64), (64, 64)), small).variant == "simple"
    large = resolved("matmul", (64, 64), (64, 64), tunables={"TILE": 17})
    assert plan.make(large, capabilities.PRESETS["floor"]).variant == "simple"


def test_one_pipeline_serves_all_sizes():
    """The sizes of arrays that are not broadcast are no constants of the shader."""
    for name, small, large in (
        ("gelu", [(8,)], [(3, 400)]),
        ("add", [(8,), (8,)], [(3, 400), (3, 400)]),
        ("rms_norm", [(2, 8), (8,)], [(3, 400), (400,)]),
        ("softmax", [(2, 40)], [(3, 5, 400)]),
        ("matmul", [(3, 4), (4, 5)], [(8, 9), (9, 3)]),
        ("scan", [(8,)], [(13,)]),
    ):
        texts = [
            [each.wgsl for each in plan.make(resolved(name, *shapes), DEVICES[0]).passes[:2]]
            for shapes in (small, large)
        ]
        assert texts[0] == texts[1], name


# ---- refusals -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "shapes", "attributes", "words"),
    [
        ("gelu", [(3,)], {"approximate": "erf"}, 'approximate is "erf"; expected one of "none"'),
        ("add", [(3,), (4,)], {}, r"\[3\] and \[4\] do not broadcast"),
        ("rms_norm", [(), ()], {}, "ranks.x >= 1"),
        ("rms_norm", [(2, 3), (3,)], {"axis": 2}, "axis < ranks.x"),
        ("rms_norm", [(2, 3), (3,)], {"axis": -3}, "axis >= 0"),
        ("rms_norm", [(2, 3), (2,)], {}, r"broadcastable\(shapes.weight, shapes.x\)"),
        ("rms_norm", [(3,), (2, 3)], {}, r"broadcastable\(shapes.weight, shapes.x\)"),
        ("rms_norm", [(2, 3), (3,)], {"stash_type": 10}, "stash_type is 10; expected one of 1"),
        ("softmax", [()], {}, "ranks.x >= 1"),
        ("softmax", [(2, 3)], {"axis": 2}, "axis < ranks.x"),
        ("softmax", [(2, 3)], {"axis": -3}, "axis >= 0"),
        ("matmul", [(2, 3), (4, 5)], {}, r"\[2, 3\] and \[4, 5\] do not fit"),
        ("matmul", [(), (4, 5)], {}, "a scalar has no matrix product"),
        ("matmul", [(2, 1, 1), (3, 1, 1)], {}, r"\[2\] and \[3\] do not broadcast"),
        ("scan", [()], {}, "ranks.x >= 1"),
        ("scan", [(2, 3)], {"axis": 2}, "axis < ranks.x"),
        ("scan", [(2, 3)], {"exclusive": 2}, "exclusive is 2; expected one of 0, 1"),
    ],
)
def test_a_wrong_call_is_told_what_is_wrong(name, shapes, attributes, words):
    with pytest.raises(CallError, match=words):
        variants.select(resolved(name, *shapes, **attributes), capabilities.IDEAL)


@each_kernel
def test_a_shape_of_the_caller_s_must_be_the_result_s(name):
    shapes = {"add": [(2, 3), (3,)], "matmul": [(2, 3), (3, 3)], "rms_norm": [(2, 3), (3,)]}
    inputs = {
        port: Tensor(shape, "float32")
        for port, shape in zip(SPECS[name].inputs, shapes.get(name, [(2, 3)]), strict=True)
    }
    call = resolve(SPECS[name], inputs, outputs={"y": (3, 2)})
    with pytest.raises(CallError, match="sameShape"):
        variants.select(call, capabilities.IDEAL)
