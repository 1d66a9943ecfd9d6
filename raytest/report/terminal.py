"""A verdict as one screen of plain lines: is it the same everywhere, and if not, what next?"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from raytest.report.decode import decoder
from raytest.report.diagnosis import diagnosis_lines, diagnosis_of
from raytest.report.facts import bound_words, trials_words
from raytest.report.material import Material, axis_verdict
from raytest.report.quarantine import isolated
from raytest.report.streams import Side, Streams, divergent_rows, streams
from raytest.report.table import printable, table_lines

MOST_LISTED = 6
MOST_MEMBERS = 3
# A stream's text on its line; more would wrap at 80 columns.
TEXT_COLUMNS = 56
INDENT = "    "


def screen_lines(material: Material, width: int | None = None) -> list[str]:
    """Everything about one run. ``width``: columns to wrap at (None, as in a pipe: whole lines)."""
    rows = divergent_rows(material, 1)
    shown = next(iter(streams(material, rows, decoder(material.spec))), None)
    suspects = [f"{entity}: {why}" for entity, why in isolated(material)]
    where = str(material.folder.path)
    proved = diagnosis_lines(diagnosis_of(material.folder))
    lines = _screen(material.document, where, material.judged, suspects, shown, proved)
    return _wrapped(lines, width)


def verdict_lines(document: Mapping[str, Any], width: int | None = None) -> list[str]:
    """The screen of a verdict document alone, as when runs are compared with each other."""
    suspects = [f"{s['entity']}: outside on {s['axis']}" for s in document["suspects"]]
    return _wrapped(_screen(document, "", True, suspects, None), width)


def _screen(
    document: Mapping[str, Any],
    where: str,
    judged: bool,
    suspects: Sequence[str],
    shown: Streams | None,
    proved: Sequence[str] = (),
) -> list[str]:
    name = "+".join(map(str, document["run"]["run_ids"]))
    lines = [*_table(document["axes"]), ""]
    lines += [f"because {x}" for x in _some(document["reasons"], "reasons")]
    lines += [f"suspect {x}" for x in _some(suspects, "suspects")]
    lines += _some([_failure(f) for f in document["failures"]], "failures")
    lines += _skipped(document["skipped_requests"])
    if shown is not None:
        lines += _streams(shown)
    elif any(a["worst"] for a in document["axes"]):
        lines += _worst(document["axes"])
    if document.get("baseline"):
        lines.append(_baseline(document["baseline"]))
    lines += [f"proved {x}" for x in proved]
    lines.append(_coverage(document))
    if where:
        lines.append(f"run folder: {where}")
    if not judged:
        lines.append("no verdict.json yet: this is what is on disk so far")
    lines.append(f"{name}: {document['verdict'].upper()} (exit code {document['exit_code']})")
    return [*lines, *(f"next: {step}" for step in next_steps(document, name, judged))]


HEADER = ("axis", "worst", "differ", "95% bound", "gate")


def _table(axes: Sequence[Mapping[str, Any]]) -> list[str]:
    if not axes:
        return ["nothing is varied, so nothing was compared"]
    return table_lines(HEADER, [_row(a) for a in axes])


def _row(axis: Mapping[str, Any]) -> tuple[str, ...]:
    requests = axis["requests"]
    contract = axis["contract"] if axis["stated"] else f"({axis['contract']})"
    differ = requests["compared"] - requests["bitwise"]
    return (
        axis["axis"],
        axis_verdict(axis),
        f"{differ} of {requests['compared']}",
        bound_words(axis),
        f"{contract} {axis['result']}",
    )


def _some(entries: Sequence[str], what: str) -> list[str]:
    shown = list(entries[:MOST_LISTED])
    if len(entries) > MOST_LISTED:
        shown.append(f"… and {len(entries) - MOST_LISTED} more {what}")
    return shown


def _failure(failure: Mapping[str, Any]) -> str:
    return f"failed: {failure['cell_id']} launch {failure['launch']}: {failure['reason']}"


def _skipped(skipped: Sequence[Mapping[str, Any]]) -> list[str]:
    if not skipped:
        return []
    first = skipped[0]
    return [f"{len(skipped)} requests cannot run ({first['request_id']}: {first['error']})"]


def _baseline(compared: Mapping[str, Any]) -> str:
    title = f"baseline {compared['name']}/{compared['number']}, run {compared['run_id']}"
    changed = len(compared["environment"])
    told = f"{changed} facts of the environment changed" if changed else "same environment"
    if compared["axis"]:
        requests = compared["axis"]["requests"]
        differ = requests["compared"] - requests["bitwise"]
        told += f", {differ} of {requests['compared']} requests differ"
    return f"{title}: {told}: {compared['verdict']}"


def _coverage(document: Mapping[str, Any]) -> str:
    coverage, trials = document["coverage"], document["trials"]
    caught = sum(c["caught"] for c in document["controls"])
    return (
        f"{coverage['n_nodes']} nodes, {coverage['n_devices']} devices, "
        f"{coverage['n_requests']} requests; {trials_words(trials)}; "
        f"controls caught {caught} of {len(document['controls'])}"
    )


def _streams(shown: Streams) -> Iterator[str]:
    """The worst divergence: the common end, then each side from the first difference on."""
    at = "" if shown.position is None else f" at position {shown.position}"
    margin = "" if shown.margin is None else f", margin {shown.margin:.4g} nats"
    yield f"worst: {shown.axis}, request {shown.title}: {shown.verdict}{at}{margin}"
    members = _members(shown.members)
    yield f"{INDENT}{shown.reference.member} ({shown.reference.n_members}) against {members}"
    if shown.tokens_equal:
        size = shown.max_logprob_difference
        told = "" if size is None else f" by at most {size:.4g} nats"
        yield f"{INDENT}tokens equal, logprobs differ{told}"
    else:
        yield f"{INDENT}both       {_end(shown.before_text or _ids(shown.before))}"
        for name, side in (("reference", shown.reference), ("other", shown.other)):
            yield f"{INDENT}{name:10} {_begin(side.text or _ids(side.tokens) or '(ended)')}"
    for name, side in (("reference", shown.reference), ("other", shown.other)):
        if side.candidates:
            yield f"{INDENT}{name:10} {_top(side)}"


def _top(side: Side) -> str:
    entries = []
    for c in side.candidates[:3]:
        text = f" {c.text!r}" if c.text else ""
        entries.append(f"{'>' if c.taken else ''}{c.token}{text} {c.logprob:.4f}")
    return "top " + ", ".join(entries)


def _worst(axes: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """The worst divergence in words alone, where its payloads are not at hand."""
    axis = next(a for a in axes if a["worst"])
    worst = axis["worst"]
    at = "" if worst["position"] is None else f" at position {worst['position']}"
    yield f"worst: {axis['axis']}, request {worst['request_id']}: {worst['verdict']}{at}"
    yield f"{INDENT}{worst['reference']} against {_members(worst['members'])}"
    yield f"{INDENT}{worst['reason']}"


def _members(members: Sequence[str]) -> str:
    rest = len(members) - MOST_MEMBERS
    more = f" and {rest} more" if rest > 0 else ""
    return ", ".join(members[:MOST_MEMBERS]) + more


def _ids(tokens: Sequence[int]) -> str:
    return " ".join(map(str, tokens))


def _begin(text: str) -> str:
    shown = printable(text)
    return shown if len(shown) <= TEXT_COLUMNS else f"{shown[: TEXT_COLUMNS - 1]}…"


def _end(text: str) -> str:
    shown = printable(text)
    return shown if len(shown) <= TEXT_COLUMNS else f"…{shown[1 - TEXT_COLUMNS :]}"


def next_steps(document: Mapping[str, Any], name: str, judged: bool) -> list[str]:
    """Commands that a person would run next."""
    if not judged or (document["exit_code"] == 3 and not document["complete"]):
        return [f"raytest run SPEC --run-id {name} --resume"]
    if document["exit_code"] != 1:
        return []
    steps = [f"raytest explain {name}"]
    return [f"raytest retest {name}", *steps] if document["suspects"] else steps


def _wrapped(lines: Sequence[str], width: int | None) -> list[str]:
    safe = [printable(line) for line in lines]
    if width is None:
        return safe
    table = next((i for i, line in enumerate(safe) if not line), 0)
    wrapped = list(safe[:table])
    for line in safe[table:]:
        if len(line) <= width:
            wrapped.append(line)
            continue
        wrapped += textwrap.wrap(
            line,
            width,
            subsequent_indent=INDENT + "  ",
            break_long_words=False,
            break_on_hyphens=False,
            drop_whitespace=True,
        )
    return wrapped
