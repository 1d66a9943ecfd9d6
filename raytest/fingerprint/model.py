"""What a model's folder holds, by content: two nodes with the same path may hold two models."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from raytest.errors import UsageError

SAMPLED_ABOVE = 2 << 30
_BLOCK = 1 << 20
_SAMPLES = 64

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".npz")
_TOKENIZER = (
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "tekken.json",
)  # fmt: skip
_SINGLE = {
    "config": "config.json",
    "generation_config": "generation_config.json",
    "preprocessor_config": "preprocessor_config.json",
    "weights_index": "model.safetensors.index.json",
}
# What vLLM takes over from it (ModelConfig.get_diff_sampling_param).
SAMPLING_DEFAULTS = (
    "repetition_penalty", "presence_penalty", "frequency_penalty", "temperature", "top_k", "top_p",
    "min_p", "max_new_tokens",
)  # fmt: skip
_TEMPLATES = ("chat_template.jinja", "chat_template.json")


def model_fingerprint(path: str | os.PathLike[str]) -> dict[str, str]:
    """Digests of a model's files, ``model.*`` and ``tokenizer.*``; SHA-256 of their bytes.

    A file above 2 GiB is sampled: its size and 64 blocks of 1 MiB, evenly spread, the first and
    last among them. Such a value begins with ``sampled:``, as does ``model.weights``, the digest
    over all weight files. Raises UsageError where ``path`` is no readable folder.
    """
    folder = Path(path)
    try:
        files = sorted(p for p in folder.iterdir() if p.is_file())
        facts = _facts(folder, files)
    except OSError as error:
        where = error.filename or folder
        raise UsageError(f"{where}: model cannot be read: {error.strerror}") from None
    if not any(p.suffix in _WEIGHTS for p in files):
        raise UsageError(f"{folder}: no weights ({', '.join(_WEIGHTS)}) in the model's folder")
    return facts


def _facts(folder: Path, files: list[Path]) -> dict[str, str]:
    facts = {"model.path": str(folder)}
    weights = {p.name: file_digest(p) for p in files if p.suffix in _WEIGHTS}
    facts.update({f"model.weights.{name}": digest for name, digest in weights.items()})
    facts["model.weights"] = _combined(weights)
    facts["model.weights_bytes"] = str(sum(p.stat().st_size for p in files if p.suffix in _WEIGHTS))
    for key, name in _SINGLE.items():
        if (folder / name) in files:
            facts[f"model.{key}"] = file_digest(folder / name)
    defaults = generation_defaults(folder)
    facts.update({f"model.generation_config.{k}": json.dumps(v) for k, v in defaults.items()})
    tokenizer = {p.name: file_digest(p) for p in files if p.name in _TOKENIZER}
    if tokenizer:
        facts["tokenizer.files"] = _combined(tokenizer)
        facts.update({f"tokenizer.{name}": digest for name, digest in tokenizer.items()})
    template = _chat_template(folder, files)
    if template is not None:
        facts["tokenizer.chat_template"] = hashlib.sha256(template).hexdigest()
    # With trust_remote_code the model's own Python decides what is computed.
    code = {p.name: file_digest(p) for p in files if p.suffix == ".py"}
    if code:
        facts["model.code"] = _combined(code)
    return facts


def generation_defaults(folder: Path) -> dict[str, Any]:
    """Sampling defaults and stop tokens that a model's ``generation_config.json`` sets; {} where
    there is none, or none that can be read."""
    try:
        found = json.loads((folder / _SINGLE["generation_config"]).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(found, dict):
        return {}
    return {k: found[k] for k in (*SAMPLING_DEFAULTS, "eos_token_id") if found.get(k) is not None}


def file_digest(path: Path) -> str:
    """SHA-256 of a file, or ``sampled:`` and that of its size and blocks. Raises OSError."""
    size = path.stat().st_size
    digest = hashlib.sha256()
    with path.open("rb") as file:
        if size <= SAMPLED_ABOVE:
            while block := file.read(_BLOCK):
                digest.update(block)
            return digest.hexdigest()
        digest.update(str(size).encode())
        for i in range(_SAMPLES):
            file.seek((size - _BLOCK) * i // (_SAMPLES - 1))
            digest.update(file.read(_BLOCK))
    return f"sampled:{digest.hexdigest()}"


def _combined(digests: dict[str, str]) -> str:
    """One digest over names and digests; ``sampled:`` where any of them is."""
    lines = "\n".join(f"{name} {digest}" for name, digest in sorted(digests.items()))
    sampled = any(d.startswith("sampled:") for d in digests.values())
    return ("sampled:" if sampled else "") + hashlib.sha256(lines.encode()).hexdigest()


def _chat_template(folder: Path, files: list[Path]) -> bytes | None:
    """The template's own text, wherever it stands: a file of its own wins, as in transformers."""
    for name in _TEMPLATES:
        if (folder / name) in files:
            return (folder / name).read_bytes()
    config = folder / "tokenizer_config.json"
    if config not in files:
        return None
    try:
        template = json.loads(config.read_text(encoding="utf-8")).get("chat_template")
    except (ValueError, AttributeError):  # not JSON, or no object: the file's digest tells
        return None
    return None if template is None else json.dumps(template, sort_keys=True).encode()
