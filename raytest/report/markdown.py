"""A summary for pull requests and step summaries: at most 1 MiB, a longer one is dropped whole."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from raytest.report.decode import decoder
from raytest.report.facts import bound_words, duration_s, duration_words, trials_words
from raytest.report.material import Material, axis_verdict
from raytest.report.quarantine import isolated
from raytest.report.spread import SPREAD_HEADER, spread_rows
from raytest.report.streams import Side, Streams, divergent_rows, streams
from raytest.report.table import printable
from raytest.report.validation import batch_invariance

MOST_BYTES = 1 << 20
MOST_LINES = 50
MOST_STREAMS = 5
LONGEST = 300
MARKS = {"pass": "✅", "mismatch": "❌", "inconclusive": "⚠️", "not comparable": "⚠️"}
RESULTS = {
    "holds": "✅ holds",
    "fails": "❌ fails",
    "undecided": "⚠️ undecided",
    "recorded": "recorded",
}


def markdown_text(material: Material) -> str:
    """The summary, whatever the run's size."""
    document = material.document
    parts = [
        *_head(material),
        *_validation(material),
        *_axes(document["axes"]),
        *_spread(document["axes"]),
        *_list("Why", document["reasons"]),
        *_baseline(document.get("baseline")),
        *_list("Suspects", [f"{e}: {why}" for e, why in isolated(material)]),
        *_findings(document["findings"]),
        *_divergences(material),
        *_environment(material),
    ]
    return _limited(parts)


def _head(material: Material) -> Iterator[str]:
    document = material.document
    mark = MARKS[document["verdict"]]
    yield f"## {mark} {_code(material.spec.name)}: {document['verdict']}\n"
    trials, coverage = document["trials"], document["coverage"]
    caught = sum(c["caught"] for c in document["controls"])
    if not material.judged:
        yield "**The run has no verdict.json: this is what is on disk so far.**\n"
    yield (
        f"Run {_code(material.run_id)}, exit code {document['exit_code']}, "
        f"{duration_words(duration_s(document['run']))}: {coverage['n_nodes']} nodes, "
        f"{coverage['n_devices']} devices, {coverage['n_requests']} requests, "
        f"{coverage['n_tokens']} tokens; {trials_words(trials)}; "
        f"controls caught {caught} of {len(document['controls'])}.\n"
    )


def _validation(material: Material) -> Iterator[str]:
    said = batch_invariance(material)
    if said is not None:
        yield f"**{_inline(said)}**\n"


def _axes(axes: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    if not axes:
        return
    lines = [
        "| axis | worst verdict | requests that differ | 95% bound | gate |",
        "|---|---|---|---|---|",
    ]
    for axis in axes:
        requests = axis["requests"]
        differ = requests["compared"] - requests["bitwise"]
        lines.append(
            f"| {axis['axis']} | {axis_verdict(axis)} | {differ} of {requests['compared']} | "
            f"{bound_words(axis)} | {axis['contract']}: {RESULTS[axis['result']]} |"
        )
    yield "\n".join(lines) + "\n"


def _spread(axes: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """The spread of what differs; an axis that is equal throughout has none."""
    rows = spread_rows([a for a in axes if a["comparisons"]["divergent"]])
    if rows:
        lines = [SPREAD_HEADER, ("---",) * len(SPREAD_HEADER), *rows]
        yield "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def _list(title: str, entries: Sequence[str]) -> Iterator[str]:
    if not entries:
        return
    lines = [f"### {title}\n", *(f"- {_inline(e)}" for e in entries[:MOST_LINES])]
    if len(entries) > MOST_LINES:
        lines.append(f"- … and {len(entries) - MOST_LINES} more (verdict.json has them all)")
    yield "\n".join(lines) + "\n"


def _baseline(compared: Mapping[str, Any] | None) -> Iterator[str]:
    """What the run was compared with, and each fact of the environment that is not what it was."""
    if not compared:
        return
    title = f"{compared['name']}/{compared['number']}"
    run = _code(compared["run_id"])
    yield f"Compared with baseline {_code(title)} (run {run}): {compared['verdict']}.\n"
    yield from _list(
        "Changed since",
        [
            f"{c['group']}: {c['key']}: {_was(c['baseline'])} -> {_was(c['run'])}"
            for c in compared["environment"]
        ],
    )


def _was(value: str | None) -> str:
    return "(unset)" if value is None else value


def _findings(findings: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """One line a kind of finding, with how many there are."""
    kinds: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for f in findings:
        kinds.setdefault((f["severity"], f["code"]), []).append(f)
    yield from _list(
        "Findings",
        [
            f"{severity}: {code}{f' × {len(found)}' if len(found) > 1 else ''}: "
            f"{found[0]['detail']}; {found[0]['suggested_action']}"
            for (severity, code), found in kinds.items()
        ],
    )


def _divergences(material: Material) -> Iterator[str]:
    rows = divergent_rows(material, None)
    for shown in streams(material, rows[:MOST_STREAMS], decoder(material.spec)):
        yield _divergence(shown)
    if len(rows) > MOST_STREAMS:
        yield f"{len(rows) - MOST_STREAMS} more divergences: report.html and verdicts.parquet.\n"


def _divergence(shown: Streams) -> str:
    margin = "" if shown.margin is None else f", margin {shown.margin:.4g} nats"
    where = "no position" if shown.position is None else f"position {shown.position}"
    before = _short(shown.before_text or " ".join(map(str, shown.before)))
    body = [
        f"prompt ({shown.prompt_length} tokens): {_short(shown.prompt)}",
        f"both, before:   …{before}",
        _side("reference", shown.reference),
        _side("other", shown.other),
    ]
    fence = "```"
    while any(fence in line for line in body):
        fence += "`"
    title = f"{_html(shown.axis)}: request {_html(shown.title)}: {shown.verdict} at {where}{margin}"
    inside = "\n".join([fence + "text", *body, fence])
    return f"<details><summary>{title}</summary>\n\n{inside}\n\n</details>\n"


def _side(name: str, side: Side) -> str:
    text = _short(side.text or " ".join(map(str, side.tokens)) or "(ended)")
    candidates = ", ".join(f"{c.token} {c.logprob:.4f}" for c in side.candidates[:5])
    top = f" [top: {candidates}]" if candidates else ""
    return f"{name} {_short(side.member)} (of {side.n_members}): {text}{top}"


def _environment(material: Material) -> Iterator[str]:
    spec = material.spec
    facts = material.folder.manifest.get("environment", {})
    told = ", ".join(f"{k} {v}" for k, v in sorted(facts.items()) if v)
    version = material.document["run"].get("raytest_version", "")
    model = f"model {_code(spec.model.path)} ({spec.model.dtype})"
    devices = {d.model for c in material.plan.cells for d in c.slot.devices if d.model}
    if devices:
        model += f" on {_inline(', '.join(sorted(devices)))}"
    yield f"{model}, {_inline(told) or 'environment unknown'}, raytest {_inline(str(version))}.\n"


def _limited(parts: Sequence[str]) -> str:
    """Whole parts only, and a note where some did not fit."""
    note = "… cut: the summary would be longer than 1 MiB.\n"
    room = MOST_BYTES - len(note.encode()) - 1
    kept: list[str] = []
    for part in parts:
        size = len(part.encode("utf-8", "backslashreplace")) + 1
        if size > room:
            kept.append(note)
            break
        room -= size
        kept.append(part)
    return "\n".join(kept)


def _short(text: str) -> str:
    shown = printable(text[:LONGEST])
    return shown if len(text) <= LONGEST else f"{shown}… ({len(text) - LONGEST} more characters)"


def _inline(text: str) -> str:
    """One line of text that Markdown shows as it is."""
    return re.sub(r"([\\`*_\[\]<>#|~&@])", r"\\\1", _short(text))


def _html(text: str) -> str:
    from html import escape

    return escape(_short(text)).replace("|", "&#124;").replace("`", "&#96;").replace("@", "&#64;")


def _code(text: str) -> str:
    shown = _short(text)
    ticks = "`" * (1 + max((len(m) for m in re.findall("`+", shown)), default=0))
    return f"{ticks}{shown}{ticks}" if "`" not in shown else f"{ticks} {shown} {ticks}"
