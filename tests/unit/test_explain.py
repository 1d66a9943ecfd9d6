"""From a run folder to an explanation: which facts become factors, and what the command says."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from raytest.cli import cli
from raytest.compare.loading import observe
from raytest.explain.factors import factors_of
from raytest.explain.outcomes import outcomes_of
from raytest.explain.tables import Factor, Role
from raytest.plan import Launch
from raytest.store import RunFolder
from tests.support.fleet import write_fingerprints
from tests.support.make_run import RunMaker, flip_bit, inventory, plant, spec

Facts = Callable[[Launch, int], Mapping[str, str]]
PAIRS = '[[variants]]\nname = "one"\n[[variants]]\nname = "two"\ntensor_parallel_size = 2\n'


def factors(folder: RunFolder) -> dict[str, Factor]:
    _, members = outcomes_of(observe([folder]), folder.plan())
    return {f.name: f for f in factors_of(folder, members)}


def values(factor: Factor) -> list[str]:
    return [factor.levels[i] for i in factor.codes]


def made(tmp_path: Path, facts: Facts, text: str = "", **maker: object) -> RunFolder:
    folder = RunMaker(spec(text), inventory(2, 2), **maker).write(tmp_path)  # type: ignore[arg-type]
    write_fingerprints(folder, facts)
    return folder


def explain(tmp_path: Path, *arguments: str) -> Result:
    return CliRunner().invoke(cli, ["explain", "run", "--results", str(tmp_path), *arguments])


def test_what_the_plan_and_the_spec_say_is_a_factor(tmp_path: Path) -> None:
    found = factors(made(tmp_path, lambda _, __: {}, PAIRS))
    assert values(found["tensor_parallel_size"]) == ["1"] * 4 + ["2"] * 2
    assert values(found["node"])[:4] == ["node-0", "node-0", "node-1", "node-1"]
    assert found["GPU UUID"].role is Role.IDENTITY
    assert found["node"].role is Role.LABEL
    assert {"GPU model", "device index", "arrangement", "launch", "spec level"} <= found.keys()


def test_ranks_that_agree_are_one_factor_and_ranks_that_differ_one_each(tmp_path: Path) -> None:
    def facts(launch: Launch, rank: int) -> Mapping[str, str]:
        odd = launch.cell.slot.name == "node-1:0,1" and rank == 1
        return {"env.SAME": "1", "env.ODD": "b" if odd else "a"} if rank >= 0 else {}

    found = factors(made(tmp_path, facts, PAIRS))
    assert "env.SAME[rank 0]" not in found
    assert values(found["env.ODD"]) == ["a"] * 5 + ["a + b"]
    assert values(found["env.ODD[rank 0]"]) == ["a"] * 6
    assert values(found["env.ODD[rank 1]"]) == ["a"] * 5 + ["b"]


def test_gpus_are_compared_by_place_and_not_by_their_index(tmp_path: Path) -> None:
    def facts(launch: Launch, rank: int) -> Mapping[str, str]:
        index = launch.cell.slot.devices[0].index
        return {f"gpu.{index}.driver": "580", f"gpu.{index}.uuid": launch.cell.cell_id}

    found = factors(made(tmp_path, facts))
    assert values(found["gpu.driver"]) == ["580"] * 4
    assert (found["gpu.driver"].role, found["gpu.uuid"].role) == (Role.SETTING, Role.IDENTITY)


def test_noise_is_no_factor_but_throttling_and_ecc_counts_are(tmp_path: Path) -> None:
    keys = ("gpu.0.temperature", "gpu.0.throttle_reasons", "gpu.0.ecc.corrected", "process.pid")
    found = factors(made(tmp_path, lambda _, __: dict.fromkeys(keys, "1")))
    assert not {"gpu.temperature", "process.pid"} & found.keys()
    assert found["gpu.throttle_reasons"].role is Role.STATE
    assert found["gpu.ecc.corrected"].role is Role.STATE


def test_only_the_last_attempt_of_a_launch_speaks(tmp_path: Path) -> None:
    folder = made(tmp_path, lambda _, __: {"env.X": "first", "env.GONE": "1"})
    write_fingerprints(folder, lambda _, __: {"env.X": "second"}, attempt=1)
    found = factors(folder)
    assert found["env.X"].levels == ("second",)
    assert "env.GONE" not in found


def test_a_variable_that_some_processes_lack_is_not_an_empty_one(tmp_path: Path) -> None:
    def facts(launch: Launch, _: int) -> Mapping[str, str]:
        return {"env.X": ""} if launch.cell.slot.node == "node-0" else {}

    found = factors(made(tmp_path, facts))
    assert values(found["env.X"]) == ["", "", "not set", "not set"]


def test_the_command_names_the_driver_of_the_divergent_slots(tmp_path: Path) -> None:
    bad = ("node-1", "node-4")
    maker = RunMaker(spec(), inventory(6, 4), changes=[plant(flip_bit(), node=list(bad))])
    folder = maker.write(tmp_path)
    write_fingerprints(
        folder,
        lambda launch, _: {
            "gpu.0.driver": "575.57" if launch.cell.slot.node in bad else "580.95",
            "env.OMP_NUM_THREADS": "1",
        },
    )
    ended = explain(tmp_path)
    assert ended.exit_code == 0, ended.output
    assert "all 8 divergent slots and no other have gpu.driver 575.57" in ended.output
    document = json.loads(explain(tmp_path, "--format", "json").output)
    assert document["schema"] == "raytest.explain/1"
    assert document["conclusion"] == "cause"
    assert document["causes"][0]["members"][0][0]["name"] == "gpu.driver"
    assert document["causes"][0]["members"][0][0]["role"] == "setting"
    assert [len(c["workers"]) for c in document["classes"]] == [16, 8]


def test_sizes_and_arrangements_are_told_apart_from_each_other(tmp_path: Path) -> None:
    text = f'[trials]\narrangements = ["batch", "solo"]\n{PAIRS}'
    changes = [plant(flip_bit(), variant="two"), plant(flip_bit(5), arrangement="solo")]
    RunMaker(spec(text), inventory(4, 4), changes=changes).write(tmp_path)
    output = explain(tmp_path).output
    assert "of class A and no other have tensor_parallel_size 1 and arrangement batch" in output
    assert "confounded with tensor_parallel_size: variant" in output


@pytest.mark.parametrize("skip", [False, True])
def test_a_run_without_a_difference_has_nothing_to_explain(tmp_path: Path, skip: bool) -> None:
    cells = [x.cell.cell_id for x in RunMaker(spec(), inventory(2, 2)).plan.launches()]
    trials = [(c, 0, t) for c in cells for t in range(2)] if skip else []
    RunMaker(spec(), inventory(2, 2), skip=trials).write(tmp_path)
    ended = explain(tmp_path)
    assert ended.exit_code == 0
    assert "no difference to explain" in ended.output


def test_repeats_that_differ_are_told_as_a_rate(tmp_path: Path) -> None:
    changes = [plant(flip_bit(), repeat=1, request=[2], node="node-1")]
    RunMaker(spec(), inventory(2, 2), changes=changes).write(tmp_path)
    output = explain(tmp_path).output
    assert "repeats of the same worker differ on 1 request and 2 of 4 workers" in output


def test_a_folder_that_is_no_run_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    from tests.support.command import raytest

    ended = raytest("explain", "absent", cwd=tmp_path)
    assert (ended.code, len(ended.said)) == (2, 1)
    assert "no such run" in ended.said[0]
