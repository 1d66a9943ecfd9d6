#!/usr/bin/env bash
# Runs a spec on a GPU host that has no network, and packs the run folder to take home.
#
#   run.sh SITE_DIR OUT_DIR SPEC [RAYTEST_RUN_OPTION ...]
#
# SITE_DIR  holds vLLM, Ray and raytest's other dependencies, unpacked from a bundle of wheels
#           (pip install --target SITE_DIR --no-index --find-links WHEELS raytest[cuda]).
# OUT_DIR   gets <run-id>.tar.gz and <run-id>.verdict.
# The exit code is the verdict's, from verdict.json alone.
set -euo pipefail
[ $# -ge 3 ] || { sed -n '2,9s/^# \{0,1\}//p' "$0" >&2; exit 2; }
site=$1 out=$2 spec=$3; shift 3
repository=$(cd "$(dirname "$0")/../.." && pwd)
export PYTHONPATH=$site:$repository HF_HUB_OFFLINE=1
# A bundle leaves FlashInfer out to stay small; its sampler would be looked for otherwise.
export VLLM_USE_FLASHINFER_SAMPLER=${VLLM_USE_FLASHINFER_SAMPLER-0}
mkdir -p "$out"
run_id=$(basename "$spec" .toml)-$(date -u +%Y%m%d-%H%M%S)
results=$(mktemp -d)
trap 'rm -rf "$results"' EXIT
code=0
python3 -m raytest run "$spec" --results "$results" --run-id "$run_id" "$@" >&2 || code=$?
if [ -d "$results/$run_id" ]; then
  tar -czf "$out/$run_id.tar.gz" -C "$results" "$run_id"
fi
[ "$code" -ne 2 ] && [ "$code" -ne 75 ] || exit "$code"
code=0
python3 -m raytest verdict "$results/$run_id" | tee "$out/$run_id.verdict" || code=${PIPESTATUS[0]}
exit "$code"
