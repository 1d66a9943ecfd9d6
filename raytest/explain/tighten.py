"""``raytest tighten``: climbs the determinism levels one at a time until the gates hold, and says
what each step costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from raytest import cluster
from raytest.configure import check_spec, target_of
from raytest.console import progress_for
from raytest.errors import ExitCode, UsageError
from raytest.explain.replay_pair import Tell
from raytest.runner import judge, run_spec, vllm_version
from raytest.seeding import LEVELS, unsupported
from raytest.spec import Gates, Placement, Spec, Trials
from raytest.store import RunFolder, new_run_id, write_json

SCHEMA = "raytest.tighten/1"
# Starts of each level's engine for its price, in turn with level 1's.
PRICE_LAUNCHES = 2
PRICE_REPEATS = 3


class Climb:
    """One climb: a run per level, and at the end one run in which their engines take turns."""

    def __init__(
        self, spec: Spec, *, source: str, address: str, results: str, base_dir: str, tell: Tell
    ) -> None:
        self.spec, self.source, self.address = spec, source, address
        self.results, self.base_dir, self.tell = results, base_dir, tell
        self.name = new_run_id(f"{spec.name[:32]}-tighten")

    def run(self) -> dict[str, Any]:
        """The document, kept beside the last level's verdict. Raises RaytestError."""
        if not self.spec.gates.stated():
            raise UsageError(
                f"{self.source}: gates: tighten climbs until the stated gates hold, and none is "
                'stated; such as gates.node = "bitwise"'
            )
        platform = self._platform()
        levels: list[dict[str, Any]] = []
        suffices: int | None = None
        for level in (x.level for x in LEVELS if x.level >= 1):
            reason = self._unsupported(level, platform)
            entry = self._refused(level, reason) if reason else self._level(level)
            levels.append(entry)
            if entry["holds"]:
                suffices = level
                break
        tried = [x["level"] for x in levels if x["supported"]]
        prices = self._prices(tried) if len(tried) > 1 else {}
        for entry in levels:
            entry["price"] = prices.get(entry["level"])
        return self._document(levels, suffices)

    def _platform(self) -> str:
        with cluster.connect(self.address, self.spec.cluster):
            inventory = cluster.take_inventory(self.spec.placement.share)
            target = target_of(inventory, vllm_version())
            check_spec(at_level(self.spec, 1), target, self.source)
            return target.platform

    def _unsupported(self, level: int, platform: str) -> str | None:
        return unsupported(level, platform) if self.spec.backend == "vllm" else None

    def _refused(self, level: int, reason: str) -> dict[str, Any]:
        self.tell(f"level {level}: not supported: {reason}")
        return {
            **_about(level),
            "supported": False,
            "reason": reason,
            "holds": False,
            "gates": [],
            "run_id": None,
        }

    def _level(self, level: int) -> dict[str, Any]:
        self.tell(f"level {level}: running {self.name}-{level}")
        folder, document = self._run(at_level(self.spec, level), f"{self.name}-{level}")
        gates = [
            {
                "axis": a["axis"],
                "result": a["result"],
                "differ": a["requests"]["compared"] - a["requests"]["bitwise"],
                "compared": a["requests"]["compared"],
            }
            for a in document["axes"]
            if a["stated"] or a["result"] in ("fails", "undecided")
        ]
        holds = document["exit_code"] == ExitCode.PASS
        self.tell(f"level {level}: {'every gate holds' if holds else _failing(gates)}")
        return {
            **_about(level),
            "supported": True,
            "reason": None,
            "holds": holds,
            "gates": gates,
            "run_id": folder.run_id,
        }

    def _run(self, spec: Spec, run_id: str) -> tuple[RunFolder, dict[str, Any]]:
        with progress_for(True) as progress:
            outcome = run_spec(
                spec,
                source=self.source,
                address=self.address,
                results=self.results,
                run_id=run_id,
                resume=False,
                base_dir=self.base_dir,
                progress=progress,
            )
        return outcome.folder, judge(outcome.folder, outcome.evaluation)

    def _prices(self, levels: Sequence[int]) -> dict[int, dict[str, Any] | None]:
        """Tokens/s of each level's engine on one slot, in turns: every level once, then every level
        again, so that a machine that grows slower slows them all."""
        self.tell(f"price: levels {', '.join(map(str, levels))} in turns on one slot")
        folder, _ = self._run(price_spec(self.spec, levels), f"{self.name}-price")
        speeds = {level: _speeds(folder, f"level-{level}") for level in levels}
        return {level: price(speeds[level], speeds[levels[0]]) for level in levels}

    def _document(self, levels: list[dict[str, Any]], suffices: int | None) -> dict[str, Any]:
        last = next((x for x in reversed(levels) if x["supported"]), None)
        if suffices is not None:
            sentence = f"level {suffices} is the cheapest that suffices: every gate holds"
        elif last is None:
            sentence = "no level is supported here"
        else:
            sentence = (
                f"no level suffices: at level {last['level']}, the highest supported, "
                f"{_failing(last['gates'])}"
            )
        document = {
            "schema": SCHEMA,
            "name": self.spec.name,
            "level": suffices,
            "sentence": sentence,
            "levels": levels,
            "exit_code": int(ExitCode.MISMATCH if suffices is None else ExitCode.PASS),
        }
        if last is not None:
            folder = RunFolder.open(f"{self.results}/{last['run_id']}")
            write_json(folder.path / "tighten.json", document)
        return document


def at_level(spec: Spec, level: int) -> Spec:
    """The same spec with every variant at ``level``."""
    return spec.model_copy(
        update={
            "determinism": spec.determinism.model_copy(update={"level": level}),
            "variants": tuple(v.model_copy(update={"level": None}) for v in spec.variants),
        }
    )


def price_spec(spec: Spec, levels: Sequence[int]) -> Spec:
    """The first variant at each level on one slot, one engine at a time, every level launched once
    before any is launched again."""
    first = spec.variants[0]
    variants = tuple(
        first.model_copy(
            update={"name": f"level-{n}", "level": n, "launches": PRICE_LAUNCHES, "scope": "one"}
        )
        for n in levels
    )
    return spec.model_copy(
        update={
            "variants": variants,
            "placement": Placement(share=spec.placement.share, devices=spec.placement.devices),
            "trials": Trials(
                repeats=PRICE_REPEATS,
                arrangements=spec.trials.arrangements[:1],
                warmup=1,
                launches=PRICE_LAUNCHES,
            ),
            "limits": spec.limits.model_copy(update={"parallel": 1}),
            "gates": Gates(),
        }
    )


def _speeds(folder: RunFolder, variant: str) -> list[float]:
    """Tokens/s of every trial of a variant."""
    cells = {c.cell_id for c in folder.plan().cells if c.variant == variant}
    found = []
    for cell_id, launch, trial in sorted(folder.finished_trials()):
        if cell_id in cells:
            table = folder.read_trial((cell_id, launch, trial), ["n_tokens", "duration_s"])
            tokens = sum(n for n in table.column("n_tokens").to_pylist() if n)
            seconds = max(table.column("duration_s").to_pylist(), default=0.0)
            if tokens and seconds > 0:
                found.append(tokens / seconds)
    return found


def price(speeds: Sequence[float], first: Sequence[float]) -> dict[str, Any] | None:
    """Median tokens/s and its ratio to level 1's median, each with least and most (trials of both,
    taken in turns, are set against each other one by one). None without a trial of both."""
    if not speeds or not first:
        return None
    ratios = [a / b for a, b in zip(speeds, first, strict=False)]
    return {
        "tokens_per_s": median(speeds),
        "least": min(speeds),
        "most": max(speeds),
        "ratio": median(ratios),
        "ratio_least": min(ratios),
        "ratio_most": max(ratios),
        "trials": len(speeds),
    }


def _about(level: int) -> dict[str, Any]:
    rung = next(x for x in LEVELS if x.level == level)
    return {"level": level, "name": rung.name, "adds": rung.adds}


def _failing(gates: Sequence[Mapping[str, Any]]) -> str:
    found = [
        f"{g['axis']} {g['result']} ({g['differ']} of {g['compared']} differ)"
        for g in gates
        if g["result"] in ("fails", "undecided")
    ]
    return ", ".join(found) or "the run is incomplete"


def lines_of(document: Mapping[str, Any]) -> list[str]:
    """A line a level, then the answer."""
    lines = []
    for x in document["levels"]:
        head = f"level {x['level']} ({x['name']}): "
        if not x["supported"]:
            lines.append(f"{head}not supported: {x['reason']}")
            continue
        gates = ", ".join(
            f"{g['axis']} {g['result']}" + (f" ({g['differ']} differ)" if g["differ"] else "")
            for g in x["gates"]
        )
        lines.append(f"{head}{gates or 'no gate was judged'}; {_price_words(x['price'])}")
    return [*lines, document["sentence"]]


def _price_words(found: Mapping[str, Any] | None) -> str:
    if found is None:
        return "price not measured"
    return (
        f"{found['tokens_per_s']:.4g} tokens/s ({found['least']:.4g} to {found['most']:.4g}), "
        f"{found['ratio']:.2f} of level 1 "
        f"({found['ratio_least']:.2f} to {found['ratio_most']:.2f}, "
        f"{found['trials']} trials)"
    )
