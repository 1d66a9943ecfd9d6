"""Replay on real vLLM: fixed tokens scored through prompt_logprobs in two dtypes."""

from __future__ import annotations

import json
from pathlib import Path

from tests.support.command import raytest

SPEC = """
name = "replay"
[model]
path = "synthetic:tiny"
dtype = "float32"
max_model_len = 256
[workload]
limit = 6
sampling = { max_tokens = 16, logprobs = 3 }
[cluster]
nodes = 1
[placement]
scope = "one"
devices = "cpu"
[trials]
repeats = 1
warmup = 0
replay = true
[[variants]]
name = "float32"
[[variants]]
name = "bfloat16"
dtype = "bfloat16"
[gates]
variant = "may-differ"
"""


def test_dtypes_part_by_their_rounding_and_scoring_names_what_decoding_chose(
    tmp_path: Path,
) -> None:
    (tmp_path / "s.toml").write_text(SPEC)
    ended = raytest("run", "s.toml", "--run-id", "one", "--quiet", cwd=tmp_path, timeout=500)
    assert ended.code == 0, ended.err + ended.out
    ended = raytest("replay", "one", "--format", "json", cwd=tmp_path)
    assert ended.code == 0, ended.err
    document = json.loads(ended.out)
    assert document["path"] == "prefill (prompt_logprobs)"
    reference, other = document["cells"]
    assert reference["against_reference"]["share_bitwise"] == 1.0
    assert other["against_reference"]["share_bitwise"] < 0.5
    assert 1e-4 < other["against_reference"]["max_abs"] < 0.5
    for cell in (reference, other):
        assert cell["consistency"]["n_positions"] > 16
        assert cell["consistency"]["n_other"] == 0
    # there is no second-generation model runner on a CPU, and that is what is said
    ended = raytest("replay", "one", "--path", "decode", "--format", "json", cwd=tmp_path)
    assert ended.code == 3, ended.err
    document = json.loads(ended.out)
    assert document["path"] == "decode (trace replay)"
    assert len(document["not_scored"]) == 2
    for why in document["not_scored"].values():
        assert "decode-path replay is not available" in why or "Model Runner V2" in why
