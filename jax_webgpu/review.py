"""Each variant of a kernel rendered for a table of devices, and compiled on this machine's."""

from collections.abc import Iterator
from dataclasses import dataclass

from jax_webgpu import device, plan, probe, trial
from jax_webgpu.capabilities import PRESETS, Capabilities
from jax_webgpu.errors import AdapterError, DeviceError, JaxWebGPUError, ShaderError
from jax_webgpu.folder import Folder
from jax_webgpu.resolve import Resolved
from jax_webgpu.spec import Spec


@dataclass(frozen=True)
class Verdict:
    """What became of a variant on a device.

    Attributes:
      variant: its id.
      device: the device's name.
      status: ``compiles``; ``renders``, on a device on paper; ``refused``, by a device that lacks
        something; or ``fails``.
      detail: why, in words.
      warning: of a template that prints something undefined.
    """

    variant: str
    device: str
    status: str
    detail: str = ""
    warning: str = ""


def calls(spec: Spec, files: Folder) -> dict[str, Resolved]:
    """A call for each variant that one is found for: of the folder's tests, or made up."""
    cases = trial.read(files) if files.find("test.json") is not None else ()
    return probe.calls(spec, trial.calls(spec, cases))


def review(found: dict[str, Resolved]) -> Iterator[Verdict]:
    """Plans each call for each device of the table, and compiles it on this machine's.

    Where this machine has no adapter, devices on paper are all.
    """
    try:
        gpu = device.get()
    except AdapterError:
        gpu = None
    own = [gpu.capabilities] if gpu else []
    for variant, call in found.items():
        for capabilities in [*own, *PRESETS.values()]:
            yield _verdict(variant, call, capabilities, gpu if capabilities in own else None)


def _verdict(
    variant: str, call: Resolved, capabilities: Capabilities, gpu: device.Device | None
) -> Verdict:
    name = capabilities.name
    try:
        planned = plan.anew(call, capabilities)
        if gpu is not None:
            gpu.compile(planned.passes)
    except ShaderError as error:
        return Verdict(variant, name, "fails", str(error))
    except DeviceError as error:
        return Verdict(variant, name, "refused", str(error).splitlines()[-1].strip())
    except JaxWebGPUError as error:
        return Verdict(variant, name, "fails", str(error))
    warning = ""
    try:
        plan.anew(call, capabilities, strict=True)
    except JaxWebGPUError as error:
        warning = str(error)
    return Verdict(variant, name, "renders" if gpu is None else "compiles", warning=warning)
