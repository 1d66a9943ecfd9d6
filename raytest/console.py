"""The person's terminal: live progress on stderr. The only file that imports rich.

rich is for people at a terminal alone: off one it cuts identifiers and reads brackets as markup, so
what goes to a pipe or a file never passes through it.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Self

from raytest.schema import CellState

if TYPE_CHECKING:
    from raytest.plan import Launch, Plan, Trial

PIPED_INTERVAL_S = 10.0


def progress_for(quiet: bool) -> LiveProgress | LineProgress:
    """A live display where stderr is a terminal, else a few whole lines (none when quiet)."""
    if quiet or not sys.stderr.isatty():
        return LineProgress(quiet)
    return LiveProgress()


class Tally:
    """How far the launches and trials of a run are."""

    def __init__(self) -> None:
        self.states: dict[tuple[str, int], CellState] = {}
        self.trials_done = 0
        self.trials_planned = 0
        self._began: float | None = None
        self._first_done = 0

    def begin(self, plan: Plan, trials_done: int) -> None:
        """Count from a plan, of which ``trials_done`` were there already."""
        self.states = {(x.cell.cell_id, x.launch): CellState.PLANNED for x in plan.launches()}
        self.trials_planned = plan.n_trials
        self.trials_done = self._first_done = trials_done
        self._began = time.monotonic()

    def seconds_left(self) -> float | None:
        """Estimate from the trials done so far; None before the first."""
        new = self.trials_done - self._first_done
        if self._began is None or new == 0:
            return None
        per_trial = (time.monotonic() - self._began) / new
        return per_trial * (self.trials_planned - self.trials_done)

    def line(self) -> str:
        """One line: cells by state, trials, time left."""
        counts = {s: sum(x is s for x in self.states.values()) for s in CellState}
        shown = ", ".join(f"{n} {s.value}" for s, n in counts.items() if n)
        left = self.seconds_left()
        estimate = "" if left is None else f", about {_duration(left)} left"
        return f"launches: {shown}; trials {self.trials_done} of {self.trials_planned}{estimate}"


class LineProgress:
    """For pipes and logs: whole lines on stderr, seldom; failures at once."""

    def __init__(self, quiet: bool = False) -> None:
        self.tally = Tally()
        self._quiet = quiet
        self._last = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return

    def begin(self, plan: Plan, trials_done: int) -> None:
        """The run is planned."""
        self.tally.begin(plan, trials_done)

    def launch(self, launch: Launch, state: CellState, note: str = "") -> None:
        """A launch reached ``state``."""
        self.tally.states[launch.cell.cell_id, launch.launch] = state
        if note:
            self._write(f"{launch.cell.cell_id} launch {launch.launch}: {note}")
        self._maybe()

    def trial(self, launch: Launch, trial: Trial) -> None:  # noqa: ARG002 - the protocol's
        """A trial is safe on disk."""
        self.tally.trials_done += 1
        self._maybe()

    def _maybe(self) -> None:
        if time.monotonic() - self._last >= PIPED_INTERVAL_S:
            self._last = time.monotonic()
            self._write(self.tally.line())

    def _write(self, text: str) -> None:
        if not self._quiet:
            sys.stderr.write(f"{text}\n")
            sys.stderr.flush()


class LiveProgress:
    """For a terminal: one bar of trials, and under it what each busy launch is doing."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        self.tally = Tally()
        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.completed:.0f}/{task.total:.0f}", markup=False),
            TextColumn("{task.fields[note]}", markup=False),
            TimeElapsedColumn(),
            console=Console(stderr=True, markup=False, highlight=False),
            transient=True,
        )
        self._trials = self._bar.add_task("trials", total=1, note="connecting to Ray")
        self._tasks: dict[tuple[str, int], Any] = {}
        self._per_launch = 1

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def begin(self, plan: Plan, trials_done: int) -> None:
        """The run is planned."""
        self.tally.begin(plan, trials_done)
        self._per_launch = len(plan.trials)
        self._bar.update(self._trials, total=plan.n_trials, completed=trials_done, note="")

    def launch(self, launch: Launch, state: CellState, note: str = "") -> None:
        """A launch reached ``state``."""
        key = (launch.cell.cell_id, launch.launch)
        self.tally.states[key] = state
        if state in (CellState.DONE, CellState.FAILED):
            task = self._tasks.pop(key, None)
            if task is not None:
                self._bar.remove_task(task)
        elif key not in self._tasks:
            name = f"{launch.cell.cell_id} #{launch.launch}"
            self._tasks[key] = self._bar.add_task(name, total=self._per_launch, note=state.value)
        else:
            self._bar.update(self._tasks[key], note=state.value)
        if note:
            self._bar.console.print(f"{launch.cell.cell_id} launch {launch.launch}: {note}")
        self._refresh()

    def trial(self, launch: Launch, trial: Trial) -> None:  # noqa: ARG002 - the protocol's
        """A trial is safe on disk."""
        self.tally.trials_done += 1
        task = self._tasks.get((launch.cell.cell_id, launch.launch))
        if task is not None:
            self._bar.advance(task)
        self._refresh()

    def _refresh(self) -> None:
        left = self.tally.seconds_left()
        note = "" if left is None else f"about {_duration(left)} left"
        self._bar.update(self._trials, completed=self.tally.trials_done, note=note)


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


COLOURS = (
    (r"\b(PASS|holds)\b", "green"),
    (r"\b(MISMATCH|fails|failed)\b|^(suspect) ", "bold red"),
    (r"\b(INCONCLUSIVE|NOT COMPARABLE|undecided)\b", "yellow"),
    (r"^(next|worst|because|run folder):? ", "dim"),
)


def terminal_width() -> int | None:
    """Columns of stdout where it is a terminal, else None: lines in a pipe stay whole."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def print_coloured(lines: Sequence[str]) -> None:
    """Lines for a person's terminal, the words that matter in colour; nothing is cut or wrapped."""
    from rich.console import Console
    from rich.text import Text

    console = Console(markup=False, highlight=False, emoji=False)
    for line in lines:
        text = Text(line)
        for pattern, style in COLOURS:
            text.highlight_regex(pattern, style)
        console.print(text, soft_wrap=True)
