"""What the commands share: their options, and how they print. Only click is imported at the top."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from raytest.spec import Spec
    from raytest.store import RunFolder


def results_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """``--results``: the store of all commands."""
    return click.option(
        "--results",
        default="results",
        envvar="RAYTEST_RESULTS",
        show_default=True,
        metavar="DIR",
        help="Folder that holds the runs (also RAYTEST_RESULTS).",
    )(function)


def format_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """``--format text|json``."""
    return click.option(
        "--format",
        "output",
        type=click.Choice(["text", "json"]),
        default="text",
        help="json prints one document and nothing else.",
    )(function)


def address_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """``--address``: which Ray cluster."""
    return click.option(
        "--address",
        default="local",
        show_default=True,
        metavar="A",
        help="local starts Ray here; auto, HOST:PORT and ray://HOST:PORT join a cluster.",
    )(function)


# Engine starts that a search for a cause may take unless told otherwise: one cause among a hundred
# settings takes twelve, and a replay with hooks three.
ENGINE_STARTS = 16


def set_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """``--set KEY=VALUE``: overrides of the spec."""
    return click.option(
        "--set",
        "overrides",
        multiple=True,
        metavar="KEY=VALUE",
        help="Override a key of the spec, such as trials.repeats=3 or variants.tp2.env.X=1.",
    )(function)


def spec_argument(function: Callable[..., Any]) -> Callable[..., Any]:
    """SPEC: a file, or the name of a preset."""
    return click.argument("spec_file", metavar="SPEC")(function)


def load_spec_or_preset(spec_file: str, overrides: tuple[str, ...]) -> tuple[Spec, str]:
    """A spec from a file, or from a preset where no such file exists."""
    from raytest.presets import is_preset, preset_text
    from raytest.spec_file import load_spec, parse_spec

    if is_preset(spec_file) and not os.path.exists(spec_file):
        source = f"preset {spec_file}"
        return parse_spec(preset_text(spec_file), source, overrides), source
    return load_spec(spec_file, overrides), spec_file


def write_reports(folder: RunFolder) -> None:
    """The run's own reports; what fails is told and changes nothing."""
    from raytest.report.write import write_in_folder

    _, problems = write_in_folder(folder)
    for problem in problems:
        click.echo(f"raytest: {problem}", err=True)


def show_verdict(document: dict[str, Any], output: str, folder: RunFolder | None = None) -> None:
    from raytest.console import terminal_width
    from raytest.report.material import gather
    from raytest.report.terminal import screen_lines, verdict_lines

    def lines() -> list[str]:
        width = terminal_width()
        return (
            verdict_lines(document, width)
            if folder is None
            else screen_lines(gather(folder), width)
        )

    show(output, lambda: document, lines)
    raise SystemExit(document["exit_code"])


def show(output: str, document: Callable[[], Any], lines: Callable[[], list[str]]) -> None:
    """Data on stdout: one JSON document, or lines."""
    import json

    if output == "json":
        click.echo(json.dumps(document(), indent=1, sort_keys=True))
    else:
        print_lines(lines())


def print_lines(lines: list[str]) -> None:
    """Lines on stdout; coloured only for a person at a terminal."""
    if sys.stdout.isatty() and not os.environ.get("NO_COLOR"):
        from raytest.console import print_coloured

        print_coloured(lines)
    else:
        for line in lines:
            click.echo(line)
