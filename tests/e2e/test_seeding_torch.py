"""Seeds, threads and refusals with the torch that vLLM brings, each in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from raytest.seeding import THREAD_VARIABLES, compare_audits, level_env

pytest.importorskip("torch", reason="torch comes with vLLM, which is not installed")


def in_a_fresh_process(code: str, **env: str) -> Any:
    inherited = {k: v for k, v in os.environ.items() if k not in THREAD_VARIABLES}
    source = f"import json\nfrom raytest.seeding import *\nfrom raytest import seeding\n{code}"
    done = subprocess.run(
        [sys.executable, "-c", source],
        env={**inherited, **env},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return json.loads(done.stdout)


def test_two_processes_with_one_seed_draw_the_same() -> None:
    code = """
seed_everything(42, level=1)
states = seeding.state_digests()
import random, numpy, torch
print(json.dumps([states, random.random(), numpy.random.rand(), torch.rand(1).item()]))
"""
    first, second = (in_a_fresh_process(code, **level_env(1)) for _ in range(2))
    assert "torch" in first[0]
    assert compare_audits({"rank 0": first[0], "rank 1": second[0]}) == []
    assert first == second


def test_the_audit_sees_a_draw_that_the_initial_seed_hides() -> None:
    code = """
import torch
seed_everything(42, level=1)
before = (torch.initial_seed(), seeding.state_digests())
torch.rand(1)
after = (torch.initial_seed(), seeding.state_digests())
print(json.dumps([before, after, torch.cuda.is_initialized()]))
"""
    (seed_before, before), (seed_after, after), cuda = in_a_fresh_process(code)
    assert seed_before == seed_after == 42
    assert {name for name in after if after[name] != before[name]} == {"torch"}
    assert cuda is False


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core: there is one thread anyway")
def test_threads_are_fixed_before_the_process_exists_and_not_later() -> None:
    code = "import torch\nprint(json.dumps(torch.get_num_threads()))"
    assert in_a_fresh_process(code, **level_env(2, threads=1)) == 1
    late = "import torch, os\nos.environ['OMP_NUM_THREADS'] = '1'\n" + code
    assert in_a_fresh_process(late, OMP_NUM_THREADS="2") == 2


def test_an_operation_that_torch_refuses_is_named() -> None:
    code = """
import torch
seed_everything(42, level=5)
try:
    torch.zeros(3).put_(torch.tensor([0, 0]), torch.ones(2))
except RuntimeError as error:
    print(json.dumps(nondeterministic_operation(str(error))))
"""
    operation, advice = in_a_fresh_process(code)
    assert operation == "put_"
    assert "warn_only" in advice
