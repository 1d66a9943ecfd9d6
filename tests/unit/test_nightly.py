"""The night around the run: its lock, and a webhook that rings on a change of state alone."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from raytest import nightly
from raytest.errors import UnavailableError, UsageError
from raytest.nightly import Night, only_one, run_night, tell
from raytest.webhook import SLACK_SECTION, body_for, check_url, message, send, slack_body
from tests.support.make_run import spec

SECRET = "T0000-very-secret"


class Receiver:
    """A web server on this machine that keeps what it is sent."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.status = 200
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                length = int(self.headers["Content-Length"])
                outer.calls.append(json.loads(self.rfile.read(length)))
                self.send_response(outer.status)
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                return

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/services/{SECRET}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    receiver = Receiver()
    yield receiver
    receiver.server.shutdown()
    receiver.server.server_close()


def night(results: Path, url: str = "", form: str = "auto") -> Night:
    return Night("local", str(results), None, False, url, form, ".")


def document(verdict: str, code: int) -> dict[str, Any]:
    return {
        "verdict": verdict,
        "exit_code": code,
        "reasons": [f"because {verdict}"],
        "suspects": [{"entity": "node-0:1"}],
        "run": {"run_ids": ["r"], "ended_at": "2026-12-01T00:00:00+00:00"},
    }


def tell_all(results: Path, receiver: Receiver, states: list[tuple[str, int]]) -> list[str]:
    said: list[str] = []
    for verdict, code in states:
        told = document(verdict, code)
        tell("golden", verdict, told, night(results, receiver.url), said.append)
    return said


def test_the_webhook_rings_on_a_change_of_state_alone(tmp_path: Path, receiver: Receiver) -> None:
    states = [("pass", 0), ("pass", 0), ("mismatch", 1), ("mismatch", 1), ("pass", 0)]
    tell_all(tmp_path, receiver, states)
    assert [(c["state_before"], c["state"]) for c in receiver.calls] == [
        ("pass", "mismatch"),
        ("mismatch", "pass"),
    ]
    assert receiver.calls[0]["reasons"] == ["because mismatch"]
    assert receiver.calls[0]["suspects"] == ["node-0:1"]


def test_a_first_night_that_fails_is_news(tmp_path: Path, receiver: Receiver) -> None:
    tell_all(tmp_path, receiver, [("mismatch", 1)])
    assert [c["state"] for c in receiver.calls] == ["mismatch"]


def test_what_was_not_taken_is_told_again(tmp_path: Path, receiver: Receiver) -> None:
    receiver.status = 500
    said = tell_all(tmp_path, receiver, [("mismatch", 1)])
    receiver.status = 200
    tell_all(tmp_path, receiver, [("mismatch", 1), ("mismatch", 1)])
    assert said == ["raytest: webhook: answered with HTTP 500"]
    assert len(receiver.calls) == 2


def test_the_url_is_never_shown(tmp_path: Path, receiver: Receiver) -> None:
    receiver.status = 403
    said = tell_all(tmp_path, receiver, [("mismatch", 1)])
    receiver.server.shutdown()
    receiver.server.server_close()
    said += tell_all(tmp_path, receiver, [("mismatch", 1)])
    assert len(said) == 2
    assert SECRET not in "".join(said)
    state = (tmp_path / ".nightly").rglob("*.json")
    assert not [p for p in state if SECRET in p.read_text()]
    for bad in (f"ftp://host/{SECRET}", SECRET, f"http:///{SECRET}", f"https://[{SECRET}"):
        with pytest.raises(UsageError) as caught:
            check_url(bad)
        assert SECRET not in str(caught.value)


def test_a_silent_receiver_costs_no_more_than_the_time_out() -> None:
    import socket

    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/{SECRET}"
        assert send(url, {}, timeout_s=0.3) in (
            "webhook: no answer within 0.3 s",
            "webhook: no answer in time",
        )


def test_slack_gets_its_own_shape_within_its_limits() -> None:
    told = message(
        "golden", "mismatch", "pass", {**document("mismatch", 1), "reasons": ["<x>" * 2000]}
    )
    body = body_for("https://hooks.slack.com/services/x", "auto", told)
    assert body == slack_body(told)
    assert body["text"] == "raytest golden: mismatch (was pass)"
    assert all(len(b["text"]["text"]) <= SLACK_SECTION for b in body["blocks"])
    assert "&lt;x&gt;" in body["blocks"][1]["text"]["text"]
    assert "<" not in body["blocks"][1]["text"]["text"]
    assert body_for("https://example.org/", "auto", told) == told
    assert body_for("https://example.org/", "slack", told) == slack_body(told)


HOLD = """
import sys
from raytest.nightly import only_one
with only_one(sys.argv[1], "golden"):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_second_start_leaves_the_first_alone_and_a_dead_one_frees_the_lock(
    tmp_path: Path,
) -> None:
    first = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert first.stdout is not None
    assert first.stdout.readline() == "held\n"
    with pytest.raises(UnavailableError, match="is running"), only_one(str(tmp_path), "golden"):
        pass
    with only_one(str(tmp_path), "another"):
        pass
    first.kill()
    first.communicate(timeout=20)
    with only_one(str(tmp_path), "golden"):
        pass


def test_a_night_that_cannot_run_is_told_and_its_error_kept(
    tmp_path: Path, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> Any:
        raise UnavailableError("no cluster at 10.0.0.1")

    monkeypatch.setattr(nightly, "doctor", refuse)
    with pytest.raises(UnavailableError, match="no cluster"):
        run_night(spec(), "t", night(tmp_path, receiver.url), nullcontext(None), lambda _: None)
    (call,) = receiver.calls
    assert (call["state"], call["exit_code"]) == ("unavailable", 75)
    assert call["reasons"] == ["no cluster at 10.0.0.1"]
