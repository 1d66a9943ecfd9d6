"""``raytest selftest``."""

from __future__ import annotations

import click

from raytest.options import format_option, show


@click.command()
@click.argument("kinds", nargs=-1, metavar="[KIND]...")
@click.option(
    "--trials",
    type=click.IntRange(min=1),
    default=20,
    show_default=True,
    help="Cases of each kind of fault.",
)
@click.option(
    "--clean",
    type=click.IntRange(min=0),
    default=40,
    show_default=True,
    help="Runs without a fault, none of which may be flagged.",
)
@click.option(
    "--prompts",
    type=click.IntRange(2, 1000),
    default=6,
    show_default=True,
    help="Requests of a run.",
)
@click.option(
    "--tokens",
    type=click.IntRange(1, 200),
    default=12,
    show_default=True,
    help="Tokens of a request.",
)
@click.option(
    "--repeats", type=click.IntRange(2, 100), default=2, show_default=True, help="Repeats of a run."
)
@click.option("--seed", type=click.IntRange(0, 2**31 - 1), default=0, show_default=True)
@format_option
def selftest(
    kinds: tuple[str, ...],
    trials: int,
    clean: int,
    prompts: int,
    tokens: int,
    repeats: int,
    seed: int,
    output: str,
) -> None:
    """Examine raytest itself: plant faults in the reference engine, see what is caught.

    A fleet of four slots, one with a random fault of each kind (or of KIND), goes through the
    analysis of a run. Says how many were caught (of those that changed any bit), whether the right
    slot and module were blamed, what would have caught it alone (tokens, logprobs, replay,
    activations, audit), and how often a run without a fault was flagged. The exit code is 1 where a
    fault was missed, a clean run flagged, or rounding called corrupt.

    Example: raytest selftest "NaN in one row" "swapped outputs" --trials 100
    """
    from raytest.selftest.examination import Extent, choose, examine_all, lines_of

    extent = Extent(trials, clean, prompts, tokens, repeats, seed)
    found = examine_all(choose(kinds), extent, lambda line: click.echo(line, err=True))
    show(output, lambda: found, lambda: lines_of(found))
    raise SystemExit(found["exit_code"])
