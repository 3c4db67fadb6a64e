"""Operators as JAX primitives: one `register`, the two crossings to the host, the fence at exit.

This module and `fuse` are the only ones that import JAX's unstable parts.
"""

import atexit
import functools
import logging
import os
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir, xla
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_webgpu import config, device, dtypes, plan, variants
from jax_webgpu.capabilities import IDEAL
from jax_webgpu.errors import CallError, DeviceError, LimitError, ShaderError
from jax_webgpu.resolve import Pairs, Resolved, Tensor
from jax_webgpu.runtime import Dispatcher, Operator

try:
    from jax.experimental.buffer_callback import buffer_callback
except ImportError:  # a JAX without it crosses by `jax.pure_callback` everywhere
    buffer_callback = None  # type: ignore[assignment]

config.on_change(jax.clear_caches)
_logger = logging.getLogger(__name__)


class DeadlockWarning(UserWarning):
    """A call crosses to the host by a way that can wait for ever."""


@config.check_with
def _check_tunables(settings: config.Settings) -> None:
    """Each is one of some operator's, and of its kind: True must not pass for an equal 1."""
    if not settings.tunables:
        return
    known = dict[str, Any]()
    for registered in _registered.values():
        known |= registered.operator.overlaid.tunables
    for name, value in settings.tunables:
        if name not in known:
            raise CallError(f"no operator has a tunable {name}: {', '.join(sorted(known))}")
        if _kind(value) != _kind(known[name]):
            wanted = _kind(known[name])
            raise CallError(f"the tunable {name} is {value!r}; expected a {wanted}")


def _kind(value: Any) -> str:
    return {bool: "boolean", str: "string"}.get(type(value), "number")


@dataclass(frozen=True)
class Call:
    """The static parameters of one bind. Equal calls are equal, so that JAX lowers them once."""

    attributes: Pairs
    """The manifest's attributes."""
    static: Pairs = ()
    """What else the operator keeps of the call."""
    settings: config.Settings = field(default_factory=config.Settings)
    placed: bool = False
    """The last operand is the place in a mesh, which no rule of an operator sees."""
    loose_axes: tuple[str, ...] = ()
    """Mesh axes that are not manual while others are."""

    def with_static(self, **static: Any) -> "Call":
        """The call with more to keep."""
        return replace(self, static=tuple({**dict(self.static), **static}.items()))

    def __str__(self) -> str:
        set_ = [(k, v) for k, v in self.settings.items() if v is not None]
        parts = [f"{name}={value}" for name, value in [*self.attributes, *self.static, *set_]]
        return f"({', '.join(parts)})"

    __repr__ = __str__


# For each dimension of an array the mesh axes that it is sharded over.
Spec = tuple[tuple[str, ...], ...]


class Rules(Protocol):
    """What an operator's file tells JAX of it: an object, or a class with static methods.

    `operands` are arrays or tracers in the primitive's order; a tangent or cotangent that is zero
    is None.
    """

    operator: Operator

    def resolve(self, call: Call, tensors: tuple[Tensor, ...]) -> Resolved:
        """The call for the engine; raises `ValueError` for what is the caller's mistake."""

    def results(self, call: Call, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The outputs as JAX has them."""

    def narrow(self, call: Call, *operands: Any) -> tuple[Call, Sequence[Any]]:
        """The call and the operands that cross to the host: of large ones what the call reads."""

    def reference(self, call: Call, *operands: Any) -> Sequence[Any]:
        """The operator in plain JAX."""

    def partition(
        self,
        call: Call,
        shapes: Sequence[tuple[int, ...]],
        specs: Sequence[Spec],
        sizes: Mapping[str, int],
    ) -> tuple[Call, Sequence[Spec], Spec]:
        """The call that each shard makes, the operands' shardings for it and the outputs'.

        `specs` are the operands' shardings as they come, `sizes` the mesh's.
        """

    def batch(
        self, call: Call, operands: Sequence[Any], axes: Sequence[int | None], size: int
    ) -> tuple[Sequence[Any], Sequence[int]]:
        """The outputs for a whole batch along `axes`, and their batch axes."""

    def jvp(self, call: Call, operands: Sequence[Any], tangents: Sequence[Any]) -> Sequence[Any]:
        """The outputs' tangents."""

    def transpose(
        self, call: Call, cotangents: Sequence[Any], operands: Sequence[Any]
    ) -> Sequence[Any]:
        """The cotangents of the operands that are `jax.ShapeDtypeStruct`s; None for others."""


@dataclass(frozen=True)
class Registered:
    """An operator that JAX knows."""

    rules: Rules
    primitive: Primitive

    @property
    def operator(self) -> Operator:
        return self.rules.operator

    def bind(self, operands: Sequence[Any], attributes: Pairs, static: Pairs = ()) -> list[Any]:
        """Binds the primitive with the settings in force.

        Where operands are sharded over Explicit mesh axes, each shard makes a call of its own.
        """
        device.check_process()
        call = Call(attributes, static, config.settings())
        mesh = _explicit_mesh(operands)
        if mesh is None:
            return self.apply(call, *_equally_varying(operands))
        specs = tuple(_spec(operand) for operand in operands)
        shapes = [operand.shape for operand in operands]
        call, wanted, out = self.rules.partition(call, shapes, specs, mesh.shape)
        return interruptible(_per_shard(self, call, mesh, tuple(wanted), out))(*operands)

    def apply(self, call: Call, *operands: Any) -> list[Any]:
        """Binds the primitive for a call that is known already, as a rule does.

        A callback cannot learn which device it serves. Inside `shard_map` the linear place in the
        mesh goes along as an operand, so that the host can choose among several adapters.
        """
        mesh = jax.sharding.get_abstract_mesh()
        manual = mesh.manual_axes
        loose = tuple(name for name in mesh.axis_names if name not in manual) if manual else ()
        call = replace(call, placed=bool(manual), loose_axes=loose)
        place = [jax.lax.axis_index(manual)] if manual else []
        results: list[Any] = self.primitive.bind(*operands, *place, call=call)
        return results

    @functools.lru_cache(1024)  # noqa: B019 - operators live as long as the process
    def resolve(self, call: Call, tensors: tuple[Tensor, ...]) -> Resolved:
        """`Rules.resolve`, once for equal calls."""
        return self.rules.resolve(call, tensors)


_registered: dict[Primitive, Registered] = {}


def register(rules: Rules) -> Registered:
    """Makes an operator a JAX primitive that evaluates, lowers, batches and differentiates."""
    primitive = Primitive(rules.operator.name)
    primitive.multiple_results = True
    registered = _registered[primitive] = Registered(rules, primitive)
    evaluate(primitive)
    primitive.def_abstract_eval(functools.partial(_abstract_eval, registered))
    lower(primitive, functools.partial(_cross, registered))
    batching.primitive_batchers[primitive] = functools.partial(_batch, rules)
    ad.primitive_jvps[primitive] = functools.partial(_jvp, registered)
    ad.primitive_transposes[primitive] = functools.partial(_transpose, rules)
    return registered


def registered(equation: Any) -> Registered | None:
    """The operator of an equation of a jaxpr, if it is one of ours."""
    return _registered.get(equation.primitive)


def tensors_of(avals: Sequence[Any]) -> tuple[Tensor, ...]:
    return tuple(Tensor(tuple(aval.shape), str(aval.dtype)) for aval in avals)


def _equally_varying(operands: Sequence[Any]) -> Sequence[Any]:
    """Inside `shard_map`, operands that vary over the same mesh axes.

    Without the cast, whose transpose is a sum over the mesh, the gradient of a replicated cache
    beside a sharded x would miss the other shards.
    """
    varying = [jax.typeof(operand).manual_axis_type.varying for operand in operands]
    union = frozenset[Any]().union(*varying)
    return [
        jax.lax.pcast(operand, tuple(union - own), to="varying") if union - own else operand
        for operand, own in zip(operands, varying, strict=True)
    ]


def _explicit_mesh(operands: Sequence[Any]) -> Any:
    """The mesh of the operand that is sharded over Explicit axes; None if there is none."""
    for operand in operands:
        sharding = jax.typeof(operand).sharding
        if not sharding.mesh.empty and any(sharding.spec):
            return sharding.mesh
    return None


def _spec(operand: Any) -> Spec:
    spec = jax.typeof(operand).sharding.spec
    axes = [() if axis is None else axis if isinstance(axis, tuple) else (axis,) for axis in spec]
    return tuple(axes) + ((),) * (operand.ndim - len(axes))


@functools.lru_cache(1024)
def _per_shard(
    registered: Registered, call: Call, mesh: Any, specs: tuple[Spec, ...], out: Spec
) -> Callable[..., list[Any]]:
    """Reshards the operands as `specs` say and makes the call on each shard.

    Outside of a mesh's context it is jitted, since there only `jit` brings other arrays to the
    mesh; inside it is not, since the cache of `jit` does not know what axes a `vmap` maps over.
    """
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    explicit = {name for name, kind in kinds if kind == AxisType.Explicit}
    if explicit == set(mesh.axis_names):
        explicit = set()  # all: a `vmap` around us may map over one, which must not be named

    def call_on_shards(*operands: Any) -> list[Any]:
        placed = [
            jax.sharding.reshard(operand, NamedSharding(mesh, P(*spec)))
            for operand, spec in zip(operands, specs, strict=True)
        ]
        # Made while tracing, since it looks at once for the axes that a `vmap` maps over.
        on_each: Callable[..., list[Any]] = jax.shard_map(
            lambda *shards: registered.apply(call, *_equally_varying(shards)),
            mesh=mesh,
            in_specs=tuple(P(*spec) for spec in specs),
            out_specs=P(*out),
            axis_names=explicit,
        )
        return on_each(*placed)

    jitted: Callable[..., list[Any]] = jax.jit(call_on_shards)

    def run(*operands: Any) -> list[Any]:
        return (jitted if jax.sharding.get_abstract_mesh().empty else call_on_shards)(*operands)

    return run


def own(call: Call, operands: Sequence[Any]) -> Sequence[Any]:
    """What of a primitive's operands, or of what belongs to each, the operator knows."""
    return operands[:-1] if call.placed else operands


# ---- evaluation and lowering --------------------------------------------------------------------


def _abstract_eval(registered: Registered, *avals: Any, call: Call) -> list[Any]:
    """Refuses here, with no GPU, what no device could run."""
    tensors = tensors_of(own(call, avals))
    if call.settings.implementation != "reference":
        for tensor in tensors:
            if not all(isinstance(size, int) for size in tensor.shape):
                raise CallError(
                    f"{registered.operator.name} of {tensor}: a kernel is planned for sizes that "
                    "are known; trace under jax_webgpu.configure(implementation='reference')"
                )
        variants.select(registered.resolve(call, tensors), IDEAL)
    # From an input's aval rather than anew: it carries the sharding and the varying mesh axes.
    like = avals[0] if avals else jax.core.ShapedArray((), np.dtype(np.float32))
    return [
        like.update(shape=result.shape, dtype=np.dtype(result.dtype), weak_type=False)
        for result in registered.rules.results(call, tensors)
    ]


def evaluate(primitive: Primitive) -> None:
    """Lets a primitive be evaluated outside of `jax.jit`."""
    apply: Callable[..., Any] = functools.partial(xla.apply_primitive, primitive)
    primitive.def_impl(interruptible(apply))


def lower(primitive: Primitive, crossing: Callable[..., Sequence[Any]]) -> None:
    """Lowers a primitive to what `crossing`, told whether the platform is the CPU, traces to."""
    for platform in (None, "cpu"):
        traced = functools.partial(crossing, platform == "cpu")
        lowering = mlir.lower_fun(traced, multiple_results=True)
        mlir.register_lowering(primitive, functools.partial(_lower, lowering), platform=platform)


def _lower(
    lowering: Callable[..., Any], context: Any, *operands: Any, call: Call, **params: Any
) -> Any:
    parameters = context.module_context.lowering_parameters
    if parameters.for_export and call.settings.implementation != "reference":
        raise NotImplementedError(
            "JAX cannot export a callback: trace and export under "
            "jax_webgpu.configure(implementation='reference'), which lowers to plain JAX"
        )
    return lowering(context, *operands, call=call, **params)


def _cross(registered: Registered, on_cpu: bool, *arrays: Any, call: Call) -> Sequence[Any]:
    """Traced by the lowering: the call to the host, or the operator in plain JAX."""
    operands, place = own(call, arrays), arrays[len(own(call, arrays)) :]
    if call.settings.implementation == "reference":
        return registered.rules.reference(call, *operands)
    given = tensors_of([jax.typeof(operand) for operand in operands])
    wanted = registered.rules.results(call, given)
    call, operands = registered.rules.narrow(call, *operands)
    tensors = tensors_of([jax.typeof(operand) for operand in operands])
    made = wanted if tensors == given else registered.rules.results(call, tensors)
    results = [jax.ShapeDtypeStruct(each.shape, np.dtype(each.dtype)) for each in made]
    resolved = registered.resolve(call, tensors)
    check_early(registered.operator, call.static, resolved)
    dispatch = Dispatcher(registered.operator, resolved, call.static)
    host = functools.partial(_host, dispatch, call.placed)
    crossed = cross(call, on_cpu, host, results, *operands, *place, sharded=call.placed)
    return [convert(each, result.dtype) for each, result in zip(crossed, wanted, strict=True)]


def check_early(operator: Operator, static: Pairs, resolved: Resolved) -> None:
    """Raises what is the caller's mistake: raised in a callback, it comes inside an error of JAX's.

    So is WGSL that no device takes, and a tunable that this one could do without. What is the
    device's, or that there is none, is told when the call runs.
    """
    try:
        operator.plan(resolved, device.get().capabilities).check_written()
        if operator.early is not None:
            operator.early(static, resolved)
    except ShaderError:
        raise
    except LimitError:
        capabilities = device.get().capabilities
        if plan.is_refused_for_tunables(resolved, lambda call: operator.plan(call, capabilities)):
            raise
    except DeviceError:
        pass


def cross(
    call: Call,
    on_cpu: bool,
    host: "Host",
    results: Sequence[jax.ShapeDtypeStruct],
    *operands: Any,
    sharded: bool,
) -> Sequence[Any]:
    """The call to the host, by the crossing that the settings choose.

    What is `sharded` makes other calls on other devices, which may wait for this one.

    `pure_callback` calls `device_put` on its arguments, and waiting for that inside the callback
    needs a thread of the pool that waiting callbacks fill: on the CPU platform it can deadlock.
    `buffer_callback` hands over XLA's own buffers and cannot, but it works there only.
    """
    wanted = call.settings.callback
    if wanted == "buffer" and not (on_cpu and buffer_callback is not None):
        raise CallError(
            "callback='buffer' works on JAX's CPU platform, with a JAX that has "
            "jax.experimental.buffer_callback; use callback='pure' or None here"
        )
    if on_cpu and wanted != "pure" and buffer_callback is not None:
        in_place = functools.partial(_buffer_host, host, sharded)
        _install_fence(os.getpid())
        crossed: Sequence[Any] = buffer_callback(in_place, results)(*operands)
        return crossed
    _require_cpu_backend()
    if call.loose_axes:
        raise CallError(
            f"jax.pure_callback does not work under a shard_map that leaves mesh axes, "
            f"{', '.join(call.loose_axes)}, automatic: make all axes manual, or use "
            "callback='buffer' on the CPU platform"
        )
    if on_cpu:
        _warn_of_deadlock()
    _install_fence(os.getpid())
    in_copies = functools.partial(_pure_host, host, results)
    crossed = jax.pure_callback(in_copies, results, *operands)
    return crossed


# Fills the outputs from the arrays.
Host = Callable[[Sequence[np.ndarray], Sequence[np.ndarray]], None]


def _host(
    dispatch: Dispatcher, placed: bool, outputs: Sequence[np.ndarray], arrays: Sequence[np.ndarray]
) -> None:
    if placed:
        dispatch(arrays[:-1], outputs, int(arrays[-1]))
    else:
        dispatch(arrays, outputs)


def _buffer_host(
    host: Host, sharded: bool, context: Any, outputs: Sequence[Any], *arrays: Any
) -> None:
    with _noting_signals:
        try:
            host([np.asarray(out) for out in outputs], [np.asarray(array) for array in arrays])
        except Exception as error:
            # A collective waits for this device, and XLA then ends the process before the error
            # gets to anybody. `pure_callback` logs its errors itself.
            if sharded:
                _logger.error("a call on one of several devices failed: %s", error)
            raise


def _pure_host(
    host: Host, results: Sequence[jax.ShapeDtypeStruct], *arrays: Any
) -> list[np.ndarray]:
    with _noting_signals:
        outputs = [np.empty(result.shape, result.dtype) for result in results]
        host(outputs, [np.asarray(array) for array in arrays])
        return outputs


class _Signals(threading.local):
    """What a signal's handler raised in a host function on this thread: KeyboardInterrupt, mostly.

    JAX makes a `JaxRuntimeError` of it, as of whatever a callback raises.
    """

    wanted = False
    raised: BaseException | None = None

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if self.wanted and error is not None and not isinstance(error, Exception):
            self.raised = error

    def taken(self) -> BaseException | None:
        """What was raised; from now on nothing is noted."""
        raised, self.wanted, self.raised = self.raised, False, None
        return raised


_noting_signals = _Signals()


def interruptible(f: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a call that runs at once raise what a signal raised in its host function.

    A small call runs on the thread that makes it. One that is jitted is out of reach here.
    """

    @functools.wraps(f)
    def call(*args: Any, **kwargs: Any) -> Any:
        signals = _noting_signals
        signals.wanted, signals.raised = True, None
        try:
            return f(*args, **kwargs)
        except Exception as error:
            # What JAX itself does before and after the host function can be interrupted too.
            if str(error).rstrip().endswith("\nKeyboardInterrupt:"):
                raise KeyboardInterrupt from None
            raise
        finally:
            if (raised := signals.taken()) is not None:
                try:  # in place of JAX's error, or of results that hold it
                    # The frames of the host function hold XLA's buffers, which are gone by now.
                    raise raised.with_traceback(None)
                finally:
                    del raised  # which has this frame

    return call


def _require_cpu_backend() -> None:
    try:
        jax.local_devices(backend="cpu")
    except RuntimeError as error:
        now = getattr(jax.config, "jax_platforms", None)  # `read` refuses this one
        raise CallError(
            "jax.pure_callback needs JAX's CPU platform beside the accelerator's: add cpu to "
            f"JAX_PLATFORMS, now {now!r}"
        ) from error


# With so many threads XLA's pool was never seen to be filled by callbacks that wait.
_MANY_THREADS = 16


@functools.cache
def _warn_of_deadlock() -> None:
    given = os.environ.get("NPROC", "")  # which XLA reads
    if (int(given) if given.isdecimal() else _cores()) >= _MANY_THREADS:
        return
    # While JAX lowers no line of the user's may be on the stack.
    warnings.warn_explicit(
        "jax.pure_callback can wait for ever on JAX's CPU platform, where an argument is still "
        f"being computed: callback=None cannot, nor can NPROC={_MANY_THREADS}, set in the "
        "environment before JAX starts; see docs/crossings.md",
        DeadlockWarning,
        "jax_webgpu",
        0,
    )


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@functools.cache
def _install_fence(pid: int) -> None:
    atexit.register(_fence, pid)
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_after_fork)


def _fence(pid: int) -> None:
    """Waits until every local device has run what was queued before.

    An interpreter that exits while a callback is queued is aborted. Neither a counter of running
    callbacks nor `jax.effects_barrier` sees the queued ones, and the results may be gone; but a
    device runs its queue in order. A forked child has none of the threads that run the queues.
    """
    if os.getpid() != pid:
        return
    devices = {*jax.local_devices(), *jax.local_devices(backend="cpu")}
    jax.block_until_ready([jax.device_put(0, each) + 1 for each in devices])


def _after_fork() -> None:
    """Makes JAX raise in a forked child of a process that used the GPU, where it could only hang.

    What was compiled before may wait there, before it comes to us, for threads that a fork does not
    copy, and a compiler does so always. So all is traced anew, since a setting that means nothing
    here but is part of what JAX compiles for is changed; and what comes to be compiled is refused.
    To clear JAX's caches instead takes long, and locks that the parent's threads may have held.
    """
    if device.is_forked():
        jax.config.update("jax_xla_profile_version", os.getpid())
        jax.monitoring.register_event_duration_secs_listener(_refuse)


def _refuse(event: str, duration_secs: float, **about: Any) -> None:
    device.check_process()


# ---- transformations ----------------------------------------------------------------------------


def _batch(
    rules: Rules, operands: Sequence[Any], axes: Sequence[Any], *, call: Call
) -> tuple[Sequence[Any], Sequence[int]]:
    operands = own(call, operands)
    axes = [axis if isinstance(axis, int) else None for axis in own(call, axes)]
    size = next(
        operand.shape[axis]
        for operand, axis in zip(operands, axes, strict=True)
        if axis is not None
    )
    return rules.batch(call, operands, axes, size)


def _jvp(
    registered: Registered, primals: Sequence[Any], tangents: Sequence[Any], *, call: Call
) -> tuple[Sequence[Any], Sequence[Any]]:
    primals, tangents = own(call, primals), own(call, tangents)
    results = registered.apply(call, *primals)
    known = [None if isinstance(tangent, ad.Zero) else tangent for tangent in tangents]
    moved = registered.rules.jvp(call, primals, known)
    return results, [
        ad.Zero(jax.typeof(result).to_tangent_aval()) if tangent is None else tangent
        for result, tangent in zip(results, moved, strict=True)
    ]


def _transpose(
    rules: Rules, cotangents: Sequence[Any], *operands: Any, call: Call
) -> Sequence[Any]:
    place, operands = operands[len(own(call, operands)) :], tuple(own(call, operands))
    linear = [operand.aval if ad.is_undefined_primal(operand) else None for operand in operands]
    known = [None if isinstance(ct, ad.Zero) else ct for ct in cotangents]
    results: Sequence[Any] = [None] * len(operands)
    if any(cotangent is not None for cotangent in known):
        shown = [
            operand if aval is None else jax.ShapeDtypeStruct(aval.shape, aval.dtype)
            for operand, aval in zip(operands, linear, strict=True)
        ]
        results = rules.transpose(call, known, shown)
    return [
        ad.Zero(aval) if aval is not None and result is None else result
        for result, aval in zip(results, linear, strict=True)
    ] + [None] * len(place)


# ---- conversions --------------------------------------------------------------------------------


def convert(x: Any, dtype: Any) -> Any:
    """As `x.astype(dtype)`; but between float32 and a narrower float a NaN keeps its bits.

    That is, what there is room for of them: see `dtypes.nan_bits`.
    """
    kinds = {str(x.dtype), str(dtype)}
    if "float32" in kinds and kinds & {"float16", "bfloat16"}:
        return _convert.bind(x, dtype=np.dtype(dtype))
    return x.astype(dtype)


def _converted(x: Any, *, dtype: np.dtype) -> Any:
    own, new = (np.dtype(f"u{each.itemsize}") for each in (x.dtype, dtype))
    bits = jax.lax.bitcast_convert_type(x, own).astype(np.uint32)
    nans = dtypes.nan_bits(bits, str(x.dtype), str(dtype)).astype(new)
    rest = jax.lax.bitcast_convert_type(x.astype(dtype), new)
    return jax.lax.bitcast_convert_type(jnp.where(jnp.isnan(x), nans, rest), dtype)


# A primitive, since bits have no derivative; and `fuse` knows it.
_convert = Primitive("webgpu_convert")
evaluate(_convert)
_convert.def_abstract_eval(lambda x, dtype: x.update(dtype=dtype, weak_type=False))
mlir.register_lowering(_convert, mlir.lower_fun(_converted, multiple_results=False))
ad.deflinear2(_convert, lambda cotangent, x, dtype: [convert(cotangent, x.aval.dtype)])
batching.defvectorized(_convert)


# ---- memory -------------------------------------------------------------------------------------


def clear_caches() -> None:
    """Gives back the memory that is kept for the next call.

    That of every device of this process, which are idle buffers, pipelines, uniforms and bind
    groups; and what was planned. The next call makes anew what it needs. `jax.clear_caches` is
    JAX's own, of jitted functions.

    Raises:
      DeviceError: the process was forked from one that had used the GPU.
    """
    device.clear_caches()
    Registered.resolve.cache_clear()
    _per_shard.cache_clear()


# ---- meshes -------------------------------------------------------------------------------------


def per_shard(f: Callable[..., Any], *in_specs: Any) -> Callable[..., Any]:
    """Makes our operators in `f` run on each shard where mesh axes are automatic.

    Under Explicit axes, and inside `jax.shard_map`, they do so by themselves. Under automatic axes
    JAX tells a callback nothing of shards: it would gather the whole array for each call.

    Args:
      f: a function of arrays, or of pytrees of arrays.
      *in_specs: a `jax.sharding.PartitionSpec` for each argument of `f`, or a pytree of them.

    Returns:
      A function like `f`, to be called inside of `jax.jit` under `jax.set_mesh(mesh)`. In `f` all
      mesh axes are Explicit; the results are sharded as they come out.

    Raises:
      ValueError: no mesh is set when it is called.
    """

    @functools.wraps(f)
    def on_mesh(*args: Any) -> Any:
        if jax.sharding.get_abstract_mesh().empty:
            raise CallError("per_shard needs a mesh: call it under jax.set_mesh(mesh)")
        return jax.sharding.explicit_axes(f, in_sharding=in_specs)(*args)

    return on_mesh
