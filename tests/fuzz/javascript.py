"""A second evaluator of the format's expressions: trees in, JavaScript's values out.

A tree is a scalar or a tuple: an operator's name and its operands. Every number is a double, a
Python float, and every rule is written from ECMAScript's text (https://tc39.es/ecma262/) or from
the format's own. What neither settles raises `Unsure`.
"""

import math
import operator
from collections.abc import Callable, Mapping
from decimal import Decimal
from fractions import Fraction
from typing import Any


class Refused(Exception):
    """The format does not define a value."""


class Unsure(Exception):
    """Neither text says what the value is."""


class _Undefined:
    def __repr__(self) -> str:
        return "undefined"


UNDEFINED = _Undefined()

# What a tree's ("name", NAME) may say, as the two evaluators have it.
SCOPE: dict[str, Any] = {
    "n": 7.0,
    "zero": 0.0,
    "big": 2.0**40,
    "half": 0.5,
    "word": "abc",
    "yes": True,
    "nothing": None,
    "shape": [2.0, 3.0, 4.0],
    "empty": [],
}


def text_of(tree: Any) -> str:
    """The expression of a tree, every operation in parentheses."""
    match tree:
        case ("name", name):
            return str(name)
        case ("undefined",):
            return "attrs.nothing"
        case ("list", *items):
            return f"[{', '.join(map(text_of, items))}]"
        case ("call", name, *arguments):
            return f"{name}({', '.join(map(text_of, arguments))})"
        case ("filter", name, of, *arguments):
            given = f"({', '.join(map(text_of, arguments))})" if arguments else ""
            return f"(({text_of(of)})|{name}{given})"
        case ("index", of, at):
            return f"{_operand(of)}[{text_of(at)}]"
        case ("if", test, then, other):
            return f"({_operand(then)} if {text_of(test)} else {text_of(other)})"
        case (("neg" | "pos" | "not") as word, of):
            return f"({dict(neg='-', pos='+')[word] if word != 'not' else 'not '}{_operand(of)})"
        case (word, left, right):
            return f"({text_of(left)} {word} {text_of(right)})"
        case bool() | None:
            return {True: "true", False: "false", None: "none"}[tree]
        case str():
            return "'" + tree + "'"
    return repr(tree)


def _operand(tree: Any) -> str:
    """In parentheses where it is a bare number or a string, which a sign or a member would join."""
    return f"({text_of(tree)})" if not isinstance(tree, tuple) else text_of(tree)


def evaluate(tree: Any) -> Any:
    """The value of a tree."""
    found = _evaluate(tree)
    return found + 0.0 if isinstance(found, float) else found  # the format has one zero


def _evaluate(tree: Any) -> Any:
    match tree:
        case ("name", name):
            return SCOPE[name]
        case ("undefined",):
            return UNDEFINED
        case ("list", *items):
            return [evaluate(item) for item in items]
        case ("call", name, *arguments):
            return FUNCTIONS[name](*map(evaluate, arguments))
        case ("filter", name, of, *arguments):
            return FILTERS[name](evaluate(of), *map(evaluate, arguments))
        case ("index", of, at):
            return _member(evaluate(of), evaluate(at))
        case ("if", test, then, other):
            return evaluate(then if to_boolean(evaluate(test)) else other)
        case ("neg", of):
            return -_number(evaluate(of))
        case ("pos", of):
            return _number(evaluate(of))
        case ("not", of):
            return not to_boolean(evaluate(of))
        case ("and" | "or" as word, left, right):
            value = evaluate(left)
            return value if to_boolean(value) == (word == "or") else evaluate(right)
        case ("in", item, of):
            return _contains(evaluate(item), evaluate(of))
        case (word, left, right):
            return OPERATORS[word](evaluate(left), evaluate(right))
    return float(tree) if type(tree) in (int, float) else tree


def to_boolean(value: Any) -> bool:
    if isinstance(value, list):
        raise Unsure  # an empty list is true in JavaScript, and false in Jinja
    return not (value in (None, UNDEFINED, "") or value == 0 or value != value)


def _number(value: Any) -> float:
    if type(value) is not float:
        raise Refused
    return value


def _whole(value: Any) -> int:
    if not _number(value).is_integer():
        raise Refused
    return int(value)


def to_number(value: Any) -> float:
    """ECMAScript's ToNumber, of scalars."""
    if not isinstance(value, str):
        return float(value)
    text = value.strip()
    if text[:2].lower() in ("0x", "0o", "0b"):
        base = {"x": 16, "o": 8, "b": 2}[text[1].lower()]
        try:
            return float(int(text, base)) if text[2:].isalnum() else math.nan
        except ValueError:  # a digit that the base has not
            return math.nan
    if text.lstrip("+-") == "Infinity":
        return -math.inf if text[0] == "-" else math.inf
    if {*text.lower()} - {*"0123456789.e+-"}:
        return math.nan
    try:
        return float(text) if text else 0.0
    except ValueError:
        return math.nan


def to_string(value: Any) -> str:
    """ECMAScript's Number::toString, and the format's words for the rest."""
    if value is None or value is UNDEFINED:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        raise Refused
    if not math.isfinite(value):
        return "NaN" if value != value else "Infinity" if value > 0 else "-Infinity"
    if value == 0:
        return "0"
    sign, digits, exponent = Decimal(repr(value)).normalize().as_tuple()
    s, k = "".join(map(str, digits)), len(digits)
    n = k + int(exponent)
    if k <= n <= 21:
        text = s + "0" * (n - k)
    elif 0 < n <= 21:
        text = f"{s[:n]}.{s[n:]}"
    elif -6 < n <= 0:
        text = f"0.{'0' * -n}{s}"
    else:
        text = f"{s[0]}{'.' + s[1:] if k > 1 else ''}e{n - 1:+d}"
    return "-" + text if sign else text


def is_equal(left: Any, right: Any) -> bool:
    if left is None or right is None:
        return left is right
    if UNDEFINED in (left, right) or isinstance(left, list) or isinstance(right, list):
        return False
    if isinstance(left, str) and isinstance(right, str):
        return left == right
    return to_number(left) == to_number(right)


def _compared(compare: Callable[[Any, Any], bool]) -> Callable[[Any, Any], bool]:
    def compared(left: Any, right: Any) -> bool:
        if {type(left), type(right)} not in ({float}, {str}):
            raise Refused
        return compare(left, right)

    return compared


def _add(left: Any, right: Any) -> Any:
    if isinstance(left, str) or isinstance(right, str):
        return to_string(left) + to_string(right)
    if isinstance(left, list) and isinstance(right, list):
        return left + right
    return _number(left) + _number(right)


def _divide(left: Any, right: Any) -> float:
    left, right = _number(left), _number(right)
    if right == 0:
        return math.nan if left == 0 or left != left else math.copysign(math.inf, left)
    return left / right


def _remainder(left: Any, right: Any) -> float:
    left, right = _number(left), _number(right)
    if right == 0 or math.isinf(left) or left != left or right != right:
        return math.nan
    return math.fmod(left, right)


def _contains(item: Any, of: Any) -> bool:
    if isinstance(of, str):
        if not isinstance(item, str):
            raise Unsure
        return item in of
    if not isinstance(of, list):
        raise Refused
    return any(is_equal(item, each) for each in of)


def _member(of: Any, at: Any) -> Any:
    if isinstance(of, str):
        raise Unsure
    if not isinstance(of, list):
        raise Refused
    if type(at) is not float or not at.is_integer() or not -len(of) <= at < len(of):
        return UNDEFINED
    return of[int(at)]


OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "+": _add,
    "-": lambda left, right: _number(left) - _number(right),
    "*": lambda left, right: _number(left) * _number(right),
    "/": _divide,
    "%": _remainder,
    "~": lambda left, right: to_string(left) + to_string(right),
    "==": is_equal,
    "!=": lambda left, right: not is_equal(left, right),
    "<": _compared(operator.lt),
    "<=": _compared(operator.le),
    ">": _compared(operator.gt),
    ">=": _compared(operator.ge),
}


# ---- the format's functions ---------------------------------------------------------------------


def _rounded(rounding: Callable[[float], int]) -> Callable[[Any], float]:
    def rounded(value: Any) -> float:
        value = _number(value)
        return float(rounding(value)) if math.isfinite(value) else value

    return rounded


def _extreme(choose: Callable[..., float], none: float) -> Callable[..., float]:
    def extreme(*values: Any) -> float:
        numbers = [_number(value) for value in values]
        return math.nan if any(map(math.isnan, numbers)) else choose(numbers, default=none)

    return extreme


def _pow(base: Any, exponent: Any) -> float:
    """Number::exponentiate."""
    base, exponent = _number(base), _number(exponent)
    if exponent != exponent:
        return math.nan
    if exponent == 0:
        return 1.0
    if math.isinf(exponent) and abs(base) == 1:
        return math.nan
    if base < 0 and math.isfinite(base) and math.isfinite(exponent) and not exponent.is_integer():
        return math.nan
    if base == 0:
        return 0.0 if exponent > 0 else math.inf
    try:
        return math.pow(base, exponent)
    except OverflowError:
        return -math.inf if base < 0 and exponent % 2 else math.inf


def _ceil_div(left: Any, right: Any) -> float:
    left, right = _number(left), _number(right)
    found = _divide(left, right)
    if not math.isfinite(found):
        return found
    if not math.isfinite(right):
        return 0.0
    exact = math.ceil(Fraction(left) / Fraction(right))
    if exact != math.ceil(found):
        raise Unsure  # the quotient is rounded first, or it is not
    return float(exact)


def _pow2ceil(value: Any) -> float:
    value = _number(value)
    if not value < 2.0**50:
        raise Unsure
    return 1.0 if value <= 1 else 2.0 ** math.ceil(math.log2(value))


def _log2ceil(value: Any) -> float:
    value = _number(value)
    if not value < 2.0**50:
        raise Unsure
    return 0.0 if value <= 1 else float(math.ceil(math.log2(value)))


def _sizes(value: Any) -> list[int]:
    if not isinstance(value, list):
        raise Refused
    sizes = [_whole(each) for each in value]
    if any(size < 0 for size in sizes):
        raise Unsure
    return sizes


def _product(sizes: list[int]) -> float:
    return float(math.prod(sizes))


def _cut(shape: Any, axis: Any) -> tuple[list[int], int]:
    sizes, at = _sizes(shape), _whole(axis)
    if not sizes:
        raise Unsure
    return sizes, at % len(sizes)


def _outer(shape: Any, axis: Any) -> float:
    sizes, at = _cut(shape, axis)
    return _product(sizes[:at])


def _inner(shape: Any, axis: Any) -> float:
    sizes, at = _cut(shape, axis)
    return _product(sizes[at + 1 :])


def _rows(shape: Any, axis: Any) -> float:
    sizes, at = _cut(shape, axis)
    return _product(sizes[:at] + sizes[at + 1 :])


def _dim(shape: Any, axis: Any) -> Any:
    if shape == []:
        return UNDEFINED
    sizes, at = _cut(shape, axis)
    return float(sizes[at])


def _length(value: Any) -> float:
    if not isinstance(value, list | str):
        raise Refused
    return float(len(value))


def _int(value: Any) -> float:
    if isinstance(value, str | bool):
        raise Unsure
    return _rounded(math.floor)(value)


FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "ceil": _rounded(math.ceil),
    "floor": _rounded(math.floor),
    "min": _extreme(min, math.inf),
    "max": _extreme(max, -math.inf),
    "pow": _pow,
    "ceilDiv": _ceil_div,
    "pow2ceil": _pow2ceil,
    "log2ceil": _log2ceil,
    "numel": lambda shape: _product(_sizes(shape)),
    "dim": _dim,
    "outer": _outer,
    "inner": _inner,
    "rows": _rows,
}
FILTERS: Mapping[str, Callable[..., Any]] = {
    "int": _int,
    "length": _length,
    "default": lambda value, other="": other if value is UNDEFINED else value,
}
