"""The file of tuned tunables: what it changes, what overrides it, and how it is made."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

import jax_webgpu
from jax_webgpu import cli, device, tuning


@pytest.fixture
def tuned(monkeypatch, tmp_path):
    """Puts text, or an object as JSON, into the file that this process reads."""
    file = tmp_path / "deep" / "tuned.json"
    monkeypatch.setenv("JAX_WEBGPU_TUNED", str(file))

    def write(content):
        file.parent.mkdir(exist_ok=True)
        content = content if isinstance(content, str | bytes) else json.dumps(content)
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
        tuning.load.cache_clear()
        return file

    tuning.load.cache_clear()
    yield write
    tuning.load.cache_clear()


def sizes(*, name=None):
    """The workgroup sizes of a rotation in float32 and in float16 and of a split."""
    x, cache = jnp.zeros((1, 2, 16, 128)), jnp.zeros((1, 16, 64))
    half, half_cache = x.astype(jnp.float16), cache.astype(jnp.float16)
    plans = (
        *jax_webgpu.explain(jax_webgpu.rotary_embedding, x, cache, cache, device=name),
        *jax_webgpu.explain(jax_webgpu.rotary_embedding, half, half_cache, half_cache, device=name),
        *jax_webgpu.explain(lambda x: jax_webgpu.split(x, [1, 15], axis=2), x, device=name),
    )
    return [
        int(plan.passes[0].wgsl.split("@workgroup_size(")[1].split(")")[0].split(",")[0])
        for plan in plans
    ]


def test_the_file_applies_to_its_adapter_operator_and_dtype(tuned):
    assert sizes(name="lavapipe") == [256, 256, 256]
    rotary = {"float16": {"WORKGROUP_SIZE": 64}}
    split = {"uint32": {"WORKGROUP_SIZE": 32}}
    tuned({"lavapipe": {"RotaryEmbedding": rotary, "Split": split}})
    assert sizes(name="lavapipe") == [256, 64, 32]
    assert sizes(name="h200") == [256, 256, 256]


def test_a_call_s_own_tunable_comes_first_and_the_limit_last(tuned):
    floats = {dtype: {"WORKGROUP_SIZE": 1024} for dtype in ("float32", "float16")}
    tuned({"floor": {"RotaryEmbedding": floats}})
    x, cache = jnp.zeros((1, 2, 16, 128)), jnp.zeros((1, 16, 64))
    (plan,) = jax_webgpu.explain(jax_webgpu.rotary_embedding, x, cache, cache, device="floor")
    assert "@workgroup_size(256" in plan.passes[0].wgsl  # a device of that name has changed
    with jax_webgpu.configure(tunables={"WORKGROUP_SIZE": 128}):
        (plan,) = jax_webgpu.explain(jax_webgpu.rotary_embedding, x, cache, cache, device="floor")
    assert "@workgroup_size(128" in plan.passes[0].wgsl


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[]",
        "[" * 100_000,
        b'{"a": "\x86"}',
        '{"a": 1}',
        {"a": {"Split": {"uint32": {"SIZE": 3}}}},
        {"a": {"Split": {"uint32": {"WORKGROUP_SIZE": "64"}}}},
        {"a": {"Split": {"uint32": {"WORKGROUP_SIZE": 0}}}},
        {"a": {"Split": {"uint32": {"WORKGROUP_SIZE": True}}}},
    ],
    ids=lambda content: ascii(content)[:40],
)
def test_another_file_is_refused_by_name(content, tuned):
    file = tuned(content)
    with pytest.raises(ValueError, match=r"delete it, or tune again") as error:
        tuning.load()
    assert str(file) in str(error.value)


def test_tune(tuned, capsys):
    """The whole command on little data; what it writes is what later calls take."""
    file = tuned({"another": {"Split": {"uint32": {"WORKGROUP_SIZE": 32}}}})
    assert cli.main(["tune", "--mib", "0.05"]) == 0
    out = capsys.readouterr().out
    name = jax_webgpu.device_info().capabilities.name
    written = json.loads(file.read_text())
    assert set(written) == {"another", name}
    assert written["another"] == {"Split": {"uint32": {"WORKGROUP_SIZE": 32}}}
    largest = device.get().capabilities.limit("maxComputeInvocationsPerWorkgroup")
    for size in {*tuning.CANDIDATES["WORKGROUP_SIZE"]} - {256}:  # which is the default
        assert (f"WORKGROUP_SIZE {size}" in out) == (size <= largest)
    for operator, dtypes in written[name].items():
        for dtype, tunables in dtypes.items():
            chosen = ", ".join(f"{key} {value}" for key, value in tunables.items()) or "default"
            assert f"{operator} {dtype}  {chosen}: " in out
    assert out.endswith(f"written to {file}\n")
    x = np.arange(12.0, dtype=np.float32)
    assert np.array_equal(np.concatenate(jax_webgpu.split(x, [4, 8])), x)


def test_where_the_file_is(monkeypatch):
    monkeypatch.delenv("JAX_WEBGPU_TUNED")
    monkeypatch.setenv("XDG_CONFIG_HOME", "/somewhere")
    assert str(tuning.path()) == "/somewhere/jax_webgpu/tuned.json"
    monkeypatch.delenv("XDG_CONFIG_HOME")
    assert tuning.path().parts[-3:] == (".config", "jax_webgpu", "tuned.json")
