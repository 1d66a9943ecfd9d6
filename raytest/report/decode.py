"""Text of token ids, where a fast tokenizer is on this machine; nothing is fetched or made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from raytest.errors import UsageError
from raytest.spec import Spec
from raytest.synthetic import cached_model

Decode = Callable[[Sequence[int]], str]


def decoder(spec: Spec) -> Decode | None:
    """A function from token ids to text, or None where no tokenizer.json is at hand."""
    folder = _folder(spec)
    if folder is None or not (folder / "tokenizer.json").is_file():
        return None
    from raytest.workload import token_decoder

    try:
        return token_decoder(str(folder))
    except UsageError:
        return None


def _folder(spec: Spec) -> Path | None:
    named = spec.model.tokenizer
    size = spec.model.synthetic_size or ("tiny" if spec.backend == "reference" else None)
    if named is None and size is not None:
        return cached_model(size, spec.model.synthetic_seed)
    path = Path(named or spec.model.path).expanduser()
    if path.is_dir():
        return path
    return _hub_folder(named or spec.model.path)


def _hub_folder(hub_id: str) -> Path | None:
    """The snapshot of a hub model in this machine's cache."""
    try:
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError
    except ImportError:
        return None
    try:
        found = try_to_load_from_cache(hub_id, "tokenizer.json")
    except HFValidationError:
        return None
    return Path(found).parent if isinstance(found, str) else None
