"""Each planted fault does what its table says, where it says, and nothing before that place."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raytest.digest import prompt_digest
from raytest.engines.base import Completion, EngineConfig, Request, Sampling
from raytest.engines.reference import ReferenceEngine
from raytest.engines.reference_faults import FAULT_KINDS
from raytest.engines.reference_trace import ModuleTrace
from raytest.errors import CellError

HEALTHY_TOKENS = [31, 5, 77, 120]


@pytest.fixture(autouse=True)
def _no_threads_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("VLLM_BATCH_INVARIANT", raising=False)


def config(
    fault: Mapping[str, Any] | None, tp: int = 2, pp: int = 1, **changed: Any
) -> EngineConfig:
    values: dict[str, Any] = {
        "backend": "reference",
        "model_path": "none",
        "tokenizer_path": "none",
        "dtype": "float32",
        "max_model_len": 128,
        "seed": 0,
        "tensor_parallel_size": tp,
        "pipeline_parallel_size": pp,
        "level": 3,
        "profile": "strict",
        "device_kind": "cpu",
        "device_uuids": tuple(f"cpu:{i}" for i in range(tp * pp)),
        "executor": "uni",
        "env": {"OMP_NUM_THREADS": "1"},
        "fault": fault,
        **changed,
    }
    return EngineConfig(**values)


def engine(fault: Mapping[str, Any] | None, **changed: Any) -> ReferenceEngine:
    one = ReferenceEngine(config(fault, **changed))
    one.start()
    return one


def workload(n: int = 6, **sampling: Any) -> list[Request]:
    rng = np.random.default_rng(11)
    requests = []
    for i in range(n):
        ids = tuple(int(t) for t in rng.integers(3, 512, 20))
        asked = Sampling(**{"max_tokens": 10, "seed": 3 * i, "ignore_eos": True, **sampling})
        requests.append(Request(f"request-{i}", i, ids, prompt_digest(ids), asked))
    return requests


def run(one: ReferenceEngine, requests: Sequence[Request]) -> list[Completion]:
    completions, _ = one.generate([requests])
    return sorted(completions, key=lambda c: c.request_id)


def bits(completions: Sequence[Completion]) -> list[bytes]:
    return [c.token_ids.tobytes() + c.logprobs.tobytes() for c in completions]


CHANGING: list[dict[str, Any]] = [
    {"kind": "weight_bit_flip", "rank": 1, "layer": 1, "module": "mlp.down_proj"},
    {"kind": "weight_bit_flip", "module": "norm", "bit": 22, "index": 3},
    {"kind": "weight_bits", "rank": 1, "index": 40, "value": 3},
    {"kind": "activation_stripe", "rank": 1, "layer": 1},
    {"kind": "activation_stripe", "every": 4},
    {"kind": "stuck_accumulator", "rank": 1, "module": "self_attn.o_proj", "index": 5},
    {"kind": "allreduce_drop", "rank": 1},
    {"kind": "allreduce_double", "rank": 0, "layer": 1},
    {"kind": "stale_kv_block", "rank": 1, "layer": 1, "index": 1},
    {"kind": "nan_row", "rank": 0, "index": 2},
    {"kind": "other_dtype"},
    {"kind": "other_tokenizer"},
    {"kind": "chat_template", "value": [1, 2]},
    {"kind": "generation_config", "temperature": 1.5},
    {"kind": "swapped_outputs"},
    {"kind": "truncated_output", "index": 3},
    {"kind": "env_unset", "rank": 1},
    {"kind": "reordered_reduction", "rank": 1},
]
SILENT = ("wrong_seed", "slow", "hang_on_start", "die_on_start", "die_in_trial", "out_of_memory")


@pytest.mark.parametrize("fault", CHANGING, ids=lambda f: f"{f['kind']}-{len(f)}")
def test_a_planted_fault_changes_results_and_a_benign_one_hardly_a_token(
    fault: dict[str, Any],
) -> None:
    requests = workload()
    healthy, faulty = run(engine(None), requests), run(engine(fault), requests)
    assert bits(healthy) != bits(faulty)
    if FAULT_KINDS[fault["kind"]].benign:
        pairs = zip(healthy, faulty, strict=True)
        assert sum(np.array_equal(a.token_ids, b.token_ids) for a, b in pairs) >= 5


def test_every_kind_of_fault_is_tried_here() -> None:
    assert {f["kind"] for f in CHANGING} | set(SILENT) == set(FAULT_KINDS)


@pytest.mark.parametrize("fault", CHANGING, ids=lambda f: f"{f['kind']}-{len(f)}")
def test_a_fault_repeats_itself_on_a_new_engine(fault: dict[str, Any]) -> None:
    requests = workload(4)
    assert bits(run(engine(fault), requests)) == bits(run(engine(fault), requests))


def traces(fault: Mapping[str, Any] | None, **changed: Any) -> dict[tuple[str, int], ModuleTrace]:
    one = engine(fault, **changed)
    return {(t.name, t.rank): t for t in one.trace(workload(1)[0], HEALTHY_TOKENS)}


def first_difference(fault: Mapping[str, Any], **changed: Any) -> tuple[str, int]:
    healthy, faulty = traces(None, **changed), traces(fault, **changed)
    assert list(healthy) == list(faulty)
    return next(k for k in healthy if healthy[k].output_digest != faulty[k].output_digest)


@pytest.mark.parametrize(
    ("fault", "module", "rank"),
    [
        (
            {"kind": "weight_bit_flip", "rank": 1, "module": "layers.1.self_attn.qkv_proj"},
            "layers.1.self_attn.qkv_proj",
            1,
        ),
        ({"kind": "weight_bit_flip", "rank": 0, "module": "norm"}, "norm", 0),
        ({"kind": "weight_bit_flip", "rank": 1, "module": "lm_head"}, "lm_head", 1),
        ({"kind": "weight_bits", "rank": 1, "layer": 1}, "layers.1.mlp.down_proj", 0),
        (
            {"kind": "activation_stripe", "rank": 1, "module": "mlp.act_fn"},
            "layers.0.mlp.act_fn",
            1,
        ),
        (
            {"kind": "stuck_accumulator", "rank": 1, "module": "mlp.gate_up_proj"},
            "layers.0.mlp.gate_up_proj",
            1,
        ),
        (
            {"kind": "allreduce_drop", "rank": 1, "module": "self_attn.o_proj"},
            "layers.0.self_attn.o_proj",
            0,
        ),
        ({"kind": "allreduce_double", "rank": 1, "layer": 1}, "layers.1.mlp.down_proj", 0),
        ({"kind": "stale_kv_block", "rank": 1, "layer": 1}, "layers.1.self_attn.attn", 1),
        (
            {"kind": "nan_row", "rank": 1, "module": "input_layernorm", "layer": 1},
            "layers.1.input_layernorm",
            1,
        ),
    ],
)
def test_a_fault_shows_first_at_its_module_and_rank(
    fault: dict[str, Any], module: str, rank: int
) -> None:
    assert first_difference(fault) == (module, rank)


def test_a_fault_on_a_later_stage_has_that_stage_s_rank() -> None:
    fault = {"kind": "activation_stripe", "rank": 3}
    assert first_difference(fault, tp=2, pp=2) == ("layers.1.mlp.down_proj", 3)


def test_replicated_outputs_are_equal_on_all_ranks_unless_one_is_at_fault() -> None:
    def unequal(found: dict[tuple[str, int], ModuleTrace]) -> list[str]:
        return [
            name
            for (name, rank), t in found.items()
            if rank == 0 and t.replicated and t.output_digest != found[(name, 1)].output_digest
        ]

    assert unequal(traces(None)) == []
    fault = {"kind": "activation_stripe", "rank": 1, "module": "input_layernorm", "layer": 1}
    assert unequal(traces(fault))[0] == "layers.1.input_layernorm"


def test_tp_sizes_first_differ_at_the_first_all_reduce() -> None:
    one, two = traces(None, tp=1), traces(None, tp=2)
    shared = [k for k, t in one.items() if t.replicated]
    differing = [k for k in shared if one[k].output_digest != two[k].output_digest]
    assert differing[0] == ("layers.0.self_attn.o_proj", 0)
    assert ("embed_tokens", 0) not in differing
    assert ("layers.0.input_layernorm", 0) not in differing


def test_a_trace_holds_each_position_and_the_tensors_asked_for() -> None:
    one = engine(None)
    found = one.trace(workload(1)[0], HEALTHY_TOKENS, modules=["norm"])
    assert [t.name for t in found if t.rank == 0] == list(one.module_names())
    norm = next(t for t in found if t.name == "norm")
    assert norm.positions == tuple(range(20 + len(HEALTHY_TOKENS) - 1))
    assert norm.outputs is not None
    assert norm.outputs.shape == (23, 64)
    assert len(norm.output_digests) == 23
    assert all(t.outputs is None for t in found if t.name != "norm")
    head = next(t for t in found if t.name == "lm_head")
    assert head.positions == (19, 20, 21, 22)
    with pytest.raises(CellError, match="no module 'head'"):
        one.trace(workload(1)[0], HEALTHY_TOKENS, modules=["head"])


def test_a_batch_differs_from_solo_from_the_first_decoded_position_on() -> None:
    requests = workload(5)
    one = engine(None, tp=1)
    solo = one.trace(requests[0], HEALTHY_TOKENS)
    batch = one.trace(
        requests[0], HEALTHY_TOKENS, companions=[(r, HEALTHY_TOKENS) for r in requests[1:]]
    )
    differing = [
        (a.name, next(p for p, x, y in zip(a.positions, *digests, strict=True) if x != y))
        for a, b in zip(solo, batch, strict=True)
        if (digests := (a.output_digests, b.output_digests))[0] != digests[1]
    ]
    assert differing[0] == ("layers.0.self_attn.qkv_proj", 20)
    assert min(position for _, position in differing) == 20


def test_a_stale_block_holds_what_was_there_before_and_zeros_after_a_reset() -> None:
    one = engine({"kind": "stale_kv_block", "index": 0, "request": 0})
    mine, other = workload(2)
    empty = bits(run(one, [mine]))
    one.reset(0)
    run(one, [other])
    assert bits(run(one, [mine])) != empty
    one.reset(0)
    assert bits(run(one, [mine])) == empty


def test_nan_in_one_request_stays_in_that_request() -> None:
    requests = workload()
    # one in a longer table: the others are padded to it, and must not read a block with NaN
    longer = requests[5].prompt_token_ids * 3
    requests[5] = replace(requests[5], prompt_token_ids=longer)
    fault = {"kind": "nan_row", "request": 0, "layer": 0}
    healthy, faulty = run(engine(None), requests), run(engine(fault), requests)
    assert np.isnan(faulty[0].logprobs).all()
    others = [1, 2, 3, 4, 5]
    assert [bits(healthy)[i] for i in others] == [bits(faulty)[i] for i in others]


def test_a_fault_in_one_step_of_n_spares_the_steps_before_it() -> None:
    requests = workload()
    healthy = run(engine(None), requests)
    faulty = run(engine({"kind": "activation_stripe", "step": 4, "every": 0}), requests)
    for a, b in zip(healthy, faulty, strict=True):
        assert a.logprobs[:4].tobytes() == b.logprobs[:4].tobytes()
        assert a.logprobs[4] != b.logprobs[4]


def test_swapped_outputs_are_each_other_s() -> None:
    requests = workload()
    healthy = bits(run(engine(None), requests))
    swapped = bits(run(engine({"kind": "swapped_outputs", "index": 1, "value": 4}), requests))
    healthy[1], healthy[4] = healthy[4], healthy[1]
    assert swapped == healthy


def test_a_truncated_output_is_a_prefix_with_the_old_finish_reason() -> None:
    requests = workload()
    healthy = run(engine(None), requests)
    cut = run(engine({"kind": "truncated_output", "index": 3, "value": 4}), requests)
    assert cut[3].token_ids.tolist() == healthy[3].token_ids[:4].tolist()
    assert (cut[3].finish_reason, len(cut[3].top_logprobs)) == ("length", 20)


def test_a_wrong_seed_shows_in_the_audit_and_in_sampled_tokens_alone() -> None:
    wrong = engine({"kind": "wrong_seed"})
    audit = wrong.reset(5)
    assert audit[0] != audit[1]
    assert audit[1] == engine(None).reset(5)[1]
    greedy, sampled = workload(), workload(temperature=1.0)
    assert bits(run(wrong, greedy)) == bits(run(engine(None), greedy))
    assert bits(run(wrong, sampled)) != bits(run(engine(None), sampled))


@pytest.mark.parametrize(
    ("fault", "key"),
    [
        ({"kind": "env_unset", "rank": 1}, "env.OMP_NUM_THREADS"),
        ({"kind": "other_dtype"}, "engine.dtype"),
        ({"kind": "other_tokenizer"}, "tokenizer.digest"),
        ({"kind": "chat_template"}, "chat_template.digest"),
        ({"kind": "generation_config"}, "generation_config.digest"),
    ],
)
def test_a_changed_environment_shows_in_the_fingerprint(fault: dict[str, Any], key: str) -> None:
    healthy, changed = engine(None).rank_fingerprints(), engine(fault).rank_fingerprints()
    assert healthy[1].get(key) != changed[1].get(key)
    assert (healthy[0] == changed[0]) == (fault.get("rank") == 1)


def test_a_planted_weight_fault_leaves_no_mark_in_the_fingerprint() -> None:
    fault = {"kind": "weight_bit_flip"}
    assert engine(None).rank_fingerprints() == engine(fault).rank_fingerprints()


def test_a_fault_of_a_device_or_an_environment_leaves_others_healthy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    requests = workload(3)
    healthy = bits(run(engine(None), requests))
    of_device = {"kind": "allreduce_drop", "device": "GPU-b"}
    assert bits(run(engine(of_device, device_uuids=("GPU-a", "GPU-c")), requests)) == healthy
    hit = bits(run(engine(of_device, device_uuids=("GPU-a", "GPU-b")), requests))
    assert hit == bits(run(engine({"kind": "allreduce_drop", "rank": 1}), requests))
    of_node = {"kind": "allreduce_drop", "when_env": {"NODE": "bad"}}
    assert bits(run(engine(of_node), requests)) == healthy
    monkeypatch.setenv("NODE", "bad")
    assert bits(run(engine(of_node), requests)) != healthy


def test_running_out_of_memory_is_an_error_of_the_cell() -> None:
    with pytest.raises(CellError, match="out of memory: rank 1"):
        engine({"kind": "out_of_memory", "rank": 1})


def test_a_fault_with_once_happens_once(tmp_path: Path) -> None:
    fault = {"kind": "out_of_memory", "once": str(tmp_path / "happened")}
    with pytest.raises(CellError, match="out of memory"):
        engine(fault)
    assert len(run(engine(fault), workload(1))) == 1


def in_a_process(fault: dict[str, Any], seconds: float) -> int:
    """Exit code of a process that starts the engine and runs a trial; 99 if it survives."""
    program = (
        f"import sys, runpy; m = runpy.run_path({__file__!r}); "
        f"m['run'](m['engine']({fault!r}), m['workload'](1)); sys.exit(99)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run(
        [sys.executable, "-c", program], timeout=seconds, env=environment, check=False
    ).returncode


@pytest.mark.parametrize(
    ("fault", "code"),
    [
        ({"kind": "die_on_start", "value": 7}, 7),
        ({"kind": "die_on_start", "value": "kill"}, -signal.SIGKILL),
        ({"kind": "die_in_trial", "step": 2, "value": 9}, 9),
        ({"kind": "die_in_trial", "step": 50}, 99),
    ],
)
def test_a_death_is_the_end_of_the_process(fault: dict[str, Any], code: int) -> None:
    assert in_a_process(fault, 50) == code


def test_a_hang_sleeps_again_whenever_it_wakes(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []

    def sleep(seconds: float) -> None:
        waited.append(seconds)
        if len(waited) == 3:
            raise InterruptedError

    monkeypatch.setattr("raytest.engines.reference.time.sleep", sleep)
    with pytest.raises(InterruptedError):
        engine({"kind": "hang_on_start"})
    assert waited == [3600.0] * 3


def test_a_slow_engine_waits_in_each_step_and_changes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waited: list[float] = []
    monkeypatch.setattr("raytest.engines.reference.time.sleep", waited.append)
    requests = workload(2)
    slow = run(engine({"kind": "slow", "value": 0.5}), requests)
    assert waited == [0.5] * 10
    assert bits(slow) == bits(run(engine(None), requests))


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ({"kind": "weight_bitflip"}, "did you mean 'weight_bit_flip'"),
        ({}, "fault.kind: None is no kind of fault"),
        ({"kind": "slow", "rank": 1}, "fault.rank: slow takes no such parameter"),
        ({"kind": "nan_row", "rank": 2}, "fault.rank: 2, but the last rank is 1"),
        ({"kind": "nan_row", "layer": 9}, "fault.layer: 9, but the last is 1"),
        ({"kind": "nan_row", "module": "mlp.down"}, "did you mean 'mlp.down_proj'"),
        ({"kind": "nan_row", "index": "first"}, "fault.index: expected int, found 'first'"),
        ({"kind": "allreduce_drop", "module": "norm"}, "norm has no all-reduce"),
        ({"kind": "stuck_accumulator", "module": "norm"}, "norm is no matrix product"),
        ({"kind": "weight_bit_flip", "module": "mlp.act_fn"}, "has no weights"),
        ({"kind": "weight_bit_flip", "bit": 32}, "fault.bit: 32, but float32 has 32 bits"),
        ({"kind": "weight_bit_flip", "index": 99999}, "but the shard has 4096"),
        ({"kind": "other_dtype", "value": "int4"}, "dtype: expected one of"),
    ],
)
def test_a_fault_that_cannot_be_planted_is_refused(fault: dict[str, Any], words: str) -> None:
    with pytest.raises(CellError, match=words):
        engine(fault)


def test_nan_does_not_outlive_its_request_in_the_cache() -> None:
    broken, later = workload(2)
    one = engine({"kind": "nan_row", "request": 0, "layer": 0})
    assert np.isnan(run(one, [broken])[0].logprobs).all()
    assert bits(run(one, [later])) == bits(run(engine(None), [later]))
