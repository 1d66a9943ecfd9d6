"""Tokens, keys and passwords of the machine appear nowhere under results/."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.support.command import REFERENCE, raytest

# Built from pieces, so that no scanner takes them for real ones.
SECRETS = {
    "HF_TOKEN": "hf_" + "abcdefghijklmnopqrstuvwxyz0123456789"[:34],
    "AWS_ACCESS_KEY_ID": "AKIA" + "Z7EXAMPLE0000001",
    "AWS_SECRET_ACCESS_KEY": "wJalrXUtnFEMI/K7MDENG/" + "bPxRfiCYEXAMPLEKEY",
    "HTTPS_PROXY": "http://proxyuser:" + "s3cr3tpassw0rd" + "@proxy.invalid:3128",
    "VLLM_API_KEY": "sk-" + "raytestraytestraytestraytest",
}
HIDDEN = [*(v for k, v in SECRETS.items() if k != "HTTPS_PROXY"), "s3cr3tpassw0rd"]


def everything(folder: Path) -> str:
    """Every byte of every file, and every value of every Parquet file decoded."""
    parts = []
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        parts.append(path.read_bytes().decode("utf-8", "replace"))
        if path.suffix == ".parquet":
            parts.append(str(pq.read_table(path).to_pylist()))
    return "\n".join(parts)


def test_no_secret_of_the_environment_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "s.toml").write_text(REFERENCE + '[[variants]]\nname = "tp1"\n')
    ended = raytest("run", "s.toml", "--run-id", "r", cwd=tmp_path)
    assert ended.code == 0, ended.err
    kept = everything(tmp_path / "results") + ended.out + ended.err
    assert "env.HF_TOKEN" in kept or "env.VLLM_API_KEY" in kept  # known to be set, value hidden
    assert [s for s in HIDDEN if s in kept] == []


@pytest.mark.parametrize(
    "text",
    [
        '[[variants]]\nname = "tp1"\nenv = { HF_TOKEN = "x" }\n',
        '[[variants]]\nname = "tp1"\nengine = { hf_token = "x" }\n',
        f'[[variants]]\nname = "tp1"\nenv = {{ P = "{SECRETS["HTTPS_PROXY"]}" }}\n',
    ],
)
def test_a_secret_in_the_spec_is_refused_since_the_folder_keeps_the_spec(
    tmp_path: Path, text: str
) -> None:
    (tmp_path / "s.toml").write_text(REFERENCE + text)
    ended = raytest("run", "s.toml", cwd=tmp_path)
    assert ended.code == 2
    assert "holds a secret" in ended.said[0]
    assert "s3cr3tpassw0rd" not in ended.err
    assert not (tmp_path / "results").exists()
