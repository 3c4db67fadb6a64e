"""WGSL as text: what can be told of it without compiling it.

Source: https://www.w3.org/TR/WGSL/. Every function takes time in proportion to its text, whatever
stands in it.
"""

import re

# Comments: a line's end is any of WGSL's line breaks, and block comments nest.
_OPENING = re.compile(r"/[/*]")
_LINE_END = re.compile("[\n\v\f\r\u0085\u2028\u2029]")
_BLOCK = re.compile(r"/\*|\*/")

# What uses f16: the type, its predeclared aliases (`vec4h`), and a literal's suffix (`0.5h`). One
# of them ends at each of these places, and has no more than so many characters. A pattern that
# begins with a letter is found several times as fast as one that begins with either of two.
_F16_ENDS = (re.compile(r"f16\b(?!\.)"), re.compile(r"h\b(?!\.)"))
_F16 = re.compile(r"(?<![\w.])(?:f16|vec[234]h|mat[234]x[234]h|[\d.][\w.]*h)$")
_LONGEST = 40

_DIRECTIVE = re.compile(r"\s*(enable|requires|diagnostic)\b([^;]*);")
_WORKGROUP = re.compile(r"@\s*workgroup_size\s*\(([\d\s,iu]*)\)")


def code(text: str) -> str:
    """The text with a space in place of each comment; one without an end goes to the last line."""
    parts, start = [], 0
    while opening := _OPENING.search(text, start):
        parts += [text[start : opening.start()], " "]
        start = opening.end()
        if opening[0] == "//":
            end = _LINE_END.search(text, start)
            start = end.start() if end else len(text)
            continue
        depth = 1
        while depth:
            mark = _BLOCK.search(text, start)
            if mark is None:
                return "".join(parts)
            depth += 1 if mark[0] == "/*" else -1
            start = mark.end()
    return "".join([*parts, text[start:]])


def lacks_f16(text: str) -> bool:
    """Whether code, without comments, uses `f16` and does not enable it."""
    ends = (found.end() for pattern in _F16_ENDS for found in pattern.finditer(text))
    uses = any(_F16.search(text, max(0, end - _LONGEST), end) for end in ends)
    return uses and not enables_f16(text)


def enables_f16(text: str) -> bool:
    """Whether code, without comments, enables `f16`."""
    start = 0
    while directive := _DIRECTIVE.match(text, start):
        start = directive.end()
        if directive[1] == "enable" and "f16" in re.split(r"[\s,]+", directive[2]):
            return True
    return False


def workgroup_size(text: str) -> list[int]:
    """The numbers of `@workgroup_size` in code without comments; none where it has expressions."""
    found = _WORKGROUP.search(text)
    sizes = re.findall(r"\d+", found[1]) if found else []
    return [int(size) if len(size) < 20 else 2**64 for size in sizes]


# ---- what a compiler refuses ---------------------------------------------------------------------

# In the words of naga, wgpu's compiler: a sentence, and the place of what it is about.
_SENTENCE = re.compile(r"^Shader (?:'.*' )?[a-z ]*error: (.*)$", re.MULTILINE)
_PLACE = re.compile(r"┌─ .*:(\d+):\d+$", re.MULTILINE)

# What a template does not print as it stands.
_MARKUP = re.compile(r"\{\{.*?\}\}|\{%.*?%\}|\{#.*?#\}")

# So many lines of the code stand around the one that an error is about.
AROUND = 5


def is_refusal(words: str) -> bool:
    """Whether a compiler's words are about the text, and not about the device."""
    return _SENTENCE.search(words) is not None


def refusal(template: str, source: str, text: str, words: str) -> str:
    """Why a compiler refuses code, its sentence last.

    Args:
      template: the file that the code was rendered from.
      source: its text.
      text: the code.
      words: the compiler's own, of which `is_refusal` is true.
    """
    found, place = _SENTENCE.search(words), _PLACE.search(words)
    more = [line for line in words[found.end() if found else 0 :].splitlines() if line.strip(" │")]
    reasons = [line.strip(" =") for line in more if line.lstrip().startswith("= ")]
    more = [line for line in more if line.strip(" =") not in reasons]
    sentence = ": ".join([found[1] if found else "", *reasons])
    if place is None:
        return "\n".join([*more, f"the WGSL of {template}: {sentence}"])
    lines = text.splitlines()
    at = min(int(place[1]), len(lines))
    first = max(1, at - AROUND)
    shown = [
        f"{'>' if number == at else ' '}{number:5} | {line}"
        for number, line in enumerate(lines[first - 1 : at + AROUND], first)
    ]
    origin = _origin(source, lines[at - 1])
    where = f"{template}:{origin} (line {at} of the WGSL)"
    if origin is None:
        where = f"{template}, line {at} of the WGSL"
    return "\n".join([*shown, *more, f"{where}: {sentence}"])


def _origin(source: str, line: str) -> int | None:
    """The line of a template that a line of code comes from, if only one can have made it."""
    made = [
        number
        for number, each in enumerate(source.splitlines(), 1)
        if any(parts := [part.strip() for part in _MARKUP.split(each)])
        and _may_print(parts, line.strip())
    ]
    return made[0] if len(made) == 1 else None


def _may_print(parts: list[str], line: str) -> bool:
    """Whether a line is these texts in order, with anything between them."""
    first, *between = parts
    if not between:
        return line == first
    last, at = between.pop(), len(first)
    for part in between:
        found = line.find(part, at)
        if found < 0:
            return False
        at = found + len(part)
    return line.startswith(first) and line.endswith(last) and at + len(last) <= len(line)
