"""What processes tell of themselves: engines that are not the same, seeds that did not take."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from raytest.audit import Record, started_facts
from raytest.compare.evaluate import Evaluation, evaluate
from raytest.engines.base import EngineConfig
from raytest.fingerprint.health import device_health, worsened
from raytest.schema import RunVerdict, fingerprints_schema
from raytest.store import RunFolder
from tests.support.make_run import RunMaker, inventory, spec

CONFIG = EngineConfig(
    *("vllm", "m", "m", "bfloat16", None, 42, 1, 1, 3, "strict", "gpu", ("GPU-0-0",), "uni")
)
STATES = {"random": "aa", "torch": "bb"}
SETTINGS = {"effective.cache_config.num_gpu_blocks": "512", "effective.rank": "0"}


def records(**changed: str) -> list[Record]:
    """What one engine of one rank tells; ``changed`` replaces facts of the loaded rank."""
    seeds = {f"seed.{g}": s for g, s in STATES.items()}
    return [
        (-1, "before load", dict(seeds)),
        (0, "before load", dict(seeds)),
        (0, "loaded", {**SETTINGS, **changed}),
    ]


def told(
    tmp_path: Path,
    changed: dict[str, list[Record]] | None = None,
    states: dict[str, dict[str, Any]] | None = None,
    level: int = 3,
) -> RunFolder:
    """A healthy run on four GPUs whose engines leave events and fingerprints as a real one does."""
    maker = RunMaker(spec(f"[determinism]\nlevel = {level}\n"), inventory(1, 4))
    folder = maker.write(tmp_path)
    for launch in maker.plan.launches():
        cell = launch.cell
        slot = cell.slot.name
        found = (changed or {}).get(slot, records())
        where = {"cell_id": cell.cell_id, "launch": launch.launch, "attempt": 0}
        started = started_facts(found, replace(CONFIG, level=level))
        folder.event("started", **where, **started)
        rows = [
            (cell.cell_id, launch.launch, 0, rank, stage, key, value)
            for rank, stage, facts in found
            for key, value in facts.items()
        ]
        schema = fingerprints_schema()
        columns = zip(zip(*rows, strict=True), schema, strict=True)
        table = pa.table([pa.array(c, f.type) for c, f in columns], schema=schema)
        folder.write_fingerprints((cell.cell_id, launch.launch), 0, table)
        audit = (states or {}).get(slot, {"actor": STATES, "rank 0": STATES})
        folder.event("trial done", **where, trial=0, seed_states=audit)
    return folder


def environment(found: Evaluation) -> dict[str, str]:
    return {f.code: f.detail for f in found.findings if f.category == "environment"}


def test_equal_engines_with_equal_seeds_are_no_finding(tmp_path: Path) -> None:
    found = evaluate(told(tmp_path))
    assert found.verdict is RunVerdict.PASS
    assert environment(found) == {}


def test_an_engine_that_derived_another_setting_is_named_with_setting_and_cell(
    tmp_path: Path,
) -> None:
    other = records(**{"effective.cache_config.num_gpu_blocks": "511"})
    found = evaluate(told(tmp_path, {"node-0:2": other}))
    assert environment(found) == {
        "different-engines": "variant tp1: rank 0: effective.cache_config.num_gpu_blocks is 511 in "
        "tp1@node-0-2/0, 512 in the others"
    }
    finding = next(f for f in found.findings if f.code == "different-engines")
    assert finding.entities == ("tp1@node-0-2",)
    # equal results are still equal: a setting is a reason to look, not a mismatch
    assert found.verdict is RunVerdict.PASS


def test_where_a_process_stands_makes_no_other_engine() -> None:
    one, other = (started_facts(records(**{"effective.rank": r}), CONFIG) for r in ("0", "1"))
    assert one == other
    another = started_facts(records(**{"effective.model_runner": "x"}), CONFIG)
    assert another["engine"] != one["engine"]


@pytest.mark.parametrize("process", ["actor", "rank 0"])
def test_a_process_of_another_engine_whose_seed_did_not_take_forbids_the_comparison(
    tmp_path: Path, process: str
) -> None:
    audit = {"actor": STATES, "rank 0": STATES, process: {**STATES, "torch": "other"}}
    found = evaluate(told(tmp_path, states={"node-0:1": audit}))
    assert found.verdict is RunVerdict.NOT_COMPARABLE
    assert (
        f"seed audit before trial 0: torch in tp1@node-0-1/0 {process} differs from the other "
        "7 processes of variant tp1"
    ) in found.reasons


def test_a_rank_that_loaded_the_model_unseeded_is_named(tmp_path: Path) -> None:
    late = records()
    late[1] = (0, "before load", {"seed.random": "aa", "seed.torch": "unseeded"})
    found = evaluate(told(tmp_path, {"node-0:3": late}))
    assert found.verdict is RunVerdict.NOT_COMPARABLE
    assert any(
        "before the model was loaded: torch in tp1@node-0-3/0 rank 0" in r for r in found.reasons
    )


def test_at_level_0_seeds_may_differ(tmp_path: Path) -> None:
    audit = {"actor": {"torch": "x"}, "rank 0": {"torch": "y"}}
    found = evaluate(told(tmp_path, states={"node-0:1": audit}, level=0))
    assert found.verdict is RunVerdict.PASS


def test_a_variable_that_vllm_set_anew_is_told(tmp_path: Path) -> None:
    changed = records(**{"rewritten.NCCL_ALGO": "Ring -> allreduce:tree"})
    found = evaluate(told(tmp_path, {"node-0:0": changed}))
    assert "NCCL_ALGO: Ring -> allreduce:tree" in environment(found)["variable-rewritten"]


def test_memory_errors_that_came_during_the_trials_isolate_the_device(tmp_path: Path) -> None:
    folder = told(tmp_path)
    changes = {"gpu.0.ecc.uncorrected": ["0", "2"]}
    folder.event("health worsened", cell_id="tp1@node-0-0", launch=0, attempt=0, changes=changes)
    found = evaluate(folder)
    (finding,) = [f for f in found.findings if f.code == "device-health-worsened"]
    assert finding.severity == "isolate"
    assert finding.entities == ("tp1@node-0-0",)
    assert "gpu.0.ecc.uncorrected 0 -> 2" in finding.detail


def test_only_changes_that_tell_of_trouble_are_told() -> None:
    facts = {
        "gpu.0.name": "H200",
        "gpu.0.temperature": "30",
        "gpu.0.throttle_reasons": "idle",
        "gpu.0.ecc.uncorrected": "0",
        "gpu.0.ecc.remapping_pending": "False",
        "env.X": "1",
    }
    before = device_health(facts)
    assert set(before) == set(facts) - {"gpu.0.name", "env.X"}
    assert worsened(before, {**before, "gpu.0.temperature": "80"}) == {}
    assert worsened(before, {**before, "gpu.0.throttle_reasons": "sw_power_cap"}) == {}
    assert worsened(
        before,
        {
            **before,
            "gpu.0.throttle_reasons": "hw_thermal,sw_power_cap",
            "gpu.0.ecc.uncorrected": "1",
            "gpu.0.ecc.remapping_pending": "True",
        },
    ) == {
        "gpu.0.throttle_reasons": ("idle", "hw_thermal,sw_power_cap"),
        "gpu.0.ecc.uncorrected": ("0", "1"),
        "gpu.0.ecc.remapping_pending": ("False", "True"),
    }
