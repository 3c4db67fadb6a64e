"""ONNX Runtime as a subject: in this process, and as a worker that another process asks.

    PYTHON benchmarks/onnx_session.py

is that worker, in an environment of its own: the two builds of ONNX Runtime cannot share one. It
needs NumPy and ONNX Runtime alone. Requests and answers are pickles on standard input and output.
"""

import contextlib
import functools
import os
import pickle
import statistics
import subprocess
import sys
import time

import numpy as np

# Seconds of a turn.
SETTLE, WARM, TIMED = 0.003, 0.005, 0.002


class Unable(Exception):
    """A subject cannot run, or cannot run a case; the message is a sentence that says why."""


def turn(run):
    """The seconds of a call, the median of some where they are short.

    What ran before leaves cold caches and threads that spin. Neither may meet the calls that are
    timed: it waits, then makes calls that are not.
    """
    time.sleep(SETTLE)
    _calls(run, WARM)
    return statistics.median(_calls(run, TIMED))


def _calls(run, seconds):
    """What calls take, one after the other, for so many seconds; at least one."""
    taken = []
    while sum(taken) < seconds:
        start = time.perf_counter()
        run()
        taken.append(time.perf_counter() - start)
    return taken


class Session:
    """One model on one provider.

    Args:
      model: its bytes.
      feeds: the inputs by name.
      outputs: name, shape and dtype of each output.
      provider: `cpu`; `plugin`, the WebGPU provider that is loaded as a library; or `build`, the
        one of a build of its own.
    """

    def __init__(self, model, feeds, outputs, provider):
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        providers = ["CPUExecutionProvider"]
        if provider != "cpu":
            # A node that WebGPU does not take would run on the CPU in silence.
            options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
            providers = ["WebGpuExecutionProvider"]
        if provider == "plugin":
            options.add_provider_for_devices([_plugin_device()], {})
            providers = None
        try:
            self._session = onnxruntime.InferenceSession(model, options, providers)
        except Exception as error:
            raise Unable(_sentence(error)) from None
        used = self._session.get_providers()[0]
        wanted = "CPUExecutionProvider" if provider == "cpu" else "WebGpuExecutionProvider"
        if used != wanted:
            raise Unable(f"ONNX Runtime took {used} instead")
        self._feeds = feeds
        self._outputs = [np.empty(shape, dtype) for _, shape, dtype in outputs]
        self._binding = self._session.io_binding()
        for (name, *_), array in zip(outputs, self._outputs, strict=True):
            value = onnxruntime.OrtValue.ortvalue_from_numpy(array)
            assert value.data_ptr() == array.ctypes.data  # it shares the memory
            self._binding.bind_ortvalue_output(name, value)

    def run(self):
        """The results, in arrays that ONNX Runtime makes."""
        return self._session.run(None, self._feeds)

    def run_bound(self):
        """The results through IO binding, in arrays that are kept.

        Inputs are bound at each call, since binding is what uploads them.
        """
        for name, array in self._feeds.items():
            self._binding.bind_cpu_input(name, array)
        self._session.run_with_iobinding(self._binding)
        return self._outputs


@functools.cache
def _plugin_device():
    import onnxruntime

    try:
        import onnxruntime_ep_webgpu as plugin
    except ImportError as error:
        raise Unable(f"the WebGPU plugin of ONNX Runtime is not installed: {error}") from None
    os.environ.setdefault("ORT_WEBGPU_EP_ALLOW_SOFTWARE_ADAPTER", "1")
    onnxruntime.set_default_logger_severity(4)
    onnxruntime.register_execution_provider_library("webgpu", plugin.get_library_path())
    for device in onnxruntime.get_ep_devices():
        if device.ep_name == plugin.get_ep_name():
            return device
    raise Unable("the WebGPU plugin of ONNX Runtime finds no adapter")


def _sentence(error):
    """The part of one of ONNX Runtime's long messages that says what is wrong."""
    text = str(error).splitlines()[0]
    # The second is said where an operator of no kernel was replaced by others.
    signs = ("fallback to CPU EP has been explicitly disabled", "IsNodeCompatibleWithProvider")
    if any(sign in text for sign in signs):
        return "ONNX Runtime's WebGPU provider does not take it"
    return text.rpartition(" : ")[2][:200]


class Worker:
    """The other process. Used by one caller at a time."""

    def __init__(self, python):
        self._process = subprocess.Popen(
            [python, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )

    def ask(self, method, *arguments):
        """The result of a method of `_Served`; raises `Unable` as it does."""
        try:
            _send((method, arguments), self._process.stdin)
            failed, answer = pickle.loads(pickle.load(self._process.stdout))
        except (OSError, EOFError):
            raise Unable("the process of ONNX Runtime's WebGPU build has died") from None
        if failed:
            raise Unable(answer)
        return answer

    def close(self):
        """Ends the process, which may have died."""
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait(timeout=20)


def _send(message, to):
    """Pickled twice: what cannot be unpickled is then still read to its end."""
    pickle.dump(pickle.dumps(message), to)
    to.flush()


class _Served:
    """What a worker does."""

    def __init__(self):
        self._session = None

    def version(self):
        import onnxruntime

        return onnxruntime.__version__

    def load(self, *arguments):
        self._session = Session(*arguments)

    def results(self, how):
        return getattr(self._session, how)()

    def turn(self, how):
        return turn(getattr(self._session, how))

    def forget(self):
        self._session = None


def _serve():
    requests = sys.stdin.buffer
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print is no answer
    served = _Served()
    while True:
        try:
            request = pickle.load(requests)
        except EOFError:
            return
        try:
            method, arguments = pickle.loads(request)
            answer = False, getattr(served, method)(*arguments)
        except Exception as error:
            answer = True, str(error)
        _send(answer, answers)


if __name__ == "__main__":
    _serve()
