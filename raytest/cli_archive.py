"""Commands about many runs: baselines, history, retention, and the night that uses them."""

from __future__ import annotations

import os

import click

from raytest.options import (
    address_option,
    format_option,
    load_spec_or_preset,
    print_lines,
    results_option,
    set_option,
    show,
    show_verdict,
    spec_argument,
)


@click.group()
def baseline() -> None:
    """Save golden runs, list and remove them; 'compare --baseline' compares with one."""


@baseline.command("save")
@click.argument("name", metavar="NAME")
@click.argument("run_name", metavar="RUN")
@results_option
@click.option("--replace", is_flag=True, help="Add a newer one where NAME exists; the old stays.")
def baseline_save(name: str, run_name: str, results: str, replace: bool) -> None:
    """Save RUN as baseline NAME: a complete run that passed, its controls caught.

    Example: raytest baseline save golden latest
    """
    from raytest.baseline import save_baseline
    from raytest.store import RunFolder, find_run

    folder = RunFolder.open(find_run(results, run_name))
    saved = save_baseline(results, name, folder, replace=replace)
    click.echo(f"{saved.title}: {saved.run_id}, environment {saved.key}")


@baseline.command("list")
@results_option
@format_option
def baseline_list(results: str, output: str) -> None:
    """List saved runs.

    Example: raytest baseline list
    """
    from raytest.baseline import list_baselines
    from raytest.report.table import table_lines

    found = list_baselines(results)
    rows = [(b.name, str(b.number), b.run_id, b.saved_at[:16], b.key[:12]) for b in found]
    header = ("name", "number", "run", "saved", "environment")
    show(
        output,
        lambda: {
            "schema": "raytest.baseline-list/1",
            "baselines": [
                {
                    "name": b.name,
                    "number": b.number,
                    "run_id": b.run_id,
                    "saved_at": b.saved_at,
                    "key": b.key,
                    "path": str(b.path),
                }
                for b in found
            ],
        },
        lambda: table_lines(header, rows) if rows else ["no baselines yet"],
    )


@baseline.command("rm")
@click.argument("name", metavar="NAME")
@results_option
def baseline_rm(name: str, results: str) -> None:
    """Remove baseline NAME with all its numbers, or one of them, NAME/n.

    Example: raytest baseline rm golden/1
    """
    from raytest.baseline import remove_baseline

    click.echo(f"{remove_baseline(results, name)} removed", err=True)


@click.command()
@results_option
@format_option
@click.option("--spec", "name", metavar="NAME", help="Only runs of the spec of that name.")
@click.option("--html", metavar="F", help="Write the history as one offline page.")
def history(results: str, output: str, name: str | None, html: str | None) -> None:
    """Runs over time: verdict per axis, rates, duration, and GPUs that are suspect again and again.

    Example: raytest history --html history.html
    """
    from pathlib import Path

    from raytest.history import read_history
    from raytest.report.trend import history_document, history_html, history_lines
    from raytest.store import write_text

    points, used = read_history(results, name)
    if html is not None:
        write_text(Path(html), history_html(points, used))
        click.echo(f"{html} written", err=True)
        return
    show(output, lambda: history_document(points, used), lambda: history_lines(points, used))


@click.command()
@results_option
@click.option("--keep", type=click.IntRange(0), required=True, metavar="N", help="Per spec.")
@click.option("--keep-failed", is_flag=True, help="Keep every run that ended with a mismatch.")
@click.option("--dry-run", is_flag=True, help="Only say what would go.")
def gc(results: str, keep: int, keep_failed: bool, dry_run: bool) -> None:
    """Remove all but the N newest runs of each spec; baselines and runs going on stay.

    Example: raytest gc --keep 30 --keep-failed
    """
    from raytest.retention import collect

    paths = collect(results, keep, keep_failed=keep_failed, dry_run=dry_run)
    print_lines([str(p) for p in paths])
    click.echo(f"{len(paths)} runs {'would be ' if dry_run else ''}removed", err=True)


@click.command()
@spec_argument
@address_option
@results_option
@set_option
@format_option
@click.option("--baseline", "name", metavar="NAME", help="Compare with it (or gates.baseline).")
@click.option(
    "--create-baseline", is_flag=True, help="Save the first run that passes where there is none."
)
@click.option(
    "--webhook",
    metavar="URL",
    envvar="RAYTEST_WEBHOOK",
    default="",
    help="Called on a change of state only (also RAYTEST_WEBHOOK, which no process list shows).",
)
@click.option(
    "--webhook-format",
    type=click.Choice(["auto", "json", "slack"]),
    default="auto",
    show_default=True,
)
@click.option("--quiet", is_flag=True, help="No progress on stderr.")
def nightly(
    spec_file: str,
    address: str,
    results: str,
    overrides: tuple[str, ...],
    output: str,
    name: str | None,
    create_baseline: bool,
    webhook: str,
    webhook_format: str,
    quiet: bool,
) -> None:
    """Doctor, run, comparison with the baseline, reports, exit code: what a scheduler starts.

    Safe to start twice: the second leaves the first alone and ends with 75.

    Example: raytest nightly my.toml --address auto --baseline golden --create-baseline
    """
    from raytest.console import progress_for
    from raytest.nightly import Night, run_night

    spec, source = load_spec_or_preset(spec_file, overrides)
    base = os.path.dirname(os.path.abspath(spec_file))
    night = Night(address, results, name, create_baseline, webhook, webhook_format, base)
    folder, document = run_night(
        spec, source, night, progress_for(quiet), lambda line: click.echo(line, err=True)
    )
    show_verdict(document, output, folder)


ARCHIVE: tuple[click.Command, ...] = (baseline, history, gc, nightly)
