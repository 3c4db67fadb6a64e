"""`lint`: what looks wrong in a folder, and every variant on a table of devices."""

import json
import re
import shlex
import shutil
from pathlib import Path

import folders
import pytest

from jax_webgpu import cli, folder, lint, probe, resources, review, spec

KERNELS = Path(__file__).parents[1] / "examples" / "kernels"


def call(capsys, path):
    status = cli.main(shlex.split(f"lint {path}"))
    return status, capsys.readouterr().out


@pytest.fixture(params=["Split", "RotaryEmbedding"])
def published(tmp_path, request):
    """One of the two published manifests with the templates it names."""
    path = tmp_path / request.param
    path.mkdir()
    manifest = resources.specs() / f"ai.onnx.{request.param}.json"
    shutil.copy(manifest, path / "manifest.json")
    for name in spec.load(manifest, resources.shaders()).templates:
        shutil.copy(resources.shaders() / name, path)
    return path


def changed(path, change):
    document = json.loads((path / "manifest.json").read_text())
    change(document)
    (path / "manifest.json").write_text(json.dumps(document))
    return path


@pytest.mark.parametrize("name", sorted(path.name for path in KERNELS.iterdir() if path.is_dir()))
def test_the_examples_are_clean(capsys, name):
    status, out = call(capsys, KERNELS / name)
    assert status == 0
    assert out.endswith(" 0 errors, 0 warnings\n"), out
    assert len(re.findall(r" compiles, floor renders, apple-m renders", out)) == out.count("\n") - 1


def test_a_call_is_found_for_each_published_variant(published):
    operator = spec.load(published / "manifest.json")
    found = probe.calls(operator)
    assert [*found] == [variant.id for variant in operator.variants]
    statuses = {(v.device, v.status) for v in review.review(found)}
    assert {status for _, status in statuses} == {"compiles", "renders"}
    assert {device for device, status in statuses if status == "renders"} >= {"floor", "h200"}


def test_the_published_manifests_fail_nowhere(capsys, published):
    status, out = call(capsys, published)
    assert (status, "error" in out.replace("0 errors", "")) == (0, False), out


def with_clause(clause):
    return lambda document: document["variants"][0]["when"].append(clause)


def with_key(*path, value):
    def change(document):
        *before, last = path
        for key in before:
            document = document[key]
        document[last] = value

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (with_clause("numel(shapes.z) > 0"), "`shapes.z` is never defined"),
        (with_clause("attrs.fctor != 1"), "`attrs.fctor` is never defined"),
        (with_clause("device.limits.maxWorkgroups > 1"), "`device.limits.maxWorkgroups` is never"),
        (with_clause("1 > 2"), "unreachable: `1 > 2` is never true"),
        (with_key("derive", value={"spare": "1 + 1"}), "derive.spare: nothing reads it"),
        (with_key("tunables", "TILE", value={"default": 4}), "tunables.TILE: nothing reads it"),
    ],
)
def test_what_is_pointed_out(tmp_path, change, message):
    path = folders.scale(tmp_path)
    changed(path, change)
    found = [str(each) for each in lint.findings(spec.load(path / "manifest.json"))]
    assert any(message in each for each in found), found


def test_a_variant_behind_one_that_takes_more(tmp_path):
    path = changed(
        folders.scale(tmp_path), lambda d: d["variants"].append(d["variants"][0] | {"id": "late"})
    )
    found = [str(each) for each in lint.findings(spec.load(path / "manifest.json"))]
    assert found == [
        "variant late: unreachable: bias_False_twice_False comes first and takes all it does"
    ]


def test_a_clean_folder_has_no_findings(tmp_path):
    path = folders.scale(tmp_path)
    names = [each.name for each in path.iterdir()]
    assert [*lint.findings(spec.load(path / "manifest.json"), names)] == []


def test_a_template_that_no_pass_names(tmp_path):
    path = folders.scale(tmp_path)
    (finding,) = lint.findings(spec.load(path / "manifest.json"), ["old.wgsl.jinja"])
    assert str(finding) == "old.wgsl.jinja: no pass names this template"


def test_members_in_templates(tmp_path):
    path = folders.write(
        tmp_path,
        "one",
        {"one": "  y[i] = x[i];\n  // {{ shapes.z }}"},
        inputs={"x": {"dtype": "float32"}},
        outputs={"y": {"dtype": "float32", "shape": "shapes.x"}},
        variants=[{"id": "only", "passes": [folders.step("one", ["x", "y"], "numel(shapes.x)")]}],
    )
    found = [str(each) for each in lint.findings(spec.load(path / "manifest.json"))]
    assert found == ["one.wgsl.jinja:7: `shapes.z` is never defined"]


def one(tmp_path, body):
    return folders.write(
        tmp_path,
        "one",
        {"one": body},
        inputs={"x": {"dtype": "float32"}},
        outputs={"y": {"dtype": "float32", "shape": "shapes.x"}},
        variants=[{"id": "only", "passes": [folders.step("one", ["x", "y"], "numel(shapes.x)")]}],
    )


def test_wgsl_that_is_refused_is_an_error(capsys, tmp_path):
    status, out = call(capsys, one(tmp_path, "  y[i] = nothing;"))
    assert status == 1
    assert "error: variant only on " in out and "one.wgsl.jinja" in out
    assert out.endswith("1 variants, 1 errors, 0 warnings\n")


def test_a_template_that_prints_nothing_where_it_means_something(capsys, tmp_path):
    status, out = call(capsys, one(tmp_path, "  y[i] = {{ elment }}(x[i]);"))
    assert status == 0
    assert re.search(r"^warning: .*one\.wgsl\.jinja:6: .*elment", out, re.M)


def test_a_variant_that_no_call_is_found_for(capsys, tmp_path):
    path = changed(folders.scale(tmp_path), with_clause("dim(shapes.x, 0) == 12345"))
    status, out = call(capsys, path)
    assert status == 0
    assert "warning: variant bias_False_twice_False: no call was found that it takes" in out


def test_a_folder_that_does_not_load(capsys, tmp_path):
    path = changed(folders.scale(tmp_path), lambda document: document.pop("name"))
    assert cli.main(["lint", str(path)]) == 1
    assert "the key 'name' is missing" in capsys.readouterr().err


def test_the_cases_of_a_folder_come_first():
    files = folder.read(KERNELS / "softmax")
    operator = spec.loads(files.read_bytes("manifest.json"), files.path, files.read_bytes)
    assert {call.spec.variants[0].id for call in review.calls(operator, files).values()} == {
        variant.id for variant in operator.variants
    }
