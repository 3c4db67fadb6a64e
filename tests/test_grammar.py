"""Our parsers against Jinja's own: the same trees, the same refusals."""

import warnings

import jinja2
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from jinja2 import lexer, nodes
from jinja2.parser import Parser

from benchmarks import synthetic
from jax_webgpu import grammar, markup, resources
from jax_webgpu.errors import ExpressionError

JINJA = jinja2.Environment(optimized=False, trim_blocks=True, lstrip_blocks=True)


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
    """Whether the format lacks something in a tree that Jinja has."""
    return any(
        isinstance(each, REFUSED)
        or getattr(each, "dyn_args", None) is not None
        or getattr(each, "dyn_kwargs", None) is not None
        or (isinstance(each, nodes.For) and each.recursive)
        or (isinstance(each, nodes.AssignBlock) and each.filter is not None)
        for each in (node, *node.find_all(nodes.Node))
    )


REFUSED = (
    *(nodes.Pow, nodes.FloorDiv, nodes.Include, nodes.Import, nodes.FromImport, nodes.Extends),
    *(nodes.Block, nodes.FilterBlock, nodes.Scope, nodes.ScopedEvalContextModifier),
)


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


@settings(max_examples=600, deadline=None)
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


@settings(max_examples=400, deadline=None)
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


# --- templates ----------------------------------------------------------------------------------

PIECES = st.sampled_from(
    """{% if a %}|{% elif b, %}|{% else %}|{% endif %}|{% if a if b else c %}|
|{% if (a if b else c) %}|{% for i in a %}|{% for i, j in a if b %}|{% for (i, j) in a: %}
|{% endfor %}|{% for i.b in a %}|{% for i in a recursive %}|{{a}}|{{ a, b }}|{{ a if b else c }}
|{{ }}|{{ {'a': {}} }}|{{a}}}
|{% set a = b %}|{% set a, b.c = 1, 2 %}|{% set a %}|{% set a|upper %}|{% endset %}
|{% set a.b = 1, %}|{% macro m(x, y=1) %}|{% macro m() -%}|{% endmacro %}|{% call m() %}
|{% call(a) m(b) %}|{% endcall %}|{% call m %}|{% with a = b, c = d %}|{% with %}
|{% with a.b = c %}|{% endwith %}
|{% print a, b %}|{% include 'a' %}|{% do a %}|{% raw %}|{% raw -%}|{%- endraw +%}|{% endraw %}
|{%- if a -%}|{%+ if a +%}|{{- a -}}|{{+ a }}|{# c #}|{#- c -#}|{#+ c +#}|{% endif%}| |  |x|
|y z|\t|{|{{|{%|}}|%}|#}|{#|{% endfor -%}|{%- else +%}|'|"|{{ '%}' }}|{% if '}}' %}|{{ [a }}
|{% set x = {'a': '}}'} %}|{{ a\r\n}}|\r\n|{% if true %}|{% set true = 1 %}|{% print %}|{% 5 %}
|{% block b %}|{% endblock %}|{{ a ** b }}|{{ f(*a) }}""".replace("\n|", "|").split("|")
    + ["\n"] * 9
)


def check_template(source):
    with warnings.catch_warnings(action="ignore"):
        try:
            theirs = JINJA.parse(source)
        except (jinja2.TemplateSyntaxError, jinja2.TemplateAssertionError):
            theirs = None
    if theirs is None or is_refused(theirs):
        with pytest.raises(ExpressionError):
            markup.parse(source)
    else:
        assert markup.parse(source) == theirs.body


@settings(max_examples=600, deadline=None)
@given(st.lists(PIECES, max_size=9).map("".join))
@example("")
@example("\n")
@example("a\n\n")
@example("  {% if a %}  \n  b{% endif %}\n\n")
@example("a\n   {%- if a %}\n\n  {%+ if b +%}\n {% endif -%}\n {% endif %}x")
@example("{#- a\n -#}\n  {# b #}\n{{- c -}}\n")
@example("\n {% raw -%}\n {{ a }} {% if %}\n {%- endraw %}\n b")
@example(" {% raw %} {# {% endraw +%}\n")
@example("{% for i, (j, k) in a, b if c if d else e %}{% else %}{% endfor %}")
@example("{% if a %}{% elif b %}{% elif c, d %}{% else %}{% endif %}")
@example("{% set ns.a, (b, c) = 1, (2, 3) %}{% set ns.b %}{% endset %}")
@example("{% call(a, b=1) f(x)(y).z(1) %}{{ a }}{% endcall %}")
@example("{% macro for(if, else=1) %}{% endmacro %}")
@example("{{ {'a': {'b': {}}}}}")
@example("{{ a }}}}")
@example("{{ {'a': 1 }}")
@example("{{ (a }} )")
@example("{{\n a\n+\n\nb }}\n{{ c }}")
def test_the_same_templates(source):
    check_template(source)


@pytest.mark.parametrize("path", sorted(resources.shaders().iterdir()), ids=lambda path: path.name)
def test_the_project_s_templates(path):
    check_template(path.read_text(encoding="utf-8"))


def test_a_large_template():
    for name, data in synthetic.files().items():
        if name.endswith(".jinja"):
            check_template(data.decode())
