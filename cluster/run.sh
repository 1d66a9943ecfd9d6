#!/usr/bin/env bash
# Runs SPEC and ends with its verdict. What Slurm, systemd, KubeRay and cron start.
set -uo pipefail
# shellcheck source=cluster/judge.sh
source "$(dirname "${BASH_SOURCE[0]}")/judge.sh"

usage="usage: run.sh [--run ID] [--results DIR] [--metrics FILE] [--deadline SECONDS] SPEC [OPTION of raytest run]…"
run=nightly-$(date -u +%Y%m%d-%H%M%S)-$(printf %04x "$RANDOM")
results=${RAYTEST_RESULTS:-results}
metrics=
deadline=0
while [[ ${1-} == --* ]]; do
    [ $# -ge 2 ] || refuse "$1 needs a value; $usage"
    case $1 in
        --run) run=$2 ;;
        --results) results=$2 ;;
        --metrics) metrics=$2 ;;
        --deadline) deadline=$2 ;;
        *) refuse "unknown option $1; $usage" ;;
    esac
    shift 2
done
[ $# -ge 1 ] || refuse "$usage"
[[ $deadline =~ ^[0-9]+$ ]] || refuse "--deadline '$deadline': expected seconds"
require_run "$run"
spec=$1
shift

started=$(date +%s)
child=
signalled=
# A program in the background ignores INT, so both end the run with TERM; it has 60 s to write what
# it has.
pass_on() {
    signalled=$1
    if [ -n "$child" ]; then kill -TERM "$child" 2>/dev/null; fi
}
trap 'pass_on 143' TERM
trap 'pass_on 130' INT

# In the background, since bash runs a trap only between commands in the foreground.
timeout --signal=TERM --kill-after=60 "$deadline" \
    raytest run "$spec" --run-id "$run" --results "$results" --quiet "$@" &
child=$!
if [ -n "$signalled" ]; then pass_on "$signalled"; fi
wait "$child"
ended=$?
while kill -0 "$child" 2>/dev/null; do
    wait "$child"
    ended=$?
done
if [ -n "$signalled" ] && [ "$ended" -ne 0 ] && [ "$ended" -gt 4 ]; then ended=$signalled; fi

if [ -n "$metrics" ] && ! raytest report "$run" --results "$results" --prometheus "$metrics"; then
    echo "run.sh: $metrics was not written; the alert for a missing run will tell" >&2
fi
judge "$results" "$run" "$ended" "$(($(date +%s) - started + 2))s"
