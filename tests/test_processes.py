"""What a forked or a spawned process can do. Each test in processes of its own."""

import os

import pytest
from stress import LONG, figures

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")

# --- forks --------------------------------------------------------------------------------------

# A child that hangs is ended by its alarm, with status -14.
FORKING = """
import json, os, signal, sys, warnings
warnings.simplefilter("ignore")  # JAX warns of every fork
import jax, numpy as np
import jax_webgpu

x = np.arange(6, dtype=np.float32)
f = lambda x: jax_webgpu.split(x, [2, x.shape[0] - 2])[1]
jitted = jax.jit(f)

def in_child(call, end=os._exit):
    # What a call raises or gives in a forked child, and the child's status.
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.alarm(200)
        try:
            seen = str(jax.block_until_ready(call()))
        except Exception as error:
            named = "fork" in str(error) and "'spawn'" in str(error)
            seen = type(error).__name__ + " spawn" * named
        os.write(writer, seen.encode())
        end(3)
    os.close(writer)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with open(reader) as file:
        return file.read(), status
"""

# Functions that were called before the fork, eagerly, jitted or otherwise, with these arguments;
# and others. JAX may wait for threads that are gone before it comes to us, where an array is large.
REFUSED = """
large = np.arange(1 << 20, dtype=np.float32)
arguments = [x, large, jax.numpy.asarray(x), jax.numpy.asarray(large)]
functions = [
    f,
    jitted,
    jax.jit(lambda x: -f(x * 2)),
    jax.jit(jax.grad(lambda x: (f(x) ** 2).sum())),
    jax_webgpu.fuse(f),
    lambda x: jax.vmap(f)(x.reshape(2, -1)),
]
for g in functions:
    for a in arguments:
        jax.block_until_ready(g(a))
        seen = in_child(lambda: g(a))
        assert seen == ("DeviceError spawn", 3), (seen, functions.index(g), a.shape)
plain = jax.jit(lambda x: x * 2)
jax.block_until_ready(plain(large))
assert in_child(lambda: plain(large)) == ("DeviceError spawn", 3)  # JAX alone would wait
compiled = jitted.lower(x).compile()
assert in_child(lambda: compiled(x)) == ("JaxRuntimeError spawn", 3)
for g in (jax_webgpu.device_info, jax_webgpu.clear_caches, lambda: jax.jit(lambda x: f(x) + 1)(x)):
    assert in_child(g) == ("DeviceError spawn", 3), g
# It does not wait for its parent's calls either, at its end, where JAX's own may still fail.
seen, status = in_child(lambda: "runs", sys.exit)
assert seen == "runs" and status != -14, status
assert str(f(x)) == str(jitted(x)) == "[2. 3. 4. 5.]"
print(json.dumps({"children": len(functions) * len(arguments) + 6}))
"""


@pytest.mark.promise("forks")
@pytest.mark.parametrize("callback", ["buffer", "pure"][: 1 + LONG])
def test_a_forked_child_refuses(callback, run_snippet, record_property):
    done = run_snippet(FORKING + REFUSED, JAX_WEBGPU_CALLBACK=callback, NPROC="16")
    figures(done, record_property)


@pytest.mark.promise("forks")
def test_a_child_forked_before_the_first_use(run_snippet):
    """JAX must not have been used either. The child's calls in flight are awaited at its end."""
    many = """
def many():
    large = np.arange(1 << 17, dtype=np.float32)
    for i in range(20):
        jitted(large * i)
    return jitted(x)

print(*in_child(many, sys.exit))
print(jitted(x))
"""
    done = run_snippet(FORKING + many)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["[2. 3. 4. 5.] 3", "[2. 3. 4. 5.]"]


# --- spawned ones -------------------------------------------------------------------------------

SPAWNING = """
import multiprocessing
import joblib
import numpy as np
import jax_webgpu

def second(first):
    return np.asarray(jax_webgpu.split(np.arange(6, dtype=np.float32), [first, 6 - first])[1])

if __name__ == "__main__":
    print(second(3))
    for method in METHODS:
        with multiprocessing.get_context(method).Pool(1) as pool:
            print(*pool.map(second, [1, 4]))
    print(*joblib.Parallel(n_jobs=2, backend="loky")(joblib.delayed(second)(n) for n in (1, 4)))
    print(second(3))
"""


@pytest.mark.promise("spawn")
def test_spawned_children(run_snippet, tmp_path):
    """Each has a device of its own, while the parent uses its own."""
    script = tmp_path / "spawning.py"
    methods = ["spawn", "forkserver"] if LONG else ["spawn"]
    script.write_text(SPAWNING.replace("METHODS", str(methods)))
    done = run_snippet(f"import runpy; runpy.run_path({str(script)!r}, run_name='__main__')")
    assert done.returncode == 0, done.stderr
    both = "[1. 2. 3. 4. 5.] [4. 5.]"
    rest = [both] * (len(methods) + 1)
    assert done.stdout.splitlines() == ["[3. 4. 5.]", *rest, "[3. 4. 5.]"]
