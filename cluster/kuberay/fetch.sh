#!/usr/bin/env bash
# Brings a run's folder from its Ray head to DIR, where no volume does: launch.sh --fetch cluster/kuberay/fetch.sh
# KubeRay keeps the head for ttlSecondsAfterFinished.
set -uo pipefail

run=${1:?usage: fetch.sh RUN DIR}
folder=${2:?usage: fetch.sh RUN DIR}
cluster=$(kubectl get rayjob "$run" -o 'jsonpath={.status.rayClusterName}')
pod=$(kubectl get pod -l "ray.io/cluster=$cluster,ray.io/node-type=head" -o name)
if [ -z "$cluster" ] || [ -z "$pod" ]; then
    echo "fetch.sh: $run has no Ray head any more" >&2
    exit 75
fi
mkdir -p "$folder" && kubectl exec "$pod" -- tar -c -C /results "$run" | tar -x -C "$folder"
