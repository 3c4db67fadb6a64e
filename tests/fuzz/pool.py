"""Worker processes under a watchdog: an abort or a hang is put down to the input that ran."""

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path

from fuzz import targets
from fuzz.worker import Begin, Came, Chunk, Done, Failure

TESTS = Path(__file__).resolve().parents[1]

# As `Target.chunk`: what is drawn does not depend on how many workers there are.
GUIDED_CHUNK = 4000
# A worker that ran so many is replaced: it compiles something new for most.
LIFE = 5000
_WORKER = "from fuzz import worker; worker.main()"
# Seconds that a process may take before its first input.
START = 300
# Of what a process wrote before it ended.
TAIL = 4000

_OFFLINE = {
    # Ours first, and then the caller's: wgpu may be there.
    "PYTHONPATH": os.pathsep.join(
        [str(TESTS), str(TESTS.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    ),
    "HF_HUB_OFFLINE": "1",
    "JAX_WEBGPU_TUNED": os.devnull,
    # On the CPU platform `pure_callback` can hang where the pool of threads is small.
    "NPROC": "16",
}


@dataclass
class Result:
    """What came of the inputs of a run, by target."""

    labels: defaultdict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    seconds: Counter[str] = field(default_factory=Counter)
    failures: list[Failure] = field(default_factory=list)

    @property
    def tried(self) -> int:
        return sum(labels.total() for labels in self.labels.values())


def plan(names: Iterable[str], inputs: int, seed: int) -> list[Chunk]:
    """The chunks of a run: so many inputs in all, each target's in proportion to its share."""
    chosen, chunks = [targets.load(name) for name in names], []
    for target in chosen:
        left = max(1, round(inputs * target.share / sum(each.share for each in chosen)))
        size = GUIDED_CHUNK if target.guided else target.chunk
        for number, start in enumerate(range(0, left, size)):
            drawn = random.Random(f"{seed} {target.name} {number}").getrandbits(48)
            chunks.append(Chunk(target.name, drawn, min(size, left - start)))
    random.Random(seed).shuffle(chunks)  # the slow ones do not come together
    chunks.sort(key=lambda chunk: targets.load(chunk.target).guided is None)  # the longest first
    return chunks


def run(
    chunks: Iterable[Chunk],
    *,
    workers: int,
    limit: float,
    progress: Callable[[Result], None] = lambda result: None,
) -> Result:
    """Runs chunks.

    Args:
      chunks: in any order.
      workers: processes.
      limit: seconds that an input may take.
      progress: told after each chunk.
    """
    result, waiting = Result(), deque(chunks)
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder, contextlib.ExitStack() as stack:
        pool = [_Worker(Path(folder) / str(number)) for number in range(workers)]
        for worker in pool:
            stack.callback(worker.end)
        while waiting or any(worker.chunk for worker in pool):
            for worker in pool:
                if worker.chunk is None and waiting:
                    known = frozenset(failure.signature for failure in result.failures)
                    worker.begin(replace(waiting.popleft(), known=known))
            busy = {worker.connection: worker for worker in pool if worker.chunk}
            for ready in wait(list(busy), timeout=1):
                busy[ready].hear(result)
            for worker in busy.values():
                rest = worker.watched(limit, result)
                waiting.extend(rest)
                if worker.chunk is None:
                    progress(result)
    return result


class _Worker:
    """A process, made when it is needed, and what is known of it."""

    def __init__(self, folder: Path):
        folder.mkdir()
        self.folder = folder
        self.process: subprocess.Popen[bytes] | None = None
        self.connection: Connection | None = None
        self.chunk: Chunk | None = None
        self.left = 0
        self.age = 0
        self.dead = False

    def begin(self, chunk: Chunk) -> None:
        if self.process is None:
            self._start()
        assert self.connection is not None
        self.connection.send(chunk)
        self.chunk, self.left = chunk, chunk.inputs
        self.input, self.since = "", time.monotonic()
        self.started = time.monotonic()

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        environment = os.environ | _OFFLINE | {"HF_HOME": str(self.folder)}
        environment.setdefault("JAX_PLATFORMS", "cpu")
        with theirs, (self.folder / "output").open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-c", _WORKER, str(theirs.fileno())],
                cwd=self.folder,
                env=environment,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        self.connection = Connection(ours.detach())
        self.age, self.dead = 0, False

    def hear(self, result: Result) -> None:
        """Takes what the process has sent."""
        assert self.connection is not None and self.chunk is not None
        try:
            while self.connection.poll():
                match self.connection.recv():
                    case Begin(input=input):
                        self.input, self.since = input, time.monotonic()
                    case Came(label=label):
                        result.labels[self.chunk.target][label] += 1
                        self.left -= 1
                        self.age += 1
                        self.since = time.monotonic()
                    case Failure() as failure:
                        if failure.signature not in {each.signature for each in result.failures}:
                            result.failures.append(failure)
                    case Done(left=left):
                        self._account(result)
                        if left or self.age >= LIFE:
                            self.end()
                        return
        except (EOFError, OSError):
            self.dead = True

    def watched(self, limit: float, result: Result) -> list[Chunk]:
        """What is left of the chunk, if the process ended or has to be ended."""
        limit = limit if self.input else START
        if self.chunk is None or not (self.dead or time.monotonic() - self.since > limit):
            return []
        assert self.process is not None
        if self.dead:
            status = self.process.wait()
            signature = f"ended with status {status}"
        else:
            signature = f"took more than {limit:g} s"
            self.process.send_signal(signal.SIGUSR1)  # writes down where it is
            time.sleep(1)
        chunk, left = self.chunk, self.left
        self._kill()
        said = (self.folder / "output").read_bytes()[-TAIL:].decode(errors="replace")
        result.labels[chunk.target][targets.FAILED] += 1
        result.failures.append(Failure(chunk.target, self.input, signature, f"{signature}\n{said}"))
        self._account(result)
        return [replace(chunk, seed=chunk.seed + 1, inputs=left - 1)] if left > 1 else []

    def _account(self, result: Result) -> None:
        assert self.chunk is not None
        result.seconds[self.chunk.target] += time.monotonic() - self.started
        self.chunk = None

    def end(self) -> None:
        """Lets the process go, unless it is at work."""
        if self.process is None:
            return
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            if self.connection is not None and self.chunk is None:
                self.connection.send(None)
                self.process.wait(10)
        self._kill()

    def _kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
        if self.connection is not None:
            self.connection.close()
        self.process = self.connection = None
