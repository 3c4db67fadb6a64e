"""Kernel folders as JAX functions: `load_kernel`."""

import copy
import inspect
import pickle
import pydoc
import shutil
from functools import partial
from pathlib import Path

import folders
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from calls import counted, names
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads

import jax_webgpu
from jax_webgpu import CallError, DerivativeError, DTypeError, load_kernel, resources

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
        (lambda k, x: k(x, x, x), CallError, r"takes 2 inputs \(x, bias\), got 3"),
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


def test_a_traced_attribute(scale):
    with pytest.raises(DTypeError, match=r"factor must be static.*static_argnames"):
        jax.jit(lambda x, factor: scale(x, factor=factor))(floats(4), 3)


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"vmap_axis": {"z": 0, "y": 0}}, "vmap_axis names 'z'"),
        ({"vmap_axis": {"x": 0}}, "no axis of the output y"),
        ({"vmap_axis": 0.5}, "must be an integer"),
        ({"vmap_method": "fast"}, "expected one of sequential"),
        ({"tunables": {"SIZE": 1}}, "no tunable SIZE"),
        ({"tunables": {"WORKGROUP_SIZE": "many"}}, "WORKGROUP_SIZE"),
    ],
)
def test_what_load_kernel_refuses(tmp_path, keywords, message):
    with pytest.raises((CallError, DTypeError), match=message):
        load_kernel(folders.scale(tmp_path), **keywords)


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
        y, dispatches = counted(run, batched, xs, bias)
        assert dispatches == 1
        np.testing.assert_array_equal(y, 3 * x + bias)


def test_vmap_folds_the_named_ports(run, tmp_path):
    kernel = load_kernel(folders.moments(tmp_path), vmap_axis={"x": 0, "total": 0, "square": 0})
    x = floats(3, 4, 5)
    both, dispatches = counted(run, jax.vmap(kernel, in_axes=1), x)
    assert dispatches == 2
    np.testing.assert_array_equal(both.total, x.sum(2).T)
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
    y, dispatches = counted(run, jax.vmap(kernel), x)
    assert dispatches == 1
    np.testing.assert_array_equal(y, 2 * x)
    if method == "broadcast_all":
        y = run(jax.vmap(kernel, in_axes=(0, None)), x, bias)
        np.testing.assert_array_equal(y, 2 * x + bias)


def test_a_wrong_vmap_axis_is_found(tmp_path):
    kernel = load_kernel(folders.moments(tmp_path), vmap_axis={"x": 1, "total": 0, "square": 0})
    with pytest.raises(CallError, match="vmap_axis is 0 for total"):
        jax.vmap(kernel)(floats(3, 4, 5))


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


def test_tunables(run, tmp_path):
    kernel = load_kernel(folders.scale(tmp_path), tunables={"WORKGROUP_SIZE": 32})
    (plan,) = jax_webgpu.explain(kernel, floats(65), device="floor")
    assert plan.passes[0].workgroups == (3, 1, 1)
    with jax_webgpu.configure(tunables={"WORKGROUP_SIZE": 16, "BYTES_EACH": 16}):
        other = load_kernel(folders.scale(tmp_path / "other"))
        (plan,) = jax_webgpu.explain(other, floats(65), device="floor")
        assert plan.passes[0].workgroups == (5, 1, 1)
        np.testing.assert_array_equal(run(other, np.ones(65, "f4")), np.full(65, 2.0))


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
