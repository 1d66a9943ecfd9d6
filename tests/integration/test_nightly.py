"""Four nights as a scheduler starts them, on a real Ray with the reference engine."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from raytest.store import RunFolder, find_run
from tests.support.command import REFERENCE, Ended, raytest
from tests.support.webhook import SECRET, Hook, listening

SPEC = (
    REFERENCE.replace("nodes = 2", "nodes = 1").replace("every-node", "every-gpu")
    + '[[variants]]\nname = "tp1"\n[gates]\nrepeat = "bitwise"\ngpu = "bitwise"\nrun = "bitwise"\n'
)
VARIABLE = "variants.tp1.env.MKL_CBWR=COMPATIBLE"
WRONG = 'variants.tp1.fault={ kind = "weight_bit_flip" }'


@pytest.fixture(scope="module")
def hook() -> Iterator[Hook]:
    with listening() as server:
        yield server


@pytest.fixture(scope="module")
def nights(tmp_path_factory: pytest.TempPathFactory, hook: Hook) -> list[tuple[Ended, RunFolder]]:
    folder = tmp_path_factory.mktemp("nights")
    (folder / "s.toml").write_text(SPEC)
    found = []
    for overrides in ((), (), (VARIABLE,), (WRONG,)):
        options = [x for o in overrides for x in ("--set", o)]
        ended = raytest(
            *("nightly", "s.toml", "--baseline", "golden", "--create-baseline", "--quiet"),
            *("--webhook", hook.url, *options),
            cwd=folder,
        )
        found.append((ended, RunFolder.open(find_run(folder / "results", "latest"))))
    return found


pytestmark = pytest.mark.timeout(600)


def test_the_first_night_saves_the_baseline_and_the_second_equals_it(
    nights: list[tuple[Ended, RunFolder]],
) -> None:
    (first, _), (second, folder) = nights[:2]
    assert first.code == 0, first.err + first.out
    assert "saved as baseline golden/1" in first.err
    assert second.code == 0, second.err + second.out
    document = folder.verdict()
    assert document is not None
    assert document["baseline"]["axis"]["requests"]["bitwise"] == 6
    assert "baseline golden/1" in second.out


def test_a_changed_variable_is_not_comparable_and_named_in_every_output(
    nights: list[tuple[Ended, RunFolder]],
) -> None:
    ended, folder = nights[2]
    assert ended.code == 4, ended.err + ended.out
    named = [ended.out]
    named += [(folder.path / n).read_text() for n in ("report.html", "junit.xml", "verdict.json")]
    named.append((folder.path / "summary.md").read_text().replace("\\", ""))
    for text in named:
        assert "MKL_CBWR" in text
        assert "requests differ" in text or '"stale": true' in text
    assert "raytest_baseline_stale" in (folder.path / "metrics.prom").read_text()


def test_a_wrong_result_with_the_variable_back_is_a_mismatch(
    nights: list[tuple[Ended, RunFolder]],
) -> None:
    ended, _ = nights[3]
    assert ended.code == 1, ended.err + ended.out
    assert "baseline golden/1" in ended.out


def test_the_webhook_rings_once_a_change_and_its_url_is_nowhere(
    nights: list[tuple[Ended, RunFolder]], hook: Hook
) -> None:
    assert [(c["state_before"], c["state"]) for c in hook.calls] == [
        ("pass", "not comparable"),
        ("not comparable", "mismatch"),
    ]
    assert "MKL_CBWR" in json.dumps(hook.calls[0])
    for ended, folder in nights:
        assert SECRET not in ended.out + ended.err
        for path in folder.path.parent.rglob("*"):
            if path.is_file():
                assert SECRET.encode() not in path.read_bytes()
