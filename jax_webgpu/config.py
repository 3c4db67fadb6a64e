"""Settings: what `configure` sets, and what the environment says.

A setting is a static parameter of each call: it is read when a primitive is bound, so that an
eager call sees it at once. Whoever caches what was bound asks to be told of a change.

Environment variables, read once:
  JAX_WEBGPU_ADAPTER      index, or part of the name in any case, of the adapter to use
  JAX_WEBGPU_REQUIRE_GPU  1: an adapter that is a CPU is an error
  JAX_WEBGPU_CALLBACK     pure or buffer: what `configure(callback=...)` starts from
  JAX_WEBGPU_POOL_BYTES   how many bytes of idle device memory are kept for the next call
  JAX_WEBGPU_TIMEOUT      how many seconds a call waits for the device before it raises
  JAX_WEBGPU_FEATURES     the features to use where the adapter has them, separated by commas, of
                          shader-f16, subgroups, timestamp-query and wgpu's own
                          mappable-primary-buffers; or floor: none. Unset: all
  JAX_WEBGPU_LIMITS       limits to hold the device to, by WebGPU's names and separated by commas,
                          such as maxStorageBuffersPerShaderStage=8,maxBufferSize=268435456; floor
                          stands for all of WebGPU's default limits, which no device falls below

The last two answer whether a program runs on a smaller device than this one: the driver itself
then refuses what such a device would refuse.
"""

import functools
import os
import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, Final, Self

from jax_webgpu.capabilities import FLOOR_LIMITS, worse
from jax_webgpu.errors import CallError

CALLBACKS = ("pure", "buffer")
IMPLEMENTATIONS = ("webgpu", "reference")
FEATURES = ("shader-f16", "subgroups", "timestamp-query", "mappable-primary-buffers")


@dataclass(frozen=True)
class Settings:
    """What `configure` sets; equal settings are equal."""

    callback: str | None = None
    """``pure``, ``buffer``, or None: whichever is safe on the platform."""
    tunables: tuple[tuple[str, Any], ...] = ()
    implementation: str | None = None
    """``reference``, or None: the WebGPU kernels."""

    overlays: bool = True
    """Whether the manifests' overlays take part."""

    def items(self) -> list[tuple[str, Any]]:
        """Name and value of each setting, tunables by their own names."""
        return [
            ("callback", self.callback),
            ("implementation", self.implementation),
            ("overlays", None if self.overlays else False),
            *self.tunables,
        ]


@dataclass(frozen=True)
class Environment:
    """What the environment variables say; None where one is not set."""

    adapter: str | None
    require_gpu: bool
    callback: str | None
    pool_bytes: int | None
    timeout: float | None
    features: frozenset[str] | None
    """The only features to use; `floor` in the variable is an empty set here."""
    limits: tuple[tuple[str, int], ...]
    """Pairs of limit name and value, sorted by name; empty where the variable is not set."""


@functools.cache
def environment() -> Environment:
    """The environment variables, as they were at the first call."""
    callback = os.environ.get("JAX_WEBGPU_CALLBACK") or None
    if callback is not None and callback not in CALLBACKS:
        raise CallError(f"JAX_WEBGPU_CALLBACK is {callback!r}; expected pure or buffer")
    return Environment(
        adapter=os.environ.get("JAX_WEBGPU_ADAPTER", "").strip() or None,
        require_gpu=os.environ.get("JAX_WEBGPU_REQUIRE_GPU", "").lower() in ("1", "true", "yes"),
        callback=callback,
        pool_bytes=_number("JAX_WEBGPU_POOL_BYTES", int, "a whole number of bytes, 0 or more"),
        timeout=_number("JAX_WEBGPU_TIMEOUT", float, "a number of seconds, 0 or more"),
        features=_features(os.environ.get("JAX_WEBGPU_FEATURES", "")),
        limits=_limits(os.environ.get("JAX_WEBGPU_LIMITS", "")),
    )


def _number(variable: str, kind: Callable[[str], Any], expected: str) -> Any:
    text = os.environ.get(variable, "").strip()
    if not text:
        return None
    try:
        value = kind(text)
    except ValueError:
        value = -1
    if not value >= 0:  # nor is NaN
        raise CallError(f"{variable} is {text!r}; expected {expected}")
    return value


def _features(text: str) -> frozenset[str] | None:
    names = frozenset(_listed(text))
    unknown = names - {*FEATURES, "floor"}
    if unknown or (len(names) > 1 and "floor" in names):
        raise CallError(
            f"JAX_WEBGPU_FEATURES is {text!r}; expected floor, or names of {', '.join(FEATURES)}"
        )
    return names - {"floor"} if names else None


def _limits(text: str) -> tuple[tuple[str, int], ...]:
    found = dict[str, int]()
    for each in _listed(text):
        name, _, value = each.partition("=")
        floor = FLOOR_LIMITS.get(name)
        if each == "floor":
            found |= FLOOR_LIMITS
        elif floor is None or not value.isdecimal() or len(value) > 20:
            raise CallError(
                f"JAX_WEBGPU_LIMITS has {each!r}; expected floor, or NAME=NUMBER with a name of "
                f"{', '.join(FLOOR_LIMITS)}"
            )
        elif worse(name, int(value), floor) != floor:
            raise CallError(
                f"JAX_WEBGPU_LIMITS has {each!r}; every WebGPU device has {floor} or better"
            )
        else:
            found[name] = int(value)
    return tuple(sorted(found.items()))


def _listed(text: str) -> list[str]:
    """What is listed between commas."""
    return [part.strip() for part in text.split(",") if part.strip()]


class _Unset:
    def __repr__(self) -> str:
        return "unchanged"


_UNSET: Final = _Unset()


@dataclass
class _State:
    lock: threading.Lock = field(default_factory=threading.Lock)
    settings: Settings | None = None
    checks: list[Callable[[Settings], None]] = field(default_factory=list)
    listeners: list[Callable[[], None]] = field(default_factory=list)


_state = _State()


def settings() -> Settings:
    """The settings in force."""
    if _state.settings is None:
        _apply(Settings(callback=environment().callback), tell=False)
    assert _state.settings is not None
    return _state.settings


def check_with(check: Callable[[Settings], None]) -> None:
    """Calls `check` with new settings before they apply; it raises to refuse them."""
    _state.checks.append(check)


def on_change(listener: Callable[[], None]) -> None:
    """Calls `listener` after each change of a value."""
    _state.listeners.append(listener)


class configure:
    """Sets what is given, at once and for the whole process; in a `with`, until its end.

    A change of value also clears JAX's caches, so that functions that were jitted before see it:
    they are compiled again at their next call.

    Args:
      callback: ``"pure"`` crosses to the host by `jax.pure_callback`, ``"buffer"`` by
        `jax.experimental.buffer_callback`, which copies nothing but works on the CPU platform
        alone; None, the default, takes ``"buffer"`` on the CPU platform and ``"pure"`` elsewhere.
      tunables: values by name for the manifests' tunables, such as ``{"WORKGROUP_SIZE": 64}``;
        they replace those set before. Each must be one of some operator's; a call of an operator
        that has no such tunable raises.
      implementation: ``"webgpu"``, the default; or ``"reference"``, which lowers the same
        operators to plain JAX, for `jax.export` and for platforms without callbacks.
      overlays: whether the faster variants that stand beside the published manifests take part;
        True, the default. On an adapter that is a CPU they do not, unless the tunable ON_CPU is
        set: each shape is compiled, which takes long there.

    Raises:
      ValueError: a value is not one of those above.
    """

    def __init__(
        self,
        *,
        callback: str | _Unset | None = _UNSET,
        tunables: Mapping[str, Any] | _Unset | None = _UNSET,
        implementation: str | _Unset = _UNSET,
        overlays: bool | _Unset = _UNSET,
    ):
        changes: dict[str, Any] = {}
        if not isinstance(callback, _Unset):
            if callback is not None and not _is_one_of(callback, CALLBACKS):
                raise CallError(f"callback is {callback!r}; expected 'pure', 'buffer' or None")
            changes["callback"] = callback
        if not isinstance(tunables, _Unset):
            changes["tunables"] = _pairs({} if tunables is None else tunables)
        if not isinstance(implementation, _Unset):
            if not _is_one_of(implementation, IMPLEMENTATIONS):
                expected = "' or '".join(IMPLEMENTATIONS)
                raise CallError(f"implementation is {implementation!r}; expected '{expected}'")
            changes["implementation"] = None if implementation == "webgpu" else implementation
        if not isinstance(overlays, _Unset):
            if not isinstance(overlays, bool):
                raise CallError(f"overlays is {overlays!r}; expected True or False")
            changes["overlays"] = overlays
        self._changes = changes
        self._set()

    def _set(self) -> None:
        self._before: Settings | None = settings()
        new = replace(self._before, **self._changes)
        for check in _state.checks:
            check(new)
        _apply(new)

    def __enter__(self) -> Self:
        if self._before is None:  # left already, and entered again
            self._set()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        before, self._before = self._before, None
        # Only what this changed: others may have come and gone in between.
        _apply(replace(settings(), **{name: getattr(before, name) for name in self._changes}))


def _is_one_of(value: Any, texts: Collection[str]) -> bool:
    return isinstance(value, str) and value in texts


def _pairs(tunables: Any) -> tuple[tuple[str, Any], ...]:
    if not isinstance(tunables, Mapping) or not all(isinstance(name, str) for name in tunables):
        raise CallError(f"tunables is {tunables!r}; expected a mapping of names to values")
    for name, value in tunables.items():
        if not isinstance(value, bool | int | float | str):
            kind = type(value).__name__
            raise CallError(f"the tunable {name} is a {kind}; expected a number, bool or string")
    return tuple(sorted(tunables.items()))


def _apply(new: Settings, *, tell: bool = True) -> None:
    with _state.lock:
        changed, _state.settings = new != _state.settings, new
    if changed and tell:
        for listener in _state.listeners:
            listener()
