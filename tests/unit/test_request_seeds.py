"""Each request has a seed of its own, wherever it stands and whatever else runs."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raytest import request_seeds
from raytest.engines.base import Sampling
from raytest.request_seeds import SEED_RANGE, assign_seeds, derive_seed


@given(base=st.integers(0, 2**31 - 1), request_id=st.text(max_size=30), attempt=st.integers(0, 5))
def test_a_derived_seed_leaves_room_for_64_samples(
    base: int, request_id: str, attempt: int
) -> None:
    seed = derive_seed(base, request_id, attempt)
    assert seed >= 0
    assert seed + 64 <= 2**31 - 1


def test_derived_seeds_are_the_same_in_every_version() -> None:
    # recorded runs and baselines hold seeds: these two may never change
    assert (derive_seed(42, "builtin/mixed/000-language"), derive_seed(0, "q")) == (
        22721920,
        2119225803,
    )


counts = st.dictionaries(st.text(max_size=3), st.integers(1, 8), min_size=1, max_size=12)


@given(n_by_id=counts, data=st.data())
def test_samples_of_two_requests_never_share_a_seed(
    n_by_id: dict[str, int], data: st.DataObject
) -> None:
    room = 8 * sum(n_by_id.values())
    with pytest.MonkeyPatch.context() as patch:
        # so small a range that collisions are the rule
        patch.setattr(request_seeds, "SEED_RANGE", room)
        names = data.draw(st.permutations(list(n_by_id)))
        seeds = assign_seeds({i: Sampling(seed=1, n=n_by_id[i]) for i in names}, {})
        again = assign_seeds({i: Sampling(seed=1, n=n_by_id[i]) for i in sorted(names)}, {})
    ranges = {i: set(range(seeds[i], seeds[i] + n_by_id[i])) for i in names}
    assert all(not ranges[a] & ranges[b] for a, b in combinations(names, 2))
    assert again == seeds


def test_a_seed_that_a_line_asks_for_is_kept_and_others_keep_clear_of_it() -> None:
    free = derive_seed(5, "b")
    samplings = {"a": Sampling(seed=free - 2, n=4), "b": Sampling(seed=5, n=4)}
    seeds = assign_seeds(samplings, {"a": free - 2})
    assert seeds["a"] == free - 2
    assert seeds["b"] == derive_seed(5, "b", 1)


def test_seeds_without_a_collision_are_the_derived_ones() -> None:
    names = [f"r{i}" for i in range(2000)]
    seeds = assign_seeds({i: Sampling(seed=42) for i in names}, {})
    assert seeds == {i: derive_seed(42, i) for i in names}
    assert max(seeds.values()) < SEED_RANGE
