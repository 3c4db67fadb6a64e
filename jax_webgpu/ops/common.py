"""What the operators' argument checks share."""

import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_webgpu import config, device, plan, tuning
from jax_webgpu.capabilities import Capabilities
from jax_webgpu.errors import CallError, DTypeError
from jax_webgpu.resolve import Resolved


def array(value: Any, name: str) -> jax.Array:
    """A JAX or NumPy array as a JAX array; anything else is refused by `name`."""
    device.check_process()  # in a forked child what follows could hang
    if not isinstance(value, jax.Array | np.ndarray | np.generic):
        kind = type(value).__name__
        raise DTypeError(f"{name} must be an array, got {kind}: pass jnp.asarray({name})")
    if isinstance(value, jax.Array):
        return value  # JAX 0.10.0's `asarray` mistakes the sharding of what a `vmap` maps over
    try:
        return jnp.asarray(value)
    except (TypeError, ValueError) as error:
        raise DTypeError(f"{name} of dtype {value.dtype} makes no JAX array: {error}") from None


def is_key(value: Any) -> bool:
    """Whether a value is an array of random keys, which gives neither numbers nor an iterator."""
    return isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key)


def integer(value: Any, name: str) -> int:
    """A Python int from anything that is one while tracing."""
    if isinstance(value, jax.core.Tracer):
        raise DTypeError(f"{name} must be static, got a traced value: {value}")
    if isinstance(value, bool | np.bool_):
        raise DTypeError(f"{name} must be an integer, got {value}")
    try:
        return operator.index(value)
    except TypeError:
        kind = type(value).__name__
        raise DTypeError(f"{name} must be an integer, got {kind} {value!r}") from None


def is_concrete(value: Any) -> bool:
    """Whether the values can be looked at now, on this host."""
    if isinstance(value, jax.core.Tracer):
        return False
    return not isinstance(value, jax.Array) or value.is_fully_addressable


def tunables(settings: config.Settings) -> dict[str, Any]:
    """The tunables that are set, of which the sizes must be possible ones."""
    known = dict(settings.tunables)
    for name in ("WORKGROUP_SIZE", "BYTES_EACH"):
        size = known.get(name, 1)
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise CallError(f"{name} is {size!r}; expected a whole number, 1 or more")
    return known


def fit_tunables(resolved: Resolved, capabilities: Capabilities) -> Resolved:
    """`plan.fitted`, with the tunables that `tune` found to be the fastest on the device.

    Raises:
      LimitError: the caller set a WORKGROUP_SIZE that the device cannot run.
    """
    plan.check_workgroup_size(resolved, capabilities)
    return plan.fitted(resolved, capabilities, tuning.found(resolved, capabilities.name))
