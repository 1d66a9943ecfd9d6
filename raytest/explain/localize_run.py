"""``raytest localize``: from a run folder to the first module that differs, kept in the folder."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raytest.digest import json_digest
from raytest.engines.trace import Trace
from raytest.errors import ExitCode
from raytest.explain.divergence import Divergence, find_divergence
from raytest.explain.growth_plot import growth_svg
from raytest.explain.localize import Finding, Localization, localize
from raytest.explain.replay_pair import Replay, Tell, replay_pair
from raytest.store import RunFolder, write_json, write_table, write_text

if TYPE_CHECKING:
    import pyarrow as pa

SCHEMA = "raytest.localize/1"


@dataclass(frozen=True, slots=True)
class Conclusion:
    """A replay in one word, one sentence and an exit code."""

    finding: str
    sentence: str
    exit_code: ExitCode


def localize_run(
    folder: RunFolder, pair: tuple[str, str] | None, address: str, tell: Tell
) -> dict[str, Any]:
    """Replay one divergent request in both cells and say where they part; the document.

    Writes ``activations/<pair>/``. Raises RaytestError.
    """
    found = find_divergence(folder, pair)
    if found is None:
        return {
            "schema": SCHEMA,
            "run_id": folder.run_id,
            "finding": Finding.EQUAL.value,
            "sentence": "No difference found: no two observations of the run differ.",
            "exit_code": int(ExitCode.PASS),
        }
    replay = replay_pair(folder, found, address, tell)
    localization = localize(replay.second or replay.first)
    document = document_of(folder, found, replay, localization)
    where = folder.path / "activations" / _name(found)
    for side, trace in zip("ab", replay.traces, strict=True):
        write_table(where / f"{side}.parquet", trace_table(trace), trace_schema())
    if localization.growth:
        write_text(where / "growth.svg", growth_svg(localization, document["pair"]))
    document["folder"] = str(where)
    write_json(where / "localization.json", document)
    folder.event("localized", pair=document["pair"], finding=document["finding"])
    return document


def conclude(found: Divergence, replay: Replay, localization: Localization) -> Conclusion:
    """What a replay proves, and what it does not: a difference that did not come again is no
    equality."""
    if replay.second is not None and not _stable(replay):
        return Conclusion(
            "not stable",
            "The two passes disagree about the first difference: the cause is not deterministic. "
            f"First pass: {localize(replay.first).sentence}",
            ExitCode.INCONCLUSIVE,
        )
    if localization.finding is Finding.FOUND:
        return Conclusion(localization.finding, localization.sentence, ExitCode.PASS)
    if localization.finding is Finding.NOTHING:
        return Conclusion(localization.finding, localization.sentence, ExitCode.INCONCLUSIVE)
    if replay.diverged:
        return Conclusion(
            "after the model",
            f"All {localization.n_modules} modules are bitwise equal, and the completions differ: "
            "the cause lies after the model, in the sampler.",
            ExitCode.PASS,
        )
    if not found.bitwise:
        return Conclusion(
            "not reproduced",
            "The difference did not come again: this time both sides gave the same, in every "
            f"module ({localization.n_modules}) and in the completion.",
            ExitCode.INCONCLUSIVE,
        )
    return Conclusion(localization.finding, localization.sentence, ExitCode.PASS)


def _stable(replay: Replay) -> bool:
    first, second = replay.first.first(), replay.second.first() if replay.second else None
    if first is None or second is None:
        return False
    return (first.module, first.part, first.first()) == (second.module, second.part, second.first())


def document_of(
    folder: RunFolder, found: Divergence, replay: Replay, localization: Localization
) -> dict[str, Any]:
    """``raytest.localize/1``, without the folder it is kept in."""
    conclusion = conclude(found, replay, localization)
    facts = asdict(localization)
    for key in ("finding", "skipped", "growth", "n_modules", "n_positions", "n_rows"):
        facts.pop(key)
    document = {
        "schema": SCHEMA,
        "run_id": folder.run_id,
        "pair": [found.a.name, found.b.name],
        "request_id": found.request_id,
        "sample_index": found.sample_index,
        "first_divergence": found.first,
        "finding": str(conclusion.finding),
        "sentence": conclusion.sentence,
        "exit_code": int(conclusion.exit_code),
        **facts,
        "rows_compared": localization.n_rows,
        "modules_compared": localization.n_modules,
        "positions_compared": localization.n_positions,
        "not_compared": {k: list(v) for k, v in (localization.skipped or {}).items()},
        "growth": [
            {"module": g.module, "position": g.position, **asdict(g.distance)}
            for g in localization.growth
        ],
        "reproduced": dict(zip(("a", "b"), replay.reproduced, strict=True)),
        "engine_starts": replay.engine_starts,
        "notes": replay.notes,
    }
    plain = _finite(document)
    assert isinstance(plain, dict)
    return plain


def lines_of(document: Mapping[str, Any]) -> list[str]:
    """The document for a person."""
    lines = [document["sentence"]]
    if "pair" not in document:
        return lines
    at = document["first_divergence"]
    told = "tokens equal" if at is None else f"first other token at {at}"
    lines += [
        f"  a: {document['pair'][0]}",
        f"  b: {document['pair'][1]}",
        f"  request {document['request_id']}, sample {document['sample_index']}: {told}",
    ]
    lines += _growth_lines(document["growth"])
    skipped = document["not_compared"]
    lines += [f"  not compared, {why}: {_some(names)}" for why, names in skipped.items()]
    for side, name in (("a", document["pair"][0]), ("b", document["pair"][1])):
        if not document["reproduced"][side]:
            lines.append(f"  note: {name} did not give what the run had recorded, bit by bit")
    lines += [f"  note: {note}" for note in document["notes"]]
    return [*lines, f"  {document['engine_starts']} engine starts; kept in {document['folder']}"]


def _growth_lines(growth: list[Mapping[str, Any]]) -> list[str]:
    """Layer by layer: the last module of each layer that differs."""
    last: dict[str, Mapping[str, Any]] = {}
    for entry in growth:
        if entry["n_different"]:
            layer = re.match(r"(.*?layers\.\d+)\.", entry["module"])
            last[layer[1] if layer else entry["module"]] = entry
    return [
        f"  {e['module']}: {e['n_different']} of {e['n_elements']} elements, "
        f"up to {_short(e['max_ulp'])} units in the last place, relative {_short(e['relative'])}"
        for e in last.values()
    ]


def _some(names: list[str]) -> str:
    return f"{names[0]} and {len(names) - 1} more" if len(names) > 1 else names[0]


def _short(value: float | None) -> str:
    return "?" if value is None else f"{value:.3g}"


def trace_schema() -> pa.Schema:
    """One row per module, part, rank and position, with the row's digest."""
    import pyarrow as pa

    text = ("module", "kind", "part", "layout", "dtype")
    numbers = ("rank", "tensor_parallel_rank", "stage", "order", "columns", "position", "step")
    return pa.schema(
        [
            *(pa.field(n, pa.string(), nullable=False) for n in text),
            *(pa.field(n, pa.int32(), nullable=False) for n in numbers),
            pa.field("digest", pa.binary(16), nullable=False),
        ]
    )


def trace_table(trace: Trace) -> pa.Table:
    """A trace's digests as a table of :func:`trace_schema`."""
    import pyarrow as pa

    schema = trace_schema()
    tables = []
    for part in sorted(trace.parts, key=lambda p: (p.stage, p.order, p.rank, p.part)):
        n = len(part.positions)
        columns: dict[str, Any] = {
            "position": part.positions,
            "step": part.steps,
            "digest": [d.astype("<u8").tobytes() for d in part.digests],
        }
        for name in schema.names:
            if name not in columns:
                columns[name] = [getattr(part, name)] * n
        tables.append(pa.table([pa.array(columns[f.name], f.type) for f in schema], schema=schema))
    return pa.concat_tables(tables) if tables else schema.empty_table()


def _name(found: Divergence) -> str:
    """A folder name for the pair: readable, and unique where it had to be cut."""
    text = f"{found.a.name}--{found.b.name}"
    safe = re.sub(r"[^A-Za-z0-9@._=-]+", "_", text)
    return safe if len(safe) <= 150 else f"{safe[:140]}-{json_digest('pair', text)[:8]}"


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return str(value) if isinstance(value, Path) else value
