"""A whole pre-norm transformer block that crosses to the GPU and back once.

Attention and MLP are made of kernel folders (`examples/kernels/`), of `split` and
`rotary_embedding`, and of JAX's own reshapes, transposes and arithmetic; `jax_webgpu.fuse` runs all
of it in one submission. The result is checked against plain JAX.

    python examples/transformer_block.py
"""

import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import jax_webgpu

KERNELS = Path(__file__).parent / "kernels"
add, gelu, matmul, rms_norm, softmax = (
    jax_webgpu.load_kernel(KERNELS / name)
    for name in ("add", "gelu", "matmul", "rms_norm", "softmax")
)

BATCH, SEQUENCE, HEADS, HEAD_SIZE = 2, 48, 4, 32
WIDTH = HEADS * HEAD_SIZE

Weights = dict[str, jax.Array]


@jax_webgpu.fuse
def block(weights: Weights, x: jax.Array, mask: jax.Array, positions: jax.Array) -> jax.Array:
    """X of (batch, sequence, width) through attention and MLP, each beside a residual."""
    qkv = matmul(rms_norm(x, weights["norm 1"]), weights["qkv"])
    q, k, v = jax_webgpu.split(qkv, num_outputs=3, axis=-1)
    cos, sin = weights["cos"], weights["sin"]
    q = jax_webgpu.rotary_embedding(q, cos, sin, positions, num_heads=HEADS)
    k = jax_webgpu.rotary_embedding(k, cos, sin, positions, num_heads=HEADS)
    q, k, v = (heads(each) for each in (q, k, v))
    scores = add(matmul(q, k.swapaxes(2, 3)) / math.sqrt(HEAD_SIZE), mask)
    mixed = matmul(softmax(scores, axis=-1), v).swapaxes(1, 2).reshape(x.shape)
    x = add(x, matmul(mixed, weights["out"]))
    hidden = gelu(matmul(rms_norm(x, weights["norm 2"]), weights["up"]), approximate="tanh")
    return add(x, matmul(hidden, weights["down"]))


def heads(x: jax.Array) -> jax.Array:
    """(batch, sequence, width) as (batch, heads, sequence, head size)."""
    return x.reshape(*x.shape[:2], HEADS, HEAD_SIZE).swapaxes(1, 2)


def plain_block(weights: Weights, x: jax.Array, mask: jax.Array, positions: jax.Array) -> jax.Array:
    """The same in plain JAX."""

    def norm(x: jax.Array, weight: jax.Array) -> jax.Array:
        return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5) * weight

    def rotated(x: jax.Array) -> jax.Array:
        a, b = jnp.split(heads(x), 2, -1)
        c, s = (weights[name][positions][:, None] for name in ("cos", "sin"))
        return jnp.concatenate([a * c - b * s, a * s + b * c], -1)

    q, k, v = jnp.split(norm(x, weights["norm 1"]) @ weights["qkv"], 3, -1)
    scores = rotated(q) @ rotated(k).swapaxes(2, 3) / math.sqrt(HEAD_SIZE) + mask
    mixed = (jax.nn.softmax(scores) @ heads(v)).swapaxes(1, 2).reshape(x.shape)
    x = x + mixed @ weights["out"]
    hidden = jax.nn.gelu(norm(x, weights["norm 2"]) @ weights["up"], approximate=True)
    return x + hidden @ weights["down"]


def main() -> None:
    """Runs the block, shows what crosses, and compares with plain JAX."""
    rng = np.random.default_rng(0)

    def weight(rows: int, columns: int) -> jax.Array:
        return jnp.asarray(rng.normal(0, rows**-0.5, (rows, columns)), jnp.float32)

    cos, sin = jax_webgpu.rotary_cache(SEQUENCE, HEAD_SIZE)
    weights = {
        "norm 1": jnp.asarray(rng.uniform(0.5, 1.5, WIDTH), jnp.float32),
        "norm 2": jnp.asarray(rng.uniform(0.5, 1.5, WIDTH), jnp.float32),
        "qkv": weight(WIDTH, 3 * WIDTH),
        "out": weight(WIDTH, WIDTH),
        "up": weight(WIDTH, 4 * WIDTH),
        "down": weight(4 * WIDTH, WIDTH),
        "cos": cos,
        "sin": sin,
    }
    x = jnp.asarray(rng.normal(size=(BATCH, SEQUENCE, WIDTH)), jnp.float32)
    causal = np.tril(np.ones((SEQUENCE, SEQUENCE), bool))
    mask = jnp.asarray(np.where(causal, 0, -1e9), jnp.float32)
    positions = jnp.broadcast_to(jnp.arange(SEQUENCE, dtype=jnp.int32), (BATCH, SEQUENCE))

    y = block(weights, x, mask, positions)
    expected = plain_block(weights, x, mask, positions)
    difference = float(jnp.abs(y - expected).max())

    plans = jax_webgpu.explain(block, weights, x, mask, positions)
    kernels = sum(len(plan.passes) for plan in plans)
    (group,) = plans.groups
    print(f"{len(plans)} calls of WebGPU operators, {kernels} dispatches, one crossing")
    print(f"{group.bytes_together:,} bytes cross; call by call {group.bytes_alone:,} would")
    print(f"largest difference from plain JAX: {difference:.1e}")
    assert difference < 1e-4, difference


if __name__ == "__main__":
    main()
