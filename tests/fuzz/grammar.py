"""Trees of `javascript` and texts that look like expressions, to be drawn."""

import re
from typing import Any

from hypothesis import strategies as st

from fuzz import javascript

NUMBERS = st.integers(0, 12) | st.sampled_from(
    [0.5, 2.25, 0.1, 1e-7, 1.5e-6, 123456.789, 1e21, 1e300, 5e-324, 255, 256, 2**31, 2**32, 2**53]
)
STRINGS = st.sampled_from(["", "3", "x", "2.5", " 7 ", "1e3", "0x10", "Infinity", "abc", "NaN"])
NAMES = st.sampled_from(sorted(javascript.SCOPE)).map(lambda name: ("name", name))
LEAVES = NUMBERS | NUMBERS | NAMES | STRINGS | st.sampled_from([True, False, None, ("undefined",)])
SHAPES = st.sampled_from([("name", "shape"), ("name", "empty"), ("list", 4, 1, 6), ("list", 3)])


def _tree(draw: Any, kind: str, depth: int) -> Any:
    """A tree that has a value of a kind; one operand in twelve is of any kind."""

    def inner(kind: str) -> Any:
        return _tree(draw, "any" if draw(st.integers(0, 11)) == 0 else kind, depth - 1)

    if kind == "any":
        kind = draw(st.sampled_from(["number", "number", "boolean", "string", "list", "leaf"]))
    if kind == "leaf":
        return draw(LEAVES)
    leaf = depth <= 0 or draw(st.integers(0, 4)) == 0
    if kind == "number":
        if leaf:
            return draw(NUMBERS | st.sampled_from([("name", n) for n in ("n", "big", "half")]))
        match draw(st.integers(0, 9)):
            case 0 | 1 | 2 | 3:
                return draw(st.sampled_from("+-*/%")), inner("number"), inner("number")
            case 4:
                return draw(st.sampled_from(["neg", "pos"])), inner("number")
            case 5:
                name = draw(st.sampled_from(["min", "max", "pow", "ceilDiv"]))
                return "call", name, inner("number"), inner("number")
            case 6:
                name = draw(st.sampled_from(["ceil", "floor", "pow2ceil", "log2ceil"]))
                return "call", name, inner("number")
            case 7:
                return "if", inner("boolean"), inner("number"), inner("number")
            case 8:
                name = draw(st.sampled_from(["dim", "outer", "inner", "rows"]))
                return "call", name, draw(SHAPES), draw(st.integers(-3, 4))
        name = draw(st.sampled_from(["int", "length", "default"]))
        return "filter", name, inner({"int": "number", "length": "list"}.get(name, "any"))
    if kind == "boolean":
        if leaf:
            return draw(st.booleans() | st.just(("name", "yes")))
        match draw(st.integers(0, 4)):
            case 0 | 1:
                word = draw(st.sampled_from(["<", "<=", ">", ">="]))
                return word, inner("number"), inner("number")
            case 2:
                return draw(st.sampled_from(["==", "!="])), inner("any"), inner("any")
            case 3:
                return draw(st.sampled_from(["and", "or"])), inner("boolean"), inner("boolean")
        return draw(
            st.sampled_from([("not", inner("boolean")), ("in", inner("any"), inner("list"))])
        )
    if kind == "string":
        if leaf:
            return draw(STRINGS)
        return draw(st.sampled_from(["~", "+"])), inner("string"), inner("any")
    if leaf:
        return draw(SHAPES)
    return "list", *(inner("any") for _ in range(draw(st.integers(0, 3))))


@st.composite
def trees(draw: Any) -> Any:
    """An expression that mostly has a value."""
    return _tree(draw, draw(st.sampled_from(["number", "number", "boolean", "any"])), 4)


TREES = trees()

# Of whole numbers, most of which come out as whole numbers.
WHOLE = st.recursive(
    st.integers(0, 9) | st.sampled_from([64, 255, 2**31]) | st.just(("name", "n")),
    lambda inner: (
        st.tuples(st.sampled_from(["+", "-", "*", "%", "/"]), inner, inner)
        | st.tuples(st.just("call"), st.sampled_from(["min", "max", "ceilDiv"]), inner, inner)
        | st.tuples(st.just("call"), st.sampled_from(["floor", "pow2ceil", "log2ceil"]), inner)
        | st.tuples(
            st.just("if"), st.tuples(st.sampled_from(["<", "=="]), inner, inner), inner, inner
        )
        | st.tuples(st.just("neg"), inner)
    ),
    max_leaves=8,
)

# ---- texts --------------------------------------------------------------------------------------

WORDS = (
    "n zero word shape attrs attrs.nothing derive derive.n tunables.WORKGROUP_SIZE shapes.x "
    "ranks.x dtypes.T device device.limits device.features.has('shader-f16') present.x args loop "
    "repeat "
    "1 2.5 1e999 0 65536 99999999999999999999 1_000 0x1f .5 'x' \"y\" '\\n' '\\u2028' '\\x00' true "
    "false none True None - + * / % ~ == != < <= > >= in not and or if else is is_not defined "
    "number string boolean mapping | |int |length |default(1) |join(',') |upper |e |safe ( ) [ ] "
    "{ } , : . ; # {# {{ }} {% %} dim min max numel fill range namespace f16Ok pick has "
    "dim(shapes.x,1) fill(0,65536) [0] [-1] [1:] [::-1] [::0] .b ['b'] {'a':1} () numel(shape) "
    '__class__ .__class__ .__mro__ // ** @ ! ? `" é 変 \ud800 \u0661 \u200b \ufeff \x00 \t \n '
    "lambda import for self _"
).split(" ")
TOKENS = st.sampled_from([word for word in WORDS if word])
LOOSE = st.lists(TOKENS, max_size=12).map(" ".join) | st.lists(TOKENS, max_size=9).map("".join)
TEXTS = TREES.map(javascript.text_of) | LOOSE | st.text(max_size=12)


@st.composite
def mangled(draw: Any, text: str) -> str:
    """A text with up to four of its tokens gone, doubled, or others."""
    tokens = re.findall(r"\s+|\w+|.", text, re.DOTALL)
    for _ in range(draw(st.integers(1, 4))):
        if not tokens:
            break
        at = draw(st.integers(0, len(tokens) - 1))
        match draw(st.integers(0, 4)):
            case 0:
                del tokens[at]
            case 1:
                tokens.insert(at, tokens[at])
            case 2:
                tokens.insert(at, draw(TOKENS))
            case 3:
                other = draw(st.integers(0, len(tokens) - 1))
                tokens[at], tokens[other] = tokens[other], tokens[at]
            case _:
                tokens[at] = draw(TOKENS | st.text(max_size=3))
    return "".join(tokens)
