"""The grammar of expressions: text to a syntax tree of Jinja's nodes.

It is Jinja's own grammar, of which Jinja's parser takes some three times as long: large manifests
have thousands of expressions. A test holds the two against each other.
"""

import re
import warnings
from typing import Any, NoReturn, TypeVar

from jinja2 import lexer, nodes

from jax_webgpu.errors import ExpressionError

# Parentheses, signs and the like within each other; each takes a few frames of Python's stack.
MAX_NESTING = 64

MAX_LENGTH = 1 << 16

N = TypeVar("N", bound=nodes.Node)

# All of Jinja's tokens in one pattern, in the order in which Jinja tries them.
_TOKEN = re.compile(
    rf"(?:{lexer.whitespace_re.pattern})?"
    r"(?:"
    rf"(?P<float>(?ix:{lexer.float_re.pattern}))"
    rf"|(?P<integer>(?ix:{lexer.integer_re.pattern}))"
    r"|(?P<name>\w+)"
    rf"|(?P<string>(?s:{lexer.string_re.pattern}))"
    rf"|(?P<operator>{lexer.operator_re.pattern})"
    r")"
)
_SPACE = re.compile(lexer.whitespace_re.pattern)

_CONSTANTS = {"true": True, "True": True, "false": False, "False": False, "none": None,
              "None": None}  # fmt: skip
_COMPARED = {"==": "eq", "!=": "ne", "<": "lt", "<=": "lteq", ">": "gt", ">=": "gteq"}
_COMPARED_BY_WORD = {"in": "in", "not in": "notin"}

# What binds two operands, from the loosest to the tightest.
_LEVELS = {
    **{"or": 1, "and": 2},
    **dict.fromkeys([*_COMPARED, *_COMPARED_BY_WORD], 4),
    **{"+": 5, "-": 5, "~": 6, "*": 7, "/": 7, "%": 7, "//": 7},
}
_NOT = 3
_BINARY: dict[str, type[nodes.BinExpr]] = {
    "or": nodes.Or,
    "and": nodes.And,
    "+": nodes.Add,
    "-": nodes.Sub,
    "*": nodes.Mul,
    "/": nodes.Div,
    "%": nodes.Mod,
}
_REFUSED = {"**": "Pow", "//": "FloorDiv"}


def parse(text: str) -> nodes.Expr:
    """Parses one expression; raises `ExpressionError` where it is none."""
    if len(text) > MAX_LENGTH:
        raise ExpressionError(f"an expression of {len(text):,} characters; at most {MAX_LENGTH:,}")
    parser = _Parser(text)
    node = parser.conditional()
    if parser.kind != "end":
        parser.unexpected()
    return node


def _node(kind: type[N], **fields: Any) -> N:
    """A node; Jinja's own constructor would take most of the time of parsing."""
    node = kind.__new__(kind)
    vars(node).update(fields)
    return node


def _unescaped(text: str) -> str:
    """What stands between quotes."""
    if "\r" in text:
        text = re.sub(r"\r\n?", "\n", text)
    if "\\" not in text:
        return text
    with warnings.catch_warnings(action="ignore"):  # a sequence that Python does not know stays
        return text.encode("ascii", "backslashreplace").decode("unicode-escape")


class _Parser:
    """A recursive descent; operators by their precedence."""

    def __init__(self, text: str):
        self.text = text
        self.tokens = self._tokens()
        self.at = -1
        self.depth = 0
        self.advance()

    def _tokens(self) -> list[tuple[str, str]]:
        """Kind and text of each token; the kind of an operator or a word is itself."""
        text, at, found = self.text, 0, list[tuple[str, str]]()
        while match := _TOKEN.match(text, at):
            at = match.end()
            kind = str(match.lastgroup)
            value = match[kind]
            if kind == "operator" or (kind == "name" and value in _WORDS):
                kind = value
            elif kind == "name" and not value.isidentifier():
                raise ExpressionError(f"Invalid character in identifier {value!r} in `{text}`")
            found.append((kind, value))
        space = _SPACE.match(text, at)
        at = space.end() if space else at
        if at < len(text):
            raise ExpressionError(f"unexpected {text[at]!r} in `{text}`")
        found.append(("end", ""))
        return found

    def advance(self) -> None:
        self.at += 1
        self.kind, self.value = self.tokens[self.at]

    def unexpected(self) -> NoReturn:
        what = repr(self.value) if self.kind != "end" else "end of the expression"
        raise ExpressionError(f"unexpected {what} in `{self.text}`")

    def skip(self, kind: str) -> bool:
        """Goes past a token if it is the next."""
        if self.kind == kind:
            self.advance()
            return True
        return False

    def expect(self, kind: str) -> str:
        value = self.value
        if not self.skip(kind):
            self.unexpected()
        return value

    def name(self) -> str:
        """A name, which may be one of the words that are operators elsewhere."""
        value = self.value
        if self.kind != "name" and self.kind not in _WORDS:
            self.unexpected()
        self.advance()
        return value

    def deeper(self) -> None:
        self.depth += 1
        if self.depth > MAX_NESTING:
            raise ExpressionError("the expression is nested too deeply")

    # ---- operators

    def conditional(self) -> nodes.Expr:
        self.deeper()
        node = self.operation(0)
        while self.skip("if"):
            test = self.operation(0)
            other = self.conditional() if self.skip("else") else None
            node = _node(nodes.CondExpr, test=test, expr1=node, expr2=other)
        self.depth -= 1
        return node

    def operation(self, least: int) -> nodes.Expr:
        """Operands and what binds them, as tightly as `least` or tighter."""
        if self.kind == "not" and least <= _NOT:
            self.deeper()
            self.advance()
            node: nodes.Expr = _node(nodes.Not, node=self.operation(_NOT))
            self.depth -= 1
        else:
            node = self.unary()
        while True:
            operator = self.operator()
            level = _LEVELS.get(operator, -1)
            if level < least:
                if operator in _REFUSED:
                    raise ExpressionError(f"{_REFUSED[operator]} is not in the manifest format")
                return node
            if level == _LEVELS["=="]:
                node = self.comparison(node)
            elif operator == "~":
                parts = [node]
                while self.skip("~"):
                    parts.append(self.operation(level + 1))
                node = _node(nodes.Concat, nodes=parts)
            elif operator in _REFUSED:
                raise ExpressionError(f"{_REFUSED[operator]} is not in the manifest format")
            else:
                self.advance()
                right = self.operation(level + 1)
                node = _node(_BINARY[operator], left=node, right=right)

    def operator(self) -> str:
        if self.kind == "not" and self.tokens[self.at + 1][0] == "in":
            return "not in"
        return self.kind

    def comparison(self, left: nodes.Expr) -> nodes.Expr:
        ops = list[nodes.Operand]()
        while True:
            operator = self.operator()
            name = _COMPARED.get(operator) or _COMPARED_BY_WORD.get(operator)
            if name is None:
                return _node(nodes.Compare, expr=left, ops=ops)
            self.advance()
            if operator == "not in":
                self.advance()
            ops.append(_node(nodes.Operand, op=name, expr=self.operation(_LEVELS[operator] + 1)))

    def unary(self, with_filter: bool = True) -> nodes.Expr:
        if self.kind in ("-", "+"):
            kind = nodes.Neg if self.kind == "-" else nodes.Pos
            self.deeper()
            self.advance()
            node: nodes.Expr = _node(kind, node=self.unary(with_filter=False))
            self.depth -= 1
        else:
            node = self.primary()
        node = self.postfix(node)
        return self.filtered(node) if with_filter else node

    # ---- operands

    def primary(self) -> nodes.Expr:
        kind, value = self.kind, self.value
        if kind == "name" or kind in _WORDS:
            self.advance()
            if value in _CONSTANTS:
                return _node(nodes.Const, value=_CONSTANTS[value])
            return _node(nodes.Name, name=value, ctx="load")
        if kind == "integer":
            self.advance()
            return _node(nodes.Const, value=int(value.replace("_", ""), 0))
        if kind == "float":
            self.advance()
            return _node(nodes.Const, value=float(value.replace("_", "")))
        if kind == "string":
            parts = []
            while self.kind == "string":
                parts.append(_unescaped(self.value[1:-1]))
                self.advance()
            return _node(nodes.Const, value="".join(parts))
        if kind == "(":
            return self.parenthesised()
        if kind == "[":
            self.advance()
            items = list[nodes.Expr]()
            while self.more(items, "]"):
                items.append(self.conditional())
            return _node(nodes.List, items=items)
        if kind == "{":
            self.advance()
            pairs = list[nodes.Pair]()
            while self.more(pairs, "}"):
                key = self.conditional()
                self.expect(":")
                pairs.append(_node(nodes.Pair, key=key, value=self.conditional()))
            return _node(nodes.Dict, items=pairs)
        self.unexpected()

    def more(self, before: list[Any], closing: str) -> bool:
        """Whether another item follows those before; goes past the comma or the closing."""
        if self.skip(closing):
            return False
        if before:
            self.expect(",")
            return not self.skip(closing)
        return True

    def parenthesised(self) -> nodes.Expr:
        self.advance()
        items = list[nodes.Expr]()
        comma = False
        while not self.skip(")"):
            if items:
                self.expect(",")
                comma = True
                if self.skip(")"):
                    break
            items.append(self.conditional())
        return (
            items[0]
            if len(items) == 1 and not comma
            else (_node(nodes.Tuple, items=items, ctx="load"))
        )

    def postfix(self, node: nodes.Expr) -> nodes.Expr:
        while True:
            if self.kind == ".":
                self.advance()
                if self.kind == "integer":
                    index = _node(nodes.Const, value=int(self.value.replace("_", ""), 0))
                    self.advance()
                    node = _node(nodes.Getitem, node=node, arg=index, ctx="load")
                else:
                    node = _node(nodes.Getattr, node=node, attr=self.name(), ctx="load")
            elif self.kind == "[":
                node = self.subscript(node)
            elif self.kind == "(":
                node = _node(nodes.Call, node=node, **self.arguments())
            else:
                return node

    def subscript(self, node: nodes.Expr) -> nodes.Expr:
        self.advance()
        parts = list[nodes.Expr]()
        while not self.skip("]"):
            if parts:
                self.expect(",")
            parts.append(self.part())
        arg = parts[0] if len(parts) == 1 else _node(nodes.Tuple, items=parts, ctx="load")
        return _node(nodes.Getitem, node=node, arg=arg, ctx="load")

    def part(self) -> nodes.Expr:
        """An index or a slice."""
        bounds: list[nodes.Expr | None] = [None, None, None]
        if self.kind != ":":
            first = self.conditional()
            if self.kind != ":":
                return first
            bounds[0] = first
        for index in (1, 2):
            if self.skip(":") and self.kind not in (":", "]", ","):
                bounds[index] = self.conditional()
        return _node(nodes.Slice, start=bounds[0], stop=bounds[1], step=bounds[2])

    def arguments(self) -> dict[str, Any]:
        """Of a call or a filter: by position, then by name."""
        self.advance()
        args, named = list[nodes.Expr](), list[nodes.Keyword]()
        while self.more([*args, *named], ")"):
            if self.kind in ("*", "**"):
                raise ExpressionError("calls with * or ** are not in the manifest format")
            if self.tokens[self.at + 1 : self.at + 2] == [("=", "=")]:
                key = self.name()
                self.advance()
                named.append(_node(nodes.Keyword, key=key, value=self.conditional()))
            elif named:
                self.unexpected()
            else:
                args.append(self.conditional())
        return {"args": args, "kwargs": named, "dyn_args": None, "dyn_kwargs": None}

    def filtered(self, node: nodes.Expr) -> nodes.Expr:
        """What stands behind an operand: filters, tests, and calls of their results."""
        while True:
            if self.skip("|"):
                name = self.dotted()
                node = _node(nodes.Filter, node=node, name=name, **self.arguments_if_any())
            elif self.skip("is"):
                node = self.test(node)
            elif self.kind == "(":
                node = _node(nodes.Call, node=node, **self.arguments())
            else:
                return node

    def dotted(self) -> str:
        name = self.name()
        while self.skip("."):
            name += "." + self.name()
        return name

    def arguments_if_any(self) -> dict[str, Any]:
        if self.kind == "(":
            return self.arguments()
        return {"args": [], "kwargs": [], "dyn_args": None, "dyn_kwargs": None}

    def test(self, node: nodes.Expr) -> nodes.Expr:
        negated = self.skip("not")
        name = self.dotted()
        bare = self.kind in _ARGUMENT
        given = self.arguments_if_any()
        if bare:
            if self.kind == "is":
                raise ExpressionError("You cannot chain multiple tests with is")
            given["args"] = [self.postfix(self.primary())]
        node = _node(nodes.Test, node=node, name=name, **given)
        return _node(nodes.Not, node=node) if negated else node


# Names that are operators in their places.
_WORDS = frozenset({"or", "and", "not", "in", "is", "if", "else"})

# What a test takes for its argument without parentheses around it, words among them.
_ARGUMENT = frozenset({"name", "string", "integer", "float", "[", "{", "not", "in", "is", "if"})
