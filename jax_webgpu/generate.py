"""WGSL for what stands between operators: movement of data, conversions, elementwise arithmetic.

A `Step` says what one array is made of. `kernels` makes one dispatch for each array that must be in
memory, and computes what is between in registers. Every array is bound as 32-bit words, and data
that is only moved is never given a float type, so that it keeps its bits. 16-bit floats lie two to
a word; they are converted by integer arithmetic, rounded to nearest even, and computed with in
float32: no feature of the device is needed. Each step can also be evaluated by NumPy.
"""

import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jax_webgpu import dtypes
from jax_webgpu.capabilities import Capabilities
from jax_webgpu.plan import Bound, Buffer, PassPlan, declarations, folded
from jax_webgpu.resolve import DISPATCH_FOLD_WIDTH, Tensor

# Sizes of the dtypes that a kernel can read and write. The others have no arithmetic here.
BYTES = {"float32": 4, "int32": 4, "uint32": 4, "float16": 2, "bfloat16": 2}
# Arrays that one kernel reads at most: WebGPU's floor has 8 storage buffers a stage.
MOST_READ = 7
# Elements of an array, so that no index overflows.
MOST_ELEMENTS = 2**31
_WORKGROUP = 256
# Steps that follow each other in one kernel.
_DEEPEST = 64

_FLOATS = ("float32", "float16", "bfloat16")
_INTEGERS = ("int32", "uint32")


@dataclass(frozen=True)
class Constant:
    """A scalar in place of an array."""

    value: int | float
    dtype: str


@dataclass(frozen=True)
class Step:
    """One array, made of others.

    Attributes:
      name: of the operation: a key of `ARITHMETIC` or of `MOVEMENT`.
      operands: numbers of arrays, or constants.
      result: the number of the array that it makes.
      parameters: as the operation takes them.
    """

    name: str
    operands: tuple[int | Constant, ...]
    result: int
    parameters: tuple[Any, ...] = ()

    @property
    def arrays(self) -> tuple[int, ...]:
        return tuple(operand for operand in self.operands if isinstance(operand, int))


@dataclass(frozen=True)
class Arithmetic:
    """An elementwise operation: its WGSL, with `{0}` for the first operand, and NumPy's."""

    wgsl: str
    numpy: Callable[..., Any]
    dtypes: tuple[str, ...] = _FLOATS


def _power(x: Any, exponent: int) -> Any:
    power = np.multiply.reduce([x] * abs(exponent))
    return power if exponent > 0 else 1 / power


_EVERY = _FLOATS + _INTEGERS
ARITHMETIC = {
    "add": Arithmetic("{0} + {1}", np.add, _EVERY),
    "sub": Arithmetic("{0} - {1}", np.subtract, _EVERY),
    "mul": Arithmetic("{0} * {1}", np.multiply, _EVERY),
    "div": Arithmetic("{0} / {1}", np.divide),
    "max": Arithmetic("larger({0}, {1})", np.maximum),
    "min": Arithmetic("smaller({0}, {1})", np.minimum),
    "sqrt": Arithmetic("sqrt({0})", np.sqrt),
    "rsqrt": Arithmetic("inverseSqrt({0})", lambda x: 1 / np.sqrt(x)),
    "exp": Arithmetic("exp({0})", np.exp),
    "log": Arithmetic("log({0})", np.log),
    "logistic": Arithmetic("1.0 / (1.0 + exp(-max({0}, -88.0)))", lambda x: 1 / (1 + np.exp(-x))),
    "square": Arithmetic("{0} * {0}", np.square, _EVERY),
}
# Of the bits alone, which a NaN keeps.
_SIGN = {"neg": ("{0} ^ {1}", np.negative), "abs": ("{0} & ~{1}", np.abs)}


def supports(step: Step, tensors: Mapping[int, Tensor] | Sequence[Tensor]) -> bool:
    """Whether a kernel can be made for a step, whatever stands around it."""
    result = tensors[step.result]
    known = [tensors[array] for array in step.arrays] + [result]
    sources = [tensors[array].dtype for array in step.arrays]
    if any(tensor.dtype not in BYTES for tensor in known):
        return False
    if any(not 0 < math.prod(tensor.shape) < MOST_ELEMENTS for tensor in known):
        return False
    for operand in step.operands:
        if isinstance(operand, Constant):
            if operand.dtype not in BYTES or not math.isfinite(operand.value):
                return False
            sources.append(operand.dtype)
    if step.name in ARITHMETIC:
        return result.dtype in ARITHMETIC[step.name].dtypes
    if step.name in _SIGN:
        return result.dtype in _FLOATS
    if step.name == "integer_pow":
        return result.dtype in _FLOATS and 1 <= abs(step.parameters[0]) <= 8
    if step.name == "convert":
        return result.dtype in _FLOATS or sources[0] in _INTEGERS
    return step.name in MOVEMENT and len(set(step.arrays)) <= MOST_READ


# ---- NumPy --------------------------------------------------------------------------------------


def evaluate(step: Step, operands: Sequence[np.ndarray], result: Tensor) -> np.ndarray:
    """The array of a step, by NumPy: 16-bit floats as the kernels compute with them."""
    if step.name in MOVEMENT:
        return np.asarray(MOVEMENT[step.name](operands, result.shape, *step.parameters))
    with np.errstate(all="ignore"):
        wide = [np.asarray(x, np.float32) if x.dtype.itemsize == 2 else x for x in operands]
        if step.name == "convert":
            made = wide[0]
        elif step.name == "integer_pow":
            made = _power(wide[0], *step.parameters)
        elif step.name in _SIGN:
            made = _SIGN[step.name][1](wide[0])
        else:
            made = ARITHMETIC[step.name].numpy(*wide)
        return np.broadcast_to(np.asarray(made).astype(result.dtype), result.shape)


def _broadcast(
    operands: Sequence[np.ndarray], shape: tuple[int, ...], axes: tuple[int, ...]
) -> np.ndarray:
    (x,) = operands
    sizes = dict(zip(axes, x.shape, strict=True))
    return np.broadcast_to(x.reshape([sizes.get(axis, 1) for axis in range(len(shape))]), shape)


def _slice(
    operands: Sequence[np.ndarray],
    shape: tuple[int, ...],
    starts: tuple[int, ...],
    strides: tuple[int, ...],
) -> np.ndarray:
    (x,) = operands
    parts = zip(starts, strides, shape, strict=True)
    return x[tuple(slice(at, at + step * (size - 1) + 1, step) for at, step, size in parts)]


def _pad(
    operands: Sequence[np.ndarray], shape: tuple[int, ...], low: tuple[int, ...]
) -> np.ndarray:
    x, value = operands
    padded = np.full(shape, value)
    padded[tuple(slice(at, at + size) for at, size in zip(low, x.shape, strict=True))] = x
    return padded


MOVEMENT: dict[str, Callable[..., np.ndarray]] = {
    "reshape": lambda operands, shape: operands[0].reshape(shape),
    "transpose": lambda operands, shape, axes: operands[0].transpose(axes),
    "reverse": lambda operands, shape, axes: np.flip(operands[0], axes),
    "concatenate": lambda operands, shape, axis: np.concatenate(operands, axis),
    "tile": lambda operands, shape, counts: np.tile(operands[0], counts),
    "broadcast": _broadcast,
    "slice": _slice,
    "pad": _pad,
}


# ---- kernels ------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Kernel:
    """One dispatch that makes one array: for `program.link` the same as a `plan.Plan`."""

    label: str
    inputs: tuple[Buffer, ...]
    outputs: tuple[Buffer, ...]
    passes: tuple[PassPlan, ...]
    reads: tuple[int, ...]
    """The array behind each input."""
    makes: int
    capabilities: Capabilities
    intermediates: tuple[Buffer, ...] = ()


def kernels(
    steps: Sequence[Step],
    tensors: Sequence[Tensor],
    homes: Sequence[int],
    kept: set[int],
    capabilities: Capabilities,
) -> dict[int, Kernel]:
    """The kernels of steps, by the array that each makes.

    Args:
      steps: in an order in which each array is made before it is used.
      tensors: of all arrays.
      homes: for each array the one whose bytes it has, in another shape; mostly itself.
      kept: the arrays that are needed in memory. Others are put there where they are used by steps
        that look at different elements of them, or where a kernel would read too many arrays.
      capabilities: of the device that the kernels are for.
    """
    stored = set(kept)
    users: dict[int, list[Step]] = {}
    for step in steps:
        for array in step.arrays:
            users.setdefault(homes[array], []).append(step)
    made = {step.result: step for step in steps}
    # What a kernel reads to make an array in registers, and how many steps that takes.
    sources: dict[int, set[int]] = {}
    depth: dict[int, int] = {}
    for step in steps:
        uses = users.get(step.result, [])
        if len(uses) > 1 and any(use.name in MOVEMENT for use in uses):
            stored.add(step.result)
        operands = {homes[array] for array in step.arrays}
        inner = [array for array in operands if array in made and array not in stored]
        while True:
            read = (operands - set(inner)).union(*(sources[array] for array in inner))
            if len(read) <= MOST_READ or not inner:
                break
            widest = max(inner, key=lambda array: len(sources[array]))
            inner.remove(widest)
            stored.add(widest)
        sources[step.result] = read
        depth[step.result] = 1 + max((depth[array] for array in inner), default=0)
        if depth[step.result] == _DEEPEST:
            stored.add(step.result)
    return {
        step.result: _kernel(step, _Writer(made, tensors, homes, stored, step.result), capabilities)
        for step in steps
        if step.result in stored
    }


@dataclass(frozen=True)
class _Index:
    """Where in an array: one WGSL expression for its linear index or one for each axis."""

    shape: tuple[int, ...]
    linear: str | None = None
    by_axis: tuple[str, ...] | None = None


@dataclass
class _Writer:
    """Writes the body of `fn element(i) -> u32`."""

    made: Mapping[int, Step]
    tensors: Sequence[Tensor]
    homes: Sequence[int]
    stored: set[int]
    target: int
    read: list[int] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    names: int = 0
    known: dict[Any, str] = field(default_factory=dict)

    def let(self, expression: str) -> str:
        """The name of a value; equal expressions share one."""
        if ("let", expression) not in self.known:
            self.names += 1
            self.lines.append(f"let v{self.names} = {expression};")
            self.known["let", expression] = f"v{self.names}"
        return self.known["let", expression]

    # -- indices

    def linear(self, index: _Index) -> str:
        if index.linear is not None:
            return index.linear
        assert index.by_axis is not None
        strides = _strides(index.shape)
        terms = [
            each if stride == 1 else f"{each} * {stride}u"
            for each, stride, size in zip(index.by_axis, strides, index.shape, strict=True)
            if size > 1
        ]
        return self.let(" + ".join(terms) or "0u")

    def by_axis(self, index: _Index) -> tuple[str, ...]:
        if index.by_axis is not None:
            return index.by_axis
        assert index.linear is not None
        found = []
        for axis, (stride, size) in enumerate(zip(_strides(index.shape), index.shape, strict=True)):
            each = index.linear if stride == 1 else f"{index.linear} / {stride}u"
            first = all(before == 1 for before in index.shape[:axis])
            found.append("0u" if size == 1 else self.let(each if first else f"({each}) % {size}u"))
        return tuple(found)

    # -- values: of movement as bits, of arithmetic as WGSL's types

    def bits(self, operand: int | Constant, index: _Index) -> str:
        if isinstance(operand, Constant):
            return _constant_bits(operand)
        operand, index = self._at_home(operand, index)
        step = self.made.get(operand)
        if step is None or (operand in self.stored and operand != self.target):
            return self.let(self._load(operand, self.linear(index)))
        if step.name not in MOVEMENT:
            return self.let(_ENCODE[self.tensors[operand].dtype].format(self.value(operand, index)))
        key = (operand, index)
        if key not in self.known:
            self.known[key] = self._moved(step, index)
        return self.known[key]

    def value(self, operand: int | Constant, index: _Index) -> str:
        if isinstance(operand, Constant):
            return self.let(_DECODE[operand.dtype].format(_constant_bits(operand)))
        operand, index = self._at_home(operand, index)
        dtype, step = self.tensors[operand].dtype, self.made.get(operand)
        elsewhere = operand in self.stored and operand != self.target
        if step is None or elsewhere or step.name in MOVEMENT:
            return self.let(_DECODE[dtype].format(self.bits(operand, index)))
        key = (operand, index)
        if key not in self.known:
            self.known[key] = self._computed(step, index, dtype)
        return self.known[key]

    def _at_home(self, array: int, index: _Index) -> tuple[int, _Index]:
        home = self.homes[array]
        if home == array:
            return array, index
        return home, _Index(self.tensors[home].shape, self.linear(index))

    def _load(self, array: int, at: str) -> str:
        if array not in self.read:
            self.read.append(array)
        name = f"a{self.read.index(array)}"
        if BYTES[self.tensors[array].dtype] == 4:
            return f"{name}[{at}]"
        return f"({name}[{at} >> 1u] >> (16u * ({at} & 1u))) & 0xffffu"

    def _computed(self, step: Step, index: _Index, dtype: str) -> str:
        values = [self.value(operand, self._same(operand, index)) for operand in step.operands]
        if step.name == "convert":
            computed = f"{_WGSL[dtype]}({values[0]})"
        elif step.name == "integer_pow":
            (exponent,) = step.parameters
            product = " * ".join(values * abs(exponent))
            computed = product if exponent > 0 else f"1.0 / ({product})"
        elif step.name in _SIGN:
            text = _SIGN[step.name][0].format(f"bitcast<u32>({values[0]})", "0x80000000u")
            computed = f"bitcast<f32>({text})"
        else:
            computed = ARITHMETIC[step.name].wgsl.format(*values)
        computed = self.let(computed)
        if BYTES[dtype] == 2:  # each operation is rounded, as JAX's are
            computed = self.let(_DECODE[dtype].format(self.let(_ENCODE[dtype].format(computed))))
        return computed

    def _same(self, operand: int | Constant, index: _Index) -> _Index:
        """The index of an elementwise operand: an array of rank 0 stands for one of any shape."""
        if isinstance(operand, int) and not self.tensors[operand].shape:
            return _Index((), "0u")
        return index

    def _moved(self, step: Step, index: _Index) -> str:
        source = step.operands[0]
        shape = self.tensors[source].shape if isinstance(source, int) else ()
        if step.name == "concatenate":
            return self._concatenated(step, index)
        axes = self.by_axis(index)
        if step.name == "broadcast":
            (onto,) = step.parameters
            places = ["0u" if size == 1 else axes[at] for size, at in zip(shape, onto, strict=True)]
        elif step.name == "transpose":
            (order,) = step.parameters
            places = [axes[order.index(axis)] for axis in range(len(shape))]
        elif step.name == "reverse":
            (flipped,) = step.parameters
            places = [
                self.let(f"{size - 1}u - {at}") if axis in flipped else at
                for axis, (size, at) in enumerate(zip(shape, axes, strict=True))
            ]
        elif step.name == "tile":
            places = [
                at if size == whole else self.let(f"{at} % {size}u")
                for size, whole, at in zip(shape, index.shape, axes, strict=True)
            ]
        elif step.name == "slice":
            places = [
                at if (start, stride) == (0, 1) else self.let(f"{start}u + {at} * {stride}u")
                for start, stride, at in zip(*step.parameters, axes, strict=True)
            ]
        else:
            return self._padded(step, shape, axes)
        return self.bits(source, _Index(shape, by_axis=tuple(places)))

    def _concatenated(self, step: Step, index: _Index) -> str:
        (axis,) = step.parameters
        axes, start = self.by_axis(index), 0
        result = self._variable("0u")
        for count, operand in enumerate(step.operands):
            assert isinstance(operand, int)
            shape = self.tensors[operand].shape
            places = list(axes)
            if start:
                places[axis] = f"({axes[axis]} - {start}u)"
            start += shape[axis]
            last = count == len(step.operands) - 1
            self.lines.append("{" if last else f"if ({axes[axis]} < {start}u) {{")
            self._assign(result, operand, _Index(shape, by_axis=tuple(places)))
            self.lines.append("}" if last else "} else")
        return result

    def _padded(self, step: Step, shape: tuple[int, ...], axes: tuple[str, ...]) -> str:
        (low,) = step.parameters
        source, filling = step.operands
        assert isinstance(source, int)
        result = self._variable(self.bits(filling, _Index((), "0u")))
        # In u32 what lies before the array wraps round to beyond it.
        places = [
            self.let(f"{at} - {start}u") if start else at
            for at, start in zip(axes, low, strict=True)
        ]
        inside = [f"{at} < {size}u" for at, size in zip(places, shape, strict=True)]
        self.lines.append(f"if ({' && '.join(inside) or 'true'}) {{")
        self._assign(result, source, _Index(shape, by_axis=tuple(places)))
        self.lines.append("}")
        return result

    def _variable(self, first: str) -> str:
        self.names += 1
        self.lines.append(f"var v{self.names} = {first};")
        return f"v{self.names}"

    def _assign(self, result: str, operand: int, index: _Index) -> None:
        """Inside of a block, whose names end with it."""
        outer, self.known = self.known, dict(self.known)
        self.lines.append(f"{result} = {self.bits(operand, index)};")
        self.known = outer


_WGSL = {"float32": "f32", "float16": "f32", "bfloat16": "f32", "int32": "i32", "uint32": "u32"}
_DECODE = {
    "float32": "bitcast<f32>({0})",
    "int32": "bitcast<i32>({0})",
    "uint32": "{0}",
    "float16": "from_float16({0})",
    "bfloat16": "bitcast<f32>({0} << 16u)",
}
_ENCODE = {
    "float32": "bitcast<u32>({0})",
    "int32": "bitcast<u32>({0})",
    "uint32": "{0}",
    "float16": "to_float16({0})",
    "bfloat16": "to_bfloat16({0})",
}
_FUNCTIONS = {
    "from_float16": """\
fn from_float16(h: u32) -> f32 {
  let sign = (h & 0x8000u) << 16u;
  let rest = h & 0x7fffu;
  if (rest >= 0x7c00u) { return bitcast<f32>(sign | 0x7f800000u | ((rest & 0x3ffu) << 13u)); }
  if (rest >= 0x400u) { return bitcast<f32>(sign | ((rest << 13u) + 0x38000000u)); }
  return bitcast<f32>(sign | bitcast<u32>(f32(rest) * 5.9604644775390625e-8));
}""",
    "to_float16": """\
fn to_float16(x: f32) -> u32 {
  let bits = bitcast<u32>(x);
  let sign = (bits >> 16u) & 0x8000u;
  let rest = bits & 0x7fffffffu;
  if (rest > 0x7f800000u) {
    let kept = (rest >> 13u) & 0x3ffu;
    return sign | 0x7c00u | select(kept, 0x200u, kept == 0u);
  }
  if (rest >= 0x477ff000u) { return sign | 0x7c00u; }
  if (rest >= 0x38800000u) {
    return sign | ((rest - 0x38000000u + 0xfffu + ((rest >> 13u) & 1u)) >> 13u);
  }
  if (rest < 0x33000000u) { return sign; }
  let shift = 126u - (rest >> 23u);
  let digits = (rest & 0x7fffffu) | 0x800000u;
  let whole = digits >> shift;
  let part = digits & ((1u << shift) - 1u);
  let half = 1u << (shift - 1u);
  return sign | (whole + select(0u, 1u, part + (whole & 1u) > half));
}""",
    "to_bfloat16": """\
fn to_bfloat16(x: f32) -> u32 {
  let bits = bitcast<u32>(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) {
    return (bits >> 16u) | select(0u, 0x40u, (bits & 0x7f0000u) == 0u);
  }
  return (bits + 0x7fffu + ((bits >> 16u) & 1u)) >> 16u;
}""",
    "larger": """\
fn larger(a: f32, b: f32) -> f32 {
  if ((bitcast<u32>(a) & 0x7fffffffu) > 0x7f800000u) { return a; }
  if ((bitcast<u32>(b) & 0x7fffffffu) > 0x7f800000u) { return b; }
  return max(a, b);
}""",
    "smaller": """\
fn smaller(a: f32, b: f32) -> f32 {
  if ((bitcast<u32>(a) & 0x7fffffffu) > 0x7f800000u) { return a; }
  if ((bitcast<u32>(b) & 0x7fffffffu) > 0x7f800000u) { return b; }
  return min(a, b);
}""",
}


def _constant_bits(constant: Constant) -> str:
    if constant.dtype in _INTEGERS:
        return f"{int(constant.value) % 2**32}u"
    if BYTES[constant.dtype] == 2:  # a constant is one of its dtype's numbers already
        (bits,) = struct.unpack("<I", struct.pack("<f", constant.value))
        if constant.dtype == "bfloat16":
            return f"{bits >> 16}u"
        return f"{int(np.float16(constant.value).view(np.uint16))}u"
    return f"{struct.unpack('<I', struct.pack('<f', constant.value))[0]}u"


def _strides(shape: tuple[int, ...]) -> list[int]:
    return [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]


def _words(tensor: Tensor) -> int:
    return -(-math.prod(tensor.shape) * BYTES[tensor.dtype] // 4)


def _buffer(name: str, tensor: Tensor) -> Buffer:
    return Buffer(name, Tensor((_words(tensor),), "uint32"), dtypes.TABLE["uint32"])


def _kernel(step: Step, writer: _Writer, capabilities: Capabilities) -> Kernel:
    tensor = writer.tensors[step.result]
    result = writer.bits(step.result, _Index(tensor.shape, "i"))
    body = "\n".join(f"  {line}" for line in writer.lines)
    inputs = tuple(_buffer(f"a{at}", writer.tensors[array]) for at, array in enumerate(writer.read))
    output = _buffer("y", tensor)
    words, size = _words(tensor), math.prod(tensor.shape)
    if BYTES[tensor.dtype] == 4:
        store = "y[at] = element(at);"
    elif size % 2:
        store = f"""\
var word = element(2u * at);
  if (2u * at + 1u < {size}u) {{ word |= element(2u * at + 1u) << 16u; }}
  y[at] = word;"""
    else:
        store = "y[at] = element(2u * at) | (element(2u * at + 1u) << 16u);"
    functions = "\n".join(text for name, text in _FUNCTIONS.items() if f"{name}(" in body)
    bindings = tuple(
        Bound(
            buffer.name,
            "storage" if buffer is output else "read-only-storage",
            "array<u32>",
            buffer.name,
            buffer.size,
        )
        for buffer in (*inputs, output)
    )
    wgsl = f"""\
{declarations(bindings)}
{functions}
fn element(i: u32) -> u32 {{
{body}
  return {result};
}}

@compute @workgroup_size({_WORKGROUP})
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lane: u32) {{
  let at = (group.y * {DISPATCH_FOLD_WIDTH}u + group.x) * {_WORKGROUP}u + lane;
  if (at >= {words}u) {{ return; }}
  {store}
}}
"""
    label = f"generated.{step.name}"
    dispatch = PassPlan(label, wgsl, bindings, folded(-(-words // _WORKGROUP)))
    return Kernel(
        label, inputs, (output,), (dispatch,), tuple(writer.read), step.result, capabilities
    )
