#!/usr/bin/env bash
# Creates a RayJob under a name of its own, waits for its end, and ends with the run's verdict. What
# nightly-cronjob.yaml runs; also from a laptop.
#
# A submitter Job can be Complete while its RayJob is FAILED, and a RayJob Complete while its run
# found a mismatch: only the verdict counts.
set -uo pipefail
# shellcheck source=cluster/judge.sh
source "$(dirname "${BASH_SOURCE[0]}")/../judge.sh"

usage="usage: launch.sh [--manifest FILE] [--run ID] [--results DIR] [--fetch COMMAND] [--deadline SECONDS] [--poll SECONDS]

--manifest  a RayJob named raytest-manual (default: rayjob.yaml beside this script); the name is
            replaced by the run id wherever it stands
--results   where the run's folder is, or is brought, on this machine (default: results)
--fetch     brings the folder RUN where no volume does: run as COMMAND RUN DIR, such as fetch.sh"
manifest=$(dirname "${BASH_SOURCE[0]}")/rayjob.yaml
run=raytest-$(date -u +%Y%m%d-%H%M%S)-$(printf %04x "$RANDOM")
results=${RAYTEST_RESULTS:-results}
fetch=
deadline=16200
poll=15
while [ $# -gt 0 ]; do
    [ $# -ge 2 ] || refuse "$1 needs a value; $usage"
    case $1 in
        --manifest) manifest=$2 ;;
        --run) run=$2 ;;
        --results) results=$2 ;;
        --fetch) fetch=$2 ;;
        --deadline) deadline=$2 ;;
        --poll) poll=$2 ;;
        *) refuse "unknown argument $1; $usage" ;;
    esac
    shift 2
done
[[ $deadline =~ ^[1-9][0-9]*$ && $poll =~ ^[0-9]+$ ]] || refuse "--deadline and --poll take seconds"
# KubeRay's own limit on a RayJob's name.
[[ $run =~ ^[a-z][a-z0-9-]{0,45}[a-z0-9]$ ]] ||
    refuse "run id '$run': a RayJob's name has small letters, digits and '-', at most 47"
grep -q '^  name: raytest-manual$' "$manifest" ||
    refuse "$manifest: no RayJob named raytest-manual"

# Killing the launcher kills the work, so that the next night starts on free GPUs.
# shellcheck disable=SC2329 # the traps call it
leave() {
    kubectl delete rayjob "$run" --wait=false --ignore-not-found >&2
    exit "$1"
}
trap 'leave 130' INT
trap 'leave 143' TERM

# For the traps' sake, every wait is one for a program in the background.
pause() {
    sleep "$1" &
    wait $!
}

started=$(date +%s)
sed "s/raytest-manual/$run/g" "$manifest" | kubectl create -f - >&2 ||
    echo "launch.sh: kubectl create failed; asking whether the RayJob is there all the same" >&2

ended=124
silent=0
shown=
while [ "$(($(date +%s) - started))" -lt "$deadline" ]; do
    state=$(kubectl get rayjob "$run" \
        -o 'jsonpath={.status.jobDeploymentStatus} {.status.jobStatus} {.status.reason}.')
    if [ "$state" != "$shown" ]; then echo "launch.sh: $run: $state" >&2; fi
    shown=$state
    case $state in
        "Complete SUCCEEDED"*) ended=0 && break ;;
        Complete* | Failed*) ended=3 && break ;;
        "") silent=$((silent + 1)) ;;
        *) silent=0 ;;
    esac
    if [ "$silent" -ge 5 ]; then
        echo "launch.sh: no answer about $run: the RayJob never was, or is gone" >&2
        ended=75
        break
    fi
    pause "$poll"
done
if [ "$ended" -eq 124 ]; then kubectl delete rayjob "$run" --wait=false --ignore-not-found >&2; fi
if [ -n "$fetch" ] && [ ! -e "$results/$run/verdict.json" ]; then
    bash -c "$fetch \"\$@\"" fetch "$run" "$results" ||
        echo "launch.sh: could not bring the verdict of $run here" >&2
fi
# The cluster's clock may be behind this one's.
judge "$results" "$run" "$ended" "$(($(date +%s) - started + 300))s"
