"""Fakes of raytest, ray, srun and kubectl for the wrappers: they do as told, and fail silently."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

CLUSTER = Path(__file__).parents[2] / "cluster"

# `run` does as RUN_DOES says; `verdict` is the real one.
RAYTEST = """#!/usr/bin/env bash
if [ "$1" = verdict ]; then
    [ "$RUN_DOES" = no-raytest ] && exit 0
    exec PYTHON -m raytest.cli "$@"
fi
[ "$1" = report ] && { echo metrics >"${@: -1}"; exit 0; }
results= run=
while [ $# -gt 0 ]; do
    case $1 in --run-id) run=$2 ;; --results) results=$2 ;; esac
    shift
done
echo "$run" >>"$STATE/ran"
leave_verdict() { # WORD CODE [AGE]
    local ended
    ended=$(date -u -d "${3:-now}" +%FT%T+00:00)
    mkdir -p "$results/$run"
    echo '{"run_id": "'"$run"'"}' >"$results/$run/manifest.json"
    echo '{"schema": "raytest.verdict/1", "verdict": "'"$1"'", "exit_code": '"$2"', "reasons": [],
        "run": {"run_ids": ["'"$run"'"], "ended_at": "'"$ended"'"}}' \\
        >"$results/$run/verdict.json"
}
case $RUN_DOES in
    pass) leave_verdict pass 0 ;;
    mismatch) leave_verdict mismatch 1; exit 1 ;;
    silent-mismatch) leave_verdict mismatch 1 ;;
    inconclusive) leave_verdict inconclusive 3; exit 3 ;;
    not-comparable) leave_verdict "not comparable" 4; exit 4 ;;
    nothing | no-raytest) ;;
    no-verdict) leave_verdict pass 0; rm "$results/$run/verdict.json" ;;
    old) leave_verdict pass 0 "-2 days" ;;
    in-use) leave_verdict pass 0; exit 2 ;;
    no-cluster) exit 75 ;;
    killed) leave_verdict pass 0; kill -KILL $$ ;;
    hang) trap 'exit 143' TERM; touch "$STATE/hangs"; for _ in $(seq 300); do sleep 0.1; done ;;
    finish-on-term) trap 'leave_verdict mismatch 1; exit 1' TERM
        touch "$STATE/hangs"; for _ in $(seq 300); do sleep 0.1; done ;;
esac
"""

RAY = """#!/usr/bin/env bash
if [ "$1" = status ]; then
    [ -e "$STATE/nodes" ] || exit 0
    printf 'Node status\\n----\\nActive:\\n'
    awk '{print " 1 node_" $1}' "$STATE/nodes"
    printf 'Idle:\\n (no idle nodes)\\nPending:\\n (no pending nodes)\\n'
    printf 'Recent failures:\\n 1 node_dead\\n'
    exit 0
fi
verb=$2
shift 2
id=
while [ $# -gt 0 ]; do
    case $1 in
        --submission-id) id=$2; shift 2 ;;
        --address | --log-style | --log-color | --working-dir) shift 2 ;;
        --no-wait | --follow) shift ;;
        --) shift; break ;;
        *) id=$1; shift ;;
    esac
done
job=$STATE/jobs/$id
case $verb in
    submit)
        [ "$RAY_DOES" = start-failure ] && exit 0
        mkdir -p "$STATE/jobs"
        echo "$id" >>"$STATE/submitted"
        "$@" >"$job.log" 2>&1
        echo $? >"$job.rc" ;;
    status)
        [ -e "$job.rc" ] || exit 0
        echo asked >>"$job.asked"
        if [[ $id != *-verdict-* ]]; then
            case $RAY_DOES in
                stopped) echo "WARNING: Job '$id' was stopped"; exit 0 ;;
                forever) echo "Status for job '$id': RUNNING"; exit 0 ;;
                gone) [ "$(wc -l <"$job.asked")" -gt 2 ] && exit 0
                    echo "Status for job '$id': RUNNING"; exit 0 ;;
                log-drops) if [ "$(wc -l <"$job.asked")" -lt 4 ]; then
                    echo "Status for job '$id': RUNNING"; exit 0; fi ;;
            esac
        fi
        ended=failed
        [ "$(cat "$job.rc")" = 0 ] && ended=succeeded
        echo "Job '$id' $ended"
        # Ray goes on with the log's end.
        echo "Status message: last available logs: Job 'r' succeeded" ;;
    logs)
        echo followed >>"$job.followed"
        case $RAY_DOES in
            lost-tail) head -c 150 "$job.log" ;;
            lost-log) ;;
            *) cat "$job.log" ;;
        esac ;;
esac
"""

SRUN = """#!/usr/bin/env bash
[ "$SRUN_DOES" = start-failure ] && exit 0
count=1
for argument in "$@"; do case $argument in --ntasks=*) count=${argument#*=} ;; esac; done
[[ $SRUN_DOES = no-workers && $* != *--head* ]] && exit 0
for _ in $(seq "$count"); do echo "a$RANDOM" | tr -d ghijk >>"$STATE/nodes"; done
echo "$*" >>"$STATE/steps"
echo "$RAY_AUTH_MODE $RAY_AUTH_TOKEN" >>"$STATE/tokens"
trap 'echo ended >>"$STATE/ended"; exit 0' TERM
for _ in $(seq 300); do sleep 0.1; done
"""

KUBECTL = r"""#!/usr/bin/env bash
case $1 in
    create)
        manifest=$(cat)
        name=$(sed -n 's/^  name: //p' <<<"$manifest" | head -n 1)
        [ "$KUBECTL_DOES" = start-failure ] && exit 0
        grep -q -- "--run $name " <<<"$manifest" || exit 1
        touch "$STATE/job"
        raytest run /etc/raytest/spec.toml --run-id "$name" --results "$RESULTS"
        exit 0 ;;
    exec) shift 3; exec "${@/#\/results/$RESULTS}" ;;
    get)
        case "$*" in
            "get rayjob r1 -o jsonpath={.status.rayClusterName}") echo r1-abcde; exit ;;
            "get pod -l ray.io/cluster=r1-abcde,ray.io/node-type=head -o name")
                [ "$KUBECTL_DOES" = no-head ] || echo pod/r1-abcde-head; exit ;;
        esac
        [ -e "$STATE/job" ] || exit 0
        case $KUBECTL_DOES in
            stopped) echo "Complete STOPPED ." ;;
            failed) echo "Failed FAILED AppFailed." ;;
            deadline) echo "Failed RUNNING DeadlineExceeded." ;;
            forever) echo "Running RUNNING ." ;;
            *) echo "Complete SUCCEEDED ." ;;
        esac ;;
    delete) echo "$*" >>"$STATE/deleted" ;;
esac
"""


def _heed_interrupts() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Schedulers:
    """A folder of fakes on PATH, and what they noted down."""

    def __init__(self, folder: Path) -> None:
        self.state = folder / "state"
        self.results = folder / "results"
        self.programs = folder / "programs"
        for made in (self.state, self.programs):
            made.mkdir()
        fakes = {"raytest": RAYTEST, "ray": RAY, "srun": SRUN, "kubectl": KUBECTL}
        for name, text in fakes.items():
            path = self.programs / name
            path.write_text(text.replace("PYTHON", shlex.quote(sys.executable)))
            path.chmod(0o755)

    def start(self, command: list[str], **does: str) -> subprocess.Popen[str]:
        """A wrapper with the fakes on PATH; ``does`` tells them what to do."""
        given = {
            "PATH": f"{self.programs}:{os.environ['PATH']}",
            "STATE": str(self.state),
            "RESULTS": str(self.results),
            "RUN_DOES": "pass",
            "RAY_DOES": "",
            "SRUN_DOES": "",
            "KUBECTL_DOES": "",
            **does,
        }
        return subprocess.Popen(
            command,
            env={**os.environ, **given},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=CLUSTER.parent,
            # background jobs of a shell ignore SIGINT, and so would what they start
            preexec_fn=_heed_interrupts,
        )

    def end(self, process: subprocess.Popen[str]) -> subprocess.CompletedProcess[str]:
        out, err = process.communicate(timeout=50)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def run(self, command: list[str], **does: str) -> subprocess.CompletedProcess[str]:
        return self.end(self.start(command, **does))

    def signalled(
        self, command: list[str], what: signal.Signals, **does: str
    ) -> subprocess.CompletedProcess[str]:
        """Sends a signal once the run hangs."""
        process = self.start(command, **does)
        until = time.monotonic() + 20
        while not (self.state / "hangs").exists() and time.monotonic() < until:
            time.sleep(0.05)
        process.send_signal(what)
        return self.end(process)

    def noted(self, name: str) -> list[str]:
        path = self.state / name
        return path.read_text().splitlines() if path.exists() else []
