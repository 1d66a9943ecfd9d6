"""Sampled, several-sample and beam-search workloads on real vLLM: every sample, again and again."""

from __future__ import annotations

from pathlib import Path

import duckdb
import pytest

from tests.support.command import raytest

SPEC = """
name = "sampling"
[model]
path = "synthetic:tiny"
dtype = "bfloat16"
max_model_len = 256
[workload]
prompts = "builtin:short"
limit = 3
sampling = {{ {sampling} }}
[placement]
scope = "one"
[[variants]]
name = "tp1"
[gates]
repeat = "{gate}"
"""


def rows(folder: Path) -> list[tuple[int, int, int]]:
    """Observations, distinct (request, sample), distinct token digests within one trial."""
    query = f"""
        select count(*), count(distinct (request_id, sample_index)),
          count(distinct token_digest) filter (where trial = 0)
        from read_parquet('{folder}/results/r/observations/*/*.parquet') where error is null
    """
    return duckdb.execute(query).fetchall()


@pytest.mark.parametrize(
    ("sampling", "gate"),
    [
        ("temperature = 0.8, top_p = 0.9, n = 3, max_tokens = 12, logprobs = 2", "bitwise"),
        # a beam comes without candidates: it is compared by its tokens
        ("beam_width = 3, length_penalty = 0.8, max_tokens = 6", "tokens"),
    ],
    ids=["sampled", "beam"],
)
def test_every_sample_comes_back_once_and_repeats(tmp_path: Path, sampling: str, gate: str) -> None:
    (tmp_path / "s.toml").write_text(SPEC.format(sampling=sampling, gate=gate))
    ended = raytest("run", "s.toml", "--run-id", "r", cwd=tmp_path, timeout=500)
    assert ended.code == 0, ended.out + ended.err
    ((observations, distinct, different),) = rows(tmp_path)
    assert observations == 2 * 3 * 3
    assert distinct == 3 * 3
    assert different == 3 * 3
