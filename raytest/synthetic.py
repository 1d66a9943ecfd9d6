"""A small random-weight model and its tokenizer, made from a seed: the same bytes on every machine.

Weights come from integer arithmetic alone (SHA-256 keys a Philox counter; sums of uniform 16-bit
integers approximate a normal distribution), so neither the processor's vector width nor a library's
float routines can change a bit.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raytest.errors import UsageError
from raytest.fingerprint.model import file_digest
from raytest.synthetic_weights import (
    DTYPES,
    SHAPES,
    STANDARD_DEVIATION,
    VERSION,
    VOCABULARY,
    Shape,
    split_into_files,
    tensor_shapes,
    write_safetensors,
)
from raytest.vocabulary import write_tokenizer

MANIFEST = "raytest-model.json"


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What was written: ``digest`` is over the bytes of every file."""

    path: str
    size: str
    seed: int
    parameters: int
    digest: str


def write_model(
    path: str | Path, size: str = "tiny", seed: int = 0, dtype: str = "bfloat16"
) -> ModelInfo:
    """Write a Qwen3-architecture checkpoint (safetensors), its tokenizer and configuration.

    The folder appears whole or not at all. Raises UsageError for an unknown size or dtype, a folder
    that is not empty, or a disk that refuses.
    """
    _check(size, dtype)
    target = Path(path).expanduser().absolute()
    temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        _refuse_used(target)
        temporary.mkdir(parents=True)
        parameters = _write_files(temporary, SHAPES[size], seed, dtype)
        digests = model_digest(temporary, full=True)
        digest = hashlib.sha256(json.dumps(digests, sort_keys=True).encode()).hexdigest()
        manifest = {"version": VERSION, "size": size, "seed": seed, "files": digests}
        (temporary / MANIFEST).write_text(json.dumps(manifest, indent=1, sort_keys=True))
        # takes the place of an empty folder; fails where another process has filled it meanwhile
        os.rename(temporary, target)
    except OSError as error:
        raise UsageError(f"{target}: cannot be written: {error.strerror}") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return ModelInfo(str(target), size, seed, parameters, digest)


def ensure_model(size: str, seed: int = 0, cache: str | Path | None = None) -> Path:
    """Path of the model in the user's cache, made (or made again where damaged) if need be.

    ``size`` may be written as in a spec (``synthetic:tiny``). ``cache`` is by default
    ``$XDG_CACHE_HOME/raytest/models``. Processes that ask at the same time make it once. Raises
    UsageError for an unknown size or a cache that cannot be written.
    """
    size = size.removeprefix("synthetic:")
    _check(size, "bfloat16")
    path = cached_model(size, seed, cache)
    if _intact(path):
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _one_at_a_time(path.parent):
            if not _intact(path):
                _replace(path, size, seed)
    except OSError as error:
        raise UsageError(f"{path}: cannot be written: {error.strerror}") from None
    return path


def cached_model(size: str, seed: int, cache: str | Path | None = None) -> Path:
    """Where :func:`ensure_model` keeps the model; it need not be there yet."""
    root = Path(cache) if cache is not None else _cache_root()
    return root / f"{size}-{seed}-v{VERSION}"


def model_digest(path: str | Path, *, full: bool = False) -> dict[str, str]:
    """SHA-256 of every file of a model folder but raytest's own manifest, by file name.

    A file above 2 GiB is sampled and its value begins with ``sampled:``, unless ``full``. Raises
    OSError.
    """
    files = [f for f in sorted(Path(path).iterdir()) if f.is_file() and f.name != MANIFEST]
    return {f.name: _full_digest(f) if full else file_digest(f) for f in files}


def _full_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _check(size: str, dtype: str) -> None:
    if size not in SHAPES:
        raise UsageError(f"size {size!r}: expected one of {', '.join(SHAPES)}")
    if dtype not in DTYPES:
        raise UsageError(f"dtype {dtype!r}: expected one of {', '.join(DTYPES)}")


def _refuse_used(target: Path) -> None:
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UsageError(f"{target}: exists and is not empty")
    if target == Path.cwd():
        raise UsageError(f"{target}: is the folder you are in; name a new one")


def _replace(path: Path, size: str, seed: int) -> None:
    """Make the cached model; what is damaged, or was left by a killed process, goes first."""
    for leftover in path.parent.glob(f".{path.name}.*.tmp"):
        shutil.rmtree(leftover, ignore_errors=True)
    if path.is_dir():
        aside = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
        os.rename(path, aside)
        shutil.rmtree(aside, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
    try:
        write_model(path, size, seed)
    except UsageError:
        # without a lock another process may have been faster; its bytes are the same
        if not _intact(path):
            raise


@contextmanager
def _one_at_a_time(folder: Path) -> Iterator[None]:
    """Hold the folder for this process; where the file system knows no locks, go on without."""
    import fcntl

    handle = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _cache_root() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "raytest" / "models"


def _intact(path: Path) -> bool:
    """Whether the folder's files are those its manifest was written for, by content."""
    try:
        manifest = json.loads((path / MANIFEST).read_bytes())
        return bool(
            manifest["version"] == VERSION and manifest["files"] == model_digest(path, full=True)
        )
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _write_files(folder: Path, shape: Shape, seed: int, dtype: str) -> int:
    tensors = list(tensor_shapes(shape))
    config = _configuration(shape, dtype)
    (folder / "config.json").write_text(json.dumps(config, indent=1, sort_keys=True))
    generation = {"bos_token_id": 0, "eos_token_id": 1, "do_sample": False}
    (folder / "generation_config.json").write_text(json.dumps(generation, sort_keys=True))
    write_tokenizer(folder, VOCABULARY, seed)
    files = split_into_files(tensors, DTYPES[dtype][1])
    index: dict[str, str] = {}
    for number, part in enumerate(files, start=1):
        name = "model.safetensors"
        if len(files) > 1:
            name = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        write_safetensors(folder / name, part, seed, dtype)
        index.update({tensor: name for tensor, _ in part})
    total = sum(math.prod(s) for _, s in tensors)
    if len(files) > 1:
        size = {"total_size": DTYPES[dtype][1] * total}
        document = {"metadata": size, "weight_map": index}
        (folder / "model.safetensors.index.json").write_text(json.dumps(document, sort_keys=True))
    return total


def _configuration(shape: Shape, dtype: str) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": VOCABULARY,
        "num_hidden_layers": shape.num_hidden_layers,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_attention_heads": shape.num_attention_heads,
        "num_key_value_heads": shape.num_key_value_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "use_cache": True,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "torch_dtype": dtype,
        "initializer_range": STANDARD_DEVIATION,
    }
