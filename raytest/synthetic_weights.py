"""The synthetic model's weights: which tensors, which values, and the files that hold them."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

# A change of any byte of the model, weights or not, is a new version.
VERSION = 1
VOCABULARY = 8192
STANDARD_DEVIATION = 0.03
SHARD_BYTES = 2 * 1024**3
# The name and the bytes of one value in a safetensors file.
DTYPES = {"bfloat16": ("BF16", 2), "float16": ("F16", 2), "float32": ("F32", 4)}
# Values made at a time: what a processor's cache holds.
BLOCK = 1 << 17


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


def tensor_shapes(shape: Shape) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of every tensor, in the order in which they stand in the files."""
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


def split_into_files(
    tensors: list[tuple[str, tuple[int, ...]]], width: int
) -> list[list[tuple[str, tuple[int, ...]]]]:
    """The tensors of each file, in order; a file holds ``SHARD_BYTES`` unless one tensor has
    more. ``width`` is the bytes of one value."""
    files: list[list[tuple[str, tuple[int, ...]]]] = [[]]
    used = 0
    for name, shape in tensors:
        size = width * math.prod(shape)
        if used + size > SHARD_BYTES and files[-1]:
            files.append([])
            used = 0
        files[-1].append((name, shape))
        used += size
    return files


def write_safetensors(
    path: Path, tensors: list[tuple[str, tuple[int, ...]]], seed: int, dtype: str
) -> None:
    """Write tensors as one safetensors file. Raises OSError.

    The format is a length, a JSON header and the data; written here block by block, since the
    library would want numpy's missing bfloat16 and the whole file in memory.
    """
    code, width = DTYPES[dtype]
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in tensors:
        end = offset + width * math.prod(shape)
        header[name] = {"dtype": code, "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, shape in tensors:
            for values in weights(name, math.prod(shape), seed):
                file.write(_little_endian(values, dtype))


def weights(name: str, count: int, seed: int) -> Iterator[npt.NDArray[np.float32]]:
    """The values of one tensor in blocks: ones for norms, else near-normal of the standard
    deviation.

    Each value is the sum of four independent uniform 16-bit integers (Irwin-Hall), centred: of
    variance 4 (2^32 - 1)/12 and never past 3.47 standard deviations. It is scaled by one float32
    product, which IEEE 754 rounds in one way.
    """
    import numpy as np

    key = hashlib.sha256(f"raytest-synthetic/{VERSION}/{seed}/{name}".encode()).digest()
    source = np.random.Philox(key=int.from_bytes(key[:16], "little"))
    scale = np.float32(STANDARD_DEVIATION / math.sqrt(4 * (2.0**32 - 1) / 12))
    low_halves = np.uint64(0x0000FFFF0000FFFF)
    for start in range(0, count, BLOCK):
        n = min(BLOCK, count - start)
        if name.endswith("norm.weight"):
            yield np.ones(n, dtype=np.float32)
            continue
        raw = source.random_raw(n)
        # two sums of two side by side; their order within 64 bits does not matter
        pairs = ((raw & low_halves) + ((raw >> np.uint64(16)) & low_halves)).view(np.int32)
        yield (pairs[0::2] + pairs[1::2] - np.int32(2 * 0xFFFF)).astype(np.float32) * scale


def _little_endian(values: npt.NDArray[np.float32], dtype: str) -> bytes:
    """Bytes of float32 values in another dtype, rounded to the nearest even."""
    import numpy as np

    if dtype == "float32":
        return values.astype("<f4", copy=False).tobytes()
    if dtype == "float16":
        return values.astype("<f2").tobytes()
    bits = values.view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return (rounded >> np.uint32(16)).astype("<u2").tobytes()
