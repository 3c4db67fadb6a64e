"""A process that runs inputs: it says what it is about to run, and what came of it."""

import contextlib
import faulthandler
import os
import resource
import signal
import sys
import time
import traceback
import warnings
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import hypothesis
import hypothesis.configuration
import jax
from hypothesis import HealthCheck, Phase

from fuzz import targets
from fuzz.targets import Target

# With fewer inputs than this there is nothing to be guided by.
LEAST_GUIDED = 1000
# Seconds that a failure may be made smaller for.
PATIENCE = 30
# After so many inputs what JAX compiled for them is given up.
KEPT = 100


@dataclass(frozen=True)
class Chunk:
    """So many inputs of a target, drawn from a seed; of failures that are known none is told."""

    target: str
    seed: int
    inputs: int
    known: frozenset[str] = frozenset()


# What a worker sends, in this order for each input; a failure's input may come again, smaller.


@dataclass(frozen=True)
class Begin:
    """An input is about to run."""

    input: str


@dataclass(frozen=True)
class Failure:
    """An input and what is wrong with what came of it."""

    target: str
    input: str
    signature: str
    text: str


@dataclass(frozen=True)
class Came:
    """What came of an input."""

    label: str


@dataclass(frozen=True)
class Done:
    """The chunk has run; the process may be at its end too."""

    left: bool = False


class Journal:
    """Runs the inputs of one chunk, and tells the parent of each."""

    def __init__(self, target: Target, chunk: Chunk, connection: Connection):
        self.target = target
        self.left = chunk.inputs
        self.known = {*chunk.known}
        self.connection = connection

    def run(self, value: Any) -> str:
        """What came of an input; raises what is wrong and new."""
        self.connection.send(Begin(repr(value)))
        try:
            return self.target.run(value)
        except Exception as error:
            if targets.signature(error) in self.known:
                return targets.FAILED
            raise

    def count(self, label: str) -> None:
        self.left -= 1
        self.connection.send(Came(label))

    def fail(self, value: Any, error: BaseException) -> None:
        found = targets.signature(error)
        self.known.add(found)
        text = "".join(traceback.format_exception(error))
        self.connection.send(Failure(self.target.name, repr(value), found, text))
        self.count(targets.FAILED)


def draw(journal: Journal, seed: int) -> None:
    """Hypothesis draws inputs, up to the first failure that is new, which it makes smaller."""
    failed = dict[str, Exception]()
    smallest, end = None, 0.0

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=journal.left,
        database=None,
        deadline=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
        verbosity=hypothesis.Verbosity.quiet,
    )
    @hypothesis.given(journal.target.inputs())
    def probe(value: Any) -> None:
        nonlocal smallest, end
        if failed and time.monotonic() > end and repr(value) not in failed:
            return
        if not journal.left:
            return
        try:
            label = journal.run(value)
        except Exception as error:
            end = end or time.monotonic() + PATIENCE
            failed[repr(value)] = error
            smallest = value
            raise
        if not failed:
            journal.count(label)

    try:
        probe()
    except Exception:
        if not failed:
            raise
        journal.fail(smallest, failed[repr(smallest)])


def guide(journal: Journal, seed: int) -> None:
    """The target makes inputs, until there are enough; the process ends with them."""

    def probe(value: Any) -> None:
        try:
            journal.count(journal.run(value))
        except Exception as error:
            journal.fail(value, error)
        if not journal.left:
            journal.connection.send(Done(left=True))
            os._exit(0)

    assert journal.target.guided is not None
    journal.target.guided(seed, probe)


def work(connection: Connection) -> None:
    """Runs chunks until there are no more."""
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_num_cpu_devices", 4)
    warnings.simplefilter("ignore")
    since = 0
    while (chunk := connection.recv()) is not None:
        target = targets.load(chunk.target)
        journal = Journal(target, chunk, connection)
        if target.guided is not None and chunk.inputs >= LEAST_GUIDED:
            guide(journal, chunk.seed)
        for attempt in range(chunk.inputs):
            if journal.left:
                draw(journal, chunk.seed + attempt)
        since += chunk.inputs
        if since >= KEPT:
            jax.clear_caches()
            since = 0
        connection.send(Done())


def main() -> None:
    """The process; its argument is the number of the connection's file."""
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)  # the watchdog's, before it ends a process that hangs
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    hypothesis.configuration.set_hypothesis_home_dir(os.getcwd())
    with contextlib.closing(Connection(int(sys.argv[1]))) as connection:
        work(connection)
