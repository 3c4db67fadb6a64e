"""Templates: of statements that Jinja itself runs in the same way, and any text at all."""

import functools
from typing import Any

import jinja2
from hypothesis import strategies as st

from fuzz import corpus, grammar
from fuzz.expressions import SCOPE
from fuzz.targets import RIGHT, Target, Wrong
from jax_webgpu.errors import ExpressionError
from jax_webgpu.templates import parse

DATA = st.sampled_from(
    ["let i = gid.x;\n", "  ", "\n", "\n\n", "x", "}\n", " \t", "// é\n", "{ ", "%", "#", "a\r\nb"]
)
NAMES = ("a", "b", "c")


def _expression(draw: Any, names: tuple[str, ...], depth: int = 2) -> str:
    """Of whole numbers, which Jinja and the format have alike."""
    if depth == 0 or draw(st.integers(0, 2)) == 0:
        return draw(st.sampled_from([*names, "0", "1", "2", "7", "n"]))
    left, right = (_expression(draw, names, depth - 1) for _ in range(2))
    if draw(st.integers(0, 5)) == 0:
        test = f"{left} {draw(st.sampled_from(['<', '==', '>=', '!=']))} {right}"
        return f"({left} if {test} else {right})"
    return f"({left} {draw(st.sampled_from('+-*'))} {right})"


def _condition(draw: Any, names: tuple[str, ...]) -> str:
    left, right = (_expression(draw, names, 1) for _ in range(2))
    word = draw(st.sampled_from(["<", "==", ">=", "!=", "and", "or"]))
    return draw(st.sampled_from([f"{left} {word} {right}", f"not {left} {word} {right}"]))


def _tag(draw: Any, text: str) -> str:
    """A statement's tag, which may take the white space around it along."""
    left, right = draw(st.sampled_from(["", "", "-", "+"])), draw(st.sampled_from(["", "", "-"]))
    return f"{{%{left} {text} {right}%}}"


def _body(draw: Any, names: tuple[str, ...], depth: int, macros: tuple[str, ...]) -> str:
    parts = []
    for _ in range(draw(st.integers(0, 4))):
        match draw(st.integers(0, 11 if depth else 5)):
            case 0 | 1:
                parts.append(draw(DATA))
            case 2 | 3:
                sign = draw(st.sampled_from(["", "-"]))
                parts.append(f"{{{{{sign} {_expression(draw, names)} {sign}}}}}")
            case 4:
                name = draw(st.sampled_from(NAMES))
                parts.append(_tag(draw, f"set {name} = {_expression(draw, names)}"))
            case 5:
                raw = _tag(draw, "raw") + "{{ a }}\n" + _tag(draw, "endraw")
                parts.append(draw(st.sampled_from(["{# a {{ b }} #}", "{#- a -#}\n", raw])))
            case 6 | 7:
                parts.append(_tag(draw, f"if {_condition(draw, names)}"))
                parts.append(_body(draw, names, depth - 1, macros))
                if draw(st.booleans()):
                    parts.append(_tag(draw, f"elif {_condition(draw, names)}"))
                    parts.append(_body(draw, names, depth - 1, macros))
                if draw(st.booleans()):
                    parts.append(_tag(draw, "else") + _body(draw, names, depth - 1, macros))
                parts.append(_tag(draw, "endif"))
            case 8 | 9:
                name = draw(st.sampled_from(["i", "j"]))
                each = draw(st.sampled_from(["range(3)", "range(0)", "range(5, 1, -2)", "[4, 1]"]))
                chosen = draw(st.sampled_from(["", f" if {name} > 1"]))
                inside = (*names, name, "loop.index", "loop.index0", "loop.length", "loop.revindex")
                parts.append(_tag(draw, f"for {name} in {each}{chosen}"))
                parts.append(_body(draw, inside, depth - 1, macros))
                if draw(st.booleans()):
                    parts.append("{{ ',' if not loop.last }}")
                if draw(st.booleans()):
                    parts.append(_tag(draw, "else") + _body(draw, names, depth - 1, macros))
                parts.append(_tag(draw, "endfor"))
            case 10:
                parts.append(_tag(draw, f"set ns.k = {_expression(draw, names)}") + "{{ ns.k }}")
            case 11:
                name = draw(st.sampled_from(macros))
                given = _expression(draw, names)
                how = draw(st.sampled_from([given, "", f"p={given}", f"{given}, q={given}"]))
                parts.append(f"{{{{ {name}({how}) }}}}")
    return "".join(parts)


@st.composite
def programs(draw: Any) -> str:
    """Macros, a namespace and statements."""
    start = "".join(
        f"{{% macro {name}(p, q=2) %}}{_body(draw, ('p', 'q'), 1, ('m0',))}{{% endmacro %}}"
        for name in ("m1", "m2")
    )
    first = "{% macro m0(p=1, q=3) %}<{{ p }}|{{ q }}>{% endmacro %}"
    names = draw(st.sampled_from([("n",), ("n", "a"), ("n", "a", "b", "missing")]))
    start += "{% set ns = namespace(k=1) %}{% set a = 3 %}"
    return first + start + _body(draw, names, 3, ("m0", "m1", "m2"))


@functools.cache
def _known() -> list[str]:
    """The templates of all folders here."""
    found = {data for seed in corpus.seeds().values() for data in seed.templates.values()}
    return sorted(data.decode() for data in found)


@st.composite
def inputs(draw: Any) -> Any:
    match draw(st.integers(0, 3)):
        case 0 | 1:
            return "program", draw(programs())
        case 2:
            return "text", draw(st.sampled_from(_known()).flatmap(grammar.mangled))
    tags = st.sampled_from(
        "{{ }} {% %} {%- -%} {# #} if(n) for in endfor endif else set macro endmacro call caller() "
        "endcall filter block extends include import with endwith raw endraw recursive loop(n) "
        "range(9) range(70000) namespace(k=1) ns.k = do autoescape trans break continue "
        "loop.cycle(1,2) self.x super() varargs kwargs".split()
    )
    words = st.lists(tags | grammar.TOKENS | DATA, max_size=14).map(" ".join)
    return "text", draw(words | programs().flatmap(grammar.mangled))


_JINJA = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)


def run(value: Any) -> str:
    kind, text = value
    found = _rendered(text)
    if kind != "program":
        return "rendered" if isinstance(found, str) else "ExpressionError"
    try:
        wanted: Any = _JINJA.from_string(text).render(n=7)
    except jinja2.TemplateError as error:
        wanted = error
    if isinstance(wanted, str) != isinstance(found, str):
        raise Wrong(f"{found!r}, expected {wanted!r}")
    if isinstance(wanted, str) and found != wanted:
        raise Wrong(f"{found!r}, expected {wanted!r}")
    return RIGHT if isinstance(wanted, str) else "ExpressionError"


def _rendered(text: str) -> Any:
    """The text, or the error, which must name template and line."""
    try:
        template = parse("t", text)
        found = template.render({**SCOPE, "n": 7, "env": {"wgsl": {"resourceDeclarations": ""}}})
    except ExpressionError as error:
        if not str(error).startswith("t:"):
            raise Wrong(f"names no line: {error}") from error
        return error
    if not isinstance(found, str):
        raise Wrong(f"{found!r} is no text")
    return found


TARGET = Target("templates", 8, inputs, run)
