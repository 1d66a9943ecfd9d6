"""The factor table: everything recorded that could explain why workers differ, a value per worker.

From the plan (variant, sizes, slot), the spec (what the variants set), the inventory (GPU model,
labels) and the fingerprints of every process. Values of the ranks of one engine are folded into one
where they agree in every launch; else each rank has a factor of its own, and all together one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from raytest.compare.observed import Member
from raytest.explain.tables import Factor, Role
from raytest.fingerprint.diff import Group, by_position, group_of
from raytest.fingerprint.gpu import VOLATILE_PREFIXES
from raytest.plan import family_settings
from raytest.store import RunFolder

if TYPE_CHECKING:
    import pyarrow as pa

ABSENT = "not set"
Process = tuple[str, int, int]
Values = Mapping[str, Mapping[int, str]]

_DEVICE = re.compile(r"gpu\[(\d+)\]\.(.+)")
_GPU_HEALTH = ("throttle_reasons", "pcie.current.")
_IDENTITY = re.compile(
    r"(^|[._])(uuid|serial|bus_id|pid|node_id|machine_id|boot_id)$|^rank(\.|$)|^effective\.rank$"
)


def factors_of(folder: RunFolder, members: Sequence[Member]) -> list[Factor]:
    """Every recorded factor of the workers ``members``. Raises StoreError for damaged files."""
    rows = [(m.cell.cell_id, m.launch) for m in members]
    settings = _settings(folder)
    labels = {
        n["name"]: n.get("labels", {})
        for n in folder.manifest.get("inventory", {}).get("nodes", ())
    }
    planned = [
        {**_planned(m, labels.get(m.cell.slot.nodes[0], {})), **settings[m.cell.variant]}
        for m in members
    ]
    columns: dict[str, list[str]] = {}
    for key in sorted({k for facts in planned for k in facts}):
        columns[key] = [facts.get(key, ABSENT) for facts in planned]
    factors = [_factor(name, values, *_planned_role(name)) for name, values in columns.items()]
    table = folder.fingerprints()
    constant = _constant(table, len(set(rows)))
    recorded = _columns(_launches(_without(table, constant.keys())))
    recorded |= {key: dict.fromkeys(rows, value) for key, value in constant.items()}
    for name, by_launch in recorded.items():
        role = _recorded_role(name)
        if role is not None:
            values = [by_launch.get(row, ABSENT) for row in rows]
            factors.append(_factor(name, values, *role))
    return factors


def _factor(name: str, values: Sequence[str], role: Role, rank: int) -> Factor:
    import numpy as np

    levels: dict[str, int] = {}
    codes = np.array([levels.setdefault(v, len(levels)) for v in values], dtype=np.int64)
    return Factor(name, role, codes, tuple(levels), rank)


def _planned(member: Member, labels: Mapping[str, str]) -> dict[str, str]:
    """What the plan, the spec and the inventory say of one worker."""
    cell, devices = member.cell, member.cell.slot.devices
    return {
        "variant": cell.variant,
        "tensor_parallel_size": str(cell.tensor_parallel_size),
        "pipeline_parallel_size": str(cell.pipeline_parallel_size),
        "arrangement": member.trial.arrangement.value,
        "launch": str(member.launch),
        "node": cell.slot.node,
        "slot": cell.slot.name,
        "device index": cell.slot.local,
        "GPU UUID": _each(d.uuid for d in devices),
        "GPU model": _each(d.model or d.kind for d in devices),
        "nodes of the slot": str(len(cell.slot.nodes)),
        **{f"label {k}": str(v) for k, v in labels.items()},
    }


def _settings(folder: RunFolder) -> dict[str, dict[str, str]]:
    """What the spec sets for each variant, flat."""
    spec = folder.spec()
    found = {}
    for variant in spec.variants:
        flat: dict[str, str] = {"spec executor": variant.executor}
        for name, value in family_settings(spec, variant).items():
            inner = value if isinstance(value, Mapping) else {"": value}
            flat |= {f"spec {name} {k}".strip(): str(v) for k, v in inner.items()}
        found[variant.name] = flat
    return found


def _each(values: Iterable[str]) -> str:
    return " + ".join(dict.fromkeys(values))


# Of what the plan says, what is no setting of the engine.
_PLANNED: Mapping[str, Role] = {
    "arrangement": Role.PASS,
    "launch": Role.PASS,
    "variant": Role.LABEL,
    "node": Role.LABEL,
    "device index": Role.LABEL,
    "slot": Role.IDENTITY,
    "GPU UUID": Role.IDENTITY,
}


def _planned_role(name: str) -> tuple[Role, int]:
    label = Role.LABEL if name.startswith("label ") else Role.SETTING
    if name == "label ray.io/node-id":
        return Role.IDENTITY, 0
    return _PLANNED.get(name, label), 0


def _recorded_role(name: str) -> tuple[Role, int] | None:
    """Role and rank of a fingerprint's key; None where it changes while nothing is wrong."""
    group = _group(name.split("[rank ")[0])
    if group is Group.NOISE:
        return None
    rank = 1 + list(Group).index(group)
    if name.startswith("os.hostname"):
        return Role.LABEL, rank
    if group is Group.NAMES or _IDENTITY.search(name.split("[")[0]):
        return Role.IDENTITY, rank
    return (Role.STATE if group is Group.HEALTH else Role.SETTING), rank


def _group(key: str) -> Group:
    if key.startswith("gpu."):
        fact = key.removeprefix("gpu.")
        if fact.startswith(_GPU_HEALTH):
            return Group.HEALTH
        if fact.startswith(VOLATILE_PREFIXES):
            return Group.NOISE
        if fact not in ("count", "topology"):
            return group_of(f"gpu[0].{fact}")
    return Group.SETTINGS if key.startswith(("engine.", "reference.")) else group_of(key)


def _constant(table: pa.Table, n_launches: int) -> dict[str, str]:
    """Keys that every launch has with one value: most of them, and quick to tell in Arrow. (Those
    of GPUs are renamed, and a second attempt may lack some: neither is told here.)"""
    import pyarrow as pa
    import pyarrow.compute as pc

    if not table.num_rows or pc.max(table.column("attempt")).as_py() > 0:
        return {}
    launch = pc.binary_join_element_wise(
        table.column("cell_id"), table.column("launch").cast(pa.string()), "/"
    )
    grouped = table.select(["key", "value"]).append_column("of", launch)
    grouped = grouped.group_by("key").aggregate(
        [("value", "count_distinct"), ("value", "min"), ("of", "count_distinct")]
    )
    same = grouped.filter(
        pc.and_(
            pc.equal(grouped.column("value_count_distinct"), 1),
            pc.equal(grouped.column("of_count_distinct"), n_launches),
        )
    )
    pairs = zip(*(same.column(c).to_pylist() for c in ("key", "value_min")), strict=True)
    return {key: value for key, value in pairs if not key.startswith("gpu.")}


def _without(table: pa.Table, keys: Iterable[str]) -> pa.Table:
    import pyarrow as pa
    import pyarrow.compute as pc

    left_out = pc.is_in(table.column("key"), pa.array(sorted(keys), pa.string()))
    return table.filter(pc.invert(left_out))


def _launches(table: pa.Table) -> dict[tuple[str, int], dict[str, dict[int, str]]]:
    """Per launch and key the value of each rank (of each GPU, for keys of GPUs).

    Only the last attempt counts. The actor speaks for what no rank has recorded, and for the GPUs,
    all of which it sees.
    """
    columns = {name: table.column(name).to_pylist() for name in table.column_names}
    processes: dict[tuple[str, int], dict[Process, dict[str, str]]] = {}
    facts: dict[str, str] = {}
    last: tuple[str, int, int, int] | None = None
    for cell, launch, attempt, rank, key, value in zip(
        *(columns[c] for c in ("cell_id", "launch", "attempt", "rank", "key", "value")),
        strict=True,
    ):
        place = cell, launch, attempt, rank
        if place != last:  # a process' rows follow each other
            own = processes.setdefault((cell, launch), {})
            facts, last = own.setdefault((cell, attempt, rank), {}), place
        facts[key] = value
    return {key: _launch(own) for key, own in processes.items()}


def _launch(processes: Mapping[Process, Mapping[str, str]]) -> dict[str, dict[int, str]]:
    last = max(attempt for _, attempt, _ in processes)
    ranks = {rank: facts for (_, attempt, rank), facts in processes.items() if attempt == last}
    values: dict[str, dict[int, str]] = {}
    for rank in sorted(ranks):
        for key, value in by_position(ranks[rank]).items():
            device = _DEVICE.fullmatch(key) if key.startswith("gpu[") else None
            if device:
                # the actor is the first, and sees every GPU of the slot on its node
                values.setdefault(f"gpu.{device[2]}", {}).setdefault(int(device[1]), value)
            elif rank < 0:
                values[key] = {rank: value}
            else:
                values.setdefault(key, {}).pop(-1, None)
                values[key][rank] = value
    return values


def _columns(launches: Mapping[tuple[str, int], Values]) -> dict[str, dict[tuple[str, int], str]]:
    """One column a key, and one a rank where the ranks of some engine differ; an engine without
    that rank has the value of its first there, so that its size makes no difference."""
    columns: dict[str, dict[tuple[str, int], str]] = {}
    apart: dict[str, int] = {}
    for row, values in launches.items():
        for key, by_rank in values.items():
            if len(by_rank) == 1:
                (columns.setdefault(key, {})[row],) = by_rank.values()
                continue
            distinct = sorted(set(by_rank.values()))
            columns.setdefault(key, {})[row] = " + ".join(distinct)
            if len(distinct) > 1:
                apart[key] = max(apart.get(key, 0), *by_rank)
    for key, ranks in apart.items():
        for rank in range(ranks + 1):
            columns[f"{key}[rank {rank}]"] = {
                row: values[key].get(rank, values[key][min(values[key])])
                for row, values in launches.items()
                if key in values
            }
    return columns
