"""A `Spec` and the shapes, dtypes and attributes of one call: `Resolved`.

Names are bound, defaults filled in and output shapes and dtypes worked out. No device is involved.
"""

import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from jax_webgpu import dtypes
from jax_webgpu.capabilities import IDEAL, Capabilities
from jax_webgpu.errors import CallError, ExpressionError
from jax_webgpu.expressions import Expression
from jax_webgpu.helpers import HELPERS
from jax_webgpu.spec import Port, Spec, Value, evaluate, whole
from jax_webgpu.values import UNDEFINED

DISPATCH_FOLD_WIDTH = 65535

Pairs = tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class Tensor:
    """Shape and logical dtype of an array."""

    shape: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


@dataclass(frozen=True)
class Resolved:
    """One call of one operator, on no device yet. Hashable; equal calls are equal."""

    spec: Spec
    inputs: tuple[tuple[str, Tensor], ...]
    """The ports that are given, in the manifest's order."""
    outputs: tuple[tuple[str, Tensor], ...]
    """The ports that are asked for, in the manifest's order."""
    attributes: Pairs
    """With defaults; an attribute without value is absent."""
    args: Pairs
    tunables: Pairs
    """Those set for this call; the manifest's and the variant's defaults are not here."""
    logical: tuple[tuple[str, str], ...]
    """Type variables and the logical dtypes they are bound to."""

    def __str__(self) -> str:
        parts = [f"{name} = {tensor}" for name, tensor in self.inputs]
        parts += [f"{name} = {value}" for name, value in self.attributes]
        outputs = ", ".join(f"{name} {tensor}" for name, tensor in self.outputs)
        return f"{self.spec.name}({', '.join(parts)}) -> {outputs}"

    def with_tunables(self, **tunables: Any) -> "Resolved":
        return replace(self, tunables=tuple(sorted({**dict(self.tunables), **tunables}.items())))

    def with_dtype(self, old: str, new: str) -> "Resolved":
        """The same call with arrays of one dtype replaced by another."""

        def replaced(ports: tuple[tuple[str, Tensor], ...]) -> tuple[tuple[str, Tensor], ...]:
            return tuple(
                (name, Tensor(tensor.shape, new if tensor.dtype == old else tensor.dtype))
                for name, tensor in ports
            )

        return replace(
            self,
            inputs=replaced(self.inputs),
            outputs=replaced(self.outputs),
            logical=tuple((name, new if dtype == old else dtype) for name, dtype in self.logical),
        )

    def storage(self, port: Port) -> dtypes.DType:
        """The table's row for a port's array as it lies in a buffer."""
        return dtypes.TABLE[port.storage or dict(self.inputs + self.outputs)[port.name].dtype]


def resolve(
    spec: Spec,
    inputs: Mapping[str, Tensor | None],
    *,
    attributes: Mapping[str, Any] | None = None,
    args: Mapping[str, Any] | None = None,
    outputs: Mapping[str, Iterable[int] | None] | None = None,
    tunables: Mapping[str, Any] | None = None,
) -> Resolved:
    """Binds a call's names and types and works out its outputs.

    Args:
      spec: the operator.
      inputs: by port name; an optional port may be left out or None.
      attributes: by name; None leaves one out.
      args: the call's scalars by name.
      outputs: the ports asked for, with the shape where the manifest states none; by default every
        output that is not optional.
      tunables: by name, over the manifest's and the variants' defaults.

    Raises:
      CallError: a name is unknown or missing, or a type or value is not admitted.
    """
    bound = _bound(spec, inputs)
    logical = _types(spec, bound)
    resolved = Resolved(
        spec=spec,
        inputs=bound,
        outputs=(),
        attributes=_attributes(spec, attributes or {}),
        args=_args(spec, args or {}),
        tunables=_tunables(spec, tunables or {}),
        logical=tuple(logical.items()),
    )
    return replace(resolved, outputs=_outputs(resolved, outputs))


def scope(resolved: Resolved, capabilities: Capabilities) -> dict[str, Any]:
    """The names of expressions, without derived values."""
    spec, bound = resolved.spec, dict(resolved.inputs + resolved.outputs)
    ports = {**spec.inputs, **spec.outputs}
    storage = {name: resolved.storage(ports[name]) for name in bound}
    wgsl, logical = dict[str, str](), dict[str, str]()
    for variable, dtype in resolved.logical:
        wgsl[variable], logical[variable] = dtypes.TABLE[dtype].wgsl, dtype
    for name in bound:
        wgsl[ports[name].dtype] = storage[name].wgsl
        logical.setdefault(ports[name].dtype, bound[name].dtype)
    args = dict(resolved.args)
    return {
        **HELPERS,
        "DISPATCH_FOLD_WIDTH": DISPATCH_FOLD_WIDTH,
        "derive": {},
        "dtypes": wgsl,
        "logicalDtypes": logical,
        "tensorDtypes": {name: row.storage.name for name, row in storage.items()},
        "ranks": {name: len(tensor.shape) for name, tensor in bound.items()},
        "shapes": {name: tensor.shape for name, tensor in bound.items()},
        "present": {name: name in bound or name in args for name in [*ports, *spec.args]},
        "args": args,
        "attrs": dict(resolved.attributes),
        "tunables": {**spec.tunables, **dict(resolved.tunables)},
        "device": capabilities.as_scope(),
        "f16Ok": capabilities.f16_ok,
    }


def extend(scope: dict[str, Any], derive: Iterable[tuple[str, Value]]) -> dict[str, Any]:
    """A copy of `scope` with derived values, each of which sees the earlier ones.

    Raises:
      ExpressionError: one has no value; the message names it.
    """
    scope = {**scope, "derive": dict(scope["derive"])}
    for name, value in derive:
        try:
            scope[name] = scope["derive"][name] = evaluate(value, scope)
        except ExpressionError as error:
            raise ExpressionError(f"derive.{name}: {error}") from None
    return scope


def _bound(spec: Spec, inputs: Mapping[str, Tensor | None]) -> tuple[tuple[str, Tensor], ...]:
    for name in inputs:
        if name not in spec.inputs:
            raise CallError(f"{spec.name} has no input {name}; it has {', '.join(spec.inputs)}")
    bound = []
    for name, port in spec.inputs.items():
        tensor = inputs.get(name)
        if tensor is not None:
            bound.append((name, tensor))
        elif not port.optional:
            raise CallError(f"{spec.name}: the input {name} is missing")
    return tuple(bound)


def _types(spec: Spec, bound: Iterable[tuple[str, Tensor]]) -> dict[str, str]:
    types: dict[str, str] = {}
    binder: dict[str, str] = {}
    for name, tensor in bound:
        variable = spec.inputs[name].dtype
        allowed = spec.type_constraints.get(variable, (variable,))
        if tensor.dtype not in allowed:
            expected = " or ".join([", ".join(allowed[:-1])] * (len(allowed) > 1) + [allowed[-1]])
            raise CallError(f"{spec.name}: {name} has dtype {tensor.dtype}; expected {expected}")
        if variable in spec.type_constraints:
            first = types.setdefault(variable, tensor.dtype)
            if first != tensor.dtype:
                raise CallError(
                    f"{spec.name}: {name} has dtype {tensor.dtype}; expected {first}, "
                    f"the dtype of {binder[variable]}"
                )
            binder.setdefault(variable, name)
    return types


def _attributes(spec: Spec, given: Mapping[str, Any]) -> Pairs:
    for name in given:
        if name not in spec.attributes:
            known = ", ".join(spec.attributes) or "none"
            raise CallError(f"{spec.name} has no attribute {name}; it has {known}")
    result = []
    for name, attribute in spec.attributes.items():
        value = given.get(name)
        value = attribute.default if value is None else _frozen(value)
        if value is UNDEFINED:
            if attribute.required:
                raise CallError(f"{spec.name}: the attribute {name} is missing")
            continue
        if attribute.values is not None and _rounded(value) not in map(_rounded, attribute.values):
            allowed = ", ".join(map(str, attribute.values))
            raise CallError(f"{spec.name}: {name} is {value}; expected one of {allowed}")
        result.append((name, value))
    return tuple(result)


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list | tuple) else value


def _rounded(value: Any) -> Any:
    """Numbers are compared after rounding to f32."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    try:
        return struct.unpack("f", struct.pack("f", value))[0]
    except OverflowError:
        return float("inf") if value > 0 else float("-inf")


_KINDS: dict[str, type | tuple[type, ...]] = {
    "bool": bool,
    "string": str,
    "f32": (int, float),
    "u32": int,
    "i32": int,
}


def _args(spec: Spec, given: Mapping[str, Any]) -> Pairs:
    for name in given:
        if name not in spec.args:
            raise CallError(
                f"{spec.name} has no argument {name}; it has {', '.join(spec.args) or 'none'}"
            )
    result = []
    for name, argument in spec.args.items():
        value = given.get(name)
        if value is None:
            if argument.required:
                raise CallError(f"{spec.name}: the argument {name} is missing")
            continue
        wanted = _KINDS[argument.kind]
        if not isinstance(value, wanted) or (isinstance(value, bool) and argument.kind != "bool"):
            raise CallError(f"{spec.name}: {name} is {value!r}; expected {argument.kind}")
        if argument.one_of and value not in argument.one_of:
            allowed = ", ".join(map(str, argument.one_of))
            raise CallError(f"{spec.name}: {name} is {value!r}; expected one of {allowed}")
        result.append((name, value))
    return tuple(result)


def _tunables(spec: Spec, given: Mapping[str, Any]) -> Pairs:
    known = set(spec.tunables).union(*(dict(variant.tunables) for variant in spec.variants))
    for name in given:
        if name not in known:
            has = ", ".join(sorted(known)) or "none"
            raise CallError(f"{spec.name} has no tunable {name}; it has {has}")
    return tuple(sorted(given.items()))


def _outputs(
    resolved: Resolved, asked: Mapping[str, Iterable[int] | None] | None
) -> tuple[tuple[str, Tensor], ...]:
    spec = resolved.spec
    if asked is None:
        asked = {name: None for name, port in spec.outputs.items() if not port.optional}
    for name in asked:
        if name not in spec.outputs:
            raise CallError(f"{spec.name} has no output {name}; it has {', '.join(spec.outputs)}")
    outputs = []
    for name, port in spec.outputs.items():
        if name not in asked:
            if not port.optional:
                raise CallError(f"{spec.name}: the output {name} is not optional")
            continue
        shape = asked[name]
        if shape is None and port.shape is None:
            raise CallError(f"{spec.name}: the manifest states no shape for {name}; one is needed")
        sizes = _shape_of(resolved, port) if shape is None else tuple(shape)
        outputs.append((name, Tensor(sizes, _output_dtype(resolved, port))))
    return tuple(outputs)


def _output_dtype(resolved: Resolved, port: Port) -> str:
    allowed = resolved.spec.type_constraints.get(port.dtype, (port.dtype,))
    bound = dict(resolved.logical).get(port.dtype)
    if bound is None and len(allowed) > 1:
        raise CallError(f"{resolved.spec.name}: no input decides the dtype of {port.name}")
    return bound or allowed[0]


def _shape_of(resolved: Resolved, port: Port) -> tuple[int, ...]:
    """The manifest's shape. Only what it reads is derived: the rest may need the outputs."""
    derive = resolved.spec.derive
    needed = _reads(port.shape)
    for name in reversed(list(derive)):
        if name in needed:
            needed |= _reads(derive[name])
    try:
        names = extend(scope(resolved, IDEAL), ((n, v) for n, v in derive.items() if n in needed))
        sizes = evaluate(port.shape, names)
    except ExpressionError as error:
        raise CallError(f"{resolved.spec.name}: the shape of {port.name}: {error}") from None
    shape = [whole(size) for size in sizes] if isinstance(sizes, list | tuple) else [None]
    if any(size is None or size < 0 for size in shape):
        raise CallError(f"{resolved.spec.name}: the shape of {port.name} comes out as {sizes}")
    return tuple(size for size in shape if size is not None)


def _reads(value: Value) -> set[str]:
    match value:
        case Expression():
            return set(value.names | value.derived)
        case tuple():
            return set[str]().union(*map(_reads, value))
        case dict():
            return set[str]().union(*map(_reads, value.values()))
    return set()
