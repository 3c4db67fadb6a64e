"""`python -m jax_webgpu check`: one small call of each variant on this machine's adapter.

The expected values are worked out here with NumPy. The test suite is far wider; this tells a user
whether adapter and driver can be relied on.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jax_webgpu import device, runtime
from jax_webgpu.errors import JaxWebGPUError
from jax_webgpu.ops import rotary_embedding, split
from jax_webgpu.resolve import Resolved, Tensor, resolve
from jax_webgpu.runtime import Operator


@dataclass(frozen=True)
class Case:
    """A call that a given variant takes, and what it must give."""

    operator: Operator
    variant: str
    resolved: Resolved
    arrays: Sequence[np.ndarray]
    expected: Sequence[np.ndarray]
    tolerance: float

    def __str__(self) -> str:
        return f"{self.operator.name} {self.variant}"

    def run(self) -> str | None:
        """Runs the case; what went wrong, or None."""
        try:
            plan = self.operator.plan(self.resolved, device.get().capabilities)
            results = runtime.run(self.operator, self.resolved, self.arrays)
        except JaxWebGPUError as problem:
            return str(problem)
        if plan.variant != self.variant:
            return f"the variant {plan.variant} was chosen"
        for (name, _), result, wanted in zip(
            self.resolved.outputs, results, self.expected, strict=True
        ):
            error = np.abs(result - wanted).max(initial=0)
            if not error <= self.tolerance:
                return f"{name} differs by {error}"
        return None


def cases() -> list[Case]:
    """A case for each variant of both operators."""
    return [*_rotary_cases(), *_split_cases()]


# Head sizes that lead to the three families of variants: whole quads, odd pairs, whole vec4s of
# which the halves are none.
_HEAD_SIZES = {"_quad": 16, "": 6, "_output_vec4": 12}


def _rotary_cases() -> list[Case]:
    return [
        _rotary_case(rank, positions, suffix, size)
        for rank in (3, 4)
        for positions in (True, False)
        for suffix, size in _HEAD_SIZES.items()
    ]


def _rotary_case(rank: int, positions: bool, suffix: str, size: int) -> Case:
    batch, heads, tokens, rows = 2, 3, 5, 11
    rng = np.random.default_rng(size)

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    x = normal(batch, heads, tokens, size)
    table = (rows, size // 2) if positions else (batch, tokens, size // 2)
    cos, sin = normal(*table), normal(*table)
    ids = rng.integers(0, rows, (batch, tokens))
    c, s = (cos[ids], sin[ids]) if positions else (cos, sin)
    c, s, a, b = c[:, None], s[:, None], x[..., : size // 2], x[..., size // 2 :]
    y = np.concatenate([a * c - b * s, a * s + b * c], axis=-1)
    attributes: dict[str, Any] = {}
    if rank == 3:
        x, y = (each.swapaxes(1, 2).reshape(batch, tokens, -1) for each in (x, y))
        attributes["num_heads"] = heads
    arrays = {"x": x, "cos": cos, "sin": sin, **({"positionIds": ids} if positions else {})}
    return Case(
        operator=rotary_embedding.Rules.operator,
        variant=f"rank{rank}_{'cache2_pos' if positions else 'cache3'}{suffix}",
        resolved=resolve(
            rotary_embedding.Rules.operator.spec,
            {name: Tensor(each.shape, str(each.dtype)) for name, each in arrays.items()},
            attributes=attributes,
        ),
        arrays=tuple(arrays.values()),
        expected=(y,),
        tolerance=1e-5,
    )


# Sizes along the axis, elements behind it, and the variant that they lead to.
_SPLITS = (
    ((7,), 3, "one_output_copy"),
    ((4, 8), 3, "two_outputs_block_vec4"),
    ((3, 4), 3, "two_outputs"),
    ((8, 4, 12), 1, "three_outputs_block_vec4"),
    ((9, 5, 7), 1, "three_outputs_block_scalar_x4"),
    ((1, 0, 2), 1, "three_outputs"),
    ((4, 8, 4, 12), 1, "four_outputs_block_vec4"),
    ((1, 3, 2, 5), 1, "four_outputs"),
    ((1, 3, 0, 5, 2), 1, "five_outputs"),
)


def _split_cases() -> list[Case]:
    return [_split_case(*each) for each in _SPLITS]


def _split_case(sizes: tuple[int, ...], inner: int, variant: str) -> Case:
    rows = 5
    rng = np.random.default_rng(len(sizes))
    x = rng.integers(-(2**31), 2**31, (rows, sum(sizes), inner)).astype(np.int32)
    starts = np.cumsum((0, *sizes))
    parts = [x[:, start : start + size] for start, size in zip(starts, sizes, strict=False)]
    return Case(
        operator=split.Rules.operator,
        variant=variant,
        resolved=resolve(
            split.Rules.operator.spec,
            {"input": Tensor(x.shape, "int32")},
            attributes={"axis": 1},
            outputs={f"y{index}": part.shape for index, part in enumerate(parts)},
        ),
        arrays=(x,),
        expected=parts,
        tolerance=0,
    )
