"""Which request and which position each row of a vLLM step belongs to.

Model runners reorder requests inside a step, so rows are never mapped by submission order: the
runner's own list of the step says whose tokens follow one another, and input ids and positions
that the model is given must agree with it. Where a runner has no such list, runs of consecutive
positions are matched against the traced request by their token ids alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Segments = list[tuple[str, int]]
NOBODY = "?"


@dataclass(frozen=True, slots=True)
class StepRows:
    """The rows of one forward pass that may be the traced request's.

    ``width`` is the number of rows of the step's tensors, padding included; ``rows`` [k] are places
    among them, ``positions`` [k] the token each one is, ``owners`` [k] the runner's request ids.
    ``step`` counts forward passes.
    """

    step: int
    width: int
    rows: Ints
    positions: Ints
    owners: tuple[str, ...]


class RowMap:
    """Follows the traced request, known by its ``token_ids`` alone, from step to step.

    A request that has had another token than the traced one's at any position is out for good; of
    those that remain, the one with the most positions is the traced one.
    """

    def __init__(self, token_ids: Ints) -> None:
        self._wanted = token_ids
        self._out: set[str] = set()
        self._seen: dict[str, set[int]] = {}
        self._steps = 0
        self.notes: set[str] = set()

    def step(
        self, input_ids: Ints, positions: Ints, segments: Segments | None
    ) -> tuple[StepRows, StepRows]:
        """The step's rows, and the same for the tensors that hold each request's last row alone
        (what logits are computed from). ``segments`` are (request id, rows) in row order."""
        cut = self._cut(positions, segments)
        found: list[tuple[str, int, int, int]] = []
        for place, (owner, start, stop) in enumerate(cut):
            if owner not in self._out and not self._matches(input_ids, positions, start, stop):
                self._out.add(owner)
            if owner in self._out and owner != NOBODY:
                continue
            if owner == NOBODY and not self._matches(input_ids, positions, start, stop):
                continue
            found.append((owner, place, start, stop))
        step, self._steps = self._steps, self._steps + 1
        return (
            self._rows(step, len(positions), positions, found),
            self._last_rows(step, len(cut), positions, found),
        )

    def owner(self) -> str | None:
        """The runner's id of the traced request; None where no request had its tokens."""
        alive = {o: len(p) for o, p in self._seen.items() if o not in self._out or o == NOBODY}
        if not alive:
            return None
        most = max(alive.values())
        best = [o for o, n in alive.items() if n == most]
        if len(best) > 1:
            self.notes.add(f"{len(best)} requests have the traced tokens; the first was taken")
        return best[0]

    def _cut(self, positions: Ints, segments: Segments | None) -> list[tuple[str, int, int]]:
        if segments is not None:
            cut, start = [], 0
            for owner, n in segments:
                cut.append((owner, start, start + n))
                start += n
            if start <= len(positions) and all(_consecutive(positions[a:b]) for _, a, b in cut):
                return cut
            self.notes.add("the runner's list of a step did not fit its positions")
        self.notes.add("rows of some steps were matched by token ids and positions alone")
        breaks = np.flatnonzero(np.diff(positions) != 1) + 1
        edges = [0, *breaks.tolist(), len(positions)]
        return [(NOBODY, a, b) for a, b in pairwise(edges)]

    def _matches(self, input_ids: Ints, positions: Ints, start: int, stop: int) -> bool:
        """Whether the segment's tokens are the traced ones, as far as those go."""
        at = positions[start:stop]
        known = at < len(self._wanted)
        return bool((self._wanted[at[known]] == input_ids[start:stop][known]).all())

    def _rows(
        self, step: int, width: int, positions: Ints, found: list[tuple[str, int, int, int]]
    ) -> StepRows:
        rows: list[int] = []
        owners: list[str] = []
        for owner, _, start, stop in found:
            mine = [r for r in range(start, stop) if positions[r] < len(self._wanted)]
            rows += mine
            owners += [owner] * len(mine)
            self._seen.setdefault(owner, set()).update(int(positions[r]) for r in mine)
        index = np.array(rows, dtype=np.int64)
        return StepRows(step, width, index, positions[index], tuple(owners))

    def _last_rows(
        self, step: int, width: int, positions: Ints, found: list[tuple[str, int, int, int]]
    ) -> StepRows:
        kept = [
            (owner, place, int(positions[stop - 1]))
            for owner, place, _, stop in found
            if positions[stop - 1] < len(self._wanted)
        ]
        return StepRows(
            step,
            width,
            np.array([place for _, place, _ in kept], dtype=np.int64),
            np.array([position for _, _, position in kept], dtype=np.int64),
            tuple(owner for owner, _, _ in kept),
        )


def _consecutive(positions: Ints) -> bool:
    return bool(len(positions)) and bool((np.diff(positions) == 1).all())


class RunnerView:
    """What a model runner lets one see of the step it is about to run; any generation of runner.

    While watching, ``execute_model`` and (where it exists) ``prepare_inputs`` of the instance are
    wrapped; both pass through unchanged.
    """

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._scheduled: Mapping[str, int] = {}
        self._batch: Any = None
        self._wrapped: dict[str, Any] = {}

    def watch(self) -> None:
        """Start to watch the runner's steps."""
        self._wrap("execute_model", self._before_step, None)
        if hasattr(self._runner, "prepare_inputs"):
            self._wrap("prepare_inputs", None, self._after_inputs)

    def release(self) -> None:
        """Give the runner its own methods back."""
        for name, own in self._wrapped.items():
            if own is None:
                delattr(self._runner, name)
            else:
                setattr(self._runner, name, own)
        self._wrapped.clear()

    def _wrap(self, name: str, before: Any, after: Any) -> None:
        method = getattr(self._runner, name)
        self._wrapped[name] = vars(self._runner).get(name)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if before is not None:
                before(*args, **kwargs)
            result = method(*args, **kwargs)
            if after is not None:
                after(result)
            return result

        setattr(self._runner, name, wrapped)

    def _before_step(self, *args: Any, **kwargs: Any) -> None:
        output = args[0] if args else kwargs.get("scheduler_output")
        self._scheduled = dict(getattr(output, "num_scheduled_tokens", None) or {})
        self._batch = None

    def _after_inputs(self, result: Any) -> None:
        if hasattr(result, "req_ids") and hasattr(result, "num_scheduled_tokens"):
            self._batch = result

    def input_ids(self, given: Any) -> Any:
        """The step's token ids: what the model was given, or the runner's own where a later
        pipeline stage is given none."""
        if given is not None:
            return given
        return getattr(self._batch, "input_ids", None)

    def segments(self) -> Segments | None:
        """(request id, rows) in row order; None where this runner does not say."""
        batch = self._batch
        if batch is not None:
            return [
                (str(r), int(n))
                for r, n in zip(batch.req_ids, batch.num_scheduled_tokens, strict=False)
            ]
        ids = getattr(getattr(self._runner, "input_batch", None), "req_ids", None)
        if ids is None or not self._scheduled:
            return None
        known = [r for r in ids if r in self._scheduled]
        if len(known) != len(self._scheduled):
            return None
        return [(str(r), int(self._scheduled[r])) for r in known]
