"""The command line, as a user calls it."""

import json
import pathlib
import re
import shlex
import shutil

import pytest

from jax_webgpu import cli, resources
from jax_webgpu.capabilities import PRESETS

ROTARY = "explain rotary_embedding --x 1,32,1024,128 --cos 1024,64 --position-ids"


def call(capsys, line):
    status = cli.main(shlex.split(line))
    return status, *capsys.readouterr()


@pytest.mark.parametrize("name", PRESETS)
def test_explain_on_paper(capsys, name):
    status, out, _ = call(capsys, f"{ROTARY} --no-overlays --device {name}")
    assert status == 0
    assert re.search(rf"^device +{name}$", out, re.M)
    assert re.search(r"^variant +rank4_cache2_pos_quad$", out, re.M)
    assert "2048 × 1 × 1 workgroups" in out
    assert "numHeads = 32" in out
    assert "@compute @workgroup_size(256)" in out
    assert "rank4_cache2_pos: applies too, but rank4_cache2_pos_quad comes first" in out
    assert "`ranks.x == 3`: 4, expected 3" in out


@pytest.mark.parametrize("name", PRESETS)
def test_explain_with_overlays(capsys, name):
    """On a GPU the faster variants beside the manifest's; on a CPU, where compiling lasts, not."""
    _, out, _ = call(capsys, f"{ROTARY} --device {name}")
    quad, items = "rank4_cache2_pos_quad", "rank4_cache2_pos_items"
    chosen = quad if name in ("lavapipe", "swiftshader") else items
    assert re.search(rf"^variant +{chosen}$", out, re.M)
    outdone = re.search(rf"{quad}.*: applies too, but {items} comes first", out)
    assert bool(outdone) == (chosen == items)


def test_explain_needs_no_gpu(run_snippet):
    """With a device on paper, wgpu is not even imported."""
    source = f"""
        import sys
        from jax_webgpu import cli
        assert cli.main({f"{ROTARY} --dtype float16 --device apple-m".split()!r}) == 0
        assert "wgpu" not in sys.modules
    """
    result = run_snippet(source)
    assert result.returncode == 0, result.stderr
    assert "vec4<f16>" in result.stdout


def test_explain_split(capsys):
    line = "explain split --x 4,9 --axis -1 --split 2,3,4 --dtype int8 --workgroup-size 64"
    status, out, _ = call(capsys, f"{line} --no-overlays --device floor")
    assert status == 0
    assert re.search(r"^variant +three_outputs_block_scalar_x4$", out, re.M)
    assert "WORKGROUP_SIZE = 64" in out
    assert "@workgroup_size(64)" in out


def test_explain_on_this_adapter(capsys):
    status, out, _ = call(capsys, "explain split --x 4,9 --num-outputs 3")
    assert status == 0
    assert "y1 uint32[1,18], y2 uint32[1,0]" in out


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("explain split --x 4,9 --device floor", "exactly one of split and num_outputs"),
        ("explain split --x 4,9 --num-outputs 2 --device phone", "device is 'phone'"),
        (
            "explain split --x 4,9 --num-outputs 2 --dtype real --device floor",
            "'real' is no data type",
        ),
        ("explain split --x 4,9 --num-outputs 2 --dtype O --device floor", "'O' is no data type"),
        ("explain split --x 4,9 --num-outputs 2 --dtype 0( --device floor", "'0(' is no data type"),
        ("explain split --x 4,9 --num-outputs 2 --dtype 01 --device floor", "'01' is no data type"),
        ("explain rotary_embedding --x 8 --cos 8,4 --position-ids --device floor", "x has shape"),
        ("explain rotary_embedding --x 1,2,3,8 --cos 1,3,8 --device floor", "the full width of 8"),
        (f"{ROTARY} --workgroup-size 512 --device floor", "WORKGROUP_SIZE is 512"),
        (
            "explain examples/kernels/gelu x=float32:4 x=float32:5 --device floor",
            "x is given twice",
        ),
        ("explain examples/kernels/scan x=float32:4 axis=0 axis=0", "axis is given twice"),
    ],
)
def test_what_is_wrong_is_said(capsys, line, message):
    status, out, err = call(capsys, line)
    assert (status, out) == (1, "")
    assert message in err


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("explain split --x 3,y", "'3,y' is not a list of sizes"),
        ("explain split --x 3,-1", "'3,-1' has a negative size"),
        ("explain split --x 3 --workgroup-size 0", "'0' is no whole number of 1 or more"),
        ("tune --mib inf", "'inf' is no size in MiB"),
        ("tune --mib nan", "'nan' is no size in MiB"),
        ("tune --mib 0", "'0' is no size in MiB"),
        ("tune --mib many", "'many' is no size in MiB"),
    ],
)
def test_wrong_use(capsys, line, message):
    with pytest.raises(SystemExit, match="2"):
        cli.main(line.split())
    assert message in capsys.readouterr().err


KERNELS = pathlib.Path(__file__).parents[1] / "examples" / "kernels"


def without_manifest(path):
    (path / "manifest.json").unlink()


def in_place(name, data=None):
    """Another thing under a file's name: other bytes, or a folder."""

    def change(path):
        (path / name).unlink(missing_ok=True)
        (path / name).mkdir() if data is None else (path / name).write_bytes(data)

    return change


def a_loop_of_links(path):
    (path / "manifest.json").unlink()
    (path / "manifest.json").symlink_to("manifest.json")


ODD = {
    "none": (shutil.rmtree, "there is no kernel folder"),
    "empty": (lambda path: [each.unlink() for each in path.iterdir()], "manifest.json is missing"),
    "no manifest": (without_manifest, "manifest.json is missing"),
    "no template": (lambda path: (path / "gelu.wgsl.jinja").unlink(), "gelu.wgsl.jinja is missing"),
    "no JSON": (in_place("manifest.json", b'{"name": '), "manifest.json: Expecting value"),
    "no object": (in_place("manifest.json", b"[]"), "manifest.json: $: expected an object"),
    "no bytes": (in_place("manifest.json", b""), "manifest.json: Expecting value"),
    "nested": (in_place("manifest.json", b"[" * 100_000), "nested too deeply"),
    "no text": (in_place("gelu.wgsl.jinja", b"\xff\xfe\0"), "can't decode byte"),
    "a folder": (in_place("manifest.json"), "cannot read manifest.json: Is a directory"),
    "a folder for a template": (in_place("gelu.wgsl.jinja"), "gelu.wgsl.jinja: Is a directory"),
    "metadata": (in_place("metadata.json", b"{"), "metadata.json: Expecting property name"),
    "a link": (a_loop_of_links, "cannot read manifest.json: "),
}


@pytest.mark.parametrize("name", ODD)
@pytest.mark.parametrize("command", ["info", "explain", "lint", "test"])
def test_odd_folders(capsys, tmp_path, recwarn, name, command):
    """One line says what is wrong, and no traceback."""
    path = tmp_path / "gelu"
    shutil.copytree(KERNELS / "gelu", path)
    (path / "metadata.json").unlink()
    change, message = ODD[name]
    change(path)
    status, out, err = call(capsys, f"{command} {path}" + " x=float32:4" * (command == "explain"))
    assert (status, err.count("\n"), "Traceback" in out + err) == (1, 1, False)
    assert err.startswith(f"python -m jax_webgpu {command}: ") and message in err


@pytest.mark.parametrize(
    ("data", "message"),
    [(None, "Is a directory"), (b"{", "Expecting property"), (b"[]", "expected an object")],
)
@pytest.mark.parametrize("command", ["lint", "test"])
def test_odd_tests_in_a_folder(capsys, tmp_path, command, data, message):
    shutil.copytree(KERNELS / "gelu", tmp_path / "gelu")
    (tmp_path / "gelu" / "metadata.json").unlink()
    in_place("test.json", data)(tmp_path / "gelu")
    status, _, err = call(capsys, f"{command} {tmp_path / 'gelu'}")
    assert (status, err.count("\n")) == (1, 1)
    assert "test.json" in err and message in err


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("x" * 5000, "File name too long"),
        ("\udcff", "no kernel folder '\\udcff'"),
        (" ", "no kernel folder ' '"),
        (str(KERNELS / "gelu" / "manifest.json"), "is a file; give its folder"),
        ("examples/kernels/gelu/nothing", "there is no kernel folder"),
    ],
)
@pytest.mark.parametrize("command", ["info", "lint", "test"])
def test_odd_names_of_folders(capsys, name, command, message):
    assert cli.main([command, name]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line and len(line) < 400


def test_explain_takes_64_bits_as_such(capsys):
    status, _, err = call(capsys, f"explain {KERNELS / 'gelu'} x=float64:4 --device floor")
    assert (status, "x has dtype float64; expected float32 or float16" in err) == (1, True)


def test_explain_a_folder_of_one_variant(capsys):
    status, out, _ = call(capsys, f"explain {KERNELS / 'scan'} x=float32:8 --device floor")
    assert status == 0
    assert out.endswith("the other variants\n  none: the manifest has no other\n")


def test_info(capsys):
    status, out, _ = call(capsys, "info")
    assert status == 0
    assert re.search(r"^\* 0: .+", out, re.M)
    assert "maxStorageBufferBindingSize: " in out


def test_check(capsys):
    status, out, _ = call(capsys, "check")
    assert status == 0
    assert out.count(": pass\n") == 21
    assert out.endswith("pass: 21 of 21 variants\n")


def test_check_tells_a_failure(capsys, monkeypatch):
    from jax_webgpu import runtime

    right = runtime.run

    def wrong(*args, **kwargs):
        return tuple(result + 1 for result in right(*args, **kwargs))

    monkeypatch.setattr(runtime, "run", wrong)
    status, out, _ = call(capsys, "check")
    assert status == 1
    assert "FAIL: y differs by 1" in out
    assert out.endswith("FAIL: 0 of 21 variants\n")


# ---- kernel folders -----------------------------------------------------------------------------

KERNELS = pathlib.Path(__file__).parents[1] / "examples" / "kernels"


def test_info_of_a_folder(capsys):
    status, out, _ = call(capsys, f"info {KERNELS / 'softmax'}")
    assert status == 0
    assert out.startswith("softmax(x, *, axis=-1, outputs=None)\n")
    assert "x: float32 or float16" in out


@pytest.mark.parametrize("how", ["explain", "explain kernel"])
def test_explain_a_folder(capsys, how):
    line = f"{how} {KERNELS / 'softmax'} x=float16:8,100 axis=1 --workgroup-size 64"
    status, out, _ = call(capsys, f"{line} --device apple-m")
    assert status == 0
    assert re.search(r"^variant +line_a_workgroup$", out, re.M)
    assert "@compute @workgroup_size(64)" in out
    assert "line_an_invocation" in out


def test_explain_a_folder_whose_outputs_are_given(capsys, tmp_path):
    shutil.copytree(resources.shaders(), tmp_path / "Split")
    manifest = resources.specs() / "ai.onnx.Split.json"
    shutil.copy(manifest, tmp_path / "Split" / "manifest.json")
    line = f"explain {tmp_path / 'Split'} input=int32:4,8 axis=1 --output y0=4,4 --output y1=4,4"
    status, out, _ = call(capsys, f"{line} --device floor")
    assert status == 0
    assert re.search(r"^variant +two_outputs_block", out, re.M)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("explain nowhere x=float32:2", "there is no kernel folder nowhere"),
        ("explain {softmax} x", "'x' is not of the form NAME=VALUE"),
        ("explain {softmax} x=float33:2", "'float33' is no data type"),
        ("explain {softmax} x=float32:2 axis=5 --device floor", "axis"),
        ("explain {softmax} x=float32:2 axis=" + "[" * 9999 + " --device floor", "axis"),
        ("explain {softmax} x=float32:2,-1", "'2,-1' has a negative size"),
        ("explain {softmax} x=float32:2 outputs=1", "outputs are named by --output"),
        ("explain {softmax} x=float32:2 self=1 --device floor", "has no 'self'"),
        ("explain {softmax} x=float32:2 axes=1 --device floor", "has no 'axes'"),
        ("explain {softmax} x=float32:2 --output z --device floor", "no output 'z'"),
        ("info nowhere", "there is no kernel folder nowhere"),
        ("info some/where", 'load_kernel("some/where", version=1)'),
        ("test nowhere", "there is no kernel folder nowhere"),
    ],
)
def test_what_is_wrong_with_a_folder(capsys, line, message):
    status, _, error = call(capsys, line.format(softmax=KERNELS / "softmax"))
    assert status == 1
    assert message in error


def test_tests_of_a_folder(capsys):
    status, out, _ = call(capsys, f"test {KERNELS / 'softmax'}")
    assert status == 0
    assert re.search(r"softmax: \d+ passed$", out.strip())


def test_a_test_that_fails(capsys, tmp_path):
    shutil.copytree(KERNELS / "gelu", tmp_path / "gelu")
    file = tmp_path / "gelu" / "test.json"
    document = json.loads(file.read_text())
    document["cases"][0]["outputs"]["y"]["data"]["values"][0] += 1
    file.write_text(json.dumps(document))
    (tmp_path / "gelu" / "metadata.json").unlink()
    status, out, _ = call(capsys, f"test {tmp_path / 'gelu'}")
    assert status == 1
    assert re.search(r": failed: y\[0, 0\] is .*, expected 0.83", out)
    assert ", 1 failed" in out or "1 failed," in out
