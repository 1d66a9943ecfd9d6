"""Run by test_bench_main: one engine, bare ``generate`` and raytest trials in turn; JSON on stdout."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from statistics import median

FOLDER, PAIRS = Path(sys.argv[1]), int(sys.argv[2])
MAX_TOKENS, REQUESTS = 64, 32


def main() -> None:
    from raytest.configure import Target, configure
    from raytest.engines.vllm import sampling_params
    from raytest.inventory import Device, Inventory, Node
    from raytest.plan import make_plan
    from raytest.runner import find_model, read_workload, vllm_version
    from raytest.schema import Arrangement
    from raytest.spec_file import parse_spec
    from raytest.store import RunFolder
    from raytest.worker import Job, TrialJob, Worker
    from raytest.workload import arrange

    spec = parse_spec(
        f"""
name = "bench"
[model]
path = "synthetic:tiny"
dtype = "bfloat16"
max_model_len = 512
[workload]
limit = {REQUESTS}
sampling = {{ max_tokens = {MAX_TOKENS}, ignore_eos = true }}
[[variants]]
name = "tp1"
""",
        "bench",
    )
    model = find_model(spec)
    node = Node("here", "here", "here", (Device("here", 0, "cpu:here:0", "cpu"),))
    plan = make_plan(spec, Inventory((node,)))
    config, env = configure(
        spec,
        plan.cells[0],
        Target("cpu", vllm_version()),
        model_path=model.path,
        tokenizer_path=model.tokenizer_path,
    )
    os.environ.update(env)
    requests = read_workload(spec, model, ".").requests()
    batches = tuple(tuple(b) for b in arrange(requests, Arrangement.BATCH, spec.seed))
    cell = plan.cells[0]
    where = {
        "run_id": "bench",
        "cell_id": cell.cell_id,
        "variant": "tp1",
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "node_id": "here",
        "hostname": "here",
        "gpu_uuids": ["cpu:here:0"],
        "slot": cell.slot.name,
        "launch": 0,
        "attempt": 0,
    }
    folder = RunFolder.create(FOLDER, "bench", {"spec": {}, "plan": {}})
    worker = Worker(Job(config, where, {}, "here", ""))
    worker.start()
    llm = worker._engine._llm
    prompts = [{"prompt_token_ids": list(r.prompt_token_ids)} for r in requests]
    params = [sampling_params(r.sampling) for r in requests]

    def bare() -> float:
        llm.reset_prefix_cache()
        began = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        return time.perf_counter() - began

    def trial(number: int) -> float:
        job = TrialJob(number, number, "batch", spec.seed, batches)
        began = time.perf_counter()
        observations, _ = worker.run_trial(job)
        ids = set(observations.column("payload_id").to_pylist())
        unseen = sorted(ids - known)
        payloads = worker.payloads(unseen) if unseen else None
        folder.write_trial((cell.cell_id, 0, number), observations, payloads)
        known.update(ids)
        return time.perf_counter() - began

    known: set[bytes] = set()
    bare()
    trial(0)
    pairs = [(bare(), trial(i + 1)) for i in range(PAIRS)]
    ratios = [t / b for b, t in pairs]
    print(
        json.dumps(
            {
                "requests": len(requests),
                "max_tokens": MAX_TOKENS,
                "ratio": median(ratios),
                "ratio_min": min(ratios),
                "ratio_max": max(ratios),
                "bare_s": median(b for b, _ in pairs),
                "trial_s": median(t for _, t in pairs),
            }
        )
    )


if __name__ == "__main__":
    main()
