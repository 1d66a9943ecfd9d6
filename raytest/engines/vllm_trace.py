"""Hooks on every module of one vLLM rank: what the traced request's rows were, in and out.

Digests are computed on the device and stay there until they are taken, so a pass moves 16 bytes a
row and module; whole rows are kept only for the modules and positions that were asked for. The
hooks start no collective operation, draw no random number and change no tensor, so neither the
schedule nor a result depends on them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from raytest.engines.vllm_layout import held, kinds_of
from raytest.engines.vllm_parts import Digester, Gathered, bits_of
from raytest.engines.vllm_rows import RowMap, RunnerView, StepRows

HOOK_ERRORS = (RuntimeError, ValueError, TypeError, IndexError, KeyError, AttributeError)


class Tracer:
    """Traces one request on one rank. ``options`` are ``token_ids``, ``keep`` and ``limit_bytes``
    of a :class:`raytest.engines.trace.TraceJob`. Raises ValueError where hooks would see nothing.
    """

    def __init__(self, worker: Any, options: dict[str, Any]) -> None:
        config = worker.vllm_config
        if not config.model_config.enforce_eager:
            raise ValueError(
                "compiled and captured graphs call no hooks; enforce_eager = true is needed"
            )
        self._rank = int(worker.rank)
        self._size = int(config.parallel_config.tensor_parallel_size)
        world = self._size * int(config.parallel_config.pipeline_parallel_size)
        self._stage, self._tp_rank = divmod(self._rank % world, self._size)
        self._hidden = int(config.model_config.get_hidden_size())
        runner = worker.model_runner
        self._model = runner.get_model() if hasattr(runner, "get_model") else runner.model
        self._view = RunnerView(runner)
        self._map = RowMap(np.array(options["token_ids"], dtype=np.int64))
        self._keep = {m: set(p) for m, p in dict(options["keep"]).items()}
        self._left_bytes = int(options["limit_bytes"])
        self._digester = Digester()
        self._gathered: dict[tuple[str, str], Gathered] = {}
        self._names: dict[int, list[str]] = {}
        self._restore: list[Callable[[], None]] = []
        self._notes: set[str] = set()
        self._unmapped: set[str] = set()
        # of the forward pass under way
        self._rows: StepRows | None = None
        self._last: StepRows | None = None
        self._index: torch.Tensor | None = None
        self._stack: list[str] = []
        self._calls: Counter[str] = Counter()
        self._order = 0

    def start(self) -> None:
        """Put the hooks in."""
        self._view.watch()
        self._restore.append(self._view.release)
        for name, module in self._model.named_modules(remove_duplicate=False):
            self._names.setdefault(id(module), []).append(name)
        for module in self._model.modules():
            if module is self._model or "PPMissingLayer" in kinds_of(module):
                continue
            before = module.register_forward_pre_hook(self._before, with_kwargs=True)
            self._restore += [before.remove, module.register_forward_hook(self._after).remove]
        top = self._model.register_forward_pre_hook(self._enter, with_kwargs=True)
        self._restore += [top.remove, self._model.register_forward_hook(self._leave).remove]
        self._watch_products()
        self._watch_logits()

    def stop(self) -> None:
        """Take the hooks out; the rank is as it was before."""
        while self._restore:
            self._restore.pop()()

    def take(self) -> dict[str, Any]:
        """Parts in plain values (see :func:`raytest.engines.trace.part_from_reply`) and notes."""
        owner = self._map.owner()
        parts = []
        for (module, part), gathered in self._gathered.items():
            reply = gathered.reply(owner)
            if reply is not None:
                parts.append({"module": module, "part": part, **self._who(), **reply})
        notes = self._notes | self._map.notes
        if self._unmapped:
            some = ", ".join(sorted(self._unmapped)[:3])
            notes.add(f"{len(self._unmapped)} tensors have other rows than the step: {some}")
        return {"parts": parts, "notes": sorted(notes)}

    def _who(self) -> dict[str, int]:
        return {
            "rank": self._rank,
            "tensor_parallel_rank": self._tp_rank,
            "tensor_parallel_size": self._size,
            "stage": self._stage,
        }

    # one forward pass -----------------------------------------------------------------------------

    def _enter(self, _module: Any, args: Any, kwargs: Any) -> None:
        self._rows = self._last = None
        self._stack.clear()
        self._calls.clear()
        self._order = 0
        try:
            given = dict(zip(("input_ids", "positions"), args, strict=False)) | dict(kwargs)
            ids, positions = self._view.input_ids(given.get("input_ids")), given.get("positions")
            if ids is None or positions is None:
                self._notes.add(f"rank {self._rank} is not told token ids or positions")
                return
            at = _host(positions[0] if positions.ndim > 1 else positions)
            rows, self._last = self._map.step(_host(ids), at, self._view.segments())
            self._look_at(rows, positions.device)
        except HOOK_ERRORS as error:
            self._pass_over(error)

    def _leave(self, _module: Any, _args: Any, _output: Any) -> None:
        self._rows = None

    def _look_at(self, rows: StepRows, device: Any) -> None:
        self._rows = rows if len(rows.rows) else None
        self._index = torch.as_tensor(rows.rows, device=device)

    def _pass_over(self, error: BaseException) -> None:
        """A hook must not end the engine: the rest of the step goes untraced, and that is said."""
        self._rows = None
        self._notes.add(f"rank {self._rank}: {type(error).__name__}: {error}")

    def _watch_logits(self) -> None:
        """Logits are computed after the forward pass, from each request's last row."""
        compute = getattr(self._model, "compute_logits", None)
        if compute is None:
            return

        def watched(hidden: Any, *args: Any, **kwargs: Any) -> Any:
            if self._last is not None and hidden.shape[0] == self._last.width:
                self._look_at(self._last, hidden.device)
            try:
                return compute(hidden, *args, **kwargs)
            finally:
                self._rows = None

        self._model.compute_logits = watched
        self._restore.append(lambda: delattr(self._model, "compute_logits"))

    def _watch_products(self) -> None:
        """A row-parallel layer's product before its all-reduce, and the output layer's (which is
        no module call), pass through their quantisation method's ``apply``."""
        layers: dict[int, str] = {}
        methods = {}
        for module in self._model.modules():
            kinds = kinds_of(module)
            reduced = "RowParallelLinear" in kinds and module.tp_size > 1 and module.reduce_results
            if reduced or "ParallelLMHead" in kinds:
                layers[id(module)] = "partial" if reduced else "output"
                methods[id(module.quant_method)] = module.quant_method
        for method in methods.values():
            self._wrap_apply(method, layers)

    def _wrap_apply(self, method: Any, layers: dict[int, str]) -> None:
        apply = method.apply

        def watched(layer: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
            part = layers.get(id(layer))
            if part == "output":
                self._note(layer, "input", x)
            result = apply(layer, x, *args, **kwargs)
            if part is not None:
                self._note(layer, part, result)
            return result

        method.apply = watched
        self._restore.append(lambda: delattr(method, "apply"))

    # one module call ------------------------------------------------------------------------------

    def _before(self, module: Any, args: Any, kwargs: Any) -> None:
        if self._rows is not None:
            self._stack.append(self._name(module))
            self._calls[self._stack[-1]] += 1
            self._note(module, "input", (args, kwargs))

    def _after(self, module: Any, _args: Any, output: Any) -> None:
        if self._rows is not None and self._stack:
            self._note(module, "output", output)
            self._stack.pop()

    def _name(self, module: Any) -> str:
        """A module that several parents share goes by its name under the parent that called it."""
        names = self._names[id(module)]
        for caller in reversed(self._stack) if len(names) > 1 else ():
            for name in names:
                if name.startswith(f"{caller}."):
                    return name
        return names[0]

    def _note(self, module: Any, part: str, value: Any) -> None:
        if self._rows is None:
            return
        within = self._stack[-1] if self._stack else None
        name = within if within in self._names[id(module)] else self._name(module)
        assert name is not None
        called = self._calls[name]
        self._order += 1
        try:
            for i, tensor in enumerate(_tensors(value)):
                key = f"{name}#{called}" if called > 1 else name, f"{part}.{i}" if i else part
                self._keep_rows(module, key, tensor)
        except HOOK_ERRORS as error:
            self._pass_over(error)

    def _keep_rows(self, module: Any, key: tuple[str, str], tensor: Any) -> None:
        rows = self._rows
        assert rows is not None
        assert self._index is not None
        if tensor.ndim == 0 or tensor.shape[0] != rows.width:
            self._unmapped.add(f"{key[0]} ({key[1]})")
            return
        bits = bits_of(tensor.detach().index_select(0, self._index).reshape(len(rows.rows), -1))
        gathered = self._gathered.get(key)
        if gathered is None:
            gathered = self._gathered[key] = Gathered(
                kind=type(module).__name__,
                order=self._order,
                held=held(module, key[1], bits.shape[1], self._hidden),
                dtype=str(tensor.dtype).removeprefix("torch."),
                columns=bits.shape[1],
            )
        gathered.digests.append((rows, self._digester.digest(bits, gathered.held)))
        self._keep_values(key[0], gathered, rows, bits)

    def _keep_values(
        self, module: str, gathered: Gathered, rows: StepRows, bits: torch.Tensor
    ) -> None:
        wanted = self._keep.get(module, ())
        mine = [i for i, p in enumerate(rows.positions.tolist()) if p in wanted]
        size = len(mine) * bits.shape[1] * bits.element_size()
        if size > self._left_bytes:
            self._notes.add("tensors past the memory limit were left out")
        elif mine:
            self._left_bytes -= size
            positions = tuple(int(rows.positions[i]) for i in mine)
            gathered.values.append((positions, tuple(rows.owners[i] for i in mine), bits[mine]))


def _host(tensor: Any) -> npt.NDArray[np.int64]:
    return np.asarray(tensor.detach().cpu().numpy(), dtype=np.int64)


def _tensors(value: Any) -> Iterator[Any]:
    """Tensors inside tuples, lists, mappings and vLLM's ``IntermediateTensors``, in order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for member in value:
            yield from _tensors(member)
    elif isinstance(value, dict):
        for member in value.values():
            yield from _tensors(member)
    elif isinstance(getattr(value, "tensors", None), dict):
        yield from _tensors(value.tensors)
