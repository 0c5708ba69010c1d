"""From token ids to text, one token at a time, and stop strings found across token boundaries.

Byte-level BPE tokens are byte strings that may split a character; text is released as soon as its bytes are complete,
and the released pieces together equal `tokenizer.decode` of all ids.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

import tokenizers
from tokenizers.decoders import DecodeStream


class Detokenizer(Protocol):
    """Text of one sequence, incrementally."""

    def push(self, token: int) -> str:
        """Text that became complete with `token` ("" if none)."""

    def flush(self) -> str:
        """Text still held at the end (bytes of an unfinished character become U+FFFD)."""


def byte_alphabet() -> dict[str, int]:
    """The printable character that stands for each byte in a byte-level vocabulary (the GPT-2 table), inverted."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    table = {chr(byte): byte for byte in printable}
    table.update({chr(256 + index): byte for index, byte in enumerate(others)})
    return table


def token_bytes_table(tokenizer: tokenizers.Tokenizer) -> list[bytes]:
    """Bytes of every token id of a byte-level tokenizer; b"" for ids without a token."""
    alphabet = byte_alphabet()
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    table = [b""] * (max(vocabulary.values(), default=-1) + 1)
    for token, index in vocabulary.items():
        # Added tokens hold plain text: with a character outside the alphabet it is taken literally, as by the decoder.
        codes = [alphabet.get(character) for character in token]
        table[index] = token.encode() if None in codes else bytes(code for code in codes if code is not None)
    return table


class ByteLevelDetokenizer:
    """Incremental UTF-8 decoding over a table of token bytes."""

    __slots__ = ("_decode", "_size", "_table")

    def __init__(self, table: Sequence[bytes]) -> None:
        self._table = table
        self._size = len(table)
        self._decode = codecs.getincrementaldecoder("utf-8")(errors="replace").decode

    def push(self, token: int) -> str:
        return self._decode(self._table[token]) if token < self._size else ""

    def flush(self) -> str:
        return self._decode(b"", True)


class StreamDetokenizer:
    """Any other tokenizer, through the library's own stream."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=skip_special_tokens)
        self._skip = skip_special_tokens
        self._held: list[int] = []

    def push(self, token: int) -> str:
        text = self._stream.step(self._tokenizer, token)
        if text is None:
            self._held.append(token)
            return ""
        self._held.clear()
        return text

    def flush(self) -> str:
        return self._tokenizer.decode(self._held, skip_special_tokens=self._skip) if self._held else ""


class StopMatcher:
    """Releases text, but never text of a stop string.

    The result does not depend on how the text is cut into pieces: the stop string that is complete first ends the text
    (of several that end at the same character, the longest). Text that may be the beginning of a stop string is held.
    """

    __slots__ = ("_held", "_include", "_longest", "_stops", "matched")

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        self._stops = tuple(stops)
        self._include = include
        self._longest = max((len(stop) for stop in stops), default=0)
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Text that may be shown; after a match (`matched` is set) nothing more is."""
        if self.matched is not None:
            return ""
        held = self._held + text
        found = [(held.find(stop) + len(stop), -len(stop), stop) for stop in self._stops if stop in held]
        if found:
            end, _, self.matched = min(found)
            self._held = ""
            return held[: end if self._include else end - len(self.matched)]
        keep = self._keep(held)
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep]

    def _keep(self, held: str) -> int:
        """Length of the longest end of `held` that begins a stop string."""
        for length in range(min(self._longest - 1, len(held)), 0, -1):
            tail = held[-length:]
            if any(stop.startswith(tail) for stop in self._stops):
                return length
        return 0

    def flush(self) -> str:
        """The held text, once no more can come."""
        held, self._held = self._held, ""
        return held
