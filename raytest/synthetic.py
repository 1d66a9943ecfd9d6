"""A small random-weight model and its tokenizer, made from a seed: the same bytes on every machine.

Weights come from integer arithmetic alone (SHA-256 keys a Philox counter; sums of uniform 16-bit
integers approximate a normal distribution), so neither the processor's vector width nor a library's
float routines can change a bit.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raytest.errors import UsageError
from raytest.vocabulary import write_tokenizer

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

VERSION = 1
VOCABULARY = 8192
STANDARD_DEVIATION = 0.03
SHARD_BYTES = 2 * 1024**3
MANIFEST = "raytest-model.json"


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of one model; names as in a Qwen3 ``config.json``."""

    num_hidden_layers: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int = 64


# Head counts divide by 2, 4 and (but for tiny) 8, so these TP sizes work. Wide random logits are
# nearly tied: the smallest rounding difference flips a token, which makes a good detector.
SHAPES = {
    "tiny": Shape(4, 256, 768, 4, 4),
    "small": Shape(12, 768, 2304, 16, 8),
    "1b": Shape(28, 2048, 6144, 32, 8),
}


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What was written: ``digest`` is over the bytes of every file."""

    path: str
    size: str
    seed: int
    parameters: int
    digest: str


def write_model(path: str | Path, size: str = "tiny", seed: int = 0) -> ModelInfo:
    """Write a Qwen3-architecture checkpoint (bfloat16 safetensors), tokenizer and configuration.

    The folder appears whole or not at all. Raises UsageError for an unknown size, a folder that is
    not empty, or a disk that refuses.
    """
    if size not in SHAPES:
        raise UsageError(f"size {size!r}: expected one of {', '.join(SHAPES)}")
    target = Path(path)
    if target.exists() and any(target.iterdir() if target.is_dir() else [target]):
        raise UsageError(f"{target}: exists and is not empty")
    temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        temporary.mkdir(parents=True)
        parameters = _write_files(temporary, SHAPES[size], seed)
        digests = model_digest(temporary)
        digest = hashlib.sha256(json.dumps(digests, sort_keys=True).encode()).hexdigest()
        info = ModelInfo(str(target), size, seed, parameters, digest)
        manifest = {"version": VERSION, "size": size, "seed": seed, "files": digests}
        (temporary / MANIFEST).write_text(json.dumps(manifest, indent=1, sort_keys=True))
        if target.exists():
            target.rmdir()
        os.rename(temporary, target)
    except OSError as error:
        raise UsageError(f"{target}: cannot be written: {error.strerror}") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return info


def ensure_model(size: str, seed: int, cache: str | Path | None = None) -> Path:
    """Path of the model in the user's cache, made (or made again where damaged) if need be."""
    root = Path(cache) if cache is not None else _cache_root()
    path = root / f"{size}-{seed}-v{VERSION}"
    if _intact(path):
        return path
    root.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    write_model(fresh, size, seed)
    try:
        if path.exists():
            shutil.rmtree(path, ignore_errors=True)
        os.rename(fresh, path)
    except OSError:
        # another process was faster; its bytes are the same
        shutil.rmtree(fresh, ignore_errors=True)
        if not _intact(path):
            raise UsageError(f"{path}: damaged, and cannot be replaced; remove it") from None
    return path


def model_digest(path: str | Path) -> dict[str, str]:
    """SHA-256 of every file of a model folder but raytest's own manifest, by file name."""
    digests = {}
    for file in sorted(Path(path).iterdir()):
        if file.is_file() and file.name != MANIFEST:
            with file.open("rb") as handle:
                digests[file.name] = hashlib.file_digest(handle, "sha256").hexdigest()
    return digests


def _cache_root() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "raytest" / "models"


def _intact(path: Path) -> bool:
    """Whether the folder's files are those its manifest was written for (sizes, then content)."""
    try:
        manifest = json.loads((path / MANIFEST).read_bytes())
        return bool(manifest["version"] == VERSION and manifest["files"] == model_digest(path))
    except (OSError, ValueError, KeyError):
        return False


def _write_files(folder: Path, shape: Shape, seed: int) -> int:
    tensors = list(_tensor_shapes(shape))
    config = _configuration(shape)
    (folder / "config.json").write_text(json.dumps(config, indent=1, sort_keys=True))
    generation = {"bos_token_id": 0, "eos_token_id": 1, "do_sample": False}
    (folder / "generation_config.json").write_text(json.dumps(generation, sort_keys=True))
    write_tokenizer(folder, VOCABULARY, seed)
    shards = _shards(tensors)
    index: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        name = "model.safetensors"
        if len(shards) > 1:
            name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        _write_safetensors(folder / name, names, seed)
        index.update({tensor: name for tensor, _ in names})
    total = sum(_count(s) for _, s in tensors)
    if len(shards) > 1:
        document = {"metadata": {"total_size": 2 * total}, "weight_map": index}
        (folder / "model.safetensors.index.json").write_text(json.dumps(document, sort_keys=True))
    return total


def _tensor_shapes(shape: Shape) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, head = shape.hidden_size, shape.head_dim
    query, value = shape.num_attention_heads * head, shape.num_key_value_heads * head
    yield "model.embed_tokens.weight", (VOCABULARY, hidden)
    for i in range(shape.num_hidden_layers):
        layer = f"model.layers.{i}"
        yield f"{layer}.input_layernorm.weight", (hidden,)
        yield f"{layer}.self_attn.q_proj.weight", (query, hidden)
        yield f"{layer}.self_attn.k_proj.weight", (value, hidden)
        yield f"{layer}.self_attn.v_proj.weight", (value, hidden)
        yield f"{layer}.self_attn.o_proj.weight", (hidden, query)
        yield f"{layer}.self_attn.q_norm.weight", (head,)
        yield f"{layer}.self_attn.k_norm.weight", (head,)
        yield f"{layer}.post_attention_layernorm.weight", (hidden,)
        yield f"{layer}.mlp.gate_proj.weight", (shape.intermediate_size, hidden)
        yield f"{layer}.mlp.up_proj.weight", (shape.intermediate_size, hidden)
        yield f"{layer}.mlp.down_proj.weight", (hidden, shape.intermediate_size)
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (VOCABULARY, hidden)


def _configuration(shape: Shape) -> dict[str, Any]:
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
        "torch_dtype": "bfloat16",
        "initializer_range": STANDARD_DEVIATION,
    }


def _shards(
    tensors: list[tuple[str, tuple[int, ...]]],
) -> list[list[tuple[str, tuple[int, ...]]]]:
    shards: list[list[tuple[str, tuple[int, ...]]]] = [[]]
    used = 0
    for name, shape in tensors:
        size = 2 * _count(shape)
        if used + size > SHARD_BYTES and shards[-1]:
            shards.append([])
            used = 0
        shards[-1].append((name, shape))
        used += size
    return shards


def _count(shape: tuple[int, ...]) -> int:
    total = 1
    for n in shape:
        total *= n
    return total


def _write_safetensors(path: Path, tensors: list[tuple[str, tuple[int, ...]]], seed: int) -> None:
    """The format is a length, a JSON header and the data; written here tensor by tensor, since the
    library would want numpy's missing bfloat16 and the whole file in memory."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in tensors:
        end = offset + 2 * _count(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, shape in tensors:
            file.write(_weights(name, shape, seed).astype("<u2", copy=False).tobytes())


def _weights(name: str, shape: tuple[int, ...], seed: int) -> npt.NDArray[np.uint16]:
    """bfloat16 bits of one tensor: ones for norms, else near-normal values of the standard
    deviation.

    Each value is the sum of four independent uniform 16-bit integers, centred: variance 4
    (2^32-1)/12.
    """
    import numpy as np

    n = _count(shape)
    if name.endswith("norm.weight"):
        return np.full(n, 0x3F80, dtype=np.uint16)
    key = hashlib.sha256(f"raytest-synthetic/{VERSION}/{seed}/{name}".encode()).digest()
    raw = np.random.Philox(key=int.from_bytes(key[:16], "little")).random_raw(n)
    total = sum(((raw >> np.uint64(16 * i)) & np.uint64(0xFFFF)).astype(np.int64) for i in range(4))
    centred = np.asarray(total, dtype=np.int64) - 2 * 0xFFFF
    # an exact power of two keeps the product exact in float32 up to one rounding, the same
    # everywhere
    scale = np.float32(STANDARD_DEVIATION / (4 * (2.0**32 - 1) / 12) ** 0.5)
    return _to_bfloat16(centred.astype(np.float32) * scale)


def _to_bfloat16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Round to nearest even on the bits."""
    import numpy as np

    bits = values.view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return (rounded >> np.uint32(16)).astype(np.uint16)
