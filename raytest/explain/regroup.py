"""How to regroup devices so that one bad device can be told from its partners: group testing for
tensor-parallel groups, where a run blames a group and never a GPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

Round = tuple[tuple[int, ...], ...]


def regroupings(n: int, k: int) -> tuple[Round, ...]:
    """Rounds of disjoint groups of ``k`` out of ``n`` devices, after which the groups that fail
    name any single bad device.

    The first round is consecutive devices, as a plan places them. Where ``k`` divides ``n`` there
    are ceil(log_g n) rounds for g = n/k groups, which is the least possible: each round splits
    devices into g. Elsewhere some devices rest in a round, and each device works in at least one.
    Raises ValueError where no regrouping can tell: all devices in every group, or too few.
    """
    if k < 1 or n < k or (n == k and k > 1):
        raise ValueError(f"groups of {k} out of {n} devices can never be told apart by regrouping")
    g = n // k
    first = tuple(tuple(range(i * k, i * k + k)) for i in range(g))
    rounds = [first]
    codes: list[tuple[int, ...]] = [(min(d // k, g),) for d in range(n)]
    while len(set(codes)) < n or not all(_worked(c, g) for c in codes):
        places = _transposed(n, k) if len(rounds) == 1 else None
        places = places or _dealt(codes, g, k)
        codes = [(*code, place) for code, place in zip(codes, places, strict=True)]
        rounds.append(tuple(tuple(d for d in range(n) if places[d] == group) for group in range(g)))
    return tuple(rounds)


def _transposed(n: int, k: int) -> list[int] | None:
    """Group of each device where blocks of k x k are read by column: neighbours stay near, as in
    {01}{23} then {02}{13}. None where the blocks do not fill the devices."""
    if k == 1 or n % (k * k):
        return None
    return [d // (k * k) * k + d % k for d in range(n)]


def _dealt(codes: Sequence[tuple[int, ...]], g: int, k: int) -> list[int]:
    """Group of each device (``g``: it rests): devices with one code so far are dealt to as many
    groups as there are; first those that never worked, then the largest such classes, while there
    is room to part them."""
    n = len(codes)
    sizes = Counter(codes)
    order = sorted(range(n), key=lambda d: (_worked(codes[d], g), -sizes[codes[d]], codes[d], d))
    room = [k] * g + [n - g * k]
    places = [g] * n
    dealt: Counter[tuple[tuple[int, ...], int]] = Counter()
    turn = 0
    for device in order:
        code = codes[device]
        open_places = [p for p in range(g + 1) if room[p]]
        usable = [p for p in open_places if p < g or _worked(code, g)] or open_places
        place = min(usable, key=lambda p: (dealt[code, p], (p - turn) % (g + 1)))
        dealt[code, place] += 1
        room[place] -= 1
        places[device] = place
        turn = (place + 1) % (g + 1)
    return places


def _worked(code: tuple[int, ...], g: int) -> bool:
    """Whether the device was in a group in any round so far."""
    return any(c != g for c in code)
