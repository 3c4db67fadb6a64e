"""The table of the format's facts names what exists."""

import ast
import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "docs" / "format.md").read_text(encoding="utf-8")
# From the tables' cells alone: prose may quote what is no name here.
NAMES = sorted(set(re.findall(r"`(\w+\.\w+)`", TEXT)) - {"derive.NAME", "test.json"})
TESTS = [name for name in NAMES if name.startswith("test_")]


@pytest.mark.parametrize("name", TESTS)
def test_each_test_exists(name):
    file, function = name.split(".")
    tree = ast.parse((ROOT / "tests" / f"{file}.py").read_text(encoding="utf-8"))
    assert function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("name", [name for name in NAMES if name not in TESTS])
def test_each_place_exists(name):
    module, member = name.split(".")
    assert hasattr(importlib.import_module(f"jax_webgpu.{module}"), member)


def test_each_fact_has_a_place_and_a_test():
    rows = [line.split("|")[1:-1] for line in TEXT.splitlines() if line.startswith("| ")]
    for cells in rows:
        assert len(cells) == 3
        if cells[0].strip() not in ("fact", "question"):
            assert "`test_" in cells[2], cells[0]
    assert len(rows) > 45 and len(TESTS) > 70
