"""A kernel folder's own tests: `test.json` is read and checked, its cases are run and judged.

As far as the format is public, a file is `{fixtureArrays?, cases}` and a case `{name, skipGpu?,
provenance?, inputs, outputs}` with arrays by port, each `{dtype, shape, data}`. An output's `data`
may be left out; its `tolerance` and `allowNaN` say how near a result must come. `data` is
`{kind: "values", values}` with a flat list or `{"$ref": "#/fixtureArrays/NAME"}`. Added here are
the keys `attributes`, `args` and `tunables` of a case, each by name, and the strings "NaN",
"Infinity" and "-Infinity" among values.
"""

import contextlib
import enum
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from jax_webgpu import device, document, dtypes, plan, runtime, spec, variants
from jax_webgpu.capabilities import IDEAL
from jax_webgpu.document import Node
from jax_webgpu.errors import CallError, DeviceError, JaxWebGPUError
from jax_webgpu.folder import MANIFEST, Folder
from jax_webgpu.plan import Plan
from jax_webgpu.resolve import Resolved, Tensor, resolve
from jax_webgpu.spec import Spec
from jax_webgpu.values import is_number

# What an output may be off by where the case does not say; all other dtypes must be exact.
TOLERANCES = {"float32": 1e-5, "float16": 1e-2}

_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


@dataclass(frozen=True, eq=False)
class Array:
    """An array of a case.

    Attributes:
      tensor: shape and logical dtype.
      values: None where the case gives none, or in a way that is not public.
      kind: what the case calls that way.
      tolerance: how far from an expected value e a result r may be: |r - e| <= tolerance *
        max(1, |e|).
      allow_nan: whether a NaN may be expected, which then only a NaN meets.
    """

    tensor: Tensor
    values: np.ndarray | None
    kind: str = "values"
    tolerance: float = 0.0
    allow_nan: bool = False


@dataclass(frozen=True, eq=False)
class Case:
    """One call of the kernel, and what it must give.

    Attributes:
      name: the case's own.
      inputs: by port.
      outputs: by port; those that are asked for.
      attributes: by name.
      args: by name.
      tunables: by name.
      skip: why it is not for GPUs; None where it is.
    """

    name: str
    inputs: Mapping[str, Array]
    outputs: Mapping[str, Array]
    attributes: Mapping[str, Any]
    args: Mapping[str, Any]
    tunables: Mapping[str, Any]
    skip: str | None


class Status(enum.StrEnum):
    """How a case ended."""

    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"
    """The case is not for GPUs."""
    REFUSED = "refused"
    """No variant runs it on this device, and one would on another."""
    NOT_RUN = "not run"
    """The case is written in a way that is not public."""


@dataclass(frozen=True)
class Result:
    """How a case ended and why.

    Attributes:
      case: its name.
      status: how it ended.
      detail: why, in words; of a case that passed, what was not compared.
      variant: what ran, if anything did.
    """

    case: str
    status: Status
    detail: str = ""
    variant: str | None = None

    def __str__(self) -> str:
        return f"{self.case}: {self.status}" + (f": {self.detail}" if self.detail else "")


def run(files: Folder) -> Iterator[Result]:
    """Runs the cases of a kernel folder one by one on this process's device.

    Raises:
      SpecError: manifest or tests are not in the format; before the first case runs.
      AdapterError: there is no device.
    """
    operator = spec.loads(files.read_bytes(MANIFEST), files.path / MANIFEST, files.read_bytes)
    cases = read(files)
    return (attempt(operator, case) for case in cases)


def calls(operator: Spec, cases: Iterable[Case]) -> Iterator[Resolved]:
    """The calls of the cases, without those that the operator does not admit."""
    for case in cases:
        with contextlib.suppress(CallError):
            yield _resolved(operator, case)


def attempt(operator: Spec, case: Case) -> Result:
    """Runs one case and compares what it gives.

    Raises:
      AdapterError: there is no device.
    """
    if case.skip is not None:
        return Result(case.name, Status.SKIPPED, case.skip)
    for array in [*case.inputs.values(), *case.outputs.values()]:
        if array.kind != "values":
            return Result(case.name, Status.NOT_RUN, f"data kind {array.kind!r} is not public")
    capabilities = device.get().capabilities
    try:
        call = _resolved(operator, case)
    except CallError as error:
        return Result(case.name, Status.FAILED, str(error))
    try:
        planned = plan.make(plan.fitted(call, capabilities), capabilities)
    except CallError as error:
        return Result(case.name, Status.FAILED, str(error))
    except DeviceError as error:
        status = Status.FAILED if _is_refused_everywhere(call) else Status.REFUSED
        return Result(case.name, status, str(error))
    problem = _problem(operator, case, planned)
    if problem:
        return Result(case.name, Status.FAILED, problem, planned.variant)
    untold = [name for name, array in case.outputs.items() if array.values is None]
    detail = f"the case gives no values of {', '.join(untold)}" if untold else ""
    return Result(case.name, Status.PASSED, detail, planned.variant)


def _resolved(operator: Spec, case: Case) -> Resolved:
    def states_no_shape(name: str) -> bool:
        return name in operator.outputs and operator.outputs[name].shape is None

    return resolve(
        operator,
        {name: array.tensor for name, array in case.inputs.items()},
        attributes=case.attributes,
        args=case.args,
        tunables=case.tunables,
        outputs={
            name: array.tensor.shape if states_no_shape(name) else None
            for name, array in case.outputs.items()
        },
    )


def _is_refused_everywhere(call: Resolved) -> bool:
    """Whether the call itself is wrong, and not this device too small for it."""
    try:
        variants.select(call, IDEAL)
    except CallError:
        return True
    return False


def _problem(operator: Spec, case: Case, planned: Plan) -> str | None:
    """What is wrong with the WGSL or the outputs of a call, the first thing alone."""
    call = planned.resolved
    for name, tensor in call.outputs:
        if tensor != case.outputs[name].tensor:
            return f"{name} is {tensor}, expected {case.outputs[name].tensor}"
    arrays = [case.inputs[name].values for name, _ in call.inputs]
    runner = runtime.Operator(repr(operator), operator)
    try:
        runtime.compile_(planned, device.get())  # which tells the line of what is refused
        results = runtime.run(runner, call, [array for array in arrays if array is not None])
    except (JaxWebGPUError, ValueError) as error:
        return str(error)
    for (name, _), result in zip(call.outputs, results, strict=True):
        problem = _difference(name, result, case.outputs[name])
        if problem:
            return problem
    return None


def _difference(name: str, result: np.ndarray, expected: Array) -> str | None:
    """Where a result is not what was expected: the first such element, and how many there are."""
    values = expected.values
    if values is None:
        return None
    wrong = ~_agrees(result, values, expected)
    if not wrong.any():
        return None
    first = np.unravel_index(int(np.argmax(wrong)), wrong.shape)
    place = f"{name}[{', '.join(map(str, first))}]" if first else name
    tolerance = f" (tolerance {expected.tolerance:g})" if expected.tolerance else ""
    return (
        f"{place} is {result[first]}, expected {values[first]}{tolerance}; "
        f"{np.count_nonzero(wrong)} of {wrong.size} elements are wrong"
    )


def _agrees(result: np.ndarray, values: np.ndarray, expected: Array) -> np.ndarray:
    """For each element, whether it is right."""
    agrees = np.asarray(result == values)
    if expected.allow_nan and values.dtype.kind == "f":
        agrees |= np.isnan(result) & np.isnan(values)
    if expected.tolerance:
        # Nothing finite is near to an infinity, though the formula would say so.
        wanted = values.astype(np.float64)
        with np.errstate(invalid="ignore"):
            error = np.abs(result.astype(np.float64) - wanted)
            limit = expected.tolerance * np.maximum(1, np.abs(wanted))
            agrees |= np.isfinite(wanted) & (error <= limit)
    return agrees


# ---- reading ------------------------------------------------------------------------------------


def read(files: Folder) -> tuple[Case, ...]:
    """The cases of `test.json` in a kernel folder.

    Raises:
      SpecError: there is no such file, or it is not in the format; the text gives the JSON path.
    """
    root = document.parse_data(files.read_bytes("test.json"), files.path / "test.json")
    top = root.object("cases", "$schema fixtureArrays")
    fixtures = top["fixtureArrays"].members() if "fixtureArrays" in top else {}
    cases = tuple(_case(node, fixtures) for node in top["cases"].elements())
    for index, case in enumerate(cases):
        if any(case.name == other.name for other in cases[:index]):
            node = top["cases"].elements()[index]
            raise node.fail(f"the name {case.name!r} is taken already")
    return cases


def _brief(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _case(node: Node, fixtures: Mapping[str, Node]) -> Case:
    keys = node.object("name inputs outputs", "skipGpu provenance attributes args tunables")

    def arrays(key: str) -> dict[str, Array]:
        return {port: _array(each, key, fixtures) for port, each in keys[key].members().items()}

    def plain(key: str) -> dict[str, Any]:
        members = keys[key].members() if key in keys else {}
        return {name: each.value for name, each in members.items()}

    skip = keys.get("skipGpu")
    if skip is not None and not isinstance(skip.value, str | bool):
        raise skip.fail(f"expected a boolean or the reason, got {_brief(skip.value)}")
    reason = None
    if skip is not None and skip.value is not False:
        reason = "the case is not for GPUs" if skip.value is True else skip.text()
    return Case(
        name=keys["name"].text(),
        inputs=arrays("inputs"),
        outputs=arrays("outputs"),
        attributes=plain("attributes"),
        args=plain("args"),
        tunables=plain("tunables"),
        skip=reason,
    )


def _size(node: Node) -> int:
    size = node.integer()
    if size < 0:
        raise node.fail(f"expected a size of 0 or more, got {size}")
    return size


def _array(node: Node, key: str, fixtures: Mapping[str, Node]) -> Array:
    if key == "inputs":
        keys = node.object("dtype shape data")
    else:
        keys = node.object("dtype shape", "data tolerance allowNaN")
    dtype = keys["dtype"].text()
    if dtype not in dtypes.TABLE:
        raise keys["dtype"].fail(f"{dtype!r} is no dtype; known: {', '.join(dtypes.TABLE)}")
    tensor = Tensor(tuple(_size(each) for each in keys["shape"].elements()), dtype)
    tolerance = TOLERANCES.get(dtype, 0.0)
    if "tolerance" in keys:
        tolerance = keys["tolerance"].number()
        if not 0 <= tolerance < math.inf:
            raise keys["tolerance"].fail(f"expected a number of 0 or more, got {tolerance}")
    allow_nan = keys.read("allowNaN", Node.boolean, False)
    values, kind = None, "values"
    if "data" in keys:
        data = keys["data"].members()
        if "kind" not in data:
            raise keys["data"].fail("the key 'kind' is missing")
        kind = data["kind"].text()
        if kind == "values":
            values = _values(keys["data"].object("kind values")["values"], tensor, fixtures)
    return Array(tensor, values, kind, tolerance, allow_nan)


def _values(node: Node, tensor: Tensor, fixtures: Mapping[str, Node]) -> np.ndarray:
    if isinstance(node.value, dict):
        reference = node.object("$ref")["$ref"]
        name = reference.text().removeprefix("#/fixtureArrays/")
        if name not in fixtures or reference.value != f"#/fixtureArrays/{name}":
            known = ", ".join(f"#/fixtureArrays/{each}" for each in fixtures) or "none"
            raise reference.fail(f"{_brief(reference.value)} is no fixture; there are: {known}")
        target = fixtures[name]
    else:
        target = node
    elements = target.elements()
    size = math.prod(tensor.shape)
    if len(elements) != size:
        raise node.fail(f"expected {size} values for {tensor}, got {len(elements)}")
    numpy = dtypes.TABLE[tensor.dtype].numpy
    array = np.array([_number(each, numpy) for each in elements], numpy)
    try:
        return array.reshape(tensor.shape)
    except ValueError as error:  # more axes than NumPy has
        raise node.fail(str(error)) from None


def _number(node: Node, dtype: np.dtype) -> float:
    """A value as JSON has it, if it is one of the dtype's."""
    value = node.value
    if dtype.kind == "f":
        if isinstance(value, str) and value in _NOT_FINITE:
            return _NOT_FINITE[value]
        if not is_number(value):
            raise node.wrong(f"a number or one of {', '.join(_NOT_FINITE)}")
        if abs(value) > float(np.finfo(dtype).max):
            raise node.fail(f"{_brief(value)} is beyond {dtype}")
        return float(value)
    if dtype.kind == "b":
        low, high = 0, 1
    else:
        low, high = int(np.iinfo(dtype).min), int(np.iinfo(dtype).max)
    whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    if not whole or not low <= value <= high or (isinstance(value, bool) and dtype.kind != "b"):
        expected = f"a whole number from {low} to {high} ({dtype})"
        raise node.fail(f"expected {expected}, got {_brief(value)}")
    return int(value)
