"""One HTTP call that tells another system how a run ended. The URL is a secret: it is never shown,
nor is anything that the other side answers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from raytest.errors import UsageError

TIMEOUT_S = 10.0
SLACK_HOST = "hooks.slack.com"
# Slack refuses a message with a longer section.
SLACK_SECTION = 3000
MOST_REASONS = 20


def check_url(url: str) -> None:
    """Raise UsageError, without the URL, where it is none that can be called."""
    try:
        parts = urlsplit(url)
        fine = parts.scheme in ("http", "https") and bool(parts.hostname)
    except ValueError:
        fine = False
    if not fine:
        raise UsageError("webhook: expected a URL that begins with https:// or http://")


def message(name: str, now: str, before: str | None, document: Mapping[str, Any]) -> dict[str, Any]:
    """The generic body: which spec, the state it is in and was in, and why.

    ``document`` is a verdict document, or ``{"reasons": [...]}`` where no run came to one.
    """
    run = document.get("run", {})
    compared = document.get("baseline") or {}
    return {
        "schema": "raytest.webhook/1",
        "spec": name,
        "state": now,
        "state_before": before,
        "exit_code": document.get("exit_code"),
        "run_id": "+".join(map(str, run.get("run_ids", ()))),
        "ended_at": run.get("ended_at"),
        "reasons": list(document.get("reasons", ()))[:MOST_REASONS],
        "suspects": [s["entity"] for s in document.get("suspects", ())][:MOST_REASONS],
        "baseline": f"{compared['name']}/{compared['number']}" if compared else None,
    }


def body_for(url: str, form: str, told: Mapping[str, Any]) -> dict[str, Any]:
    """``told`` as ``form`` (json, slack, or auto: by the URL's host)."""
    slack = form == "slack" or (form == "auto" and urlsplit(url).hostname == SLACK_HOST)
    return slack_body(told) if slack else dict(told)


def slack_body(told: Mapping[str, Any]) -> dict[str, Any]:
    """Slack's incoming-webhook shape; text is escaped as Slack asks."""
    before = told["state_before"] or "unknown"
    title = f"raytest {told['spec']}: {told['state']} (was {before})"
    lines = [*(f"• {r}" for r in told["reasons"])]
    if told["suspects"]:
        lines.append(f"suspects: {', '.join(told['suspects'])}")
    if told["run_id"]:
        lines.append(f"run {told['run_id']}, exit code {told['exit_code']}")
    blocks = [
        _section(f"*{_escaped(title)}*"),
        _section(_escaped("\n".join(lines) or "no details")),
    ]
    return {"text": _escaped(title), "blocks": blocks}


def send(url: str, body: Mapping[str, Any], timeout_s: float = TIMEOUT_S) -> str:
    """POST ``body`` as JSON. '' where it was taken, else what went wrong, without the URL."""
    from http.client import HTTPException
    from urllib.error import HTTPError, URLError
    from urllib.request import Request, urlopen

    data = json.dumps(body, ensure_ascii=True).encode("ascii")
    headers = {"Content-Type": "application/json", "User-Agent": "raytest"}
    try:
        with urlopen(Request(url, data, headers, method="POST"), timeout=timeout_s):
            return ""
    except HTTPError as error:
        return f"webhook: answered with HTTP {error.code}"
    except TimeoutError:
        return f"webhook: no answer within {timeout_s:g} s"
    except URLError as error:
        late = isinstance(error.reason, TimeoutError)
        return f"webhook: {'no answer in time' if late else 'cannot be reached'}"
    except (HTTPException, OSError, ValueError) as error:
        return f"webhook: failed with {type(error).__name__}"


def _section(text: str) -> dict[str, Any]:
    cut = text if len(text) <= SLACK_SECTION else text[: SLACK_SECTION - 1] + "…"
    return {"type": "section", "text": {"type": "mrkdwn", "text": cut}}


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
