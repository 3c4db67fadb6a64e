"""The device's own time of kernels, by timestamps, against a coalesced copy of as many bytes.

Bytes are what a call has to touch: x, y, positions and the cache rows that are named, each once.
The copy moves the same sum, and the two take turns. The share is the copy's time over the
kernel's. Where JAX has a GPU too, XLA's jitted version of a rotation is timed there.
"""

import math
import statistics
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import jax_webgpu
from benchmarks import host, subjects
from benchmarks.onnx_session import Unable
from jax_webgpu import device, runtime, spec
from jax_webgpu.plan import make
from jax_webgpu.program import alone
from jax_webgpu.resolve import Tensor, resolve

COPY = spec.load(Path(__file__).parent / "copy" / "manifest.json")

TURNS, ROUNDS = 2, 3  # a case's turns beside the copy, and the submissions of each
WARM = 0.3  # seconds before each: an idle device has low clocks
XLA_CALLS = 16


def run(cases, mib, runs, say):
    """Measures each case at about `mib` MiB of traffic; returns the report, of JSON's types."""
    gpu = device.get()
    runs = runs or (4 if gpu.info.kind == "CPU" else 200)
    report = {"mode": "kernels", "machine": host.machine(), "mib": mib, "runs": runs, "cases": []}
    for index, case in enumerate(cases, start=1):
        case = case.scaled(mib)
        say(f"{case.name}: preparing")
        found = {"name": case.name, "rotary": case.rotary, "bytes": case.touched}
        report["cases"].append(found)
        try:
            found |= _measure(gpu, case, mib, runs)
        except (Unable, jax_webgpu.DeviceError) as why:
            found["left out"] = str(why).splitlines()[0]
        say(f"[{index:2}/{len(cases)}] {line(found)}\n")
    return report


def line(found):
    """A case as one line for people."""
    if "left out" in found:
        return f"left out: {found['name']}: {found['left out']}"
    seconds = found["seconds"]["median"]
    text = f"{share(found):5.2f} of the copy  {found['bytes'] / seconds / 1e9:#7.3g} GB/s"
    if "xla" in found:
        text += f"  {found['xla'] / seconds:5.2f}× as fast as XLA"
    text += f"  {found['name']}  {found['variant']}"
    return text + f"  (in ×{found['widened']:.0f} the bytes)" * (found["widened"] > 1)


def share(found):
    """The copy's time over the kernel's."""
    return found["copy"]["median"] / found["seconds"]["median"]


def _measure(gpu, case, mib, runs):
    case.check(subjects.jitted(None, case).results())
    plan = _plan(case)
    with jax_webgpu.configure(overlays=False, tunables=None):  # some are the overlay's
        published = _plan(case)
    arrays = [
        runtime.to_storage(_as_bound(array, buffer.tensor), buffer)
        for array, buffer in zip(case.inputs, plan.inputs, strict=False)
    ]
    words = case.touched // 8 // 4 * 4
    copy = make(resolve(COPY, {"src": Tensor((words,), "uint32")}), gpu.capabilities)
    source = np.ones(words, np.uint32)
    # Together larger than any cache.
    how = {"sets": min(16, max(2, round(512 / mib))), "runs": runs, "rounds": ROUNDS, "warm": WARM}
    kernel, limit = [], []
    for _ in range(TURNS):
        limit += gpu.measure(alone(copy), [source], **how)
        kernel += gpu.measure(alone(plan), arrays, **how)
    found = {
        "variant": plan.variant,
        "published": published.variant,
        # A dtype that the device lacks, or WGSL, crosses and is moved as a wider one.
        "widened": arrays[0].nbytes / case.inputs[0].nbytes,
        "seconds": host.summary(kernel),
        "copy": host.summary(limit),
    }
    accelerators = [each for each in jax.devices() if each.platform != "cpu"]
    if case.rotary and accelerators:
        found["xla"] = _xla(case, accelerators[0])
    return found


def _plan(case):
    structs = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in case.inputs]
    plans = jax_webgpu.explain(case.function, *structs)
    if len(plans) != 1:
        raise Unable(f"it takes {len(plans)} dispatches")
    return plans[0]


def _as_bound(array, tensor):
    """An array as the plan has it, where it may be of other words, or of fewer rows."""
    size, dtype = math.prod(tensor.shape), np.dtype(tensor.dtype)
    if array.nbytes == size * dtype.itemsize:
        return np.ascontiguousarray(array).reshape(-1).view(dtype).reshape(tensor.shape)
    if array.size == size:
        return array.reshape(tensor.shape)
    return np.zeros(tensor.shape, dtype)


def _xla(case, on):
    """XLA's own time for a call, in seconds: what more calls add to a program of one.

    Each call has arrays of its own, so that XLA cannot share work among them.
    """
    given = jax.device_put(case.inputs, on)
    sets = [[jnp.array(array, copy=True) for array in given] for _ in range(1 + XLA_CALLS)]
    rotate = subjects.plain(case)
    program = jax.jit(lambda sets: [rotate(*each) for each in sets])
    one, many = (program.lower(part).compile() for part in (sets[:1], sets))
    (y,) = one(sets[:1])[0]
    case.check([np.asarray(y)])
    del y

    def seconds(compiled, part):
        start = time.perf_counter()
        jax.block_until_ready(compiled(part))
        return time.perf_counter() - start

    seconds(many, sets)
    added = [seconds(many, sets) - seconds(one, sets[:1]) for _ in range(9)]
    return statistics.median(added) / XLA_CALLS


if __name__ == "__main__":
    from benchmarks.__main__ import main

    sys.exit(main(["--kernels", *sys.argv[1:]]))
