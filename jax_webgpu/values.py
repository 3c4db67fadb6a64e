"""The values of the manifest format's expressions, and their rules, which are JavaScript's.

A number is a double: a whole one is held as a Python int, so that it prints without a point.
A missing member is `UNDEFINED`. Lists are Python sequences, objects are dicts with string keys.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from typing import Any, Final, final

from jax_webgpu.errors import ExpressionError


@final
class Undefined:
    """The type of `UNDEFINED`: what a look-up gives that finds nothing."""

    def __repr__(self) -> str:
        return "undefined"

    def __bool__(self) -> bool:
        return False


UNDEFINED: Final = Undefined()

# Beyond this a double no longer holds every whole number.
_EXACT = 2**53


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_sequence(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def number(value: float) -> int | float:
    """Rounds to a double; a whole result becomes an int."""
    if isinstance(value, int) and -_EXACT <= value <= _EXACT:
        return value
    try:
        double = float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf
    return int(double) if double.is_integer() else double


def need_number(value: Any, what: str) -> int | float:
    if not is_number(value):
        raise ExpressionError(f"{what} takes a number, got {show(value)}")
    return value


def need_integer(value: Any, what: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ExpressionError(f"{what} takes a whole number, got {show(value)}")
    return value


def need_list(value: Any, what: str) -> Sequence[Any]:
    if not is_sequence(value):
        raise ExpressionError(f"{what} takes a list, got {show(value)}")
    return value


def truthy(value: Any) -> bool:
    return bool(value) and value == value  # NaN is false


def to_number(value: bool | float | str) -> float:
    """JavaScript's ToNumber, for a comparison of a string or a boolean with a number."""
    if isinstance(value, str):
        text = value.strip()
        try:
            return float(text) if text else 0
        except ValueError:
            return math.nan
    return value


def equal(left: Any, right: Any) -> bool:
    """The format's `==`: loose between numbers, strings and booleans; lists are never equal."""
    if left is None or right is None:
        return left is right
    scalars = (isinstance(value, bool | int | float | str) for value in (left, right))
    if not all(scalars):
        return False
    if isinstance(left, str) and isinstance(right, str):
        return left == right
    return to_number(left) == to_number(right)


def compare(operator: str, left: Any, right: Any) -> bool:
    """`<`, `<=`, `>`, `>=` between two numbers or two strings; anything else is an error."""
    alike = (is_number(left) and is_number(right)) or (
        isinstance(left, str) and isinstance(right, str)
    )
    if not alike:
        raise ExpressionError(f"cannot compare {show(left)} {operator} {show(right)}")
    match operator:
        case "<":
            return left < right
        case "<=":
            return left <= right
        case ">":
            return left > right
        case _:
            return left >= right


def contains(container: Any, item: Any) -> bool:
    """The format's `in`."""
    if isinstance(container, str):
        return isinstance(item, str) and item in container
    if isinstance(container, Mapping):
        return item in container
    return any(equal(item, element) for element in need_list(container, "in"))


def add(left: Any, right: Any) -> Any:
    if is_number(left) and is_number(right):
        return number(left + right)
    if isinstance(left, str) or isinstance(right, str):
        return to_text(left) + to_text(right)
    if is_sequence(left) and is_sequence(right):
        return [*left, *right]
    raise ExpressionError(f"cannot add {show(left)} + {show(right)}")


def divide(left: Any, right: Any) -> int | float:
    need_number(left, "/")
    if need_number(right, "/") == 0:
        return math.nan if left == 0 or left != left else math.copysign(math.inf, left)
    return number(left / right)


def remainder(left: Any, right: Any) -> int | float:
    """The sign is the left side's."""
    need_number(left, "%")
    if need_number(right, "%") == 0 or math.isinf(left):
        return math.nan
    if isinstance(left, int) and isinstance(right, int):
        return int(math.copysign(abs(left) % abs(right), left))
    return number(math.fmod(left, right))


def lookup(container: Any, key: Any) -> Any:
    """A mapping's own key or a list's index; `UNDEFINED` where there is none."""
    if isinstance(container, Mapping):
        return container.get(key, UNDEFINED) if isinstance(key, str) else UNDEFINED
    if isinstance(container, Sequence):
        if is_number(key) and isinstance(key, int) and -len(container) <= key < len(container):
            return container[key]
        return UNDEFINED
    raise ExpressionError(f"cannot look up {show(key)} in {show(container)}")


def to_text(value: Any) -> str:
    """What a value prints, as JavaScript prints numbers; undefined and none print nothing."""
    match value:
        case None | Undefined():
            return ""
        case bool():
            return "true" if value else "false"
        case str():
            return value
        case int():
            return str(value) if abs(value) < 10**21 else _double_text(float(value))
        case float():
            return _double_text(value)
    raise ExpressionError(f"cannot print {show(value)}")


def _double_text(value: float) -> str:
    if not math.isfinite(value):
        return "NaN" if value != value else ("Infinity" if value > 0 else "-Infinity")
    text = repr(value)
    mantissa, e, exponent = text.partition("e")
    if not e:
        return text
    if -7 < int(exponent) < 0:
        return format(Decimal(text), "f")
    return f"{mantissa.removesuffix('.0')}e{int(exponent):+d}"


def show(value: Any) -> str:
    """A value as a message shows it: told apart from others, and never long."""
    match value:
        case None:
            return "none"
        case Undefined():
            return "undefined"
        case bool() | int() | float():
            return to_text(value)
        case str():
            text = f'"{value}"'
        case Mapping():
            text = "{" + ", ".join(map(str, value)) + "}"
        case Callable():
            text = "a function"
        case _:
            text = "[" + ", ".join(show(element) for element in value) + "]"
    return text if len(text) <= 80 else text[:77] + "..."
