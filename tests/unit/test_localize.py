"""The first module that differs is named, and no other: planted faults, TP, PP, batches, steps."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from raytest.digest import prompt_digest
from raytest.engines.base import Completion, EngineConfig, Request, Sampling
from raytest.engines.reference import ReferenceEngine
from raytest.engines.reference_weights import PRODUCTS, ROW_PARALLEL, ModelShape, base_name
from raytest.engines.row_digest import multipliers, row_digests, slice_columns
from raytest.engines.trace import Layout, Part, Trace, TraceJob
from raytest.explain.growth import reduction_holds, rounded, ulps
from raytest.explain.localize import Finding, Localization, localize, rows_to_keep
from raytest.explain.traces import compare_traces

SMALL = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "vocab_size": 64,
}


@pytest.fixture(autouse=True)
def _no_threads_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("VLLM_BATCH_INVARIANT", raising=False)


def engine(
    tp: int = 1, pp: int = 1, fault: Mapping[str, Any] | None = None, **changed: Any
) -> ReferenceEngine:
    values: dict[str, Any] = {
        "backend": "reference",
        "model_path": "none",
        "tokenizer_path": "none",
        "dtype": "bfloat16",
        "max_model_len": 64,
        "seed": 0,
        "tensor_parallel_size": tp,
        "pipeline_parallel_size": pp,
        "level": 3,
        "profile": "strict",
        "device_kind": "cpu",
        "device_uuids": tuple(f"cpu:{i}" for i in range(tp * pp)),
        "executor": "uni",
        "engine_args": SMALL,
        "fault": fault,
        **changed,
    }
    one = ReferenceEngine(EngineConfig(**values))
    one.start()
    return one


def workload(n: int = 2, n_prompt: int = 6, max_tokens: int = 4) -> tuple[Request, ...]:
    rng = np.random.default_rng(5)
    requests = []
    for i in range(n):
        ids = tuple(int(t) for t in rng.integers(3, 64, n_prompt + i))
        asked = Sampling(max_tokens=max_tokens, seed=i, ignore_eos=True)
        requests.append(Request(f"request-{i}", i, ids, prompt_digest(ids), asked))
    return tuple(requests)


def bits(completion: Completion) -> bytes:
    return b"".join(
        a.tobytes() for a in (completion.token_ids, completion.logprobs, completion.top_logprobs)
    )


def common_tokens(request: Request, a: Completion, b: Completion) -> tuple[int, ...]:
    """Prompt and completion as far as the sides agree; the last token of all is not run."""
    different = np.flatnonzero(a.token_ids != b.token_ids)
    end = int(different[0]) if len(different) else len(a.token_ids)
    return (*request.prompt_token_ids, *(int(t) for t in a.token_ids[:end]))


def job(
    request: Request, tokens: Sequence[int], batch: Sequence[Request] | None = None
) -> TraceJob:
    return TraceJob((tuple(batch or workload()),), request.request_id, tuple(tokens), 0)


def run(one: ReferenceEngine) -> dict[str, Completion]:
    one.reset(0)
    return {c.request_id: c for c in one.generate([workload()])[0]}


def random_fault(rng: random.Random, tp: int, pp: int, modules: Sequence[str]) -> dict[str, Any]:
    kind = rng.choice(
        ["activation_stripe", "weight_bit_flip", "weight_bits", "nan_row", "stuck_accumulator",
         "allreduce_drop", "allreduce_double", "stale_kv_block"]
    )  # fmt: skip
    able = {
        "stuck_accumulator": PRODUCTS,
        "allreduce_drop": ROW_PARALLEL,
        "allreduce_double": ROW_PARALLEL,
        "stale_kv_block": ("self_attn.attn",),
    }
    weightless = ("self_attn.attn", "mlp.act_fn")
    fitting = [
        m
        for m in modules
        if base_name(m) in able.get(kind, (base_name(m),))
        and not (kind.startswith("weight") and base_name(m) in weightless)
    ]
    module = rng.choice(fitting)
    stage = ModelShape(layers=2, pipeline_parallel_size=pp).stage(module)
    fault: dict[str, Any] = {"kind": kind, "rank": stage * tp + rng.randrange(tp)}
    if kind == "stale_kv_block":
        fault["layer"] = int(module.split(".")[1])
    else:
        fault["module"] = module
    if not kind.startswith("weight"):
        fault["step"] = rng.randrange(4)
    if kind in ("weight_bit_flip", "weight_bits", "stuck_accumulator"):
        fault["index"] = rng.randrange(24)
    if kind == "nan_row":
        fault["request"] = rng.randrange(2)
    return fault | {"expected": module}


def keep_all(modules: Sequence[str]) -> dict[str, tuple[int, ...]]:
    return {m: tuple(range(16)) for m in modules}


def healthy_traces(tp: int, pp: int) -> dict[str, Trace]:
    """Every request of the workload on a healthy engine, whole, with all tensors."""
    plain = run(engine(tp, pp))
    found = {}
    for request in workload():
        tokens = (*request.prompt_token_ids, *(int(t) for t in plain[request.request_id].token_ids))
        asked = replace(job(request, tokens), keep=keep_all(engine().module_names()))
        found[request.request_id] = engine(tp, pp).trace_batches(asked)
    return found


def localize_fault(
    tp: int, pp: int, fault: Mapping[str, Any], healthy: Mapping[str, Trace]
) -> Localization | None:
    """As the command does it: the request that diverges first, replayed on fresh engines, one pass
    for the digests and one for tensors. None where no output shows the fault."""
    faulty = run(engine(tp, pp, fault))
    plain = {c.request_id: c for t in healthy.values() for c in t.completions}
    tokens = {
        r.request_id: common_tokens(r, plain[r.request_id], faulty[r.request_id])
        for r in workload()
        if bits(plain[r.request_id]) != bits(faulty[r.request_id])
    }
    if not tokens:
        return None
    request = min(
        (r for r in workload() if r.request_id in tokens),
        key=lambda r: len(tokens[r.request_id]) - len(r.prompt_token_ids),
    )
    asked = job(request, tokens[request.request_id])
    a = healthy[request.request_id]
    comparison = compare_traces(a, engine(tp, pp, fault).trace_batches(asked))
    asked = replace(asked, keep=rows_to_keep(comparison))
    return localize(compare_traces(a, engine(tp, pp, fault).trace_batches(asked)))


@pytest.mark.timeout(180)
def test_two_hundred_random_faults_are_each_found_in_their_module() -> None:
    rng = random.Random(2026)
    healthy = {size: healthy_traces(*size) for size in [(1, 1), (2, 1), (1, 2), (2, 2)]}
    modules = engine().module_names()
    found = 0
    while found < 200:
        tp, pp = rng.choice(list(healthy))
        fault = random_fault(rng, tp, pp, modules)
        expected = fault.pop("expected")
        where = localize_fault(tp, pp, fault, healthy[tp, pp])
        if where is None:
            continue
        found += 1
        assert where.module == expected, (fault, tp, pp, where)
        assert where.input_equal is True, (fault, where)
        assert where.distance is not None, (fault, where)
        assert where.distance.n_different > 0, (fault, where)
        if tp > 1 and fault["kind"] in ("activation_stripe", "nan_row", "stuck_accumulator"):
            assert where.ranks == (fault["rank"] % tp,), (fault, where)
        if tp > 1 and base_name(expected) in ROW_PARALLEL:
            in_product = fault["kind"].startswith(("weight", "stuck"))
            assert where.cause == ("product" if in_product else "all-reduce"), (fault, where)


def traced(one: ReferenceEngine, **changed: Any) -> Trace:
    request = workload()[1]
    plain = run(engine())[request.request_id]
    tokens = (*request.prompt_token_ids, *(int(t) for t in plain.token_ids[:2]))
    return one.trace_batches(replace(job(request, tokens), **changed))


def test_equal_cells_end_in_no_difference() -> None:
    found = localize(compare_traces(traced(engine(2)), traced(engine(2))))
    assert found.finding is Finding.EQUAL
    assert found.sentence == (
        f"No difference found: {len(engine().module_names())} modules are bitwise equal at "
        "9 positions."
    )


def test_tracing_changes_no_output() -> None:
    plain = run(engine(2))
    hooked = {c.request_id: c for c in traced(engine(2)).completions}
    assert {k: bits(c) for k, c in plain.items()} == {k: bits(c) for k, c in hooked.items()}


def test_a_pipeline_is_compared_with_one_stage_by_module_name() -> None:
    comparison = compare_traces(traced(engine(pp=2)), traced(engine(pp=1)))
    assert comparison.modules() == set(engine().module_names())
    assert localize(comparison).finding is Finding.EQUAL


@pytest.mark.parametrize("flipped", [False, True])
def test_tp_sizes_differ_first_in_a_row_parallel_product_that_was_split(flipped: bool) -> None:
    sides = [engine(1), engine(2)]
    a, b = (traced(e) for e in (reversed(sides) if flipped else sides))
    first = compare_traces(a, b)
    keep = rows_to_keep(first)
    a, b = (traced(e, keep=keep) for e in (reversed(sides) if flipped else sides))
    found = localize(compare_traces(a, b))
    assert base_name(found.module) in ROW_PARALLEL
    assert found.input_equal is True
    assert found.cause == "split"
    assert found.operation == "row-parallel product after its all-reduce"
    assert found.distance is not None
    assert 0 < found.distance.n_different <= found.distance.n_elements


def test_slices_of_two_tp_sizes_are_compared_by_their_sum() -> None:
    fault = {"kind": "activation_stripe", "module": "layers.0.self_attn.qkv_proj", "rank": 1}
    comparison = compare_traces(traced(engine(1)), traced(engine(2, fault=fault)))
    found = localize(comparison)
    assert found.module == "layers.0.self_attn.qkv_proj"
    assert found.input_equal is True
    assert found.ranks == ()


def test_the_growth_ends_at_the_last_position_and_starts_at_zero() -> None:
    fault = {"kind": "activation_stripe", "module": "layers.1.mlp.act_fn", "value": 1.5}
    keep = rows_to_keep(compare_traces(traced(engine()), traced(engine(fault=fault))))
    found = localize(
        compare_traces(traced(engine(), keep=keep), traced(engine(fault=fault), keep=keep))
    )
    by_module = {g.module: g for g in found.growth}
    assert list(by_module) == list(engine().module_names())
    before = list(by_module)[: list(by_module).index("layers.1.mlp.act_fn")]
    assert all(by_module[m].distance.n_different == 0 for m in before)
    assert by_module["layers.1.mlp.act_fn"].distance.max_ulp
    assert by_module["norm"].distance.relative > 0


def part(**changed: Any) -> Part:
    values: dict[str, Any] = {
        "module": "m", "kind": "Thing", "part": "output", "rank": 0, "tensor_parallel_rank": 0,
        "tensor_parallel_size": 1, "stage": 0, "order": 0, "layout": Layout.WHOLE,
        "dtype": "float32", "columns": 4, "positions": np.arange(3, dtype=np.int32),
        "steps": np.zeros(3, dtype=np.int32), "digests": np.zeros((3, 2), dtype=np.uint64),
    }  # fmt: skip
    return Part(**{**values, **changed})


def digests(*rows: int) -> Any:
    return np.array([(r, r) for r in rows], dtype=np.uint64)


def test_the_earliest_step_counts_before_the_order_of_modules() -> None:
    steps = np.array([0, 1, 2], dtype=np.int32)
    a = [part(module=m, order=i, steps=steps, digests=digests(0, 0, 0)) for i, m in enumerate("xy")]
    b = [
        part(module="x", order=0, steps=steps, digests=digests(0, 0, 9)),
        part(module="y", order=1, steps=steps, digests=digests(0, 9, 9)),
    ]
    found = localize(compare_traces(Trace(a), Trace(b)))
    assert (found.module, found.step, found.position) == ("y", 1, 1)


def test_an_input_that_differs_after_equal_outputs_lies_between_modules() -> None:
    a = [
        part(module="x", part="output", order=1),
        part(module="y", part="input", order=2),
        part(module="y", part="output", order=3),
    ]
    b = [a[0], replace(a[1], digests=digests(0, 0, 7)), replace(a[2], digests=digests(0, 0, 7))]
    found = localize(compare_traces(Trace(a), Trace(b)))
    assert (found.module, found.part, found.after) == ("y", "input", "x")
    assert found.sentence.startswith("Between x and y")


def test_other_chunks_of_the_prompt_are_compared_position_by_position() -> None:
    whole = part(positions=np.arange(4, dtype=np.int32), steps=np.zeros(4, dtype=np.int32),
                 digests=digests(1, 2, 3, 4))  # fmt: skip
    chunked = replace(whole, steps=np.array([0, 0, 1, 1], dtype=np.int32))
    assert localize(compare_traces(Trace([whole]), Trace([chunked]))).finding is Finding.EQUAL


def test_positions_that_one_side_took_from_its_cache_are_left_out() -> None:
    whole = part(digests=digests(1, 2, 3))
    cached = replace(
        whole,
        positions=np.array([2], dtype=np.int32),
        steps=np.zeros(1, dtype=np.int32),
        digests=digests(3),
    )
    comparison = compare_traces(Trace([whole]), Trace([cached]))
    assert comparison.positions() == {2}
    assert localize(comparison).finding is Finding.EQUAL


def of_ranks(layout: Layout, *rows: Any, columns: int = 4) -> list[Part]:
    return [
        part(tensor_parallel_rank=r, rank=r, tensor_parallel_size=len(rows), layout=layout,
             digests=d, columns=columns)
        for r, d in enumerate(rows)
    ]  # fmt: skip


def test_a_tensor_of_unknown_layout_counts_across_tp_sizes_only_where_ranks_agree() -> None:
    one = of_ranks(Layout.UNKNOWN, digests(1, 2, 3))
    agreeing = of_ranks(Layout.UNKNOWN, digests(1, 2, 4), digests(1, 2, 4))
    parted = of_ranks(Layout.UNKNOWN, digests(1, 2, 4), digests(5, 6, 7))
    assert localize(compare_traces(Trace(one), Trace(agreeing))).finding is Finding.FOUND
    comparison = compare_traces(Trace(one), Trace(parted))
    assert comparison.compared == []
    assert "its ranks hold different numbers, and the TP sizes differ" in comparison.skipped


def test_a_rank_whose_replicated_output_departs_from_the_others_is_named() -> None:
    one = of_ranks(Layout.WHOLE, digests(1, 2, 3))
    two = of_ranks(Layout.WHOLE, digests(1, 2, 3), digests(1, 2, 9))
    assert localize(compare_traces(Trace(one), Trace(two))).ranks == (1,)


def test_shards_count_only_between_equal_tp_sizes() -> None:
    one = of_ranks(Layout.SHARD, digests(1, 2, 3))
    two = of_ranks(Layout.SHARD, digests(1, 2, 3), digests(4, 5, 6))
    assert localize(compare_traces(Trace(one), Trace(two))).finding is Finding.NOTHING
    assert localize(compare_traces(Trace(two), Trace(two))).finding is Finding.EQUAL


def test_digests_see_order_zeros_and_the_sign_of_zero() -> None:
    rows = np.array([[1, 2, 3], [3, 2, 1], [1, 2, 3]], dtype=np.uint16)
    a, b, c = (tuple(d) for d in row_digests(rows))
    assert a == c
    assert a != b
    zeros = row_digests(np.zeros((1, 4), dtype=np.uint16))
    assert not np.array_equal(zeros, row_digests(np.zeros((1, 5), dtype=np.uint16)))
    signed = np.array([[0.0], [-0.0]], dtype=np.float32).view(np.uint32)
    assert len({tuple(d) for d in row_digests(signed).tolist()}) == 2


def test_no_single_bit_and_no_swap_of_neighbours_goes_unseen() -> None:
    row = np.random.default_rng(1).integers(0, 2**16, 64).astype(np.uint16)
    changed = [row]
    for i in range(64):
        changed += [np.where(np.arange(64) == i, row ^ np.uint16(1 << b), row) for b in range(16)]
    for i in range(63):
        swapped = row.copy()
        swapped[[i, i + 1]] = swapped[[i + 1, i]]
        changed.append(swapped)
    for half in row_digests(np.stack(changed)).T:
        assert len(set(half.tolist())) == len({r.tobytes() for r in changed})


@pytest.mark.parametrize("size", [1, 2, 4])
def test_digests_of_merged_slices_add_up_to_the_digest_of_the_whole(size: int) -> None:
    whole = np.random.default_rng(2).integers(0, 2**32, (3, 24)).astype(np.uint32)
    q, k = whole[:, :16], whole[:, 16:]
    total = np.zeros((3, 2), dtype=np.uint64)
    for rank in range(size):
        mine = np.concatenate([np.split(q, size, axis=1)[rank], np.split(k, size, axis=1)[rank]], 1)
        total += row_digests(mine, slice_columns(rank, size, [16 // size, 8 // size]))
    assert np.array_equal(total, row_digests(whole))


def test_multipliers_are_odd_and_all_different() -> None:
    made = multipliers(np.arange(4096, dtype=np.uint64))
    assert (made & np.uint64(1)).all()
    assert len(np.unique(made)) == made.size


def test_units_in_the_last_place_cross_zero_by_single_steps() -> None:
    below, above = np.array([0x8000], np.uint16), np.array([0x0000], np.uint16)
    assert ulps(below, above).tolist() == [1.0]
    assert ulps(np.array([0x8001], np.uint16), np.array([0x0001], np.uint16)).tolist() == [3.0]


def test_rounding_to_bfloat16_goes_to_the_nearest_even() -> None:
    # 1 + 2**-8 lies half way between two bfloat16 numbers, 1 + 3 * 2**-8 too
    values = np.array([1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-12, -0.0], dtype=np.float32)
    expected = np.array([1.0, 1 + 4 * 2**-8, 1 + 2**-7, -0.0], dtype=np.float32)
    assert rounded(values, "bfloat16").tobytes() == expected.tobytes()


@pytest.mark.parametrize(("total", "holds"), [(1.5, True), (1.25, False)])
def test_an_all_reduce_that_is_not_the_sum_of_its_terms_is_seen(total: float, holds: bool) -> None:
    def kept(value: float, rank: int) -> Part:
        values = np.full((1, 4), value, dtype=np.float32).view(np.uint32)
        return part(values=values, value_positions=np.array([2], dtype=np.int32),
                    tensor_parallel_size=2, tensor_parallel_rank=rank)  # fmt: skip

    assert reduction_holds([kept(1.0, 0), kept(0.5, 1)], kept(total, 0)) is holds
    assert reduction_holds([kept(1.0, 0)], kept(total, 0)) is None
