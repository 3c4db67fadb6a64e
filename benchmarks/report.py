"""What was measured, for people: a table, the targets, what was left out, and a chart."""

import statistics
from collections import defaultdict
from dataclasses import dataclass

from benchmarks import growth, kernels, loading, memory
from benchmarks.subjects import WEBGPU_PEERS

OURS = ("buffer", "pure")


@dataclass(frozen=True)
class Target:
    """What is aimed at, and what came out; `met` is None where nothing can be said."""

    name: str
    goal: str
    figure: str
    met: bool | None

    def __str__(self):
        mark = {True: "met", False: "MISSED", None: "-"}[self.met]
        return f"{mark:6}  {self.name}: {self.figure}  (target {self.goal})"


def median(case, id):
    """The median of a subject in a case, in seconds; None if it was left out."""
    found = case["seconds"].get(id)
    return found and found["median"]


def fastest_peer(case):
    """ONNX Runtime on WebGPU: the fastest of its builds, with or without IO binding; or None."""
    found = {id: median(case, id) for id in WEBGPU_PEERS}
    return min((time for time in found.values() if time is not None), default=None)


def table(report):
    """A line a case, a column a subject: median in ms, and half the quartiles' distance in %."""
    ids = list(report["subjects"])
    width = max([len(case["name"]) for case in report["cases"]] + [4])
    lines = ["ms ±half the quartiles' distance", ""]
    lines.append("  ".join([f"{'case':{width}}", *(f"{_column(id):>12}" for id in ids)]))
    for case in report["cases"]:
        cells = [f"{_cell(case['seconds'].get(id)):>12}" for id in ids]
        lines.append("  ".join([f"{case['name']:{width}}", *cells]))
    lines.append("")
    lines += [f"{_column(id):>12}  {text}" for id, text in report["subjects"].items()]
    return "\n".join(lines)


def _column(id):
    return id.replace("ort-plugin", "plugin").replace("ort-build", "build")


def _cell(found):
    if found is None:
        return "-"
    low, middle, high = _three(found)
    spread = (high - low) / 2 / middle
    return f"{_ms(found['median'])} ±{spread:3.0%}"


def _three(found):
    low, high = found["quartiles"]
    return low, found["median"], high


def _ms(seconds):
    ms = seconds * 1e3
    return f"{ms:.0f}" if ms >= 100 else f"{ms:.3g}" if ms >= 1 else f"{ms:.3f}"


def left_out(report):
    """A sentence for each reason why a subject has no figure, and where."""
    names, ids = defaultdict(list), defaultdict(list)
    for case in report["cases"]:
        for id, reason in case["left out"].items():
            names[id, reason["why"], reason["failed"]].append(case["name"])
    for (id, why, failed), where in names.items():
        ids[why, failed, tuple(where)].append(id)
    lines = []
    for (why, failed, where), who in ids.items():
        places = "every case" if len(where) == len(report["cases"]) else ", ".join(where)
        lines.append(f"{'FAILED' if failed else 'left out'}: {', '.join(who)} in {places}: {why}")
    return "\n".join(lines)


def failed(report):
    """Whether some subject of ours failed."""
    return any(each["failed"] for case in report["cases"] for each in case["left out"].values())


# --- targets -------------------------------------------------------------------------------------


def host_targets(report):
    """The targets that this run says something of."""
    cases = {case["name"]: case for case in report["cases"]}
    return [
        *_against_peers(report),
        *_fixed_cost(cases),
        *_decode(cases),
        *_second_call(report),
    ]


def _against_peers(report):
    for id in ("bare", *OURS):
        ratios = {
            case["name"]: fastest_peer(case) / median(case, id)
            for case in report["cases"]
            if fastest_peer(case) and median(case, id)
        }
        if not ratios:
            yield Target(f"{id} against ONNX Runtime WebGPU", "≥ 2.57×, none < 1×", "-", None)
            continue
        mean = statistics.geometric_mean(ratios.values())
        worst = min(ratios, key=ratios.get)
        slower = sum(ratio < 1 for ratio in ratios.values())
        yield Target(
            f"{id} against the fastest ONNX Runtime WebGPU",
            "geometric mean ≥ 2.57×, no case slower",
            f"{mean:.2f}× over {len(ratios)} cases, {slower} slower, worst {ratios[worst]:.2f}× "
            f"in {worst}",
            mean >= 2.57 and not slower,
        )


def _fixed_cost(cases):
    for name in ("rotary-tiny", "split-tiny"):
        case = cases.get(name)
        if case is None or median(case, "bare") is None:
            continue
        bare = case["seconds"]["bare"]
        for id in OURS:
            if median(case, id) is None:
                continue
            pairs = zip(case["seconds"][id]["all"], bare["all"], strict=True)
            cost = statistics.median(jitted - alone for jitted, alone in pairs)
            met = cost <= 60e-6 if id == "buffer" else None
            goal = "≤ 60 µs" if id == "buffer" else "none"
            yield Target(f"{name}, {id} over bare", goal, f"{cost * 1e6:.0f} µs", met)
        goal = "≤ 0.25 ms"
        time = bare["median"]
        yield Target(f"{name}, bare", goal, f"{_ms(time)} ms", time <= 0.25e-3)
        peer = fastest_peer(case)
        if peer is not None:
            figure = f"{_ms(time)} against {_ms(peer)} ms"
            goal = "no slower"
            yield Target(f"{name}, bare against ONNX Runtime", goal, figure, time <= peer)


def _decode(cases):
    for batch in (1, 8):
        few, many = (cases.get(f"decode-{batch}-of-{rows}") for rows in (128, 131_072))
        for id in ("bare", *OURS):
            if few and many and median(few, id) and median(many, id):
                ratio = median(many, id) / median(few, id)
                met = None if id == "bare" else ratio <= 1.2
                name = f"decode of {batch}, {id}: 131,072 rows against 128"
                yield Target(name, "≤ 1.2×" if id != "bare" else "none", f"{ratio:.2f}×", met)


def _second_call(report):
    made, copies = {}, {}
    for case in report["cases"]:
        second = case["second call"]
        if second is None:
            continue
        for name, count in second["made"].items():
            if count:
                made.setdefault(name, []).append(case["name"])
        work = second["work"]
        if "bytes in" in work:
            copies[case["name"]] = (work["bytes in"] + work["bytes out"]) / case["touched"]
    if any(case["second call"] for case in report["cases"]):
        figure = "; ".join(f"{name} in {', '.join(names)}" for name, names in made.items())
        yield Target("second call of a shape makes", "nothing", figure or "nothing", not made)
    if copies:
        most = max(copies, key=copies.get)
        figure = f"{copies[most]:.2f} in {most}, median {statistics.median(copies.values()):.2f}"
        name = "bytes that cross over bytes that must be touched, at most"
        yield Target(name, "1.00", figure, copies[most] <= 1.01)


def kernel_targets(report):
    """The worst of each kind of kernel beside the copy, and of rotations beside XLA."""
    measured = [case for case in report["cases"] if "seconds" in case]
    vectors, others, widened = [], [], []
    for case in measured:
        fast = any(part in case["published"] for part in ("quad", "block_vec4", "copy"))
        (widened if case["widened"] > 1 else vectors if fast else others).append(case)
    for name, cases, least in (
        ("quad, block_vec4 and copy", vectors, 0.95),
        ("other kernels", others, 0.85),
        ("kernels of dtypes that are widened", widened, None),
    ):
        if cases:
            worst = min(cases, key=kernels.share)
            share = kernels.share(worst)
            figure = f"{share:.2f} at least, in {worst['name']}, of {len(cases)}"
            goal = "none" if least is None else f"≥ {least}"
            met = None if least is None else share >= least
            yield Target(f"{name}: share of the copy", goal, figure, met)
    ratios = {c["name"]: c["xla"] / c["seconds"]["median"] for c in measured if "xla" in c}
    if ratios:
        worst = min(ratios, key=ratios.get)
        mean = statistics.geometric_mean(ratios.values())
        figure = f"{ratios[worst]:.2f}× at least, in {worst}; geometric mean {mean:.2f}×"
        yield Target("rotations against XLA", "≥ 2×", figure, ratios[worst] >= 2)


def growth_targets(report):
    """How far each curve is from proportion."""
    for curve in report["curves"]:
        found = growth.deviation(curve)
        if found is not None:
            difference, mib = found
            name = f"{curve['case']}, {curve['subject']}: time of a MiB against its median"
            met = None if curve["subject"] == "copy" else abs(difference) <= 0.15
            goal = "within 15 %" if met is not None else "none"
            yield Target(name, goal, f"{difference:+.0%} at {mib} MiB", met)


def memory_targets(report):
    """The peak of a call, and what a thousand leave behind."""
    for figure in report["figures"]:
        if "left out" in figure:
            continue
        name = f"{figure['subject']}, {figure['case']}"
        if figure["kind"] == "once":
            ratio = memory.ratio(figure)
            text = f"{ratio:.2f}×"
            goal = "≤ 1.1 × (inputs + outputs)"
            yield Target(f"{name}: peak extra memory", goal, text, ratio <= 1.1)
        else:
            text = f"{figure['growth'] / 2**20:+.2f} MiB"
            name = f"{name}: growth over {figure['calls'] - figure['from']} calls"
            yield Target(name, "flat: ≤ 1 MiB", text, figure["growth"] <= 2**20)


def load_targets(report):
    """What a user waits for before the first call of a kernel, and of a shape."""
    for figure in report["loads"]:
        each, again = loading.per_kib(figure) * 1e3, figure["again"] * 1e3
        name = f"{figure['name']}: load"
        yield Target(name, "< 1.5 ms a KiB", f"{each:.2f} ms", each < 1.5)
        yield Target(f"{name} again", "< 5 ms", f"{again:.2f} ms", again < 5)
    for figure in report["plans"]:
        seconds = figure["seconds"] * 1e3
        yield Target(f"plan of {figure['name']}", "< 5 ms", f"{seconds:.2f} ms", seconds < 5)


# --- charts --------------------------------------------------------------------------------------

_COLOURS = {
    "bare": "#7fa3d1",
    "bare-fresh": "#b5cbe6",
    "buffer": "#15396b",
    "pure": "#3f6ca8",
    "xla": "#4e9a63",
    "numpy": "#a3c9ae",
    "ort-cpu": "#e8c468",
    "ort-plugin": "#d98246",
    "ort-plugin-bound": "#e7aa80",
    "ort-build": "#b04a3a",
    "ort-build-bound": "#cf8a7e",
}


def host_chart(report, file):
    """A panel a case, a bar a subject: its time over the limit's, on a logarithmic scale."""
    ids = [id for id in report["subjects"] if id in _COLOURS]
    cases = [case for case in report["cases"] if median(case, "copy")]
    columns = max(1, min(4, len(cases)))
    rows = max(1, -(-len(cases) // columns))
    figure = _figure(columns * 3.4, rows * (0.5 + 0.16 * len(ids)) + 0.8)
    panels = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    for panel, case in zip(panels.flat, cases, strict=False):
        limit = median(case, "copy")
        for place, id in enumerate(ids):
            found = case["seconds"].get(id)
            if found is None:
                continue
            low, middle, high = (each / limit for each in _three(found))
            panel.barh(place, middle - 1, left=1, color=_COLOURS[id], height=0.8)
            panel.plot([low, high], [place, place], color="black", linewidth=0.8)
            panel.annotate(
                f"{_ms(found['median'])} ms",
                (max(high, 1), place),
                xytext=(3, 0),
                textcoords="offset points",
                fontsize=5.5,
                verticalalignment="center",
            )
        panel.axvline(1, color="firebrick", linewidth=1)
        panel.set_title(f"{case['name']} (limit {_ms(limit)} ms)", fontsize=7.5)
        panel.tick_params(labelsize=6)
    panels.flat[0].set_xscale("log")
    panels.flat[0].minorticks_off()  # of which so many panels would have thousands
    panels.flat[0].set_xticks([10.0**power for power in range(-2, 6)])
    panels.flat[0].set_yticks(range(len(ids)), [_column(id) for id in ids], fontsize=6)
    panels.flat[0].invert_yaxis()
    for place, panel in enumerate(panels.flat):
        panel.tick_params(labelbottom=place + columns >= len(cases))
        panel.set_axis_off() if place >= len(cases) else None
    ratios = [each / median(case, "copy") for case in cases for each in _medians(case, ids)]
    panels.flat[0].set_xlim(min([0.5, *ratios]) / 2, max([2, *ratios]) * 20)  # room for the text
    figure.suptitle(
        "Whole calls, host to host: time over that of copying every byte once in and once out\n"
        f"{report['machine']['adapter']}",
        fontsize=9,
    )
    _save(figure, file)


def _medians(case, ids):
    return [case["seconds"][id]["median"] for id in ids if id in case["seconds"]]


def kernel_chart(report, file):
    """A bar a kernel: its share of the copy's speed."""
    cases = [case for case in report["cases"] if "seconds" in case]
    figure = _figure(8, 0.8 + 0.17 * len(cases))
    panel = figure.subplots()
    for place, case in enumerate(cases):
        panel.barh(place, kernels.share(case), color=_COLOURS["buffer"], height=0.8)
    for line in (0.85, 0.95, 1):
        panel.axvline(line, color="firebrick", linestyle="-" if line == 1 else ":", linewidth=1)
    panel.set_yticks(range(len(cases)), [case["name"] for case in cases], fontsize=6)
    panel.set_ylim(len(cases) - 0.5, -0.5)
    panel.set_title(f"Share of a copy's speed\n{report['machine']['adapter']}", fontsize=9)
    _save(figure, file)


def growth_chart(report, file):
    """A panel a case, a line a subject: the time of a MiB."""
    names = list(dict.fromkeys(curve["case"] for curve in report["curves"]))
    figure = _figure(4.5 * len(names), 4)
    panels = figure.subplots(1, len(names), sharey=True, squeeze=False)
    for panel, name in zip(panels.flat, names, strict=True):
        for curve in report["curves"]:
            if curve["case"] == name:
                each = [1e6 * curve["seconds"][mib]["median"] / mib for mib in report["sizes"]]
                colour = _COLOURS.get(curve["subject"], "firebrick")
                panel.loglog(report["sizes"], each, ".-", color=colour, label=curve["subject"])
        panel.set(title=name, xlabel="MiB of x", ylabel="µs a MiB")
        panel.legend(frameon=False, fontsize=8)
    figure.suptitle(report["machine"]["adapter"], fontsize=9)
    _save(figure, file)


def _figure(width, height):
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _save(figure, file):
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=130, format="png")
