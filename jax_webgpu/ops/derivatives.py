"""The derivative rules that a loaded kernel is given, and the check of what they take and give.

JAX would check much of it, but in terms of functions that the user does not know.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_webgpu.errors import CallError, DTypeError
from jax_webgpu.resolve import Tensor


@dataclass(frozen=True)
class Differentiated:
    """A call of a kernel that has a rule.

    Attributes:
      kernel: the kernel's name as a function.
      inputs: the names of all inputs.
      outputs: the names of the outputs that are asked for.
      results: those outputs of arrays, None for an input that is left out.
      packed: makes the kernel's result of several arrays.
      known: the attributes and arguments, which rules get by name.
    """

    kernel: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    results: Callable[..., tuple[Tensor, ...]]
    packed: Callable[[Sequence[Any]], Any]
    known: Mapping[str, Any]

    def with_jvp(self, call: Callable[..., Any], rule: Callable[..., Any]) -> Callable[..., Any]:
        """`call`, with what `Kernel.defjvp` was given for its derivative."""
        takes, gives = ("primals", "tangents"), "(result, tangent)"
        own = Rule(self.kernel, self.known, "defjvp", rule, takes, gives)

        def both(primals: Any, tangents: Any) -> Any:
            wanted = self.results(*primals)
            result, tangent = own.pair(own(primals, tangents))
            moved = tuple(Tensor(each.shape, _tangent_dtype(each.dtype)) for each in wanted)
            return (
                self._packed(own, "the result", result, wanted),
                self._packed(own, "the tangent", tangent, moved, zeros=True),
            )

        differentiable = jax.custom_jvp(call)
        differentiable.defjvp(both)
        return differentiable

    def with_vjp(
        self, call: Callable[..., Any], forward: Callable[..., Any], backward: Callable[..., Any]
    ) -> Callable[..., Any]:
        """`call`, with what `Kernel.defvjp` was given for its derivative."""
        takes = tuple(name if name.isidentifier() else "_" for name in self.inputs)
        first = Rule(self.kernel, self.known, "defvjp", forward, takes, "(result, kept)")
        gives = f"({', '.join(f'cotangent of {name}' for name in self.inputs)})"
        takes = ("kept", "cotangent")
        second = Rule(self.kernel, self.known, "defvjp", backward, takes, gives)

        def there(*arrays: Any) -> Any:
            result, kept = first.pair(first(*arrays))
            made = self._packed(first, "the result", result, self.results(*arrays))
            return made, (kept, [_Known.of(each) for each in arrays])

        def back(kept: Any, cotangent: Any) -> Any:
            kept, given = kept
            return self._cotangents(second, second(kept, cotangent), given)

        differentiable = jax.custom_vjp(call)
        differentiable.defvjp(there, back)
        return differentiable

    def _packed(
        self, rule: "Rule", what: str, found: Any, wanted: Sequence[Tensor], *, zeros: bool = False
    ) -> Any:
        """What a rule returns, as the kernel would; None stands for zeros where there may be."""
        names = self.outputs
        is_list = isinstance(found, tuple | list)
        parts = tuple(found) if is_list and len(names) > 1 else (found,)
        if len(parts) != len(names) or (is_list and len(names) == 1):
            raise rule.fail(f"returns {kind(found)} as {what}; there are {', '.join(names)}")
        return self.packed(
            [
                rule.checked(f"{what} {name}", part, tensor, zeros)
                for name, part, tensor in zip(names, parts, wanted, strict=True)
            ]
        )

    def _cotangents(self, rule: "Rule", found: Any, given: Sequence["_Known"]) -> tuple[Any, ...]:
        """For each input what `backward` returns; None for one that has none."""
        parts = tuple(found) if isinstance(found, tuple | list) else (found,)
        if len(parts) != len(given):
            raise rule.fail(f"returns {kind(found)}; there are {', '.join(self.inputs)}")
        made = []
        for name, part, each in zip(self.inputs, parts, given, strict=True):
            differentiable = each.tensor and _tangent_dtype(each.tensor.dtype) != "float0"
            if part is not None and each.tensor and differentiable:
                part = rule.checked(f"the cotangent of {name}", part, each.tensor, True)
            made.append(part if differentiable else None)
        return tuple(made)


@jax.tree_util.register_static
@dataclass(frozen=True)
class _Known:
    """An input as `back` needs to know it; JAX keeps it beside the arrays."""

    tensor: Tensor | None

    @classmethod
    def of(cls, array: Any) -> "_Known":
        return cls(None if array is None else Tensor(tuple(array.shape), str(array.dtype)))


@dataclass(frozen=True)
class Rule:
    """A function of the user's, and how it is called.

    Attributes:
      kernel: the kernel's name as a function.
      known: the attributes and arguments, which it gets by name.
      setter: the method that it was given to.
      function: the function.
      takes: the names of what it gets by position.
      gives: what it should return.
    """

    kernel: str
    known: Mapping[str, Any]
    setter: str
    function: Callable[..., Any]
    takes: tuple[str, ...]
    gives: str

    def __str__(self) -> str:
        name = getattr(self.function, "__name__", "the rule")
        return f"{name}, a rule that {self.kernel}.{self.setter} was given,"

    @property
    def signature(self) -> str:
        """How it should be written."""
        name = getattr(self.function, "__name__", "rule")
        named = [f"{each}" for each in self.known]
        takes = ", ".join([*self.takes, *(["*"] if named else []), *named])
        return f"def {name if name.isidentifier() else 'rule'}({takes}): return {self.gives}"

    def __call__(self, *args: Any) -> Any:
        try:
            inspect.signature(self.function).bind(*args, **self.known)
        except TypeError as error:
            message = f"{self} cannot be called: {error}: expected {self.signature}"
            raise DTypeError(message) from None
        except ValueError:  # a function that does not tell its signature
            pass
        return self.function(*args, **self.known)

    def fail(self, message: str) -> CallError:
        return CallError(f"{self} {message}: expected {self.signature}")

    def pair(self, found: Any) -> tuple[Any, Any]:
        """The two things that a rule returns."""
        if not isinstance(found, tuple | list) or len(found) != 2:
            raise self.fail(f"returns {kind(found)}")
        return found[0], found[1]

    def checked(self, what: str, part: Any, wanted: Tensor, zeros: bool) -> Any:
        """An array of a shape and a dtype; of integers' tangents zeros will do in any dtype."""
        if wanted.dtype == "float0":
            return np.zeros(wanted.shape, jax.dtypes.float0)
        if part is None and zeros:
            return jnp.zeros(wanted.shape, wanted.dtype)
        if not isinstance(part, jax.Array | np.ndarray | np.generic):
            raise self.fail(f"returns {kind(part)} as {what}, which is {wanted}")
        found = Tensor(tuple(part.shape), str(part.dtype))
        if found != wanted:
            raise self.fail(f"returns {found} as {what}, which is {wanted}")
        return jnp.asarray(part)


def _tangent_dtype(dtype: str) -> str:
    return dtype if jnp.issubdtype(dtype, jnp.inexact) else "float0"


def kind(found: Any) -> str:
    """What something is, for a message."""
    if isinstance(found, tuple | list):
        return f"a {type(found).__name__} of {len(found)}"
    if isinstance(found, jax.Array | np.ndarray):
        return str(Tensor(tuple(found.shape), str(found.dtype)))
    return "None" if found is None else f"a {type(found).__name__}"
