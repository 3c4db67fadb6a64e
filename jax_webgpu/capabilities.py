"""What a device can do, as data, so that a plan can be made for any device on paper.

Names are WebGPU's (https://www.w3.org/TR/webgpu/#limits, #feature-index), in its own spelling.
"""

from collections.abc import Mapping, Set
from dataclasses import dataclass, field, replace
from typing import Any, Self

# WebGPU's default limits, which every adapter reaches, as far as compute work meets them.
FLOOR_LIMITS = {
    "maxBindGroups": 4,
    "maxBindingsPerBindGroup": 1000,
    "maxBufferSize": 268435456,
    "maxComputeInvocationsPerWorkgroup": 256,
    "maxComputeWorkgroupSizeX": 256,
    "maxComputeWorkgroupSizeY": 256,
    "maxComputeWorkgroupSizeZ": 64,
    "maxComputeWorkgroupStorageSize": 16384,
    "maxComputeWorkgroupsPerDimension": 65535,
    "maxStorageBufferBindingSize": 134217728,
    "maxStorageBuffersPerShaderStage": 8,
    "maxUniformBufferBindingSize": 65536,
    "maxUniformBuffersPerShaderStage": 12,
    "minStorageBufferOffsetAlignment": 256,
    "minUniformBufferOffsetAlignment": 256,
}


def worse(name: str, *values: int) -> int:
    """Of values of one limit the one that allows least: of an alignment the largest."""
    return max(values) if name.startswith("min") else min(values)


@dataclass(frozen=True)
class Capabilities:
    """Features, limits and adapter information of one device.

    Attributes:
      name: what messages call the device.
      features: WebGPU feature names, such as ``shader-f16``.
      limits: pairs of WebGPU limit name and value, sorted by name.
      adapter_info: pairs of ``GPUAdapterInfo`` member and value; absent members are absent.
      wgsl_language_features: names of WGSL language extensions.
      is_ideal: every feature and no limit; what is refused here is refused everywhere.
    """

    name: str
    features: frozenset[str] = frozenset()
    limits: tuple[tuple[str, int], ...] = tuple(sorted(FLOOR_LIMITS.items()))
    adapter_info: tuple[tuple[str, Any], ...] = ()
    wgsl_language_features: frozenset[str] = frozenset()
    is_ideal: bool = False
    _limits: dict[str, int] = field(init=False, repr=False, compare=False, hash=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_limits", dict(self.limits))

    def has(self, feature: str) -> bool:
        return self.is_ideal or feature in self.features

    def limit(self, name: str) -> int:
        """The value of a WebGPU limit; `KeyError` for a name that WebGPU does not have."""
        return self._limits[name]

    @property
    def most_bound(self) -> int:
        """The most bytes of an array that can be bound whole."""
        return min(self.limit("maxStorageBufferBindingSize"), self.limit("maxBufferSize"))

    def held_to(self, features: Set[str] | None, limits: Mapping[str, int]) -> Self:
        """No better than this: the features that are named, or all; and a limit's worse value."""
        return replace(
            self,
            features=self.features if features is None else self.features & features,
            limits=tuple(
                (name, worse(name, value, limits.get(name, value))) for name, value in self.limits
            ),
        )

    def f16_ok(self, dtype: Any) -> bool:
        """The format's `f16Ok`: `dtype` (a WGSL scalar or a logical name) can be used in WGSL."""
        return dtype not in ("f16", "float16") or self.has("shader-f16")

    def as_scope(self) -> dict[str, Any]:
        """The `device` object of expressions and templates."""
        return {
            "features": {"has": self.has},
            "wgslLanguageFeatures": {"has": self.wgsl_language_features.__contains__},
            "limits": self._limits,
            "adapterInfo": dict(self.adapter_info),
        }


def make(
    name: str,
    features: tuple[str, ...] = (),
    adapter_info: Mapping[str, Any] | None = None,
    **limits: int,
) -> Capabilities:
    """A device on paper: WebGPU's default limits, with those given in their place."""
    return Capabilities(
        name,
        frozenset(features),
        tuple(sorted({**FLOOR_LIMITS, **limits}.items())),
        tuple(sorted((adapter_info or {}).items())),
    )


IDEAL = Capabilities(
    "any device",
    limits=tuple(
        (name, 1 if name.startswith("min") else 65535 if "PerDimension" in name else 2**53)
        for name in sorted(FLOOR_LIMITS)
    ),
    is_ideal=True,
)
"""Selection runs against this while JAX traces: what it refuses is the caller's mistake."""

PRESETS = {
    preset.name: preset
    for preset in (
        make("floor"),
        make(
            "apple-m",
            ("shader-f16", "subgroups", "timestamp-query"),
            {"vendor": "apple", "subgroupMinSize": 32, "subgroupMaxSize": 32},
            maxBufferSize=4294967296,
            maxComputeInvocationsPerWorkgroup=1024,
            maxComputeWorkgroupSizeX=1024,
            maxComputeWorkgroupSizeY=1024,
            maxComputeWorkgroupStorageSize=32768,
            maxStorageBufferBindingSize=4294967292,
            maxStorageBuffersPerShaderStage=10,
        ),
        make(
            "swiftshader",
            ("timestamp-query",),
            {
                "vendor": "google",
                "isFallbackAdapter": True,
                "subgroupMinSize": 4,
                "subgroupMaxSize": 4,
            },
            maxBufferSize=1073741824,
            maxStorageBufferBindingSize=1073741824,
            maxStorageBuffersPerShaderStage=10,
            minStorageBufferOffsetAlignment=32,
        ),
        make(
            "lavapipe",
            ("shader-f16", "timestamp-query"),
            {
                "vendor": "llvmpipe",
                "isFallbackAdapter": True,
                "subgroupMinSize": 4,
                "subgroupMaxSize": 128,
            },
            maxBufferSize=2147483647,
            maxComputeInvocationsPerWorkgroup=1024,
            maxComputeWorkgroupSizeX=1024,
            maxComputeWorkgroupSizeY=1024,
            maxComputeWorkgroupSizeZ=1024,
            maxComputeWorkgroupStorageSize=32768,
            maxStorageBuffersPerShaderStage=32,
            maxUniformBuffersPerShaderStage=15,
            minStorageBufferOffsetAlignment=32,
            minUniformBufferOffsetAlignment=32,
        ),
        make(
            "h200",
            ("shader-f16", "timestamp-query"),
            {"vendor": "NVIDIA", "subgroupMinSize": 4, "subgroupMaxSize": 128},
            maxBufferSize=4292870144,
            maxComputeInvocationsPerWorkgroup=1024,
            maxComputeWorkgroupSizeX=1024,
            maxComputeWorkgroupSizeY=1024,
            maxComputeWorkgroupStorageSize=49152,
            maxStorageBufferBindingSize=2147483644,
            maxStorageBuffersPerShaderStage=524288,
            maxUniformBuffersPerShaderStage=524288,
            minStorageBufferOffsetAlignment=32,
            minUniformBufferOffsetAlignment=64,
        ),
    )
}
"""Devices on paper: WebGPU's floor, and four that are often met."""
