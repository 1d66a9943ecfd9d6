"""JUnit, Prometheus, Markdown and the quarantine list: what machines read."""

from __future__ import annotations

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from lxml import etree
from prometheus_client.parser import text_string_to_metric_families

from raytest.report.junit import junit_xml
from raytest.report.markdown import MOST_BYTES, markdown_text
from raytest.report.material import Material, gather
from raytest.report.prometheus import prometheus_text
from raytest.report.quarantine import quarantine_text
from raytest.report.terminal import screen_lines
from raytest.report.write import write_in_folder, write_reports
from raytest.store import RunFolder
from tests.support.judged import (
    OUTLIER,
    broken_value,
    judge_again,
    nasty_material,
    planted,
    write_judged,
)
from tests.support.make_run import plant, swap_token

XSD = Path(__file__).parents[1] / "support" / "junit.xsd"
SIX_SLOTS = '[placement]\nscope="every-gpu"\n[gates]\ngpu="bitwise"\n'


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Material:
    return planted(tmp_path_factory.mktemp("planted"))


@pytest.fixture(scope="module")
def partial(tmp_path_factory: pytest.TempPathFactory) -> Material:
    folder = write_judged(
        tmp_path_factory.mktemp("partial"), skip=[("tp1@node-0-1", 0, 1), ("tp1@node-0-1", 1, 0)]
    )
    folder.remove_verdict()
    return gather(folder)


def cases(text: str) -> dict[str, tuple[str, str]]:
    """State and message by ``suite/name``."""
    found = {}
    for suite in ElementTree.fromstring(text):
        states = []
        for case in suite.iter("testcase"):
            outcome = [c for c in case if c.tag != "system-out"]
            assert len(outcome) <= 1
            state = outcome[0].tag if outcome else "passed"
            states.append(state)
            message = outcome[0].attrib["message"] if outcome else ""
            found[f"{suite.attrib['name'].rpartition('.')[2]}/{case.attrib['name']}"] = (
                state,
                message,
            )
        for total, state in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
            assert int(suite.attrib[total]) == states.count(state)
        assert int(suite.attrib["tests"]) == len(states)
    return found


def hold_to_schema(text: str) -> None:
    """Raises where the text is no valid JUnit file, with line and element."""
    schema = etree.XMLSchema(etree.parse(XSD))
    schema.assertValid(etree.fromstring(text.encode()))


def test_junit_blames_the_wrong_slot_and_its_variant_alone(material: Material) -> None:
    found = cases(junit_xml(material))
    assert found["axes/gpu[tp1]"][0] == "failure"
    assert found["axes/gpu[tp2]"][0] == "passed"
    assert found["axes/tp[tp1]"][0] == "passed"
    assert found["axes/pp[tp1]"][0] == "skipped"
    slots = {k: v[0] for k, v in found.items() if k.startswith("slots/")}
    assert len(slots) == 18
    assert [k for k, v in slots.items() if v != "passed"] == ["slots/tp1@node-1-2"]
    assert found["run/verdict"][0] == "failure"


def test_junit_calls_what_is_missing_an_error_never_a_pass(partial: Material) -> None:
    found = cases(junit_xml(partial))
    assert found["slots/tp1@node-0-1"][0] == "error"
    assert "missing" in found["slots/tp1@node-0-1"][1]
    assert found["axes/gpu[tp1]"][0] == "error"
    assert found["axes/repeat[tp2]"][0] == "passed"
    assert found["run/verdict"][0] == "error"
    assert not [k for k, v in found.items() if v[0] == "failure"]


def test_junit_is_valid_for_a_strict_reader(
    material: Material, partial: Material, tmp_path: Path
) -> None:
    hold_to_schema(junit_xml(material))
    hold_to_schema(junit_xml(partial))


def test_a_missed_control_makes_an_error(tmp_path: Path) -> None:
    found = cases(junit_xml(gather(write_judged(tmp_path, control=False))))
    assert found["controls/engine"][0] == "error"
    assert found["run/verdict"][0] == "error"


def test_values_that_cannot_be_right_are_failures_everywhere(tmp_path: Path) -> None:
    material = gather(
        write_judged(
            tmp_path,
            text=SIX_SLOTS,
            nodes=1,
            devices=3,
            changes=[plant(broken_value, slot="node-0:1")],
        )
    )
    assert cases(junit_xml(material))["values/nan"][0] == "failure"
    assert [line.split("\t")[0] for line in quarantine_text(material).splitlines()] == ["GPU-0-1"]


def series(text: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    found: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
    for family in text_string_to_metric_families(text):
        assert family.documentation
        for sample in family.samples:
            key = (sample.name, frozenset(sample.labels.items()))
            assert key not in found, f"twice: {key}"
            assert sample.timestamp is None
            found[key] = sample.value
    return found


def value(text: str, name: str, **labels: str) -> float:
    (match,) = [
        v
        for (n, have), v in series(text).items()
        if n == name and labels.items() <= dict(have).items()
    ]
    return match


def test_prometheus_has_one_verdict_hot_for_each_axis(material: Material) -> None:
    text = prometheus_text(material)
    hot: dict[str, list[str]] = {}
    for (name, labels), v in series(text).items():
        if name == "raytest_run_verdict" and v == 1:
            hot.setdefault(dict(labels)["axis"], []).append(dict(labels)["verdict"])
    assert hot["all"] == ["mismatch"]
    assert hot["gpu"] == ["mismatch"]
    assert hot["tp"] == ["pass"]
    assert all(len(v) == 1 for v in hot.values())


def test_prometheus_names_the_suspect_gpu_its_node_and_the_controls(material: Material) -> None:
    text = prometheus_text(material)
    assert value(text, "raytest_gpu_suspect", gpu_uuid="GPU-1-2", node="node-1") == 1
    assert value(text, "raytest_gpu_suspect", gpu_uuid="GPU-1-3") == 0
    assert value(text, "raytest_control_caught", control="engine") == 1
    assert value(text, "raytest_run_duration_seconds") == 125
    assert value(text, "raytest_requests_divergent", axis="gpu") == 8
    assert value(text, "raytest_cells", state="done") == 18


def test_prometheus_counts_what_a_partial_run_lacks(partial: Material) -> None:
    text = prometheus_text(partial)
    assert value(text, "raytest_trials", state="missing") == 2
    assert value(text, "raytest_cells", state="missing") == 1
    assert value(text, "raytest_run_verdict", axis="all", verdict="inconclusive") == 1


def test_the_last_success_survives_a_failed_run(tmp_path: Path, material: Material) -> None:
    target = tmp_path / "m.prom"
    write_reports(gather(write_judged(tmp_path, "good", nodes=1)), {"prometheus": target})
    name = "raytest_last_success_timestamp_seconds"
    before = value(target.read_text(), name)
    assert before == value(target.read_text(), "raytest_last_run_timestamp_seconds")
    write_reports(material, {"prometheus": target})
    assert value(target.read_text(), name) == before
    assert value(target.read_text(), "raytest_exit_code") == 1
    assert [p.name for p in tmp_path.iterdir() if "m.prom" in p.name] == ["m.prom"]


def test_a_label_with_quotes_and_newlines_comes_back_as_it_was(
    tmp_path: Path, material: Material
) -> None:
    nasty = 'a"b\\c\nd'
    folder = RunFolder(material.folder.path, {**material.folder.manifest})
    folder.manifest["inventory"] = {"nodes": [{"name": "node-0", "hostname": nasty}]}
    text = prometheus_text(
        Material(
            folder,
            material.document,
            material.verdicts,
            material.spec,
            material.plan,
            material.judged,
        )
    )
    assert value(text, "raytest_gpu_suspect", gpu_uuid="GPU-0-0", node=nasty) == 0


def test_quarantine_names_the_suspect_gpu_and_says_why(material: Material) -> None:
    (line,) = quarantine_text(material).splitlines()
    entity, reason = line.split("\t# ")
    assert entity == "GPU-1-2"
    assert "outlier-gpu" in reason
    assert "node-1" in reason


def test_quarantine_names_nobody_where_no_single_fault_explains_it(tmp_path: Path) -> None:
    wrong = [f"node-0:{i}" for i in range(3)]
    changes = [plant(swap_token(3 + i), slot=s) for i, s in enumerate(wrong)]
    material = gather(write_judged(tmp_path, text=SIX_SLOTS, nodes=1, devices=8, changes=changes))
    assert material.document["verdict"] == "mismatch"
    assert "systemic-gpu" in [f["code"] for f in material.document["findings"]]
    assert quarantine_text(material) == ""


def test_markdown_says_verdict_rates_suspect_and_the_first_difference(material: Material) -> None:
    text = markdown_text(material)
    assert text.startswith("## ❌ `t`: mismatch")
    assert "| gpu | near-tie | 8 of 12 | 35% to 90% | bitwise: ❌ fails |" in text
    assert "GPU-1-2" in text
    assert "position 5" in text


def test_markdown_stays_under_its_limit_and_says_that_it_was_cut(material: Material) -> None:
    document = dict(material.document)
    long = "x" * 5_000
    document["axes"] = [
        {**a, "contract": long * 100, "reason": long} for a in material.document["axes"]
    ]
    cut = Material(material.folder, document, material.verdicts, material.spec, material.plan, True)
    text = markdown_text(cut)
    assert len(text.encode()) <= MOST_BYTES
    assert "cut: the summary would be longer" in text


def test_a_run_gets_its_four_reports(tmp_path: Path) -> None:
    folder = write_judged(tmp_path, text=SIX_SLOTS, nodes=1, devices=2)
    written, problems = write_in_folder(folder)
    assert not problems
    assert {p.name for p in written} == {"report.html", "junit.xml", "summary.md", "metrics.prom"}
    assert all(p.stat().st_size for p in written)


def test_a_report_that_fails_is_told_and_the_others_are_written(tmp_path: Path) -> None:
    folder = write_judged(tmp_path, text=SIX_SLOTS, nodes=1, devices=2)
    (folder.path / "report.html").mkdir()
    written, problems = write_in_folder(folder)
    assert {p.name for p in written} == {"junit.xml", "summary.md", "metrics.prom"}
    (problem,) = problems
    assert problem.startswith("report.html was not written")


def test_reports_of_equal_results_are_equal(tmp_path: Path) -> None:
    one = gather(write_judged(tmp_path / "a", changes=(OUTLIER,)))
    two = gather(write_judged(tmp_path / "b", changes=(OUTLIER,)))
    judge_again(two.folder)
    for form in (junit_xml, prometheus_text, markdown_text, quarantine_text):
        assert form(one) == form(gather(two.folder))


@pytest.fixture(scope="module")
def nasty(tmp_path_factory: pytest.TempPathFactory) -> Material:
    return nasty_material(tmp_path_factory.mktemp("nasty"))


FORMS = {
    "terminal": lambda m: "\n".join(screen_lines(m, 80)),
    "junit": junit_xml,
    "markdown": markdown_text,
    "prometheus": prometheus_text,
    "quarantine": quarantine_text,
}


@pytest.mark.parametrize("form", FORMS)
def test_no_prompt_harms_a_report(nasty: Material, form: str) -> None:
    """HTML, escape sequences, text that turns the line around, a megabyte: in prompts and in what
    was generated."""
    text = FORMS[form](nasty)
    assert len(text) < 1_000_000
    assert not set(text) & set("\x1b\x07\u202e\u202c")
    if form == "junit":
        hold_to_schema(text)
    elif form == "prometheus":
        assert list(text_string_to_metric_families(text))
    elif form == "markdown":
        # inside a fence nothing is markup; a prompt with a fence of its own must not end it
        outside = re.sub(r"^(`{3,})text\n.*?\n\1$", "", text, flags=re.DOTALL | re.MULTILINE)
        assert "alert(" in text
        assert not re.search(r"<script|</details>.*alert|alert\(", outside)
    elif form == "quarantine":
        assert "GPU-1-2" in text


ARRANGED = """
[placement]
scope = "one"
[trials]
arrangements = ["batch", "solo"]
[determinism]
level = 4
[gates]
arrangement = "bitwise"
"""


def test_a_batch_invariant_model_is_validated_in_one_sentence(tmp_path: Path) -> None:
    text = markdown_text(gather(write_judged(tmp_path, text=ARRANGED)))
    assert (
        "Validated: synthetic:tiny (bfloat16) on H200, vLLM 0.32, level 4: all 12 requests give"
    ) in text.replace("\\", "")
    assert "(batch, solo)" in text.replace("\\", "")


def test_one_that_is_not_is_told_with_the_first_module_where_it_is_known(tmp_path: Path) -> None:
    wrong = plant(swap_token(5), arrangement="solo", request=range(3))
    folder = write_judged(tmp_path, text=ARRANGED, changes=(wrong,))
    text = markdown_text(gather(folder)).replace("\\", "")
    assert "Not batch-invariant: synthetic:tiny (bfloat16) on H200" in text
    assert "3 of 12 requests differ" in text
    assert "'raytest localize run' names the first module" in text
    pair = folder.path / "activations" / "pair"
    pair.mkdir(parents=True)
    (pair / "localization.json").write_text('{"finding": "found", "module": "model.norm"}')
    text = markdown_text(gather(folder)).replace("\\", "")
    assert "the first module that differs on equal input is model.norm" in text


def test_a_run_that_does_not_ask_is_not_validated(material: Material) -> None:
    assert "alidated" not in markdown_text(material)


def test_a_suspect_that_was_run_again_says_so_in_every_list(tmp_path: Path) -> None:
    material = planted(tmp_path)
    kept = material.folder.path / "retest"
    kept.mkdir()
    said = "reproduced in 5 of 5 repeats; it follows the device"
    (kept / "1.json").write_text(
        json.dumps({"suspects": [{"entity": "node-1:2", "conclusion": said}]})
    )
    for text in (quarantine_text(material), markdown_text(material).replace("\\", "")):
        assert f"run again: {said}" in text
    assert any(f"run again: {said}" in line for line in screen_lines(material))
