"""Who tests the tester: planted faults are caught and blamed, and a broken detector is noticed."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from click.testing import CliRunner

from raytest import observations
from raytest.cli import cli
from raytest.engines.reference_faults import FAULT_KINDS
from raytest.errors import UsageError
from raytest.schema import Verdict
from raytest.selftest import examine
from raytest.selftest.examination import Extent, choose, document, examine_all, summary
from raytest.selftest.examine import Fleet, Seen
from raytest.selftest.planting import Kind, kinds

# They end a process, and are told by the run itself.
ENDS_A_PROCESS = {"hang_on_start", "die_on_start", "die_in_trial", "out_of_memory", "slow"}
SMALL = Extent(trials=2, clean=2, prompts=5, tokens=8)


def quiet(_: str) -> None:
    return


def examined(*names: str, extent: Extent = SMALL) -> dict[str, Any]:
    return examine_all(choose(names), extent, quiet)


def test_every_kind_of_fault_of_the_engine_is_examined() -> None:
    rng = random.Random(1)
    fleet = Fleet(2, 2, 2, 2, 0)
    planted = {str(k.make(rng, fleet.shape).fault["kind"]) for k in kinds().values()}
    assert planted == set(FAULT_KINDS) - ENDS_A_PROCESS


def test_faults_are_caught_on_the_right_slot_in_the_right_module_and_health_is_no_alarm() -> None:
    names = ("weight bit: lower mantissa", "stuck accumulator", "NaN in one row", "swapped outputs")
    found = examined(*names)
    assert found["failed"] == []
    assert found["exit_code"] == 0
    for kind in found["kinds"]:
        assert kind["caught"] == kind["due"] > 0
        assert kind["blamed"] == kind["blamed_of"] > 0
    assert [k["module_of"] > 0 for k in found["kinds"]] == [True, True, True, False]
    assert found["clean"] == {
        "runs": 2,
        "alarms": 0,
        "rate": {"rate": 0.0, "low": 0.0, "high": pytest.approx(0.842, abs=1e-3)},
    }


def test_a_lower_mantissa_bit_shows_in_logprobs_before_it_shows_in_tokens() -> None:
    (kind,) = examined("weight bit: lower mantissa", extent=Extent(6, 0))["kinds"]
    channels = kind["channels"]
    assert channels["logprobs"]["caught"] > channels["tokens"]["caught"]


def test_a_reordered_reduction_is_seen_and_not_called_corrupt() -> None:
    (kind,) = examined("reordered reduction")["kinds"]
    assert kind["caught"] == kind["due"] > 0
    assert kind["called_corrupt"] == 0


@pytest.fixture
def blind_to_logprobs(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("logprob_digest", "top_digest"):
        monkeypatch.setattr(observations, name, lambda *_: bytes(16))


@pytest.mark.usefixtures("blind_to_logprobs")
def test_an_analysis_that_is_blind_to_logprobs_fails_its_examination() -> None:
    found = examined("weight bit: lower mantissa", extent=Extent(6, 0))
    assert found["exit_code"] == 1
    assert found["failed"][0].startswith("weight bit: lower mantissa:")


def test_an_audit_that_sees_nothing_fails_its_examination(monkeypatch: pytest.MonkeyPatch) -> None:
    assert examined("wrong seed in one rank")["exit_code"] == 0
    monkeypatch.setattr(examine, "compare_audits", lambda _: [])
    found = examined("wrong seed in one rank")
    assert found["exit_code"] == 1
    assert found["failed"] == ["wrong seed in one rank: 2 of 2 missed"]


def test_an_analysis_that_cries_wolf_fails_its_examination(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examine, "_flagged", lambda _: True)
    found = examined("swapped outputs")
    assert "2 of 2 runs without a fault were flagged" in found["failed"]


def seen(**changed: Any) -> Seen:
    channels = dict.fromkeys(("tokens", "logprobs", "replay", "activations", "audit"), True)
    values = {"changed": True, "caught": True, "blamed": True, "module": True}
    return Seen(**{**values, "channels": channels, "verdicts": (), **changed})


def judged(*cases: Seen, benign: bool = False) -> dict[str, Any]:
    kind = Kind("k", next(iter(kinds().values())).make, benign)
    return document([summary(kind, cases)], Extent(len(cases), 0), 0)


def test_only_what_changed_a_bit_must_be_caught() -> None:
    assert judged(seen(), seen(changed=False, caught=False))["exit_code"] == 0
    assert judged(seen(), seen(caught=False))["failed"] == ["k: 1 of 2 missed"]


def test_blame_on_another_slot_fails() -> None:
    assert judged(*[seen()] * 99, seen(blamed=False))["exit_code"] == 0
    assert "right slot" in judged(seen(), seen(blamed=False))["failed"][0]


def test_rounding_that_is_called_corrupt_fails() -> None:
    corrupt = seen(verdicts=(Verdict.CORRUPT.value,))
    assert judged(corrupt)["exit_code"] == 0
    assert "called corrupt" in judged(corrupt, benign=True)["failed"][0]


def test_an_unknown_kind_is_refused_with_those_there_are() -> None:
    with pytest.raises(UsageError, match=r"gremlin.*NaN in one row"):
        choose(["gremlin"])


def test_the_command_prints_a_table_or_one_document() -> None:
    asked = ["selftest", "swapped outputs", "--trials", "2", "--clean", "1"]
    shown = CliRunner().invoke(cli, asked)
    assert shown.exit_code == 0, shown.output
    assert "2 of 2" in shown.stdout
    assert "false alarms: 0 of 1" in shown.stdout
    one = CliRunner().invoke(cli, [*asked, "--format", "json"])
    assert json.loads(one.stdout)["schema"] == "raytest.selftest/1"
