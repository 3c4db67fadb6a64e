"""Uniform structs: the exact value of each field, and the bytes of all.

Every field takes 4 bytes, in order; a struct is padded to whole rows of four, and has at least one.
"""

import math
import struct
from collections.abc import Callable, Mapping, Sequence
from itertools import count, islice
from typing import Any

from jax_webgpu.errors import ExpressionError
from jax_webgpu.expressions import Evaluator, Expression
from jax_webgpu.spec import StructField, evaluate, whole
from jax_webgpu.values import METER, UNDEFINED, is_number, show

Field = tuple[str, str, Any]
"""Name, WGSL type and value."""

_RANGES = {"u32": (0, 2**32 - 1), "i32": (-(2**31), 2**31 - 1)}
_FORMATS = {"u32": "I", "i32": "i", "f32": "f"}


def field(declared: StructField, names: Mapping[str, Any], args: Mapping[str, Any]) -> Field:
    """A field with its value: its own, else that of the arg of its name, else the default.

    Raises:
      ExpressionError: the value is not one that the type holds exactly; f32 alone is rounded.
    """
    value: Any = UNDEFINED
    if declared.value is not None:
        value = evaluate(declared.value, names)
    elif declared.name in args:
        value = args[declared.name]
    return _exact(declared, value)


def _exact(declared: StructField, value: Any) -> Field:
    name, type_ = declared.name, declared.type
    if value.__class__ is int and type_ != "f32" and 0 <= value < 2**31:
        return name, type_, value  # as nearly all are
    if value is UNDEFINED:
        value = declared.default
    if value is UNDEFINED and not declared.required:
        value = 0
    if value.__class__ is bool:
        value = int(value)
    if not is_number(value):
        raise ExpressionError(f"the field {name} comes out as {show(value)}")
    if type_ == "f32":
        if math.isnan(value):
            raise ExpressionError(f"the field {name} comes out as NaN")
        return name, type_, float(value)
    low, high = _RANGES[type_]
    exact = whole(value)
    if exact is None or not low <= exact <= high:
        raise ExpressionError(
            f"the field {name} comes out as {show(value)}; expected a whole number from {low} to "
            f"{high} ({type_})"
        )
    return name, type_, exact


class Struct:
    """A uniform struct that is filled again and again, where only some fields differ.

    Args:
      declared: its fields.
      differs: whether one may have another value in other names.
      names: the scope of what does not differ.
      args: the call's.
    """

    def __init__(
        self,
        declared: Sequence[StructField],
        differs: Callable[[StructField], bool],
        names: Mapping[str, Any],
        args: Mapping[str, Any],
    ):
        self.cost = len(declared)
        """What filling it counts as."""
        self.again = list[tuple[int, StructField, Evaluator]]()
        self.fields = list[Field]()
        for at, each in enumerate(declared):
            if isinstance(each.value, Expression) and differs(each):
                self.again.append((at, each, each.value.evaluator))
                self.cost += each.value.size
            self.fields.append(field(each, names, args))
        missing = -len(declared) % 4 if declared else 4
        taken = {each.name for each in declared}
        spare = (name for index in count() if (name := f"_pad{index}") not in taken)
        self.fields += [(name, "u32", 0) for name in islice(spare, missing)]
        self.layout = struct.Struct("<" + "".join(_FORMATS[type_] for _, type_, _ in self.fields))

    def filled(self, names: Mapping[str, Any]) -> tuple[tuple[Field, ...], bytes]:
        """The fields with their values in these names, padding included, and the bytes of all."""
        fields = self.fields
        names[METER].spend(self.cost)
        for at, each, value in self.again:
            fields[at] = _exact(each, value(names))
        try:
            return tuple(fields), self.layout.pack(*[value for _, _, value in fields])
        except OverflowError:
            name, value = next((n, v) for n, type_, v in fields if type_ == "f32" and not _fits(v))
            raise ExpressionError(f"the field {name} comes out as {value}, beyond f32") from None


def _fits(value: float) -> bool:
    try:
        struct.pack("<f", value)
    except OverflowError:
        return False
    return True
