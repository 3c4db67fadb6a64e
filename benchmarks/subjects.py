"""What is measured, host to host: arrays of the host go in, results on the host come out.

A subject makes of a case a `Call`, or raises `Unable` with a sentence that says why it cannot.
"""

import functools
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.buffer_callback import buffer_callback

import jax_webgpu
from benchmarks.onnx_session import Session, Unable, turn
from jax_webgpu import primitive, runtime


@dataclass(frozen=True)
class Call:
    """A case that is ready to run.

    Attributes:
      results: runs it; NumPy arrays.
      turn: `onnx_session.turn` of it.
      run: runs it, and no more; None where that is in another process.
    """

    results: Callable[[], Any]
    turn: Callable[[], float]
    run: Callable[[], Any] | None = None


@dataclass(frozen=True)
class Subject:
    """One way to run a case."""

    id: str
    text: str
    prepare: Callable[[Any], Call]

    @property
    def ours(self):
        """Whether its failure is ours."""
        return not self.id.startswith("ort")


def local(run):
    """The call that `run` makes in this process."""
    return Call(lambda: [np.asarray(each) for each in run()], functools.partial(turn, run), run)


# --- the limit, and NumPy -----------------------------------------------------------------------


def _copy(case):
    """Each byte that must be read copied once, and each that must be written: no work at all."""
    x, *rest = case.inputs
    read = [x]
    if case.rotary:
        cos, sin, *positions = rest
        rows = np.unique(positions[0]) if positions else slice(None)
        read += [np.ascontiguousarray(cos[rows]), np.ascontiguousarray(sin[rows]), *positions]
    there = [np.empty_like(array) for array in read]
    back = [np.empty(shape, dtype) for shape, dtype in case.outputs]
    flat, ends = there[0].reshape(-1), np.cumsum([array.size for array in back])[:-1]
    parts = np.split(flat, ends)

    def run():
        for source, target in zip(read, there, strict=True):
            np.copyto(target, source)
        for source, target in zip(parts, back, strict=True):
            np.copyto(target.reshape(-1), source)
        return back

    return Call(lambda: None, functools.partial(turn, run))


def _numpy(case):
    if not case.rotary:
        (x,), call = case.inputs, case.call
        ends = np.cumsum(call.sizes)[:-1]
        return local(lambda: [part.copy() for part in np.split(x, ends, call.axis)])
    arrays, keywords = case.inputs, case.call.keywords

    def run():
        x, cos, sin, *positions = arrays
        y = np.empty_like(x)
        split, out = _heads(x, keywords), _heads(y, keywords)
        c, s = (_by_token(np, x, cache, positions) for cache in (cos, sin))
        first, second, tail = _places(x.shape, keywords, c.shape[-1])
        a, b = (split[place].astype(np.float32) for place in (first, second))
        out[first] = a * c - b * s
        out[second] = a * s + b * c
        out[tail] = split[tail]
        return [y]

    return local(run)


def _heads(x, keywords):
    return x if x.ndim == 4 else x.reshape(*x.shape[:2], keywords["num_heads"], -1)


def _by_token(library, x, cache, positions):
    """The row of each token, with an axis for the heads."""
    rows = cache[positions[0]] if positions else cache
    return library.expand_dims(rows.astype(np.float32), 1 if x.ndim == 4 else 2)


def _places(shape, keywords, half):
    """Where a head's pairs and its rest are."""
    if keywords["interleaved"]:
        pairs = np.s_[..., 0 : 2 * half : 2], np.s_[..., 1 : 2 * half : 2]
    else:
        pairs = np.s_[..., :half], np.s_[..., half : 2 * half]
    return *pairs, np.s_[..., 2 * half :]


# --- XLA ----------------------------------------------------------------------------------------


def plain(case):
    """The case in plain `jnp`, of its arrays: computed in float32 and rounded once, as ours."""
    keywords = case.call.keywords
    if not case.rotary:
        ends = np.cumsum(case.call.sizes)[:-1].tolist()
        return lambda x: jnp.split(x, ends, case.call.axis)

    def rotate(x, cos, sin, *positions):
        split = _heads(x, keywords)
        c, s = (_by_token(jnp, x, cache, positions) for cache in (cos, sin))
        first, second, tail = _places(x.shape, keywords, c.shape[-1])
        a, b = (split[place].astype(np.float32) for place in (first, second))
        pairs = a * c - b * s, a * s + b * c
        if keywords["interleaved"]:
            turned = jnp.stack(pairs, axis=-1).reshape(*a.shape[:-1], -1)
        else:
            turned = jnp.concatenate(pairs, axis=-1)
        y = jnp.concatenate([turned.astype(x.dtype), split[tail]], axis=-1)
        return [y.reshape(x.shape)]

    return rotate


def _compiled(function, case):
    """A jitted function, compiled ahead, on arrays that lie on JAX's CPU device already.

    Ahead, so that it keeps the settings that are in force now: `configure` clears JAX's caches.
    """
    arrays = case.jax_inputs
    compiled = jax.jit(function).lower(*arrays).compile()

    def run():
        results = jax.block_until_ready(compiled(*arrays))
        return results if isinstance(results, list | tuple) else [results]

    return local(run)


def _xla(case):
    return _compiled(plain(case), case)


# --- jax_webgpu ---------------------------------------------------------------------------------


def jitted(callback, case):
    """Our public function under a crossing."""
    with jax_webgpu.configure(callback=callback):
        return _compiled(case.function, case)


def dispatcher(case):
    """The dispatcher of a case, and the arrays that it takes: of large caches the rows named."""
    structs = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in case.inputs]
    equations = jax.make_jaxpr(case.function)(*structs).eqns
    registered = primitive.registered(equations[0])
    if len(equations) > 1 or registered is None:
        names = ", ".join(dict.fromkeys(each.primitive.name for each in equations))
        raise Unable(f"for JAX it is more than one call of the dispatcher: {names}")
    operands = [jnp.asarray(array) for array in case.inputs]
    call, operands = registered.rules.narrow(equations[0].params["call"], *operands)
    resolved = registered.resolve(call, primitive.tensors_of(operands))
    arrays = [np.asarray(operand) for operand in operands]
    return runtime.Dispatcher(registered.operator, resolved, call.static), arrays


def _bare(fresh, case):
    dispatch, arrays = dispatcher(case)
    wanted = case.outputs
    kept = [np.empty(shape, dtype) for shape, dtype in wanted]

    def run():
        outputs = [np.empty(shape, dtype) for shape, dtype in wanted] if fresh else kept
        return dispatch(arrays, outputs)

    return local(run)


def _empty(case):
    """The least that a call by `buffer_callback` costs: one that does nothing, and the dispatcher.

    In turns, as in a call of ours, since each finds the processor's caches full of the other.
    """
    dispatch = _bare(False, case)
    results = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in case.outputs]
    nothing = _compiled(lambda *arrays: buffer_callback(_do_nothing, results)(*arrays), case)

    def run():
        nothing.run()
        return dispatch.run()

    return local(run)


def _do_nothing(context, outputs, *arrays):
    pass


# --- ONNX Runtime -------------------------------------------------------------------------------


def _model(case):
    """The case as a model of one node: its bytes, its inputs, its outputs."""
    if importlib.util.find_spec("onnx") is None:
        raise Unable("models are made with the package onnx, which is not installed")
    import onnx
    from onnx import helper

    call = case.call
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(call.dtype))
    given = dict(zip(("x", "cos", "sin", "positions"), case.inputs, strict=False))
    if "positions" in given:
        given["positions"] = given["positions"].astype(np.int64)
    results = [(f"y{i}", *output) for i, output in enumerate(case.outputs)]
    inputs = [
        helper.make_tensor_value_info(
            name, onnx.TensorProto.INT64 if name == "positions" else kind, array.shape
        )
        for name, array in given.items()
    ]
    outputs = [helper.make_tensor_value_info(name, kind, shape) for name, shape, _ in results]
    if case.rotary:
        attributes = call.attributes
        node = helper.make_node("RotaryEmbedding", list(given), ["y0"], **attributes)
        constants = []
    else:
        names = [name for name, *_ in results]
        node = helper.make_node("Split", ["x", "sizes"], names, axis=call.axis)
        constants = [onnx.numpy_helper.from_array(np.array(call.sizes, np.int64), "sizes")]
    graph = helper.make_graph([node], "case", inputs, outputs, constants)
    opset = [helper.make_opsetid("", 23)]
    model = helper.make_model(graph, opset_imports=opset, ir_version=10)
    return model.SerializeToString(), given, results


@functools.cache
def _session(provider, case):
    if importlib.util.find_spec("onnxruntime") is None:
        raise Unable("the package onnxruntime is not installed")
    return Session(*_model(case), provider)


def _onnx(provider, how, case):
    return local(getattr(_session(provider, case), how))


@functools.cache
def _load(worker, case):
    worker().ask("load", *_model(case), "build")


def _asked(worker, how, case):
    _load(worker, case)
    ask = worker().ask
    return Call(functools.partial(ask, "results", how), functools.partial(ask, "turn", how))


def forget():
    """Gives back what the subjects of a case share."""
    _session.cache_clear()
    _load.cache_clear()


WEBGPU_PEERS = ("ort-plugin", "ort-plugin-bound", "ort-build", "ort-build-bound")


def subjects(worker):
    """All of them.

    Args:
      worker: a function that gives the process of ONNX Runtime's WebGPU build, or raises `Unable`.
    """
    plugin, build = "ONNX Runtime's WebGPU plugin", "ONNX Runtime's WebGPU build"
    rows = (
        ("copy", "the limit: each byte copied once in and once out by NumPy", _copy),
        ("bare", "jax_webgpu's dispatcher into arrays that are kept", _bare, False),
        ("bare-fresh", "jax_webgpu's dispatcher into new arrays", _bare, True),
        ("empty", "the limit of `buffer`: a callback of nothing, then the dispatcher", _empty),
        ("buffer", "jax_webgpu jitted, crossing by buffer_callback", jitted, "buffer"),
        ("pure", "jax_webgpu jitted, crossing by pure_callback", jitted, "pure"),
        ("xla", "plain jnp jitted by XLA for the CPU", _xla),
        ("numpy", "NumPy", _numpy),
        ("ort-cpu", "ONNX Runtime's CPU provider", _onnx, "cpu", "run"),
        ("ort-plugin", plugin, _onnx, "plugin", "run"),
        ("ort-plugin-bound", f"{plugin}, IO binding", _onnx, "plugin", "run_bound"),
        ("ort-build", build, _asked, worker, "run"),
        ("ort-build-bound", f"{build}, IO binding", _asked, worker, "run_bound"),
    )
    return [Subject(id, text, functools.partial(f, *given)) for id, text, f, *given in rows]
