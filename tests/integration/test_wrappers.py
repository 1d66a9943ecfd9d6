"""The wrappers against schedulers that fail silently: only a fresh pass on disk is a pass."""

from __future__ import annotations

import re
import signal
import subprocess
from pathlib import Path

import pytest

from tests.support.schedulers import CLUSTER, Schedulers


@pytest.fixture
def fakes(tmp_path: Path) -> Schedulers:
    return Schedulers(tmp_path)


def run_sh(fakes: Schedulers, *options: str) -> list[str]:
    return [
        "bash",
        str(CLUSTER / "run.sh"),
        "--run",
        "r",
        "--results",
        str(fakes.results),
        *options,
        "fleet",
    ]


def submit_sh(fakes: Schedulers, *options: str) -> list[str]:
    return [
        *("bash", str(CLUSTER / "submit.sh"), "--address", "http://head:8265", "--poll", "0"),
        *("--run", "r", "--results", str(fakes.state / "here")),
        *("--remote-results", str(fakes.results), *options, "fleet"),
    ]


def launch_sh(fakes: Schedulers, *options: str) -> list[str]:
    return [
        *("bash", str(CLUSTER / "kuberay/launch.sh"), "--run", "r1", "--poll", "0"),
        *("--results", str(fakes.results), *options),
    ]


def sbatch(fakes: Schedulers, **does: str) -> subprocess.CompletedProcess[str]:
    return fakes.run(
        ["bash", str(CLUSTER / "slurm/raytest.sbatch"), "fleet"], **{**slurm(fakes), **does}
    )


def slurm(fakes: Schedulers) -> dict[str, str]:
    return {
        "SLURM_JOB_NUM_NODES": "3",
        "SLURMD_NODENAME": "n1",
        "SLURM_JOB_ID": "77",
        "SLURM_CPUS_ON_NODE": "8",
        "SLURM_GPUS_ON_NODE": "4",
        "RAY_NODES_WITHIN": "40",
        "WRAPPERS": str(CLUSTER),
        "RAYTEST_RESULTS": str(fakes.results),
    }


ENDS = [
    ("pass", 0),
    ("mismatch", 1),
    ("silent-mismatch", 1),
    ("inconclusive", 3),
    ("not-comparable", 4),
    ("nothing", 3),
    ("no-verdict", 3),
    ("old", 3),
    ("no-raytest", 3),
    ("in-use", 2),
    ("no-cluster", 75),
    ("killed", 3),
]


@pytest.mark.parametrize(("does", "code"), ENDS)
def test_run_ends_with_the_verdict_or_with_why_there_is_none(
    fakes: Schedulers, does: str, code: int
) -> None:
    done = fakes.run(run_sh(fakes), RUN_DOES=does)
    assert done.returncode == code, done.stderr
    assert done.stdout.startswith(("r: ", "no finished verdict")), done.stdout


def test_run_passes_options_on_and_writes_metrics_before_the_verdict(fakes: Schedulers) -> None:
    metrics = fakes.state / "raytest.prom"
    done = fakes.run([*run_sh(fakes, "--metrics", str(metrics)), "--address", "auto"])
    assert (done.returncode, metrics.read_text()) == (0, "metrics\n")


@pytest.mark.parametrize(
    ("what", "does", "code"),
    [
        (signal.SIGTERM, "hang", 143),
        (signal.SIGINT, "hang", 130),
        (signal.SIGTERM, "finish-on-term", 1),
    ],
)
def test_a_signal_ends_the_run_and_what_it_left_is_judged(
    fakes: Schedulers, what: signal.Signals, does: str, code: int
) -> None:
    assert fakes.signalled(run_sh(fakes), what, RUN_DOES=does).returncode == code


def test_the_deadline_has_its_own_exit_code(fakes: Schedulers) -> None:
    assert fakes.run(run_sh(fakes, "--deadline", "1"), RUN_DOES="hang").returncode == 124


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--run", "../up"], "run id '../up'"),
        (["--deadline", "4h"], "--deadline '4h'"),
        (["--runs", "x"], "unknown option --runs"),
    ],
)
def test_wrong_usage_runs_nothing(fakes: Schedulers, options: list[str], said: str) -> None:
    done = fakes.run(["bash", str(CLUSTER / "run.sh"), *options, "fleet"])
    assert done.returncode == 2
    assert said in done.stderr
    assert fakes.noted("ran") == []


@pytest.mark.parametrize(
    ("ray", "does", "code"),
    [
        ("", "pass", 0),
        ("log-drops", "pass", 0),
        ("lost-log", "pass", 3),
        ("lost-tail", "pass", 3),
        ("start-failure", "pass", 75),
        ("stopped", "pass", 3),
        ("gone", "pass", 75),
        ("", "mismatch", 1),
        ("", "silent-mismatch", 1),
        ("stopped", "silent-mismatch", 1),
        ("", "no-verdict", 3),
        ("", "nothing", 3),
        ("", "old", 3),
        ("", "no-raytest", 3),
    ],
)
def test_submit_believes_the_verdict_alone(
    fakes: Schedulers, ray: str, does: str, code: int
) -> None:
    done = fakes.run(submit_sh(fakes), RAY_DOES=ray, RUN_DOES=does)
    assert done.returncode == code, done.stderr


def test_a_dropped_log_is_taken_up_again_and_nothing_is_submitted_twice(fakes: Schedulers) -> None:
    assert fakes.run(submit_sh(fakes), RAY_DOES="log-drops").returncode == 0
    assert len(fakes.noted("jobs/r.followed")) == 3
    assert fakes.noted("submitted").count("r") == 1


def test_submit_gives_up_at_its_deadline_while_the_job_goes_on(fakes: Schedulers) -> None:
    done = fakes.run(submit_sh(fakes, "--deadline", "1", "--poll", "1"), RAY_DOES="forever")
    assert done.returncode == 124, done.stderr


def test_submit_attaches_without_submitting(fakes: Schedulers) -> None:
    assert fakes.run(submit_sh(fakes)).returncode == 0
    attach = [*submit_sh(fakes)[:-1], "--attach", "r"]
    assert fakes.run(attach).returncode == 0
    assert fakes.noted("submitted").count("r") == 1


def test_submit_takes_a_folder_that_a_command_brings(fakes: Schedulers) -> None:
    copy = f"mkdir -p {fakes.state}/here; cp -r {fakes.results}/$1 $2/ #"
    bring = fakes.programs / "bring"
    bring.write_text(f"#!/bin/sh\n{copy}\n")
    bring.chmod(0o755)
    assert fakes.run(submit_sh(fakes, "--fetch", "bring")).returncode == 0
    assert fakes.noted("submitted") == ["r"]


@pytest.mark.parametrize(
    ("kubectl", "does", "code"),
    [
        ("", "pass", 0),
        ("start-failure", "pass", 75),
        ("stopped", "pass", 3),
        ("failed", "pass", 3),
        ("deadline", "pass", 3),
        ("", "mismatch", 1),
        ("failed", "mismatch", 1),
        ("failed", "not-comparable", 4),
        ("", "silent-mismatch", 1),
        ("", "no-verdict", 3),
        ("", "nothing", 3),
        ("", "old", 3),
        ("", "no-raytest", 3),
    ],
)
def test_launch_believes_the_verdict_alone(
    fakes: Schedulers, kubectl: str, does: str, code: int
) -> None:
    done = fakes.run(launch_sh(fakes), KUBECTL_DOES=kubectl, RUN_DOES=does)
    assert done.returncode == code, done.stderr


def test_launch_deletes_what_it_gives_up_on(fakes: Schedulers) -> None:
    options = ("--deadline", "1", "--poll", "1")
    done = fakes.run(launch_sh(fakes, *options), KUBECTL_DOES="forever")
    assert done.returncode == 124, done.stderr
    assert fakes.noted("deleted") == ["delete rayjob r1 --wait=false --ignore-not-found"]


@pytest.mark.parametrize(("kubectl", "code"), [("", 0), ("no-head", 3)])
def test_launch_brings_the_run_from_its_head(fakes: Schedulers, kubectl: str, code: int) -> None:
    here = fakes.state / "here"
    fetch = ("--results", str(here), "--fetch", f"bash {CLUSTER}/kuberay/fetch.sh")
    done = fakes.run(launch_sh(fakes, *fetch), KUBECTL_DOES=kubectl)
    assert done.returncode == code, done.stderr
    assert (here / "r1/verdict.json").exists() == (code == 0)


def test_a_run_id_that_kuberay_refuses_is_refused_here(fakes: Schedulers) -> None:
    done = fakes.run([*launch_sh(fakes), "--run", "Nightly_1"])
    assert done.returncode == 2
    assert "RayJob's name" in done.stderr


@pytest.mark.parametrize(
    ("does", "code"), [("pass", 0), ("silent-mismatch", 1), ("nothing", 3), ("old", 3)]
)
def test_a_slurm_job_ends_with_the_verdict(fakes: Schedulers, does: str, code: int) -> None:
    assert sbatch(fakes, RUN_DOES=does).returncode == code


@pytest.mark.parametrize("srun", ["start-failure", "no-workers"])
def test_a_slurm_job_with_too_few_ray_nodes_runs_nothing(fakes: Schedulers, srun: str) -> None:
    done = sbatch(fakes, SRUN_DOES=srun, RAY_NODES_WITHIN="1")
    assert done.returncode == 75
    assert "of 3 Ray nodes" in done.stderr
    assert fakes.noted("ran") == []


def test_a_slurm_job_starts_one_ray_node_a_host_and_ends_them(fakes: Schedulers) -> None:
    assert sbatch(fakes).returncode == 0
    head, workers = sorted(fakes.noted("steps"), key=lambda step: "--head" not in step)
    assert "--nodes=1 --ntasks=1 --nodelist=n1 ray start --head" in head
    assert "--nodes=2 --ntasks=2 --exclude=n1 ray start --address=" in workers
    (token,) = set(fakes.noted("tokens"))
    assert re.fullmatch("token [0-9a-f]{64}", token)
    for step in (head, workers):
        assert "--cpu-bind=none --cpus-per-task=8" in step
        assert step.endswith("--block --disable-usage-stats --num-gpus=4")
    assert fakes.noted("ended") == ["ended"] * 2


def test_slurms_warning_ends_the_run_and_what_it_left_is_judged(fakes: Schedulers) -> None:
    command = ["bash", str(CLUSTER / "slurm/raytest.sbatch"), "fleet"]
    for does, code in (("hang", 143), ("finish-on-term", 1)):
        done = fakes.signalled(command, signal.SIGTERM, RUN_DOES=does, **slurm(fakes))
        assert done.returncode == code, done.stderr
        (fakes.state / "hangs").unlink()
        (fakes.state / "nodes").unlink()


def node_verdict(fakes: Schedulers, does: str) -> dict[str, str]:
    """The store of a node whose own run did as said."""
    fakes.run(run_sh(fakes), RUN_DOES=does)
    return {"NODE_RESULTS": str(fakes.results), "RAYTEST_RESULTS": str(fakes.results)}


NODE = [("pass", 0, 0, 0), ("mismatch", 1, 1, 1)] + [
    (does, 0, 1, 2) for does in ("inconclusive", "not-comparable", "nothing", "no-verdict", "old")
]


@pytest.mark.parametrize(("does", "prolog", "strict", "npd"), NODE)
def test_a_node_is_drained_for_a_proven_mismatch_alone(
    fakes: Schedulers, does: str, prolog: int, strict: int, npd: int
) -> None:
    given = node_verdict(fakes, does)
    script = ["bash", str(CLUSTER / "slurm/prolog.sh")]
    assert fakes.run(script, **given).returncode == prolog
    assert fakes.run(script, **given, PROLOG_STRICT="1").returncode == strict
    plugin = fakes.run(["bash", str(CLUSTER / "npd/verdict.sh")], **given)
    assert plugin.returncode == npd
    assert 1 < len(plugin.stdout.encode()) <= 81
    assert plugin.stdout.count("\n") == 1


def test_a_raytest_that_says_nothing_is_no_verdict_of_a_node(fakes: Schedulers) -> None:
    given = {**node_verdict(fakes, "pass"), "RUN_DOES": "no-raytest"}
    strict = fakes.run(["bash", str(CLUSTER / "slurm/prolog.sh")], **given, PROLOG_STRICT="1")
    assert strict.returncode == 1
    assert fakes.run(["bash", str(CLUSTER / "npd/verdict.sh")], **given).returncode == 2
    (fakes.programs / "raytest").write_text("#!/bin/sh\nexit 1\n")
    assert fakes.run(["bash", str(CLUSTER / "slurm/prolog.sh")], **given).returncode == 0
    assert fakes.run(["bash", str(CLUSTER / "npd/verdict.sh")], **given).returncode == 2


def test_an_alert_names_unit_and_cause_and_its_failure_shows(fakes: Schedulers) -> None:
    given = node_verdict(fakes, "mismatch")
    script = ["bash", str(CLUSTER / "systemd/alert.sh"), "raytest-nightly.service"]
    sent = fakes.state / "sent"
    assert fakes.run(script, **given, ALERT_COMMAND=f"cat >{sent}").returncode == 0
    assert "raytest-nightly.service failed on" in sent.read_text()
    assert "r: mismatch" in sent.read_text()
    assert fakes.run(script, **given, ALERT_COMMAND="exit 5").returncode == 5


def test_the_unit_starts_run_sh_as_it_is(fakes: Schedulers) -> None:
    unit = (CLUSTER / "systemd/raytest-nightly.service").read_text()
    (start,) = re.findall(r"^ExecStart=(.*)$", unit, re.M)
    command = start.replace("/opt/raytest/cluster", str(CLUSTER)).replace("${SPEC}", "fleet")
    command = command.replace("${STATE_DIRECTORY}", str(fakes.state))
    for does, code in (("pass", 0), ("mismatch", 1), ("nothing", 3)):
        assert fakes.run(command.split(), RUN_DOES=does).returncode == code


@pytest.mark.parametrize(
    ("does", "runs", "judges"),
    [("pass", 0, 0), ("mismatch", 1, 1), ("nothing", 3, 3), ("old", 3, 3)],
)
def test_the_steps_of_the_workflow_are_red_unless_the_run_passed(
    fakes: Schedulers, tmp_path: Path, does: str, runs: int, judges: int
) -> None:
    from cluster.checks.outcome import documents

    (workflow,) = documents(CLUSTER / "github/nightly.yml")
    steps = [s["run"] for s in workflow["jobs"]["nightly"]["steps"] if "run" in s]
    given = {"RUN_ID": "github-1", "RUN_DOES": does, "GITHUB_STEP_SUMMARY": str(tmp_path / "sum")}
    codes = []
    for text in steps:
        here = text.replace("/opt/raytest/cluster", str(CLUSTER))
        here = here.replace("--results results", f"--results {fakes.results}")
        # As GitHub runs a step whose shell is bash by name.
        shell = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", here]
        codes.append(fakes.run(shell, **given).returncode)
    assert codes == [runs, judges]


@pytest.mark.parametrize("file", ["kuberay/rayjob.yaml", "kuberay/raycronjob.yaml"])
def test_the_entrypoint_of_a_rayjob_is_red_unless_the_run_passed(
    fakes: Schedulers, file: str
) -> None:
    from cluster.checks.outcome import documents

    (job,) = documents(CLUSTER / file)
    entrypoint = job["spec"].get("jobTemplate", job["spec"])["entrypoint"]
    words = entrypoint.replace("/opt/raytest/cluster", str(CLUSTER)).split()
    words[words.index("--results") + 1] = str(fakes.results)
    for does, code in (("mismatch", 1), ("nothing", 1), ("pass", 0)):
        if "--run" in words:
            words[words.index("--run") + 1] = f"{does}-1"
        done = fakes.run(words, RUN_DOES=does)
        assert bool(done.returncode) == bool(code), done.stderr
