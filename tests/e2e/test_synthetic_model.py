"""Real vLLM takes the synthetic model for a model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from raytest.synthetic import write_model
from raytest.tokenizer import Tokenizer

# A process of its own: the variables hold only where they are set before vLLM is imported.
PROGRAM = """
import json, sys
from vllm import LLM, SamplingParams
llm = LLM(sys.argv[1], dtype="bfloat16", max_model_len=128, enforce_eager=True, seed=0)
parameters = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
prompts = [{"prompt_token_ids": ids} for ids in json.loads(sys.argv[2])]
chat = llm.get_tokenizer().apply_chat_template(
    [{"role": "user", "content": "Hi"}], add_generation_prompt=True, tokenize=False
)
found = [list(o.outputs[0].token_ids) for o in llm.generate(prompts, parameters, use_tqdm=False)]
print("RESULT " + json.dumps({"tokens": found, "chat": chat}))
"""
CPU = {
    "CUDA_VISIBLE_DEVICES": "",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}


def test_vllm_loads_tiny_and_greedy_decoding_depends_on_the_prompt(tmp_path: Path) -> None:
    model = tmp_path / "tiny"
    write_model(model)
    tokenizer = Tokenizer(str(model))
    prompts = [tokenizer.encode(text) for text in ("The harbour was", "def f(x):", "中文")]
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(model), json.dumps(prompts)],
        env={**os.environ, **CPU},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    (line,) = [x for x in ended.stdout.splitlines() if x.startswith("RESULT ")]
    found = json.loads(line.removeprefix("RESULT "))
    tokens = found["tokens"]
    assert [len(t) for t in tokens] == [24, 24, 24]
    # neither stuck on one token nor deaf to the prompt
    assert all(len(set(t)) > 1 for t in tokens)
    assert len({tuple(t) for t in tokens}) == 3
    # our renderer agrees with the one of transformers
    text, _ = tokenizer.encode_messages([{"role": "user", "content": "Hi"}])
    assert found["chat"] == text
