"""Commands that say why results differ: explain, localize."""

from __future__ import annotations

import click

from raytest.options import address_option, format_option, results_option, show


@click.command()
@click.argument("run_name", metavar="RUN")
@results_option
@format_option
def explain(run_name: str, results: str, output: str) -> None:
    """Which recorded factors (node, GPU, driver, variable, TP size, ...) explain RUN's classes.

    Reads the run folder and nothing else. The exit code is 0 where it could, whatever it found.

    Example: raytest explain latest
    """
    from raytest.explain.run import explain_run
    from raytest.report.explanation import explanation_document, explanation_lines
    from raytest.store import RunFolder, find_run

    folder = RunFolder.open(find_run(results, run_name))
    found = explain_run(folder)
    show(
        output,
        lambda: explanation_document(folder.run_id, found),
        lambda: explanation_lines(folder.run_id, found),
    )


@click.command()
@click.argument("run_name", metavar="RUN")
@click.option(
    "--pair",
    nargs=2,
    metavar="A B",
    help="Cells, or variants with one cell; CELL/solo or CELL/LAUNCH-TRIAL names one trial.",
)
@address_option
@results_option
@format_option
def localize(
    run_name: str, pair: tuple[str, str] | None, address: str, results: str, output: str
) -> None:
    """Name the first module whose output differs between two cells, or two trials of one cell.

    Starts both engines again and replays one divergent request with hooks on every module of
    every rank: the earliest divergence of the run, or of --pair. Keeps what it saw in RUN's folder.

    Example: raytest localize latest --pair tp1@node-0-0/batch tp2
    """
    from raytest.explain.localize_run import lines_of, localize_run
    from raytest.store import RunFolder, find_run

    folder = RunFolder.open(find_run(results, run_name))
    document = localize_run(folder, pair, address, lambda line: click.echo(line, err=True))
    show(output, lambda: document, lambda: lines_of(document))
    raise SystemExit(document["exit_code"])


EXPLAIN = (explain, localize)
