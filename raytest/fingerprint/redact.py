"""Secrets are taken out before anything is printed, stored or handed over.

A value is hidden where its name says that it is secret, or where it looks like a known kind of
credential. Both err on the side of hiding, except for names that only look secret: vLLM and its
libraries count tokens everywhere.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from itertools import pairwise

REDACTED = "<redacted>"

_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_SECRET_WORDS = frozenset(
    {
        "TOKEN", "SECRET", "SECRETS", "PASSWORD", "PASSWORDS", "PASSWD", "PASSPHRASE", "PASS",
        "PWD", "PW", "CREDENTIAL", "CREDENTIALS", "CREDS", "AUTH", "AUTHORIZATION", "COOKIE",
        "COOKIES", "APIKEY", "BEARER", "JWT", "SAS", "DSN", "PAT", "SESSIONID",
    }
)  # fmt: skip
_KEY_OWNERS = frozenset(
    {
        "API", "ACCESS", "PRIVATE", "SECRET", "ACCOUNT", "ENCRYPTION", "SIGNING", "SSH", "MASTER",
        "SHARED", "STORAGE", "LICENSE", "HMAC", "DEPLOY", "AUTH", "WANDB", "SERVICE", "CLIENT",
    }
)  # fmt: skip
_GLUED = re.compile(
    r"APIKEY|ACCESSKEY|PRIVATEKEY|SECRETKEY|PASSWORD|PASSWD|CREDENTIAL|AUTHTOKEN|ACCESSTOKEN"
)
# Shell bookkeeping and counts, not secrets.
_NOT_SECRET = frozenset({"PWD", "OLDPWD", "SSH_AUTH_SOCK", "XAUTHORITY", "TOKEN_COUNT"})
# Words that make "TOKEN" a unit of text: MAX_TOKEN_BUDGET, VLLM_MOE_TOKEN_CHUNK, EOS_TOKEN_ID.
_TOKEN_UNITS = frozenset(
    {
        "MAX", "MIN", "NUM", "PER", "BATCH", "BATCHED", "BUDGET", "COUNT", "CHUNK", "SIZE", "LEN",
        "LENGTH", "ID", "IDS", "EOS", "BOS", "PAD", "UNK", "STOP", "SPECIAL", "LIMIT", "BLOCK",
        "DIGEST", "INDEX", "POSITION", "RATE", "LATENCY", "LOGPROB", "DISPATCH",
        "TRACE", "EMBEDDING", "PARALLEL",
    }
)  # fmt: skip


def is_secret_name(name: str) -> bool:
    """Whether the value of a variable, argument or header of that name must not be shown.

    ``TOKENS`` (a number of them) and ``TOKENIZERS`` are no secrets, ``HF_TOKEN`` is.
    """
    spelled = _CAMEL.sub("_", name.strip()).upper()
    if spelled in _NOT_SECRET:
        return False
    words = [w for w in re.split(r"[^A-Z0-9]+", spelled) if w]
    secret = _SECRET_WORDS.intersection(words)
    if secret == {"TOKEN"} and _TOKEN_UNITS.intersection(words):
        secret = frozenset()
    owned_key = any(a in _KEY_OWNERS and b in {"KEY", "KEYS"} for a, b in pairwise(words))
    return bool(secret) or owned_key or any(_GLUED.search(w) for w in words)


def _keep_first(match: re.Match[str]) -> str:
    return f"{match[1]}{REDACTED}"


def _keep_ends(match: re.Match[str]) -> str:
    return f"{match[1]}{REDACTED}{match[2]}"


def _assignment(match: re.Match[str]) -> str:
    """``token=12`` in a log line is a position or an id."""
    value = match["value"]
    counts = value.isdecimal() and len(value) < 8 and match["name"].lower().endswith("token")
    return match[0] if counts or not is_secret_name(match["name"]) else _keep_first(match)


def _all(_: re.Match[str]) -> str:
    return REDACTED


_Replacement = Callable[[re.Match[str]], str]
# Order matters: a whole PEM block or URL before the tokens that may stand inside it.
_PATTERNS: tuple[tuple[re.Pattern[str], _Replacement], ...] = (
    (
        re.compile(
            r"-----BEGIN [A-Z0-9 ]*PRIVATE KEY-----.*?(?:-----END [A-Z0-9 ]*PRIVATE KEY-----|\Z)",
            re.DOTALL,
        ),
        _all,
    ),
    (re.compile(r"(\b[a-zA-Z][a-zA-Z0-9+.-]{0,30}://)[^/\s?#'\"]+(@)"), _keep_ends),
    # A secret access key has no mark of its own: 40 characters that follow a key id.
    (
        re.compile(
            r"(\b(?:AKIA|ASIA)[A-Z0-9]{16}\b[^A-Za-z0-9/+]{1,8}(?:[A-Za-z_]{1,32}\W{1,6})?)"
            r"[A-Za-z0-9/+]{40}(?![A-Za-z0-9/+])"
        ),
        _keep_first,
    ),
    (re.compile(r"\b(?:AKIA|ASIA|AROA|AIDA)[A-Z0-9]{16}\b"), _all),
    (re.compile(r"\beyJ[A-Za-z0-9_-]{5,}\.[A-Za-z0-9_-]{5,}\.[A-Za-z0-9_-]*"), _all),
    (re.compile(r"(?i)(\b(?:bearer|basic)\s+)[A-Za-z0-9._~+/-]{8,}=*"), _keep_first),
    (re.compile(r"\bhf_[A-Za-z0-9]{16,}"), _all),
    (re.compile(r"\bsk-[A-Za-z0-9_-]{16,}"), _all),
    (re.compile(r"\b(?:gh[opusr]_[A-Za-z0-9]{20,}|github_pat_[A-Za-z0-9_]{20,})"), _all),
    (re.compile(r"\bglpat-[A-Za-z0-9_-]{16,}"), _all),
    (re.compile(r"\bxox[a-z]-[A-Za-z0-9-]{10,}"), _all),
    (re.compile(r"\bnvapi-[A-Za-z0-9_-]{16,}"), _all),
    (re.compile(r"\bAIza[A-Za-z0-9_-]{35}"), _all),
    # NAME=value, "name": "value", name=['value']: a quoted value or list is hidden whole.
    (
        re.compile(
            r"((?P<name>\b[A-Za-z][A-Za-z0-9_.-]{1,80})['\"]?\s{0,2}[=:]\s{0,2})"
            r"(?!<redacted>)(?!(?:None|null|true|false|True|False)\b)"
            r"(?P<value>\"[^\"\n]*\"|'[^'\n]*'|\[[^\]\n]*\]|[^\s'\",;&}\])]+)"
        ),
        _assignment,
    ),
    (
        re.compile(
            r"((?:^|\s)--(?P<name>[A-Za-z][A-Za-z0-9_-]{1,80})\s+)(?!-|<redacted>)(?P<value>\S+)"
        ),
        _assignment,
    ),
)


def redact_text(text: str) -> str:
    """``text`` (a message, a traceback, a log line) with every recognised secret hidden."""
    for pattern, replacement in _PATTERNS:
        text = pattern.sub(replacement, text)
    return text


def redact_env(mapping: Mapping[str, object]) -> dict[str, str]:
    """The mapping with secret values hidden, in the same order. Which names are set stays seen."""
    return {
        str(name): REDACTED
        if is_secret_name(str(name)) and value not in ("", None)
        else redact_text(str(value))
        for name, value in mapping.items()
    }
