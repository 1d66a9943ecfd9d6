"""What replay keeps in a run folder, and the document made of it."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from raytest.compare.replay_json import replay_document
from raytest.errors import ExitCode, StoreError
from raytest.replay_folder import Recorded, reference_of, scored_files, write_scored
from raytest.report.replay import replay_lines
from raytest.scoring import score_job
from raytest.store import RunFolder, payload_rows
from tests.support.make_run import RunMaker, flip_bit, inventory, plant, spec

TWO = '[[variants]]\nname = "a"\n[[variants]]\nname = "b"\n[placement]\nscope = "one"\n'


@pytest.fixture
def maker() -> RunMaker:
    return RunMaker(spec(TWO), inventory(), changes=[plant(flip_bit(), variant="b", request=1)])


def score_all(folder: RunFolder, *cells: str) -> Recorded:
    """Scores as the cells' own first trial: what an engine that is consistent would give."""
    reference = reference_of(folder, any_cell=False)
    assert reference is not None
    payloads = pa.concat_tables(list(folder.iter_payload_tables()))
    for cell_id in cells:
        write_scored(folder, cell_id, 0, folder.read_trial((cell_id, 0, 0)), payloads)
    return reference


def test_the_reference_is_the_first_trial_of_the_first_cell_and_stays_it(
    tmp_path: Path, maker: RunMaker
) -> None:
    first = maker.plan.cells[0].cell_id
    maker.skip = [(first, 0, 0)]
    folder = maker.write(tmp_path)
    chosen = reference_of(folder, any_cell=False)
    assert chosen is not None
    assert (chosen.cell_id, chosen.launch, chosen.trial) == (first, 0, 1)
    # trial 0 is finished later, by a resumed run
    source = folder.path / "observations" / first / "0-1.parquet"
    (source.parent / "0-0.parquet").write_bytes(source.read_bytes())
    again = reference_of(folder, any_cell=False)
    assert again is not None
    assert again.trial == 1


def test_another_cell_stands_in_only_where_that_is_asked_for(
    tmp_path: Path, maker: RunMaker
) -> None:
    first, second = (c.cell_id for c in maker.plan.cells)
    maker.skip = [(first, 0, 0), (first, 0, 1)]
    folder = maker.write(tmp_path)
    assert reference_of(folder, any_cell=False) is None
    chosen = reference_of(folder, any_cell=True)
    assert chosen is not None
    assert chosen.cell_id == second


def test_every_cell_scores_the_same_tokens_with_as_many_candidates(
    tmp_path: Path, maker: RunMaker
) -> None:
    folder = maker.write(tmp_path)
    reference = reference_of(folder, any_cell=False)
    assert reference is not None
    job = score_job(maker.spec, maker.requests(), reference)
    assert [r.request_id for r in job.requests] == ["r0", "r1", "r2", "r3"]
    assert job.completions[2] == tuple(reference.payloads["r2"].token_ids)
    assert {(r.sampling.n, r.sampling.temperature) for r in job.requests} == {(1, 0.0)}


def test_one_flipped_bit_is_one_position_of_one_request(tmp_path: Path, maker: RunMaker) -> None:
    folder = maker.write(tmp_path)
    cells = [c.cell_id for c in maker.plan.cells]
    document = replay_document(folder, score_all(folder, *cells), {})
    same, other = (c["against_reference"] for c in document["cells"])
    assert same["n_bitwise"] == same["n_positions"] == 48
    assert (other["n_bitwise"], other["n_requests_bitwise"]) == (47, 3)
    assert document["exit_code"] == ExitCode.PASS
    assert any("97.9%" in line for line in replay_lines(document))


def test_a_cell_without_scores_is_named_with_its_reason_and_inconclusive(
    tmp_path: Path, maker: RunMaker
) -> None:
    folder = maker.write(tmp_path)
    first, second = (c.cell_id for c in maker.plan.cells)
    document = replay_document(folder, score_all(folder, first), {second: "a rank died"})
    assert document["not_scored"] == {second: "a rank died"}
    assert document["exit_code"] == ExitCode.INCONCLUSIVE
    assert f"  {second}: not scored: a rank died" in replay_lines(document)


def test_without_the_references_own_scores_nothing_is_compared(
    tmp_path: Path, maker: RunMaker
) -> None:
    folder = maker.write(tmp_path)
    second = maker.plan.cells[1].cell_id
    document = replay_document(folder, score_all(folder, second), {})
    assert document["cells"][0]["against_reference"] is None
    assert document["exit_code"] == ExitCode.INCONCLUSIVE


def test_scores_without_their_payloads_are_refused(tmp_path: Path, maker: RunMaker) -> None:
    folder = maker.write(tmp_path)
    first = maker.plan.cells[0].cell_id
    reference = score_all(folder, first)
    path = scored_files(folder)[first]
    table = pa.concat_tables(list(folder.iter_payload_tables()))
    write_scored(folder, first, 0, folder.read_trial((first, 0, 0)), table.slice(0, 1))
    assert len(list(payload_rows(table))) > 1
    with pytest.raises(StoreError, match=f"{path.name}: 3 payloads are missing"):
        replay_document(folder, reference, {})
