"""The HTML report: one file without a network, whatever the prompts hold."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from collections import Counter
from pathlib import Path

import html5lib
import pytest

from raytest.report.html import html_text
from raytest.report.material import Material, gather
from raytest.report.spec_toml import spec_toml
from raytest.report.timeline import spans
from raytest.spec_file import parse_spec
from tests.support.html_page import Page
from tests.support.judged import nasty_material, planted, write_facts, write_judged

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Material:
    material = planted(tmp_path_factory.mktemp("html"))
    write_facts(material.folder, "tp1@node-1-2", {"driver": "590", "same": "yes"})
    for at, event in enumerate(("placed", "loading", "running", "launch done")):
        material.folder.event(event, cell_id="tp1@node-1-2", launch=0, at=at)
    (material.folder.path / "activations" / "pair").mkdir(parents=True)
    picture = '<svg xmlns="http://www.w3.org/2000/svg"><script>alert(3)</script></svg>'
    (material.folder.path / "activations" / "pair" / "growth.svg").write_text(picture)
    return material


@pytest.fixture(scope="module")
def text(material: Material) -> str:
    return html_text(material)


@pytest.fixture(scope="module")
def page(text: str) -> Page:
    return Page(text)


@pytest.fixture(scope="module")
def nasty(tmp_path_factory: pytest.TempPathFactory) -> str:
    return html_text(nasty_material(tmp_path_factory.mktemp("nasty")))


def test_nothing_is_loaded_and_nothing_runs(page: Page) -> None:
    names = Counter(tag for tag, _ in page.tags)
    assert not names["script"]
    assert not names["iframe"]
    for tag, attributes in page.tags:
        for key in ("src", "href", "xlink:href", "action"):
            value = attributes.get(key, "#")
            assert value.startswith(("#", "data:")), f"{tag} {key}={value[:80]}"
        assert not [k for k in attributes if k.startswith("on")]
    (policy,) = [a["content"] for t, a in page.tags if a.get("http-equiv")]
    assert "default-src 'none'" in policy


def test_ids_are_unique_and_every_link_has_its_target(page: Page) -> None:
    ids = Counter(a["id"] for _, a in page.tags if "id" in a)
    assert not [i for i, n in ids.items() if n > 1]
    targets = [a["href"][1:] for t, a in page.tags if a.get("href", "").startswith("#")]
    assert targets
    assert not set(targets) - ids.keys()


def test_every_chart_has_a_name_and_takes_the_pages_colours(page: Page, text: str) -> None:
    charts = [a for t, a in page.tags if t == "svg"]
    assert len(charts) == 6
    assert all(a["role"] == "img" and a["aria-label"] for a in charts)
    assert "currentColor" in text
    assert "var(--series-0)" in text
    assert not re.search(r"#(a1000\d|010203|040506)", text)


def test_the_page_names_the_wrong_gpu_its_class_and_its_node(page: Page) -> None:
    assert "GPU-1-2" in page.words
    boxes = [a for t, a in page.tags if a.get("class", "").startswith("box")]
    assert len(boxes) == 18
    other = [b["title"] for b in boxes if b["class"] != "box c0"]
    assert len(other) == 1
    assert other[0].startswith("tp1@node-1-2: class tp1 B")


def test_the_page_shows_facts_that_differ_and_only_those(page: Page) -> None:
    assert "driver" in page.words
    assert "17: " in page.words
    assert "590" in page.words


def test_each_divergence_can_be_opened_with_its_candidates(page: Page, material: Material) -> None:
    opened = [a for t, a in page.tags if t == "details"]
    distinct = {
        (r["axis"], r["request_id"], r["payload_id"], r["reference_payload_id"])
        for r in material.verdicts.to_pylist()
    }
    assert len(opened) == len(distinct) + 1  # and the controls
    assert "margin 0.05 nats" in page.words
    assert "(5 tokens" not in page.words


def test_a_localize_plot_is_shown_as_an_image_that_cannot_run(page: Page) -> None:
    (picture,) = [a for t, a in page.tags if t == "img"]
    assert picture["src"].startswith("data:image/svg+xml;base64,")


def test_the_spec_on_the_page_runs_as_it_is(page: Page, material: Material) -> None:
    begin = "".join(page.text).index('name = "t"')
    text = "".join(page.text)[begin:].split("raytest 1.0;")[0]
    again = parse_spec(text.strip(), "page")
    assert again.model_dump(mode="json") == material.folder.manifest["spec"]


def test_secrets_in_a_folders_spec_are_hidden_although_a_spec_with_one_is_refused() -> None:
    env = {"HF_TOKEN": "hf_abcdefghijklmnop", "OMP_NUM_THREADS": "1"}
    written = spec_toml({"name": "t", "variants": [{"name": "tp1", "env": env}]})
    assert "hf_abcdefghijklmnop" not in written
    assert "OMP_NUM_THREADS" in written


@pytest.mark.parametrize("which", ["text", "nasty"])
def test_the_page_is_valid_html(which: str, request: pytest.FixtureRequest) -> None:
    """By the parser of the HTML standard: it names every parse error instead of mending it."""
    parser = html5lib.HTMLParser(namespaceHTMLElements=False)
    parser.parse(request.getfixturevalue(which))
    assert [error for _, error, _ in parser.errors] == []


def test_html_in_a_prompt_stays_text(nasty: str) -> None:
    page = Page(nasty)
    assert not [t for t, _ in page.tags if t in ("script", "img")]
    assert "<script>alert(1)</script>" in page.words
    assert "{{ 7*7 }}" in page.words


def test_escapes_and_turned_text_are_shown_as_escapes(nasty: str) -> None:
    assert not set(nasty) & set("\x1b\x07\u202e\u202c")
    assert "\\x1b[31mred" in nasty
    assert "\\u202eevil" in nasty
    assert "שלום" in nasty


def test_a_prompt_of_a_megabyte_is_cut_with_a_note(nasty: str) -> None:
    assert len(nasty) < 1_500_000
    assert "more characters)" in nasty


def test_a_run_without_results_still_has_a_page(tmp_path: Path) -> None:
    folder = write_judged(tmp_path, text="", nodes=1, devices=1, n_requests=0)
    folder.remove_verdict()
    page = Page(html_text(gather(folder)))
    assert "no verdict.json" in page.words
    assert "inconclusive" in page.words


def test_the_same_run_gives_the_same_page(material: Material, text: str) -> None:
    assert html_text(material) == text


def test_attempts_of_a_launch_follow_each_other_in_the_timeline() -> None:
    def event(second: int, name: str) -> dict[str, object]:
        time = f"2026-12-01T00:00:{second:02d}+00:00"
        return {"time": time, "event": name, "cell_id": "a", "launch": 0}

    first, second = spans(
        [
            event(0, "placed"),
            event(1, "loading"),
            event(3, "attempt failed"),
            event(4, "placed"),
            event(6, "loading"),
            event(7, "running"),
            event(9, "launch done"),
        ]
    )
    assert (first.outcome, second.outcome) == ("failed", "done")
    assert first.phases == (("placed", 0, 1), ("loading", 1, 3))
    assert second.phases == (("placed", 4, 6), ("loading", 6, 7), ("running", 7, 9))


def chromium(page: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    """Open a page in a browser without a screen and a profile of its own."""
    return subprocess.run(
        [
            str(CHROMIUM),
            *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
            *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
            f"--user-data-dir={page.parent / 'profile'}",
            "--enable-logging=stderr",
            *flags,
            f"file://{page}",
        ],
        capture_output=True,
        text=True,
        timeout=55,
        check=False,
    )


# Pieces of text that lie upon each other, and how far the page is wider than its window. Labels of
# one chart and cells of one table are neighbours by design; each is measured where it is drawn.
MEASURE = """<script>
const boxes = [...document.querySelectorAll("h1,h2,h3,p,th,td,figcaption,summary,svg text")]
  .filter(e => e.textContent.trim() && e.checkVisibility())
  .map(e => { const r = document.createRange(); r.selectNodeContents(e);
              const b = e instanceof SVGElement ? e.getBoundingClientRect()
                                                : r.getBoundingClientRect();
              return [e, b]; }).filter(([e, b]) => b.width > 0 && b.height > 0);
const found = [];
for (let i = 0; i < boxes.length; i++) for (let j = i + 1; j < boxes.length; j++) {
  const [e, a] = boxes[i], [f, b] = boxes[j];
  if (e.contains(f) || f.contains(e)) continue;
  const x = Math.min(a.right, b.right) - Math.max(a.left, b.left);
  const y = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
  if (x > 2 && y > 2) found.push(e.textContent.trim() + " | " + f.textContent.trim());
}
const root = document.documentElement;
document.title = "measured " + JSON.stringify(
  {overlapping: found.slice(0, 5), wider: root.scrollWidth - root.clientWidth, n: boxes.length});
</script>"""


@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
@pytest.mark.parametrize("width", [700, 1200])
@pytest.mark.parametrize("which", ["text", "nasty"])
def test_nothing_overlaps_or_sticks_out(
    which: str, width: int, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    written = request.getfixturevalue(which)
    # the page itself allows no script; this copy may run the one that measures it
    free = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", written)
    page = tmp_path / "page.html"
    page.write_text(free.replace("</body>", f"{MEASURE}</body>"), encoding="utf-8")
    done = chromium(page, f"--window-size={width},2000", "--dump-dom")
    found = re.search(r"<title>measured (.*?)</title>", done.stdout, re.DOTALL)
    assert found is not None, done.stderr[-2000:]
    measured = json.loads(html.unescape(found[1]))
    assert measured["n"] > 50
    assert measured["overlapping"] == []
    assert measured["wider"] <= 0


@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
@pytest.mark.parametrize("which", ["text", "nasty"])
def test_chromium_draws_the_page_without_a_complaint(
    which: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    page = tmp_path / "page.html"
    page.write_text(request.getfixturevalue(which), encoding="utf-8")
    done = chromium(page, "--window-size=1000,2000", f"--screenshot={tmp_path / 'page.png'}")
    assert "CONSOLE" not in done.stderr
    assert (tmp_path / "page.png").stat().st_size > 20_000
