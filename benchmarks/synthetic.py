"""A kernel folder as large as published ones are, with nothing in it that is drawn at random.

A matrix product with a bias and an activation in some sixty variants, by element type, tile,
vector width and what the device has, and a recurrent variant of hundreds of passes. The manifest
has about 300 KiB; the templates have macros, namespaces and loops, the largest about 50 KiB.
"""

import functools
import json

TILES = ((16, 16), (32, 16), (16, 32), (32, 32), (64, 32), (32, 64), (64, 64), (128, 64))
FAMILIES = ("plain", "bias", "gelu", "relu", "gated", "scaled", "masked")
STEPS = 256

PRODUCT, REDUCTION, STEP = (
    "synthetic-product.wgsl.jinja",
    "synthetic-reduction.wgsl.jinja",
    "synthetic-step.wgsl.jinja",
)


@functools.cache
def files():
    """The folder's files, by name: bytes."""
    return {
        "manifest.json": json.dumps(_manifest(), indent=2).encode(),
        PRODUCT: _product().encode(),
        REDUCTION: _reduction().encode(),
        STEP: _STEP.encode(),
    }


def write(folder):
    """Writes the folder; returns the path of its manifest."""
    for name, data in files().items():
        (folder / name).write_bytes(data)
    return folder / "manifest.json"


# --- the manifest -------------------------------------------------------------------------------


def _manifest():
    return {
        "$schema": "https://example.com/kernel-manifest-2.1.json",
        "name": "Synthetic",
        "description": "y = act(a @ b * scale + bias), and a recurrence along the rows of a",
        "sinceVersion": 1,
        "inputs": {
            "a": {"dtype": "T", "description": "The left matrices, (..., rows, inner)."},
            "b": {"dtype": "T", "description": "The right matrices, (..., inner, columns)."},
            "bias": {"dtype": "T", "optional": True, "rank": 1},
            "scale": {"dtype": "T", "optional": True, "rank": 1},
            "lengths": {"dtype": "I", "optional": True, "storage": "int32", "narrowing": "checked"},
            "h": {"dtype": "T", "optional": True, "rank": 2},
        },
        "outputs": {"y": {"dtype": "T", "shape": "outShape", "rank": "max(ranks.a, ranks.b)"}},
        "attributes": {
            "activation": {"default": "none", "description": "none, relu or gelu"},
            "transA": {"default": 0},
            "transB": {"default": 0},
            "alpha": {"default": 1},
            "recurrent": {"default": 0, "description": "1 for h' = act(h + a_t)."},
            "axes": {},
        },
        "attributeConstraints": {
            "activation": {"values": ["none", "relu", "gelu"]},
            **{name: {"values": [0, 1]} for name in ("transA", "transB", "recurrent")},
        },
        "typeConstraints": {"T": ["float32", "float16"], "I": ["int64"]},
        "tunables": {
            "WORKGROUP_SIZE": {"default": 256, "description": "Invocations of a flat workgroup."},
            "SPLIT_K": {"default": 1, "description": "Parts of the inner axis."},
            "SUBGROUPS": {"default": True},
        },
        "derive": _derived(),
        "when": ["ranks.a >= 2 and ranks.b >= 2", "f16Ok(dtypes.T)"],
        "bindings": _bindings(),
        "variants": [*_variants(), _recurrent()],
    }


def _derived():
    values = {
        "m": "dim(shapes.a, -1) if attrs.transA == 1 else dim(shapes.a, -2)",
        "k": "dim(shapes.a, -2) if attrs.transA == 1 else dim(shapes.a, -1)",
        "kb": "dim(shapes.b, -1) if attrs.transB == 1 else dim(shapes.b, -2)",
        "n": "dim(shapes.b, -2) if attrs.transB == 1 else dim(shapes.b, -1)",
        "batchA": "prefix(shapes.a, ranks.a - 2)",
        "batchB": "prefix(shapes.b, ranks.b - 2)",
        "batchShape": "broadcastShape(batchA, batchB)",
        "outShape": "shapes.a if attrs.recurrent == 1 else batchShape + [m, n]",
        "batches": "numel(batchShape)",
        "half": 'dtypes.T == "f16"',
        "elementBytes": "dtypeBytes(dtypes.T)",
        "workgroupCap": "min(device.limits.maxComputeInvocationsPerWorkgroup, "
        "device.limits.maxComputeWorkgroupSizeX)",
        "sharedCap": "device.limits.maxComputeWorkgroupStorageSize / elementBytes",
        "groupCap": "min(device.limits.maxComputeWorkgroupsPerDimension, DISPATCH_FOLD_WIDTH)",
        "workgroupSize": "min(tunables.WORKGROUP_SIZE, workgroupCap)",
        "subgroupsOk": 'tunables.SUBGROUPS and device.features.has("subgroups") and '
        "(device.adapterInfo.subgroupMinSize | default(4)) >= 8",
        "isApple": 'device.adapterInfo.vendor == "apple"',
        "productContract": "attrs.recurrent == 0 and k == kb and broadcastable(batchB, batchShape) "
        "and sameShape(shapes.y, outShape) and numel(shapes.y) > 0",
        "recurrentContract": "attrs.recurrent == 1 and ranks.a == 2 and sameShape(shapes.a, "
        "shapes.y) and (not present.h or numel(shapes.h) == dim(shapes.a, 1)) and not present.bias",
    }
    contracts = {
        "plain": "not present.bias and not present.scale",
        "bias": "present.bias and ranks.bias == 1 and dim(shapes.bias, 0) == n and not "
        "present.scale",
        "gelu": 'attrs.activation == "gelu" and (not present.bias or dim(shapes.bias, 0) == n)',
        "relu": 'attrs.activation == "relu" and (not present.bias or dim(shapes.bias, 0) == n)',
        "gated": "present.scale and numel(shapes.scale) == n and n % 2 == 0 and not present.bias",
        "scaled": "present.scale and numel(shapes.scale) in [1, n] and attrs.alpha != 0",
        "masked": "present.lengths and ranks.lengths == 1 and dim(shapes.lengths, 0) == batches",
    }
    for family in FAMILIES:
        values[f"{family}Contract"] = f"productContract and {contracts[family]}"
    for rows, columns in TILES:
        tile = f"tile{rows}x{columns}"
        values |= {
            f"{tile}RowsOk": f"m >= {rows} and (m % {rows} == 0 or m >= {rows * 4})",
            f"{tile}ColumnsOk": f"n >= {columns} and (n % {columns} == 0 or n >= {columns * 4})",
            f"{tile}Shared": f"({rows} + {columns}) * (32 if half else 16)",
            f"{tile}Threads": f"ceilDiv({rows}, 4) * ceilDiv({columns}, 4)",
            f"{tile}Fits": f"{tile}Shared <= sharedCap and {tile}Threads <= workgroupCap and "
            f"{tile}Threads * 4 >= workgroupSize / 16",
            f"{tile}GroupsX": f"ceilDiv(n, {columns})",
            f"{tile}GroupsY": f"ceilDiv(m, {rows}) * max(1, tunables.SPLIT_K)",
            f"{tile}DispatchOk": f"{tile}GroupsX <= groupCap and {tile}GroupsY <= groupCap and "
            "batches <= groupCap",
            f"{tile}Ok": f"{tile}RowsOk and {tile}ColumnsOk and {tile}Fits and {tile}DispatchOk",
        }
    return values


def _field(name, value, kind="u32"):
    return {"name": name, "type": kind, "value": value}


def _bindings():
    handles = {}
    for family in FAMILIES:
        for rows, columns in TILES:
            tile = f"{family}_{rows}x{columns}"
            handles[f"a_{tile}"] = {"name": "a", "elementType": "$vector"}
            handles[f"b_{tile}"] = {"name": "b", "elementType": "$vector"}
            handles[f"y_{tile}"] = {"name": "y", "elementType": "$outVector"}
            handles[f"params_{tile}"] = {
                "name": "params",
                "struct": [
                    _field("m", "m"),
                    _field("n", "n"),
                    _field("k", "k"),
                    _field("batches", "batches"),
                    _field("tilesM", f"ceilDiv(m, {rows})"),
                    _field("tilesN", f"ceilDiv(n, {columns})"),
                    _field("strideA", "m * k if numel(batchA) > 1 else 0"),
                    _field("strideB", "k * n if numel(batchB) > 1 else 0"),
                    _field("alpha", "attrs.alpha", "f32"),
                    _field("lastRow", f"m - floor((m - 1) / {rows}) * {rows}"),
                    _field("lastColumn", f"n - floor((n - 1) / {columns}) * {columns}"),
                    _field(f"{family}Rows", f"min(m, {rows}) * ({len(family)} - 1) + {rows}"),
                    _field(f"{family}Columns", f"min(n, {columns}) * {len(family)} + {columns}"),
                ],
            }
    return handles


def _extras(family):
    return {
        "plain": [],
        "bias": ["bias"],
        "gelu": [],
        "relu": [],
        "gated": ["scale"],
        "scaled": ["scale"],
        "masked": [{"arg": "lengths", "elementType": "$I"}],
    }[family]


def _variants():
    for order, family in enumerate(FAMILIES):
        for size, (rows, columns) in enumerate(TILES):
            yield _product_variant(family, order, rows, columns, size)


def _product_variant(family, order, rows, columns, size):
    tile, name = f"tile{rows}x{columns}", f"{family}_{rows}x{columns}"
    width = 4 if columns >= 32 else 2
    subgroups = size % 4 == 3
    variant = {
        "id": name,
        "description": f"{family}, a tile of {rows} by {columns} an workgroup",
        "priority": 10 * size + order,
        "when": [
            f"{family}Contract",
            f"{tile}Ok",
            f"k % {width} == 0 and n % {width} == 0",
            "attrs.transA == 0",
            f"m * n * k >= {rows * columns * 64} and (m >= {rows + order} or batches > {order})",
            f"ceilDiv(m, {rows}) * ceilDiv(n, {columns}) * batches <= groupCap * {64 + order}",
            *(["subgroupsOk", 'device.features.has("subgroups")'] if subgroups else []),
        ],
        "demoteWhen": [f"isApple and not half and {rows * columns} >= 4096", f"m < {rows // 2}"],
        "requires": {"features": ["subgroups"]} if subgroups else {},
        "tunables": {
            "TILE_K": {"default": 16 if rows < 64 else 8, "description": "The inner axis's part."},
            "UNROLL": {"default": 4},
        },
        "derive": {
            "rows": rows,
            "columns": columns,
            "lanes": width,
            "vector": f'"vec{width}<" ~ dtypes.T ~ ">"',
            "outVector": f'"vec{width}<" ~ dtypes.T ~ ">"',
            "tileK": "min(tunables.TILE_K, pow2ceil(k))",
            "threadsX": f"ceilDiv({columns}, {width * 2})",
            "threadsY": f"ceilDiv({rows}, 4)",
            "splits": "max(1, min(tunables.SPLIT_K, ceilDiv(k, tileK)))",
            "family": f'"{family}"',
            "tilesM": f"ceilDiv(m, {rows}) + {order} - {order}",
            "tilesN": f"ceilDiv(n, {columns}) + {order} - {order}",
            "sharedBytes": f"({rows} + {columns}) * tileK * elementBytes + {16 * order}",
            "registers": f"{rows} / threadsY * (lanes if tileK >= {width} else 1) + {order}",
            "occupancy": f"floor(sharedCap * elementBytes / max(1, sharedBytes + {32 * order}))",
            "lastTile": f"[m - (tilesM - 1) * {rows}, n - (tilesN - 1) * {columns}, {order}]",
            "hasBias": "present.bias",
        },
        "passes": [
            {
                "id": "product",
                "name": f"Synthetic.{name}",
                "shader": PRODUCT,
                "derive": {
                    "exactRows": f"m % {rows} == 0",
                    "exactColumns": f"n % {columns} == 0",
                    "kTiles": "ceilDiv(k, tileK)",
                    "epilogue": f'"{family if family in ("gelu", "relu") else "none"}"',
                },
                "bindings": [f"a_{name}", f"b_{name}", *_extras(family),
                             f"y_{name}", f"params_{name}"],
                "dispatch": {
                    "x": f"min(ceilDiv((n), ({columns})), min(device.limits."
                    "maxComputeWorkgroupsPerDimension, 65535))",
                    "y": f"min(ceilDiv((m), ({rows})) * splits, min(device.limits."
                    "maxComputeWorkgroupsPerDimension, 65535))",
                    "z": "min(batches, device.limits.maxComputeWorkgroupsPerDimension)",
                },
            }
        ],
    }  # fmt: skip
    if size % 3 == 1:
        part = {"arg": "y", "name": "y", "elementType": "$outVector"}
        variant["passes"][0]["derive"]["outVector"] = f'"vec{width}<f32>"'  # into `parts`
        variant["intermediates"] = [
            {"id": "parts", "dtype": "float32", "shape": ["splits", "numel(shapes.y)"]}
        ]
        variant["passes"][0]["bindings"][-2] = {
            "scratch": "parts",
            "name": "y",
            "elementType": f"vec{width}<f32>",
        }
        variant["passes"].append(
            {
                "id": "reduction",
                "name": f"Synthetic.{name}.Reduction",
                "shader": REDUCTION,
                "derive": {"count": f"numel(shapes.y) / {width}", "parts_": "splits"},
                "bindings": [
                    {"scratch": "parts", "name": "parts", "elementType": f"vec{width}<f32>"},
                    part,
                    f"params_{name}",
                ],
                "dispatch": {
                    "threads": f"numel(shapes.y) / {width}",
                    "workgroupSize": "workgroupSize",
                },
            }
        )
    return variant


def _recurrent():
    return {
        "id": "recurrent",
        "priority": 1,
        "when": ["recurrentContract"],
        "derive": {"width": "dim(shapes.a, 1)", "steps": "dim(shapes.a, 0)"},
        "intermediates": [
            {"id": "state", "dtype": "float32", "shape": [2, "width"], "zeroInit": True}
        ],
        "passes": [
            {
                "id": "steps",
                "repeat": {"count": "steps", "index": "t"},
                "passes": [
                    {
                        "id": "step",
                        "name": "Synthetic.Step",
                        "shader": STEP,
                        "derive": {
                            "from": "t % 2 * width",
                            "into": "(t + 1) % 2 * width",
                            "groups": "ceilDiv(width, workgroupSize)",
                        },
                        "bindings": [
                            "a",
                            "y",
                            "state",
                            {
                                "name": "params",
                                "struct": [
                                    _field("t", "t"),
                                    _field("width", "width"),
                                    _field("start", "derive.from"),
                                    _field("end", "into"),
                                    _field("last", "t == steps - 1"),
                                    _field("alpha", "attrs.alpha", "f32"),
                                ],
                            },
                        ],
                        "dispatch": {"x": "groups"},
                    }
                ],
            }
        ],
    }


# --- the templates ------------------------------------------------------------------------------

_HEAD = """\
{#- One tile of the product a workgroup: the tiles of a and b go through workgroup memory. -#}
{% set wide = "vec" ~ lanes ~ "<f32>" %}
{% set ns = namespace(registers=0, loads=0) %}
{% macro guard(index, limit, exact) %}
{% if not exact %}
  if ({{ index }} < {{ limit }}) {
{% else %}
  {
{% endif %}
{% endmacro %}
{% macro load(name, row, column, stride) %}
{{ name }}[({{ row }}) * {{ stride }} + {{ column }}]
{%- endmacro %}
{% macro activate(value, kind) %}
{% if kind == "relu" %}
max({{ value }}, {{ wide }}(0.0))
{%- elif kind == "gelu" %}
0.5 * {{ value }} * (1.0 + tanh(0.7978845608 * ({{ value }} + 0.044715 * pow3({{ value }}))))
{%- else %}
{{ value }}
{%- endif %}
{% endmacro %}
{{ env.wgsl.resourceDeclarations }}

var<workgroup> tileA: array<{{ wide }}, {{ rows * tileK / lanes }}>;
var<workgroup> tileB: array<{{ wide }}, {{ columns * tileK / lanes }}>;

fn pow3(value: {{ wide }}) -> {{ wide }} { return value * value * value; }
"""

_SECTION = """
// Part {0}: {1} rows a thread.
{{% if rows % {1} == 0 and tileK >= {2} and ({0} % 4 == 0 or family == "{3}") %}}
fn accumulate{0}(row: u32, column: u32, start: u32) -> array<{{{{ wide }}}}, {1}> {{
  var sums = array<{{{{ wide }}}}, {1}>();
{{% for i in range({1}) %}}
{{% set ns.registers = ns.registers + 1 %}}
  // register {{{{ ns.registers }}}} of row {{{{ loop.index }}}} of {{{{ loop.length }}}}
  for (var inner = 0u; inner < {{{{ tileK / lanes }}}}u; inner++) {{
    let left = {{{{ load("tileA", "row + " ~ i ~ "u", "inner", (tileK / lanes) ~ "u") }}}};
{{% for lane in range(lanes) %}}
    sums[{{{{ i }}}}] += left[{{{{ lane }}}}]
      * {{{{ load("tileB", "inner * " ~ lanes ~ "u + " ~ lane ~ "u", "column", "{2}u") }}}};
{{% set ns.loads = ns.loads + 1 %}}
{{% endfor %}}
  }}
{{% endfor %}}
  return sums;
}}

fn store{0}(sums: array<{{{{ wide }}}}, {1}>, row: u32, column: u32) {{
{{% for i in range({1}) %}}
{{{{ guard("row + " ~ i ~ "u", "params.m", exactRows) }}}}
{{% if hasBias | default(false) and family == "bias" %}}
    let value{{{{ i }}}} = sums[{{{{ i }}}}] * params.alpha + f32(bias[column]);
{{% elif family == "scaled" or family == "gated" %}}
    let value{{{{ i }}}} = sums[{{{{ i }}}}] * params.alpha * f32(scale[column]);
{{% else %}}
    let value{{{{ i }}}} = sums[{{{{ i }}}}] * params.alpha;
{{% endif %}}
    let at{{{{ i }}}} = (row + {{{{ i }}}}u) * (params.n / {{{{ lanes }}}}u) + column;
    y[at{{{{ i }}}}] = {{{{ outVector }}}}({{{{ activate("value" ~ i, epilogue) }}}});
  }}
{{% endfor %}}
}}
{{% else %}}
// {{{{ rows }}}} rows are not cut into {1}, or {{{{ tileK }}}} is less than {2}, or not for {3}.
{{% endif %}}
"""

_MAIN = """
@compute @workgroup_size({{ threadsX }}, {{ threadsY }})
fn main(
  @builtin(workgroup_id) group: vec3<u32>,
  @builtin(local_invocation_id) local: vec3<u32>,
) {
  let row = group.y * {{ rows }}u + local.y * 4u;
  let column = group.x * {{ columns / lanes }}u + local.x;
{% for tile in range(min(kTiles, tunables.UNROLL)) %}
  { // of {{ kTiles }} tiles along the inner axis, {{ ns.registers }} registers
    let start = {{ tile * tileK / lanes }}u;
    tileA[local.y * {{ threadsX }}u + local.x] = {{ wide }}(a[row * (params.k / {{ lanes }}u)
      + start]);
    tileB[local.y * {{ threadsX }}u + local.x] = {{ wide }}(b[(start + local.y) * (params.n
      / {{ lanes }}u) + column]);
    workgroupBarrier();
    store0(accumulate0(row, column, start), row, column);
  }
{% endfor %}
}
"""

_STEP = """\
{#- One step of the recurrence. Which one is in the uniform, so that all share a pipeline. -#}
{{ env.wgsl.resourceDeclarations }}

@compute @workgroup_size({{ workgroupSize }})
fn main(@builtin(global_invocation_id) gid: vec3<u32>) {
  if (gid.x >= params.width) { return; }
  let before = state[params.start + gid.x];
{% if attrs.activation == "relu" %}
  let after = max(before + f32(a[params.t * params.width + gid.x]), 0.0) * params.alpha;
{% else %}
  let after = (before + f32(a[params.t * params.width + gid.x])) * params.alpha;
{% endif %}
  state[params.end + gid.x] = after;
  y[params.t * params.width + gid.x] = {{ dtypes.T }}(after);
}
"""


def _product():
    sections = [
        _SECTION.format(index, 1 << index % 4, 4 << index % 3, FAMILIES[index % 7])
        for index in range(32)
    ]
    return "".join([_HEAD, *sections, _MAIN])


def _reduction():
    body = "".join(
        f"{{% if parts_ > {index} %}}\n"
        f"  sum += parts[{index}u * {{{{ count }}}}u + at];\n"
        "{% endif %}\n"
        for index in range(64)
    )
    return f"""\
{{#- Adds the parts of the inner axis. -#}}
{{{{ env.wgsl.resourceDeclarations }}}}

@compute @workgroup_size({{{{ workgroupSize }}}})
fn main(@builtin(global_invocation_id) gid: vec3<u32>) {{
  let at = gid.x + gid.y * {{{{ DISPATCH_FOLD_WIDTH * workgroupSize }}}}u;
  if (at >= {{{{ count }}}}u) {{ return; }}
  var sum = vec{{{{ lanes }}}}<f32>();
{body}
  y[at] = {{{{ outVector }}}}(sum * params.alpha);
}}
"""
