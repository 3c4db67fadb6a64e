"""A small language model learns Python from Python: with operators on WebGPU, and in plain JAX.

A decoder-only transformer reads the source of the standard library, byte by byte. In each layer
`jax_webgpu.split` cuts one projection into queries, keys and values, and
`jax_webgpu.rotary_embedding` turns queries and keys by their positions; `jax.grad` goes through
both, in a `scan` over layers inside a `scan` over steps inside one `jit`. A second model has these
two operators in plain JAX. It starts from the same weights and reads the same text, so both must
learn the same. Run it with `./dev train`, which also plots how the two learned.
"""

import argparse
import functools
import importlib.util
import pathlib
import sysconfig
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import entr

import jax_webgpu


@dataclass(frozen=True)
class Size:
    layers: int
    heads: int
    head_size: int
    tokens: int
    batch: int
    steps: int
    fall: float  # after so many steps the loss must be below this part of the first


DEFAULT = Size(layers=3, heads=3, head_size=32, tokens=128, batch=8, steps=300, fall=0.45)
SMALL = Size(layers=2, heads=2, head_size=32, tokens=64, batch=8, steps=60, fall=0.7)
TOLERANCE = 3e-5  # of any step's loss: rounding gives 2e-6, a gradient 1 % too long 1e-4
RATE, WARM_UP, BETA1, BETA2, EPSILON = 1e-3, 20, 0.9, 0.99, 1e-8  # Adam's
REPORT = 20  # steps from one line of progress to the next

Params = dict[str, Any]
State = tuple[Params, Params, Params]  # weights; Adam's means of the gradient and of its square
Operator = Callable[..., Any]
Train = Callable[[State, jax.Array, jax.Array], tuple[State, jax.Array]]


def make_train(size: Size, split: Operator, rotate: Operator) -> Train:
    """The steps of given numbers, jitted: (state, text, numbers) to (state, losses)."""
    cos, sin = jax_webgpu.rotary_cache(size.tokens, size.head_size)
    positions = jnp.tile(jnp.arange(size.tokens), (size.batch, 1))

    def normed(x: jax.Array) -> jax.Array:
        return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)

    def layer(x: jax.Array, weights: Params) -> tuple[jax.Array, None]:
        q, k, v = split(normed(x) @ weights["qkv"], num_outputs=3, axis=-1)
        q = rotate(q, cos, sin, positions, num_heads=size.heads)
        k = rotate(k, cos, sin, positions, num_heads=size.heads)
        q, k, v = (each.reshape(*x.shape[:2], size.heads, size.head_size) for each in (q, k, v))
        attended = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        x = x + attended.reshape(x.shape) @ weights["out"]
        return x + jax.nn.gelu(normed(x) @ weights["up"]) @ weights["down"], None

    def loss(params: Params, text: jax.Array) -> jax.Array:
        """Nats per byte, each byte predicted from those before it."""
        x, _ = jax.lax.scan(layer, params["embed"][text[:, :-1]], params["layers"])
        scores = jax.nn.log_softmax(normed(x) @ params["predict"])
        return -jnp.take_along_axis(scores, text[:, 1:, None], axis=-1).mean()

    def step(text: jax.Array, state: State, number: jax.Array) -> tuple[State, jax.Array]:
        """A step of Adam, https://arxiv.org/abs/1412.6980, on passages that its number chooses."""
        params, mean, square = state
        key = jax.random.fold_in(jax.random.key(1), number)
        starts = jax.random.randint(key, (size.batch, 1), 0, len(text) - size.tokens)
        passages = text[starts + jnp.arange(size.tokens + 1)].astype(jnp.int32)
        value, gradient = jax.value_and_grad(loss)(params, passages)
        mean = jax.tree.map(lambda m, g: BETA1 * m + (1 - BETA1) * g, mean, gradient)
        square = jax.tree.map(lambda s, g: BETA2 * s + (1 - BETA2) * g * g, square, gradient)
        count = number.astype(jnp.float32) + 1
        rate = RATE * jnp.minimum(count / WARM_UP, 1)

        def moved(param: jax.Array, m: jax.Array, s: jax.Array) -> jax.Array:
            m, s = m / (1 - BETA1**count), s / (1 - BETA2**count)
            return param - rate * m / (jnp.sqrt(s) + EPSILON)

        return (jax.tree.map(moved, params, mean, square), mean, square), value

    def train(state: State, text: jax.Array, numbers: jax.Array) -> tuple[State, jax.Array]:
        return jax.lax.scan(functools.partial(step, text), state, numbers)

    return jax.jit(train)


def rope(
    x: jax.Array, cos: jax.Array, sin: jax.Array, positions: jax.Array, num_heads: int
) -> jax.Array:
    a, b = jnp.split(x.reshape(*x.shape[:2], num_heads, -1), 2, axis=-1)
    c, s = cos[positions][:, :, None], sin[positions][:, :, None]
    return jnp.concatenate([a * c - b * s, b * c + a * s], axis=-1).reshape(x.shape)


def make_state(size: Size) -> State:
    """Random weights, the same at each call, and nothing learned."""
    random = np.random.default_rng(0)

    def matrix(*shape: int) -> jax.Array:
        return jnp.asarray(random.normal(0, (4 * shape[-2]) ** -0.5, shape), jnp.float32)

    width = size.heads * size.head_size
    layers = {
        "qkv": matrix(size.layers, width, 3 * width),
        "out": matrix(size.layers, width, width),
        "up": matrix(size.layers, width, 4 * width),
        "down": matrix(size.layers, 4 * width, width),
    }
    params = {"embed": matrix(256, width), "layers": layers, "predict": matrix(width, 256)}
    zeros = jax.tree.map(jnp.zeros_like, params)
    return params, zeros, zeros


def run(trains: dict[str, Train], state: State, text: jax.Array, steps: int) -> list[np.ndarray]:
    """Trains in turn, some steps at a time, and prints how it goes: the losses of each."""
    states = dict.fromkeys(trains, state)
    seconds = dict.fromkeys(trains, 0.0)
    curves = {name: np.empty(steps) for name in trains}
    print(f"\n step  {'  '.join(f'{name:>9}' for name in trains)}  largest difference")
    for start in range(0, steps, REPORT):
        part = np.arange(start, min(start + REPORT, steps))
        for name, train in trains.items():
            began = time.perf_counter()
            states[name], curves[name][part] = train(states[name], text, jnp.asarray(part))
            seconds[name] += time.perf_counter() - began
        a, b = (curve[part] for curve in curves.values())
        line = f"{part[-1] + 1:5}  {a.mean():9.4f}  {b.mean():9.4f}  {abs(a - b).max():18.1e}"
        print(line, flush=True)
    print(f"\ntime        {', '.join(f'{time:.0f} s {name}' for name, time in seconds.items())}")
    return list(curves.values())


def plot(file: pathlib.Path, webgpu: np.ndarray, plain: np.ndarray, text: jax.Array) -> None:
    from matplotlib.figure import Figure

    pairs = jnp.zeros((256, 256)).at[text[:-1], text[1:]].add(1) / (len(text) - 1)
    entropy = float(entr(pairs).sum() - entr(pairs.sum(axis=1)).sum())
    figure = Figure(figsize=(7, 5.5), layout="constrained")
    above, below = figure.subplots(2, sharex=True, height_ratios=[3, 1])
    above.plot(plain, color="#f5b971", linewidth=5, label="plain JAX")
    above.plot(webgpu, color="#15396b", linewidth=1, label="operators on WebGPU")
    above.axhline(entropy, color="gray", linestyle=":", label="knowing only the byte before")
    above.set(title="A transformer learns to read Python", ylabel="loss (nats per byte)")
    below.semilogy(abs(webgpu - plain), ".", color="#15396b", markersize=3)
    below.axhline(TOLERANCE, color="firebrick", linestyle=":", label="allowed")
    below.set(xlabel="step", ylabel="difference\n(no dot: none)", ylim=(5e-8, 2e-3))
    for axes in (above, below):
        axes.legend(loc="upper right", frameon=False)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=150, format="png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--small", action="store_true", help="a smaller model, for half a minute")
    parser.add_argument("--steps", type=int, help="fewer than usual: any fall of the loss will do")
    parser.add_argument("--plot", type=pathlib.Path, metavar="FILE", help="write a PNG")
    options = parser.parse_args()
    if options.plot and not importlib.util.find_spec("matplotlib"):
        parser.error("--plot needs matplotlib: pip install '.[examples]'")
    # Without this, a GPU may round what enters a product to 10 bits.
    jax.config.update("jax_default_matmul_precision", "highest")

    size = SMALL if options.small else DEFAULT
    steps = options.steps or size.steps
    library = pathlib.Path(sysconfig.get_path("stdlib"))
    source = b"".join(path.read_bytes() for path in sorted(library.glob("*.py")))
    text, state = jnp.asarray(np.frombuffer(source, np.uint8)), make_state(size)
    webgpu = make_train(size, jax_webgpu.split, jax_webgpu.rotary_embedding)
    plain = make_train(size, lambda x, num_outputs, axis: jnp.split(x, num_outputs, axis), rope)
    plans = jax_webgpu.explain(webgpu, state, text, jnp.arange(REPORT))
    print(f"adapter     {jax_webgpu.device_info()}")
    print(f"variants    {', '.join(dict.fromkeys(plan.variant for plan in plans))}")
    print(f"parameters  {sum(leaf.size for leaf in jax.tree.leaves(state[0])):,}")
    print(f"text        {len(text):,} bytes of Python from {library}")
    a, b = run({"WebGPU": webgpu, "plain JAX": plain}, state, text, steps)
    difference, fall = abs(a - b).max(), a[-REPORT:].mean() / a[0]
    print(f"difference  {difference:.1e} at most, of {TOLERANCE:.0e} allowed")
    print(f"loss        falls to {fall:.2f} of what it was, of {size.fall} allowed")
    if options.plot:
        plot(options.plot, a, b, text)
        print(f"plot        {options.plot}")
    assert difference <= TOLERANCE
    assert fall <= (size.fall if steps >= size.steps else 1)


if __name__ == "__main__":
    main()
