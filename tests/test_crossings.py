"""The two ways from JAX to the host and back, and the settings that choose between them."""

import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from calls import public_function
from cases import CASES, RotaryCase, SplitCase
from test_operators import assert_right

import jax_webgpu
from jax_webgpu import capabilities, config, device, primitive

X = np.arange(24, dtype=np.float32).reshape(2, 12)
SIZES = (4, 8)


def split(x):
    return jax_webgpu.split(x, SIZES, axis=1)


@pytest.fixture
def crossed(monkeypatch):
    """The crossings in the order that calls were lowered to them, and that they ran."""
    seen = SimpleNamespace(lowered=[], ran=[])

    def noting(name, crossing):
        def note(host, *args, **kwargs):
            def noted(*operands):
                seen.ran.append(name)
                return host(*operands)

            seen.lowered.append(name)
            return crossing(noted, *args, **kwargs)

        return note

    monkeypatch.setattr(jax, "pure_callback", noting("pure", jax.pure_callback))
    monkeypatch.setattr(primitive, "buffer_callback", noting("buffer", primitive.buffer_callback))
    jax.clear_caches()
    with jax_webgpu.configure(callback=None, tunables=None):
        yield seen
    jax.clear_caches()


def ready(*arrays):
    """As JAX arrays, computed: `pure` can deadlock on those that are not."""
    return jax.block_until_ready([jnp.asarray(array) for array in arrays])


# --- equal results ------------------------------------------------------------------------------

ONE_OF_EACH = (
    RotaryCase(None, 4, 2, 3, 5, 64, 32, True, "float16", 13),
    RotaryCase(None, 3, 2, 3, 5, 10, 0, False, "float32", None),
    SplitCase(None, (3, 20), 1, (4, 0, 16), "float32"),
    SplitCase(None, (3, 11), -1, (4, 4, 1, 2), "float16"),
    SplitCase(None, (5, 3), 0, (2, 2, 1), "bool", by_number=True),
)


@pytest.mark.parametrize("case", ONE_OF_EACH, ids=lambda case: case.id)
def test_both_crossings_give_equal_results(case, crossed):
    f, inputs = public_function(case), case.inputs()
    shapes = jax.tree.map(lambda out: (out.shape, out.dtype), jax.eval_shape(f, *inputs))
    seen = []
    for callback in ("pure", "buffer"):
        with jax_webgpu.configure(callback=callback):
            arrays = ready(*inputs)
            compiled = jax.jit(f).lower(*arrays).compile()
            crossed.ran.clear()
            for call in (f, jax.jit(f), compiled):
                results = jax.block_until_ready(call(*arrays))
                assert_right(results, case, inputs)
                seen.append(results)
            assert crossed.ran == [callback] * 3
            assert shapes == jax.tree.map(lambda out: (out.shape, out.dtype), results)
    for results in seen:
        jax.tree.map(oracle.assert_same_bits, results, seen[0])


def test_tracing_crosses_nowhere(crossed):
    before = device.get().counters.copy()
    jax.eval_shape(split, X)
    jax.jit(split).lower(X).compile()
    assert crossed.ran == []
    assert device.get().counters == before


# --- which one ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("callback", "taken"), [(None, "buffer"), ("pure", "pure"), ("buffer", "buffer")]
)
def test_choice_on_the_cpu_platform(callback, taken, crossed, run):
    with jax_webgpu.configure(callback=callback):
        oracle.assert_split(run(split, *ready(X)), X, SIZES, 1)
    assert (crossed.lowered, crossed.ran) == ([taken], [taken])


def test_a_jax_without_buffer_callback(crossed, run, monkeypatch):
    monkeypatch.setattr(primitive, "buffer_callback", None)
    oracle.assert_split(run(split, *ready(X)), X, SIZES, 1)
    assert crossed.ran == ["pure"]


def test_buffer_where_it_cannot_work(crossed, run, monkeypatch):
    monkeypatch.setattr(primitive, "buffer_callback", None)
    with (
        jax_webgpu.configure(callback="buffer"),
        pytest.raises(ValueError, match="callback='buffer' works on JAX's CPU platform") as error,
    ):
        run(split, X)
    assert "callback='pure'" in str(error.value)
    assert crossed.lowered == []


def test_pure_where_jax_has_no_cpu_platform(crossed, run, monkeypatch):
    local_devices = jax.local_devices

    def no_cpu(*args, backend=None, **kwargs):
        if backend == "cpu":
            raise RuntimeError("Unknown backend cpu")
        return local_devices(*args, backend=backend, **kwargs)

    x = ready(X)
    with monkeypatch.context() as patch, jax_webgpu.configure(callback="pure"):
        patch.setattr(jax, "local_devices", no_cpu)
        with pytest.raises(ValueError, match="JAX_PLATFORMS") as error:
            run(split, *x)
        assert "cpu" in str(error.value).splitlines()[0]
        assert crossed.lowered == []
        oracle.assert_split(run(reference, *x), X, SIZES, 1)
    oracle.assert_split(run(split, *x), X, SIZES, 1)


def reference(x):
    return tuple(jnp.split(x, [SIZES[0]], axis=1))


LOWERED = """
import jax, numpy as np
import jax_webgpu

def crossing():
    text = jax.jit(lambda x: jax_webgpu.split(x, [1, 2])).lower(np.arange(3)).as_text()
    found = ["xla_ffi_python_cpu_callback" in text, "xla_buffer_python_cpu_callback" in text]
    return ["pure", "buffer"][found.index(True)]

print(crossing())
for callback in ("buffer", "pure", None):
    with jax_webgpu.configure(callback=callback):
        print(crossing())
print(crossing())
"""


@pytest.mark.parametrize(("variable", "default"), [("pure", "pure"), ("", "buffer")])
def test_environment_variable(variable, default, run_snippet):
    done = run_snippet(LOWERED, JAX_WEBGPU_CALLBACK=variable)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [default, "buffer", "pure", "buffer", default]


def test_environment_variable_of_a_wrong_value(run_snippet):
    done = run_snippet(LOWERED, JAX_WEBGPU_CALLBACK="gpu")
    assert done.returncode == 1
    assert "CallError: JAX_WEBGPU_CALLBACK is 'gpu'; expected pure or buffer" in done.stderr


# --- configure ----------------------------------------------------------------------------------


def test_a_function_that_was_jitted_before_sees_a_change(crossed):
    jitted = jax.jit(split)
    x, *_ = ready(X)

    def both():
        crossed.ran.clear()
        for f in (jitted, split):
            oracle.assert_split(jax.block_until_ready(f(x)), X, SIZES, 1)
        return crossed.ran

    assert both() == ["buffer"] * 2
    with jax_webgpu.configure(callback="pure"):
        assert both() == ["pure"] * 2
        with jax_webgpu.configure(callback="buffer"):
            assert both() == ["buffer"] * 2
        assert both() == ["pure"] * 2
    assert both() == ["buffer"] * 2
    with pytest.raises(KeyError), jax_webgpu.configure(callback="pure"):
        raise KeyError
    assert both() == ["buffer"] * 2


def test_without_with_it_stays(crossed):
    jitted = jax.jit(split)
    x, *_ = ready(X)
    for callback in ("pure", "buffer", "pure"):
        jax_webgpu.configure(callback=callback)
        jax.block_until_ready([jitted(x), split(x)])
    assert crossed.ran == ["pure"] * 2 + ["buffer"] * 2 + ["pure"] * 2


def test_no_change_compiles_nothing(crossed):
    jitted = jax.jit(split)
    x, *_ = ready(X)
    jax.block_until_ready(jitted(x))
    with jax_webgpu.configure(callback=None), jax_webgpu.configure():
        jax.block_until_ready(jitted(x))
    jax_webgpu.configure(tunables={})
    jax.block_until_ready(jitted(x))
    assert crossed.lowered == ["buffer"]


def test_a_setting_leaves_the_others(crossed):
    with jax_webgpu.configure(callback="pure"):
        with jax_webgpu.configure(tunables={"WORKGROUP_SIZE": 32}):
            assert config.settings() == config.Settings("pure", (("WORKGROUP_SIZE", 32),))
        assert config.settings() == config.Settings("pure")


@pytest.mark.parametrize(
    ("setting", "error", "pattern"),
    [
        ({"callback": "gpu"}, ValueError, "callback is 'gpu'; expected 'pure', 'buffer' or None"),
        ({"callback": True}, ValueError, "callback is True"),
        ({"implementation": "cuda"}, ValueError, "implementation is 'cuda'"),
        ({"tunables": {"WORKGROUP_SIZE": None}}, ValueError, "WORKGROUP_SIZE is a NoneType"),
        ({"tunables": {"WORKGROUP_SIZE": [64]}}, ValueError, "WORKGROUP_SIZE is a list"),
        ({"callbacks": "pure"}, TypeError, "callbacks"),
    ],
)
def test_bad_values_change_nothing(setting, error, pattern):
    before = config.settings()
    with pytest.raises(error, match=pattern):
        jax_webgpu.configure(**setting)
    assert config.settings() is before


# --- tunables -----------------------------------------------------------------------------------

ROTARY = RotaryCase(None, 4, 2, 3, 5, 64, 32, False, "float32", 13)
SPLIT = SplitCase(None, (3, 20), 1, (7, 6, 7), "float32")
both_operators = pytest.mark.parametrize("case", [ROTARY, SPLIT], ids=["rotary", "split"])


def workgroup_sizes(plan):
    """Of each pass, what stands in its WGSL."""
    return [int(re.search(r"@workgroup_size\((\d+)", each.wgsl)[1]) for each in plan.passes]


@both_operators
def test_tunables_reach_plan_and_results(case, run):
    f, inputs = public_function(case), case.inputs()
    workgroups = []
    for size in (1, 16, 64):
        with jax_webgpu.configure(tunables={"WORKGROUP_SIZE": size}):
            (plan,) = jax_webgpu.explain(f, *inputs)
            assert workgroup_sizes(plan) == [size]
            workgroups.append(plan.passes[0].workgroups[0])
            assert_right(run(f, *inputs), case, inputs)
    assert workgroups == sorted(workgroups, reverse=True) and workgroups[0] > workgroups[-1]
    (plan,) = jax_webgpu.explain(f, *inputs)
    assert workgroup_sizes(plan) == [256]


def test_an_unknown_tunable():
    """It is refused where it is set, and nothing has changed."""
    before = jax_webgpu.config.settings()
    with pytest.raises(ValueError, match=r"tunable WORKGROUP_SIZES: .* WORKGROUP_SIZE\b"):
        jax_webgpu.configure(tunables={"WORKGROUP_SIZES": 64})
    assert jax_webgpu.config.settings() == before


@pytest.mark.parametrize(
    ("tunables", "expected"),
    [
        ({"WORKGROUP_SIZE": True}, "WORKGROUP_SIZE is True; expected a number"),
        ({"WORKGROUP_SIZE": "64"}, "WORKGROUP_SIZE is '64'; expected a number"),
        ({"ON_CPU": 1}, "ON_CPU is 1; expected a boolean"),
    ],
)
def test_a_tunable_of_another_kind(tunables, expected):
    with pytest.raises(ValueError, match=expected):
        jax_webgpu.configure(tunables=tunables)


@both_operators
@pytest.mark.parametrize("size", [0, -1, 1.5])
def test_an_impossible_workgroup_size(case, size, run):
    f, inputs = public_function(case), case.inputs()
    with (
        jax_webgpu.configure(tunables={"WORKGROUP_SIZE": size}),
        pytest.raises(ValueError, match=rf"WORKGROUP_SIZE is {size!r}; expected a whole number"),
    ):
        run(f, *inputs)


@both_operators
@pytest.mark.parametrize("limit", ["maxComputeInvocationsPerWorkgroup", "maxComputeWorkgroupSizeX"])
def test_workgroup_size_over_a_limit(case, limit, run, monkeypatch):
    """Only the device knows: it is asked while JAX compiles, and by `explain`."""
    limits = {"maxComputeInvocationsPerWorkgroup": 512, "maxComputeWorkgroupSizeX": 512} | {
        limit: 128
    }
    small = capabilities.make("small", ("shader-f16",), **limits)
    f, inputs = public_function(case), case.inputs()
    message = f"WORKGROUP_SIZE is 129; {limit} of small is 128"
    with jax_webgpu.configure(tunables={"WORKGROUP_SIZE": 129}), monkeypatch.context() as patch:
        patch.setattr(device.get(), "capabilities", small)
        with pytest.raises(jax_webgpu.LimitError, match=message):
            jax_webgpu.explain(f, *inputs)
        with pytest.raises(jax_webgpu.LimitError, match=message):
            run(f, *inputs)
    assert_right(run(f, *inputs), case, inputs)


# --- a device below WebGPU's floor of 256 invocations -------------------------------------------

TINY = capabilities.make(
    "tiny",
    ("shader-f16",),
    maxComputeInvocationsPerWorkgroup=64,
    maxComputeWorkgroupSizeX=64,
    maxComputeWorkgroupSizeY=64,
    maxComputeWorkgroupSizeZ=64,
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_a_small_device_gets_small_workgroups(case, monkeypatch):
    """On paper, and then planned for it and run here."""
    monkeypatch.setitem(capabilities.PRESETS, "tiny", TINY)
    f, inputs = public_function(case), case.inputs()
    with jax.enable_x64(case.dtype == "int64"):
        for small in jax_webgpu.explain(f, *inputs, device="tiny"):
            assert all(size <= 64 for size in workgroup_sizes(small))
        monkeypatch.setattr(device.get(), "capabilities", TINY)
        assert_right(f(*inputs), case, inputs)


@both_operators
def test_what_the_caller_set_is_kept_on_a_small_device(case, monkeypatch):
    monkeypatch.setitem(capabilities.PRESETS, "tiny", TINY)
    with jax_webgpu.configure(tunables={"WORKGROUP_SIZE": 16}):
        (plan,) = jax_webgpu.explain(public_function(case), *case.inputs(), device="tiny")
    assert workgroup_sizes(plan) == [16]


def test_configure_twice_and_across():
    """A context can be entered again, and leaving one takes back only what it changed."""
    settings = jax_webgpu.config.settings
    context = jax_webgpu.configure(overlays=False)
    for _ in range(2):
        with context:
            assert not settings().overlays
        assert settings().overlays
    first, second = jax_webgpu.configure(callback="pure"), jax_webgpu.configure(overlays=False)
    with second:
        with first:
            assert settings().callback == "pure"
        assert settings().callback is None and not settings().overlays
    assert settings().overlays
