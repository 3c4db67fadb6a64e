"""Our parser of templates against Jinja's own: the same trees, lines and refusals."""

import re
import warnings
from pathlib import Path

import jinja2
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jinja2 import nodes
from test_grammar import is_refused

from benchmarks import synthetic
from jax_webgpu import template_grammar
from jax_webgpu.errors import ExpressionError

ROOT = Path(__file__).parents[1]
JINJA = jinja2.Environment(trim_blocks=True, lstrip_blocks=True, optimized=False)
OTHERS = (
    *(nodes.Include, nodes.Import, nodes.FromImport, nodes.Extends, nodes.Block),
    *(nodes.FilterBlock, nodes.ScopedEvalContextModifier),
)


# Jinja lets a comment or a raw block begin at the very end.
ENDLESS = re.compile(r"(\{#[-+]?|\{%[-+]?\s*raw\s*(-%\}\s*|%\}))\n?\Z")


def jinja_parse(source):
    """The tree of Jinja's parser; None where there is none, or one that the format lacks."""
    if ENDLESS.search(source):
        return None
    with warnings.catch_warnings(action="ignore"):
        try:
            tree = JINJA.parse(source)
        except (jinja2.TemplateSyntaxError, ValueError):
            return None
    odd = any(True for _ in tree.find_all(OTHERS)) or is_refused(tree)
    odd = odd or any(each.recursive for each in tree.find_all(nodes.For))
    odd = odd or any(each.filter for each in tree.find_all(nodes.AssignBlock))
    return None if odd else tree.body


def lines(body):
    """The lines of statements, as far as Jinja tells where they begin."""
    tree = nodes.Template(body)
    unsure = {id(each) for found in tree.find_all(nodes.If) for each in found.elif_}
    for output in tree.find_all(nodes.Output):
        first = output.nodes[0] if output.nodes else None
        if not isinstance(first, nodes.TemplateData | nodes.Name):  # it has its operator's line
            unsure.add(id(output))
    return [each.lineno for each in tree.find_all(nodes.Stmt) if id(each) not in unsure]


def check(source):
    theirs = jinja_parse(source)
    if theirs is None:
        with pytest.raises((ExpressionError, ValueError)):
            template_grammar.parse("t", source)
    else:
        ours = template_grammar.parse("t", source)
        assert ours == theirs
        assert lines(ours) == lines(theirs)


def templates():
    yield from (data.decode() for name, data in synthetic.files().items() if "jinja" in name)
    for folder in ("shaders", "examples", "benchmarks", "docs"):
        yield from (path.read_text() for path in sorted((ROOT / folder).rglob("*.jinja")))


def test_templates_of_this_project():
    sources = list(templates())
    assert len(sources) > 20
    for source in sources:
        assert jinja_parse(source)
        check(source)


PIECES = st.sampled_from(
    ["a", " ", "\n", "  \n ", "\t", "{", "}", "%", "#", "\r\n", "\r", "{{ a }}", "{{- a -}}",
     "{{+ a }}", "{{ 'x}}' }}", "{{ {'a': {}} }}", "{{ {'a': {1: 2}}}}", "{{ (a }}", "{{ a) }}",
     "{{ [a} }}", "{{ }}", "{{ a, b }}", "{{ a, }}", "{{ , }}", "{{\na\n}}", "{{ a if b }}",
     "{# a #}", "{#- a -#}", "{#+ a +#}", "{# a\n\n #}\n", "{#", "#}", "{# {{ #}", "{#}",
     "{% raw %}", "{%- raw -%}", "{%+raw%}", "{% endraw %}", "{%- endraw -%}", "{%+ endraw +%}\n",
     "{% endraw -%}\n ", "{% raw %}\n  {% if %} {{ {#\n{% endraw %}", "{% rawx %}", "{{ raw %}",
     "{# raw %} #}", "{% if a %}", "{%- if a -%}", "{%+ if a +%}", "{% if a, b %}", "{% if a: %}",
     "{% if a if b else c %}", "{% if %}", "{% elif b %}", "{%- elif b +%}", "{% else %}\n",
     "{% else: %}", "{% else a %}", "{% endif %}", "{%- endif -%}\n\n", "{% endif a %}",
     "{% for a in b %}", "{% for a, (b, c) in d %}", "{% for (a) in b, c if d %}",
     "{% for a, in b, %}", "{% for in in b %}", "{% for a in b recursive %}", "{% for a.b in c %}",
     "{% for 1 in b %}", "{% for true in b %}", "{% for a in b if c else d %}", "{% endfor %}",
     "{% set a = b %}", "{% set a, b = c, d %}", "{% set n.a = b %}", "{% set n.a, b = c if d %}",
     "{% set a[0] = b %}", "{% set (n.a, b) = c %}", "{% set none = 1 %}", "{% set a %}",
     "{% set a | upper %}", "{% endset %}", "{% macro m() %}", "{% macro m(a, b=1, c=a~'x') %}",
     "{% macro m(a=1, b) %}", "{% macro m(a,) %}", "{% macro m %}", "{% macro m(true) %}",
     "{% macro if(not) %}", "{% endmacro %}", "{% call m() %}", "{% call(a, b=2) m(1)(2) %}",
     "{% call m %}", "{% call (a) %}", "{% endcall %}", "{% with %}", "{% with a = 1, b = a %}",
     "{% with a, b = c, d = e %}", "{% with a = 1, %}", "{% with a = 1: %}", "{% endwith %}",
     "{% print a %}", "{% print a, b %}", "{% print a, %}", "{% include 'a' %}", "{% block a %}",
     "{% endblock %}", "{% import 'a' as b %}", "{% from 'a' import b %}", "{% extends 'a' %}",
     "{% filter upper %}", "{% endfilter %}", "{% autoescape true %}", "{% endautoescape %}",
     "{% do a %}", "{% 1 %}", "{% %}", "{%", "%}", "{{", "}}", "{% set a = '%}' %}",
     "{% set a = {'b': '}}'} %}", "{% set a = 7 % 2 %}", "{% if a %}b{% endif %}\n",
     "{% for a in b %}\n  {{ a }}\n{% else %}c{% endfor %}\n", "{%\nif\na\n%}", "{{-\n\na + b }}",
     "²", "é", "{{ ² }}", "{{ a ? }}", "{{ 'a }}", "{{ 1e3.a }}", "{{ '\\d\\n' }}"]
)  # fmt: skip
WHOLE = st.sampled_from(
    ["{% if a %}", "{%- if b %}\n", "{% for a in b %}", "{% for a, b in c if d %}\n", "{% set a %}",
     "{% macro m(a, b=1) %}", "{% call(a) m() %}", "{% with a = 1 %}"]
)  # fmt: skip
ENDS = {"if": "endif", "for": "endfor", "set": "endset", "macro": "endmacro", "call": "endcall",
        "with": "endwith"}  # fmt: skip


def closed(opening, body):
    word = opening.strip("{%-} \n").partition(" ")[0].partition("(")[0]
    return f"{opening}{body}{{% {ENDS[word]} %}}"


BLOCKS = st.recursive(
    st.lists(PIECES, max_size=3).map("".join),
    lambda inner: st.lists(inner | st.builds(closed, WHOLE, inner), max_size=4).map("".join),
    max_leaves=8,
)


@settings(max_examples=1500, deadline=None)
@given(st.lists(PIECES, max_size=8).map("".join) | BLOCKS)
@example("{% if a %}1{% elif b %}2{% elif c %}3{% else %}4{% endif %}")
@example("{% for a in b %}{% if a %}{% else %}{% endif %}{% else %}{% endfor %}\n\n")
@example("a {%- if b -%} c {%+ endif +%}\n d")
@example("\n  {% raw -%}\n  a  \n  {%- endraw %}\n  b\n")
@example("  {#- a #}\n  {# b -#}  \n  {{ c }}\n")
@example("{{ a }}\n\n\n{{ b\n| default(\n1) }}\n{% if c %}{% endif %}")
@example("")
@example("\n")
def test_the_same_trees(source):
    check(source)


@settings(max_examples=1000, deadline=None)
@given(st.text("ab1 \n\t'{}%#-+rawifend=", max_size=24))
def test_the_same_tags(source):
    check(source)


@pytest.mark.parametrize(
    "source",
    ["{% if a %}" * 40 + "{% endif %}" * 40, "{% for a in b %}" * 500 + "{% endfor %}" * 500,
     "{% if " + "(" * 70 + "a" + ")" * 70 + " %}{% endif %}"],
    ids=lambda source: source[:10],
)  # fmt: skip
def test_nesting_is_bounded(source):
    with pytest.raises(ExpressionError, match=r"^t:1: .*nested too deeply"):
        template_grammar.parse("t", source)


@pytest.mark.parametrize(
    "source",
    ["{{ a " * 100_000, "{% if " * 100_000, "{#" * 500_000, "{% raw %}" * 100_000, "{ " * 500_000,
     "{%" + " " * 1_000_000, "{% raw" + " " * 1_000_000, "{{ '" + "\\a" * 500_000,
     " " * 1_000_000 + "{%- if a %}", "{{ a }}" * 100_000, "\n" * 1_000_000, "{{ (" * 100_000],
    ids=lambda source: source[:12],
)  # fmt: skip
def test_time_is_in_proportion_to_the_source(source, patience):
    with patience(10):
        try:
            template_grammar.parse("t", source)
        except ExpressionError as error:
            assert len(str(error)) < 200
