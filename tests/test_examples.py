"""The examples run, say what they should, and hold what they assert."""

import pathlib
import re

import pytest

EXAMPLES = pathlib.Path(__file__).parents[1] / "examples"


@pytest.fixture
def run_example(run_snippet):
    """Run an example as a script in a process of its own, after some preparation of the latter."""

    def call(name, *arguments, prepare="pass"):
        path = str(EXAMPLES / name)
        source = f"{prepare}\nimport runpy, sys\nsys.argv = {[path, *arguments]!r}\n"
        return run_snippet(f"{source}runpy.run_path({path!r}, run_name='__main__')", timeout=280)

    return call


def labelled(output, label):
    """The rest of the line that starts with `label`."""
    (rest,) = re.findall(rf"^{label} {{2,}}(.*)$", output, re.MULTILINE)
    return rest


def test_attention(run_example):
    result = run_example("attention.py")
    assert result.returncode == 0, result.stderr
    assert labelled(result.stdout, "adapter")
    assert labelled(result.stdout, "largest difference").endswith("of 1e-05 allowed")
    assert len(labelled(result.stdout, "variants").split(", ")) == 3


def test_transformer_block(run_example):
    result = run_example("transformer_block.py")
    assert result.returncode == 0, result.stderr
    calls, crossing, difference = result.stdout.splitlines()
    assert calls == "16 calls of WebGPU operators, 17 dispatches, one crossing"
    together, alone = (int(each.replace(",", "")) for each in re.findall(r"[\d,]+\d", crossing))
    assert together < alone / 3
    assert float(difference.rpartition(" ")[2]) < 1e-5


def test_train_lm(run_example, tmp_path):
    plot = tmp_path / "plots" / "curves.png"
    result = run_example("train_lm.py", "--small", "--plot", str(plot))
    assert result.returncode == 0, result.stderr
    progress = re.findall(r"^ +(\d+) +(\S+) +(\S+) +(\S+)$", result.stdout, re.MULTILINE)
    steps, webgpu, plain, differences = (
        [float(cell) for cell in column] for column in zip(*progress, strict=True)
    )
    assert steps == [20, 40, 60]
    assert webgpu == sorted(webgpu, reverse=True)
    assert webgpu == pytest.approx(plain, abs=1e-4)  # as they are printed
    assert max(differences) <= 3e-5
    assert labelled(result.stdout, "plot") == str(plot)
    assert plot.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_train_lm_notices_an_operator_that_is_wrong(run_example):
    """One that leaves its argument as it is."""
    prepare = "import jax_webgpu\njax_webgpu.rotary_embedding = lambda x, *_, **__: x"
    result = run_example("train_lm.py", "--small", "--steps", "2", prepare=prepare)
    assert result.returncode == 1
    assert "assert difference <= TOLERANCE" in result.stderr


def test_train_lm_asks_for_what_plots_need(run_example):
    prepare = "import sys\nsys.modules['matplotlib'] = None"
    result = run_example("train_lm.py", "--plot", "curves.png", prepare=prepare)
    assert result.returncode == 2
    assert "--plot needs matplotlib: pip install '.[examples]'" in result.stderr
