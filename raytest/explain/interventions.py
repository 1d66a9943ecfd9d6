"""What differs between two sides and can be changed one by one: from two cells to engines that have
some settings of one and the rest of the other. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from raytest.explain.divergence import Side
from raytest.fingerprint.diff import Group, diff, group_of
from raytest.fingerprint.redact import is_secret_name, redact_text
from raytest.inventory import Slot
from raytest.plan import Trial
from raytest.seeding import THREAD_VARIABLES
from raytest.spec import Spec, Variant

UNSET = "(unset)"
PLACEMENT = "placement"
ARRANGEMENT = "arrangement"
# Fields of a variant that can be changed alone; what they resolve to is compared.
FIELDS = ("level", "profile", "dtype", "executor", "logprobs", "runtime_env", "fault")
# What has been to blame most often comes first; explain's ranking may put others before it.
USUAL_SUSPECTS = (
    *(f"env {name}" for name in THREAD_VARIABLES),
    "env VLLM_BATCH_INVARIANT",
    "dtype",
    "fault",
    "level",
    "profile",
    ARRANGEMENT,
)
_OWNED = ("RAY_", "RAYTEST_", "CUDA_VISIBLE_DEVICES", "PWD", "OLDPWD", "SHLVL")


@dataclass(frozen=True, slots=True)
class Change:
    """One thing to set as side ``a`` has it, in the place of side ``b``'s. ``a`` and ``b`` are
    shown to people; None is not set."""

    name: str
    a: str | None
    b: str | None

    @property
    def sentence(self) -> str:
        """``env OMP_NUM_THREADS = 1 (not 2)``."""
        return f"{self.name} = {_shown(self.a)} (not {_shown(self.b)})"


def _shown(value: str | None) -> str:
    return UNSET if value is None else value or "(empty)"


@dataclass(frozen=True, slots=True)
class Trialled:
    """One engine and pass over the workload: everything that a set of changes decides. ``unset``
    are variables that the slot's node has and the process must not see."""

    variant: Variant
    slot: Slot
    trial: Trial
    unset: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Environment:
    """A side's variables: ``configured`` by level, profile and variant, ``inherited`` by its
    process from its node."""

    configured: Mapping[str, str]
    inherited: Mapping[str, str]

    def value(self, name: str) -> str | None:
        """What the side's process has."""
        return self.configured.get(name, self.inherited.get(name))


class Interventions:
    """The changes between two sides of a run, and the engine that any set of them makes."""

    def __init__(
        self,
        spec: Spec,
        a: Side,
        b: Side,
        environments: tuple[Environment, Environment],
        ranking: Sequence[str] = (),
    ) -> None:
        self._spec, self._a, self._b = spec, a, b
        self._variants = tuple(
            next(v for v in spec.variants if v.name == s.cell.variant) for s in (a, b)
        )
        self._environments = environments
        self.changes = _ranked(list(self._found()), ranking)

    def _found(self) -> Iterable[Change]:
        one, other = self._variants
        for name in self._differing_variables():
            yield Change(f"env {name}", *(e.value(name) for e in self._environments))
        for name in sorted(one.engine.keys() | other.engine.keys()):
            if one.engine.get(name) != other.engine.get(name):
                yield Change(f"engine {name}", *(_text(v.engine.get(name)) for v in (one, other)))
        for name in FIELDS:
            mine, theirs = (self._resolved(v, name) for v in (one, other))
            if mine != theirs:
                yield Change(name, _text(mine), _text(theirs))
        if self._placed(self._a, one) != self._placed(self._b, other):
            yield Change(PLACEMENT, self._placed(self._a, one), self._placed(self._b, other))
        if self._a.trial.arrangement != self._b.trial.arrangement:
            yield Change(
                ARRANGEMENT, self._a.trial.arrangement.value, self._b.trial.arrangement.value
            )

    def _differing_variables(self) -> list[str]:
        """Those a variant sets, and those that a node's processes inherit; what level and profile
        set goes with them."""
        one, other = self._variants
        stated = one.env.keys() | other.env.keys()
        by_level = {k for e in self._environments for k in e.configured} - stated
        names = stated | {k for e in self._environments for k in e.inherited}
        return sorted(
            name
            for name in names - by_level
            if not name.startswith(_OWNED)
            and group_of(f"env.{name}") is Group.VARIABLES
            and not is_secret_name(name)
            and len({e.value(name) for e in self._environments}) > 1
            and not any(_redacted(e.value(name)) for e in self._environments)
        )

    def _resolved(self, variant: Variant, name: str) -> Any:
        if name == "level":
            return self._spec.level(variant)
        if name == "profile":
            return self._spec.profile(variant)
        if name == "dtype":
            return variant.dtype or self._spec.model.dtype
        if name == "logprobs":
            return self._spec.logprobs(variant)
        return getattr(variant, name)

    def _placed(self, side: Side, variant: Variant) -> str:
        """Sizes cannot be changed without the devices that they need: they go together."""
        one, other = self._variants
        text = side.cell.slot.name
        if one.world_size != other.world_size or _sizes(one) != _sizes(other):
            tp, pp = _sizes(variant)
            text += f" TP={tp} PP={pp}"
        return text

    def make(self, made: frozenset[str]) -> Trialled:
        """Side b with the changes ``made``."""
        one, other = self._variants
        fields: dict[str, Any] = {
            name: self._resolved(one if name in made else other, name) for name in FIELDS
        }
        place = self._a if PLACEMENT in made else self._b
        placed = one if PLACEMENT in made else other
        engine, env, unset = dict(other.engine), dict(other.env), []
        for change in self.changes:
            kind, _, name = change.name.partition(" ")
            source = one if change.name in made else other
            if kind == "engine":
                engine.pop(name, None)
                engine |= {name: source.engine[name]} if name in source.engine else {}
            elif kind == "env":
                value = change.a if change.name in made else change.b
                env.pop(name, None)
                if value is not None:
                    env[name] = value
                elif name in self._environments[place is not self._a].inherited:
                    unset.append(name)
        fields.update(
            engine=engine,
            env=env,
            tensor_parallel_size=placed.tensor_parallel_size,
            pipeline_parallel_size=placed.pipeline_parallel_size,
        )
        trial = self._a.trial if ARRANGEMENT in made else self._b.trial
        variant = other.model_copy(update=fields)
        return Trialled(variant, place.cell.slot, replace(trial, trial=0, repeat=0), tuple(unset))


def untestable(a: Mapping[str, str], b: Mapping[str, str], changes: Sequence[Change]) -> list[str]:
    """Recorded facts that differ and that nobody can set alone (serial numbers, versions, what
    follows from a setting), the most telling first."""
    covered = {f"env.{c.name.partition(' ')[2]}" for c in changes if c.name.startswith("env ")}
    return [d.key for d in diff(a, b) if d.group is not Group.NOISE and d.key not in covered]


def _sizes(variant: Variant) -> tuple[int, int]:
    return variant.tensor_parallel_size, variant.pipeline_parallel_size


def _redacted(value: str | None) -> bool:
    return value is not None and ("redacted" in value or redact_text(value) != value)


def _text(value: Any) -> str | None:
    return None if value is None else str(value)


def _ranked(changes: Sequence[Change], ranking: Sequence[str]) -> tuple[Change, ...]:
    """Usual suspects, then as ``ranking`` has them, then as found: a suspicion of the run itself
    counts among equals."""
    names = dict.fromkeys((*USUAL_SUSPECTS, *map(_as_change, ranking)))
    order = {name: i for i, name in enumerate(names)}
    return tuple(sorted(changes, key=lambda c: order.get(c.name, len(order))))


def _as_change(factor: str) -> str:
    """The name of a factor of ``explain`` as a change has it."""
    for prefix, kind in (("env.", "env "), ("spec env ", "env "), ("spec engine ", "engine ")):
        if factor.startswith(prefix):
            return kind + factor.removeprefix(prefix)
    if factor in ("node", "slot", "GPU UUID", "GPU model", "device index"):
        return PLACEMENT
    return factor.removeprefix("spec ")
