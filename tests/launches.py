"""Plans run on a device by hand, with nothing of JAX between."""

import contextlib
import dataclasses
import gc
import weakref

import numpy as np

import jax_webgpu
from jax_webgpu.plan import declarations
from jax_webgpu.program import alone

KINDS = ("CPU", "IntegratedGPU", "DiscreteGPU", "Unknown")  # of any adapter that runs this


def planned(f, *args):
    (plan,) = jax_webgpu.explain(f, *args)
    return plan


def with_pass(plan, **changes):
    """The plan of one pass with something else in that pass."""
    (only,) = plan.passes
    return dataclasses.replace(plan, passes=(only._replace(**changes),))


X = np.arange(7, dtype=np.uint32) + 100
PARTS = [X[:3], X[3:]]


def split_x(x):
    return jax_webgpu.split(x, [3, 4])


_used = []


def launched(gpu, plan):
    """What a plan like that of `split_x` gives for `X`."""
    arrays = [X.reshape(plan.inputs[0].tensor.shape)]
    arrays += [np.full(3, 0xDEAD, np.uint32), np.full(4, 0xDEAD, np.uint32)]
    _used[:] = map(weakref.ref, arrays)
    gpu.run(alone(plan), arrays[:1], arrays[1:])
    return arrays[1:]


@contextlib.contextmanager
def nothing_kept():
    """At the end no array of the last `launched` is left, with no help of Python's collector.

    It comes too late: XLA's memory is gone with the call.
    """
    gc.disable()
    try:
        yield
        assert all(ref() is None for ref in _used)
    finally:
        gc.enable()


def assert_split_runs(gpu):
    for actual, expected in zip(launched(gpu, planned(split_x, X)), PARTS, strict=True):
        np.testing.assert_array_equal(actual, expected)


def constant(value):
    """`split_x` by other WGSL under the same label: every element of the first part is `value`."""
    plan = planned(split_x, X)
    names = [bound.name for bound in plan.passes[0].bindings]
    body = "\n".join(f"  _ = &{name};" for name in names)
    stores = "\n".join(f"  {names[1]}[{index}] = {value}u;" for index in range(3))
    resources = declarations(plan.passes[0].bindings)
    main = f"@compute @workgroup_size(1) fn main() {{\n{body}\n{stores}\n}}"
    return with_pass(plan, wgsl=f"{resources}\n{main}", workgroups=(1, 1, 1))
