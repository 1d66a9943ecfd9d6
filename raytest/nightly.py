"""What a scheduler starts each night: doctor, run, comparison with the baseline, reports, one call
where the state has changed, and the exit code."""

from __future__ import annotations

import fcntl
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raytest.baseline import has_baseline, save_baseline
from raytest.baseline_check import amender
from raytest.environment import doctor, doctor_lines
from raytest.errors import ExitCode, RaytestError, StoreError, UnavailableError
from raytest.report.write import write_in_folder
from raytest.runner import judge, run_spec
from raytest.schema import RunVerdict
from raytest.spec import Spec
from raytest.store import RunFolder, read_json, write_json
from raytest.webhook import body_for, check_url, message, send

if TYPE_CHECKING:
    from raytest.execution import Progress

FOLDER = ".nightly"
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Night:
    """How a night is run. ``baseline`` overrides the spec's; ``create_baseline`` saves the first
    run that passes where there is none; ``webhook`` is a URL ('' for none)."""

    address: str
    results: str
    baseline: str | None
    create_baseline: bool
    webhook: str
    webhook_form: str
    base_dir: str


def run_night(
    spec: Spec, source: str, night: Night, progress: AbstractContextManager[Progress], say: Say
) -> tuple[RunFolder, dict[str, Any]]:
    """One night; ``say`` gets what a person may want to know, a line each.

    Raises UnavailableError where the same night is running already, and whatever a run raises; the
    state that this leaves is told to the webhook too.
    """
    if night.webhook:
        check_url(night.webhook)
    with only_one(night.results, spec.name):
        try:
            folder, document = _run(spec, source, night, progress, say)
        except RaytestError as error:
            code = ExitCode(error.exit_code)
            ended = {"exit_code": int(code), "reasons": str(error).splitlines()}
            tell(spec.name, code.name.lower(), ended, night, say)
            raise
        tell(spec.name, document["verdict"], document, night, say)
    return folder, document


def _run(
    spec: Spec, source: str, night: Night, progress: AbstractContextManager[Progress], say: Say
) -> tuple[RunFolder, dict[str, Any]]:
    name = night.baseline or spec.gates.baseline
    first = name is not None and night.create_baseline and not has_baseline(night.results, name)
    amend = amender(night.results, None if first else name)
    for line in doctor_lines(doctor(night.address, spec, night.results, None)):
        say(line)
    with progress as shown:
        outcome = run_spec(
            spec,
            source=source,
            address=night.address,
            results=night.results,
            run_id=None,
            resume=False,
            base_dir=night.base_dir,
            progress=shown,
        )
    folder = outcome.folder
    document = judge(folder, outcome.evaluation, amend(folder))
    _, problems = write_in_folder(folder)
    for problem in problems:
        say(f"raytest: {problem}")
    if first and name is not None and document["verdict"] == RunVerdict.PASS:
        saved = save_baseline(night.results, name, folder, replace=False)
        say(f"saved as baseline {saved.title}, the first of that name")
    return folder, document


@contextmanager
def only_one(results: str, name: str) -> Iterator[None]:
    """Hold the night's lock, which ends with the process, however that ends. Raises
    UnavailableError where another holds it."""
    path = Path(results) / FOLDER / f"{name}.lock"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a")
    except OSError as error:
        raise StoreError(f"{path}: cannot be made: {error.strerror}") from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UnavailableError(
                f"{path}: another 'raytest nightly' of {name!r} is running; it is not disturbed"
            ) from None
        yield


def tell(name: str, now: str, document: Mapping[str, Any], night: Night, say: Say) -> None:
    """Call the webhook where the state is not what it was. Nothing was before the first night, so
    a first pass is no news. What was not taken is told again the next night."""
    path = Path(night.results) / FOLDER / f"{name}.json"
    before = _state(path)
    if now == (before or RunVerdict.PASS.value):
        if before is None:
            _remember(path, now)
        return
    if night.webhook:
        told = message(name, now, before, document)
        problem = send(night.webhook, body_for(night.webhook, night.webhook_form, told))
        if problem:
            say(f"raytest: {problem}")
            return
        say(f"webhook told: {before or 'unknown'} -> {now}")
    _remember(path, now)


def _remember(path: Path, state: str) -> None:
    write_json(path, {"state": state, "since": datetime.now(UTC).isoformat()})


def _state(path: Path) -> str | None:
    try:
        return str(read_json(path).get("state") or "") or None
    except StoreError:
        return None
