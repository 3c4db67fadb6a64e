"""What is promised to whoever runs this inside a training job, and the table of what held.

A test says which promise it holds by `@pytest.mark.promise("leaving")`, and what it went through by
pytest's `record_property("calls", 240)`. Where JAX_WEBGPU_RECORD names a file, a line is written
there for each such test, and for a run of `./dev fuzz`, with which adapter and when.
`./dev reliability` runs the tests in the long form. This module then adds what the lines say to
`docs/reliability.json`, in place of what an earlier run with the same adapter said of the same
promise, and makes the table of `docs/reliability.md` of that file. The lines may come from another
machine:

    JAX_WEBGPU_RECORD=run.jsonl JAX_WEBGPU_STRESS=10 python -m pytest -n auto -m promise  # there
    python tests/promises.py run.jsonl  # here

Figures of one name add up, over the tests of a promise; those that begin with "most" do not.
"""

import datetime
import functools
import json
import os
import pathlib
import re
import sys
import warnings
from collections import defaultdict

from stress import SCALE

DOCS = pathlib.Path(__file__).resolve().parent.parent / "docs"

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
    "adapters": "Right with the device held to WebGPU's floor, one feature or limit at a time and "
    "all at once; with an adapter that is named and missing, no adapter, or no Vulkan loader, what "
    "needs no device works and the rest says why",
    "supply": "A wheel and an sdist of what they should hold and nothing else, the same bytes from "
    "two builds; CI's versions are locked with their hashes, and the lowest are told",
    "idle": "Five idle seconds cost less than 0.1 s of CPU",
}

BEGIN, END = "<!-- made by ./dev reliability -->", "<!-- end -->"


def summed(lines):
    """What the recorded lines of one promise say together."""
    figures = {}
    for line in lines:
        for name, value in line["figures"].items():
            before = figures.get(name, 0)
            figures[name] = max(before, value) if name.startswith("most") else before + value
    return {
        "tests": sorted({pathlib.Path(re.sub(r"\[.*", "", line["test"])).name for line in lines}),
        "held": all(line["outcome"] == "passed" for line in lines),
        "figures": figures,
    }


def table(runs):
    """Markdown of `docs/reliability.json`.

    That has by promise and adapter what `summed` gives, when, and how many times the counts of CI.
    """
    rows = ["| promise | held by | last run |", "|---|---|---|"]
    for name, text in PROMISES.items():
        own = runs.get(name, {})
        tests = sorted({test for run in own.values() for test in run["tests"]})
        shown = "<br>".join(f"`{test}`" for test in tests)
        seen = "<br>".join(_seen(adapter, run) for adapter, run in own.items())
        rows.append(f"| {text} | {shown} | {seen or 'not run'} |")
    last = {adapter: run["with"] for own in runs.values() for adapter, run in own.items()}
    used = [f"* {adapter}: {versions}" for adapter, versions in last.items()]
    return "\n".join([*rows, "", *used])


def _seen(adapter, run):
    told = [_figure(name, value) for name, value in run["figures"].items()]
    held = "held" if run["held"] else "**failed**"
    when = f"{run['date']}, counts × {run['times']}"
    return f"{held}, {adapter}, {when}{': ' if told else ''}{', '.join(told)}"


def _figure(name, value):
    what, most = name.removeprefix("most "), name.startswith("most ")
    return f"{value:,} {what}{' at most' if most else ''}"


def update(*records):
    """Adds files of recorded lines to the two documents."""
    texts = [pathlib.Path(record).read_text() for record in records]
    stored, document = DOCS / "reliability.json", DOCS / "reliability.md"
    runs = json.loads(stored.read_text()) if stored.exists() else {}
    runs = merged(runs, [json.loads(line) for text in texts for line in text.splitlines()])
    stored.write_text(json.dumps(runs, indent=1) + "\n")
    text = document.read_text()
    before, after = text[: text.index(BEGIN)], text[text.index(END) :]
    document.write_text(f"{before}{BEGIN}\n{table(runs)}\n{after}")


def merged(runs, lines):
    """What `table` shows, after the run or the runs that the lines are of."""
    new = {name: dict(runs.get(name, {})) for name in PROMISES}
    for name, own in new.items():
        by_adapter = defaultdict(list)
        for line in lines:
            if line["promise"] == name:
                by_adapter[line["run"]["adapter"]].append(line)
        for adapter, recorded in by_adapter.items():
            run = max((line["run"] for line in recorded), key=lambda run: run["date"])
            own[adapter] = summed(recorded) | {key: run[key] for key in ("date", "times", "with")}
    return {name: own for name, own in new.items() if own}


def record(promise, test, outcome, figures, **about):
    """Writes a line of what a test went through, if there is to be a record."""
    path = os.environ.get("JAX_WEBGPU_RECORD")
    if path:
        line = {"promise": promise, "test": test, "outcome": outcome, "figures": figures}
        with open(path, "a") as file:
            file.write(json.dumps(line | {"run": where() | about}) + "\n")


@functools.cache
def where():
    """With which adapter the tests run, when, and how many times the counts of CI."""
    import jax
    import wgpu

    import jax_webgpu

    with warnings.catch_warnings(action="ignore"):  # that it is no GPU
        info = jax_webgpu.device_info()
    name = info.name.partition(" (")[0]
    versions = info.driver, f"JAX {jax.__version__}", f"wgpu {wgpu.__version__}"
    driver = os.environ.get("JAX_WEBGPU_DRIVER")  # whose adapter may be called as the system's is
    return {
        "adapter": f"{name} ({driver})" if driver else name,
        "date": datetime.date.today().isoformat(),
        "times": SCALE,
        "with": ", ".join(filter(None, versions)),
    }


if __name__ == "__main__":
    update(*sys.argv[1:])
