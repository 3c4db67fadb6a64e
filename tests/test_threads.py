"""Many threads at once: what they get, how often things are made, and which locks are held when."""

import ast
import functools
import pathlib
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from stress import CALLS, LONG, PATIENCE, SCALE, figures

import jax_webgpu
from jax_webgpu import config, device

PACKAGE = pathlib.Path(jax_webgpu.__file__).parent

# --- mixed calls --------------------------------------------------------------------------------

# Eight threads come to the first call at once. They make calls of more shapes than are kept.
MIXED = """
import json, sys, threading
from concurrent.futures import ThreadPoolExecutor
from jax_webgpu import device, plan, program

sys.setswitchinterval(1e-5)
device.MAX_PROGRAMS, device.MAX_IDLE_BYTES = 8, 1 << 20
made = []
init = device.Device.__init__
device.Device.__init__ = lambda self, *args: (made.append(self), init(self, *args))[1]

jitted = {{name: jax.jit(f) for name, f in OPERATORS.items()}}
together = threading.Barrier(8)

def work(thread):
    rng = np.random.default_rng(thread)
    together.wait()
    for i in range({calls}):
        size = 128 * int(rng.integers(1, 13)) * (1 if i % 8 else 64)
        name = ("split", "rotary")[i % 2]
        x = rng.integers(-1000, 1000, size).astype(np.float32)
        f = OPERATORS[name] if rng.random() < 0.5 else jitted[name]
        assert right(name, f(x), x), (thread, i)
    return {calls}

with ThreadPoolExecutor(8) as pool:
    calls = sum(pool.map(work, range(8)))
(gpu,) = made
assert gpu.counters["dispatches"] >= calls
assert len(gpu._programs) <= 8
assert all(len(kept.groups) <= device.MAX_BIND_GROUPS for kept in gpu._programs.values())
assert len(gpu._pipelines) <= 8 and len(gpu._uniforms) <= 16
assert gpu._pool.idle_bytes == sum(each.size for each in gpu._pool.idle.values()) <= 1 << 20
assert sorted(gpu._pool.idle) == sorted(sum(gpu._pool.classes.values(), []))
for cache in (plan, program.alone, jax_webgpu.primitive.Registered.resolve):
    assert cache.cache_info().currsize <= cache.cache_info().maxsize
print(json.dumps({{"calls": calls, "most threads": 8}}))
"""


@pytest.mark.promise("threads")
@pytest.mark.parametrize("cores", [2, 1][: 1 + LONG])
def test_mixed_calls(cores, run_snippet, record_property):
    source = CALLS + MIXED.format(calls=200 * SCALE)
    done = run_snippet(source, cores=cores, timeout=PATIENCE, JAX_WEBGPU_CALLBACK="")
    figures(done, record_property)


# --- other threads than the main one, and asyncio -----------------------------------------------

# JAX and wgpu are first used in a coroutine, on a thread that is not the main one.
ELSEWHERE = """
import asyncio, json, threading

calls = 0

def call(i):
    name = ("split", "rotary")[i % 2]
    x = np.arange(128 * (1 + i % 5), dtype=np.float32)
    f = OPERATORS[name] if i % 4 < 2 else jax.jit(OPERATORS[name])
    assert right(name, f(x), x)
    return 1

async def many(count):
    done = call(0)
    done += sum(await asyncio.gather(*(asyncio.to_thread(call, i) for i in range(count))))
    for i in range(count):  # among other tasks that are awake
        ticker = asyncio.create_task(asyncio.sleep(0))
        done += call(i)
        await ticker
    return done

def run():
    global calls
    calls += asyncio.run(many({calls}))

thread = threading.Thread(target=run)
thread.start()
thread.join()
assert calls == 2 * {calls} + 1
run()
print(json.dumps({{"calls": calls}}))
"""


@pytest.mark.promise("elsewhere")
@pytest.mark.parametrize("callback", ["buffer", "pure"][: 1 + LONG])
def test_asyncio_and_another_thread(callback, run_snippet, record_property):
    source = CALLS + ELSEWHERE.format(calls=20 * SCALE)
    done = run_snippet(source, timeout=PATIENCE, JAX_WEBGPU_CALLBACK=callback, NPROC="16")
    figures(done, record_property)


# --- wgpu's instance ----------------------------------------------------------------------------

# Another thread of the process uses wgpu first while we list adapters, and replaces the instance.
REPLACED = """
import wgpu
from wgpu.backends.wgpu_native import _helpers

listed, kept = wgpu.gpu.enumerate_adapters_sync, []

def replace():
    found = listed()
    if not kept:
        kept.append(_helpers._the_instance)
        _helpers._the_instance = None
        _helpers.get_wgpu_instance()
    return found

wgpu.gpu.enumerate_adapters_sync = replace
x = np.arange(65_536, dtype=np.float32)
assert right("split", split(x), x)
print(len(kept))
"""


def test_another_thread_makes_wgpus_instance_first(run_snippet):
    """Answers come from the instance of the adapters alone."""
    done = run_snippet(CALLS + REPLACED)
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr


# --- locks --------------------------------------------------------------------------------------


def imported(tree):
    """The names of the modules that a module imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module


def test_which_modules_have_locks():
    """None that knows JAX, so that nobody who holds one can wait for it."""
    trees = {path.stem: ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py")}
    locking = {
        name
        for name, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr in ("Lock", "RLock", "Condition")
    }
    assert locking == {"config", "device", "spec"}
    for name in locking:
        assert not [each for each in imported(trees[name]) if each.split(".")[0] == "jax"]


@pytest.mark.promise("locks")
def test_what_is_told_of_a_change_may_wait(monkeypatch):
    """JAX's caches are cleared with no lock held: what clears them may wait for a call."""
    seen = []

    def listen():
        free = threading.Thread(target=lambda: seen.append(config._state.lock.acquire(timeout=5)))
        free.start()
        free.join()
        config._state.lock.release()

    monkeypatch.setattr(config._state, "listeners", [listen])
    with jax_webgpu.configure(overlays=False):
        assert seen == [True]
    assert seen == [True, True]


class Spying:
    """A lock that knows who holds it."""

    def __init__(self, lock, held):
        self.lock, self.held = lock, held

    def __enter__(self):
        self.lock.acquire()
        self.held.append(threading.get_ident())

    def __exit__(self, *_):
        self.held.remove(threading.get_ident())
        self.lock.release()


@pytest.mark.promise("locks")
@pytest.mark.parametrize("callback", ["buffer", "pure"])
def test_nothing_of_jax_is_read_under_a_lock(callback, monkeypatch, record_property):
    """Arguments that are still being computed are awaited before one is taken."""
    gpu, held, calls = device.get(), [], 0
    monkeypatch.setattr(device, "_lock", Spying(device._lock, held))
    monkeypatch.setattr(gpu, "_lock", Spying(gpu._lock, held))
    run = device.Device.run

    def checked(self, program, inputs, outputs):
        assert all(type(each) is np.ndarray for each in (*inputs, *outputs))
        assert threading.get_ident() not in held
        return run(self, program, inputs, outputs)

    def spied(wait):
        def waiting(array, *args, **kwargs):
            assert not isinstance(array, jax.Array) or threading.get_ident() not in held
            return wait(array, *args, **kwargs)

        return waiting

    monkeypatch.setattr(device.Device, "run", checked)
    for name in ("asarray", "array", "ascontiguousarray"):
        monkeypatch.setattr(np, name, spied(getattr(np, name)))
    f = functools.partial(jax_webgpu.split, split=[1000, 2000])
    with jax_webgpu.configure(callback=callback):
        for each in (f, jax.jit(f), jax_webgpu.fuse(f)):
            for i in range(10):
                x = np.arange(3000, dtype=np.float32)
                first, second = each(jnp.asarray(x) * i)
                assert np.array_equal(first, x[:1000] * i) and np.array_equal(second, x[1000:] * i)
                calls += 1
    record_property("calls", calls)
