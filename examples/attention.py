"""An attention layer of a real model's size, in one `jax.jit`, with two operators on WebGPU.

Causal self-attention, 2,048 wide: 32 query heads of 64 that share 8 key and value heads, over the
first 512 bytes of a text that every Python brings along. `jax_webgpu.split` cuts the projection
into queries, keys and values, and `jax_webgpu.rotary_embedding` turns queries and keys by their
positions. All else is plain JAX, and so is a second copy of the layer that the first must agree
with. Run it with `./dev demo`.
"""

import os
import pathlib
import statistics
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

import jax_webgpu

HEADS, KV_HEADS, HEAD_SIZE = 32, 8, 64
WIDTH, KV_WIDTH = HEADS * HEAD_SIZE, KV_HEADS * HEAD_SIZE
TOKENS = 512
ROPE_BASE = 500_000.0
TOLERANCE = 1e-5

Layer = Callable[[dict[str, jax.Array], jax.Array], jax.Array]


def make_layer(
    split: Callable[[jax.Array, list[int]], Sequence[jax.Array]],
    rotate: Callable[[jax.Array, jax.Array, jax.Array, jax.Array, int], jax.Array],
) -> Layer:
    """The layer, jitted, made from the two operators."""

    def layer(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        positions = jnp.arange(TOKENS, dtype=jnp.int32)[None]
        q, k, v = split(x @ params["qkv"], [WIDTH, KV_WIDTH, KV_WIDTH])
        q = rotate(q, params["cos"], params["sin"], positions, HEADS)
        k = rotate(k, params["cos"], params["sin"], positions, KV_HEADS)

        # b: batch, s and t: positions, g: key and value heads, r: query heads for each, d: size.
        q = q.reshape(1, TOKENS, KV_HEADS, HEADS // KV_HEADS, HEAD_SIZE)
        k = k.reshape(1, TOKENS, KV_HEADS, HEAD_SIZE)
        v = v.reshape(1, TOKENS, KV_HEADS, HEAD_SIZE)
        scores = jnp.einsum("bsgrd,btgd->bgrst", q, k) / HEAD_SIZE**0.5
        causal = jnp.tril(jnp.ones((TOKENS, TOKENS), bool))
        weights = jax.nn.softmax(jnp.where(causal, scores, -jnp.inf))
        attended = jnp.einsum("bgrst,btgd->bsgrd", weights, v)
        return attended.reshape(1, TOKENS, WIDTH) @ params["out"]

    return jax.jit(layer)


# The two operators on WebGPU ...


def webgpu_split(x: jax.Array, sizes: list[int]) -> Sequence[jax.Array]:
    return jax_webgpu.split(x, sizes, axis=-1)


def webgpu_rotate(
    x: jax.Array, cos: jax.Array, sin: jax.Array, positions: jax.Array, heads: int
) -> jax.Array:
    return jax_webgpu.rotary_embedding(x, cos, sin, positions, num_heads=heads)


# ... and in plain JAX.


def plain_split(x: jax.Array, sizes: list[int]) -> Sequence[jax.Array]:
    return jnp.split(x, [sizes[0], sizes[0] + sizes[1]], axis=-1)


def plain_rotate(
    x: jax.Array, cos: jax.Array, sin: jax.Array, positions: jax.Array, heads: int
) -> jax.Array:
    a, b = jnp.split(x.reshape(1, TOKENS, heads, HEAD_SIZE), 2, axis=-1)
    c, s = cos[positions][:, :, None], sin[positions][:, :, None]
    return jnp.concatenate([a * c - b * s, b * c + a * s], axis=-1).reshape(x.shape)


def make_inputs() -> tuple[dict[str, jax.Array], jax.Array]:
    """Random weights, and a text embedded byte by byte."""
    keys = jax.random.split(jax.random.key(0), 3)
    cos, sin = jax_webgpu.rotary_cache(TOKENS, HEAD_SIZE, base=ROPE_BASE)
    params = {
        "qkv": jax.random.normal(keys[0], (WIDTH, WIDTH + 2 * KV_WIDTH)) / WIDTH**0.5,
        "out": jax.random.normal(keys[1], (WIDTH, WIDTH)) / WIDTH**0.5,
        "cos": cos,
        "sin": sin,
    }
    text = pathlib.Path(os.__file__).read_bytes()[:TOKENS]
    embedding = jax.random.normal(keys[2], (256, WIDTH))
    return params, embedding[jnp.array(list(text))][None]


def milliseconds(layer: Layer, params: dict[str, jax.Array], x: jax.Array) -> float:
    """The median of some calls of a layer that has run before."""
    times = []
    for _ in range(9):
        start = time.perf_counter()
        layer(params, x).block_until_ready()
        times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times)


def main() -> None:
    # Without this, a GPU may round what enters a product to 10 bits.
    jax.config.update("jax_default_matmul_precision", "highest")
    params, x = make_inputs()
    webgpu = make_layer(webgpu_split, webgpu_rotate)
    plain = make_layer(plain_split, plain_rotate)

    print(f"adapter             {jax_webgpu.device_info()}")
    plans = jax_webgpu.explain(webgpu, params, x)
    print(f"variants            {', '.join(plan.variant for plan in plans)}")
    difference = float(jnp.max(jnp.abs(webgpu(params, x) - plain(params, x))))
    print(f"largest difference  {difference:.1e}, of {TOLERANCE:.0e} allowed")
    print(f"on WebGPU           {milliseconds(webgpu, params, x):.1f} ms")
    print(f"in plain JAX        {milliseconds(plain, params, x):.1f} ms")
    assert difference <= TOLERANCE


if __name__ == "__main__":
    main()
