"""The synthetic model is the same bytes on every machine, and whole or not there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from raytest.errors import UsageError
from raytest.synthetic import MANIFEST, _weights, ensure_model, model_digest, write_model

# sha256 of every file of size tiny, seed 0, version 1. The tokenizer's bytes belong to the release of
# the tokenizers library, so it is held to be the same in every process instead.
TINY = {
    "config.json": "c09894b866e72d8364fac341eb9ce603e890f313627313b0a294eb1fe1446e43",
    "generation_config.json": "ec11e5b4b12ade70223e19ccecdc1c3f93419d7b224d3f43485de8d1efde82b0",
    "model.safetensors": "84b18368b212b9290b67a10f1626c620684bfd7a3593494e51241ed2961483e4",
    "tokenizer_config.json": "f668670bed7ec0fd47d4665563b9c8a8436949898ca2eadf95b30531dfa314e6",
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny"
    write_model(path, "tiny", 0)
    return path


def test_the_same_seed_and_version_give_the_same_bytes_everywhere(tiny: Path) -> None:
    digests = model_digest(tiny)
    digests.pop("tokenizer.json")
    assert digests == TINY


def test_another_process_and_hash_seed_write_the_same_tokenizer(tiny: Path, tmp_path: Path) -> None:
    code = "import sys; from raytest.synthetic import write_model; write_model(sys.argv[1])"
    environment = {**os.environ, "PYTHONHASHSEED": "7"}
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "m")], check=True, env=environment)
    assert model_digest(tmp_path / "m") == model_digest(tiny)


def test_another_seed_gives_other_weights_and_another_tokenizer(tiny: Path, tmp_path: Path) -> None:
    write_model(tmp_path / "m", "tiny", 1)
    ours, theirs = model_digest(tiny), model_digest(tmp_path / "m")
    assert ours["model.safetensors"] != theirs["model.safetensors"]
    assert ours["tokenizer.json"] != theirs["tokenizer.json"]


def test_weights_have_the_stated_spread() -> None:
    values = (_weights("w", (512, 512), 3).astype(np.uint32) << 16).view(np.float32)
    assert abs(float(values.mean())) < 3e-4
    assert abs(float(values.std()) - 0.03) < 3e-4
    assert (_weights("x.norm.weight", (4,), 3) == 0x3F80).all()


def test_the_tokenizer_has_exactly_the_models_vocabulary(tiny: Path) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tiny / "tokenizer.json"))
    config = json.loads((tiny / "config.json").read_text())
    assert tokenizer.get_vocab_size() == config["vocab_size"] == 8192
    text = "Ünïcode 中文 🏳️‍🌈 e\u0301\n\tcode"
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_a_damaged_copy_in_the_cache_is_made_again(tmp_path: Path) -> None:
    path = ensure_model("tiny", 0, tmp_path)
    good = model_digest(path)
    with (path / "model.safetensors").open("r+b") as file:
        file.seek(5000)
        file.write(b"\x00\x01")
    assert ensure_model("tiny", 0, tmp_path) == path
    assert model_digest(path) == good
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_a_folder_in_use_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UsageError, match="exists and is not empty"):
        write_model(tmp_path)
    assert (tmp_path / "file").read_text() == "mine"


def test_an_unknown_size_names_the_sizes() -> None:
    with pytest.raises(UsageError, match="tiny, small, 1b"):
        write_model("x", "huge")


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot be written"):
        write_model(tmp_path / "file" / "m")


def test_the_manifest_does_not_hash_itself(tiny: Path) -> None:
    assert MANIFEST not in model_digest(tiny)
    assert json.loads((tiny / MANIFEST).read_text())["files"] == model_digest(tiny)
