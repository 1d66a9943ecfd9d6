"""Golden runs: what may become one, and what is said of a run that is held to it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from raytest.baseline import find_baseline, list_baselines, remove_baseline, save_baseline
from raytest.baseline_check import amender, compare_with_baseline, with_baseline
from raytest.compare.verdict_json import verdict_schema
from raytest.errors import UsageError
from raytest.report.html import html_text
from raytest.report.junit import junit_xml
from raytest.report.markdown import markdown_text
from raytest.report.material import gather
from raytest.report.prometheus import prometheus_text
from raytest.report.terminal import screen_lines
from raytest.store import RunFolder
from tests.support.judged import judge_again, write_judged
from tests.support.make_run import plant, swap_token

SPEC = '[placement]\nscope = "every-gpu"\n'
WRONG = plant(swap_token(5), request=range(3))
FACTS = {"env.OMP_NUM_THREADS": "1", "vllm.version": "0.32", "process.pid": "7"}


def night(results: Path, run_id: str, **options: Any) -> RunFolder:
    defaults = {"text": SPEC, "nodes": 1, "devices": 2, "n_requests": 8, "length": 12}
    return write_judged(results, run_id, **{**defaults, "facts": FACTS, **options})


@pytest.fixture
def results(tmp_path: Path) -> Path:
    save_baseline(str(tmp_path), "golden", night(tmp_path, "first"), replace=False)
    return tmp_path


def judged_by(results: Path, folder: RunFolder, name: str = "golden") -> dict[str, Any]:
    """The document that a run held to the baseline leaves, written to its folder."""
    amend = amender(str(results), name)(folder)
    assert amend is not None
    document = amend(judge_again(folder))
    jsonschema.validate(document, verdict_schema())
    folder.write_verdict(document)
    return document


def test_an_equal_night_in_the_same_environment_passes(results: Path) -> None:
    second = night(results, "second", facts={**FACTS, "process.pid": "8"})
    document = judged_by(results, second)
    assert (document["verdict"], document["exit_code"]) == ("pass", 0)
    compared = document["baseline"]
    assert (compared["stale"], compared["number"], compared["run_id"]) == (False, 1, "first")
    assert compared["axis"]["requests"] == {"compared": 8, "bitwise": 8, "tokens": 8}
    assert 0 <= compared["age_s"] < 3600


def test_a_wrong_result_in_the_same_environment_is_a_mismatch(results: Path) -> None:
    document = judged_by(results, night(results, "fourth", changes=[WRONG]))
    assert (document["verdict"], document["exit_code"]) == ("mismatch", 1)
    assert document["reasons"][0].startswith("baseline golden/1: run: ")
    assert not document["baseline"]["environment"]


def test_another_environment_is_not_comparable_and_says_what_it_did(results: Path) -> None:
    facts = {**FACTS, "env.OMP_NUM_THREADS": "2"}
    third = night(results, "third", facts=facts, changes=[WRONG])
    document = judged_by(results, third)
    assert (document["verdict"], document["exit_code"]) == ("not comparable", 4)
    (reason,) = document["reasons"]
    assert "env.OMP_NUM_THREADS was '1' and is '2'" in reason
    assert "3 of 8 requests differ from it" in reason
    assert document["baseline"]["environment"] == [
        {"group": "variables", "key": "env.OMP_NUM_THREADS", "baseline": "1", "run": "2"}
    ]


def test_every_report_names_the_changed_variable(results: Path) -> None:
    third = night(results, "third", facts={**FACTS, "env.OMP_NUM_THREADS": "2"}, changes=[WRONG])
    judged_by(results, third)
    material = gather(third)
    for told in (
        "\n".join(screen_lines(material)),
        html_text(material),
        junit_xml(material),
        markdown_text(material).replace("\\", ""),
    ):
        assert "env.OMP_NUM_THREADS" in told
        assert "3 of 8 requests differ" in told
    assert 'raytest_baseline_stale{baseline="golden",spec="t"} 1' in prometheus_text(material)


def test_a_run_that_fails_by_itself_stays_a_mismatch_beside_a_stale_baseline(results: Path) -> None:
    outlier = plant(swap_token(5), slot="node-0:1", request=range(3))
    failed = night(results, "x", facts={**FACTS, "vllm.version": "0.33"}, changes=[outlier])
    document = judged_by(results, failed)
    assert (document["verdict"], document["exit_code"]) == ("mismatch", 1)
    assert document["reasons"][0].startswith("gpu: ")
    assert any("vllm.version was '0.32' and is '0.33'" in r for r in document["reasons"])


def test_a_fact_that_appears_is_a_change(results: Path) -> None:
    document = judged_by(results, night(results, "x", facts={**FACTS, "env.NCCL_ALGO": "Ring"}))
    assert document["baseline"]["environment"][0]["baseline"] is None
    assert "env.NCCL_ALGO was unset and is 'Ring'" in document["reasons"][0]


def test_other_prompts_are_not_comparable(results: Path) -> None:
    prompts = [(i + 100, i + 101) for i in range(8)]
    document = judged_by(results, night(results, "x", prompt_ids=prompts))
    assert (document["verdict"], document["exit_code"]) == ("not comparable", 4)
    assert "no request in common" in document["reasons"][0]
    assert document["baseline"]["axis"] is None


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"skip": [("tp1@node-0-1", 0, 1)]}, "is incomplete"),
        ({"control": False}, "has no engine control that was caught"),
        (
            {"changes": [plant(swap_token(5), slot="node-0:1", request={0})]},
            "ended with mismatch",
        ),
    ],
)
def test_an_unfit_run_is_refused(tmp_path: Path, options: dict[str, Any], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        save_baseline(str(tmp_path), "golden", night(tmp_path, "r", **options), replace=False)
    assert not list_baselines(str(tmp_path))


def test_a_run_without_a_verdict_is_refused(tmp_path: Path) -> None:
    folder = night(tmp_path, "r")
    folder.remove_verdict()
    with pytest.raises(UsageError, match="has no finished verdict"):
        save_baseline(str(tmp_path), "golden", folder, replace=False)


def test_replacing_is_explicit_and_leaves_the_old_one(results: Path) -> None:
    second = night(results, "second")
    with pytest.raises(UsageError, match="--replace"):
        save_baseline(str(results), "golden", second, replace=False)
    assert save_baseline(str(results), "golden", second, replace=True).number == 2
    assert [(b.number, b.run_id) for b in list_baselines(str(results))] == [
        (1, "first"),
        (2, "second"),
    ]
    assert find_baseline(str(results), "golden").run_id == "second"
    assert find_baseline(str(results), "golden/1").run_id == "first"


def test_a_run_stopped_only_by_a_stale_baseline_can_replace_it(results: Path) -> None:
    third = night(results, "third", facts={**FACTS, "vllm.version": "0.33"})
    assert judged_by(results, third)["exit_code"] == 4
    saved = save_baseline(str(results), "golden", third, replace=True)
    assert (
        judged_by(results, night(results, "next", facts={**FACTS, "vllm.version": "0.33"}))[
            "exit_code"
        ]
        == 0
    )
    assert saved.number == 2


def test_a_baseline_outlives_its_run(results: Path) -> None:
    import shutil

    shutil.rmtree(results / "first")
    assert judged_by(results, night(results, "second"))["exit_code"] == 0


def test_it_holds_the_lock_of_its_environment(results: Path) -> None:
    record = json.loads((find_baseline(str(results), "golden").path / "baseline.json").read_text())
    assert record["lock"]["variables"] == {"OMP_NUM_THREADS": "1"}
    assert record["environment"]["vllm.version"] == ["0.32"]
    assert "process.pid" not in record["environment"]


def test_a_baseline_that_does_not_exist_is_named_with_those_that_do(results: Path) -> None:
    with pytest.raises(UsageError, match=r"no baseline 'gold' .* there are: golden"):
        amender(str(results), "gold")
    with pytest.raises(UsageError, match="no number 7; there are: 1"):
        find_baseline(str(results), "golden/7")
    with pytest.raises(UsageError, match="use letters"):
        find_baseline(str(results), "..")


def test_a_run_is_not_compared_with_itself(results: Path) -> None:
    with pytest.raises(UsageError, match="is baseline golden/1 itself"):
        compare_with_baseline(str(results), "golden", RunFolder.open(results / "first"))


def test_one_number_or_the_whole_name_is_removed(results: Path) -> None:
    save_baseline(str(results), "golden", night(results, "second"), replace=True)
    remove_baseline(str(results), "golden/1")
    assert [b.number for b in list_baselines(str(results))] == [2]
    remove_baseline(str(results), "golden")
    assert not list_baselines(str(results))


def test_the_worse_of_two_verdicts_holds() -> None:
    base = {"reasons": ["own"]}
    told = {"name": "g", "number": 1, "reasons": ["r"]}
    for own, other, code in (
        ("inconclusive", "not comparable", 4),
        ("not comparable", "mismatch", 1),
        ("inconclusive", "pass", 3),
        ("pass", "inconclusive", 3),
        ("mismatch", "not comparable", 1),
    ):
        document = with_baseline({**base, "verdict": own}, {**told, "verdict": other})
        assert document["exit_code"] == code
