"""A spec is refused before anything starts, with the file, the key and what would be right."""

from __future__ import annotations

from pathlib import Path

import pytest

from raytest.errors import UsageError
from raytest.presets import preset_names, preset_text
from raytest.schema import Axis
from raytest.spec import Spec, Thresholds
from raytest.spec_file import load_spec, parse_spec

BASE = """
name = "x"
[model]
path = "synthetic:tiny"
[[variants]]
name = "tp1"
"""


def refusal(extra: str, *overrides: str) -> str:
    with pytest.raises(UsageError) as caught:
        parse_spec(BASE + extra, "a.toml", overrides)
    return str(caught.value)


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ("[trials]\nrepeets = 3", "a.toml: trials.repeets: unknown key; did you mean 'repeats'?"),
        ('[gates]\ntpp = "bitwise"', "a.toml: gates.tpp: unknown key; did you mean 'tp'?"),
        ("[gates]\ntp = { tokns = 0.9 }", "a.toml: gates.tp.tokns: unknown key"),
        ("[gates]\ntp = { tokens = 1.9 }", "a.toml: gates.tp.tokens: should be less than"),
        ("[gates]\ntp = {}", "a gate needs at least one bound"),
        ("[gates]\ntp = 3", "a.toml: gates.tp: expected one of bitwise, tokens"),
        ("[workload]\nsampling = { max_tokns = 3 }", "workload.sampling.max_tokns: unknown key"),
        ("[workload]\nsampling = { temperature = 0.005 }", "would be raised to 0.01"),
        ("[workload]\nsampling = { n = 4 }", "n equal answers"),
        ("[cluster]\nnodes = 0", "a.toml: cluster.nodes"),
        ('[cluster]\nnodes = [{ nam = "a" }]', "cluster.nodes.0.nam: unknown key"),
        ('[[variants]]\nname = "tp1"', "two variants are named 'tp1'"),
        ('[[variants]]\nname = "b"\nenv = { CUDA_VISIBLE_DEVICES = "1" }', "placement"),
        (
            '[[placement.slots]]\nnode = "n"\ndevices = [0]\nvariants = ["tp9"]',
            "'tp9' is no variant",
        ),
        ("x = ", "a.toml: not valid TOML"),
    ],
)
def test_a_mistake_is_named_with_file_key_and_what_would_be_right(extra: str, said: str) -> None:
    assert said in refusal(extra)


def test_a_misspelt_word_names_the_closest_right_one() -> None:
    assert "did you mean 'bitwise'?" in refusal('[gates]\ntp = "bitwize"')
    assert "did you mean 'batch'?" in refusal('[trials]\narrangements = ["batsh"]')
    assert "did you mean 'every-gpu'?" in refusal('[placement]\nscope = "every"')


def test_all_mistakes_are_told_at_once() -> None:
    said = refusal("[trials]\nrepeets = 3\n[limits]\nretrys = 1").splitlines()
    assert len(said) == 2


def test_an_unknown_synthetic_size_names_the_ones_there_are() -> None:
    with pytest.raises(UsageError, match="synthetic:tiny, synthetic:small or synthetic:1b"):
        parse_spec(BASE.replace("tiny", "huge"), "a.toml")


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("trials.repeats=7", lambda s: s.trials.repeats == 7),
        ("model.path=synthetic:small", lambda s: s.model.path == "synthetic:small"),
        ("variants.tp1.env.X=1", lambda s: False),
        ('variants.tp1.env.X="1"', lambda s: s.variants[0].env == {"X": "1"}),
        ("variants.0.tensor_parallel_size=2", lambda s: s.variants[0].tensor_parallel_size == 2),
        ('gates.repeat="tokens"', lambda s: s.gates.repeat == "tokens"),
    ],
)
def test_overrides_reach_the_key_they_name(override: str, value: object) -> None:
    if "X=1" in override:
        assert "variants.0.env.X" in refusal("", override)
        return
    assert value(parse_spec(BASE, "a.toml", (override,)))  # type: ignore[operator]


@pytest.mark.parametrize("override", ["trials.repeats", "=3", "variants.tp9.env.X=1", "name.x=1"])
def test_an_override_that_fits_nothing_is_refused(override: str) -> None:
    assert "--set" in refusal("", override)


def test_gates_are_words_or_bounds() -> None:
    spec = parse_spec(BASE + '[gates]\nrepeat = "bitwise"\ntp = { tokens = 0.9 }', "a.toml")
    assert spec.gates.stated() == {Axis.REPEAT: "bitwise", Axis.TP: Thresholds(tokens=0.9)}


def test_the_resolved_spec_reads_back_as_itself() -> None:
    spec = parse_spec(preset_text("demo"), "demo")
    assert Spec.model_validate(spec.model_dump(mode="json")) == spec


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_is_a_valid_spec_of_its_own_name(name: str) -> None:
    assert parse_spec(preset_text(name), name).name == name


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda p: None, "no such spec"),
        (lambda p: p.mkdir(), "is a folder"),
        (lambda p: p.write_bytes(b"\xff\xfe"), "not UTF-8"),
    ],
)
def test_an_unreadable_file_is_one_line(tmp_path: Path, make: object, said: str) -> None:
    path = tmp_path / "s.toml"
    make(path)  # type: ignore[operator]
    with pytest.raises(UsageError, match=said):
        load_spec(path)


def test_greedy_sampling_has_one_canonical_form() -> None:
    spec = parse_spec(BASE + "[workload]\nsampling = { top_p = 0.5, top_k = 7 }", "a.toml")
    plain = parse_spec(BASE, "a.toml")
    assert spec.workload.sampling.resolve(1) == plain.workload.sampling.resolve(1)


def test_a_secret_is_refused_in_one_line_that_does_not_repeat_it() -> None:
    said = refusal('[[variants]]\nname = "b"\nenv = { HF_TOKEN = "hf_abcdefghijklmnop" }')
    assert len(said.splitlines()) == 1
    assert "HF_TOKEN holds a secret" in said
    assert "hf_abcdefghijklmnop" not in said
