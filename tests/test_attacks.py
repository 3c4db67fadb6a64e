"""What a stranger's folder may try: each entry ends soon, harmless or with an error that says why.

The first tables go through a whole folder: loaded, resolved, planned. An entry's result is the text
that comes out, exactly, or an error, of which the message's beginning or a part is given.
"""

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from engine import operator, step, variant

from jax_webgpu import capabilities, document, plan, spec, values
from jax_webgpu.errors import (
    CallError,
    DeviceError,
    ExpressionError,
    JaxWebGPUError,
    LimitError,
    SpecError,
)
from jax_webgpu.resolve import Tensor, resolve

resource = pytest.importorskip("resource")  # not on Windows

# Of the processor's time. What is refused takes a fraction; a bound that is reached, most of it.
SECONDS = 3
MEBIBYTES = 400

FLOOR = capabilities.PRESETS["floor"]
X = Tensor((2, 3), "float32")


@pytest.fixture(autouse=True)
def soon(patience):
    """Every entry ends soon, and takes little memory."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with patience(SECONDS):
        yield
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown / (1024 if sys.platform == "linux" else 1 << 20) < MEBIBYTES


def planned(template="", device=FLOOR, **keys):
    """The WGSL that a manifest's one pass comes to."""
    made = plan.anew(resolve(operator(template, **keys), {"x": X}), device)
    return made.passes[0].wgsl if made.passes else ""


class Refused:
    """A result: an error of a kind, with these words in its message."""

    def __init__(self, words, kind=JaxWebGPUError):
        self.words, self.kind = words, kind

    def __repr__(self):
        return self.words[:40]


def check(expected, run):
    if isinstance(expected, Refused):
        with pytest.raises(expected.kind, match=re.escape(expected.words)) as caught:
            run()
        assert len(str(caught.value)) < 2000
    else:
        assert run() == expected


def table(*rows):
    """Parametrises by rows of one attack or several with one result."""
    pairs = [(each, expected) for *each_of, expected in rows for each in each_of]
    names = [each[:60].replace("\n", " ") for each, _ in pairs]
    return pytest.mark.parametrize(("attack", "expected"), pairs, ids=names)


# --- out of the sandbox -------------------------------------------------------------------------

NOTHING = ""  # an undefined name or member prints nothing
LOOK_UP, NO_FUNCTION = Refused("cannot look up"), Refused("not a function")


@table(
    # Python's objects have no members.
    ("{{ ''.__class__ }}", "{{ ''['__class__'] }}", "{{ [].__class__ }}", "{{ {}.__class__ }}",
     "{{ ().__class__ }}", "{{ 'a'['__cl' ~ 'ass__'] }}", "{{ shapes.x.__class__ }}",
     "{{ shapes.__class__ }}", "{{ [[]][0].__len__ }}", NOTHING),
    ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "{{ (1).__class__ }}",
     "{{ 1.5.__class__ }}", "{{ true.__class__ }}", "{{ none.__class__ }}",
     "{{ dim.__globals__ }}", "{{ dim.__globals__['__builtins__'] }}", "{{ range.__self__ }}",
     "{{ namespace.__init__.__globals__ }}", "{{ env.device.features.has.__self__ }}",
     "{{ f16Ok.__func__ }}", "{{ pick['__call__'] }}", LOOK_UP),
    # Nor methods.
    ("{{ ''.upper() }}", "{{ '{0.__class__}'.format(1) }}", "{{ '{x}'.format_map(shapes) }}",
     "{{ ''.join([1]) }}", "{{ 'a'.encode() }}", "{{ [].append(1) }}", "{{ shapes.x.index(2) }}",
     "{{ shapes.keys() }}", "{{ shapes.values() }}", "{{ attrs.get('a') }}",
     "{{ attrs.update({'a': 1}) }}", "{{ env.wgsl.items() }}", "{{ env.clear() }}",
     "{% for k, v in shapes.items() %}{% endfor %}", NO_FUNCTION),
    ("{{ ''|attr('__class__') }}", Refused("filter attr is not in the manifest format")),
    ("{{ [1]|map('string') }}", Refused("filter map is not in the manifest format")),
    ("{{ 'a'|format(1) }}", Refused("filter format is not in the manifest format")),
    ("{{ shapes|xmlattr }}", Refused("filter xmlattr is not in the manifest format")),
    ("{{ 'a' is callable }}", Refused("test callable is not in the manifest format")),
    ("{{ '%s' % range }}", "{{ '%(a)s' % attrs }}", Refused("% takes a number")),
    ("{{ 'a' * 1000000000 }}", Refused('* takes a number, got "a"')),
    # Nor has Jinja's environment any.
    ("{{ self }}{{ cycler }}{{ joiner }}{{ lipsum }}{{ config }}{{ request }}{{ dict }}{{ g }}",
     "{{ __builtins__ }}{{ __import__ }}{{ context }}{{ environment }}{{ super }}", NOTHING),
    ("{{ self._TemplateReference__context }}", "{{ cycler.__init__.__globals__ }}",
     "{{ lipsum.__globals__['os'].popen('id').read() }}", "{{ joiner.__init__ }}",
     "{{ config.__class__.__init__.__globals__ }}", LOOK_UP),
    ("{{ cycler(1) }}", "{{ dict(a=1) }}", "{{ lipsum() }}", "{{ super() }}", "{{ caller() }}",
     "{{ url_for('a') }}", "{{ open('/etc/passwd') }}", NO_FUNCTION),
    ("{% macro m() %}{% endmacro %}{{ m.__globals__ }}",
     "{% macro m() %}{% endmacro %}{{ m.name }}",
     "{% macro m() %}{{ caller.__code__ }}{% endmacro %}{% call m() %}{% endcall %}", LOOK_UP),
    ("{% set n = namespace() %}{{ n.__class__ }}{{ n.__init__ }}{{ n.keys }}{{ n['get'] }}",
     "{% for i in [1] %}{{ loop.__class__ }}{{ loop._iterator }}{{ loop.cycle }}{% endfor %}",
     "{% set s %}{% endset %}{{ s.__html__ }}", NOTHING),
    ("{% for i in [1] %}{{ loop.cycle(1, 2) }}{% endfor %}", NO_FUNCTION),
    ("{% set n = namespace() %}{% set n.__class__ = 7 %}{{ n.__class__ }}", "7"),  # its own key
    ("{{ {'__class__': 7}.__class__ }}", "7"),
    ("{% set range = 5 %}{{ range }}", "{% set shapes = 5 %}{{ shapes }}", "5"),
    ("{% set shapes.x = 5 %}", "{% set env.device = 5 %}", Refused("not a namespace")),
    ("{{ dim(*[1]) }}", "{{ dim(**attrs) }}", Refused("calls with * or **")),
    ("{{ dim(shapes.x, 0, 1, 2) }}", "{{ dim(self=1) }}", "{{ min(key=1) }}", Refused("t.wgsl")),
    # No other file, and no code.
    ("{% include '/etc/passwd' %}", Refused("include is not in the manifest format")),
    ("{% import 'os' as os %}", "{% from 'os' import path %}", "{% extends 'a' %}",
     "{% block a %}{% endblock %}", "{% filter upper %}{% endfilter %}",
     "{% autoescape false %}{% endautoescape %}", Refused("is not in the manifest format")),
    ("{% do 1 %}", "{% debug %}", "{% trans %}", "{% break %}", Refused("unknown tag")),
    ("{% python print(1) %}", "{% exec %}", "{% do_if 1 %}", Refused("unknown tag")),
    ("{{ '\\ud800' }}", "{{ '\\udfff' ~ 1 }}", Refused("no text: '\\ud")),
    ("{{ '\\N{BULLET}\\x41\\u2028' }}", "•A\u2028"),
    ("{% raw %}{{ ''.__class__ }}{% endraw %}", "{{ ''.__class__ }}"),
)  # fmt: skip
def test_templates_reach_nothing(attack, expected):
    check(expected, lambda: planned(attack))


@table(
    ("''.__class__", "shapes.__class__", "attrs['__init__']", "'a'['__class__']", NOTHING),
    ("dim.__globals__", "device.features.has.__self__", "f16Ok.__func__", "(1).real", LOOK_UP),
    ("'{0}'.format(1)", "shapes.items()", "attrs.pop('a')", "device.limits.keys()", NO_FUNCTION),
    ("self", "cycler", "range(3)", "namespace(a=1)", "__import__('os')", "env", "loop", "open",
     Refused("unknown name", SpecError)),
    ("lambda: 1", "[x for x in shapes]", "a := 1", "1; 2", "`id`", "a\0b", "{{ 1 }}", "$(id)",
     Refused("$.variants[0].derive.a: ", SpecError)),
    ("'\\ud83d'", Refused("no text: '\\ud83d'", SpecError)),
    ("'a'|attr('b')", Refused("filter attr is not in", SpecError)),
    ("derive", Refused("cannot print {", CallError)),
    ("derive.__class__", NOTHING),
    ("{'b': derive}.b.b", "1"),
)  # fmt: skip
def test_expressions_reach_nothing(attack, expected):
    made = {"variants": [variant("only", derive={"b": 1, "a": attack, "c": "a"})]}
    check(expected, lambda: planned("{{ c }}", **made))


@pytest.mark.parametrize(
    "name", ["values", "items", "keys", "get", "update", "__class__", "__dict__", "copy", "pop"]
)
def test_a_port_of_any_name_is_that_port(name):
    port, keys = {"dtype": "T"}, {"bindings": [{"arg": name, "name": "src"}]}
    made = operator(
        f"{{{{ shapes.{name} | join(',') }}}} {{{{ ranks['{name}'] }}}} {{{{ present.{name} }}}}",
        inputs={name: port},
        outputs={"y": port | {"shape": f"shapes.{name}"}},
        attributes={name: {"default": 7}},
        variants=[variant("only", when=[f"shapes.{name}[0] == 2"], passes=[step(**keys)])],
    )
    (only,) = plan.anew(resolve(made, {name: X}), FLOOR).passes
    assert only.wgsl == "2,3 2 true"
    other = operator("{{ shapes.%s }}{{ attrs.%s }}{{ has(shapes, '%s') }}" % ((name,) * 3))
    assert plan.anew(resolve(other, {"x": X}), FLOOR).passes[0].wgsl == "false"


# --- without end --------------------------------------------------------------------------------

NO_END = Refused("the evaluation does not come to an end")
LONG, DEEP = Refused("a text of more than"), Refused("nested too deeply")
BIG = "{% set big = fill(1, 65536) %}{% set text = fill('x', 65536)|join %}"


def often(body, start=""):
    """A template that does something 2.16e14 times, after `start`."""
    return start + "{% for a in range(60000) %}" * 3 + body + "{% endfor %}" * 3


def grow(statement):
    """A template that does something again and again to a namespace's members."""
    start = "{% set n = namespace(t='x', l=[1], d=namespace()) %}"
    return start + "{% for i in range(60000) %}" + statement + "{% endfor %}"


@table(
    (often(""), often("{% set b = a %}"), often("{{ '' }}"), NO_END),
    (often("{{ a }}"), often("{{ a ~ a }}"), Refused("t.wgsl.jinja:1: ")),
    (often("{% set b = big + [1] %}", BIG), often("{% set b = text ~ a %}", BIG),
     often("{{ numel(big) }}", BIG), often("{% set b = big[1:] %}", BIG),
     often("{% set b = [text, text]|join %}", BIG), often("{% if 2 in big %}{% endif %}", BIG),
     often("{% if 'y' in text %}{% endif %}", BIG), often("{% set b = fill(a, 65536) %}", BIG),
     often("{% if isUniqueIntList(big, 0, 1) %}{% endif %}", BIG),
     often("{% if t == u %}{% endif %}", BIG + "{% set t = text ~ 1 %}{% set u = text ~ 1 %}"),
     often("{% if text < text ~ 1 %}{% endif %}", BIG),
     often("{% if text == 1 %}{% endif %}", BIG),
     often("{% set b = text|int %}", BIG), often("{% set b = permuteShape(big, big) %}", BIG),
     Refused("t.wgsl.jinja:1: ")),
    (often("{{ text }}", BIG), BIG + "{% for a in big %}{{ text }}{% endfor %}", LONG),
    ("{{ range(10000000000)|length }}", Refused("range: more than 65536 elements")),
    ("{{ fill(0, 1e9) }}", Refused("fill: a length between 0 and 65536 is needed")),
    ("{{ reversedAxes(1e300) }}", Refused("a length between 0 and 65536 is needed")),
    ("{{ fill(fill('x', 65536)|join, 65536)|join }}", LONG),
    (grow("{% set n.t = n.t ~ n.t %}"), grow("{% set n.t = n.t + n.t %}"),
     grow("{% set n.t = [n.t, n.t]|join(n.t) %}"),
     grow("{% set n.t %}{{ n.t }}{{ n.t }}{% endset %}"),
     Refused("t.wgsl.jinja:1: ")),
    (grow("{% set n.l = n.l + n.l %}"), Refused("a list of more than 65536 elements")),
    # A chain as long as the loop is no harm.
    (grow("{% set n.d = namespace(d=n.d) %}"), grow("{% set n.l = [n.l] %}"),
     grow("{% set n.l = {'a': n.l} %}"), NOTHING),
    (grow("{% set n.l = [n.l] %}") + "{{ n.l }}", Refused("cannot print [[[[[")),
    (grow("{% set n.l = [n.l, n.l] %}") + "{{ n.l }}", Refused("cannot print [[[[[")),
    ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
     "{% macro a() %}{{ b() }}{% endmacro %}{% macro b() %}{{ a() }}{% endmacro %}{{ a() }}",
     "{% macro m() %}{% call m() %}{% endcall %}{% endmacro %}{{ m() }}",
     Refused("macros call each other without end")),
    ("{% macro m() %}{{ m() }}{{ m() }}{% endmacro %}{{ m() }}",
     Refused("macros call each other without end")),
    ("{% macro m0() %}x{% endmacro %}" + "".join(
        f"{{% macro m{i + 1}() %}}" + f"{{{{ m{i}() }}}}" * 9 + "{% endmacro %}" for i in range(20))
     + "{{ m20() }}", Refused("t.wgsl.jinja:1: ")),
    ("{% for a in [1] %}" * 1000 + "{% endfor %}" * 1000, "{% if 1 %}" * 1000, DEEP),
    ("{{ " + "(" * 5000 + ")" * 5000 + " }}", "{{ " + "-" * 5000 + "1 }}", DEEP),
    ("{{ " + "1+" * 5000 + "1 }}", "{{ a" + ".b" * 5000 + " }}",
     "{{ a" + "[0]" * 5000 + " }}", DEEP),
    ("{{ " + "not " * 5000 + "a }}", "{{ " + "a if b else " * 5000 + "c }}", DEEP),
    ("{{ " + "[" * 500 + "]" * 500 + " }}", "{{ " + "a(" * 500 + ")" * 500 + " }}",
     "{{ " + "{'a':" * 500 + "1" + "}" * 500 + " }}", DEEP),
    ("{{ pow(9, pow(9, pow(9, pow(9, 9)))) }}", "Infinity"),
    ("{{ pow2ceil(1e308) ~ '' }}", "{{ 1e308 * 1e308 }}", "{{ numel(fill(1e308, 65536)) }}",
     "{{ rows(fill(9007199254740993, 65536), 0) }}",
     "{{ outer(fill(1e308, 60000), -1) }}", "Infinity"),
    ("{{ 1" + "0" * 10_000 + " }}", "{{ 1.2 * " + "9" * 10_000 + " }}", Refused("digits")),
    ("{{ '" + "9" * 100_000 + "x' == 1 }}", "false"),
    ("{{ '" + "9" * 100_000 + "'|int }}", "Infinity"),
    ("{{ log2ceil(1e999) }}", Refused("log2ceil takes a finite number")),
    ("{{ '" + "\\\\" * 50_000 + "'|length }}", "50000"),
    ("{{ " + "'a' " * 10_000 + "|length }}", "10000"),
    ("{#" * 50_000, Refused("Missing end of comment tag")),
    ("{% raw %}" + "{% endra " * 50_000, Refused("Missing end of raw directive")),
    ("{{" * 50_000, "{%" * 50_000, "{{ '" + "a" * 500_000, "{{ " + " " * 500_000,
     Refused("t.wgsl")),
    ("{ " * 250_000 + "}", "{ " * 250_000 + "}"),
    ("/*" * 250_000, "/*" * 250_000),
    ("enable " * 70_000 + "f16", "enable f16;\n" + "enable " * 70_000 + "f16"),
    ("@workgroup_size(" + "9" * 5000 + ")", Refused("workgroup size about 10^19; max", LimitError)),
    ("x" * (spec.MAX_TEMPLATE + 1), Refused("it has more than 1,048,576 bytes", SpecError)),
)  # fmt: skip
def test_templates_end(attack, expected):
    check(expected, lambda: planned(attack))


def doubling(first, again, count=60):
    return {"d0": first} | {f"d{i + 1}": again.format(f"d{i}") for i in range(count)}


@pytest.mark.parametrize(
    ("derive", "expected"),
    [
        (doubling("'x'", "{0} ~ {0}"), LONG),
        (doubling("'x'", "[{0}, {0}]|join"), LONG),
        (doubling("[1]", "{0} + {0}"), Refused("a list of more than 65536 elements")),
        (doubling("[1]", "[{0}, {0}]"), NOTHING),
        (doubling("{{'a': 1}}".format(), "{{'a': {0}, 'b': {0}}}"), NOTHING),
        (doubling("false", "{0} and {0}"), NOTHING),
        ({f"a{i}": "fill(0, 65536)" for i in range(4000)}, NO_END),
        ({f"a{i}": f"fill('x', 65536)|join ~ {i}" for i in range(4000)}, NO_END),
        ({f"a{i}": "derive" for i in range(200)}, NOTHING),
        ({f"a{i}": i for i in range(5000)}, Refused("5,000 values; at most 4,096", SpecError)),
        ({"a": "+".join("1" * 500)}, Refused("nested too deeply", SpecError)),
        ({"a": " and ".join(["true"] * 500)}, Refused("nested too deeply", SpecError)),
        ({"a": "a" * 70_000}, Refused("an expression of 70,000 characters", SpecError)),
        ({"a": "[" + "1, " * 20_000 + "]"}, NOTHING),
        ({"a": "pow(9, pow(9, pow(9, 9)))", "b": "a - a"}, NOTHING),
        ({"a": "1" + "0" * 5000}, Refused("digits", SpecError)),
    ],
    ids=lambda each: "" if isinstance(each, Refused | str) else str([*each.items()][-1])[:40],
)  # fmt: skip
def test_derived_values_end(derive, expected):
    check(expected, lambda: planned(derive=derive))


def test_clauses_that_lead_to_each_other_are_followed_once():
    derive = doubling("ranks.x == 7", "{0} and {0}") | {"dev": "not f16Ok('f32')"}
    made = operator(
        derive=derive, variants=[variant("a", when=["d60"]), variant("b", when=["dev"])]
    )
    with pytest.raises(DeviceError, match=r"a: d60: d59: .*d0: `ranks\.x == 7`: 2, expected 7"):
        plan.anew(resolve(made, {"x": X}), FLOOR)
    assert plan.anew(resolve(made, {"x": X}), capabilities.IDEAL).variant == "b"


# --- manifests ----------------------------------------------------------------------------------


def manifest(**keys):
    return json.dumps({"name": "a", "outputs": {}, "variants": []} | keys)


ONE = '{"id": "v%d", "passes": []}'


@table(
    ("[" * 1_000_000, '{"a":' * 500_000, Refused("$: nested too deeply")),
    (manifest(derive={"a": "$"}).replace('"$"', "[" * 70 + "]" * 70),
     manifest(conformance="$").replace('"$"', '{"a":' * 70 + "1" + "}" * 70),
     Refused("$: nested too deeply")),
    (manifest(derive={"a": "$"}).replace('"$"', "1" + "0" * 5000), Refused("digits")),
    (manifest(derive={"a": "$"}).replace('"$"', "NaN"), Refused("$.derive.a: NaN is not JSON")),
    (manifest(tunables={"A": {"default": "$"}}).replace('"$"', "-Infinity"),
     Refused("-Infinity is not JSON")),
    (manifest(description="x" * document.MAX_BYTES), Refused("more than 4,194,304 bytes")),
    (manifest(conformance=[0] * 300_000), manifest(conformance={f"{i}": 0 for i in range(250_000)}),
     Refused("$: more than 200,000 values")),
    ('{"a": 1, ' + ", ".join('"a": 1' for _ in range(100_000)) + "}",
     Refused("$.a: the key 'a' stands twice in one object")),
    ('{"a": 1, ' + ", ".join(f'"{i}": 1, "{i}": 2' for i in range(50_000)) + "}",
     Refused("stands twice in one object")),
    (manifest(variants="$").replace('"$"', f"[{', '.join(ONE % i for i in range(60_000))}]"),
     Refused("$.variants: 60,000 variants; at most 1,024")),
    (manifest(variants="$").replace('"$"', f"[{', '.join([ONE % 1] * 1000)}]"),
     Refused("the id 'v1' is taken already")),
    (manifest(description="\ud800"), manifest(**{"\udfff": 1}),
     Refused("half of a surrogate pair")),
    ('{"name": "a"', "", "null", "[]", '"a"', "0", '{"name": "a"} x', Refused("big.json: ")),
    (manifest(inputs={"x": {"dtype": "T"}}), Refused("'T' is no type")),
    (manifest(typeConstraints={"T": ["float32"] * 150_000}), "a"),  # said often is said once
    (manifest(inputs={f"i{i}": {"dtype": "bool"} for i in range(20_000)}), "a"),
    (manifest(attributes={f"a{i}": {"default": [[1] * 9] * 9} for i in range(1000)}), "a"),
)  # fmt: skip
def test_documents(attack, expected):
    run = lambda: spec.loads(attack.encode("utf-8", "surrogatepass"), Path("big.json"), Path()).name  # noqa: E731
    check(expected, run)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        # What stands in WGSL is a name, a type, a number.
        ({"bindings": [{"arg": "x", "name": "x: u32; var<private> y"}]}, "is no name in WGSL"),
        ({"bindings": [{"arg": "x", "name": "a\nb"}]}, "'a\\nb' is no name in WGSL"),
        ({"bindings": [{"arg": "x", "name": "x/*"}]}, "'x/*' is no name in WGSL"),
        ({"bindings": [{"arg": "x", "name": "__x"}]}, "'__x' is no name in WGSL"),
        ({"bindings": [{"arg": "x", "elementType": "u32>; @group(0)"}]}, "is not a WGSL scalar"),
        ({"bindings": [{"arg": "x", "elementType": "f32, 4"}]}, "'f32, 4' is not a WGSL scalar"),
        ({"bindings": [{"arg": "x", "elementType": "array<" * 9000}]}, "is not a WGSL scalar"),
        ({"bindings": [{"arg": "x", "elementType": "$evil"}], "derive": {"evil": "'u32>;'"}},
         "the binding x: 'u32>;' is not a WGSL scalar"),
        ({"bindings": [{"name": "p", "struct": [{"name": "n }", "type": "u32", "value": 1}]}]},
         "'n }' is no name in WGSL"),
        ({"bindings": [{"name": "p", "struct": [{"name": "n", "type": "u32 }", "value": 1}]}]},
         "expected one of u32, i32, f32"),
        ({"bindings": [{"name": "p", "structName": "P {", "struct": []}]}, "is no name in WGSL"),
        ({"bindings": [{"name": "x", "buffer": "uniform> a"}]}, "expected one of uniform, storage"),
        # Sizes.
        ({"bindings": [{"arg": "x", "length": 2**40}]},
         "the binding x in bytes: 4,398,046,511,104; maxStorageBufferBindingSize of floor"),
        ({"bindings": [{"arg": "x", "length": "pow(9, 999)"}]}, "the length of x comes out as Inf"),
        ({"dispatch": {"x": 2**53}},
         "workgroups in x: 9,007,199,254,740,992; maxComputeWorkgroupsPerDimension of floor"),
        ({"dispatch": {"x": 1, "z": 1e300}}, "workgroups in z: about 10^300; maxComputeW"),
        ({"dispatch": {"threads": 1e300, "workgroupSize": 1}}, "workgroups in y: about 10^295;"),
        ({"dispatch": {"workgroups": "1 / 0"}}, "dispatch.workgroups comes out as Infinity"),
        ({"bindings": [{"name": "p", "struct": [
            {"name": f"n{i}", "type": "u32", "value": 1} for i in range(20_000)]}]},
         "the binding p in bytes: 80,000; maxUniformBufferBindingSize of floor is 65,536"),
        ({"bindings": [{"name": "p", "struct": [
            {"name": f"n{i}", "type": "u32", "default": 1} for i in range(60_000)]}]},
         "more than 200,000 values"),
        ({"bindings": ["big"] * 1}, "the binding big in bytes: 134,217,732"),
        ({"shader": "../../etc/passwd"}, "is not the name of a file beside the manifest"),
    ],
    ids=lambda each: each[:50] if isinstance(each, str) else "",
)  # fmt: skip
def test_passes(keys, expected):
    scratch = [{"id": "big", "dtype": "float32", "shape": [2**25 + 1]}]
    made = variant("only", passes=[step(**keys)], intermediates=scratch)
    check(
        Refused(expected), lambda: planned("{{ env.wgsl.resourceDeclarations }}", variants=[made])
    )


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ([2**53], "elements of f32; WGSL counts them in u32, up to 4,294,967,296"),
        ([2**53, 2], "y has 18,014,398,509,481,984 elements; at most 9,007,199,254,740,992"),
        ([1e300], "y has about 10^300 elements; at most 9,007,199,254,740,992"),
        ("fill(1e300, 60)", "y has about 10^18000 elements; at most"),
        ("fill(1, 65536)", "the shape of y has 65,536 axes; at most 64"),
        ([-1], "the shape of y comes out as [-1]"),
        (["1 / 0"], "the shape of y comes out as [Infinity]"),
        ([65536, 65536], "the binding y in bytes: 17,179,869,184; maxStorageBufferBindingSize"),
    ],
)
def test_outputs(shape, expected):
    outputs = {"y": {"dtype": "T", "shape": shape}}
    with pytest.raises(JaxWebGPUError, match=re.escape(expected)):
        planned(outputs=outputs)


@pytest.mark.parametrize(
    ("scratch", "expected"),
    [
        (
            [{"shape": [2**42]}],
            "the intermediate t0 in bytes: 17,592,186,044,416; maxBufferSize of",
        ),
        ([{"shape": ["pow(2, 60)"]}], "t0 has about 10^18 elements; at most"),
        (
            [{"shape": [2**26]}] * 100,
            "the intermediates in bytes: 26,843,545,600; 16 times the max",
        ),
        ([{"shape": ["-1"]}], "the shape of t0 comes out as [-1]"),
    ],
)
def test_intermediates(scratch, expected):
    named = [{"id": f"t{i}", "dtype": "float32"} | each for i, each in enumerate(scratch)]
    check(Refused(expected), lambda: planned(variants=[variant("only", intermediates=named)]))


def repeat(count, *passes):
    return {"repeat": {"count": count, "index": "i"}, "passes": [*passes]}


@pytest.mark.parametrize(
    ("group", "expected"),
    [
        (repeat(10**9, step()), "repeat: more than 4096 passes"),
        (repeat("pow(9, 999)", step()), "the repeat count comes out as Infinity"),
        (repeat(4096, step(), step()), "more than 4096 passes"),
        (repeat(4096, repeat(4096, repeat(4096))), "repeat groups of more than 16384 turns"),
        (repeat(4096, *[step(dispatch={"x": 0})] * 99), "repeat groups of more than 16384 turns"),
        (repeat(4096, step(derive={"a": "fill(i, 65536)"})), "does not come to an end"),
        (repeat(4096, step(dispatch={"x": "numel(fill(1, 60000)) * i"})), "come to an end"),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_repeat_groups(group, expected):
    check(Refused(expected), lambda: planned("{{ i }}", variants=[variant("only", passes=[group])]))


def test_a_thousand_variants_that_refuse():
    clauses = [f"ranks.x == {i + 3}" for i in range(150)]
    many = [variant(f"v{i}", when=clauses, passes=[]) for i in range(1000)]
    with pytest.raises(DeviceError) as caught:
        planned(variants=many)
    assert "v999: `ranks.x == 3`: 2, expected 3" in str(caught.value)


def test_a_thousand_variants_that_supersede_each_other():
    names = [f"v{i}" for i in range(1000)]
    many = [variant(name, passes=[], supersededBy=names[:150]) for name in names]
    with pytest.raises(DeviceError, match="v0 supersedes it"):
        planned(variants=many)


def test_a_handle_of_many_fields_that_every_pass_binds():
    struct = [{"name": f"n{i}", "type": "u32", "value": "1"} for i in range(2000)]
    bindings = {"p": {"struct": struct}}
    many = [variant(f"v{i}", passes=[step(bindings=["p"])]) for i in range(100)]
    with pytest.raises(SpecError, match="more than 100,000 fields in the structs of all passes"):
        planned(bindings=bindings, variants=many)


# --- files --------------------------------------------------------------------------------------


def folder(tmp_path, shader="t.wgsl.jinja"):
    """A kernel folder whose one pass names a template."""
    inside = tmp_path / "kernel"
    inside.mkdir()
    passes = [step(shader=shader)]
    port = {"dtype": "float32"}
    document = {"inputs": {"x": port}, "outputs": {"y": port | {"shape": [1]}}}
    text = manifest(variants=[variant("only", passes=passes)], **document)
    (inside / "manifest.json").write_text(text)
    (tmp_path / "secret").write_text("{{ secret }}")
    return inside


@pytest.mark.parametrize(
    "name",
    ["..", ".", "", "../secret", "kernel/../../secret", "/etc/passwd", "a/b", "\\\\host\\share",
     "..\\secret", "C:secret", "C:\\secret", "t\0.jinja", "file:///etc/passwd", "t.jinja/",
     "~/a/b"],
)  # fmt: skip
def test_names_that_are_paths(tmp_path, name):
    with pytest.raises(SpecError) as caught:
        spec.load(folder(tmp_path, name) / "manifest.json")
    place = "$.variants[0].passes[0].shader: "
    assert f"{place}{name!r} is not the name of a file beside the manifest" in str(caught.value)


def test_a_name_that_is_too_long(tmp_path):
    with pytest.raises(SpecError, match=r"cannot read the template aaa.*too long"):
        spec.load(folder(tmp_path, "a" * 5000) / "manifest.json")


def pipe(path):
    os.mkfifo(path)


def listening(path):
    here = os.getcwd()
    os.chdir(path.parent)  # the path of a socket has at most a hundred characters
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(here)


def huge(path):
    with path.open("wb") as file:
        file.truncate(1 << 40)  # a terabyte of nothing


FILES = {
    "a link out": (lambda path: path.symlink_to("../secret"), "it is a link out of the folder"),
    "an absolute link": (lambda path: path.symlink_to("/etc/passwd"), "a link out of the folder"),
    "a link to a device": (lambda path: path.symlink_to("/dev/zero"), "a link out of the folder"),
    "a link to nothing": (lambda path: path.symlink_to("/no/such"), "a link out of the folder"),
    "a link to itself": (lambda path: path.symlink_to(path.name), "levels of symbolic links"),
    "a pipe": (pipe, "it is not a regular file"),
    "a socket": (listening, "No such device or address"),
    "a folder": (lambda path: path.mkdir(), "Is a directory|it is not a regular file"),
    "a huge file": (huge, "it has more than [0-9,]+ bytes"),
    "nothing": (lambda path: None, "No such file"),
    "no UTF-8": (lambda path: path.write_bytes(b"\xff"), "decode|codec"),
}


@pytest.mark.parametrize("kind", FILES)
def test_templates_that_are_no_files(tmp_path, kind):
    make, message = FILES[kind]
    inside = folder(tmp_path)
    make(inside / "t.wgsl.jinja")
    with pytest.raises(SpecError, match=rf"cannot read the template t\.wgsl\.jinja: .*({message})"):
        spec.load(inside / "manifest.json")


@pytest.mark.parametrize("kind", FILES)
def test_manifests_that_are_no_files(tmp_path, kind):
    make, message = FILES[kind]
    inside = folder(tmp_path)
    (inside / "manifest.json").unlink()
    make(inside / "manifest.json")
    with pytest.raises(SpecError, match=rf"manifest\.json: .*({message})"):
        spec.load(inside / "manifest.json")


def test_links_inside_and_hard_links_are_fine(tmp_path):
    inside = folder(tmp_path)
    (inside / "other.jinja").write_text("{{ shapes.x[0] }}")
    (inside / "t.wgsl.jinja").symlink_to("other.jinja")
    (tmp_path / "link").symlink_to(inside)
    for path in (inside, tmp_path / "link"):
        loaded = spec.load(path / "manifest.json")
        assert loaded.templates["t.wgsl.jinja"].source == "{{ shapes.x[0] }}"
    (inside / "t.wgsl.jinja").unlink()
    os.link(tmp_path / "secret", inside / "t.wgsl.jinja")
    assert spec.load(inside / "manifest.json").templates["t.wgsl.jinja"].source == "{{ secret }}"


def test_links_that_are_the_caller_s_own_may_lead_out(tmp_path):
    inside = folder(tmp_path)
    (inside / "t.wgsl.jinja").symlink_to("../secret")
    loaded = spec.load(inside / "manifest.json", links=True)
    assert loaded.templates["t.wgsl.jinja"].source == "{{ secret }}"
    (inside / "t.wgsl.jinja").unlink()
    (inside / "t.wgsl.jinja").symlink_to("/dev/zero")
    with pytest.raises(SpecError, match="it is not a regular file"):
        spec.load(inside / "manifest.json", links=True)


def test_what_was_loaded_is_checked_again(tmp_path):
    inside = folder(tmp_path)
    (inside / "t.wgsl.jinja").write_text("{{ secret }}")
    assert spec.load(inside / "manifest.json")
    (inside / "t.wgsl.jinja").unlink()
    (inside / "t.wgsl.jinja").symlink_to("../secret")  # of equal bytes
    with pytest.raises(SpecError, match="it is a link out of the folder"):
        spec.load(inside / "manifest.json")


def test_templates_are_bounded_together(tmp_path):
    shaders = {f"t{i}": b"x" * spec.MAX_TEMPLATE for i in range(5)}
    passes = [step(shader=name, bindings=[]) for name in shaders]
    text = manifest(variants=[variant("only", passes=passes)]).encode()
    with pytest.raises(SpecError, match="the templates have more than 4,194,304 bytes"):
        spec.loads(text, Path("a.json"), shaders.__getitem__)


# --- the same, whatever Python is asked to do with warnings -------------------------------------


def test_sequences_that_python_does_not_know_are_no_warning():
    source = (
        "from jax_webgpu import expressions, templates\n"
        "assert expressions.parse(r\"'\\d'\")({}) == r'\\d'\n"
        "assert templates.parse('t', r\"{{ '\\d' }}\").render({}) == r'\\d'"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", source], capture_output=True)
    assert done.returncode == 0, done.stderr.decode()


def test_the_work_of_a_call_is_counted_once_for_all_of_it():
    made = operator(
        "{% for i in range(60000) %}{{ i }}{% endfor %}", derive={"a": "fill(1, 60000)"}
    )
    scope_ = {values.METER: values.Meter()}
    made.derive["a"](scope_ | {"fill": lambda v, n: [v] * n})
    assert scope_[values.METER].left == values.MAX_WORK - 60000 - made.derive["a"].size
    with pytest.raises(ExpressionError, match="does not come to an end"):
        for _ in range(200):
            made.derive["a"](scope_ | {"fill": lambda v, n: [v] * n})
