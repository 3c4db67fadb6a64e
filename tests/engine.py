"""What the tests of the engine share: the manifests, calls of them, and small manifests."""

import json
import tempfile
from pathlib import Path

from cases import CASES, RotaryCase

from jax_webgpu import resources, spec
from jax_webgpu.resolve import Tensor, resolve

SPECS = {
    name: spec.load(resources.specs() / f"{name}.json", resources.shaders())
    for name in ("ai.onnx.RotaryEmbedding", "ai.onnx.Split")
}
ROTARY, SPLIT = SPECS.values()


def is_empty(case):
    """Whether some output has no elements."""
    return not all(size for shape in case.shapes.values() for size in shape)


# A call for each variant, the table's first that runs on every device and fills every output.
FIRST = {
    case.variant: case for case in reversed(CASES) if case.dtype != "float16" and not is_empty(case)
}


def resolved(case, **tunables):
    """A row of the table as the engine's call."""
    rotary = isinstance(case, RotaryCase)
    inputs, outputs = {}, {}
    for name, shape in case.shapes.items():
        dtype = "int64" if name == "positionIds" else case.dtype
        (inputs if rotary or name == "input" else outputs)[name] = Tensor(shape, dtype)
    return resolve(
        SPECS[case.spec],
        inputs,
        attributes=case.attributes,
        outputs=None if rotary else {name: tensor.shape for name, tensor in outputs.items()},
        tunables=tunables,
    )


def rotary(x, cos, sin=None, positions=None, *, y=None, dtype="float32", **attributes):
    """A call of RotaryEmbedding by the shapes of its arrays, which may be wrong."""
    inputs = {"x": Tensor(x, dtype), "cos": Tensor(cos, dtype), "sin": Tensor(sin or cos, dtype)}
    if positions is not None:
        inputs["positionIds"] = Tensor(positions, "int64")
    outputs = None if y is None else {"y": y}
    return resolve(ROTARY, inputs, attributes=attributes, outputs=outputs)


def split(x, *parts, dtype="float32", **attributes):
    """A call of Split by the shapes of its input and outputs, which may be wrong."""
    outputs = {f"y{index}": part for index, part in enumerate(parts)}
    return resolve(SPLIT, {"input": Tensor(x, dtype)}, attributes=attributes, outputs=outputs)


def operator(template="fn main() {}", **keys):
    """A small manifest, one pass from `x` to `y`, with some top-level keys changed or added."""
    document = {
        "name": "Small",
        "typeConstraints": {"T": ["float32", "float16", "int8"]},
        "inputs": {"x": {"dtype": "T"}},
        "outputs": {"y": {"dtype": "T", "shape": "shapes.x"}},
        "variants": [variant("only")],
    }
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "t.wgsl.jinja").write_text(template)
        data = json.dumps(document | keys).encode()
        return spec.loads(data, Path("small.json"), Path(folder))


def variant(id, **keys):
    """A variant of a small manifest, with some keys changed or added."""
    return {"id": id, "passes": [step()]} | keys


def step(**keys):
    """A pass of a small manifest, with some keys changed or added."""
    return {"shader": "t.wgsl.jinja", "bindings": ["x", "y"], "dispatch": {"x": 1}} | keys
