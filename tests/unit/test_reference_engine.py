"""What changes the reference engine's rounding and what does not, and what each request gets."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import product as cartesian
from typing import Any

import numpy as np
import pytest

from raytest.digest import prompt_digest
from raytest.engines.base import Completion, EngineConfig, Request, Sampling
from raytest.engines.reference import ReferenceEngine
from raytest.errors import CellError

Outcome = Mapping[tuple[str, int], Completion]


@pytest.fixture(autouse=True)
def _no_threads_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("VLLM_BATCH_INVARIANT", raising=False)


def engine(tp: int = 1, pp: int = 1, dtype: str = "float32", **changed: Any) -> ReferenceEngine:
    values: dict[str, Any] = {
        "backend": "reference",
        "model_path": "none",
        "tokenizer_path": "none",
        "dtype": dtype,
        "max_model_len": 128,
        "seed": 0,
        "tensor_parallel_size": tp,
        "pipeline_parallel_size": pp,
        "level": 3,
        "profile": "strict",
        "device_kind": "cpu",
        "device_uuids": tuple(f"cpu:{i}" for i in range(tp * pp)),
        "executor": "uni",
        **changed,
    }
    started = ReferenceEngine(EngineConfig(**values))
    started.start()
    return started


def request(prompt: Sequence[int], index: int = 0, **sampling: Any) -> Request:
    values = {"max_tokens": 12, "seed": index, "ignore_eos": True, **sampling}
    ids = tuple(prompt)
    return Request(f"request-{index}", index, ids, prompt_digest(ids), Sampling(**values))


def workload(n: int = 12, **sampling: Any) -> list[Request]:
    rng = np.random.default_rng(7)
    lengths = rng.integers(3, 40, n)
    return [
        request([int(t) for t in rng.integers(3, 512, length)], i, **sampling)
        for i, length in enumerate(lengths)
    ]


def outcome(one: ReferenceEngine, *batches: Sequence[Request]) -> Outcome:
    completions, _ = one.generate(batches)
    found = {(c.request_id, c.sample_index): c for c in completions}
    assert len(found) == len(completions)
    return found


def same_tokens(a: Outcome, b: Outcome) -> int:
    assert a.keys() == b.keys()
    return sum(np.array_equal(a[k].token_ids, b[k].token_ids) for k in a)


def same_bits(a: Outcome, b: Outcome) -> int:
    assert a.keys() == b.keys()
    return sum(
        a[k].token_ids.tobytes() == b[k].token_ids.tobytes()
        and a[k].logprobs.tobytes() == b[k].logprobs.tobytes()
        and a[k].top_logprobs.tobytes() == b[k].top_logprobs.tobytes()
        for k in a
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_repeats_launches_and_pp_sizes_are_bitwise_equal(dtype: str) -> None:
    requests = workload()
    first = engine(dtype=dtype)
    reference = outcome(first, requests)
    first.reset(0)
    assert same_bits(reference, outcome(first, requests)) == 12
    assert same_bits(reference, outcome(engine(dtype=dtype), requests)) == 12
    assert same_bits(reference, outcome(engine(pp=2, dtype=dtype), requests)) == 12


def test_another_tp_size_changes_logprob_bits_and_hardly_a_token() -> None:
    requests = workload()
    one, two, four = (outcome(engine(tp), requests) for tp in (1, 2, 4))
    assert same_bits(one, two) == 0
    assert same_bits(two, four) == 0
    assert same_tokens(one, two) >= 11


def test_another_tp_size_in_bfloat16_flips_some_tokens_but_not_most() -> None:
    requests = workload(32)
    one, two = (outcome(engine(tp, dtype="bfloat16"), requests) for tp in (1, 2))
    assert 16 < same_tokens(one, two) < 32


def test_tp_and_pp_together_give_what_tp_alone_gives() -> None:
    requests = workload()
    assert same_bits(outcome(engine(2), requests), outcome(engine(2, 2), requests)) == 12


def test_the_thread_count_changes_logprob_bits() -> None:
    requests = workload()
    one = outcome(engine(env={"OMP_NUM_THREADS": "1"}), requests)
    two = outcome(engine(env={"OMP_NUM_THREADS": "2"}), requests)
    assert same_bits(one, two) == 0
    assert same_bits(one, outcome(engine(), requests)) == 12


def test_the_thread_count_of_the_process_counts_where_the_variant_names_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    requests = workload(4)
    asked = outcome(engine(env={"OMP_NUM_THREADS": "3"}), requests)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert same_bits(asked, outcome(engine(), requests)) == 4


def test_another_version_changes_logprob_bits_and_hardly_a_token() -> None:
    requests = workload()
    old = outcome(engine(), requests)
    new = outcome(engine(engine_args={"reference_version": "1.1"}), requests)
    assert same_bits(old, new) == 0
    assert same_tokens(old, new) >= 11


def test_batch_and_solo_differ_unless_batch_invariant() -> None:
    requests = workload()
    solo = [[r] for r in requests]
    assert same_bits(outcome(engine(), requests), outcome(engine(), *solo)) < 12
    for settings in (
        {"engine_args": {"batch_invariant": True}},
        {"env": {"VLLM_BATCH_INVARIANT": "1"}},
    ):
        one = engine(**settings)
        assert same_bits(outcome(one, requests), outcome(one, *solo)) == 12


def test_the_order_of_a_batch_changes_nothing() -> None:
    requests = workload(temperature=0.8)
    mixed = [requests[i] for i in np.random.default_rng(1).permutation(12)]
    straight = outcome(engine(), requests)
    assert same_bits(straight, outcome(engine(), requests[::-1])) == 12
    assert same_bits(straight, outcome(engine(), mixed)) == 12


def test_requests_beyond_max_num_seqs_wait_and_change_the_batches() -> None:
    requests = workload()
    wide, narrow = engine(), engine(engine_args={"max_num_seqs": 3})
    completions, log = narrow.generate([requests])
    assert log.batch_size == 3
    assert wide.generate([requests])[1].batch_size == 12
    assert all(len(c.token_ids) == 12 for c in completions)
    prompts = sum(len(r.prompt_token_ids) for r in requests)
    assert sum(log.tokens) == prompts + 12 * 11


def test_a_cached_prefix_is_used_counted_and_may_change_rounding_alone() -> None:
    shared = [int(t) for t in np.random.default_rng(3).integers(3, 512, 50)]
    requests = [request([*shared, 100 + i], i) for i in range(6)]
    cold = outcome(engine(), requests)
    caching = engine(engine_args={"enable_prefix_caching": True})
    warm = outcome(caching, requests)
    cached = [warm[(r.request_id, 0)].n_cached_tokens for r in requests]
    assert cached == [0, 48, 48, 48, 48, 48]
    assert same_tokens(cold, warm) == 6
    assert same_bits(cold, warm) < 6
    invariant = {"enable_prefix_caching": True, "batch_invariant": True}
    plain = outcome(engine(engine_args={"batch_invariant": True}), requests)
    assert same_bits(plain, outcome(engine(engine_args=invariant), requests)) == 6
    assert sum(caching.generate([requests])[1].tokens) == 6 * (51 - 48) + 6 * 11
    caching.reset(0)
    assert outcome(caching, requests[:1])[("request-0", 0)].n_cached_tokens == 0


def test_the_last_token_of_a_prompt_is_computed_even_where_all_of_it_is_cached() -> None:
    one = engine(engine_args={"enable_prefix_caching": True, "batch_invariant": True})
    whole_blocks = [request(range(3, 35))]
    first, second = outcome(one, whole_blocks), outcome(one, whole_blocks)
    assert second[("request-0", 0)].n_cached_tokens == 16
    assert same_bits(first, second) == 1


def test_one_bad_prompt_costs_no_other() -> None:
    good = workload(3)
    bad = [request([5, 512], 10), request([], 11), request([9] * 128, 12), request([4, -1], 13)]
    completions = outcome(engine(), [good[0], *bad, *good[1:]])
    assert [completions[(r.request_id, 0)].error for r in bad] == [
        "token id 512 is out of the vocabulary of 512",
        "the prompt has no tokens",
        "the prompt has 128 tokens; max_model_len is 128",
        "token id -1 is out of the vocabulary of 512",
    ]
    alone = outcome(engine(), good)
    assert same_bits(alone, {k: v for k, v in completions.items() if v.error is None}) == 3


def test_n_samples_are_the_single_samples_of_the_seeds_that_follow() -> None:
    prompt = [7, 8, 9, 10]
    invariant = {"batch_invariant": True}
    together = outcome(
        engine(engine_args=invariant), [request(prompt, n=3, temperature=1.0, seed=50)]
    )
    for i in range(3):
        alone = outcome(
            engine(engine_args=invariant), [request(prompt, temperature=1.0, seed=50 + i)]
        )
        both = together[("request-0", i)], alone[("request-0", 0)]
        assert both[0].token_ids.tobytes() == both[1].token_ids.tobytes()
    assert len({c.token_ids.tobytes() for c in together.values()}) == 3


def test_stop_and_end_of_sequence_tokens_end_a_completion() -> None:
    plain = outcome(engine(), [request([7, 8, 9])])[("request-0", 0)]
    assert (plain.finish_reason, plain.stop_reason, len(plain.token_ids)) == ("length", None, 12)
    tokens = plain.token_ids.tolist()
    fifth = tokens[4]
    end = tokens.index(fifth) + 1
    stopped = outcome(engine(), [request([7, 8, 9], stop_token_ids=(fifth,))])[("request-0", 0)]
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", str(fifth))
    assert stopped.token_ids.tolist() == tokens[:end]
    ending = engine(engine_args={"eos_token_id": fifth})
    ended = outcome(ending, [request([7, 8, 9], ignore_eos=False)])[("request-0", 0)]
    assert (ended.finish_reason, ended.stop_reason) == ("stop", None)
    assert ended.token_ids.tolist() == tokens[:end]
    assert outcome(ending, [request([7, 8, 9])])[("request-0", 0)].token_ids.tolist() == tokens


def test_a_completion_ends_at_max_model_len() -> None:
    one = outcome(engine(max_model_len=20), [request([5] * 15)])[("request-0", 0)]
    assert (len(one.token_ids), one.finish_reason) == (5, "length")


def test_logprobs_are_kept_as_asked() -> None:
    kinds = {k: outcome(engine(), [request([7, 8], logprobs=k)]) for k in (None, 0, 3, 600)}
    none, sampled, three, all_of_them = (kinds[k][("request-0", 0)] for k in (None, 0, 3, 600))
    assert (len(none.logprobs), none.top_k, none.cumulative_logprob) == (0, 0, None)
    assert (len(sampled.logprobs), len(sampled.top_logprobs)) == (12, 0)
    top = three.top_logprobs.reshape(12, 3)
    assert (np.diff(top, axis=1) <= 0).all()
    np.testing.assert_array_equal(top[:, 0], three.logprobs)
    np.testing.assert_array_equal(three.top_token_ids.reshape(12, 3)[:, 0], three.token_ids)
    whole = np.exp(all_of_them.top_logprobs.reshape(12, 512).astype(np.float64)).sum(axis=1)
    np.testing.assert_allclose(whole, 1.0, atol=1e-5)
    np.testing.assert_array_equal(all_of_them.top_logprobs.reshape(12, 512)[:, :3], top)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_scores_are_the_logprobs_that_generation_gave_in_the_same_batch(temperature: float) -> None:
    requests = workload(temperature=temperature)
    one = engine()
    generated = outcome(one, requests)
    given = [generated[(r.request_id, 0)].token_ids.tolist() for r in requests]
    one.reset(0)
    scored = {(c.request_id, c.sample_index): c for c in one.score(requests, given)}
    assert same_bits(generated, scored) == 12


def test_a_score_of_other_tokens_is_about_those_tokens() -> None:
    asked = request([7, 8, 9], max_tokens=1)
    scored = engine().score([asked], [[11, 12, 13]])[0]
    assert scored.token_ids.tolist() == [11, 12, 13]
    first = outcome(engine(), [request([7, 8, 9], logprobs=512)])[("request-0", 0)]
    of_eleven = first.top_logprobs[:512][first.top_token_ids[:512] == 11]
    assert scored.logprobs[0] == of_eleven[0]
    assert engine().score([asked], [[11, 512]])[0].error == (
        "completion: token id 512 is out of the vocabulary of 512"
    )


@pytest.mark.parametrize("length_penalty", [0.0, 1.0, 2.5])
def test_a_wide_beam_search_finds_what_trying_every_completion_finds(length_penalty: float) -> None:
    arguments = {"vocab_size": 6, "eos_token_id": 2, "batch_invariant": True}
    one = engine(engine_args=arguments)
    prompt, length = [3, 4, 5, 1], 3
    every = [
        tokens
        for n in range(1, length + 1)
        for tokens in cartesian(range(6), repeat=n)
        if 2 not in tokens[:-1] and (n == length or tokens[-1] == 2)
    ]
    scored = one.score([request(prompt, i, logprobs=0) for i in range(len(every))], every)

    def rank(c: Completion) -> float:
        ends = int(c.token_ids[-1]) == 2
        total = math.fsum(c.logprobs.astype(np.float64))
        return total / (len(prompt) + len(c.token_ids) - ends) ** length_penalty

    best = sorted(scored, key=rank, reverse=True)[:20]
    asked = request(
        prompt,
        beam_width=200,
        length_penalty=length_penalty,
        max_tokens=length,
        ignore_eos=False,
    )
    found = outcome(one, [asked])
    assert [found[("request-0", i)].token_ids.tolist() for i in range(20)] == [
        c.token_ids.tolist() for c in best
    ]


def test_a_beam_of_one_is_greedy() -> None:
    greedy = outcome(engine(), [request([7, 8, 9])])[("request-0", 0)]
    beam = outcome(engine(), [request([7, 8, 9], beam_width=1)])[("request-0", 0)]
    assert beam.token_ids.tolist() == greedy.token_ids.tolist()
    assert beam.cumulative_logprob == pytest.approx(greedy.cumulative_logprob, abs=1e-4)


def test_the_seed_audit_names_each_rank_and_follows_the_seed() -> None:
    one = engine(2, 2)
    audit = one.reset(5)
    assert len(audit) == 4
    assert set(audit[0]) == {"reference.random", "reference.numpy"}
    assert all(rank == audit[0] for rank in audit)
    assert one.reset(6)[0] != audit[0]
    assert one.reset(5) == audit


def test_fingerprints_hold_each_rank_and_no_secret() -> None:
    one = engine(2, env={"OMP_NUM_THREADS": "2", "HF_TOKEN": "hf_abc", "NCCL_ALGO": "Ring"})
    first, second = one.rank_fingerprints()
    assert first["env.OMP_NUM_THREADS"] == first["reference.threads"] == "2"
    assert first["engine.tensor_parallel_size"] == "2"
    assert first["reference.version"] == "1.0"
    assert (first["device.uuid"], second["device.uuid"]) == ("cpu:0", "cpu:1")
    assert first["env.NCCL_ALGO"] == "Ring"
    assert "hf_abc" not in str(first)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"tp": 3}, "tensor_parallel_size 3 does not divide num_attention_heads 4"),
        ({"pp": 3}, "pipeline_parallel_size 3 is more than num_hidden_layers 2"),
        ({"dtype": "int8"}, "dtype: expected one of auto, float32"),
        ({"engine_args": {"max_num_seq": 3}}, "did you mean 'max_num_seqs'"),
        ({"engine_args": {"layers": 3}}, "did you mean 'num_hidden_layers'"),
        ({"engine_args": {"vocab_size": "many"}}, "vocab_size: expected int, found 'many'"),
        ({"engine_args": {"block_size": 0}}, "block_size: expected 1 or more, found 0"),
        ({"engine_args": {"hidden_size": 20}}, "hidden_size 20 cannot be cut into 4"),
        ({"engine_args": {"reference_version": "2"}}, "expected one of 1.0, 1.1, found '2'"),
        ({"env": {"OMP_NUM_THREADS": "some"}}, "OMP_NUM_THREADS: expected a number of threads"),
    ],
)
def test_an_impossible_configuration_is_named(changed: dict[str, Any], words: str) -> None:
    with pytest.raises(CellError, match=words.replace("(", r"\(")):
        engine(**changed)


def test_an_engine_that_was_closed_says_so() -> None:
    one = engine()
    one.close()
    with pytest.raises(CellError, match="not been started, or is closed"):
        one.generate([[request([5])]])
