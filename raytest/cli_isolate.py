"""Commands that run again to prove a suspicion or a cause, or to find a cure: retest, isolate,
tighten."""

from __future__ import annotations

import click

from raytest.options import (
    ENGINE_STARTS,
    address_option,
    format_option,
    load_spec_or_preset,
    results_option,
    set_option,
    show,
    spec_argument,
)


@click.command()
@click.argument("run_name", metavar="RUN")
@click.option(
    "--pair",
    nargs=2,
    metavar="A B",
    help="Cells, or variants with one cell; CELL/ARRANGEMENT names one arrangement.",
)
@click.option(
    "--budget",
    type=click.IntRange(min=1),
    default=ENGINE_STARTS,
    show_default=True,
    metavar="N",
    help="Most engine starts of this call; a second call goes on where it ended.",
)
@click.option("--dry-run", is_flag=True, help="Print what would be changed and its cost; ask none.")
@address_option
@results_option
@format_option
def isolate(
    run_name: str,
    pair: tuple[str, str] | None,
    budget: int,
    dry_run: bool,
    address: str,
    results: str,
    output: str,
) -> None:
    """Prove which settings make two cells of RUN differ, by running again with some changed.

    Takes the closest two cells that differ (or --pair), and starts the second's engine with groups
    of the first's settings (variables, engine arguments, level, dtype, executor, arrangement,
    placement) until the smallest set is known that makes them equal. Each start repeats the
    workload three times or more. What was asked is kept in RUN's folder. The exit code is 0 where
    the cause was found or nothing differs, and 3 where it was not.

    Example: raytest isolate latest --pair tp1@node-0-0 tp1@node-1-0 --budget 10
    """
    from raytest.explain.isolate import isolate_run, lines_of
    from raytest.store import RunFolder, find_run

    folder = RunFolder.open(find_run(results, run_name))
    document = isolate_run(folder, pair, address, _tell, budget=budget, dry_run=dry_run)
    show(output, lambda: document, lambda: lines_of(document))
    raise SystemExit(document["exit_code"])


@click.command()
@spec_argument
@address_option
@results_option
@set_option
@format_option
def tighten(
    spec_file: str, address: str, results: str, overrides: tuple[str, ...], output: str
) -> None:
    """Climb the determinism levels of SPEC, one at a time, until its gates hold.

    Runs SPEC at level 1, 2, ... and says for each which gates hold. Then the engines of all levels
    tried take turns on one slot: the price is tokens/s against level 1. Levels that this platform
    does not have are named. The exit code is 0 where a level suffices, and 1 where none does.

    Example: raytest tighten my.toml --set gates.arrangement='"bitwise"'
    """
    import os

    from raytest.explain.tighten import Climb, lines_of

    spec, source = load_spec_or_preset(spec_file, overrides)
    base = os.path.dirname(os.path.abspath(spec_file))
    climb = Climb(spec, source=source, address=address, results=results, base_dir=base, tell=_tell)
    document = climb.run()
    show(output, lambda: document, lambda: lines_of(document))
    raise SystemExit(document["exit_code"])


@click.command()
@click.argument("run_name", metavar="RUN")
@click.option(
    "--times",
    type=click.IntRange(2, 1000),
    default=5,
    show_default=True,
    help="Repeats an engine start: 5 that are equal still allow a rate of 52% (95%), 20 of 17%.",
)
@address_option
@results_option
@format_option
def retest(run_name: str, times: int, address: str, results: str, output: str) -> None:
    """Run the suspects of RUN again: on the same devices, on others, with ranks swapped.

    Says how often each stands outside the majority of the run's other slots again, with an exact
    interval, and whether that follows the device. RUN's verdict stays as it was; what was seen is
    kept in RUN's folder, beside what earlier calls saw. The exit code is 0 where every engine
    answered, whatever it found, and 3 where one did not.

    Example: raytest retest last-night --times 20 --address auto
    """
    from raytest.explain.retest import lines_of, retest_run
    from raytest.store import RunFolder, find_run

    folder = RunFolder.open(find_run(results, run_name))
    document = retest_run(folder, address, _tell, times=times)
    show(output, lambda: document, lambda: lines_of(document))
    raise SystemExit(document["exit_code"])


def _tell(line: str) -> None:
    click.echo(line, err=True)


ISOLATE = (retest, isolate, tighten)
