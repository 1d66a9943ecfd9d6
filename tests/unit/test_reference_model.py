"""The reference engine's logprobs against the same transformer written plainly in float64."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from raytest.digest import prompt_digest
from raytest.engines.base import EngineConfig, Request, Sampling
from raytest.engines.reference import ReferenceEngine
from raytest.engines.reference_weights import ModelShape, make_weights

HEADS, SIZE = 4, 16


def plain_logprobs(tokens: list[int]) -> np.ndarray:
    """float64 log-probabilities [positions, vocabulary], without a cache, batches or ranks."""
    shape = ModelShape()
    weights = {k: v[0].astype(np.float64) for k, v in make_weights(shape, 0, "float32").items()}
    h = weights["embed_tokens"][tokens]
    for i in range(shape.layers):
        w = {k.removeprefix(f"layers.{i}."): v for k, v in weights.items()}
        qkv = (norm(h) * w["input_layernorm"]) @ w["self_attn.qkv_proj"]
        q, k, v = qkv.reshape(len(tokens), 3, HEADS, SIZE).transpose(1, 2, 0, 3)
        scores = rotate(q) @ rotate(k).transpose(0, 2, 1) / np.sqrt(SIZE)
        scores[:, np.triu(np.ones((len(tokens),) * 2), 1) == 1] = -np.inf
        p = np.exp(scores - scores.max(axis=-1, keepdims=True))
        p /= p.sum(axis=-1, keepdims=True)
        h = h + (p @ v).transpose(1, 0, 2).reshape(len(tokens), -1) @ w["self_attn.o_proj"]
        gate, up = np.split(
            (norm(h) * w["post_attention_layernorm"]) @ w["mlp.gate_up_proj"], 2, axis=-1
        )
        h = h + (gate / (1 + np.exp(-gate)) * up) @ w["mlp.down_proj"]
    logits = (norm(h) * weights["norm"]) @ weights["lm_head"]
    return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


def norm(x: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + 1e-6)


def rotate(x: np.ndarray) -> np.ndarray:
    pairs = x[..., : SIZE // 2] + 1j * x[..., SIZE // 2 :]
    angles = np.outer(np.arange(x.shape[1]), 10000.0 ** (-np.arange(SIZE // 2) * 2 / SIZE))
    turned = pairs * np.exp(1j * angles)
    return np.concatenate([turned.real, turned.imag], axis=-1)


def config(tp: int, pp: int) -> EngineConfig:
    return EngineConfig(
        backend="reference",
        model_path="none",
        tokenizer_path="none",
        dtype="float32",
        max_model_len=128,
        seed=0,
        tensor_parallel_size=tp,
        pipeline_parallel_size=pp,
        level=0,
        profile="strict",
        device_kind="cpu",
        device_uuids=tuple(f"cpu:{i}" for i in range(tp * pp)),
        executor="uni",
        engine_args={"enable_prefix_caching": True},
        env={"OMP_NUM_THREADS": "1"},
    )


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (4, 2)])
def test_logprobs_are_those_of_the_plain_model(tp: int, pp: int) -> None:
    rng = np.random.default_rng(5)
    requests, completions = [], []
    for i in range(5):
        ids = tuple(int(t) for t in rng.integers(0, 512, 10 + 9 * i))
        asked = Sampling(logprobs=512)
        requests.append(Request(f"r{i}", i, ids, prompt_digest(ids), asked))
        completions.append([int(t) for t in rng.integers(0, 512, 20)])
    engine = ReferenceEngine(config(tp, pp))
    engine.start()
    for _ in ("empty cache", "cached prefixes"):
        scored = {c.request_id: c for c in engine.score(requests, completions)}
        for request, completion in zip(requests, completions, strict=True):
            n = len(request.prompt_token_ids)
            plain = plain_logprobs([*request.prompt_token_ids, *completion])[n - 1 : -1]
            found = scored[request.request_id]
            exact = plain[np.arange(20), completion]
            np.testing.assert_allclose(found.logprobs, exact, atol=1e-4)
            ids = found.top_token_ids.reshape(20, 512)
            exact = np.take_along_axis(plain, ids, axis=1)
            np.testing.assert_allclose(found.top_logprobs.reshape(20, 512), exact, atol=1e-4)


def test_a_model_folder_gives_the_vocabulary_of_its_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": 700, "eos_token_id": [1, 2]}')
    changed = replace(config(2, 1), model_path=str(tmp_path))
    engine = ReferenceEngine(changed)
    assert engine.vocabulary_size() == 700
    engine.start()
    ids = (699, 5)
    request = Request("r", 0, ids, prompt_digest(ids), Sampling(max_tokens=3))
    assert engine.generate([[request]])[0][0].error is None
