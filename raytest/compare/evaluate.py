"""The one entry point of the analysis: a run folder in, an :class:`Evaluation` out.

Order matters: distinct devices, equal inputs and complete rows are proved before a token is
compared. The result is a pure function of the folder's contents: files or rows in another order
change nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from raytest.compare.axes import Grouping, group_members
from raytest.compare.axis_result import AxisData, AxisNumbers, axis_numbers
from raytest.compare.classes import Classes, form_classes
from raytest.compare.control import ControlResult, engine_control, planted_control
from raytest.compare.coverage import Coverage, Integrity, check_integrity, coverage_of
from raytest.compare.findings import Finding, axis_findings, value_findings
from raytest.compare.gates import Contract, GateResult, Outcome, default_contract, judge_gate
from raytest.compare.loading import observe
from raytest.compare.observed import Observed
from raytest.compare.pairs import Histogram
from raytest.compare.payloads import Compared, Pairs, compare_payloads
from raytest.compare.processes import check_processes
from raytest.compare.spread import Spread, chosen, graded, payloads_of, spread_of
from raytest.compare.suspects import Attribution, find_suspects
from raytest.compare.verdict_table import verdicts_table
from raytest.compare.verdicts import Setting, dtype_index, is_degenerate, judge_divergences
from raytest.errors import ExitCode
from raytest.needs import decisions
from raytest.plan import HELD
from raytest.schema import Axis, RunVerdict
from raytest.spec import Spec, Thresholds
from raytest.store import RunFolder

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import pyarrow as pa

EXIT_CODES = {
    RunVerdict.PASS: ExitCode.PASS,
    RunVerdict.MISMATCH: ExitCode.MISMATCH,
    RunVerdict.NOT_COMPARABLE: ExitCode.NOT_COMPARABLE,
    RunVerdict.INCONCLUSIVE: ExitCode.INCONCLUSIVE,
}


@dataclass(frozen=True, slots=True)
class AxisResult:
    """One axis: its contract, what was compared, how the gate came out, and what was left out.

    ``decided_after`` so many trials its gate stood, and ``not_needed`` others did not run (None, 0:
    all of the plan was wanted).
    """

    axis: Axis
    contract: Contract
    outcome: Outcome
    numbers: AxisNumbers
    left_out: Mapping[str, int]
    not_needed: int
    decided_after: int | None
    spread: Spread | None = None


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What a run, or several, say. ``reasons`` explain the verdict, worst first."""

    run_ids: tuple[str, ...]
    verdict: RunVerdict
    exit_code: ExitCode
    reasons: tuple[str, ...]
    axes: tuple[AxisResult, ...]
    findings: tuple[Finding, ...]
    attributions: tuple[Attribution, ...]
    controls: tuple[ControlResult, ...]
    coverage: Coverage
    integrity: Integrity
    verdicts: pa.Table


def evaluate(folder: RunFolder, *, control: ControlResult | None = None) -> Evaluation:
    """Judge one run. ``control`` is the engine's control; by default the one in the folder.

    Raises StoreError for files that are damaged or of another schema.
    """
    observed = observe([folder])
    spec, plan = folder.spec(), folder.plan()
    axes = [a for a in HELD if a in plan.varied or a in spec.gates.stated()]
    engine = control or engine_control(folder.control())
    return judge(observed, [folder], spec, axes, engine)


def judge(
    observed: Observed,
    folders: Sequence[RunFolder],
    spec: Spec,
    axes: Sequence[Axis],
    engine: ControlResult | None,
) -> Evaluation:
    """Judge observations along ``axes`` by the gates of ``spec``. ``engine`` is the engine's
    control (None where none is due: stored runs were judged with their own)."""
    integrity = check_integrity(observed, folders)
    groupings = [group_members(axis, observed.members, spec) for axis in axes]
    classes = [form_classes(observed, g.groups) for g in groupings]
    paths = [p for folder in folders for p in folder.payload_paths()]
    looked_at = [chosen(c, observed) for c in classes]
    sample = _longest(observed)
    keep = _kept(observed, classes, looked_at, sample)
    compared, pair_of = _compare(observed, classes, paths, keep)
    findings, bad = value_findings(observed, compared.facts)
    data = [
        _axis_data(i, grouping, formed, compared, pair_of[i], bad, observed, spec)
        for i, (grouping, formed) in enumerate(zip(groupings, classes, strict=True))
    ]
    early = decisions(folders[0]) if len(folders) == 1 else {}
    right = graded(folders, observed)
    results = [
        replace(
            _axis_result(entry, observed, spec, early),
            spread=spread_of(entry, at, compared.kept, right, observed),
        )
        for entry, at in zip(data, looked_at, strict=True)
    ]
    attributions = _attribute(data, observed)
    outcomes = {r.axis: r.outcome for r in results}
    findings += axis_findings(data, outcomes, attributions, observed)
    for folder in folders:
        environment, unlike = check_processes(folder)
        findings += environment
        integrity = replace(integrity, problems=(*integrity.problems, *unlike))
    controls = (
        *planted_control(observed, compared.kept.get(sample)),
        *((engine,) if engine is not None else ()),
    )
    coverage = coverage_of(observed)
    verdict, reasons = _verdict(results, integrity, controls, coverage, bool(bad.any()))
    return Evaluation(
        run_ids=tuple(f.run_id for f in folders),
        verdict=verdict,
        exit_code=EXIT_CODES[verdict],
        reasons=tuple(reasons),
        axes=tuple(results),
        findings=tuple(findings),
        attributions=tuple(attributions.values()),
        controls=controls,
        coverage=coverage,
        integrity=integrity,
        verdicts=verdicts_table(data, observed),
    )


def _compare(
    observed: Observed,
    classes: Sequence[Classes],
    paths: Sequence[Path],
    keep: npt.NDArray[np.int64],
) -> tuple[Compared, list[npt.NDArray[np.int64]]]:
    """Compare every distinct pair of payloads once; per axis, which pair each divergence is. The
    payloads at ``keep`` are kept.

    A pair's histogram is that of the set of axes it occurs on (a bit per axis).
    """
    import numpy as np

    n = len(observed.payload_ids)
    keys = [
        observed.payload[c.divergences.reference, c.divergences.unit] * n
        + observed.payload[c.divergences.member, c.divergences.unit]
        for c in classes
    ]
    none = np.empty(0, dtype=np.int64)
    unique, inverse = np.unique(np.concatenate([none, *keys]), return_inverse=True)
    parts = np.split(inverse, np.cumsum([len(k) for k in keys])[:-1]) if keys else []
    kind = np.zeros(len(unique), dtype=np.int64)
    for i, part in enumerate(parts):
        kind[part] |= 1 << i
    pairs = Pairs(unique // max(n, 1), unique % max(n, 1), kind)
    return compare_payloads(paths, observed.payload_ids, pairs, keep), parts


def _kept(
    observed: Observed,
    classes: Sequence[Classes],
    looked_at: Sequence[npt.NDArray[np.int64]],
    sample: int,
) -> npt.NDArray[np.int64]:
    """Payloads to keep: those that the spread is taken from, and one for the control."""
    import numpy as np

    one = np.array([sample] if sample >= 0 else [], dtype=np.int64)
    several = [payloads_of(c, at, observed) for c, at in zip(classes, looked_at, strict=True)]
    return np.unique(np.concatenate([one, *several]))


def _axis_data(
    number: int,
    grouping: Grouping,
    classes: Classes,
    compared: Compared,
    pair: npt.NDArray[np.int64],
    bad: npt.NDArray[np.bool_],
    observed: Observed,
    spec: Spec,
) -> AxisData:
    import numpy as np

    d = classes.divergences
    metrics = compared.pairs.pick(pair)
    reference, payload = (observed.payload[m, d.unit] for m in (d.reference, d.member))
    degenerate = is_degenerate(compared.facts.longest_run, compared.facts.length)
    dtypes = np.array([dtype_index(m.dtype) for m in observed.members], dtype=np.int64)
    gate = spec.gates.stated().get(grouping.axis)
    setting = Setting(
        tokens_equal=d.tokens_equal,
        sampled=observed.workload.sampled[observed.request_of(d.unit)],
        dtype=np.maximum(dtypes[d.reference], dtypes[d.member]),
        bad_values=bad[reference] | bad[payload],
        one_degenerate=degenerate[reference] != degenerate[payload],
        near_tie_margin=gate.near_tie_margin if isinstance(gate, Thresholds) else None,
    )
    histogram = Histogram.empty()
    for kind, counted in compared.histograms.items():
        if kind >> number & 1:
            histogram.counts += counted.counts
    return AxisData(
        grouping.axis, grouping, classes, metrics, judge_divergences(metrics, setting), histogram
    )


def _axis_result(
    entry: AxisData, observed: Observed, spec: Spec, early: Mapping[str, int]
) -> AxisResult:
    stated = spec.judged_gates().get(entry.axis)
    members = [observed.members[i] for g in entry.grouping.groups for i in g.members]
    members = members or list(observed.members)
    contract = (
        Contract(stated, True)
        if stated is not None
        else default_contract(
            entry.axis,
            min((m.level for m in members), default=0),
            all(m.has_logprobs for m in members),
        )
    )
    numbers = axis_numbers(entry, observed)
    outcome = judge_gate(contract, numbers, entry.grouping.not_needed)
    if not numbers.n_comparisons and entry.grouping.left_out:
        why = "; ".join(entry.grouping.left_out)
        outcome = replace(outcome, reason=f"nothing was compared: {why}")
    after = early.get(entry.axis.value)
    if after is not None:
        told = f"decided after {after} of {len(observed.members)} trials"
        if entry.grouping.not_needed:
            told += f", {entry.grouping.not_needed} were not needed"
        outcome = replace(outcome, reason=f"{outcome.reason}; {told}")
    return AxisResult(
        entry.axis,
        contract,
        outcome,
        numbers,
        entry.grouping.left_out,
        entry.grouping.not_needed,
        after,
    )


def _attribute(data: Sequence[AxisData], observed: Observed) -> dict[Axis, Attribution]:
    by_axis = {entry.axis: entry for entry in data}
    unstable: dict[str, set[int]] | None = None
    for axis in (Axis.REPEAT, Axis.LAUNCH):
        if axis in by_axis and by_axis[axis].classes.groups_compared.any():
            d = by_axis[axis].classes.divergences
            unstable = {} if unstable is None else unstable
            for member, request in zip(d.member, observed.request_of(d.unit), strict=True):
                cell = observed.members[int(member)].cell.cell_id
                unstable.setdefault(cell, set()).add(int(request))
    return {
        axis: find_suspects(by_axis[axis], observed, unstable)
        for axis in (Axis.GPU, Axis.NODE)
        if axis in by_axis
    }


def _longest(observed: Observed) -> int:
    """Payload of the longest completion of the first trial that has one (-1: none), to plant a
    difference in."""
    import numpy as np

    lengths = np.where(observed.payload >= 0, observed.n_tokens, 0)
    if not lengths.size or not lengths.max():
        return -1
    first = int(np.argmax(lengths.max(axis=1) > 0))
    return int(observed.payload[first, int(lengths[first].argmax())])


def _verdict(
    results: Sequence[AxisResult],
    integrity: Integrity,
    controls: Sequence[ControlResult],
    coverage: Coverage,
    bad_values: bool,
) -> tuple[RunVerdict, list[str]]:
    """Mismatch before not comparable before inconclusive before pass; every reason of the verdict
    and of those below it."""
    failed = [
        f"{r.axis}: {r.outcome.reason}" for r in results if r.outcome.result is GateResult.FAILS
    ]
    if bad_values:
        failed.append("values that no engine may return (see findings)")
    incomparable = list(integrity.problems)
    open_ends = list(integrity.incomplete)
    for r in results:
        if r.outcome.result is GateResult.UNDECIDED:
            refused = r.contract.stated and not r.numbers.n_comparisons and r.left_out
            (incomparable if refused else open_ends).append(f"{r.axis}: {r.outcome.reason}")
    open_ends += [f"control missed: {c.name}: {c.detail}" for c in controls if not c.caught]
    if not coverage.n_observations:
        open_ends.append("no observation was made")
    reasons = failed + incomparable + open_ends
    if failed:
        return RunVerdict.MISMATCH, reasons
    if incomparable:
        return RunVerdict.NOT_COMPARABLE, reasons
    if open_ends:
        return RunVerdict.INCONCLUSIVE, reasons
    return RunVerdict.PASS, []
