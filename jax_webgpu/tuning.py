"""`python -m jax_webgpu tune`: the tunables that are fastest on this machine's adapter.

What was found is kept in a small JSON file, by adapter, operator and dtype, and applies to every
later process, where a call does not set the tunable itself. Deleting the file undoes it.
"""

import functools
import json
import os
import statistics
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jax_webgpu import device
from jax_webgpu.errors import CallError
from jax_webgpu.plan import Plan, largest_workgroup
from jax_webgpu.program import alone
from jax_webgpu.resolve import Resolved, Tensor, resolve
from jax_webgpu.runtime import Operator

# What is tried, one tunable after the other, each with the best of those before.
CANDIDATES = {"WORKGROUP_SIZE": (32, 64, 128, 256, 512, 1024), "BYTES_EACH": (16, 32, 64, 128)}

# Another choice than the default must be so much faster: less is noise.
_GAIN = 1.03


def path() -> Path:
    """The file: JAX_WEBGPU_TUNED, or `jax_webgpu/tuned.json` in XDG_CONFIG_HOME or ~/.config."""
    named = os.environ.get("JAX_WEBGPU_TUNED")
    if named:
        return Path(named)
    home = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
    return Path(home).expanduser() / "jax_webgpu" / "tuned.json"


@functools.cache
def load() -> Mapping[str, Any]:
    """What the file holds: adapter, operator, dtype, tunable. Read once a process.

    Raises:
      CallError: it is not such a file; the message names it.
    """
    try:
        data = path().read_bytes()
    except OSError:
        return {}
    if not data.strip():
        return {}
    try:
        found = json.loads(data)
        for operators in found.values():
            for dtypes in operators.values():
                for tunables in dtypes.values():
                    for name, value in tunables.items():
                        if name not in CANDIDATES or type(value) is not int or value < 1:
                            raise ValueError(f"{name} is {value!r}")
    except (ValueError, AttributeError, RecursionError) as error:
        raise CallError(
            f"{path()} is no file of `python -m jax_webgpu tune`: {error}; delete it, or tune again"
        ) from error
    result: Mapping[str, Any] = found
    return result


def found(resolved: Resolved, adapter: str) -> dict[str, int]:
    """The tunables that were found for calls like this one on an adapter of this name."""
    by_dtype = load().get(adapter, {}).get(resolved.spec.name, {})
    return dict(by_dtype.get(resolved.inputs[0][1].dtype, {}))


def save(adapter: str, results: Mapping[str, Mapping[str, Mapping[str, int]]]) -> Path:
    """Writes what was found for an adapter, beside what the file has for others."""
    file = path()
    file.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({**load(), adapter: results}, indent=2)
    new = file.with_suffix(".new")
    new.write_text(text + "\n", encoding="utf-8")
    new.replace(file)
    load.cache_clear()
    return file


@dataclass(frozen=True)
class Trial:
    """One measured choice."""

    operator: str
    dtype: str
    tunables: Mapping[str, int]
    seconds: float
    best: bool
    """Whether it is the fastest so far, by more than noise."""


def trials(operators: Mapping[str, Operator], mebibytes: float) -> Iterator[Trial]:
    """Measures each operator in each of its float dtypes; each last best trial is the result.

    Args:
      operators: by the name of their manifest.
      mebibytes: of the array that is rotated or split.
    """
    gpu = device.get()
    _, largest = largest_workgroup(gpu.capabilities)
    for name, operator in operators.items():
        for dtype in ("float32", "float16") if name == "RotaryEmbedding" else ("uint32",):
            if not gpu.capabilities.f16_ok(dtype):
                continue
            plan = _plan(gpu, operator, name, dtype, {}, mebibytes)
            best, chosen = _seconds(gpu, plan), dict[str, int]()
            yield Trial(name, dtype, {}, best, True)
            for tunable, values in CANDIDATES.items():
                if tunable not in operator.overlaid.tunables:
                    continue
                base = dict(chosen)
                for value in values:
                    if tunable == "WORKGROUP_SIZE" and value > largest:
                        continue
                    tunables = {**base, tunable: value}
                    other = _plan(gpu, operator, name, dtype, tunables, mebibytes)
                    if other.passes == plan.passes:
                        continue  # no part of the variant that the device takes
                    seconds = _seconds(gpu, other)
                    faster = seconds * _GAIN < best
                    if faster:
                        best, chosen, plan = seconds, tunables, other
                    yield Trial(name, dtype, tunables, seconds, faster)


def _seconds(gpu: device.Device, plan: Plan) -> float:
    """The device's own time, or where it has no clock the whole time."""
    inputs = [np.zeros(b.tensor.shape, b.dtype.storage) for b in plan.inputs]
    if "timestamp-query" in gpu.capabilities.features:
        return statistics.median(gpu.measure(alone(plan), inputs, sets=2, runs=10, rounds=5))
    outputs = [np.empty(b.tensor.shape, b.dtype.storage) for b in plan.outputs]
    times = []
    for _ in range(8):
        start = time.perf_counter()
        gpu.run(alone(plan), inputs, outputs)
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def _plan(
    gpu: device.Device,
    operator: Operator,
    name: str,
    dtype: str,
    tunables: Mapping[str, int],
    mebibytes: float,
) -> Plan:
    elements = int(mebibytes * 2**20) // np.dtype(dtype).itemsize
    attributes: dict[str, Any]
    outputs: dict[str, tuple[int, ...]] | None = None
    if name == "RotaryEmbedding":
        tokens = max(1, elements // (32 * 128))
        inputs = {"x": Tensor((1, 32, tokens, 128), dtype)}
        inputs |= {cache: Tensor((1, tokens, 64), dtype) for cache in ("cos", "sin")}
        attributes = {}
    else:
        rows = max(1, elements // 3072)
        inputs = {"input": Tensor((rows, 3072), dtype)}
        attributes, outputs = {"axis": 1}, {f"y{index}": (rows, 1024) for index in range(3)}
    resolved = resolve(
        operator.overlaid, inputs, attributes=attributes, outputs=outputs, tunables=tunables
    )
    return operator.plan(resolved, gpu.capabilities)
