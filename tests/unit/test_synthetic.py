"""The synthetic model is the same bytes on every machine, and whole or not there."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from raytest import synthetic, synthetic_weights, vocabulary
from raytest.errors import UsageError
from raytest.synthetic import MANIFEST, cached_model, ensure_model, model_digest, write_model
from raytest.synthetic_weights import (
    SHAPES,
    SHARD_BYTES,
    split_into_files,
    tensor_shapes,
    weights,
    write_safetensors,
)
from raytest.vocabulary import write_tokenizer

# sha256 of every file of size tiny, seed 0, version 1. Whoever changes one counts VERSION up:
# caches and recorded runs of the old bytes must not be taken for those of the new.
TINY = {
    "config.json": "c09894b866e72d8364fac341eb9ce603e890f313627313b0a294eb1fe1446e43",
    "generation_config.json": "ec11e5b4b12ade70223e19ccecdc1c3f93419d7b224d3f43485de8d1efde82b0",
    "model.safetensors": "84b18368b212b9290b67a10f1626c620684bfd7a3593494e51241ed2961483e4",
    "tokenizer.json": "c685e703791fdb441e03b1742635b2e7ef9b093b2eb819722b8b02c2aeca20c3",
    "tokenizer_config.json": "f668670bed7ec0fd47d4665563b9c8a8436949898ca2eadf95b30531dfa314e6",
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny"
    write_model(path, "tiny", 0)
    return path


@pytest.fixture
def cache(tiny: Path, tmp_path: Path) -> Path:
    shutil.copytree(tiny, cached_model("tiny", 0, tmp_path))
    return tmp_path


def test_the_same_seed_and_version_give_the_same_bytes_everywhere(tiny: Path) -> None:
    assert model_digest(tiny) == TINY


@pytest.mark.parametrize("parallel", ["true", "false"])
def test_another_process_hash_seed_and_thread_setting_write_the_same_bytes(
    parallel: str, tiny: Path, tmp_path: Path
) -> None:
    code = "import sys; from raytest.synthetic import write_model; write_model(sys.argv[1])"
    environment = {**os.environ, "PYTHONHASHSEED": "7", "TOKENIZERS_PARALLELISM": parallel}
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "m")], check=True, env=environment)
    assert model_digest(tmp_path / "m") == model_digest(tiny)


def test_another_seed_gives_other_weights_and_another_tokenizer(tiny: Path, tmp_path: Path) -> None:
    write_model(tmp_path / "m", "tiny", 1)
    ours, theirs = model_digest(tiny), model_digest(tmp_path / "m")
    assert ours["model.safetensors"] != theirs["model.safetensors"]
    assert ours["tokenizer.json"] != theirs["tokenizer.json"]


def test_weights_have_the_stated_spread_and_norms_are_one() -> None:
    values = np.concatenate(list(weights("w", 512 * 512, 3)))
    assert values.shape == (512 * 512,)
    assert abs(float(values.mean())) < 3e-4
    assert abs(float(values.std()) - 0.03) < 3e-4
    # past three standard deviations: the volume of two corners of the unit cube in four dimensions
    beyond = 2 * (2 - 3**0.5) ** 4 / 24
    error = (beyond / values.size) ** 0.5
    assert abs(float((np.abs(values) > 0.09).mean()) - beyond) < 5 * error
    assert (np.concatenate(list(weights("x.norm.weight", 4, 3))) == 1.0).all()


def test_a_tensors_values_do_not_depend_on_the_block_they_are_made_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = np.concatenate(list(weights("w", 5000, 0)))
    monkeypatch.setattr(synthetic_weights, "BLOCK", 999)
    assert np.array_equal(np.concatenate(list(weights("w", 5000, 0))), whole)


def test_the_safetensors_library_reads_every_tensor_of_every_dtype(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.numpy")
    tensors = [("a.weight", (3, 5)), ("b.norm.weight", (4,))]
    wanted = np.concatenate(list(weights("a.weight", 15, 0))).reshape(3, 5)
    for dtype in ("float32", "float16"):
        write_safetensors(tmp_path / dtype, tensors, 0, dtype)
        found = safetensors.load_file(tmp_path / dtype)
        assert found["a.weight"].dtype == found["b.norm.weight"].dtype == np.dtype(dtype)
        assert np.array_equal(found["a.weight"], wanted.astype(dtype))
        assert np.array_equal(found["b.norm.weight"], np.ones(4))


def test_bfloat16_is_the_nearest_to_the_float32_value_ties_to_even(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "f", [("a.weight", (4096,))], 0, "bfloat16")
    bits = np.frombuffer((tmp_path / "f").read_bytes()[-2 * 4096 :], dtype="<u2")
    exact = np.concatenate(list(weights("a.weight", 4096, 0))).astype(np.float64)

    def value(pattern: np.ndarray) -> np.ndarray:
        return (pattern.astype(np.uint32) << 16).view(np.float32).astype(np.float64)

    error = np.abs(value(bits) - exact)
    for neighbour in (bits - 1, bits + 1):
        other = np.abs(value(neighbour) - exact)
        assert ((error < other) | ((error == other) & (bits % 2 == 0))).all()


def test_a_model_beyond_the_limit_is_split_and_every_tensor_is_in_one_file() -> None:
    tensors = list(tensor_shapes(SHAPES["1b"]))
    files = split_into_files(tensors, 2)
    assert len(files) == 2
    assert [t for f in files for t in f] == tensors
    assert all(2 * sum(math.prod(s) for _, s in f) <= SHARD_BYTES for f in files)


@pytest.mark.parametrize(("size", "millions"), [("tiny", 7.6), ("small", 104.6), ("1b", 1384.2)])
def test_sizes_have_the_parameters_they_say_and_heads_that_tp_4_divides(
    size: str, millions: float
) -> None:
    shape = SHAPES[size]
    count = sum(math.prod(s) for _, s in tensor_shapes(shape))
    assert round(count / 1e6, 1) == millions
    assert shape.num_attention_heads % 4 == shape.num_key_value_heads % 4 == 0
    assert shape.intermediate_size % (4 * 16) == 0


def test_the_tokenizer_has_exactly_the_models_vocabulary(tiny: Path) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tiny / "tokenizer.json"))
    config = json.loads((tiny / "config.json").read_text())
    assert tokenizer.get_vocab_size() == config["vocab_size"] == 8192
    text = "Ünïcode 中文 🏳️‍🌈 e\u0301\n\tcode"
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_a_damaged_copy_in_the_cache_is_made_again_and_what_a_killed_process_left_is_removed(
    cache: Path,
) -> None:
    path = cached_model("tiny", 0, cache)
    (cache / f".{path.name}.0badcafe.tmp").mkdir()
    with (path / "model.safetensors").open("r+b") as file:
        file.seek(5000)
        file.write(b"\x00\x01")
    assert model_digest(path) != TINY
    assert ensure_model("tiny", 0, cache) == path
    assert model_digest(path) == TINY
    assert [p.name for p in cache.iterdir()] == [path.name]


@pytest.mark.parametrize("manifest", ["[]", "{", '{"version": 0, "files": {}}'])
def test_a_copy_with_a_manifest_of_something_else_is_made_again(
    cache: Path, manifest: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Path] = []
    monkeypatch.setattr(synthetic, "_replace", lambda path, *_: made.append(path))
    path = cached_model("tiny", 0, cache)
    (path / MANIFEST).write_text(manifest)
    ensure_model("tiny", 0, cache)
    assert made == [path]


def test_a_file_in_the_models_place_in_the_cache_is_replaced(tmp_path: Path) -> None:
    path = cached_model("tiny", 0, tmp_path)
    path.write_text("in the way")
    assert model_digest(ensure_model("synthetic:tiny", 0, tmp_path)) == TINY


def test_an_intact_model_in_the_cache_is_left_as_it_is(cache: Path) -> None:
    before = cached_model("tiny", 0, cache).stat()
    after = ensure_model("tiny", 0, cache).stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_processes_that_ask_at_once_make_the_model_once(tmp_path: Path) -> None:
    code = (
        "import sys, os; from raytest.synthetic import ensure_model; "
        "path = ensure_model('tiny', 0, sys.argv[1]); "
        "print(os.stat(path).st_ino)"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    folders = {process.communicate(timeout=50)[0] for process in running}
    assert [process.returncode for process in running] == [0, 0, 0]
    # each was handed the same folder: none took away what another was reading
    assert len(folders) == 1
    assert model_digest(cached_model("tiny", 0, tmp_path)) == TINY


def test_the_cache_is_the_users_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cached_model("tiny", 3) == tmp_path / "raytest" / "models" / "tiny-3-v1"


def test_a_cache_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot be written"):
        ensure_model("tiny", 0, tmp_path / "file")


def test_making_a_model_leaves_no_variable_behind(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    monkeypatch.setattr(vocabulary, "LINES", 100)
    before = dict(os.environ)
    write_tokenizer(tmp_path, 300, 0)
    assert dict(os.environ) == before


def test_a_missing_tokenizers_package_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(UsageError, match=r"install raytest\[cpu\] or raytest\[cuda\]"):
        write_model(tmp_path / "m")
    assert list(tmp_path.iterdir()) == []


def test_the_folder_one_stands_in_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="is the folder you are in"):
        write_model(".")


def test_a_folder_in_use_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UsageError, match="exists and is not empty"):
        write_model(tmp_path)
    assert (tmp_path / "file").read_text() == "mine"


def test_an_unknown_size_or_dtype_names_the_known_ones() -> None:
    with pytest.raises(UsageError, match="tiny, small, 1b"):
        write_model("x", "huge")
    with pytest.raises(UsageError, match="tiny, small, 1b"):
        ensure_model("synthetic:huge")
    with pytest.raises(UsageError, match="bfloat16, float16, float32"):
        write_model("x", dtype="int8")


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot be written"):
        write_model(tmp_path / "file" / "m")


def test_the_manifest_does_not_hash_itself(tiny: Path) -> None:
    assert MANIFEST not in model_digest(tiny)
    assert json.loads((tiny / MANIFEST).read_text())["files"] == model_digest(tiny)
