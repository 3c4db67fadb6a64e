"""WGSL templates: Jinja's statements in the format's semantics, and the six of this project."""

import re

import pytest
from cases import CASES
from engine import FIRST, SPECS, resolved
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_webgpu import capabilities, helpers, plan, templates, values, variants
from jax_webgpu.errors import ExpressionError
from jax_webgpu.resolve import extend
from jax_webgpu.templates import parse


def render(source, *, strict=False, **scope):
    return parse("t.wgsl", source).render({**helpers.HELPERS, **scope}, strict=strict)


def renders(cases):
    return pytest.mark.parametrize(("source", "text"), cases, ids=[source for source, _ in cases])


# --- statements ---------------------------------------------------------------------------------


@renders(
    [
        ("plain", "plain"),
        ("{{ 6 / 2 }}u", "3u"),
        ("{{ 64.0 }}u", "64u"),
        ("{{ true }} {{ none }}|{{ 'a' ~ 1 }}", "true |a1"),
        ("{{ nothing }}{{ shape.nothing }}|", "|"),
        ("{{ [1, 2] | join(', ') }}", "1, 2"),
        ("{# a comment #}x", "x"),
        ("{% raw %}{{ x }}{% endraw %}", "{{ x }}"),
        ("{% if nothing %}a{% elif 0 %}b{% else %}c{% endif %}", "c"),
        ("{% if 1 %}a{% elif unheard < 1 %}b{% endif %}", "a"),
        ("{% if nothing is defined %}a{% else %}b{% endif %}", "b"),
        ("{% for a in [1, 2, 3] %}{{ a }}{% endfor %}", "123"),
        ("{% for a in [] %}x{% else %}none{% endfor %}", "none"),
        ("{% for a in [1, 2, 3, 4] if a % 2 == 0 %}{{ a }}{% endfor %}", "24"),
        ("{% for a in [1] if a > 1 %}x{% else %}none{% endfor %}", "none"),
        ("{% for a, b in [[1, 2], [3, 4]] %}{{ a }}-{{ b }} {% endfor %}", "1-2 3-4 "),
        ("{% for key in shape %}{{ key }}{% endfor %}", "xy"),
        ("{% for i in range(3) %}{{ i }}{% endfor %}", "012"),
        ("{% for i in range(5, 0, -2) %}{{ i }}{% endfor %}", "531"),
        ("{{ range(2, 5)[1] }}{{ range(4) | length }}", "34"),
        ("{% set a = 1 %}{{ a }}", "1"),
        ("{% set a, b = 1, 2 %}{{ b }}{{ a }}", "21"),
        ("{% set a %}x{{ 1 }}{% endset %}{{ a ~ a }}", "x1x1"),
        ("{% with a = 1, b = 2 %}{{ a }}{{ b }}{% endwith %}{{ a }}", "12"),
        ("{% set ns = namespace(n=1) %}{% set ns.n = ns.n + 1 %}{{ ns.n }}", "2"),
        ("{% set ns = namespace({'n': 1}, m=2) %}{{ ns.n }}{{ ns.m }}{{ ns.keys }}", "12"),
    ]
)
def test_statements(source, text):
    assert render(source, shape={"x": 1, "y": 2}) == text


@renders(
    [
        ("{{ loop.index }}/{{ loop.length }} ", "1/3 2/3 3/3 "),
        ("{{ loop.index0 }}{{ loop.revindex }}{{ loop.revindex0 }} ", "032 121 210 "),
        ("{% if not loop.first %}, {% endif %}{{ a }}", "a, b, c"),
        ("{{ a }}{{ ';' if loop.last else ',' }}", "a,b,c;"),
        ("{{ loop.previtem }}<{{ loop.nextitem }} ", "<b a<c b< "),
        ("{% for b in [1, 2] %}{{ loop.index }}{% endfor %}{{ loop.index }} ", "121 122 123 "),
    ]
)
def test_loop(source, text):
    assert render(f"{{% for a in ['a', 'b', 'c'] %}}{source}{{% endfor %}}") == text


def test_loop_counts_what_the_filter_keeps():
    source = "{% for a in range(9) if a % 3 == 1 %}{{ loop.index }}:{{ a }}/{{ loop.length }} "
    assert render(source + "{% endfor %}") == "1:1/3 2:4/3 3:7/3 "


@renders(
    [
        # What is set in a loop stays there; in an `if` it does not stay there.
        ("{% set a = 0 %}{% for i in range(3) %}{% set a = a + 1 %}{{ a }}{% endfor %}{{ a }}",
         "1110"),
        ("{% for i in range(2) %}{% set b = i %}{% endfor %}{{ b }}{{ i }}|", "|"),
        ("{% if 1 %}{% set a = 5 %}{% endif %}{{ a }}", "5"),
        ("{% set ns = namespace(sum=0) %}{% for i in range(5) %}{% set ns.sum = ns.sum + i %}"
         "{% endfor %}{{ ns.sum }}", "10"),
        ("{% set a = 1 %}{% with %}{% set a = 2 %}{{ a }}{% endwith %}{{ a }}", "21"),
        ("{% set a = 1 %}{% set b %}{% set a = 2 %}{{ a }}{% endset %}{{ b }}{{ a }}", "21"),
        ("{% set a = 1 %}{% macro m() %}{% set a = 2 %}{{ a }}{% endmacro %}{{ m() ~ a }}", "21"),
        ("{% set given = 2 %}{{ given }}", "2"),
    ]
)  # fmt: skip
def test_scopes(source, text):
    scope = {"given": 1}
    assert render(source, **scope) == text
    assert scope == {"given": 1}


@renders(
    [
        ("{% macro f(a, b=2) %}{{ a }}+{{ b }}{% endmacro %}{{ f(1) }} {{ f(1, 3) }} "
         "{{ f(b=5, a=4) }}",
         "1+2 1+3 4+5"),
        ("{% macro f(a) %}[{{ a }}]{% endmacro %}{{ f() }}", "[]"),
        ("{% macro f(a, b=a) %}{{ b }}{% endmacro %}{{ f(7) }}", "7"),
        ("{% macro f(n) %}{{ n }}{% if n %}{{ f(n - 1) }}{% endif %}{% endmacro %}"
         "{{ f(3) }}", "3210"),
        ("{% macro f() %}{{ later }}{% endmacro %}{% set later = 1 %}{{ f() }}", "1"),
        ("{% macro f() %}<{{ caller() }}>{% endmacro %}{% call f() %}x{{ 1 }}{% endcall %}",
         "<x1>"),
        ("{% macro f(a) %}{{ caller(a, 2) }}{% endmacro %}{% call(p, q) f(1) %}{{ p }}{{ q }}"
         "{% endcall %}",
         "12"),
        ("{% macro f() %}{{ caller is defined }}{% endmacro %}{{ f() }} {% call f() %}"
         "{% endcall %}",
         "false true"),
        ("{% macro f() %}x{% endmacro %}{% set t = f() ~ f() %}{{ t | length }}", "2"),
    ]
)  # fmt: skip
def test_macros(source, text):
    assert render(source) == text


@renders(
    [
        ("a\n{% if 1 %}\nb\n{% endif %}\nc\n", "a\nb\nc"),
        ("  {% if 1 %}\n    b\n  {% endif %}\nc", "    b\nc"),
        ("x {% if 1 %}y{% endif %}\nz", "x yz"),
        ("  {# gone #}\nx", "x"),
        ("  {{ 1 }}\n  {{ 2 }}", "  1\n  2"),
        ("a   {%- if 1 %} b {%- endif %} c", "a b c"),
        ("a\n\n{{- 1 -}}\n\nb", "a1b"),
        ("{% for i in range(2) %}\n  y{{ i }};\n{% endfor %}\n}", "  y0;\n  y1;\n}"),
    ]
)
def test_blocks_are_trimmed_and_stripped(source, text):
    assert render(source) == text


# --- strict -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "source",
    [
        "{{ nothing }}",
        "{{ shape.nothing }}",
        "{% if nothing %}{% endif %}",
        "{% set a = nothing %}",
        "{{ 1 if nothing else 2 }}",
        "{{ nothing ~ 1 }}",
        "{% macro f() %}{{ nothing }}{% endmacro %}{{ f() }}",
        "{% macro f(a) %}{{ a }}{% endmacro %}{{ f() }}",
        "{% for i in range(1) %}{% set late = 1 %}{% endfor %}{{ late }}",
    ],
)
def test_strict_refuses_what_is_undefined(source):
    assert render(source, shape={}) in ("", "1", "2")
    with pytest.raises(ExpressionError, match=r"^t\.wgsl:1: (unknown name|an undefined value)"):
        render(source, strict=True, shape={})


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{% if nothing is defined %}a{% endif %}b", "b"),
        ("{{ nothing | default(3) }}", "3"),
        ("{{ shape.nothing | default(3) }}", "3"),
        ("{{ 1 or nothing }}", "1"),
        ("{% if 0 %}{{ nothing }}{% endif %}", ""),
    ],
)
def test_strict_lets_optional_names_be_asked_for(source, text):
    assert render(source, strict=True, shape={}) == text


# --- errors -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("a\n{{ 1 + }}", "t.wgsl:2: unexpected"),
        ("a\n\n{% if %}", "t.wgsl:3: "),
        ("{% for a in b %}", "t.wgsl:1: Unexpected end of template"),
        ("a\n{% if b %}\n{% else %}\n", "t.wgsl:3: Unexpected end of template. Jinja was looking"),
        ("{{ 2 ** 3 }}", "t.wgsl:1: Pow is not in the manifest format"),
        ("a\n{{ x | upper }}", "t.wgsl:2: filter upper is not in the manifest format"),
        ("\n\n{% include 'a' %}", "t.wgsl:3: include is not in the manifest format"),
        ("{% import 'a' as b %}", "t.wgsl:1: import is not in the manifest format"),
        ("{% from 'a' import b %}", "t.wgsl:1: fromimport is not in the manifest format"),
        ("{% extends 'a' %}", "t.wgsl:1: extends is not in the manifest format"),
        ("{% block a %}{% endblock %}", "t.wgsl:1: block is not in the manifest format"),
        ("{% filter upper %}{% endfilter %}", "t.wgsl:1: filterblock is not in the manifest"),
        ("{% autoescape true %}{% endautoescape %}", "t.wgsl:1: scope is not in the manifest"),
        ("{% do f() %}", "t.wgsl:1: Encountered unknown tag 'do'"),
        ("{% for a in b recursive %}{% endfor %}", "t.wgsl:1: recursive loops"),
        ("{% set a | upper %}{% endset %}", "t.wgsl:1: filters on a set block"),
        ("{% if 1 %}\n{% if 1 %}\n{{ 7 // 2 }}\n{% endif %}\n{% endif %}", "t.wgsl:3: FloorDiv"),
        ("{{ " + "9" * 5000 + " }}", "t.wgsl: Exceeds the limit"),
        ("{{ " + "(" * 500 + ")" * 500 + " }}", "t.wgsl: nested too deeply"),
        ("{% if 1 %}" * 500 + "{% endif %}" * 500, "t.wgsl: nested too deeply"),
    ],
)
def test_errors_of_parsing_give_file_and_line(source, message):
    with pytest.raises(ExpressionError, match="^" + re.escape(message)):
        parse("t.wgsl", source)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("a\n{{ 1 < 'a' }}", 't.wgsl:2: cannot compare 1 < "a"'),
        ("\n{{ [1] }}", "t.wgsl:2: cannot print [1]"),
        ("{{ shape }}", "t.wgsl:1: cannot print {x}"),
        ("{{ dim }}", "t.wgsl:1: cannot print a function"),
        ("{{ nothing.more }}", "t.wgsl:1: cannot look up"),
        ("{{ nothing() }}", "t.wgsl:1: nothing is undefined, not a function"),
        ("{% for a in 3 %}{% endfor %}", "t.wgsl:1: for takes a list, got 3"),
        ("{% for a in nothing %}{% endfor %}", "t.wgsl:1: for takes a list, got undefined"),
        ("{% for a, b in [1] %}{% endfor %}", "t.wgsl:1: unpacking takes a list, got 1"),
        ("{% for a, b in [[1, 2, 3]] %}{% endfor %}", "t.wgsl:1: cannot unpack [1, 2, 3] to 2"),
        ("{% set a, b = 1, 2, 3 %}", "t.wgsl:1: cannot unpack [1, 2, 3] to 2"),
        ("{% set nothing.a = 1 %}", "t.wgsl:1: nothing is undefined, not a namespace"),
        ("{% set shape.a = 1 %}", "t.wgsl:1: shape is {x}, not a namespace"),
        ("{{ namespace(3) }}", "t.wgsl:1: namespace takes an object, got 3"),
        ("{{ namespace('ab') }}", "t.wgsl:1: namespace takes an object"),
        ("{{ namespace.fromkeys('ab') }}", "t.wgsl:1: cannot look up"),
        ("{{ range() }}", "t.wgsl:1: range takes a stop"),
        ("{{ range(1, 2, 0) }}", "t.wgsl:1: range takes a stop"),
        ("{{ range('a') }}", "t.wgsl:1: range takes a whole number"),
        ("{{ range(0.5) }}", "t.wgsl:1: range takes a whole number"),
        ("{% macro f(a) %}{% endmacro %}{{ f(1, 2) }}", "t.wgsl:1: macro f takes (a)"),
        ("{% macro f(a) %}{% endmacro %}{{ f(b=2) }}", "t.wgsl:1: macro f takes (a)"),
        ("{% macro f() %}{{ caller() }}{% endmacro %}{{ f() }}", "t.wgsl:1: caller is undefined"),
        ("a\n{% macro f() %}\n{{ 1 < 'a' }}\n{% endmacro %}\n{{ f() }}", "t.wgsl:3: cannot"),
        ("{{ ''.__class__ }}{{ ().__class__.__base__() }}", "t.wgsl:1: cannot look up"),
        ("{{ shape.items() }}", "t.wgsl:1: shape.items is undefined, not a function"),
        ("{{ self._TemplateReference__context }}", "t.wgsl:1: cannot look up"),
        ("{{ cycler(1) }}", "t.wgsl:1: cycler is undefined, not a function"),
        ("{{ loop.cycle(1) }}", "t.wgsl:1: cannot look up"),
    ],
)  # fmt: skip
def test_errors_of_rendering_give_file_and_line(source, message):
    with pytest.raises(ExpressionError, match="^" + re.escape(message)):
        render(source, shape={"x": 1})


NINES = "{% for a in range(60000) %}" * 3 + "{{ a }}" + "{% endfor %}" * 3
DOUBLING = (
    "{% set n = namespace(t='x') %}{% for i in range(60) %}{% set n.t = n.t ~ n.t %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (NINES, "does not come to an end"),
        ("{% set a = fill('x', 65536) | join %}" + NINES.replace("for a", "for b"),
         "a text of more than 4194304 characters"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "macros call each other without end"),
        ("{% macro f() %}{{ g() }}{% endmacro %}{% macro g() %}{{ f() }}{% endmacro %}{{ g() }}",
         "macros call each other without end"),
        ("{% macro f() %}" + "{{ f() }}" * 9 + "{% endmacro %}{{ f() }}", "without end"),
        ("{{ range(1e30) | length }}", "range: more than 65536 elements"),
        ("{{ range(65537) | length }}", "range: more than 65536 elements"),
        (DOUBLING, "a text of more than"),
        ("{% set ns = namespace(t=[1]) %}{% for i in range(60) %}{% set ns.t = ns.t + ns.t %}"
         "{% endfor %}", "a list of more than"),
    ],
)  # fmt: skip
def test_no_template_runs_away(source, message, monkeypatch):
    monkeypatch.setattr(values, "MAX_WORK", 600_000)
    template = parse("t.wgsl", source)
    with pytest.raises(ExpressionError, match=rf"^t\.wgsl:1: .*{re.escape(message)}"):
        template.render(helpers.HELPERS)


def test_bounds_are_far_from_what_a_template_does(monkeypatch):
    spent, spend = [], values.Meter.spend
    monkeypatch.setattr(values.Meter, "spend", lambda *a: spent.append(a[1]) or spend(*a))
    call = resolved(FIRST["five_outputs"], WORKGROUP_SIZE=127)
    ready = plan.make(call, capabilities.PRESETS["floor"])
    assert len(ready.passes[0].wgsl) * 1000 < templates.MAX_TEXT
    assert 100 < sum(spent) < values.MAX_WORK / 1000


def test_a_template_is_its_name_and_source():
    assert parse("a", "x") == parse("a", "x") != parse("a", "y")
    assert parse("a", "x") != parse("b", "x")
    assert len({parse("a", "x"), parse("a", "x")}) == 1


PIECES = st.sampled_from(
    "{% if a %} {% else %} {% endif %} {% for i in a %} {% endfor %} {{a}} {{i~b}} {% set a = b %} "
    "{% macro m(x) %} {% endmacro %} {{m(a)}} {% call m() %} {% endcall %} text {#c#} {{loop}} "
    "{% raw %} {% endraw %} {% with i = a %} {% endwith %} {{caller()}} {{a[0]+1}} {".replace(
        "} ", "}\n"
    ).split("\n")
)


@settings(max_examples=200, deadline=None)
@given(st.lists(PIECES, max_size=10).map("".join), st.booleans())
def test_any_template_gives_text_or_an_error(source, strict):
    try:
        text = render(source, strict=strict, a=[1, "x"], b=2)
    except ExpressionError as error:
        assert str(error).startswith("t.wgsl")
    else:
        assert isinstance(text, str)


# --- the project's own templates ----------------------------------------------------------------


# A call whose first input is empty has no passes.
DISPATCHED = [case for case in CASES if all(next(iter(case.shapes.values())))]


def rendered(case, device, strict):
    """The WGSL of each pass, from the scopes that a plan is made in."""
    call = resolved(case)
    ready = plan.make(call, capabilities.PRESETS[device])
    variant = call.spec.variant(ready.variant)
    names = variants.select(call, capabilities.PRESETS[device]).scope
    for each, done in zip(variant.every_pass, ready.passes, strict=True):
        scope = extend(extend(names, variant.derive), each.derive)
        template = call.spec.templates[each.shader]
        on = capabilities.PRESETS[device]
        yield plan.render(template, done.bindings, scope, on, strict=strict), done.wgsl


def test_there_is_a_call_for_each_variant():
    ids = [variant.id for spec in SPECS.values() for variant in spec.variants]
    assert sorted(FIRST) == sorted(ids) and len(ids) == 21


@pytest.mark.parametrize("case", DISPATCHED, ids=lambda case: case.id)
def test_variants_render_with_undefined_names_as_errors(case):
    for strict, lenient in rendered(case, "h200", strict=True):
        assert strict == lenient
        assert not re.search(r"\d\.0u|NaN|Infinity|undefined|true|none|\{\{|\{%", strict)


@pytest.mark.parametrize("case", FIRST.values(), ids=FIRST)
def test_wgsl_is_well_formed_on_paper(case):
    for wgsl, _ in rendered(case, "floor", strict=False):
        for opening, closing in ("()", "[]", "{}"):
            assert wgsl.count(opening) == wgsl.count(closing)
        assert len(re.findall(r"@compute @workgroup_size\(\d+\)\nfn main\(", wgsl)) == 1
        declared = re.findall(r"@group\(0\) @binding\((\d+)\) var<[\w, ]+> (\w+):", wgsl)
        assert [int(index) for index, _ in declared] == list(range(len(declared)))
        code = re.sub(r"@group.*|//.*", "", wgsl)
        for _, name in declared:
            assert re.search(rf"\b{name}\b", code), f"{name} is bound and not used"
