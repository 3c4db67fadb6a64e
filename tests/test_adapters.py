"""Machines without the adapter: one that is named and missing, no driver, no loader of drivers.

What needs no device works there, and what needs one says why there is none and what to do, in a
process that ends as it should. Each machine is made by the environment of a process of its own.
"""

import sys
from pathlib import Path

import pytest

SOFTMAX = Path(__file__).parents[1] / "examples" / "kernels" / "softmax"

pytestmark = [
    pytest.mark.promise("adapters"),
    pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the system itself is the driver"),
]

MACHINES = {
    # what its first line says, and one of what follows
    "missing name": ("JAX_WEBGPU_ADAPTER is 'nothing', and the adapters are:", "  0: "),
    "no driver": ("no WebGPU adapter was found", "  - Linux: install the GPU vendor's Vulkan"),
    "no loader": ("no WebGPU adapter was found", "  - Linux: install the GPU vendor's Vulkan"),
}


@pytest.fixture
def machine(tmp_path):
    """The environment of a machine.

    A library that is an empty file cannot be loaded, and the linker looks for no other. OpenGL,
    which wgpu takes where there is no Vulkan, goes by way of EGL.
    """

    def environment(name):
        if name == "missing name":
            return {"JAX_WEBGPU_ADAPTER": "nothing"}
        missing = ["libEGL.so", "libEGL.so.1"]
        missing += ["libvulkan.so", "libvulkan.so.1"] if name == "no loader" else []
        for library in missing:
            (tmp_path / library).touch()
        nowhere = dict.fromkeys(("VK_DRIVER_FILES", "VK_ICD_FILENAMES"), "/nowhere")
        drivers = nowhere if name == "no driver" else {}
        return {"LD_LIBRARY_PATH": str(tmp_path), "JAX_WEBGPU_ADAPTER": ""} | drivers

    return environment


COMMON = """
    import sys, threading
    import jax, jax.numpy as jnp, numpy as np
    import jax_webgpu
    f, x = lambda x: jax_webgpu.split(x, [1, 2]), np.arange(3, dtype=np.float32)
"""

EVERYTHING = """
    # Without a device.
    assert [part.shape for part in jax.eval_shape(f, x)] == [(1,), (2,)]
    assert len(jax_webgpu.explain(f, x, device="floor")) == 1
    jax.make_jaxpr(jax.grad(lambda x: f(x)[1].sum()))(x)
    jax.jit(f).lower(x).compile()
    softmax = jax_webgpu.load_kernel(SOFTMAX)
    assert jax.eval_shape(softmax, x).shape == (3,)
    with jax_webgpu.configure(implementation="reference"):
        assert [part.tolist() for part in f(x)] == [[0], [1, 2]]
    jax_webgpu.clear_caches()

    # With one: what a call raises, the second time as the first, and on other threads.
    raised = []
    def note(call):
        try:
            jax.block_until_ready(call())
        except Exception as error:
            raised.append(error)
        else:
            raised.append(None)
    jitted, fused = jax.jit(f), jax_webgpu.fuse(f)
    gradient = jax.grad(lambda x: (f(x)[1] ** 2).sum())
    calls = [lambda: f(x), lambda: jitted(x), lambda: fused(x), lambda: gradient(x),
             lambda: softmax(x), lambda: jitted(x + 1)]
    for call in [jax_webgpu.device_info, jax_webgpu.device_info, *calls, *calls]:
        note(call)
    threads = [threading.Thread(target=note, args=[call]) for call in calls * 2]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    with jax_webgpu.configure(callback="pure"):
        note(lambda: f(x))
        note(lambda: jitted(x))

    assert [type(error) for error in raised[:2]] == [jax_webgpu.AdapterError] * 2, raised[:2]
    first, *rest = str(raised[0]).splitlines()
    print(first)
    print(rest[0])
    for error in raised[2:]:
        # A callback's error is a JaxRuntimeError, or a ValueError by JAX's fast path.
        assert isinstance(error, (jax.errors.JaxRuntimeError, ValueError)), repr(error)
        assert str(raised[0]) in str(error), error
    print(len(raised))
"""


@pytest.mark.parametrize("name", MACHINES)
def test_what_needs_no_device_works_and_the_rest_says_why(
    name, machine, run_snippet, record_property
):
    softmax = f"    SOFTMAX = {str(SOFTMAX)!r}"
    done = run_snippet(COMMON + softmax + EVERYTHING, NPROC="16", **machine(name))
    assert done.returncode == 0, done.stderr
    first, second, count = done.stdout.splitlines()
    assert first == MACHINES[name][0]
    assert second.startswith(MACHINES[name][1])
    assert int(count) == 28
    record_property("calls without an adapter", int(count))


@pytest.mark.parametrize("name", ["missing name", "no loader"])
def test_commands_say_it_and_fail(name, machine, run_snippet):
    done = run_snippet(
        f"""
        from jax_webgpu import cli
        split = ["explain", "split", "--x", "4", "--split", "1,3"]
        for line in [["info"], ["check"], ["tune"], ["test", {str(SOFTMAX)!r}], split]:
            assert cli.main(line) == 1, line
        assert cli.main([*split, "--device", "floor"]) == 0
        """,
        **machine(name),
    )
    assert done.returncode == 0, done.stderr
    says = [line for line in done.stderr.splitlines() if line.startswith("python -m jax_webgpu")]
    commands = ["info", "check", "tune", "test", "explain"]
    assert says == [f"python -m jax_webgpu {name_}: {MACHINES[name][0]}" for name_ in commands]
    assert "Traceback" not in done.stderr


LEAVING = {
    "an error that nobody catches": ("jax.block_until_ready(f(x))", 1),
    # JAX may raise at the call, or hold the error until somebody waits.
    "calls that nobody awaits": (
        "for i in range(8):\n"
        "    try: jax.jit(f)(x + i)\n"
        "    except (jax.errors.JaxRuntimeError, ValueError): pass\n"
        "sys.exit(3)",
        3,
    ),
}


@pytest.mark.parametrize("callback", ["pure", "buffer"])
@pytest.mark.parametrize("way", LEAVING)
def test_the_process_ends_as_it_should(way, callback, machine, run_snippet):
    source, status = LEAVING[way]
    lines = "\n".join(f"    {line}" for line in source.splitlines())
    settings = {"JAX_WEBGPU_CALLBACK": callback, "NPROC": "16"}  # docs/crossings.md
    done = run_snippet(COMMON + lines, **machine("no loader"), **settings)
    assert done.returncode == status, done.stderr
    if status == 1:
        assert MACHINES["no loader"][0] in done.stderr


def test_a_name_that_is_missing_and_no_adapter_at_all(machine, run_snippet):
    """The remedies come first: without an adapter no name is right."""
    settings = machine("no loader") | {"JAX_WEBGPU_ADAPTER": "nothing"}
    done = run_snippet("import jax_webgpu; jax_webgpu.device_info()", **settings)
    assert done.returncode == 1
    assert "AdapterError: no WebGPU adapter was found\n  - Linux: install" in done.stderr
