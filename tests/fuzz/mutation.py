"""Changes of JSON documents, as literals: a place by its number, and what happens there."""

import copy
import functools
import random
import re
from collections.abc import Iterable, Iterator
from typing import Any

from hypothesis import strategies as st

from fuzz import grammar, javascript

Change = tuple[str, int, Any]

KINDS = (
    *("tweak", "tweak", "tweak", "tweak", "text", "number", "number", "value", "copy", "swap"),
    *("drop", "rename", "twice", "wrap", "add"),
)

KEYS = (
    "name domain inputs outputs args attributes attributeConstraints typeConstraints tunables "
    "derive when requires bindings variants onnx conformance $schema $comment description dtype "
    "rank optional layout shape storage narrowing kind required oneOf default values features "
    "limits subgroupMinSize subgroupMatrixConfigs id priority demoteWhen supersededBy "
    "intermediates passes zeroInit shader dispatch x y z threads workgroupSize workgroups repeat "
    "count index viewAlias input output submitAfter profile buffer arg scratch elementType length "
    "structName struct type value internal float32 float16 int64 bool data values tolerance "
    "allowNaN cases fixtureArrays skipGpu provenance digest files algorithm sha256 path __class__"
).split()
VALUES = (
    None, True, False, 0, 1, -1, 2, 0.5, -0.5, 4, 255, 65535, 65536, 2**31, 2**32, 2**53, 2**63,
    1e308, -1e308, 10**400, "", "0", "1", "T", "x", "y", "f32", "vec4<f32>", "u32", "i32", "bool",
    "float16", "int64", "$T", "$", "array<f32,4>", "atomic<u32>", "uniform", "storage",
    "read-only-storage", "checked", "1/0", "shapes.x", "[]", "{}", "none", "true", "é", "\u2028",
    "a" * 300, "main", "gid", "params", "\x00", "../x", "/etc/passwd", "x.wgsl.jinja", [], {}, [0],
    [[]], [None], {"a": 1}, [1, 2, 3], ["x"], {"default": 1}, {"x": 1}, {"value": 1},
    {"dtype": "float32"}, {"$ref": "#/fixtureArrays/a"}, {"kind": "values", "values": [1]},
)  # fmt: skip


def changes(most: int = 3) -> st.SearchStrategy[list[Change]]:
    """A few changes of any document."""
    whole = grammar.WHOLE.map(javascript.text_of)
    value = st.sampled_from(VALUES) | grammar.TEXTS | whole | st.sampled_from(KEYS)
    change = st.tuples(st.sampled_from(KINDS), st.integers(0, 10_000), value)
    return st.lists(change, min_size=1, max_size=1) | st.lists(change, min_size=1, max_size=most)


def random_changes(generator: random.Random) -> list[Change]:
    """The same without Hypothesis."""
    return [
        (
            generator.choice(KINDS),
            generator.randrange(10_000),
            generator.choice([generator.choice(VALUES), generator.choice(grammar.WORDS)]),
        )
        for _ in range(generator.randint(1, 3))
    ]


def apply(document: Any, wanted: Iterable[Change]) -> Any:
    """A copy of a document with changes."""
    root = [copy.deepcopy(document)]
    for kind, at, value in wanted:
        places = list(_places(root))
        holder, key = places[at % len(places)]
        other_holder, other_key = places[(at * 7919 + 13) % len(places)]
        other = copy.deepcopy(other_holder[other_key])
        own = holder[key]
        tweaked = [(h, k) for h, k in places if isinstance(h[k], str) and _TOKEN.search(h[k])]
        match kind:
            case "drop" if holder is not root:
                del holder[key]
            case "value" | "drop":
                holder[key] = copy.deepcopy(value)
            case "tweak" if tweaked:
                at_text = tweaked[at % len(tweaked)]
                at_text[0][at_text[1]] = _tweaked(at_text[0][at_text[1]], at)
            case "text" if isinstance(own, str):
                holder[key] = _edited(own, at, value)
            case "rename" if isinstance(holder, dict):
                named = value if isinstance(value, str) else KEYS[at % len(KEYS)]
                items = [(named if each == key else each, holder[each]) for each in holder]
                holder.clear()
                holder.update(items)
            case "copy":
                holder[key] = other
            case "swap":
                holder[key] = other
                if other_holder.__class__ is list and other_key < len(other_holder):
                    other_holder[other_key] = copy.deepcopy(own)
            case "twice" if isinstance(holder, list) and holder is not root:
                holder.insert(key, copy.deepcopy(own))
            case "wrap":
                holder[key] = [own] if at % 2 else {"a": own}
            case "number" if isinstance(own, int | float):
                holder[key] = _scaled(own, at)
            case "add" if isinstance(own, dict):
                own[KEYS[at % len(KEYS)]] = copy.deepcopy(value)
            case "add" if isinstance(own, list):
                own.append(copy.deepcopy(value))
            case _:
                holder[key] = copy.deepcopy(value)
    return root[0]


def _places(holder: Any) -> Iterator[tuple[Any, Any]]:
    """Each value of a document as what holds it and the key there; the document's own first."""
    for key in list(holder) if isinstance(holder, dict) else range(len(holder)):
        yield holder, key
        if isinstance(holder[key], dict | list):
            yield from _places(holder[key])


def _edited(text: str, at: int, value: Any) -> str:
    """A text with another between two of its characters, or in place of one of its words."""
    put = value if isinstance(value, str) else str(value)[:40]
    words = text.split(" ")
    if at % 2 and len(words) > 1:
        words[at // 2 % len(words)] = put
        return " ".join(words)
    place = at // 2 % (len(text) + 1)
    return text[:place] + put + text[place:]


# Of one kind each: what stands for another leaves an expression what it is.
_ALIKE = (
    ("0", "1", "2", "3", "4", "64", "255", "65535", "65536", "4294967296"),
    ("+", "-", "*", "/", "%"),
    ("<", "<=", ">", ">=", "==", "!="),
    ("min", "max", "ceilDiv", "pow"),
    ("floor", "ceil", "pow2ceil", "log2ceil"),
    ("numel", "dim", "outer", "inner", "rows"),
    ("and", "or"),
    ("true", "false", "none"),
    ("x", "y", "a", "b", "input", "y0", "weight", "cos"),
    ("shapes", "ranks", "present", "dtypes", "tensorDtypes", "attrs", "args", "tunables"),
)
_ALIKE_BY_WORD = {word: words for words in _ALIKE for word in words}
_TOKEN = re.compile(
    "|".join(
        re.escape(w) if not w.isalnum() else rf"\b{w}\b"
        for w in sorted(_ALIKE_BY_WORD, key=len, reverse=True)
    )
)


def _tweaked(text: str, at: int) -> str:
    """A text with one of its words in place of another of the kind."""
    found = list(_TOKEN.finditer(text))
    one = found[at // 3 % len(found)]
    words = _ALIKE_BY_WORD[one[0]]
    return text[: one.start()] + words[at // 7 % len(words)] + text[one.end() :]


def _scaled(number: float, at: int) -> float:
    return [number + 1, number - 1, -number, number * 2, number + 0.5, number * 2**31][at % 6]


@functools.cache
def dictionary() -> list[str]:
    """Words for a mutator of bytes."""
    words = {*KEYS, *(word for word in grammar.WORDS if word.isascii() and word.isprintable())}
    return sorted({*words, *(v for v in VALUES if isinstance(v, str) and v.isascii())})
