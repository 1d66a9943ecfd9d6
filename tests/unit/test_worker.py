"""What the worker holds its engine to, without Ray or a real engine."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from raytest.engines.base import Completion, EngineConfig, Request, StepLog
from raytest.errors import CellError
from raytest.seeding import seed_everything, state_digests
from raytest.worker import Job, TrialJob, Worker

WHERE = {
    "run_id": "r",
    "cell_id": "c",
    "variant": "v",
    "tensor_parallel_size": 1,
    "pipeline_parallel_size": 1,
    "node_id": "n",
    "hostname": "h",
    "gpu_uuids": ["cpu:n:0"],
    "slot": "n:0",
    "launch": 0,
    "attempt": 0,
}


class FakeEngine:
    """Ranks in a process of their own: what they answer is ``states``."""

    def __init__(self, states: Mapping[str, str]) -> None:
        self.states = states

    def reset(self, seed: int) -> list[Mapping[str, str]]:
        random.random()  # asking the ranks draws in this process, as a message queue's ids do
        return [self.states]

    def generate(self, batches: Sequence[Sequence[Request]]) -> tuple[list[Completion], StepLog]:
        return [], StepLog()

    def vocabulary_size(self) -> int:
        return 10


def worker(level: int, states: Mapping[str, str]) -> Worker:
    config = EngineConfig(
        *("vllm", "m", "m", "bfloat16", None, 42, 1, 1, level, "strict", "cpu", ("cpu:n:0",), "uni")
    )
    made = Worker(Job(config, WHERE, {}, "n", ""))
    engine: Any = FakeEngine(states)
    made._engine = engine
    return made


def seeded(seed: int) -> dict[str, str]:
    seed_everything(seed, level=1)
    return state_digests()


TRIAL = TrialJob(0, 0, "batch", 42, ())


def test_what_asking_the_ranks_draws_here_is_not_held_against_them() -> None:
    """Seen with an engine process on a GPU: the audit was taken after the call to the ranks."""
    _, states = worker(1, seeded(42)).run_trial(TRIAL)
    assert states == seeded(42)


def test_a_rank_with_another_seed_is_named_with_the_generator() -> None:
    with pytest.raises(CellError, match=r"before trial 0: .*random.*rank 0"):
        worker(1, seeded(43)).run_trial(TRIAL)


def test_at_level_0_nothing_is_demanded_of_the_seeds() -> None:
    worker(0, seeded(43)).run_trial(TRIAL)
