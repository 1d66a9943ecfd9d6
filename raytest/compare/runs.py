"""Runs against runs: the same requests in two or more run folders, matched by prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from raytest.compare.evaluate import Evaluation, judge
from raytest.compare.loading import observe
from raytest.errors import NotComparableError, UsageError
from raytest.schema import Axis
from raytest.store import RunFolder

# Facts of a fingerprint that say which model and tokenizer a process really loaded.
IDENTITY_PREFIXES = ("model.", "weights.", "tokenizer.")
IDENTITY_SUFFIXES = ("digest", "sha256", "hash")


def compare_runs(folders: Sequence[RunFolder]) -> Evaluation:
    """Compare runs along the axis ``run``; the first is the reference, and its spec holds the gate.

    Trials are matched by variant, slot, launch, arrangement and repeat; where no slot name occurs
    in all runs (another cluster), slots are free. Raises NotComparableError where the models differ
    or no request is in common; requests that only some runs have are counted and make the result
    not comparable.
    """
    if len(folders) < 2:
        raise UsageError("comparing runs needs two or more; one run is judged by itself")
    _same_model(folders)
    observed = observe(folders)
    if not _in_common(observed.unmatched, observed.n_requests):
        raise NotComparableError(
            f"{folders[0].path} and {folders[1].path}: no request in common "
            f"({_counts(observed.unmatched)})"
        )
    return judge(observed, folders, folders[0].spec(), [Axis.RUN], None)


def _in_common(unmatched: Mapping[str, int], n_requests: int) -> bool:
    """Whether any request of the first run occurs elsewhere."""
    alone = sum(n for what, n in unmatched.items() if "later" not in what)
    return alone < n_requests


def _counts(unmatched: Mapping[str, int]) -> str:
    return ", ".join(f"{n} {what}" for what, n in unmatched.items() if n)


def _same_model(folders: Sequence[RunFolder]) -> None:
    """Refuse runs of different models. A model that both runs fingerprinted is known by its
    digests; else by its name in the spec."""
    facts = [_identity(folder) for folder in folders]
    specs = [folder.spec() for folder in folders]
    for other, theirs, spec in zip(folders[1:], facts[1:], specs[1:], strict=True):
        shared = sorted(facts[0].keys() & theirs.keys())
        for key in shared:
            if facts[0][key] != theirs[key]:
                raise NotComparableError(
                    f"{folders[0].path} and {other.path}: {key} differs "
                    f"({_some(facts[0][key])} and {_some(theirs[key])})"
                )
        if shared:
            continue
        ours, found = (
            {"model.path": s.model.path, "model.synthetic_seed": s.model.synthetic_seed}
            for s in (specs[0], spec)
        )
        for key, value in ours.items():
            if found[key] != value:
                raise NotComparableError(
                    f"{folders[0].path} and {other.path}: {key} is {value!r} and {found[key]!r}"
                )


def _identity(folder: RunFolder) -> dict[str, set[str]]:
    table: Any = folder.fingerprints().select(["key", "value"])
    found: dict[str, set[str]] = {}
    for key, value in zip(*(table.column(c).to_pylist() for c in ("key", "value")), strict=True):
        if key.startswith(IDENTITY_PREFIXES) and key.endswith(IDENTITY_SUFFIXES):
            found.setdefault(key, set()).add(value)
    return found


def _some(values: set[str]) -> str:
    return ", ".join(sorted(values)[:3])
