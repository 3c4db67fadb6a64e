"""Operators as JAX primitives: one `register`, the two crossings to the host, the fence at exit.

This module and `fuse` are the only ones that import JAX's unstable parts.
"""

import atexit
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import mlir, xla

from jax_webgpu import config, device, runtime, variants
from jax_webgpu.capabilities import IDEAL, PRESETS, Capabilities
from jax_webgpu.errors import CallError
from jax_webgpu.plan import Plan
from jax_webgpu.resolve import Pairs, Resolved, Tensor
from jax_webgpu.runtime import Operator

try:
    from jax.experimental.buffer_callback import buffer_callback
except ImportError:  # a JAX without it crosses by `jax.pure_callback` everywhere
    buffer_callback = None  # type: ignore[assignment]

config.on_change(jax.clear_caches)


@dataclass(frozen=True)
class Call:
    """The static parameters of one bind. Equal calls are equal, so that JAX lowers them once."""

    attributes: Pairs
    sizes: tuple[int, ...] = ()
    """What the manifest leaves to the caller about the outputs; the operator knows its meaning."""
    settings: config.Settings = field(default_factory=config.Settings)

    def __str__(self) -> str:
        parts = [f"{name}={value}" for name, value in self.attributes]
        parts += [f"sizes={self.sizes}"] if self.sizes else []
        parts += [f"callback={self.settings.callback}"] if self.settings.callback else []
        parts += [f"{name}={value}" for name, value in self.settings.tunables]
        return f"({', '.join(parts)})"

    __repr__ = __str__


# From a call's static parameters and its inputs' shapes and dtypes to the resolved call.
Resolve = Callable[[Call, tuple[Tensor, ...]], Resolved]


@dataclass(frozen=True)
class Registered:
    """An operator that JAX knows."""

    operator: Operator
    resolve: Resolve
    primitive: Primitive

    def bind(self, arrays: Sequence[Any], **static: Any) -> list[Any]:
        """Binds the primitive with the settings in force; `static` are the fields of `Call`."""
        device.check_process()
        call = Call(settings=config.settings(), **static)
        results: list[Any] = self.primitive.bind(*arrays, call=call)
        return results


_registered: dict[Primitive, Registered] = {}


def register(operator: Operator, resolve: Resolve) -> Registered:
    """Makes an operator a JAX primitive.

    Args:
      operator: the manifest and what the operator adds to it.
      resolve: must raise `ValueError` for what is the caller's mistake; it runs while JAX traces.
    """
    primitive = Primitive(operator.name)
    primitive.multiple_results = True
    registered = Registered(operator, functools.lru_cache(1024)(resolve), primitive)
    _registered[primitive] = registered
    primitive.def_impl(functools.partial(xla.apply_primitive, primitive))
    primitive.def_abstract_eval(functools.partial(_abstract_eval, registered))
    for platform in (None, "cpu"):
        crossing = functools.partial(_cross, registered, platform == "cpu")
        lowering = mlir.lower_fun(crossing, multiple_results=True)
        mlir.register_lowering(primitive, functools.partial(_lower, lowering), platform=platform)
    return registered


def _tensors(avals: Sequence[Any]) -> tuple[Tensor, ...]:
    return tuple(Tensor(tuple(aval.shape), str(aval.dtype)) for aval in avals)


def _abstract_eval(registered: Registered, *avals: Any, call: Call) -> list[Any]:
    """Refuses here, with no GPU, what no device could run."""
    resolved = registered.resolve(call, _tensors(avals))
    variants.select(resolved, IDEAL)
    # From an input's aval rather than anew: it carries the sharding and the varying mesh axes.
    return [
        avals[0].update(shape=tensor.shape, dtype=np.dtype(tensor.dtype), weak_type=False)
        for _, tensor in resolved.outputs
    ]


def _lower(lowering: Callable[..., Any], context: Any, *operands: Any, call: Call) -> Any:
    _install_fence()
    return lowering(context, *operands, call=call)


def _cross(registered: Registered, on_cpu: bool, *arrays: Any, call: Call) -> Sequence[Any]:
    """Traced by the lowering: the call to the host, by the crossing that the settings choose.

    `pure_callback` calls `device_put` on its arguments, and waiting for that inside the callback
    needs a thread of the pool that waiting callbacks fill: on the CPU platform it can deadlock.
    `buffer_callback` hands over XLA's own buffers and cannot, but it works there only.
    """
    resolved = registered.resolve(call, _tensors([jax.typeof(array) for array in arrays]))
    results = [jax.ShapeDtypeStruct(t.shape, np.dtype(t.dtype)) for _, t in resolved.outputs]
    wanted = call.settings.callback
    if wanted == "buffer" and not (on_cpu and buffer_callback is not None):
        raise CallError(
            "callback='buffer' works on JAX's CPU platform, with a JAX that has "
            "jax.experimental.buffer_callback; use callback='pure' or None here"
        )
    if on_cpu and wanted != "pure" and buffer_callback is not None:
        in_place = functools.partial(_buffer_host, registered.operator, resolved)
        crossed: Sequence[Any] = buffer_callback(in_place, results)(*arrays)
        return crossed
    _require_cpu_backend()
    host = functools.partial(_pure_host, registered.operator, resolved)
    crossed = jax.pure_callback(host, results, *arrays)
    return crossed


def _buffer_host(
    operator: Operator, resolved: Resolved, context: Any, outputs: Sequence[Any], *arrays: Any
) -> None:
    outs = [np.asarray(output) for output in outputs]
    runtime.run(operator, resolved, [np.asarray(array) for array in arrays], outs)


def _pure_host(operator: Operator, resolved: Resolved, *arrays: Any) -> tuple[np.ndarray, ...]:
    return runtime.run(operator, resolved, [np.asarray(array) for array in arrays])


def _require_cpu_backend() -> None:
    try:
        jax.local_devices(backend="cpu")
    except RuntimeError as error:
        raise CallError(
            "jax.pure_callback needs JAX's CPU platform beside the accelerator's: add cpu to "
            f"JAX_PLATFORMS, now {jax.config.read('jax_platforms')!r}"
        ) from error


@functools.cache
def _install_fence() -> None:
    atexit.register(_fence)


def _fence() -> None:
    """Waits until every local device has run what was queued before.

    An interpreter that exits while a callback is queued is aborted. Neither a counter of running
    callbacks nor `jax.effects_barrier` sees the queued ones, and the results may be gone; but a
    device runs its queue in order.
    """
    devices = {*jax.local_devices(), *jax.local_devices(backend="cpu")}
    jax.block_until_ready([jax.device_put(0, each) + 1 for each in devices])


# ---- explain ------------------------------------------------------------------------------------


def explain(f: Callable[..., Any], *args: Any, device: str | None = None, **kwargs: Any) -> "Plans":
    """The plans of the operators that `f(*args, **kwargs)` would run; nothing is run.

    Args:
      f: any function that JAX can trace.
      *args: arrays, or `jax.ShapeDtypeStruct`s, in pytrees.
      device: ``"floor"``, ``"apple-m"``, ``"swiftshader"``, ``"lavapipe"`` or ``"h200"``; by
        default the adapter of this machine. With a name, no GPU is needed.
      **kwargs: as `args`.

    Returns:
      A tuple of plans in the order of the program, which prints as text. Of each, `variant` is
      the variant that was chosen.

    Raises:
      ValueError: `device` is unknown.
      DeviceError: the device cannot run one of the calls.
    """
    capabilities = on_device(device)
    jaxpr = jax.make_jaxpr(f)(*args, **kwargs)
    return Plans(
        registered.operator.plan(registered.resolve(call, tensors), capabilities)
        for registered, call, tensors in _calls(jaxpr.jaxpr)
    )


def on_device(name: str | None) -> Capabilities:
    """The capabilities of a preset, or of this machine's device; see `explain`."""
    if name is None:
        return device.get().capabilities
    if name not in PRESETS:
        raise CallError(f"device is {name!r}; expected one of {', '.join(PRESETS)}, or None")
    return PRESETS[name]


class Plans(tuple[Plan, ...]):
    """Plans that print as text."""

    def __str__(self) -> str:
        return "\n\n".join(plan.describe() for plan in self)


def _calls(jaxpr: Any) -> Iterator[tuple[Registered, Call, tuple[Tensor, ...]]]:
    """The binds of our primitives in a jaxpr and those inside it, in the program's order."""
    for equation in jaxpr.eqns:
        if equation.primitive in _registered:
            tensors = _tensors([variable.aval for variable in equation.invars])
            yield _registered[equation.primitive], equation.params["call"], tensors
        for parameter in equation.params.values():
            for inner in parameter if isinstance(parameter, list | tuple) else [parameter]:
                if hasattr(inner, "eqns"):
                    yield from _calls(inner)
                elif hasattr(inner, "jaxpr"):
                    yield from _calls(inner.jaxpr)
