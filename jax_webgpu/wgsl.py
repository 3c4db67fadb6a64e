"""WGSL as text: what can be told of it without compiling it.

Source: https://www.w3.org/TR/WGSL/. Every function takes time in proportion to its text, whatever
stands in it.
"""

import re

# Comments: a line's end is any of WGSL's line breaks, and block comments nest.
_OPENING = re.compile(r"//|/\*")
_LINE_END = re.compile("[\n\v\f\r\u0085\u2028\u2029]")
_BLOCK = re.compile(r"/\*|\*/")

# What uses f16: the type, its predeclared aliases (`vec4h`), and a literal's suffix (`0.5h`). One
# of them ends at each of these places, and has no more than so many characters.
_F16_END = re.compile(r"(?:f16|h)\b(?!\.)")
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
    ends = (found.end() for found in _F16_END.finditer(text))
    if not any(_F16.search(text, max(0, end - _LONGEST), end) for end in ends):
        return False
    start = 0
    while directive := _DIRECTIVE.match(text, start):
        start = directive.end()
        if directive[1] == "enable" and "f16" in re.split(r"[\s,]+", directive[2]):
            return False
    return True


def workgroup_size(text: str) -> list[int]:
    """The numbers of `@workgroup_size` in code without comments; none where it has expressions."""
    found = _WORKGROUP.search(text)
    sizes = re.findall(r"\d+", found[1]) if found else []
    return [int(size) if len(size) < 20 else 2**64 for size in sizes]
