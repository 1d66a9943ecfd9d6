"""Seeds reach every generator of a process, and an audit shows where they did not."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from raytest import seeding
from raytest.seeding import (
    LEVELS,
    compare_audits,
    level_engine_args,
    level_env,
    nondeterministic_operation,
    seed_everything,
    state_digests,
    unsupported,
)

HERE_ONLY = ("PYTHONHASHSEED", *seeding.THREAD_VARIABLES)
NO_TORCH = "import sys; sys.modules['torch'] = None\n"


class Generator:
    """A stand-in for torch's generators: a state that a seed decides and a draw moves."""

    def __init__(self) -> None:
        self.state = random.randbytes(16)

    def seed(self, seed: int) -> None:
        self.state = f"seed {seed}".encode()

    def get(self) -> SimpleNamespace:
        return SimpleNamespace(numpy=lambda: np.frombuffer(self.state, dtype=np.uint8))


def fake_torch(n_devices: int = 2, *, started: bool = True) -> Any:
    cpu, devices = Generator(), [Generator() for _ in range(n_devices)]
    torch: Any = ModuleType("torch")

    def manual_seed(seed: int) -> None:
        for generator in (cpu, *devices):
            generator.seed(seed)

    def get_cuda_state(index: int) -> SimpleNamespace:
        assert started, "asking for a CUDA generator starts CUDA"
        return devices[index].get()

    torch.manual_seed, torch.get_rng_state = manual_seed, cpu.get
    torch.cuda = SimpleNamespace(
        is_initialized=lambda: started,
        device_count=lambda: n_devices,
        get_rng_state=get_cuda_state,
    )
    cudnn = SimpleNamespace(deterministic=False, benchmark=True)
    torch.backends = SimpleNamespace(cudnn=cudnn)
    torch.strict = []
    torch.use_deterministic_algorithms = lambda on, warn_only: torch.strict.append((on, warn_only))
    torch.devices = devices
    return torch


@pytest.fixture(autouse=True)
def _keep_generators(monkeypatch: pytest.MonkeyPatch) -> Any:
    """No test leaves this process seeded, nor depends on a torch that happens to be there."""
    monkeypatch.setitem(sys.modules, "torch", None)
    own, array = random.getstate(), np.random.get_state()
    yield
    random.setstate(own)
    np.random.set_state(array)


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> Any:
    module = fake_torch()
    monkeypatch.setitem(sys.modules, "torch", module)
    return module


def in_a_fresh_process(code: str, **env: str) -> Any:
    inherited = {k: v for k, v in os.environ.items() if k not in HERE_ONLY}
    done = subprocess.run(
        [sys.executable, "-c", NO_TORCH + "import json\n" + code],
        env={**inherited, **env},
        capture_output=True,
        text=True,
        timeout=50,
        check=True,
    )
    return json.loads(done.stdout)


def two_fresh_processes(code: str, **env: str) -> dict[str, Any]:
    return {name: in_a_fresh_process(code, **env) for name in ("rank 0", "rank 1")}


SEED_ALL = """
from raytest.seeding import seed_everything, state_digests
seed_everything(42, level=1)
print(json.dumps(state_digests()))
"""
SEED_NUMPY_ALONE = """
import numpy
from raytest.seeding import state_digests
numpy.random.seed(42)
print(json.dumps(state_digests()))
"""
DRAW_THEN_SEED = """
import random
from raytest.seeding import seed_everything, state_digests
drawn = random.random()
seed_everything(42, level=1)
print(json.dumps({"drawn": drawn, "states": state_digests()}))
"""
SEED_THEN_DRAW = """
import random
from raytest.seeding import seed_everything
seed_everything(42, level=1)
print(json.dumps({"drawn": random.random()}))
"""


class TestSeeding:
    def test_two_processes_with_one_seed_agree_on_every_generator(self) -> None:
        audits = two_fresh_processes(SEED_ALL, PYTHONHASHSEED="0")
        assert set(audits["rank 0"]) == {"random", "numpy", "python_hash_seed"}
        assert compare_audits(audits) == []

    def test_seeding_one_library_leaves_the_others_apart_and_the_audit_names_them(self) -> None:
        found = compare_audits(two_fresh_processes(SEED_NUMPY_ALONE, PYTHONHASHSEED="0"))
        assert len(found) == 1
        assert found[0].startswith("random: ")
        assert "rank 0" in found[0]
        assert "rank 1" in found[0]

    def test_what_was_drawn_before_the_seed_differs_though_the_states_agree(self) -> None:
        late = two_fresh_processes(DRAW_THEN_SEED)
        assert late["rank 0"]["states"] == late["rank 1"]["states"]
        assert late["rank 0"]["drawn"] != late["rank 1"]["drawn"]
        early = two_fresh_processes(SEED_THEN_DRAW)
        assert early["rank 0"] == early["rank 1"]

    def test_level_0_leaves_every_generator_as_it_was(self, torch: Any) -> None:
        before = state_digests()
        seed_everything(42, level=0)
        assert state_digests() == before

    @pytest.mark.parametrize("level", range(1, 6))
    def test_every_other_level_seeds_every_generator(self, torch: Any, level: int) -> None:
        before = state_digests()
        seed_everything(42, level=level)
        after = state_digests()
        assert {name for name in after if after[name] != before[name]} == {
            "random", "numpy", "torch", "torch.cuda.0", "torch.cuda.1",
        }  # fmt: skip

    @pytest.mark.parametrize("generator", ["random", "numpy", "torch", "torch.cuda.0"])
    def test_another_seed_is_another_state(self, torch: Any, generator: str) -> None:
        seed_everything(42, level=1)
        first = state_digests()
        seed_everything(43, level=1)
        assert state_digests()[generator] != first[generator]

    def test_seeding_again_undoes_any_draw(self) -> None:
        seed_everything(7, level=1)
        fresh, first = state_digests(), (random.random(), float(np.random.rand()))
        assert state_digests()["random"] != fresh["random"]
        assert state_digests()["numpy"] != fresh["numpy"]
        seed_everything(7, level=1)
        assert state_digests() == fresh
        assert (random.random(), float(np.random.rand())) == first

    def test_a_seed_that_numpy_would_refuse_is_taken(self) -> None:
        seed_everything(2**32 + 5, level=1)
        large = state_digests()["numpy"]
        np.random.seed(5)
        assert state_digests()["numpy"] == large

    def test_cudnn_is_fixed_from_level_2_on(self, torch: Any) -> None:
        seed_everything(1, level=1)
        assert torch.backends.cudnn == SimpleNamespace(deterministic=False, benchmark=True)
        seed_everything(1, level=2)
        assert torch.backends.cudnn == SimpleNamespace(deterministic=True, benchmark=False)

    def test_torch_is_told_to_refuse_at_level_5_alone(self, torch: Any) -> None:
        seed_everything(1, level=4)
        assert torch.strict == []
        seed_everything(1, level=5)
        seed_everything(1, level=5, warn_only=True)
        assert torch.strict == [(True, False), (True, True)]

    def test_neither_numpy_nor_torch_is_imported_before_the_seed(self) -> None:
        code = "import raytest.seeding\nprint(json.dumps([m for m in sys.modules if m in heavy]))"
        heavy = "heavy = {'numpy', 'torch', 'ray', 'vllm', 'pyarrow'}\n"
        assert set(in_a_fresh_process(heavy + code)) <= {"torch"}  # blocked, not imported


class TestAudit:
    def test_it_draws_from_no_generator(self, torch: Any) -> None:
        seed_everything(3, level=1)
        expected = (random.random(), float(np.random.rand()))
        seed_everything(3, level=1)
        assert state_digests() == state_digests()
        assert (random.random(), float(np.random.rand())) == expected

    def test_it_starts_no_cuda(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "torch", fake_torch(started=False))
        assert not [name for name in state_digests() if name.startswith("torch.cuda")]

    def test_one_device_that_drew_is_seen(self, torch: Any) -> None:
        seed_everything(3, level=1)
        before = state_digests()
        torch.devices[1].seed(99)
        after = state_digests()
        assert [name for name in after if after[name] != before[name]] == ["torch.cuda.1"]

    def test_a_draw_of_one_normal_is_seen_though_the_key_of_numpy_stays(self) -> None:
        np.random.seed(1)
        np.random.standard_normal()
        keys, before = np.random.get_state()[1].copy(), state_digests()["numpy"]
        np.random.standard_normal()  # the second of a pair: kept from the first draw
        assert (np.random.get_state()[1] == keys).all()
        assert state_digests()["numpy"] != before

    def test_it_says_whether_hashes_were_fixed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PYTHONHASHSEED", "0")
        assert state_digests()["python_hash_seed"] == "0"
        monkeypatch.delenv("PYTHONHASHSEED")
        assert state_digests()["python_hash_seed"] == "unset"

    def test_the_odd_rank_is_named_with_its_generator(self) -> None:
        audits = {f"rank {r}": {"numpy": "a", "torch": "b"} for r in range(4)}
        audits["rank 2"] = {"numpy": "a", "torch": "x"}
        assert compare_audits(audits) == ["torch: rank 2 differ from rank 0, rank 1, rank 3"]

    def test_every_generator_that_is_apart_is_named(self) -> None:
        audits = {"rank 0": {"numpy": "a", "torch": "b"}, "rank 1": {"numpy": "c", "torch": "d"}}
        assert [line.partition(":")[0] for line in compare_audits(audits)] == ["numpy", "torch"]

    def test_a_generator_that_a_process_lacks_is_not_held_against_it(self) -> None:
        assert (
            compare_audits({"the actor": {"random": "a"}, "rank 0": {"random": "a", "t": "b"}})
            == []
        )

    def test_no_process_and_one_process_agree(self) -> None:
        assert compare_audits({}) == []
        assert compare_audits({"rank 0": {"random": "a"}}) == []


class TestLevels:
    def test_they_are_numbered_by_their_place_and_say_what_they_add(self) -> None:
        assert [rung.level for rung in LEVELS] == list(range(6))
        assert len({rung.name for rung in LEVELS}) == len(LEVELS)
        assert all(rung.adds for rung in LEVELS)

    @pytest.mark.parametrize("level", range(1, 6))
    def test_each_keeps_what_the_one_below_has_set(self, level: int) -> None:
        assert level_env(level - 1).items() <= level_env(level).items()
        assert level_engine_args(level - 1).items() <= level_engine_args(level).items()

    def test_each_variable_comes_with_its_level(self) -> None:
        added = [
            set(level_env(rung.level)) - set(level_env(max(0, rung.level - 1))) for rung in LEVELS
        ]
        assert added == [
            set(),
            {"PYTHONHASHSEED"},
            {"OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"},
            {"VLLM_ENABLE_V1_MULTIPROCESSING"},
            {"VLLM_BATCH_INVARIANT"},
            {"CUBLAS_WORKSPACE_CONFIG", "CUDA_LAUNCH_BLOCKING"},
        ]

    def test_threads_are_as_many_as_asked_for(self) -> None:
        assert {level_env(2, threads=4)[name] for name in seeding.THREAD_VARIABLES} == {"4"}

    def test_the_scheduler_is_synchronous_from_level_3_on(self) -> None:
        assert level_engine_args(2) == {}
        assert level_engine_args(3) == {"async_scheduling": False}

    @pytest.mark.parametrize(("level", "platform", "refused"), [
        (3, "cpu", False), (4, "cpu", True), (5, "cpu", True), (5, "cuda", False),
    ])  # fmt: skip
    def test_batch_invariance_is_refused_where_no_kernel_has_it(
        self, level: int, platform: str, refused: bool
    ) -> None:
        reason = unsupported(level, platform)
        assert (reason is not None) == refused
        assert reason is None or "level 3" in reason

    def test_hashes_agree_where_the_variable_was_set_before_the_process(self) -> None:
        code = "print(json.dumps(hash('rank')))"
        fixed = two_fresh_processes(code, **level_env(1))
        assert fixed["rank 0"] == fixed["rank 1"]

    def test_setting_the_variable_inside_the_process_is_too_late(self) -> None:
        code = "import os; os.environ['PYTHONHASHSEED'] = '0'\nprint(json.dumps(hash('rank')))"
        late = two_fresh_processes(code)
        assert late["rank 0"] != late["rank 1"]


REFUSED = (
    "RuntimeError: {} does not have a deterministic implementation, but you set "
    "'torch.use_deterministic_algorithms(True)'. You can turn off determinism just for this "
    "operation, or you can use the 'warn_only=True' option."
)
CUBLAS = (
    "Deterministic behavior was enabled with either `torch.use_deterministic_algorithms(True)` or "
    "`at::Context::setDeterministicAlgorithms(true)`, but this operation is not deterministic "
    "because it uses CuBLAS and you have CUDA >= 10.2."
)


class TestRefusedOperations:
    def test_the_operation_is_named_with_a_way_out(self) -> None:
        operation, advice = nondeterministic_operation(REFUSED.format("put_")) or ("", "")
        assert operation == "put_"
        assert "level 4" in advice
        assert "warn_only" in advice

    @pytest.mark.parametrize("name", [
        "cumsum_cuda_kernel", "aten::put_", "scatter with src tensor and reduce=None",
    ])  # fmt: skip
    def test_its_whole_name_is_read(self, name: str) -> None:
        found = nondeterministic_operation(REFUSED.format(name))
        assert found is not None
        assert found[0] == name

    def test_cublas_asks_for_its_workspace(self) -> None:
        operation, advice = nondeterministic_operation(CUBLAS) or ("", "")
        assert operation == "cuBLAS"
        assert "CUBLAS_WORKSPACE_CONFIG=:4096:8" in advice

    def test_another_error_is_left_alone(self) -> None:
        assert nondeterministic_operation("CUDA out of memory") is None
