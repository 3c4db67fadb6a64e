"""What every test shares: strict dtypes, the adapter in the report, and eager against jitted."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import warnings
from collections import defaultdict
from itertools import chain
from types import SimpleNamespace

import hypothesis
import hypothesis.configuration
import jax
import promises
import pytest

os.environ["JAX_WEBGPU_TUNED"] = os.devnull  # what this machine was tuned to is not tested

import jax_webgpu
from jax_webgpu import device, driver

# Hypothesis draws anew each time, and keeps nothing in the checkout.
hypothesis.settings.register_profile("here", database=None)
hypothesis.settings.load_profile("here")
hypothesis.configuration.set_hypothesis_home_dir(tempfile.gettempdir() + "/jax_webgpu-hypothesis")
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_num_cpu_devices", 8)  # for the meshes


def pytest_configure(config):
    # XLA takes half of the time, and compiles much of the same for many tests. A worker has a cache
    # of its own: they are written to without a lock.
    worker = os.environ.get("PYTEST_XDIST_WORKER", "main")
    cache = config.rootpath / "build" / "xla-cache" / f"{jax.__version__}-{worker}"
    jax.config.update("jax_compilation_cache_dir", str(cache))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    # Warnings are errors. These are given once a process, to users: the report names the adapter.
    for name in ("SoftwareAdapterWarning", "DeadlockWarning"):
        config.addinivalue_line("filterwarnings", f"ignore::jax_webgpu.{name}")
    config.addinivalue_line(
        "markers",
        "halves: of kernels that compute in float16; where the adapter has no shader-f16 there is "
        "nothing to test, and it is deselected (tests/test_masks.py tests what is refused)",
    )
    config.addinivalue_line(
        "markers",
        "software: of Mesa's software driver, whatever adapter the others use; where that is "
        "hardware it is deselected, since such a machine need not have the driver",
    )
    if os.environ.get("JAX_WEBGPU_RECORD"):
        promises.where()  # before any test changes what there is


def pytest_addoption(parser):
    parser.addoption(
        "--each",
        type=int,
        metavar="N",
        help="of each test function at most N of its cases, spread evenly over all of them",
    )


@pytest.hookimpl(trylast=True)  # of what -k leaves
def pytest_collection_modifyitems(config, items):
    marked = {item: [name for name in NEEDED if item.get_closest_marker(name)] for item in items}
    there = {name: NEEDED[name]() for name in {*chain.from_iterable(marked.values())}}
    absent = [item for item in items if not all(there[name] for name in marked[item])]
    if absent:
        config.hook.pytest_deselected(items=absent)
        items[:] = [item for item in items if item not in absent]
    most = config.getoption("each")
    if most is None:
        return
    cases = defaultdict(list)
    for item in items:
        cases[item.nodeid.partition("[")[0]].append(item)
    kept = set()
    for own in cases.values():
        count = min(most, len(own))
        kept.update(own[at * len(own) // count] for at in range(count))
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]


def adapter():
    """None where there is none: what needs one fails by itself."""
    with contextlib.suppress(jax_webgpu.AdapterError), warnings.catch_warnings(action="ignore"):
        return jax_webgpu.device_info()


def has_halves():
    found = adapter()
    return found is None or found.capabilities.has("shader-f16")


def is_software():
    found = adapter()
    return found is None or found.kind == "CPU"


# By marker, whether there is what such tests need.
NEEDED = {"halves": has_halves, "software": is_software}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Where nothing may be skipped, as in CI, a skip is a failure."""
    report = yield
    if report.skipped and os.environ.get("JAX_WEBGPU_NO_SKIP") == "1":
        report.outcome = "failed"
        report.longrepr = f"skipped, and JAX_WEBGPU_NO_SKIP is set: {report.longrepr}"
    if report.when == "call" or not report.passed:
        for promise in item.iter_markers("promise"):
            _record(*promise.args, report)
    return report


def _record(promise, report):
    """Writes what `promises.update` reads."""
    if promise not in promises.PROMISES:
        raise pytest.UsageError(f"{report.nodeid} holds an unknown promise: {promise}")
    promises.record(promise, report.nodeid, report.outcome, dict(report.user_properties))


def pytest_report_header():
    try:
        with warnings.catch_warnings(action="ignore"):
            adapter = str(jax_webgpu.device_info())
    except RuntimeError as error:  # the tests of specs and plans need no adapter
        adapter = f"none: {error}"
    return f"jax {jax.__version__}, WebGPU adapter: {adapter}"


@pytest.fixture(scope="session", params=["eager", "jitted"])
def run(request):
    """Call ``f(*args)``, once as it is and once under ``jax.jit``."""

    def call(f, *args):
        return (jax.jit(f) if request.param == "jitted" else f)(*args)

    return call


ON_CORES = """
import os
if hasattr(os, "sched_setaffinity"):
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:{cores}])
"""


@pytest.fixture(scope="session")
def patience():
    """A context that fails, and ends, what takes more than so many seconds.

    Of the processor's time, so that it does not matter what else a machine does; what waits for
    something that does not come is given a minute.
    """

    @contextlib.contextmanager
    def within(seconds):
        def stop(number, frame):
            pytest.fail(f"takes more than {seconds} s of the processor's time, or waits")

        timers = ((signal.SIGPROF, signal.ITIMER_PROF, seconds),
                  (signal.SIGALRM, signal.ITIMER_REAL, 60))  # fmt: skip
        before = [
            (number, signal.signal(number, stop), timer, signal.setitimer(timer, limit))
            for number, timer, limit in timers
        ]
        try:
            yield
        finally:
            for number, handler, timer, setting in before:
                signal.setitimer(timer, *setting)  # pytest-timeout's
                signal.signal(number, handler)

    return within


@pytest.fixture(scope="session")
def run_snippet():
    """Run Python source in a process of its own; one that hangs tells where its threads are.

    Keyword arguments besides ``timeout``, in seconds, and ``cores``, how many it may use, are
    environment variables.
    """

    def call(source, *, timeout=240, cores=None, **environment):
        source = textwrap.dedent(source)
        if cores is not None:
            source = ON_CORES.format(cores=cores) + source
        command = [sys.executable, "-X", "faulthandler", "-c", source]
        process = subprocess.Popen(
            command,
            env=os.environ | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            stdout, stderr = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGABRT)  # on which it writes the stacks
            try:
                stdout, stderr = process.communicate(timeout=20)
            except subprocess.TimeoutExpired as hung:  # a child of it holds the pipes
                process.kill()
                stdout, stderr = hung.stdout, hung.stderr
            pytest.fail(f"hangs after {timeout} s: stdout {stdout}, stderr {stderr}")
        return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)

    return call


@pytest.fixture
def fresh(monkeypatch):
    """Makes a device with caches of its own, bounded as given."""
    import wgpu

    def call(**bounds):
        for name, value in bounds.items():
            monkeypatch.setattr(device if hasattr(device, name) else driver, name, value)
        info = jax_webgpu.device_info()
        return device.Device(wgpu.gpu.enumerate_adapters_sync()[info.index], info)

    return call


MADE = [
    "create_bind_group_layout",
    "create_buffer",
    "create_buffer_with_data",
    "create_compute_pipeline",
    "create_pipeline_layout",
    "create_shader_module",
]


@pytest.fixture
def spied(monkeypatch):
    """What wgpu makes and destroys from now on: bind groups by the sizes of what they bind, and
    among the buffers those of the pool.
    """
    import wgpu

    seen = SimpleNamespace(made=[], buffers=[], destroyed=[], bound=[])

    def spy(kind, name, note):
        original = getattr(kind, name)

        def spying(self, *args, **kwargs):
            result = original(self, *args, **kwargs)
            note(self, result, kwargs)
            return result

        monkeypatch.setattr(kind, name, spying)

    gpu = device.get()._device
    for name in MADE:
        spy(type(gpu), name, lambda self, result, kwargs, name=name: seen.made.append(name))

    def pooled(self, buffer, kwargs):
        if kwargs.get("label") == "jax_webgpu":
            seen.buffers.append(buffer)

    spy(type(gpu), "create_buffer", pooled)
    spy(
        type(gpu),
        "create_bind_group",
        lambda self, result, kwargs: seen.bound.extend(
            entry["resource"]["size"] for entry in kwargs["entries"]
        ),
    )
    probe = gpu.create_buffer(size=4, usage=wgpu.BufferUsage.COPY_DST)
    seen.buffer_type = type(probe)
    spy(seen.buffer_type, "destroy", lambda self, result, kwargs: seen.destroyed.append(self))
    for noted in (seen.made, seen.buffers):
        noted.clear()
    return seen
