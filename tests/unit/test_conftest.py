"""The rules of the test suite itself, tried on a small suite of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = Path(__file__).parents[1] / "conftest.py"
MARKERS = """[pytest]
addopts = --strict-markers
markers =
    gpu(n): n
    integration: i
    e2e: e
"""
TWO_GPUS = """import pytest

@pytest.mark.gpu(2)
def test_two():
    pass
"""


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    (tmp_path / "conftest.py").write_text(CONFTEST.read_text())
    (tmp_path / "pytest.ini").write_text(MARKERS)
    return tmp_path


def run(suite: Path, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if k != "RAYTEST_REQUIRE_GPUS"}
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-rsf", "-p", "no:cacheprovider", *args],
        cwd=suite,
        env={**clean, **env},
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )


def add(suite: Path, path: str, text: str) -> None:
    (suite / path).parent.mkdir(exist_ok=True)
    (suite / path).write_text(text)


@pytest.fixture
def gpu_suite(suite: Path) -> Path:
    add(suite, "gpu/test_card.py", TWO_GPUS)
    return suite


def test_a_gpu_test_without_gpus_is_skipped_and_says_how_many_it_needs(gpu_suite: Path) -> None:
    done = run(gpu_suite, CUDA_VISIBLE_DEVICES="")
    assert "needs 2 NVIDIA GPU(s), found 0" in done.stdout
    assert "1 skipped" in done.stdout


def test_a_gpu_test_without_gpus_fails_where_gpus_are_required(gpu_suite: Path) -> None:
    done = run(gpu_suite, CUDA_VISIBLE_DEVICES="", RAYTEST_REQUIRE_GPUS="1")
    assert done.returncode == 1
    assert "found 0, and RAYTEST_REQUIRE_GPUS is set" in done.stdout


def test_fast_layers_run_before_slow_ones(suite: Path) -> None:
    for layer in ("e2e", "integration", "unit"):
        add(suite, f"{layer}/test_{layer}.py", f"def test_{layer}():\n    pass\n")
    lines = run(suite, "-v").stdout.splitlines()
    order = [line.split("/")[0] for line in lines if "PASSED" in line]
    assert order == ["unit", "integration", "e2e"]


def test_a_layer_can_be_left_out_by_its_marker(suite: Path) -> None:
    for layer in ("e2e", "integration", "unit"):
        add(suite, f"{layer}/test_{layer}.py", f"def test_{layer}():\n    pass\n")
    done = run(suite, "-m", "not e2e and not integration")
    assert "1 passed, 2 deselected" in done.stdout


def test_a_test_outside_every_layer_is_refused(suite: Path) -> None:
    add(suite, "misc/test_stray.py", "def test_stray():\n    pass\n")
    done = run(suite)
    assert done.returncode != 0
    assert "tests live in one of unit, integration, e2e, gpu, benchmarks" in done.stderr


def test_hypothesis_draws_the_same_examples_every_time_in_ci(suite: Path) -> None:
    text = """
from hypothesis import given, strategies as st

@given(st.integers())
def test_draw(n):
    with open("drawn.txt", "a") as out:
        print(n, file=out)
"""
    add(suite, "unit/test_draw.py", text)
    drawn = suite / "drawn.txt"
    first_two = []
    for _ in range(2):
        assert "1 passed" in run(suite, CI="true").stdout
        first_two.append(drawn.read_text())
        drawn.unlink()
    assert first_two[0] == first_two[1]
    assert len(first_two[0].splitlines()) > 50
