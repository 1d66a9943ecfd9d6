"""Two completions side by side, aligned at their first difference."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from raytest.errors import StoreError
from raytest.report.decode import Decode
from raytest.report.material import Material
from raytest.schema import Verdict

if TYPE_CHECKING:
    import pyarrow as pa

    from raytest.store import Payload

# Tokens shown before and after the first difference; the rest is counted, not shown.
BEFORE = 24
AFTER = 16
LONGEST_PROMPT = 2000


@dataclass(frozen=True, slots=True)
class Candidate:
    """One of the most likely next tokens at the first difference; ``logprob`` in nats."""

    token: int
    text: str
    logprob: float
    taken: bool


@dataclass(frozen=True, slots=True)
class Side:
    """One completion: who said it, the tokens at and after the difference, and their text.

    ``logprob`` is that of the token at the difference (None: ended, or none were kept).
    """

    member: str
    n_members: int
    n_tokens: int
    tokens: tuple[int, ...]
    text: str
    logprob: float | None
    candidates: tuple[Candidate, ...]


@dataclass(frozen=True, slots=True)
class Streams:
    """A divergence as a person reads it. ``before`` are the last common tokens and ``skipped`` the
    number of common ones in front of them; ``position`` is None where only what is around the
    tokens differs."""

    axis: str
    request_id: str
    sample_index: int
    verdict: str
    reason: str
    position: int | None
    tokens_equal: bool
    margin: float | None
    max_logprob_difference: float | None
    prompt: str
    prompt_length: int
    skipped: int
    before: tuple[int, ...]
    before_text: str
    reference: Side
    other: Side
    members: tuple[str, ...]

    @property
    def title(self) -> str:
        """Request and sample."""
        sample = f" sample {self.sample_index}" if self.sample_index else ""
        return f"{self.request_id}{sample}"


def divergent_rows(material: Material, most: int | None, axis: str = "") -> list[dict[str, Any]]:
    """Distinct divergences, the worst first: worst verdict, then gated axes, then the earliest."""
    import pyarrow.compute as pc

    table = material.verdicts
    if axis:
        table = table.filter(pc.equal(table.column("axis"), axis))
    failing = {a["axis"]: a["result"] != "fails" for a in material.document["axes"]}
    order = [v.value for v in Verdict]
    keys = ("axis", "request_id", "sample_index", "reference_payload_id", "payload_id")
    rows: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in table.to_pylist():
        rows.setdefault(tuple(row[k] for k in keys), row)

    def rank(row: Mapping[str, Any]) -> tuple[Any, ...]:
        first = row["first_divergence"]
        return (
            failing.get(row["axis"], True),
            -order.index(row["verdict"]),
            row["token"] is None and row["reference_token"] is None,
            first is None,
            first or 0,
            row["request_index"],
            row["sample_index"],
        )

    ranked = sorted(rows.values(), key=rank)
    return ranked if most is None else ranked[:most]


def streams(
    material: Material, rows: Sequence[Mapping[str, Any]], decode: Decode | None
) -> Iterator[Streams]:
    """The rows' payloads, aligned. A payload that is not there leaves its row out."""
    ids = {r[k] for r in rows for k in ("reference_payload_id", "payload_id")} - {None}
    try:
        payloads = material.folder.payloads(ids)
    except StoreError:
        payloads = {}
    requests = material.folder.requests()
    prompts = _prompts(requests, {r["request_index"] for r in rows}, decode)
    for row in rows:
        a, b = payloads.get(row["reference_payload_id"]), payloads.get(row["payload_id"])
        if a is not None and b is not None:
            yield _aligned(row, a, b, prompts.get(row["request_index"], ("", 0)), decode)


def _prompts(
    requests: pa.Table, wanted: set[int], decode: Decode | None
) -> dict[int, tuple[str, int]]:
    """Text (or ids) of each prompt, and its length in tokens."""
    import pyarrow as pa
    import pyarrow.compute as pc

    index = requests.column("request_index")
    rows = requests.filter(pc.is_in(index, pa.array(sorted(wanted), pa.int32())))
    found = {}
    for row in rows.select(["request_index", "prompt", "prompt_token_ids"]).to_pylist():
        ids = row["prompt_token_ids"]
        text = row["prompt"]
        if text is None:
            text = decode(ids[:LONGEST_PROMPT]) if decode else " ".join(map(str, ids[:400]))
        found[row["request_index"]] = (text, len(ids))
    return found


def _aligned(
    row: Mapping[str, Any], a: Payload, b: Payload, prompt: tuple[str, int], decode: Decode | None
) -> Streams:
    tokens_equal = bool(len(a.token_ids) == len(b.token_ids) and (a.token_ids == b.token_ids).all())
    position = row["first_divergence"]
    at = len(a.token_ids) if position is None else int(position)
    start = max(0, at - BEFORE)
    before = tuple(int(t) for t in a.token_ids[start:at])
    return Streams(
        axis=row["axis"],
        request_id=row["request_id"],
        sample_index=row["sample_index"],
        verdict=row["verdict"],
        reason=row["reason"] or "",
        position=position,
        tokens_equal=tokens_equal,
        margin=row["margin"],
        max_logprob_difference=row["max_logprob_difference"],
        prompt=prompt[0],
        prompt_length=prompt[1],
        skipped=start,
        before=before,
        before_text=_text(before, decode),
        reference=_side(row["reference_member"], row["n_reference"], a, at, decode),
        other=_side(row["member"], row["n_members"], b, at, decode),
        members=tuple(row["members"]),
    )


def _side(member: str, n: int, payload: Payload, at: int, decode: Decode | None) -> Side:
    tokens = tuple(int(t) for t in payload.token_ids[at : at + AFTER])
    with_logprobs = len(payload.logprobs) == len(payload.token_ids)
    inside = at < len(payload.token_ids)
    return Side(
        member=member,
        n_members=n,
        n_tokens=len(payload.token_ids),
        tokens=tokens,
        text=_text(tokens, decode),
        logprob=float(payload.logprobs[at]) if inside and with_logprobs else None,
        candidates=tuple(_candidates(payload, at, decode)) if inside else (),
    )


def _candidates(payload: Payload, at: int, decode: Decode | None) -> Iterator[Candidate]:
    k = payload.top_k
    taken = int(payload.token_ids[at])
    ids = payload.top_token_ids[at * k : (at + 1) * k]
    values = payload.top_logprobs[at * k : (at + 1) * k]
    for token, value in zip(ids, values, strict=True):
        if int(token) >= 0:
            yield Candidate(
                int(token), _text((int(token),), decode), float(value), int(token) == taken
            )


def _text(tokens: Sequence[int], decode: Decode | None) -> str:
    """Text of the tokens; '' where no tokenizer is at hand or it does not know an id."""
    if decode is None or not tokens:
        return ""
    try:
        return decode(tokens)
    except (IndexError, OverflowError, ValueError):
        return ""
