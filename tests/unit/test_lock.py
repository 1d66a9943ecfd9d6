"""A lock describes an environment exactly, is refused where it is damaged, and pip can read it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from raytest.errors import UsageError
from raytest.fingerprint import lock as module
from raytest.fingerprint.capture import capture
from raytest.fingerprint.lock import check_lock, make_lock, read, requirements, write

FACTS = {
    "package.torch": "2.13.0+cpu",
    "package.numpy": "2.3.0",
    "package.raytest": "0.1.0",
    "package.tool": "1.0",
    "source.raytest": "file:///src/raytest",
    "source.tool": "git+https://host/tool@0123abc",
    "env.OMP_NUM_THREADS": "1",
    "env.HF_TOKEN": "<redacted>",
    "env.RAY_JOB_ID": "01000000",
    "vllm.version": "0.32.0",
    "python.version": "3.11.7",
    "os.hostname": "n1",
    "process.pid": "12",
    "cpu.model": "Xeon",
    "gpu.3.name": "NVIDIA H200",
    "gpu.3.driver": "595.71.05",
    "gpu.3.uuid": "GPU-a",
    "gpu.3.temperature": "31",
    "gpu.3.ecc.uncorrected": "0",
    "torch.build_digest": "aa",
}
MODEL = {"model.weights": "abc", "model.path": "/models/x", "tokenizer.chat_template": "def"}


def codes(found: list[Any]) -> set[tuple[str, str, str]]:
    return {(f.severity, f.code, f.where) for f in found}


def test_an_environment_agrees_with_its_own_lock() -> None:
    assert check_lock(make_lock(FACTS, MODEL), FACTS, MODEL) == []


def test_this_environment_agrees_with_its_own_lock() -> None:
    assert check_lock(make_lock(capture("x")), capture("y")) == []


def test_a_lock_holds_on_another_node_of_the_same_kind() -> None:
    other = {k.replace("gpu.3.", "gpu.0."): v for k, v in FACTS.items()}
    other.update(
        {"os.hostname": "n2", "process.pid": "7", "gpu.0.uuid": "GPU-b", "env.RAY_JOB_ID": "2"}
    )
    moved = {**MODEL, "model.path": "/mnt/x"}
    assert check_lock(make_lock(FACTS, MODEL), other, moved) == []


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("package.numpy", "2.2.0", ("error", "lock-different", "packages.numpy")),
        ("package.numpy", None, ("error", "lock-missing", "packages.numpy")),
        ("package.extra", "1", ("info", "lock-extra", "packages.extra")),
        ("env.OMP_NUM_THREADS", "8", ("error", "lock-different", "variables.OMP_NUM_THREADS")),
        ("env.OMP_NUM_THREADS", None, ("error", "lock-missing", "variables.OMP_NUM_THREADS")),
        ("env.NCCL_ALGO", "Ring", ("warning", "lock-extra", "variables.NCCL_ALGO")),
        ("gpu.3.driver", "580.1", ("error", "lock-different", "versions.gpu[0].driver")),
        ("gpu.3.name", "H100", ("error", "lock-different", "gpu.gpu[0].name")),
        ("cpu.model", "EPYC", ("error", "lock-different", "node.cpu.model")),
    ],
)
def test_each_deviation_is_found_and_named(
    key: str, value: str | None, expected: tuple[str, str, str]
) -> None:
    facts = {k: v for k, v in {**FACTS, key: value}.items() if v is not None}
    assert codes(check_lock(make_lock(FACTS, MODEL), facts, MODEL)) == {expected}


def test_a_model_with_other_weights_is_found() -> None:
    other = {**MODEL, "model.weights": "xyz"}
    found = check_lock(make_lock(FACTS, MODEL), FACTS, other)
    assert codes(found) == {("error", "lock-different", "model.model.weights")}


def test_a_locked_model_that_was_not_looked_at_is_said_so() -> None:
    found = check_lock(make_lock(FACTS, MODEL), FACTS)
    assert codes(found) == {("warning", "lock-unchecked", "model")}
    assert check_lock(make_lock(FACTS), FACTS) == []


def test_a_remedy_is_a_command_where_there_is_one() -> None:
    found = check_lock(make_lock(FACTS), {**FACTS, "package.numpy": "1.0"})
    assert found[0].remedy == "pip install 'numpy==2.3.0'"


def test_writing_and_reading_changes_nothing(tmp_path: Path) -> None:
    lock = make_lock(FACTS, MODEL)
    write(tmp_path / "raytest.lock", lock)
    assert read(tmp_path / "raytest.lock") == lock
    assert [p.name for p in tmp_path.iterdir()] == ["raytest.lock"]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "is no lock file"),
        ("[]", "schema is None"),
        ('{"schema": "raytest.lock/9"}', "raytest.lock/9"),
        (json.dumps({**make_lock(FACTS), "packages": []}), "packages: must be an object"),
        (json.dumps({**make_lock(FACTS), "gpu": {"x": 1}}), "gpu.x: must be a string"),
    ],
)
def test_a_damaged_lock_is_refused_naming_file_and_key(
    tmp_path: Path, content: str, said: str
) -> None:
    path = tmp_path / "raytest.lock"
    path.write_text(content)
    with pytest.raises(UsageError) as caught:
        read(path)
    assert str(path) in str(caught.value)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_lock_that_cannot_be_read_or_written_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        read(tmp_path / "nowhere")
    with pytest.raises(UsageError, match="cannot be written"):
        write(tmp_path / "no" / "folder", make_lock(FACTS))
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="not UTF-8"):
        read(tmp_path / "binary")


def test_requirements_pin_what_an_index_has_and_comment_what_it_has_not() -> None:
    lines = requirements(make_lock({**FACTS, "package.odd": "unknown"})).splitlines()
    assert "numpy==2.3.0" in lines
    assert "torch==2.13.0+cpu" in lines
    assert "--extra-index-url https://download.pytorch.org/whl/cpu" in lines
    assert "tool @ git+https://host/tool@0123abc" in lines
    assert any(x.startswith("# raytest==0.1.0") for x in lines)
    assert any(x.startswith("# odd") for x in lines)
    for line in lines:
        if not line.startswith(("#", "--")):
            Requirement(line)


def test_pip_accepts_this_environments_own_requirements(tmp_path: Path) -> None:
    path = tmp_path / "requirements.txt"
    path.write_text(requirements(make_lock(capture("x"))))
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--no-index", "--no-deps"]
    done = subprocess.run(
        [*command, "--report", "-", "-q", "-r", str(path)],
        capture_output=True, text=True, timeout=55, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["install"] == []  # every line is satisfied already


def test_no_secret_is_locked() -> None:
    assert make_lock(FACTS)["variables"] == {"OMP_NUM_THREADS": "1", "HF_TOKEN": "<redacted>"}
    assert make_lock({})["schema"] == module.SCHEMA
