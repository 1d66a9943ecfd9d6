"""Secrets leave no trace in what raytest prints or stores, and nothing else is hidden."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raytest.fingerprint.redact import REDACTED, is_secret_name, redact_env, redact_text
from raytest.fingerprint.vllm_history import known

# Put together here so that scanners of this repository don't take them for leaks.
AWS_ID = "AKIA" + "IOSFODNN7EXAMPLE"
AWS_SECRET = "wJalrXUtnFEMI/K7MDENG/" + "bPxRfiCYEXAMPLEKEY"
HF = "hf_" + "abcdefghijklmnopqrstuvwxyzABCDEFGH"
OPENAI = "sk-" + "proj-abcdefghijklmnopqrstuvwxyz012345"
GITHUB = "ghp_" + "abcdefghijklmnopqrstuvwxyz0123456789"
SLACK = "xoxb-" + "123456789012-abcdefghijkl"
JWT = "eyJ" + "hbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.dozjgNryP4J3jVmN"
PEM = "-----BEGIN RSA PRIVATE" + " KEY-----\nMIIEowIBAAKCAQEA\nq83v\n-----END RSA PRIVATE KEY-----"


@pytest.mark.parametrize(
    "name",
    [
        "HF_TOKEN", "hf_token", "HUGGING_FACE_HUB_TOKEN", "AWS_SECRET_ACCESS_KEY",
        "AWS_ACCESS_KEY_ID", "OPENAI_API_KEY", "VLLM_API_KEY", "S3_SECRET_ACCESS_KEY",
        "MYSQL_PWD", "DB_PASSWORD", "REDIS_PASSWD", "GOOGLE_APPLICATION_CREDENTIALS", "apiKey",
        "accessToken", "Authorization", "X-Api-Key", "Set-Cookie", "SSH_PRIVATE_KEY",
        "RAY_REDIS_PASSWORD", "WANDB_KEY", "NPM_AUTH", "github_pat", "SENTRY_DSN", "OPENAI_KEY",
        "DATADOG_APP_KEY", "MY_KEY",
    ],
)  # fmt: skip
def test_names_of_credentials_are_secret(name: str) -> None:
    assert is_secret_name(name)
    assert redact_env({name: "abc"}) == {name: REDACTED}


@pytest.mark.parametrize(
    "name",
    [
        "TOKENIZERS_PARALLELISM", "max_num_batched_tokens", "max_tokens", "PYTHONHASHSEED",
        "VLLM_MAX_TOKENS_PER_EXPERT_FP4_MOE", "prompt_token_ids", "stop_token_ids",
        "eos_token_id", "token_ids", "tokenizer", "PWD", "OLDPWD", "PATH", "author", "HOME",
        "kv_cache_dtype", "CUBLAS_WORKSPACE_CONFIG", "VLLM_ENABLE_V1_MULTIPROCESSING", "keys",
        "HF_HUB_OFFLINE", "NCCL_ALGO", "token_digest", "monkey", "passes", "compass",
        "key", "sort_key", "cache_key", "SSH_PUBLIC_KEY", "missing_keys",
    ],
)  # fmt: skip
def test_names_that_only_look_secret_are_shown(name: str) -> None:
    assert not is_secret_name(name)
    assert redact_env({name: "4096"}) == {name: "4096"}


def test_of_all_names_of_vllm_only_those_of_credentials_are_hidden() -> None:
    versions = [(0, minor) for minor in range(20, 34)]
    names = {
        name
        for version in versions
        for name in known("variables", version) | known("engine_arguments", version)
    }
    assert len(names) > 300
    assert {name for name in names if is_secret_name(name)} == {
        "VLLM_API_KEY", "S3_ACCESS_KEY_ID", "S3_SECRET_ACCESS_KEY", "hf_token",
    }  # fmt: skip


@pytest.mark.parametrize(
    "secret",
    [AWS_ID, HF, OPENAI, GITHUB, SLACK, JWT, PEM, "github_pat_" + "A1" * 20, "glpat-" + "x" * 20],
    ids=lambda s: s[:8],
)
@pytest.mark.parametrize("around", ["{}", "loading with {} failed", '{{"x": "{}"}}', "a={},b=1"])
def test_known_kinds_of_credentials_are_hidden_wherever_they_stand(
    secret: str, around: str
) -> None:
    shown = redact_text(around.format(secret))
    assert secret not in shown
    assert REDACTED in shown


@pytest.mark.parametrize(
    "text",
    [
        f"{AWS_ID} {AWS_SECRET}",
        f"key id {AWS_ID}, secret: {AWS_SECRET}",
        f"aws_access_key_id = {AWS_ID}\naws_secret_access_key = {AWS_SECRET}",
        f'{{"AccessKeyId": "{AWS_ID}", "SecretAccessKey": "{AWS_SECRET}"}}',
    ],
)
def test_an_aws_secret_beside_its_key_id_is_hidden(text: str) -> None:
    shown = redact_text(text)
    assert AWS_SECRET not in shown
    assert AWS_ID not in shown


def test_what_stands_after_a_secret_in_an_address_is_shown() -> None:
    shown = redact_text("GET https://host/x?access_token=zzz&seed=1 failed")
    assert shown == f"GET https://host/x?access_token={REDACTED}&seed=1 failed"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("git clone https://user:pw@host/x.git", f"git clone https://{REDACTED}@host/x.git"),
        ("redis://:p@ss@10.0.0.1:6379/0", f"redis://{REDACTED}@10.0.0.1:6379/0"),
        ("see https://host/a@b?c=d", "see https://host/a@b?c=d"),
        ("http://127.0.0.1:8265", "http://127.0.0.1:8265"),
    ],
)
def test_only_the_login_of_an_address_is_hidden(text: str, expected: str) -> None:
    assert redact_text(text) == expected


@pytest.mark.parametrize(
    ("text", "secret"),
    [
        ("Authorization: Bearer abcdefgh12345678", "abcdefgh12345678"),
        ("vllm serve m --api-key letmein --seed 0", "letmein"),
        ("PASSWORD='a b c'", "b c"),
        ("{'hf_token': 'zzz', 'max_tokens': 16}", "zzz"),
        ("api_key=['one', 'two']", "two"),
        ("DB_PASSWORD=1234", "1234"),
        ("MY_SECRET: top", "top"),
        ("GET https://host/x?access_token=zzz&seed=1 failed", "zzz"),
        ("s3 GET https://b/x?X-Amz-Signature=zzz&X-Amz-Expires=60", "zzz"),
        ("https://a.blob/x?sv=2024&sig=zzz%3D", "zzz"),
        ("env: HF_TOKEN=zzz", "zzz"),
        ("FOO=\nHF_TOKEN=zzz", "zzz"),
        ("command='HF_TOKEN=zzz vllm serve'", "zzz"),
        ("argv is ['vllm', '--api-key', 'zzz', '--seed', '0']", "zzz"),
        ("Cookie: theme=dark; session=zzz", "zzz"),
        ('> Authorization: Digest username="me", response="zzz"', "zzz"),
    ],
)
def test_a_value_is_hidden_by_the_name_before_it(text: str, secret: str) -> None:
    assert secret not in redact_text(text)


@pytest.mark.parametrize(
    "text",
    [
        "max_num_batched_tokens=4096 token_ids=[1, 2, 3]",
        "first divergence at token=12, margin 0.25",
        "GPU-5f3c1a2e-1111-2222-3333-444455556666",
        "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
        "cf30153c4c131c8164ee7798e5022d810682e2cb",
        "vLLM ignores VLLM_ATTENTION_BACKEND: it is gone since 0.16",
        "hf_token=None api_key=null",
        "basic block of task-runner risk-averse",
        "loading https://host/model?revision=main&limit=5",
        "cache key: 12ab, sort_key=name",
        "--tokenizer /models/x --max-num-batched-tokens 4096 ['--tokenizer', 'x']",
    ],
)
def test_evidence_is_left_as_it_is(text: str) -> None:
    assert redact_text(text) == text


def test_a_variable_with_an_ordinary_name_may_hold_a_credential() -> None:
    assert redact_env({"RAY_ADDRESS": f"https://u:{HF}@h:1"}) == {
        "RAY_ADDRESS": f"https://{REDACTED}@h:1"
    }


def test_an_empty_secret_shows_that_it_is_empty() -> None:
    assert redact_env({"HF_TOKEN": ""}) == {"HF_TOKEN": ""}


@given(st.text(max_size=300))
def test_hiding_twice_changes_nothing_more(text: str) -> None:
    once = redact_text(text)
    assert redact_text(once) == once


@given(st.text(st.characters(codec="ascii"), max_size=60), st.text(max_size=60))
def test_a_credential_in_any_surroundings_is_hidden(before: str, after: str) -> None:
    text = f"{before} {GITHUB} {after}"
    assert GITHUB not in redact_text(text)


@pytest.mark.parametrize(
    "line",
    [
        "INFO 12-01 05:27:44 [core.py:93] max_seq_len=4096, dtype=torch.bfloat16 a://b ",
        "a.b-c+",
        "eyJaaaaa.",
        "-----BEGIN PRIVATE",
        "token token --token ",
        "token='",
        "token=[",
        "a=" * 40,
        "https://host/x?a=b&signature",
        "cookie: a=b; ",
    ],
)
def test_a_long_log_is_read_in_linear_time(line: str) -> None:
    text = line * (500_000 // len(line))
    started = time.perf_counter()
    redact_text(text)
    assert time.perf_counter() - started < 10  # quadratic: hours
