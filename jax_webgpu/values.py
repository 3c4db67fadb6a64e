"""The values of the manifest format's expressions, and their rules, which are JavaScript's.

A number is a double: a whole one is held as a Python int, so that it prints without a point.
A missing member is `UNDEFINED`. Lists are Python sequences, objects are dicts with string keys.
"""

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
EXACT = 2**53

# A manifest must not be able to ask for unbounded memory.
MAX_LIST = 1 << 16
MAX_TEXT = 1 << 22

# What JavaScript reads as a number, in text.
_NUMERAL = re.compile(r"[+-]?(Infinity|(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?)", re.ASCII)


# What may be evaluated for one call: nodes of expressions, elements of lists, and text.
MAX_WORK = 2_000_000
CHARACTERS = 16  # that count as much as one

# The name under which a scope holds its `Meter`; no expression can name it.
METER: Final = " meter"


class Meter:
    """Counts the work that is done in a scope and in all that are made from it.

    What a manifest or a template can ask for has an end: `spend` raises `ExpressionError` where
    it has not.
    """

    def __init__(self) -> None:
        self.left = MAX_WORK

    def spend(self, work: int) -> None:
        self.left -= work
        if self.left < 0:
            raise ExpressionError(
                f"more than {MAX_WORK:,} steps: the evaluation does not come to an end"
            )


_SIZED: frozenset[type] = frozenset({str, list, tuple, range})


def spend(scope: Mapping[str, Any], *operands: Any) -> None:
    """Charges a scope for going through long lists and texts."""
    for each in operands:
        if type(each) in _SIZED and len(each) > 64 and METER in scope:
            scope[METER].spend(len(each) // (CHARACTERS if type(each) is str else 1))


def is_number(value: Any) -> bool:
    kind = value.__class__  # the common types first: this is asked more often than all else
    return kind is int or kind is float or (isinstance(value, (int, float)) and kind is not bool)


def is_sequence(value: Any) -> bool:
    kind = value.__class__
    if kind is list or kind is tuple:
        return True
    return isinstance(value, Sequence) and not isinstance(value, str)


def number(value: Any) -> int | float:
    """Rounds to a double; a whole result becomes an int."""
    if isinstance(value, int) and -EXACT <= value <= EXACT:
        return value
    try:
        double = float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf
    return int(double) if double.is_integer() else double


def need_number(value: Any, what: str) -> int | float:
    if value.__class__ is not int and not is_number(value):
        raise ExpressionError(f"{what} takes a number, got {show(value)}")
    return value


def need_integer(value: Any, what: str) -> int:
    if value.__class__ is not int and (not isinstance(value, int) or isinstance(value, bool)):
        raise ExpressionError(f"{what} takes a whole number, got {show(value)}")
    return value


def need_list(value: Any, what: str) -> Sequence[Any]:
    if not is_sequence(value):
        raise ExpressionError(f"{what} takes a list, got {show(value)}")
    return value


def need_text(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise ExpressionError(f"{what} takes a string, got {show(value)}")
    return value


def need_unicode(text: str) -> str:
    """Text that can be written: without a half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ExpressionError(f"no text: {text[error.start]!a}") from None
    return text


def truthy(value: Any) -> bool:
    return bool(value) and (value.__class__ is not float or value == value)  # NaN is false


def to_number(value: bool | float | str) -> float:
    """JavaScript's ToNumber, for a comparison of a string or a boolean with a number."""
    if not isinstance(value, str):
        return float(value) if isinstance(value, bool) else value
    text = value.strip()
    if not text:
        return 0
    return float(text) if _NUMERAL.fullmatch(text) else math.nan


def equal(left: Any, right: Any) -> bool:
    """The format's `==`: loose between numbers, strings and booleans; lists are never equal."""
    kind = left.__class__
    if kind is right.__class__ and (kind is int or kind is str or kind is bool):
        return bool(left == right)
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
        return isinstance(item, str) and item in container
    return any(equal(item, element) for element in need_list(container, "in"))


def subtract(left: Any, right: Any) -> int | float:
    return number(need_number(left, "-") - need_number(right, "-"))


def multiply(left: Any, right: Any) -> int | float:
    return number(need_number(left, "*") * need_number(right, "*"))


def add(left: Any, right: Any) -> Any:
    if is_number(left) and is_number(right):
        return number(left + right)
    if isinstance(left, str) or isinstance(right, str):
        return concatenated([left, right])
    if is_sequence(left) and is_sequence(right):
        if len(left) + len(right) > MAX_LIST:
            raise ExpressionError(f"a list of more than {MAX_LIST} elements")
        return [*left, *right]
    raise ExpressionError(f"cannot add {show(left)} + {show(right)}")


def divide(left: Any, right: Any) -> int | float:
    need_number(left, "/")
    if need_number(right, "/") == 0:
        return math.nan if left == 0 or left != left else math.copysign(math.inf, left)
    return number(left / right)


def remainder(left: Any, right: Any) -> int | float:
    """The sign is the left side's."""
    if left.__class__ is int and right.__class__ is int and left >= 0 < right:
        return left % right
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
        whole = isinstance(key, int) and not isinstance(key, bool)
        return container[key] if whole and -len(container) <= key < len(container) else UNDEFINED
    raise ExpressionError(f"cannot look up {show(key)} in {show(container)}")


def to_text(value: Any) -> str:
    """What a value prints, as JavaScript prints numbers; undefined and none print nothing."""
    kind = value.__class__
    if kind is str:
        return value
    if kind is int and -EXACT <= value <= EXACT:
        return str(value)
    match value:
        case None | Undefined():
            return ""
        case bool():
            return "true" if value else "false"
        case str():
            return value
        case int() | float():
            return _double_text(float(value))
    raise ExpressionError(f"cannot print {show(value)}")


def _double_text(value: float) -> str:
    """The shortest digits that give the double back; an exponent from 1e21 and below 1e-6."""
    if not math.isfinite(value):
        return "NaN" if value != value else ("Infinity" if value > 0 else "-Infinity")
    text = repr(value)
    mantissa, _, exponent = text.partition("e")
    if -7 < int(exponent or 0) < 21:
        return format(Decimal(text), "f").removesuffix(".0")
    return f"{mantissa}e{int(exponent):+d}"


def concatenated(values: Iterable[Any], separator: str = "") -> str:
    """The texts of values, one after the other."""
    parts = [value if value.__class__ is str else to_text(value) for value in values]
    if sum(map(len, parts)) + len(separator) * len(parts) > MAX_TEXT:
        raise ExpressionError(f"a text of more than {MAX_TEXT} characters")
    return separator.join(parts)


def quoted(text: str) -> str:
    """A string as it stands in an expression."""
    return json.dumps(text, ensure_ascii=False)


def counted(number: int) -> str:
    """A whole number as a message shows it, of any size."""
    if abs(number) < 10**18:
        return f"{number:,}"
    return f"about {'-' * (number < 0)}10^{math.log10(abs(number)):.0f}"


def show(value: Any) -> str:
    """A value as a message shows it: told apart from others, and never long."""
    text = ""
    for piece in _shown(value):
        text += piece
        if len(text) > 80:
            return text[:77] + "..."
    return text


def _shown(value: Any) -> Iterator[str]:
    match value:
        case None:
            yield "none"
        case Undefined():
            yield "undefined"
        case bool() | int() | float():
            yield to_text(value)
        case str():
            yield quoted(value[:80])
        case Mapping():
            yield "{"
            for index, key in enumerate(value):
                yield f", {key}" if index else str(key)
            yield "}"
        case Callable():
            yield "a function"
        case _:
            yield "["
            for index, element in enumerate(value):
                if index:
                    yield ", "
                yield from _shown(element)
            yield "]"
