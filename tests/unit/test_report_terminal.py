"""One screen that says whether it is the same everywhere."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from raytest import console
from raytest.cli import cli
from raytest.report.material import Material, gather
from raytest.report.terminal import screen_lines, verdict_lines
from tests.support.judged import planted, write_judged
from tests.support.make_run import noise, plant


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Material:
    return planted(tmp_path_factory.mktemp("terminal"))


def line(lines: list[str], begin: str) -> str:
    (found,) = [x for x in lines if x.startswith(begin)]
    return found


def cells(text: str) -> str:
    return " ".join(text.split())


def test_each_axis_has_a_line_with_verdict_rate_bound_and_gate(material: Material) -> None:
    lines = screen_lines(material)
    assert cells(line(lines, "gpu ")) == "gpu near-tie 8 of 12 35% to 90% (bitwise) fails"
    assert cells(line(lines, "repeat ")) == "repeat bitwise 0 of 12 < 22% (bitwise) holds"


def test_the_suspect_is_named_with_node_and_gpu(material: Material) -> None:
    suspect = line(screen_lines(material), "suspect ")
    assert "GPU-1-2" in suspect
    assert "node-1 GPU 2" in suspect


def test_the_worst_divergence_is_two_streams_from_the_first_difference(material: Material) -> None:
    lines = screen_lines(material)
    at = lines.index(line(lines, "worst: "))
    assert lines[at] == "worst: gpu, request r0: near-tie at position 5, margin 0.05 nats"
    both, reference, other, top, other_top = lines[at + 2 : at + 7]
    assert both.split()[0] == "both"
    assert reference.split()[0] == "reference"
    assert other.split()[0] == "other"
    assert reference != other
    assert ">" in top
    assert top.replace("reference", "") != other_top.replace("other", "")


def test_ids_stand_in_where_no_tokenizer_is_at_hand(
    material: Material, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("raytest.report.terminal.decoder", lambda _: None)
    lines = screen_lines(material)
    both = next(x for x in lines if x.strip().startswith("both"))
    assert all(word.isdigit() for word in both.split()[1:])


def test_the_end_says_the_verdict_and_what_to_run_next(material: Material) -> None:
    lines = screen_lines(material)
    verdict = lines.index("planted: MISMATCH (exit code 1)")
    assert lines[verdict + 1 :] == ["next: raytest retest planted", "next: raytest explain planted"]


def test_a_partial_run_says_how_to_take_it_up(tmp_path: Path) -> None:
    folder = write_judged(tmp_path, "part", nodes=1, skip=[("tp1@node-0-1", 0, 1)])
    folder.remove_verdict()
    lines = screen_lines(gather(folder))
    assert "no verdict.json yet: this is what is on disk so far" in lines
    assert lines[-1] == "next: raytest run SPEC --run-id part --resume"


def test_equal_tokens_with_other_logprobs_are_said_to_be_so(tmp_path: Path) -> None:
    change = plant(noise(1e-4), slot="node-0:1")
    text = '[placement]\nscope="every-gpu"\n'
    lines = screen_lines(gather(write_judged(tmp_path, text=text, nodes=1, changes=[change])))
    assert any(x.strip().startswith("tokens equal, logprobs differ by at most") for x in lines)


@pytest.mark.parametrize("width", [80, 60])
def test_a_terminal_gets_lines_that_fit_but_for_words_that_do_not(
    material: Material, width: int
) -> None:
    lines = screen_lines(material, width)
    table = lines.index("")
    assert max(map(len, lines[:table])) <= 80
    for text in lines[table:]:
        assert len(text) <= width or " " not in text.strip()
    joined = " ".join(" ".join(lines).split())
    assert joined == " ".join(" ".join(screen_lines(material)).split())


def test_one_slot_has_a_screen(tmp_path: Path) -> None:
    lines = screen_lines(gather(write_judged(tmp_path, text="", nodes=1, devices=1)))
    assert lines[-1] == "run: PASS (exit code 0)"


def test_text_from_outside_cannot_move_the_cursor(material: Material) -> None:
    document = dict(material.document)
    document["reasons"] = ["\x1b[2J\u202egone"]
    lines = verdict_lines(document)
    assert not set("".join(lines)) & set("\x1b\u202e")
    assert "\\x1b[2J" in "".join(lines)


def test_a_pipe_gets_no_colour_and_whole_lines(material: Material) -> None:
    results = material.folder.path.parent
    done = CliRunner().invoke(cli, ["report", "planted", "--results", str(results)])
    assert done.exit_code == 0, done.output
    assert "\x1b" not in done.stdout
    assert done.stdout.splitlines() == screen_lines(material)


def test_a_terminal_gets_colour_and_the_same_text(
    material: Material, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr(sys, "stdout", terminal)
    console.print_coloured(["run: PASS [/INST] node[gpu0]", "gpu fails"])
    import re

    shown = terminal.getvalue()
    assert "\x1b[" in shown
    plain = re.sub(r"\x1b\[[0-9;]*m", "", shown)
    assert plain.splitlines() == ["run: PASS [/INST] node[gpu0]", "gpu fails"]


def test_files_are_written_where_they_are_asked_for(material: Material, tmp_path: Path) -> None:
    results = material.folder.path.parent
    names = ("html", "junit", "markdown", "prometheus", "quarantine")
    options = [x for n in names for x in (f"--{n}", str(tmp_path / n))]
    done = CliRunner().invoke(cli, ["report", "planted", "--results", str(results), *options])
    assert done.exit_code == 0, done.output
    assert done.stdout == ""
    assert all((tmp_path / n).stat().st_size for n in names)


def test_a_file_that_cannot_be_written_is_one_line(material: Material, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    target = str(tmp_path / "file" / "x.xml")
    from raytest.errors import StoreError

    done = CliRunner().invoke(
        cli, ["report", str(material.folder.path), "--results", str(tmp_path), "--junit", target]
    )
    assert isinstance(done.exception, StoreError)
    assert "cannot be" in str(done.exception)
