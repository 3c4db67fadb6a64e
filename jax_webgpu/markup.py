"""The grammar of templates: text to a list of Jinja's statement nodes.

It is Jinja's own grammar with `trim_blocks` and `lstrip_blocks`, for the statements that the format
has; Jinja's lexer alone would take most of the time of loading. A test holds the two against each
other.
"""

import re
from collections.abc import Callable, Generator, Iterator
from typing import NoReturn

from jinja2 import nodes

from jax_webgpu.errors import ExpressionError
from jax_webgpu.grammar import SPACE, TOKEN, Parser, kind_of, make

# Blocks within each other; each takes a few frames of Python's stack.
MAX_NESTING = 32

_TAG = re.compile(r"\{([{%#])([-+]?)")
_COMMENT_END = re.compile(r"\+#\}|-#\}\s*|#\}\n?")
_RAW = re.compile(r"\s*raw\s*(?:-%\}\s*|%\})")
_RAW_END = re.compile(r"\{%([-+]?)\s*endraw\s*(?:\+%\}|-%\}\s*|%\}\n?)")
_ENDS = {"{": re.compile(r"-\}\}\s*|\}\}"), "%": re.compile(r"\+%\}|-%\}\s*|%\}\n?")}
_NAMES = {"{": "variable", "%": "block"}
_CLOSING = {"(": ")", "[": "]", "{": "}"}

# What Jinja has and the format has not.
_REFUSED = frozenset("autoescape block extends filter from import include".split())

Token = tuple[str, str, int]
"""Kind, text and line."""


class SyntaxFault(ExpressionError):
    """A template could not be parsed; `line` is where."""

    def __init__(self, message: str, line: int):
        super().__init__(message)
        self.line = line


def parse(source: str) -> list[nodes.Node]:
    """Parses a template; raises `SyntaxFault`."""
    parser = _TemplateParser(source)
    try:
        return parser.statements(())
    except SyntaxFault:
        raise
    except (ExpressionError, ValueError) as error:  # the latter for a number of too many digits
        raise SyntaxFault(str(error), parser.line) from None


def _tokens(source: str) -> Iterator[Token]:
    """Text, and what stands in the tags between."""
    source = re.sub(r"\r\n?", "\n", source).removesuffix("\n")
    at, line = 0, 1
    while tag := _TAG.search(source, at):
        kind, sign = tag.groups()
        yield from _data(source, at, tag.start(), sign, kind != "{", line)
        line += source.count("\n", at, tag.end())
        at = tag.end()
        raw = _RAW.match(source, at) if kind == "%" else None
        end: re.Match[str] | None
        if kind == "#":
            end = _COMMENT_END.search(source, at)
            if end is None and at < len(source):  # nothing is no comment, to Jinja
                raise SyntaxFault("Missing end of comment tag", line)
        elif raw is not None:
            end = _RAW_END.search(source, raw.end())
            if end is not None:
                yield from _data(source, raw.end(), end.start(), end[1], True, line)
            elif raw.end() < len(source):
                raise SyntaxFault("Missing end of raw directive", line)
        else:
            yield f"{_NAMES[kind]}_begin", tag[0], line
            end = yield from _inside(source, at, kind, line)
        if end is None:
            at = len(source)
            break
        line += source.count("\n", at, end.end())
        at = end.end()
    yield from _data(source, at, len(source), "+", False, line)
    yield "end", "", line + source.count("\n", at)


def _data(
    source: str, start: int, end: int, sign: str, is_block: bool, line: int
) -> Iterator[Token]:
    """The text between two tags, as the tag behind it leaves it."""
    text = source[start:end]
    if sign == "-":
        text = text.rstrip()
    elif sign != "+" and is_block:
        begin = text.rfind("\n") + 1
        if (begin or start == 0 or source[start - 1] == "\n") and text[begin:].isspace():
            text = text[:begin]
    if text:
        yield "data", text, line


def _inside(source: str, at: int, kind: str, line: int) -> Generator[Token, None, re.Match[str]]:
    """The tokens of a tag up to its end, which is returned."""
    open_ = list[str]()
    while True:
        space = SPACE.match(source, at)
        if space:
            line += source.count("\n", at, space.end())
            at = space.end()
        if not open_ and (end := _ENDS[kind].match(source, at)):
            yield f"{_NAMES[kind]}_end", end[0], line
            return end
        found = TOKEN.match(source, at)
        if found is None:
            what = repr(source[at]) if at < len(source) else "end of the template"
            raise SyntaxFault(f"unexpected {what}", line)
        token, text = kind_of(found)
        if token in _CLOSING:
            open_.append(_CLOSING[token])
        elif token in _CLOSING.values() and (not open_ or open_.pop() != token):
            raise SyntaxFault(f"unexpected {token!r}", line)
        yield token, text, line
        line += text.count("\n")
        at = found.end()


class _TemplateParser(Parser):
    """Statements around the expressions."""

    def __init__(self, source: str):
        self.lines = list[int]()
        self.opened = list[int]()
        """The lines of the tags around."""
        self.blocks = 0
        super().__init__(source)

    def tokenize(self) -> list[tuple[str, str]]:
        found = list[tuple[str, str]]()
        for kind, text, line in _tokens(self.text):
            found.append((kind, text))
            self.lines.append(line)
        return found

    @property
    def line(self) -> int:
        return self.lines[max(0, self.at)]

    def unexpected(self) -> NoReturn:
        what = repr(self.value) if self.kind != "end" else "end of the template"
        raise SyntaxFault(f"unexpected {what}", self.line)

    def fail(self, message: str, line: int | None = None) -> NoReturn:
        raise SyntaxFault(message, self.line if line is None else line)

    def word(self, *words: str) -> bool:
        """Whether the next token is one of these words; a template's names may be any."""
        return self.value in words and self.kind not in ("data", "string")

    # ---- blocks

    def statements(self, ends: tuple[str, ...]) -> list[nodes.Node]:
        """A body, up to a tag with one of `ends`, of which the word is the next token."""
        self.blocks += 1
        if self.blocks > MAX_NESTING:
            self.fail("nested too deeply")
        body, data = list[nodes.Node](), list[nodes.Node]()

        def flush() -> None:
            if data:
                body.append(make(nodes.Output, nodes=[*data], lineno=data[0].lineno))
                data.clear()

        while self.kind != "end":
            line = self.line
            if self.kind == "data":
                data.append(make(nodes.TemplateData, data=self.value, lineno=line))
                self.advance()
                continue
            if self.skip("variable_begin"):
                printed = self.tuple_(self.conditional)
                vars(printed)["lineno"] = line
                data.append(printed)
                self.expect("variable_end")
                continue
            flush()
            self.expect("block_begin")
            if self.word(*ends):
                self.blocks -= 1
                return body
            body.append(self.statement())
            self.expect("block_end")
        if ends:
            expected = " or ".join(f"'{each}'" for each in ends)
            self.fail(f"Unexpected end of template, {expected} is missing", self.opened[-1])
        flush()
        return body

    def body(self, *ends: str) -> list[nodes.Node]:
        """The end of a tag and the body behind it; goes past the word that ends the body."""
        self.skip(":")
        self.expect("block_end")
        found = self.statements(ends)
        self.ended = self.value
        self.advance()
        return found

    def statement(self) -> nodes.Node:
        line, word = self.line, self.value
        if not word.isidentifier():
            self.fail("tag name expected")
        if word in _REFUSED:
            self.fail(f"{word} is not in the manifest format")
        parse: Callable[[], nodes.Node] | None = getattr(self, f"do_{word}", None)
        if parse is None:
            self.fail(f"Encountered unknown tag {word!r}")
        self.advance()
        self.opened.append(line)
        node = parse()
        self.opened.pop()
        vars(node)["lineno"] = line
        return node

    def do_print(self) -> nodes.Node:
        printed = list[nodes.Expr]()
        while self.kind != "block_end":
            if printed:
                self.expect(",")
            line = self.line
            printed.append(self.conditional())
            vars(printed[-1])["lineno"] = line
        return make(nodes.Output, nodes=printed)

    def do_if(self) -> nodes.Node:
        result = self.branch()
        while self.ended == "elif":
            line = self.line
            result.elif_.append(self.branch())
            vars(result.elif_[-1])["lineno"] = line
        if self.ended == "else":
            result.else_ = self.body("endif")
        return result

    def branch(self) -> nodes.If:
        test = self.tuple_(self.alternative)
        body = self.body("elif", "else", "endif")
        return make(nodes.If, test=test, body=body, elif_=[], else_=[])

    def do_for(self) -> nodes.Node:
        target = self.target("in")
        if not self.word("in"):
            self.unexpected()
        self.advance()
        iter_ = self.tuple_(self.alternative, "recursive")
        test = self.conditional() if self.skip("if") else None
        if self.word("recursive"):
            self.fail("recursive loops are not in the manifest format")
        body = self.body("endfor", "else")
        else_ = self.body("endfor") if self.ended == "else" else []
        return make(nodes.For, target=target, iter=iter_, body=body, else_=else_, test=test,
                    recursive=False)  # fmt: skip

    def do_set(self) -> nodes.Node:
        target = self.target()
        if self.skip("="):
            return make(nodes.Assign, target=target, node=self.tuple_(self.conditional))
        if self.kind == "|":
            self.fail("filters on a set block are not in the manifest format")
        return make(nodes.AssignBlock, target=target, filter=None, body=self.body("endset"))

    def do_with(self) -> nodes.Node:
        targets, values = list[nodes.Expr](), list[nodes.Expr]()
        while self.kind != "block_end":
            if targets:
                self.expect(",")
            targets.append(self.target(ctx="param", namespaces=False))
            self.expect("=")
            values.append(self.conditional())
        return make(nodes.With, targets=targets, values=values, body=self.body("endwith"))

    def do_macro(self) -> nodes.Node:
        name = self.name()
        args, defaults = self.signature()
        return make(
            nodes.Macro, name=name, args=args, defaults=defaults, body=self.body("endmacro")
        )

    def do_call(self) -> nodes.Node:
        args, defaults = self.signature() if self.kind == "(" else ([], [])
        call = self.conditional()
        if not isinstance(call, nodes.Call):
            self.fail("expected call")
        return make(nodes.CallBlock, call=call, args=args, defaults=defaults,
                    body=self.body("endcall"))  # fmt: skip

    def signature(self) -> tuple[list[nodes.Name], list[nodes.Expr]]:
        args, defaults = list[nodes.Name](), list[nodes.Expr]()
        self.expect("(")
        while not self.skip(")"):
            if args:
                self.expect(",")
            args.append(make(nodes.Name, name=self.name(), ctx="param"))
            if self.skip("="):
                defaults.append(self.conditional())
            elif defaults:
                self.fail("non-default argument follows default argument")
        return args, defaults

    # ---- parts of tags

    def tuple_(self, item: Callable[[], nodes.Expr], end: str = "") -> nodes.Expr:
        """One expression, or several with commas between, which may end with one."""
        items, comma = list[nodes.Expr](), False
        while not (self.kind in ("variable_end", "block_end", ")") or (end and self.word(end))):
            items.append(item())
            if not self.skip(","):
                break
            comma = True
        if not items:
            self.unexpected()
        return make(nodes.Tuple, items=items, ctx="load") if comma else items[0]

    def alternative(self) -> nodes.Expr:
        """An expression in which an `if` would be another part of the tag."""
        return self.operation(0)

    def target(self, end: str = "", ctx: str = "store", namespaces: bool = True) -> nodes.Expr:
        """What is assigned to: a name, a namespace's member, or several of these."""
        namespaces = namespaces and not end

        def one() -> nodes.Expr:
            if namespaces and self.tokens[self.at + 1][0] == ".":
                name = self.name()
                self.advance()
                return make(nodes.NSRef, name=name, attr=self.name())
            return self.primary()

        return self.assignable(self.tuple_(one, end), ctx)

    def assignable(self, node: nodes.Expr, ctx: str) -> nodes.Expr:
        match node:
            case nodes.Name():
                return make(nodes.Name, name=node.name, ctx=ctx)
            case nodes.Tuple():
                items = [self.assignable(each, ctx) for each in node.items]
                return make(nodes.Tuple, items=items, ctx=ctx)
            case nodes.NSRef():
                return node
        self.fail(f"can't assign to {type(node).__name__.lower()!r}")
