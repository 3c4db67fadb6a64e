"""The grammar of templates: a source to statements, as Jinja's nodes.

It is Jinja's own grammar, with `trim_blocks` and `lstrip_blocks`, for which Jinja's parser takes
several times as long: most of what loading a kernel would take. What the manifest format does not
have is refused where it begins. A test holds the two parsers against each other.
"""

import re
from collections.abc import Callable, Iterator
from typing import TypeVar

from jinja2 import nodes

from jax_webgpu.errors import ExpressionError
from jax_webgpu.grammar import CONSTANTS, TOKEN, Parser, make

T = TypeVar("T")

# Blocks within each other; each takes a few frames of Python's stack.
MAX_NESTING = 32

# Where a tag begins, and a raw block, which is text up to its end whatever stands in it.
_OPENING = re.compile(r"\{(?P<kind>[%{#])(?P<sign>[-+]?)\s*")
_RAW = re.compile(r"raw\s*(?:-%\}\s*|%\})")
# Where they end. A statement and a comment take the end of their line with them.
_STATEMENT_END = r"\+%\}|-%\}\s*|%\}\n?"
_TAGS = {
    "%": re.compile(rf"(?P<end>{_STATEMENT_END})|{TOKEN.pattern}"),
    "{": re.compile(rf"(?P<end>-\}}\}}\s*|\}}\}})|{TOKEN.pattern}"),
}
_COMMENT_END = re.compile(r"\+#\}|-#\}\s*|#\}\n?")
_RAW_END = re.compile(rf"\{{%(?P<sign>[-+]?)\s*endraw\s*(?:{_STATEMENT_END})")
_CLOSING = {"(": ")", "[": "]", "{": "}"}

# Jinja's other statements, by the names of its nodes.
_REFUSED = {
    **{word: word for word in ("include", "import", "extends", "block")},
    **{"from": "fromimport", "filter": "filterblock", "autoescape": "scope"},
}


def parse(name: str, source: str) -> list[nodes.Node]:
    """Parses a template; raises `ExpressionError` with its name and the line."""
    reader = _Reader(name, source)
    try:
        return reader.body()
    except ExpressionError as error:
        raise ExpressionError(f"{name}:{reader.line}: {error}") from None


class _Reader:
    """Reads a template from its beginning to its end.

    Attributes:
      at: where in the source the piece begins that is read, text or a tag.
      line: its line.
      tag: the tokens of the tag that was read last, and where in them the reader is.
      word: the name of the statement whose tag was read last.
    """

    tag: Parser

    def __init__(self, name: str, source: str):
        self.name = name
        self.source = re.sub(r"\r\n?", "\n", source).removesuffix("\n")
        self.at = 0
        self.line = 1
        self.word = ""
        self.nesting = 0
        self.pieces = self._pieces()

    # ---- text and tags

    def _pieces(self) -> Iterator[tuple[str, str]]:
        """The kind of each piece, `text` or a tag's, and the text."""
        while opening := _OPENING.search(self.source, self.at):
            kind = opening["kind"]
            raw = _RAW.match(self.source, opening.end()) if kind == "%" else None
            yield from self._text_before(opening, strips=kind != "{")
            self._go((raw or opening).end())
            if kind == "#" or raw:
                end = (_RAW_END if raw else _COMMENT_END).search(self.source, self.at)
                if end is None:
                    what = "raw directive" if raw else "comment tag"
                    raise ExpressionError(f"Missing end of {what}")
                if raw:
                    yield from self._text_before(end, strips=True)
            else:
                end = self._read_tag(kind)
                yield kind, ""
            self._go(end.end())
        if self.at < len(self.source):
            yield "text", self.source[self.at :]
            self._go(len(self.source))

    def _go(self, at: int) -> None:
        self.line += self.source.count("\n", self.at, at)
        self.at = at

    def _text_before(self, tag: re.Match[str], strips: bool) -> Iterator[tuple[str, str]]:
        """The text in front of a tag, without the space that the tag takes with it."""
        text = self.source[self.at : tag.start()]
        if tag["sign"] == "-":
            text = text.rstrip()
        elif strips and tag["sign"] != "+":
            line = text.rfind("\n") + 1
            from_its_start = line > 0 or self.at == 0 or self.source[self.at - 1] == "\n"
            if from_its_start and text[line:].isspace():
                text = text[:line]
        if text:
            yield "text", text

    def _read_tag(self, kind: str) -> re.Match[str]:
        """Reads the tokens of a tag up to its end, which is none inside brackets or a string."""
        tokens, closing = list[str](), list[str]()
        at = self.at
        while found := (TOKEN if closing else _TAGS[kind]).search(self.source, at):
            at, token = found.end(), found[0]
            if found.lastgroup:
                text = self.source[self.at : found.start()].strip()
                self.tag = Parser(text if len(text) <= 80 else f"{text[:77]}...", tokens)
                return found
            tokens.append(token)
            if token in _CLOSING:
                closing.append(_CLOSING[token])
            elif token in _CLOSING.values() and (not closing or closing.pop() != token):
                raise ExpressionError(f"unexpected {token!r}")
        raise ExpressionError("Missing end of tag")

    # ---- statements

    def body(self, *ends: str) -> list[nodes.Node]:
        """Statements, up to a tag that is one of `ends` if there are any, and past its name."""
        self.nesting += 1
        if self.nesting > MAX_NESTING:
            raise ExpressionError("nested too deeply")
        word, line = self.word, self.line
        found = list[nodes.Node]()
        output: nodes.Output | None = None
        for kind, text in self.pieces:
            if kind == "%":
                output, begun, self.word = None, self.line, self.tag.name()
                if self.word in ends:
                    self.nesting -= 1
                    return found
                found.append(self.statement(self.word))
                found[-1].lineno = begun
                self.end()
                continue
            if output is None:
                output = make(nodes.Output, nodes=[], lineno=self.line)
                found.append(output)
            output.nodes.append(self.printed(text))
        if ends:
            self.line = line
            raise ExpressionError(f"{{% {word} %}} without its {{% {ends[-1]} %}}")
        return found

    def printed(self, text: str) -> nodes.Expr:
        """A piece of the output: text, or the value of a tag."""
        node: nodes.Expr
        if text:
            node = make(nodes.TemplateData, data=text)
        else:
            node = self.listed(self.tag.conditional)
            self.end()
        node.lineno = self.line
        return node

    def end(self) -> None:
        """Raises where something is left of the tag."""
        if self.tag.kind != "end":
            self.tag.unexpected()

    def block(self, *ends: str) -> list[nodes.Node]:
        """What stands between this tag and one with one of these names, which is then `word`."""
        self.tag.skip(":")
        self.end()
        return self.body(*ends)

    def statement(self, word: str) -> nodes.Node:
        match word:
            case "if":
                return self.if_()
            case "for":
                return self.for_()
            case "set":
                return self.set()
            case "macro":
                name = self.parameter()
                return make(
                    nodes.Macro, name=name.name, **self.signature(), body=self.block("endmacro")
                )
            case "call":
                return self.call()
            case "with":
                return self.with_()
            case "print":
                return make(nodes.Output, nodes=[*self.separated(self.tag.conditional)])
        if word in _REFUSED:
            raise ExpressionError(f"{_REFUSED[word]} is not in the manifest format")
        raise ExpressionError(f"Encountered unknown tag {word!r}")

    def if_(self) -> nodes.If:
        first = self.branch()
        while self.word == "elif":
            first.elif_.append(self.branch())
        if self.word == "else":
            first.else_ = self.block("endif")
        return first

    def branch(self) -> nodes.If:
        test = self.listed(lambda: self.tag.operation(0))
        return make(
            nodes.If, test=test, body=self.block("elif", "else", "endif"), elif_=[], else_=[]
        )

    def for_(self) -> nodes.For:
        target = self.target(self.tag.primary)
        self.tag.expect("in")
        items = self.listed(lambda: self.tag.operation(0))
        test = self.tag.conditional() if self.tag.skip("if") else None
        if self.tag.value == "recursive":
            raise ExpressionError("recursive loops are not in the manifest format")
        body = self.block("else", "endfor")
        otherwise = self.block("endfor") if self.word == "else" else []
        return make(nodes.For, target=target, iter=items, body=body, else_=otherwise, test=test,
                    recursive=False)  # fmt: skip

    def set(self) -> nodes.Assign | nodes.AssignBlock:
        target = self.target(self.place)
        if self.tag.skip("="):
            return make(nodes.Assign, target=target, node=self.listed(self.tag.conditional))
        if self.tag.kind == "|":
            raise ExpressionError("filters on a set block are not in the manifest format")
        return make(nodes.AssignBlock, target=target, filter=None, body=self.block("endset"))

    def call(self) -> nodes.CallBlock:
        signature = self.signature() if self.tag.kind == "(" else {"args": [], "defaults": []}
        call = self.tag.conditional()
        if not isinstance(call, nodes.Call):
            raise ExpressionError("expected call")
        return make(nodes.CallBlock, call=call, **signature, body=self.block("endcall"))

    def with_(self) -> nodes.With:
        targets, values = list[nodes.Expr](), list[nodes.Expr]()
        for target in self.separated(lambda: self.target(self.tag.primary, "param")):
            targets.append(target)
            self.tag.expect("=")
            values.append(self.tag.conditional())
        return make(nodes.With, targets=targets, values=values, body=self.block("endwith"))

    # ---- parts of statements

    def separated(self, parse: Callable[[], T]) -> Iterator[T]:
        """What stands between commas, up to the end of the tag."""
        first = True
        while self.tag.kind != "end":
            if not first:
                self.tag.expect(",")
            first = False
            yield parse()

    def listed(self, parse: Callable[[], nodes.Expr]) -> nodes.Expr:
        """A value, or a tuple of what stands between commas."""
        items = list[nodes.Expr]()
        while self.tag.kind not in ("end", ")"):
            items.append(parse())
            if not self.tag.skip(","):
                if len(items) == 1:
                    return items[0]
                break
        if not items:
            self.tag.unexpected()
        return make(nodes.Tuple, items=items, ctx="load")

    def target(self, parse: Callable[[], nodes.Expr], context: str = "store") -> nodes.Expr:
        """What a value is given to: a name, or names between commas."""
        return self.assigned(self.listed(parse), context)

    def assigned(self, node: nodes.Expr, context: str) -> nodes.Expr:
        match node:
            case nodes.Name(name=name) if name not in CONSTANTS:
                node.ctx = context
            case nodes.Tuple():
                node.ctx = context
                for item in node.items:
                    self.assigned(item, context)
            case nodes.NSRef():
                pass
            case _:
                raise ExpressionError(f"can't assign to {type(node).__name__.lower()!r}")
        return node

    def place(self) -> nodes.Expr:
        """A target of `set`, which may be a member of a namespace."""
        node = self.tag.primary()
        if isinstance(node, nodes.Name) and self.tag.skip("."):
            return make(nodes.NSRef, name=node.name, attr=self.tag.name())
        return node

    def parameter(self, context: str = "store") -> nodes.Name:
        name = make(nodes.Name, name=self.tag.name(), ctx=context)
        self.assigned(name, context)
        return name

    def signature(self) -> dict[str, list[nodes.Expr]]:
        """The parameters of a macro, and the defaults of the last of them."""
        args, defaults = list[nodes.Expr](), list[nodes.Expr]()
        self.tag.expect("(")
        while not self.tag.skip(")"):
            if args:
                self.tag.expect(",")
            args.append(self.parameter("param"))
            if self.tag.skip("="):
                defaults.append(self.tag.conditional())
            elif defaults:
                raise ExpressionError("non-default argument follows default argument")
        return {"args": args, "defaults": defaults}
