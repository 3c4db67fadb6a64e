"""Kernel folders as JAX functions: `load_kernel`."""

import copy
import enum
import inspect
import json
import pickle
import pydoc
import re
import shutil
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import cloudpickle
import folders
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from calls import counted, names
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads

import jax_webgpu
from jax_webgpu import (
    CallError,
    DerivativeError,
    DTypeError,
    LimitError,
    load_kernel,
    resources,
)

RNG = np.random.default_rng(41)


@pytest.fixture(autouse=True)
def reseeded():
    """Whatever ran before, a test has its own arrays."""
    RNG.bit_generator.state = np.random.default_rng(41).bit_generator.state


def floats(*shape, dtype="float32"):
    """Small whole numbers, on which the kernels here are exact."""
    return RNG.integers(-8, 9, shape).astype(dtype)


@pytest.fixture
def scale(tmp_path):
    return load_kernel(folders.scale(tmp_path))


@pytest.fixture
def accumulate(tmp_path):
    return load_kernel(folders.accumulate(tmp_path))


@pytest.fixture
def moments(tmp_path):
    return load_kernel(folders.moments(tmp_path))


@pytest.fixture
def take(tmp_path):
    return load_kernel(folders.take(tmp_path))


# ---- calls --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "float16", "int32"])
def test_inputs_by_position_and_by_name(run, scale, dtype):
    x, bias = floats(3, 5, dtype=dtype), floats(3, 5, dtype=dtype)
    for y in (
        run(lambda x, b: scale(x, b, factor=3), x, bias),
        run(lambda x, b: scale(x, bias=b, factor=3), x, bias),
        run(lambda x, b: scale(bias=b, x=x, factor=3.0), x, bias),
    ):
        assert y.dtype == dtype
        np.testing.assert_array_equal(y, 3 * x + bias)


def test_what_is_optional(run, scale):
    x = floats(7)
    np.testing.assert_array_equal(run(scale, x), 2 * x)
    np.testing.assert_array_equal(run(lambda x: scale(x, None, mode="negated"), x), -2 * x)
    both = run(lambda x: scale(x, outputs=["twice"]), x)
    assert both._fields == ("y", "twice")
    np.testing.assert_array_equal(both.y, 2 * x)
    np.testing.assert_array_equal(both.twice, 4 * x)
    again = run(lambda x: scale(x, outputs={"y": (7,), "twice": None}), x)
    np.testing.assert_array_equal(again.twice, both.twice)


@pytest.mark.halves
def test_numbers_take_the_dtype_of_the_arrays_beside_them(run, scale):
    x = floats(dtype="float16")
    y = run(lambda x: scale(x, 1.5), x)
    assert (y.dtype, y.shape) == (jnp.float16, ())
    np.testing.assert_array_equal(y, 2 * x + np.float16(1.5))
    assert scale(3).dtype == jnp.int32
    assert scale(3.0).dtype == jnp.float32


class Few(enum.IntEnum):
    THREE = 3


@pytest.mark.parametrize(
    ("a", "b", "dtype"),
    [
        (1, 2, "int32"),
        (1, 2.0, "float32"),
        (2.0, 1, "float32"),
        (Few.THREE, 1, "int32"),
        (np.float64(1.5), 2, "float32"),
        (np.int64(3), 1, "int32"),
        (np.ones(3, "float64"), 1, "float32"),
        (np.arange(3), 1, "int32"),
        (np.ones(3, "float16"), 0.5, "float16"),
        (1, np.ones(3, "float16"), "float16"),
    ],
)
def test_the_dtypes_of_numbers(run, a, b, dtype):
    """As in JAX: a number has no dtype of its own, traced or not, and NumPy's have."""
    add = load_kernel(KERNELS / "add")
    for y in (add(a, b), run(add, a, b), run(lambda a: add(a, b), a), run(lambda b: add(a, b), b)):
        assert y.dtype == dtype
        np.testing.assert_array_equal(y, np.asarray(a) + np.asarray(b))


def test_a_weak_array_takes_the_dtype_beside_it(run):
    add, x = load_kernel(KERNELS / "add"), floats(3, dtype="float16")
    with jax.numpy_dtype_promotion("standard"):
        y = run(lambda x: add(x, jnp.asarray(2.0) * 3), x)
    assert y.dtype == jnp.float16
    np.testing.assert_array_equal(y, x + np.float16(6))
    assert run(load_kernel(KERNELS / "gelu"), 2).dtype == jnp.float32
    with pytest.raises(CallError, match="b has dtype float32; expected int32, the dtype of a"):
        run(add, np.arange(3, dtype="int32"), jnp.asarray(2.0))


@pytest.mark.parametrize(
    ("dtype", "number", "message"),
    [
        ("float16", 70000.0, r"b is 70000.0, outside of the range of float16"),
        ("float32", 10**400, r"b is about 10\^400, outside of the range of float32"),
        ("int32", 2**31, r"b is 2,147,483,648, outside of the range of int32"),
        ("int32", np.int64(2**31), r"b is 2147483648, outside of the range of int32: enable"),
        (
            "int32",
            np.array([1, -(2**40)]),
            r"b\[1\] is -1099511627776, outside of the range of int",
        ),
        ("uint32", np.array([2**33], "uint64"), r"b\[0\] is 8589934592, outside of the range of u"),
    ],
)
def test_numbers_that_do_not_fit(dtype, number, message):
    add = load_kernel(KERNELS / "add")
    with pytest.raises(CallError, match=message):
        add(np.ones(2, dtype), number)
    assert np.isnan(add(np.ones(2, "float32"), float("nan"))).all()


@pytest.mark.parametrize("shape", [(8,), (2,), (2, 2), ()])
def test_a_shape_that_the_manifest_does_not_give(run, scale, shape):
    """Of a larger array the kernel would leave the rest as it is."""
    x = floats(4)
    for given in (shape, jax.ShapeDtypeStruct(shape, "float32")):
        with pytest.raises(CallError, match=r"outputs gives y the shape .*; it is \(4,\) in this"):
            run(lambda x, given=given: scale(x, outputs={"y": given}), x)
    np.testing.assert_array_equal(run(lambda x: scale(x, outputs={"y": (4,)}), x), 2 * x)


def test_arrays_as_numpy_has_them(run):
    """Of any strides and alignment, read-only, and without axes or elements."""
    gelu, x = load_kernel(KERNELS / "gelu"), floats(4, 6)
    unaligned = np.frombuffer(b"\0" + x.tobytes(), "float32", offset=1).reshape(x.shape)
    still = np.broadcast_to(np.float32(1.5), (3, 2))
    for each in (x[:, ::2], x[::-1], x.T, np.asfortranarray(x), unaligned, still, x[0, 0], x[:0]):
        np.testing.assert_allclose(
            run(gelu, each), jax.nn.gelu(np.ascontiguousarray(each), approximate=False), rtol=1e-5
        )


def test_in_place_ports(run, accumulate):
    state, x = floats(9), floats(9)
    before = state.copy()
    results = [run(lambda s, x: accumulate(s, x, amount=0.5), state, x) for _ in range(2)]
    np.testing.assert_array_equal(results, [before + 0.5 * x] * 2)
    np.testing.assert_array_equal(state, before)


def test_in_place_ports_in_a_loop(run, accumulate):
    state, xs = floats(9), floats(6, 9)

    def total(state, xs):
        return jax.lax.scan(lambda s, x: (accumulate(s, x, amount=1), None), state, xs)[0]

    np.testing.assert_array_equal(run(total, state, xs), state + xs.sum(0))


def test_an_output_that_a_later_pass_reads(run, moments):
    x = floats(5, 3)
    both = run(moments, x)
    np.testing.assert_array_equal(both.total, x.sum(1))
    np.testing.assert_array_equal(both.square, x.sum(1) ** 2)


def test_empty_arrays(run, scale, accumulate, moments):
    assert run(scale, floats(0, 4)).shape == (0, 4)
    assert run(lambda s, x: accumulate(s, x, amount=1), floats(0), floats(0)).shape == (0,)
    assert [each.shape for each in run(moments, floats(0, 4))] == [(0,), (0,)]


def test_int64_without_64_bit_mode(run, take):
    x, rows, wide = floats(6, 4), np.array([5, 0, 3], np.int32), np.array([-7, 2**31 - 1], np.int32)
    y, named = run(take, x, rows, wide)
    np.testing.assert_array_equal(y, x[rows])
    assert named.dtype == jnp.int32
    np.testing.assert_array_equal(named, wide)


def test_int64_in_64_bit_mode(run, take):
    with jax.enable_x64(True):
        x, rows, wide = floats(6, 4), np.array([5, 0, 3]), np.array([-7, 2**40, -(2**62)])
        y, named = run(take, x, rows, wide)
        np.testing.assert_array_equal(y, x[rows])
        assert named.dtype == jnp.int64
        np.testing.assert_array_equal(named, wide)
        with pytest.raises(
            (ValueError, jax.errors.JaxRuntimeError), match=r"rows\[1\] = 2147483648"
        ):
            jax.block_until_ready(run(take, x, np.array([0, 2**31]), wide))


def test_an_output_s_dtype_that_no_input_decides(run, tmp_path):
    path = folders.write(
        tmp_path,
        "cast",
        {"cast": "  y[i] = {{ dtypes.T2 }}(x[i]);"},
        typeConstraints={"T1": ["float32", "int32"], "T2": ["float32", "int32", "uint32"]},
        inputs={"x": {"dtype": "T1"}},
        outputs={"y": {"dtype": "T2", "shape": "shapes.x"}},
        variants=[{"id": "only", "passes": [folders.step("cast", ["x", "y"], "numel(shapes.x)")]}],
    )
    cast = load_kernel(path, vmap_axis=0)
    x = RNG.uniform(0, 9, (3, 4)).astype("f4")

    def rounded(x):
        return cast(x, outputs={"y": jax.ShapeDtypeStruct(x.shape, jnp.int32)})

    for y in (run(rounded, x), run(jax.vmap(rounded), x)):
        assert y.dtype == jnp.int32
        np.testing.assert_array_equal(y, x.astype("int32"))
    with pytest.raises(CallError, match="no input decides the dtype of y"):
        cast(x)


def test_the_own_manifests_as_folders(run, tmp_path):
    for name in ("Split", "RotaryEmbedding"):
        shutil.copytree(resources.shaders(), tmp_path / name)
        manifest = resources.specs() / f"ai.onnx.{name}.json"
        shutil.copy(manifest, tmp_path / name / "manifest.json")
    split = load_kernel(tmp_path / "Split")
    x = floats(4, 6)
    parts = run(lambda x: split(x, axis=1, outputs={"y0": (4, 2), "y1": (4, 4)}), x)
    np.testing.assert_array_equal(parts.y0, x[:, :2])
    np.testing.assert_array_equal(parts.y1, x[:, 2:])
    rotary = load_kernel(tmp_path / "RotaryEmbedding")
    x, cos, sin = floats(2, 3, 5, 8), floats(7, 4), floats(7, 4)
    positions = RNG.integers(0, 7, (2, 5)).astype(np.int32)
    np.testing.assert_array_equal(
        run(rotary, x, cos, sin, positions),
        run(jax_webgpu.rotary_embedding, x, cos, sin, positions),
    )


# ---- what is refused ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda k, x: k(), CallError, "the input x is missing"),
        (
            lambda k, x: k(x, x, 3),
            CallError,
            r"takes 2 inputs \(x, bias\), got 3; attributes and arguments go by name, as factor=…",
        ),
        (lambda k, x: k(x, factor=True), CallError, "factor is true; expected a number"),
        (lambda k, x: k(x, mode=["plain"]), CallError, r'mode is \["plain"\]; expected a string'),
        (lambda k, x: k(x, x=x), CallError, "the input x is given by position and by name"),
        (lambda k, x: k(x, factr=1), CallError, "has no 'factr'; it has x, bias, factor, mode"),
        (lambda k, x: k(x, mode="up"), CallError, "mode is .*up.*; expected one of .*plain"),
        (lambda k, x: k(x, factor=[1, 2]), CallError, "factor"),
        (lambda k, x: k([1.0]), DTypeError, "x must be an array, got list"),
        (lambda k, x: k(x.astype("int8")), CallError, "x has dtype int8; expected float32"),
        (lambda k, x: k(x, x.astype("int32")), CallError, "bias has dtype int32; expected float32"),
        (lambda k, x: k(x.astype("int32"), 1.5), DTypeError, "bias is the number 1.5"),
        (lambda k, x: k(x, x[:2]), CallError, "sameShape"),
        (lambda k, x: k(x, outputs=["z"]), CallError, "no output 'z'; it has y, twice"),
        (lambda k, x: k(x, outputs={"y": (-1,)}), CallError, "the shape of y has -1"),
        (lambda k, x: k(x, factor={1}), DTypeError, "factor must be a number"),
        (lambda k, x: k(x, factor="two"), CallError, "factor is .*two.*; expected a number"),
        (lambda k, x: k(x.astype("int8"), 2.0), CallError, "x has dtype int8; expected float32"),
    ],
)
def test_what_is_refused(run, scale, call, error, message):
    with pytest.raises(error, match=message):
        run(lambda x: call(scale, x), floats(4))


def test_equal_values_of_another_kind_are_refused_after_a_call(scale):
    """JAX keeps what it traced by values that are equal, and True is 1."""
    x = floats(4)
    for f in (scale, jax.jit(scale, static_argnames="factor")):
        np.testing.assert_array_equal(f(x, factor=1), x)
        with pytest.raises(CallError, match="factor is true; expected a number"):
            f(x, factor=True)


def test_an_argument_of_another_kind(accumulate):
    x = floats(4)
    accumulate(x, x, amount=1)
    with pytest.raises(CallError, match="amount is true; expected f32"):
        accumulate(x, x, amount=True)


def test_takes_one_input(moments):
    with pytest.raises(CallError, match=r"Moments takes 1 input \(x\), got 2$"):
        moments(floats(2, 2), 1)


@pytest.mark.parametrize(
    ("name", "call", "message"),
    [
        ("moments", lambda k: k(3.0), r"no variant .*\n  only: `ranks.x == 2`: 0, expected 2"),
        ("moments", lambda k: k(floats(3)), r"no variant .*\n  only: `ranks.x == 2`: 1, exp"),
        (
            "take",
            lambda k: k(3.0, np.zeros(3, "int32"), np.zeros(3, "int32")),
            r"the shape of y comes out as \[3, undefined\]; expected a list of .*"
            r"; of x = float32\[\], rows = int64\[3\]",
        ),
    ],
)
def test_a_number_for_an_array(run, tmp_path, name, call, message):
    """The clauses refuse it; shapes of outputs that fail for it come first, and tell less."""
    kernel = load_kernel(getattr(folders, name)(tmp_path))
    with pytest.raises(CallError, match=message):
        call(kernel)


def test_a_rank_that_is_documented_is_told_where_the_shape_fails(tmp_path):
    path = folders.moments(tmp_path)
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["variants"][0]["when"] = []
    (path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CallError, match=r"x is float32\[\]; expected an array of rank 2"):
        load_kernel(path)(3.0)


def test_wgsl_that_is_refused_is_told_before_the_call(run, tmp_path):
    """As the last thing, with the line of the template, and in no error of JAX's."""
    path = folders.scale(tmp_path)
    template = path / "scale.wgsl.jinja"
    template.write_text(template.read_text().replace("y[i] = scaled;", "y[i] = scald;"))
    kernel = load_kernel(path)
    for f in (kernel, jax.vmap(kernel), jax_webgpu.fuse(lambda x: kernel(x) + 1)):
        with pytest.raises(jax_webgpu.ShaderError) as caught:
            run(f, floats(3, 4))
        lines = str(caught.value).partition("\n------")[0].splitlines()
        assert re.fullmatch(
            r"scale\.wgsl\.jinja:11 \(line \d+ of the WGSL\): no definition .*`scald`", lines[-1]
        )
        assert any(re.match(r"> +\d+ \|   y\[i\] = scald;", line) for line in lines)
    np.testing.assert_array_equal(
        run(lambda x: kernel(x, mode="negated"), np.ones(3, "f4")), [-2] * 3
    )


def test_a_traced_attribute(scale):
    with pytest.raises(DTypeError, match=r"factor must be static.*static_argnames"):
        jax.jit(lambda x, factor: scale(x, factor=factor))(floats(4), 3)


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"vmap_axis": {"z": 0, "y": 0}}, "vmap_axis names 'z'"),
        ({"vmap_axis": {"x": 0}}, "no axis of the output y"),
        ({"vmap_axis": 0.5}, "must be an integer"),
        ({"vmap_axis": {"x": 2, "y": 0}}, "vmap_axis is 2 for x, which has the rank 2"),
        ({"vmap_method": "fast"}, "expected one of sequential"),
        ({"tunables": {"SIZE": 1}}, "no tunable SIZE"),
        ({"tunables": {"WORKGROUP_SIZE": "many"}}, "WORKGROUP_SIZE"),
    ],
)
def test_what_load_kernel_refuses(tmp_path, keywords, message):
    path = folders.scale(tmp_path)
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["inputs"]["x"]["rank"] = 2
    (path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises((CallError, DTypeError), match=message):
        load_kernel(path, **keywords)


def test_the_file_in_place_of_the_folder(tmp_path):
    with pytest.raises(CallError, match=r"manifest.json is a file; give its folder"):
        load_kernel(folders.scale(tmp_path) / "manifest.json")


def test_no_folder(tmp_path):
    with pytest.raises(CallError, match=r"no kernel folder .*nothing"):
        load_kernel(tmp_path / "nothing")


# ---- as a function ------------------------------------------------------------------------------


def test_help_reads_like_a_docstring(scale, accumulate):
    text = pydoc.plain(pydoc.render_doc(scale))
    for line in (
        "scale(x, bias=None, *, factor=2, mode='plain', outputs=None)",
        "Multiplies by a factor.",
        "x: float32 or float16 or int32, the same for every T. What is scaled.",
        'mode: "plain" by default; one of "plain", "negated".',
        "bias_False_twice_False",
    ):
        assert line.lower() in text.lower(), text
    assert "amount: f32." in accumulate.__doc__
    assert str(inspect.signature(accumulate)) == "(state, x, *, amount=None, outputs=None)"


def test_help_describes_variants_and_tunables(tmp_path):
    gelu = load_kernel(KERNELS / "gelu")
    assert "\n  vec4: Four elements an invocation.\n" in gelu.__doc__
    assert "  WORKGROUP_SIZE: 256 by default. Invocations a workgroup, as far as" in gelu.__doc__
    path = folders.scale(tmp_path)
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["variants"][0] |= {"tunables": {"LANES": {"default": 4, "description": "Wide."}}}
    manifest["variants"][1]["description"] = {"any": "thing"}
    (path / "manifest.json").write_text(json.dumps(manifest))
    text = load_kernel(path).__doc__
    assert "\n  LANES: 4 by default. Wide.\n" in text
    assert "\n  bias_False_twice_True\n" in text


def test_a_jaxpr_names_it(scale):
    jaxpr = jax.make_jaxpr(lambda x: scale(x, factor=3))(floats(4))
    assert names(jaxpr.jaxpr) == ["Scale"]
    assert "factor=3" in str(jaxpr)


def test_eval_shape_needs_no_gpu(scale, moments):
    assert jax.eval_shape(scale, jax.ShapeDtypeStruct((3,), "float16")).dtype == jnp.float16
    shapes = jax.eval_shape(moments, jax.ShapeDtypeStruct((3, 2), "int32"))
    assert [each.shape for each in shapes] == [(3,), (3,)]


def negative(x, bias, **attributes):
    return -x


def test_copies(tmp_path):
    scale = load_kernel(folders.scale(tmp_path), vmap_axis=0)
    scale.defreference(negative)
    shutil.rmtree(tmp_path)
    x = floats(4)
    for kernel in (copy.copy(scale), copy.deepcopy(scale), pickle.loads(pickle.dumps(scale))):
        np.testing.assert_array_equal(kernel(x), scale(x))
        assert (kernel.vmap_axes, kernel._reference) == (scale.vmap_axes, negative)


def test_an_output_that_no_pass_writes(run, tmp_path):
    passes = [folders.step("one", ["x", "y"], "numel(shapes.x)")]
    kernel = load_kernel(
        folders.write(
            tmp_path,
            "half",
            {"one": "  y[i] = x[i];"},
            inputs={"x": {"dtype": "T"}},
            outputs={name: {"dtype": "T", "shape": "shapes.x"} for name in ("y", "z")},
            variants=[{"id": "only", "passes": passes}],
        )
    )
    with pytest.raises(CallError, match="no pass writes z"):
        run(kernel, floats(3))


def test_explain(scale):
    (plan,) = jax_webgpu.explain(scale, floats(4), device="floor", factor=2.5)
    (plan,) = jax_webgpu.explain(scale, floats(4), device="floor")
    assert plan.variant == "bias_False_twice_False"


# ---- transformations ----------------------------------------------------------------------------


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_vmap_folds_into_an_axis(run, tmp_path, axis):
    kernel = load_kernel(folders.scale(tmp_path), vmap_axis=axis)
    x, bias = floats(3, 4, 5), floats(4, 5)
    for in_axes, xs in ((0, x), (1, x.swapaxes(0, 1)), (2, np.moveaxis(x, 0, 2))):
        batched = jax.vmap(partial(kernel, factor=3), in_axes=(in_axes, None))
        run(batched, xs, bias)  # once it is tried
        y, dispatches = counted(run, batched, xs, bias)
        assert dispatches == 1
        np.testing.assert_array_equal(y, 3 * x + bias)


def test_vmap_folds_the_named_ports(run, tmp_path):
    kernel = load_kernel(folders.moments(tmp_path), vmap_axis={"x": 0, "total": 0, "square": 0})
    x = floats(3, 4, 5)
    run(jax.vmap(kernel, in_axes=1), x)
    both, dispatches = counted(run, jax.vmap(kernel, in_axes=1), x)
    assert dispatches == 2
    np.testing.assert_array_equal(both.total, x.sum(2).T)
    run(jax.vmap(jax.vmap(kernel)), floats(2, 3, 4, 5))
    nested, dispatches = counted(run, jax.vmap(jax.vmap(kernel)), floats(2, 3, 4, 5))
    assert (dispatches, nested.square.shape) == (2, (2, 3, 4))


def test_vmap_is_sequential_else(run, scale):
    x = floats(3, 4)
    y, dispatches = counted(run, jax.vmap(scale, in_axes=1, out_axes=1), x)
    assert dispatches == 4
    np.testing.assert_array_equal(y, 2 * x)


@pytest.mark.parametrize("method", ["expand_dims", "broadcast_all"])
def test_vmap_methods(run, tmp_path, method):
    kernel = load_kernel(folders.scale(tmp_path), vmap_method=method)
    x, bias = floats(3, 4), floats(4)
    run(jax.vmap(kernel), x)
    y, dispatches = counted(run, jax.vmap(kernel), x)
    assert dispatches == 1
    np.testing.assert_array_equal(y, 2 * x)
    if method == "broadcast_all":
        y = run(jax.vmap(kernel, in_axes=(0, None)), x, bias)
        np.testing.assert_array_equal(y, 2 * x + bias)


def test_a_wrong_vmap_axis_is_found(tmp_path):
    kernel = load_kernel(folders.moments(tmp_path), vmap_axis={"x": 1, "total": 0, "square": 0})
    with pytest.raises(CallError, match=r"vmap_axis is 0 for total, which is .* for one element"):
        jax.vmap(kernel)(floats(3, 4, 5))


def mixing(name, **options):
    """An example's kernel that is loaded with some way to batch its calls."""
    return load_kernel(KERNELS / name, **options)


@pytest.mark.parametrize(
    ("name", "options", "shape", "attributes"),
    [
        ("softmax", {"vmap_axis": 0}, (4,), {}),
        ("softmax", {"vmap_axis": -1}, (3, 4), {}),
        ("softmax", {"vmap_axis": 0}, (3, 4), {"axis": 0}),
        ("softmax", {"vmap_axis": 0}, (1,), {}),
        ("softmax", {"vmap_axis": 0}, (100_000,), {}),
        ("softmax", {"vmap_method": "broadcast_all"}, (3, 4), {"axis": 0}),
        ("softmax", {"vmap_method": "expand_dims"}, (3, 4), {"axis": 0}),
        ("scan", {"vmap_axis": 1}, (3, 4), {"axis": 1}),
        ("scan", {"vmap_axis": 1}, (3, 4), {"axis": 1, "reverse": 1, "exclusive": 1}),
    ],
)
@pytest.mark.parametrize("fused", [False, True])
def test_a_batch_that_the_kernel_would_mix_is_refused(run, name, options, shape, attributes, fused):
    """The shapes are right, and the results would not be."""
    kernel = partial(mixing(name, **options), **attributes)
    batched = jax.vmap(jax_webgpu.fuse(lambda x: kernel(x) + 1) if fused else kernel)
    with pytest.raises(
        CallError, match=r"mixes the elements of a batch .* axis \d of \w.* vmap_axis"
    ):
        run(batched, floats(3, *shape))
    one = run(batched, floats(1, *shape))  # nothing to be mixed with
    assert one.shape == (1, *shape)


def test_a_norm_s_mixed_axes_are_found_without_a_name(run):
    """It mixes the last axis and no attribute says so; its batch may go into another."""
    x, weight = floats(2, 3, 4), np.ones(1, "f4")
    for axis, array in ((1, x), (0, x[0])):
        kernel = mixing("rms_norm", vmap_axis={"x": axis, "y": axis})
        with pytest.raises(CallError, match="mixes the elements"):
            run(jax.vmap(kernel, (0, None)), array, weight)


@pytest.mark.parametrize("dtype", ["float32", "float16", "int32"])
@pytest.mark.parametrize(
    ("name", "attributes", "axis", "shapes"),
    [
        ("softmax", {"axis": -1}, 0, [(5, 6)]),
        ("softmax", {"axis": 0}, 1, [(5, 6)]),
        ("scan", {"axis": 0}, -1, [(5, 600)]),
        ("add", {}, 0, [(5, 6), (5, 6)]),
        ("add", {}, -1, [(5, 6), (6,)]),
        ("add", {}, 0, [(5,), ()]),
        ("gelu", {}, 1, [(5, 6)]),
        ("rms_norm", {}, {"x": 0, "y": 0}, [(5, 6), (6,)]),
    ],
)
def test_a_batch_that_the_kernel_does_not_mix(run, name, attributes, axis, shapes, dtype):
    if dtype not in (kernel := mixing(name, vmap_axis=axis)).spec.type_constraints["T"]:
        dtype = "float32"
    first = floats(4, *shapes[0], dtype=dtype)
    others = [floats(*shape, dtype=dtype) for shape in shapes[1:]]
    axes = (0, *(None for _ in others))
    call = partial(kernel, **attributes)
    result, sequential = (
        run(jax.vmap(partial(each, **attributes), axes), first, *others)
        for each in (kernel, mixing(name))
    )
    np.testing.assert_allclose(result, sequential, rtol=2e-3 if dtype == "float16" else 1e-6)
    _, dispatches = counted(run, jax.vmap(call, axes), first, *others)
    _, single = counted(run, call, first[0], *others)
    assert dispatches == single


def test_a_mask_s_numbers_do_not_hide_what_a_kernel_mixes(run, tmp_path):
    """Each is as it should be, and far larger than the sums that are not."""
    body = """
  var total = {{ dtypes.T }}();
  for (var at = 0u; at < params.size; at++) { total += x[at]; }
  y[i] = select(total, {{ dtypes.T }}(-6e4), i % 4 == 3);"""
    masked = folders.write(
        tmp_path,
        "masked",
        {"masked": body},
        inputs={"x": {"dtype": "T"}},
        outputs={"y": {"dtype": "T", "shape": "shapes.x"}},
        variants=[
            {"id": "only", "passes": [folders.step("masked", ["x", "y"], "numel(shapes.x)")]}
        ],
    )
    for dtype in ("float32", "float16"):
        with pytest.raises(CallError, match="tried with numbers, 18 of 24 in y"):
            run(jax.vmap(load_kernel(masked, vmap_axis=0)), floats(3, 8, dtype=dtype))


def test_results_that_the_batch_does_not_reach_may_round_otherwise():
    from jax_webgpu import batch

    alone = np.array([1, 1e-3, np.nan, np.inf], "f4")
    near = alone * np.float32(1 + 1e-6)
    assert batch._wrong(np.stack([alone, near, near]), [alone, alone]) == 0
    assert batch._wrong(np.stack([alone, alone * 2]), [alone, alone]) == 1
    assert batch._wrong(np.stack([alone, alone[::-1]]), [alone, alone]) == 4


def test_a_trial_keeps_few_copies_of_large_arrays():
    from jax_webgpu import batch

    pair = [np.full(1 << 20, value, "f4") for value in (1, 2)]
    results = np.stack([pair[0], pair[1] * np.float32(1 + 1e-6)] * 4)
    tracemalloc.start()
    try:
        assert batch._wrong(results, pair) == 0
        assert tracemalloc.get_traced_memory()[1] < 3 * results.nbytes
    finally:
        tracemalloc.stop()


def test_a_batch_of_batches_is_tried_within(run):
    """Folded by the inner vmap alone it is wrong, whatever the outer one does."""
    inner = jax.vmap(mixing("softmax", vmap_axis=0))
    with pytest.raises(CallError, match="mixes the elements"):
        run(jax.vmap(inner), floats(1, 3, 4))
    right = mixing("softmax", vmap_axis=0)
    x = floats(2, 3, 4, 5)
    np.testing.assert_allclose(
        run(jax.vmap(jax.vmap(right)), x), jax.nn.softmax(x, axis=-1), rtol=1e-5, atol=1e-6
    )


def test_a_batch_is_tried_once(monkeypatch):
    from jax_webgpu import batch

    tried = []
    original = batch._elements
    monkeypatch.setattr(batch, "_elements", lambda own: tried.append(own) or original(own))
    kernel = mixing("gelu", vmap_axis=0)
    for _ in range(2):
        jax.vmap(kernel)(floats(3, 4))
        jax.jit(jax.vmap(kernel))(floats(3, 4))
    assert len(tried) == 1
    jax.vmap(kernel)(floats(3, 5))
    assert len(tried) == 2


def test_a_kernel_that_works_in_blocks_mixes_what_is_no_whole_number_of_them(run, tmp_path):
    body = """
  var total = {{ dtypes.T }}();
  for (var at = i / 4 * 4; at <= i; at++) { total += x[at]; }
  y[i] = total;"""
    kernel = load_kernel(
        folders.write(
            tmp_path,
            "blocks",
            {"blocks": body},
            inputs={"x": {"dtype": "T"}},
            outputs={"y": {"dtype": "T", "shape": "shapes.x"}},
            variants=[
                {"id": "only", "passes": [folders.step("blocks", ["x", "y"], "numel(shapes.x)")]}
            ],
        ),
        vmap_axis=0,
    )
    x = floats(3, 8)
    expected = x.reshape(3, 2, 4).cumsum(-1).reshape(3, 8)
    np.testing.assert_array_equal(run(jax.vmap(kernel), x), expected)
    with pytest.raises(CallError, match="mixes the elements"):
        run(jax.vmap(kernel), x[:, :6])


def test_a_trial_says_nothing_of_another_way_to_batch(run):
    """In a place of its own an element is mixed with no other; behind the other it would be."""
    x, kernel = floats(3, 5), partial(mixing, "softmax")
    for _ in range(2):
        result = run(jax.vmap(kernel(vmap_method="broadcast_all")), x)
        np.testing.assert_allclose(result, jax.nn.softmax(x), rtol=1e-5, atol=1e-6)
        with pytest.raises(CallError, match="mixes the elements"):
            run(jax.vmap(kernel(vmap_axis=0)), x)


def test_a_batch_of_calls_that_are_refused(run, tmp_path):
    """A call of one element that no device takes, or not this one, is no call of a batch."""
    for name, clause, message in (
        ("any", "dim(shapes.x, 0) > 4", r"no variant .* on any device: Scale\(x = float32\[4\]"),
        ("this", "numel(shapes.x) > 4 or device.features.has('rare')", "of one element cannot be"),
    ):
        path = folders.scale(tmp_path / name)
        manifest = json.loads((path / "manifest.json").read_text())
        manifest["when"] = [clause]
        (path / "manifest.json").write_text(json.dumps(manifest))
        kernel = load_kernel(path, vmap_axis=0)
        assert run(kernel, floats(12)).shape == (12,)
        with pytest.raises(CallError, match=message):
            run(jax.vmap(kernel), floats(3, 4))


def test_a_vmap_axis_that_an_input_does_not_have(run):
    kernel = mixing("add", vmap_axis=1)
    with pytest.raises(CallError, match=r"vmap_axis is 1 for b, .*\(6,\).*expected -1 to 0"):
        run(jax.vmap(kernel, (0, None)), floats(3, 5, 6), floats(6))
    with pytest.raises(CallError, match=r"vmap_axis is -3 for a, .*\(5,\)"):
        run(jax.vmap(mixing("add", vmap_axis=-3)), floats(3, 5), floats(3, 5))
    numbers = run(jax.vmap(kernel), floats(3), floats(3))  # no axis to go into: one by one
    assert numbers.shape == (3,)


def test_a_folded_call_that_is_refused(run):
    with pytest.raises(CallError, match=r"vmap_axis folds a batch of 3 into one call, .*refused"):
        run(jax.vmap(mixing("add", vmap_axis=0), (0, None)), floats(3, 5, 5), floats(5))


@pytest.mark.parametrize("method", ["expand_dims", "broadcast_all"])
def test_one_more_axis_in_front_of_arrays_of_other_ranks(run, method):
    """Where the axes of a batch do not meet it is refused, whether or not the shapes fit."""
    add = jax.vmap(mixing("add", vmap_method=method))
    with pytest.raises(CallError, match="Add mixes the elements of a batch"):
        run(add, floats(2, 2, 4), floats(2, 4))
    with pytest.raises(
        CallError, match=r"one more axis of 2 in front, which is refused.*\[2, 3, 4\]"
    ):
        run(add, floats(2, 3, 4), floats(2, 4))
    x, y = floats(2, 3, 4), floats(2, 1, 4)
    np.testing.assert_array_equal(run(add, x, y), x + y)


def test_another_reference_takes_the_place_of_one_that_has_run(run, scale):
    with jax_webgpu.configure(implementation="reference"):
        for factor in (2, 3):
            scale.defreference(lambda x, bias, by=factor, **_: by * x)
            np.testing.assert_array_equal(run(scale, np.ones(4, "f4")), np.full(4, factor))


def test_vmap_of_the_reference_needs_no_folding():
    softmax = mixing("softmax", vmap_axis=0)
    softmax.defreference(jax.nn.softmax)
    x = floats(3, 4)
    with jax_webgpu.configure(implementation="reference"):
        np.testing.assert_allclose(jax.vmap(softmax)(x), jax.nn.softmax(x), rtol=1e-6)


def test_no_derivative(run, scale):
    with pytest.raises(DerivativeError, match=r"(?s)@scale.defjvp\n.*defvjp"):
        run(jax.grad(lambda x: scale(x).sum()), floats(4))
    assert run(jax.grad(lambda x: scale(jax.lax.stop_gradient(x)).sum()), floats(4)).sum() == 0


def test_defjvp(run, scale):
    @scale.defjvp
    def derivative(primals, tangents, *, factor, mode):
        x, bias = primals
        assert bias is None
        return scale(x, factor=factor, mode=mode), factor * tangents[0]

    x = floats(4)
    gradient = run(jax.grad(lambda x: (scale(x, factor=3) * x).sum()), x)
    np.testing.assert_array_equal(gradient, 6 * x)
    check_grads(partial(scale, factor=3), (x,), order=2, modes=["fwd", "rev"], eps=1e-2)
    np.testing.assert_array_equal(run(jax.vmap(jax.grad(scale)), x), np.full(4, 2.0))


def test_defjvp_of_several_outputs(run, moments):
    """A plain tuple will do, and arguments that are left out are None."""

    @moments.defjvp
    def derivative(primals, tangents):
        (x,), (t,) = primals, tangents
        total = x.sum(1)
        return (total, total**2), (t.sum(1), 2 * total * t.sum(1))

    x = floats(3, 4)
    gradient = run(jax.grad(lambda x: moments(x).square.sum()), x)
    np.testing.assert_array_equal(gradient, np.repeat(2 * x.sum(1, keepdims=True), 4, 1))


def test_defvjp_of_one_input(run, scale):
    """A cotangent that is no tuple will do."""
    once = load_kernel(KERNELS / "gelu")
    once.defvjp(
        lambda x, *, approximate: (once(x), x), lambda x, cotangent, *, approximate: 5 * cotangent
    )
    np.testing.assert_array_equal(
        run(jax.grad(lambda x: once(x).sum()), floats(3)), np.full(3, 5.0)
    )


def test_defvjp(run, scale):
    scale.defvjp(
        lambda x, bias, *, factor, mode: (scale(x, bias, factor=factor), None),
        lambda _, cotangent, *, factor, mode: (factor * cotangent, cotangent),
    )
    x, bias = floats(4), floats(4)
    gradients = run(jax.grad(lambda x, b: scale(x, b, factor=3).sum(), (0, 1)), x, bias)
    np.testing.assert_array_equal(gradients, [[3.0] * 4, [1.0] * 4])


def right(primals, tangents, *, factor, mode):
    return 2 * primals[0], 2 * tangents[0]


SIGNATURE = r": expected def {}\(primals, tangents, \*, factor, mode\): return \(result, tangent\)"


@pytest.mark.parametrize(
    ("rule", "error", "message"),
    [
        (lambda primals: None, DTypeError, "cannot be called: too many positional arguments"),
        (lambda p, t: None, DTypeError, "cannot be called: got an unexpected keyword argument"),
        (lambda p, t, *, factor, mode, k: None, DTypeError, "called: missing a required .*'k'"),
        (lambda p, t, **_: p[0], CallError, r"returns float32\[4\]"),
        (lambda p, t, **_: None, CallError, "returns None"),
        (lambda p, t, **_: (p[0], t[0], t[0]), CallError, "returns a tuple of 3"),
        (
            lambda p, t, **_: (p[0][:2], t[0]),
            CallError,
            r"returns float32\[2\] as the result y, which is float32\[4\]",
        ),
        (
            lambda p, t, **_: (p[0], t[0].astype("float16")),
            CallError,
            r"returns float16\[4\] as the tangent y, which is float32\[4\]",
        ),
        (
            lambda p, t, **_: (p[0], t),
            CallError,
            r"returns a tuple of 2 as the tangent; there are y",
        ),
        (lambda p, t, **_: (None, t[0]), CallError, "returns None as the result y"),
        (lambda p, t, **_: (p[0], 0.0), CallError, "returns a float as the tangent y"),
    ],
)
def test_a_wrong_defjvp(run, scale, rule, error, message):
    """The rule and the kernel are named, and how the rule should be written."""
    rule.__name__ = "wrong"
    scale.defjvp(rule)
    told = rf"wrong, a rule that scale.defjvp was given, .*{message}.*{SIGNATURE.format('wrong')}"
    with pytest.raises(error, match=told):
        run(jax.grad(lambda x: scale(x).sum()), floats(4))
    scale.defjvp(right)
    assert run(jax.grad(lambda x: scale(x).sum()), floats(4)).tolist() == [2.0] * 4


def test_a_tangent_that_is_none_is_zero(run, scale, take):
    scale.defjvp(lambda primals, tangents, **_: (primals[0], None))
    assert run(jax.grad(lambda x: scale(x).sum()), floats(4)).tolist() == [0.0] * 4

    @take.defjvp
    def rows(primals, tangents):  # of the int64 output none
        x, at, wide = primals
        return (x[at], wide), (tangents[0][at], None)

    at, wide = np.array([2, 0], np.int32), np.array([7], np.int32)
    gradient = run(jax.grad(lambda x: take(x, at, wide).y.sum()), floats(3, 2))
    np.testing.assert_array_equal(gradient, [[1, 1], [0, 0], [1, 1]])


def test_a_wrong_number_of_tangents(run, moments):
    moments.defjvp(lambda primals, tangents: (moments(*primals), tangents[0].sum(1)))
    with pytest.raises(
        CallError, match=r"moments.defjvp .* as the tangent; there are total, square"
    ):
        run(jax.grad(lambda x: moments(x).square.sum()), floats(3, 4))


@pytest.mark.parametrize(
    ("forward", "backward", "error", "message"),
    [
        (
            lambda x: None,
            lambda *_, **__: None,
            DTypeError,
            r"def there\(x, bias, \*, factor, mode\)",
        ),
        (
            lambda x, b, **_: x,
            lambda *_, **__: None,
            CallError,
            r"returns float32\[4\]: expected def there",
        ),
        (
            lambda x, b, **_: (x[:2], x),
            lambda *_, **__: None,
            CallError,
            "as the result y, which is",
        ),
        (
            lambda x, b, **_: (x, x),
            lambda kept: None,
            DTypeError,
            r"def back\(kept, cotangent, \*,",
        ),
        (
            lambda x, b, **_: (x, x),
            lambda kept, ct, **_: (ct,),
            CallError,
            r"a tuple of 1; there are x, bias: .* def back\(.*\(cotangent of x, cotangent of bias",
        ),
        (
            lambda x, b, **_: (x, x),
            lambda kept, ct, **_: (ct[:3], None),
            CallError,
            r"returns float32\[3\] as the cotangent of x, which is float32\[4\]",
        ),
    ],
)
def test_a_wrong_defvjp(run, scale, forward, backward, error, message):
    forward.__name__, backward.__name__ = "there", "back"
    scale.defvjp(forward, backward)
    with pytest.raises(error, match=rf"scale.defvjp was given, .*{message}"):
        run(jax.grad(lambda x: scale(x).sum()), floats(4))


def test_a_rule_that_is_no_function(scale):
    for setter in (scale.defjvp, scale.deftranspose, scale.defreference):
        with pytest.raises(DTypeError, match=rf"{setter.__name__} takes a function, got int"):
            setter(3)
    with pytest.raises(DTypeError, match="defvjp takes a function, got NoneType"):
        scale.defvjp(right, None)


@pytest.mark.parametrize(
    ("transpose", "message"),
    [
        (lambda ct, **_: ct, "the transpose gives 1 cotangents; expected 2"),
        (
            lambda ct, **_: (ct, ct[:2]),
            r"gives bias the cotangent float32\[2\]; expected float32\[4",
        ),
        (
            lambda ct, **_: (ct.astype("float16"), ct),
            r"gives x the cotangent float16\[4\]; expected",
        ),
        (lambda ct, **_: (1.0, ct), r"gives x the cotangent a float; expected float32\[4\]"),
        (lambda ct, **_: [ct, [ct]], r"gives bias the cotangent a list of 1; expected float32"),
    ],
)
def test_a_wrong_transpose(run, scale, transpose, message):
    scale.deftranspose(transpose)
    with pytest.raises(CallError, match=message):
        run(jax.grad(lambda x, b: scale(x, b).sum(), (0, 1)), floats(4), floats(4))


def test_a_transpose_that_cannot_be_called(run, scale, take):
    scale.deftranspose(lambda cotangent: cotangent)
    with pytest.raises(
        DTypeError,
        match=r"scale.deftranspose was given, cannot be called: got an unexpected keyword argument "
        r"'factor': expected def rule\(cotangent_of_y, \*, factor, mode\): return cotangent of x",
    ):
        run(jax.grad(lambda x: scale(x).sum()), floats(4))
    take.deftranspose(lambda cotangent: cotangent)
    whole = np.array([1, 0], np.int32)
    with pytest.raises(
        DTypeError, match=r"def rule\(cotangent_of_y, cotangent_of_named, rows, wid"
    ):
        run(jax.grad(lambda x: take(x, whole, whole).y.sum()), floats(3, 2))


def test_a_rule_in_terms_of_the_kernel_itself(run, scale):
    """Of what is not differentiated it may call it; of tangents if it is linear."""

    @scale.defjvp
    def rule(primals, tangents, **attributes):
        return scale(*primals, **attributes), scale(tangents[0], **attributes)

    def loss(x):
        return (scale(x) ** 2).sum()

    x = floats(4)
    np.testing.assert_array_equal(run(lambda x: jax.jvp(loss, (x,), (x,))[1], x), 8 * (x @ x))
    with pytest.raises(
        DerivativeError, match=r"^scale is called in its own rule .*scale.deftranspose"
    ):
        run(jax.grad(loss), x)
    scale.deftranspose(lambda cotangent, *, factor, mode: [factor * cotangent])
    np.testing.assert_array_equal(run(jax.grad(loss), x), 8 * x)
    np.testing.assert_array_equal(run(jax.hessian(loss), x), 8 * np.eye(4))


def test_deftranspose(run, scale):
    scale.deftranspose(scale)
    x = floats(4)
    gradient = run(jax.grad(lambda x: (scale(x, factor=3, mode="negated") ** 2).sum()), x)
    np.testing.assert_array_equal(gradient, 18 * x)
    check_grads(partial(scale, factor=3), (x,), order=2, modes=["fwd", "rev"], eps=1e-2)
    np.testing.assert_array_equal(run(jax.linear_transpose(scale, x), x)[0], 2 * x)


def test_deftranspose_by_a_function_of_several_inputs(run, scale):
    scale.deftranspose(lambda ct, *, factor, mode: (factor * ct, ct))
    x, bias = floats(4), floats(4)
    for argnums, expected in ((0, 3.0), (1, 1.0)):
        f = jax.grad(lambda x, b: scale(x, b, factor=3).sum(), argnums)
        np.testing.assert_array_equal(run(f, x, bias), np.full(4, expected))


def test_reference(scale):
    x = floats(4)
    with jax_webgpu.configure(implementation="reference"):
        with pytest.raises(CallError, match=r"scale.defreference\(function\)"):
            scale(x)
        scale.defreference(lambda x, bias, *, factor, mode: factor * x)
        np.testing.assert_array_equal(scale(x, factor=5), 5 * x)


def test_jax_s_other_transformations(run):
    """Of a kernel that has a rule: whatever JAX does with a function of its own."""
    gelu, x = load_kernel(KERNELS / "gelu"), floats(4) / 4

    def plain(x, *, approximate="none"):
        return jax.nn.gelu(x, approximate=approximate == "tanh")

    @gelu.defjvp
    def derivative(primals, tangents, **attributes):
        _, tangent = jax.jvp(partial(plain, **attributes), primals, tangents)
        return gelu(*primals, **attributes), tangent

    def through_custom_vjp(f):
        own = jax.custom_vjp(f)
        own.defvjp(lambda x: (f(x), x), lambda x, cotangent: (3 * cotangent * f(x),))
        return jax.grad(lambda x: own(x).sum())

    for transformed in (
        lambda f: jax.grad(lambda x: jax.checkpoint(lambda x: f(f(x)))(x).sum()),
        lambda f: jax.grad(
            lambda x: jax.lax.scan(lambda c, _: (f(c), c.sum()), x, None, length=3)[0].sum()
        ),
        lambda f: lambda x: jax.lax.while_loop(lambda c: c.sum() > 0.01, f, x),
        lambda f: lambda x: jax.linearize(f, x)[1](x),
        lambda f: lambda x: jax.vjp(f, x)[1](x)[0],
        lambda f: lambda x: jax.lax.cond(x.sum() > 0, f, lambda x: 2 * f(x), x),
        lambda f: jax.vmap(jax.value_and_grad(f)),
        lambda f: jax.hessian(lambda x: f(x).sum()),
        through_custom_vjp,
    ):
        result, expected = run(transformed(gelu), x), transformed(plain)(x)
        jax.tree.map(partial(np.testing.assert_allclose, rtol=2e-5, atol=1e-6), result, expected)


def test_donated_arguments(accumulate):
    step = jax.jit(lambda state, x: accumulate(state, x, amount=1), donate_argnums=0)
    state, x = jnp.asarray(floats(9)), jnp.asarray(floats(9))
    expected = np.asarray(state) + 2 * np.asarray(x)
    given, state = state, step(state, x)
    np.testing.assert_array_equal(step(state, x), expected)
    assert given.is_deleted()


def test_cloudpickled_with_its_rules(scale):
    scale.defjvp(lambda primals, tangents, factor, mode: (primals[0], 5 * tangents[0]))
    sent = cloudpickle.dumps(jax.grad(lambda x: scale(x, factor=3).sum()))
    np.testing.assert_array_equal(cloudpickle.loads(sent)(floats(4)), np.full(4, 5.0))


def test_loaded_and_batched_by_threads_at_once():
    x = floats(8, 3, 5)

    def own(at):
        batched = jax.vmap(load_kernel(KERNELS / "softmax", vmap_axis=0))
        return batched(x[at : at + 1 + at % 3])

    with ThreadPoolExecutor(8) as pool:
        for at, result in enumerate(pool.map(own, range(6))):
            expected = jax.nn.softmax(x[at : at + 1 + at % 3], -1)
            np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-6)


def test_shard_map(run, scale):
    mesh = jax.make_mesh((4,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    x = floats(8, 3)
    for check in (True, False):
        f = jax.shard_map(scale, mesh=mesh, in_specs=P("i"), out_specs=P("i"), check_vma=check)
        np.testing.assert_array_equal(run(f, x), 2 * x)


def test_explicit_axes(scale):
    mesh = jax.make_mesh((4,), ("i",))
    x = floats(8, 3)
    with jax.set_mesh(mesh):
        y = jax.jit(scale)(jax.device_put(x, jax.NamedSharding(mesh, P("i"))))
        np.testing.assert_array_equal(y, 2 * x)


def test_fuse(run, scale, accumulate):
    def f(x):
        y = scale(x, factor=3)
        return accumulate(y, scale(jnp.exp2(x)), amount=1) + 1

    x = floats(64)
    np.testing.assert_array_equal(run(jax_webgpu.fuse(f), x), 3 * x + 2 * 2.0**x + 1)
    ((group,), plans) = (lambda e: (e.groups, e))(jax_webgpu.explain(jax_webgpu.fuse(f), x))
    assert len(plans) == 3
    assert group.bytes_together < group.bytes_alone


def test_fuse_of_calls_that_are_given_numbers(run, scale):
    """A constant without axes is no array of the jaxpr."""
    assert run(jax_webgpu.fuse(lambda: scale(scale(3.0)))) == 12
    x = np.float32(3)
    assert run(jax_webgpu.fuse(lambda x: scale(scale(x), jnp.float32(3))), x) == 15
    assert run(jax_webgpu.fuse(lambda x: scale(x) + scale(jnp.float32(2))), x) == 10


def test_tunables(run, tmp_path):
    kernel = load_kernel(folders.scale(tmp_path), tunables={"WORKGROUP_SIZE": 32})
    (plan,) = jax_webgpu.explain(kernel, floats(65), device="floor")
    assert plan.passes[0].workgroups == (3, 1, 1)
    with jax_webgpu.configure(tunables={"WORKGROUP_SIZE": 16, "BYTES_EACH": 16}):
        other = load_kernel(folders.scale(tmp_path / "other"))
        (plan,) = jax_webgpu.explain(other, floats(65), device="floor")
        assert plan.passes[0].workgroups == (5, 1, 1)
        np.testing.assert_array_equal(run(other, np.ones(65, "f4")), np.full(65, 2.0))


def test_a_tunable_that_is_too_large_is_refused_while_jax_compiles(tmp_path):
    kernel = load_kernel(folders.scale(tmp_path), tunables={"WORKGROUP_SIZE": 2**20})
    message = r"^Scale: WORKGROUP_SIZE is 1,048,576; maxCompute"
    with pytest.raises(LimitError, match=message):
        jax.jit(kernel).lower(floats(3))
    for make in (kernel, jax_webgpu.fuse(lambda x: kernel(kernel(x)))):
        with pytest.raises(LimitError, match=message):
            make(floats(3))


def test_a_tunable_that_the_manifest_bounds_is_not_refused(run, tmp_path):
    path = folders.scale(tmp_path)
    for file in path.iterdir():
        size = "min(tunables.WORKGROUP_SIZE, device.limits.maxComputeWorkgroupSizeX)"
        file.write_text(file.read_text().replace("tunables.WORKGROUP_SIZE", size))
    kernel = load_kernel(path, tunables={"WORKGROUP_SIZE": 2**20})
    np.testing.assert_array_equal(run(kernel, np.ones(65, "f4")), np.full(65, 2.0))


# ---- the examples' folders ----------------------------------------------------------------------

KERNELS = Path(__file__).parents[1] / "examples" / "kernels"

# Of each a call in JAX alone, attributes, and inputs that are not near anything special.
EXAMPLES = {
    "gelu": (partial(jax.nn.gelu, approximate=False), {}, [(3, 7)]),
    "add": (jnp.add, {}, [(2, 3, 5), (3, 1)]),
    "rms_norm": (
        lambda x, w: x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5) * w,
        {},
        [(4, 9), (9,)],
    ),
    "softmax": (partial(jax.nn.softmax, axis=1), {"axis": 1}, [(3, 6, 5)]),
    "matmul": (jnp.matmul, {}, [(2, 5, 7), (7, 3)]),
    "scan": (partial(jnp.cumsum, axis=1), {"axis": 1}, [(3, 10)]),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_example_folders(run, name):
    plain, attributes, shapes = EXAMPLES[name]
    kernel = partial(load_kernel(KERNELS / name), **attributes)
    arrays = [RNG.standard_normal(shape).astype("f4") for shape in shapes]
    expected = plain(*arrays)
    np.testing.assert_allclose(run(kernel, *arrays), expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(
        run(jax_webgpu.fuse(lambda *a: kernel(*a) * 2 + 1), *arrays),
        expected * 2 + 1,
        rtol=1e-5,
        atol=1e-5,
    )
    batch = [RNG.standard_normal((3, *shape)).astype("f4") for shape in shapes]
    np.testing.assert_allclose(
        run(jax.vmap(kernel), *batch), jax.vmap(plain)(*batch), rtol=1e-5, atol=1e-6
    )


def test_example_folders_fold_their_batches(run):
    x, weight = RNG.standard_normal((5, 4, 9)).astype("f4"), np.ones(9, "f4")
    rms_norm = load_kernel(KERNELS / "rms_norm", vmap_axis={"x": 0, "y": 0})
    run(jax.vmap(rms_norm, in_axes=(0, None)), x, weight)
    y, dispatches = counted(run, jax.vmap(rms_norm, in_axes=(0, None)), x, weight)
    assert dispatches == 1
    np.testing.assert_allclose(y, EXAMPLES["rms_norm"][0](x, weight), rtol=1e-5, atol=1e-6)


def test_a_transpose_by_another_kernel(run):
    """Sums from the front and from the back are each other's transposes."""
    scan = load_kernel(KERNELS / "scan")
    scan.deftranspose(
        lambda ct, *, axis, exclusive, reverse: scan(
            ct, axis=axis, exclusive=exclusive, reverse=1 - reverse
        )
    )
    x = floats(6)
    for reverse in (0, 1):
        call = partial(scan, exclusive=1, reverse=reverse)
        matrix = np.tril(np.ones((6, 6), "f4"), -1)
        matrix = matrix.T if reverse else matrix
        np.testing.assert_array_equal(run(jax.jacfwd(call), x), matrix)
        np.testing.assert_array_equal(run(jax.jacrev(call), x), matrix)
        hessian = run(jax.hessian(lambda x, call=call: (call(x) ** 2).sum() / 2), x)
        np.testing.assert_array_equal(hessian, matrix.T @ matrix)


# ---- a rule that comes late ---------------------------------------------------------------------


@pytest.mark.parametrize("wrap", [jax.jit, jax_webgpu.fuse])
@pytest.mark.parametrize("rule", ["defjvp", "defvjp", "deftranspose"])
def test_a_rule_that_comes_after_the_first_trace(scale, wrap, rule):
    x = jnp.asarray(floats(4))
    function = wrap(lambda x: scale(x))

    def slope():
        return jax.grad(lambda x: function(x).sum())(x)

    with pytest.raises(DerivativeError):
        slope()
    if rule == "defjvp":
        scale.defjvp(lambda primals, tangents, **_: (scale(primals[0]), 2 * tangents[0]))
    elif rule == "defvjp":
        scale.defvjp(lambda x, bias, **_: (scale(x), None), lambda kept, t, **_: (2 * t, None))
    else:
        scale.deftranspose(lambda cotangent, **_: 2 * cotangent)
    np.testing.assert_array_equal(slope(), np.full(4, 2))
