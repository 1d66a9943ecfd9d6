"""Run by test_bench_main: one engine, bare ``generate`` and raytest trials in turn; JSON on stdout.

    trial_overhead.py FOLDER PAIRS

On a GPU the model is larger and CUDA graphs are on, as in production; the third arm asks for no
logprobs, which shows what keeping them costs.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

SPEC = """
name = "bench"
[model]
path = "{model}"
dtype = "bfloat16"
max_model_len = 1024
[workload]
limit = {requests}
sampling = {{ max_tokens = {tokens}, logprobs = 5, ignore_eos = true }}
[[variants]]
name = "tp1"
engine = {{ enforce_eager = {eager} }}
"""
CPU = {"model": "synthetic:tiny", "requests": 32, "tokens": 64, "eager": "true"}
GPU = {"model": "synthetic:1b", "requests": 64, "tokens": 256, "eager": "false"}


def main() -> None:
    from dataclasses import replace

    from raytest.configure import Target, configure
    from raytest.engines.vllm import sampling_params
    from raytest.fingerprint.gpu import gpus
    from raytest.inventory import Device, Inventory, Node
    from raytest.plan import make_plan
    from raytest.runner import find_model, read_workload, vllm_version
    from raytest.schema import Arrangement
    from raytest.spec_file import parse_spec
    from raytest.store import RunFolder
    from raytest.worker import Job, TrialJob, Worker
    from raytest.workload import arrange

    folder, pairs = Path(sys.argv[1]), int(sys.argv[2])
    found = gpus()
    settings = GPU if found else CPU
    spec = parse_spec(SPEC.format(**settings), "bench")
    model = find_model(spec)
    kind, uuid = ("gpu", found[0]["uuid"]) if found else ("cpu", "cpu:here:0")
    node = Node("here", "here", "here", (Device("here", 0, uuid, kind),))
    cell = make_plan(spec, Inventory((node,))).cells[0]
    config, env = configure(
        spec,
        cell,
        Target("cuda" if found else "cpu", vllm_version()),
        model_path=model.path,
        tokenizer_path=model.tokenizer_path,
    )
    os.environ.update(env)
    requests = read_workload(spec, model, ".").requests()
    batches = tuple(tuple(b) for b in arrange(requests, Arrangement.BATCH, spec.seed))
    where = {
        "run_id": "bench",
        "cell_id": cell.cell_id,
        "variant": "tp1",
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "node_id": "here",
        "hostname": "here",
        "gpu_uuids": [uuid],
        "slot": cell.slot.name,
        "launch": 0,
        "attempt": 0,
    }
    store = RunFolder.create(folder, "bench", {"spec": {}, "plan": {}})
    worker = Worker(Job(config, where, {}, "here", ""))
    worker.start()
    llm: Any = worker._engine._llm  # type: ignore[union-attr] # the bare side is the same engine
    prompts = [{"prompt_token_ids": list(r.prompt_token_ids)} for r in requests]
    plain = [sampling_params(r.sampling) for r in requests]
    silent = [sampling_params(replace(r.sampling, logprobs=None)) for r in requests]
    known: set[bytes] = set()

    def bare(params: list[Any]) -> float:
        llm.reset_prefix_cache()
        began = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        return time.perf_counter() - began

    inside: list[float] = []
    generate = llm.generate

    def timed_generate(*args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        try:
            return generate(*args, **kwargs)
        finally:
            inside.append(time.perf_counter() - began)

    def trial(number: int) -> float:
        llm.generate = timed_generate
        try:
            return run_trial(number)
        finally:
            llm.generate = generate

    def run_trial(number: int) -> float:
        began = time.perf_counter()
        observations, _ = worker.run_trial(TrialJob(number, number, "batch", spec.seed, batches))
        ids = set(observations.column("payload_id").to_pylist())
        unseen = sorted(ids - known)
        payloads = worker.payloads(unseen) if unseen else None
        store.write_trial((cell.cell_id, 0, number), observations, payloads)
        known.update(ids)
        return time.perf_counter() - began

    bare(plain)
    bare(silent)
    trial(0)
    inside.clear()
    rounds = [(bare(plain), trial(i + 1), bare(silent)) for i in range(pairs)]
    ratios = [t / b for b, t, _ in rounds]
    result = {
        "device": found[0]["name"] if found else "cpu",
        "requests": len(requests),
        "max_tokens": settings["tokens"],
        "ratio": median(ratios),
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
        "no_logprobs": median(t / s for _, t, s in rounds),
        "added_s": median(t - i for (_, t, _), i in zip(rounds, inside, strict=True)),
        "inside": median(t / i for (_, t, _), i in zip(rounds, inside, strict=True)),
        "bare_s": median(b for b, _, _ in rounds),
        "trial_s": median(t for _, t, _ in rounds),
        "tokens_per_second": len(requests) * settings["tokens"] / median(t for _, t, _ in rounds),
    }
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
