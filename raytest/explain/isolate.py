"""``raytest isolate``: proves which settings make two cells differ, by running again with some of
them changed. What was asked is kept in the run folder; a second call goes on from there."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict
from statistics import median
from typing import Any

from raytest import cluster
from raytest.configure import Target, configure, target_of
from raytest.digest import json_digest
from raytest.errors import ExitCode, StoreError
from raytest.explain.ask_again import Asked, Bench, Digests, recorded
from raytest.explain.closest import closest_pair
from raytest.explain.divergence import Side, find_divergence
from raytest.explain.interventions import (
    ARRANGEMENT,
    PLACEMENT,
    Change,
    Environment,
    Interventions,
    untestable,
)
from raytest.explain.minimal import (
    Answer,
    BudgetOverError,
    Ending,
    Minimal,
    expected_questions,
    minimal_set,
)
from raytest.explain.replay_pair import Tell, read_requests, require_same_cluster
from raytest.explain.run import explain_run
from raytest.plan import Cell
from raytest.runner import find_model, vllm_version
from raytest.store import RunFolder, read_json, write_json

SCHEMA = "raytest.isolate/1"
REPEATS = 3


def isolate_run(
    folder: RunFolder,
    pair: tuple[str, str] | None,
    address: str,
    tell: Tell,
    *,
    budget: int,
    dry_run: bool = False,
    axis: str | None = None,
) -> dict[str, Any]:
    """The document. Starts at most ``budget`` engines. Raises RaytestError."""
    sides = _sides(folder, pair, axis)
    if sides is None:
        return _nothing(folder, pair, "no two observations of the run differ")
    a, b = sides
    expected, differing, unstable = _expectation(folder, a, b)
    if not differing and not unstable:
        return _nothing(folder, pair, f"{a.name} and {b.name} gave the same on every request")
    study = _Study(folder, a, b, expected, budget, tell)
    if not differing or not study.changes:
        why = "their own repeats differ" if unstable else "nothing that can be set differs"
        return study.document(
            "not stable" if unstable else "nothing to change", why, Minimal(Ending.UNSURE)
        )
    if dry_run:
        return study.plan()
    return study.run(address, differing)


def _sides(
    folder: RunFolder, pair: tuple[str, str] | None, axis: str | None
) -> tuple[Side, Side] | None:
    if pair is None:
        return closest_pair(folder, axis)
    found = find_divergence(folder, pair)
    return None if found is None else (found.a, found.b)


def _expectation(folder: RunFolder, a: Side, b: Side) -> tuple[Digests, int, int]:
    """What side a gave where both are stable; how many samples differ; how many are unstable."""
    (mine, loose_a), (theirs, loose_b) = recorded(folder, a), recorded(folder, b)
    both = {key: value for key, value in mine.items() if key in theirs}
    differing = sum(value != theirs[key] for key, value in both.items())
    return both, differing, loose_a + loose_b


def _nothing(folder: RunFolder, pair: tuple[str, str] | None, why: str) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "run_id": folder.run_id,
        "pair": list(pair) if pair else None,
        "finding": "no difference found",
        "sentence": f"no difference found: {why}",
        "exit_code": int(ExitCode.PASS),
    }


class _Study:
    """One pair's questions and answers, and where they are kept."""

    def __init__(
        self, folder: RunFolder, a: Side, b: Side, expected: Digests, budget: int, tell: Tell
    ) -> None:
        self.folder, self.a, self.b, self.expected = folder, a, b, expected
        self.budget, self.tell = budget, tell
        self.spec = folder.spec()
        self.facts = tuple(_facts(folder, s) for s in (a, b))
        self.interventions = Interventions(self.spec, a, b, self._environments(), _ranking(folder))
        self.changes = self.interventions.changes
        self.not_testable = untestable(self.facts[0][1], self.facts[1][1], self.changes)
        self.starts = 0
        self.where = folder.path / "isolate" / _folder_name(a, b)
        self.asked = self._read()

    def _environments(self) -> tuple[Environment, Environment]:
        platform = self.folder.manifest.get("environment", {})
        target = Target(platform.get("platform", "cpu"), platform.get("vllm", ""))
        one, other = (
            Environment(
                configure(self.spec, s.cell, target, model_path="/", tokenizer_path="/")[1],
                self._inherited(s.cell, actor),
            )
            for s, (actor, _) in zip((self.a, self.b), self.facts, strict=True)
        )
        return one, other

    def _inherited(self, cell: Cell, actor: Mapping[str, str]) -> dict[str, str]:
        """Variables of the process as recorded, and those that the spec gives to its node."""
        env = {k.removeprefix("env."): v for k, v in actor.items() if k.startswith("env.")}
        nodes = {n.name: n.env for n in self.spec.cluster.nodes_named()}
        return {**nodes.get(cell.slot.nodes[0], {}), **env}

    # on disk --------------------------------------------------------------------------------------

    def _key(self) -> str:
        return json_digest("isolate", [asdict(c) for c in self.changes])

    def _read(self) -> dict[str, dict[str, Any]]:
        path = self.where / "asked.json"
        if not path.exists():
            return {}
        kept = read_json(path)
        if kept.get("key") != self._key():
            return {}
        # an engine that failed has answered nothing
        return {q: x for q, x in kept["asked"].items() if not x["error"]}

    def _keep(self, made: frozenset[str], again: bool, asked: Asked) -> None:
        self.asked[_question(made, again)] = {**asdict(asked), "answer": asked.answer.value}
        write_json(self.where / "asked.json", {"key": self._key(), "asked": self.asked})

    # asking ---------------------------------------------------------------------------------------

    def run(self, address: str, differing: int) -> dict[str, Any]:
        """Ask until the smallest set is known or the budget is spent."""
        model = find_model(self.spec)
        with cluster.connect(address, self.spec.cluster):
            inventory = cluster.take_inventory(self.spec.placement.share)
            target = target_of(inventory, vllm_version())
            require_same_cluster(self.folder, [self.a.cell, self.b.cell], inventory, target)
            bench = Bench(
                self.folder,
                self.spec,
                read_requests(self.folder),
                model,
                inventory,
                target,
                self.expected,
                REPEATS,
                self.facts[1][0].get("python.executable", "python"),
            )
            found = minimal_set([c.name for c in self.changes], lambda made: self._ask(bench, made))
            confirmed = self._confirm(bench, found)
        return self._conclude(found, confirmed, differing)

    def _confirm(self, bench: Bench, found: Minimal) -> Answer | None:
        """A start of its own for the set that was found; None where the budget allows none."""
        if found.ending is not Ending.FOUND:
            return None
        try:
            return self._ask(bench, frozenset(found.members), again=True)
        except BudgetOverError:
            return None

    def _ask(self, bench: Bench, made: frozenset[str], again: bool = False) -> Answer:
        question = _question(made, again)
        if question not in self.asked:
            if self.starts == self.budget:
                raise BudgetOverError
            self.starts += 1
            self._start(bench, made, again)
        return Answer(self.asked[question]["answer"])

    def _start(self, bench: Bench, made: frozenset[str], again: bool) -> None:
        """One engine start answers for both arrangements, where these are among the changes."""
        number = len(self.asked) + 1
        self.tell(f"engine start {self.starts} of at most {self.budget}: {self._words(made)}")
        wanted = self.interventions.make(made)
        sets = [made]
        if any(c.name == ARRANGEMENT for c in self.changes) and not again:
            sets.append(made ^ {ARRANGEMENT})
        trials = [self.interventions.make(s).trial for s in sets]
        answers = bench.ask(wanted, trials, f"{self.b.cell.cell_id}-{number}")
        for one, asked in zip(sets, answers, strict=True):
            self._keep(one, again, asked)
        first = answers[0]
        shown = first.error or f"{first.equal} of {first.repeats} repeats equal to {self.a.name}"
        self.tell(f"    {first.answer.value}: {shown}")

    def _words(self, made: frozenset[str]) -> str:
        if not made:
            return f"{self.b.cell.cell_id} as it was"
        names = [c.name for c in self.changes if c.name in made]
        if len(names) == len(self.changes) > 1:
            return f"all {len(names)} as {self.a.cell.cell_id} has them"
        more = f" and {len(names) - 3} more" if len(names) > 4 else ""
        shown = ", ".join(names if not more else names[:3])
        return f"{shown}{more} as {self.a.cell.cell_id} has {'it' if len(names) == 1 else 'them'}"

    # telling --------------------------------------------------------------------------------------

    def plan(self) -> dict[str, Any]:
        """``--dry-run``: what would be asked, and what it costs."""
        expected = expected_questions(len(self.changes)) + 1
        seconds = seconds_per_start(self.folder)
        cost = "" if seconds is None else f", about {expected * seconds:.0f} s"
        sentence = (
            f"{len(self.changes)} changes to try between {self.a.name} and {self.b.name}: for one "
            f"cause at most {expected} engine starts{cost}; {len(self.asked)} questions are "
            "answered already"
        )
        return {
            **self.document("planned", sentence, Minimal(Ending.OPEN), ExitCode.PASS),
            "sentence": sentence,
            "expected_engine_starts": expected,
            "seconds_per_start": seconds,
        }

    def _conclude(self, found: Minimal, confirmed: Answer | None, differing: int) -> dict[str, Any]:
        finding, why, code = _finding(found, confirmed, self.a.name, self.b.name)
        errors = [x["error"] for x in self.asked.values() if x["error"]]
        if errors and finding != "found":
            why += f"; {len(errors)} engines failed: {errors[0]}"
        document = self.document(finding, why, found, code)
        document["confirmed"] = confirmed is Answer.EQUAL
        document["differing_samples"] = differing
        if finding == "found":
            document["recipe"] = self._recipe(found)
        write_json(self.where / "isolation.json", document)
        self.folder.event("isolated", pair=document["pair"], finding=finding)
        return document

    def _recipe(self, found: Minimal) -> list[str]:
        chosen = [c for c in self.changes if c.name in found.members]
        kept = self.asked[_question(frozenset(found.members), False)]
        without = self.asked[_question(frozenset(), False)]
        theirs = ", ".join(f"{c.name} = {_value(c.b)}" for c in chosen)
        ours = ", ".join(f"{c.name} = {_value(c.a)}" for c in chosen)
        n = len(self.expected)
        return [
            f"with {ours}: equal ({kept['equal']} of {kept['repeats']} repeats, {n} results each)",
            f"with {theirs}: different ({without['differed']} of {n} results differ)",
        ]

    def document(
        self, finding: str, why: str, found: Minimal, code: ExitCode = ExitCode.INCONCLUSIVE
    ) -> dict[str, Any]:
        """``raytest.isolate/1``."""
        by_name = {c.name: c for c in self.changes}
        return {
            "schema": SCHEMA,
            "run_id": self.folder.run_id,
            "pair": [self.a.name, self.b.name],
            "finding": finding,
            "sentence": f"{finding}: {why}",
            "cause": [asdict(by_name[m]) for m in found.members],
            "undecided": list(found.undecided),
            "changes": [asdict(c) for c in self.changes],
            "not_testable": self.not_testable,
            "asked": self.asked,
            "engine_starts": self.starts,
            "budget": self.budget,
            "folder": str(self.where),
            "exit_code": int(code),
        }


def _finding(found: Minimal, confirmed: Answer | None, a: str, b: str) -> tuple[str, str, ExitCode]:
    names = ", ".join(found.members)
    if found.ending is Ending.FOUND and confirmed in (None, Answer.EQUAL):
        told = "" if confirmed else " (no engine start was left to confirm it)"
        return "found", f"{names} makes {b} differ from {a}{told}", ExitCode.PASS
    if found.ending is Ending.OPEN:
        left = ", ".join(found.undecided)
        why = f"the budget is spent; the cause is within {names}; not decided: {left}"
        return "budget spent", why, ExitCode.INCONCLUSIVE
    if found.ending is Ending.EQUAL_ALREADY:
        why = f"{b} gave this time what {a} had given, with nothing changed"
        return "not reproduced", why, ExitCode.INCONCLUSIVE
    if found.ending is Ending.NOT_ENOUGH:
        why = (
            f"with everything set as {a} has it, what {a} had given did not come again: the cause "
            "is none of what can be changed, or not deterministic"
        )
        return "not testable", why, ExitCode.INCONCLUSIVE
    why = "answers that the result rests on were not the same over repeats, or did not come"
    return "not stable", why, ExitCode.INCONCLUSIVE


def lines_of(document: Mapping[str, Any]) -> list[str]:
    """The document for a person: where a cause was found, the recipe comes first."""
    if "changes" not in document:
        return [document["sentence"]]
    lines = [*document.get("recipe", []), document["sentence"]]
    if document["finding"] == "planned":
        lines += [f"  {Change(**c).sentence}" for c in document["changes"]]
    if any(c["name"] == PLACEMENT for c in document["cause"]) or not document["cause"]:
        keys = document["not_testable"]
        if keys:
            more = f" and {len(keys) - 12} more" if len(keys) > 12 else ""
            lines.append(f"  differ too, and cannot be set alone: {', '.join(keys[:12])}{more}")
    if document["finding"] == "budget spent":
        lines.append(f"  next: raytest isolate {document['run_id']} goes on where this ended")
    if document["finding"] != "planned":
        lines.append(
            f"  {document['engine_starts']} engine starts, {len(document['changes'])} differences "
            f"that can be set; kept in {document['folder']}"
        )
    return lines


def _value(value: str | None) -> str:
    return "(unset)" if value is None else value or "(empty)"


def _question(made: frozenset[str], again: bool) -> str:
    return ("again: " if again else "") + " + ".join(sorted(made))


def _folder_name(a: Side, b: Side) -> str:
    text = f"{a.cell.cell_id}={a.trial.arrangement}--{b.cell.cell_id}={b.trial.arrangement}"
    safe = re.sub(r"[^A-Za-z0-9@._=-]+", "_", text)
    return safe if len(safe) <= 150 else f"{safe[:140]}-{json_digest('pair', text)[:8]}"


def _ranking(folder: RunFolder) -> list[str]:
    """Factors as the reading half ranks them; [] where it cannot read the run."""
    try:
        explained = explain_run(folder)
    except StoreError:
        return []
    sets = [*explained.causes, *explained.partial, *explained.labels]
    return [alike.name for s in sets for member in s.members for alike in member]


def _facts(folder: RunFolder, side: Side) -> tuple[dict[str, str], dict[str, str]]:
    """Facts of a side's actor, and of actor and first rank together, of its last attempt."""
    import pyarrow.compute as pc

    table = folder.fingerprints()
    table = table.filter(
        pc.and_(
            pc.equal(table.column("cell_id"), side.cell.cell_id),
            pc.equal(table.column("launch"), side.launch),
        )
    )
    rows = table.sort_by([("attempt", "ascending"), ("rank", "ascending")]).to_pylist()
    actor = {r["key"]: r["value"] for r in rows if r["rank"] < 0}
    return actor, {r["key"]: r["value"] for r in rows if r["rank"] <= 0}


def seconds_per_start(folder: RunFolder) -> float | None:
    """Median seconds from placing to the last trial of the run's own launches; None without."""
    from datetime import datetime

    began: dict[tuple[Any, ...], datetime] = {}
    ended: dict[tuple[Any, ...], datetime] = {}
    for event in folder.events():
        key = tuple(event.get(k) for k in ("cell_id", "launch", "attempt"))
        at = datetime.fromisoformat(event["time"])
        if event["event"] == "placed":
            began[key] = at
        elif event["event"] == "trial done":
            ended[key] = at
    spans = [(ended[k] - began[k]).total_seconds() for k in ended if k in began]
    return median(spans) if spans else None
