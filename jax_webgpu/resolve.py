"""A `Spec` and the shapes, dtypes and attributes of one call: `Resolved`.

Names are bound, defaults filled in and output shapes and dtypes worked out. No device is involved.
"""

import struct
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from jax_webgpu import dtypes
from jax_webgpu.capabilities import IDEAL, Capabilities
from jax_webgpu.document import Value
from jax_webgpu.errors import CallError, ExpressionError
from jax_webgpu.expressions import EVERY
from jax_webgpu.helpers import HELPERS
from jax_webgpu.spec import Port, Spec, evaluate, reads, sizes
from jax_webgpu.values import METER, UNDEFINED, Meter, is_number, need_number, number, show

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
        logical = dict(self.inputs + self.outputs)[port.name].dtype
        if port.storage is not None and logical in dtypes.WHOLE:
            return dtypes.TABLE[port.storage]
        return dtypes.TABLE[logical]


def resolve(
    spec: Spec,
    inputs: Mapping[str, Tensor | None],
    *,
    attributes: Mapping[str, Any] | None = None,
    args: Mapping[str, Any] | None = None,
    outputs: Mapping[str, Iterable[int] | Tensor | None] | None = None,
    tunables: Mapping[str, Any] | None = None,
) -> Resolved:
    """Binds a call's names and types and works out its outputs.

    Args:
      spec: the operator.
      inputs: by port name; an optional port may be left out or None.
      attributes: by name; None leaves one out.
      args: the call's scalars by name.
      outputs: the ports asked for, with the shape where the manifest states none, and as a
        `Tensor` where no input decides the dtype; by default every output that is not optional.
      tunables: by name, over the manifest's and the variants' defaults.

    Raises:
      CallError: a name is unknown or missing, or a type or value is not admitted.
    """
    bound = _bound(spec, inputs)
    if outputs is None:
        outputs = {name: None for name, port in spec.outputs.items() if not port.optional}
    _known(spec, "output", outputs, spec.outputs)
    given = ((name, each) for name, each in outputs.items() if isinstance(each, Tensor))
    logical = _types(spec, [*bound, *given])
    resolved = Resolved(
        spec=spec,
        inputs=bound,
        outputs=(),
        attributes=_attributes(spec, attributes or {}),
        args=_args(spec, args or {}),
        tunables=checked_tunables(spec, tunables or {}),
        logical=tuple(logical.items()),
    )
    return replace(resolved, outputs=_outputs(resolved, outputs))


def scope(resolved: Resolved, capabilities: Capabilities) -> dict[str, Any]:
    """The names of expressions, without derived values."""
    spec, bound = resolved.spec, dict(resolved.inputs + resolved.outputs)
    ports = {**spec.inputs, **spec.outputs}
    storage = {name: resolved.storage(ports[name]) for name in bound}
    logical = dict(resolved.logical)
    for name in bound:
        logical.setdefault(ports[name].dtype, bound[name].dtype)
    args = dict(resolved.args)
    return {
        **HELPERS,
        "DISPATCH_FOLD_WIDTH": DISPATCH_FOLD_WIDTH,
        "derive": {},
        "dtypes": scalars(resolved),
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
        METER: Meter(),
    }


def scalars(resolved: Resolved) -> dict[str, str]:
    """The WGSL type of each type variable, and of each concrete dtype that a port has."""
    spec, bound = resolved.spec, resolved.inputs + resolved.outputs
    result = {variable: dtypes.TABLE[dtype].wgsl for variable, dtype in resolved.logical}
    ports = [spec.inputs.get(name) or spec.outputs[name] for name, _ in bound]
    # A type that some port stores narrower has that port's scalar.
    for port in sorted(ports, key=lambda port: port.storage is not None):
        result[port.dtype] = resolved.storage(port).wgsl
    return result


def extend(
    scope: dict[str, Any], values: Iterable[tuple[str, Value]], unsure: Collection[str] = ()
) -> dict[str, Any]:
    """A copy of `scope` with derived values; see `derive`."""
    scope = {**scope, "derive": dict(scope["derive"])}
    derive(scope, values, unsure)
    return scope


def derive(
    scope: dict[str, Any], values: Iterable[tuple[str, Value]], unsure: Collection[str] = ()
) -> None:
    """Adds derived values to a scope, each of which sees the earlier ones.

    Args:
      scope: the names before, and then all.
      values: names and their values in order.
      unsure: those that are left out, and no error, where they have no value.

    Raises:
      ExpressionError: one has no value; the message names it.
    """
    derived = scope["derive"]
    for name, value in values:
        try:
            scope[name] = derived[name] = evaluate(value, scope)
        except ExpressionError as error:
            if name not in unsure:
                raise ExpressionError(f"derive.{name}: {error}") from None


def _bound(spec: Spec, inputs: Mapping[str, Tensor | None]) -> tuple[tuple[str, Tensor], ...]:
    _known(spec, "input", inputs, spec.inputs)
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
        variable = (spec.inputs.get(name) or spec.outputs[name]).dtype
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


def _known(spec: Spec, what: str, given: Iterable[str], known: Collection[str]) -> None:
    """Raises where a name is given that the operator does not have."""
    for name in given:
        if name not in known:
            has = ", ".join(known) or "none"
            raise CallError(f"{spec.name} has no {what} {name}; it has {has}")


def _attributes(spec: Spec, given: Mapping[str, Any]) -> Pairs:
    _known(spec, "attribute", given, spec.attributes)
    result = []
    for name, attribute in spec.attributes.items():
        value = given.get(name)
        value = attribute.default if value is None else _plain(spec, name, value)
        if value is UNDEFINED:
            if attribute.required:
                raise CallError(f"{spec.name}: the attribute {name} is missing")
            continue
        if isinstance(value, bool) and not isinstance(attribute.default, bool):
            value = int(value)  # equal to it, so it must also print the same
        kinds = {
            _kind(each)
            for each in (value, attribute.default)
            if isinstance(each, int | float | str)
        }
        if kinds == {"string", "number"}:
            wanted = _kind(attribute.default)
            raise CallError(f"{spec.name}: {name} is {show(value)}; expected a {wanted}")
        if attribute.values is not None and _rounded(value) not in map(_rounded, attribute.values):
            allowed = ", ".join(map(show, attribute.values))
            raise CallError(f"{spec.name}: {name} is {show(value)}; expected one of {allowed}")
        result.append((name, value))
    return tuple(result)


def _plain(spec: Spec, name: str, value: Any) -> Any:
    """A value of the format, which has no other numbers than doubles; lists become tuples."""
    if isinstance(value, list | tuple):
        return tuple(_plain(spec, name, element) for element in value)
    if is_number(value):
        return number(value)
    if not isinstance(value, bool | str):
        kind = type(value).__name__
        raise CallError(f"{spec.name}: {name} is a {kind}; expected a number, a string or a list")
    return value


def _rounded(value: Any) -> Any:
    """Numbers are compared after rounding to f32."""
    if isinstance(value, tuple):
        return tuple(map(_rounded, value))
    if not is_number(value):
        return value
    try:
        return struct.unpack("f", struct.pack("f", value))[0]
    except OverflowError:
        return float("inf") if value > 0 else float("-inf")


_RANGES: dict[str, tuple[float, float]] = {
    "u32": (0, 2**32 - 1),
    "i32": (-(2**31), 2**31 - 1),
}
_KINDS: dict[str, type | tuple[type, ...]] = {
    "bool": bool,
    "string": str,
    "f32": (int, float),
    "u32": int,
    "i32": int,
}


def _args(spec: Spec, given: Mapping[str, Any]) -> Pairs:
    _known(spec, "argument", given, spec.args)
    result: list[tuple[str, Any]] = []
    for name, argument in spec.args.items():
        value = given.get(name)
        if value is None:
            if argument.required:
                raise CallError(f"{spec.name}: the argument {name} is missing")
            continue
        value = _plain(spec, name, value)
        wanted = _KINDS[argument.kind]
        if not isinstance(value, wanted) or (isinstance(value, bool) and argument.kind != "bool"):
            raise CallError(f"{spec.name}: {name} is {show(value)}; expected {argument.kind}")
        low, high = _RANGES.get(argument.kind, (0, 0))
        if argument.kind in _RANGES and not low <= need_number(value, name) <= high:
            raise CallError(
                f"{spec.name}: {name} is {show(value)}; expected {argument.kind}, from {low} to "
                f"{high}"
            )
        if argument.one_of and value not in argument.one_of:
            allowed = ", ".join(map(show, argument.one_of))
            raise CallError(f"{spec.name}: {name} is {show(value)}; expected one of {allowed}")
        result.append((name, value))
    return tuple(result)


def checked_tunables(spec: Spec, given: Mapping[str, Any]) -> Pairs:
    """Values for tunables that the manifest or a variant has; raises `CallError`."""
    defaults = dict(spec.tunables)
    for variant in spec.variants:
        defaults |= dict(variant.tunables)
    _known(spec, "tunable", given, sorted(defaults))
    result = []
    for name, value in sorted(given.items()):
        value, default = _plain(spec, name, value), defaults[name]
        if _kind(value) != _kind(default):
            raise CallError(f"{spec.name}: {name} is {show(value)}; expected a {_kind(default)}")
        result.append((name, value))
    return tuple(result)


def _kind(value: Any) -> str:
    return "number" if is_number(value) else "string" if isinstance(value, str) else "boolean"


def _outputs(
    resolved: Resolved, asked: Mapping[str, Iterable[int] | Tensor | None]
) -> tuple[tuple[str, Tensor], ...]:
    spec, inputs = resolved.spec, dict(resolved.inputs)
    outputs: list[tuple[str, Tensor]] = []
    for name, port in spec.outputs.items():
        if name not in asked:
            if not port.optional:
                raise CallError(f"{spec.name}: the output {name} is not optional")
            continue
        given = asked[name]
        shape = given.shape if isinstance(given, Tensor) else given
        if shape is None and port.shape is None:
            if name not in inputs:
                raise CallError(
                    f"{spec.name}: the manifest states no shape for {name}; one is needed"
                )
            shape = inputs[name].shape
        so_far = replace(resolved, outputs=tuple(outputs))
        output = Tensor(_shape(so_far, port, shape, asked), _output_dtype(resolved, port))
        if inputs.get(name, output) != output:
            raise CallError(
                f"{spec.name}: {name} goes in as {inputs[name]} and out as {output}; an in-out "
                "port is one array"
            )
        outputs.append((name, output))
    return tuple(outputs)


def _output_dtype(resolved: Resolved, port: Port) -> str:
    allowed = resolved.spec.type_constraints.get(port.dtype, (port.dtype,))
    bound = dict(resolved.logical).get(port.dtype)
    if bound is None and len(allowed) > 1:
        raise CallError(f"{resolved.spec.name}: no input decides the dtype of {port.name}")
    return bound or allowed[0]


def _shape(
    resolved: Resolved, port: Port, given: Iterable[int] | None, asked: Iterable[str]
) -> tuple[int, ...]:
    """The caller's shape, else the manifest's; `asked` are the outputs that are present."""
    derive = resolved.spec.derive
    try:
        if given is not None:
            return sizes(tuple(given), {}, port.name)
        # Only what the shape reads is derived: the rest may need the outputs.
        needed = reads(port.shape)
        for name in reversed(list(derive)):
            if name in needed:
                needed |= reads(derive[name])
        names = scope(resolved, IDEAL)
        names["present"] |= dict.fromkeys(asked, True)
        if EVERY in needed:
            names = extend(names, derive.items(), unsure=derive)
        else:
            names = extend(names, ((n, v) for n, v in derive.items() if n in needed))
        return sizes(port.shape, names, port.name)
    except ExpressionError as error:
        raise CallError(f"{resolved.spec.name}: {error}") from None
