"""``raytest replay``, and what a run with ``trials.replay`` does at its end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from raytest.errors import CellError, NotComparableError, StoreError, UnavailableError
from raytest.options import address_option, format_option, results_option, show

if TYPE_CHECKING:
    from raytest.replay_folder import ReplayPath
    from raytest.store import RunFolder


@click.command()
@click.argument("run_name", metavar="RUN")
@click.option(
    "--path",
    type=click.Choice(["prefill", "decode"]),
    default="prefill",
    show_default=True,
    help="Score the tokens as the end of a prompt, or decode them one by one (trace replay).",
)
@address_option
@results_option
@format_option
def replay(run_name: str, path: ReplayPath, address: str, results: str, output: str) -> None:
    """Score one fixed completion in every cell of RUN: every position stays comparable.

    The tokens are those of the first finished trial of the first cell. Cells that have not scored
    them yet (trials.replay = true does it in the run) are started again; the rest is read. vLLM
    scores through prompt_logprobs, the prefill path; with --path decode through trace replay, where
    this vLLM has it and its engine the second-generation model runner: else it is said of each cell
    that it was not scored, and why.

    Prints per cell the KL estimates k1 and k3, importance ratios, logprob differences, and whether
    scoring a cell's own greedy tokens names the same ones. The exit code is 0 where every cell was
    scored, whatever it found, and 3 where one was not.

    Example: raytest replay latest --format json
    """
    from raytest.report.replay import replay_lines
    from raytest.store import RunFolder, find_run

    folder = RunFolder.open(find_run(results, run_name))
    document = complete_replay(folder, address, path)
    show(output, lambda: document, lambda: replay_lines(document))
    raise SystemExit(document["exit_code"])


def complete_replay(
    folder: RunFolder, address: str, path: ReplayPath = "prefill"
) -> dict[str, Any]:
    """Score where scores are missing, compare, and keep the document. Raises RaytestError."""
    from raytest.compare.replay_json import replay_document
    from raytest.replay_folder import reference_of, scored_files
    from raytest.store import write_json

    reference = reference_of(folder, any_cell=True)
    if reference is None:
        raise StoreError(f"{folder.path}: no trial has finished, so there are no tokens to score")
    missing = [c for c in folder.plan().cells if c.cell_id not in scored_files(folder, path)]
    failed: dict[str, str] = {}
    if missing:
        from raytest.replay import score_cells

        failed = score_cells(folder, missing, reference, address, _tell, path)
    document = replay_document(folder, reference, failed, path)
    name = "replay.json" if path == "prefill" else "replay-decode.json"
    write_json(folder.path / "replay" / name, document)
    return document


def replay_after_run(folder: RunFolder, address: str) -> None:
    """The end of a run with ``trials.replay``: its verdict stands, whatever comes of this."""
    from raytest.report.replay import replay_lines

    try:
        lines = replay_lines(complete_replay(folder, address))
    except (CellError, NotComparableError, StoreError, UnavailableError) as error:
        lines = [f"raytest: replay: {line}" for line in str(error).splitlines()]
    for line in lines:
        _tell(line)


def _tell(line: str) -> None:
    click.echo(line, err=True)
