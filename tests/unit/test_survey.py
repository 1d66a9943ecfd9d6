"""A node's clock is judged by when it answered."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from raytest.survey import _least_skew

ASKED = datetime(2026, 12, 1, 12, 0, 0, tzinfo=UTC)


def skew(seconds: float) -> str:
    at = (ASKED + timedelta(seconds=seconds)).isoformat(timespec="milliseconds")
    return _least_skew({"process.captured_at": at}, ASKED, ASKED + timedelta(seconds=5))


def test_a_date_between_question_and_answer_proves_no_skew() -> None:
    assert [skew(s) for s in (0, 2.5, 5)] == ["0.000"] * 3


def test_a_date_outside_of_them_is_off_by_at_least_the_distance() -> None:
    assert skew(6.5) == "1.500"
    assert skew(-3) == "-3.000"
