"""The set-up script, with a stand-in for Python that notes what it was asked to do."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

SETUP = Path(__file__).parents[2] / ".ci" / "setup.sh"

# Answers as Python and pip would; OFFERS says where the CPU build of torch is to be found, BROKEN
# which module does not import.
PYTHON = """#!/usr/bin/env bash
case "$*" in
    -V) echo "Python 3.11.9" ;;
    "-m venv --clear "*)
        rm -rf "$4"; mkdir -p "$4/bin"; cp "$0" "$4/bin/python"; echo "made" >>"$NOTES" ;;
    "-m pip install"*)
        echo "install $*" >>"$NOTES"
        case "$OFFERS $*" in
            everywhere* | torch-index*pytorch.org*) ;;
            *) echo "ERROR: No matching distribution found for torch==2.13.0+cpu"; exit 1 ;;
        esac ;;
    "-m pip uninstall"*) echo "uninstall $*" >>"$NOTES" ;;
    "-I -c import torchvision") [ "$BROKEN" != torchvision ] ;;
    "-I - "*) cat >/dev/null; [ "$BROKEN" != package ] && echo "state $3" ;;
esac
"""


class Machine:
    def __init__(self, folder: Path) -> None:
        self.venv = folder / "venv"
        self.notes = folder / "notes"
        self.python = folder / "python3.11"
        self.python.write_text(PYTHON)
        self.python.chmod(0o755)

    def setup(self, **env: str) -> subprocess.CompletedProcess[str]:
        """One call of the script; what it asked for is in ``notes`` afterwards."""
        self.notes.write_text("")
        given = {"VENV": str(self.venv), "PYTHON": str(self.python), "NOTES": str(self.notes)}
        defaults = {"EXTRA": "cpu", "OFFERS": "everywhere", "BROKEN": ""}
        return subprocess.run(
            ["bash", str(SETUP)],
            env={**os.environ, **given, **defaults, **env},
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )

    def asked(self) -> list[str]:
        return [line.split(" ", 1)[0] for line in self.notes.read_text().splitlines()]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_a_second_set_up_does_nothing(machine: Machine) -> None:
    assert machine.setup().returncode == 0
    assert machine.asked() == ["made", "install"]
    done = machine.setup()
    assert (done.returncode, done.stderr, machine.asked()) == (0, "", [])


def test_another_extra_is_installed_into_the_same_environment(machine: Machine) -> None:
    machine.setup()
    assert machine.setup(EXTRA="cuda").returncode == 0
    assert machine.asked() == ["install"]
    assert ".[cuda,dev]" in machine.notes.read_text()


def test_a_package_that_is_gone_is_installed_again(machine: Machine) -> None:
    machine.setup()
    done = machine.setup(BROKEN="package")
    assert machine.asked() == ["install"]
    assert done.returncode == 1
    assert "incomplete after the install" in done.stderr


def test_an_environment_whose_python_is_gone_is_made_again(machine: Machine) -> None:
    machine.setup()
    (machine.venv / "bin" / "python").unlink()
    assert machine.setup().returncode == 0
    assert machine.asked() == ["made", "install"]


def test_a_set_up_that_was_cut_short_starts_from_nothing(machine: Machine) -> None:
    assert machine.setup(OFFERS="nowhere").returncode == 1
    assert machine.setup().returncode == 0
    assert machine.asked() == ["made", "install"]


def test_the_index_of_pytorch_is_asked_only_where_pip_finds_no_cpu_torch(machine: Machine) -> None:
    assert machine.setup(OFFERS="torch-index").returncode == 0
    assert machine.asked() == ["made", "install", "install"]
    first, second = machine.notes.read_text().splitlines()[1:]
    assert "--extra-index-url" not in first
    assert "--extra-index-url https://download.pytorch.org/whl/cpu" in second


def test_a_failed_install_says_why_and_where_the_log_is(machine: Machine) -> None:
    done = machine.setup(OFFERS="nowhere")
    assert done.returncode == 1
    assert "No matching distribution found for torch" in done.stderr
    assert str(machine.venv / "install.log") in done.stderr


def test_a_torchvision_that_does_not_import_is_removed_with_its_kin(machine: Machine) -> None:
    machine.setup(BROKEN="torchvision")
    assert machine.asked() == ["made", "install", "uninstall"]
    assert machine.notes.read_text().strip().endswith("torchvision torchaudio torchcodec")


def test_without_a_fit_python_the_error_says_which_are_and_how_to_name_one(
    machine: Machine,
) -> None:
    done = machine.setup(PYTHON="/bin/false")
    assert done.returncode == 1
    assert "no Python 3.11, 3.12 or 3.13" in done.stderr
    assert "PYTHON=/path/to/python" in done.stderr
    assert not machine.venv.exists()


def test_an_unknown_extra_is_refused(machine: Machine) -> None:
    done = machine.setup(EXTRA="tpu")
    assert done.returncode == 1
    assert "EXTRA is 'tpu': expected cpu or cuda" in done.stderr
