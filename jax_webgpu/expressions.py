"""Text to a checked expression of the manifest format.

The syntax tree of Jinja's grammar is compiled once into closures with the format's own semantics
(`values`). Jinja2's evaluator is not used, because its rules are Python's and because nothing in a
manifest may reach Python: the only things that can be called are functions put into the scope.
"""

import functools
import math
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from jinja2 import nodes

from jax_webgpu import grammar, values
from jax_webgpu.errors import ExpressionError
from jax_webgpu.helpers import HELPERS
from jax_webgpu.values import EXACT, METER, UNDEFINED, show, spend, truthy

Scope = Mapping[str, Any]
Evaluator = Callable[[Scope], Any]


# Deeper trees are refused, so that walking one never overflows Python's stack.
MAX_DEPTH = 200

# Among the names that an expression reads, for all derived values.
EVERY = "*"


@dataclass(frozen=True)
class Expression:
    """A parsed expression; equal and hashed by its text."""

    text: str
    node: nodes.Expr = field(compare=False, repr=False)
    evaluator: Evaluator = field(compare=False, repr=False)
    names: frozenset[str] = field(compare=False, repr=False)
    """Bare names that must exist where it is evaluated: it does not ask whether they do."""
    reads: frozenset[str] = field(compare=False, repr=False)
    """All that it may read: bare names and the NAMEs of `derive.NAME`; `EVERY` for any of these."""
    size: int = field(compare=False, repr=False)
    """The nodes of its tree."""

    def __call__(self, scope: Scope) -> Any:
        """Evaluates in `scope`; raises `ExpressionError`."""
        meter = scope.get(METER)
        if meter is not None:
            meter.left -= self.size
            if meter.left < 0:
                meter.spend(0)
        return self.evaluator(scope)

    @functools.cached_property
    def conjuncts(self) -> tuple["Expression", ...]:
        """The operands of the outermost `and`s, from left to right."""
        return tuple(_expression(node) for node in _conjuncts(self.node))

    @property
    def name(self) -> str | None:
        """The name that is the whole expression, if it is one."""
        return self.node.name if isinstance(self.node, nodes.Name) else None

    def explain(self, scope: Scope) -> str:
        """The expression beside the values that decided it, for a message."""
        text = f"`{self.text}`"
        match self.node:
            case nodes.Compare(expr=left, ops=[nodes.Operand(op="eq", expr=right)]):
                text += f": {_attempt(left, scope)}, expected {_attempt(right, scope)}"
        leaves = {source(leaf): leaf for leaf in _leaves(self.node)}
        if leaves:
            known = (f"{name} = {_attempt(leaf, scope)}" for name, leaf in leaves.items())
            text += f" with {', '.join(known)}"
        return text


@functools.lru_cache(maxsize=16384)
def parse(text: str) -> Expression:
    """Parses one expression; raises `ExpressionError` for what the format does not have."""
    try:
        return _expression(grammar.parse(text), text)
    except ExpressionError:
        raise
    except RecursionError:
        raise ExpressionError("the expression is nested too deeply") from None
    except ValueError as error:  # a number of thousands of digits
        raise ExpressionError(str(error)) from None


def _expression(node: nodes.Expr, text: str | None = None) -> Expression:
    compiler = Compiler()
    evaluator = compiler.compile(node)
    names = frozenset(compiler.names - compiler.tested)
    reads = frozenset(compiler.names | compiler.tested | compiler.derived)
    text = source(node) if text is None else text
    return Expression(text, node, evaluator, names, reads, compiler.size)


def _attempt(node: nodes.Expr, scope: Scope) -> str:
    """The value of an expression as a message shows it, or why there is none."""
    try:
        return show(Compiler().compile(node)(scope))
    except ExpressionError as error:
        return f"an error ({error})"


def _conjuncts(node: nodes.Expr) -> Iterator[nodes.Expr]:
    for operand in _operands(node, nodes.And):
        if isinstance(operand, nodes.And):
            yield from _conjuncts(operand)
        else:
            yield operand


def _operands(node: nodes.Expr, kind: type[nodes.BinExpr]) -> list[nodes.Expr]:
    """The operands of `a and b and c`, which is a tree that leans to the left."""
    found = []
    while isinstance(node, kind):
        found.append(node.right)
        node = node.left
    return [node, *reversed(found)]


def _leaves(node: nodes.Node) -> Iterator[nodes.Expr]:
    """The names and member paths in an expression, and calls of members, outermost first."""
    match node:
        case nodes.Name():
            if node.name not in HELPERS and node.name != "f16Ok":
                yield node
        case nodes.Getattr() | nodes.Call(node=nodes.Getattr()):
            yield node
        case _:
            for child in node.iter_child_nodes():
                yield from _leaves(child)


# ---- evaluation ---------------------------------------------------------------------------------

_COMPARISONS: dict[str, Callable[[Any, Any], bool]] = {
    "eq": values.equal,
    "ne": lambda a, b: not values.equal(a, b),
    "lt": functools.partial(values.compare, "<"),
    "lteq": functools.partial(values.compare, "<="),
    "gt": functools.partial(values.compare, ">"),
    "gteq": functools.partial(values.compare, ">="),
    "in": lambda a, b: values.contains(b, a),
    "notin": lambda a, b: not values.contains(b, a),
}


_ARITHMETIC: dict[type[nodes.Node], Callable[[Any, Any], Any]] = {
    nodes.Add: values.add,
    nodes.Sub: values.subtract,
    nodes.Mul: values.multiply,
    nodes.Div: values.divide,
    nodes.Mod: values.remainder,
}

# What the same operators are between whole numbers, which nearly all operands are; the results
# of arithmetic as far as they are exact.
_WHOLE: dict[str | type[nodes.Node], Callable[[int, int], Any]] = {
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "lteq": operator.le,
    "gt": operator.gt,
    "gteq": operator.ge,
    nodes.Add: operator.add,
    nodes.Sub: operator.sub,
    nodes.Mul: operator.mul,
}

_TESTS: dict[str, Callable[[Any], bool]] = {
    "defined": lambda value: value is not UNDEFINED,
    "undefined": lambda value: value is UNDEFINED,
    "none": lambda value: value is None,
    "number": values.is_number,
    "string": lambda value: isinstance(value, str),
    "boolean": lambda value: isinstance(value, bool),
}


def _length(value: Any) -> int:
    if isinstance(value, str | Mapping) or values.is_sequence(value):
        return len(value)
    raise ExpressionError(f"length takes a list, an object or a string, got {show(value)}")


def _int(value: Any) -> int | float:
    """Rounds down; text that is no number gives 0, as in Jinja."""
    if isinstance(value, str | bool):
        value = values.to_number(value)
        value = 0 if value != value else values.number(value)
    return HELPERS["floor"](value)


def _join(value: Any, separator: Any = "") -> str:
    return values.concatenated(values.need_list(value, "join"), values.to_text(separator))


_NO_KEYWORDS: dict[str, Any] = {}
_HELPERS = frozenset(HELPERS.values())

# With the number of arguments that each takes at most.
_FILTERS: dict[str, tuple[Callable[..., Any], int]] = {
    "default": (lambda value, other="": other if value is UNDEFINED else value, 1),
    "length": (_length, 0),
    "int": (_int, 0),
    "join": (_join, 1),
}


def _told(error: ExpressionError, node: nodes.Node) -> ExpressionError:
    """The error with the part of the expression that it is about."""
    text = source(node)
    return ExpressionError(f"{error} in `{text if len(text) <= 80 else text[:77] + '...'}`")


@functools.cache
def _method(kind: type[nodes.Node]) -> str:
    return f"_{kind.__name__.lower()}"


class Compiler:
    """Compiles expression nodes to closures over the scope, and notes what they read.

    `lenient` makes an unknown bare name undefined, as templates have it; otherwise it is an error.
    """

    def __init__(self, lenient: bool = False):
        self.lenient = lenient
        self.names: set[str] = set()
        """Bare names that are read."""
        self.tested: set[str] = set()
        """Bare names that are asked to be defined; elsewhere they may be read too."""
        self.derived: set[str] = set()
        """The NAMEs of `derive.NAME`; `EVERY` where which one is not known."""
        self.size = 0
        """The nodes compiled so far."""
        self._depth = 0

    def compile(self, node: nodes.Node) -> Evaluator:
        """The closure; raises `ExpressionError` for a node that the format does not have."""
        make = getattr(self, _method(type(node)), None)
        if make is None:
            raise ExpressionError(f"{type(node).__name__} is not in the manifest format")
        self.size += 1
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise ExpressionError("the expression is nested too deeply")
        compiled: Evaluator = make(node)
        self._depth -= 1
        return compiled

    def _const(self, node: nodes.Const) -> Evaluator:
        value = values.number(node.value) if values.is_number(node.value) else node.value
        if isinstance(value, str) and not value.isascii():
            values.need_unicode(value)
        return lambda scope: value

    def _name(self, node: nodes.Name) -> Evaluator:
        name = node.name
        self.names.add(name)
        if name == "derive":
            self.derived.add(EVERY)
        if self.lenient:
            return lambda scope: scope.get(name, UNDEFINED)

        def load(scope: Scope) -> Any:
            try:
                return scope[name]
            except KeyError:
                raise ExpressionError(f"unknown name {name}") from None

        return load

    def optional(self, node: nodes.Expr) -> Evaluator:
        """As `compile`, for a place where a bare name may be missing."""
        if isinstance(node, nodes.Name):
            self.tested.add(node.name)
            return lambda scope: scope.get(node.name, UNDEFINED)
        return self.compile(node)

    def defaulted(self, node: nodes.Expr) -> Evaluator:
        """As `compile`, for what the filter `default` is applied to."""
        return self.compile(node)

    def _getattr(self, node: nodes.Getattr) -> Evaluator:
        key = node.attr
        if isinstance(node.node, nodes.Name) and node.node.name == "derive":
            self.derived.add(key)
            self.names.add("derive")
            return lambda scope: values.lookup(scope["derive"], key)
        of = self.compile(node.node)
        lookup = values.lookup

        def member(scope: Scope) -> Any:
            container = of(scope)
            if isinstance(container, dict):
                return container.get(key, UNDEFINED)
            try:
                return lookup(container, key)
            except ExpressionError as error:
                raise _told(error, node) from None

        return member

    def _getitem(self, node: nodes.Getitem) -> Evaluator:
        if isinstance(node.arg, nodes.Slice):
            return self._cut(node, node.arg)
        if isinstance(node.arg, nodes.Const) and isinstance(node.arg.value, str):
            return self._getattr(nodes.Getattr(node.node, node.arg.value, "load"))
        of, key = self.compile(node.node), self.compile(node.arg)

        def item(scope: Scope) -> Any:
            container, index = of(scope), key(scope)
            try:
                return values.lookup(container, index)
            except ExpressionError as error:
                raise _told(error, node) from None

        return item

    def _cut(self, node: nodes.Getitem, bounds: nodes.Slice) -> Evaluator:
        of = self.compile(node.node)
        parts = [
            None if part is None else self.compile(part)
            for part in (bounds.start, bounds.stop, bounds.step)
        ]

        def cut(scope: Scope) -> Any:
            value = of(scope)
            given = [None if part is None else part(scope) for part in parts]
            try:
                start, stop, step = (
                    None if each is None else values.need_integer(each, "a slice") for each in given
                )
                if step == 0:
                    raise ExpressionError("a slice cannot have the step 0")
                if not isinstance(value, str):
                    value = list(values.need_list(value, "a slice"))
            except ExpressionError as error:
                raise _told(error, node) from None
            spend(scope, value)
            return value[start:stop:step]

        return cut

    def _call(self, node: nodes.Call) -> Evaluator:
        if node.dyn_args is not None or node.dyn_kwargs is not None:
            raise ExpressionError("calls with * or ** are not in the manifest format")
        function = self.compile(node.node)
        arguments = [self.compile(argument) for argument in node.args]
        keywords = [(keyword.key, self.compile(keyword.value)) for keyword in node.kwargs]

        def call(scope: Scope) -> Any:
            callee = function(scope)
            if not callable(callee):
                raise ExpressionError(f"{source(node.node)} is {show(callee)}, not a function")
            given = [argument(scope) for argument in arguments]
            named = {key: value(scope) for key, value in keywords} if keywords else _NO_KEYWORDS
            try:
                result = callee(*given, **named)
            except TypeError as error:
                raise ExpressionError(f"{source(node.node)}: {error}") from None
            except ExpressionError as error:
                if callee not in _HELPERS:
                    raise  # a macro's, which says in which line of it
                raise _told(error, node) from None
            spend(scope, result, *given)
            return result

        return call

    def _filter(self, node: nodes.Filter) -> Evaluator:
        function, most = _FILTERS.get(node.name, (None, 0))
        if function is None or node.node is None:
            raise ExpressionError(
                f"filter {node.name} is not in the manifest format, which has {', '.join(_FILTERS)}"
            )
        if len(node.args) > most or node.kwargs or node.dyn_args or node.dyn_kwargs:
            raise ExpressionError(f"filter {node.name} takes at most {most} arguments")
        of = (self.defaulted if node.name == "default" else self.compile)(node.node)
        arguments = [self.compile(argument) for argument in node.args]

        def filtered(scope: Scope) -> Any:
            value, given = of(scope), [argument(scope) for argument in arguments]
            try:
                result = function(value, *given)
            except ExpressionError as error:
                raise _told(error, node) from None
            spend(scope, value, result)
            return result

        return filtered

    def _test(self, node: nodes.Test) -> Evaluator:
        if node.name not in _TESTS or node.args or node.kwargs or node.dyn_args or node.dyn_kwargs:
            raise ExpressionError(
                f"test {node.name} is not in the manifest format, which has {', '.join(_TESTS)}"
            )
        test = _TESTS[node.name]
        of = (self.optional if node.name in ("defined", "undefined") else self.compile)(node.node)
        return lambda scope: test(of(scope))

    def _and(self, node: nodes.And) -> Evaluator:
        *first, last = self._chain(node)

        def all_(scope: Scope) -> Any:
            for operand in first:
                value = operand(scope)
                if value is not True and not truthy(value):
                    return value
            return last(scope)

        return all_

    def _or(self, node: nodes.Or) -> Evaluator:
        *first, last = self._chain(node)

        def any_(scope: Scope) -> Any:
            for operand in first:
                value = operand(scope)
                if value is True or truthy(value):
                    return value
            return last(scope)

        return any_

    def _chain(self, node: nodes.BinExpr) -> list[Evaluator]:
        """The operands, as deep in the tree as they are many."""
        operands = _operands(node, type(node))
        self._depth += len(operands)
        compiled = [self.compile(operand) for operand in operands]
        self._depth -= len(operands)
        return compiled

    def _not(self, node: nodes.Not) -> Evaluator:
        of = self.compile(node.node)
        return lambda scope: not truthy(of(scope))

    def _compare(self, node: nodes.Compare) -> Evaluator:
        first = self.compile(node.expr)
        steps = [(_COMPARISONS[step.op], self.compile(step.expr)) for step in node.ops]
        if len(steps) == 1 and node.ops[0].op not in ("in", "notin"):
            ((compare, second),) = steps
            whole = _WHOLE[node.ops[0].op]

            def once(scope: Scope) -> bool:
                left, right = first(scope), second(scope)
                if left.__class__ is int and right.__class__ is int:
                    return bool(whole(left, right))
                if left.__class__ is str or right.__class__ is str:
                    spend(scope, left, right)
                try:
                    return compare(left, right)
                except ExpressionError as error:
                    raise _told(error, node) from None

            return once

        def chain(scope: Scope) -> bool:
            left = first(scope)
            for holds, operand in steps:
                right = operand(scope)
                spend(scope, left, right)
                try:
                    if not holds(left, right):
                        return False
                except ExpressionError as error:
                    raise _told(error, node) from None
                left = right
            return True

        return chain

    def _arithmetic(self, node: nodes.BinExpr) -> Evaluator:
        operate, whole = _ARITHMETIC[type(node)], _WHOLE.get(type(node))
        left, right = self.compile(node.left), self.compile(node.right)

        if whole is None:  # division, whose result is a number

            def divide(scope: Scope) -> Any:
                a, b = left(scope), right(scope)
                try:
                    return operate(a, b)
                except ExpressionError as error:
                    raise _told(error, node) from None

            return divide

        def calculate(scope: Scope) -> Any:
            a, b = left(scope), right(scope)
            if a.__class__ is int and b.__class__ is int:
                result = whole(a, b)
                if -EXACT <= result <= EXACT:
                    return result
            try:
                result = operate(a, b)
            except ExpressionError as error:
                raise _told(error, node) from None
            spend(scope, result)
            return result

        return calculate

    _add = _sub = _mul = _div = _mod = _arithmetic

    def _sign(self, node: nodes.Neg | nodes.Pos) -> Evaluator:
        of, sign = self.compile(node.node), -1 if isinstance(node, nodes.Neg) else 1

        def signed(scope: Scope) -> int | float:
            value = of(scope)
            try:
                return sign * values.need_number(value, "-" if sign < 0 else "+")
            except ExpressionError as error:
                raise _told(error, node) from None

        return signed

    _neg = _pos = _sign

    def _concat(self, node: nodes.Concat) -> Evaluator:
        parts = [self.compile(part) for part in node.nodes]

        def concatenate(scope: Scope) -> str:
            given = [part(scope) for part in parts]
            try:
                result = values.concatenated(given)
            except ExpressionError as error:
                raise _told(error, node) from None
            spend(scope, result)
            return result

        return concatenate

    def _condexpr(self, node: nodes.CondExpr) -> Evaluator:
        test, then = self.compile(node.test), self.compile(node.expr1)
        other = self.compile(node.expr2) if node.expr2 is not None else lambda scope: UNDEFINED
        return lambda scope: then(scope) if truthy(test(scope)) else other(scope)

    def _list(self, node: nodes.List | nodes.Tuple) -> Evaluator:
        items = [self.compile(item) for item in node.items]
        return lambda scope: [item(scope) for item in items]

    _tuple = _list

    def _dict(self, node: nodes.Dict) -> Evaluator:
        pairs = [(self.compile(pair.key), self.compile(pair.value)) for pair in node.items]
        return lambda scope: {values.to_text(key(scope)): value(scope) for key, value in pairs}


# ---- source -------------------------------------------------------------------------------------

_OPERATORS = {
    nodes.Or: ("or", 1),
    nodes.And: ("and", 2),
    nodes.Add: ("+", 5),
    nodes.Sub: ("-", 5),
    nodes.Mul: ("*", 7),
    nodes.Div: ("/", 7),
    nodes.Mod: ("%", 7),
}
_COMPARED = {
    "eq": "==",
    "ne": "!=",
    "lt": "<",
    "lteq": "<=",
    "gt": ">",
    "gteq": ">=",
    "in": "in",
    "notin": "not in",
}


def source(node: nodes.Node, above: float = 0) -> str:
    """Writes an expression node back as text; `above` is the precedence of what surrounds it."""
    text, precedence = _source(node)
    return f"({text})" if precedence < above else text


def _literal(value: Any) -> str:
    if isinstance(value, str):
        return values.quoted(value)
    if values.is_number(value):
        value = values.number(value)
    return show(value) if value != math.inf else "1e999"


def _source(node: nodes.Node) -> tuple[str, float]:
    match node:
        case nodes.Const():
            return _literal(node.value), 9
        case nodes.Name():
            return node.name, 9
        case nodes.Getattr():
            return f"{source(node.node, 9)}.{node.attr}", 9
        case nodes.Getitem():
            return f"{source(node.node, 9)}[{source(node.arg)}]", 9
        case nodes.Slice():
            bounds = [node.start, node.stop] + ([node.step] if node.step else [])
            return ":".join("" if part is None else source(part) for part in bounds), 9
        case nodes.Call():
            arguments = [source(argument) for argument in node.args]
            arguments += [f"{keyword.key}={source(keyword.value)}" for keyword in node.kwargs]
            return f"{source(node.node, 9)}({', '.join(arguments)})", 9
        case nodes.Filter():
            inside = f"({', '.join(map(source, node.args))})" if node.args else ""
            return f"{source(node.node, 8) if node.node else ''}|{node.name}{inside}", 8
        case nodes.Test():
            return f"{source(node.node, 8)} is {node.name}", 4
        case nodes.Not():
            return f"not {source(node.node, 3)}", 3
        case nodes.Compare():
            steps = (f" {_COMPARED[step.op]} {source(step.expr, 5)}" for step in node.ops)
            return source(node.expr, 5) + "".join(steps), 4
        case nodes.Concat():
            return " ~ ".join(source(part, 7) for part in node.nodes), 6
        case nodes.BinExpr() if type(node) in _OPERATORS:
            word, precedence = _OPERATORS[type(node)]
            left, right = source(node.left, precedence), source(node.right, precedence + 1)
            return f"{left} {word} {right}", precedence
        case nodes.Neg() | nodes.Pos():
            # A filter takes the sign with what it is applied to.
            return f"{'-' if isinstance(node, nodes.Neg) else '+'}{source(node.node, 8.5)}", 8.5
        case nodes.CondExpr():
            then = source(node.expr1, 1)
            if re.search(r" is \w+$", then):  # Jinja would take the `if` for the test's argument
                then = f"({then})"
            tail = "" if node.expr2 is None else f" else {source(node.expr2)}"
            return f"{then} if {source(node.test, 1)}{tail}", 0
        case nodes.List() | nodes.Tuple():
            return f"[{', '.join(map(source, node.items))}]", 9
        case nodes.Dict():
            pairs = (f"{source(pair.key)}: {source(pair.value)}" for pair in node.items)
            return f"{{{', '.join(pairs)}}}", 9
    return type(node).__name__, 9
