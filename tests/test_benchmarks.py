"""The benchmarks' table gives what the oracle says, and their command reports all of it."""

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks import growth, kernels, loading, memory, report, subjects
from benchmarks.__main__ import main
from benchmarks.cases import CASES, KERNEL_CASES, chosen
from benchmarks.onnx_session import Unable, Worker

ROOT = Path(__file__).parents[1]
SUBJECTS = {each.id: each for each in subjects.subjects(None)}


def by_name(cases):
    return pytest.mark.parametrize("case", cases, ids=lambda case: case.name)


@by_name(CASES)
def test_case(case):
    small = case.small()
    small.check(SUBJECTS["buffer"].prepare(small).results())


@by_name(chosen(CASES, "rotary-partial") + chosen(CASES, "split-3-odd"))
def test_check_notices_one_wrong_element(case):
    small = case.small()
    results = [np.array(each) for each in SUBJECTS["numpy"].prepare(small).results()]
    small.check(results)
    results[0].flat[-1] += 1 + abs(results[0].flat[0])
    with pytest.raises(AssertionError):
        small.check(results)


def test_small_and_scaled_keep_the_kind_of_call():
    for case in {case.name: case for case in CASES + KERNEL_CASES}.values():
        small = case.small()
        assert small.whole < 2**20
        assert small.call.dtype == case.call.dtype
        assert len(small.outputs) == len(case.outputs)
        if case in KERNEL_CASES:
            scaled = case.scaled(256)
            assert 0.9 < scaled.touched / 2**28 < 1.1
            assert len(scaled.outputs) == len(case.outputs)


def test_bytes_that_must_be_touched():
    (case,) = (each for each in CASES if each.name == "decode-8-of-131072")
    x, row = 8 * 32 * 128 * 4, 64 * 4
    assert case.touched == 2 * x + 2 * 8 * row + 8 * 4
    assert len(np.unique(case.inputs[3])) == 8


def test_whole_run_has_every_case_and_subject(tmp_path):
    """In the table, in the JSON and in a sentence where it is left out."""
    file = tmp_path / "new" / "all.json"
    command = [sys.executable, "-m", "benchmarks", "--small", "--repetitions", "1"]
    command += ["--json", str(file)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr + done.stdout
    found = json.loads(file.read_text())
    assert [case["name"] for case in found["cases"]] == [case.name for case in CASES]
    assert list(found["subjects"]) == list(SUBJECTS)
    table = done.stdout.split("\n\n")[2]
    assert len(table.splitlines()[0].split()) == 1 + len(SUBJECTS)
    for case in found["cases"]:
        assert set(case["seconds"]) | set(case["left out"]) == set(SUBJECTS)
        assert {"copy", "buffer", "pure", "xla", "numpy"} <= set(case["seconds"])
        assert all(len(each["all"]) == 1 for each in case["seconds"].values())
        assert f"\n{case['name']} " in table
        assert case["name"] in done.stderr  # progress
        for id, reason in case["left out"].items():
            assert reason["why"]
            assert re.search(rf"^left out: .*\b{id}\b.* in .*: ", done.stdout, re.MULTILINE)
    assert "ort-build-bound in every case: no environment with onnxruntime-webgpu" in done.stdout
    assert found["targets"]


def test_charts(tmp_path):
    chart = tmp_path / "new" / "chart.png"
    for mode in (
        ["--only", "*tiny", "--subjects", "copy,bare"],
        ["--kernels", "--only", "split-3"],
    ):
        assert main([*mode, "--small", "--repetitions", "1", "--chart", str(chart)]) == 0
        assert chart.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
        chart.unlink()


def test_a_wrong_result_is_a_failure_and_is_not_timed(monkeypatch, capsys):
    right = subjects.runtime.Dispatcher.__call__

    def wrong(*arguments):
        outputs = right(*arguments)
        outputs[0][...] += 1
        return outputs

    monkeypatch.setattr(subjects.runtime.Dispatcher, "__call__", wrong)
    given = ["--small", "--only", "rotary-tiny", "--subjects", "bare", "--repetitions", "1"]
    assert main(given) == 1
    assert "FAILED: bare in every case: AssertionError" in capsys.readouterr().out


def test_targets():
    """By figures of which the ratios are known."""

    def timed(**seconds):
        return {id: {"median": s, "quartiles": [s, s], "all": [s]} for id, s in seconds.items()}

    peers = {"ort-plugin": 8.0, "ort-build-bound": 4.0}
    second = {"work": {}, "made": {"pipelines": 0, "plans": 1}}
    cases = [
        {"name": "one", "seconds": timed(buffer=1.0, **peers), "second call": second},
        {"name": "two", "seconds": timed(buffer=4.0, **peers), "second call": None},
        {"name": "alone", "seconds": timed(buffer=9.0), "second call": None},
        {"name": "decode-1-of-128", "seconds": timed(buffer=1.0), "second call": None},
        {"name": "decode-1-of-131072", "seconds": timed(buffer=1.5), "second call": None},
        {
            "name": "rotary-tiny",
            "seconds": timed(bare=1e-4, buffer=1.5e-4, pure=3e-4),
            "second call": None,
        },
    ]
    found = {each.name: each for each in report.host_targets({"cases": cases})}
    against = found["buffer against the fastest ONNX Runtime WebGPU"]
    assert (against.figure, against.met) == (
        "2.00× over 2 cases, 0 slower, worst 1.00× in two",
        False,
    )
    decode = found["decode of 1, buffer: 131,072 rows against 128"]
    assert (decode.figure, decode.met) == ("1.50×", False)
    cost = found["rotary-tiny, buffer over bare"]
    assert (cost.figure, cost.met) == ("50 µs", True)
    assert found["rotary-tiny, bare"].met
    assert found["second call of a shape makes"].figure == "plans in one"


def test_kernels():
    case, odd = chosen(KERNEL_CASES, "rotary-90")[0], chosen(KERNEL_CASES, "split-12")[0]
    found = kernels.run([case, odd], 1, 2, lambda text: None)
    first, second = found["cases"]
    assert 0 < kernels.share(first) < 100
    assert first["published"] == "rank4_cache2_pos"
    assert "left out" in second or kernels.share(second) > 0
    (target,) = [each for each in report.kernel_targets(found) if "other" in each.name]
    assert "rotary-90" in target.figure


def test_growth():
    found = growth.run(2, ["bare"], 2, lambda text: None)
    assert found["sizes"] == [1, 2]
    assert [curve["case"] for curve in found["curves"]] == ["rotary", "split"]
    assert len(growth.table(found).splitlines()) == 5
    curve = {"seconds": {mib: {"median": mib * (1.0 + mib / 100)} for mib in (1, 16, 32, 64)}}
    assert growth.deviation(curve) == (pytest.approx(1.64 / 1.32 - 1), 64)


def test_memory():
    if not Path("/proc/self/clear_refs").exists():  # not Linux
        assert "asked of Linux" in memory.run(["bare"], True, print)["left out"]
        return
    command = [sys.executable, "-m", "benchmarks.memory", "bare", "once", "1", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    figure = json.loads(done.stdout)
    assert figure["whole"] == 16 << 20
    assert 0.4 < memory.ratio(figure) < 4
    assert "at the peak" in memory.line(figure)


def test_loading():
    said = []
    found = loading.run(1, said.append)
    assert [each["name"] for each in found["loads"]] == ["synthetic", "RotaryEmbedding", "Split"]
    assert found["loads"][0]["bytes"] > 300 * 1024
    passes = {each["variant"]: each["passes"] for each in found["plans"]}
    assert passes == {"plain_64x64": 1, "bias_64x64": 1, "recurrent": 256}
    assert len(said) == 6 and "ms a KiB; again" in said[0] and "256 × " in said[-1]
    targets = list(report.load_targets(found))
    assert len(targets) == 9 and all(each.met in (True, False) for each in targets)


def test_a_process_that_dies_is_said_to_have():
    worker = Worker(sys.executable)
    worker._process.kill()
    with pytest.raises(Unable, match="has died"):
        worker.ask("version")
    worker.close()


def test_a_worker_answers_and_says_what_it_cannot():
    worker = Worker(sys.executable)
    with pytest.raises(Unable, match="no_such_thing"):
        worker.ask("no_such_thing")
    with pytest.raises(Unable):  # it goes on after what cannot be read
        worker.ask("load", b"", {}, [], "build")
    worker.close()
