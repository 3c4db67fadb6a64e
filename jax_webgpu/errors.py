"""The exception types. Each also derives from the built-in type that a caller would expect."""


class JaxWebGPUError(Exception):
    """Base of every error that this package raises on purpose."""


class SpecError(JaxWebGPUError, ValueError):
    """A kernel folder is not in the manifest format; the text gives file and JSON path or line."""


class ExpressionError(JaxWebGPUError, ValueError):
    """An expression or a template could not be parsed, or its evaluation has no defined result."""


class CallError(JaxWebGPUError, ValueError):
    """The arguments of a call do not fit its operator, on any device."""


class DeviceError(JaxWebGPUError, RuntimeError):
    """The adapter, its driver or its limits stand in the way of a call that is right in itself."""


class DeviceLostError(DeviceError):
    """The device was lost, and a new one that was made in its place was lost too."""


class AdapterError(DeviceError):
    """There is no usable WebGPU adapter, not the one that was asked for, or it gives no device."""


class LimitError(DeviceError):
    """A WebGPU limit of the device is too low; the text names it, what is needed and what is."""


class ShaderError(DeviceError):
    """WGSL that the implementation refused; the text holds the numbered source."""


class DTypeError(JaxWebGPUError, TypeError):
    """An argument is of a kind or a dtype that the operator does not take."""


class DerivativeError(JaxWebGPUError, NotImplementedError):
    """A kernel that was loaded has no derivative; the text says how to give it one."""


class HubError(JaxWebGPUError, OSError):
    """The Hub could not be reached, or does not have what was asked for; the cause tells more."""


class MissingExtraError(JaxWebGPUError, ImportError):
    """A package is not installed that an extra of this one brings; the text names the extra."""
