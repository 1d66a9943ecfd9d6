#!/usr/bin/env bash
# Runs SPEC on a Ray cluster from a laptop, through `ray job submit`, and ends with its verdict.
#
# `ray job submit` returns 0 for a stopped job and when its log connection drops; the job goes on. So
# the job has a name, its status is asked, the log is taken up again, and nothing is submitted twice.
set -uo pipefail
# shellcheck source=cluster/judge.sh
source "$(dirname "${BASH_SOURCE[0]}")/judge.sh"

usage="usage: submit.sh --address http://HEAD:8265 [--run ID] [--results DIR] [--remote-results DIR]
           [--fetch COMMAND] [--deadline SECONDS] [--poll SECONDS] SPEC [OPTION of raytest run]…
       submit.sh --address http://HEAD:8265 --attach ID [--results DIR] [--remote-results DIR] [--fetch COMMAND]

SPEC             a preset, or a file here; the file's folder is uploaded (Ray takes at most 500 MiB)
--results        where the run's folder is, or is brought, on this machine (default: results)
--remote-results where the cluster's head writes it, as a full path (default: /tmp/raytest-results);
                 a folder that both see may be given as both
--fetch          brings the folder RUN from the cluster: run as COMMAND RUN DIR (default: a small Ray
                 job prints the verdict, with a checksum)
--attach         takes up a run that was submitted before, instead of submitting one"
address=${RAY_API_SERVER_ADDRESS:-}
run=laptop-$(date -u +%Y%m%d-%H%M%S)-$(printf %04x "$RANDOM")
results=${RAYTEST_RESULTS:-results}
remote_results=/tmp/raytest-results
fetch=fetch_by_job
deadline=21600
poll=10
attach=
while [[ ${1-} == --* ]]; do
    [ $# -ge 2 ] || refuse "$1 needs a value; $usage"
    case $1 in
        --address) address=$2 ;;
        --run) run=$2 ;;
        --results) results=$2 ;;
        --remote-results) remote_results=$2 ;;
        --fetch) fetch=$2 ;;
        --deadline) deadline=$2 ;;
        --poll) poll=$2 ;;
        --attach) attach=yes run=$2 ;;
        *) refuse "unknown option $1; $usage" ;;
    esac
    shift 2
done
[ -n "$address" ] || refuse "--address is missing; $usage"
[ -n "$attach" ] || [ $# -ge 1 ] || refuse "$usage"
[[ $deadline =~ ^[1-9][0-9]*$ && $poll =~ ^[0-9]+$ ]] || refuse "--deadline and --poll take seconds"
# Each job has a working folder of its own.
[[ $remote_results == /* ]] || refuse "--remote-results '$remote_results': expected a full path"
require_run "$run"

# job VERB ARGUMENT…: what Ray's Jobs API says, without colours that depend on the terminal.
job() {
    local verb=$1
    shift
    ray job "$verb" --address "$address" --log-style record --log-color false "$@"
}

submit() {
    local spec=$1 upload=()
    shift
    if [ -f "$spec" ]; then
        upload=(--working-dir "$(dirname "$spec")")
        spec=$(basename "$spec")
    fi
    job submit --submission-id "$run" --no-wait "${upload[@]}" -- \
        raytest run "$spec" --address auto --run-id "$run" --results "$remote_results" "$@" ||
        echo "submit.sh: ray job submit failed; asking whether the job is there all the same" >&2
}

# status ID: succeeded, failed, stopped, going, or unknown where Ray gives no answer.
status() {
    local said
    said=$(job status "$1" 2>&1)
    # A failed job's log follows, and may say anything: it is asked for first.
    case $said in
        *"'$1' failed"*) echo failed ;;
        *"'$1' was stopped"*) echo stopped ;;
        *"'$1' succeeded"*) echo succeeded ;;
        *"'$1': "*PENDING* | *"'$1': "*RUNNING*) echo going ;;
        *) echo unknown ;;
    esac
}

# await ID SECONDS: waits for the end of a job and leaves its status in $state; `going` once the time
# is over. Five silent answers in a row are `unknown`: the cluster is gone, or the job never was.
await() {
    local until=$(($(date +%s) + $2)) silent=0
    while [ "$silent" -lt 5 ]; do
        state=$(status "$1")
        case $state in
            succeeded | failed | stopped) return ;;
            unknown) silent=$((silent + 1)) ;;
            going)
                silent=0
                if [ "$(date +%s)" -ge "$until" ]; then return; fi
                if [ "$1" = "$run" ]; then follow "$until"; fi
                ;;
        esac
        sleep "$poll"
    done
}

# Shows the log until the job ends, the connection drops (the caller comes back) or time is over.
follow() {
    local left=$(($1 - $(date +%s)))
    timeout "$((left > 0 ? left : 1))" ray job logs --address "$address" --follow \
        --log-style record --log-color false "$run" >&2 &
    wait $!
}

# Prints manifest and verdict in one line of the head's own log, with a checksum: of a line that was
# cut nothing is taken.
# shellcheck disable=SC2016
PRINT='cd "$0" && tar -cz manifest.json verdict.json | base64 -w 0 >/tmp/$1 &&
    echo "raytest-folder $(sha256sum </tmp/$1 | cut -c 1-64) $(cat /tmp/$1)"; rm -f "/tmp/$1"'

fetch_by_job() {
    local id=$1-verdict-$$ line
    job submit --submission-id "$id" --no-wait -- \
        sh -c "$PRINT" "$remote_results/$1" "$id" >/dev/null
    await "$id" 300
    line=$(job logs "$id" | sed -n 's/^.*raytest-folder \([0-9a-f]\{64\} .*\)$/\1/p' | tail -n 1)
    if [ "$(printf '%s' "${line#* }" | sha256sum | cut -c 1-64)" != "${line%% *}" ]; then
        echo "submit.sh: the verdict did not come over whole" >&2
        return 1
    fi
    mkdir -p "$2/$1" &&
        printf '%s' "${line#* }" | base64 -d | tar -xz -C "$2/$1" manifest.json verdict.json
}

# shellcheck disable=SC2329 # the traps call it
leave() {
    echo "submit.sh: left; the job goes on: submit.sh --address $address --attach $run" >&2
    exit "$1"
}
trap 'leave 130' INT
trap 'leave 143' TERM

started=$(date +%s)
if [ -z "$attach" ]; then submit "$@"; fi
await "$run" "$deadline"
case $state in
    succeeded) ended=0 ;;
    going) ended=124 ;;
    unknown) ended=75 ;;
    *) ended=3 ;;
esac
if [ "$ended" -ne 0 ]; then echo "submit.sh: job $run: $state" >&2; fi
if [ ! -e "$results/$run/verdict.json" ] && [ "$ended" -ne 75 ] && [ "$ended" -ne 124 ]; then
    if [ "$fetch" = fetch_by_job ]; then
        fetch_by_job "$run" "$results"
    else
        bash -c "$fetch \"\$@\"" fetch "$run" "$results"
    fi || echo "submit.sh: could not bring the verdict of $run here" >&2
fi
# The cluster's clock may be behind this one's.
age=$(($(date +%s) - started + 300))s
if [ -n "$attach" ]; then age=26h; fi
judge "$results" "$run" "$ended" "$age"
