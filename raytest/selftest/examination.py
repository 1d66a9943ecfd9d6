"""All kinds, many cases each: how many are caught, who is blamed, how often nothing is alarm."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from raytest.compare.statistics import clopper_pearson
from raytest.errors import ExitCode, UsageError
from raytest.report.table import table_lines
from raytest.schema import Verdict
from raytest.selftest.examine import Fleet, Seen
from raytest.selftest.planting import Kind, kinds

CHANNELS = ("tokens", "logprobs", "replay", "activations", "audit")
BLAMED_AT_LEAST = 0.99


@dataclass(frozen=True, slots=True)
class Extent:
    """How much is examined: cases of each kind, runs without a fault, and a run's size."""

    trials: int
    clean: int
    prompts: int = 6
    tokens: int = 12
    repeats: int = 2
    seed: int = 0


def choose(names: Sequence[str]) -> list[Kind]:
    """The kinds called ``names`` (all, where none is named). Raises UsageError."""
    known = kinds()
    unknown = [n for n in names if n not in known]
    if unknown:
        raise UsageError(f"no such kind of fault: {', '.join(unknown)}; known: {', '.join(known)}")
    return [known[n] for n in names] if names else list(known.values())


def examine_all(
    chosen: Sequence[Kind], extent: Extent, tell: Callable[[str], None]
) -> dict[str, Any]:
    """Examine the reference engine at TP=1 and TP=2 in turn; the document."""
    results = []
    for kind in chosen:
        rng = random.Random(f"{extent.seed} {kind.name}")
        seen = [_case(kind, extent, rng, i) for i in range(extent.trials)]
        results.append(summary(kind, seen))
        tell(_line(results[-1]))
    alarms = 0
    for i in range(extent.clean):
        alarms += _fleet(extent, tp=1 + i % 2, seed=extent.seed + i).clean()
        if (i + 1) % 50 == 0:
            tell(f"{i + 1} of {extent.clean} runs without a fault: {alarms} alarms")
    return document(results, extent, alarms)


def _fleet(extent: Extent, tp: int, seed: int) -> Fleet:
    return Fleet(tp, extent.prompts, extent.tokens, extent.repeats, seed)


def _case(kind: Kind, extent: Extent, rng: random.Random, number: int) -> Seen:
    # what one rank alone can have wrong needs a second one to be told from
    tp = 2 if "rank" in kind.name or number % 2 else 1
    fleet = _fleet(extent, tp, seed=extent.seed + number)
    return fleet.examine(kind.make(rng, fleet.shape), rng)


def summary(kind: Kind, seen: Sequence[Seen]) -> dict[str, Any]:
    """Counts of one kind with their exact 95% intervals. ``missed``: cases that changed results and
    were not flagged, or that an audit must find and did not."""
    due = [s for s in seen if s.changed or kind.audited]
    caught = sum(s.caught for s in due)
    blamed = [s.blamed for s in seen if s.blamed is not None]
    modules = [s.module for s in seen if s.module is not None]
    corrupt = sum(Verdict.CORRUPT.value in s.verdicts for s in seen) if kind.benign else 0
    return {
        "kind": kind.name,
        "cases": len(seen),
        "changed": sum(s.changed for s in seen),
        "due": len(due),
        "caught": caught,
        "caught_rate": _rate(caught, len(due)),
        "missed": len(due) - caught,
        "blamed": sum(blamed),
        "blamed_of": len(blamed),
        "module": sum(modules),
        "module_of": len(modules),
        "benign": kind.benign,
        "called_corrupt": corrupt,
        "channels": {c: _channel(c, seen) for c in CHANNELS},
    }


def _channel(name: str, seen: Sequence[Seen]) -> dict[str, int]:
    told = [s.channels[name] for s in seen if s.channels[name] is not None]
    return {"caught": sum(map(bool, told)), "of": len(told)}


def _rate(k: int, n: int) -> dict[str, float] | None:
    if not n:
        return None
    bounds = clopper_pearson(k, n)
    return {"rate": k / n, "low": bounds.low, "high": bounds.high}


def document(results: Sequence[Mapping[str, Any]], extent: Extent, alarms: int) -> dict[str, Any]:
    """``raytest selftest --format json``: exit code 1 where a fault was missed, a clean run was
    alarm, a benign change was called corrupt, or the wrong slot was blamed too often."""
    blamed, of = (sum(r[k] for r in results) for k in ("blamed", "blamed_of"))
    failed = [
        *(f"{r['kind']}: {r['missed']} of {r['due']} missed" for r in results if r["missed"]),
        *(
            f"{r['kind']}: changes rounding only, {r['called_corrupt']} called corrupt"
            for r in results
            if r["called_corrupt"]
        ),
    ]
    if of and blamed / of < BLAMED_AT_LEAST:
        failed.append(f"the right slot was blamed in {blamed} of {of} only")
    if alarms:
        failed.append(f"{alarms} of {extent.clean} runs without a fault were flagged")
    return {
        "schema": "raytest.selftest/1",
        "engine": "reference",
        "run": {"prompts": extent.prompts, "tokens": extent.tokens, "repeats": extent.repeats},
        "seed": extent.seed,
        "kinds": list(results),
        "clean": {"runs": extent.clean, "alarms": alarms, "rate": _rate(alarms, extent.clean)},
        "failed": failed,
        "exit_code": int(ExitCode.MISMATCH if failed else ExitCode.PASS),
    }


def _line(result: Mapping[str, Any]) -> str:
    return f"{result['kind']}: caught {result['caught']} of {result['due']}"


def lines_of(found: Mapping[str, Any]) -> list[str]:
    """The document for people."""
    header = ("fault", "changed", "caught", "95%", "slot", "module", *CHANNELS)
    rows = [_row(r) for r in found["kinds"]]
    clean = found["clean"]
    lines = table_lines(header, rows)
    if clean["rate"] is not None:
        bound = f"true rate below {100 * clean['rate']['high']:.2g}% (95%)"
        lines += ["", f"false alarms: {clean['alarms']} of {clean['runs']} clean runs; {bound}"]
    return [*lines, *(f"FAILED {f}" for f in found["failed"])]


def _row(r: Mapping[str, Any]) -> tuple[str, ...]:
    rate = r["caught_rate"]
    bounds = "-" if rate is None else f"{100 * rate['low']:.3g}% to {100 * rate['high']:.3g}%"
    channels = [r["channels"][c] for c in CHANNELS]
    return (
        r["kind"],
        f"{r['changed']} of {r['cases']}",
        f"{r['caught']} of {r['due']}",
        bounds,
        _of(r["blamed"], r["blamed_of"]),
        _of(r["module"], r["module_of"]),
        *(_of(c["caught"], c["of"]) for c in channels),
    )


def _of(k: int, n: int) -> str:
    return f"{k} of {n}" if n else "-"
