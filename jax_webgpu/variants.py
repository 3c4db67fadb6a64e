"""Which variant of an operator a device runs, or why none.

Sorted by priority, ties in the manifest's order, the first variant wins whose requirements,
binding counts and `when` clauses hold and that is not demoted, else the first demoted one.
"""

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from jax_webgpu.capabilities import Capabilities
from jax_webgpu.document import SCOPE_NAMES
from jax_webgpu.errors import CallError, DeviceError, ExpressionError
from jax_webgpu.expressions import Expression
from jax_webgpu.resolve import Resolved, extend, scope
from jax_webgpu.spec import Requires, Spec, Variant
from jax_webgpu.values import show, truthy


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

    With ideal capabilities it chooses one that some device may run: what asks for a feature holds
    there, and a refusal counts only if it has nothing to do with the device, because a real one may
    lack what the ideal one has, or know more of itself.

    Raises:
      CallError: no variant applies and `capabilities` are ideal: the call itself is wrong.
      DeviceError: no variant applies on this device.
    """
    spec, ideal = resolved.spec, capabilities.is_ideal
    error = CallError if ideal else DeviceError
    try:
        unsure = spec.of_device if ideal else ()
        names = extend(scope(resolved, capabilities), spec.derive.items(), unsure)
    except ExpressionError as problem:
        raise error(f"{resolved}: {problem}") from None
    variant = _Judge(resolved, capabilities, names).best()
    if variant is None and ideal:
        variant = next((each for each in spec.ranked if _may_apply(spec, each, names)), None)
    if variant is None:
        raise error(report(resolved, capabilities, refusals(resolved, capabilities, names)))
    return Selection(variant, names)


class _Judge:
    """The rules of the choice between the variants of one call."""

    def __init__(self, resolved: Resolved, capabilities: Capabilities, names: dict[str, Any]):
        self.spec = resolved.spec
        self.capabilities = capabilities
        self.names = names
        self.open = all(_holds(clause, names) for clause in self.spec.when)
        self.applying = dict[str, bool]()

    def best(self) -> Variant | None:
        """The variant that runs: the first that is not demoted, else the first that is."""
        second = None
        for variant in self.spec.ranked:
            if self.applies(variant) and not any(self.supersedes(variant)):
                if not _demoted(variant, self.names):
                    return variant
                second = second or variant
        return second

    def applies(self, variant: Variant) -> bool:
        """Whether nothing refuses the variant, but for those that may supersede it."""
        found = self.applying.get(variant.id)
        if found is None:
            found = self.applying[variant.id] = (
                self.open
                and not any(True for _ in _needs(self.capabilities, variant))
                and all(_holds(clause, self.names) for clause in variant.when)
            )
        return found

    def supersedes(self, variant: Variant) -> Iterator[str]:
        """Those that refuse a variant: they are listed there, apply, and are not demoted.

        One that is superseded itself refuses others all the same: what supersedes it is better
        than they are.
        """
        for other in map(self.spec.variant, variant.superseded_by):
            if self.applies(other) and not _demoted(other, self.names):
                yield other.id


def _may_apply(spec: Spec, variant: Variant, names: dict[str, Any]) -> bool:
    """Whether no clause rules the variant out on every device."""
    seen = set[tuple[str, bool]]()
    return not any(_never(clause, names, spec, seen) for clause in [*spec.when, *variant.when])


def _never(
    clause: Expression,
    names: dict[str, Any],
    spec: Spec,
    seen: set[tuple[str, bool]],
    strictly: bool = True,
) -> bool:
    """Whether a clause fails on every device: a conjunct does that does not ask the device.

    `seen` has the derived values that were looked into, and of which this is not known.
    """
    for conjunct, strict in _conjuncts(clause, strictly):
        if _holds(conjunct, names, strict):
            continue
        if not conjunct.reads & spec.of_device:
            return True
        name = conjunct.name or ""
        inside = spec.derive.get(name)
        # One of the format's names that is derived anew may have meant another value then.
        shadowed = SCOPE_NAMES & spec.derive.keys()
        if not isinstance(inside, Expression) or inside.reads & shadowed:
            continue
        if (name, strict) not in seen:
            seen.add((name, strict))
            if _never(inside, names, spec, seen, strict):
                return True
    return False


def _conjuncts(clause: Expression, strictly: bool) -> Iterator[tuple[Expression, bool]]:
    """The conjuncts of a clause, and whether each must be true itself.

    The value of `a and b` is b's where a passes for true, so only the last must be true itself.
    """
    *before, last = clause.conjuncts
    yield from ((conjunct, False) for conjunct in before)
    yield last, strictly


def _holds(clause: Expression, names: dict[str, Any], strictly: bool = True) -> bool:
    try:
        value = clause(names)
    except ExpressionError:
        return False
    return value is True or (not strictly and truthy(value))


def refusals(
    resolved: Resolved, capabilities: Capabilities, names: dict[str, Any]
) -> tuple[Refusal, ...]:
    """Why each variant that does not run does not, the nearest to running first."""
    spec, judge = resolved.spec, _Judge(resolved, capabilities, names)
    best = judge.best()
    found = []
    for variant in spec.variants:
        if variant is best:
            continue
        needs = [*_needs(capabilities, variant)]
        clauses = [*spec.when, *variant.when]
        seen = set[tuple[str, bool]]()
        failures = [
            each for clause in clauses for each in _failing(clause, names, spec.derive, seen)
        ]
        better = [*judge.supersedes(variant)]
        if needs:
            reason = f"it needs {needs[0]}"
        elif failures:
            reason = failures[0].told(names)
        elif better:
            reason = f"{better[0]} supersedes it"
        else:
            reason = f"applies too, but {best.id} comes first" if best else "does not apply"
        misses = len(needs) + len(failures) + len(better)
        found.append(Refusal(variant.id, reason, misses))
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


def _needs(capabilities: Capabilities, variant: Variant) -> Iterator[str]:
    """What the variant takes from the device and the device does not have."""
    if not capabilities.is_ideal:
        yield from _requirements(variant.requires, capabilities)
        for name, count in variant.most_bound.items():
            if count > capabilities.limit(name):
                yield f"{name} of at least {count}; the device has {capabilities.limit(name)}"


def _requirements(requires: Requires, capabilities: Capabilities) -> Iterator[str]:
    for feature in requires.features:
        if not capabilities.has(feature):
            yield f"the feature {feature}"
    limits = dict(capabilities.limits) if requires.limits else {}
    for name, minimum in requires.limits:
        if limits.get(name, 0) < minimum:
            yield f"{name} of at least {minimum}; the device has {limits.get(name, 0)}"
    if requires.subgroup_min_size is not None:
        size = dict(capabilities.adapter_info).get("subgroupMinSize", 0)
        if size < requires.subgroup_min_size:
            wanted = requires.subgroup_min_size
            yield f"subgroups of at least {wanted}; the device's have {size}"
    if requires.subgroup_matrix_configs:
        yield "subgroup matrices, which WebGPU does not have yet"


@dataclass(frozen=True)
class _Failure:
    """A conjunct that fails a clause."""

    conjunct: Expression
    error: str = ""
    """Why it has no value, if it has none."""
    came: str = ""
    """Its value, where that is no boolean and must be true itself."""
    via: tuple[str, ...] = ()
    """The derived values that lead to it."""

    def told(self, names: dict[str, Any]) -> str:
        clause = f"`{self.conjunct.text}`"
        if self.error:
            text = f"{clause}: {self.error.removesuffix(f' in {clause}')}"
        else:
            text = self.conjunct.explain(names)
        if self.came:
            text += f"; `when` expects true or false, got {self.came}"
        return ": ".join([*self.via, text])


def _failing(
    clause: Expression,
    names: dict[str, Any],
    derive: Mapping[str, Any],
    seen: set[tuple[str, bool]],
    strictly: bool = True,
) -> Iterator[_Failure]:
    """The conjuncts that fail a clause, those inside derived values it is made of among them.

    Each derived value is looked into once: `seen` has those that were.
    """
    for conjunct, strict in _conjuncts(clause, strictly):
        try:
            value = conjunct(names)
        except ExpressionError as error:
            yield _Failure(conjunct, str(error))
            continue
        if value is True or (truthy(value) and not strict):
            continue
        name = conjunct.name
        inside = derive.get(name) if name else None
        if not name or not isinstance(inside, Expression):
            is_wrong = strict and not isinstance(value, bool)
            yield _Failure(conjunct, came=show(value) if is_wrong else "")
        elif (name, strict) not in seen:
            seen.add((name, strict))
            before = dict(itertools.islice(derive.items(), list(derive).index(name)))
            for failure in _failing(inside, names, before, seen, strict):
                yield replace(failure, via=(name, *failure.via))


def _demoted(variant: Variant, names: dict[str, Any]) -> bool:
    for clause in variant.demote_when:
        try:
            if clause(names) is True:
                return True
        except ExpressionError:
            continue
    return False
