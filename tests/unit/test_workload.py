"""Prompts from anywhere become the same token ids in every cell, each known by its id."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raytest.arrangement import CACHE_BLOCK, shared_prefix
from raytest.engines.base import Sampling
from raytest.errors import UsageError
from raytest.schema import requests_schema
from raytest.synthetic import write_model
from raytest.tokenizer import Tokenizer
from raytest.workload import Workload, decode_tokens, derive_seed, load_workload, token_decoder


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("models") / "tiny"
    write_model(path)
    return str(path)


@pytest.fixture(scope="module")
def made(tokenizer: str) -> Tokenizer:
    return Tokenizer(tokenizer)


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
        (
            "p.jsonl",
            b'{"prompt":"a","id":"x"}\n{"prompt":"b","id":"x"}',
            r"p.jsonl:2: id: 'x' appears twice; first at .*p.jsonl:1$",
        ),
        ("p.jsonl", b'{"prompt": "a", "id": "p:2"}\n{"prompt": "b"}', "'p:2' appears twice"),
        ("p.jsonl", b'{"prompt": "a", "prompt": "b"}', "key 'prompt' appears twice"),
        ("p.jsonl", b'{"prompt_token_ids": [' + b"9" * 5000 + b"]}", r"p.jsonl:1: not JSON"),
        ("p.jsonl", b"[" * 200_000, r"p.jsonl:1: not JSON"),
        ("p.jsonl", b'{"prompt": "a", "id": ""}', "id: expected text or a number, found ''"),
        ("p.jsonl", b'{"prompt": "a", "id": "\\udc00"}', "id: has half a character"),
        ("p.jsonl", b'{"prompt": "a", "reference": 4}', "reference: expected text, found int"),
        ("p.jsonl", b'{"prompt": "a", "kind": []}', "kind: expected text, found list"),
        ("p.jsonl", b'{"prompt": "a", "sampling": 3}', "sampling: expected an object, found int"),
        (
            "p.jsonl",
            b'{"prompt": "a", "sampling": {"temprature": 1}}',
            r"p.jsonl:1: sampling.temprature: unknown key; did you mean 'temperature'",
        ),
        (
            "p.jsonl",
            b'{"prompt": "a", "sampling": {"top_p": 7}}',
            r"sampling.top_p: should be less than or equal to 1, found 7$",
        ),
        ("p.jsonl", b'{"prompt": "a", "sampling": {"n": 2}}', "n > 1 with temperature 0"),
        ("p.jsonl", b'{"prompt": "a", "sampling": {"logprobs": 21}}', "at most 20 .* found 21"),
        ("p.jsonl", b"\n  \n", "has no prompts"),
        ("p.jsonl", b'{"messages": [{"role": "\\ud800", "content": ""}]}', "half a character"),
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


def test_parquet_rows_may_leave_out_what_json_lines_may(tokenizer: str, tmp_path: Path) -> None:
    rows = [
        {"id": "a", "prompt": "one", "sampling": {"max_tokens": 3, "seed": None}},
        {"id": None, "prompt_token_ids": [1, 2], "reference": "r"},
        {"id": "c", "messages": [{"role": "user", "content": "Hi"}]},
    ]
    pq.write_table(pa.Table.from_pylist(_all_keys(rows)), tmp_path / "p.parquet")
    one, two, three = load(tokenizer, "p.parquet", tmp_path).items
    assert [i.request.request_id for i in (one, two, three)] == ["a", "p:2", "c"]
    assert one.request.sampling.max_tokens == 3
    assert one.request.sampling.seed == derive_seed(0, "a")
    assert two.request.prompt_token_ids == (1, 2)
    assert two.source.reference == "r"
    assert three.error is None


def _all_keys(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    keys = {key for row in rows for key in row}
    return [{key: row.get(key) for key in keys} for row in rows]


@pytest.mark.parametrize(
    ("column", "said"),
    [
        (pa.array(["a"]), "has none of the columns"),
        (pa.array([b"\xff"]).view(pa.string()), "cannot be read"),
    ],
)
def test_a_parquet_file_of_something_else_is_one_line(
    tokenizer: str, tmp_path: Path, column: pa.Array, said: str
) -> None:
    name = "prompt" if said == "cannot be read" else "text"
    pq.write_table(pa.table({name: column}), tmp_path / "p.parquet")
    with pytest.raises(UsageError, match=said):
        load(tokenizer, "p.parquet", tmp_path)


def test_a_line_may_have_sampling_of_its_own_over_the_workloads(
    tokenizer: str, tmp_path: Path
) -> None:
    write_jsonl(
        tmp_path / "p.jsonl",
        {"prompt": "a", "sampling": {"temperature": 0.7, "n": 3, "stop_token_ids": [1]}},
        {"prompt": "b", "sampling": {"seed": 123, "max_tokens": 1020}},
        {"prompt": "c"},
    )
    own, long, plain = load(tokenizer, "p.jsonl", tmp_path).items
    assert own.request.sampling.temperature == 0.7
    assert own.request.sampling.n == 3
    assert own.request.sampling.stop_token_ids == (1,)
    assert own.request.sampling.max_tokens == 16
    assert own.request.sampling.seed == derive_seed(0, "p:1")
    assert long.request.sampling.seed == 123
    assert plain.request.sampling == Sampling(max_tokens=16, seed=derive_seed(0, "p:3"))
    # what the line asks for is what its prompt must leave room for
    write_jsonl(tmp_path / "q.jsonl", {"prompt": "b", "sampling": {"max_tokens": 1024}})
    assert "with max_tokens 1024" in str(load(tokenizer, "q.jsonl", tmp_path).items[0].error)


def test_a_lines_own_seed_holds_where_all_others_have_the_same(
    tokenizer: str, tmp_path: Path
) -> None:
    write_jsonl(tmp_path / "p.jsonl", {"prompt": "a", "sampling": {"seed": 5}}, {"prompt": "b"})
    sampling = Sampling(seed=7)
    items = load(tokenizer, "p.jsonl", tmp_path, seed_per_request="same", sampling=sampling).items
    assert [i.request.sampling.seed for i in items] == [5, 7]


def test_messages_that_the_template_refuses_cost_no_other(tmp_path: Path, tokenizer: str) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tokenizer, folder)
    template = "{% if messages[0].role != 'user' %}{{ raise_exception('user first') }}{% endif %}"
    (folder / "chat_template.jinja").write_text(
        template + "{{ bos_token }}{{ messages[0].content }}"
    )
    write_jsonl(
        tmp_path / "p.jsonl",
        {"messages": [{"role": "system", "content": "x"}]},
        {"messages": [{"role": "user", "content": "Hi"}]},
    )
    refused, good = load(str(folder), "p.jsonl", tmp_path).items
    assert refused.error == "chat template: user first"
    assert good.error is None
    assert good.prompt == "<|begin|>Hi"
    assert good.request.prompt_token_ids[0] == 0


def test_messages_for_a_model_without_a_template_are_refused_at_once(
    tmp_path: Path, tokenizer: str
) -> None:
    shutil.copy(Path(tokenizer) / "tokenizer.json", tmp_path)
    write_jsonl(tmp_path / "p.jsonl", {"messages": [{"role": "user", "content": "Hi"}]})
    with pytest.raises(UsageError, match="has no chat template, which messages need"):
        load(str(tmp_path), "p.jsonl", tmp_path)


def test_truncation_and_padding_of_a_tokenizers_training_do_not_touch_prompts(
    tmp_path: Path, tokenizer: str
) -> None:
    path = tmp_path / "tokenizer.json"
    document = json.loads((Path(tokenizer) / "tokenizer.json").read_text())
    document["truncation"] = {
        "direction": "Right",
        "max_length": 4,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    path.write_text(json.dumps(document))
    text = "many words here, far more than four tokens of them"
    assert Tokenizer(str(tmp_path)).encode(text) == Tokenizer(tokenizer).encode(text)


@pytest.mark.parametrize("content", ["{", "{}", '{"model": {"type": "Unknown"}}'])
def test_a_damaged_tokenizer_is_one_line(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(UsageError, match="its tokenizer cannot be read") as caught:
        Tokenizer(str(tmp_path))
    assert "\n" not in str(caught.value)


def test_a_missing_library_names_the_extra(monkeypatch: pytest.MonkeyPatch, tokenizer: str) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(UsageError, match=r"tokenizers is needed .* raytest\[cpu\]"):
        Tokenizer(tokenizer)


@settings(max_examples=60)
@given(text=st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=60))
def test_text_comes_back_from_its_tokens_character_by_character(made: Tokenizer, text: str) -> None:
    # no normalisation: e + accent stays two characters
    assert made.decode(made.encode(text)) == text


def test_text_for_reports_is_what_the_tokenizer_says(tokenizer: str, made: Tokenizer) -> None:
    ids = made.encode("<|user|>e\u0301 ok")
    decode = token_decoder(tokenizer)
    assert decode(ids) == decode_tokens(tokenizer, ids) == "<|user|>e\u0301 ok"


def test_tokens_that_a_broken_engine_made_up_still_decode(tokenizer: str) -> None:
    ids = Tokenizer(tokenizer).encode("good")
    assert decode_tokens(tokenizer, [-1, *ids, 2**31, 9000]) == "good"


def test_the_recorded_text_of_a_cut_prompt_is_the_text_that_runs(
    tokenizer: str, made: Tokenizer
) -> None:
    workload = load(tokenizer, "builtin:mixed", max_model_len=64)
    assert len(workload.requests()) == len(workload.items)
    for item in workload.items:
        assert item.prompt is not None
        assert len(item.request.prompt_token_ids) <= 48
        if "�" not in item.prompt:
            assert made.decode(item.request.prompt_token_ids) == item.prompt


def test_long_prompts_share_no_cache_block_and_families_do(tokenizer: str) -> None:
    def shared(name: str) -> list[int]:
        ids = [r.prompt_token_ids for r in load(tokenizer, name, max_model_len=4096).requests()]
        return [
            max(shared_prefix(one, other) for j, other in enumerate(ids) if j != i)
            for i, one in enumerate(ids)
        ]

    assert max(shared("builtin:long")) < CACHE_BLOCK <= min(shared("builtin:prefix"))
    lengths = [
        len(i.request.prompt_token_ids)
        for i in load(tokenizer, "builtin:long", max_model_len=4096).items
    ]
    assert 1300 < max(lengths) <= 1500


def test_built_in_ids_say_where_a_prompt_comes_from(tokenizer: str) -> None:
    ids = [i.request.request_id for i in load(tokenizer, "builtin:short").items]
    assert ids[0] == "builtin/short/000-language"
    assert "builtin/short/014-code" in ids


def test_a_limit_changes_no_seed_even_where_seeds_collide(
    tokenizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("raytest.request_seeds.SEED_RANGE", 200)
    every = {r.request_id: r.sampling.seed for r in load(tokenizer, "builtin:mixed").requests()}
    assert len(set(every.values())) == len(every)
    for request in load(tokenizer, "builtin:mixed", limit=20).requests():
        assert request.sampling.seed == every[request.request_id]


def test_a_mark_before_utf_8_is_no_part_of_the_first_prompt(tokenizer: str, tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_bytes(b"\xef\xbb\xbfone\n")
    assert load(tokenizer, "p.txt", tmp_path).items[0].prompt == "one"


def test_bad_token_ids_are_never_mistaken_for_another_prompt(
    tokenizer: str, tmp_path: Path
) -> None:
    write_jsonl(
        tmp_path / "p.jsonl",
        *({"prompt_token_ids": ids} for ids in ([5], [-1, 5], [5, 2**40], [])),
    )
    items = load(tokenizer, "p.jsonl", tmp_path).items
    assert [i.error is None for i in items] == [True, False, False, False]
    assert len({i.request.prompt_digest for i in items}) == 4


def test_the_table_says_what_each_request_was_asked(tokenizer: str, tmp_path: Path) -> None:
    write_jsonl(tmp_path / "p.jsonl", {"prompt": "Hi", "id": 7, "kind": "mine", "reference": "r"})
    workload = load(tokenizer, "p.jsonl", tmp_path)
    (row,) = workload.table().to_pylist()
    request = workload.items[0].request
    assert json.loads(row.pop("sampling")) == {**asdict(request.sampling), "stop_token_ids": []}
    assert row == {
        "request_index": 0,
        "request_id": "7",
        "prompt_digest": request.prompt_digest,
        "prompt": "Hi",
        "prompt_token_ids": list(request.prompt_token_ids),
        "kind": "mine",
        "reference": "r",
        "seed": request.sampling.seed,
        "error": None,
    }
