"""Which variant of an operator a device runs, or why none.

Sorted by priority, ties in the manifest's order, the first variant wins whose requirements,
binding counts and `when` clauses hold and that is not demoted, else the first demoted one.
"""

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from jax_webgpu.capabilities import Capabilities
from jax_webgpu.errors import CallError, DeviceError, ExpressionError
from jax_webgpu.expressions import Expression
from jax_webgpu.resolve import Resolved, extend, scope
from jax_webgpu.spec import Pass, Repeat, Variant, merged
from jax_webgpu.values import truthy


@dataclass(frozen=True)
class Refusal:
    """Why a variant does not apply."""

    variant: str
    reason: str
    misses: int
    """How many conditions do not hold: the fewer, the nearer."""


@dataclass(frozen=True)
class Selection:
    """The variant that runs, and the names in scope for it."""

    variant: Variant
    scope: dict[str, Any]


def select(resolved: Resolved, capabilities: Capabilities) -> Selection:
    """Chooses the variant for a call on a device.

    Raises:
      CallError: no variant applies and `capabilities` are ideal: the call itself is wrong.
      DeviceError: no variant applies on this device.
    """
    error = CallError if capabilities.is_ideal else DeviceError
    try:
        names = extend(scope(resolved, capabilities), resolved.spec.derive.items())
    except ExpressionError as problem:
        raise error(f"{resolved}: {problem}") from None
    ranked = _ranked(resolved, capabilities, names)
    if not ranked:
        raise error(report(resolved, capabilities, refusals(resolved, capabilities, names)))
    return Selection(ranked[0], names)


def _ranked(resolved: Resolved, capabilities: Capabilities, names: dict[str, Any]) -> list[Variant]:
    """The variants that apply, best first."""
    candidates = sorted(resolved.spec.variants, key=lambda variant: -variant.priority)
    applying = [v for v in candidates if _applies(resolved, capabilities, v, names)]
    demoted = {variant.id for variant in applying if _demoted(variant, names)}
    leading = {variant.id for variant in applying} - demoted
    eligible = [variant for variant in applying if not leading & set(variant.superseded_by)]
    return sorted(eligible, key=lambda variant: variant.id in demoted)


def refusals(
    resolved: Resolved, capabilities: Capabilities, names: dict[str, Any]
) -> tuple[Refusal, ...]:
    """Why each variant that does not run does not, the nearest to running first."""
    spec, ranked = resolved.spec, _ranked(resolved, capabilities, names)

    def leads(id: str) -> bool:
        variant = spec.variant(id)
        return _applies(resolved, capabilities, variant, names) and not _demoted(variant, names)

    found = []
    for variant in spec.variants:
        if variant in ranked[:1]:
            continue
        reasons = [
            *(f"it needs {need}" for need in _needs(resolved, capabilities, variant)),
            *(
                ": ".join(chain)
                for clause in [*spec.when, *variant.when]
                for chain in _failing(clause, names, spec.derive)
            ),
            *(f"{other} supersedes it" for other in variant.superseded_by if leads(other)),
        ]
        reason = reasons[0] if reasons else f"applies too, but {ranked[0].id} comes first"
        found.append(Refusal(variant.id, reason, len(reasons)))
    return tuple(sorted(found, key=lambda refusal: refusal.misses))


def report(resolved: Resolved, capabilities: Capabilities, found: tuple[Refusal, ...]) -> str:
    """The message for a call that no variant takes."""
    name = resolved.spec.name
    lines = [f"no variant of {name} takes this call on {capabilities.name}: {resolved}"]
    return "\n".join(lines + grouped(found))


def grouped(found: tuple[Refusal, ...]) -> list[str]:
    """A line a reason, with all variants that share it."""
    groups: dict[str, list[str]] = {}
    for refusal in found:
        groups.setdefault(refusal.reason, []).append(refusal.variant)
    return [f"  {', '.join(variants)}: {reason}" for reason, variants in groups.items()]


def passes(variant: Variant) -> Iterator[Pass]:
    """Every pass once, those of repeat groups too."""

    def walk(entries: tuple[Pass | Repeat, ...]) -> Iterator[Pass]:
        for entry in entries:
            if isinstance(entry, Repeat):
                yield from walk(entry.passes)
            else:
                yield entry

    return walk(variant.passes)


def _applies(
    resolved: Resolved, capabilities: Capabilities, variant: Variant, names: dict[str, Any]
) -> bool:
    if any(True for _ in _needs(resolved, capabilities, variant)):
        return False
    try:
        return all(clause(names) is True for clause in [*resolved.spec.when, *variant.when])
    except ExpressionError:
        return False


def _needs(resolved: Resolved, capabilities: Capabilities, variant: Variant) -> Iterator[str]:
    """What the variant takes from the device and the device does not have."""
    if not capabilities.is_ideal:
        yield from _requirements(resolved, capabilities, variant)
        yield from _counts(capabilities, variant)


def _requirements(
    resolved: Resolved, capabilities: Capabilities, variant: Variant
) -> Iterator[str]:
    requires = merged(resolved.spec.requires, variant.requires)
    for feature in requires.features:
        if not capabilities.has(feature):
            yield f"the feature {feature}"
    limits = dict(capabilities.limits)
    for name, minimum in requires.limits:
        if limits.get(name, 0) < minimum:
            yield f"{name} of at least {minimum}; the device has {limits.get(name, 0)}"
    size = dict(capabilities.adapter_info).get("subgroupMinSize", 0)
    wanted = requires.subgroup_min_size
    if wanted is not None and size < wanted:
        yield f"subgroups of at least {wanted}; the device's have {size}"
    if requires.subgroup_matrix_configs:
        yield "subgroup matrices, which WebGPU does not have yet"


def _counts(capabilities: Capabilities, variant: Variant) -> Iterator[str]:
    for each in passes(variant):
        uniform = sum(
            binding.buffer == "uniform" or (binding.buffer is None and binding.struct is not None)
            for binding in each.bindings
        )
        counts = {
            "maxStorageBuffersPerShaderStage": len(each.bindings) - uniform,
            "maxUniformBuffersPerShaderStage": uniform,
        }
        for name, count in counts.items():
            if count > capabilities.limit(name):
                yield f"{name} of at least {count}; the device has {capabilities.limit(name)}"


def _failing(
    clause: Expression, names: dict[str, Any], derive: Mapping[str, Any], strictly: bool = True
) -> Iterator[list[str]]:
    """The conjuncts that fail a clause, each as the chain of derived names that leads to it.

    The value of `a and b` is b's where a passes for true, so only the last must be true itself.
    """
    for conjunct in clause.conjuncts:
        strict = strictly and conjunct is clause.conjuncts[-1]
        try:
            value = conjunct(names)
        except ExpressionError as error:
            yield [f"`{conjunct.text}`: {error}"]
            continue
        if value is True or (truthy(value) and not strict):
            continue
        name = conjunct.name
        inside = derive.get(name) if name else None
        if name and isinstance(inside, Expression):
            before = dict(itertools.islice(derive.items(), list(derive).index(name)))
            for chain in _failing(inside, names, before, strict):
                yield [name, *chain]
        else:
            yield [conjunct.explain(names)]


def _demoted(variant: Variant, names: dict[str, Any]) -> bool:
    for clause in variant.demote_when:
        try:
            if clause(names) is True:
                return True
        except ExpressionError:
            continue
    return False
