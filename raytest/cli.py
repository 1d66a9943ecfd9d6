"""Commands: parse, call, print, exit code. No logic, and nothing but click is imported at the top,
so that ``raytest --help`` starts as fast as click does."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

import click

from raytest import __version__
from raytest.cli_archive import ARCHIVE
from raytest.cli_environment import ENVIRONMENT
from raytest.cli_explain import EXPLAIN
from raytest.cli_isolate import ISOLATE
from raytest.cli_replay import replay, replay_after_run
from raytest.cli_selftest import selftest
from raytest.errors import ExitCode, RaytestError, UsageError
from raytest.options import (
    ENGINE_STARTS,
    address_option,
    format_option,
    print_lines,
    results_option,
    set_option,
    show,
    show_verdict,
    spec_argument,
    write_reports,
)
from raytest.options import load_spec_or_preset as _load

if TYPE_CHECKING:
    from raytest.spec import Spec

CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 100}


@click.group(context_settings=CONTEXT)
@click.version_option(__version__, prog_name="raytest")
@click.option("--debug", is_flag=True, help="Show the traceback of an internal error.")
@click.pass_context
def cli(context: click.Context, debug: bool) -> None:
    """Does the same vLLM work give the same answer on every GPU, node and TP/PP size?

    \b
    raytest demo              the main job on this machine, nothing to write first
    raytest init my.toml      a commented spec to edit
    raytest plan my.toml      what would run where
    raytest run my.toml       run it, compare, judge; the exit code is the verdict

    \b
    Exit codes: 0 pass, 1 mismatch, 2 usage, 3 inconclusive, 4 not comparable,
    70 internal error, 75 no cluster or device, 124 deadline, 130/143 interrupted.
    """  # noqa: D301 - click reads a real backspace
    context.obj = {"debug": debug}


@cli.command()
@address_option
@results_option
@set_option
@format_option
@click.option("--run-id", metavar="ID", help="Name of the run's folder.")
def demo(
    address: str, results: str, overrides: tuple[str, ...], output: str, run_id: str | None
) -> None:
    """Run the main job on what this machine has, with nothing to write first.

    Makes a small synthetic model, starts two virtual Ray nodes, runs real vLLM at TP=1, TP=2 and
    PP=2, compares every token and logprob bit, and prints the verdicts.

    Example: raytest demo --set gates.tp='"bitwise"'
    """
    spec, source = _load("demo", overrides)
    _run(spec, source, address, results, run_id, False, ".", output, False)


@cli.command()
@click.argument("file", default="raytest.toml", metavar="[FILE]")
@click.option(
    "--preset", default="rollout", show_default=True, help="Which shipped spec to start from."
)
@click.option("--force", is_flag=True, help="Overwrite FILE.")
def init(file: str, preset: str, force: bool) -> None:
    """Write a commented spec to edit.

    Example: raytest init my.toml --preset fleet
    """
    from raytest.presets import preset_text

    text = preset_text(preset)
    try:
        with open(file, "w" if force else "x", encoding="utf-8") as handle:
            handle.write(text)
    except FileExistsError:
        raise UsageError(f"{file}: exists; --force overwrites it") from None
    except OSError as error:
        raise UsageError(f"{file}: cannot be written: {error.strerror}") from None
    click.echo(f"{file} written; next: raytest plan {file}", err=True)


@cli.command()
@spec_argument
@address_option
@set_option
@format_option
def plan(spec_file: str, address: str, overrides: tuple[str, ...], output: str) -> None:
    """Show the cells, slots, launches and trials of SPEC, and why any is impossible; run nothing.

    Example: raytest plan my.toml --address auto
    """
    from raytest.report.plan import plan_document, plan_lines
    from raytest.runner import plan_only

    spec, source = _load(spec_file, overrides)
    made, _ = plan_only(spec, address, source)
    show(output, lambda: plan_document(spec, made), lambda: plan_lines(spec, made))
    made.require_possible()


@cli.command()
@spec_argument
@address_option
@results_option
@set_option
@format_option
@click.option(
    "--run-id", metavar="ID", help="Name of the run's folder (default: name, time, 4 hex)."
)
@click.option("--resume", is_flag=True, help="Take up the run --run-id (default: the latest).")
@click.option("--quiet", is_flag=True, help="No progress on stderr.")
@click.option("--explain", is_flag=True, help="Run again to find what fails a gate.")
@click.option(
    "--explain-budget",
    type=click.IntRange(min=1),
    default=ENGINE_STARTS,
    show_default=True,
    metavar="N",
    help="Most engine starts of --explain.",
)
def run(
    spec_file: str,
    address: str,
    results: str,
    overrides: tuple[str, ...],
    output: str,
    run_id: str | None,
    resume: bool,
    quiet: bool,
    explain: bool,
    explain_budget: int,
) -> None:
    """Run SPEC (a file or a preset), compare, and judge; the exit code is the verdict.

    With --explain each failed gate is followed by explain, isolate and localize; what they find
    stands in the run folder (diagnosis.json), the terminal and the reports.

    Example: raytest run my.toml --address auto --run-id tonight
    """
    spec, source = _load(spec_file, overrides)
    base = os.path.dirname(os.path.abspath(spec_file))
    budget = explain_budget if explain else 0
    _run(spec, source, address, results, run_id, resume, base, output, quiet, budget)


@cli.command()
@click.argument("runs", nargs=-1, required=True, metavar="RUN...")
@click.option("--baseline", metavar="NAME", help="Compare RUN with a saved run.")
@results_option
@format_option
def compare(runs: tuple[str, ...], baseline: str | None, results: str, output: str) -> None:
    """Judge a finished or partial run again, or compare runs with each other.

    RUN is a run id, a path, or latest. With --baseline the verdict is the worse of the run's own
    and of what changed since; a baseline from another environment is not comparable.

    Example: raytest compare last-night latest
    """
    from raytest.baseline_check import amender
    from raytest.runner import compare_folders

    if baseline is not None and len(runs) > 1:
        raise UsageError("--baseline compares one RUN with a saved one; name one RUN")
    show_verdict(compare_folders(results, runs, amender(results, baseline)), output)


@cli.command()
@click.argument("run_name", metavar="RUN")
@results_option
@click.option(
    "--as",
    "form",
    type=click.Choice(["text", "json", "nagios", "npd", "prolog"]),
    default="text",
    show_default=True,
    help="The line's form: for people, programs, Nagios, node-problem-detector, a Slurm prolog.",
)
@click.option("--max-age", metavar="AGE", help="Older than this (26h, 90m, 2d) is no verdict.")
def verdict(run_name: str, results: str, form: str, max_age: str | None) -> None:
    """One line and the exit code from RUN's verdict.json alone; 3 where there is none.

    What every wrapper ends with: schedulers can return 0 for work that failed or never ran.

    Example: raytest verdict latest --max-age 26h
    """
    from raytest.report.verdict_line import verdict_line

    line, code = verdict_line(results, run_name, form, max_age)
    click.echo(line)
    raise SystemExit(code)


@cli.command()
@click.argument("run_name", metavar="RUN")
@results_option
@click.option("--html", metavar="F", help="One offline page with charts.")
@click.option("--junit", metavar="F", help="A test case per axis and variant, and per slot.")
@click.option("--markdown", metavar="F", help="For a pull request or a step summary.")
@click.option("--prometheus", metavar="F", help="For the node exporter's textfile collector.")
@click.option("--quarantine", metavar="F", help="Suspects, a GPU UUID or hostname a line.")
def report(run_name: str, results: str, **files: str | None) -> None:
    """Write reports of a finished or partial run; without a file named, print the verdict.

    The exit code is 0 where the reports were written, whatever the verdict: 'raytest verdict' has
    that one.

    Example: raytest report latest --html report.html --junit junit.xml
    """
    from pathlib import Path

    from raytest.console import terminal_width
    from raytest.report.material import gather
    from raytest.report.terminal import screen_lines
    from raytest.report.write import write_reports
    from raytest.store import RunFolder, find_run

    material = gather(RunFolder.open(find_run(results, run_name)))
    targets = {form: Path(name) for form, name in files.items() if name}
    write_reports(material, targets)
    for path in targets.values():
        click.echo(f"{path} written", err=True)
    if not targets:
        print_lines(screen_lines(material, terminal_width()))


@cli.command()
@click.argument("path", metavar="PATH")
@click.option(
    "--size", type=click.Choice(["tiny", "small", "1b"]), default="tiny", show_default=True
)
@click.option("--seed", default=0, show_default=True, type=click.IntRange(0, 2**31 - 1))
def synth(path: str, size: str, seed: int) -> None:
    """Write the synthetic model and tokenizer to PATH: the same bytes on every machine.

    Example: raytest synth /tmp/tiny --size tiny --seed 7
    """
    from raytest.synthetic import write_model

    info = write_model(path, size=size, seed=seed)
    click.echo(str(info))


def _run(
    spec: Spec,
    source: str,
    address: str,
    results: str,
    run_id: str | None,
    resume: bool,
    base_dir: str,
    output: str,
    quiet: bool,
    explain_budget: int = 0,
) -> None:
    from raytest.baseline_check import amender
    from raytest.console import progress_for
    from raytest.runner import judge, run_spec

    amend = amender(results, spec.gates.baseline)
    with progress_for(quiet) as progress:
        outcome = run_spec(
            spec,
            source=source,
            address=address,
            results=results,
            run_id=run_id,
            resume=resume,
            base_dir=base_dir,
            progress=progress,
        )
    document = judge(outcome.folder, outcome.evaluation, amend(outcome.folder))
    if explain_budget:
        from raytest.diagnosis import diagnose

        diagnose(
            outcome.folder,
            document,
            address,
            explain_budget,
            lambda line: click.echo(line, err=True),
        )
    write_reports(outcome.folder)
    if spec.trials.replay:
        replay_after_run(outcome.folder, address)
    show_verdict(document, output, outcome.folder)


for command in (*ARCHIVE, *ENVIRONMENT, *EXPLAIN, *ISOLATE, replay, selftest):
    cli.add_command(command)


def main() -> None:
    """The console entry point: every way to end has its exit code, and none is a traceback."""
    sys.exit(_main(sys.argv[1:]))


def _main(arguments: list[str]) -> int:
    debug = "--debug" in arguments
    try:
        cli.main(args=arguments, prog_name="raytest", standalone_mode=False)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(ExitCode.INTERNAL)
    except click.exceptions.Exit as end:
        return end.exit_code
    except (click.Abort, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        return int(ExitCode.INTERRUPTED)
    except click.ClickException as error:
        error.show()
        return int(ExitCode.USAGE)
    except RaytestError as error:
        for line in str(error).splitlines():
            click.echo(f"raytest: {line}", err=True)
        return int(error.exit_code)
    except BrokenPipeError:
        # the reader went away (| head); what it wanted it has
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return int(ExitCode.PASS)
    except Exception as error:  # the program's edge: a bug must not look like a mismatch
        if debug:
            raise
        click.echo(
            f"raytest: internal error: {type(error).__name__}: {error}; "
            "--debug before the command shows where",
            err=True,
        )
        return int(ExitCode.INTERNAL)
    return int(ExitCode.PASS)


if __name__ == "__main__":
    main()
