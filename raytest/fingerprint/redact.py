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
        "TRACE", "EMBEDDING", "PARALLEL", "THRESHOLD",
    }
)  # fmt: skip
# Words that make a name ending in "KEY" one of a table, not of a lock.
_OPEN_KEYS = frozenset(
    {
        "PUBLIC", "CACHE", "SORT", "PRIMARY", "FOREIGN", "GROUP", "ROW", "COLUMN", "HASH", "BLOCK",
        "DICT", "MAP", "CONFIG", "LOOKUP", "INDEX", "PARTITION", "DEVICE", "QUERY", "STATE",
        "DUPLICATE", "UNKNOWN", "MISSING", "UNEXPECTED", "JSON", "TOML", "FIELD", "ENTRY", "LAYER",
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
    some_key = len(words) > 1 and words[-1] == "KEY" and not _OPEN_KEYS.intersection(words)
    return bool(secret) or owned_key or some_key or any(_GLUED.search(w) for w in words)


def _keep_first(match: re.Match[str]) -> str:
    return f"{match[1]}{REDACTED}"


def _keep_ends(match: re.Match[str]) -> str:
    return f"{match[1]}{REDACTED}{match[2]}"


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
    # A header's value may have several parts: all that follows on its line.
    (
        re.compile(r"(?i)(\b(?:authorization|cookie):[ \t]{0,8})[^\r\n]+"),
        _keep_first,
    ),
    # A signed address is a key to what it names.
    (re.compile(r"(?i)([?&](?:[a-z-]{0,30}signature|sig)=)[^&\s'\"]+"), _keep_first),
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
)
# NAME=value, "name": "value", name=['value'], --name value, ['--name', 'value'].
_NAME = re.compile(
    r"\b(?P<name>[A-Za-z][A-Za-z0-9_.-]{1,80})['\"]?[ \t]{0,2}[=:][ \t]{0,2}"
    r"|(?<![\w-])--(?P<flag>[A-Za-z][A-Za-z0-9_-]{1,80})(?:['\"],[ \t]{0,2}['\"]|[ \t]{1,8})(?!-)"
)
# A quoted value or list is hidden whole.
_VALUE = re.compile(
    r"(?!<redacted>)(?!(?:None|null|true|false|True|False)\b)"
    r"(?:\"[^\"\n]*\"|'[^'\n]*'|\[[^\]\n]*\]|[^\s'\",;&}\])]+)"
)


def redact_text(text: str) -> str:
    """``text`` (a message, a traceback, a log line) with every recognised secret hidden."""
    for pattern, replacement in _PATTERNS:
        text = pattern.sub(replacement, text)
    return _hide_named(text)


def _hide_named(text: str) -> str:
    """Hide what secret names are given. An ordinary name's value is searched for names too:
    ``env: HF_TOKEN=...``."""
    parts, done = [], 0
    for match in _NAME.finditer(text):
        name = match["name"] or match["flag"]
        if match.start() < done or not is_secret_name(name):
            continue
        value = _VALUE.match(text, match.end())
        if value is not None and not _counts_tokens(name, value[0]):
            parts += [text[done : match.end()], REDACTED]
            done = value.end()
    return "".join([*parts, text[done:]])


def _counts_tokens(name: str, value: str) -> bool:
    """``token=12`` in a log line is a position or an id."""
    return value.isdecimal() and len(value) < 8 and name.lower().endswith("token")


def redact_env(mapping: Mapping[str, object]) -> dict[str, str]:
    """The mapping with secret values hidden, in the same order. Which names are set stays seen."""
    return {
        str(name): REDACTED
        if is_secret_name(str(name)) and value not in ("", None)
        else redact_text(str(value))
        for name, value in mapping.items()
    }
