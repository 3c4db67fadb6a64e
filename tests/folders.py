"""Small kernel folders, made by the tests that load them."""

import itertools
import json

FRAME = """\
{{ env.wgsl.resourceDeclarations }}
@compute @workgroup_size({{ tunables.WORKGROUP_SIZE }})
fn main(@builtin(global_invocation_id) gid: vec3<u32>) {
  let i = gid.x;
  if (i >= params.size) { return; }
%s
}
"""


def write(folder, name, bodies, **keys):
    """A folder: its templates run a body for each `i` below `params.size`, see `step`."""
    path = folder / name
    path.mkdir(parents=True)
    manifest = {
        "domain": "test",
        "name": name.capitalize(),
        "typeConstraints": {"T": ["float32", "float16", "int32"]},
        "tunables": {"WORKGROUP_SIZE": {"default": 64}},
    }
    (path / "manifest.json").write_text(json.dumps(manifest | keys))
    for shader, body in bodies.items():
        (path / f"{shader}.wgsl.jinja").write_text(FRAME % body)
    return path


def step(shader, bindings, threads, **fields):
    """A pass; `fields` are more members of `params`, all f32."""
    struct = [{"name": "size", "type": "u32", "value": threads}]
    struct += [{"name": name, "type": "f32", "value": value} for name, value in fields.items()]
    return {
        "shader": f"{shader}.wgsl.jinja",
        "bindings": [*bindings, {"name": "params", "struct": struct}],
        "dispatch": {"threads": threads, "workgroupSize": "tunables.WORKGROUP_SIZE"},
    }


def scale(folder):
    """`y = factor * x + bias` and beside it `twice = 2 * y`, bias and twice where wanted."""
    variants = []
    for bias, twice in itertools.product((False, True), repeat=2):
        bindings = ["x", *["bias"] * bias, "y", *["twice"] * twice]
        when = [f"present.bias == {bias}".lower(), f"present.twice == {twice}".lower()]
        when += ["sameShape(shapes.x, shapes.bias)"] * bias + ["f16Ok(dtypes.T)"]
        passes = [step("scale", bindings, "numel(shapes.x)", factor="attrs.factor")]
        variants.append({"id": f"bias_{bias}_twice_{twice}", "when": when, "passes": passes})
    body = """
  let scaled = {{ dtypes.T }}(params.factor) * x[i] {{ "+ bias[i]" if present.bias }};
  {% if attrs.mode == "negated" %}
  y[i] = -scaled;
  {% else %}
  y[i] = scaled;
  {% endif %}
  {{ "twice[i] = 2 * y[i];" if present.twice }}"""
    return write(
        folder,
        "scale",
        {"scale": body},
        description="Multiplies by a factor.",
        inputs={
            "x": {"dtype": "T", "description": "What is scaled."},
            "bias": {"dtype": "T", "optional": True},
        },
        outputs={
            "y": {"dtype": "T", "shape": "shapes.x"},
            "twice": {"dtype": "T", "shape": "shapes.x", "optional": True},
        },
        attributes={"factor": {"default": 2}, "mode": {"default": "plain"}},
        attributeConstraints={"mode": {"values": ["plain", "negated"]}},
        variants=variants,
    )


def accumulate(folder):
    """`state += amount * x`, in place."""
    return write(
        folder,
        "accumulate",
        {"accumulate": "  state[i] += {{ dtypes.T }}(params.amount) * x[i];"},
        inputs={"state": {"dtype": "T"}, "x": {"dtype": "T"}},
        outputs={"state": {"dtype": "T", "shape": "shapes.state"}},
        args={"amount": {"kind": "f32"}},
        variants=[
            {
                "id": "only",
                "when": ["sameShape(shapes.x, shapes.state)"],
                "passes": [
                    step("accumulate", ["state", "x"], "numel(shapes.x)", amount="args.amount")
                ],
            }
        ],
    )


def moments(folder):
    """The sums of the rows of a matrix, and by a second pass that reads them their squares."""
    body = """
  var total = {{ dtypes.T }}();
  let columns = arrayLength(&x) / params.size;
  for (var at = 0u; at < columns; at++) { total += x[i * columns + at]; }
  total_[i] = total;"""
    return write(
        folder,
        "moments",
        {"sum": body, "square": "  square[i] = total_[i] * total_[i];"},
        inputs={"x": {"dtype": "T", "rank": 2}},
        outputs={
            "total": {"dtype": "T", "shape": ["dim(shapes.x, 0)"]},
            "square": {"dtype": "T", "shape": ["dim(shapes.x, 0)"]},
        },
        bindings={
            "written": {"name": "total_", "arg": "total"},
            "read": {"name": "total_", "arg": "total", "buffer": "read-only-storage"},
        },
        variants=[
            {
                "id": "only",
                "when": ["ranks.x == 2", "dim(shapes.x, 1) > 0"],
                "passes": [
                    step("sum", ["x", "written"], "dim(shapes.x, 0)"),
                    step("square", ["read", "square"], "dim(shapes.x, 0)"),
                ],
            }
        ],
    )


def take(folder):
    """Rows of a matrix by int64 numbers, which are also given back, and their largest."""
    body = """
  let row = u32(rows[i / params_columns()]);
  y[i] = x[row * params_columns() + i % params_columns()];
}
fn params_columns() -> u32 { return {{ dim(shapes.x, 1) }}u;"""
    return write(
        folder,
        "take",
        {"take": body, "copy": "  named[i] = wide[i];"},
        typeConstraints={"T": ["float32"], "I": ["int64"]},
        inputs={
            "x": {"dtype": "T"},
            "rows": {"dtype": "I", "storage": "int32", "narrowing": "checked"},
            "wide": {"dtype": "int64"},
        },
        outputs={
            "y": {"dtype": "T", "shape": ["dim(shapes.rows, 0)", "dim(shapes.x, 1)"]},
            "named": {"dtype": "int64", "shape": "shapes.wide"},
        },
        variants=[
            {
                "id": "only",
                "passes": [
                    step("take", ["x", "rows", "y"], "numel(shapes.y)"),
                    step("copy", ["wide", "named"], "numel(shapes.wide)"),
                ],
            }
        ],
    )
