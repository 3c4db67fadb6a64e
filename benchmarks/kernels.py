"""Device time of every kind of kernel against a coalesced copy of as many bytes, by timestamps.

    python benchmarks/kernels.py [--mib 256] [--json FILE] [FILTER]

Bytes are what the call has to touch: x, y, positions and the cache rows that are named, each once.
The copy moves the same sum, in the same run. The share is the copy's time over the kernel's.
"""

import argparse
import json
import statistics
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jax_webgpu import device, spec
from jax_webgpu.ops import rotary_embedding, split
from jax_webgpu.plan import Plan, make
from jax_webgpu.program import alone
from jax_webgpu.resolve import Resolved, Tensor, resolve

TUNABLES: dict[str, int] = {}
COPY = spec.load(Path(__file__).parent / "copy" / "manifest.json")


@dataclass(frozen=True)
class Case:
    name: str
    plan: Plan
    arrays: list[np.ndarray]
    traffic: int


def rotary(gpu, mib, dtype, heads, size, *, rotary_dim=0, interleaved=0, positions=True, rank=4):
    """A call whose x and y together are about `mib` MiB."""
    item = np.dtype(dtype).itemsize
    tokens = 2048
    batch = max(1, round(mib * 2**20 / 2 / item / (heads * tokens * size)))
    half = (rotary_dim or size) // 2
    rng = np.random.default_rng(0)
    shape = (batch, heads, tokens, size) if rank == 4 else (batch, tokens, heads * size)
    table = (tokens, half) if positions else (batch, tokens, half)
    inputs = {"x": Tensor(shape, dtype), "cos": Tensor(table, dtype), "sin": Tensor(table, dtype)}
    ids = np.stack([rng.permutation(tokens) for _ in range(batch)]).astype(np.uint32)
    if positions:
        inputs["positionIds"] = Tensor(ids.shape, "int64")
    attributes = {"interleaved": interleaved, "rotary_embedding_dim": rotary_dim}
    if rank == 3:
        attributes["num_heads"] = heads
    operator = rotary_embedding.Rules.operator
    resolved = resolve(operator.overlaid, inputs, attributes=attributes, tunables=TUNABLES)
    plan = operator.plan(resolved, gpu.capabilities)
    arrays = [np.ones(shape, dtype), *(np.ones(table, dtype) for _ in "cs")]
    traffic = 2 * arrays[0].nbytes + 2 * arrays[1].nbytes
    if positions:
        arrays.append(ids)
        traffic += ids.nbytes
    form = "interleaved" if interleaved else "halves"
    part = f" of {size}" if rotary_dim else ""
    name = f"rotary {dtype} {form} {rotary_dim or size}{part} rank {rank} {plan.variant}"
    return Case(name, plan, arrays, traffic)


def parts(gpu, mib, dtype, columns):
    item = 4 if dtype in ("int16", "uint8") else np.dtype(dtype).itemsize
    rows = round(mib * 2**20 / 2 / item / sum(columns))
    operator = split.Rules.operator
    resolved = resolve(
        operator.overlaid,
        {"input": Tensor((rows, sum(columns)), dtype)},
        attributes={"axis": 1},
        outputs={f"y{index}": (rows, width) for index, width in enumerate(columns)},
        tunables=TUNABLES,
    )
    plan = operator.plan(resolved, gpu.capabilities)
    x = np.ones((rows, sum(columns)), plan.inputs[0].dtype.storage)
    return Case(f"split {dtype} {columns} {plan.variant}", plan, [x], 2 * x.nbytes)


def cases(gpu, mib):
    for dtype in ("float32", "float16"):
        for interleaved in (0, 1):
            yield rotary(gpu, mib, dtype, 32, 128, interleaved=interleaved)
            yield rotary(gpu, mib, dtype, 32, 64, interleaved=interleaved, positions=False, rank=3)
            yield rotary(gpu, mib, dtype, 32, 128, rotary_dim=32, interleaved=interleaved)
            yield rotary(gpu, mib, dtype, 32, 6, interleaved=interleaved)
            yield rotary(gpu, mib, dtype, 32, 100, interleaved=interleaved, rank=3)
            yield rotary(gpu, mib, dtype, 32, 80, rotary_dim=20, interleaved=interleaved)
        yield rotary(gpu, mib, dtype, 32, 20)
        yield rotary(gpu, mib, dtype, 32, 100, positions=False)
    yield parts(gpu, mib, "uint32", [4096])
    yield parts(gpu, mib, "uint32", [1024, 1024])
    yield parts(gpu, mib, "uint32", [2048, 512, 512])
    yield parts(gpu, mib, "uint32", [256, 512, 768, 512])
    yield parts(gpu, mib, "uint32", [1023, 1022, 1027])
    yield parts(gpu, mib, "uint32", [255, 514])
    yield parts(gpu, mib, "uint32", [255, 514, 77, 99])
    yield parts(gpu, mib, "uint32", [256, 512, 768, 1024, 512])
    yield parts(gpu, mib, "uint32", [255, 511, 769, 1024, 513])
    yield parts(gpu, mib, "uint8", [7, 5])
    yield parts(gpu, mib, "int16", [1023, 1022, 1027])


def copy_of(gpu, traffic) -> Resolved:
    words = traffic // 8 // 4 * 4
    return make(resolve(COPY, {"src": Tensor((words,), "uint32")}), gpu.capabilities)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("filter", nargs="?", default="", help="only cases whose name has this")
    parser.add_argument("--mib", type=float, default=256, help="of traffic a case")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--tunable", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--json", type=Path, help="also write the figures there")
    options = parser.parse_args()
    gpu = device.get()
    settings = dict(pair.split("=") for pair in options.tunable)
    TUNABLES.update({name: int(value) for name, value in settings.items()})
    print(f"{gpu.info}, {options.mib:.0f} MiB of traffic a case")
    figures = []
    for case in cases(gpu, options.mib):
        if options.filter not in case.name:
            continue
        copy = copy_of(gpu, case.traffic)
        words = np.ones(copy.inputs[0].tensor.shape, np.uint32)
        how = {"sets": 2, "runs": options.runs, "rounds": options.rounds}
        # The two take turns, so that a change of clocks meets both.
        kernel, limit = [], []
        for _ in range(2):
            limit += gpu.measure(alone(copy), [words], **how)
            kernel += gpu.measure(alone(case.plan), case.arrays, **how)
        seconds = statistics.median(kernel)
        best = statistics.median(limit)
        figures.append({"case": case.name, "seconds": seconds, "copy": best, "bytes": case.traffic})
        rate = case.traffic / seconds / 1e9
        print(f"{best / seconds:5.2f} of the copy  {rate:7.0f} GB/s  {case.name}", flush=True)
    if options.json:
        options.json.write_text(
            json.dumps({"adapter": str(gpu.info), "figures": figures}, indent=1)
        )


if __name__ == "__main__":
    main()
