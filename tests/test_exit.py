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
