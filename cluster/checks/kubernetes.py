"""Kubernetes files: strict schemas, and the rules that make a run mean what it says."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cluster.checks.outcome import Outcome, documents, outcome

# Kubernetes' own schemas as of a version that KubeRay 1.7 supports.
KUBERNETES = "1.34"
RAYJOB, CRONJOB, RAYCRONJOB = "rayjob.yaml", "nightly-cronjob.yaml", "raycronjob.yaml"
Object = dict[str, Any]


def checks(folder: Path) -> list[Outcome]:
    """Strict validation of every object and pod template, then the rules of each file."""
    kuberay = folder / "kuberay"
    (job,) = documents(kuberay / RAYJOB)
    (cron_ray_job,) = documents(kuberay / RAYCRONJOB)
    nightly = documents(kuberay / CRONJOB)
    template = cron_ray_job["spec"]["jobTemplate"]
    return [
        outcome(f"kuberay/{RAYJOB}", "kubernetes", _templates(job["spec"])),
        outcome(f"kuberay/{RAYJOB}", "rules", _job_rules(job["spec"], job["metadata"]["name"])),
        outcome(f"kuberay/{CRONJOB}", "kubernetes", (p for o in nightly for p in _strict(o))),
        outcome(f"kuberay/{CRONJOB}", "rules", _nightly_rules(nightly, job["spec"])),
        outcome(f"kuberay/{RAYCRONJOB}", "kubernetes", _templates(template)),
        outcome(f"kuberay/{RAYCRONJOB}", "rules", _ray_cron_rules(template, job["spec"])),
    ]


def _strict(thing: Object) -> Iterator[str]:
    """An object against Kubernetes' schema, unknown keys refused."""
    import kubernetes_validate

    try:
        kubernetes_validate.validate(thing, KUBERNETES, strict=True)
    except kubernetes_validate.ValidationError as error:
        where = ".".join(str(part) for part in error.path)
        yield f"{thing['kind']} {thing['metadata'].get('name', '')}: {where}: {error.message}"
    except kubernetes_validate.SchemaNotFoundError as error:
        yield f"{thing.get('kind')}: {error}"


def _templates(spec: Object) -> Iterator[str]:
    """The pod templates of a RayJob, each as a Pod."""
    for group, template in _groups(spec):
        metadata = {"name": group, **template.get("metadata", {})}
        yield from _strict(
            {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}
        )


def _groups(spec: Object) -> Iterator[tuple[str, Object]]:
    cluster = spec["rayClusterSpec"]
    yield "head", cluster["headGroupSpec"]["template"]
    for group in cluster["workerGroupSpecs"]:
        yield group["groupName"], group["template"]


def _job_rules(spec: Object, name: str) -> Iterator[str]:
    """Rules of KubeRay's operator that its schema lacks, and ours."""
    if f"--run {name} " not in spec["entrypoint"]:
        yield f"entrypoint: --run {name} is missing: launch.sh looks for the run under that name"
    yield from _entrypoint(spec)
    for group, template in _groups(spec):
        yield from (f"{group}: {problem}" for problem in _ray_pod(template["spec"]))
    for group in spec["rayClusterSpec"]["workerGroupSpecs"]:
        yield from (f"{group['groupName']}: {problem}" for problem in _worker_group(group))
    version = spec["rayClusterSpec"]["rayVersion"]
    for image in _images(spec):
        if f"ray{version}" not in image:
            yield f"image {image}: not of rayVersion {version}"


def _entrypoint(spec: Object) -> Iterator[str]:
    words = spec["entrypoint"].split()
    if words[:2] != ["bash", "/opt/raytest/cluster/run.sh"] or ";" in spec["entrypoint"]:
        yield "entrypoint: not run.sh, which ends with the verdict"
    deadline = words[words.index("--deadline") + 1] if "--deadline" in words else "0"
    if not 0 < int(deadline) < spec["activeDeadlineSeconds"]:
        yield "entrypoint: --deadline is no time before activeDeadlineSeconds, so nothing is judged"
    if spec["preRunningDeadlineSeconds"] >= spec["activeDeadlineSeconds"]:
        yield "preRunningDeadlineSeconds: not before activeDeadlineSeconds"


def _worker_group(group: Object) -> Iterator[str]:
    if not group["replicas"] == group["minReplicas"] == group["maxReplicas"]:
        yield "replicas, minReplicas and maxReplicas differ: the number of hosts may change"
    pod = group["template"]["spec"]
    gpus = [c["resources"]["limits"].get("nvidia.com/gpu") for c in pod["containers"]]
    if not any(gpus):
        yield "no container asks for GPUs"
    labels = group["template"].get("metadata", {}).get("labels", {})
    rules = (
        pod.get("affinity", {})
        .get("podAntiAffinity", {})
        .get("requiredDuringSchedulingIgnoredDuringExecution", [])
    )
    if not any(_keeps_apart(rule, labels) for rule in rules):
        yield "nothing keeps two workers off one host (required podAntiAffinity)"


def _keeps_apart(rule: Object, labels: Object) -> bool:
    wanted = rule.get("labelSelector", {}).get("matchLabels", {})
    return (
        rule.get("topologyKey") == "kubernetes.io/hostname"
        and bool(wanted)
        and wanted.items() <= labels.items()
    )


def _ray_pod(pod: Object) -> Iterator[str]:
    yield from _pod(pod)
    memory = {
        volume["name"]
        for volume in pod.get("volumes", ())
        if volume.get("emptyDir", {}).get("medium") == "Memory"
        and "sizeLimit" in volume["emptyDir"]
    }
    for container in pod["containers"]:
        mounts = {m["mountPath"]: m["name"] for m in container.get("volumeMounts", ())}
        if mounts.get("/dev/shm") not in memory:
            yield f"{container['name']}: /dev/shm is not an in-memory emptyDir with a sizeLimit"
        resources = container.get("resources", {})
        if resources.get("requests") != resources.get("limits") or not resources.get("limits"):
            yield f"{container['name']}: requests and limits differ"


def _pod(pod: Object) -> Iterator[str]:
    if pod.get("restartPolicy") != "Never":
        yield "restartPolicy is not Never: a second start hides the first one's end"
    for container in pod["containers"]:
        if not re.search(r":[^:/]*\d[^:/]*$|@sha256:[0-9a-f]{64}$", container["image"]):
            yield f"{container['name']}: image {container['image']} is not pinned"
        for variable in container.get("env", ()):
            if re.search(r"TOKEN|SECRET|PASSWORD|KEY", variable["name"]) and "value" in variable:
                yield f"{container['name']}: {variable['name']}: a secret in the file"


def _images(spec: Object) -> Iterator[str]:
    for _, template in _groups(spec):
        yield from (container["image"] for container in template["spec"]["containers"])


def _nightly_rules(objects: list[Object], job: Object) -> Iterator[str]:
    kinds = {thing["kind"]: thing for thing in objects}
    spec = kinds["CronJob"]["spec"]
    inner = spec["jobTemplate"]["spec"]
    pod = inner["template"]["spec"]
    if spec.get("concurrencyPolicy") != "Forbid":
        yield "concurrencyPolicy is not Forbid: two runs would share GPUs"
    for key in ("timeZone", "startingDeadlineSeconds", "failedJobsHistoryLimit"):
        if key not in spec:
            yield f"{key} is missing"
    if inner.get("backoffLimit") != 0:
        yield "backoffLimit is not 0: a retry hides a mismatch"
    yield from _pod(pod)
    command = pod["containers"][0]["command"]
    if "/opt/raytest/cluster/kuberay/launch.sh" not in command:
        yield "command: not launch.sh, which ends with the verdict"
    waits = int(command[command.index("--deadline") + 1]) if "--deadline" in command else 0
    if not job["activeDeadlineSeconds"] < waits < inner.get("activeDeadlineSeconds", 0):
        yield "deadlines: expected those of the RayJob < launch.sh < the CronJob's Job"
    yield from _nightly_names(kinds, pod, job)


def _nightly_names(kinds: dict[str, Object], pod: Object, job: Object) -> Iterator[str]:
    """One object names another by a string that nothing else checks."""
    account = kinds["ServiceAccount"]["metadata"]["name"]
    binding = kinds["RoleBinding"]
    if pod.get("serviceAccountName") != account or binding["subjects"][0]["name"] != account:
        yield f"ServiceAccount {account}: not that of the pod and the RoleBinding"
    if binding["roleRef"]["name"] != kinds["Role"]["metadata"]["name"]:
        yield "RoleBinding: roleRef names another Role"
    verbs = {v for rule in kinds["Role"]["rules"] for v in rule["verbs"]}
    if verbs != {"create", "get", "delete"}:
        yield f"Role: verbs {sorted(verbs)}: expected what launch.sh does: create, get, delete"
    claim = kinds["PersistentVolumeClaim"]["metadata"]["name"]
    head = job["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]
    if claim not in _claims(pod) & _claims(head):
        yield f"PersistentVolumeClaim {claim}: not mounted by both the CronJob and the Ray head"


def _claims(pod: Object) -> set[str]:
    volumes = pod.get("volumes", ())
    return {
        v["persistentVolumeClaim"]["claimName"] for v in volumes if "persistentVolumeClaim" in v
    }


def _ray_cron_rules(template: Object, job: Object) -> Iterator[str]:
    yield from _entrypoint(template)
    if "--run" in template["entrypoint"].split():
        yield "entrypoint: a fixed --run; the second night's would be refused"
    apart = sorted(k for k in {*template, *job} if template.get(k) != job.get(k))
    if apart != ["entrypoint"]:
        yield f"differs from rayjob.yaml in {', '.join(apart)}; expected: in the entrypoint alone"
