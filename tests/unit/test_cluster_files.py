"""Every file of cluster/ passes its check, and a copy with one thing wrong does not."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from cluster.checks import (
    docker,
    github,
    kubernetes,
    npd,
    prometheus,
    schedules,
    schemas,
    shell,
    systemd,
)
from cluster.checks.__main__ import check_all
from cluster.checks.outcome import CLUSTER, Outcome, find_tool

RAYJOB, RAYCRONJOB = "kuberay/rayjob.yaml", "kuberay/raycronjob.yaml"
CRONJOB, WORKFLOW = "kuberay/nightly-cronjob.yaml", "github/nightly.yml"
SERVICE, TIMER = "systemd/raytest-nightly.service", "systemd/raytest-nightly.timer"
ALERT, SBATCH = "systemd/raytest-alert@.service", "slurm/raytest.sbatch"
ALERTS, ALERTS_TEST = "prometheus/alerts.yml", "prometheus/alerts_test.yml"
NPD, LAUNCHER = "npd/raytest.json", "ray-cluster.yaml"

# Tools that are no Python packages: a machine without them says so, and the rest is still checked.
DEBIAN = {"promtool", "systemd-analyze"}


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    folder = tmp_path / "cluster"
    shutil.copytree(CLUSTER, folder, ignore=shutil.ignore_patterns("__pycache__", "checks"))
    return folder


@pytest.fixture(scope="module")
def shipped() -> list[Outcome]:
    return check_all()


def test_what_is_shipped_passes_its_checks(shipped: list[Outcome]) -> None:
    assert [found for found in shipped if found.problems] == []


def test_only_tools_that_are_no_packages_may_be_missing(shipped: list[Outcome]) -> None:
    assert {found.check for found in shipped if found.skipped} <= DEBIAN


def test_every_file_has_a_check(shipped: list[Outcome]) -> None:
    files = {
        str(path.relative_to(CLUSTER))
        for path in CLUSTER.rglob("*")
        if path.is_file() and not {"checks", "schema"} & {*path.relative_to(CLUSTER).parts}
    }
    assert files - {found.file for found in shipped} == {"README.md", "npd/schema.json"}


def test_a_file_of_another_shape_fails_in_one_line(copy: Path) -> None:
    change(copy, ALERTS, "expr: raytest_gpu", "exp: raytest_gpu")
    change(copy, RAYJOB, "  backoffLimit: 0", "  backoffLimit: 0\n  backoffLimit: 0")
    found = [outcome for outcome in check_all(copy) if outcome.check == "shape"]
    assert [(o.file, len(o.problems)) for o in found] == [("kubernetes", 1), ("prometheus", 1)]
    assert "expr" in found[1].problems[0]


def change(folder: Path, file: str, old: str, new: str) -> None:
    path = folder / file
    text = path.read_text()
    assert old in text, f"{file} has no {old!r}: the test is stale"
    path.write_text(text.replace(old, new, 1))


def complaints(outcomes: list[Outcome]) -> str:
    return "\n".join(f"{o.file}: {o.check}: {line}" for o in outcomes for line in o.problems)


def refused(
    checks: Callable[[Path], list[Outcome]], folder: Path, file: str, old: str, new: str, word: str
) -> None:
    change(folder, file, old, new)
    said = complaints(checks(folder))
    assert word in said, said or "nothing was said"


@pytest.mark.parametrize(
    ("file", "old", "new", "word"),
    [
        (RAYJOB, "backoffLimit: 0", "backoffLimit: 1", "backoffLimit"),
        (RAYJOB, "backoffLimit: 0", "backofLimit: 0", "backofLimit"),
        (RAYJOB, "shutdownAfterJobFinishes: true", "shutdownAfterJobFinishes: false", "shutdown"),
        (RAYJOB, "  preRunningDeadlineSeconds: 1500\n", "", "preRunningDeadlineSeconds"),
        (RAYJOB, "activeDeadlineSeconds: 14400", "activeDeadlineSeconds: 0", "activeDeadline"),
        (RAYJOB, "enableInTreeAutoscaling: false", "enableInTreeAutoscaling: true", "Autoscaling"),
        (RAYJOB, "mode: token", "mode: disabled", "mode"),
        (RAYJOB, "numOfHosts: 1", "numOfHosts: 2", "numOfHosts"),
        (RAYJOB, "name: raytest-manual", "name: Raytest_manual", "name"),
        (RAYJOB, "  submissionMode", "  schedule: daily\n  submissionMode", "schedule"),
        (RAYJOB, 'num-cpus: "0"', "num-cpus: 0", "num-cpus"),
        (RAYJOB, "  backoffLimit: 0", "  backoffLimit: 0\n  backoffLimit: 0", "backoffLimit"),
        (RAYCRONJOB, "timeZone: Etc/UTC", "timezone: Etc/UTC", "timezone"),
        (RAYCRONJOB, "jobTemplate:", "concurrencyPolicy: Forbid\n  jobTemplate:", "concurrency"),
        (RAYCRONJOB, "    backoffLimit: 0", "    backoffLimit: 2", "backoffLimit"),
        (NPD, '"timeout": "25s"', '"timeout": 25', "timeout"),
        (NPD, '"max_output_length": 80', '"max_output_length": 200', "max_output_length"),
        (NPD, '"invoke_interval"', '"invokeInterval"', "invokeInterval"),
        (WORKFLOW, "timeout-minutes: 270", "timeout-minute: 270", "timeout-minute"),
        (WORKFLOW, "runs-on", "run-on", "run-on"),
        (LAUNCHER, "max_workers: 2", "max_worker: 2", "max_worker"),
        (LAUNCHER, "run_options", "run_option", "run_option"),
    ],
)
def test_a_schema_refuses(copy: Path, file: str, old: str, new: str, word: str) -> None:
    refused(lambda folder: [schemas.check_file(folder, file)], copy, file, old, new, word)


@pytest.mark.parametrize(
    ("file", "old", "new", "word"),
    [
        (RAYJOB, "runAsNonRoot", "runAsNotRoot", "runAsNotRoot"),
        (RAYJOB, "medium: Memory", 'medium: ""', "/dev/shm"),
        (RAYJOB, "mountPath: /dev/shm", "mountPath: /dev/sm", "/dev/shm"),
        (RAYJOB, "                sizeLimit: 16Gi\n", "", "/dev/shm"),
        (RAYJOB, 'nvidia.com/gpu: "8"', 'nvidia.com/gpu: "4"', "requests and limits"),
        (RAYJOB, "topologyKey: kubernetes.io/hostname", "topologyKey: zone", "one host"),
        (RAYJOB, "name: raytest-worker", "name: raytest-other", "one host"),
        (RAYJOB, "maxReplicas: 2", "maxReplicas: 8", "replicas"),
        (RAYJOB, "restartPolicy: Never", "restartPolicy: Always", "restartPolicy"),
        (RAYJOB, ":0.1.0-vllm0.32.0-ray2.60.0", ":latest", "not pinned"),
        (RAYJOB, 'rayVersion: "2.60.0"', 'rayVersion: "2.59.0"', "rayVersion"),
        (RAYJOB, "--run raytest-manual", "--run other", "--run"),
        (RAYJOB, "bash /opt/raytest/cluster/run.sh", "raytest run", "entrypoint"),
        (RAYJOB, "--deadline 12600", "--deadline 14400", "--deadline"),
        (
            RAYJOB,
            "envFrom:",
            "env: [{name: HF_TOKEN, value: x}]\n                envFrom:",
            "secret",
        ),
        (RAYJOB, "preRunningDeadlineSeconds: 1500", "preRunningDeadlineSeconds: 15000", "preRun"),
        (RAYCRONJOB, "run.sh --results", "run.sh --run x --results", "--run"),
        (RAYCRONJOB, "sizeLimit: 64Gi", "sizeLimit: 32Gi", "rayClusterSpec"),
        (CRONJOB, "concurrencyPolicy: Forbid", "concurrencyPolicy: Allow", "concurrencyPolicy"),
        (CRONJOB, "concurrencyPolicy: Forbid", "concurencyPolicy: Forbid", "concurencyPolicy"),
        (CRONJOB, "backoffLimit: 0", "backoffLimit: 1", "backoffLimit"),
        (CRONJOB, "  timeZone: Etc/UTC\n", "", "timeZone"),
        (CRONJOB, "  startingDeadlineSeconds: 3600\n", "", "startingDeadlineSeconds"),
        (CRONJOB, "activeDeadlineSeconds: 18000", "activeDeadlineSeconds: 16000", "deadlines"),
        (CRONJOB, "kuberay/launch.sh", "kuberay/create.sh", "launch.sh"),
        (CRONJOB, "      - delete\n", "      - patch\n", "verbs"),
        (CRONJOB, "apiGroup: rbac", "apiGroups: rbac", "apiGroup"),
        (CRONJOB, "serviceAccountName: raytest-nightly", "serviceAccountName: other", "Account"),
        (CRONJOB, "claimName: raytest-results", "claimName: other", "PersistentVolumeClaim"),
        (CRONJOB, "  accessModes:", "  accessMode:", "accessMode"),
    ],
)
def test_kubernetes_rules_refuse(copy: Path, file: str, old: str, new: str, word: str) -> None:
    refused(kubernetes.checks, copy, file, old, new, word)


@pytest.mark.parametrize(
    ("file", "old", "new", "word"),
    [
        (CRONJOB, '"17 2 * * *"', '"17 25 * * *"', CRONJOB),
        (CRONJOB, "timeZone: Etc/UTC", "timeZone: Etc/UCT2", "time zone"),
        (RAYCRONJOB, '"17 2 * * *"', '"17 2 * * 1"', "no run between"),
        (WORKFLOW, '"17 2 * * *"', '"17 2 * *"', WORKFLOW),
        (WORKFLOW, '"17 2 * * *"', '"0 0 31 2 *"', WORKFLOW),
    ],
)
def test_a_schedule_is_refused(copy: Path, file: str, old: str, new: str, word: str) -> None:
    refused(schedules.checks, copy, file, old, new, word)


@pytest.mark.parametrize(
    ("file", "old", "new", "word"),
    [
        ("run.sh", "done\n", "don\n", "run.sh: bash"),
        ("run.sh", '"$spec" --run-id', "$spec --run-id", "SC2086"),
        ("run.sh", "set -uo pipefail", "set -u", "pipefail"),
        ("run.sh", 'wait "$child"\nended', 'wait "$child" || true\nended', "thrown away"),
        ("run.sh", 'judge "$results"', 'exit "$ended" # "$results"', "raytest verdict"),
        ("submit.sh", 'judge "$results"', 'exit "$ended" # "$results"', "raytest verdict"),
        ("kuberay/launch.sh", 'judge "$results"', 'exit "$ended" # ', "raytest verdict"),
        ("judge.sh", "local results", "local -x results; lcal results", "judge.sh"),
        ("slurm/prolog.sh", "exit 0", "exit 0 | fi", "prolog.sh"),
        ("npd/verdict.sh", "esac", "", "verdict.sh"),
        ("systemd/alert.sh", "fi\n", "\n", "alert.sh"),
        (SBATCH, "#SBATCH --exclusive\n", "", "--exclusive is missing"),
        (SBATCH, "--no-requeue", "--requeue", "--no-requeue is missing"),
        (SBATCH, "--signal=B:TERM@180", "--signal=TERM@180", "--signal"),
        (SBATCH, "--ntasks-per-node=1\n", "--ntasks-per-node=8\n", "--ntasks-per-node"),
        (SBATCH, "#SBATCH --open-mode=append", "#SBATCH -open-mode=append", "#SBATCH line"),
        (SBATCH, "#SBATCH --time", "true\n#SBATCH --time", "--time is missing"),
    ],
)
def test_a_script_is_refused(copy: Path, file: str, old: str, new: str, word: str) -> None:
    refused(lambda folder: shell.check_script(folder, folder / file), copy, file, old, new, word)


@pytest.mark.parametrize(
    ("file", "old", "new", "word"),
    [
        (SERVICE, "Type=oneshot", "Type=simple", "oneshot"),
        (SERVICE, "TimeoutStartSec=4h", "TimeoutStartSec=infinity", "TimeoutStartSec"),
        (SERVICE, "OnFailure=raytest-alert@%n", "OnFailure=raytest@%n", "OnFailure"),
        (SERVICE, "TimeoutStopSec=90s", "SuccessExitStatus=143", "SuccessExitStatus"),
        (SERVICE, "UMask=0022", "RestartForceExitStatus=75", "RestartForceExitStatus"),
        (SERVICE, "cluster/run.sh", "bin/run", "run.sh"),
        (SERVICE, "ExecStart=/usr", "ExecStart=-/usr", "ignored"),
        (SERVICE, "User=raytest\n", "", "root"),
        (TIMER, "Persistent=true", "Persistent=false", "Persistent"),
        (TIMER, "RandomizedDelaySec=30min\n", "", "RandomizedDelaySec"),
        (TIMER, "timers.target", "multi-user.target", "timers.target"),
        (TIMER, "OnCalendar=", "OnCalender=", "OnCalendar"),
        (ALERT, "alert.sh %i", "alert.sh", "alert.sh"),
    ],
)
def test_a_unit_is_refused(copy: Path, file: str, old: str, new: str, word: str) -> None:
    refused(systemd.rules, copy, file, old, new, word)


@pytest.mark.skipif(find_tool("systemd-analyze") is None, reason="systemd-analyze is not here")
@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        (SERVICE, "TimeoutStopSec", "TimeoutStoppSec"),
        (SERVICE, "/usr/bin/env", "/usr/bin/no-such"),
        (SERVICE, "UMask=0022", "UMask=0028"),
        (TIMER, "FixedRandomDelay=true", "FixedRandomDelays=true"),
        (ALERT, "TimeoutStartSec=2min", "TimeoutStartSec=two"),
    ],
)
def test_systemd_itself_refuses(copy: Path, file: str, old: str, new: str) -> None:
    refused(lambda folder: [systemd.verify(folder, file)], copy, file, old, new, file)


@pytest.mark.skipif(find_tool("systemd-analyze") is None, reason="systemd-analyze is not here")
def test_systemd_itself_refuses_a_time_of_day(copy: Path) -> None:
    refused(schedules.checks, copy, TIMER, "02:17:00", "02:77:00", f"{TIMER}: systemd-analyze")


@pytest.mark.parametrize(
    ("file", "old", "new", "word"),
    [
        (ALERTS, "raytest_control_caught", "raytest_control_found", "no such metric"),
        (ALERTS, '{verdict="mismatch"}', '{result="mismatch"}', "no label result"),
        (ALERTS, "$labels.gpu_uuid", "$labels.uuid", "no label uuid"),
        (ALERTS, "alert: RaytestNoRun", "alert: RaytestNoMetrics", "twice"),
        (ALERTS, "alert: RaytestNoRun", "alert: RaytestSilent", "RaytestNoRun: is missing"),
        (ALERTS, "severity: critical", "severity: page", "severity"),
        (
            ALERTS_TEST,
            "alertname: RaytestGpuSuspect\n        exp",
            "alertname: X\n        exp",
            "fire",
        ),
        (ALERTS_TEST, "raytest_control_caught", "raytest_run_info", "no such metric"),
        (ALERTS_TEST, 'verdict="mismatch"', 'verdict="pass"', "twice"),
    ],
)
def test_an_alert_is_refused(copy: Path, file: str, old: str, new: str, word: str) -> None:
    refused(prometheus.rules, copy, file, old, new, word)


@pytest.mark.skipif(find_tool("promtool") is None, reason="promtool is not here (apt: prometheus)")
@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        (ALERTS, "== 0", "=== 0"),
        (ALERTS, "26 * 3600", "30 * 3600"),
        (ALERTS, "26 * 3600", "24 * 3600"),
        (ALERTS, "offset 25h", "offset 1h"),
        (ALERTS, "max_over_time(raytest_last_run_timestamp_seconds[7d])", "raytest_info"),
        (ALERTS, 'verdict="mismatch"} == 1', 'verdict="mismatch"} == 2'),
        (ALERTS, "raytest_gpu_suspect == 1", "raytest_gpu_suspect == 0"),
        (ALERTS, "changes(raytest_last_run_timestamp_seconds[25h]) > 0", "raytest_cells"),
    ],
)
def test_promtool_refuses(copy: Path, file: str, old: str, new: str) -> None:
    refused(prometheus.checks, copy, file, old, new, "promtool")


@pytest.mark.parametrize(
    ("old", "new", "word"),
    [
        ("@11bd71901bbe5b1630ceea73d27597364c9af683", "@v4", "zizmor"),
        ("        with:\n          persist-credentials: false\n", "", "zizmor"),
        ('--run "$RUN_ID"', "--run ${{ github.event.head_commit.message }}", "zizmor"),
        ("contents: read", "contents: write", "permissions"),
        ("cancel-in-progress: false", "cancel-in-progress: true", "concurrency"),
        ("shell: bash", "shell: sh", "shell"),
        ("    timeout-minutes: 270\n", "", "timeout-minutes"),
        ("if: always()", "if: success()", "raytest verdict"),
        ("if: always()\n        uses", "if: success()\n        uses", "uploaded"),
        (
            "if: always()\n        run",
            "if: always()\n        continue-on-error: true\n        run",
            "green",
        ),
    ],
)
def test_a_workflow_is_refused(copy: Path, old: str, new: str, word: str) -> None:
    refused(github.checks, copy, WORKFLOW, old, new, word)


@pytest.mark.parametrize(
    ("file", "old", "new", "word"),
    [
        ("Dockerfile", "cuda:12.9.1-devel-ubuntu24.04", "cuda:latest", "not pinned"),
        ("Dockerfile", "USER 1000:1000", "USER root", "USER"),
        ("Dockerfile", "--no-install-recommends ", "", "--no-install-recommends"),
        ("Dockerfile", "rm -rf /var/lib/apt/lists/*", "true", "lists"),
        ("Dockerfile", "install --no-cache-dir", "install", "--no-cache-dir"),
        ("Dockerfile", "DO_NOT_TRACK=1", "HF_TOKEN=x", "secret"),
        ("Dockerfile", 'CMD ["raytest", "--help"]', "CMD raytest --help", "CMD"),
        ("Dockerfile", '"-o", "pipefail", ', "", "pipefail"),
        ("Dockerfile", "COPY raytest ", "COPY rayetst ", "COPY rayetst"),
        ("Dockerfile", "COPY raytest ", "ADD raytest ", "ADD"),
        ("Dockerfile", "RAY_VERSION=2.60.0", "RAY_VERSION=2.61.0", "tag"),
        ("Dockerfile", "&& install -d", "&& wget -qO- https://x | sh && install -d", "unseen"),
        (CRONJOB, "raytest:0.1.0", "raytest:0.2.0", CRONJOB),
        (LAUNCHER, "ray2.60.0", "ray2.59.0", LAUNCHER),
        (LAUNCHER, "max_workers: 2", "max_workers: 4", "worker_ips"),
    ],
)
def test_an_image_is_refused(copy: Path, file: str, old: str, new: str, word: str) -> None:
    refused(docker.checks, copy, file, old, new, word)


@pytest.mark.parametrize(
    ("old", "new", "word"),
    [
        ('"timeout": "25s"', '"timeout": "45s"', "global"),
        ('"timeout": "30s"', '"timeout": "20m"', "invoke_interval"),
        ('"condition": "RaytestMismatch"', '"condition": "Other"', "condition"),
        ("npd/verdict.sh", "npd/check.sh", "no such script"),
    ],
)
def test_a_plugin_is_refused(copy: Path, old: str, new: str, word: str) -> None:
    refused(npd.checks, copy, NPD, old, new, word)


def test_a_plugin_that_cannot_be_started_is_refused(copy: Path) -> None:
    (copy / "npd/verdict.sh").chmod(0o644)
    assert "not executable" in complaints(npd.checks(copy))
