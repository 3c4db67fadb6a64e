"""Each variant of a kernel rendered for a table of devices, and compiled on this machine's."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from jax_webgpu import device, lint, plan, probe, runtime, trial, variants, wgsl
from jax_webgpu.capabilities import IDEAL, PRESETS, Capabilities
from jax_webgpu.errors import AdapterError, DeviceError, JaxWebGPUError, ShaderError
from jax_webgpu.folder import Folder
from jax_webgpu.plan import Plan
from jax_webgpu.resolve import Resolved, extend, scope
from jax_webgpu.spec import Spec

F16 = "shader-f16"


@dataclass(frozen=True)
class Verdict:
    """What became of a variant on a device.

    Attributes:
      variant: its id.
      device: the device's name.
      status: ``compiles``; ``renders``, on a device on paper; ``refused``, by a device that lacks
        something; or ``fails``. The worst of its calls', but refused where all are.
      details: why, in words, of each call that fails or is refused.
      warnings: of a template that prints something undefined, or declares another workgroup size
        than its dispatch counts with; and of a test's tunables that alone are too much.
    """

    variant: str
    device: str
    status: str
    details: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


def calls(spec: Spec, files: Folder) -> tuple[dict[str, list[Resolved]], dict[str, str]]:
    """Calls of each variant, and of those that none is found for why the nearest is refused.

    One that is found, in the folder's tests or made up, the same in every dtype that the variant
    takes, and all of the tests that it runs.
    """
    cases = trial.read(files) if files.find("test.json") is not None else ()
    given = [*trial.calls(spec, cases)]
    chosen = [(_chosen(call), call) for call in given]
    found, refused = dict[str, list[Resolved]](), dict[str, str]()
    for variant in spec.variants:
        misses, call = probe.near(spec, variant.id, given)
        if call is None or misses:
            refused[variant.id] = "" if call is None else _refusal(call)
            continue
        own = [replace(each, spec=call.spec) for name, each in chosen if name == variant.id]
        found[variant.id] = list(dict.fromkeys([call, *probe.typed(call), *own]))
    return found, refused


def _chosen(call: Resolved) -> str | None:
    """The variant that would run a call on a device that can do everything."""
    try:
        return variants.select(call, IDEAL).variant.id
    except JaxWebGPUError:
        return None


def _refusal(call: Resolved) -> str:
    """Why the only variant of a call does not take it."""
    try:
        names = extend(scope(call, IDEAL), call.spec.derive.items(), call.spec.of_device)
    except JaxWebGPUError as error:
        return str(error)
    return variants.refusals(call, IDEAL, names)[0].reason


def review(found: Mapping[str, Sequence[Resolved]]) -> Iterator[Verdict]:
    """Plans each call for each device of the table, and compiles it on this machine's.

    Where this machine has no adapter, devices on paper are all.
    """
    try:
        gpu = device.get()
    except AdapterError:
        gpu = None
    own = [gpu.capabilities] if gpu else []
    for variant, given in found.items():
        strict = set(given)  # what a template leaves undefined it does on the first device too
        for capabilities in [*own, *PRESETS.values()]:
            on = gpu if capabilities in own else None
            verdicts = [_verdict(variant, call, capabilities, on, call in strict) for call in given]
            strict -= {c for c, v in zip(given, verdicts, strict=True) if v.status != "refused"}
            yield _worst(verdicts)


def half_floats(spec: Spec, found: Mapping[str, Sequence[Resolved]]) -> str | None:
    """Which dtypes run only on devices with the feature shader-f16; None where all run on others.

    Args:
      spec: the manifest.
      found: its calls, as `calls` gives them.
    """
    without = [each.held_to(each.features - {F16}, {}) for each in PRESETS.values()]
    runs = dict[str, bool]()
    """Of a dtype that some device takes, whether one without the feature does."""
    for call in {replace(call, spec=spec): None for given in found.values() for call in given}:
        if any(_runs(each, call) for each in PRESETS.values()):
            apart = any(_runs(each, call) for each in without)
            for variable, dtype in call.logical:
                told = f"{variable} as {dtype}"
                runs[told] = runs.get(told, False) or apart
    if all(runs.values()):
        return None
    needing = ", ".join(name for name, apart in runs.items() if not apart)
    others = ", ".join(name for name, apart in runs.items() if apart) or "nothing"
    lacking = " and ".join(each.name for each in PRESETS.values() if not each.has(F16))
    return f"only with the feature {F16}, which {lacking} lack: {needing}; without it too: {others}"


def _runs(capabilities: Capabilities, call: Resolved) -> bool:
    """Whether a device takes a call, and has the f16 that its WGSL may ask for."""
    try:
        passes = plan.make(plan.fitted(call, capabilities), capabilities).passes
    except JaxWebGPUError:
        return False
    return capabilities.has(F16) or not any(wgsl.enables_f16(wgsl.code(p.wgsl)) for p in passes)


def _worst(verdicts: Sequence[Verdict]) -> Verdict:
    """The verdicts of several calls as one: a device may lack what only some of them need."""
    order = ("fails", "compiles", "renders", "refused")
    worst = min(verdicts, key=lambda each: order.index(each.status))
    alike = [each for each in verdicts if each.status == worst.status]
    return replace(
        worst,
        details=tuple(dict.fromkeys(text for each in alike for text in each.details)),
        warnings=tuple(dict.fromkeys(text for each in verdicts for text in each.warnings)),
    )


def _verdict(
    variant: str,
    call: Resolved,
    capabilities: Capabilities,
    gpu: device.Device | None,
    strict: bool,
) -> Verdict:
    name, status = capabilities.name, "renders" if gpu is None else "compiles"

    def make(call: Resolved, strict: bool = False) -> Plan:
        return plan.anew(plan.fitted(call, capabilities), capabilities, strict=strict)

    try:
        planned = make(call)
        if gpu is not None:
            runtime.compile_(planned, gpu)
    except ShaderError as error:
        return Verdict(variant, name, "fails", (str(error),))
    except DeviceError as error:
        reason = str(error).splitlines()[-1].strip()
        told = (reason,) if plan.is_refused_for_tunables(call, make) else ()
        return Verdict(variant, name, "refused", (reason,), told)
    except JaxWebGPUError as error:
        return Verdict(variant, name, "fails", (str(error),))
    if not strict:
        return Verdict(variant, name, status)
    try:
        warnings = tuple(_mismatches(make(call, strict=True)))
    except JaxWebGPUError as error:
        if any(lint.is_certain(each, str(error)) for each in call.spec.templates.values()):
            return Verdict(variant, name, "fails", (str(error),))
        warnings = (str(error),)
    return Verdict(variant, name, status, warnings=warnings)


def _mismatches(strict: Plan) -> Iterator[str]:
    """Where a template declares another workgroup size than the dispatch counts with."""
    for each in strict.passes:
        declared = wgsl.workgroup_size(wgsl.code(each.wgsl))
        counted = each.workgroup_size
        if declared and counted is not None and math.prod(declared) != counted:
            shown = ", ".join(map(str, declared))
            yield (
                f"{each.label}: {each.template} declares @workgroup_size({shown}), and the "
                f"dispatch counts with a workgroupSize of {counted}"
            )
