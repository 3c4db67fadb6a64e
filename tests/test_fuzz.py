"""A fuzzing of all targets that fits into CI, always the same; and whether the fuzzer sees a thing.

The long form is ``./dev fuzz --inputs 100000``; JAX_WEBGPU_FUZZ_INPUTS and
JAX_WEBGPU_FUZZ_SEED in the environment make another of this one.
"""

import io
import json
import math
import os
from collections import Counter
from contextlib import redirect_stdout

import jax
import numpy as np
import pytest
from fuzz import __main__ as command
from fuzz import javascript, models, pool, targets, traps
from fuzz.targets import Wrong, documented
from fuzz.worker import Chunk, Failure

from jax_webgpu import split
from jax_webgpu.errors import CallError, DTypeError

SIZES = (("INPUTS", 2000), ("SEED", 6))
INPUTS, SEED = (int(os.environ.get(f"JAX_WEBGPU_FUZZ_{name}", default)) for name, default in SIZES)
PLAN = pool.plan(targets.MODULES, INPUTS, SEED)


def sums(result):
    return command.figures(result, SEED, 0)["fuzz"]


# --- all targets --------------------------------------------------------------------------------


@pytest.mark.promise("bad input")
@pytest.mark.timeout(900 + INPUTS)
@pytest.mark.parametrize("name", targets.MODULES)
def test_target(name, record_property):
    chunks = [chunk for chunk in PLAN if chunk.target == name]
    result = pool.run(chunks, workers=1, limit=120)
    record_property("inputs", result.tried)
    told = [f"{failure.input}\n{failure.text}" for failure in result.failures]
    assert not told, "\n\n".join(told)
    found = sums(result)
    assert found["inputs"] == sum(chunk.inputs for chunk in chunks)
    # Of inputs that are all refused, or all right, nothing is learnt.
    record_property("right answers", found["right"])
    record_property("documented errors", found["refused"])
    assert found["right"] >= found["inputs"] / 8 and found["refused"] >= found["inputs"] / 20


def test_plan_is_of_so_many_inputs_and_always_the_same():
    assert abs(sum(chunk.inputs for chunk in PLAN) - INPUTS) <= len(targets.MODULES)
    assert {chunk.target for chunk in PLAN} == {*targets.MODULES}
    assert pool.plan(targets.MODULES, INPUTS, SEED) == PLAN
    assert pool.plan(targets.MODULES, INPUTS, SEED + 1) != PLAN
    large = pool.plan(targets.MODULES, 100_000, SEED)
    assert abs(sum(chunk.inputs for chunk in large) - 100_000) <= len(targets.MODULES)
    assert len({chunk.seed for chunk in large}) == len(large)


def test_inputs_do_not_depend_on_the_number_of_workers():
    chunks = [Chunk("expressions", 7, 60), Chunk("templates", 8, 60), Chunk("expressions", 9, 60)]
    one, three = (pool.run(chunks, workers=number, limit=120).labels for number in (1, 3))
    assert one == three and len(one["expressions"]) > 1


# --- what it found ------------------------------------------------------------------------------


def array(dtype, shape, fill="normal"):
    return {"array": dtype, "shape": shape, "fill": fill, "form": "jax", "seed": 1}


def call(function, how="eager", **arguments):
    value = {"function": function, "arguments": arguments, "how": how, "x64": True}
    return "functions", value | {"settings": {}, "device": "floor"}


def caches(dtype, *shape):
    return {name: array(dtype, shape) for name in ("cos_cache", "sin_cache")}


def kernel(name, how="eager", **arguments):
    return "kernels", {"kernel": name, "arguments": arguments, "how": how, "callback": None}


def traced(*shape):
    x, tables = array("float32", shape), caches("float32", *shape[:2], shape[3] // 2)
    return call("rotary_embedding", "vmap", x=x, **tables, interleaved={"traced": 1})


TAIL = array("bfloat16", (1, 1, 128), "bits")
STACKED = array("bfloat16", (1000, 2), "bits")
POSITIONS = array("int32", (1, 1)) | {"positions": 1, "at": [(0, 1)]}
KEY = array("key", ())
ROW = array("float32", (4,))
TURNED = {"x": array("float32", (1, 1, 1, 2)), **caches("float32", 1, 1, 1)}
EMPTY = {"x": array("float32", (1, 0, 1, 2)), **caches("float32", 1, 1), "position_ids": POSITIONS}
WEAK = {"odd": "JAX array of rank 0"}
# Of each a target and its input, as `--replay` runs them; and what is to come of it.
FOUND = {
    "signalling NaNs in a tail": (
        *call("rotary_embedding", x=TAIL, **caches("bfloat16", 1, 1, 1), rotary_embedding_dim=2,
              num_heads=1),
        "right",
    ),
    "signalling NaNs in a batch": (*call("split", "vmap", x=STACKED, num_outputs=1), "right"),
    "traced under vmap": (*traced(1, 1, 1, 2), "DTypeError"),
    "traced under vmap, and empty": (*traced(0, 0, 0, 0), "DTypeError"),
    "positions of a call that XLA leaves out": (*call("rotary_embedding", "jit", **EMPTY), "right"),
    "a key": (*call("rotary_embedding", **TURNED, interleaved=KEY), "CallError"),
    "keys": (*call("rotary_embedding", **TURNED, interleaved=array("key", (1,))), "CallError"),
    "a boolean array": (
        *call("rotary_embedding", **TURNED, interleaved=array("bool", ())),
        "right",
    ),
    "keys as sizes": (
        *call("split", "jit", x=array("float32", (4,)), split=array("key", (1,))),
        "DTypeError",
    ),
    "a base that is no float": (
        *call("rotary_cache", max_positions=1, rotary_dim=2, base={"odd": "huge"}),
        "CallError",
    ),
    "a workgroup of nothing that is too large": (
        "functions",
        {
            "function": "split",
            "arguments": {"x": array("bool", (1000, 0)), "axis": 0, "split": [0, 1000]},
            "how": "explain",
            "x64": True,
            "settings": {"tunables": {"WORKGROUP_SIZE": 2**31}},
            "device": "floor",
        },
        "LimitError",
    ),
    "an array as dtype": (
        *call("rotary_cache", max_positions=1, rotary_dim=2, dtype=array("float32", (2,))),
        "DTypeError",
    ),
    "what NumPy reads as Python": (
        *call("rotary_cache", max_positions=1, rotary_dim=2, dtype="01"),
        "DTypeError",
    ),
    "more rows than NumPy counts": (
        *call("rotary_cache", max_positions=2**63, rotary_dim=2),
        "CallError",
    ),
    "a dtype of the command line": (
        "commands",
        ["explain", "split", "--x=8,12", "--num-outputs=3", "--dtype=01"],
        "Status 1",
    ),
    "text that is no number": (
        "expressions",
        ("tree", ("==", ("~", "0x10", False), 0)),
        "right",
    ),
    "a weak array alone": (*kernel("gelu", x=WEAK), "right"),
    "a weak array and one": (*kernel("add", "jit", a=WEAK, b=array("float32", (0,))), "right"),
    "a weak array and a number": (*kernel("add", a=WEAK, b=1.5), "right"),
    "a weak array of a type variable of its own": (
        *kernel("rms_norm", x=array("float16", (1,)), weight=WEAK),
        "right",
    ),
    "a number that is none": (*kernel("add", a={"odd": "nan"}, b=array("float32", ())), "right"),
    "a key as an attribute": (*kernel("softmax", x=ROW, axis=KEY), "DTypeError"),
    "a long double": (*kernel("softmax", x=ROW, axis={"odd": "long double"}), "DTypeError"),
    "four bits": (*kernel("softmax", x=ROW, axis=array("int4", ()) | {"form": "numpy"}), "right"),
    "a large negative number": (*kernel("scan", x=-(2**63)), "CallError"),
    "outputs that are arrays": (
        *kernel("gelu", x=ROW, outputs={"odd": "list of arrays"}),
        "CallError",
    ),
    "a tunable that is no number": (
        "kernels",
        {"load": "add", "options": {"tunables": {"WORKGROUP_SIZE": "a"}}},
        "CallError",
    ),
}  # fmt: skip


@pytest.mark.parametrize("found", FOUND)
def test_what_was_found_once(found):
    target, value, label = FOUND[found]
    assert command.evaluate(repr(value)) == value
    with jax.numpy_dtype_promotion("strict"):
        assert targets.load(target).run(value) == label


def test_what_takes_long_begins_first():
    """And what is slow comes in small chunks, so that no worker ends long after the others."""
    plan = pool.plan(targets.MODULES, 100_000, SEED)
    guided = [targets.load(chunk.target).guided is not None for chunk in plan]
    assert guided == sorted(guided, reverse=True)
    largest = {chunk.target: chunk.inputs for chunk in reversed(plan)}
    assert largest["fused"] < largest["functions"] < largest["expressions"] == 100


# --- what the fuzzer must see -------------------------------------------------------------------


SIGNATURES = {
    "abort": "ended with status -6",
    "exit": "ended with status 3",
    "hang": "took more than 5 s",
}


@pytest.fixture(scope="module")
def trapped():
    chunks = [Chunk(f"traps:{way}", 1, 60 if way == "wrong" else 12) for way in traps.WAYS]
    return pool.run(chunks, workers=2, limit=5)


@pytest.mark.parametrize("way", SIGNATURES)
def test_an_abort_or_a_hang_is_put_down_to_its_input(trapped, way):
    own = [each for each in trapped.failures if each.target == f"traps:{way}"]
    assert own
    for failure in own:
        assert failure.signature == SIGNATURES[way] and int(failure.input) > 500
        # It says where it was.
        assert way == "exit" or ("traps.py" in failure.text and "in run" in failure.text)


def test_a_wrong_answer_is_told_once_and_made_smaller(trapped):
    (own,) = [each for each in trapped.failures if each.target == "traps:wrong"]
    assert own.input == "501" and "Wrong: above 500" in own.text
    assert trapped.labels["traps:wrong"]["failed"] > 1


def test_what_is_left_of_a_chunk_runs_after_a_failure(trapped):
    for way in traps.WAYS:
        labels = trapped.labels[f"traps:{way}"]
        assert labels.total() == (60 if way == "wrong" else 12)
        assert labels["right"] + labels["CallError"] > 3


# --- what counts as an answer -------------------------------------------------------------------


def raised(f, *args, **kwargs):
    with pytest.raises(Exception) as caught:
        f(*args, **kwargs)
    return caught.value


def test_documented_errors_are_of_a_type_and_name_an_argument():
    error = raised(split, np.zeros(4), num_outputs=0)
    assert documented(error, (CallError,), ("x", "num_outputs")) == "CallError"
    for kinds, names in (((DTypeError,), ("num_outputs",)), ((CallError,), ("axis", "num"))):
        with pytest.raises(Wrong):
            documented(error, kinds, names)


def test_python_s_own_error_is_documented_only_where_it_is_about_the_call():
    own = raised(split, np.zeros(4), nothing=1)
    assert documented(own, (TypeError,), ("nothing",)) == "TypeError"

    names = {}
    exec(compile("def f(x): return x + 1", "/somewhere/jax_webgpu/module.py", "exec"), names)
    inside = raised(names["f"], "text")
    with pytest.raises(Wrong, match="from inside the library"):
        documented(inside, (TypeError,), ("str",))


def test_models_see_a_wrong_element():
    x = np.arange(12, dtype=np.float32).reshape(2, 6)
    wanted, check = models.split({"x": x, "axis": 1, "num_outputs": 2})
    assert wanted is True
    check((x[:, :3], x[:, 3:]))
    for wrong in ((x[:, :3], x[:, :3]), (x[:, :3],), [x[:, :3], x[:, 3:]]):
        with pytest.raises(Wrong):
            check(wrong)
    cos, sin = np.cos(x[:, :2]), np.sin(x[:, :2])
    x = np.stack([x[:, :4]] * 3)[None]
    ids = np.array([[1, 0]])
    given = {"x": x, "cos_cache": cos, "sin_cache": sin, "position_ids": ids}
    wanted, check = models.rotary_embedding(given)
    a, b = x[..., :2], x[..., 2:]
    c, s = cos[ids][:, None], sin[ids][:, None]
    y = np.concatenate([a * c - b * s, a * s + b * c], -1).astype(np.float32)
    assert wanted is True
    check(y)
    y[0, 1, 1, 3] *= 1 + 1e-6
    with pytest.raises(Wrong, match="1 wrong"):
        check(y)
    assert models.rotary_embedding(given | {"position_ids": ids + 1})[0] is False
    assert models.split({"x": x, "split": [1, 2], "axis": 2})[0] is False


@pytest.mark.parametrize(
    ("number", "text"),  # as node prints them
    [
        (1e21, "1e+21"),
        (123456789012345680000.0, "123456789012345680000"),
        (1e-7, "1e-7"),
        (0.000001, "0.000001"),
        (-1.5e300, "-1.5e+300"),
        (5e-324, "5e-324"),
        (0.1, "0.1"),
        (64.0, "64"),
        (-0.0, "0"),
        (math.inf, "Infinity"),
    ],
)
def test_numbers_of_the_second_evaluator_print_as_in_javascript(number, text):
    assert javascript.to_string(number) == text


# --- the command --------------------------------------------------------------------------------


def test_reproducers_are_read_as_they_were_written(tmp_path, capsys):
    for value in (("text", "\ud800'\n\0"), b"\xff\0", {"a": [math.inf, (1, None)]}, 7):
        path = command.save(Failure("traps:abort", repr(value), "s", "what\nwas wrong"), tmp_path)
        assert command.read(path) == ("traps:abort", value)
    assert command.main(["--replay", str(path)]) == 0
    assert capsys.readouterr().out == "right\n"
    assert len(list(tmp_path.iterdir())) == 4


def test_command_prints_a_table_and_one_line_of_json(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(command, "SAVED", tmp_path)
    arguments = ["templates", "expressions", "--inputs", "30", "--seed", "5", "--workers", "1"]
    out = io.StringIO()
    with redirect_stdout(out):
        assert command.main(arguments) == 0
    (line,) = out.getvalue().splitlines()
    found = json.loads(line)["fuzz"]
    assert found["seed"] == 5 and found["failed"] == 0
    assert found["inputs"] == found["right"] + found["refused"] == 30
    assert found["targets"].keys() == {"expressions", "templates"}
    assert Counter(found["refusals"]).total() == found["refused"]
    table = capsys.readouterr().err
    assert "expressions" in table and "refusals by type" in table
