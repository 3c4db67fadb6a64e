"""Text to a checked expression of the manifest format.

Jinja2 parses; its syntax tree is then compiled once into closures with the format's own semantics
(`values`). Jinja2's evaluator is not used, because its rules are Python's and because nothing in a
manifest may reach Python: the only things that can be called are functions put into the scope.
"""

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.parser import Parser

from jax_webgpu import values
from jax_webgpu.errors import ExpressionError
from jax_webgpu.helpers import HELPERS
from jax_webgpu.values import UNDEFINED, show, truthy

Scope = Mapping[str, Any]
Evaluator = Callable[[Scope], Any]


@dataclass(frozen=True)
class Expression:
    """A parsed expression; equal and hashed by its text."""

    text: str
    node: nodes.Expr = field(compare=False, repr=False)
    evaluator: Evaluator = field(compare=False, repr=False)
    names: frozenset[str] = field(compare=False, repr=False)
    """Bare names that must exist where it is evaluated."""
    derived: frozenset[str] = field(compare=False, repr=False)
    """The NAMEs read as `derive.NAME`."""

    def __call__(self, scope: Scope) -> Any:
        """Evaluates in `scope`; raises `ExpressionError`."""
        return self.evaluator(scope)

    @functools.cached_property
    def conjuncts(self) -> list["Expression"]:
        """The operands of the outermost `and`s, from left to right."""
        return [_expression(node) for node in _conjuncts(self.node)]

    @property
    def name(self) -> str | None:
        """The name that is the whole expression, if it is one."""
        return self.node.name if isinstance(self.node, nodes.Name) else None

    def explain(self, scope: Scope) -> str:
        """The expression beside the values that decided it, for a message."""
        text = f"`{self.text}`"
        match self.node:
            case nodes.Compare(ops=[nodes.Operand(op="eq", expr=wanted)]):
                left = attempt(_compiler.compile(self.node.expr), scope)
                text += f": {left}, expected {attempt(_compiler.compile(wanted), scope)}"
        leaves = {source(leaf): leaf for leaf in _leaves(self.node)}
        known = {name: attempt(_compiler.compile(leaf), scope) for name, leaf in leaves.items()}
        if known:
            text += " with " + ", ".join(f"{name} = {value}" for name, value in known.items())
        return text


def attempt(evaluator: Evaluator, scope: Scope) -> str:
    """The value as a message shows it, or why there is none."""
    try:
        return show(evaluator(scope))
    except ExpressionError as error:
        return f"an error ({error})"


@functools.lru_cache(maxsize=16384)
def parse(text: str) -> Expression:
    """Parses one expression; raises `ExpressionError` for what the format does not have."""
    try:
        parser = Parser(_environment, text, state="variable")
        node = parser.parse_expression()
        if not parser.stream.eos:
            raise ExpressionError(f"unexpected {parser.stream.current} in `{text}`")
        return _expression(node, text)
    except jinja2.TemplateSyntaxError as error:
        raise ExpressionError(f"{error.message} in `{text}`") from None
    except RecursionError:
        raise ExpressionError("the expression is nested too deeply") from None


def _expression(node: nodes.Expr, text: str | None = None) -> Expression:
    return Expression(
        source(node) if text is None else text,
        node,
        _compiler.compile(node),
        frozenset(required_names(node)),
        frozenset(
            attribute.attr
            for attribute in [node, *node.find_all(nodes.Getattr)]
            if isinstance(attribute, nodes.Getattr)
            and isinstance(attribute.node, nodes.Name)
            and attribute.node.name == "derive"
        ),
    )


def required_names(node: nodes.Node) -> Iterator[str]:
    """Names read by `node`, without those that it only tests for being defined."""
    match node:
        case nodes.Test(name="defined" | "undefined", node=nodes.Name()):
            return
        case nodes.Name(ctx="load"):
            yield node.name
    for child in node.iter_child_nodes():
        yield from required_names(child)


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
    parts = (values.to_text(element) for element in values.need_list(value, "join"))
    return values.to_text(separator).join(parts)


_FILTERS: dict[str, Callable[..., Any]] = {
    "default": lambda value, other="": other if value is UNDEFINED else value,
    "length": _length,
    "int": _int,
    "join": _join,
}


class Compiler:
    """Compiles an expression node to a closure over the scope.

    `lenient` makes an unknown bare name undefined, as templates have it; otherwise it is an error.
    """

    def __init__(self, lenient: bool):
        self.lenient = lenient

    def compile(self, node: nodes.Node) -> Evaluator:
        """The closure; raises `ExpressionError` for a node that the format does not have."""
        make = getattr(self, f"_{type(node).__name__.lower()}", None)
        if make is None:
            raise ExpressionError(f"{type(node).__name__} is not in the manifest format")
        compiled: Evaluator = make(node)
        return compiled

    def _const(self, node: nodes.Const) -> Evaluator:
        value = values.number(node.value) if values.is_number(node.value) else node.value
        return lambda scope: value

    def _name(self, node: nodes.Name, maybe: bool = False) -> Evaluator:
        name = node.name
        if self.lenient or maybe:
            return lambda scope: scope.get(name, UNDEFINED)

        def load(scope: Scope) -> Any:
            try:
                return scope[name]
            except KeyError:
                raise ExpressionError(f"unknown name {name}") from None

        return load

    def _maybe(self, node: nodes.Expr) -> Evaluator:
        """As `compile`, for a place where a bare name may be missing."""
        return self._name(node, True) if isinstance(node, nodes.Name) else self.compile(node)

    def _getattr(self, node: nodes.Getattr) -> Evaluator:
        of, key = self.compile(node.node), node.attr
        return lambda scope: values.lookup(of(scope), key)

    def _getitem(self, node: nodes.Getitem) -> Evaluator:
        of, key = self.compile(node.node), self.compile(node.arg)
        if not isinstance(node.arg, nodes.Slice):
            return lambda scope: values.lookup(of(scope), key(scope))

        def cut(scope: Scope) -> Any:
            value = of(scope)
            return (value if isinstance(value, str) else list(values.need_list(value, "a slice")))[
                key(scope)
            ]

        return cut

    def _slice(self, node: nodes.Slice) -> Evaluator:
        parts = (node.start, node.stop, node.step)
        bounds = [None if part is None else self.compile(part) for part in parts]

        def make(scope: Scope) -> slice:
            start, stop, step = (
                None if bound is None else values.need_integer(bound(scope), "a slice")
                for bound in bounds
            )
            if step == 0:
                raise ExpressionError("a slice cannot have the step 0")
            return slice(start, stop, step)

        return make

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
        if node.name not in _FILTERS or node.kwargs or node.node is None:
            raise ExpressionError(
                f"filter {node.name} is not in the manifest format, which has {', '.join(_FILTERS)}"
            )
        function = _FILTERS[node.name]
        of = self._maybe(node.node) if node.name == "default" else self.compile(node.node)
        arguments = [self.compile(argument) for argument in node.args]
        return lambda scope: function(of(scope), *[argument(scope) for argument in arguments])

    def _test(self, node: nodes.Test) -> Evaluator:
        if node.name not in _TESTS or node.args or node.kwargs:
            raise ExpressionError(
                f"test {node.name} is not in the manifest format, which has {', '.join(_TESTS)}"
            )
        test, of = _TESTS[node.name], self._maybe(node.node)
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
        return lambda scope: "".join([values.to_text(part(scope)) for part in parts])

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
_compiler = Compiler(lenient=False)


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


def source(node: nodes.Node, above: int = 0) -> str:
    """Writes an expression node back as text; `above` is the precedence of what surrounds it."""
    text, precedence = _source(node)
    return f"({text})" if precedence < above else text


def _source(node: nodes.Node) -> tuple[str, int]:
    match node:
        case nodes.Const():
            value = node.value
            return show(values.number(value) if values.is_number(value) else value), 9
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
            return f"{source(node.node, 9) if node.node else ''}|{node.name}{inside}", 8
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
            return f"{'-' if isinstance(node, nodes.Neg) else '+'}{source(node.node, 8)}", 8
        case nodes.CondExpr():
            tail = "" if node.expr2 is None else f" else {source(node.expr2)}"
            return f"{source(node.expr1, 1)} if {source(node.test, 1)}{tail}", 0
        case nodes.List() | nodes.Tuple():
            return f"[{', '.join(map(source, node.items))}]", 9
        case nodes.Dict():
            pairs = (f"{source(pair.key)}: {source(pair.value)}" for pair in node.items)
            return f"{{{', '.join(pairs)}}}", 9
    return type(node).__name__, 9
