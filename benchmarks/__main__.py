"""Measures whole calls, host to host; or, if asked to, kernels, growth, memory or loading.

`./dev bench` runs it with everything that it needs.
"""

import argparse
import functools
import importlib.util
import json
import sys
from pathlib import Path

import jax_webgpu
from benchmarks import growth, host, kernels, loading, memory, report, subjects
from benchmarks.cases import CASES, KERNEL_CASES, chosen


def main(arguments=None):
    """Runs one mode; the result is the exit status, 1 if something of ours failed."""
    options = _options(arguments)
    jax_webgpu.configure(tunables=options.tunables)
    found, text, targets, chart = options.mode(options)
    print(f"{found['machine']['adapter']}\n\n{text}\n")
    if options.small:
        print("With --small the targets say nothing:")
    print("\n".join(map(str, targets)))
    found["targets"] = [vars(target) for target in targets]
    _save(options, found)
    if options.chart:
        chart(found, options.chart)
    return 1 if found["mode"] == "host" and report.failed(found) else 0


# --- modes: what was found, it as text, the targets, and what draws it --------------------------


def _host(options):
    cases = [case for case in CASES if options.large or options.small or not case.large]
    cases = chosen(cases, options.only)
    if options.small:
        cases = [case.small() for case in cases]
    save = functools.partial(_save, options)
    found = host.run(cases, options.subjects, options.repetitions, options.peer, _say, save)
    text = f"{report.table(found)}\n\n{report.left_out(found)}".rstrip()
    return found, text, list(report.host_targets(found)), report.host_chart


def _kernels(options):
    cases = chosen(KERNEL_CASES, options.only)
    found = kernels.run(cases, 1 if options.small else options.mib, options.runs, _say)
    text = "\n".join(map(kernels.line, found["cases"]))
    return found, text, list(report.kernel_targets(found)), report.kernel_chart


def _growth(options):
    most = 2 if options.small else 1024
    found = growth.run(most, options.subjects, options.repetitions, _say)
    return found, growth.table(found), list(report.growth_targets(found)), report.growth_chart


def _memory(options):
    found = memory.run(options.subjects, options.small, _say)
    text = "\n".join([*map(memory.line, found["figures"]), found.get("left out", "")]).rstrip()
    return found, text, list(report.memory_targets(found)), None


def _load(options):
    found = loading.run(1 if options.small else options.repetitions, _say)
    text = "\n".join(map(loading.line, [*found["loads"], *found["plans"]]))
    return found, text, list(report.load_targets(found)), None


# --- the command line ---------------------------------------------------------------------------


def _options(arguments):
    parser = argparse.ArgumentParser(prog="./dev bench", description=__doc__.partition("\n")[0])
    modes = parser.add_mutually_exclusive_group()
    parser.set_defaults(mode=_host)
    for name, mode, text in (
        ("--kernels", _kernels, "the device's own time, against a copy of as many bytes"),
        ("--growth", _growth, "time by size, from 1 MiB to 1 GiB"),
        ("--memory", _memory, "memory at the peak of a call and over a thousand"),
        ("--load", _load, "loading of manifests and planning of calls, without a device"),
    ):
        modes.add_argument(name, dest="mode", action="store_const", const=mode, help=text)
    parser.add_argument(
        "--only", metavar="PATTERN", help="cases by name: 'split*', or a part of it"
    )
    parser.add_argument("--subjects", type=_subjects, metavar="ID,ID", help="in place of all")
    parser.add_argument("--repetitions", type=int, default=21, metavar="N", help="21 by default")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures")
    parser.add_argument("--chart", type=Path, metavar="FILE", help="write a PNG; not of all modes")
    parser.add_argument("--small", action="store_true", help="few elements, to see that it runs")
    parser.add_argument("--large", action="store_true", help="also cases of gigabytes")
    parser.add_argument("--mib", type=float, default=256, help="of a kernel's traffic; 256")
    parser.add_argument("--runs", type=int, help="of a kernel in a submission; by the adapter")
    parser.add_argument("--tunable", dest="tunables", action="append", default=[], type=_tunable)
    parser.add_argument("--peer", metavar="PYTHON", help="one that has onnxruntime-webgpu")
    options = parser.parse_args(arguments)
    options.tunables = dict(options.tunables)
    if options.chart and options.mode in (_memory, _load):
        parser.error("this mode draws no chart")
    if options.chart and not importlib.util.find_spec("matplotlib"):
        parser.error("--chart needs matplotlib: pip install '.[bench]'")
    return options


def _save(options, found):
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(found, indent=1))


def _subjects(text):
    known = [each.id for each in subjects.subjects(None)]
    wanted = [id.strip() for id in text.split(",")]
    unknown = [id for id in wanted if id not in known]
    if unknown:
        raise argparse.ArgumentTypeError(f"{unknown[0]} is none of {', '.join(known)}")
    return wanted


def _tunable(text):
    name, _, value = text.partition("=")
    return name, int(value)


def _say(text):
    """Progress: what ends a line stays; other text is overwritten, and for a terminal only."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
    elif text.endswith("\n"):
        print(text, end="", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
