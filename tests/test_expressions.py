"""The manifest format's expressions: each rule of the format, then properties of the evaluator."""

import contextlib
import itertools
import math
import operator
import re

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from jax_webgpu import capabilities, dtypes, expressions, helpers, values
from jax_webgpu.errors import ExpressionError
from jax_webgpu.expressions import Expression, parse, source
from jax_webgpu.values import UNDEFINED

SCOPE = {
    **helpers.HELPERS,
    "f16Ok": capabilities.PRESETS["floor"].f16_ok,
    "device": capabilities.PRESETS["floor"].as_scope(),
    "derive": {"total": 24},
    "total": 24,
    "shapes": {"x": (2, 3, 4), "s": ()},
    "attrs": {"axis": 1, "name": "sum", "scale": 0.5, "flag": False},
    "none_": None,
    "missing": UNDEFINED,
    "infinity": math.inf,
    "nan": math.nan,
}


def value(text, **names):
    return parse(text)({**SCOPE, **names})


def same(a, b):
    """Equal, and of one type: 64 is not 64.0, True is not 1."""
    if isinstance(a, list | tuple | range) and isinstance(b, list | tuple | range):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return type(a) is type(b) and (a == b or (a != a and b != b))


def evaluates(cases):
    """Parametrises by expression and value."""
    return pytest.mark.parametrize(("text", "expected"), cases, ids=[text for text, _ in cases])


def refuses(cases):
    """Parametrises by expression and a part of the message."""
    return pytest.mark.parametrize(("text", "message"), cases, ids=[text for text, _ in cases])


def is_value(thing):
    """Whether something is a value of the format and nothing else of Python's."""
    match thing:
        case None | bool() | int() | float() | str() | values.Undefined():
            return True
        case list() | tuple() | range():
            return all(map(is_value, thing))
        case dict():
            return all(isinstance(key, str) and is_value(thing[key]) for key in thing)
    return any(thing == known for known in functions(SCOPE))


def functions(scope):
    for each in scope.values():
        if isinstance(each, dict):
            yield from functions(each)
        elif callable(each):
            yield each


# --- numbers ------------------------------------------------------------------------------------


@evaluates(
    [
        ("7 / 2", 3.5),
        ("8 / 2", 4),
        ("0.5 + 0.5", 1),
        ("64.0", 64),
        ("1 / 0", math.inf),
        ("-1 / 0", -math.inf),
        ("0 / 0", math.nan),
        ("infinity - infinity", math.nan),
        ("7 % 3", 1),
        ("-7 % 3", -1),
        ("7 % -3", 1),
        ("-7 % -3", -1),
        ("-6 % 3", 0),
        ("7.5 % 2", 1.5),
        ("-7.5 % 2", -1.5),
        ("7 % 0", math.nan),
        ("infinity % 2", math.nan),
        ("5 % infinity", 5),
        ("9007199254740992 + 1", 9007199254740992),  # the doubles end here
        ("9007199254740992 * 9007199254740992", 2**106),
        ("1e308 * 10", math.inf),
        ("1e999", math.inf),
        ("2 + 3 * 4", 14),
        ("(2 + 3) * 4", 20),
        ("10 - 4 - 3", 3),
        ("24 / 4 / 2", 3),
        ("-2 * -3", 6),
        ("+3", 3),
        ("- -3", 3),
    ]
)
def test_arithmetic_is_that_of_doubles(text, expected):
    assert same(value(text), expected)


@evaluates(
    [
        ("'' ~ 64.0", "64"),
        ("'' ~ 128 / 2", "64"),
        ("'' ~ 0.1", "0.1"),
        ("'' ~ 0.1 * 3", "0.30000000000000004"),
        ("'' ~ 1 / 3", "0.3333333333333333"),
        ("'' ~ 1e20", "100000000000000000000"),
        ("'' ~ 1e21", "1e+21"),
        ("'' ~ 1.5e300", "1.5e+300"),
        ("'' ~ 1152921504606846976", "1152921504606847000"),  # the shortest digits of 2**60
        ("'' ~ 0.000001", "0.000001"),
        ("'' ~ 0.0000001", "1e-7"),
        ("'' ~ 0.00000015", "1.5e-7"),
        ("'' ~ 1 / 0", "Infinity"),
        ("'' ~ -1 / 0", "-Infinity"),
        ("'' ~ 0 / 0", "NaN"),
        ("'' ~ true", "true"),
        ("'' ~ false", "false"),
        ("'' ~ none", ""),
        ("'' ~ missing", ""),
        ("'' ~ attrs.nothing", ""),
        ("'vec4<' ~ 'f' ~ 32 ~ '>'", "vec4<f32>"),
        ("'n' + 64.0", "n64"),
    ]
)
def test_text_of_values_is_javascript_s(text, expected):
    assert same(value(text), expected)


@pytest.mark.parametrize("number", [0.0, 64.0, -3.0, 2.0**52])
def test_a_whole_float_never_prints_a_point(number):
    assert values.to_text(number) == str(int(number))
    assert same(values.number(number), int(number))


@evaluates(
    [
        ("3.7|int", 3),
        ("-3.2|int", -4),  # the sign belongs to what the filter is applied to
        ("(-3.2)|int", -4),
        ("-(3.2|int)", -3),
        ("7 / 2|int", 3.5),
        ("(7 / 2)|int", 3),
        ("'12.5'|int", 12),
        ("'twelve'|int", 0),
        ("true|int", 1),
    ]
)
def test_int_rounds_down(text, expected):
    assert same(value(text), expected)


@refuses(
    [
        ("1 - true", "takes a number, got true"),
        ("true * 2", "takes a number, got true"),
        ("'a' * 3", 'takes a number, got "a"'),
        ("'%s' % 3", 'takes a number, got "%s"'),
        ("missing + 1", "cannot add undefined + 1"),
        ("[1] + 1", "cannot add [1] + 1"),
        ("shapes + 1", "cannot add {x, s} + 1"),
        ("-'a'", 'takes a number, got "a"'),
        ("+none", "takes a number, got none"),
        ("2 ** 3", "Pow is not in the manifest format"),
        ("7 // 2", "FloorDiv is not in the manifest format"),
        ("'' ~ [1]", "cannot print [1]"),
    ]
)
def test_arithmetic_refuses(text, message):
    with pytest.raises(ExpressionError, match=re.escape(message)):
        value(text)


@refuses(
    [
        ("1 + missing / 2", "/ takes a number, got undefined in `missing / 2`"),
        ("2 * (missing % 2)", "% takes a number, got undefined in `missing % 2`"),
        ("1 - missing", "- takes a number, got undefined in `1 - missing`"),
        ("(-missing) * 2", "- takes a number, got undefined in `-missing`"),
        (
            "ceilDiv(missing, 4) > 1",
            "ceilDiv takes a number, got undefined in `ceilDiv(missing, 4)`",
        ),
        ("1 < missing", "cannot compare 1 < undefined in `1 < missing`"),
        ("1 < 2 < missing", "cannot compare 2 < undefined in `1 < 2 < missing`"),
        ("missing.size", 'cannot look up "size" in undefined in `missing.size`'),
        ("missing[0] + 1", "cannot look up 0 in undefined in `missing[0]`"),
        ("missing[1:]", "a slice takes a list, got undefined in `missing[1:]`"),
        (
            "missing|length",
            "length takes a list, an object or a string, got undefined in `missing|",
        ),
        ("'a' ~ [1]", 'cannot print [1] in `"a" ~ [1]`'),
    ]
)
def test_a_message_names_the_operand(text, message):
    """Where a value comes from, so that an author finds it in a long expression."""
    with pytest.raises(ExpressionError, match=f"^{re.escape(message)}"):
        value(text)


# --- comparisons --------------------------------------------------------------------------------


@evaluates(
    [
        ("1 == 1.0", True),
        ("1 == '1'", True),
        ("' 1 ' == 1", True),
        ("'' == 0", True),
        ("true == 1", True),
        ("false == 0", True),
        ("true == '1'", True),
        ("'1' == '1.0'", False),  # two strings are compared as strings
        ("'1_000' == 1000", False),
        ("'inf' == infinity", False),
        ("'Infinity' == infinity", True),
        ("'nan' == nan", False),
        ("nan == nan", False),
        ("nan != nan", True),
        ("'a' != 'b'", True),
        ("none == none", True),
        ("none == 0", False),
        ("none == false", False),
        ("[] == 0", False),
        ("[1] == 1", False),
    ]
)
def test_equality_is_loose_between_scalars(text, expected):
    assert value(text) is expected


@evaluates(
    [
        ("[1, 2] == [1, 2]", False),
        ("[1, 2] != [1, 2]", True),
        ("shapes.x == shapes.x", False),
        ("sameShape(shapes.x, [2, 3, 4])", True),
        ("sameShape([1, 2], [1, 3])", False),
        ("{'a': 1} == {'a': 1}", False),
    ]
)
def test_lists_are_never_equal(text, expected):
    assert value(text) is expected


@evaluates(
    [
        ("1 < 2", True),
        ("2 <= 2", True),
        ("'a' < 'b'", True),
        ("nan < 1", False),
        ("1 >= nan", False),
        ("1 < infinity", True),
    ]
)
def test_order(text, expected):
    assert value(text) is expected


@refuses(
    [
        ("missing < 1", "cannot compare undefined < 1"),
        ("1 >= attrs.nothing", "cannot compare 1 >= undefined"),
        ("1 < '2'", 'cannot compare 1 < "2"'),
        ("none <= 1", "cannot compare none <= 1"),
        ("[1] > [0]", "cannot compare [1] > [0]"),
    ]
)
def test_order_refuses(text, message):
    with pytest.raises(ExpressionError, match=re.escape(message)):
        value(text)


@evaluates(
    [
        ("2 in [1, 2]", True),
        ("'2' in [1, 2]", True),
        ("3 in [1, 2]", False),
        ("3 not in [1, 2]", True),
        ("[1] in [[1]]", False),
        ("missing in [1]", False),
        ("'xis' in 'axis'", True),
        ("1 in '123'", False),
        ("'axis' in attrs", True),
        ("'keys' in attrs", False),
        ("'__class__' in attrs", False),
        ("[1] in attrs", False),
        ("1 in shapes.s", False),
    ]
)
def test_in(text, expected):
    assert value(text) is expected


# --- undefined ----------------------------------------------------------------------------------


@evaluates(
    [
        ("attrs.nothing", UNDEFINED),
        ("attrs['nothing']", UNDEFINED),
        ("shapes.x[3]", UNDEFINED),
        ("shapes.x[0.5]", UNDEFINED),
        ("shapes.x[true]", UNDEFINED),
        ("shapes.x['length']", UNDEFINED),
        ("dim(shapes.s, 0)", UNDEFINED),
        ("1 if false", UNDEFINED),
        ("attrs.nothing == attrs.nothing", False),
        ("attrs.nothing == none", False),
        ("attrs.nothing == 0", False),
        ("attrs.nothing != 1", True),
        ("not attrs.nothing", True),
        ("attrs.nothing is defined", False),
        ("attrs.nothing is undefined", True),
        ("attrs.nothing is not defined", True),
        ("attrs.flag is defined", True),
        ("unheard_of is defined", False),
        ("unheard_of is undefined", True),
        ("unheard_of is defined and unheard_of > 0", False),
        ("attrs.nothing|default(5)", 5),
        ("attrs.axis|default(5)", 1),
        ("attrs.flag|default(5)", False),
        ("none_|default(5)", None),
        ("''|default(5)", ""),
        ("0|default(5)", 0),
        ("attrs.nothing|default", ""),
    ]
)
def test_undefined(text, expected):
    assert same(value(text), expected)


@refuses(
    [
        ("unheard_of", "unknown name unheard_of"),
        ("unheard_of == 1", "unknown name unheard_of"),
        ("unheard_of|default(1)", "unknown name unheard_of"),
        ("unheard_of is number", "unknown name unheard_of"),
        ("attrs.nothing.more", "cannot look up"),
        ("attrs.nothing[0]", "cannot look up 0 in undefined"),
        ("attrs.nothing()", "attrs.nothing is undefined, not a function"),
        ("total.more", 'cannot look up "more" in 24'),
        ("none_.more", "cannot look up"),
        ("dim.more", "in a function"),
    ]
)
def test_undefined_refuses(text, message):
    with pytest.raises(ExpressionError, match=re.escape(message)):
        value(text)


def test_a_branch_that_is_not_taken_may_hold_an_unknown_name():
    assert value("total if true else unheard_of") == 24


# --- logic --------------------------------------------------------------------------------------


@evaluates(
    [
        ("3 and 5", 5),
        ("0 and 5", 0),
        ("'' and 5", ""),
        ("[] and 5", []),
        ("none_ and 5", None),
        ("nan and 5", math.nan),
        ("3 or 5", 3),
        ("0 or 5", 5),
        ("attrs.nothing or 5", 5),
        ("0 or false", False),
        ("attrs.nothing and 5", UNDEFINED),
        ("1 and [2]", [2]),
        ("not 0", True),
        ("not [0]", False),
        ("not nan", True),
        ("not '0'", False),
        ("true and not false", True),
        ("1 or 0 and 0", 1),
        ("0 and unheard_of", 0),
        ("1 or unheard_of", 1),
        ("0 and (1 < 'a')", 0),
        ("1 if 2 > 1 else 0", 1),
        ("1 if 0 else 2 if 0 else 3", 3),
        ("1 if [] else 2", 2),
    ]
)
def test_logic_gives_operands_back_lazily(text, expected):
    assert same(value(text), expected)


# --- look-ups, slices, literals, filters, tests -------------------------------------------------


@evaluates(
    [
        ("shapes.x[0]", 2),
        ("shapes.x[-1]", 4),
        ("shapes['x'][1]", 3),
        ("shapes.x.0", 2),
        ("attrs.name[0]", "s"),
        ("derive.total", 24),
        ("{'a': 1, 'b': [2]}.b[0]", 2),
        ("{1: 'one', true: 'yes'}['1']", "one"),
        ("{1: 'one', true: 'yes'}['true']", "yes"),
        ("shapes.x[1:]", [3, 4]),
        ("shapes.x[:-1]", [2, 3]),
        ("shapes.x[::-1]", [4, 3, 2]),
        ("shapes.x[:]", [2, 3, 4]),
        ("shapes.x[1:2] + [9]", [3, 9]),
        ("shapes.x[5:]", []),
        ("attrs.name[1:]", "um"),
        ("[1, 2, 3]|length", 3),
        ("shapes|length", 2),
        ("'four'|length", 4),
        ("[1, 2.0, 'x']|join(', ')", "1, 2, x"),
        ("[1, none, true]|join", "1true"),
        ("1 is number", True),
        ("true is number", False),
        ("'1' is number", False),
        ("'1' is string", True),
        ("1 is string", False),
        ("(1, 2)", [1, 2]),
        ("()", []),
        ("'a' 'b'", "ab"),
        ("'it''s'", "its"),
        ('"a\\"b\\n\\u00e9"', 'a"b\né'),
        ("device.features.has('shader-f16')", False),
        ("device.wgslLanguageFeatures.has('packed_4x8_integer_dot_product')", False),
        ("device.limits.maxComputeWorkgroupsPerDimension", 65535),
        ("device.limits.unheard_of", UNDEFINED),
        ("device.adapterInfo.vendor", UNDEFINED),
        ("f16Ok('f16')", False),
        ("f16Ok('float16')", False),
        ("f16Ok('f32')", True),
    ]
)
def test_the_rest_of_the_format(text, expected):
    assert same(value(text), expected)


@refuses(
    [
        ("shapes.x[::0]", "the step 0"),
        ("shapes.x['a':]", "whole number"),
        ("total[1:]", "takes a list"),
        ("shapes[1:]", "takes a list"),
        ("5 in 7", "takes a list"),
        ("7|length", "length takes"),
        ("'abc'|join", "takes a list"),
        ("missing|int", "takes a number"),
        ("shapes.x|length(1)", "filter length takes at most 0 arguments"),
        ("shapes.x|join(' ', 1)", "filter join takes at most 1 arguments"),
        ("1|default(2, true)", "filter default takes at most 1 arguments"),
        ("[1]|join(d=' ')", "filter join takes"),
        ("'a'|upper", "filter upper is not in the manifest format"),
        ("1 is odd", "test odd is not in the manifest format"),
        ("4 is divisibleby(2)", "test divisibleby is not in the manifest format"),
        ("1 is number(2)", "test number is not in the manifest format"),
        ("dim(*shapes.x)", "calls with * or **"),
        ("dim(**shapes)", "calls with * or **"),
        ("dim(shapes.x)", "dim: "),
        ("dim(shapes.x, 0, 1)", "dim: "),
        ("dim(shapes.x, axes=0)", "dim: "),
        ("shapes(1)", "shapes is {x, s}, not a function"),
        ("shapes.x[1:2, 0]", "Slice is not in the manifest format"),
    ]
)
def test_the_rest_of_the_format_refuses(text, message):
    with pytest.raises(ExpressionError, match=re.escape(message)):
        value(text)


@refuses(
    [
        ("", "end of"),
        ("1 +", "end of"),
        ("(1", "end of"),
        ("1)", "unexpected"),
        ("1 2", "unexpected"),
        ("1, 2", "unexpected"),
        ("a }} b", "unexpected"),
        ("a = 1", "unexpected"),
        ("a ? b : c", "unexpected '?'"),
        ("a && b", "unexpected '&'"),
        ("'open", "unexpected"),
        ("²", "nvalid character in identifier"),
        ("a!", "unexpected '!'"),
        ("'\\x4'", "truncated"),
        ("9" * 5000, "digits"),
        ("(" * 500 + ")" * 500, "nested too deeply"),
        ("not " * 5000 + "a", "nested too deeply"),
        ("-" * 300 + "1", "nested too deeply"),
        ("1" + "+1" * 300, "nested too deeply"),
    ]
)
def test_what_is_no_expression_is_an_error_when_parsed(text, message):
    with pytest.raises(ExpressionError, match=re.escape(message)):
        parse(text)


def test_long_chains_are_fine():
    assert value(" and ".join(["true"] * 150)) is True
    assert value("+".join(["1"] * 150)) == 150


# --- nothing reaches Python ---------------------------------------------------------------------

DUNDERS = (
    "__class__ __mro__ __subclasses__ __globals__ __builtins__ __init__ __dict__ __doc__ __call__ "
    "__code__ __self__ __func__ __wrapped__ __module__ __getattribute__ __import__"
).split()
METHODS = "format format_map join keys values items get pop update append copy count index".split()
SUBJECTS = (
    "'text'", "()", "[1]", "{'a': 1}", "shapes", "shapes.x", "attrs", "derive", "device",
    "device.features", "device.features.has", "device.limits", "dim", "f16Ok", "total", "1.5",
    "true", "none", "missing", "range", "namespace", "self", "config", "cycler", "lipsum", "dict",
)  # fmt: skip


@pytest.mark.parametrize("subject", SUBJECTS)
def test_no_member_of_a_python_object_can_be_looked_up(subject):
    for name in [*DUNDERS, *METHODS]:
        for text in (f"({subject}).{name}", f"({subject})['{name}']", f"({subject})['{name}'][0]"):
            try:
                found = value(text)
            except ExpressionError:
                continue
            assert found is UNDEFINED, text
        with pytest.raises(ExpressionError):
            value(f"({subject}).{name}()")


@pytest.mark.parametrize(
    "text",
    [
        "().__class__.__base__.__subclasses__()",
        "''.__class__.__mro__[1]",
        "'{0.__class__}'.format(1)",
        "'%(a)s' % attrs",
        "[].append(1)",
        "attrs.update({'axis': 2})",
        "dim.__globals__['__builtins__']",
        "device.features.has.__self__",
        "shapes.x.count(2)",
        "attrs|attr('keys')",
        "shapes|items",
        "'a'|format",
        "shapes.x|map('string')",
        "range(3)",
        "namespace(a=1)",
        "dict(a=1)",
        "self",
        "caller()",
        "has.__call__(attrs, 'axis')",
    ],
)
def test_attempts_to_reach_python_are_errors(text):
    with pytest.raises(ExpressionError):
        value(text)


@evaluates(
    [
        ("pow(10, pow(10, 10))", math.inf),
        ("pow(-10, 309)", -math.inf),
        ("pow(2, 0.5)", 2**0.5),
        ("pow(-8, 0.5)", math.nan),
        ("pow(0, -1)", math.inf),
        ("pow(1, infinity)", math.nan),
        ("pow2ceil(1e308)", math.inf),
        ("numel(fill(9007199254740992, 30))", math.inf),
    ]
)
def test_huge_numbers_stay_doubles(text, expected):
    assert same(value(text), expected)


@refuses(
    [
        ("fill(0, 1e9)", "a length between 0 and 65536"),
        ("reversedAxes(1e9)", "a length between 0 and 65536"),
        ("fill(0, 65536) + [0]", "a list of more than 65536 elements"),
        ("fill('x' ~ 1e20, 65536)|join|length + fill(long, 65536)|join|length", "a text of more"),
    ]
)
def test_memory_is_bounded(text, message):
    with pytest.raises(ExpressionError, match=re.escape(message)):
        value(text, long="x" * 1000)


def test_text_that_doubles_is_bounded():
    names = {"a0": "x" * 1000}
    with pytest.raises(ExpressionError, match="a text of more than"):
        for index in range(40):
            names[f"a{index + 1}"] = value(f"a{index} ~ a{index}", **names)
    assert index == 12


def test_a_message_never_walks_a_huge_value():
    nested = "fill(fill(fill(fill(fill(fill(1, 60000), 60000), 60000), 60000), 60000), 60000)"
    with pytest.raises(ExpressionError) as caught:
        value(f"{nested} < 1")
    shown, _, where = str(caught.value).partition(" in `")
    assert shown == f"cannot compare {'[' * 6}{'1, ' * 23}1,... < 1"
    assert where == f"{nested[:77]}...`"


# --- Expression ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("a + b.c[d]", {"a", "b", "d"}),
        ("f(x, y) | default(z)", {"f", "x", "y", "z"}),
        ("a is defined", set()),
        ("a is not defined or b", {"b"}),
        ("a is defined and a > 1", set()),  # not reached where there is none
        ("a > 1 and b is defined", {"a"}),
        ("a.b is defined", {"a"}),
        ("a is number", {"a"}),
        ("a | default(1)", {"a"}),
        ("{'k': v}.k", {"v"}),
        ("x[a:b:c]", {"x", "a", "b", "c"}),
        ("p if q else r", {"p", "q", "r"}),
        ("1", set()),
    ],
)
def test_names(text, names):
    assert parse(text).names == names


@pytest.mark.parametrize(
    ("text", "reads"),
    [
        ("a + derive.b * derive['c'] + derive.d.e", {"a", "b", "c", "d", "derive"}),
        ("a.derive.b", {"a"}),
        ("a is defined or b is undefined", {"a", "b"}),
        ("derive[a]", {"a", "derive", expressions.EVERY}),
        ("derive.a + numel(derive[b])", {"a", "b", "numel", "derive", expressions.EVERY}),
        ("has(derive, 'a') and derive.b", {"has", "b", "derive", expressions.EVERY}),
    ],
)
def test_what_an_expression_may_read(text, reads):
    assert parse(text).reads == reads


def test_an_expression_is_its_text():
    assert parse("a + 1") is parse("a + 1")
    assert parse("a + 1") != parse("a +  1")
    assert len({parse("a"), parse("b"), parse("a")}) == 2
    assert isinstance(parse("a"), Expression) and parse("a").text == "a"
    assert parse("a").name == "a" and parse("a.b").name is None


def test_conjuncts():
    expression = parse("a and (b or c) and (d and not e) and f == 1")
    assert [each.text for each in expression.conjuncts] == ["a", "b or c", "d", "not e", "f == 1"]
    assert [each.text for each in parse("a or b").conjuncts] == ["a or b"]


@pytest.mark.parametrize(
    ("text", "explained"),
    [
        (
            "dim(shapes.x, 1) * 2 == (attrs.rotary if attrs.rotary != 0 else total)",
            ": 6, expected 24 with shapes.x = [2, 3, 4], attrs.rotary = 0, total = 24",
        ),
        ("total % 5 == 0", ": 4, expected 0 with total = 24"),
        ("shapes.s|length > 0", " with shapes.s = []"),
        ("shapes.x[1] > 3", " with shapes.x = [2, 3, 4]"),
        ("attrs.nothing is defined", " with attrs.nothing = undefined"),
        ("device.features.has('f')", " with device.features.has(\"f\") = false"),
        ("attrs.name == 'mean'", ': "sum", expected "mean" with attrs.name = "sum"'),
        ("unheard_of == 1", ": an error (unknown name unheard_of), expected 1 with unheard_of = an "
         "error (unknown name unheard_of)"),
        ("1 == 2", ": 1, expected 2"),
        ("false", ""),
    ],
)  # fmt: skip
def test_explain(text, explained):
    scope = {**SCOPE, "attrs": {"rotary": 0, "name": "sum"}}
    assert parse(text).explain(scope) == f"`{text}`{explained}"


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("a+b*c", "a + b * c"),
        ("(a+b)*c", "(a + b) * c"),
        ("a-(b-c)", "a - (b - c)"),
        ("(a-b)-c", "a - b - c"),
        ("a*(b/c)", "a * (b / c)"),
        ("a ~ (b + c)", "a ~ (b + c)"),
        ("not (a and b)", "not (a and b)"),
        ("(not a) and b", "not a and b"),
        ("a and b or c", "a and b or c"),
        ("a and (b or c)", "a and (b or c)"),
        ("(a if b else c) if d else e", "(a if b else c) if d else e"),
        ("a if b else (c if d else e)", "a if b else c if d else e"),
        ("(a is defined) if b else c", "(a is defined) if b else c"),
        ("-(a|int)", "-(a|int)"),
        ("-a|int", "-a|int"),
        ("a.b['c'][0]", 'a.b["c"][0]'),
        ("a[1:][::2]", "a[1:][::2]"),
        ("f(a, k=1)", "f(a, k=1)"),
        ("a|join(', ')|length", 'a|join(", ")|length'),
        ("x is not number", "not x is number"),
        ("a not in b", "a not in b"),
        ("a < b <= c", "a < b <= c"),
        ("(1,2)", "[1, 2]"),
        ("{'a': [1.0]}", '{"a": [1]}'),
        ("'it\\'s \"it\"'", '"it\'s \\"it\\""'),
        ("'" + "long " * 30 + "'", '"' + "long " * 30 + '"'),
        ("true or none", "true or none"),
        ("1e999", "1e999"),
        ("1e30", "1e+30"),
    ],
)
def test_source(text, written):
    assert source(parse(text).node) == written
    assert source(parse(written).node) == written


# --- properties: a second evaluator -------------------------------------------------------------
#
# An expression is drawn as a tree: a scalar, or an operator and its operands. Below, every number
# is a Python float, which is what JavaScript's are.

NUMBERS = st.integers(0, 12) | st.sampled_from([0.5, 2.25, 2.0**31, 2.0**53, 1e300])
LEAVES = NUMBERS | st.sampled_from([True, False, None, "", "3", "x", UNDEFINED])
BINARY = ["+", "-", "*", "/", "%", "==", "!=", "<", "<=", ">", ">=", "and", "or"]
TREES = st.recursive(
    LEAVES,
    lambda inner: (
        st.tuples(st.sampled_from(BINARY), inner, inner)
        | st.tuples(st.sampled_from(["not", "neg"]), inner)
        | st.tuples(st.just("if"), inner, inner, inner)
    ),
    max_leaves=12,
)


def text_of(tree):
    match tree:
        case ("not", a):
            return f"(not {text_of(a)})"
        case ("neg", a):
            return f"(-{text_of(a)})"
        case ("if", test, then, other):
            return f"({text_of(then)} if {text_of(test)} else {text_of(other)})"
        case (word, a, b):
            return f"({text_of(a)} {word} {text_of(b)})"
        case values.Undefined():
            return "attrs.nothing"
        case str():
            return f"'{tree}'"
        case True | False | None:
            return str(tree).lower()
    return repr(tree)


class Refused(Exception):
    """What the format does not define."""


def reckon(tree):
    match tree:
        case ("not", a):
            return not as_bool(reckon(a))
        case ("neg", a):
            return -as_number(reckon(a))
        case ("if", test, then, other):
            return reckon(then if as_bool(reckon(test)) else other)
        case ("and" | "or" as word, a, b):
            left = reckon(a)
            return left if as_bool(left) == (word == "or") else reckon(b)
        case ("==" | "!=" as word, a, b):
            return is_equal(reckon(a), reckon(b)) == (word == "==")
        case ("<" | "<=" | ">" | ">=" as word, a, b):
            left, right = reckon(a), reckon(b)
            if {type(left), type(right)} not in ({float}, {str}):
                raise Refused
            compare = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}
            return compare[word](left, right)
        case ("+", a, b):
            left, right = reckon(a), reckon(b)
            if isinstance(left, str) or isinstance(right, str):
                assume(not {type(left), type(right)} & {float})  # the digits have their own tests
                return spelt(left) + spelt(right)
            return as_number(left) + as_number(right)
        case (word, a, b):
            left, right = as_number(reckon(a)), as_number(reckon(b))
            if word == "/":
                return divided(left, right)
            if word == "%":
                return math.nan if right == 0 or math.isinf(left) else math.fmod(left, right)
            return left - right if word == "-" else left * right
    return float(tree) if type(tree) is int else tree


def divided(left, right):
    with np.errstate(all="ignore"):
        return float(np.float64(left) / np.float64(right))


def as_bool(scalar):
    return not (scalar in (None, UNDEFINED, "") or scalar == 0 or scalar != scalar)


def as_number(scalar):
    if type(scalar) is not float:
        raise Refused
    return scalar


def spelt(scalar):
    return {True: "true", False: "false", None: "", UNDEFINED: ""}.get(scalar, scalar)


def is_equal(left, right):
    if None in (left, right) or UNDEFINED in (left, right):
        return left is None and right is None
    if type(left) is type(right):
        return left == right
    numbers = {"": 0.0, "3": 3.0}
    left, right = (
        float(numbers.get(s, math.nan)) if isinstance(s, str) else float(s) for s in (left, right)
    )
    return left == right


def outcome(function, *arguments):
    """What a call gives, its numbers as floats; None of Python's errors may come through."""
    try:
        found = function(*arguments)
    except (ExpressionError, Refused):
        return "refused"
    if isinstance(found, float) and found.is_integer():
        assert function is reckon, f"{found!r} would print with a point"
    number = isinstance(found, int | float) and not isinstance(found, bool)
    # JavaScript tells -0 from 0, and prints both as 0; here there is one 0.
    return float(found) + 0.0 if number else found


@settings(max_examples=200, deadline=None)
@given(TREES)
@example(("/", 1, ("neg", 0)))
def test_evaluation_agrees_with_a_second_evaluator(tree):
    expected = outcome(reckon, tree)
    assume(not negative_zero_decides(tree))
    text = text_of(tree)
    assert same(outcome(value, text), expected)
    # Written with as few parentheses as `source` thinks it needs, it is still the same.
    written = source(parse(text).node)
    assert source(parse(written).node) == written
    assert same(outcome(value, written), expected)


def negative_zero_decides(tree):
    """Whether some division is by a negative zero, of which the format's numbers have none."""
    match tree:
        case ("/", _, b):
            with contextlib.suppress(Refused):
                divisor = reckon(b)
                if divisor == 0 and math.copysign(1, divisor) < 0:
                    return True
    return isinstance(tree, tuple) and any(map(negative_zero_decides, tree[1:]))


# --- properties: any text -----------------------------------------------------------------------

WORDS = st.sampled_from(
    "a shapes.x attrs.nothing total 1 2.5 'x' true none -1 - + * / % ~ == != < <= in not and or "
    "if else is defined number string |int |length |default(1) |join ( ) [ ] { } , : . dim min "
    "dim(shapes.x,1) [0] [1:] [::-1] .b ['b'] {'a':1} () numel f(1) 'a'.b __class__ // **".split()
)


@settings(max_examples=300, deadline=None)
@given(st.lists(WORDS, max_size=12).map(" ".join))
def test_any_text_gives_an_error_or_a_value(text):
    try:
        expression = parse(text)
    except ExpressionError:
        return
    written = source(expression.node)
    assert source(parse(written).node) == written
    assert parse(written).names == expression.names
    found = []
    for each in (expression, parse(written)):
        try:
            found.append(each(SCOPE))
        except ExpressionError as error:
            found.append(str(error))
    assert same(*found) or not all(map(is_value, found)) or found[0] in functions(SCOPE)
    assert all(map(is_value, found)), text
    assert expression.explain(SCOPE)


# --- helpers ------------------------------------------------------------------------------------

SIZES = st.lists(st.integers(0, 5), max_size=5)
AXES = st.integers(-9, 9)


def call(name, *arguments):
    return helpers.HELPERS[name](*arguments)


def test_every_helper_of_the_format_is_there():
    names = (
        "ceil floor min max pow ceilDiv pow2ceil log2ceil numel dim outer inner rows prefix suffix "
        "fill moveAxis permuteShape reversedAxes broadcastShape broadcastable matmulShape "
        "sameShape hasAxis axisValue isUniqueIntList has dtypeBytes onnxDtypeCode pick"
    )
    assert helpers.HELPERS.keys() == set(names.split())


@evaluates(
    [
        ("ceil(1.2)", 2),
        ("ceil(-1.2)", -1),
        ("floor(-1.2)", -2),
        ("floor(infinity)", math.inf),
        ("min(3, 1, 2)", 1),
        ("max(3, 1.5)", 3),
        ("min()", math.inf),
        ("max()", -math.inf),
        ("min(nan, 1)", math.nan),
        ("max(1, nan)", math.nan),
        ("ceilDiv(7, 2)", 4),
        ("ceilDiv(8, 2)", 4),
        ("ceilDiv(-7, 2)", -3),
        ("ceilDiv(1.5, 256)", 1),
        ("ceilDiv(0, 256)", 0),
        ("ceilDiv(1, 0)", math.inf),
        ("pow(2, 10)", 1024),
        ("pow2ceil(0)", 1),
        ("pow2ceil(1)", 1),
        ("pow2ceil(5)", 8),
        ("pow2ceil(8)", 8),
        ("pow2ceil(2.5)", 4),
        ("log2ceil(0)", 0),
        ("log2ceil(1)", 0),
        ("log2ceil(-infinity)", 0),
        ("pow2ceil(-infinity)", 1),
        ("log2ceil(5)", 3),
        ("log2ceil(8)", 3),
        ("numel([])", 1),
        ("numel([2, 0, 3])", 0),
        ("dim([], 3)", UNDEFINED),
        ("outer([], 3)", 1),
        ("inner([], 3)", 1),
        ("rows([], 3)", 1),
        ("prefix([1, 2, 3], 2)", [1, 2]),
        ("prefix([1], 5)", [1]),
        ("suffix([1, 2, 3], 2)", [2, 3]),
        ("suffix([1, 2, 3], 0)", []),
        ("suffix([1], 5)", [1]),
        ("fill(7, 3)", [7, 7, 7]),
        ("fill('a', 0)", []),
        ("reversedAxes(3)", [2, 1, 0]),
        ("sameShape([], [])", True),
        ("sameShape([1], missing)", False),
        ("hasAxis([0, -1], 2, 3)", True),
        ("hasAxis([0, -1], 1, 3)", False),
        ("axisValue([10, 20], [0, -1], 2, 3, 5)", 20),
        ("axisValue([10, 20], [0, -1], 1, 3, 5)", 5),
        ("isUniqueIntList([0, 1, -3], -3, 2)", True),
        ("isUniqueIntList([0, 1, -3], -3, 2, 3)", False),
        ("isUniqueIntList([0, 0], 0, 2)", False),
        ("isUniqueIntList([0, 3], 0, 2)", False),
        ("isUniqueIntList([0.5], 0, 2)", False),
        ("isUniqueIntList([true], 0, 2)", False),
        ("isUniqueIntList('01', 0, 2)", False),
        ("has(attrs, 'axis')", True),
        ("has(attrs, 'keys')", False),
        ("has(attrs, 1)", False),
        ("has(attrs, [1])", False),
        ("has(missing, 'axis')", False),
        ("pick([[false, 1], [0, 2], [3 > 2, 'c']], 4)", "c"),
        ("pick([[false, 1]], 4)", 4),
        ("dtypeBytes('float16')", 2),
        ("dtypeBytes('f16')", 2),
        ("dtypeBytes('int8')", 4),
        ("dtypeBytes('bool')", 4),
        ("dtypeBytes('int64')", 8),
        ("dtypeBytes('vec2<u32>')", 8),
        ("dtypeBytes('vec3<f32>')", 16),
        ("dtypeBytes('vec4<f16>')", 8),
        ("onnxDtypeCode('float32')", 1),
    ]
)
def test_helpers(text, expected):
    assert same(value(text), expected)


@refuses(
    [
        ("ceil('1')", "ceil takes a number"),
        ("min([1, 2])", "min takes a number"),
        ("ceilDiv(true, 2)", "ceilDiv takes a number"),
        ("pow(2, 'a')", "pow takes a number"),
        ("log2ceil(infinity)", "finite"),
        ("numel(7)", "numel takes a list"),
        ("numel([1.5])", "numel takes a whole number"),
        ("numel(missing)", "numel takes a list, got undefined"),
        ("dim(shapes.x, 0.5)", "dim takes a whole number"),
        ("prefix([1], -1)", "prefix"),
        ("permuteShape([2, 3], [0, 0])", "no permutation"),
        ("permuteShape([2, 3], [0])", "no permutation"),
        ("broadcastShape([2, 3], [4])", "[2, 3] and [4] do not broadcast"),
        ("matmulShape([2, 3], [4, 5])", "[2, 3] and [4, 5] do not fit"),
        ("matmulShape([], [4])", "a scalar has no matrix product"),
        ("pick([1], 2)", "takes a list"),
        ("pick([[1]], 2)", "pairs of condition and value"),
        ("isUniqueIntList([1], 'a', 2)", "takes a number"),
        ("dtypeBytes('float8')", "is no data type"),
        ("dtypeBytes([1])", "no data type"),
        ("dtypeBytes('vec2<vec2<u32>>')", "is no data type"),
        ("onnxDtypeCode('float')", "is no ONNX data type"),
        ("onnxDtypeCode([1])", "takes a string"),
    ]
)
def test_helpers_refuse(text, message):
    with pytest.raises(ExpressionError, match=re.escape(message)):
        value(text)


@given(SIZES, AXES)
def test_shape_helpers_are_numpy_s(shape, axis):
    assert call("numel", shape) == int(np.prod(shape, dtype=int))
    assert call("reversedAxes", len(shape)) == list(range(len(shape)))[::-1]
    assume(shape)
    at = axis % len(shape)
    assert call("dim", shape, axis) == shape[at]
    assert call("outer", shape, axis) == int(np.prod(shape[:at], dtype=int))
    assert call("inner", shape, axis) == int(np.prod(shape[at + 1 :], dtype=int))
    assert call("rows", shape, axis) == int(np.prod(np.delete(shape, at), dtype=int))
    assert call("hasAxis", [axis], at, len(shape))


@given(SIZES, st.randoms(), AXES, AXES)
def test_moved_and_permuted_axes_are_numpy_s(shape, random, first, second):
    array = np.empty(shape)
    order = random.sample(range(len(shape)), len(shape))
    assert tuple(call("permuteShape", shape, order)) == array.transpose(order).shape
    assume(shape)
    first, second = first % len(shape), second % len(shape)
    assert tuple(call("moveAxis", shape, first, second)) == np.moveaxis(array, first, second).shape
    again = call("moveAxis", shape, first - len(shape), second - len(shape))
    assert tuple(again) == np.moveaxis(array, first, second).shape


@given(SIZES, SIZES)
def test_broadcasting_is_numpy_s(a, b):
    try:
        expected = np.broadcast_shapes(tuple(a), tuple(b))
    except ValueError:
        with pytest.raises(ExpressionError, match="do not broadcast"):
            call("broadcastShape", a, b)
        assert not call("broadcastable", a, b)
        return
    assert tuple(call("broadcastShape", a, b)) == expected
    assert call("broadcastable", a, b) == (expected == tuple(b))


@given(st.lists(st.integers(0, 3), min_size=1, max_size=4), st.lists(st.integers(0, 3), max_size=4))
def test_matrix_products_are_numpy_s(a, b):
    assume(b)
    try:
        expected = (np.zeros(a) @ np.zeros(b)).shape
    except ValueError:
        with pytest.raises(ExpressionError):
            call("matmulShape", a, b)
        return
    assert tuple(call("matmulShape", a, b)) == expected


@given(st.integers(-5, 2**53))
def test_powers_of_two(n):
    power, exponent = call("pow2ceil", n), call("log2ceil", n)
    assert power == 2**exponent >= n
    assert power == 1 or power // 2 < n


@pytest.mark.parametrize("name", dtypes.TABLE)
def test_dtype_bytes_are_those_of_storage(name):
    row = dtypes.TABLE[name]
    assert call("dtypeBytes", name) == call("dtypeBytes", row.wgsl) == row.storage.itemsize


def test_onnx_codes_are_onnx_s():
    names = "float32 uint8 int8 uint16 int16 int32 int64 string bool float16 float64 uint32 uint64"
    for code, name in enumerate(names.split(), start=1):
        assert call("onnxDtypeCode", name) == code
    assert call("onnxDtypeCode", "bfloat16") == 16


ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**6), 10**6)
    | st.sampled_from([0.5, -1.5, int(1e300), math.inf, math.nan, UNDEFINED, "", "f32", "x"]),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from("ab"), inner, max_size=2)
    ),
    max_leaves=6,
)
ARITY = {"axisValue": 5, "isUniqueIntList": 4, "moveAxis": 3}


@settings(max_examples=40, deadline=None)
@pytest.mark.parametrize("name", helpers.HELPERS)
@given(data=st.data())
def test_helpers_are_total(name, data):
    likely = SIZES | st.integers(-3, 9) | ANYTHING
    arguments = data.draw(st.lists(likely, min_size=1, max_size=ARITY.get(name, 2)))
    try:
        found = parse(f"{name}({', '.join('abcde'[: len(arguments)])})")(
            {**SCOPE, **dict(zip("abcde", arguments, strict=False))}
        )
    except ExpressionError:
        return
    assert is_value(found)
    assert not (isinstance(found, float) and found.is_integer())


@given(ANYTHING, ANYTHING)
def test_operators_are_total(a, b):
    for word in ("+", "-", "*", "/", "%", "==", "<", "in", "~", "and"):
        try:
            assert is_value(value(f"a {word} b", a=a, b=b))
        except ExpressionError as error:
            assert len(str(error)) < 250
    for text in ("a[b]", "a|int", "a|length", "a|join(b)", "a|default(b)", "a[b:]", "not a", "-a"):
        try:
            assert is_value(value(text, a=a, b=b))
        except ExpressionError as error:
            assert len(str(error)) < 250


def test_a_deep_value_is_shown():
    deep = list(itertools.accumulate(range(300), lambda inner, _: [inner], initial=[]))[-1]
    assert values.show(deep) == "[" * 77 + "..."
