"""A manifest as the text of a docstring: what the operator takes and gives, and its variants."""

import textwrap
from collections.abc import Iterable, Iterator

from jax_webgpu.expressions import Expression
from jax_webgpu.spec import Port, Spec, Value
from jax_webgpu.values import UNDEFINED, show

_WIDTH = 92


def describe(spec: Spec) -> str:
    """The documentation of an operator, for `help` and for the command line."""
    return "\n".join(_lines(spec))


def _lines(spec: Spec) -> Iterator[str]:
    since = "" if spec.since_version is None else f", version {spec.since_version}"
    yield from _wrapped(spec.description or f"{spec.name} of {spec.domain}{since}.", "")
    if spec.description:
        yield ""
        yield f"{spec.name} of {spec.domain}{since}."
    yield ""
    yield "Inputs, by position or by name:"
    yield from _ports(spec, spec.inputs.values(), "optional, may be left out or None")
    if spec.attributes:
        yield ""
        yield "Attributes, by name:"
        for attribute in spec.attributes.values():
            text = "required" if attribute.required else "optional"
            if attribute.default is not UNDEFINED:
                text = f"{show(attribute.default)} by default"
            if attribute.values is not None:
                text += f"; one of {', '.join(map(show, attribute.values))}"
            yield from _item(attribute.name, text, attribute.description)
    if spec.args:
        yield ""
        yield "Arguments, scalars by name:"
        for argument in spec.args.values():
            text = argument.kind + ("" if argument.required else ", optional")
            if argument.one_of:
                text += f"; one of {', '.join(map(show, argument.one_of))}"
            yield from _item(argument.name, text, "")
    yield ""
    yield "Outputs:"
    yield from _ports(spec, spec.outputs.values(), "optional, made where `outputs` names it")
    if any(port.shape is None for port in spec.outputs.values()):
        yield "  The shapes of those without one are given: outputs={name: shape}."
    if spec.tunables:
        yield ""
        yield "Tunables, for `load_kernel(..., tunables={name: value})`:"
        for name, value in spec.tunables.items():
            yield from _item(name, f"{show(value)} by default", "")
    yield ""
    yield "Variants, of which a device runs the first that applies:"
    for variant in sorted(spec.variants, key=lambda variant: -variant.priority):
        yield f"  {variant.id}"


def _ports(spec: Spec, ports: Iterable[Port], optional: str) -> Iterator[str]:
    none = True
    for port in ports:
        none = False
        text = " or ".join(_dtypes(spec, port))
        if port.dtype in spec.type_constraints and len(_dtypes(spec, port)) > 1:
            text += f", the same for every {port.dtype}"
        if port.rank is not None:
            text += f"; rank {_value(port.rank)}"
        if port.shape is not None:
            text += f"; shape {_value(port.shape)}"
        if port.optional:
            text += f"; {optional}"
        yield from _item(port.name, text, port.description)
    if none:
        yield "  none"


def _dtypes(spec: Spec, port: Port) -> tuple[str, ...]:
    return spec.type_constraints.get(port.dtype, (port.dtype,))


def _value(value: Value) -> str:
    match value:
        case Expression():
            return value.text
        case tuple():
            return f"[{', '.join(map(_value, value))}]"
    return show(value)


def _item(name: str, text: str, more: str) -> Iterator[str]:
    sentence = f"{name}: {text}. {more}" if more else f"{name}: {text}."
    yield from _wrapped(sentence, "  ", "    ")


def _wrapped(text: str, indent: str, hanging: str | None = None) -> Iterator[str]:
    further = indent if hanging is None else hanging
    yield from textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=indent,
        subsequent_indent=further,
        break_long_words=False,
        break_on_hyphens=False,
    )
