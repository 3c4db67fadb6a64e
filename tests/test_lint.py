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
    told = out.count("\n") - out.count("\nnote: ") - 1
    assert len(re.findall(r" compiles, floor renders, apple-m renders", out)) == told


@pytest.mark.parametrize(
    ("types", "contract", "note"),
    [
        (
            ["float32", "float16", "int32"],
            "f16Ok(dtypes.T)",
            "only with the feature shader-f16, which floor and swiftshader lack: T as float16; "
            "without it too: T as float32, T as int32",
        ),
        (
            ["float16"],
            "f16Ok(dtypes.T)",
            "only with the feature shader-f16, which floor and swiftshader lack: T as float16; "
            "without it too: nothing",
        ),
        (["float32", "int32"], "f16Ok(dtypes.T)", None),
        # Nothing in the manifest says it; but the WGSL has `f16`.
        (
            ["float32", "float16"],
            "true",
            "only with the feature shader-f16, which floor and swiftshader lack: T as float16; "
            "without it too: T as float32",
        ),
    ],
)
def test_a_note_of_dtypes_that_need_shader_f16(capsys, tmp_path, types, contract, note):
    path = one(tmp_path, "  y[i] = x[i];")
    changed(path, with_key("typeConstraints", "T", value=types))
    changed(path, with_key("when", value=[contract]))
    for ports in ("inputs", "outputs"):
        changed(path, with_key(ports, "x" if ports == "inputs" else "y", "dtype", value="T"))
    status, out = call(capsys, path)
    assert status == 0, out
    assert re.findall("^note: (.*)$", out, re.MULTILINE) == ([note] if note else [])


def test_a_call_is_found_for_each_published_variant(published):
    operator = spec.load(published / "manifest.json")
    found = {variant: [call] for variant, call in probe.calls(operator).items()}
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
        (with_clause("device.features.has('f16')"), 'WebGPU has no feature "f16"'),
        (with_clause("dtypes.T == 'float32'"), '`dtypes.T` is never "float32", but "f32" or "f16"'),
        (with_clause("'fine' == attrs.mode"), '`attrs.mode` is never "fine", but "plain"'),
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
    assert out.endswith("1 variant, 1 error, 0 warnings\n")


def test_a_template_that_prints_nothing_where_it_means_something(capsys, tmp_path):
    status, out = call(capsys, one(tmp_path, "  y[i] = {{ elment }}(x[i]);"))
    assert status == 1
    assert re.search(r"^error: .*one\.wgsl\.jinja:6: unknown name elment", out, re.M)


@pytest.mark.parametrize(
    "body",
    [
        "{% if numel(shapes.x) > 1e9 %}{% set elment = 'f32' %}{% endif %}{{ elment }}(x[i])",
        "{{ 'f32' if elment else '' }}(x[i])",
        "{% macro of(elment) %}{{ elment }}{% endmacro %}{{ of() }}(x[i])",
    ],
)
def test_a_template_that_may_mean_to_print_nothing(capsys, tmp_path, body):
    status, out = call(capsys, one(tmp_path, f"  y[i] = {body};"))
    assert status == 0
    assert re.search(r"^warning: .*one\.wgsl\.jinja:6: ", out, re.M)


def test_every_dtype_is_compiled(capsys, tmp_path):
    """A literal that only the first dtype takes."""
    path = changed(
        one(tmp_path, "  y[i] = x[i] + 0.5f;"), with_key("inputs", "x", "dtype", value="T")
    )
    changed(path, with_key("outputs", "y", "dtype", value="T"))
    changed(path, with_key("typeConstraints", "T", value=["float32", "int32"]))
    status, out = call(capsys, path)
    assert (status, len(re.findall("^error: ", out, re.M))) == (1, 1)
    assert re.search(r"^> .* y\[i\] = x\[i\] \+ 0.5f;$", out, re.M)
    assert re.search(
        r"^one\.wgsl\.jinja:6 \(line .* automatic|^one\.wgsl\.jinja:6 .*Sint", out, re.M
    )


def test_the_calls_of_the_tests_are_compiled(capsys, tmp_path):
    """Of sizes that no made-up call has."""
    path = one(tmp_path, "  y[i] = x[i] {{ '+ nothing' if numel(shapes.x) == 37 }};")
    assert call(capsys, path)[0] == 0
    array = {"dtype": "float32", "shape": [37], "data": {"kind": "values", "values": [0] * 37}}
    case = {"name": "thirty-seven", "inputs": {"x": array}, "outputs": {"y": array}}
    (path / "test.json").write_text(json.dumps({"cases": [case]}))
    status, out = call(capsys, path)
    assert status == 1
    assert "nothing" in out


@pytest.mark.parametrize(
    ("declared", "counted", "is_told"),
    [("64", 64, False), ("8, 8", 64, False), ("32", 64, True), ("16, 16, 1", 64, True)],
)
def test_another_workgroup_size_than_the_dispatch_has(capsys, tmp_path, declared, counted, is_told):
    path = one(tmp_path, "  y[i] = x[i];")
    dispatch = {"threads": "numel(shapes.x)", "workgroupSize": counted}
    changed(path, with_key("variants", 0, "passes", 0, "dispatch", value=dispatch))
    changed(path, with_key("tunables", value={}))
    template = path / "one.wgsl.jinja"
    template.write_text(template.read_text().replace("{{ tunables.WORKGROUP_SIZE }}", declared))
    status, out = call(capsys, path)
    told = f"declares @workgroup_size({declared}), and the dispatch counts with a workgroupSize of"
    assert (status, told in out, out.count("warning: ")) == (0, is_told, is_told), out


def test_a_tunable_of_a_test_that_a_device_cannot_have(capsys, tmp_path):
    path = one(tmp_path, "  y[i] = x[i];")
    array = {"dtype": "float32", "shape": [1], "data": {"kind": "values", "values": [1]}}
    case = {"name": "large", "inputs": {"x": array}, "outputs": {"y": array}}
    case["tunables"] = {"WORKGROUP_SIZE": 512}
    (path / "test.json").write_text(json.dumps({"cases": [case]}))
    status, out = call(capsys, path)
    assert status == 0
    for name in ("floor", "swiftshader"):
        assert "warning: One: WORKGROUP_SIZE is 512; maxCompute" in out
        assert f"of {name} is 256" in out
    assert "2 warnings" in out, out


@pytest.mark.parametrize(
    ("clause", "message"),
    [
        ("attrs.fctor == 2", "`attrs.fctor` is never defined"),
        ("attrs['fctor'] == 2", "`attrs.fctor` is never defined"),
        ("derive.fctor == 2", "`derive.fctor` is never defined"),
        ("device.features.hass('shader-f16')", "`device.features.hass` is never defined"),
    ],
)
def test_a_typo_in_a_clause_is_told_as_such(capsys, tmp_path, clause, message):
    path = changed(folders.scale(tmp_path), with_clause(clause))
    status, out = call(capsys, path)
    assert status == 1
    assert re.search(rf"^error: variant bias_False_twice_False, when: {re.escape(message)}", out)
    assert "no call was found" not in out


@pytest.mark.parametrize("clause", ["attrs.fctor is defined", "attrs.fctor | default(1) == 1"])
def test_what_is_asked_for_may_be_missing(capsys, tmp_path, clause):
    status, out = call(capsys, changed(folders.scale(tmp_path), with_clause(clause)))
    assert status == 0
    assert "warning: variant bias_False_twice_False, when: `attrs.fctor` is never defined" in out


def test_a_variant_that_no_call_is_found_for(capsys, tmp_path):
    path = changed(folders.scale(tmp_path), with_clause("dim(shapes.x, 0) == 12345"))
    status, out = call(capsys, path)
    assert status == 0
    told = (
        "warning: variant bias_False_twice_False: no call was found that it takes: give it a test"
    )
    assert told in out
    assert "of the nearest: `dim(shapes.x, 0) == 12345`: 4, expected 12345" in out


def test_a_folder_that_does_not_load(capsys, tmp_path):
    path = changed(folders.scale(tmp_path), lambda document: document.pop("name"))
    assert cli.main(["lint", str(path)]) == 1
    assert "the key 'name' is missing" in capsys.readouterr().err


def test_the_cases_of_a_folder_come_first():
    files = folder.read(KERNELS / "softmax")
    operator = spec.loads(files.read_bytes("manifest.json"), files.path, files.read_bytes)
    found, refused = review.calls(operator, files)
    assert [*found] == [variant.id for variant in operator.variants]
    assert refused == {}
    shapes = {
        tensor.shape for calls in found.values() for call in calls for _, tensor in call.inputs
    }
    cases = json.loads((KERNELS / "softmax" / "test.json").read_text())["cases"]
    assert {tuple(each["inputs"]["x"]["shape"]) for each in cases} == shapes
    for calls in found.values():
        assert {dtype for call in calls for _, dtype in call.logical} == {"float32", "float16"}
