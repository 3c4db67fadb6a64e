"""The command line: `python -m jax_webgpu info | explain | lint | test | tune | check`."""

import argparse
import itertools
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

import jax_webgpu
from jax_webgpu import device, lint, review, selftest, trial, tuning, variants
from jax_webgpu.capabilities import PRESETS
from jax_webgpu.errors import JaxWebGPUError
from jax_webgpu.folder import MANIFEST, Folder
from jax_webgpu.ops.kernel import open_folder
from jax_webgpu.ops.rotary_embedding import Rules as Rotary
from jax_webgpu.ops.split import Rules as Split
from jax_webgpu.spec import loads


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; the result is the exit status: 0, 1 for a failure, 2 for wrong use."""
    options = _parser().parse_args(_with_kernel(sys.argv[1:] if arguments is None else arguments))
    try:
        status: int = options.run(options)
    except BrokenPipeError:  # what reads has read enough; at exit Python would write again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (JaxWebGPUError, ValueError, OSError) as error:
        print(f"python -m jax_webgpu {options.command}: {error}", file=sys.stderr)
        return 1
    return status


def _with_kernel(arguments: Sequence[str]) -> list[str]:
    """`explain FOLDER` written out as `explain kernel FOLDER`."""
    first, *rest = arguments or [""]
    own = {"kernel", "rotary_embedding", "split"}
    if first == "explain" and rest and rest[0] not in own and not rest[0].startswith("-"):
        rest.insert(0, "kernel")
    return [first, *rest] if arguments else []


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m jax_webgpu",
        description="WebGPU kernels in JAX programs: what this machine has, and what a call does.",
    )
    parser.add_argument("--version", action="version", version=jax_webgpu.__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    info = commands.add_parser(
        "info",
        help="the adapters of this machine, features and limits; or a kernel folder's manual",
    )
    _add_folder(info, nargs="?")
    info.set_defaults(run=_info)

    _add_explain(commands)

    lint_ = commands.add_parser(
        "lint",
        help="check a kernel folder: manifest, templates, every variant on a table of devices",
        description="Loads the folder, points out what looks wrong in it, then renders each "
        "variant, in each dtype and as the folder's tests call it, for devices on paper, and "
        "compiles it on this machine's. The exit status is 1 where the folder or a variant fails; "
        "what may be meant is a warning.",
    )
    _add_folder(lint_)
    lint_.set_defaults(run=_lint)

    test = commands.add_parser(
        "test", help="run the cases of a kernel folder's test.json on this adapter"
    )
    _add_folder(test)
    test.set_defaults(run=_test)

    tune = commands.add_parser(
        "tune",
        help="find the fastest tunables on this adapter, and remember them",
        description="Measures workgroup sizes, and on a GPU how much one invocation does, for each "
        "operator and dtype. Later processes use what was fastest; delete the file to undo it.",
    )
    tune.add_argument(
        "--mib", type=_mebibytes, metavar="N", help="size of the array, 64; on a CPU 4"
    )
    tune.set_defaults(run=_tune)

    check = commands.add_parser("check", help="a self-test of all variants on this adapter")
    check.set_defaults(run=_check)
    return parser


def _add_explain(commands: Any) -> None:
    explain = commands.add_parser(
        "explain",
        help="every stage of one call: variant, bindings, uniforms, dispatch, WGSL",
        description="Prints what one call does, and why its variant was chosen. Without --device, "
        "for the adapter of this machine; with it, no GPU is needed.",
    )
    operators = explain.add_subparsers(dest="operator", required=True, metavar="OPERATOR")
    rotary, split = _add_rotary_embedding(operators), _add_split(operators)
    for each in (rotary, split, _add_kernel(operators)):
        each.add_argument(
            "--device", metavar="NAME", help=f"a device on paper: {', '.join(PRESETS)}"
        )
        each.add_argument(
            "--workgroup-size", type=_positive, metavar="N", help="in place of the manifest's"
        )
    for each in (rotary, split):
        each.add_argument("--dtype", default="float32", help="of the arrays; float32 by default")
        each.add_argument(
            "--no-overlays", action="store_true", help="the published manifest's variants alone"
        )


def _add_rotary_embedding(operators: Any) -> argparse.ArgumentParser:
    rotary: argparse.ArgumentParser = operators.add_parser(
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
    return rotary


def _add_split(operators: Any) -> argparse.ArgumentParser:
    split: argparse.ArgumentParser = operators.add_parser(
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
    return split


def _add_kernel(operators: Any) -> argparse.ArgumentParser:
    kernel: argparse.ArgumentParser = operators.add_parser(
        "kernel",
        help="a kernel folder, also written `explain FOLDER`",
        epilog="example: python -m jax_webgpu explain examples/kernels/softmax x=float32:8,100 "
        "axis=-1 --device floor",
    )
    _add_folder(kernel)
    kernel.add_argument(
        "values",
        nargs="*",
        metavar="NAME=VALUE",
        help="an input as dtype:sizes (float32:8,100), or an attribute or argument in JSON",
    )
    kernel.add_argument(
        "--output",
        action="append",
        default=[],
        metavar="NAME[=SIZES]",
        help="an output that is wanted, with its shape where the manifest gives none",
    )
    kernel.set_defaults(run=_explain, call=_kernel, dtype="", no_overlays=False)
    return kernel


def _add_folder(parser: argparse.ArgumentParser, nargs: str | None = None) -> None:
    parser.add_argument("folder", nargs=nargs, metavar="FOLDER", help="or a repository of the Hub")
    parser.add_argument("--version", dest="contract", type=int, metavar="N", help="of a repository")
    parser.add_argument("--revision", metavar="COMMIT", help="of a repository, in its place")


def _opened(options: argparse.Namespace) -> Folder:
    return open_folder(options.folder, version=options.contract, revision=options.revision)


def _sizes(text: str) -> tuple[int, ...]:
    try:
        shape = tuple(int(size) for size in text.split(",") if size.strip())
    except ValueError:
        raise ValueError(f"{text!r} is not a list of sizes like 1,32,8") from None
    if min(shape, default=0) < 0:
        raise ValueError(f"{text!r} has a negative size")
    return shape


def _shape(text: str) -> tuple[int, ...]:
    """As `_sizes`, for argparse, which prints messages of this type alone."""
    try:
        return _sizes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _positive(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of 1 or more")
    return int(text)


def _mebibytes(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0
    if not 0 < number < 2**20:
        raise argparse.ArgumentTypeError(f"{text!r} is no size in MiB")
    return number


def _info(options: argparse.Namespace) -> int:
    if options.folder is not None:
        kernel = jax_webgpu.load_kernel(
            options.folder, version=options.contract, revision=options.revision
        )
        print(f"{kernel.__name__}{kernel.__signature__}\n\n{kernel.__doc__}")
        return 0
    found = device.adapters()
    chosen = device.info()
    for adapter in found:
        mark = "*" if adapter.index == chosen.index else " "
        print(f"{mark} {adapter.index}: {adapter}")
        own = adapter.index == chosen.index
        capabilities = device.get().capabilities if own else adapter.capabilities
        print(f"     features: {', '.join(sorted(capabilities.features)) or 'none'}")
        for name, value in capabilities.limits:
            print(f"     {name}: {value:,}")
    print("* is used; JAX_WEBGPU_ADAPTER, an index or part of a name, chooses another")
    return 0


def _explain(options: argparse.Namespace) -> int:
    tunables = {"WORKGROUP_SIZE": options.workgroup_size} if options.workgroup_size else {}
    function, arrays = options.call(options)
    settings = jax_webgpu.configure(tunables=tunables, overlays=not options.no_overlays)
    with settings, jax.enable_x64(options.dtype in ("int64", "uint64", "float64")):
        plans = jax_webgpu.explain(function, *arrays, device=options.device)
    asked = ", ".join(f"{array.dtype}{list(array.shape)}" for array in arrays)
    print(f"asked     {getattr(options, 'folder', options.operator)} of {asked}")
    for whole in plans.pieces:
        print(whole.describe())
    for plan in plans:
        print(plan.describe())
        names = variants.select(plan.resolved, plan.capabilities).scope
        others = variants.grouped(variants.refusals(plan.resolved, plan.capabilities, names))
        print("\n".join(["the other variants", *(others or ["  none: the manifest has no other"])]))
    return 0


def _array(shape: tuple[int, ...], dtype: str) -> jax.ShapeDtypeStruct:
    try:
        found = jnp.dtype(dtype)
    except (TypeError, ValueError, SyntaxError):  # NumPy reads some texts as Python
        found = None
    if found is None or not (jnp.issubdtype(found, jnp.number) or found == jnp.bool_):
        raise ValueError(f"{dtype!r} is no data type of JAX's; expected one like float16")
    return jax.ShapeDtypeStruct(shape, found)


def _rotary_embedding(options: argparse.Namespace) -> tuple[Callable[..., Any], list[Any]]:
    arrays = [
        _array(shape, options.dtype)
        for shape in (options.x, options.cos, options.sin or options.cos)
    ]
    if options.position_ids is not None:
        batch, *_, tokens, _ = options.x if len(options.x) == 4 else (*options.x, 0, 0, 0)[:3]
        arrays.append(_array(options.position_ids or (batch, tokens), "int32"))

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


def _kernel(options: argparse.Namespace) -> tuple[Callable[..., Any], list[Any]]:
    kernel = jax_webgpu.load_kernel(
        options.folder, version=options.contract, revision=options.revision
    )
    inputs, named = dict[str, Any](), dict[str, Any]()
    for each in options.values:
        name, equals, text = each.partition("=")
        if not equals:
            raise ValueError(f"{each!r} is not of the form NAME=VALUE")
        if name in inputs or name in named:
            raise ValueError(f"{name} is given twice")
        if name in kernel.spec.inputs:
            dtype, colon, sizes = text.partition(":")
            if not colon and not dtype.isidentifier():
                raise ValueError(f"{each!r}: expected DTYPE:SIZES, as in {name}=float32:2,3,40")
            inputs[name] = _array(_sizes(sizes), dtype)
            if inputs[name].dtype.itemsize == 8:
                options.dtype = "int64"  # else JAX would take it for one of 32 bits
        elif name == "outputs":
            raise ValueError("outputs are named by --output")
        else:
            named[name] = _json(text)
    outputs = {
        name: _sizes(sizes) if equals else None
        for name, equals, sizes in (each.partition("=") for each in options.output)
    }

    def call(*arrays: Any) -> Any:
        return kernel(**dict(zip(inputs, arrays, strict=True)), outputs=outputs, **named)

    return call, [*inputs.values()]


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):  # a string without its quotes
        return text


def _lint(options: argparse.Namespace) -> int:
    files = _opened(options)
    manifest = files.read_bytes(MANIFEST)
    spec = loads(manifest, files.path / MANIFEST, files.read_bytes)
    names = [path.name for path in files.path.iterdir()] if files.path.is_dir() else []
    findings = [*lint.findings(spec, names)]
    calls, refused = review.calls(spec, files)
    wrong = [each.place for each in findings if each.is_error]
    for name, reason in refused.items():
        if not any(f"variant {name}," in f"{place}," or place == "when" for place in wrong):
            nearest = f"; of the nearest: {reason}" if reason else ""
            message = f"no call was found that it takes: give it a test case{nearest}"
            findings.append(lint.Finding(f"variant {name}", message))
    for finding in findings:
        print(f"{'error' if finding.is_error else 'warning'}: {finding}")
    errors, warnings = len(wrong), dict[str, None]()
    for variant, verdicts in itertools.groupby(review.review(calls), lambda each: each.variant):
        found = [*verdicts]
        nowhere = all(verdict.status == "refused" for verdict in found)
        for verdict in found[:1] if nowhere else found:
            for detail in verdict.details if verdict.status == "fails" or nowhere else ():
                errors += 1
                where = "any device, as on " if nowhere else ""
                print(f"error: variant {variant} on {where}{verdict.device}: {detail}")
        warnings |= dict.fromkeys(text for verdict in found for text in verdict.warnings)
        statuses = ", ".join(f"{verdict.device} {verdict.status}" for verdict in found)
        print(f"{variant}: {statuses}", flush=True)
    if note := review.half_floats(spec, calls):
        print(f"note: {note}")
    for warning in warnings:
        print(f"warning: {warning}")
    count = len(findings) - len(wrong) + len(warnings)
    counted = (len(spec.variants), "variant"), (errors, "error"), (count, "warning")
    total = (f"{number} {noun}" + "s" * (number != 1) for number, noun in counted)
    print(f"{files.path}: {', '.join(total)}")
    return 1 if errors else 0


def _test(options: argparse.Namespace) -> int:
    files = _opened(options)
    print(f"adapter: {jax_webgpu.device_info()}")
    counts = Counter[str]()
    for result in trial.run(files):
        counts[result.status] += 1
        print(result, flush=True)
    total = ", ".join(f"{count} {status}" for status, count in sorted(counts.items()))
    print(f"{files.path}: {total or 'no cases'}")
    wrong = counts[trial.Status.FAILED] + counts[trial.Status.NOT_RUN]
    return 0 if counts[trial.Status.PASSED] and not wrong else 1


def _tune(options: argparse.Namespace) -> int:
    adapter = jax_webgpu.device_info()
    print(f"adapter: {adapter}")
    size = options.mib or (4 if adapter.kind == "CPU" else 64)
    operators = {rules.operator.spec.name: rules.operator for rules in (Rotary, Split)}
    best: dict[str, dict[str, Any]] = {}
    for each in tuning.trials(operators, size):
        what = ", ".join(f"{name} {value}" for name, value in each.tunables.items()) or "default"
        mark = "  best so far" if each.best else ""
        print(
            f"{each.operator} {each.dtype}  {what}: {each.seconds * 1e3:.3f} ms{mark}",
            flush=True,
        )
        if each.best:
            best.setdefault(each.operator, {})[each.dtype] = dict(each.tunables)
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
