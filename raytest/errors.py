"""What raytest tells a person when something is wrong, and the exit code that goes with it.

Every error carries one plain string, so it survives pickling through Ray (an exception whose
``__init__`` takes two arguments does not).
"""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """Exit codes of every command. Precedence: 1 > 4 > 3 > 124, 130, 143 > 75."""

    PASS = 0
    MISMATCH = 1
    USAGE = 2
    INCONCLUSIVE = 3
    NOT_COMPARABLE = 4
    INTERNAL = 70
    UNAVAILABLE = 75
    DEADLINE = 124
    INTERRUPTED = 130
    TERMINATED = 143


class RaytestError(Exception):
    """One line for the person at the keyboard: what, where, what was found, what would be right."""

    exit_code = ExitCode.INTERNAL


class UsageError(RaytestError):
    """Bad arguments, spec, workload or schema; nothing ran."""

    exit_code = ExitCode.USAGE


class StoreError(UsageError):
    """A run folder that cannot be read or written: missing, damaged, foreign or of another
    version."""


class DiskError(StoreError):
    """A run folder that cannot be written now: a full disk, a quota, no permission. What is
    finished stays; once there is room, ``--resume`` goes on."""

    exit_code = ExitCode.UNAVAILABLE


class NotComparableError(RaytestError):
    """Fingerprints, workloads or a baseline that don't allow the comparison that was asked for."""

    exit_code = ExitCode.NOT_COMPARABLE


class UnavailableError(RaytestError):
    """No cluster, or resources that don't exist or stay busy: trying again may help."""

    exit_code = ExitCode.UNAVAILABLE


class CellError(RaytestError):
    """A cell could not run: its engine did not start, its pin was wrong, a rank died."""

    exit_code = ExitCode.INCONCLUSIVE
