#!/usr/bin/env bash
# Chromium and two fonts for the tests that draw the reports, where there is an apt and leave to use
# it. Fails where there is none; the tests then say that they skipped it.
set -euo pipefail
if command -v chromium >/dev/null || command -v chromium-browser >/dev/null; then exit; fi
[ "$(id -u)" -eq 0 ]
export DEBIAN_FRONTEND=noninteractive
install() { apt-get -qq install -y --no-install-recommends chromium fonts-liberation fonts-dejavu-core >/dev/null 2>&1; }
install || { apt-get -qq update && install; }
chromium --version
