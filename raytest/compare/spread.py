"""How far configurations spread: the metrics of arXiv 2506.09501 along each axis.

A configuration is one value of the axis with everything else held equal (a group's members); each
number is taken per group and averaged over the groups. Std@Acc needs prompts with a reference
answer and completions with text: an answer is right where its text contains the reference (case and
white space aside).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from raytest.compare.axis_result import AxisData
from raytest.compare.classes import Classes
from raytest.compare.metrics import avg_std_output_length, avg_std_top1_prob, std_at_accuracy
from raytest.compare.observed import Observed
from raytest.store import Payload, RunFolder

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Ints = npt.NDArray[np.int64]
    Bools = npt.NDArray[np.bool_]

# Divergent requests of an axis whose probabilities are looked at position by position. All of their
# completions are held in memory at once.
MOST_REQUESTS = 32
MOST_COMPLETIONS = 2048


@dataclass(frozen=True, slots=True)
class Spread:
    """One axis; None where it cannot be known. ``div_index`` is the mean first position where
    completions differ, over comparisons that do; ``avg_std_top1_prob`` covers the greedy requests
    (those that diverge by ``n_top1_requests`` of them, evenly chosen); ``accuracy`` has the lowest,
    the mean and the highest of the configurations."""

    n_configurations: int
    div_index: float | None
    avg_std_output_length: float | None
    avg_std_top1_prob: float | None
    n_top1_requests: int
    std_at_accuracy: float | None
    accuracy: tuple[float, float, float] | None


def chosen(classes: Classes, observed: Observed) -> Ints:
    """The divergences (indices) of the group and unit pairs whose completions are to be kept."""
    import numpy as np

    d = classes.divergences
    greedy = np.flatnonzero(~observed.workload.sampled[observed.request_of(d.unit)])
    if not len(greedy):
        return greedy
    key = d.group[greedy] * observed.state.shape[1] + d.unit[greedy]
    places, inverse, counts = np.unique(key, return_inverse=True, return_counts=True)
    most = min(MOST_REQUESTS, max(1, MOST_COMPLETIONS // (int(counts.max()) + 1)))
    taken = np.unique(np.linspace(0, len(places) - 1, min(most, len(places))).astype(np.int64))
    found: Ints = greedy[np.isin(inverse, taken)]
    return found


def payloads_of(classes: Classes, at: Ints, observed: Observed) -> Ints:
    """The payloads on either side of the divergences ``at``."""
    import numpy as np

    d = classes.divergences
    both = (observed.payload[member[at], d.unit[at]] for member in (d.reference, d.member))
    return np.unique(np.concatenate(list(both)))


def spread_of(
    data: AxisData, at: Ints, kept: Mapping[int, Payload], right: Bools | None, observed: Observed
) -> Spread | None:
    """The spread along one axis; None where nothing was compared. ``right`` says of each payload
    whether its answer is."""
    import numpy as np

    rows = [np.array(g.members) for g in data.grouping.groups]
    rows = [r for r in rows if (observed.payload[r] >= 0).any(axis=1).sum() > 1]
    if not rows:
        return None
    lengths, accuracies = [], []
    for members in rows:
        payload = observed.payload[members]
        members, payload = _present(members, payload)
        whole = (payload >= 0).all(axis=0)
        if whole.any():
            lengths.append(avg_std_output_length(observed.n_tokens[members][:, whole]))
        graded = whole & _with_reference(observed)
        if right is not None and graded.any():
            accuracies.append(right[payload[:, graded]])
    first = data.metrics.first[data.metrics.first >= 0]
    top1, n_top1 = _top1(data, at, kept, observed)
    shares = np.concatenate([a.mean(axis=1) for a in accuracies]) if accuracies else None
    return Spread(
        n_configurations=max(len(r) for r in rows),
        div_index=float(first.mean()) if len(first) else None,
        avg_std_output_length=float(np.mean(lengths)) if lengths else None,
        avg_std_top1_prob=top1,
        n_top1_requests=n_top1,
        std_at_accuracy=float(np.mean([std_at_accuracy(a) for a in accuracies]))
        if accuracies
        else None,
        accuracy=None
        if shares is None
        else (float(shares.min()), float(shares.mean()), float(shares.max())),
    )


def _present(members: Ints, payload: Ints) -> tuple[Ints, Ints]:
    """Members that have any result; a trial that failed is no configuration."""
    there = (payload >= 0).any(axis=1)
    return members[there], payload[there]


def _with_reference(observed: Observed) -> Bools:
    import numpy as np

    known = np.array([r is not None for r in observed.workload.reference], dtype=np.bool_)
    return np.repeat(known, observed.workload.n_samples)


def _top1(
    data: AxisData, at: Ints, kept: Mapping[int, Payload], observed: Observed
) -> tuple[float | None, int]:
    """Avg_Std@top1_prob over the greedy requests of all groups: requests that do not diverge count
    0, those that do by the mean of those looked at."""
    import numpy as np

    d = data.classes.divergences
    greedy = ~observed.workload.sampled
    # a request of a group is one place; groups hold the same requests
    compared = float(data.classes.n_classes.sum()) * float(greedy.mean())
    if not greedy.any() or not compared:
        return None, 0
    places = _places(d.group[at], d.unit[at])
    found: list[float] = []
    for entries in places:
        value = _one(data, at[entries], kept, observed)
        if value is not None:
            found.append(value)
    everywhere = greedy[observed.request_of(d.unit)]
    divergent = len(_places(d.group[everywhere], d.unit[everywhere]))
    if divergent and not found:
        return None, 0
    share = divergent / compared
    return (share * float(np.mean(found)) if found else 0.0), len(found)


def _places(group: Ints, unit: Ints) -> list[Ints]:
    """Indices of the entries of each group and unit."""
    import numpy as np

    if not len(group):
        return []
    order = np.lexsort((unit, group))
    cut = (np.diff(group[order]) != 0) | (np.diff(unit[order]) != 0)
    return np.split(order, np.flatnonzero(cut) + 1)


def _one(
    data: AxisData, entries: Ints, kept: Mapping[int, Payload], observed: Observed
) -> float | None:
    import numpy as np

    d, unit = data.classes.divergences, int(data.classes.divergences.unit[entries[0]])
    first = data.metrics.first[entries]
    sides = [(int(d.reference[entries[0]]), int(d.n_reference[entries[0]]))]
    sides += [(int(d.member[e]), int(d.n_members[e])) for e in entries]
    found = [(kept.get(int(observed.payload[m, unit])), n) for m, n in sides]
    series = [(p.logprobs, n) for p, n in found if p is not None]
    if len(series) < len(sides) or not min(len(s) for s, _ in series):
        return None
    until = min([int(f) for f in first if f >= 0] + [len(s) for s, _ in series])
    stacked = np.array([s[:until] for s, n in series for _ in range(n)], dtype=np.float32)
    if not np.isfinite(stacked).all():
        return None
    return avg_std_top1_prob(stacked, until)


def graded(folders: Sequence[RunFolder], observed: Observed) -> Bools | None:
    """Per payload whether its text contains its request's reference; None where no request has one
    or no text was kept."""
    import numpy as np

    references = observed.workload.reference
    if not any(r is not None for r in references):
        return None
    texts: dict[bytes, str] = {}
    for folder in folders:
        for table in folder.iter_payload_tables(["payload_id", "text"]):
            columns = (table.column(c).to_pylist() for c in ("payload_id", "text"))
            texts.update({i: t for i, t in zip(*columns, strict=True) if t is not None})
    if not texts:
        return None
    ids = observed.payload_ids.to_pylist()
    right = np.zeros(len(ids), dtype=np.bool_)
    for unit in range(observed.payload.shape[1]):
        reference = references[unit // observed.workload.n_samples]
        if reference is None:
            continue
        wanted = _plain(reference)
        for payload in np.unique(observed.payload[:, unit]):
            if payload >= 0:
                right[payload] = wanted in _plain(texts.get(ids[payload], ""))
    return right


def _plain(text: str) -> str:
    return " ".join(text.casefold().split())
