"""A fingerprint says what a process runs on, changes nothing in it and hides its secrets."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from raytest.fingerprint import capture as module
from raytest.fingerprint import gpu, host, software
from raytest.fingerprint.capture import capture, env_facts, visible_gpus

GPUS = [
    {"index": "0", "uuid": "GPU-aaaa1111", "name": "H200"},
    {"index": "1", "uuid": "GPU-aaaa2222", "name": "H200"},
    {"index": "2", "uuid": "GPU-bbbb3333", "name": "H200"},
]


def in_a_fresh_process(code: str, **env: str) -> dict[str, str]:
    source = f"import json\nfrom raytest.fingerprint.capture import capture\n{code}"
    done = subprocess.run(
        [sys.executable, "-c", source],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=50,
        check=True,
    )
    found: dict[str, str] = json.loads(done.stdout)
    return found


def test_it_imports_neither_torch_nor_vllm_nor_ray() -> None:
    code = (
        "import sys\ncapture('x')\n"
        "print(json.dumps({m: str(m in sys.modules) for m in ('torch', 'vllm', 'ray', 'numpy')}))"
    )
    assert set(in_a_fresh_process(code).values()) == {"False"}


def test_every_value_is_text_and_every_group_is_read() -> None:
    facts = capture("before load")
    assert all(isinstance(k, str) and isinstance(v, str) for k, v in facts.items())
    assert not [k for k in facts if k.startswith("capture.failed")]
    assert facts["process.stage"] == "before load"
    assert facts["process.pid"] == str(os.getpid())
    groups = {key.split(".")[0] for key in facts}
    assert groups >= {"python", "os", "cpu", "memory", "process", "threads", "package", "gpu"}
    assert facts["package.pytest"] == pytest.__version__


def test_it_draws_no_random_number() -> None:
    before = random.getstate()
    capture("x")
    assert random.getstate() == before


def test_it_takes_less_than_two_seconds() -> None:
    software.packages.cache_clear()
    software._record_digest.cache_clear()
    started = time.perf_counter()
    capture("x")
    assert time.perf_counter() - started < 2


def test_two_captures_of_one_process_agree_but_for_what_changes_by_itself() -> None:
    first, second = capture("x"), capture("x")
    changed = {k for k in first.keys() | second.keys() if first.get(k) != second.get(k)}
    assert changed <= {"process.captured_at", "memory.available", "memory.shm_free"}


def test_variables_that_decide_determinism_are_in_it_and_others_are_not() -> None:
    facts = env_facts({"VLLM_BATCH_INVARIANT": "1", "NCCL_ALGO": "Ring", "EDITOR": "vi"})
    assert facts == {"env.NCCL_ALGO": "Ring", "env.VLLM_BATCH_INVARIANT": "1"}
    assert env_facts({}) == {}


def test_a_variable_is_seen_as_the_process_was_started_with_it() -> None:
    facts = in_a_fresh_process("print(json.dumps(capture('x')))", OMP_NUM_THREADS="3")
    assert facts["env.OMP_NUM_THREADS"] == "3"


def test_no_secret_of_the_environment_is_anywhere_in_it() -> None:
    secret = "hf_" + "abcdefghijklmnopqrstuvwxyz0123456789"
    facts = in_a_fresh_process(
        "print(json.dumps(capture('x')))",
        HF_TOKEN=secret,
        VLLM_API_KEY="plain-looking",
        RAY_ADDRESS=f"https://user:{secret}@head:6379",
    )
    text = json.dumps(facts)
    assert secret not in text
    assert "plain-looking" not in text
    assert "env.HF_TOKEN" in facts


def test_a_group_that_cannot_be_read_is_named_and_costs_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken() -> Mapping[str, str]:
        raise OSError(5, "Input/output error", "/proc/cpuinfo")

    monkeypatch.setattr(module, "_GROUPS", {**module._GROUPS, "cpu": broken})
    facts = capture("x")
    assert "Input/output error" in facts["capture.failed.cpu"]
    assert not [k for k in facts if k.startswith("cpu.")]
    assert facts["os.system"]


def test_files_that_do_not_exist_are_empty_facts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(host, "read_text", lambda path: "")
    assert host.cpu_facts()["cpu.governor"] == ""
    assert host.os_facts()["os.distribution"] == ""
    assert "memory.total" not in host.memory_facts()


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, ["0", "1", "2"]),
        ("", []),
        ("-1", []),
        ("2,0", ["2", "0"]),
        ("GPU-bbbb", ["2"]),
        ("GPU-aaaa", []),  # two match: CUDA sees none
        ("0,9,1", ["0"]),  # CUDA stops at the first that it does not know
        (" 1 , 0", ["1", "0"]),
    ],
)
def test_visible_gpus_are_those_that_cuda_would_see(
    visible: str | None, expected: list[str]
) -> None:
    assert [g["index"] for g in visible_gpus(GPUS, visible)] == expected


def test_only_visible_gpus_and_their_links_are_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,2")
    monkeypatch.setattr(gpu, "gpus", lambda: GPUS)
    pairs = {"0-1": "PIX", "0-2": "SYS", "1-2": "SYS"}
    monkeypatch.setattr(gpu, "topology", lambda: pairs)
    facts = capture("x")
    assert facts["gpu.count"] == "2"
    assert facts["gpu.2.uuid"] == "GPU-bbbb3333"
    assert "gpu.1.uuid" not in facts
    assert [k for k in facts if k.startswith("gpu.topology")] == ["gpu.topology.0-2"]


@pytest.mark.parametrize(
    ("cores", "expected"), [([], ""), ([3], "3"), ([0, 1, 2, 5, 7, 8], "0-2,5,7-8")]
)
def test_cores_are_written_as_ranges(cores: list[int], expected: str) -> None:
    assert module._ranges(cores) == expected


def test_of_two_installed_copies_the_first_on_the_path_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder, name in (("a", "Foo_Bar-2.0"), ("b", "foo_bar-1.0"), ("b", "baz-3.1.post1")):
        (tmp_path / folder / f"{name}.dist-info").mkdir(parents=True)
    monkeypatch.setattr(sys, "path", [str(tmp_path / "a"), str(tmp_path / "b"), "/nowhere"])
    software.packages.cache_clear()
    try:
        assert software.packages() == {"foo-bar": "2.0", "baz": "3.1.post1"}
    finally:
        software.packages.cache_clear()


def test_two_builds_of_one_version_have_two_digests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digests = []
    for build, content in (("one", "AAA"), ("two", "BBB"), ("three", "AAA")):
        site = tmp_path / build
        (site / "torch").mkdir(parents=True)
        (site / "torch" / "__init__.py").touch()
        info = site / "torch-2.13.0.dist-info"
        info.mkdir()
        noise = f"../../bin/torchrun-{build},sha256=x,1\ntorch/a.pyc,,\n"
        (info / "RECORD").write_text(f"torch/lib.so,sha256={content},5\n{noise}")
        monkeypatch.setattr(software, "_package_folder", lambda name, site=site: site / name)
        software._record_digest.cache_clear()
        digests.append(software._record_digest("torch"))
    software._record_digest.cache_clear()
    assert digests[0] != digests[1]
    assert digests[0] == digests[2]


def test_a_loaded_vllm_is_asked_for_what_it_takes_variables_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refused() -> str:
        raise ValueError("Invalid value 'tf32'")

    table = {"VLLM_BATCH_INVARIANT": lambda: True, "VLLM_FLOAT32_MATMUL_PRECISION": refused}
    loaded = ModuleType("vllm.envs")
    loaded.environment_variables = table  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm.envs", loaded)
    assert software.vllm_facts() == {
        "vllm.envs.VLLM_BATCH_INVARIANT": "True",
        "vllm.envs.VLLM_FLOAT32_MATMUL_PRECISION": "refused: Invalid value 'tf32'",
    }


def test_a_torch_that_is_only_half_loaded_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace())  # type: ignore[misc]
    assert software.torch_facts() == {}


def test_loaded_numeric_libraries_are_named_by_file(monkeypatch: pytest.MonkeyPatch) -> None:
    maps = (
        "7f00-7f01 r-xp 00000000 08:01 12 /venv/torch/lib/libgomp-a34b3233.so.1\n"
        "7f02-7f03 r-xp 00000000 08:01 13 /usr/lib/libgomp.so.1\n"
        "7f04-7f05 r-xp 00000000 08:01 14 /venv/nccl/lib/libnccl.so.2\n"
        "7f06-7f07 r-xp 00000000 08:01 15 /usr/lib/libc.so.6\n"
    )
    monkeypatch.setattr(software, "read_text", lambda path: maps)
    assert software.library_facts() == {
        "library.libgomp": "libgomp-a34b3233.so.1,libgomp.so.1",
        "library.libnccl": "libnccl.so.2",
    }


@pytest.mark.parametrize(
    ("command", "expected"), [("uv", "uv run"), ("/opt/bin/uv", "uv run"), ("sh", ""), ("uvx", "")]
)
def test_a_process_anywhere_below_uv_run_says_so(
    tmp_path: Path, command: str, expected: str
) -> None:
    asked = "from raytest.fingerprint.host import launcher; print(launcher())"
    child = [sys.executable, "-c", asked]
    between = [sys.executable, "-c", f"import subprocess; subprocess.run({child!r}, check=True)"]
    # A Python that is called "uv" and runs a script that is called "run".
    (tmp_path / "run").write_text(f"import subprocess\nsubprocess.run({between!r}, check=True)")
    done = subprocess.run(
        [command, "run"],
        executable=sys.executable,
        cwd=tmp_path,
        # Python looks for its library where a command of its name is found.
        env={"PATH": str(tmp_path), "PYTHONPATH": str(Path(host.__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert (done.stdout.strip(), done.returncode) == (expected, 0), done.stderr


def test_a_container_and_its_image_are_known_where_they_can_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("RAYTEST_IMAGE", "APPTAINER_CONTAINER", "SINGULARITY_CONTAINER"):
        monkeypatch.delenv(name, raising=False)
    identity = "ab" * 32
    mounts = f"1 2 8:1 /var/lib/docker/containers/{identity}/hostname /etc/hostname rw"
    assert host._image_facts("", mounts) == {"container.id": identity}
    podman = 'engine="podman"\nid="cd"\nimage="reg/x:1"\nimageid="ef"\n'
    assert host._image_facts(podman, mounts) == {
        "container.id": "cd",
        "container.image": "reg/x:1",
        "container.image_id": "ef",
    }
    monkeypatch.setenv("RAYTEST_IMAGE", "reg/y@sha256:00")
    assert host._image_facts("", "") == {"container.image": "reg/y@sha256:00"}
