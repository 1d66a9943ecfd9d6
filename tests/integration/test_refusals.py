"""What is wrong is told in one line, with its exit code, before anything is started."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.command import REFERENCE, raytest

TINY = REFERENCE.replace('backend = "reference"\n', "").replace(
    'path = "reference"', 'path = "synthetic:tiny"'
)
TP1 = '[[variants]]\nname = "tp1"\n'


@pytest.mark.parametrize(
    ("spec", "code", "said"),
    [
        (TINY + TP1 + "[trials]\nrepeets = 3\n", 2, "trials.repeets: unknown key; did you mean"),
        (
            TINY + '[[variants]]\nname = "tp3"\ntensor_parallel_size = 3\n',
            2,
            "attention heads, which 3 does not divide",
        ),
        (TINY.replace("synthetic:tiny", "/no/such") + TP1, 2, "/no/such: no such folder"),
        (TINY.replace("limit = 6", 'prompts = "empty.txt"') + TP1, 2, "empty.txt"),
        (TINY.replace("limit = 6", 'prompts = "absent.jsonl"') + TP1, 2, "absent.jsonl"),
        (
            TINY + '[[variants]]\nname = "a"\nenv = { VLLM_ATTENTION_BACKEND = "FLASH_ATTN" }\n',
            2,
            "attention_backend",
        ),
        (
            REFERENCE + '[[variants]]\nname = "tp4"\ntensor_parallel_size = 4\n',
            75,
            "variant tp4: needs 4 devices on one node",
        ),
    ],
    ids=["key", "tp", "model", "empty", "absent", "variable", "devices"],
)
def test_it_is_one_line_and_nothing_is_left(
    tmp_path: Path, spec: str, code: int, said: str
) -> None:
    (tmp_path / "s.toml").write_text(spec)
    (tmp_path / "empty.txt").write_text("")
    ended = raytest("run", "s.toml", cwd=tmp_path)
    assert ended.code == code, ended.err
    (line,) = ended.said
    assert said in line
    assert ended.out == ""
    assert not (tmp_path / "results").exists()


def test_no_cluster_at_an_address_is_75(tmp_path: Path) -> None:
    (tmp_path / "s.toml").write_text(REFERENCE + TP1)
    ended = raytest("run", "s.toml", "--address", "127.0.0.1:1", cwd=tmp_path)
    assert ended.code == 75
    assert "no Ray cluster there" in ended.said[-1]


def test_an_unknown_option_is_2(tmp_path: Path) -> None:
    assert raytest("run", "--no-such-option", cwd=tmp_path).code == 2


def test_a_run_that_is_not_there_is_2_and_its_verdict_3(tmp_path: Path) -> None:
    assert raytest("compare", "nope", cwd=tmp_path).code == 2
    assert raytest("verdict", "nope", cwd=tmp_path).code == 3
