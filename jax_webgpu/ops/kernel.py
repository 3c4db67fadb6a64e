"""Any kernel folder in the manifest format as a JAX function."""

import functools
import inspect
import os
import re
from collections import namedtuple
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np

from jax_webgpu import config, device, folder, hub, plan, primitive, runtime, variants
from jax_webgpu.batch import Batch
from jax_webgpu.batch import check as check_batch
from jax_webgpu.capabilities import IDEAL
from jax_webgpu.describe import describe
from jax_webgpu.errors import CallError, DerivativeError, DTypeError
from jax_webgpu.expressions import EVERY, Expression
from jax_webgpu.ops.arguments import (
    Given,
    admitted,
    arrays_of,
    as_int64,
    asked_of,
    bind,
    filled,
)
from jax_webgpu.ops.derivatives import Differentiated, Rule, kind
from jax_webgpu.primitive import Call
from jax_webgpu.resolve import (
    Pairs,
    Resolved,
    Tensor,
    checked_tunables,
    resolve,
    stated_shape,
)
from jax_webgpu.runtime import Operator
from jax_webgpu.spec import Spec, loads
from jax_webgpu.values import UNDEFINED

VMAP_METHODS = ("sequential", "expand_dims", "broadcast_all")


def load_kernel(
    source: str | os.PathLike[str],
    *,
    version: int | None = None,
    revision: str | None = None,
    vmap_axis: int | Mapping[str, int] | None = None,
    vmap_method: str | None = None,
    tunables: Mapping[str, Any] | None = None,
) -> "Kernel":
    """Loads a kernel folder: a ``manifest.json`` and the WGSL templates that it names.

    Args:
      source: a folder; or, where there is none of this name, the id of a repository of the type
        "kernel" on the Hugging Face Hub, which needs the extra ``hub``. Where the folder has a
        ``metadata.json``, the files must have the digests that it lists.
      version: of a repository's contract, such as 1; a folder has none.
      revision: in place of a version, the 40 digits of a commit.
      vmap_axis: the axis of every input and output along which the kernel makes no difference
        between one array and several one behind the other; or, by port name, that of some inputs
        and of every output. `jax.vmap` then makes one call, in which no axis is added, and this
        one is as many times as long as the batch has elements; negative ones count from the last
        axis of a single element. An input that the batch shares is repeated along its axis, or
        stays as it is where it has no axes or is not named. Where one that is mapped has none, or
        the axes are not equally long, the kernel is called for each element.
      vmap_method: in place of `vmap_axis`, in the words of `jax.pure_callback`:
        ``"sequential"``, the default, calls the kernel for each element of the batch;
        ``"expand_dims"`` and ``"broadcast_all"`` call it once with one more axis in front, of
        size 1 or of the batch's for what is not mapped. A call that stands for a batch is tried
        before it first runs, and refused if the kernel mixes what `vmap` put into it.
      tunables: values for the manifest's tunables, in place of their defaults.

    Returns:
      A function of JAX arrays.

    Raises:
      SpecError: the folder is not in the format, or a file has not the digest that its metadata
        lists; the message gives file and JSON path or line.
      ValueError, TypeError: there is no such folder, or an argument does not fit.
      HubError: the Hub cannot be reached, or has no such kernel.
      MissingExtraError: the Hub's client is not installed.
    """
    if vmap_axis is not None and vmap_method is not None:
        raise CallError(
            f"vmap_axis is {vmap_axis!r} and vmap_method {vmap_method!r}; expected at most one of "
            "them: each says how jax.vmap makes one call of a batch"
        )
    options = {
        "vmap_axis": vmap_axis,
        "vmap_method": _vmap_method(vmap_method),
        "tunables": _tunables(tunables),
    }
    files = open_folder(source, version=version, revision=revision)
    return Kernel(files.read_bytes(folder.MANIFEST), files.read_bytes, files.path, options)


def open_folder(
    source: str | os.PathLike[str], *, version: int | None = None, revision: str | None = None
) -> folder.Folder:
    """The verified files of a folder here or on the Hub; as for `load_kernel`."""
    given = _source(source)
    path = Path(given)
    try:
        is_folder, is_file = path.is_dir(), path.is_file()
    except OSError as error:  # a name that no file can have
        raise CallError(f"there is no kernel folder {_brief(given)}: {error.strerror}") from None
    if is_folder:
        for name, value in (("version", version), ("revision", revision)):
            if value is not None:
                raise CallError(
                    f"{name} is {value!r}, and {_brief(given)} is a folder here, which has none; "
                    "it is of a repository on the Hub"
                )
        return folder.read(path)
    if is_file:
        raise CallError(f"{given} is a file; give its folder")
    if version is None and revision is None and not re.fullmatch(r"[\w.-]+/[\w.-]+", given):
        raise CallError(f"there is no kernel folder {_brief(given)}")
    fetched = hub.fetch(given, version=version, revision=revision)
    return folder.read(fetched, fetched=True)


class Kernel:
    """A kernel folder as a JAX function; `load_kernel` makes it.

    Called with arrays by position, in the order of the manifest's inputs, or by name; with
    attributes and scalar arguments by name; and with ``outputs``, which names optional outputs,
    or gives shapes that the manifest does not, or `jax.ShapeDtypeStruct`s where no input decides
    the dtype. An int64 input takes int32, and an int64 output is int32, where JAX's 64-bit mode is
    off. The result is an array, or a named tuple of several.

    Attributes:
      spec: the manifest.
      vmap_axes: by port name; empty where no batch is folded.
    """

    def __init__(
        self,
        manifest: bytes,
        templates: Callable[[str], bytes],
        path: Path,
        options: Mapping[str, Any],
    ):
        self.spec = spec = loads(manifest, path / folder.MANIFEST, templates)
        self.vmap_axes = _vmap_axes(spec, options["vmap_axis"])
        self.vmap_method = options["vmap_method"]
        self.tunables = checked_tunables(spec, options["tunables"])
        self._made_from = manifest, path, options
        self._jvp: Callable[..., Any] | None = None
        self._vjp: tuple[Callable[..., Any], Callable[..., Any]] | None = None
        self._transpose: Callable[..., Any] | None = None
        self._reference: Callable[..., Any] | None = None
        self.__name__ = self.__qualname__ = _snake_case(spec.name)
        self.__doc__ = describe(spec)
        self.__signature__ = _signature(spec)
        # Made now, so that what another process exported can be read before the first call.
        needed = tuple(name for name, port in spec.outputs.items() if not port.optional)
        for names in (needed, tuple(spec.outputs)):
            if len(names) > 1:
                _named_tuple(spec.name, names)

    def __repr__(self) -> str:
        return f"<kernel {self.spec!r}>"

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled with the files' contents: another process needs no folder."""
        texts = {name: each.source.encode() for name, each in self.spec.templates.items()}
        rules = {name: getattr(self, name) for name in _RULES}
        return _unpickled, (*self._made_from, texts), rules

    def __get__(self, instance: Any, owner: type | None = None) -> "Kernel":
        """Itself, as the member of a class; it makes `help` take a kernel for a function."""
        return self

    def __call__(
        self,
        /,
        *inputs: Any,
        outputs: Mapping[str, Any] | Iterable[str] | None = None,
        **named: Any,
    ) -> Any:
        """Calls the kernel; see the class.

        Raises:
          ValueError: a name, shape, dtype or value does not fit; the message is in the names of
            the manifest.
          TypeError: an input is no array, or an attribute is not static.
          jax_webgpu.ShaderError: wgpu refuses the WGSL.
          jax_webgpu.LimitError: a tunable that is set is more than the device can do.
          jax_webgpu.DeviceError: the device cannot run the call (inside a
            `jax.errors.JaxRuntimeError`).
        """
        bound, attributes, args = bind(self.spec, inputs, named)
        arrays = arrays_of(self.spec, bound)
        asked = asked_of(self.spec, outputs)
        if self._jvp is None and self._vjp is None:
            return self._bind(attributes, args, asked, *arrays)
        call = partial(self._bind, attributes, args, asked)
        known = filled(self.spec, attributes) | dict.fromkeys(self.spec.args) | dict(args)
        if outputs is not None:
            known["outputs"] = outputs
        names = tuple(name for name, _ in asked)
        differentiated = Differentiated(
            kernel=self.__name__,
            inputs=tuple(self.spec.inputs),
            outputs=names,
            results=partial(self._results, attributes, args, asked),
            packed=partial(_packed, self.spec.name, names),
            known=known,
        )
        if self._jvp is not None:
            return differentiated.with_jvp(call, self._jvp)(*arrays)
        assert self._vjp is not None
        return differentiated.with_vjp(call, *self._vjp)(*arrays)

    def _bind(self, attributes: Pairs, args: Pairs, asked: Any, *arrays: Any) -> Any:
        """`arrays` are those of all inputs, None where one is left out."""
        static, operands = self._static(args, asked, arrays)
        results = _registered(self.spec).bind(operands, attributes, static)
        return _packed(self.spec.name, tuple(name for name, _ in asked), results)

    def _results(
        self, attributes: Pairs, args: Pairs, asked: Any, *arrays: Any
    ) -> tuple[Tensor, ...]:
        """The outputs that `_bind` would give."""
        static, operands = self._static(args, asked, arrays)
        call = Call(attributes, static, config.settings())
        return _registered(self.spec).rules.results(call, primitive.tensors_of(operands))

    def _static(self, args: Pairs, asked: Any, arrays: Sequence[Any]) -> tuple[Pairs, list[Any]]:
        """What a call keeps beside its attributes, and its operands."""
        ports = zip(self.spec.inputs, arrays, strict=True)
        static = (
            ("kernel", self),
            ("inputs", tuple(name for name, each in ports if each is not None)),
            ("outputs", asked),
            ("args", args),
            ("x64", jax.dtypes.canonicalize_dtype("int64") == np.int64),
        )
        return static, [each for each in arrays if each is not None]

    # ---- derivatives: setting one clears JAX's caches, which hold calls traced without it

    def defjvp(self, rule: Callable[..., Any]) -> Callable[..., Any]:
        """Sets the derivative, as `jax.custom_jvp` has it; can be used as a decorator.

        Args:
          rule: called with the inputs and with their tangents, two tuples in the order of the
            manifest's inputs, None for what is left out, and with the attributes and arguments by
            name, the defaults too; returns the kernel's result and its tangent. JAX transposes it
            for reverse mode.

        Returns:
          The rule.

        Raises:
          TypeError: it is no function. What a rule takes and gives is checked when it is called.
        """
        self._jvp, self._vjp = _function("defjvp", rule), None
        jax.clear_caches()
        return rule

    def defvjp(self, forward: Callable[..., Any], backward: Callable[..., Any]) -> None:
        """Sets the derivative for reverse mode alone, as `jax.custom_vjp` has it.

        Args:
          forward: called with the inputs, None for what is left out, and with the attributes and
            arguments by name; returns the kernel's result and what `backward` needs.
          backward: called with that and the result's cotangent, and the attributes and arguments
            by name; returns a tuple of the inputs' cotangents, None for one that has none, or the
            cotangent of the one input.

        Raises:
          TypeError: one is no function.
        """
        self._vjp = _function("defvjp", forward), _function("defvjp", backward)
        self._jvp = None
        jax.clear_caches()

    def deftranspose(self, transpose: Callable[..., Any]) -> Callable[..., Any]:
        """Says that the kernel is linear, jointly in all its inputs of a float type.

        Derivatives of any order, forward and reverse, follow.

        Args:
          transpose: another kernel, or a function; called with the cotangents of the outputs, then
            with the inputs that are not of a float type, and with the attributes and arguments by
            name, of which a kernel is given those that it has. Returns the cotangent of the one
            float input, or a tuple of theirs.

        Returns:
          The transpose.

        Raises:
          TypeError: it is no function.
        """
        self._transpose = _function("deftranspose", transpose)
        jax.clear_caches()
        return transpose

    def defreference(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Sets what `configure(implementation="reference")` runs in place of the kernel.

        Args:
          function: called as the kernel is, in plain JAX; returns an array or a tuple of them.

        Returns:
          The function.

        Raises:
          TypeError: it is no function.
        """
        if self._reference is not None:
            jax.clear_caches()  # of calls that were compiled with the one before
        self._reference = _function("defreference", function)
        return function


_RULES = ("_jvp", "_vjp", "_transpose", "_reference")


def _unpickled(
    manifest: bytes, path: Path, options: Mapping[str, Any], texts: Mapping[str, bytes]
) -> Kernel:
    return Kernel(manifest, texts.__getitem__, path, options)


# ---- checks -------------------------------------------------------------------------------------


def _function(setter: str, given: Any) -> Callable[..., Any]:
    if not callable(given):
        raise DTypeError(f"{setter} takes a function, got {type(given).__name__}")
    function: Callable[..., Any] = given
    return function


def _source(source: Any) -> str:
    given = os.fspath(source) if isinstance(source, os.PathLike) else source
    if not isinstance(given, str):
        raise DTypeError(f"source must be a path or a repository id, got {type(given).__name__}")
    if not given or "\0" in given:
        raise CallError(f"source is {given!r}; expected a folder or a repository id")
    return given


def _brief(source: str) -> str:
    """A name as it can be printed."""
    shown = source if source.isprintable() and source.strip() else repr(source)
    return shown if len(shown) <= 200 else f"{shown[:200]}…"


def _vmap_method(method: Any) -> str:
    method = "sequential" if method is None else method
    if not isinstance(method, str) or method not in VMAP_METHODS:
        expected = ", ".join(VMAP_METHODS)
        raise CallError(f"vmap_method is {method!r}; expected one of {expected}")
    return method


def _tunables(tunables: Any) -> dict[str, Any]:
    tunables = {} if tunables is None else tunables
    if not isinstance(tunables, Mapping) or not all(isinstance(name, str) for name in tunables):
        raise CallError(f"tunables is {tunables!r}; expected a mapping of names to values")
    return dict(tunables)


def _vmap_axes(spec: Spec, axis: Any) -> dict[str, int]:
    ports = {*spec.inputs, *spec.outputs}
    if axis is None:
        return {}
    axes = axis if isinstance(axis, Mapping) else dict.fromkeys(ports, axis)
    for name, each in axes.items():
        if name not in ports:
            raise CallError(f"vmap_axis names {name!r}; {spec.name} has {', '.join(sorted(ports))}")
        if isinstance(each, bool) or not isinstance(each, int):
            raise DTypeError(f"vmap_axis must be an integer, or integers by name, got {each!r}")
        rank = (spec.inputs.get(name) or spec.outputs[name]).rank
        if isinstance(axis, Mapping) and isinstance(rank, int) and not -rank <= each < rank:
            raise CallError(f"vmap_axis is {each} for {name}, which has the rank {rank}")
    for name in spec.outputs:
        if name not in axes:
            raise CallError(f"vmap_axis names no axis of the output {name}")
    return dict(axes)


# ---- results and signature ------------------------------------------------------------


def _packed(name: str, names: tuple[str, ...], results: Sequence[Any]) -> Any:
    if len(results) == 1:
        return results[0]
    return _named_tuple(name, names)(*results)


def _named_tuple(name: str, names: tuple[str, ...]) -> Any:
    """The type of a result of several arrays: one for each name of a kernel and its outputs."""
    found = _named_tuples.get((name, names))
    if found is not None:
        return found
    made: Any = namedtuple(_identifier(name), names, rename=True)  # type: ignore[misc]
    found = _named_tuples.setdefault((name, names), made)
    if found is made:  # of two threads the first
        # Or `jax.export` could not write down a function that returns one.
        jax.export.register_namedtuple_serialization(
            made, serialized_name=f"jax_webgpu.{name}({', '.join(names)})"
        )
    return found


_named_tuples: dict[tuple[str, tuple[str, ...]], Any] = {}


def _identifier(name: str) -> str:
    return name if name.isidentifier() else "kernel"


def _snake_case(name: str) -> str:
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name)
    return _identifier(words).lower()


def _signature(spec: Spec) -> inspect.Signature:
    """Of what has a name that Python takes."""
    kinds = inspect.Parameter
    optional = [name for name, port in spec.inputs.items() if port.optional]
    inputs, rest = [name for name in spec.inputs if name.isidentifier()], False
    parameters = []
    for name in inputs:
        rest = rest or name in optional
        default = None if rest else kinds.empty
        parameters.append(kinds(name, kinds.POSITIONAL_OR_KEYWORD, default=default))
    own = {name: each.default for name, each in spec.attributes.items()}
    own |= {name: None for name in spec.args}
    for name, value in own.items():
        if name.isidentifier() and name not in inputs:
            value = None if value is UNDEFINED else value
            parameters.append(kinds(name, kinds.KEYWORD_ONLY, default=value))
    if "outputs" not in {*inputs, *own}:
        parameters.append(kinds("outputs", kinds.KEYWORD_ONLY, default=None))
    return inspect.Signature(parameters)


# ---- primitive ----------------------------------------------------------------------------------


@functools.lru_cache(1024)
def _registered(spec: Spec) -> primitive.Registered:
    return primitive.register(Rules(spec))


def _check_shapes(resolved: Resolved, asked: tuple[tuple[str, Given], ...]) -> None:
    """A shape that the caller gives beside the manifest's must be the same.

    The kernel writes what the manifest says, and of a larger array the rest would be left as it is.
    """
    shapes = {name: tensor.shape for name, tensor in resolved.outputs}
    for name, given in asked:
        stated = None if given is None else stated_shape(resolved, name)
        if stated is not None and stated != shapes[name]:
            raise CallError(
                f"{resolved.spec.name}: outputs gives {name} the shape {shapes[name]}; it is "
                f"{stated} in this call"
            )


def _clearer(
    error: CallError,
    spec: Spec,
    inputs: Mapping[str, Tensor],
    named: Mapping[str, Mapping[str, Any]],
) -> CallError:
    """Why a call is refused, as far as its inputs tell; else the error itself.

    The shapes of outputs come before `when`, and fail where an input is not what the manifest
    takes: in words of an expression, where `when` may say what is wrong.
    """
    outputs = re.compile("|".join(rf"\b{re.escape(name)}\b" for name in spec.outputs) or "(?!)")
    lost = {EVERY, *spec.derive}

    def tells(clause: Expression) -> bool:
        return not outputs.search(clause.text) and clause.reads.isdisjoint(lost)

    bare = replace(
        spec,
        outputs={},
        derive={},
        when=tuple(filter(tells, spec.when)),
        variants=tuple(
            replace(each, when=tuple(filter(tells, each.when)), superseded_by=())
            for each in spec.variants
        ),
        digest=f"{spec.digest} without outputs",
    )
    try:
        variants.select(resolve(bare, inputs, **named), IDEAL)
    except CallError as refusal:
        return refusal
    if "the shape of " not in str(error):
        return error
    for name, tensor in inputs.items():
        rank = spec.inputs[name].rank
        if isinstance(rank, int) and rank != len(tensor.shape):
            return CallError(f"{spec.name}: {name} is {tensor}; expected an array of rank {rank}")
    shown = ", ".join(f"{name} = {each}" for name, each in inputs.items())
    return CallError(f"{error}; of {shown}")


def _early(static: Pairs, resolved: Resolved) -> None:
    """Compiles the call's WGSL, and tries a call that stands for a batch."""
    operator, gpu = _registered(resolved.spec).operator, device.get()
    runtime.compile_(operator.plan(resolved, gpu.capabilities), gpu)
    batch = dict(static).get("batch")
    if batch is not None:
        check_batch(operator, batch, resolved)


class Rules:
    """Operands are the inputs that are given; what a rule needs more is in the `Kernel`, static.

    Args:
      spec: the manifest.
    """

    def __init__(self, spec: Spec):
        self.operator = Operator(spec.name, spec, early=_early, fit=plan.fitted)

    def resolve(self, call: Call, tensors: tuple[Tensor, ...]) -> Resolved:
        own, static = self.operator.spec, dict(call.static)
        kernel: Kernel = static["kernel"]
        known = {*own.tunables}.union(*(dict(variant.tunables) for variant in own.variants))
        set_ = {name: value for name, value in call.settings.tunables if name in known}
        given = zip(static["inputs"], tensors, strict=True)
        inputs = {name: as_int64(admitted(own, name), each) for name, each in given}
        named = {
            "attributes": dict(call.attributes),
            "args": dict(static["args"]),
            "tunables": {**set_, **dict(kernel.tunables)},
        }
        try:
            resolved = resolve(own, inputs, outputs=dict(static["outputs"]), **named)
            _check_shapes(resolved, static["outputs"])
            return resolved
        except CallError as error:
            raise _clearer(error, own, inputs, named) from None

    def results(self, call: Call, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return self._shown(call, _registered(self.operator.spec).resolve(call, tensors))

    def _shown(self, call: Call, resolved: Resolved) -> tuple[Tensor, ...]:
        """The outputs as JAX has them: no int64 without 64-bit mode."""
        wide = dict(call.static)["x64"]
        return tuple(
            Tensor(tensor.shape, "int32") if tensor.dtype == "int64" and not wide else tensor
            for _, tensor in resolved.outputs
        )

    def narrow(self, call: Call, *operands: Any) -> tuple[Call, Sequence[Any]]:
        return call, operands

    def reference(self, call: Call, *operands: Any) -> Sequence[Any]:
        static = dict(call.static)
        kernel: Kernel = static["kernel"]
        if kernel._reference is None:
            name = kernel.__name__
            raise CallError(
                f"{self.operator.name} has no reference in plain JAX, which "
                f"implementation='reference' runs; give it one: {name}.defreference(function)"
            )
        shapes = {
            name: jax.ShapeDtypeStruct(each.shape, each.dtype) if isinstance(each, Tensor) else each
            for name, each in static["outputs"]
            if each is not None
        }
        given = dict(zip(static["inputs"], operands, strict=True))
        found = kernel._reference(
            *(given.get(name) for name in self.operator.spec.inputs),
            **filled(self.operator.spec, call.attributes),
            **dict(static["args"]),
            **({"outputs": shapes} if shapes else {}),
        )
        return found if isinstance(found, tuple) else (found,)

    def partition(
        self,
        call: Call,
        shapes: Sequence[tuple[int, ...]],
        specs: Sequence[primitive.Spec],
        sizes: Mapping[str, int],
    ) -> tuple[Call, Sequence[primitive.Spec], primitive.Spec]:
        """A kernel may mix all that it is given: each device makes the whole call."""
        return call, [((),) * len(shape) for shape in shapes], ()

    def batch(
        self, call: Call, operands: Sequence[Any], axes: Sequence[int | None], size: int
    ) -> tuple[Sequence[Any], Sequence[int]]:
        if call.settings.implementation == "reference":
            results = jax.vmap(partial(self.reference, call), in_axes=tuple(axes))(*operands)
            return results, [0] * len(results)
        kernel: Kernel = dict(call.static)["kernel"]
        single = [_without(each.shape, axis) for each, axis in zip(operands, axes, strict=True)]
        where = self._folds(call, axes, single)
        if where is not None:
            return self._folded(call, operands, axes, size, single, where)
        if kernel.vmap_method == "sequential":
            return self._sequential(call, operands, axes)
        return self._expanded(call, operands, axes, size, single)

    def _folds(
        self, call: Call, axes: Sequence[int | None], single: Sequence[tuple[int, ...]]
    ) -> list[int | None] | None:
        """For each input the axis that the batch goes into, None where there is none.

        None for all where `vmap_method` applies: an input that is mapped is not named, or has no
        axes, or the axes are not equally long.
        """
        static = dict(call.static)
        kernel: Kernel = static["kernel"]
        where = list[int | None]()
        for name, axis, shape in zip(static["inputs"], axes, single, strict=True):
            at = kernel.vmap_axes.get(name) if shape else None
            if at is None and axis is not None:
                return None
            where.append(None if at is None else self._axis(name, at, shape))
        lengths = {shape[at] for at, shape in zip(where, single, strict=True) if at is not None}
        return where if len(lengths) == 1 else None

    def _axis(self, name: str, axis: int, shape: tuple[int, ...]) -> int:
        """The axis of `vmap_axis` counted from the front."""
        rank = len(shape)
        if not -rank <= axis < rank:
            raise CallError(
                f"{self.operator.name}: vmap_axis is {axis} for {name}, which has the shape "
                f"{shape} for one element of the batch; expected {-rank} to {rank - 1}"
            )
        return axis % rank

    def _folded(
        self,
        call: Call,
        operands: Sequence[Any],
        axes: Sequence[int | None],
        size: int,
        single: Sequence[tuple[int, ...]],
        where: list[int | None],
    ) -> tuple[Sequence[Any], Sequence[int]]:
        """One call: the batch goes into an axis of each port that has one for it."""
        static = dict(call.static)
        folded = []
        for at, operand, axis, shape in zip(where, operands, axes, single, strict=True):
            if at is not None:
                if axis is None:
                    operand = jnp.broadcast_to(jnp.expand_dims(operand, at), _with(shape, at, size))
                else:
                    operand = jnp.moveaxis(operand, axis, at)
                operand = operand.reshape(_times(shape, at, size))
            folded.append(operand)
        one = self._single(call, operands, single)
        wanted = self._shown(call, one)
        vmap_axes = static["kernel"].vmap_axes
        ends = [
            self._axis(name, vmap_axes[name], each.shape) if each.shape else 0
            for (name, _), each in zip(static["outputs"], wanted, strict=True)
        ]
        asked = tuple(
            (name, _resized(given, partial(_times, axis=at, size=size)))
            for (name, given), at in zip(static["outputs"], ends, strict=True)
        )
        batch = Batch(one, size, tuple(where), tuple(ends), static.get("batch"))
        whole = call.with_static(outputs=asked, batch=batch)
        try:
            results = self._outputs_of(whole, folded)
            for (name, _), result, each, at in zip(asked, results, wanted, ends, strict=True):
                if not each.shape or result.shape != _times(each.shape, at, size):
                    raise CallError(
                        f"vmap_axis is {vmap_axes[name]} for {name}, which is {each} for one "
                        f"element, and would be {result}"
                    )
        except CallError as error:
            raise CallError(
                f"{self.operator.name}: vmap_axis folds a batch of {size} into one call, which is "
                f"refused: {error}; vmap_method='sequential', without vmap_axis, calls it for each "
                "element"
            ) from None
        made = _registered(self.operator.spec).apply(whole, *folded)
        unfolded = [
            result.reshape(_with(each.shape, at, size))
            for result, each, at in zip(made, wanted, ends, strict=True)
        ]
        return unfolded, ends

    def _sequential(
        self, call: Call, operands: Sequence[Any], axes: Sequence[int | None]
    ) -> tuple[Sequence[Any], Sequence[int]]:
        """A call for each element of the batch."""
        moved = {
            at: jnp.moveaxis(operand, axis, 0)
            for at, (operand, axis) in enumerate(zip(operands, axes, strict=True))
            if axis is not None
        }

        def one(own: dict[int, Any]) -> Any:
            return _registered(self.operator.spec).apply(
                call, *(own.get(at, operand) for at, operand in enumerate(operands))
            )

        results = jax.lax.map(one, moved)
        return results, [0] * len(results)

    def _expanded(
        self,
        call: Call,
        operands: Sequence[Any],
        axes: Sequence[int | None],
        size: int,
        single: Sequence[tuple[int, ...]],
    ) -> tuple[Sequence[Any], Sequence[int]]:
        """One call, with one more axis in front of every array."""
        static = dict(call.static)
        broadcast = static["kernel"].vmap_method == "broadcast_all"
        expanded = []
        for operand, axis, shape in zip(operands, axes, single, strict=True):
            if axis is not None:
                expanded.append(jnp.moveaxis(operand, axis, 0))
            else:
                one = jnp.expand_dims(operand, 0)
                expanded.append(jnp.broadcast_to(one, (size, *shape)) if broadcast else one)
        asked = tuple(
            (name, _resized(given, lambda shape: (size, *shape)))
            for name, given in static["outputs"]
        )
        alone = self._single(call, operands, single)
        where = tuple(0 if broadcast or axis is not None else None for axis in axes)
        batch = Batch(alone, size, where, (0,) * len(asked), static.get("batch"))
        whole = call.with_static(outputs=asked, batch=batch)
        try:
            results = self._outputs_of(whole, expanded)
            for (name, _), result, each in zip(
                asked, results, self._shown(call, alone), strict=True
            ):
                if result.shape != (size, *each.shape):
                    raise CallError(f"{name} is {result.shape}; expected {(size, *each.shape)}")
        except CallError as error:
            raise CallError(
                f"{self.operator.name}: vmap_method is {static['kernel'].vmap_method}, which makes "
                f"one call with one more axis of {size} in front, which is refused; load it with "
                f"vmap_method='sequential': {error}"
            ) from None
        made = _registered(self.operator.spec).apply(whole, *expanded)
        return made, [0] * len(made)

    def _single(
        self, call: Call, operands: Sequence[Any], shapes: Sequence[tuple[int, ...]]
    ) -> Resolved:
        """The call for one element of a batch, which some device must take."""
        dtypes = [str(operand.dtype) for operand in operands]
        return self._taken(call, tuple(map(Tensor, shapes, dtypes)))

    def _outputs_of(self, call: Call, operands: Sequence[Any]) -> tuple[Tensor, ...]:
        """The outputs as JAX has them, of a call that some device must take."""
        return self._shown(call, self._taken(call, primitive.tensors_of(operands)))

    def _taken(self, call: Call, tensors: tuple[Tensor, ...]) -> Resolved:
        """A call for the engine; `CallError` where no device would take it."""
        resolved = _registered(self.operator.spec).resolve(call, tensors)
        variants.select(resolved, IDEAL)
        return resolved

    def jvp(self, call: Call, operands: Sequence[Any], tangents: Sequence[Any]) -> Sequence[Any]:
        """Of a linear kernel: itself, of the tangents."""
        kernel: Kernel = dict(call.static)["kernel"]
        if all(tangent is None for tangent in tangents):
            return [None] * len(dict(call.static)["outputs"])
        if kernel._transpose is None:
            raise _no_derivative(kernel)
        moved = [
            operand
            if not jnp.issubdtype(operand.dtype, jnp.inexact)
            else jnp.zeros_like(operand)
            if tangent is None
            else tangent
            for operand, tangent in zip(operands, tangents, strict=True)
        ]
        return _registered(self.operator.spec).apply(call, *moved)

    def transpose(
        self, call: Call, cotangents: Sequence[Any], operands: Sequence[Any]
    ) -> Sequence[Any]:
        """Of a linear kernel: what `deftranspose` was given."""
        static = dict(call.static)
        kernel: Kernel = static["kernel"]
        if kernel._transpose is None:
            raise _no_derivative(kernel)
        tensors = primitive.tensors_of(operands)
        wanted = self.results(call, tensors)
        given = [
            jnp.zeros(each.shape, each.dtype) if cotangent is None else cotangent
            for cotangent, each in zip(cotangents, wanted, strict=True)
        ]
        ports = dict(zip(static["inputs"], operands, strict=True))
        floats = {
            name: each for name, each in ports.items() if jnp.issubdtype(each.dtype, jnp.inexact)
        }
        others = {name: each for name, each in ports.items() if name not in floats}
        known = filled(self.operator.spec, call.attributes) | dict(static["args"])
        if isinstance(kernel._transpose, Kernel):
            known = _known_to(kernel._transpose, known, [each.shape for each in floats.values()])
            found = kernel._transpose(*given, *others.values(), **known)
        else:
            takes = (*(f"cotangent_of_{name}" for name, _ in static["outputs"]), *others)
            gives = ", ".join(f"cotangent of {name}" for name in floats)
            rule = Rule(kernel.__name__, known, "deftranspose", kernel._transpose, takes, gives)
            found = rule(*given, *others.values())
        made = self._cotangents(found, floats)
        return [
            made.get(name) if isinstance(operand, jax.ShapeDtypeStruct) else None
            for name, operand in ports.items()
        ]

    def _cotangents(self, found: Any, floats: Mapping[str, Any]) -> dict[str, Any]:
        """What a transpose gives, by input; None for one that has none."""
        parts = tuple(found) if isinstance(found, tuple | list) else (found,)
        if len(parts) != len(floats):
            raise CallError(
                f"{self.operator.name}: the transpose gives {len(parts)} cotangents; expected "
                f"{len(floats)}, one for each input of a float type that is given"
            )
        made = dict(zip(floats, parts, strict=True))
        for name, part in made.items():
            if part is None:
                continue
            (like,) = primitive.tensors_of([floats[name]])
            got = primitive.tensors_of([part])[0] if hasattr(part, "dtype") else kind(part)
            if got != like:
                raise CallError(
                    f"{self.operator.name}: the transpose gives {name} the cotangent {got}; "
                    f"expected {like}"
                )
        return made


def _known_to(
    kernel: Kernel, known: Mapping[str, Any], shapes: Sequence[tuple[int, ...]]
) -> dict[str, Any]:
    """The attributes and arguments that a kernel has too, and the shapes that it does not state."""
    spec = kernel.spec
    own = {name: each for name, each in known.items() if name in {*spec.attributes, *spec.args}}
    unsaid = zip(spec.outputs.values(), shapes, strict=False)
    asked = {port.name: shape for port, shape in unsaid if port.shape is None}
    return own | ({"outputs": asked} if asked else {})


def _no_derivative(kernel: Kernel) -> DerivativeError:
    name = kernel.__name__
    if kernel._jvp is not None or kernel._vjp is not None:
        return DerivativeError(
            f"{name} is called in its own rule with what is differentiated, as if it were linear; "
            f"if it is, say so: {name}.deftranspose(other)"
        )
    return DerivativeError(
        f"{kernel.spec.name} has no derivative; these two lines give it one:\n"
        f"    @{name}.defjvp\n"
        f"    def derivative(primals, tangents, **attributes): "
        f"return {name}(*primals, **attributes), ...\n"
        f"or {name}.defvjp(forward, backward) for reverse mode alone, or, for a linear kernel, "
        f"{name}.deftranspose(other)"
    )


def _resized(given: Given, resize: Callable[[tuple[int, ...]], tuple[int, ...]]) -> Given:
    """What is given of an output, with another shape."""
    if isinstance(given, Tensor):
        return Tensor(resize(given.shape), given.dtype)
    return None if given is None else resize(given)


def _without(shape: tuple[int, ...], axis: int | None) -> tuple[int, ...]:
    return shape if axis is None else (*shape[:axis], *shape[axis + 1 :])


def _with(shape: tuple[int, ...], axis: int, size: int) -> tuple[int, ...]:
    return (*shape[:axis], size, *shape[axis:])


def _times(shape: tuple[int, ...], axis: int, size: int) -> tuple[int, ...]:
    return (*shape[:axis], size * shape[axis], *shape[axis + 1 :]) if shape else shape
