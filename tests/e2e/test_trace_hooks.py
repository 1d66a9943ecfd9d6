"""A vLLM rank's hooks on a model of a few lines: what they keep, and that they change nothing."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest


def rank_of(model: Any, runner: Any, **config: Any) -> Any:
    values = {"enforce_eager": True, "get_hidden_size": lambda: 8, **config}
    return SimpleNamespace(
        rank=0,
        model_runner=runner,
        vllm_config=SimpleNamespace(
            model_config=SimpleNamespace(**values),
            parallel_config=SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1),
        ),
    )


@pytest.fixture
def toy() -> tuple[Any, Callable[..., Any]]:
    """A model of two blocks that share a module, fuse their residual in place and pad a row."""
    torch = pytest.importorskip("torch")

    class RMSNorm(torch.nn.Module):  # type: ignore[misc,name-defined]
        def forward(self, x: Any, residual: Any) -> Any:
            residual += x
            return residual * 2, residual

    class Block(torch.nn.Module):  # type: ignore[misc,name-defined]
        def __init__(self, shared: Any) -> None:
            super().__init__()
            self.norm, self.shared = RMSNorm(), shared

        def forward(self, x: Any, residual: Any) -> Any:
            x, residual = self.norm(x, residual)
            return self.shared(x), residual

    class Model(torch.nn.Module):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            shared = torch.nn.Tanh()
            self.blocks = torch.nn.ModuleList([Block(shared), Block(shared)])

        def forward(self, input_ids: Any, positions: Any) -> Any:
            x = torch.stack([input_ids] * 8, dim=1).to(torch.bfloat16) / 64
            residual = torch.zeros_like(x)
            for block in self.blocks:
                x, residual = block(x, residual)
            return x

    model = Model()

    class Runner:
        def __init__(self) -> None:
            self.model = model
            self.input_batch = SimpleNamespace(req_ids=["b", "a"])

        def execute_model(self, scheduler_output: Any) -> Any:
            # decodes first: b's one token, a's two, one row of padding
            ids = torch.tensor([30, 7, 9, 0])
            return self.model(input_ids=ids, positions=torch.tensor([5, 0, 1, 0]))

    runner = Runner()

    def step() -> Any:
        return runner.execute_model(SimpleNamespace(num_scheduled_tokens={"a": 2, "b": 1}))

    return rank_of(model, runner), step


OPTIONS: dict[str, Any] = {"token_ids": [7, 9, 11], "keep": {}, "limit_bytes": 1 << 20}


def traced(worker: Any, step: Callable[[], Any], **options: Any) -> dict[str, Any]:
    from raytest.engines.vllm_trace import Tracer

    tracer = Tracer(worker, {**OPTIONS, **options})
    tracer.start()
    step()
    tracer.stop()
    return tracer.take()


def test_hooks_leave_the_model_as_it_was(toy: tuple[Any, Callable[..., Any]]) -> None:
    worker, step = toy
    runner = worker.model_runner
    plain = step()
    before = set(vars(runner)), set(vars(runner.model))
    traced(worker, step)
    assert (set(vars(runner)), set(vars(runner.model))) == before
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in runner.model.modules())
    assert bool((step() == plain).all())


def test_rows_tuples_and_shared_modules_are_told_apart(toy: tuple[Any, Callable[..., Any]]) -> None:
    from raytest.engines.trace import part_from_reply

    worker, step = toy
    taken = traced(worker, step, keep={"blocks.0.norm": [0, 1]})
    parts = {(p["module"], p["part"]): part_from_reply(p) for p in taken["parts"]}
    assert {m for m, _ in parts} == {
        "blocks.0", "blocks.0.norm", "blocks.0.shared",
        "blocks.1", "blocks.1.norm", "blocks.1.shared",
    }  # fmt: skip
    assert all(p.positions.tolist() == [0, 1] for p in parts.values())
    happened = [
        ("blocks.0.norm", "output"), ("blocks.0.shared", "output"), ("blocks.0", "output"),
        ("blocks.1.norm", "input"),
    ]  # fmt: skip
    assert [parts[k].order for k in happened] == sorted(parts[k].order for k in happened)
    # the residual is summed in place: its rows before and after the call are both right
    residual_in, residual_out = (parts["blocks.0.norm", k] for k in ("input.1", "output.1"))
    assert residual_in.values is not None
    assert residual_out.values is not None
    assert not residual_in.values.any()
    sevenths = np.array([7 / 64, 9 / 64], dtype=np.float32).view(np.uint32) >> 16
    assert residual_out.values[:, 0].tolist() == sevenths.tolist()
    assert parts["blocks.0", "output.1"].digests.tolist() == residual_out.digests.tolist()


def test_digests_on_the_device_are_those_of_numpy() -> None:
    torch = pytest.importorskip("torch")
    from raytest.engines.row_digest import row_digests
    from raytest.engines.trace import Layout
    from raytest.engines.vllm_layout import Held
    from raytest.engines.vllm_parts import Digester, bits_of

    generator = torch.Generator().manual_seed(3)
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        rows = torch.randn(5, 300, generator=generator).to(dtype)
        bits = bits_of(rows)
        unsigned = bits.numpy().view(f"u{bits.element_size()}")
        found = Digester().digest(bits, Held(Layout.WHOLE)).numpy().view(np.uint64)
        assert np.array_equal(found, row_digests(unsigned))


def test_tensors_past_the_memory_limit_are_left_out_and_that_is_said(
    toy: tuple[Any, Callable[..., Any]],
) -> None:
    worker, step = toy
    taken = traced(worker, step, keep={"blocks.0": [0, 1], "blocks.1": [0, 1]}, limit_bytes=96)
    kept = sum(len(p["values"]) for p in taken["parts"])
    assert 0 < kept <= 96
    assert taken["notes"] == ["tensors past the memory limit were left out"]


def test_compiled_graphs_are_refused_since_they_call_no_hooks(
    toy: tuple[Any, Callable[..., Any]],
) -> None:
    from raytest.engines.vllm_trace import Tracer

    worker, _ = toy
    compiled = rank_of(worker.model_runner.model, worker.model_runner, enforce_eager=False)
    with pytest.raises(ValueError, match="enforce_eager = true is needed"):
        Tracer(compiled, OPTIONS)


def test_what_goes_wrong_in_a_hook_is_noted_and_ends_nothing(
    toy: tuple[Any, Callable[..., Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    from raytest.engines import vllm_trace

    def broken(*_: Any) -> Any:
        raise RuntimeError("no such layout")

    monkeypatch.setattr(vllm_trace, "held", broken)
    worker, step = toy
    plain = step()
    taken = traced(worker, step)
    assert taken == {"parts": [], "notes": ["rank 0: RuntimeError: no such layout"]}
    assert bool((step() == plain).all())
