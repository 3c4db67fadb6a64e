"""How the time of a call grows with its size: a MiB to as many as memory allows.

The sizes go up and then down again, so that a drift of the machine does not look like growth.
"""

import statistics
import time
from collections import defaultdict

from benchmarks import host, subjects
from benchmarks.cases import MIB, Case, RotaryCase, SplitCase

SUBJECTS = ("copy", "bare", "buffer", "pure")
FROM = 16  # MiB: smaller ones may lie in a cache, and have fixed costs
SECONDS, LEAST = 10, 3  # a size ends after so many seconds, but not before so many rounds


def sized(mib):
    """A rotation and a split of an array of so many MiB."""
    tokens = 64 * mib
    rotary = RotaryCase(None, 4, 1, 32, tokens, 128, 0, False, "float32", tokens)
    split = SplitCase(None, (64 * mib, 4096), 1, (2048, 2048), "float32")
    return Case("rotary", rotary), Case("split", split)


def run(most, wanted, repetitions, say):
    """Measures; returns the report, of JSON's types."""
    free = host.free_memory() // MIB
    # Inputs as NumPy has them and as they are made, results, and the device's share of each.
    sizes = [1 << power for power in range(most.bit_length()) if (1 << power) * 10 <= free]
    everyone = {each.id: each for each in subjects.subjects(None)}
    ids = [id for id in wanted or SUBJECTS if id in everyone]
    seconds = defaultdict(list)
    for mib in (*sizes, *reversed(sizes)):
        for case in sized(mib):
            say(f"{case.name} of {mib} MiB")
            calls = {id: everyone[id].prepare(case) for id in ids}
            for call in calls.values():
                results = call.results()
                if results is not None:
                    case.check(results)
                del results
            start = time.monotonic()
            for index in range(repetitions):
                if index >= LEAST and time.monotonic() - start > SECONDS:
                    break
                for id, call in calls.items():
                    seconds[case.name, id, mib].append(call.turn())
            del calls
            say(f"{case.name} of {mib} MiB: measured\n")
    names = [case.name for case in sized(1)]
    return {
        "mode": "growth",
        "machine": host.machine(),
        "sizes": sizes,
        "left out": [f"left out: above {sizes[-1]} MiB, since {free} MiB are free"]
        * (2 * sizes[-1] <= most),
        "curves": [
            {
                "case": name,
                "subject": id,
                "seconds": {mib: host.summary(seconds[name, id, mib]) for mib in sizes},
            }
            for name in names
            for id in ids
        ],
    }


def deviation(curve):
    """By how much the time of a MiB differs at most from its median, from `FROM` on, and where.

    None where there are no two such sizes.
    """
    each = {mib: s["median"] / mib for mib, s in curve["seconds"].items() if mib >= FROM}
    if len(each) < 2:
        return None
    middle = statistics.median(each.values())
    differences = {mib: time / middle - 1 for mib, time in each.items()}
    where = max(differences, key=lambda mib: abs(differences[mib]))
    return differences[where], where


def table(report):
    """A line a size, a column a case and subject: microseconds a MiB of x."""
    curves = report["curves"]
    names = [f"{curve['case']} {curve['subject']}" for curve in curves]
    lines = ["µs a MiB of x", "", "   MiB  " + "  ".join(f"{name:>13}" for name in names)]
    for mib in report["sizes"]:
        cells = (f"{curve['seconds'][mib]['median'] / mib * 1e6:13.0f}" for curve in curves)
        lines.append(f"{mib:6}  " + "  ".join(cells))
    return "\n".join([*lines, *report["left out"]])
