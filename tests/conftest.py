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

import hypothesis
import hypothesis.configuration
import jax
import pytest

# Hypothesis draws anew each time, and keeps nothing in the checkout.
hypothesis.settings.register_profile("here", database=None)
hypothesis.settings.load_profile("here")
hypothesis.configuration.set_hypothesis_home_dir(tempfile.gettempdir() + "/jax_webgpu-hypothesis")

os.environ["JAX_WEBGPU_TUNED"] = os.devnull  # what this machine was tuned to is not tested

import jax_webgpu

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_num_cpu_devices", 8)  # for the meshes


def pytest_configure(config):
    # Warnings are errors. This one is given once a process, to users: the report names the adapter.
    config.addinivalue_line("filterwarnings", "ignore::jax_webgpu.SoftwareAdapterWarning")


def pytest_addoption(parser):
    parser.addoption(
        "--each",
        type=int,
        metavar="N",
        help="of each test function at most N of its cases, spread evenly over all of them",
    )


def pytest_collection_modifyitems(config, items):
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


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Where nothing may be skipped, as in CI, a skip is a failure."""
    report = yield
    if report.skipped and os.environ.get("JAX_WEBGPU_NO_SKIP") == "1":
        report.outcome = "failed"
        report.longrepr = f"skipped, and JAX_WEBGPU_NO_SKIP is set: {report.longrepr}"
    return report


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


@pytest.fixture(scope="session")
def patience():
    """A context that fails what takes longer than so many seconds, and ends it."""

    @contextlib.contextmanager
    def within(seconds):
        def stop(signal, frame):
            pytest.fail(f"takes more than {seconds} s")

        handler = signal.signal(signal.SIGALRM, stop)
        timer = signal.setitimer(signal.ITIMER_REAL, seconds)  # pytest-timeout's
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, *timer)
            signal.signal(signal.SIGALRM, handler)

    return within


@pytest.fixture(scope="session")
def run_snippet():
    """Run Python source in a process of its own; a process that hangs is a failure.

    Keyword arguments besides ``timeout``, in seconds, are environment variables.
    """

    def call(source, *, timeout=120, **environment):
        command = [sys.executable, "-X", "faulthandler", "-c", textwrap.dedent(source)]
        try:
            return subprocess.run(
                command,
                env=os.environ | environment,
                capture_output=True,
                text=True,
                timeout=timeout,
            )
        except subprocess.TimeoutExpired as hung:
            pytest.fail(f"hangs after {timeout} s: stdout {hung.stdout}, stderr {hung.stderr}")

    return call
