"""The model's tokenizer and chat template, as the server uses them."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import tokenizers

from sparkinfer.errors import CheckpointError, RequestError
from sparkinfer.server.detokenize import ByteLevelDetokenizer, Detokenizer, StreamDetokenizer, token_bytes_table

INLINE_CHARACTERS = 2048
"""Text up to this length (about a millisecond) is tokenised on the event loop, longer text on a thread beside it."""


class ServerTokenizer:
    """Encoding, decoding and chat rendering over `transformers.AutoTokenizer`.

    Raises CheckpointError when the folder holds no loadable tokenizer.
    """

    def __init__(self, folder: Path) -> None:
        # Imported late: it takes seconds, which the engine process uses to load the model.
        import jinja2
        from transformers import AutoTokenizer

        self._template_error: type[Exception] = jinja2.TemplateError
        try:
            self._hf: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{folder}: the tokenizer cannot be loaded ({error})") from error
        self.backend: tokenizers.Tokenizer = self._hf.backend_tokenizer
        self.backend.no_truncation()
        self.backend.no_padding()
        specials = {i for i, token in self.backend.get_added_tokens_decoder().items() if token.special}
        self._all_bytes: list[bytes] | None = None
        if _is_byte_level(self.backend):
            self._all_bytes = token_bytes_table(self.backend)
            self._text_bytes = [b"" if i in specials else data for i, data in enumerate(self._all_bytes)]
        self.vocab_size = self.backend.get_vocab_size(with_added_tokens=True)
        # Arguments of the rendering, and those that it passes on to the template itself.
        self._reserved = frozenset({"self", "messages", *inspect.signature(self._hf.apply_chat_template).parameters})
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tokenize")

    @property
    def has_chat_template(self) -> bool:
        """Whether chat requests can be rendered."""
        return bool(self._hf.chat_template)

    async def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Token ids of `text`; long text does not hold up the streams of other requests."""
        if len(text) <= INLINE_CHARACTERS:
            return self.backend.encode(text, add_special_tokens=add_special_tokens).ids
        loop = asyncio.get_running_loop()
        # The batch form: `encode` keeps Python's lock, so that a thread of its own would be of no use.
        (encoding,) = await loop.run_in_executor(
            self._pool, lambda: self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        )
        return encoding.ids

    def render_chat(self, messages: list[dict[str, Any]], add_generation_prompt: bool, options: dict[str, Any]) -> str:
        """The prompt text of a conversation. Raises RequestError when there is no template, or it refuses."""
        if not self.has_chat_template:
            raise RequestError(
                "this model has no chat template (chat_template.jinja or tokenizer_config.json): "
                "use /v1/completions, or add the template to the model folder",
                "messages",
            )
        taken = self._reserved.intersection(options)
        if taken:
            names = ", ".join(sorted(taken))
            raise RequestError(
                f"`chat_template_kwargs` cannot set {names}: only template variables", "chat_template_kwargs"
            )
        try:
            text = self._hf.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=add_generation_prompt, **options
            )
        except (self._template_error, TypeError, ValueError) as error:
            raise RequestError(f"the chat template does not accept these messages: {error}", "messages") from error
        return str(text)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """Text of token ids."""
        return str(self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def detokenizer(self, skip_special_tokens: bool) -> Detokenizer:
        """A new incremental decoder for one sequence."""
        if self._all_bytes is None:
            return StreamDetokenizer(self.backend, skip_special_tokens)
        return ByteLevelDetokenizer(self._text_bytes if skip_special_tokens else self._all_bytes)

    def token_bytes(self, token: int) -> bytes:
        """Bytes of one token; special tokens have those of their name."""
        if self._all_bytes is not None:
            return self._all_bytes[token] if token < len(self._all_bytes) else b""
        return self.backend.decode([token], skip_special_tokens=False).encode()

    def token_text(self, token: int) -> str:
        """Text of one token on its own; bytes that are no character become U+FFFD."""
        return self.token_bytes(token).decode(errors="replace")

    def close(self) -> None:
        """Ends the worker thread."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def _is_byte_level(backend: tokenizers.Tokenizer) -> bool:
    decoder = backend.decoder
    return decoder is not None and json.loads(decoder.__getstate__()).get("type") == "ByteLevel"
