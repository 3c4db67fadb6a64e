"""Expressions: trees against a second evaluator, and any text at all."""

import functools
from typing import Any

from hypothesis import strategies as st

from fuzz import corpus, grammar, javascript
from fuzz.targets import RIGHT, Target, Wrong
from jax_webgpu import capabilities, helpers, values
from jax_webgpu.errors import ExpressionError
from jax_webgpu.expressions import parse, source
from jax_webgpu.values import UNDEFINED

NAMES = {
    name: [int(each) for each in value]
    if isinstance(value, list)
    else int(value)
    if isinstance(value, float) and value.is_integer()
    else value
    for name, value in javascript.SCOPE.items()
}
_DEVICE = capabilities.PRESETS["apple-m"]
SCOPE = {
    **helpers.HELPERS,
    **NAMES,
    "f16Ok": _DEVICE.f16_ok,
    "device": _DEVICE.as_scope(),
    "DISPATCH_FOLD_WIDTH": 65535,
    "derive": {"n": 7},
    "dtypes": {"T": "f32"},
    "tensorDtypes": {"x": "float32"},
    "logicalDtypes": {"T": "float32"},
    "ranks": {"x": 3},
    "shapes": {"x": (2, 3, 4)},
    "present": {"x": True, "y1": False},
    "args": {},
    "attrs": {"axis": 1, "mode": "plain"},
    "tunables": {"WORKGROUP_SIZE": 64},
}


@functools.cache
def _known() -> list[str]:
    """The expressions of all manifests here."""
    return sorted({text for text in corpus.strings() if len(text) < 400})


@st.composite
def inputs(draw: Any) -> Any:
    if draw(st.integers(0, 9)) < 6:
        return "tree", draw(grammar.TREES)
    known = st.sampled_from(_known()).flatmap(grammar.mangled)
    return "text", draw(grammar.TEXTS | known | known)


def run(value: Any) -> str:
    kind, given = value
    if kind == "text":
        return of_text(given, SCOPE)
    text = javascript.text_of(given)
    try:
        wanted = javascript.evaluate(given)
    except javascript.Unsure:
        return of_text(text, SCOPE)
    except javascript.Refused:
        wanted = javascript.Refused
    expression = _parsed(text)
    if expression is None:
        if text.count("(") + text.count("[") < 20:
            raise Wrong(f"`{text}` is refused, and it is right")
        return "ExpressionError"
    written = _parsed(source(expression.node))
    for each in (expression, written):
        found = _evaluated(each, SCOPE)
        if isinstance(found, ExpressionError) != (wanted is javascript.Refused):
            raise Wrong(f"`{text}`: {found!r}, expected {wanted!r}")
        if wanted is not javascript.Refused:
            _same(text, found, wanted)
    return "ExpressionError" if wanted is javascript.Refused else RIGHT


def _same(text: str, found: Any, wanted: Any) -> None:
    if isinstance(wanted, list) and values.is_sequence(found) and len(found) == len(wanted):
        for one, other in zip(found, wanted, strict=True):
            _same(text, one, other)
        return
    if isinstance(wanted, float):
        alike = values.is_number(found) and (float(found) == wanted or found != found != wanted)
        alike = alike and (found == found or wanted != wanted)
        # A whole number must print without a point.
        alike = alike and not (isinstance(found, float) and found.is_integer())
        alike = alike and values.to_text(found) == javascript.to_string(wanted)
    elif wanted is javascript.UNDEFINED:
        alike = found is UNDEFINED
    else:
        alike = type(found) is type(wanted) and found == wanted
    if not alike:
        raise Wrong(f"`{text}`: {found!r}, expected {wanted!r}")


def _parsed(text: str) -> Any:
    try:
        return parse(text)
    except ExpressionError as error:
        if len(str(error)) > len(text) + 300:
            raise Wrong(f"a message of {len(str(error))} characters") from error
        return None


def _evaluated(expression: Any, scope: Any) -> Any:
    try:
        return expression(scope)
    except ExpressionError as error:
        return error


def of_text(text: str, scope: Any) -> str:
    """Gives a value of the format, and the same one written anew; or an `ExpressionError`."""
    expression = _parsed(text)
    if expression is None:
        return "ExpressionError"
    found = _evaluated(expression, scope)
    written = source(expression.node)
    again = parse(written)
    if source(again.node) != written or again.names != expression.names:
        raise Wrong(f"`{text}` is written as `{written}`")
    expression.explain(scope)
    if isinstance(found, ExpressionError):
        return "ExpressionError"
    if not is_value(found):
        raise Wrong(f"`{text}` gives {found!r}, which is no value of the format")
    return "evaluated"


def is_value(value: Any) -> bool:
    """Whether something is a value of the format, and nothing else of Python's."""
    if isinstance(value, str | bool | int | None) or value is UNDEFINED:
        return True
    if isinstance(value, float):
        return not value.is_integer()
    if isinstance(value, dict):
        return all(isinstance(key, str) and is_value(each) for key, each in value.items())
    if isinstance(value, list | tuple | range):
        return all(map(is_value, value))
    return callable(value)


TARGET = Target("expressions", 22, inputs, run)
