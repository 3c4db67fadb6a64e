"""The command line: arguments that are nearly right, and any others."""

import contextlib
import io
import re
from typing import Any

from hypothesis import strategies as st

from fuzz import corpus
from fuzz.targets import RIGHT, Target, Wrong
from jax_webgpu import cli

FOLDERS = ("@add", "@gelu", "@softmax", "@matmul", "@scan", "@rms_norm")
WORDS = (
    "info explain lint test tune check kernel rotary_embedding split --x --cos --sin "
    "--position-ids --interleaved --rotary-embedding-dim --num-heads --axis --split "
    "--num-outputs --device --workgroup-size --dtype --no-overlays --version --revision "
    "--output --mib --help -h -- - x=float32:8,100 x=float32 x= =1 axis=-1 "
    "axis=99999999999999999999 approximate=tanh a=int32:2 b=int32:2 floor apple-m h200 "
    "nothing float16 int64 bool key 1,2,3 8,8 0 -1 1e9 nan 1 2 4 256 a/b nowhere . / 1.5 y "
    "y=2,3 y=, "
).split()

# What may follow a folder and its inputs.
MORE = (
    *("axis=-1", "axis=9", "axis=[1]", "axis=null", "axis=", "axis=" + "1" * 5000),
    *("axis=" + "[" * 3000, "approximate=tanh", "epsilon=NaN", "epsilon=1e999", "other=1"),
    *("x=float32:8", "--output=y", "--output=z", "--output=y=2,3", "--output=y=x", "=", "=="),
    *("é=1", "self=1", "outputs=1", "inputs=1"),
)

SHAPES = st.lists(st.sampled_from([0, 1, 2, 3, 4, 8, 64, -1, 2**40]), max_size=5).map(
    lambda sizes: ",".join(map(str, sizes))
)
NUMBERS = st.sampled_from(["0", "1", "2", "4", "-1", "8", "256", "2147483648", "1" * 30, "x", ""])
DEVICES = st.sampled_from(["floor", "apple-m", "swiftshader", "lavapipe", "h200", "nothing", ""])
DTYPES = st.sampled_from(
    ["float32", "float16", "bfloat16", "int64", "int4", "bool", "key", "O", ""]
)


@st.composite
def _rotary(draw: Any) -> list[str]:
    heads, sequence, size = draw(st.tuples(*[st.sampled_from([1, 2, 4, 8])] * 3))
    right = [f"--x=2,{heads},{sequence},{size}", f"--cos=11,{size // 2}", "--position-ids"]
    found = right
    if draw(st.integers(0, 2)) == 0:
        found = [f"--x={draw(SHAPES)}", f"--cos={draw(SHAPES)}"]
    extra = {
        "--sin": SHAPES,
        "--position-ids": SHAPES,
        "--rotary-embedding-dim": NUMBERS,
        "--num-heads": NUMBERS,
    }
    return ["explain", "rotary_embedding", *found, *draw(_options(extra, "--interleaved"))]


@st.composite
def _split(draw: Any) -> list[str]:
    right = ["--x=8,12", "--axis=1", "--num-outputs=3"]
    found = right if draw(st.integers(0, 2)) else [f"--x={draw(SHAPES)}"]
    extra = {"--axis": NUMBERS, "--split": SHAPES, "--num-outputs": NUMBERS}
    return ["explain", "split", *found, *draw(_options(extra))]


@st.composite
def _options(draw: Any, extra: dict[str, Any], *flags: str) -> list[str]:
    known = {"--device": DEVICES, "--workgroup-size": NUMBERS, "--dtype": DTYPES, **extra}
    chosen = draw(st.just([]) | st.lists(st.sampled_from(sorted(known)), max_size=3))
    words = [f"{name}={draw(known[name])}" for name in chosen]
    return words + draw(st.lists(st.sampled_from([*flags, "--no-overlays"]), max_size=1))


@st.composite
def _kernel(draw: Any) -> list[str]:
    name = draw(st.sampled_from(FOLDERS))
    given = {
        "@add": ["a=float32:8,4", "b=float32:4"],
        "@matmul": ["a=float16:8,4", "b=float16:4,2"],
    }
    given["@rms_norm"] = ["x=float32:8,4", "weight=float32:4"]
    right = given.get(name, ["x=float32:8,4"])
    values = right if draw(st.integers(0, 2)) else [f"x={draw(DTYPES)}:{draw(SHAPES)}"]
    more = st.sampled_from(MORE)
    words = draw(st.just([]) | st.lists(more, max_size=2))
    device = [f"--device={draw(DEVICES)}"] if draw(st.booleans()) else []
    kernel = ["kernel"] if draw(st.booleans()) else []
    return ["explain", *kernel, name, *values, *words, *device]


@st.composite
def inputs(draw: Any) -> list[str]:
    match draw(st.integers(0, 19)):
        case 0:
            return draw(st.sampled_from([["info"], ["--version"], ["--help"], [], ["explain"]]))
        case 1 | 2:
            folder = st.sampled_from([*FOLDERS, "nowhere", "a/b", ".", "", "@", "\0", "é/é"])
            return ["info", draw(folder), *draw(st.lists(st.sampled_from(WORDS), max_size=2))]
        case 3:
            name = draw(st.sampled_from(["@add", "@gelu", "nowhere", "@"]))
            command = draw(st.sampled_from(["test", "test", "lint"]))
            return [command, name, *draw(st.lists(st.sampled_from(WORDS), max_size=1))]
        case 4:
            return ["tune", f"--mib={draw(st.sampled_from(['x', '', '-1', 'nan', 'inf', '0x1']))}"]
        case 5 | 6 | 7 | 8:
            return draw(_rotary())
        case 9 | 10 | 11 | 12:
            return draw(_split())
        case 13 | 14 | 15 | 16:
            return draw(_kernel())
    words = st.sampled_from(WORDS) | st.sampled_from(FOLDERS) | st.text(max_size=5)
    found = draw(st.lists(words, max_size=8))
    # These run for minutes, with nothing that a fuzzer could change.
    return [word for word in found if word not in ("tune", "check")]


def run(value: list[str]) -> str:
    """The exit status: 0 with something printed, 1 or 2 with a message, and no traceback."""
    arguments = [re.sub("^@", f"{corpus.EXAMPLES}/", word) for word in value]
    out, error = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
        try:
            status: Any = cli.main(arguments)
        except SystemExit as left:
            status = left.code
    printed, told = out.getvalue(), error.getvalue()
    if status not in (0, 1, 2):
        raise Wrong(f"exit status {status}")
    if "Traceback" in printed + told:
        raise Wrong(f"a traceback: {told}")
    if status == 0 and not printed:
        raise Wrong("nothing is printed")
    failed_test = status == 1 and value[0] in ("test", "lint")
    if status and not told.strip() and not failed_test:
        raise Wrong(f"exit status {status}, and nothing is said")
    return RIGHT if status == 0 else f"Status {status}"


TARGET = Target("commands", 5, inputs, run)
