"""Loading a manifest: what is wrong in it is an error that gives the file and the JSON path."""

import copy
import json
import os
import re
import shutil
from pathlib import Path

import pytest
from engine import FIRST, SPECS, resolved
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_webgpu import capabilities, plan, resources, spec
from jax_webgpu.errors import ExpressionError, JaxWebGPUError, SpecError
from jax_webgpu.expressions import parse
from jax_webgpu.resolve import replace
from jax_webgpu.spec import evaluate
from jax_webgpu.values import UNDEFINED

FILE = Path("kernels/manifest.json")
DOCUMENTS = {
    name.rpartition(".")[2]: json.loads((resources.specs() / f"{name}.json").read_bytes())
    for name in SPECS
}


def load(document):
    data = document if isinstance(document, bytes) else json.dumps(document).encode()
    return spec.loads(data, FILE, resources.shaders())


def edited(name, *edits):
    """A manifest with some places changed; an edit is a path and the new value, or `GONE`."""
    document = copy.deepcopy(DOCUMENTS[name])
    for path, value in edits:
        *above, last = path
        value = copy.deepcopy(value)
        place = document
        for key in above:
            place = place[key]
        if value is GONE:
            del place[last]
        elif isinstance(place, list) and last == len(place):
            place.append(value)
        else:
            place[last] = value
    return document


class GONE:
    """In place of a value: the key is deleted."""


def shown(path):
    """A path as the messages write it."""
    return "$" + "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path)


def test_the_real_manifests_load():
    assert [str(each) for each in map(repr, SPECS.values())] == list(SPECS)
    rotary, split = SPECS.values()
    assert (rotary.name, rotary.domain, rotary.since_version) == ("RotaryEmbedding", "ai.onnx", 23)
    assert len(rotary.variants) + len(split.variants) == 21
    assert len(rotary.templates) + len(split.templates) == 6
    assert (
        rotary.inputs["positionIds"].storage == "uint32" and rotary.inputs["positionIds"].optional
    )
    assert rotary.attributes["interleaved"].values == (0, 1)
    assert rotary.attributes["num_heads"].default is UNDEFINED
    assert split.variant("two_outputs").priority == 0
    assert evaluate(rotary.outputs["y"].shape, {"shapes": {"x": [2, 3]}}) == [2, 3]
    assert load(DOCUMENTS["Split"]) == load(DOCUMENTS["Split"])


# --- malformed documents ------------------------------------------------------------------------

V0 = ("variants", 0)
PASS = (*V0, "passes", 0)
BINDINGS = (*PASS, "bindings")
FIELD = ("bindings", "params", "struct", 0)
GROUP = {"repeat": {"count": 2, "index": "i"}, "passes": []}

# The places at which an unknown key is put, each an object of another kind.
OBJECTS = [
    (),
    ("inputs", "input"),
    ("outputs", "y0"),
    ("attributes", "axis"),
    ("attributeConstraints", "axis"),
    ("args", "n"),
    ("tunables", "WORKGROUP_SIZE"),
    ("requires",),
    ("bindings", "input"),
    FIELD,
    V0,
    (*V0, "requires"),
    (*V0, "tunables", "T"),
    (*V0, "intermediates", 0),
    PASS,
    (*PASS, "dispatch"),
    (*PASS, "viewAlias", 0),
    (*BINDINGS, 0),
    (*V0, "passes", 1),
    (*V0, "passes", 1, "repeat"),
]
# What makes the places exist that the manifest lacks.
ADDED = [
    (("attributeConstraints",), {"axis": {}}),
    (("args",), {"n": {"kind": "u32", "required": False}}),
    (("requires",), {}),
    ((*V0, "requires"), {}),
    ((*V0, "tunables"), {"T": {"default": 1}}),
    ((*V0, "intermediates"), [{"id": "tmp", "dtype": "float32", "shape": [1]}]),
    ((*V0, "passes", 1), GROUP),
]


@pytest.mark.parametrize("place", OBJECTS, ids=shown)
def test_unknown_key(place):
    assert load(edited("Split", *ADDED))
    document = edited("Split", *ADDED, ((*place, "colour"), "red"))
    path = re.escape(shown((*place, "colour")))
    with pytest.raises(
        SpecError, match=rf"^{FILE}: {path}: unknown key 'colour'; known here: [$\w]"
    ):
        load(document)


@pytest.mark.parametrize(
    "place",
    [
        ("name",),
        ("outputs",),
        ("variants",),
        ("inputs", "input", "dtype"),
        ("outputs", "y0", "dtype"),
        ("args", "n", "kind"),
        ("tunables", "WORKGROUP_SIZE", "default"),
        (*FIELD, "name"),
        (*FIELD, "type"),
        (*V0, "id"),
        (*V0, "passes"),
        (*V0, "intermediates", 0, "id"),
        (*V0, "intermediates", 0, "dtype"),
        (*V0, "intermediates", 0, "shape"),
        (*PASS, "shader"),
        (*PASS, "bindings"),
        (*PASS, "dispatch"),
        (*PASS, "viewAlias", 0, "input"),
        (*PASS, "viewAlias", 0, "output"),
        (*V0, "passes", 1, "passes"),
        (*V0, "passes", 1, "repeat", "count"),
        (*V0, "passes", 1, "repeat", "index"),
    ],
    ids=shown,
)
def test_missing_key(place):
    *above, key = place
    document = edited("Split", *ADDED, (place, GONE))
    message = f"^{FILE}: {re.escape(shown(above))}: the key '{key}' is missing$"
    with pytest.raises(SpecError, match=message):
        load(document)


OBJECT, LIST, STRING, BOOLEAN = "an object", "a list", "a string", "a boolean"
NUMBER, WHOLE, AMOUNT = "a number", "a whole number", "a number or an expression"
SCALAR, SHAPE = "a number, a string or a boolean", "an expression or a list"
TYPES = [
    ((), OBJECT),
    (("name",), STRING),
    (("domain",), STRING),
    (("description",), STRING),
    (("sinceVersion",), WHOLE),
    (("inputs",), OBJECT),
    (("inputs", "input"), OBJECT),
    (("inputs", "input", "dtype"), STRING),
    (("inputs", "input", "optional"), BOOLEAN),
    (("inputs", "input", "onnx"), STRING),
    (("inputs", "split", "storage"), STRING),
    (("inputs", "split", "narrowing"), STRING),
    (("outputs",), OBJECT),
    (("outputs", "y0", "shape"), SHAPE),
    (("args",), OBJECT),
    (("args", "n"), OBJECT),
    (("args", "n", "kind"), STRING),
    (("args", "n", "required"), BOOLEAN),
    (("args", "n", "oneOf"), LIST),
    (("attributes",), OBJECT),
    (("attributes", "axis"), OBJECT),
    (("attributeConstraints",), OBJECT),
    (("attributeConstraints", "axis", "required"), BOOLEAN),
    (("attributeConstraints", "axis", "values"), LIST),
    (("typeConstraints",), OBJECT),
    (("typeConstraints", "T"), LIST),
    (("typeConstraints", "T", 0), STRING),
    (("tunables",), OBJECT),
    (("tunables", "WORKGROUP_SIZE"), OBJECT),
    (("tunables", "WORKGROUP_SIZE", "default"), SCALAR),
    (("derive",), OBJECT),
    (("when",), LIST),
    (("requires",), OBJECT),
    (("requires", "features"), LIST),
    (("requires", "limits"), OBJECT),
    (("requires", "limits", "maxBufferSize"), WHOLE),
    (("requires", "subgroupMinSize"), WHOLE),
    (("bindings",), OBJECT),
    (("bindings", "input"), OBJECT),
    (("bindings", "input", "elementType"), STRING),
    (("bindings", "params", "struct"), LIST),
    ((*FIELD, "name"), STRING),
    ((*FIELD, "type"), STRING),
    ((*FIELD, "default"), SCALAR),
    ((*FIELD, "required"), BOOLEAN),
    (("variants",), LIST),
    (V0, OBJECT),
    ((*V0, "id"), STRING),
    ((*V0, "priority"), NUMBER),
    ((*V0, "when"), LIST),
    ((*V0, "when", 0), STRING),
    ((*V0, "demoteWhen"), LIST),
    ((*V0, "supersededBy"), LIST),
    ((*V0, "derive"), OBJECT),
    ((*V0, "intermediates"), LIST),
    ((*V0, "intermediates", 0, "shape"), SHAPE),
    ((*V0, "intermediates", 0, "shape", 0), AMOUNT),
    ((*V0, "intermediates", 0, "zeroInit"), BOOLEAN),
    ((*V0, "passes"), LIST),
    (PASS, OBJECT),
    ((*PASS, "name"), STRING),
    ((*PASS, "shader"), STRING),
    ((*PASS, "derive"), OBJECT),
    (BINDINGS, LIST),
    ((*BINDINGS, 0), OBJECT),
    ((*BINDINGS, 0, "arg"), STRING),
    ((*BINDINGS, 0, "length"), AMOUNT),
    ((*PASS, "dispatch"), OBJECT),
    ((*PASS, "dispatch", "x"), AMOUNT),
    ((*PASS, "viewAlias"), LIST),
    ((*V0, "passes", 1, "repeat"), OBJECT),
    ((*V0, "passes", 1, "repeat", "count"), AMOUNT),
    ((*V0, "passes", 1, "repeat", "index"), STRING),
    ((*V0, "passes", 1, "passes"), LIST),
]


@pytest.mark.parametrize(("place", "expected"), TYPES, ids=[shown(place) for place, _ in TYPES])
def test_wrong_type(place, expected):
    limits = (("requires",), {"limits": {"maxBufferSize": 1}})
    for value, kind in ((None, "null"), ([], "a list"), ({}, "an object"), (True, "a boolean")):
        if kind in expected or (kind == "a list" and expected == SHAPE):
            continue
        document = value
        if place:
            document = edited("Split", *ADDED, limits, (place, value))
        path = re.escape(shown(place))
        with pytest.raises(SpecError, match=f"^{FILE}: {path}: expected {expected}, got {kind}$"):
            load(document)


@pytest.mark.parametrize(
    ("name", "edit", "message"),
    [
        # Types and ports.
        ("Split", (("inputs", "input", "dtype"), "float8"),
         "$.inputs.input.dtype: 'float8' is no type; known here: T, S, float32"),
        ("Split", (("typeConstraints", "T", 1), "half"), "$.typeConstraints.T[1]: expected one of"),
        ("Split", (("typeConstraints", "T"), []), "$.typeConstraints.T: a type variable needs at"),
        ("RotaryEmbedding", (("inputs", "x", "storage"), "uint32"),
         "$.inputs.x.storage: only an int64 port has a storage, and x is T"),
        ("Split", (("inputs", "split", "storage"), "int8"), "$.inputs.split.storage: expected one"),
        ("Split", (("inputs", "split", "narrowing"), "wrapping"),
         "$.inputs.split.narrowing: expected one of checked, saturating, got 'wrapping'"),
        ("Split", (("inputs", "y0"), {"dtype": "float32"}),
         "$.outputs.y0: the in-out port y0 has two dtypes"),
        ("Split", (("args",), {"n": {"kind": "u64"}}), "$.args.n.kind: expected one of u32, i32"),
        ("RotaryEmbedding", (("attributeConstraints", "angle"), {}),
         "$.attributeConstraints.angle: angle is no attribute"),
        # Expressions.
        ("Split", (("derive", "axis"), "attrs.axis +"), "$.derive.axis: "),
        ("Split", (("derive", "axis"), "ranks.input ** 2"),
         "$.derive.axis: Pow is not in the manifest format"),
        ("Split", (("derive", "axis"), "outputCount"),
         "$.derive.axis: unknown name outputCount in `outputCount`"),
        ("Split", (("derive", "axis"), "axis + 1"), "$.derive.axis: unknown name axis in"),
        ("Split", (("derive", "new"), {"a": [1, "b + c"]}),
         "$.derive.new.a[1]: unknown name b, c in `b + c`"),
        ("Split", (("derive", "derive"), 1), "$.derive.derive: `derive` is the object of all"),
        ("Split", (("when",), ["axis > missing"]), "$.when[0]: unknown name missing in"),
        ("Split", ((*V0, "when", 0), "oneOutputContrac"),
         "$.variants[0].when[0]: unknown name oneOutputContrac in `oneOutputContrac`"),
        # A variant's own derived values are not in scope for its clauses.
        ("Split", (("variants", 1, "when", 0), "vectorScalar == 1"),
         "$.variants[1].when[0]: unknown name vectorScalar in"),
        ("Split", ((*V0, "demoteWhen"), ["nope"]), "$.variants[0].demoteWhen[0]: unknown name"),
        ("Split", (("variants", 1, "derive", "vectorScalar"), "vectr"),
         "$.variants[1].derive.vectorScalar: unknown name vectr in"),
        ("Split", ((*PASS, "derive", "count"), "numel(shape.y0)"),
         "$.variants[0].passes[0].derive.count: unknown name shape in `numel(shape.y0)`"),
        ("Split", ((*PASS, "dispatch", "x"), "groupCount"),
         "$.variants[0].passes[0].dispatch.x: unknown name groupCount in"),
        ("Split", ((*FIELD, "value"), "numl(shapes.y0)"),
         "$.bindings.params.struct[0].value: unknown name numl in"),
        ("Split", (("outputs", "y0", "shape"), ["dim(shapes.input, axs)"]),
         "$.outputs.y0.shape[0]: unknown name axs in"),
        ("Split", (("bindings", "unused"),
          {"struct": [{"name": "n", "type": "u32", "value": "("}]}),
         "$.bindings.unused.struct[0].value: "),
        # Variants.
        ("Split", (("variants", 3, "id"), "two_outputs"),
         "$.variants[5]: the id 'two_outputs' is taken already"),
        ("Split", (("variants", 3, "supersededBy"), ["two_outputs", "six_outputs"]),
         "$.variants[3].supersededBy[1]: 'six_outputs' is no variant"),
        ("Split", ((*V0, "intermediates"), [{"id": "y0", "dtype": "float32", "shape": []}]),
         "$.variants[0].intermediates[0]: the id 'y0' is taken already"),
        ("Split", ((*V0, "intermediates"), [{"id": "t", "dtype": "T", "shape": []}]),
         "$.variants[0].intermediates[0].dtype: expected one of float32"),
        # Bindings.
        ("Split", ((*BINDINGS, 0), "inputs"),
         "$.variants[0].passes[0].bindings[0]: 'inputs' is no binding, port or intermediate"),
        ("Split", ((*BINDINGS, 0), {"arg": "inputs"}),
         "$.variants[0].passes[0].bindings[0]: 'inputs' is no port or intermediate: input, split"),
        ("Split", ((*BINDINGS, 0), {"scratch": "tmp"}),
         "$.variants[0].passes[0].bindings[0]: 'tmp' is no port or intermediate"),
        ("Split", ((*BINDINGS, 0), {"elementType": "f32"}),
         "$.variants[0].passes[0].bindings[0]: a binding needs a name, an arg or a scratch"),
        ("Split", ((*BINDINGS, 1, "name"), "src"),
         "$.variants[0].passes[0].bindings[1]: two bindings are named src"),
        ("Split", ((*BINDINGS, 0, "elementType"), "$scalr"),
         "$.variants[0].passes[0].bindings[0].elementType: 'scalr' is no type variable and no"),
        ("Split", ((*BINDINGS, 0, "elementType"), "f64"),
         "$.variants[0].passes[0].bindings[0].elementType: 'f64' is not a WGSL scalar, vector,"),
        ("Split", ((*BINDINGS, 0, "elementType"), "Entry"),
         "$.variants[0].passes[0].bindings[0].elementType: 'Entry' is not a WGSL scalar"),
        ("Split", ((*BINDINGS, 0, "name"), "a b"),
         "$.variants[0].passes[0].bindings[0].name: 'a b' is no name in WGSL"),
        ("Split", ((*BINDINGS, 0), {"arg": "input", "name": "__x"}),
         "$.variants[0].passes[0].bindings[0].name: '__x' is no name in WGSL"),
        ("Split", ((*FIELD, "name"), "n: u32, m"),
         "$.bindings.params.struct[0].name: 'n: u32, m' is no name in WGSL"),
        ("Split", (("bindings", "params", "structName"), "_"),
         "$.bindings.params.structName: '_' is no name in WGSL"),
        ("Split", ((*BINDINGS, 0, "buffer"), "texture"),
         "$.variants[0].passes[0].bindings[0].buffer: expected one of uniform, storage"),
        ("Split", (("bindings", "input", "elementType"), "$vectorScalr"),
         "$.bindings.input.elementType: 'vectorScalr' is no type variable and no derived value"),
        ("Split", ((*FIELD, "type"), "f16"),
         "$.bindings.params.struct[0].type: expected one of u32, i32, f32, got 'f16'"),
        ("Split", ((*FIELD, "value"), GONE),
         "$.bindings.params.struct[0]: y0Count has no value, no default, and is no arg"),
        # Passes.
        ("Split", ((*PASS, "shader"), "datamove-copy.wgsl.jinja"),
         "$.variants[0].passes[0].shader: cannot read the template datamove-copy.wgsl.jinja"),
        ("Split", ((*PASS, "dispatch"), {"x": 1, "workgroups": 2}),
         "$.variants[0].passes[0].dispatch: expected {x, y, z}, {threads, workgroupSize} or"),
        ("Split", ((*PASS, "dispatch"), {"threads": 1}),
         "$.variants[0].passes[0].dispatch: expected {x, y, z}"),
        ("Split", ((*PASS, "dispatch"), {"workgroups": 1, "y": 1}),
         "$.variants[0].passes[0].dispatch: expected {x, y, z}"),
        ("Split", ((*PASS, "dispatch"), {"y": 1}),
         "$.variants[0].passes[0].dispatch: expected {x, y, z}"),
        ("Split", ((*PASS, "viewAlias", 0, "input"), "input"),
         "$.variants[0].passes[0].viewAlias[0].input: expected one of the pass's bindings: src"),
    ],
    ids=lambda each: each[:60] if isinstance(each, str) and each.startswith("$") else "",
)  # fmt: skip
def test_malformed(name, edit, message):
    with pytest.raises(SpecError, match=re.escape(f"{FILE}: {message}")):
        load(edited(name, edit))


@pytest.mark.parametrize(
    "name", ["../secret", "/etc/passwd", "a/b", "..", ".", "", "a\\b", "C:x", "a\0b"]
)
def test_a_template_s_name_is_no_path(name):
    with pytest.raises(SpecError) as caught:
        load(edited("Split", ((*PASS, "shader"), name)))
    place = f"{FILE}: $.variants[0].passes[0].shader: "
    assert str(caught.value) == place + f"{name!r} is not the name of a file beside the manifest"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "Expecting value: line 1 column 1"),
        (b"{", "Expecting property name enclosed in double quotes: line 1 column 2"),
        (b'{"a": 1,}', "line 1 column"),
        (b"\xff\xfe\xfa", "codec can't decode"),
        (b'{"a": NaN}', "$.a: NaN is not JSON"),
        (b'{"a": [1, {"b": -Infinity}]}', "$.a[1].b: -Infinity is not JSON"),
        (b'{"a": 1, "b": {"c": 1, "c": 2}}', "$.b.c: the key 'c' stands twice in one object"),
        (b'[{"$comment": {"a": 1, "a": 1}}]', "$[0].$comment.a: the key 'a' stands twice"),
        (b'{"a": ' + b"9" * 5000 + b"}", "Exceeds the limit"),
        (b"[" * 100_000, "$: nested too deeply"),
        (b'{"name": "a", "outputs": {}, "variants": [], "derive": {"a": '
         + b"[" * 700 + b"]" * 700 + b"}}", "$: nested too deeply"),
    ],
    ids=lambda each: each[:30] if isinstance(each, str) else "",
)  # fmt: skip
def test_what_is_not_json(text, message):
    with pytest.raises(SpecError, match=re.escape(f"{FILE}: ") + ".*" + re.escape(message)):
        load(text)


def test_duplicates_in_a_real_manifest():
    text = json.dumps(DOCUMENTS["Split"]).replace('"priority": 30', '"priority": 30, "priority": 1')
    with pytest.raises(SpecError, match=re.escape(f"{FILE}: $.variants[0].priority: the key")):
        load(text.encode())


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(SpecError, match=re.escape(f"{tmp_path / 'none.json'}: No such file")):
        spec.load(tmp_path / "none.json")


def test_errors_of_a_template_name_it_and_its_line(tmp_path):
    for path in resources.shaders().iterdir():
        shutil.copy(path, tmp_path)
    (tmp_path / "split-n.wgsl.jinja").write_text("fn main() {\n  {{ 1 + }}\n}")
    manifest = shutil.copy(resources.specs() / "ai.onnx.Split.json", tmp_path)
    with pytest.raises(SpecError) as caught:
        spec.load(Path(manifest))
    where = f"{manifest}: $.variants[5].passes[0].shader: split-n.wgsl.jinja:2: "
    assert str(caught.value).startswith(where)


def test_a_template_that_is_no_utf_8(tmp_path):
    (tmp_path / "datamove-flat-copy.wgsl.jinja").write_bytes(b"\xff")
    with pytest.raises(SpecError, match=r"\$\.variants\[0\]\.passes\[0\]\.shader: cannot read"):
        spec.loads(json.dumps(DOCUMENTS["Split"]).encode(), FILE, tmp_path)


@pytest.mark.skipif(os.name == "nt", reason="POSIX file modes")
def test_a_folder_that_is_a_template(tmp_path):
    (tmp_path / "datamove-flat-copy.wgsl.jinja").mkdir()
    with pytest.raises(SpecError, match="cannot read the template datamove-flat-copy"):
        spec.loads(json.dumps(DOCUMENTS["Split"]).encode(), FILE, tmp_path)


# --- what is well-formed ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "edits",
    [
        [(("$schema",), "https://example.com"), (("conformance",), {"any": ["thing"]})],
        [(("onnx",), {"any": 1}), (("inputs", "input", "layout"), "any")],
        [((*PASS, "profile"), True), ((*PASS, "submitAfter"), True)],
        [((*PASS, "subgroupCollectivesWidth"), 32), ((*FIELD, "internal"), True)],
        [((*PASS, "dispatch"), {"threads": "numel(shapes.y0)", "workgroupSize": 64})],
        [((*PASS, "dispatch"), {"workgroups": 7})],
        [((*PASS, "dispatch"), {"x": 1})],
        [((*V0, "supersededBy"), ["two_outputs"]), ((*V0, "demoteWhen"), ["axis > 0"])],
        [((*V0, "when"), GONE), ((*V0, "priority"), 2.5)],
        [(("requires",), {"features": ["shader-f16"], "limits": {"maxBufferSize": 1}})],
        [(("outputs", "y0", "shape"), ["outputCount", 1])],
        [(("outputs", "y0", "shape"), "fill(outputCount, 2)")],
        [(("inputs", "input", "rank"), "outputCount")],
        [(("derive", "optional"), "newName is defined and 1")],
        [(("derive", "flat"), {"list": [1, "axis", None, True], "object": {"a": "axis"}})],
        [((*BINDINGS, 2), {"name": "empty", "struct": []})],
        [((*FIELD, "value"), GONE), ((*FIELD, "required"), False)],
        [((*FIELD, "value"), GONE), ((*FIELD, "default"), 0)],
        [(("args",), {"y0Count": {"kind": "u32"}}), ((*FIELD, "value"), GONE)],
        [((*V0, "intermediates"), [{"id": "tmp", "dtype": "float32", "shape": "shapes.y0"}]),
         ((*BINDINGS, 2), "tmp"), ((*BINDINGS, 3), {"scratch": "tmp", "name": "again"})],
        [(("bindings", "stale"), {"arg": "gone", "elementType": "$gone"})],
    ],
    ids=lambda edits: ", ".join(shown(path) for path, _ in edits),
)  # fmt: skip
def test_well_formed(edits):
    assert load(edited("Split", *edits))


def test_comments_are_ignored_anywhere():
    def commented(node):
        if isinstance(node, dict):
            inner = {key: commented(value) for key, value in node.items()}
            return {"$comment": "unknown + + names", **inner}
        return [commented(each) for each in node] if isinstance(node, list) else node

    for name, document in DOCUMENTS.items():
        loaded, plain = load(commented(document)), SPECS[f"ai.onnx.{name}"]
        assert loaded.variants == plain.variants and loaded.inputs == plain.inputs
        assert loaded.derive == plain.derive and loaded.tunables == plain.tunables


def test_numbers_are_doubles_and_whole_where_they_can_be():
    loaded = load(
        edited(
            "Split",
            (("tunables", "WORKGROUP_SIZE", "default"), 64.0),
            (("derive", "one"), 1.0),
            (("attributes", "axis", "default"), -1.0),
        )
    )
    assert repr(loaded.tunables["WORKGROUP_SIZE"]) == "64"
    assert repr(loaded.derive["one"]) == "1"
    assert repr(loaded.attributes["axis"].default) == "-1"


def test_expressions_are_parsed_once_and_scalars_are_themselves():
    split = SPECS["ai.onnx.Split"]
    text = "attrs.axis if attrs.axis >= 0 else attrs.axis + ranks.input"
    assert split.derive["axis"] == parse(text)
    assert parse(text) is parse(text)
    assert dict(split.variants[1].passes[0].derive)["outputCountSpec"] == 2


def test_bindings_names_and_sources():
    rotary, split = SPECS.values()
    quad = rotary.variant("rank3_cache2_pos_quad").passes[0].bindings
    assert [(each.name, each.source) for each in quad] == [
        ("x", "x"),
        ("cos_cache", "cos"),
        ("sin_cache", "sin"),
        ("position_ids", "positionIds"),
        ("y", "y"),
        ("params", ""),
    ]
    copy_ = split.variant("one_output_copy").passes[0].bindings
    assert [(each.name, each.source) for each in copy_] == [("src", "input"), ("dst", "y0")]
    four = split.variant("four_outputs_block_vec4").passes[0].bindings
    assert [each.name for each in four] == ["input", "y0", "y1", "y2", "y3"]


def test_a_spec_is_its_bytes_and_its_templates(tmp_path):
    data = (resources.specs() / "ai.onnx.Split.json").read_bytes()
    for path in resources.shaders().iterdir():
        shutil.copy(path, tmp_path)
    here = spec.loads(data, FILE, resources.shaders())
    there = spec.loads(data, Path("elsewhere.json"), tmp_path)
    assert here == there and hash(here) == hash(there) and here != "Split"
    assert len({here, there, spec.loads(data + b"\n", FILE, tmp_path)}) == 2
    with (tmp_path / "split-n.wgsl.jinja").open("a") as file:
        file.write("// more")
    assert spec.loads(data, FILE, tmp_path) != here
    with (tmp_path / "rotary-embedding.wgsl.jinja").open("a") as file:
        file.write("// not one of Split's")
    assert spec.loads(data, FILE, tmp_path) == spec.loads(data, FILE, tmp_path)


# --- any mutation -------------------------------------------------------------------------------


def places(node, above=()):
    yield above
    items = node.items() if isinstance(node, dict) else enumerate(node)
    for key, value in items:
        if isinstance(value, dict | list):
            yield from places(value, (*above, key))
        else:
            yield (*above, key)


PLACES = {name: list(places(document))[1:] for name, document in DOCUMENTS.items()}
VALUES = st.sampled_from(
    [
        *(
            GONE,
            None,
            True,
            0,
            1,
            -1,
            2.5,
            1e300,
            64.0,
            [],
            {},
            [1],
            ["x"],
            {"x": 1},
            {"default": 2},
        ),
        *("", "x", "axis", "1 +", "shapes", "$T", "dim(shapes.input, 0)", "ranks.y0 < 1", "f32"),
        *("true", "../x", "derive", "min(1, attrs)", "[1, [2]]", "vec4<f32>", "1 / 0", "present"),
    ]
)
CALLS = {
    name: [resolved(case) for case in FIRST.values() if case.spec.endswith(name)]
    for name in DOCUMENTS
}


@settings(max_examples=100, deadline=None)
@given(data=st.data())
@pytest.mark.parametrize("name", DOCUMENTS)
def test_a_mutated_manifest_loads_or_is_refused(name, data):
    edits = data.draw(
        st.lists(st.tuples(st.sampled_from(PLACES[name]), VALUES), min_size=1, max_size=3)
    )
    try:
        document = edited(name, *edits)
    except (KeyError, IndexError, TypeError):
        return  # an earlier edit took the place of a later one away
    try:
        loaded = load(document)
    except SpecError as error:
        assert str(error).startswith(f"{FILE}: $")
        return
    # What loads may still be nonsense, but planning with it says so.
    for call in data.draw(st.permutations(CALLS[name]))[:2]:
        try:
            plan.make(replace(call, spec=loaded), capabilities.PRESETS["floor"]).describe()
        except (JaxWebGPUError, ExpressionError) as error:
            assert str(error)
