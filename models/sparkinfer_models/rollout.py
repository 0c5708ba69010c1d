"""Texts that a target writes itself, in batches: what its drafter learns from."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from sparkinfer.errors import ConfigError
from sparkinfer_models.network import Cache, Network
from sparkinfer_models.tokenizer import IM_START_ID


def prompts(ids: np.ndarray, count: int, length: int, chat_share: float, random: np.random.Generator) -> np.ndarray:
    """[count, length] prompts from a stream: windows at random places, a share of them ending where an answer begins.

    An answer begins after `<|im_start|>assistant` and its newline: the second `<|im_start|>` of an exchange.
    """
    starts = np.flatnonzero(ids == IM_START_ID)[1::2]
    # The header is the same tokens everywhere: its length is where the answer's first token stands.
    header = _header_length(ids, starts)
    ends = starts + header
    ends = ends[(ends >= length) & (ends < len(ids))]
    chat = int(count * chat_share) if len(ends) else 0
    last = np.concatenate((random.choice(ends, chat), random.integers(length, len(ids), count - chat)))
    return np.stack([ids[end - length : end] for end in last]).astype(np.int64)


def _header_length(ids: np.ndarray, starts: np.ndarray) -> int:
    """Number of leading tokens that all answers share (`<|im_start|>assistant`, newline)."""
    rows = [ids[s : s + 8] for s in starts[:64] if s + 8 <= len(ids)]
    if not rows:
        return 0
    for offset in range(8):
        if len({int(row[offset]) for row in rows}) > 1:
            if offset < 2:
                raise ConfigError("answers in this stream share no header: was it encoded with another template?")
            return offset
    return 8


@torch.no_grad()
def generate(network: Network, start: Tensor, count: int, temperatures: Tensor, generator: torch.Generator) -> Tensor:
    """Continues each row of `start` [batch, length] by `count` tokens at its own temperature (0: greedy).

    Rows do not end at a stop token: what follows it is in the training data's manner, the next document.
    """
    output = network(start, Cache.empty(network.config.num_layers))
    tokens = [start]
    warm = temperatures > 0
    divisor = torch.where(warm, temperatures, 1.0)[:, None]
    for _ in range(count):
        logits = network.logits(output.hidden[:, -1])
        noise = torch.empty_like(logits).exponential_(generator=generator).log()
        drawn = (logits / divisor - noise * warm[:, None]).argmax(-1, keepdim=True)
        tokens.append(drawn)
        if len(tokens) <= count:
            output = network(drawn, output.cache)
    return torch.cat(tokens, 1)
