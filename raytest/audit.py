"""What an engine's processes told of themselves, in the short form that events keep: enough to see
that two engines differ without opening a fingerprint."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from raytest.digest import json_digest
from raytest.engines.base import EngineConfig

Record = tuple[int, str, dict[str, str]]
"""Rank (-1: the actor), stage, facts."""

ENGINE_PREFIX = "effective."
# Differs between the ranks of one engine, and says where a process is rather than what it runs.
_PLACE = "effective.rank"
_SEED_PREFIX = "seed."
_REWRITTEN_PREFIX = "rewritten."


def is_engine_setting(key: str) -> bool:
    """Whether a fact is a setting that vLLM really runs with, derived from the machine or told."""
    return key.startswith(ENGINE_PREFIX) and key != _PLACE


def started_facts(records: Sequence[Record], config: EngineConfig) -> dict[str, Any]:
    """Fields of the event ``started``: a digest over every rank's effective settings, the seed
    audit from before the model was loaded, and variables that vLLM set anew in its ranks."""
    settings = {
        str(rank): {k: v for k, v in facts.items() if is_engine_setting(k)}
        for rank, stage, facts in records
        if stage == "loaded"
    }
    return {
        "executor": config.executor,
        "level": config.level,
        "profile": config.profile,
        "engine": json_digest("engine", settings),
        "seed_states": {
            process_name(rank): states
            for rank, stage, facts in records
            if stage == "before load" and (states := _without(_SEED_PREFIX, facts))
        },
        "rewritten": {
            name: change
            for _, _, facts in records
            for name, change in _without(_REWRITTEN_PREFIX, facts).items()
        },
    }


def process_name(rank: int) -> str:
    """A process of an engine, as people name it."""
    return "actor" if rank < 0 else f"rank {rank}"


def _without(prefix: str, facts: dict[str, str]) -> dict[str, str]:
    return {k.removeprefix(prefix): v for k, v in facts.items() if k.startswith(prefix)}
