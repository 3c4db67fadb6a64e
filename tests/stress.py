"""How much the stress tests do, and what their programs share.

In the short form, that of CI, all of them take a minute and a half on two cores. JAX_WEBGPU_STRESS
multiplies the counts: `./dev reliability` sets it.
"""

import json
import os

SCALE = int(os.environ.get("JAX_WEBGPU_STRESS", "1"))
LONG = SCALE > 1

# Seconds after which a program hangs. It takes a tenth of them; but a machine may be busy, and only
# a hang costs them.
PATIENCE = 240 * SCALE

# Both operators as functions of one array, float32 and flat, whose size is a multiple of 128; and
# whether what came is right. Exact: no sum, and no product with anything but -1, 0 and 1.
CALLS = """
import jax, jax.numpy as jnp, numpy as np
import jax_webgpu

def split(x):
    return jax_webgpu.split(x, [x.size // 4, 0, x.size - x.size // 4])

def rotary(x):
    x = x.reshape(1, 2, -1, 64)
    turned = np.arange(x.shape[2], dtype=np.int32)[None] % 5
    cos = np.repeat(np.float32([0, 1, 0, -1, 0]), 32).reshape(5, 32)
    sin = np.repeat(np.float32([1, 0, -1, 0, 1]), 32).reshape(5, 32)
    return jax_webgpu.rotary_embedding(x, cos, sin, turned).reshape(-1)

def expected(name, x):
    if name == "split":
        return x
    pairs = x.reshape(2, -1, 2, 32)
    quarter = np.int32([1, 0, 3, 2, 1])[np.arange(pairs.shape[1]) % 5]
    cos, sin = (np.float32(row)[quarter][:, None] for row in ([1, 0, -1, 0], [0, 1, 0, -1]))
    a, b = pairs[:, :, 0], pairs[:, :, 1]
    return np.stack([a * cos - b * sin, a * sin + b * cos], 2).reshape(-1)

def right(name, y, x):
    y = np.concatenate(y) if name == "split" else np.asarray(y)
    return np.array_equal(y, expected(name, x))

OPERATORS = {"split": split, "rotary": rotary}
"""


def figures(done, record_property):
    """Records what a program printed last: JSON, figures by name."""
    assert done.returncode == 0, f"status {done.returncode}\n{done.stdout}\n{done.stderr}"
    found = json.loads(done.stdout.splitlines()[-1])
    for name, value in found.items():
        record_property(name, value)
    return found
