"""The command: `./dev fuzz [TARGET...] [--inputs N] [--seed N] [--replay FILE]`."""

import argparse
import json
import math
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import promises

from fuzz import pool, targets
from fuzz.pool import Result
from fuzz.worker import Failure

SHORT = 2000  # inputs of the form that CI runs
SAVED = Path(__file__).resolve().parents[2] / "build" / "fuzz"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; the result is its exit status: 1 if there were failures."""
    options = _parser().parse_args(arguments)
    if options.replay:
        return replay(options.replay)
    seed = random.SystemRandom().getrandbits(31) if options.seed is None else options.seed
    chunks = pool.plan(options.targets or targets.MODULES, options.inputs, seed)
    told = _Teller(sum(chunk.inputs for chunk in chunks), 0 if options.quiet else 10)
    result = pool.run(chunks, workers=options.workers, limit=options.limit, progress=told)
    told(result)
    print(f"{table(result)}\nfuzz: seed {seed}", file=sys.stderr)
    found = figures(result, seed, told.seconds)
    print(json.dumps(found))
    _record(found["fuzz"])
    return 1 if result.failures else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="./dev fuzz",
        description="Runs random inputs against what a user may write. Prints a table, and on "
        "standard output its figures as one line of JSON. Exit status 1: there were failures, "
        "whose inputs are in build/fuzz.",
    )
    parser.add_argument(
        "targets", nargs="*", choices=[*targets.MODULES, []], metavar="TARGET",
        help=f"of {', '.join(targets.MODULES)}; all by default",
    )  # fmt: skip
    parser.add_argument("--inputs", type=int, default=SHORT, metavar="N", help=f"in all; {SHORT}")
    parser.add_argument("--seed", type=int, metavar="N", help="the same inputs again; random")
    parser.add_argument(
        "--workers", type=int, default=os.cpu_count() or 1, metavar="N", help="processes"
    )
    parser.add_argument(
        "--limit", type=float, default=60, metavar="SECONDS", help="for one input; 60"
    )
    parser.add_argument("--quiet", action="store_true", help="no progress")
    parser.add_argument("--replay", type=Path, metavar="FILE", help="run one saved input again")
    return parser


@dataclass
class _Teller:
    """Saves failures as they come, and says how far a run has come, every so many seconds."""

    inputs: int
    every: float
    saved: int = 0
    started: float = field(default_factory=time.monotonic)
    last: float = 0

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started

    def __call__(self, result: Result) -> None:
        for failure in result.failures[self.saved :]:
            self.say(f"{failure.target}: {failure.signature}\n    {save(failure)}")
        self.saved = len(result.failures)
        if self.every and self.seconds - self.last > self.every:
            self.last = self.seconds
            self.say(
                f"{self.seconds:.0f} s, {result.tried:,} of {self.inputs:,} inputs, "
                f"{self.saved} failures"
            )

    def say(self, text: str) -> None:
        print(f"fuzz: {text}", file=sys.stderr, flush=True)


def table(result: Result) -> str:
    """What came of the inputs of each target, for people."""
    rows = [("target", "inputs", "right", "refused", "failed", "seconds", "refusals by type")]
    for name, labels in sorted(result.labels.items()):
        sums = _sums(labels)
        kinds = ", ".join(f"{kind} {count}" for kind, count in sums["refused"].most_common())
        counts = labels.total(), sums["right"], sums["refused"].total(), sums["failed"]
        rows.append((name, *map(str, counts), f"{result.seconds[name]:.0f}", kinds))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0])]
                  + [cell.rjust(width) for cell, width in zip(row[1:-1], widths[1:], strict=True)]
                  + [row[-1]])
        for row in rows
    )  # fmt: skip


def _record(found: dict[str, Any]) -> None:
    """A line for the table of promises, in place of the one that the short form makes."""
    names = {"inputs": "inputs", "right": "right answers", "refused": "documented errors"}
    promises.record(
        "bad input",
        "test_fuzz.py::test_target",
        "failed" if found["failed"] else "passed",
        {name: found[key] for key, name in names.items()},
        times=round(found["inputs"] / SHORT),
    )


def _sums(labels: Counter[str]) -> dict[str, Any]:
    """Right answers are those without an error's name."""
    good = {label for label in labels if label[:1].islower()}
    refused = Counter({label: count for label, count in labels.items() if label not in good})
    failed = labels[targets.FAILED]
    return {
        "right": sum(labels[label] for label in good) - failed,
        "refused": refused,
        "failed": failed,
    }


def figures(result: Result, seed: int, seconds: float) -> dict[str, Any]:
    """The same for a program."""
    total = Counter[str]()
    for labels in result.labels.values():
        total.update(labels)
    sums = _sums(total)
    return {
        "fuzz": {
            "seed": seed,
            "inputs": total.total(),
            "right": sums["right"],
            "refused": sums["refused"].total(),
            "failed": sums["failed"],
            "seconds": round(seconds),
            "refusals": dict(sums["refused"].most_common()),
            "targets": {name: labels.total() for name, labels in sorted(result.labels.items())},
        }
    }


# ---- reproducers --------------------------------------------------------------------------------


def save(failure: Failure, folder: Path | None = None) -> Path:
    """Writes a failing input to a file that `--replay` takes."""
    folder = folder or SAVED
    folder.mkdir(parents=True, exist_ok=True)
    stem = failure.target.replace(":", "-")
    names = (folder / f"{stem}-{number}.txt" for number in range(10_000))
    path = next(name for name in names if not name.exists())
    told = "".join(f"# {line}\n" for line in failure.text.splitlines())
    path.write_text(f"{failure.target}\n{failure.input}\n{told}", encoding="utf-8")
    return path


def read(path: Path) -> tuple[str, Any]:
    """The target and the input of a saved failure."""
    target, text, *_ = path.read_text(encoding="utf-8").split("\n")
    return target, evaluate(text)


def evaluate(text: str) -> Any:
    """An input from its text: a literal, in which numbers may not be finite."""
    return eval(text, {"__builtins__": {}, "inf": math.inf, "nan": math.nan})


def replay(path: Path) -> int:
    """Runs a saved input in this process; its failure comes as it is."""
    name, value = read(path)
    print(targets.load(name).run(value))
    return 0


if __name__ == "__main__":
    sys.exit(main())
