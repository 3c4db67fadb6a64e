"""Settings: what `configure` sets, and what the environment says.

A setting is a static parameter of each call: it is read when a primitive is bound, so that an
eager call sees it at once. Whoever caches what was bound asks to be told of a change.

Environment variables, read once:
  JAX_WEBGPU_ADAPTER      index, or part of the name in any case, of the adapter to use
  JAX_WEBGPU_REQUIRE_GPU  1: an adapter that is a CPU is an error
  JAX_WEBGPU_CALLBACK     pure or buffer: what `configure(callback=...)` starts from
"""

import functools
import os
import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, Final, Self

from jax_webgpu.errors import CallError

CALLBACKS = ("pure", "buffer")
IMPLEMENTATIONS = ("webgpu", "reference")


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
    )


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
