"""Text to a checked expression of the manifest format.

Jinja2 parses; its syntax tree is then compiled once into closures with the format's own semantics
(`values`). Jinja2's evaluator is not used, because its rules are Python's and because nothing in a
manifest may reach Python: the only things that can be called are functions put into the scope.
"""

import functools
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import jinja2
from jinja2 import lexer, nodes
from jinja2.parser import Parser

from jax_webgpu import values
from jax_webgpu.errors import ExpressionError
from jax_webgpu.helpers import HELPERS
from jax_webgpu.values import UNDEFINED, show, truthy

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

    def __call__(self, scope: Scope) -> Any:
        """Evaluates in `scope`; raises `ExpressionError`."""
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
        parser = Parser(_environment, "")
        parser.stream = lexer.TokenStream(_environment.lexer.wrap(_tokens(text)), None, None)
        node = parser.parse_expression()
        if not parser.stream.eos:
            raise ExpressionError(f"unexpected {parser.stream.current} in `{text}`")
        return _expression(node, text)
    except ExpressionError:
        raise
    except jinja2.TemplateSyntaxError as error:
        raise ExpressionError(f"{error.message} in `{text}`") from None
    except RecursionError:
        raise ExpressionError("the expression is nested too deeply") from None
    except ValueError as error:  # a number of thousands of digits
        raise ExpressionError(str(error)) from None


# Jinja's own tokens, all in one pattern: Jinja tries them in turn, which takes longer than parsing.
_TOKEN = re.compile(
    rf"(?P<whitespace>{lexer.whitespace_re.pattern})"
    rf"|(?P<float>(?ix:{lexer.float_re.pattern}))"
    rf"|(?P<integer>(?ix:{lexer.integer_re.pattern}))"
    r"|(?P<name>\w+)"
    rf"|(?P<string>(?s:{lexer.string_re.pattern}))"
    rf"|(?P<operator>{lexer.operator_re.pattern})"
)


def _tokens(text: str) -> Iterator[tuple[int, str, str]]:
    """The tokens of an expression: line, kind and text of each."""
    at = 0
    for match in _TOKEN.finditer(text):
        if match.start() > at:
            break
        at = match.end()
        yield 1, str(match.lastgroup), match.group()
    if at < len(text):
        raise ExpressionError(f"unexpected {text[at]!r} in `{text}`")


def _expression(node: nodes.Expr, text: str | None = None) -> Expression:
    compiler = Compiler()
    evaluator = compiler.compile(node)
    names = frozenset(compiler.names - compiler.tested)
    reads = frozenset(compiler.names | compiler.tested | compiler.derived)
    return Expression(source(node) if text is None else text, node, evaluator, names, reads)


def _attempt(node: nodes.Expr, scope: Scope) -> str:
    """The value of an expression as a message shows it, or why there is none."""
    try:
        return show(Compiler().compile(node)(scope))
    except ExpressionError as error:
        return f"an error ({error})"


def _conjuncts(node: nodes.Expr) -> Iterator[nodes.Expr]:
    if isinstance(node, nodes.And):
        yield from _conjuncts(node.left)
        yield from _conjuncts(node.right)
    else:
        yield node


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


def _subtract(a: Any, b: Any) -> Any:
    return values.number(values.need_number(a, "-") - values.need_number(b, "-"))


def _multiply(a: Any, b: Any) -> Any:
    return values.number(values.need_number(a, "*") * values.need_number(b, "*"))


_ARITHMETIC: dict[type[nodes.Node], Callable[[Any, Any], Any]] = {
    nodes.Add: values.add,
    nodes.Sub: _subtract,
    nodes.Mul: _multiply,
    nodes.Div: values.divide,
    nodes.Mod: values.remainder,
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


# With the number of arguments that each takes at most.
_FILTERS: dict[str, tuple[Callable[..., Any], int]] = {
    "default": (lambda value, other="": other if value is UNDEFINED else value, 1),
    "length": (_length, 0),
    "int": (_int, 0),
    "join": (_join, 1),
}


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
        self._depth = 0

    def compile(self, node: nodes.Node) -> Evaluator:
        """The closure; raises `ExpressionError` for a node that the format does not have."""
        make = getattr(self, f"_{type(node).__name__.lower()}", None)
        if make is None:
            raise ExpressionError(f"{type(node).__name__} is not in the manifest format")
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise ExpressionError("the expression is nested too deeply")
        compiled: Evaluator = make(node)
        self._depth -= 1
        return compiled

    def _const(self, node: nodes.Const) -> Evaluator:
        value = values.number(node.value) if values.is_number(node.value) else node.value
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
        known = {*self.derived}
        of, key = self.compile(node.node), node.attr
        if isinstance(node.node, nodes.Name) and node.node.name == "derive":
            self.derived = known | {key}
        return lambda scope: values.lookup(of(scope), key)

    def _getitem(self, node: nodes.Getitem) -> Evaluator:
        if isinstance(node.arg, nodes.Slice):
            return self._cut(node.node, node.arg)
        if isinstance(node.arg, nodes.Const) and isinstance(node.arg.value, str):
            return self._getattr(nodes.Getattr(node.node, node.arg.value, "load"))
        of, key = self.compile(node.node), self.compile(node.arg)
        return lambda scope: values.lookup(of(scope), key(scope))

    def _cut(self, node: nodes.Expr, bounds: nodes.Slice) -> Evaluator:
        of = self.compile(node)
        parts = [
            None if part is None else self.compile(part)
            for part in (bounds.start, bounds.stop, bounds.step)
        ]

        def cut(scope: Scope) -> Any:
            value = of(scope)
            start, stop, step = (
                None if part is None else values.need_integer(part(scope), "a slice")
                for part in parts
            )
            if step == 0:
                raise ExpressionError("a slice cannot have the step 0")
            if not isinstance(value, str):
                value = list(values.need_list(value, "a slice"))
            return value[start:stop:step]

        return cut

    def _call(self, node: nodes.Call) -> Evaluator:
        if node.dyn_args is not None or node.dyn_kwargs is not None:
            raise ExpressionError("calls with * or ** are not in the manifest format")
        function = self.compile(node.node)
        name = source(node.node)
        arguments = [self.compile(argument) for argument in node.args]
        keywords = [(keyword.key, self.compile(keyword.value)) for keyword in node.kwargs]

        def call(scope: Scope) -> Any:
            callee = function(scope)
            if not callable(callee):
                raise ExpressionError(f"{name} is {show(callee)}, not a function")
            try:
                return callee(
                    *[argument(scope) for argument in arguments],
                    **{key: value(scope) for key, value in keywords},
                )
            except TypeError as error:
                raise ExpressionError(f"{name}: {error}") from None

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
        return lambda scope: function(of(scope), *[argument(scope) for argument in arguments])

    def _test(self, node: nodes.Test) -> Evaluator:
        if node.name not in _TESTS or node.args or node.kwargs or node.dyn_args or node.dyn_kwargs:
            raise ExpressionError(
                f"test {node.name} is not in the manifest format, which has {', '.join(_TESTS)}"
            )
        test = _TESTS[node.name]
        of = (self.optional if node.name in ("defined", "undefined") else self.compile)(node.node)
        return lambda scope: test(of(scope))

    def _and(self, node: nodes.And) -> Evaluator:
        left, right = self.compile(node.left), self.compile(node.right)

        def both(scope: Scope) -> Any:
            value = left(scope)
            return right(scope) if truthy(value) else value

        return both

    def _or(self, node: nodes.Or) -> Evaluator:
        left, right = self.compile(node.left), self.compile(node.right)

        def either(scope: Scope) -> Any:
            value = left(scope)
            return value if truthy(value) else right(scope)

        return either

    def _not(self, node: nodes.Not) -> Evaluator:
        of = self.compile(node.node)
        return lambda scope: not truthy(of(scope))

    def _compare(self, node: nodes.Compare) -> Evaluator:
        first = self.compile(node.expr)
        steps = [(_COMPARISONS[step.op], self.compile(step.expr)) for step in node.ops]

        def chain(scope: Scope) -> bool:
            left = first(scope)
            for holds, operand in steps:
                right = operand(scope)
                if not holds(left, right):
                    return False
                left = right
            return True

        return chain

    def _arithmetic(self, node: nodes.BinExpr) -> Evaluator:
        operate = _ARITHMETIC[type(node)]
        left, right = self.compile(node.left), self.compile(node.right)
        return lambda scope: operate(left(scope), right(scope))

    _add = _sub = _mul = _div = _mod = _arithmetic

    def _neg(self, node: nodes.Neg) -> Evaluator:
        of = self.compile(node.node)
        return lambda scope: -values.need_number(of(scope), "-")

    def _pos(self, node: nodes.Pos) -> Evaluator:
        of = self.compile(node.node)
        return lambda scope: values.need_number(of(scope), "+")

    def _concat(self, node: nodes.Concat) -> Evaluator:
        parts = [self.compile(part) for part in node.nodes]
        return lambda scope: values.concatenated(part(scope) for part in parts)

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


# The environment only parses. Its optimiser would fold constants by Python's rules.
_environment = jinja2.Environment(optimized=False)


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
