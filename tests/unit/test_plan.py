"""spec x inventory -> exactly the cells, slots and comparisons that a person would expect."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raytest.errors import UnavailableError, UsageError
from raytest.inventory import Device, Inventory, Node, inventory_from_json, inventory_to_json
from raytest.plan import make_plan, plan_from_json, plan_to_json
from raytest.schema import Axis
from raytest.spec import Spec
from raytest.spec_file import parse_spec


def fleet(nodes: int, gpus: int, kind: str = "gpu") -> Inventory:
    return Inventory(
        tuple(
            Node(
                f"n{n}",
                f"id{n}",
                f"host{n}",
                tuple(Device(f"n{n}", i, f"GPU-{n}-{i}", kind, "NVIDIA H200") for i in range(gpus)),
                {"zone": "a" if n % 2 == 0 else "b"},
            )
            for n in range(nodes)
        )
    )


def spec_of(*variants: str, rest: str = "") -> Spec:
    text = 'name = "x"\n[model]\npath = "synthetic:tiny"\n' + rest + "\n"
    return parse_spec(text + "".join(f"[[variants]]\n{v}\n" for v in variants), "a.toml")


TP1 = 'name = "tp1"'
TP2 = 'name = "tp2"\ntensor_parallel_size = 2'
PP2 = 'name = "pp2"\npipeline_parallel_size = 2'


def slots(spec: Spec, inventory: Inventory) -> list[str]:
    return [c.slot.name for c in make_plan(spec, inventory).cells]


def test_every_gpu_gets_one_engine() -> None:
    assert slots(spec_of(TP1), fleet(2, 2)) == ["n0:0", "n0:1", "n1:0", "n1:1"]


def test_tp2_takes_disjoint_pairs_of_a_node() -> None:
    assert slots(spec_of(TP2), fleet(1, 5)) == ["n0:0,1", "n0:2,3"]


def test_rotations_give_each_gpu_each_rank() -> None:
    spec = spec_of(TP2, rest="[placement]\nrotations = true")
    assert slots(spec, fleet(1, 2)) == ["n0:0,1", "n0:1,0"]


def test_every_node_takes_one_slot_a_node_and_one_takes_one() -> None:
    assert slots(spec_of(TP1, rest='[placement]\nscope = "every-node"'), fleet(3, 4)) == [
        "n0:0",
        "n1:0",
        "n2:0",
    ]
    assert slots(spec_of(TP1, rest='[placement]\nscope = "one"'), fleet(3, 4)) == ["n0:0"]


def test_spread_puts_tp_ranks_and_pipeline_stages_on_different_nodes() -> None:
    rest = "[placement]\nspread = true\n"
    assert slots(spec_of(TP2, rest=rest), fleet(2, 2)) == ["n0:0+n1:0", "n0:1+n1:1"]
    both = 'name = "b"\ntensor_parallel_size = 2\npipeline_parallel_size = 2'
    assert slots(spec_of(both, rest=rest), fleet(2, 2)) == ["n0:0+n0:1+n1:0+n1:1"]


def test_filters_leave_only_what_they_name() -> None:
    assert slots(spec_of(TP1, rest='[placement]\nhosts = ["host1"]'), fleet(2, 1)) == ["n1:0"]
    labels = '[placement]\nlabels = { zone = "b" }'
    assert slots(spec_of(TP1, rest=labels), fleet(4, 1)) == ["n1:0", "n3:0"]
    assert slots(spec_of(TP1, rest='[placement]\ngpu_model = "h200"'), fleet(1, 1)) == ["n0:0"]


def test_a_gpu_that_the_node_does_not_have_is_refused_by_name() -> None:
    rest = '[[placement.slots]]\nnode = "n0"\ndevices = [3]\n'
    plan = make_plan(spec_of(TP1, rest=rest), fleet(1, 2))
    with pytest.raises(UnavailableError, match=r"GPU 3 of n0, which has 2 \(0, 1\)"):
        plan.require_possible()


def test_a_variant_too_large_for_every_node_says_how_large_they_are() -> None:
    plan = make_plan(spec_of(TP1, TP2), fleet(2, 1))
    with pytest.raises(UnavailableError, match=r"variant tp2: needs 2 devices on one node.*has 1"):
        plan.require_possible()


def test_axes_are_varied_only_where_everything_else_can_be_held() -> None:
    demo = spec_of(TP1, TP2, PP2, rest='[placement]\nscope = "every-node"\n[trials]\nlaunches = 2')
    assert set(make_plan(demo, fleet(2, 2)).varied) == {
        Axis.REPEAT,
        Axis.LAUNCH,
        Axis.NODE,
        Axis.TP,
        Axis.PP,
    }
    assert Axis.GPU in make_plan(spec_of(TP1), fleet(1, 2)).varied


def test_variants_that_differ_in_more_than_tp_are_no_tp_comparison() -> None:
    other = TP2 + '\nenv = { VLLM_BATCH_INVARIANT = "1" }'
    assert Axis.TP not in make_plan(spec_of(TP1, other), fleet(1, 2)).varied
    with pytest.raises(UsageError, match=r"gates.tp: .* differ in env too: gate 'variant' instead"):
        make_plan(spec_of(TP1, other, rest='[gates]\ntp = "bitwise"'), fleet(1, 2), "a.toml")


@pytest.mark.parametrize("axis", ["launch", "arrangement", "gpu", "node", "tp", "pp", "variant"])
def test_a_gate_on_an_axis_that_never_varies_is_refused_with_advice(axis: str) -> None:
    with pytest.raises(UsageError, match=f"gates.{axis}: the plan never varies {axis}; .+"):
        make_plan(spec_of(TP1, rest=f'[gates]\n{axis} = "bitwise"'), fleet(1, 1), "a.toml")


def test_every_cell_has_a_folder_name_of_its_own() -> None:
    plan = make_plan(spec_of(TP1, TP2, PP2, rest="[placement]\nrotations = true"), fleet(3, 4))
    ids = [c.cell_id for c in plan.cells]
    assert len(set(ids)) == len(ids)
    assert all("/" not in i and not i.startswith(".") for i in ids)


def test_plan_and_inventory_read_back_as_themselves() -> None:
    inventory = fleet(2, 2)
    plan = make_plan(spec_of(TP1, TP2), inventory)
    assert plan_from_json(plan_to_json(plan)) == plan
    assert inventory_from_json(inventory_to_json(inventory)) == inventory


@given(nodes=st.integers(1, 6), gpus=st.integers(1, 8), tp=st.sampled_from([1, 2, 4]))
def test_no_device_is_in_two_slots_of_a_variant(nodes: int, gpus: int, tp: int) -> None:
    plan = make_plan(spec_of(f'name = "v"\ntensor_parallel_size = {tp}'), fleet(nodes, gpus))
    used = [d.uuid for c in plan.cells for d in c.slot.devices]
    assert len(set(used)) == len(used) == nodes * (gpus // tp) * tp
