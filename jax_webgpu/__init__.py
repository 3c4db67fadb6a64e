"""WebGPU kernels inside JAX programs, on any GPU.

`rotary_embedding` and `split` are the ONNX operators of these names as JAX functions;
`load_kernel` makes a function of any folder in the manifest format.
"""

from jax_webgpu.config import configure
from jax_webgpu.device import AdapterInfo, SoftwareAdapterWarning
from jax_webgpu.device import info as device_info
from jax_webgpu.errors import (
    AdapterError,
    CallError,
    DerivativeError,
    DeviceError,
    DeviceLostError,
    DTypeError,
    ExpressionError,
    HubError,
    JaxWebGPUError,
    LimitError,
    MissingExtraError,
    ShaderError,
    SpecError,
)
from jax_webgpu.explain import explain
from jax_webgpu.fuse import fuse
from jax_webgpu.ops.kernel import Kernel, load_kernel
from jax_webgpu.ops.rotary_embedding import rotary_cache, rotary_embedding
from jax_webgpu.ops.split import split
from jax_webgpu.primitive import DeadlockWarning, clear_caches, per_shard

__version__ = "0.1.0"

__all__ = [
    "AdapterError",
    "AdapterInfo",
    "CallError",
    "DTypeError",
    "DeadlockWarning",
    "DerivativeError",
    "DeviceError",
    "DeviceLostError",
    "ExpressionError",
    "HubError",
    "JaxWebGPUError",
    "Kernel",
    "LimitError",
    "MissingExtraError",
    "ShaderError",
    "SoftwareAdapterWarning",
    "SpecError",
    "clear_caches",
    "configure",
    "device_info",
    "explain",
    "fuse",
    "load_kernel",
    "per_shard",
    "rotary_cache",
    "rotary_embedding",
    "split",
]
