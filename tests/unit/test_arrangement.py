"""Arrangements hand over every request once, in the order and company that their names say."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raytest.arrangement import CACHE_BLOCK, arrange, shared_prefix
from raytest.engines.base import Request, Sampling
from raytest.schema import Arrangement


def make(*prompts: tuple[int, ...]) -> list[Request]:
    return [Request(f"r{i}", i, p, b"x" * 16, Sampling()) for i, p in enumerate(prompts)]


# few token ids and shared beginnings, so that families of every kind form
prompts = st.lists(
    st.builds(
        lambda start, rest: (1,) * start + tuple(rest),
        st.sampled_from([0, 15, 16, 17, 40]),
        st.lists(st.integers(0, 2), min_size=1, max_size=20),
    ),
    min_size=1,
    max_size=12,
)


@given(prompts=prompts, arrangement=st.sampled_from(Arrangement), seed=st.integers(0, 99))
def test_every_request_is_handed_over_once_and_the_same_way_again(
    prompts: list[tuple[int, ...]], arrangement: Arrangement, seed: int
) -> None:
    requests = make(*prompts)
    batches = arrange(requests, arrangement, seed)
    assert all(batches)
    flat = [r.request_index for b in batches for r in b]
    assert sorted(flat) == list(range(len(requests)))
    assert arrange(requests, arrangement, seed) == batches


@given(prompts=prompts)
def test_prefix_families_share_a_cache_block_and_nobody_outside_does(
    prompts: list[tuple[int, ...]],
) -> None:
    batches = arrange(make(*prompts), Arrangement.PREFIX, 0)
    family = {r.request_id: i for i, b in enumerate(batches) for r in b}
    requests = make(*prompts)
    for one in requests:
        for other in requests:
            if one is other:
                continue
            common = shared_prefix(one.prompt_token_ids, other.prompt_token_ids)
            if common >= CACHE_BLOCK:
                assert family[one.request_id] == family[other.request_id]
    # one batch at most, the last, is of requests that share with nobody
    lengths = [_shared_by_all(b) for b in batches if len(b) > 1]
    assert all(length >= CACHE_BLOCK for length in lengths[:-1])
    assert [n for n in lengths if n >= CACHE_BLOCK] == sorted(
        (n for n in lengths if n >= CACHE_BLOCK), reverse=True
    )


def _shared_by_all(batch: list[Request]) -> int:
    first = batch[0].prompt_token_ids
    return min(shared_prefix(first, r.prompt_token_ids) for r in batch[1:])


def test_the_longest_family_comes_first_and_the_lonely_last() -> None:
    short, long = (7,) * 16, (8,) * 64
    requests = make((1,), (*short, 1), (*long, 1), (*short, 2), (*long, 2), (2,))
    batches = arrange(requests, Arrangement.PREFIX, 0)
    assert [[r.request_index for r in b] for b in batches] == [[2, 4], [1, 3], [0, 5]]


def test_batch_solo_and_reversed_are_what_they_say() -> None:
    requests = make((1,), (2,), (3,))
    assert arrange(requests, Arrangement.BATCH, 0) == [requests]
    assert arrange(requests, Arrangement.SOLO, 0) == [[r] for r in requests]
    assert arrange(requests, Arrangement.REVERSED, 0) == [requests[::-1]]


def test_a_shuffle_depends_on_the_seed_alone() -> None:
    requests = make(*[(i,) for i in range(20)])
    (one,) = arrange(requests, Arrangement.SHUFFLED, 1)
    before = random.getstate()
    # neither on where the requests stood nor on anyone's random state
    assert arrange(requests[::-1], Arrangement.SHUFFLED, 1) == [one]
    assert random.getstate() == before
    assert arrange(requests, Arrangement.SHUFFLED, 2) != [one] != [requests]


@pytest.mark.parametrize("arrangement", Arrangement)
def test_no_requests_are_no_batches(arrangement: Arrangement) -> None:
    assert arrange([], arrangement, 0) == []
