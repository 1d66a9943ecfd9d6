"""Two folders are the same model exactly if their files say so."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from raytest.errors import UsageError
from raytest.fingerprint import model
from raytest.fingerprint.model import model_fingerprint


def make(folder: Path, **content: bytes) -> Path:
    folder.mkdir()
    files = {
        "model.safetensors": b"weights",
        "config.json": b'{"hidden_size": 8}',
        "generation_config.json": b'{"temperature": 0.6}',
        "tokenizer.json": b"{}",
        "tokenizer_config.json": json.dumps({"chat_template": "{{ messages }}"}).encode(),
        "README.md": b"anything",
        **content,
    }
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return folder


def changed(a: dict[str, str], b: dict[str, str]) -> set[str]:
    return {k for k in a.keys() | b.keys() if a.get(k) != b.get(k)} - {"model.path"}


def test_copies_agree_whatever_their_path_and_age(tmp_path: Path) -> None:
    first, second = make(tmp_path / "a"), make(tmp_path / "b")
    os.utime(second / "config.json", (0, 0))
    assert changed(model_fingerprint(first), model_fingerprint(second)) == set()


@pytest.mark.parametrize(
    ("name", "data", "expected"),
    [
        ("model.safetensors", b"weightz", {"model.weights", "model.weights.model.safetensors"}),
        ("config.json", b"{}", {"model.config"}),
        (
            "generation_config.json",
            b"{}",
            {"model.generation_config", "model.generation_config.temperature"},
        ),
        ("tokenizer.json", b"[]", {"tokenizer.files", "tokenizer.tokenizer.json"}),
        ("chat_template.jinja", b"{{ x }}", {"tokenizer.chat_template"}),
        ("modeling_x.py", b"import os", {"model.code"}),
        ("README.md", b"other", set()),
    ],
)
def test_what_changed_is_named_and_nothing_else(
    tmp_path: Path, name: str, data: bytes, expected: set[str]
) -> None:
    first = model_fingerprint(make(tmp_path / "a"))
    second = model_fingerprint(make(tmp_path / "b", **{name: data}))
    assert changed(first, second) == expected


def test_a_template_inside_the_configuration_counts_by_its_text(tmp_path: Path) -> None:
    other = json.dumps({"chat_template": "{{ other }}"}).encode()
    first = model_fingerprint(make(tmp_path / "a"))
    second = model_fingerprint(make(tmp_path / "b", **{"tokenizer_config.json": other}))
    assert "tokenizer.chat_template" in changed(first, second)


def test_a_large_file_is_sampled_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model, "SAMPLED_ABOVE", 1 << 20)
    monkeypatch.setattr(model, "_BLOCK", 1 << 10)
    data = bytearray(1 << 21)
    first = model_fingerprint(make(tmp_path / "a", **{"model.safetensors": bytes(data)}))
    data[-1] = 1  # the last block is always among the samples
    second = model_fingerprint(make(tmp_path / "b", **{"model.safetensors": bytes(data)}))
    longer = model_fingerprint(make(tmp_path / "c", **{"model.safetensors": bytes(data) + b"0"}))
    assert first["model.weights"].startswith("sampled:")
    assert len({f["model.weights"] for f in (first, second, longer)}) == 3
    assert not first["model.config"].startswith("sampled:")


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    folder = make(tmp_path / "a")
    (folder / "model.safetensors").unlink()
    with pytest.raises(UsageError, match="no weights"):
        model_fingerprint(folder)


def test_a_missing_folder_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"nowhere: model cannot be read: No such file"):
        model_fingerprint(tmp_path / "nowhere")


def test_a_tokenizer_configuration_that_is_no_json_is_still_told_apart(tmp_path: Path) -> None:
    first = make(tmp_path / "a", **{"tokenizer_config.json": b"{"})
    second = make(tmp_path / "b", **{"tokenizer_config.json": b"{{"})
    a, b = model_fingerprint(first), model_fingerprint(second)
    assert "tokenizer.chat_template" not in a
    assert "tokenizer.files" in changed(a, b)
