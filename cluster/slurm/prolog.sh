#!/usr/bin/env bash
# Slurm prolog: keeps jobs off a node whose own last test found a mismatch.
#
#   Prolog=/opt/raytest/cluster/slurm/prolog.sh      (slurm.conf)
#
# Reads the runs that this node made of itself (systemd/raytest-nightly.service). Any exit code but 0
# drains the node and requeues the job, so a node is drained for a proven mismatch alone: no raytest,
# no verdict or an old one let the job start, and say so. With PROLOG_STRICT=1 they drain as well.
set -uo pipefail
export PATH=/opt/raytest/venv/bin:$PATH

results=${NODE_RESULTS:-/var/lib/raytest/results}
say() { printf 'raytest prolog: %s\n' "$*"; }

if [ "${PROLOG_STRICT:-0}" = 1 ]; then
    line=$(timeout 20 raytest verdict latest --results "$results" --max-age 26h)
    code=$?
    say "${line:-no answer from raytest (exit code $code)}"
    [ "$code" -eq 0 ] && [[ $line == *": pass"* ]]
    exit
fi
line=$(timeout 20 raytest verdict latest --results "$results" --max-age 26h --as prolog)
code=$?
say "${line:-no answer from raytest (exit code $code)}"
# An error of the interpreter is 1 too: a mismatch also says so.
if [ "$code" -eq 1 ] && [[ $line == "print raytest "*": mismatch"* ]]; then exit 1; fi
exit 0
