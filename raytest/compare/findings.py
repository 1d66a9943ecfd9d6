"""Findings: what a person should do something about, with stable codes. raytest reports, never
acts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from raytest.compare.axis_result import AxisData, Divergence, divergence, worst_divergence
from raytest.compare.gates import GateResult, Outcome
from raytest.compare.observed import Observed
from raytest.compare.payloads import PayloadFacts
from raytest.compare.suspects import Attribution
from raytest.compare.verdicts import is_degenerate
from raytest.schema import Axis

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

MOST_ENTITIES = 64
COUNTER_WORDS = {
    "n_nan": "NaN",
    "n_inf": "infinite",
    "n_positive_logprob": "positive",
    "n_out_of_vocabulary": "out of the vocabulary",
}


@dataclass(frozen=True, slots=True)
class Finding:
    """``severity``: monitor, isolate, config or systemic."""

    code: str
    category: str
    severity: str
    axis: str | None
    entities: tuple[str, ...]
    detail: str
    action: str
    first_divergence: Divergence | None = None
    p_value: float | None = None


_AXIS_FINDINGS: Mapping[Axis, tuple[str, str, str]] = {
    Axis.REPEAT: (
        "unstable-repeat", "the same engine answers the same request differently",
        "raise determinism.level, and see whether autotuning or asynchronous scheduling is on",
    ),
    Axis.LAUNCH: (
        "unstable-launch", "a restarted engine answers differently",
        "pin autotuning and compile caches, cache sizes and batch limits; compare fingerprints",
    ),
    Axis.ARRANGEMENT: (
        "batch-dependent", "answers depend on what else is in the batch",
        "use batch-invariant kernels (level 4), or compare only equal batches",
    ),
    Axis.TP: (
        "tp-dependent", "answers depend on the tensor-parallel size",
        "gate tp with thresholds, or use kernels that are invariant to the TP size",
    ),
    Axis.PP: (
        "pp-dependent", "answers depend on the pipeline-parallel size",
        "use batch-invariant kernels (level 4), or gate pp with thresholds",
    ),
    Axis.VARIANT: (
        "variant-dependent", "answers depend on the variant",
        "'raytest isolate' finds the setting that does it",
    ),
    Axis.RUN: (
        "run-dependent", "answers differ between the runs",
        "'raytest fingerprint --diff' shows what changed between them",
    ),
}  # fmt: skip


def axis_findings(
    data: Sequence[AxisData],
    outcomes: Mapping[Axis, Outcome],
    attributions: Mapping[Axis, Attribution],
    observed: Observed,
) -> list[Finding]:
    """Findings of the axes whose gate failed, and confident flips of any."""
    found: list[Finding] = []
    for entry in data:
        if outcomes[entry.axis].result is GateResult.FAILS and len(entry.metrics.first):
            if entry.axis in attributions:
                explained = _explained(entry, attributions.get(Axis.GPU), observed)
                if not explained:
                    found += _placement(entry, attributions[entry.axis], observed)
            else:
                found.append(_dependence(entry, observed))
        found += _confident(entry, observed)
    return found


def _explained(entry: AxisData, gpu: Attribution | None, observed: Observed) -> bool:
    """Whether every difference between nodes involves a slot that is a suspect on its own node."""
    if entry.axis is not Axis.NODE or gpu is None or gpu.systemic or not gpu.suspects:
        return False
    names = {s.entity for s in gpu.suspects}
    blamed = {i for i, m in enumerate(observed.members) if m.keys["slot"] in names}
    d = entry.classes.divergences
    return all(
        int(d.reference[i]) in blamed
        or blamed.issuperset(d.all_members[d.offsets[i] : d.offsets[i + 1]].tolist())
        for i in range(len(d.unit))
    )


def _dependence(entry: AxisData, observed: Observed) -> Finding:
    code, what, action = _AXIS_FINDINGS[entry.axis]
    d = entry.classes.divergences
    cells = sorted({observed.members[int(m)].cell.cell_id for m in set(d.all_members.tolist())})
    if entry.axis is Axis.REPEAT and _first_against_rest(entry, observed):
        code, what = "cold-start", "the first repeat differs from all later ones"
        action = "look at caches and at what is compiled or tuned on first use; raise trials.warmup"
    if entry.axis is Axis.VARIANT and _observed_alone(entry, observed):
        code, what = "observer-effect", "asking for other logprobs changes the answer"
        action = "ask for logprobs as production does; an engine that is looked at is another one"
    return Finding(
        code=code,
        category="divergence",
        severity="config",
        axis=entry.axis.value,
        entities=tuple(cells[:MOST_ENTITIES]),
        detail=f"{what}; {len(cells)} cells",
        action=action,
        first_divergence=worst_divergence(entry, observed),
    )


def _observed_alone(entry: AxisData, observed: Observed) -> bool:
    """Whether all that differ are the same but for the logprobs they were asked for."""
    d = entry.classes.divergences
    members = observed.members
    return bool(len(d.member)) and all(
        members[a].logprobs != members[b].logprobs and members[a].unlooked == members[b].unlooked
        for a, b in zip(d.reference.tolist(), d.member.tolist(), strict=True)
    )


def _first_against_rest(entry: AxisData, observed: Observed) -> bool:
    """Whether in every divergence of three or more repeats, repeat 0 alone stands apart."""
    import numpy as np

    d = entry.classes.divergences
    repeat = np.array([m.trial.repeat for m in observed.members])
    return bool(
        ((d.n_reference >= 2) & (d.n_members == 1) & (repeat[d.member] == 0)).all()
        and len(d.member)
    )


def _placement(entry: AxisData, found: Attribution, observed: Observed) -> list[Finding]:
    what = "node" if entry.axis is Axis.NODE else "gpu"
    worst = worst_divergence(entry, observed)
    names = tuple(dict.fromkeys(s.entity for s in found.suspects))
    if found.systemic:
        detail = f"{len(names)} {what}s stand outside the majority: more than one fault explains"
        action = "look for what they share ('raytest explain'); no single one is to blame"
        return [
            Finding(
                f"systemic-{what}",
                "divergence",
                "systemic",
                entry.axis.value,
                (),
                detail,
                action,
                worst,
            )
        ]
    findings = []
    for s in found.suspects:
        transient = s.persistence == "transient"
        findings.append(
            Finding(
                code=f"outlier-{what}",
                category="divergence",
                severity="monitor" if transient else "isolate",
                axis=entry.axis.value,
                entities=(s.entity,),
                detail=(
                    f"outside the majority in {s.n_outside} of {s.n_requests} divergent requests "
                    f"(variant {s.variant}, {s.persistence})"
                ),
                action="'raytest retest' tells GPU, node and configuration apart",
                first_divergence=worst,
                p_value=s.p_value,
            )
        )
    if not findings:
        detail = (
            f"{found.unattributable} requests have no majority to hold anyone against"
            if found.unattributable
            else "no one stands out more often than chance allows"
        )
        action = (
            "add a third slot, more requests or repeats: two that differ don't say who is right"
        )
        findings.append(
            Finding(
                f"unattributable-{what}",
                "divergence",
                "monitor",
                entry.axis.value,
                (),
                detail,
                action,
                worst,
            )
        )
    return findings


def _confident(entry: AxisData, observed: Observed) -> list[Finding]:
    import numpy as np

    at = np.flatnonzero(entry.judged.confident)
    if not len(at):
        return []
    first = at[np.argmax(entry.judged.margin[at])]
    d = entry.classes.divergences
    cells = sorted({observed.members[int(m)].cell.cell_id for m in d.member[at]})
    return [
        Finding(
            code="confident-flip",
            category="divergence",
            severity="monitor",
            axis=entry.axis.value,
            entities=tuple(cells[:MOST_ENTITIES]),
            detail=f"{len(at)} flips at margins that rounding does not explain",
            action="suspect a wrong result rather than another order of sums; 'raytest retest'",
            first_divergence=divergence(entry, observed, int(first)),
        )
    ]


def value_findings(
    observed: Observed, facts: PayloadFacts
) -> tuple[list[Finding], npt.NDArray[np.bool_]]:
    """Findings of values that cannot be right, even where all agree; and which payloads [q] hold
    any.

    Degenerate repetition alone is a finding to monitor: small models do it by themselves.
    """
    import numpy as np

    bad = facts.unsorted.copy()
    found: list[Finding] = []
    for name, (members, units, counts) in observed.counters.items():
        if not len(members):
            continue
        index = observed.payload[members, units]
        bad[index[index >= 0]] = True
        what = COUNTER_WORDS[name]
        found.append(
            _values(
                f"{name[2:].replace('_', '-')}",
                f"{int(counts.sum())} values are {what}",
                members,
                observed,
            )
        )
    for code, mask, detail, severity in (
        ("unsorted-candidates", facts.unsorted, "candidates do not descend by logprob", ""),
        (
            "degenerate-repetition",
            is_degenerate(facts.longest_run, facts.length),
            "completions repeat one token for ever",
            "monitor",
        ),
    ):
        hit = (observed.payload >= 0) & mask[np.maximum(observed.payload, 0)] if len(mask) else None
        if hit is not None and hit.any():
            members, _ = np.nonzero(hit)
            found.append(_values(code, f"{int(hit.sum())} {detail}", members, observed, severity))
    return found, bad


def _values(
    code: str,
    detail: str,
    members: npt.NDArray[np.int64],
    observed: Observed,
    severity: str = "",
) -> Finding:
    cells = sorted({observed.members[int(m)].cell.cell_id for m in set(members.tolist())})
    everywhere = len(cells) == len({m.cell.cell_id for m in observed.members})
    return Finding(
        code=code,
        category="values",
        severity=severity or ("config" if everywhere and len(cells) > 1 else "isolate"),
        axis=None,
        entities=tuple(cells[:MOST_ENTITIES]),
        detail=f"{detail}, in {len(cells)} cells",
        action="no engine may return this: look at the kernels and dtype, then at the device",
    )
