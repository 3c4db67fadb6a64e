"""How much memory of the host calls take: at the peak of one, and after a thousand.

Each figure has a process of its own, so that nothing else has left memory behind. On Linux only:
its kernel tells the peak of the resident memory, and forgets it when asked to. Where the adapter is
a CPU, the device's memory is in the figures too.
"""

import gc
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from benchmarks import growth, host, subjects
from benchmarks.cases import CASES, MIB, chosen, nbytes

SUBJECTS = ("bare", "buffer", "pure")
CALLS, SETTLED = 1000, 100  # from which of the calls on the memory is to stay as it is


def cases(small):
    """Those of which one call is measured, and those that are repeated."""
    (tiny,) = chosen(CASES, "rotary-tiny")
    return growth.sized(8 if small else 64), (tiny, *growth.sized(1))


def run(wanted, small, say):
    """Measures; returns the report, of JSON's types."""
    report = {"mode": "memory", "machine": host.machine(), "figures": []}
    if not Path("/proc/self/clear_refs").exists():
        report["left out"] = "the peak of the resident memory is asked of Linux's /proc"
        return report
    for id in wanted or SUBJECTS:
        for kind, count in zip(("once", "often"), map(len, cases(small)), strict=True):
            for index in range(count):
                command = [sys.executable, "-W", "ignore", "-m", "benchmarks.memory"]
                command += [id, kind, str(index), str(int(small))]
                done = subprocess.run(command, capture_output=True, text=True)
                if done.returncode:
                    why = (done.stderr.strip().splitlines() or ["nothing"])[-1]
                    figure = {"subject": id, "kind": kind, "left out": why}
                else:
                    figure = json.loads(done.stdout.splitlines()[-1])
                report["figures"].append(figure)
                say(f"{line(figure)}\n")
    return report


def line(figure):
    """A figure as one line for people."""
    if "left out" in figure:
        return f"left out: {figure['subject']}, {figure['kind']}: {figure['left out']}"
    who = f"{figure['subject']:8}{figure['case']} of {figure['whole'] / MIB:.1f} MiB in and out"
    if figure["kind"] == "once":
        return f"{who}: {figure['extra'] / MIB:.1f} MiB more at the peak, {ratio(figure):.2f}×"
    return (
        f"{who}: {figure['growth'] / MIB:+.2f} MiB from call {figure['from']} to {figure['calls']}"
    )


def ratio(figure):
    """The peak's extra memory over inputs and outputs."""
    return figure["extra"] / figure["whole"]


def _once(call, case):
    """What calls of a shape that was never called take beside inputs and outputs.

    The inputs are there before; the outputs are not, whoever makes them, but have to be.
    """
    before = _resident() + nbytes(case.outputs)
    Path("/proc/self/clear_refs").write_text("5")  # the peak is now what is resident
    for _ in range(3):
        call.turn()
    return {"extra": _resident("VmHWM") - before}


def _often(call, case):
    resident = []
    for index in range(CALLS):
        call.results()
        if index == SETTLED:
            gc.collect()
            resident.append(_resident())
    gc.collect()
    return {"growth": _resident() - resident[0], "from": SETTLED, "calls": CALLS}


def _resident(field="VmRSS"):
    for each in Path("/proc/self/status").read_text().splitlines():
        if each.startswith(field):
            return int(each.split()[1]) * 1024
    raise OSError(f"no {field} in /proc/self/status")


def _measure(id, kind, index, small):
    case = cases(small)[kind == "often"][index]
    (subject,) = (each for each in subjects.subjects(None) if each.id == id)
    # The adapter, JAX and all code are loaded by another call.
    warm = replace(case).small()
    subject.prepare(warm).results()
    call = subject.prepare(case)
    found = {"once": _once, "often": _often}[kind](call, case)
    return {"subject": id, "kind": kind, "case": case.name, "whole": case.whole, **found}


if __name__ == "__main__":
    id, kind, index, small = sys.argv[1:]
    print(json.dumps(_measure(id, kind, int(index), small == "1")))
