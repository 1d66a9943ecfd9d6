"""Rows of a step go to the right request, however the model runner orders and pads them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from raytest.engines.vllm_rows import RowMap, RunnerView, StepRows

TRACED = [10, 11, 12, 13, 14]


def tokens(*ids: int) -> Any:
    return np.array(ids, dtype=np.int64)


def row_map() -> RowMap:
    return RowMap(np.array(TRACED, dtype=np.int64))


def mapped(rows: StepRows, owner: str | None) -> list[tuple[int, int]]:
    """(row, position) of one request."""
    return [
        (int(r), int(p))
        for r, p, o in zip(rows.rows, rows.positions, rows.owners, strict=True)
        if o == owner
    ]


def test_a_request_is_known_by_its_tokens_and_not_by_its_place() -> None:
    one = row_map()
    first, _ = one.step(
        tokens(20, 21, 10, 11, 12), tokens(0, 1, 0, 1, 2), [("other", 2), ("mine", 3)]
    )
    # decodes were put in another order than prefills
    second, last = one.step(tokens(13, 22), tokens(3, 2), [("mine", 1), ("other", 1)])
    assert one.owner() == "mine"
    assert mapped(first, "mine") == [(2, 0), (3, 1), (4, 2)]
    assert mapped(second, "mine") == [(0, 3)]
    assert mapped(last, "mine") == [(0, 3)]
    assert last.width == 2
    assert (first.step, second.step) == (0, 1)


def test_a_prompt_in_chunks_gives_every_position_once() -> None:
    one = row_map()
    seen = []
    for ids, at in (((10, 11), (0, 1)), ((12,), (2,)), ((13, 14), (3, 4))):
        rows, _ = one.step(tokens(*ids), tokens(*at), [("mine", len(ids))])
        seen += [p for _, p in mapped(rows, "mine")]
    assert seen == [0, 1, 2, 3, 4]


def test_padding_rows_belong_to_nobody() -> None:
    one = row_map()
    rows, _ = one.step(tokens(10, 11, 0, 0), tokens(0, 1, 0, 0), [("mine", 2)])
    assert rows.width == 4
    assert mapped(rows, "mine") == [(0, 0), (1, 1)]


def test_a_request_that_shares_a_prefix_is_out_once_it_departs() -> None:
    one = row_map()
    one.step(tokens(10, 11, 10, 11), tokens(0, 1, 0, 1), [("twin", 2), ("mine", 2)])
    assert one.owner() == "twin"
    one.step(tokens(99, 12), tokens(2, 2), [("twin", 1), ("mine", 1)])
    one.step(tokens(13, 13), tokens(3, 3), [("twin", 1), ("mine", 1)])
    assert one.owner() == "mine"


def test_requests_with_all_tokens_alike_are_told() -> None:
    one = row_map()
    one.step(tokens(10, 11, 10, 11), tokens(0, 1, 0, 1), [("a", 2), ("b", 2)])
    assert one.owner() == "a"
    assert any("2 requests have the traced tokens" in note for note in one.notes)


def test_positions_past_the_traced_tokens_are_left_out() -> None:
    one = row_map()
    one.step(tokens(*TRACED), tokens(0, 1, 2, 3, 4), [("mine", 5)])
    rows, last = one.step(tokens(77), tokens(5), [("mine", 1)])
    assert len(rows.rows) == 0
    assert len(last.rows) == 0
    assert one.owner() == "mine"


def test_without_a_list_of_requests_tokens_and_positions_decide_and_that_is_said() -> None:
    one = row_map()
    rows, _ = one.step(tokens(20, 21, 10, 11), tokens(0, 1, 0, 1), None)
    assert mapped(rows, one.owner()) == [(2, 0), (3, 1)]
    assert any("alone" in note for note in one.notes)


def test_a_list_that_does_not_fit_the_positions_is_not_believed() -> None:
    one = row_map()
    rows, _ = one.step(tokens(20, 21, 10, 11), tokens(0, 1, 0, 1), [("x", 3), ("y", 1)])
    assert mapped(rows, one.owner()) == [(2, 0), (3, 1)]
    assert any("did not fit" in note for note in one.notes)


def test_a_request_that_nobody_ran_has_no_owner() -> None:
    one = row_map()
    one.step(tokens(20, 21), tokens(0, 1), [("other", 2)])
    assert one.owner() is None


class FirstGeneration:
    """Keeps its requests in a persistent batch."""

    def __init__(self) -> None:
        self.input_batch = SimpleNamespace(req_ids=["b", "a"])
        self.seen: list[Any] = []

    def execute_model(self, scheduler_output: Any) -> str:
        self.seen.append(scheduler_output)
        return "result"


class SecondGeneration:
    """Makes the step's batch, in its own order, in a method of its own."""

    def execute_model(self, scheduler_output: Any) -> Any:
        return self.prepare_inputs(scheduler_output)

    def prepare_inputs(self, scheduler_output: Any) -> Any:
        return SimpleNamespace(
            req_ids=["b", "a"], num_scheduled_tokens=np.array([1, 4]), input_ids=tokens(1)
        )


@pytest.mark.parametrize("runner", [FirstGeneration(), SecondGeneration()])
def test_both_generations_of_model_runner_say_whose_rows_follow(runner: Any) -> None:
    view = RunnerView(runner)
    view.watch()
    result = runner.execute_model(SimpleNamespace(num_scheduled_tokens={"a": 4, "b": 1}))
    assert view.segments() == [("b", 1), ("a", 4)]
    assert result is not None
    view.release()
    assert "execute_model" not in vars(runner)
    assert "prepare_inputs" not in vars(runner)


def test_a_runner_of_another_kind_says_nothing() -> None:
    view = RunnerView(SimpleNamespace(execute_model=lambda output: None))
    assert view.segments() is None
    assert view.input_ids("given") == "given"


def test_a_later_stage_that_is_given_no_ids_takes_the_runners() -> None:
    runner = SecondGeneration()
    view = RunnerView(runner)
    view.watch()
    runner.execute_model(SimpleNamespace(num_scheduled_tokens={}))
    assert view.input_ids(None).tolist() == [1]
