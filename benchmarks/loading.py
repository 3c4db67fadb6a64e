"""How long manifests take to load, and calls to plan: no device takes part.

The folders are a synthetic one, as large as published ones are, and the project's own. Each figure
is the best of many runs, because anything else that the machine does can only add to it.
"""

import tempfile
import time
from pathlib import Path

from benchmarks import host, synthetic
from jax_webgpu import capabilities, plan, resources, spec
from jax_webgpu.resolve import Tensor, resolve

DEVICE = capabilities.PRESETS["h200"]
KIB = 1024


def folders(synthetic_folder):
    """Name, manifest and templates' folder of each."""
    yield "synthetic", synthetic.write(synthetic_folder), synthetic_folder
    for name in ("RotaryEmbedding", "Split"):
        yield name, resources.specs() / f"ai.onnx.{name}.json", resources.shaders()


def calls(large):
    """Calls of the synthetic folder: one pass, one with a bias, and one of hundreds of passes."""
    a, b = Tensor((2, 512, 256), "float32"), Tensor((256, 512), "float32")
    yield "a product", resolve(large, {"a": a, "b": b})
    bias = Tensor((512,), "float32")
    yield "with a bias", resolve(large, {"a": a, "b": b, "bias": bias})
    steps = {"a": Tensor((synthetic.STEPS, 300), "float32"), "b": Tensor((1, 1), "float32")}
    yield f"{synthetic.STEPS} passes", resolve(large, steps, attributes={"recurrent": 1})


def run(repetitions, say):
    """Measures; returns the report, of JSON's types."""
    found = {"mode": "load", "machine": host.machine(), "loads": [], "plans": []}
    with tempfile.TemporaryDirectory() as folder:
        for name, manifest, shaders in folders(Path(folder)):
            first = best(lambda: (spec.forget(), spec.load(manifest, shaders)), repetitions)  # noqa: B023
            again = best(lambda: spec.load(manifest, shaders), repetitions)  # noqa: B023
            loaded = spec.load(manifest, shaders)
            texts = (each.source for each in loaded.templates.values())
            size = manifest.stat().st_size + sum(len(text.encode()) for text in texts)
            figure = {"name": name, "bytes": size, "first": first, "again": again}
            found["loads"].append(figure)
            say(f"{line(figure)}\n")
        large = spec.load(Path(folder) / "manifest.json")
        for name, call in calls(large):
            made = plan.make(call, DEVICE)
            seconds = best(lambda: plan.anew(call, DEVICE), 10 * repetitions)  # noqa: B023
            figure = {"name": name, "variant": made.variant, "seconds": seconds}
            figure |= {"passes": len(made.passes), "wgsl": len(made.passes[0].wgsl)}
            found["plans"].append(figure)
            say(f"{line(figure)}\n")
    return found


def best(function, repetitions):
    """The shortest of so many runs, in seconds."""
    times = []
    for _ in range(repetitions):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return min(times)


def per_kib(figure):
    """Seconds a KiB of manifest and templates, of a first load."""
    return figure["first"] / (figure["bytes"] / KIB)


def line(figure):
    """A figure as one line for people."""
    if "first" in figure:
        return (
            f"load {figure['name']:16} {figure['bytes'] / KIB:6.1f} KiB: "
            f"{figure['first'] * 1e3:7.2f} ms, {per_kib(figure) * 1e3:.2f} ms a KiB; "
            f"again {figure['again'] * 1e3:.2f} ms"
        )
    passes = f"{figure['passes']} × " if figure["passes"] > 1 else ""
    return (
        f"plan {figure['name']:16} {figure['variant']}: {figure['seconds'] * 1e3:.2f} ms "
        f"({passes}{figure['wgsl']:,} characters of WGSL)"
    )
