"""Manifests: those that are here with changes, and ones made by a grammar.

A manifest is loaded, given a call that fits its ports, planned for devices on paper, and compiled
and run on this machine's: where that must come to an end.
"""

import functools
import json
import math
import re
from pathlib import Path
from typing import Any

import folders
import numpy as np
from hypothesis import strategies as st
from poison import poisoned

from fuzz import corpus, grammar, javascript, mutation
from fuzz.targets import RIGHT, Target, Wrong, documented
from jax_webgpu import capabilities, device, dtypes, folder, plan, program, runtime, spec, trial
from jax_webgpu.errors import CallError, DeviceError, LimitError, SpecError
from jax_webgpu.resolve import Resolved, Tensor, resolve
from jax_webgpu.spec import Spec

# What may run here: loops might not end, and a mutated count might take hours.
MOST_BYTES = 16 << 20
MOST_INVOCATIONS = 1 << 22
_LOOPS = re.compile(r"\b(for|while|loop)\b")

DEVICES = ("floor", "apple-m", "swiftshader")
SIZES = st.sampled_from([0, 1, 1, 2, 3, 4, 8, 13])


@st.composite
def inputs(draw: Any) -> Any:
    call = {
        "shapes": draw(st.lists(st.lists(SIZES, max_size=4), min_size=1, max_size=4)),
        "dtypes": draw(st.lists(st.integers(0, 9), min_size=1, max_size=4)),
        "optional": draw(st.booleans()),
        "attributes": draw(
            st.lists(st.sampled_from([None, None, 0, 1, -1, 2, "plain"]), max_size=3)
        ),
        "same": draw(st.booleans()),
        "case": draw(st.none() | st.integers(0, 99) | st.integers(0, 99)),
    }
    if draw(st.integers(0, 3)) == 0:
        return {"made": draw(made()), "call": call}
    return {
        "seed": draw(st.sampled_from(sorted(corpus.seeds()))),
        "changes": draw(mutation.changes()),
        "call": call,
    }


def run(value: Any) -> str:
    if "made" in value:
        return _run_made(value["made"], value["call"])
    seed = corpus.seeds()[value["seed"]]
    document = mutation.apply(seed.manifest, value["changes"])
    loaded = load(document, seed.templates)
    if isinstance(loaded, str):
        return loaded
    repr(loaded)
    cases = _cases(value["seed"])
    at = value["call"]["case"]
    if cases and at is not None:
        call = _fitting(loaded, cases[at % len(cases)])
    else:
        call = called(loaded, value["call"])
    if isinstance(call, str):
        return call
    str(call)
    label = "planned"
    for name in DEVICES:
        found = planned(call, capabilities.PRESETS[name])
        label = found if isinstance(found, str) else label
    return ran(call) or label


@functools.cache
def _cases(name: str) -> tuple[trial.Case, ...]:
    """The cases of a folder's own tests."""
    others = corpus.seeds()[name].others
    if "test.json" not in others:
        return ()
    return trial.read(folder.Folder(Path(), False, {name: b"" for name in others}, others))


def _fitting(loaded: Spec, case: trial.Case) -> Resolved | str:
    """A call that fits the manifest before it was changed."""
    tensors = {name: array.tensor for name, array in case.inputs.items()}
    try:
        return resolve(
            loaded, tensors, attributes=case.attributes, args=case.args, tunables=case.tunables
        )
    except Exception as error:
        return documented(error, (CallError,))


def load(document: Any, templates: dict[str, bytes]) -> Spec | str:
    """The `Spec`; or the label of why there is none, which names a place in the document."""

    def template(name: str) -> bytes:
        if name not in templates:
            raise FileNotFoundError(name)
        return templates[name]

    data = json.dumps(document, ensure_ascii=False).encode("utf-8", "surrogatepass")
    try:
        return spec.loads(data, Path("m.json"), template)
    except Exception as error:
        label = documented(error, (SpecError,))
        if not str(error).startswith("m.json: "):
            raise Wrong(f"names no file: {error}") from error
        if len(str(error)) > 4000:
            raise Wrong(f"a message of {len(str(error))} characters") from error
        return label


def called(loaded: Spec, wanted: Any) -> Resolved | str:
    """A call that fits, as far as the types of ports and attributes tell."""
    types: dict[str, str] = {}
    shapes, kinds = wanted["shapes"], wanted["dtypes"]

    def tensor(at: int, variable: str) -> Tensor:
        allowed = loaded.type_constraints.get(variable, (variable,))
        own = types.setdefault(variable, allowed[kinds[at % len(kinds)] % len(allowed)])
        shape = shapes[0 if wanted["same"] else at % len(shapes)]
        return Tensor(tuple(shape), own)

    arrays = {
        name: tensor(at, port.dtype)
        for at, (name, port) in enumerate(loaded.inputs.items())
        if wanted["optional"] or not port.optional
    }
    outputs = {
        name: None if port.shape is not None else shapes[0]
        for name, port in loaded.outputs.items()
        if wanted["optional"] or not port.optional
    }
    given = dict(zip(loaded.attributes, wanted["attributes"], strict=False))
    kind = {"u32": 1, "i32": 1, "f32": 0.5, "bool": True, "string": "a"}
    args = {n: (each.one_of or [kind[each.kind]])[0] for n, each in loaded.args.items()}
    try:
        return resolve(loaded, arrays, attributes=given, args=args, outputs=outputs)
    except Exception as error:
        return documented(error, (CallError,))


def planned(call: Resolved, device: capabilities.Capabilities) -> plan.Plan | str:
    try:
        found = plan.anew(call, device)
        found.describe(wgsl=False)
        for _ in found.unwritten:
            break
        return found
    except Exception as error:
        return documented(error, (CallError, DeviceError, LimitError))


def may_run(found: plan.Plan) -> bool:
    """Whether a plan ends, and soon."""
    arrays = (*found.inputs, *found.outputs, *found.intermediates)
    bound = [bound.size for each in found.passes for bound in each.bindings]
    if sum(array.size for array in arrays) + sum(bound) > MOST_BYTES:
        return False
    work = 0
    for each in found.passes:
        if _LOOPS.search(each.wgsl):
            return False
        size = re.search(r"@workgroup_size\(\s*(\d+)", each.wgsl)
        work += math.prod(each.workgroups) * min(int(size[1]) if size else 64, 1 << 20)
    return work <= MOST_INVOCATIONS


def ran(call: Resolved) -> str:
    """What came of it on this machine's device; empty where it may not run there."""
    gpu = device.get()
    found = planned(call, gpu.capabilities)
    if isinstance(found, str):
        return ""
    operator = runtime.Operator("fuzzed", call.spec)
    arrays = [np.ones(tensor.shape, tensor.dtype) for _, tensor in call.inputs]
    try:
        if may_run(found):
            runtime.run(operator, call, arrays)
            return "ran"
        linked = program.alone(found)
        gpu._keep(linked)
        return "compiled"
    except Exception as error:
        return documented(error, (CallError, DeviceError))


# ---- made by a grammar --------------------------------------------------------------------------


@st.composite
def made(draw: Any) -> dict[str, Any]:
    """A manifest that adds an expression's value to an array: what it must give is known."""
    values = draw(st.lists(grammar.WHOLE, min_size=1, max_size=3))
    names = [f"v{at}" for at in range(len(values))]
    tree = draw(grammar.WHOLE)
    return {
        "values": values,
        "tree": draw(st.sampled_from([tree, *[("name", name) for name in names]])),
        "form": draw(st.sampled_from(["threads", "workgroups", "x"])),
        "dtype": draw(st.sampled_from(["int32", "int8", "uint8", "int64"])),
        "size": draw(st.sampled_from([1, 7, 64, 256])),
        "repeat": draw(st.sampled_from([None, None, 0, 1, 3])),
        "scratch": draw(st.booleans()),
        "extra": draw(st.sampled_from([[], ["true"], ["ranks.x < 9"], ["false"]])),
    }


def _document(made: dict[str, Any]) -> Any:
    size, dtype = made["size"], made["dtype"]
    inner = "tmp" if made["scratch"] else "y"
    groups: dict[str, Any] = {"x": f"ceilDiv(numel(shapes.x), {size})"}
    if made["form"] == "workgroups":
        groups = {"workgroups": f"ceilDiv(numel(shapes.x), {size})"}
    if made["form"] == "threads":
        groups = {"threads": "numel(shapes.x)", "workgroupSize": size}
    params = [
        {"name": "size", "type": "u32", "value": "numel(shapes.x)"},
        {"name": "added", "type": "i32", "value": "added"},
    ]
    params = {"name": "params", "struct": params}
    own: dict[str, Any] = {
        "shader": "a.wgsl.jinja",
        "bindings": ["x", {"name": "o", "arg": inner} if inner == "y" else
                     {"name": "o", "scratch": inner}, params],
        "dispatch": groups,
    }  # fmt: skip
    passes: list[Any] = [own]
    if made["repeat"] is not None:
        again = own | {"shader": "b.wgsl.jinja", "bindings": [own["bindings"][1], params]}
        passes.append({"repeat": {"count": made["repeat"], "index": "k"}, "passes": [again]})
    if made["scratch"]:
        last = {"name": "x", "scratch": "tmp", "buffer": "read-only-storage"}
        passes.append(own | {"shader": "c.wgsl.jinja", "bindings": [last, "y", params]})
    derived = {f"v{at}": javascript.text_of(tree) for at, tree in enumerate(made["values"])}
    stored = {"storage": "int32"} if dtype == "int64" else {}
    return {
        "name": "Made",
        "inputs": {"x": {"dtype": dtype, **stored}},
        "outputs": {"y": {"dtype": dtype, "shape": "shapes.x", **stored}},
        "derive": {"n": 7, **derived, "added": javascript.text_of(made["tree"])},
        "variants": [
            {
                "id": "only",
                "when": made["extra"],
                "intermediates": [{"id": "tmp", "dtype": "int32", "shape": "shapes.x"}]
                if made["scratch"]
                else [],
                "passes": passes,
            }
        ],
    }


def _templates(made: dict[str, Any]) -> dict[str, bytes]:
    size, dtype = made["size"], made["dtype"]
    frame = folders.FRAME.replace("{{ tunables.WORKGROUP_SIZE }}", str(size))
    frame = frame.replace("let i = gid.x;", f"let i = gid.x + gid.y * 65535 * {size};")
    element = dtypes.TABLE["int32" if dtype == "int64" else dtype].wgsl
    first = "i32" if made["scratch"] else element
    return {
        "a.wgsl.jinja": (frame % f"  o[i] = {first}(i32(x[i]) + params.added);").encode(),
        "b.wgsl.jinja": (frame % "  o[i] += {{ k }};").encode(),
        "c.wgsl.jinja": (frame % f"  y[i] = {element}(x[i]);").encode(),
    }


def _run_made(made: dict[str, Any], wanted: Any) -> str:
    loaded = load(_document(made), _templates(made))
    if isinstance(loaded, str):
        raise Wrong("the manifest is right, and is refused")
    shape = tuple(wanted["shapes"][0])
    call = resolve(loaded, {"x": Tensor(shape, made["dtype"])})
    names = dict(javascript.SCOPE)
    try:
        for at, tree in enumerate(made["values"]):
            javascript.SCOPE[f"v{at}"] = javascript.evaluate(tree)
        added: Any = javascript.evaluate(made["tree"])
    except javascript.Refused:
        added = None
    except javascript.Unsure:  # of a number that floats do not hold
        return RIGHT
    finally:
        javascript.SCOPE.clear()
        javascript.SCOPE.update(names)
    right = added is not None and float(added).is_integer() and -(2**31) <= added < 2**31
    right = right and made["extra"] != ["false"]
    found = planned(call, device.get().capabilities)
    if isinstance(found, str):
        if right:
            raise Wrong("the call is right, and is refused")
        return found
    if not right and math.prod(shape):
        raise Wrong(f"the field is {added}, and it is taken")
    x = np.arange(math.prod(shape)).reshape(shape).astype(made["dtype"])
    with poisoned():
        (y,) = runtime.run(runtime.Operator("made", loaded), call, [x])
    if math.prod(shape):
        turns = sum(range(made["repeat"] or 0))
        exact = (x.astype(np.int64) + int(added) + turns) & 0xFFFFFFFF
        narrow = exact.astype(np.uint32).view(np.int32).astype(made["dtype"])
        if not np.array_equal(y, narrow):
            raise Wrong(f"{y}, expected {narrow}")
    return RIGHT


TARGET = Target("manifests", 22, inputs, run)
