"""What a target is, and what may come of an input."""

import importlib
import re
import traceback
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import jax

from jax_webgpu import errors
from jax_webgpu.errors import JaxWebGPUError

RIGHT = "right"
FAILED = "failed"


@dataclass(frozen=True)
class Target:
    """Something to be fuzzed.

    Attributes:
      name: for people.
      share: of the inputs, in hundredths.
      inputs: a Hypothesis strategy of Python literals, made when it is needed.
      run: what came of an input: `RIGHT`, or the label of a documented error. It raises for
        anything else.
      guided: in place of `inputs`, what makes inputs from a seed, without end, and calls a
        function with each.
      chunk: so many inputs are drawn from one seed, by one process; of slow ones fewer, or the
        others would wait for the last.
    """

    name: str
    share: int
    inputs: Callable[[], Any]
    run: Callable[[Any], str]
    guided: Callable[[int, Callable[[Any], None]], None] | None = None
    chunk: int = 100


MODULES = "functions fused kernels manifests expressions templates commands files loader".split()


def load(name: str) -> Target:
    """The target of a module of this package, or after a colon one of several."""
    module, _, own = name.partition(":")
    loaded = importlib.import_module(f"fuzz.{module}")
    found: Target = loaded.TARGETS[own] if own else loaded.TARGET
    return found


class Wrong(AssertionError):
    """An answer that is not the right one, or an error that is none of the documented ones."""


# A callback's exception arrives as text inside one of JAX's, at the start of a line.
_NAMES = "|".join(name for name in vars(errors) if name.endswith("Error"))
_INSIDE = re.compile(rf"^(?:jax_webgpu\.errors\.)?({_NAMES}): (.*)", re.MULTILINE | re.DOTALL)


def inside(error: BaseException) -> tuple[str, str] | None:
    """The type's name and the message of an exception of ours that JAX wrapped."""
    found = _INSIDE.search(str(error))
    is_jax = isinstance(error, jax.errors.JaxRuntimeError)
    return (found[1], found[2]) if is_jax and found else None


def documented(
    error: BaseException,
    kinds: Collection[type[BaseException]],
    names: Collection[str] = (),
) -> str:
    """The label of an error that a user may see.

    Args:
      error: what was raised.
      kinds: the types that are documented.
      names: of arguments, of which the message must have one; none: it need not.

    Raises:
      Wrong: the error is of another type, or names no argument.
    """
    label, message = type(error).__name__, str(error)
    if isinstance(error, jax.errors.JaxRuntimeError):
        found = inside(error)
        if found is None or found[0] not in {kind.__name__ for kind in kinds}:
            raise Wrong(f"not of ours: {message}") from error
        label, message = f"{label} of {found[0]}", found[1]
    elif not isinstance(error, tuple(kinds)):
        raise Wrong(f"not documented: {label}: {message}") from error
    elif not isinstance(error, JaxWebGPUError) and _raised_inside(error):
        raise Wrong(f"from inside the library: {label}: {message}") from error
    if names and not any(re.search(rf"(?<!\w){re.escape(each)}(?!\w)", message) for each in names):
        raise Wrong(f"names no argument: {label}: {message}") from error
    return label


def _raised_inside(error: BaseException) -> bool:
    """Whether some frame of the library stands between our own call and the error."""
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    own = max((at for at, file in enumerate(files) if "/fuzz/" in file), default=0)
    return any("/jax_webgpu/" in file for file in files[own:])


def signature(error: BaseException) -> str:
    """What tells one failure from another: the type and where it was raised."""
    first: BaseException = error.__cause__ if error.__cause__ is not None else error
    frames = traceback.extract_tb(first.__traceback__)
    own = [frame for frame in frames if "/jax_webgpu/" in frame.filename] or frames
    at = own[-1] if own else None
    place = f"{at.filename.rpartition('/')[2]}:{at.lineno}" if at else "?"
    said = re.sub(r"\d+", "0", re.sub(r"`.*`", "", str(error), flags=re.DOTALL)[:60])
    return f"{type(first).__name__} at {place}: {said}"
