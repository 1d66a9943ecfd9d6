"""What a variant's engine would really be started with is what is checked."""

from __future__ import annotations

from pathlib import Path

import pytest

from raytest.configure import Target, check_spec, configure
from raytest.errors import UsageError
from raytest.plan import make_plan
from raytest.seeding import THREAD_VARIABLES
from raytest.spec_file import parse_spec
from tests.support.make_run import inventory

SPEC = """
name = "t"
[model]
path = "synthetic:tiny"
[determinism]
profile = "{profile}"
[[variants]]
name = "a"
{variant}
"""
CUDA = Target("cuda", "0.32.0")


def check(profile: str, variant: str, target: Target = CUDA) -> None:
    check_spec(
        parse_spec(SPEC.format(profile=profile, variant=variant), "s.toml"), target, "s.toml"
    )


GRAPHS = 'engine = { compilation_config = { cudagraph_mode = "FULL" } }'


def test_a_setting_that_the_profile_makes_void_is_refused() -> None:
    with pytest.raises(UsageError, match=r"variants\.a: .*cudagraph_mode 'FULL' has no effect"):
        check("strict", GRAPHS)
    with pytest.raises(UsageError, match="enforce_eager"):
        check("eager", GRAPHS)
    check("as-deployed", GRAPHS)


def test_the_variant_overrules_the_profile() -> None:
    engine = 'engine = { enforce_eager = false, compilation_config = { cudagraph_mode = "FULL" } }'
    check("strict", engine)


def test_what_profiles_and_levels_set_themselves_is_accepted() -> None:
    for profile in ("strict", "eager", "as-deployed"):
        for target in (CUDA, Target("cuda", "0.26.0"), Target("cpu", "0.32.0")):
            check(profile, "", target)


def test_a_variable_that_this_vllm_ignores_is_refused_with_the_right_name() -> None:
    with pytest.raises(UsageError, match=r"VLLM_ATTENTION_BACKEND.*attention_backend"):
        check("strict", 'env = { VLLM_ATTENTION_BACKEND = "FLASH_ATTN" }')


@pytest.mark.parametrize(
    ("variant", "threads"),
    [
        ("", ["1", "1", "1"]),
        ('env = { OMP_NUM_THREADS = "2" }', ["2", "2", "2"]),
        ('env = { OMP_NUM_THREADS = "2", MKL_NUM_THREADS = "4" }', ["2", "4", "2"]),
    ],
)
def test_a_variants_threads_count_for_every_library_unless_it_says_otherwise(
    variant: str, threads: list[str]
) -> None:
    spec = parse_spec(SPEC.format(profile="strict", variant=variant), "s.toml")
    (cell, *_) = make_plan(spec, inventory(1, 1)).cells
    _, env = configure(spec, cell, CUDA, model_path="/m", tokenizer_path="/m")
    assert [env[name] for name in THREAD_VARIABLES] == threads


PUBLISHED = sorted((Path(__file__).parents[2] / "results").glob("*.toml"))


@pytest.mark.parametrize("path", PUBLISHED, ids=lambda p: p.stem)
def test_a_spec_of_a_published_result_can_be_run_again(path: Path) -> None:
    target = Target("cuda", "0.26.0") if path.name.startswith("h200") else Target("cpu", "0.32.0")
    check_spec(parse_spec(path.read_text(), path.name), target, path.name)
