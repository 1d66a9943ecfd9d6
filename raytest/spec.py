"""The spec as frozen pydantic models: what to run, where, and what must be equal."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

from raytest.engines.base import Sampling
from raytest.fingerprint.redact import is_secret_name, redact_text
from raytest.schema import Arrangement, Axis

Backend = Literal["vllm", "reference"]
Profile = Literal["strict", "eager", "as-deployed"]
Scope = Literal["every-gpu", "every-node", "one"]
GateWord = Literal["bitwise", "tokens", "may-differ", "must-differ"]

# Variables that raytest or Ray must own: a spec that sets them would undo the pin.
RESERVED_ENV = ("CUDA_VISIBLE_DEVICES", "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES")
# Times at which a run that may stop early looks at a statistical gate, the end included.
LOOKS = 4
NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._+-]{0,63}$"


def closest(word: str, options: Sequence[str]) -> str:
    """A hint for a misspelt word: the nearest option, or all of them."""
    near = difflib.get_close_matches(word, options, n=1, cutoff=0.5)
    if near:
        return f"; did you mean {near[0]!r}?"
    return f"; expected one of {', '.join(options)}" if options else ""


def refuse_secrets(values: dict[str, Any]) -> None:
    """Raise ValueError for a name that holds a secret: the run folder keeps the whole spec."""
    for name, value in values.items():
        if is_secret_name(name) or (isinstance(value, str) and redact_text(value) != value):
            raise ValueError(
                f"{name} holds a secret, which the run folder would keep; "
                "set it in the environment that Ray's nodes start from"
            )


def no_logprobs(value: Any) -> Any:
    """TOML has no null: ``logprobs = false`` asks for none."""
    if value is True:
        raise ValueError("expected false (none) or how many candidates to keep")
    return None if value is False else value


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Model(Strict):
    """``path``: a hub id, a folder, or ``synthetic:tiny|small|1b`` (made from
    ``synthetic_seed``)."""

    path: str = Field(min_length=1)
    tokenizer: str | None = None
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    max_model_len: int | None = Field(default=None, ge=16)
    trust_remote_code: bool = False
    synthetic_seed: int = 0

    @field_validator("path")
    @classmethod
    def _known_synthetic_size(cls, value: str) -> str:
        if value.startswith("synthetic:") and value[10:] not in ("tiny", "small", "1b"):
            raise ValueError("expected synthetic:tiny, synthetic:small or synthetic:1b")
        return value

    @property
    def synthetic_size(self) -> str | None:
        """``tiny``, ``small`` or ``1b`` where the model is synthetic."""
        return self.path.removeprefix("synthetic:") if self.path.startswith("synthetic:") else None


class SamplingSpec(Strict):
    """The TOML form of :class:`raytest.engines.base.Sampling`; same names, checked ranges."""

    temperature: float = Field(default=0.0, ge=0.0, le=100.0)
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    top_k: int = Field(default=0, ge=-1)
    min_p: float = Field(default=0.0, ge=0.0, le=1.0)
    max_tokens: int = Field(default=64, ge=1)
    seed: int | None = Field(default=None, ge=0, lt=2**31)
    n: int = Field(default=1, ge=1, le=64)
    logprobs: Annotated[int | None, BeforeValidator(no_logprobs)] = Field(default=5, ge=0, le=100)
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    beam_width: int = Field(default=0, ge=0, le=64)
    length_penalty: float = 1.0

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if 0.0 < self.temperature < 0.01:
            raise ValueError(
                f"temperature {self.temperature} would be raised to 0.01 by vLLM; "
                "use 0 (greedy) or at least 0.01"
            )
        if self.n > 1 and self.temperature == 0.0 and self.beam_width == 0:
            raise ValueError("n > 1 with temperature 0 gives n equal answers; set a temperature")
        return self

    def resolve(self, seed: int) -> Sampling:
        """The engine's sampling parameters; ``seed`` applies where the spec names none."""
        values = self.model_dump()
        values["seed"] = seed if self.seed is None else self.seed
        values["top_k"] = max(0, self.top_k)
        # greedy ignores these; one canonical form keeps equal workloads equal
        if self.temperature == 0.0:
            values.update(top_p=1.0, top_k=0, min_p=0.0)
        return Sampling(**values)


class Workload(Strict):
    prompts: str = Field(default="builtin:mixed", min_length=1)
    limit: int | None = Field(default=None, ge=1)
    seed_per_request: Literal["derived", "same"] = "derived"
    sampling: SamplingSpec = SamplingSpec()


class Determinism(Strict):
    """``level`` 0 to 5, see :data:`raytest.seeding.LEVELS`; ``profile`` what else is pinned."""

    level: int = Field(default=3, ge=0, le=5)
    profile: Profile = "strict"
    warn_only: bool = False
    threads: int = Field(default=1, ge=1, le=1024)


class Variant(Strict):
    """One engine configuration under test. What is unset comes from the spec's other sections."""

    name: str = Field(pattern=NAME_PATTERN)
    tensor_parallel_size: int = Field(default=1, ge=1, le=64)
    pipeline_parallel_size: int = Field(default=1, ge=1, le=64)
    dtype: Literal["auto", "bfloat16", "float16", "float32"] | None = None
    model: str | None = None
    level: int | None = Field(default=None, ge=0, le=5)
    profile: Profile | None = None
    executor: Literal["auto", "uni", "mp", "ray"] = "auto"
    engine: dict[str, Any] = {}
    env: dict[str, str] = {}
    logprobs: Annotated[int | Literal["workload"] | None, BeforeValidator(no_logprobs)] = "workload"
    launches: int | None = Field(default=None, ge=1)
    scope: Scope | None = None
    runtime_env: dict[str, Any] = {}
    fault: dict[str, Any] | None = None

    @property
    def world_size(self) -> int:
        """Devices that one engine of this variant takes."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @field_validator("env")
    @classmethod
    def _no_reserved_env(cls, value: dict[str, str]) -> dict[str, str]:
        for name in RESERVED_ENV:
            if name in value:
                raise ValueError(
                    f"{name} belongs to the placement; use [placement] slots to choose"
                )
        refuse_secrets(value)
        return value

    @field_validator("engine")
    @classmethod
    def _no_secret_argument(cls, value: dict[str, Any]) -> dict[str, Any]:
        refuse_secrets(value)
        return value

    @field_validator("runtime_env")
    @classmethod
    def _known_runtime_env(cls, value: dict[str, Any]) -> dict[str, Any]:
        allowed = {"py_executable", "pip", "uv", "conda", "working_dir", "py_modules", "image_uri"}
        for key in value:
            if key not in allowed:
                raise ValueError(f"{key!r} is not one of {', '.join(sorted(allowed))}")
        return value


class NodeSpec(Strict):
    """A virtual node of ``--address local``: its devices and the environment of its raylet."""

    name: str | None = Field(default=None, pattern=NAME_PATTERN)
    devices: int | None = Field(default=None, ge=1)
    env: dict[str, str] = {}
    labels: dict[str, str] = {}

    @field_validator("env")
    @classmethod
    def _no_secret(cls, value: dict[str, str]) -> dict[str, str]:
        refuse_secrets(value)
        return value


class Cluster(Strict):
    """Only for ``--address local``: how many virtual nodes, and devices on each."""

    nodes: Annotated[tuple[NodeSpec, ...], Field(min_length=1, max_length=64)] = (NodeSpec(),)
    devices_per_node: int = Field(default=2, ge=1, le=1024)

    @field_validator("nodes", mode="before")
    @classmethod
    def _count_or_list(cls, value: Any) -> Any:
        return [{}] * value if type(value) is int and 0 < value <= 64 else value

    def nodes_named(self) -> tuple[NodeSpec, ...]:
        """The virtual nodes with every field set, named ``node-0`` … where the spec names none."""
        return tuple(
            n.model_copy(
                update={
                    "name": n.name or f"node-{i}",
                    "devices": n.devices or self.devices_per_node,
                }
            )
            for i, n in enumerate(self.nodes)
        )


class SlotSpec(Strict):
    """Explicit devices: ``node`` name and device indices in rank order, for the named variants."""

    node: str = Field(min_length=1)
    devices: tuple[int, ...] = Field(min_length=1)
    variants: tuple[str, ...] = ()


class Placement(Strict):
    scope: Scope = "every-gpu"
    spread: bool = False
    rotations: bool = False
    share: int = Field(default=1, ge=1, le=16)
    devices: Literal["auto", "gpu", "cpu"] = "auto"
    slots: tuple[SlotSpec, ...] = ()
    hosts: tuple[str, ...] = ()
    labels: dict[str, str] = {}
    gpu_model: str | None = None


class Trials(Strict):
    launches: int = Field(default=1, ge=1, le=1000)
    repeats: int = Field(default=2, ge=1, le=10000)
    arrangements: tuple[Arrangement, ...] = (Arrangement.BATCH,)
    warmup: int = Field(default=1, ge=0, le=10)
    replay: bool = False
    until: Literal["all", "decided"] = "all"

    @field_validator("arrangements")
    @classmethod
    def _distinct(cls, value: tuple[Arrangement, ...]) -> tuple[Arrangement, ...]:
        if not value or len(set(value)) != len(value):
            raise ValueError("expected one or more different arrangements")
        return value


class Limits(Strict):
    """Time limits in seconds, and how often a launch that died is tried again."""

    start_s: float = Field(default=900.0, gt=0)
    trial_s: float = Field(default=1800.0, gt=0)
    deadline_s: float | None = Field(default=None, gt=0)
    place_s: float = Field(default=120.0, gt=0)
    retries: int = Field(default=1, ge=0, le=10)
    parallel: int | None = Field(default=None, ge=1)


class Thresholds(Strict):
    """A gate as bounds. ``tokens``: least share of requests with equal tokens (exact-match rate);
    ``agreement``: least mean share of tokens before the first divergence; ``near_tie_margin``:
    largest top-1/top-2 margin (nats) at which a flip still counts as a tie; ``top_overlap``: least
    mean overlap of the candidates; ``importance_ratio``: x, where 98% of the ratios must lie
    between 1/x and x; the others are largest allowed values (nats; units in the last place of the
    model's dtype for ``max_logit_residual_ulp``; first divergences per token at risk for
    ``flip_hazard``)."""

    tokens: float | None = Field(default=None, ge=0, le=1)
    bitwise: float | None = Field(default=None, ge=0, le=1)
    agreement: float | None = Field(default=None, ge=0, le=1)
    near_tie_margin: float | None = Field(default=None, ge=0)
    max_logprob_difference: float | None = Field(default=None, ge=0)
    mean_logprob_difference: float | None = Field(default=None, ge=0)
    p99_logprob_difference: float | None = Field(default=None, ge=0)
    max_logit_residual_ulp: float | None = Field(default=None, ge=0)
    k1_kl: float | None = Field(default=None, ge=0)
    k3_kl: float | None = Field(default=None, ge=0)
    importance_ratio: float | None = Field(default=None, ge=1)
    top_overlap: float | None = Field(default=None, ge=0, le=1)
    flip_hazard: float | None = Field(default=None, ge=0)
    confidence: float | None = Field(default=None, gt=0.5, lt=1)

    @model_validator(mode="after")
    def _demands_something(self) -> Self:
        if all(v is None for k, v in self.model_dump().items() if k != "confidence"):
            raise ValueError("a gate needs at least one bound")
        return self


Gate = GateWord | Thresholds


class Gates(Strict):
    """The contract per axis; an axis without one gets the default of its expected-equality
    class. ``baseline`` names a saved run that the results must agree with (by gate ``run``)."""

    repeat: Gate | None = None
    launch: Gate | None = None
    arrangement: Gate | None = None
    gpu: Gate | None = None
    node: Gate | None = None
    tp: Gate | None = None
    pp: Gate | None = None
    variant: Gate | None = None
    run: Gate | None = None
    baseline: str | None = None

    @field_validator(*Axis, mode="before")
    @classmethod
    def _word_or_table(cls, value: Any) -> Any:
        words = get_args(GateWord)
        if isinstance(value, str) and value not in words:
            raise ValueError(
                f"expected one of {', '.join(words)} or a table of bounds{closest(value, words)}"
            )
        if not isinstance(value, str | dict | Thresholds | None):
            raise ValueError(f"expected one of {', '.join(words)} or a table of bounds")
        return Thresholds.model_validate(value) if isinstance(value, dict) else value

    def stated(self) -> dict[Axis, Gate]:
        """Only the gates that the spec states."""
        return {axis: gate for axis in Axis if (gate := getattr(self, axis.value)) is not None}


class Spec(Strict):
    name: str = Field(pattern=NAME_PATTERN)
    description: str = ""
    seed: int = Field(default=42, ge=0, lt=2**31)
    backend: Backend = "vllm"
    model: Model
    workload: Workload = Workload()
    determinism: Determinism = Determinism()
    variants: Annotated[tuple[Variant, ...], Field(min_length=1)]
    cluster: Cluster = Cluster()
    placement: Placement = Placement()
    trials: Trials = Trials()
    limits: Limits = Limits()
    gates: Gates = Gates()

    @field_validator("variants")
    @classmethod
    def _distinct_names(cls, value: tuple[Variant, ...]) -> tuple[Variant, ...]:
        names = [v.name for v in value]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"two variants are named {name!r}")
        return value

    @model_validator(mode="after")
    def _slots_name_variants(self) -> Self:
        names = {v.name for v in self.variants}
        for i, slot in enumerate(self.placement.slots):
            for name in slot.variants:
                if name not in names:
                    raise ValueError(
                        f"placement.slots.{i}.variants: {name!r} is no variant"
                        f"{closest(name, sorted(names))}"
                    )
        return self

    def level(self, variant: Variant) -> int:
        """The determinism level that ``variant`` runs at."""
        return self.determinism.level if variant.level is None else variant.level

    def profile(self, variant: Variant) -> Profile:
        """The profile that ``variant`` runs under."""
        return self.determinism.profile if variant.profile is None else variant.profile

    def judged_gates(self) -> dict[Axis, Gate]:
        """The gates that the spec states; where a run may stop early, each look at a statistical
        one has its share of the error that its confidence allows (Bonferroni)."""
        gates = self.gates.stated()
        if self.trials.until != "decided":
            return gates
        return {
            axis: gate
            if not isinstance(gate, Thresholds) or gate.confidence is None
            else gate.model_copy(update={"confidence": 1 - (1 - gate.confidence) / LOOKS})
            for axis, gate in gates.items()
        }

    def logprobs(self, variant: Variant) -> int | None:
        """k of the top-k logprobs that ``variant`` keeps (None: none)."""
        if variant.logprobs == "workload":
            return self.workload.sampling.logprobs
        return variant.logprobs
