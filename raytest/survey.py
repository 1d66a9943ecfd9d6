"""Facts of every node of a cluster, asked on the node itself, for doctor, lock and fingerprint."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime

from raytest import cluster
from raytest.spec import Cluster, Spec

SURVEY_TIMEOUT_S = 120.0


def survey(address: str, spec: Spec | None, paths: tuple[str, ...]) -> dict[str, dict[str, str]]:
    """Facts by node name. ``paths`` (results, a model folder) are looked at on each node.

    Raises UnavailableError where there is no cluster or a node does not answer.
    """
    nodes = Cluster() if spec is None else spec.cluster
    with cluster.connect(address, nodes):
        inventory = cluster.take_inventory()
        names = {n.node_id: n.name for n in inventory.nodes}
        asked = datetime.now(UTC)
        facts = cluster.run_on_nodes(list(names), _facts_here, SURVEY_TIMEOUT_S, paths)
        answered = datetime.now(UTC)
    for found in facts.values():
        found["process.clock_skew"] = _least_skew(found, asked, answered)
    return {names[node_id]: found for node_id, found in facts.items()}


def _least_skew(facts: Mapping[str, str], asked: datetime, answered: datetime) -> str:
    """By how many seconds, at least, a node's clock is ahead of ours: what it dated outside of the
    time between question and answer."""
    at = datetime.fromisoformat(facts["process.captured_at"])
    nearest = min(max(at, asked), answered)
    return f"{(at - nearest).total_seconds():.3f}"


def model_facts(address: str, spec: Spec, path: str) -> Mapping[str, dict[str, str]]:
    """Hashes of the model's files by node name: the same path need not hold the same bytes."""
    from raytest.fingerprint.model import model_fingerprint

    with cluster.connect(address, spec.cluster):
        inventory = cluster.take_inventory()
        names = {n.node_id: n.name for n in inventory.nodes}
        found = cluster.run_on_nodes(list(names), model_fingerprint, 1800.0, path)
    return {names[node_id]: facts for node_id, facts in found.items()}


def _facts_here(paths: tuple[str, ...]) -> dict[str, str]:
    from raytest.fingerprint.capture import capture
    from raytest.fingerprint.host import path_facts

    facts = capture("node", all_gpus=True)
    return {**facts, **path_facts(paths)}
