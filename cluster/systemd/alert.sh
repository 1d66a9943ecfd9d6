#!/usr/bin/env bash
# Says in one line that UNIT failed, and why: into the journal, and to ALERT_COMMAND (a shell command
# that reads the line, such as one that posts it), whose exit code is this script's.
set -uo pipefail

unit=${1:?usage: alert.sh UNIT}
why=$(timeout 60 raytest verdict latest --max-age 26h)
line="$unit failed on $(uname -n): ${why:-raytest verdict said nothing}"
printf '<3>%s\n' "$line" >&2
if [ -n "${ALERT_COMMAND:-}" ]; then printf '%s\n' "$line" | bash -c "$ALERT_COMMAND"; fi
