"""What the worker holds its engine to, without Ray or a real engine."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from raytest.engines.base import Completion, EngineConfig, Request, StepLog
from raytest.engines.vllm import engine_failure
from raytest.errors import CellError
from raytest.seeding import seed_everything, state_digests
from raytest.worker import Job, TrialJob, Worker, check_environment, rewritten

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
    _, audits = worker(1, seeded(42)).run_trial(TRIAL)
    assert audits == {"actor": seeded(42), "rank 0": seeded(42)}


def test_a_rank_with_another_seed_is_named_with_the_generator() -> None:
    with pytest.raises(CellError, match=r"before trial 0: .*random.*rank 0"):
        worker(1, seeded(43)).run_trial(TRIAL)


def test_at_level_0_nothing_is_demanded_of_the_seeds() -> None:
    worker(0, seeded(43)).run_trial(TRIAL)


def test_a_variable_that_did_not_reach_a_process_is_named_with_it() -> None:
    with pytest.raises(CellError, match="X is unset in rank 1, the spec demands '1'"):
        check_environment({"X": "1"}, {}, "rank 1")
    with pytest.raises(CellError, match=r"OMP_NUM_THREADS is '4' in the actor, .* demands '1'"):
        check_environment({"OMP_NUM_THREADS": "1"}, {"OMP_NUM_THREADS": "4"}, "the actor")
    check_environment({"X": "1"}, {"X": "1"}, "rank 1")


def test_what_batch_invariance_rewrites_in_a_rank_is_no_error_there_but_is_recorded() -> None:
    mode = {"VLLM_BATCH_INVARIANT": "1"}
    wanted, seen = {**mode, "NCCL_ALGO": "Ring"}, {**mode, "NCCL_ALGO": "allreduce:tree"}
    check_environment(wanted, seen, "rank 0")
    assert rewritten(wanted, seen) == {"NCCL_ALGO": "Ring -> allreduce:tree"}
    with pytest.raises(CellError, match="NCCL_ALGO is 'allreduce:tree' in the actor"):
        check_environment(wanted, seen, "the actor")
    with pytest.raises(CellError, match="NCCL_ALGO is unset in rank 0"):
        check_environment(wanted, mode, "rank 0")


@pytest.mark.parametrize("name", ["NCCL_ALGO", "OMP_NUM_THREADS", "CUBLAS_WORKSPACE_CONFIG"])
def test_without_batch_invariance_no_rank_may_have_another_value(name: str) -> None:
    with pytest.raises(CellError, match=f"{name} is 'b' in rank 1, the spec demands 'a'"):
        check_environment({name: "a"}, {name: "b"}, "rank 1")


def test_an_operation_without_a_deterministic_form_is_named_with_layer_and_way_out() -> None:
    error = RuntimeError(
        "cumsum_cuda_kernel does not have a deterministic implementation, but you set "
        "'torch.use_deterministic_algorithms(True)'.\nYou can turn off determinism just for this. "
        "[in module model.layers.3.mlp]"
    )
    said = str(engine_failure(error))
    assert "cumsum_cuda_kernel" in said
    assert "model.layers.3.mlp" in said
    assert "level 4" in said
