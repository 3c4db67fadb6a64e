"""The table of `docs/reliability.md` is complete, and made of what was recorded."""

import json
import pathlib
import re

from promises import BEGIN, DOCS, END, PROMISES, merged, summed, table, where

TESTS = pathlib.Path(__file__).parent
RUNS = json.loads((DOCS / "reliability.json").read_text())


def test_every_promise_is_held_by_a_test():
    sources = "".join(path.read_text() for path in TESTS.glob("test_*.py"))
    named = "".join(re.findall(r"(?:mark\.promise|over_both)\(.*?\)", sources))
    assert [name for name in PROMISES if f'"{name}"' not in named] == []


def test_the_table_is_that_of_the_last_runs():
    """And in these every promise was held, with at least one adapter."""
    text = (DOCS / "reliability.md").read_text()
    assert text.split(BEGIN)[1].split(END)[0].strip() == table(RUNS)
    assert RUNS.keys() == PROMISES.keys()
    assert all(run["held"] for runs in RUNS.values() for run in runs.values())
    assert all(RUNS.values())


def test_the_tests_that_are_named_exist():
    for runs in RUNS.values():
        for run in runs.values():
            for file, name in (test.split("::") for test in run["tests"]):
                assert f"def {name}(" in (TESTS / file).read_text()


def test_figures_add_up():
    def line(outcome="passed", **figures):
        return {"test": "tests/test_a.py::test_b[1]", "outcome": outcome, "figures": figures}

    lines = [line(calls=3, **{"most MiB": 7}), line(calls=2, **{"most MiB": 5})]
    assert summed(lines) == {
        "tests": ["test_a.py::test_b"],
        "held": True,
        "figures": {"calls": 5, "most MiB": 7},
    }
    assert not summed([*lines, line("failed")])["held"]
    about = {"date": "2026-01-02", "times": 3, "with": "a driver"}
    runs = {"leaving": {"a GPU": summed(lines) | about}}
    row = "held, a GPU, 2026-01-02, counts × 3: 5 calls, 7 MiB at most |"
    assert sum(line.endswith(row) for line in table(runs).splitlines()) == 1
    assert table(runs).count("| not run |") == len(PROMISES) - 1
    assert table(runs).endswith("* a GPU: a driver")


def test_lines_of_another_machine_are_merged():
    """In place of an earlier run with that adapter; what was run with others stays."""

    def line(adapter, test, date="2026-02-03"):
        run = {"adapter": adapter, "date": date, "times": 2, "with": "a driver"}
        return {"promise": "idle", "test": f"tests/test_a.py::{test}", "outcome": "passed",
                "figures": {"calls": 1}, "run": run}  # fmt: skip

    def shown(*tests, date="2026-02-03"):
        return {"tests": [f"test_a.py::{test}" for test in tests], "held": True,
                "figures": {"calls": len(tests)}, "date": date, "times": 2,
                "with": "a driver"}  # fmt: skip

    before = {"idle": {"a GPU": {}, "another": {}}, "locks": {"a GPU": {}}}
    lines = [line("a GPU", "c"), line("a GPU", "b", "2026-02-04"), line("a third", "b")]
    assert merged(before, lines) == {
        "locks": {"a GPU": {}},
        "idle": {
            "a GPU": shown("b", "c", date="2026-02-04"),
            "another": {},
            "a third": shown("b"),
        },
    }
    assert merged(RUNS, []) == RUNS


def test_a_driver_that_is_named_has_rows_of_its_own(monkeypatch):
    """Two Mesas have adapters of one name."""
    monkeypatch.delenv("JAX_WEBGPU_DRIVER", raising=False)
    plain = where.__wrapped__()
    monkeypatch.setenv("JAX_WEBGPU_DRIVER", "backports")
    assert where.__wrapped__() == plain | {"adapter": f"{plain['adapter']} (backports)"}
