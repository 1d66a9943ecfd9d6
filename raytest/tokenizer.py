"""A model's tokenizer: text and messages to token ids, and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from raytest.chat_template import Render, find_template, renderer, special_tokens
from raytest.errors import UsageError


class Tokenizer:
    """The fast tokenizer from ``tokenizer.json``, else whatever transformers makes of the path.

    Text is taken as it is: nothing here normalises it (the model's own tokenizer may). Raises
    UsageError for a tokenizer that cannot be read, or where the library for it is missing.
    """

    def __init__(self, path: str) -> None:
        self._folder = Path(path)
        self._fast: Any = None
        self._slow: Any = None
        self._render: Render | None = None
        file = self._folder / "tokenizer.json"
        try:
            if file.is_file():
                self._fast = _read_fast(file)
            else:
                from transformers import AutoTokenizer

                self._slow = AutoTokenizer.from_pretrained(path)
        except ImportError as error:
            raise UsageError(
                f"{error.name} is needed to tokenise: install raytest[cpu] or raytest[cuda]"
            ) from None
        # the tokenizers library raises a bare Exception for a file that it cannot parse
        except Exception as error:  # noqa: BLE001
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise UsageError(f"{path}: its tokenizer cannot be read: {reason}") from None

    def encode(self, text: str) -> list[int]:
        """Token ids of a plain prompt, with the special tokens that the tokenizer puts around."""
        return self._ids(text, special=True)

    def encode_messages(self, messages: Sequence[Mapping[str, Any]]) -> tuple[str, list[int]]:
        """The text that the chat template makes of messages, and its token ids.

        Raises UsageError where the model has no usable template, and its kind ChatTemplateError
        where the template refuses these messages.
        """
        if self._render is None:
            self._render = self._make_renderer()
        text = self._render(messages)
        # the template has written the special tokens already
        return text, self._ids(text, special=False)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids, special tokens shown; what is no id of the tokenizer has none."""
        ids = [i for i in ids if 0 <= i < 2**31]
        if self._fast is not None:
            return str(self._fast.decode(ids, skip_special_tokens=False))
        return str(self._slow.decode(ids))

    def _ids(self, text: str, *, special: bool) -> list[int]:
        if self._fast is not None:
            return list(self._fast.encode(text, add_special_tokens=special).ids)
        return list(self._slow.encode(text, add_special_tokens=special))

    def _make_renderer(self) -> Render:
        template = find_template(self._folder)
        tokens = special_tokens(self._folder)
        if self._slow is not None:
            template = template or self._slow.chat_template
            tokens = {k: str(v) for k, v in self._slow.special_tokens_map.items()}
        if not isinstance(template, str):
            raise UsageError(f"{self._folder}: has no chat template, which messages need")
        try:
            return renderer(template, tokens)
        except UsageError as error:
            raise UsageError(f"{self._folder}: {error}") from None


def _read_fast(file: Path) -> Any:
    from tokenizers import Tokenizer as FastTokenizer

    fast = FastTokenizer.from_file(str(file))
    # some models ship settings of their training, which would cut prompts without a word
    fast.no_truncation()
    fast.no_padding()
    return fast
