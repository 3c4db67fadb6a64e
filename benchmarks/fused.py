"""What `jax_webgpu.fuse` saves: functions of several operators, fused and not, in turns.

Beside them the least that their results take: a callback that only copies arrays to them. Fresh
memory for large ones, which XLA asks for at each call, can cost more than all the rest.
"""

import random
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.buffer_callback import buffer_callback

import jax_webgpu
from benchmarks import host, subjects
from jax_webgpu import device

WORK = ("dispatches", "bytes in", "bytes out")


@dataclass(frozen=True)
class Function:
    """A function of WebGPU operators, and arrays for it.

    Attributes:
      aim: how many times as fast it is to be when fused; None where nothing is aimed at.
    """

    name: str
    of: Any
    arrays: tuple[Any, ...]
    aim: float | None = None


def functions(small):
    """The front of an attention layer, its gradient, and a chain."""
    tokens, heads = (8, 2) if small else (1024, 32)
    rng = np.random.default_rng(0)
    cos, sin = jax_webgpu.rotary_cache(max_positions=2 * tokens, rotary_dim=128)
    positions = jnp.asarray(rng.permutation(2 * tokens)[None, :tokens], jnp.int32)
    qkv, x = (
        jnp.asarray(rng.standard_normal(shape), jnp.float32)
        for shape in ((1, tokens, 3 * heads * 128), (1, heads, tokens, 128))
    )

    def front(qkv, cos, sin, positions):
        q, k, v = jax_webgpu.split(qkv, num_outputs=3, axis=-1)
        q = jax_webgpu.rotary_embedding(q, cos, sin, positions, num_heads=heads)
        k = jax_webgpu.rotary_embedding(k, cos, sin, positions, num_heads=heads)
        return q, k, v

    def chain(x, cos, sin, positions):
        for _ in range(10):
            x = jax_webgpu.rotary_embedding(x, cos, sin, positions)
        return x

    def pulled_back(qkv, cotangents, cos, sin, positions):
        return jax.vjp(lambda qkv: front(qkv, cos, sin, positions), qkv)[1](cotangents)

    parts = tuple(jnp.split(qkv[..., ::-1], 3, axis=-1))
    rest = (cos, sin, positions)
    return (
        Function("front", front, (qkv, *rest), aim=1.5),
        Function("front's gradient", pulled_back, (qkv, parts, *rest)),
        Function("ten rotations", chain, (x, *rest)),
    )


def run(small, repetitions, say):
    """Measures; returns the report, of JSON's types."""
    report = {"mode": "fuse", "machine": host.machine(), "functions": []}
    for function in functions(small):
        say(f"{function.name}: preparing")
        ways = {"fused": jax_webgpu.fuse(function.of), "alone": function.of}
        calls = {way: _compiled(f, function.arrays) for way, f in ways.items()}
        fused, alone = (jax.tree.leaves(calls[way].run()) for way in ways)
        for each, other in zip(fused, alone, strict=True):
            np.testing.assert_array_equal(np.asarray(each), np.asarray(other))
        found = {"name": function.name, "aim": function.aim}
        found["work"] = {way: _work(call.run) for way, call in calls.items()}
        plans = jax_webgpu.explain(ways["fused"], *function.arrays)
        found["groups"] = len(plans.groups)
        calls["results"] = _results_alone([np.asarray(each) for each in fused])
        seconds, order = defaultdict(list), list(calls)
        chance = random.Random(0)
        for _ in range(repetitions):
            chance.shuffle(order)
            for way in order:
                seconds[way].append(calls[way].turn())
        found["seconds"] = {way: host.summary(seconds[way]) for way in calls}
        report["functions"].append(found)
        say(f"{line(found)}\n")
    return report


def _compiled(f, arrays):
    compiled = jax.jit(f).lower(*arrays).compile()
    return subjects.local(lambda: jax.block_until_ready(compiled(*arrays)))


def _results_alone(arrays):
    def copy(context, outputs, *_):
        for output, array in zip(outputs, arrays, strict=True):
            np.copyto(np.asarray(output), array)

    structs = [jax.ShapeDtypeStruct(each.shape, each.dtype) for each in arrays]
    return _compiled(lambda some: buffer_callback(copy, structs)(some), (np.float32(0),))


def _work(run):
    """What a second call does, by the counters."""
    counters = device.get().counters
    before = counters.copy()
    run()
    return {name: counters[name] - before[name] for name in WORK}


def ratio(found):
    """How many times as fast it is."""
    return found["seconds"]["alone"]["median"] / found["seconds"]["fused"]["median"]


def line(found):
    """A function as one line for people."""
    fused, alone, results = (
        found["seconds"][way]["median"] * 1e3 for way in ("fused", "alone", "results")
    )
    crossed = [(work["bytes in"] + work["bytes out"]) / 2**20 for work in found["work"].values()]
    return (
        f"{found['name']:17} {fused:#7.3g} ms fused, {alone:#7.3g} alone: {ratio(found):.2f}×;  "
        f"the results' memory {results:#.3g};  {crossed[0]:.1f} MiB cross, {crossed[1]:.1f} alone"
    )
