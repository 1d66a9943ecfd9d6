#!/usr/bin/env bash
# Puts promtool into the virtual environment: it is no Python package, and Debian's package would
# start a server, so its one file is unpacked. Fails where there is no apt; the checks then skip it.
set -euo pipefail
venv=$(realpath "${VENV:-.venv}")
if command -v promtool >/dev/null || [ -x "$venv/bin/promtool" ]; then exit; fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
apt-get -qq download prometheus 2>/dev/null || { apt-get -qq update && apt-get -qq download prometheus; }
dpkg-deb --fsys-tarfile prometheus_*.deb | tar -x ./usr/bin/promtool
./usr/bin/promtool --version >/dev/null 2>&1
mv usr/bin/promtool "$venv/bin/promtool"
