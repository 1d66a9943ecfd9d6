"""Which trials of a run are still needed: asked again whenever one has finished, so that a run with
``trials.until = "decided"`` stops an axis as soon as more trials could not change its gate."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from raytest.plan import Launch, Trial
from raytest.store import RunFolder, TrialKey

Look = Callable[[RunFolder], set[TrialKey]]


@dataclass(slots=True)
class Needs:
    """``look`` gives the trials that nothing needs any more; None where all are wanted."""

    folder: RunFolder
    look: Look | None
    _unneeded: set[TrialKey] = field(default_factory=set)
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    _asked: int = 0
    _answered: int = 0

    async def again(self) -> None:
        """Look at what is on disk. One look at a time: all who ask while one goes on share the
        next."""
        if self.look is None or not self.folder.finished_trials():
            return
        self._asked += 1
        mine = self._asked
        async with self._turn:
            if self._answered >= mine:
                return
            self._answered = self._asked
            self._unneeded = await asyncio.to_thread(self.look, self.folder)

    def of(self, launch: Launch, trials: Sequence[Trial]) -> list[Trial]:
        """Those of ``trials`` that are still needed; the run folder is told of the others."""
        needed = []
        for trial in trials:
            key = (launch.cell.cell_id, launch.launch, trial.trial)
            if key in self._unneeded:
                self.folder.event("not needed", cell_id=key[0], launch=key[1], trial=key[2])
            else:
                needed.append(trial)
        return needed


def not_needed(folder: RunFolder) -> set[TrialKey]:
    """Trials that did not run because the run was decided without them."""
    told = {
        (str(e["cell_id"]), int(e["launch"]), int(e["trial"]))
        for e in folder.events()
        if e["event"] == "not needed"
    }
    return told - folder.finished_trials()


def decisions(folder: RunFolder) -> dict[str, int]:
    """Axis -> how many trials had finished when it was decided, before the end of the plan."""
    return {
        str(e["axis"]): int(e["trials_done"])
        for e in folder.events()
        if e["event"] == "axis decided"
    }
