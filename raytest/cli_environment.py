"""Commands on the environment: fingerprint, lock, doctor."""

from __future__ import annotations

import click

from raytest.errors import UsageError
from raytest.options import (
    address_option,
    format_option,
    load_spec_or_preset,
    results_option,
    show,
)


@click.command()
@click.argument("run_name", metavar="[RUN]", required=False)
@results_option
@format_option
@click.option(
    "--diff", "pair", nargs=2, metavar="A B", help="Two processes of RUN (cell/launch/rank)."
)
def fingerprint(
    run_name: str | None, results: str, output: str, pair: tuple[str, str] | None
) -> None:
    """Show the environment of this machine, or of RUN's processes, or what differs between two.

    A process is named cell/launch/rank; a part of the cell's id will do, such as node-0.

    Example: raytest fingerprint latest --diff node-0 node-1
    """
    from raytest import environment
    from raytest.fingerprint.capture import capture
    from raytest.fingerprint.diff import rows
    from raytest.report.table import table_lines
    from raytest.store import RunFolder, find_run

    if run_name is None:
        if pair is not None:
            raise UsageError("--diff needs a RUN whose processes it compares")
        processes = {"here": capture("fingerprint", all_gpus=True)}
    else:
        folder = RunFolder.open(find_run(results, run_name))
        if pair is not None:
            found = environment.differences(folder, *pair)
            header = ("group", "key", *pair)
            show(
                output,
                lambda: environment.difference_document(*pair, found),
                lambda: table_lines(header, rows(found)) if found else ["no difference"],
            )
            return
        processes = environment.run_processes(folder)
    show(
        output,
        lambda: {"schema": "raytest.fingerprint/1", "processes": processes},
        lambda: [f"{p}  {k} = {v}" for p, facts in processes.items() for k, v in facts.items()],
    )


@click.command()
@click.argument("file", default="raytest.lock", metavar="[FILE]")
@click.option(
    "--spec", "spec_file", metavar="SPEC", help="Lock the spec's model and tokenizer too."
)
@click.option("--requirements", metavar="F", help="Also write the packages for 'pip install -r'.")
def lock(file: str, spec_file: str | None, requirements: str | None) -> None:
    """Write the exact environment of this machine to a lock file.

    Packages, CUDA, driver, variables, and with --spec the hashes of model and tokenizer;
    'raytest doctor --lock FILE' checks every node of a cluster against it.

    Example: raytest lock raytest.lock --spec my.toml --requirements requirements.txt
    """
    from raytest import environment
    from raytest.fingerprint.lock import requirements as requirement_text
    from raytest.fingerprint.lock import write
    from raytest.runner import find_model

    spec = None if spec_file is None else load_spec_or_preset(spec_file, ())[0]
    made = environment.make_lock(spec, None if spec is None else find_model(spec).path)
    write(file, made)
    click.echo(f"{file} written", err=True)
    if requirements is not None:
        try:
            with open(requirements, "w", encoding="utf-8") as handle:
                handle.write(requirement_text(made))
        except OSError as error:
            raise UsageError(f"{requirements}: cannot be written: {error.strerror}") from None
        click.echo(f"{requirements} written", err=True)


@click.command()
@click.argument("spec_file", metavar="[SPEC]", required=False)
@address_option
@results_option
@format_option
@click.option("--lock", "lock_file", metavar="FILE", help="Check every node against a lock file.")
def doctor(
    spec_file: str | None, address: str, results: str, output: str, lock_file: str | None
) -> None:
    """Tell what here would make results differ or fail, and what mends it.

    Versions, variables that this vLLM ignores, unset threads, GPUs, Ray, disk, shared memory.

    Example: raytest doctor my.toml --address auto --lock raytest.lock
    """
    from raytest import environment

    spec = None if spec_file is None else load_spec_or_preset(spec_file, ())[0]
    found = environment.doctor(address, spec, results, lock_file)
    show(
        output,
        lambda: environment.doctor_document(found),
        lambda: environment.doctor_lines(found),
    )
    raise SystemExit(int(environment.doctor_exit_code(found)))


ENVIRONMENT = (fingerprint, lock, doctor)
