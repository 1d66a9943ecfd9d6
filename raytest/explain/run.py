"""Explains one run from its folder."""

from __future__ import annotations

from raytest.compare.loading import observe
from raytest.explain.attribute import attribute
from raytest.explain.factors import factors_of
from raytest.explain.outcomes import outcomes_of
from raytest.explain.tables import Explanation
from raytest.store import RunFolder


def explain_run(folder: RunFolder) -> Explanation:
    """Which recorded factors explain the run's classes. Reads the folder and nothing else; raises
    StoreError for files that are damaged or of another schema."""
    outcomes, members = outcomes_of(observe([folder]), folder.plan())
    return attribute(outcomes, factors_of(folder, members))
