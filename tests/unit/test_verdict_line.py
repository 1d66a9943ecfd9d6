"""`raytest verdict` is the one authority: whatever is not a finished verdict is no pass."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from raytest.errors import UsageError
from raytest.report.verdict_line import verdict_line
from raytest.store import RunFolder


def run_with(tmp_path: Path, code: int, word: str, age_h: float = 0.0) -> None:
    folder = RunFolder.create(tmp_path, "r", {"spec": {}, "plan": {}})
    finished = datetime.now(UTC) - timedelta(hours=age_h)
    folder.write_verdict(
        {
            "schema": "raytest.verdict/1",
            "verdict": word,
            "exit_code": code,
            "reasons": ["tp2 differs on gpu[0] \x1b[31m"],
            "run": {"run_ids": ["r"], "ended_at": finished.isoformat()},
        }
    )


@pytest.mark.parametrize(
    ("code", "form", "expected"),
    [
        (0, "text", 0),
        (1, "text", 1),
        (4, "json", 4),
        (0, "nagios", 0),
        (1, "nagios", 2),
        (3, "nagios", 1),
        (4, "nagios", 3),
        (0, "npd", 0),
        (1, "npd", 1),
        (3, "npd", 2),
        (0, "prolog", 0),
        (1, "prolog", 1),
        (3, "prolog", 0),
    ],
)
def test_each_form_has_its_own_exit_code(
    tmp_path: Path, code: int, form: str, expected: int
) -> None:
    run_with(tmp_path, code, "pass" if code == 0 else "mismatch")
    assert verdict_line(str(tmp_path), "r", form, None)[1] == expected


def test_no_verdict_is_inconclusive(tmp_path: Path) -> None:
    assert verdict_line(str(tmp_path), "r", "text", None)[1] == 3
    RunFolder.create(tmp_path, "r", {"spec": {}, "plan": {}})
    line, code = verdict_line(str(tmp_path), "r", "text", None)
    assert code == 3
    assert "no finished verdict" in line


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"schema": "other/1", "exit_code": 0}'])
def test_a_damaged_or_foreign_verdict_is_inconclusive(tmp_path: Path, content: str) -> None:
    folder = RunFolder.create(tmp_path, "r", {"spec": {}, "plan": {}})
    (folder.path / "verdict.json").write_text(content)
    assert verdict_line(str(tmp_path), "r", "text", None)[1] == 3


def test_an_old_pass_is_no_pass(tmp_path: Path) -> None:
    run_with(tmp_path, 0, "pass", age_h=30)
    assert verdict_line(str(tmp_path), "r", "text", "26h")[1] == 3
    assert verdict_line(str(tmp_path), "r", "text", "2d")[1] == 0


def test_an_age_without_a_unit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="such as 26h"):
        verdict_line(str(tmp_path), "r", "text", "26")


def test_control_characters_do_not_reach_the_terminal_and_brackets_stay(tmp_path: Path) -> None:
    run_with(tmp_path, 1, "mismatch")
    line, _ = verdict_line(str(tmp_path), "r", "text", None)
    assert "\x1b" not in line
    assert "gpu[0]" in line


def test_npd_prints_at_most_80_bytes_and_json_is_one_document(tmp_path: Path) -> None:
    run_with(tmp_path, 1, "mismatch" * 30)
    assert len(verdict_line(str(tmp_path), "r", "npd", None)[0].encode()) <= 80
    assert json.loads(verdict_line(str(tmp_path), "r", "json", None)[0])["exit_code"] == 1
