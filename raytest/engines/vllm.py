"""vLLM behind the engine protocol: one ``LLM`` in this process, with the rank extension in every
rank."""

from __future__ import annotations

import json
import os
import re
import uuid
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from raytest.engines.base import (
    SEED_VARIABLE,
    Completion,
    EngineConfig,
    Request,
    Sampling,
    StepLog,
)
from raytest.engines.trace import Trace, TraceJob, trace_of
from raytest.errors import CellError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

RANK_EXTENSION = "raytest.engines.vllm_rank.RankExtension"


class VllmEngine:
    """One vLLM engine. Build it in the process that shall own it; one per process, since vLLM keeps
    environment and patches of the first engine for the life of the process."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._llm: Any = None
        self._states_before_load: list[Mapping[str, str]] = []

    def start(self) -> None:
        """Load the model on every rank. Raises CellError with vLLM's own reason."""
        config = self._config
        os.environ[SEED_VARIABLE] = json.dumps(
            {"seed": config.seed, "level": config.level, "warn_only": config.warn_only}
        )
        from vllm import LLM

        if config.trace_replay:
            from raytest.engines.vllm_score import require_trace_replay

            require_trace_replay()
        try:
            self._llm = LLM(**engine_arguments(config))
        except (RuntimeError, ValueError, TypeError, OSError, AssertionError, ImportError) as error:
            raise engine_failure(error, "vLLM did not start") from error
        self._states_before_load = self._call("raytest_prepare")
        if config.fault is not None and not any(self._call("raytest_plant", dict(config.fault))):
            raise CellError(f"no rank planted the fault {dict(config.fault)}")

    def states_before_load(self) -> list[Mapping[str, str]]:
        """The seed audit of each rank from before it loaded the model."""
        return self._states_before_load

    def vocabulary_size(self) -> int:
        """Number of token ids the model can produce."""
        return int(self._llm.llm_engine.model_config.get_vocab_size())

    def generate(self, batches: Sequence[Sequence[Request]]) -> tuple[list[Completion], StepLog]:
        """Run the batches one after the other. Raises CellError when the engine itself fails."""
        completions: list[Completion] = []
        for batch in batches:
            beams = [r for r in batch if r.sampling.beam_width > 0]
            plain = [r for r in batch if r.sampling.beam_width == 0]
            completions += self._sample(plain) if plain else []
            completions += self._beam_search(beams) if beams else []
        return completions, self._steps()

    def score(
        self, requests: Sequence[Request], completions: Sequence[Sequence[int]]
    ) -> list[Completion]:
        """Logprobs of fixed completions: on the decode path where the engine was started for it,
        else through ``prompt_logprobs`` (the prefill path)."""
        from raytest.engines import vllm_score as fixed

        make, read = (
            (fixed.decode, fixed.decoded)
            if self._config.trace_replay
            else (fixed.prefill, fixed.prefilled)
        )
        outputs = self._run(*make(requests, completions))
        return [
            failed(request, "refused", output)
            if isinstance(output, str)
            else read(request, tokens, output)
            for request, tokens, output in zip(requests, completions, outputs, strict=True)
        ]

    def reset(self, seed: int) -> list[Mapping[str, str]]:
        """Drop the prefix cache and seed every rank; the audit, one mapping per rank."""
        self._llm.reset_prefix_cache()
        return self._call("raytest_reset", seed, self._config.level, self._config.warn_only)

    def rank_fingerprints(self) -> list[Mapping[str, str]]:
        """Fingerprint of each rank's process, in rank order."""
        return self._call("raytest_fingerprint")

    def trace_batches(self, job: TraceJob) -> Trace:
        """Run the batches with hooks on every module of every rank; see :class:`TraceJob`.

        The hooks are out again when it returns, also where it raises CellError.
        """
        self._call("raytest_trace_start", job.options())
        taken: list[Any] | None = None
        try:
            completions, _ = self.generate(job.batches)
            taken = self._call("raytest_trace_take")
        finally:
            if taken is None:
                self._call("raytest_trace_stop")
        return trace_of(taken, completions)

    def close(self) -> None:
        """Stop the engine and its processes; errors on the way are of no use to anyone."""
        llm, self._llm = self._llm, None
        shutdown = getattr(getattr(llm, "llm_engine", None), "engine_core", None)
        if shutdown is not None:
            try:
                shutdown.shutdown()
            except (RuntimeError, OSError, AttributeError, ValueError):
                return

    def _call(self, method: str, *args: Any) -> list[Any]:
        """Call an extension method on every rank and check that the replies are this call's own."""
        nonce = uuid.uuid4().hex
        try:
            replies = self._llm.collective_rpc(method, args=(nonce, *args))
        except (RuntimeError, ValueError, TimeoutError, OSError, AttributeError) as error:
            raise CellError(f"a rank did not answer {method}: {first_line(error)}") from error
        for rank, reply in enumerate(replies):
            if reply.get("nonce") != nonce:
                raise CellError(
                    f"rank {rank} answered another call than {method}; engine is unusable"
                )
            if "error" in reply:
                raise CellError(f"rank {reply['rank']}: {method}: {reply['error']}")
        return [reply["value"] for reply in replies]

    def _steps(self) -> StepLog:
        """Steps of the first rank; all ranks of an engine run the same schedule."""
        steps = self._call("raytest_steps_taken")[0]
        return StepLog([s[0] for s in steps], [s[1] for s in steps])

    def _run(self, prompts: list[Any], params: list[Any]) -> list[Any]:
        """One ``generate`` call; a refused request's place takes the reason. vLLM returns what it
        has without checking, so count it here."""
        try:
            outputs = self._llm.generate(prompts, params, use_tqdm=False)
        except refusals():
            return self._screened(prompts, params)
        except (RuntimeError, OSError, AssertionError, TypeError, TimeoutError) as error:
            raise engine_failure(error) from error
        if len(outputs) != len(prompts):
            raise CellError(f"vLLM returned {len(outputs)} results for {len(prompts)} requests")
        return list(outputs)

    def _sample(self, requests: Sequence[Request]) -> list[Completion]:
        prompts = [{"prompt_token_ids": list(r.prompt_token_ids)} for r in requests]
        params = [sampling_params(r.sampling) for r in requests]
        outputs = self._run(prompts, params)
        completions: list[Completion] = []
        for request, output in zip(requests, outputs, strict=True):
            if isinstance(output, str):
                completions.append(failed(request, "refused", output))
            else:
                completions += [completion_of(request, output, c) for c in output.outputs]
        return completions

    def _screened(self, prompts: list[Any], params: list[Any]) -> list[Any]:
        """Requests one by one into the queue, so that one vLLM refuses costs no other; refused ones
        come back as the reason."""
        results: list[Any] = []
        accepted: list[int] = []
        for i, (prompt, param) in enumerate(zip(prompts, params, strict=True)):
            try:
                self._llm.enqueue([prompt], [param], use_tqdm=False)
                accepted.append(i)
                results.append(None)
            except refusals() as error:
                results.append(first_line(error))
        outputs = self._llm.wait_for_completion(use_tqdm=False)
        if len(outputs) != len(accepted):
            raise CellError(f"vLLM returned {len(outputs)} results for {len(accepted)} requests")
        for i, output in zip(accepted, outputs, strict=True):
            results[i] = output
        return results

    def _beam_search(self, requests: Sequence[Request]) -> list[Completion]:
        """Beam search through vLLM's present interface; the best beam is sample 0, and so on."""
        from vllm.sampling_params import BeamSearchParams

        completions: list[Completion] = []
        for request in requests:
            s = request.sampling
            params = BeamSearchParams(
                beam_width=s.beam_width,
                max_tokens=s.max_tokens,
                ignore_eos=s.ignore_eos,
                temperature=s.temperature,
                length_penalty=s.length_penalty,
            )
            prompt = {"prompt_token_ids": list(request.prompt_token_ids)}
            try:
                (output,) = self._llm.beam_search([prompt], params)
            except refusals() as error:
                completions.append(failed(request, "refused", first_line(error)))
                continue
            completions += [_beam(request, i, b) for i, b in enumerate(output.sequences)]
        return completions


def refusals() -> tuple[type[Exception], ...]:
    """What vLLM raises for a request that it will not take (newer versions have a class for it)."""
    try:
        from vllm.exceptions import VLLMClientError
    except ImportError:
        return (ValueError,)
    return ValueError, VLLMClientError


def engine_arguments(config: EngineConfig) -> dict[str, Any]:
    """Arguments of ``LLM``: the variant's own win over the profile's, which win over the
    level's."""
    arguments: dict[str, Any] = {
        "model": config.model_path,
        "tokenizer": config.tokenizer_path,
        "dtype": config.dtype,
        "seed": config.seed,
        "tensor_parallel_size": config.tensor_parallel_size,
        "pipeline_parallel_size": config.pipeline_parallel_size,
        "trust_remote_code": config.trust_remote_code,
        "distributed_executor_backend": config.executor,
        "worker_extension_cls": RANK_EXTENSION,
        "generation_config": "vllm",
        "disable_log_stats": True,
    }
    if config.max_model_len is not None:
        arguments["max_model_len"] = config.max_model_len
    if config.logprobs is not None and config.logprobs > 20:
        arguments["max_logprobs"] = config.logprobs
    if config.trace_replay:
        arguments["enable_trace_replay"] = True
    return {**arguments, **config.engine_args}


def sampling_params(sampling: Sampling) -> Any:
    """vLLM's form of the parameters, every field that shapes the result set."""
    from vllm import SamplingParams

    return SamplingParams(
        n=sampling.n,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        seed=sampling.seed,
        max_tokens=sampling.max_tokens,
        stop_token_ids=list(sampling.stop_token_ids),
        ignore_eos=sampling.ignore_eos,
        logprobs=sampling.logprobs,
        flat_logprobs=sampling.logprobs is not None,
        detokenize=False,
    )


def completion_of(request: Request, output: Any, sample: Any) -> Completion:
    """One sample of a request's output."""
    import numpy as np

    tokens = np.asarray(sample.token_ids, dtype=np.int32)
    logprobs, top_k, top_ids, top_logprobs = _flat(sample.logprobs, len(tokens))
    return Completion(
        request_id=request.request_id,
        sample_index=int(sample.index),
        token_ids=tokens,
        logprobs=logprobs,
        top_k=top_k,
        top_token_ids=top_ids,
        top_logprobs=top_logprobs,
        finish_reason=None if sample.finish_reason is None else str(sample.finish_reason),
        stop_reason=None if sample.stop_reason is None else str(sample.stop_reason),
        cumulative_logprob=sample.cumulative_logprob,
        n_cached_tokens=output.num_cached_tokens,
    )


Flat = tuple["npt.NDArray[np.float32]", int, "npt.NDArray[np.int32]", "npt.NDArray[np.float32]"]


def _flat(logprobs: Any, n_tokens: int) -> Flat:
    """vLLM's flat logprobs (per position the sampled token, then k candidates) as arrays.

    Python floats made from float32 go back to float32 exactly.
    """
    import numpy as np

    if logprobs is None or n_tokens == 0:
        empty = np.empty(0, dtype=np.float32)
        return empty, 0, np.empty(0, dtype=np.int32), empty
    width, rest = divmod(len(logprobs.logprobs), n_tokens)
    if rest or len(logprobs.start_indices) != n_tokens:
        raise CellError(f"vLLM returned {len(logprobs.logprobs)} logprobs for {n_tokens} tokens")
    values = np.asarray(logprobs.logprobs, dtype=np.float64).astype(np.float32)
    ids = np.asarray(logprobs.token_ids, dtype=np.int32).reshape(n_tokens, width)
    values = values.reshape(n_tokens, width)
    top_ids, top_values = sort_candidates(ids[:, 1:], values[:, 1:])
    return values[:, 0].copy(), width - 1, top_ids.reshape(-1), top_values.reshape(-1)


def sort_candidates(
    ids: npt.NDArray[np.int32], values: npt.NDArray[np.float32]
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
    """Candidates [t, k] by logprob descending, equal ones by id: the order of ties in
    ``torch.topk`` is unspecified, so it must not count as a difference. NaN comes last."""
    import numpy as np

    order = np.lexsort((ids, -values), axis=-1)
    return np.take_along_axis(ids, order, axis=-1), np.take_along_axis(values, order, axis=-1)


def _beam(request: Request, index: int, sequence: Any) -> Completion:
    """A beam: vLLM gives its tokens (prompt included) and their logprobs, no candidates."""
    import numpy as np

    tokens = sequence.tokens[len(request.prompt_token_ids) :]
    logprobs = [step[t].logprob for step, t in zip(sequence.logprobs, tokens, strict=False)]
    return Completion(
        request_id=request.request_id,
        sample_index=index,
        token_ids=np.asarray(tokens, dtype=np.int32),
        logprobs=np.asarray(logprobs, dtype=np.float64).astype(np.float32),
        top_k=0,
        top_token_ids=np.empty(0, dtype=np.int32),
        top_logprobs=np.empty(0, dtype=np.float32),
        finish_reason=getattr(sequence, "finish_reason", None),
        cumulative_logprob=float(sequence.cum_logprob),
    )


def failed(request: Request, kind: str, reason: str) -> Completion:
    """The row that stands for a request that gave no result."""
    import numpy as np

    empty = np.empty(0, dtype=np.float32)
    ids = np.empty(0, dtype=np.int32)
    return Completion(
        request.request_id, 0, ids, empty, 0, ids, empty, error_kind=kind, error=reason
    )


def engine_failure(error: BaseException, what: str = "vLLM failed") -> CellError:
    """vLLM's error as the cell's: an operation that level 5 refuses with its layer and the way out,
    anything else with its first line."""
    from raytest.seeding import nondeterministic_operation

    found = nondeterministic_operation(str(error))
    if found is None:
        return CellError(f"{what}: {first_line(error)}")
    operation, advice = found
    module = re.search(r"\[in module ([^\]]+)\]", str(error))
    where = f" in {module[1]}" if module else ""
    return CellError(f"{operation}{where} has no deterministic implementation; {advice}")


def first_line(error: BaseException, limit: int = 500) -> str:
    """The error's type and first line that says something, without a traceback."""
    text = str(error).strip().splitlines()
    if len(text) > 1 and re.match(r"\d+ validation errors? for ", text[0]):
        text = [line.partition(" [type=")[0].strip() for line in text[1:]]
    return f"{type(error).__name__}: {text[0][:limit] if text else ''}"
