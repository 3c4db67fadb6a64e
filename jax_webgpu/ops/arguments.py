"""What the user of a kernel gives a call: checked, and in the forms that the primitive takes."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_webgpu.errors import CallError, DTypeError
from jax_webgpu.ops.common import array, is_key
from jax_webgpu.resolve import Pairs, Tensor, checked_args, checked_attributes
from jax_webgpu.spec import Spec
from jax_webgpu.values import UNDEFINED, counted

# Of an output: nothing, its shape, or its shape and dtype.
Given = tuple[int, ...] | Tensor | None


def bind(
    spec: Spec, inputs: Sequence[Any], named: Mapping[str, Any]
) -> tuple[dict[str, Any], Pairs, Pairs]:
    """The inputs, attributes and arguments of a call, by name."""
    if len(inputs) > len(spec.inputs):
        count, has = len(spec.inputs), ", ".join(spec.inputs) or "none"
        inputs_ = f"{count} input{'s' * (count != 1)}"
        other = next(iter([*spec.attributes, *spec.args]), None)
        hint = f"; attributes and arguments go by name, as {other}=…" if other else ""
        raise CallError(f"{spec.name} takes {inputs_} ({has}), got {len(inputs)}{hint}")
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
    # Here, since JAX may take a call for an earlier one that is equal: True is 1 to it.
    attributes = dict(checked_attributes(spec, attributes)) if attributes else attributes
    given = {name: value for name, value in attributes.items() if named.get(name) is not None}
    return bound, _pairs(given), _pairs(dict(checked_args(spec, args)) if args else args)


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
    if isinstance(value, np.ndarray | jax.Array | np.generic) and not is_key(value):
        plain = value.tolist()
        if not isinstance(plain, np.generic):  # as a long double stays
            return _static(spec, name, plain)
    if value is not None and not isinstance(value, bool | int | float | str):
        kind = type(value).__name__
        raise DTypeError(f"{spec.name}: {name} must be a number, a string or a list, got {kind}")
    return value


def arrays_of(spec: Spec, bound: Mapping[str, Any]) -> list[jax.Array | None]:
    """An array for each input, None where one is left out.

    A number, and an array whose type is weak, as of a number that is traced, takes the dtype that
    arrays of the same type variable have; and where there are only such, one that takes them all.
    """
    values = {name: bound.get(name) for name in spec.inputs}
    strong, weak = dict[str, str](), dict[str, set[str]]()
    for name, value in values.items():
        variable = spec.inputs[name].dtype
        if _is_weak(value):
            weak.setdefault(variable, set()).add(_kind_of(value))
        elif (dtype := _dtype_of(value)) in admitted(spec, name):
            strong[variable] = dtype
    arrays = list[jax.Array | None]()
    for name, value in values.items():
        variable = spec.inputs[name].dtype
        if _is_weak(value):
            wanted = strong.get(variable) or _natural(admitted(spec, name), weak[variable])
            value = _made(spec, name, value, wanted)
        _check_narrow(spec, name, value)
        arrays.append(None if value is None else array(value, name))
    return arrays


def _check_narrow(spec: Spec, name: str, value: Any) -> None:
    """Whole numbers of NumPy's of 64 bits, which without 64-bit mode JAX would cut off."""
    if not isinstance(value, np.ndarray | np.generic) or value.dtype.kind not in "iu":
        return
    dtype, numbers = np.dtype(jax.dtypes.canonicalize_dtype(value.dtype)), np.asarray(value)
    if numbers.dtype.itemsize > dtype.itemsize:
        info = np.iinfo(dtype)
        wrong = (numbers < info.min) | (numbers > info.max)
        if wrong.any():
            first = np.unravel_index(int(np.argmax(wrong)), wrong.shape)
            place = f"{name}[{', '.join(map(str, first))}]" if first else name
            raise CallError(
                f"{spec.name}: {place} is {numbers[first]}, outside of the range of {dtype}: "
                "enable JAX's 64-bit mode, jax_enable_x64"
            )


def _dtype_of(value: Any) -> str:
    """The dtype that an array has in JAX; empty for anything else."""
    if not isinstance(value, jax.Array | np.ndarray | np.generic):
        return ""
    is_number = isinstance(value.dtype, np.dtype) and value.dtype.kind in "biuf"
    return str(jax.dtypes.canonicalize_dtype(value.dtype) if is_number else value.dtype)


def _is_weak(value: Any) -> bool:
    """Whether a value has no dtype of its own."""
    if isinstance(value, np.generic | np.ndarray):
        return False
    return isinstance(value, bool | int | float) or getattr(value, "weak_type", False)


def _kind_of(value: Any) -> str:
    """Of a value that is weak: NumPy's letter for booleans, whole or real numbers."""
    if isinstance(value, jax.Array):
        return np.dtype(value.dtype).kind
    return "b" if isinstance(value, bool) else "i" if isinstance(value, int) else "f"


def _natural(allowed: Sequence[str], kinds: set[str]) -> str:
    """The dtype for weak values of some kinds, of those that an input admits."""
    order = ("bool", "int32", "int64", "float32")
    least = max(("b", "i", "f").index(kind) if kind in "bif" else 0 for kind in kinds)
    natural = order[least:] if least < 2 else order[3:]
    return next((each for each in natural if each in allowed), allowed[0])


def _made(spec: Spec, name: str, value: Any, dtype: str) -> jax.Array:
    """A weak value as an array of a dtype."""
    wanted = np.dtype(jax.dtypes.canonicalize_dtype(dtype))
    own, kind = _kind_of(value), wanted.kind
    exact = kind == "f" or (kind == "b") == (own == "b")
    if isinstance(value, jax.Array):
        # What does not fit stays what it is, and is refused as an array.
        fits = exact and own in "bif" and (kind not in "iu" or own == "i")
        return value.astype(wanted) if fits else value
    if not exact or (kind in "iu" and own != "i"):
        raise DTypeError(f"{spec.name}: {name} is the number {value}; expected one of {wanted}")
    if kind in "iuf" and (isinstance(value, int) or math.isfinite(value)):
        number = float if kind == "f" else int  # Python's compare exactly, however large
        info: Any = np.finfo(wanted) if kind == "f" else np.iinfo(wanted)
        if not number(info.min) <= value <= number(info.max):
            shown = counted(value) if isinstance(value, int) else value
            raise CallError(f"{spec.name}: {name} is {shown}, outside of the range of {wanted}")
    return jnp.asarray(value, wanted)


def admitted(spec: Spec, name: str) -> tuple[str, ...]:
    """The dtypes that an input or an output may have."""
    variable = (spec.inputs.get(name) or spec.outputs[name]).dtype
    return spec.type_constraints.get(variable, (variable,))


def asked_of(spec: Spec, outputs: Any) -> tuple[tuple[str, Given], ...]:
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
            given[name] = as_int64(admitted(spec, name), tensor)
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


def filled(spec: Spec, attributes: Pairs) -> dict[str, Any]:
    """The attributes with the manifest's defaults."""
    given = dict(attributes)
    every = ((name, given.get(name, each.default)) for name, each in spec.attributes.items())
    return {name: value for name, value in every if value is not UNDEFINED}


def as_int64(admitted: tuple[str, ...], tensor: Tensor) -> Tensor:
    """An int32 array for a port that takes int64 and not int32, as is usual without 64-bit mode."""
    if tensor.dtype == "int32" and "int64" in admitted and "int32" not in admitted:
        return Tensor(tensor.shape, "int64")
    return tensor
