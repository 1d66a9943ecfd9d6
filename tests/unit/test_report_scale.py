"""Reports of a thousand slots: one screen, and a page that a mail can carry."""

from __future__ import annotations

import os

import pytest

from raytest.report.html import html_text
from raytest.report.junit import junit_xml
from raytest.report.markdown import MOST_BYTES, markdown_text
from raytest.report.material import Material, gather
from raytest.report.prometheus import prometheus_text
from raytest.report.terminal import screen_lines
from tests.support.judged import write_judged
from tests.support.make_run import plant, swap_token

TEXT = '[placement]\nscope = "every-gpu"\n[trials]\nrepeats = 1\n'


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Material:
    wrong = [plant(swap_token(5), slot=f"node-{n}:1", request={0}) for n in range(40)]
    with pytest.MonkeyPatch.context() as patch:
        # a thousand small files for a test need not survive a power cut
        patch.setattr(os, "fsync", lambda _: None)
        results = tmp_path_factory.mktemp("scale")
        folder = write_judged(
            results,
            text=TEXT,
            nodes=125,
            devices=8,
            n_requests=1,
            length=8,
            changes=wrong,
        )
    return gather(folder)


def test_a_thousand_slots_are_summed_up_on_one_screen(material: Material) -> None:
    lines = screen_lines(material, 80)
    assert len(lines) <= 40
    assert any("1000 devices" in x for x in lines)


def test_the_page_stays_under_five_megabytes_and_shows_every_slot(material: Material) -> None:
    written = html_text(material)
    assert len(written.encode()) < 5_000_000
    assert written.count('<span class="box c0"') == 960
    assert written.count('<span class="box c1"') == 40


def test_the_machines_get_every_slot(material: Material) -> None:
    assert junit_xml(material).count('classname="raytest.t.slots"') == 1000
    assert prometheus_text(material).count("raytest_gpu_suspect{") == 1000
    assert len(markdown_text(material).encode()) <= MOST_BYTES
