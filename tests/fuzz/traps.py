"""What the fuzzer must catch: targets that fail above 500, each in its way, for its own tests."""

import os
import time
from collections.abc import Callable

from hypothesis import strategies as st

from fuzz.targets import RIGHT, Target, Wrong


def _wrong() -> None:
    raise Wrong("above 500")


WAYS: dict[str, Callable[[], object]] = {
    "wrong": _wrong,
    "abort": os.abort,
    "exit": lambda: os._exit(3),
    "hang": lambda: time.sleep(1000),
}


def _target(way: str) -> Target:
    def run(value: int) -> str:
        if value > 500:
            WAYS[way]()
        return RIGHT if value % 2 else "CallError"

    return Target(f"traps:{way}", 1, lambda: st.integers(0, 1000), run)


TARGETS = {way: _target(way) for way in WAYS}
