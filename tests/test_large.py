"""A folder as large as published ones: what can be done once is done once."""

import json
import re
from pathlib import Path

import pytest

from benchmarks import loading, synthetic
from jax_webgpu import (
    capabilities,
    device,
    expressions,
    grammar,
    plan,
    probe,
    runtime,
    spec,
    templates,
    variants,
)
from jax_webgpu.capabilities import IDEAL, PRESETS
from jax_webgpu.errors import DeviceError
from jax_webgpu.resolve import Tensor, resolve


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("large")
    synthetic.write(folder)
    return folder


@pytest.fixture(scope="module")
def large(folder):
    return spec.load(folder / "manifest.json")


@pytest.fixture
def counted(monkeypatch):
    """How often a function of a module is called from now on."""

    def count(module, name):
        calls, function = [], getattr(module, name)
        monkeypatch.setattr(module, name, lambda *a, **k: calls.append(a) or function(*a, **k))
        return calls

    return count


def test_it_is_as_large_as_published_folders():
    sizes = {name: len(data) / 1024 for name, data in synthetic.files().items()}
    assert 250 < sizes["manifest.json"] < 350 and 45 < sizes[synthetic.PRODUCT] < 55
    manifest = json.loads(synthetic.files()["manifest.json"])
    assert len(manifest["variants"]) == 57
    template = synthetic.files()[synthetic.PRODUCT].decode()
    for word in ("macro", "namespace", "for", "loop", "elif", "set"):
        assert re.search(rf"\{{[%{{].*\b{word}\b", template)


def test_each_expression_is_parsed_once(folder, counted):
    parsed, texts_parsed = counted(grammar, "parse"), counted(templates, "parse")
    spec.forget()
    spec.load(folder / "manifest.json")
    texts = [text for text, *_ in parsed]
    assert len(texts) == len(set(texts)) > 500
    assert len(texts_parsed) == 3  # the templates' files
    assert expressions.parse.cache_info().hits > 2 * len(texts)


def test_equal_bytes_are_not_loaded_again(folder, large, counted):
    spec.load(folder / "manifest.json")
    parsed, texts_parsed = counted(expressions, "parse"), counted(templates, "parse")
    read = counted(json, "loads")
    again = spec.load(folder / "manifest.json")
    assert again == large and not parsed and not texts_parsed and not read
    data = (folder / "manifest.json").read_bytes()
    named = spec.loads(data, folder / "other.json", lambda name: (folder / name).read_bytes())
    assert named == again and named.path.name == "other.json" and not read


@pytest.mark.parametrize("name", [synthetic.STEP, "manifest.json"])
def test_what_has_changed_is_loaded_again(tmp_path, name):
    manifest = synthetic.write(tmp_path)
    before = spec.load(manifest)
    text = (tmp_path / name).read_text()
    changed = text.replace('"priority": 1,', '"priority": 2,') if name == manifest.name else "//"
    (tmp_path / name).write_text(changed)
    after = spec.load(manifest)
    assert after != before and spec.load(manifest) is after
    (tmp_path / name).write_text(text)
    assert spec.load(manifest) == before
    (tmp_path / name).unlink()
    with pytest.raises(spec.SpecError, match=re.escape(name)):
        spec.load(manifest)


def test_few_manifests_are_kept():
    for index in range(3 * spec._kept.most):
        data = b'{"name": "a%d", "outputs": {}, "variants": []}' % index
        spec.loads(data, Path("a.json"), Path())
    assert len(spec._kept.entries) == spec._kept.most


@pytest.mark.parametrize("name", ["a product", "with a bias", f"{synthetic.STEPS} passes"])
def test_plans(large, name):
    call = dict(loading.calls(large))[name]
    ready = plan.make(call, loading.DEVICE)
    assert plan.anew(call, loading.DEVICE).passes == ready.passes
    assert variants.select(call, IDEAL).variant.id
    for each in ready.passes[:3]:
        for opening, closing in ("()", "[]", "{}"):
            assert each.wgsl.count(opening) == each.wgsl.count(closing)
        assert "{{" not in each.wgsl and "undefined" not in each.wgsl


def test_hundreds_of_passes_have_one_shader(large, counted):
    call = dict(loading.calls(large))[f"{synthetic.STEPS} passes"]
    rendered = counted(plan, "render")
    passes = plan.anew(call, PRESETS["lavapipe"]).passes
    assert len(passes) == synthetic.STEPS and len(rendered) == 1
    turns = [each.bindings[-1].fields[0] for each in passes]
    assert turns == [("t", "u32", index) for index in range(synthetic.STEPS)]
    assert len({id(each.bindings[0]) for each in passes}) == 1


def test_every_variant_is_in_the_refusal(large):
    call = resolve(large, {"a": Tensor((3, 3), "float32"), "b": Tensor((4, 3), "float32")})
    with pytest.raises(DeviceError) as caught:
        plan.make(call, capabilities.PRESETS["floor"])
    text = str(caught.value)
    assert all(variant.id in text for variant in large.variants) and len(text) < 40_000


OPERANDS = {
    "bias": {"bias": (512,)},
    "gated": {"scale": (512,)},
    "scaled": {"scale": (512,)},
    "masked": {"lengths": (2,)},
}


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_what_the_device_has_the_features_for_compiles(large, dtype):
    gpu, compiled = device.get(), 0
    for variant in large.variants:
        if not set(variant.requires.features) <= gpu.capabilities.features:
            continue
        family = variant.id.split("_")[0]
        shapes = {"a": (2, 512, 256), "b": (256, 512), **OPERANDS.get(family, {})}
        inputs = {
            name: Tensor(shape, "int64" if name == "lengths" else dtype)
            for name, shape in shapes.items()
        }
        attributes = {"activation": family} if family in ("gelu", "relu") else {}
        if family == "recurrent":
            inputs |= {"a": Tensor((4, 300), dtype)}
            attributes = {"recurrent": 1}
        call = resolve(probe.alone(large, variant.id), inputs, attributes=attributes)
        runtime.compile_(plan.anew(call, gpu.capabilities), gpu)
        compiled += 1
    assert compiled >= 43
