#!/usr/bin/env bash
# The end of every wrapper: the verdict on disk decides. Schedulers return 0 for work that failed or
# never ran, so nothing they say can turn a run green; it can only take a pass away.
# Sourced, not run.

# refuse TEXT…: one line, and the exit code for wrong usage.
refuse() {
    printf '%s: %s\n' "${0##*/}" "$*" >&2
    exit 2
}

# require_run RUN: the names that raytest takes for a run.
require_run() {
    [[ $1 =~ ^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$ ]] ||
        refuse "run id '$1': use letters, digits, '.', '_' and '-', at most 100"
}

# judge RESULTS RUN ENDED AGE: prints RUN's verdict line and exits with the code that is due.
#   ENDED  how the run ended: its exit code; 3 where the scheduler says that it didn't succeed
#   AGE    a verdict older than this, such as 90s, is that of an earlier run
judge() {
    local results=$1 run=$2 ended=$3 age=$4 line verdict
    line=$(raytest verdict "$run" --results "$results" --max-age "$age")
    verdict=$?
    printf '%s\n' "${line:-$run: raytest verdict said nothing (exit code $verdict)}"
    # 0 without the words is not raytest, or a raytest that did nothing.
    if [ "$verdict" -eq 0 ] && [[ $line != "$run: pass"* ]]; then verdict=3; fi
    case $verdict in
        0 | 2 | 3 | 70) ;;
        1 | 4) exit "$verdict" ;;
        *) verdict=3 ;;
    esac
    if [ "$ended" -eq 0 ]; then exit "$verdict"; fi
    printf '%s: the run ended with %s, so this is no pass\n' "$run" "$ended" >&2
    case $ended in
        1 | 2 | 3 | 4 | 70 | 75 | 124 | 130 | 143) exit "$ended" ;;
        *) exit 3 ;;
    esac
}
