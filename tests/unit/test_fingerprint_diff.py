"""Of two environments only what may explain a divergence comes first, and nothing is lost."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raytest.fingerprint.capture import capture
from raytest.fingerprint.diff import Difference, Group, diff, group_of, rows, significant

FACTS = {
    "env.OMP_NUM_THREADS": "1",
    "threads.torch": "1",
    "vllm.version": "0.32.0",
    "package.numpy": "2.3.0",
    "os.hostname": "n1",
    "process.pid": "12",
    "cpu.model": "Xeon",
    "gpu.3.name": "NVIDIA H200",
    "gpu.3.uuid": "GPU-a",
    "gpu.3.index": "3",
    "gpu.3.driver": "595.71.05",
    "gpu.3.temperature": "31",
    "gpu.3.ecc.uncorrected": "0",
}


def changed(**values: str | None) -> dict[str, str]:
    facts = {**FACTS, **{k.replace("__", "."): v for k, v in values.items()}}
    return {k: v for k, v in facts.items() if v is not None}


def test_equal_fingerprints_do_not_differ() -> None:
    assert diff(FACTS, dict(reversed(FACTS.items()))) == []


def test_the_most_telling_difference_comes_first_and_noise_last() -> None:
    other = changed(
        process__pid="13",
        package__numpy="2.2.0",
        vllm__version="0.31.0",
        env__OMP_NUM_THREADS="8",
        os__hostname="n2",
        threads__torch="8",
    )
    assert [d.key for d in diff(FACTS, other)] == [
        "env.OMP_NUM_THREADS",
        "threads.torch",
        "vllm.version",
        "package.numpy",
        "os.hostname",
        "process.pid",
    ]


def test_an_unset_variable_is_not_an_empty_one() -> None:
    unset, empty = changed(env__OMP_NUM_THREADS=None), changed(env__OMP_NUM_THREADS="")
    assert diff(unset, empty) == [Difference(Group.VARIABLES, "env.OMP_NUM_THREADS", None, "")]
    assert rows(diff(unset, empty)) == [("variables", "env.OMP_NUM_THREADS", "(unset)", "(empty)")]


def test_processes_on_different_gpus_of_one_kind_differ_only_in_names() -> None:
    moved = {k.replace("gpu.3.", "gpu.5."): v for k, v in FACTS.items()}
    moved.update({"gpu.5.uuid": "GPU-b", "gpu.5.index": "5", "gpu.5.temperature": "60"})
    found = diff(FACTS, moved)
    assert [(d.group, d.key) for d in found] == [
        (Group.NAMES, "gpu[0].index"),
        (Group.NAMES, "gpu[0].uuid"),
        (Group.NOISE, "gpu[0].temperature"),
    ]
    assert significant(found) == []


def test_links_are_compared_by_place_too() -> None:
    a = {"gpu.0.name": "H200", "gpu.1.name": "H200", "gpu.topology.0-1": "PIX"}
    b = {"gpu.6.name": "H200", "gpu.7.name": "H200", "gpu.topology.6-7": "SYS"}
    assert diff(a, b) == [Difference(Group.GPU, "gpu.topology[0-1]", "PIX", "SYS")]


def test_one_gpu_more_is_a_difference() -> None:
    found = diff({"gpu.0.name": "H200"}, {"gpu.0.name": "H200", "gpu.1.name": "H200"})
    assert found == [Difference(Group.GPU, "gpu[1].name", None, "H200")]


@pytest.mark.parametrize(
    ("key", "group"),
    [
        ("env.NCCL_ALGO", Group.VARIABLES),
        ("env.CUDA_VISIBLE_DEVICES", Group.NAMES),
        ("env.RAY_JOB_ID", Group.NOISE),
        ("env.RAY_CGRAPH_get_timeout", Group.VARIABLES),
        ("env.VLLM_PORT", Group.NOISE),
        ("vllm.envs.VLLM_BATCH_INVARIANT", Group.VARIABLES),
        ("vllm.version", Group.VERSIONS),
        ("torch.cudnn.benchmark", Group.SETTINGS),
        ("torch.cudnn", Group.VERSIONS),
        ("library.libnccl", Group.VERSIONS),
        ("effective.scheduler_config.max_num_seqs", Group.SETTINGS),
        ("effective.rank", Group.NAMES),
        ("seed.torch", Group.SEEDS),
        ("model.weights", Group.MODEL),
        ("tokenizer.chat_template", Group.MODEL),
        ("gpu.0.driver", Group.VERSIONS),
        ("gpu.0.name", Group.GPU),
        ("gpu.0.ecc.mode", Group.GPU),
        ("gpu.0.ecc.uncorrected", Group.HEALTH),
        ("gpu.0.clocks.current.sm", Group.NOISE),
        ("gpu.0.clocks.max.sm", Group.GPU),
        ("device.uuid", Group.NAMES),
        ("device.name", Group.GPU),
        ("package.ray", Group.PACKAGES),
        ("os.kernel", Group.NODE),
        ("memory.total", Group.NODE),
        ("memory.available", Group.NOISE),
        ("capture.failed.cpu", Group.UNREAD),
    ],
)
def test_each_kind_of_key_has_its_group(key: str, group: Group) -> None:
    assert group_of(key) is group


def test_a_group_is_named_once_where_it_begins() -> None:
    other = changed(env__OMP_NUM_THREADS="8", env__NCCL_ALGO="Ring", threads__torch="8")
    assert rows(diff(FACTS, other)) == [
        ("variables", "env.NCCL_ALGO", "(unset)", "Ring"),
        ("", "env.OMP_NUM_THREADS", "1", "8"),
        ("threads", "threads.torch", "1", "8"),
    ]


def test_two_captures_of_one_process_differ_in_nothing_significant() -> None:
    assert significant(diff(capture("before"), capture("after"))) == []


facts = st.dictionaries(st.sampled_from(sorted(FACTS)), st.sampled_from(["1", "2"]))


@given(facts, facts)
def test_no_difference_is_lost_and_none_is_made_up(a: dict[str, str], b: dict[str, str]) -> None:
    expected = {k for k in a.keys() | b.keys() if a.get(k) != b.get(k)}
    assert {d.key.replace("gpu[0]", "gpu.3") for d in diff(a, b)} == expected
    assert [(d.key, d.b, d.a) for d in diff(a, b)] == [(d.key, d.a, d.b) for d in diff(b, a)]
