"""Whole calls, host to host: every subject on every case, in turns, each result checked before."""

import gc
import os
import platform
import random
import statistics
import time
from collections import defaultdict
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import jax_webgpu
from benchmarks import subjects
from benchmarks.onnx_session import Unable, Worker
from jax_webgpu import device, plan

# A case ends after so many seconds, but not before so many rounds.
SECONDS, LEAST = 60, 5

# Bytes that a subject holds, over those of inputs and outputs: on the average, and one alone.
MEMORY, ALONE = 1.5, 6

# Counters of work that each call has to do. The others count what is made and kept.
WORK = {"dispatches", "submissions", "bytes in", "bytes out"}

PACKAGES = ("jax", "jaxlib", "numpy", "wgpu", "onnxruntime", "onnxruntime-ep-webgpu")


def run(cases, wanted, repetitions, peer, say, save):
    """Measures every case.

    Args:
      cases: to run.
      wanted: ids of the subjects; None for all.
      repetitions: rounds of a case, in each of which every subject has a turn.
      peer: a Python that has the WebGPU build of ONNX Runtime; None if there is none.
      say: is told of progress.
      save: is given the report after each case.

    Returns:
      The report, of types that JSON has.
    """
    worker = _OnDemand(peer)
    everyone = subjects.subjects(worker)
    chosen = [each for each in everyone if wanted is None or each.id in wanted]
    report = {
        "mode": "host",
        "machine": machine(),
        "subjects": {each.id: each.text for each in chosen},
        "cases": [],
    }
    for index, case in enumerate(cases, start=1):
        start = time.monotonic()
        # A copy, so that its arrays go with it.
        figures = _measure(replace(case), chosen, repetitions, say)
        subjects.forget()
        worker.forget()
        if case.large:  # what is kept for the next call is too much for the next case
            worker.close()
            jax_webgpu.clear_caches()
            gc.collect()
        report["cases"].append(figures)
        save(report)
        seconds = time.monotonic() - start
        say(
            f"[{index:2}/{len(cases)}] {case.name}: {len(figures['seconds'])} of {len(chosen)} "
            f"subjects, {figures['rounds']} rounds, {seconds:.0f} s\n"
        )
    report["machine"]["versions"]["onnxruntime-webgpu"] = worker.version
    report["machine"]["load at the end"] = os.getloadavg()
    worker.close()
    return report


def _measure(case, chosen, repetitions, say):
    calls, left_out, second = {}, {}, None
    need, free = int(max(ALONE, MEMORY * len(chosen)) * case.whole), free_memory()
    for subject in chosen:
        say(f"{case.name}: preparing {subject.id}")
        try:
            if need > free:
                raise Unable(f"all together need {need >> 30} GiB of memory, {free >> 30} are free")
            call = subject.prepare(case)
            results = call.results()
            if results is not None:
                case.check(results)
            if subject.id == "buffer":
                second = _second(call.results)
        except Unable as why:
            left_out[subject.id] = {"why": str(why), "failed": False}
        except Exception as error:
            text = str(error).strip().splitlines() or [""]
            why = f"{type(error).__name__}: {text[0][:200]}"
            left_out[subject.id] = {"why": why, "failed": subject.ours}
        else:
            calls[subject.id] = call
    seconds = defaultdict(list)
    chance = random.Random(0)
    order, start, rounds = list(calls), time.monotonic(), 0
    while rounds < repetitions and (rounds < LEAST or time.monotonic() - start < SECONDS):
        say(f"{case.name}: round {rounds + 1} of {repetitions}")
        chance.shuffle(order)  # so that nobody always comes after the same one
        for id in list(order):
            try:
                seconds[id].append(calls[id].turn())
            except Unable as why:
                left_out[id] = {"why": f"in round {rounds + 1}: {why}", "failed": False}
                order.remove(id)
                del calls[id]
        rounds += 1
    return {
        "name": case.name,
        "touched": case.touched,
        "whole": case.whole,
        "rounds": rounds,
        "seconds": {id: summary(seconds[id]) for id in calls},
        "left out": left_out,
        "second call": second,
    }


def summary(seconds):
    """The median, the quartiles and all."""
    low, middle, high = (
        statistics.quantiles(seconds, n=4, method="inclusive") if len(seconds) > 1 else seconds * 3
    )
    return {"median": middle, "quartiles": [low, high], "all": seconds}


def _second(run):
    """What a call of a shape that was called before does and makes, by the counters."""
    counters = device.get().counters
    before, plans = counters.copy(), plan.cache_info().misses
    run()
    done = {name: counters[name] - before[name] for name in counters}
    done["plans"] = plan.cache_info().misses - plans
    return {
        "work": {name: count for name, count in done.items() if name in WORK},
        "made": {name: count for name, count in done.items() if name not in WORK},
    }


class _OnDemand:
    """The process of ONNX Runtime's WebGPU build, started when it is first needed."""

    def __init__(self, peer):
        self.peer = peer
        self.worker = None
        self.version = None

    def __call__(self):
        if self.peer is None:
            raise Unable("no environment with onnxruntime-webgpu was named (--peer)")
        if self.worker is None:
            try:
                self.worker = Worker(self.peer)
                self.version = self.worker.ask("version")
            except (Unable, OSError) as error:
                self.peer, self.worker = None, None
                raise Unable(f"{self.peer} does not run onnxruntime-webgpu: {error}") from None
        return self.worker

    def forget(self):
        try:
            if self.worker is not None:
                self.worker.ask("forget")
        except Unable:
            self.close()  # another one for the next case

    def close(self):
        if self.worker is not None:
            self.worker.close()
        self.worker = None


def free_memory():
    """Bytes that can be had without swapping."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if "MemAvailable" in line)
    except (OSError, StopIteration):
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def machine():
    """What a figure depends on."""
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    return {
        "adapter": str(device.info()),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "system": platform.platform(),
        "versions": versions,
        "load": os.getloadavg(),
    }


def _processor():
    try:
        with open("/proc/cpuinfo") as lines:
            return next(line.split(":", 1)[1].strip() for line in lines if "model name" in line)
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
