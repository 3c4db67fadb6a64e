"""What is promised to whoever runs this inside a training job, and the table of what held.

A test says which promise it holds by `@pytest.mark.promise("leaving")`, and what it went through by
pytest's `record_property("calls", 240)`. Where JAX_WEBGPU_RECORD names a file, `conftest.py` writes
a line there for each such test, and this module makes the table of `docs/reliability.md` of them:
`./dev reliability` does both, in the long form.

Figures of one name add up, over the tests of a promise; those that begin with "most" do not.
"""

import datetime
import json
import pathlib
import re
import sys

PROMISES = {
    "queued calls": "The default crossing never hangs: 30 calls queued whose arguments are still "
    "being computed, operations before and after, 16 KiB to 16 MiB, on one core and on two",
    "meshes": "Nor under `shard_map` over 4 and 8 host devices",
    "company": "Nor with 2 to 8 Python threads and another user of the GPU in the process",
    "pure": "`pure` does not hang where XLA has 16 threads, nor on two cores where each result is "
    "awaited; where it can, a warning names both ways out",
    "threads": "8 threads of mixed calls of both operators and of changing shapes: every result "
    "right, the device made once, caches bounded",
    "elsewhere": "The same on a thread that is not the main one, and with asyncio",
    "locks": "No lock is held while JAX is waited for",
    "leaving": "However a process ends with calls in flight, its exit status is its own: no abort, "
    "no hang, results kept or dropped, both crossings",
    "interrupts": "Ctrl-C in an eager call raises KeyboardInterrupt, in a jitted one JAX's error; "
    "the next call works",
    "forks": "A child forked after the GPU was used gets an error at once that names `spawn`, also "
    "from what was jitted before; one forked before can use it",
    "spawn": "`spawn`, `forkserver` and joblib's loky work",
    "loss": "`device.destroy()` between any two steps of a call, and while threads call: a new "
    "device is made, once, and the results are right",
    "faults": "A driver that loses the device, has no memory or cannot compile: recovered, or an "
    "exception with the cause, and the next call works",
    "errors": "After an error, of whatever kind, the next call works, nothing is returned that was "
    "not computed, and no buffer is missing from the pool",
    "memory": "Memory of host and device is flat over calls of many shapes of both operators",
    "bounds": "The pool keeps no more than its setting, and `clear_caches` gives all back",
    "bad input": "Whatever is passed to a public function or the command line, or stands in a "
    "manifest, a template, an expression or a file beside them: a right answer or a documented "
    "error that names what is wrong; no abort, no hang",
    "positions": "A position that no row of the caches has is refused in the same words wherever "
    "the call stands, over both crossings; no other row is read",
    "unwritten output": "Every element of a result is written: with memory full of NaNs, other "
    "ones each time, none comes out, and the results are the same bit for bit",
    "idle": "Five idle seconds cost less than 0.1 s of CPU",
}

BEGIN, END = "<!-- made by ./dev reliability -->", "<!-- end -->"


def table(lines):
    """The rows as Markdown, of the recorded lines."""
    rows = ["| promise | held by | last figures | |", "|---|---|---|---|"]
    for name, text in PROMISES.items():
        own = [line for line in lines if line["promise"] == name]
        tests = sorted({re.sub(r"\[.*", "", line["test"]) for line in own})
        held = "not run" if not own else "held" if all(map(_passed, own)) else "**failed**"
        shown = "<br>".join(f"`{test}`" for test in tests)
        rows.append(f"| {text} | {shown} | {_figures(own)} | {held} |")
    return "\n".join(rows)


def _passed(line):
    return line["outcome"] == "passed"


def _figures(lines):
    total = {}
    for line in lines:
        for name, value in line["figures"].items():
            if name.startswith("most"):
                total[name] = max(total.get(name, value), value)
            else:
                total[name] = total.get(name, 0) + value
    return ", ".join(f"{value:,} {name}" for name, value in total.items())


def write(record, document):
    """Puts the table of a file of recorded lines between the marks of a document."""
    lines = [json.loads(line) for line in pathlib.Path(record).read_text().splitlines()]
    text = pathlib.Path(document).read_text()
    before, rest = text.split(BEGIN)
    made = f"{_where()}\n\n{table(lines)}"
    pathlib.Path(document).write_text(f"{before}{BEGIN}\n{made}\n{END}{rest.split(END)[1]}")


def _where():
    import jax
    import wgpu

    import jax_webgpu

    today = datetime.date.today().isoformat()
    versions = f"JAX {jax.__version__}, wgpu {wgpu.__version__}"
    return f"{today}, {jax_webgpu.device_info()}, {versions}."


if __name__ == "__main__":
    write(*sys.argv[1:])
