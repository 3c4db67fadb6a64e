"""A device held down to WebGPU's floor, one feature or limit at a time and all at once.

wgpu makes the device with these features and limits and no others, so that what a small GPU's
driver would refuse is refused here. Calls of every kind must come out right on each.
"""

import functools
import gc
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import wgpu
from calls import eighths, public_function
from cases import CASES, RotaryCase
from engine import resolved
from test_operators import assert_right

import jax_webgpu
from jax_webgpu import config, device, folder, runtime, spec, trial
from jax_webgpu.capabilities import FLOOR_LIMITS
from jax_webgpu.ops import rotary_embedding, split

pytestmark = pytest.mark.promise("adapters")

KERNELS = Path(__file__).parents[1] / "examples" / "kernels"

ALL = frozenset(config.FEATURES)
FLOOR = ("floor", "floor")
# What the environment says of features and limits.
MASKS = {
    **{f"no {feature}": (",".join(sorted(ALL - {feature})), "") for feature in config.FEATURES},
    **{f"{name}={value}": ("", f"{name}={value}") for name, value in FLOOR_LIMITS.items()},
    "no features": ("floor", ""),
    "least limits": ("", "floor"),
    "floor": FLOOR,
}


@pytest.fixture
def environment(monkeypatch):
    """Sets what the variables say of features and limits, and forgets what they said before."""

    def say(features="", limits=""):
        monkeypatch.setenv("JAX_WEBGPU_FEATURES", features)
        monkeypatch.setenv("JAX_WEBGPU_LIMITS", limits)
        config.environment.cache_clear()
        monkeypatch.setattr(device, "_devices", [])

    yield say
    monkeypatch.undo()
    config.environment.cache_clear()
    gc.collect()  # a driver may give a process no more than some dozens of devices


@pytest.fixture
def held(environment):
    """The device of this process from now on, held to what the environment says."""

    def hold(features="", limits=""):
        environment(features, limits)
        return device.get()

    return hold


# --- calls of every kind ------------------------------------------------------------------------

# A call of each variant and dtype.
EACH = tuple({(case.variant, case.dtype): case for case in reversed(CASES)}.values())


def check_operators(cases, overlays):
    """Below the public functions: the published variants, or the faster ones beside them."""
    for case in cases:
        rules = rotary_embedding.Rules if isinstance(case, RotaryCase) else split.Rules
        operator, call, inputs = rules.operator, resolved(case), case.inputs()
        if overlays:  # which a CPU takes only when it is told
            call = replace(call, spec=operator.overlaid).with_tunables(ON_CPU=True)
        if is_refused(case):
            with pytest.raises(jax_webgpu.DeviceError, match="f16Ok"):
                runtime.run(operator, call, inputs)
            continue
        results = runtime.run(operator, call, inputs)
        assert_right(results[0] if isinstance(case, RotaryCase) else results, case, inputs)


def is_refused(case):
    """Split's contract wants f16 for data that it only moves: `split` hands it bits instead.

    Rotary embedding has float16 in float32 then.
    """
    halves = device.get().capabilities.has("shader-f16")
    return case.dtype == "float16" and not halves and not isinstance(case, RotaryCase)


def check_many_parts():
    """More outputs than the floor has storage buffers."""
    x = np.random.default_rng(9).integers(0, 2**32, (5, 2346), np.uint32)
    for sizes in [(391,) * 6, (1,) * 8 + (2338,), (17,) * 138, tuple(range(1, 69))]:
        oracle.assert_split(jax_webgpu.split(x, sizes, axis=1), x, sizes, 1)


def check_kernels(thin):
    """The kernels under examples/; in float16 they need what a device may lack."""
    halves = device.get().capabilities.has("shader-f16")
    for path in sorted(path.parent for path in KERNELS.glob("*/manifest.json")):
        manifest = spec.load(path / "manifest.json")
        cases = trial.read(folder.read(path))[::thin]
        results = [trial.attempt(manifest, case) for case in cases]
        refused = [each for each in results if each.status == trial.Status.REFUSED]
        others = [str(each) for each in results if each.status != trial.Status.PASSED]
        assert others == [str(each) for each in refused]
        assert all("f16Ok" in each.detail for each in refused)
        assert not halves or not refused
        assert len(refused) < len(results)


HEADS, SIZE, SEQUENCE = 4, 16, 6


def layer(qkv, cos, sin):
    """Operators with transposes, arithmetic and conversions between them."""
    q, k, v = jax_webgpu.split(qkv, num_outputs=3, axis=-1)
    positions = np.array([[0, 3, 1, 5, 2, 4]], np.int32)
    turn = partial(jax_webgpu.rotary_embedding, num_heads=HEADS)
    q = turn(q, cos, sin, positions) * 0.5 + k
    k = turn(k, cos, sin, positions).reshape(1, SEQUENCE, HEADS, SIZE).transpose(0, 2, 1, 3)
    return q.astype(jnp.bfloat16), k, *jax_webgpu.split(v + q, num_outputs=12, axis=-1)


fused = jax_webgpu.fuse(layer)


@functools.cache
def of_layer(dtype):
    """Its arguments, all eighths, and what it gives as plain JAX."""
    rng = np.random.default_rng(5)
    shapes = [(1, SEQUENCE, 3 * HEADS * SIZE), (SEQUENCE, SIZE // 2), (SEQUENCE, SIZE // 2)]
    arrays = [jnp.asarray(eighths(rng, shape, dtype)) for shape in shapes]
    with jax_webgpu.configure(implementation="reference"):
        return arrays, jax.jit(layer)(*arrays)


def check_fused():
    for dtype in ("float32", "float16"):
        arrays, expected = of_layer(dtype)
        for one, other in zip(fused(*arrays), expected, strict=True):
            assert (one.shape, one.dtype) == (other.shape, other.dtype)
            np.testing.assert_array_equal(np.float32(one), np.float32(other))


@pytest.mark.parametrize("mask", MASKS)
def test_calls_of_every_kind_are_right(mask, held, record_property):
    features, limits = MASKS[mask]
    gpu = held(features, limits)
    thin = 1 if mask == "floor" else 3  # all calls under all masks, and few under one alone
    check_operators(EACH[::thin], overlays=False)
    check_operators(EACH[:: 3 * thin], overlays=True)
    record_property("masks", 1)
    check_kernels(thin)
    check_many_parts()
    check_fused()
    assert device.get() is gpu
    assert gpu.counters["dispatches"] > (200 if thin == 1 else 50)


@pytest.mark.parametrize("case", EACH[::4], ids=lambda case: case.id)
def test_the_public_functions_on_the_floor(case, held):
    held(*FLOOR)
    inputs = case.inputs()
    with jax.enable_x64(case.dtype == "int64"):
        assert_right(public_function(case)(*inputs), case, inputs)


def test_the_published_manifests_on_the_floor(held):
    """Of which a call takes as many as it has parts."""
    held(*FLOOR)
    with jax_webgpu.configure(overlays=False):
        check_many_parts()


@pytest.mark.parametrize("most", [4096, 65536])
@pytest.mark.parametrize("limit", ["maxStorageBufferBindingSize", "maxBufferSize"])
def test_arrays_beyond_a_limit_go_in_pieces(limit, most, environment, monkeypatch):
    """Below the floor, which no device is, so that the arrays need not be large."""
    environment()
    monkeypatch.setattr(device, "_PIECE_BYTES", 2048)
    small = replace(config.environment(), limits=((limit, most),))
    monkeypatch.setattr(config, "environment", lambda: small)
    assert device.get().capabilities.limit(limit) == most
    rng = np.random.default_rng(most)
    x = rng.integers(0, 2**32, (96, 777), np.uint32)
    for sizes in [(300, 477), (1, 2, 3, 4, 5, 6, 7, 8, 9, 732), (111,) * 7]:
        oracle.assert_split(jax_webgpu.split(x, sizes, axis=1), x, sizes, 1)
    for interleaved in (False, True):
        case = RotaryCase(None, 4, 2, 5, 60, 64, 0, interleaved, "float32", 700)
        inputs = case.inputs()
        assert_right(public_function(case)(*inputs), case, inputs)


# --- what the driver refuses --------------------------------------------------------------------


def test_the_device_has_what_it_was_held_to(held):
    gpu = held(*FLOOR)
    assert gpu.capabilities.features == frozenset()
    assert dict(gpu.capabilities.limits) == FLOOR_LIMITS
    assert not gpu._unified
    assert not {*gpu._device.features} & {*device._FEATURES, device._MAPPABLE}
    dashed = {name.replace("-", ""): value for name, value in gpu._device.limits.items()}
    assert {name: dashed[name.lower()] for name in FLOOR_LIMITS} == FLOOR_LIMITS
    assert jax_webgpu.device_info().capabilities == gpu.info.capabilities


@pytest.mark.parametrize("mask", [name for name in MASKS if "no " in name or "=" in name])
def test_the_others_stay(mask, held):
    before = held().capabilities
    features, limits = MASKS[mask]
    gpu = held(features, limits)
    missing = ALL if features == "floor" else ALL - {*features.split(",")} if features else set()
    assert before.features - gpu.capabilities.features == before.features & missing
    changed = dict({*gpu.capabilities.limits} - {*before.limits})
    name, _, value = limits.partition("=")
    worse = limits and before.limit(name) != int(value)
    assert changed == ({name: int(value)} if worse else {})


def test_wgpu_holds_a_shader_to_the_floor(held):
    """Else the masks would show nothing."""
    gpu = held(*FLOOR)._device
    layout = [
        {"binding": n, "visibility": wgpu.ShaderStage.COMPUTE, "buffer": {"type": "storage"}}
        for n in range(9)
    ]
    with pytest.raises(wgpu.GPUError, match=r"storage_buffers_per_shader_stage|StorageBuffers"):
        gpu.create_pipeline_layout(
            bind_group_layouts=[gpu.create_bind_group_layout(entries=layout)]
        )
    with pytest.raises(wgpu.GPUError, match="256"):
        gpu.create_compute_pipeline(
            layout="auto",
            compute={
                "module": gpu.create_shader_module(
                    code="@compute @workgroup_size(257) fn main() {}"
                ),
                "entry_point": "main",
            },
        )
    with pytest.raises(wgpu.GPUError, match="f16"):
        gpu.create_shader_module(code="enable f16;\nvar<private> a: f16;")


def test_a_kernel_of_half_floats_is_refused_by_its_contract(held):
    held("floor")
    softmax = jax_webgpu.load_kernel(KERNELS / "softmax")
    x = jnp.ones((3, 5), jnp.float16)
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"f16Ok"):
        softmax(x, axis=-1)
    np.testing.assert_allclose(softmax(x.astype(jnp.float32), axis=-1), np.full((3, 5), 0.2))


def test_a_tunable_beyond_the_limit_names_it(held):
    held("", "maxComputeInvocationsPerWorkgroup=256")
    x = np.arange(7, dtype=np.uint32)
    message = "WORKGROUP_SIZE is 512; maxComputeInvocationsPerWorkgroup .* is 256"
    with (
        jax_webgpu.configure(tunables={"WORKGROUP_SIZE": 512}),
        pytest.raises(jax_webgpu.LimitError, match=message),
    ):
        jax_webgpu.split(x, [3, 4])


def test_without_timestamps_there_are_no_measurements(held):
    gpu = held("floor")
    with pytest.raises(jax_webgpu.DeviceError, match="timestamp-query"):
        gpu.measure(None, [], sets=1, runs=1, rounds=1)


# --- what the variables may say -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("features", "limits", "message"),
    [
        ("shader_f16", "", "JAX_WEBGPU_FEATURES is 'shader_f16'; expected floor, or names of"),
        ("floor,shader-f16", "", "JAX_WEBGPU_FEATURES is 'floor,shader-f16'"),
        ("", "8", "JAX_WEBGPU_LIMITS has '8'; expected floor, or NAME=NUMBER"),
        ("", "maxBuffers=8", "JAX_WEBGPU_LIMITS has 'maxBuffers=8'; .*maxBufferSize"),
        ("", "floor,maxBufferSize=many", "JAX_WEBGPU_LIMITS has 'maxBufferSize=many'"),
        ("", "maxBufferSize=" + "9" * 5000, "JAX_WEBGPU_LIMITS has 'maxBufferSize=9999"),
        ("", "maxBufferSize=1000", "'maxBufferSize=1000'; every WebGPU device has 268435456"),
        ("", "minStorageBufferOffsetAlignment=512", "every WebGPU device has 256 or better"),
    ],
)
def test_a_value_that_is_none(features, limits, message, environment):
    environment(features, limits)
    with pytest.raises(jax_webgpu.CallError, match=message):
        config.environment()


def test_names_and_values_may_have_spaces_between(environment):
    environment(" subgroups , timestamp-query", "floor, maxBufferSize=300000000,")
    said = config.environment()
    assert said.features == {"subgroups", "timestamp-query"}
    assert dict(said.limits) == {**FLOOR_LIMITS, "maxBufferSize": 300_000_000}


def test_more_than_the_adapter_has_is_an_error(environment):
    environment("", f"maxBufferSize={2**60}")
    with pytest.raises(jax_webgpu.AdapterError, match=r"sets maxBufferSize to 1,152,9.* has "):
        device.get()


def test_the_features_are_those_that_a_device_asks_for():
    names = {device._WEBGPU_NAMES.get(name, name) for name in device._FEATURES}
    assert names | {device._MAPPABLE} == ALL


def test_a_process_of_its_own_on_the_floor(run_snippet):
    """As a user would ask whether a program runs on a small device."""
    done = run_snippet(
        """
        import sys
        from jax_webgpu import cli, device
        assert not device.get().capabilities.features
        sys.exit(cli.main(["info"]) or cli.main(["check"]))
        """,
        JAX_WEBGPU_FEATURES="floor",
        JAX_WEBGPU_LIMITS="floor",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "features: none" in done.stdout
    assert "maxStorageBuffersPerShaderStage: 8\n" in done.stdout
    assert done.stdout.endswith("pass: 21 of 21 variants\n")
