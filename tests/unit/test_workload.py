"""Prompts from anywhere become the same token ids in every cell, each known by its id."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raytest.engines.base import Request, Sampling
from raytest.errors import UsageError
from raytest.schema import Arrangement, requests_schema
from raytest.synthetic import write_model
from raytest.workload import Workload, arrange, derive_seed, load_workload


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("models") / "tiny"
    write_model(path)
    return str(path)


def load(tokenizer: str, prompts: str, base: Path | str = ".", **changes: object) -> Workload:
    settings: dict[str, object] = {
        "limit": None,
        "seed_per_request": "derived",
        "max_model_len": 1024,
        "vocabulary_size": 8192,
        **changes,
    }
    sampling = settings.pop("sampling", Sampling(max_tokens=16))
    return load_workload(
        prompts,
        sampling,  # type: ignore[arg-type]
        tokenizer_path=tokenizer,
        base_dir=str(base),
        **settings,  # type: ignore[arg-type]
    )


def test_the_built_in_prompts_are_of_every_kind_and_all_can_run(tokenizer: str) -> None:
    workload = load(tokenizer, "builtin:mixed")
    kinds = {i.source.kind for i in workload.items}
    assert {"language", "code", "maths", "tie", "marks", "single", "prefix", "long"} < kinds
    assert len(workload.requests()) == len(workload.items) >= 64
    lengths = {len(r.prompt_token_ids) for r in workload.requests()}
    assert {1, 15, 16, 17, 255, 256, 257} < lengths


def test_a_limit_keeps_every_kind(tokenizer: str) -> None:
    some = load(tokenizer, "builtin:mixed", limit=9)
    assert len(some.items) == 9
    assert len({i.source.kind for i in some.items}) == 9
    assert [i.request.request_index for i in some.items] == list(range(9))


def test_ids_and_seeds_do_not_depend_on_what_else_is_in_the_workload(tokenizer: str) -> None:
    every = {r.request_id: r for r in load(tokenizer, "builtin:mixed").requests()}
    for request in load(tokenizer, "builtin:mixed", limit=5).requests():
        other = every[request.request_id]
        assert request.prompt_token_ids == other.prompt_token_ids
        assert request.sampling.seed == other.sampling.seed


def write_jsonl(path: Path, *rows: object) -> None:
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))


def test_jsonl_takes_text_ids_and_messages(tokenizer: str, tmp_path: Path) -> None:
    write_jsonl(
        tmp_path / "p.jsonl",
        {"prompt": "Hello", "reference": "42"},
        {"prompt_token_ids": [5, 6, 7], "id": "mine"},
        {"messages": [{"role": "user", "content": "Hi"}]},
    )
    text, ids, chat = load(tokenizer, "p.jsonl", tmp_path).items
    assert text.request.request_id == "p:1"
    assert text.source.reference == "42"
    assert ids.request.request_id == "mine"
    assert ids.request.prompt_token_ids == (5, 6, 7)
    # <|user|> Hi <|end|> <|assistant|>
    assert chat.request.prompt_token_ids[0] == 3
    assert chat.request.prompt_token_ids[-2:] == (1, 4)


def test_text_and_parquet_files_give_one_request_a_line(tokenizer: str, tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("one\n\ntwo\r\nthree", encoding="utf-8")
    assert [i.source.text for i in load(tokenizer, "p.txt", tmp_path).items] == [
        "one",
        "two",
        "three",
    ]
    pq.write_table(pa.table({"prompt": ["one", "two"], "id": ["a", "b"]}), tmp_path / "p.parquet")
    loaded = load(tokenizer, "p.parquet", tmp_path)
    assert [i.request.request_id for i in loaded.items] == ["a", "b"]


@pytest.mark.parametrize(
    ("row", "error"),
    [
        ({"prompt": ""}, "the prompt is empty"),
        ({"prompt_token_ids": []}, "the prompt is empty"),
        ({"prompt_token_ids": [8192]}, "out of the vocabulary of 8192"),
        ({"prompt_token_ids": [-1]}, "token id -1 is no token id"),
        ({"prompt_token_ids": [2**40]}, "is no token id"),
        ({"prompt": "word " * 2000}, "more than max_model_len 1024"),
    ],
)
def test_a_bad_prompt_is_an_error_of_its_own_and_costs_no_other(
    tokenizer: str, tmp_path: Path, row: object, error: str
) -> None:
    write_jsonl(tmp_path / "p.jsonl", {"prompt": "good"}, row)
    workload = load(tokenizer, "p.jsonl", tmp_path)
    assert [r.request_id for r in workload.requests()] == ["p:1"]
    assert error in str(workload.items[1].error)
    assert workload.table().schema == requests_schema()
    assert workload.table().num_rows == 2


def test_a_prompt_of_3_mb_is_told_and_not_choked_on(tokenizer: str, tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("x" * 3_000_000)
    (item,) = load(tokenizer, "p.txt", tmp_path).items
    assert "more than max_model_len" in str(item.error)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("p.jsonl", b'{"prompt": "a"}\n{"prompt": ', r"p.jsonl:2: not JSON"),
        ("p.jsonl", b'["a"]', r"p.jsonl:1: expected an object"),
        ("p.jsonl", b'{"text": "a"}', r"p.jsonl:1: expected exactly one of .* found none"),
        ("p.jsonl", b'{"prompt": "a", "prompt_token_ids": [1]}', "found prompt, prompt_token_ids"),
        ("p.jsonl", b'{"prompt": 3}', r"p.jsonl:1: prompt: expected text, found int"),
        ("p.jsonl", b'{"prompt": "\\ud800"}', "half a character"),
        ("p.jsonl", b'{"prompt_token_ids": [true]}', "whole numbers"),
        ("p.jsonl", b'{"messages": [{"role": "user"}]}', "objects with role and content"),
        ("p.jsonl", b'{"prompt":"a","id":"x"}\n{"prompt":"b","id":"x"}', "'x' appears twice"),
        ("p.txt", b"good\n\xff\xfe\n", "p.txt:2: not UTF-8"),
        ("p.txt", b"", "has no prompts"),
        ("p.csv", b"a", "expected builtin:mixed, or a .txt, .jsonl or .parquet"),
        ("p.parquet", b"PAR1", "cannot be read"),
    ],
)
def test_a_source_that_cannot_be_read_names_file_and_line(
    tokenizer: str, tmp_path: Path, name: str, content: bytes, said: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UsageError, match=said):
        load(tokenizer, name, tmp_path)


def test_an_unknown_built_in_names_the_known_ones(tokenizer: str) -> None:
    with pytest.raises(UsageError, match="builtin:mixed, builtin:short"):
        load(tokenizer, "builtin:mixd")


def test_duplicate_prompts_under_other_ids_are_twins_with_other_seeds(
    tokenizer: str, tmp_path: Path
) -> None:
    (tmp_path / "p.txt").write_text("same\nsame\n")
    one, two = load(tokenizer, "p.txt", tmp_path).requests()
    assert one.prompt_digest == two.prompt_digest
    assert one.sampling.seed != two.sampling.seed


def test_the_same_seed_for_all_where_the_spec_says_so(tokenizer: str) -> None:
    workload = load(tokenizer, "builtin:short", seed_per_request="same", sampling=Sampling(seed=7))
    assert {r.sampling.seed for r in workload.requests()} == {7}


@given(st.integers(0, 2**31 - 1), st.text(max_size=30))
def test_derived_seeds_leave_room_for_the_samples(base: int, request_id: str) -> None:
    assert 0 <= derive_seed(base, request_id) < 2**31 - 64


def make(n: int) -> list[Request]:
    prompts = [(i % 3, i) for i in range(n)]
    return [Request(f"r{i}", i, p, b"x" * 16, Sampling()) for i, p in enumerate(prompts)]


@given(n=st.integers(1, 20), arrangement=st.sampled_from(Arrangement), seed=st.integers(0, 99))
def test_an_arrangement_hands_over_every_request_once(
    n: int, arrangement: Arrangement, seed: int
) -> None:
    requests = make(n)
    batches = arrange(requests, arrangement, seed)
    flat = [r for b in batches for r in b]
    assert sorted(r.request_index for r in flat) == list(range(n))
    assert batches == arrange(requests, arrangement, seed)
    assert len(batches) == (n if arrangement is Arrangement.SOLO else 1)


def test_arrangements_are_what_their_names_say() -> None:
    requests = make(9)
    assert arrange(requests, Arrangement.REVERSED, 1)[0] == requests[::-1]
    assert arrange(requests, Arrangement.SHUFFLED, 1)[0] != requests
    shared = [r.prompt_token_ids[0] for r in arrange(requests, Arrangement.PREFIX, 1)[0]]
    assert shared == sorted(shared)
