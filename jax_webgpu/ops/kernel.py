"""Any kernel folder in the manifest format as a JAX function."""

import functools
import inspect
import os
import re
from collections import namedtuple
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_webgpu import folder, hub, primitive
from jax_webgpu.capabilities import Capabilities
from jax_webgpu.describe import describe
from jax_webgpu.errors import CallError, DerivativeError, DTypeError
from jax_webgpu.ops.common import array
from jax_webgpu.primitive import Call
from jax_webgpu.resolve import Pairs, Resolved, Tensor, checked_tunables, resolve
from jax_webgpu.runtime import Operator
from jax_webgpu.spec import Spec, loads
from jax_webgpu.values import UNDEFINED

MANIFEST = "manifest.json"
# Of an output: nothing, its shape, or its shape and dtype.
Given = tuple[int, ...] | Tensor | None

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
      version: of a repository's contract, such as 1.
      revision: in place of a version, the 40 digits of a commit.
      vmap_axis: the axis of every input and output along which the kernel makes no difference
        between one array and several one behind the other; or, by port name, that of some inputs
        and of every output. `jax.vmap` then makes one call, with the batch folded into this axis.
        Inputs that are not named must be the same for the whole batch, or `vmap_method` applies.
      vmap_method: what `jax.vmap` does else, in the words of `jax.pure_callback`:
        ``"sequential"``, the default, calls the kernel for each element of the batch;
        ``"expand_dims"`` and ``"broadcast_all"`` call it once with one more axis in front, of
        size 1 or of the batch's for what is not mapped.
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
    options = {
        "vmap_axis": vmap_axis,
        "vmap_method": _vmap_method(vmap_method),
        "tunables": _tunables(tunables),
    }
    files = open_folder(source, version=version, revision=revision)
    return Kernel(files.read_bytes(MANIFEST), files.read_bytes, files.path, options)


def open_folder(
    source: str | os.PathLike[str], *, version: int | None = None, revision: str | None = None
) -> folder.Folder:
    """The verified files of a folder here or on the Hub; see `load_kernel`."""
    given = _source(source)
    path = Path(given)
    if path.is_dir():
        return folder.read(path)
    if path.is_file():
        raise CallError(f"{given} is a file; give its folder")
    if version is None and revision is None and not re.fullmatch(r"[\w.-]+/[\w.-]+", given):
        raise CallError(f"there is no kernel folder {given}")
    fetched = hub.fetch(given, version=version, revision=revision)
    return folder.read(fetched, fetched=True)


class Kernel:
    """A kernel folder as a JAX function; `load_kernel` makes it.

    Called with arrays by position, in the order of the manifest's inputs, or by name; with
    attributes and scalar arguments by name; and with ``outputs``, which names optional outputs,
    or gives shapes that the manifest does not, or `jax.ShapeDtypeStruct`s where no input decides
    the dtype. An int64 input takes int32, and an int64 output
    is int32, where JAX's 64-bit mode is off. The result is an array, or a named tuple of several.

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
        self.spec = spec = loads(manifest, path / MANIFEST, templates)
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
          jax_webgpu.DeviceError: the device cannot run the call (inside a
            `jax.errors.JaxRuntimeError`).
        """
        bound, attributes, args = _bound(self.spec, inputs, named)
        arrays = _arrays(self.spec, bound)
        asked = _asked(self.spec, outputs)
        if self._jvp is None and self._vjp is None:
            return self._bind(attributes, args, asked, *arrays)
        call = functools.partial(self._bind, attributes, args, asked)
        known = _filled(self.spec, attributes) | dict.fromkeys(self.spec.args) | dict(args)
        if outputs is not None:
            known["outputs"] = outputs
        packed = functools.partial(_repacked, self.spec.name, tuple(name for name, _ in asked))
        if self._jvp is not None:
            return _with_jvp(call, functools.partial(self._jvp, **known), packed)(*arrays)
        forward, backward = (functools.partial(rule, **known) for rule in self._vjp or ())
        return _with_vjp(call, forward, backward, packed)(*arrays)

    def _bind(self, attributes: Pairs, args: Pairs, asked: Any, *arrays: Any) -> Any:
        """`arrays` are those of all inputs, None where one is left out."""
        ports = [
            name for name, each in zip(self.spec.inputs, arrays, strict=True) if each is not None
        ]
        static = (
            ("kernel", self),
            ("inputs", tuple(ports)),
            ("outputs", asked),
            ("args", args),
            ("x64", jax.dtypes.canonicalize_dtype("int64") == np.int64),
        )
        operands = [each for each in arrays if each is not None]
        results = _registered(self.spec).bind(operands, attributes, static)
        return _packed(self.spec.name, tuple(name for name, _ in asked), results)

    # ---- derivatives

    def defjvp(self, rule: Callable[..., Any]) -> Callable[..., Any]:
        """Sets the derivative, as `jax.custom_jvp` has it; can be used as a decorator.

        Args:
          rule: called with the inputs and with their tangents, two tuples in the order of the
            manifest's inputs, None for what is left out, and with the attributes and arguments by
            name, the defaults too; returns the kernel's result and its tangent. JAX transposes it
            for reverse mode.
        """
        self._jvp, self._vjp = rule, None
        return rule

    def defvjp(self, forward: Callable[..., Any], backward: Callable[..., Any]) -> None:
        """Sets the derivative for reverse mode alone, as `jax.custom_vjp` has it.

        Args:
          forward: called with the inputs, None for what is left out, and with the attributes and
            arguments by name; returns the kernel's result and what `backward` needs.
          backward: called with that and the result's cotangent, and the attributes and arguments
            by name; returns a tuple of the inputs' cotangents, None for one that has none, or the
            cotangent of the one input.
        """
        self._jvp, self._vjp = None, (forward, backward)

    def deftranspose(self, transpose: Callable[..., Any]) -> Callable[..., Any]:
        """Says that the kernel is linear, jointly in all its inputs of a float type.

        Derivatives of any order, forward and reverse, follow.

        Args:
          transpose: another kernel, or a function; called with the cotangents of the outputs, then
            with the inputs that are not of a float type, and with the attributes and arguments by
            name, of which a kernel is given those that it has. Returns the cotangent of the one
            float input, or a tuple of theirs.
        """
        self._transpose = transpose
        return transpose

    def defreference(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Sets what `configure(implementation="reference")` runs in place of the kernel.

        Args:
          function: called as the kernel is, in plain JAX; returns an array or a tuple of them.
        """
        self._reference = function
        return function


_RULES = ("_jvp", "_vjp", "_transpose", "_reference")


def _unpickled(
    manifest: bytes, path: Path, options: Mapping[str, Any], texts: Mapping[str, bytes]
) -> Kernel:
    return Kernel(manifest, texts.__getitem__, path, options)


# ---- checks -------------------------------------------------------------------------------------


def _source(source: Any) -> str:
    given = os.fspath(source) if isinstance(source, os.PathLike) else source
    if not isinstance(given, str):
        raise DTypeError(f"source must be a path or a repository id, got {type(given).__name__}")
    if not given or "\0" in given:
        raise CallError(f"source is {given!r}; expected a folder or a repository id")
    return given


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
    for name in spec.outputs:
        if name not in axes:
            raise CallError(f"vmap_axis names no axis of the output {name}")
    return dict(axes)


def _bound(
    spec: Spec, inputs: Sequence[Any], named: Mapping[str, Any]
) -> tuple[dict[str, Any], Pairs, Pairs]:
    """The inputs, attributes and arguments of a call, by name."""
    if len(inputs) > len(spec.inputs):
        has = ", ".join(spec.inputs) or "none"
        raise CallError(f"{spec.name} takes {len(spec.inputs)} inputs ({has}), got {len(inputs)}")
    bound = dict(zip(spec.inputs, inputs, strict=False))
    attributes, args = dict[str, Any](), dict[str, Any]()
    for name, value in named.items():
        if name in spec.inputs and name not in bound:
            bound[name] = value
        elif name in spec.attributes:
            attributes[name] = _static(spec, name, value)
        elif name in spec.args:
            args[name] = _static(spec, name, value)
        elif name in spec.inputs:
            raise CallError(f"{spec.name}: the input {name} is given by position and by name")
        else:
            known = ", ".join([*spec.inputs, *spec.attributes, *spec.args, "outputs"])
            raise CallError(f"{spec.name} has no {name!r}; it has {known}")
    return bound, _pairs(attributes), _pairs(args)


def _pairs(values: Mapping[str, Any]) -> Pairs:
    return tuple(sorted((name, value) for name, value in values.items() if value is not None))


def _static(spec: Spec, name: str, value: Any) -> Any:
    """A scalar, or a list of them as a tuple, of Python's types."""
    if isinstance(value, jax.core.Tracer):
        raise DTypeError(
            f"{spec.name}: {name} must be static, got a traced value: {value}; under jax.jit name "
            f"it in static_argnames"
        )
    if isinstance(value, list | tuple):
        return tuple(_static(spec, name, each) for each in value)
    if isinstance(value, np.ndarray | jax.Array | np.generic):
        return _static(spec, name, value.tolist())
    if value is not None and not isinstance(value, bool | int | float | str):
        kind = type(value).__name__
        raise DTypeError(f"{spec.name}: {name} must be a number, a string or a list, got {kind}")
    return value


def _arrays(spec: Spec, bound: Mapping[str, Any]) -> list[jax.Array | None]:
    """An array for each input, None where one is left out.

    A number takes the dtype that arrays of the same type variable have.
    """
    values = {name: bound.get(name) for name in spec.inputs}
    dtypes = {
        spec.inputs[name].dtype: value.dtype
        for name, value in values.items()
        if isinstance(value, jax.Array | np.ndarray | np.generic)
        and str(value.dtype) in _admitted(spec, name)
    }
    arrays = list[jax.Array | None]()
    for name, value in values.items():
        if isinstance(value, bool | int | float):
            value = _number(spec, name, value, dtypes.get(spec.inputs[name].dtype))
        arrays.append(None if value is None else array(value, name))
    return arrays


def _number(spec: Spec, name: str, value: bool | int | float, dtype: Any) -> jax.Array:
    """A Python number as an array of rank 0."""
    allowed = _admitted(spec, name)
    if dtype is None:
        natural = {bool: "bool", int: "int32", float: "float32"}[type(value)]
        wider = ["int64", "float32"] if natural == "int32" else []
        dtype = next((each for each in (natural, *wider) if each in allowed), allowed[0])
    dtype = jax.dtypes.canonicalize_dtype(dtype)
    kind = np.dtype(dtype).kind
    exact = kind == "f" or (kind == "b") == isinstance(value, bool)
    if not exact or (kind in "iu" and not isinstance(value, int)):
        raise DTypeError(f"{spec.name}: {name} is the number {value}; expected one of {dtype}")
    if kind in "iu" and not np.iinfo(dtype).min <= value <= np.iinfo(dtype).max:
        raise CallError(f"{spec.name}: {name} is {value}, outside of the range of {dtype}")
    return jnp.asarray(value, dtype)


def _admitted(spec: Spec, name: str) -> tuple[str, ...]:
    """The dtypes that an input or an output may have."""
    variable = (spec.inputs.get(name) or spec.outputs[name]).dtype
    return spec.type_constraints.get(variable, (variable,))


def _asked(spec: Spec, outputs: Any) -> tuple[tuple[str, Given], ...]:
    """The outputs that are wanted, in the manifest's order, with what is given of them."""
    given = dict[str, Any]()
    if isinstance(outputs, Mapping):
        given = dict(outputs)
    elif outputs is not None:
        names = [outputs] if isinstance(outputs, str) else outputs
        if not isinstance(names, Iterable) or isinstance(names, jax.Array | np.ndarray):
            kind = type(outputs).__name__
            raise DTypeError(f"outputs must be names, or shapes by name, got {kind}")
        given = dict.fromkeys(map(str, names))
    for name, shape in given.items():
        if name not in spec.outputs:
            known = ", ".join(spec.outputs)
            raise CallError(f"{spec.name} has no output {name!r}; it has {known}")
        if hasattr(shape, "shape") and hasattr(shape, "dtype"):
            tensor = Tensor(tuple(shape.shape), str(shape.dtype))
            given[name] = _as_int64(_admitted(spec, name), tensor)
        elif shape is not None:
            sizes = shape if isinstance(shape, list | tuple) else (shape,)
            given[name] = tuple(_size(spec, name, size) for size in sizes)
    return tuple(
        (name, given.get(name))
        for name, port in spec.outputs.items()
        if name in given or not port.optional
    )


def _size(spec: Spec, name: str, size: Any) -> int:
    size = _static(spec, f"the shape of {name}", size)
    if isinstance(size, bool) or not isinstance(size, int) or size < 0:
        raise CallError(f"{spec.name}: the shape of {name} has {size!r}; expected 0 or more")
    return size


def _filled(spec: Spec, attributes: Pairs) -> dict[str, Any]:
    """The attributes with the manifest's defaults."""
    given = dict(attributes)
    every = ((name, given.get(name, each.default)) for name, each in spec.attributes.items())
    return {name: value for name, value in every if value is not UNDEFINED}


# ---- results, signature, derivatives ------------------------------------------------------------


def _packed(name: str, names: tuple[str, ...], results: Sequence[Any]) -> Any:
    if len(results) == 1:
        return results[0]
    return _named_tuple(name, names)(*results)


def _repacked(name: str, names: tuple[str, ...], results: Any) -> Any:
    """What a rule returns as the kernel would: a plain tuple of several as the named one."""
    return _packed(name, names, results) if len(names) > 1 else results


@functools.cache
def _named_tuple(name: str, names: tuple[str, ...]) -> Any:
    return namedtuple(_identifier(name), names, rename=True)


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


def _with_jvp(
    call: Callable[..., Any], rule: Callable[..., Any], packed: Callable[[Any], Any]
) -> Callable[..., Any]:
    def both(primals: Any, tangents: Any) -> Any:
        result, tangent = rule(primals, tangents)
        return packed(result), packed(tangent)

    differentiable = jax.custom_jvp(call)
    differentiable.defjvp(both)
    return differentiable


def _with_vjp(
    call: Callable[..., Any],
    forward: Callable[..., Any],
    backward: Callable[..., Any],
    packed: Callable[[Any], Any],
) -> Callable[..., Any]:
    def first(*arrays: Any) -> Any:
        result, kept = forward(*arrays)
        return packed(result), kept

    def second(kept: Any, cotangent: Any) -> Any:
        found = backward(kept, cotangent)
        return found if isinstance(found, tuple) else (found,)

    differentiable = jax.custom_vjp(call)
    differentiable.defvjp(first, second)
    return differentiable


# ---- primitive ----------------------------------------------------------------------------------


@functools.lru_cache(1024)
def _registered(spec: Spec) -> primitive.Registered:
    return primitive.register(Rules(spec))


def _fit(resolved: Resolved, capabilities: Capabilities) -> Resolved:
    """A WORKGROUP_SIZE that is not set is no larger than the device can run."""
    default = resolved.spec.tunables.get("WORKGROUP_SIZE")
    if not isinstance(default, int) or "WORKGROUP_SIZE" in dict(resolved.tunables):
        return resolved
    limits = ("maxComputeInvocationsPerWorkgroup", "maxComputeWorkgroupSizeX")
    most = min(map(capabilities.limit, limits))
    return resolved if default <= most else resolved.with_tunables(WORKGROUP_SIZE=most)


class Rules:
    """Operands are the inputs that are given; what a rule needs more is in the `Kernel`, static.

    Args:
      spec: the manifest.
    """

    def __init__(self, spec: Spec):
        self.operator = Operator(spec.name, spec, fit=_fit)

    def resolve(self, call: Call, tensors: tuple[Tensor, ...]) -> Resolved:
        own, static = self.operator.spec, dict(call.static)
        kernel: Kernel = static["kernel"]
        known = {*own.tunables}.union(*(dict(variant.tunables) for variant in own.variants))
        set_ = {name: value for name, value in call.settings.tunables if name in known}
        inputs = dict(zip(static["inputs"], tensors, strict=True))
        return resolve(
            own,
            {name: _as_int64(_admitted(own, name), each) for name, each in inputs.items()},
            attributes=dict(call.attributes),
            args=dict(static["args"]),
            outputs=dict(static["outputs"]),
            tunables={**set_, **dict(kernel.tunables)},
        )

    def results(self, call: Call, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        wide = dict(call.static)["x64"]
        outputs = _registered(self.operator.spec).resolve(call, tensors).outputs
        return tuple(
            Tensor(tensor.shape, "int32") if tensor.dtype == "int64" and not wide else tensor
            for _, tensor in outputs
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
            **_filled(self.operator.spec, call.attributes),
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
        kernel: Kernel = dict(call.static)["kernel"]
        inputs = dict(call.static)["inputs"]
        mapped = dict(zip(inputs, axes, strict=True))
        own = {name: each for name, each in kernel.vmap_axes.items() if name in mapped}
        single = [_without(each.shape, axis) for each, axis in zip(operands, axes, strict=True)]
        ranks = dict(zip(inputs, map(len, single), strict=True))
        lengths = {
            shape[own[name]]
            for name, shape in zip(inputs, single, strict=True)
            if name in own and -ranks[name] <= own[name] < ranks[name]
        }
        folds = all(name in own or axis is None for name, axis in mapped.items())
        if kernel.vmap_axes and folds and len(lengths) == 1:
            return self._folded(call, operands, axes, size, single)
        if kernel.vmap_method == "sequential":
            return self._sequential(call, operands, axes)
        return self._expanded(call, operands, axes, size, single)

    def _folded(
        self,
        call: Call,
        operands: Sequence[Any],
        axes: Sequence[int | None],
        size: int,
        single: Sequence[tuple[int, ...]],
    ) -> tuple[Sequence[Any], Sequence[int]]:
        """One call: the batch goes into an axis of each port that has one for it."""
        static = dict(call.static)
        where = static["kernel"].vmap_axes
        folded = []
        for name, operand, axis, shape in zip(
            static["inputs"], operands, axes, single, strict=True
        ):
            if name in where:
                at = where[name] % len(shape)
                if axis is None:
                    operand = jnp.broadcast_to(jnp.expand_dims(operand, at), _with(shape, at, size))
                else:
                    operand = jnp.moveaxis(operand, axis, at)
                operand = operand.reshape(_times(shape, at, size))
            folded.append(operand)
        wanted = self._single(call, operands, single)
        ends = [
            where[name] % max(1, len(each.shape))
            for (name, _), each in zip(static["outputs"], wanted, strict=True)
        ]
        asked = tuple(
            (name, _resized(given, functools.partial(_times, axis=at, size=size)))
            for (name, given), at in zip(static["outputs"], ends, strict=True)
        )
        results = _registered(self.operator.spec).apply(call.with_static(outputs=asked), *folded)
        unfolded = []
        for (name, _), result, each, at in zip(asked, results, wanted, ends, strict=True):
            if not each.shape or result.shape != _times(each.shape, at, size):
                raise CallError(
                    f"{self.operator.name}: vmap_axis is {where[name]} for {name}, which is "
                    f"{each}: folding a batch of {size} into that axis of the inputs gives "
                    f"{result.shape}"
                )
            unfolded.append(result.reshape(_with(each.shape, at, size)))
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
        results = _registered(self.operator.spec).apply(call.with_static(outputs=asked), *expanded)
        for (name, _), result, each in zip(
            asked, results, self._single(call, operands, single), strict=True
        ):
            if result.shape != (size, *each.shape):
                raise CallError(
                    f"{self.operator.name}: with one more axis of {size} in front of the inputs "
                    f"{name} is {result.shape}; expected {(size, *each.shape)}: load it with "
                    "vmap_method='sequential'"
                )
        return results, [0] * len(results)

    def _single(
        self, call: Call, operands: Sequence[Any], shapes: Sequence[tuple[int, ...]]
    ) -> tuple[Tensor, ...]:
        """The outputs for one element of a batch."""
        dtypes = [str(operand.dtype) for operand in operands]
        return self.results(call, tuple(map(Tensor, shapes, dtypes)))

    def jvp(self, call: Call, operands: Sequence[Any], tangents: Sequence[Any]) -> Sequence[Any]:
        """Of a linear kernel: itself, of the tangents."""
        kernel: Kernel = dict(call.static)["kernel"]
        if kernel._transpose is None:
            if all(tangent is None for tangent in tangents):
                return [None] * len(dict(call.static)["outputs"])
            raise _no_derivative(kernel)
        if all(tangent is None for tangent in tangents):
            return [None] * len(dict(call.static)["outputs"])
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
        floats = [jnp.issubdtype(operand.dtype, jnp.inexact) for operand in operands]
        others = [each for each, is_float in zip(operands, floats, strict=True) if not is_float]
        known = _filled(self.operator.spec, call.attributes) | dict(static["args"])
        if isinstance(kernel._transpose, Kernel):
            other = kernel._transpose.spec
            known = {n: v for n, v in known.items() if n in other.attributes or n in other.args}
            shapes = (
                each.shape for each, is_float in zip(operands, floats, strict=True) if is_float
            )
            unsaid = zip(other.outputs.values(), shapes, strict=False)
            asked = {port.name: shape for port, shape in unsaid if port.shape is None}
            known |= {"outputs": asked} if asked else {}
        found = kernel._transpose(*given, *others, **known)
        parts = iter(found if isinstance(found, tuple) else (found,))
        made = [next(parts, None) if is_float else None for is_float in floats]
        for name, operand, part in zip(static["inputs"], operands, made, strict=True):
            if part is not None and part.shape != operand.shape:
                raise CallError(
                    f"{self.operator.name}: the transpose gives {name} a cotangent of shape "
                    f"{part.shape}; expected {operand.shape}"
                )
        return [
            part if isinstance(operand, jax.ShapeDtypeStruct) else None
            for part, operand in zip(made, operands, strict=True)
        ]


def _as_int64(admitted: tuple[str, ...], tensor: Tensor) -> Tensor:
    """An int32 array for a port that takes int64 and not int32, as is usual without 64-bit mode."""
    if tensor.dtype == "int32" and "int64" in admitted and "int32" not in admitted:
        return Tensor(tensor.shape, "int64")
    return tensor


def _no_derivative(kernel: Kernel) -> DerivativeError:
    name = kernel.__name__
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
