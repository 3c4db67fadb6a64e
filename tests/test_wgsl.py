"""What is told of WGSL by its text: comments, f16, workgroup sizes, sizes of elements."""

import pytest

from jax_webgpu import dtypes, wgsl


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("a // b\nc", "a  \nc"),
        ("a // b\r c // d", "a  \r c  "),
        ("a // b\u2028c", "a  \u2028c"),
        ("a /* b */ c", "a   c"),
        ("a /* b /* c */ d */ e", "a   e"),
        ("a /* // */ b", "a   b"),
        ("a // /*\nb /* */", "a  \nb  "),
        ("a /* b", "a  "),
        ("a /* b /* c */ d", "a  "),
        ("a */ b", "a */ b"),
        ("a / b * c", "a / b * c"),
        ("/*/ a */ b", "  b"),
        ("/**/ b", "  b"),
        ("//", " "),
        ("", ""),
    ],
)
def test_comments(text, code):
    assert wgsl.code(text) == code


@pytest.mark.parametrize(
    ("text", "lacks"),
    [
        ("var a: f16;", True),
        ("var a: vec4<f16>;", True),
        ("var a: vec4h;", True),
        ("var a: mat2x2h;", True),
        ("let a = 0.5h;", True),
        ("let a = -1h;", True),
        ("let a = .5h;", True),
        ("let a = 1e-3h;", True),
        ("var a: f32; let length = x1h; let path2h = 0x1Fu;", False),
        ("enable f16; var a: f16;", False),
        ("enable subgroups,f16 ; var a: f16;", False),
        ("enable subgroups;\nenable f16; var a: f16;", False),
        ("requires packed_4x8_integer_dot_product; enable f16; var a: f16;", False),
        ("diagnostic(off, derivative_uniformity); enable f16; var a: f16;", False),
        ("enable my_f16; var a: f16;", True),
        ("enable subgroups; var a: f16;", True),
        ("fn enable() {} fn f16_() { var a: f16; }", True),
    ],
)
def test_f16_that_is_used_and_not_enabled(text, lacks):
    assert wgsl.lacks_f16(text) is lacks


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("@workgroup_size(64)", [64]),
        ("@compute @workgroup_size( 8u, 4i,2, )", [8, 4, 2]),
        ("@ workgroup_size\n(64)", [64]),
        ("@workgroup_size(SIZE)", []),
        ("@workgroup_size(8, SIZE)", []),
        ("@workgroup_size(" + "9" * 10_000 + ")", [2**64]),
        ("fn main() {}", []),
    ],
)
def test_workgroup_sizes(text, sizes):
    assert wgsl.workgroup_size(text) == sizes


@pytest.mark.parametrize(
    "text",
    ["/*" * 500_000, "// " * 500_000, "enable " * 200_000 + "f16", "1.1." * 300_000, "{ " * 500_000,
     "@workgroup_size(" * 100_000, "@workgroup_size(" + " 1," * 300_000, "/" * 1_000_000],
    ids=lambda text: text[:17],
)  # fmt: skip
def test_time_is_in_proportion_to_the_text(text, patience):
    with patience(5):
        code = wgsl.code(text)
        wgsl.lacks_f16(code), wgsl.lacks_f16(text + " f16")
        wgsl.workgroup_size(text)


@pytest.mark.parametrize(
    ("element", "size"),
    [
        *((scalar, 4) for scalar in ("f32", "i32", "u32", "atomic<u32>", "atomic<i32>")),
        ("f16", 2),
        ("vec2<f16>", 4),
        ("vec3<f16>", 8),
        ("vec4h", 8),
        ("vec2<u32>", 8),
        ("vec3<f32>", 16),
        ("vec3f", 16),
        ("vec4u", 16),
        ("vec4< i32 >", 16),
        ("mat2x2<f32>", 16),
        ("mat3x2f", 24),
        ("mat2x3<f32>", 32),
        ("mat3x3<f32>", 48),
        ("mat4x4f", 64),
        ("mat4x4<f16>", 32),
        ("mat3x3h", 24),
        ("array<u32, 4>", 16),
        ("array<vec3<f32>,2u>", 32),
        ("array<array<atomic<u32>, 2>, 3>", 24),
    ],
)
def test_bytes_of_an_element(element, size):
    """The strides of https://www.w3.org/TR/WGSL/#alignment-and-size."""
    assert dtypes.wgsl_bytes(element) == size


@pytest.mark.parametrize(
    "element",
    ["", "f64", "bool", "vec5<f32>", "vec2<bool>", "atomic<f32>", "mat2x2<u32>", "mat5x2f",
     "array<u32>", "array<u32, 0>", "array<u32, N>", "array<bool, 2>", "u32>; var<private> x: u32",
     "f32\n, 4", "ptr<storage, u32>", "Entry", "array<" * 200 + "u32" + ", 2>" * 200],
    ids=lambda element: element[:25],
)  # fmt: skip
def test_what_is_no_element(element):
    with pytest.raises(ValueError, match="is not a WGSL scalar, vector, matrix or array"):
        dtypes.wgsl_bytes(element)
