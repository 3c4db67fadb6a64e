"""The command line: `python -m jax_webgpu info | explain | tune | check`."""

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

import jax_webgpu
from jax_webgpu import device, selftest, tuning, variants
from jax_webgpu.capabilities import PRESETS
from jax_webgpu.errors import JaxWebGPUError
from jax_webgpu.ops.rotary_embedding import Rules as Rotary
from jax_webgpu.ops.split import Rules as Split


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; the result is the exit status: 0, 1 for a failure, 2 for wrong use."""
    options = _parser().parse_args(arguments)
    try:
        status: int = options.run(options)
    except (JaxWebGPUError, ValueError) as error:
        print(f"python -m jax_webgpu {options.command}: {error}", file=sys.stderr)
        return 1
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m jax_webgpu",
        description="WebGPU kernels in JAX programs: what this machine has, and what a call does.",
    )
    parser.add_argument("--version", action="version", version=jax_webgpu.__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    info = commands.add_parser("info", help="the adapters of this machine, features and limits")
    info.set_defaults(run=_info)

    explain = commands.add_parser(
        "explain",
        help="every stage of one call: variant, bindings, uniforms, dispatch, WGSL",
        description="Prints what one call does, and why its variant was chosen. Without --device, "
        "for the adapter of this machine; with it, no GPU is needed.",
    )
    operators = explain.add_subparsers(dest="operator", required=True, metavar="OPERATOR")

    rotary = operators.add_parser(
        "rotary_embedding",
        help="RotaryEmbedding of ONNX opset 23",
        epilog="example: python -m jax_webgpu explain rotary_embedding --x 1,32,1024,128 "
        "--cos 1024,64 --position-ids --device apple-m",
    )
    rotary.add_argument("--x", type=_shape, required=True, metavar="SIZES", help="shape of x")
    rotary.add_argument(
        "--cos", type=_shape, required=True, metavar="SIZES", help="shape of cos_cache"
    )
    rotary.add_argument(
        "--sin", type=_shape, metavar="SIZES", help="shape of sin_cache, by default that of --cos"
    )
    rotary.add_argument(
        "--position-ids",
        type=_shape,
        nargs="?",
        const=(),
        metavar="SIZES",
        help="with position_ids, by default of batch and sequence of x",
    )
    rotary.add_argument("--interleaved", action="store_true", help="rotate neighbours")
    rotary.add_argument("--rotary-embedding-dim", type=int, default=0, metavar="N")
    rotary.add_argument("--num-heads", type=int, metavar="N")
    rotary.set_defaults(run=_explain, call=_rotary_embedding)

    split = operators.add_parser(
        "split",
        help="Split of ONNX opset 18",
        epilog="example: python -m jax_webgpu explain split --x 1024,3072 --axis -1 "
        "--num-outputs 3 --device floor",
    )
    split.add_argument("--x", type=_shape, required=True, metavar="SIZES", help="shape of x")
    split.add_argument("--axis", type=int, default=0, metavar="N")
    split.add_argument("--split", type=_shape, metavar="SIZES", help="sizes of the parts")
    split.add_argument("--num-outputs", type=int, metavar="N")
    split.set_defaults(run=_explain, call=_split)

    for each in (rotary, split):
        each.add_argument("--dtype", default="float32", help="of the arrays; float32 by default")
        each.add_argument(
            "--device", metavar="NAME", help=f"a device on paper: {', '.join(PRESETS)}"
        )
        each.add_argument(
            "--no-overlays", action="store_true", help="the published manifest's variants alone"
        )
        each.add_argument(
            "--workgroup-size", type=int, metavar="N", help="in place of the manifest's"
        )

    tune = commands.add_parser(
        "tune",
        help="find the fastest tunables on this adapter, and remember them",
        description="Measures workgroup sizes, and on a GPU how much one invocation does, for each "
        "operator and dtype. Later processes use what was fastest; delete the file to undo it.",
    )
    tune.add_argument("--mib", type=float, metavar="N", help="size of the array, 64; on a CPU 4")
    tune.set_defaults(run=_tune)

    check = commands.add_parser("check", help="a self-test of all variants on this adapter")
    check.set_defaults(run=_check)
    return parser


def _shape(text: str) -> tuple[int, ...]:
    try:
        shape = tuple(int(size) for size in text.split(",") if size.strip())
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of sizes like 1,32,8") from None
    if min(shape, default=0) < 0:
        raise argparse.ArgumentTypeError(f"{text!r} has a negative size")
    return shape


def _info(options: argparse.Namespace) -> int:
    found = device.adapters()
    chosen = device.info()
    for adapter in found:
        mark = "*" if adapter.index == chosen.index else " "
        print(f"{mark} {adapter.index}: {adapter}")
        capabilities = chosen.capabilities if adapter is chosen else adapter.capabilities
        print(f"     features: {', '.join(sorted(capabilities.features)) or 'none'}")
        for name, value in capabilities.limits:
            print(f"     {name}: {value:,}")
    print("* is used; JAX_WEBGPU_ADAPTER, an index or part of a name, chooses another")
    return 0


def _explain(options: argparse.Namespace) -> int:
    tunables = {"WORKGROUP_SIZE": options.workgroup_size} if options.workgroup_size else {}
    function, arrays = options.call(options)
    settings = jax_webgpu.configure(tunables=tunables, overlays=not options.no_overlays)
    with settings, jax.enable_x64(options.dtype == "int64"):
        plans = jax_webgpu.explain(function, *arrays, device=options.device)
    asked = ", ".join(f"{array.dtype}{list(array.shape)}" for array in arrays)
    print(f"asked     {options.operator} of {asked}")
    for plan in plans:
        print(plan.describe())
        names = variants.select(plan.resolved, plan.capabilities).scope
        print("the other variants")
        print(
            "\n".join(variants.grouped(variants.refusals(plan.resolved, plan.capabilities, names)))
        )
    return 0


def _array(shape: tuple[int, ...], dtype: str) -> jax.ShapeDtypeStruct:
    try:
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
    except TypeError:
        raise ValueError(f"--dtype {dtype} is no data type; expected one like float16") from None


def _rotary_embedding(options: argparse.Namespace) -> tuple[Callable[..., Any], list[Any]]:
    arrays = [
        _array(shape, options.dtype)
        for shape in (options.x, options.cos, options.sin or options.cos)
    ]
    if options.position_ids is not None:
        x = options.x
        arrays.append(
            _array(options.position_ids or (*x[:1], x[-2 if len(x) == 4 else 1]), "int32")
        )

    def call(*arrays: Any) -> Any:
        return jax_webgpu.rotary_embedding(
            *arrays,
            interleaved=options.interleaved,
            rotary_embedding_dim=options.rotary_embedding_dim,
            num_heads=options.num_heads,
        )

    return call, arrays


def _split(options: argparse.Namespace) -> tuple[Callable[..., Any], list[Any]]:
    def call(x: Any) -> Any:
        return jax_webgpu.split(
            x, options.split, axis=options.axis, num_outputs=options.num_outputs
        )

    return call, [_array(options.x, options.dtype)]


def _tune(options: argparse.Namespace) -> int:
    adapter = jax_webgpu.device_info()
    print(f"adapter: {adapter}")
    size = options.mib or (4 if adapter.kind == "CPU" else 64)
    operators = {rules.operator.spec.name: rules.operator for rules in (Rotary, Split)}
    best: dict[str, dict[str, Any]] = {}
    for trial in tuning.trials(operators, size):
        what = ", ".join(f"{name} {value}" for name, value in trial.tunables.items()) or "default"
        mark = "  best so far" if trial.best else ""
        print(
            f"{trial.operator} {trial.dtype}  {what}: {trial.seconds * 1e3:.3f} ms{mark}",
            flush=True,
        )
        if trial.best:
            best.setdefault(trial.operator, {})[trial.dtype] = dict(trial.tunables)
    print(f"written to {tuning.save(adapter.capabilities.name, best)}")
    return 0


def _check(options: argparse.Namespace) -> int:
    print(f"adapter: {jax_webgpu.device_info()}")
    failures = 0
    cases = selftest.cases()
    for index, case in enumerate(cases, start=1):
        problem = case.run()
        failures += problem is not None
        verdict = "pass" if problem is None else f"FAIL: {problem}"
        print(f"[{index:2}/{len(cases)}] {case}: {verdict}", flush=True)
    print(f"{'FAIL' if failures else 'pass'}: {len(cases) - failures} of {len(cases)} variants")
    return 1 if failures else 0
