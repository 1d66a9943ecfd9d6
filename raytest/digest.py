"""Canonical bytes and hashes: what "equal" means in raytest.

Floats are hashed by their bits and never canonicalised: two NaNs with other payloads, or 0.0 and
-0.0, are different results. Each digest is domain-separated by what it covers and by the recipe's
version, and includes dtype and length, so a token list can never collide with a logprob list.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

RECIPE = "raytest-digest/1"
DIGEST_BYTES = 16


def digest_bytes(kind: str, *chunks: bytes) -> bytes:
    """16 bytes of SHA-256 over the recipe, ``kind`` and each chunk with its length."""
    h = hashlib.sha256(f"{RECIPE}:{kind}".encode())
    for chunk in chunks:
        h.update(len(chunk).to_bytes(8, "little"))
        h.update(chunk)
    return h.digest()[:DIGEST_BYTES]


def array_digest(kind: str, *arrays: npt.NDArray[Any]) -> bytes:
    """Digest of arrays by their little-endian bits, with dtype and shape."""
    chunks: list[bytes] = []
    for array in arrays:
        little = array.astype(array.dtype.newbyteorder("<"), copy=False)
        chunks.append(f"{little.dtype.str}{little.shape}".encode())
        chunks.append(little.tobytes())
    return digest_bytes(kind, *chunks)


def token_digest(token_ids: npt.NDArray[np.int32]) -> bytes:
    """Digest of a completion's token ids (int32, in order)."""
    return array_digest("tokens", token_ids)


def logprob_digest(logprobs: npt.NDArray[np.float32]) -> bytes:
    """Digest of the sampled tokens' logprobs by their float32 bits."""
    return array_digest("logprobs", logprobs)


def top_digest(
    top_token_ids: npt.NDArray[np.int32], top_logprobs: npt.NDArray[np.float32]
) -> bytes:
    """Digest of the top-k candidates, ids and float32 bits, flat with k per position."""
    return array_digest("top", top_token_ids, top_logprobs)


def prompt_digest(prompt_token_ids: Iterable[int]) -> bytes:
    """Digest of a prompt's token ids; requests of two runs are matched by it."""
    import numpy as np

    return array_digest("prompt", np.asarray(list(prompt_token_ids), dtype=np.int32))


def json_digest(kind: str, value: Any) -> str:
    """Hex digest of a JSON value in canonical form (sorted keys, no spaces)."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return digest_bytes(kind, text.encode()).hex()
