"""How a process ends, and what a forked or spawned one can do. Each in a process of its own."""

import pytest

# --- calls that are queued at the end -----------------------------------------------------------

# The argument of each call is still being computed, so that the call is queued. Under `pure` that
# can deadlock for want of threads; XLA makes as many as NPROC says.
QUEUE = """
import sys
import jax, jax.numpy as jnp
import jax_webgpu

x = jnp.arange(500_000, dtype=jnp.float32)
f = jax.jit(lambda x: jax_webgpu.split(x, [100_000, 400_000]))
"""
KEPT = "results = [f(x * i) for i in range(20)]\n"
DROPPED = "for i in range(20): f(x * i)\n"


@pytest.fixture
def ended(run_snippet):
    """The exit status of a program and its standard error."""

    def call(source, callback=""):
        done = run_snippet(source, JAX_WEBGPU_CALLBACK=callback, NPROC="16")
        return done.returncode, done.stderr

    return call


@pytest.mark.parametrize("queue", [KEPT, DROPPED], ids=["kept", "dropped"])
@pytest.mark.parametrize("callback", ["pure", "buffer"])
def test_exit_status_is_the_programs(callback, queue, ended):
    status, stderr = ended(QUEUE + queue + "sys.exit(7)", callback)
    assert status == 7, stderr


def test_exception_at_top_level(ended):
    status, stderr = ended(QUEUE + KEPT + "raise LookupError('mine')")
    assert status == 1, stderr
    assert "Traceback (most recent call last)" in stderr
    assert stderr.rstrip().endswith("LookupError: mine")


def test_normal_end(ended):
    status, stderr = ended(QUEUE + DROPPED)
    assert status == 0, stderr
    assert "Traceback" not in stderr


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


# --- forks --------------------------------------------------------------------------------------

# A child that hangs is ended by its alarm, with status -14.
FORKING = """
import os, signal, sys, warnings
warnings.simplefilter("ignore")  # JAX warns of every fork
import jax, numpy as np
import jax_webgpu

x = np.arange(6, dtype=np.float32)
f = lambda x: jax_webgpu.split(x, [2, 4])[1]
jitted = jax.jit(f)

def in_child(name, call, end=os._exit):
    pid = os.fork()
    if pid == 0:
        signal.alarm(20)
        try:
            print(name, call(), flush=True)
        except Exception as error:
            message = str(error)
            kind = type(error).__name__
            print(name, kind, "fork" in message and "'spawn'" in message, flush=True)
        end(3)
    print(name, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


def test_a_forked_child_refuses(run_snippet):
    done = run_snippet(
        FORKING
        + """
more = jax.numpy.arange(12.0).reshape(6, 2)
jax.block_until_ready([f(x), jitted(x), more])
in_child("eager", lambda: f(x))
in_child("another shape", lambda: f(more))
in_child("jitted anew", lambda: jax.jit(lambda x: f(x) + 1)(x))
in_child("jitted before", lambda: jax.block_until_ready(jitted(x)))
in_child("info", jax_webgpu.device_info)
print("parent", f(x))
"""
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    # A function that was compiled before only meets our check in the callback.
    assert lines.pop(6) in ("jitted before ValueError True", "jitted before JaxRuntimeError True")
    assert lines == [
        "eager DeviceError True",
        "eager 3",
        "another shape DeviceError True",
        "another shape 3",
        "jitted anew DeviceError True",
        "jitted anew 3",
        "jitted before 3",
        "info DeviceError True",
        "info 3",
        "parent [2. 3. 4. 5.]",
    ]


def test_a_forked_child_does_not_wait_for_its_parents_calls(run_snippet):
    """It has none of the threads that would run them. JAX's own end may still fail there."""
    done = run_snippet(
        FORKING
        + """
jax.block_until_ready(jitted(x))
in_child("idle", lambda: "runs", sys.exit)
"""
    )
    assert done.returncode == 0, done.stderr
    first, ended = done.stdout.splitlines()
    assert first == "idle runs"
    assert ended != "idle -14", "it hangs"


def test_a_child_forked_before_the_first_use(run_snippet):
    """JAX must not have been used either."""
    done = run_snippet(FORKING + 'in_child("child", lambda: jitted(x))\nprint("parent", jitted(x))')
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "child [2. 3. 4. 5.]",
        "child 3",
        "parent [2. 3. 4. 5.]",
    ]


def test_a_spawned_child(run_snippet, tmp_path):
    """It has a device of its own, while the parent uses its own."""
    script = tmp_path / "spawning.py"
    script.write_text(
        """
import multiprocessing
import numpy as np
import jax_webgpu

def second(first):
    return np.asarray(jax_webgpu.split(np.arange(6, dtype=np.float32), [first, 6 - first])[1])

if __name__ == "__main__":
    print(second(3))
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(*pool.map(second, [1, 4]))
"""
    )
    done = run_snippet(f"import runpy; runpy.run_path({str(script)!r}, run_name='__main__')")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["[3. 4. 5.]", "[1. 2. 3. 4. 5.] [4. 5.]"]
