"""Our parser of expressions against Jinja's own: the same trees, the same refusals."""

import warnings

import jinja2
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from jinja2 import lexer, nodes
from jinja2.parser import Parser

from jax_webgpu import grammar
from jax_webgpu.errors import ExpressionError

JINJA = jinja2.Environment(optimized=False)


def jinja_parse(text):
    """The tree of Jinja's parser; None where it is none."""
    with warnings.catch_warnings(action="ignore"):
        tokens = list(JINJA._tokenize(text, None, None, "variable"))
        assume("variable_end" not in {token.type for token in tokens})
        parser = Parser(JINJA, "")
        parser.stream = lexer.TokenStream(iter(tokens), None, None)
        try:
            node = parser.parse_expression()
        except jinja2.TemplateSyntaxError:
            return None
        return node if parser.stream.eos else None


def is_refused(node):
    """Whether the format lacks something that Jinja has."""
    calls = [*node.find_all((nodes.Call, nodes.Filter, nodes.Test))]
    calls += [node] * isinstance(node, nodes.Call | nodes.Filter | nodes.Test)
    odd = isinstance(node, nodes.Pow | nodes.FloorDiv) or any(
        True for _ in node.find_all((nodes.Pow, nodes.FloorDiv))
    )
    return odd or any(each.dyn_args or each.dyn_kwargs for each in calls)


def check(text):
    try:
        theirs = jinja_parse(text)
    except jinja2.TemplateSyntaxError:  # of its lexer
        theirs = None
    if theirs is None or is_refused(theirs):
        with pytest.raises((ExpressionError, ValueError)):
            grammar.parse(text)
    else:
        assert grammar.parse(text) == theirs


TOKENS = st.sampled_from(
    "a b c.d attrs 1 2.5 'x' \"y\" true None - + * / % ~ == != < <= > >= in not and or if else is "
    "defined number | int default length join ( ) [ ] { } , : . = ** // [0] [1:] [::-1] [:2] .b .0 "
    "(1,) (1,2) {'a':1} () f(1) g(a,k=1) |default(1) f(*a) |join(', ') not_in 0x1f 1_000 1e3 "
    "is(1) not(a)".split()
)


@settings(max_examples=1500, deadline=None)
@given(st.lists(TOKENS, max_size=14).map(" ".join))
@example("a if b else c if d else e")
@example("a if b if c else d")
@example("not a in b and not c not in d")
@example("a is not defined and b is number or c")
@example("a is defined if b else c")
@example("a is in [1]")
@example("a is divisibleby 3")
@example("-a.b|int(1) is number(2)(3)")
@example("- - a ~ b ~ c + d ~ e * f % g")
@example("a < b <= c in d not in e")
@example("x[1:2, 3][:][::2][1:][a:b:c][]")
@example("x[1,]")
@example("(((a,), b), ())")
@example("{'a': 1, 'b': {'c': [1, [2,],]},}.a[0].0.b")
@example("f(a, g(b), k=c if d else e,)(1)|x.y.z('a' 'b' \"c\")")
@example("f(k=1, a)")
@example("1 - -1 if not not a else b")
@example("and or not in is if else")
@example("if + else * (in - is)")
@example("a ** b")
@example("a // b * c")
@example("f(**a)")
def test_the_same_trees(text):
    check(text)


@settings(max_examples=1000, deadline=None)
@given(st.text("ab1_. \n'\"\\+-*/%~<>=!()[]{}|,:;éx0e²\r", max_size=16))
@example("1.5e3 .5 0x1f 1_000 'a\\'b' \"\\n\"".replace(" ", "+"))
@example("'a\r\nb'")
@example("'\\d\\x41\\u00e9é'")
@example("1.2.3")
@example("1.e5")
@example("1_0.5_0e1_0")
def test_the_same_tokens(text):
    check(text)


@pytest.mark.parametrize(
    "text",
    ["(" * 70 + "a" + ")" * 70, "-" * 70 + "a", "not " * 70 + "a", "[" * 70 + "]" * 70,
     "f(" * 70 + ")" * 70, "a[" * 70 + "0" + "]" * 70, "a if b else " * 70 + "c",
     "a is b " * 1 + "(" * 70 + ")" * 70],
    ids=lambda text: text[:10],
)  # fmt: skip
def test_nesting_is_bounded(text):
    with pytest.raises(ExpressionError, match="nested too deeply"):
        grammar.parse(text)


def test_length_is_bounded():
    with pytest.raises(ExpressionError, match="an expression of 65,537 characters; at most 65,536"):
        grammar.parse("a" * 65_537)
    assert grammar.parse("a" * 65_536).name == "a" * 65_536
