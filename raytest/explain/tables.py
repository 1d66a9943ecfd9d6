"""What attribution reads and what it says: plain values, no run folder and no Ray in sight."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Ints = npt.NDArray[np.int64]

UNKNOWN = -1
UNSTABLE = -2


class Role(IntEnum):
    """What a factor can be, the best explanation first.

    SETTING can be set; STATE is a device's health; PASS is launch or arrangement; LABEL names
    something that other factors act through (a node, a variant); IDENTITY names one worker.
    """

    SETTING = 0
    STATE = 1
    PASS = 2
    LABEL = 3
    IDENTITY = 4


@dataclass(frozen=True, slots=True)
class Factor:
    """One recorded fact, a value per worker: ``levels[codes[i]]``. ``rank`` orders factors of one
    role, the most telling first."""

    name: str
    role: Role
    codes: Ints
    levels: tuple[str, ...]
    rank: int = 0


@dataclass(frozen=True, slots=True)
class Outcomes:
    """Workers (cell x launch x arrangement) by the class of each request's result.

    ``codes`` [n, units]: equal codes are equal results; UNKNOWN where there is none, UNSTABLE where
    the worker's repeats differ. ``slot`` and ``node`` [n] say which workers are on one slot and
    node, ``launch`` [n] which are one process; ``repeats`` is the least number of repeats behind a
    worker, ``devices`` and ``group`` [slots] the devices of a slot's node and of the slot.
    """

    workers: tuple[str, ...]
    slot_names: tuple[str, ...]
    slot: Ints
    node: Ints
    launch: Ints
    codes: Ints
    repeats: int = 2
    devices: tuple[int, ...] = ()
    group: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Level:
    """One combination of values of a set of factors: how many workers and slots have it, and the
    classes (indices) that they are in."""

    values: tuple[str, ...]
    n_workers: int
    n_slots: int
    classes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Alike:
    """One of several factors that part the workers in the same way; ``values`` has one for each of
    its candidate's levels."""

    name: str
    role: Role
    values: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A set of factors. Each member lists the factors that part the workers in the same way
    (confounded: this run cannot tell them apart), the most telling first.

    ``explained`` is I(P;F)/H(P). ``p_value`` is by permuting whole workers (slots where the set is
    constant in each), ``adjusted`` by Holm over all sets tried; ``p_by_node`` permutes nodes, None
    where the set varies within them. ``requests`` of ``n_requests`` divergent ones are parted
    exactly.
    """

    members: tuple[tuple[Alike, ...], ...]
    role: Role
    levels: tuple[Level, ...]
    sufficient: bool
    explained: float
    p_value: float
    adjusted: float
    p_by_node: float | None
    requests: int
    n_requests: int


@dataclass(frozen=True, slots=True)
class WorkerClass:
    """Workers whose results are equal on every request."""

    workers: tuple[str, ...]
    slots: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Rates:
    """Workers grouped by a factor's value: how many requests of theirs differ between repeats."""

    factor: str
    values: tuple[str, ...]
    rates: tuple[float, ...]
    p_value: float
    adjusted: float


@dataclass(frozen=True, slots=True)
class Noise:
    """Repeats of one worker that differ: no recorded factor can explain that, H(P | all) > 0.

    ``causes`` are sets of factors that say which workers are unstable, ``rates`` those that say how
    much.
    """

    workers: tuple[str, ...]
    n_workers: int
    n_requests: int
    rate: float
    causes: tuple[Candidate, ...]
    rates: tuple[Rates, ...]


@dataclass(frozen=True, slots=True)
class Retest:
    """What would tell a single bad device from chance or from its partners."""

    slot: str
    group: int
    devices: int
    rounds: tuple[tuple[tuple[int, ...], ...], ...]


class Conclusion(StrEnum):
    """What the partition allows to be said.

    CAUSE: recorded factors separate the classes exactly, and chance does not. CHANCE: they do, but
    so would factors that have nothing to do with it. LABEL: only names (node, variant) separate
    them beyond chance. PARTLY: a factor explains some. SINGLE: one slot stands alone. TWO: two
    workers differ, nobody can say which is right. NOT_STABLE: only repeats differ.
    """

    EQUAL = "equal"
    CAUSE = "cause"
    CHANCE = "chance"
    LABEL = "label"
    PARTLY = "partly"
    SINGLE = "single"
    TWO = "two"
    NOT_STABLE = "not stable"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class Explanation:
    """Which recorded factors explain the classes. ``classes`` are largest first; ``tied``: no
    class is larger than all others, so none is the majority. ``causes`` are the coarsest sufficient
    sets, ``labels`` the names that separate the classes too, ``partial`` what explains a part."""

    conclusion: Conclusion
    n_workers: int
    n_slots: int
    n_factors: int
    n_requests: int
    n_divergent: int
    n_left_out: int
    repeats: int
    by_slot: bool
    tied: bool
    classes: tuple[WorkerClass, ...]
    causes: tuple[Candidate, ...] = ()
    labels: tuple[Candidate, ...] = ()
    partial: tuple[Candidate, ...] = ()
    noise: Noise | None = None
    retest: Retest | None = None
