"""How a process ends with calls in flight, and what Ctrl-C does. Each in a process of its own."""

import contextlib
import linecache
import pathlib
import signal
import sys
from itertools import chain

import numpy as np
import pytest
import wgpu
from launches import KINDS, PARTS, X, launched, nothing_kept, planned, split_x
from stress import CALLS, LONG, PATIENCE, SCALE, figures

from jax_webgpu import device, driver

# --- calls that are queued at the end -----------------------------------------------------------

# The argument of each call is still being computed, so that the call is queued. Under `pure` that
# can deadlock for want of threads; XLA makes as many as NPROC says.
QUEUE = """
import os, signal, sys, threading, time
import jax, jax.numpy as jnp
import jax_webgpu

x = jnp.arange(500_000, dtype=jnp.float32)
f = jax.jit(lambda x: jax_webgpu.split(x, [100_000, 400_000]))
"""
KEPT = "results = [f(x * i) for i in range(20)]\n"
DROPPED = "for i in range(20): f(x * i)\n"

# What ends the process, and how it then has ended. An exit that comes from elsewhere finds the main
# thread in a call, or asleep.
ENDINGS = {
    "sys.exit": ("sys.exit(7)", 7),
    "exception": ("raise LookupError('mine')", 1),
    "its end": ("", 0),
    "os._exit": ("threading.Thread(target=os._exit, args=(5,)).start(); time.sleep(60)", 5),
    "SIGTERM": ("os.kill(os.getpid(), signal.SIGTERM); time.sleep(60)", -signal.SIGTERM),
    "SIGTERM, handled": (
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(9))\n"
        "threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM)).start()\n"
        "while True: jax_webgpu.split(x, [100_000, 400_000])",
        9,
    ),
    "Ctrl-C": (
        "threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()\n"
        "while True: jax_webgpu.split(x, [100_000, 400_000])",
        -signal.SIGINT,
    ),
}
QUEUES = {
    "buffer, kept": ("buffer", KEPT),
    "pure, dropped": ("pure", DROPPED),
    "buffer, dropped": ("buffer", DROPPED),
    "pure, kept": ("pure", KEPT),
}
# In the short form one of them for each ending, in turn.
LEAVING = [
    (ending, queued)
    for n, ending in enumerate(ENDINGS)
    for m, queued in enumerate(QUEUES)
    if LONG or m == n % 2
]


@pytest.mark.promise("leaving")
@pytest.mark.parametrize(("ending", "queued"), LEAVING)
def test_exit_status_is_the_programs(ending, queued, run_snippet, record_property):
    source, expected = ENDINGS[ending]
    callback, queue = QUEUES[queued]
    for _ in range(SCALE):
        done = run_snippet(QUEUE + queue + source, JAX_WEBGPU_CALLBACK=callback, NPROC="16")
        assert done.returncode == expected, done.stderr
    record_property("exits", SCALE)
    if ending == "exception":
        assert "Traceback (most recent call last)" in done.stderr
        assert done.stderr.rstrip().endswith("LookupError: mine")
    elif ending != "Ctrl-C":
        assert "Traceback" not in done.stderr


def test_no_fence_where_nothing_crosses(run_snippet):
    """The fence needs JAX's CPU platform; plain JAX does not."""
    done = run_snippet(
        """
        import jax, numpy as np
        import jax_webgpu
        f = jax.jit(lambda x: jax_webgpu.split(x, [1, 2]))
        with jax_webgpu.configure(implementation="reference"):
            print(f(np.arange(3))[1])

        def no_cpu(backend=None):
            raise RuntimeError(f"no {backend}")

        jax.local_devices = no_cpu
        """
    )
    assert (done.returncode, done.stdout) == (0, "[1 2]\n"), done.stderr
    assert "Traceback" not in done.stderr


# --- Ctrl-C -------------------------------------------------------------------------------------

# A timer's signal, with the handler of Ctrl-C, comes at any time of a call. The next call is right.
INTERRUPTED = """
import json, logging, random, re, signal
from collections import Counter

logging.disable()  # JAX logs what a callback raises
signal.signal(signal.SIGALRM, signal.default_int_handler)
ways = {{name: f for name, f in OPERATORS.items()}}
if {jitted}:
    ways = {{name: jax.jit(f) for name, f in ways.items()}}
arguments = [(np.arange(size, dtype=np.float32) % 1000, most) for size, most in {sizes}]
for name, f in ways.items():
    for x, _ in arguments:
        assert right(name, f(x), x)
seen, rng = Counter(), random.Random({seed})

def jax_is_broken(error):
    # Whether the interrupt of an earlier call left JAX's own state half changed; it is mended here.
    if isinstance(error, RecursionError) and "Recursively calling <weakref" in str(error):
        jax.clear_caches()  # an entry was being made: what needs it is taken for a recursion
    elif is_of_no_trace(error) and is_of_no_trace(raised_by_plain_jax()):
        # The thread's trace was taken away, as each bind does, and not put back.
        contexts.append(jax.core.eval_context())
        contexts[-1].__enter__()
    else:
        return False
    return True

def is_of_no_trace(error):
    text = "'NoneType' object has no attribute '(stage_value|process_primitive|requires_low)'"
    return isinstance(error, AttributeError) and re.fullmatch(text, str(error)) is not None

def raised_by_plain_jax():
    try:
        jax.lax.neg(one)
    except AttributeError as error:
        return error

one, contexts = jnp.ones(()), []
for i in range({count}):
    name, (x, most) = ("split", "rotary")[i % 2], arguments[i // 2 % len(arguments)]
    try:
        signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-5, most))
        try:
            jax.block_until_ready(ways[name](x))
        except Exception as error:
            seen[type(error).__name__] += 1
            assert "KeyboardInterrupt" in str(error) or jax_is_broken(error), error
        signal.setitimer(signal.ITIMER_REAL, 0)
    except KeyboardInterrupt:
        seen["KeyboardInterrupt"] += 1
    try:
        y = ways[name](x)
    except (RecursionError, AttributeError) as error:
        assert jax_is_broken(error), error
        seen[type(error).__name__] += 1
        y = ways[name](x)
    assert right(name, y, x), (name, x.shape, i)
gpu = jax_webgpu.device.get()
assert gpu._pool.idle_bytes == sum(each.size for each in gpu._pool.idle.values())
print(json.dumps(seen))
"""


WAYS = [("buffer", False), ("pure", False)] + [("buffer", True), ("pure", True)] * LONG


@pytest.mark.promise("interrupts")
@pytest.mark.parametrize(("callback", "jitted"), WAYS)
def test_a_signal_at_any_time(callback, jitted, run_snippet, record_property):
    sizes = [(1 << 10, 4e-4), (1 << 14, 6e-4), (1 << 18, 3e-3)]
    source = CALLS + INTERRUPTED.format(jitted=jitted, sizes=sizes, seed=SCALE, count=100 * SCALE)
    done = run_snippet(source, timeout=PATIENCE, JAX_WEBGPU_CALLBACK=callback, NPROC="16")
    assert done.returncode == 0, done.stderr
    seen = figures(done, lambda *_: None)
    broken = seen.pop("RecursionError", 0) + seen.pop("AttributeError", 0)
    record_property("of JAX's own caches and traces broken by them", broken)
    record_property("interrupts", sum(seen.values()))
    assert sum(seen.values()) > 10 * broken
    assert jitted or seen.keys() == {"KeyboardInterrupt"}
    assert seen.keys() <= {"KeyboardInterrupt", "JaxRuntimeError", "ValueError"}


@pytest.mark.promise("interrupts")
@pytest.mark.parametrize("unified", [True, False])
def test_an_interrupt_before_each_line(unified, fresh, monkeypatch, record_property):
    """Of ours and of wgpu's: the next call is right, the pool counts right, no array is kept."""
    # wgpu's objects complain if they are dropped half made; pytest would keep what they say.
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)
    bounds = {"_WRITE_BYTES": 4, "_PIECE_BYTES": 16, "NO_PAUSE": 0, "FIRST_PAUSE": 1e-3}
    gpu, plan = fresh(**bounds, _UNIFIED=KINDS if unified else ()), planned(split_x, X)

    def call():
        for actual, expected in zip(launched(gpu, plan), PARTS, strict=True):
            np.testing.assert_array_equal(actual, expected)

    call()
    line, step, interrupts = 0, 1 if LONG else 7, 0
    while True:
        with nothing_kept():
            if not interrupted(line, call):
                break
        call()
        pool = gpu._pool
        assert pool.idle_bytes == sum(each.size for each in pool.idle.values())
        assert sorted(pool.idle) == sorted(chain.from_iterable(pool.classes.values()))
        assert len(gpu._driver._answers) <= len(pool.idle)
        line += step
        interrupts += 1
    assert line > 400
    record_property("interrupts", interrupts)


# Ours, and wgpu's.
TRACED = (device.__file__, driver.__file__, str(pathlib.Path(wgpu.__file__).parent))


def interrupted(line, call):
    """Whether a call came to so many lines of `TRACED`; there it was interrupted.

    At `with` and `try` Python looks for no signals, but it does trace. What is raised where an
    object is dropped only Python itself sees.
    """
    left = line

    def trace(frame, event, _):
        nonlocal left
        if not frame.f_code.co_filename.startswith(TRACED):
            return None
        text = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
        if event == "line" and not text.startswith(("with ", "try:")):
            left -= 1
            if left == -1 and "__del__" not in callers(frame):
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        with contextlib.suppress(KeyboardInterrupt):
            call()
    finally:
        sys.settrace(before)
    return left < 0


def callers(frame):
    """The names of the functions that are running, the innermost first."""
    while frame is not None:
        yield frame.f_code.co_name
        frame = frame.f_back
