"""Plain decoding and plain speculative decoding: the yardstick for engines, written for clarity.

Sampling is Gumbel-max with counter-based noise keyed by (seed, position, token): every verified row draws what plain
decoding would draw there, so a draft is accepted when it equals the target's own draw, at any temperature.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from sparkinfer_models.drafter import Drafter
from sparkinfer_models.network import Cache, Network
from sparkinfer_models.tokenizer import END_OF_TEXT_ID, IM_END_ID, MASK_ID

STOP = (IM_END_ID, END_OF_TEXT_ID)


def _mix(x: np.ndarray) -> np.ndarray:
    """splitmix64's finaliser (Steele et al. 2014) on uint64."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def gumbel_noise(seed: int, position: int, vocab_size: int) -> Tensor:
    """Gumbel(0, 1) noise of every token for the draw at `position`, [vocab] float32."""
    golden = np.uint64(0x9E3779B97F4A7C15)
    with np.errstate(over="ignore"):
        key = _mix(np.array([seed], np.uint64) * golden + np.uint64(position))
        bits = _mix(key + (np.arange(vocab_size, dtype=np.uint64) + np.uint64(1)) * golden)
    uniform = ((bits >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
    return torch.from_numpy(-np.log(-np.log(uniform))).float()


def draw(logits: Tensor, temperature: float, seed: int, position: int) -> int:
    """The token at `position`: argmax, or argmax with noise; logits [vocab] float32."""
    if temperature > 0:
        logits = logits / temperature + gumbel_noise(seed, position, logits.shape[-1]).to(logits.device)
    return int(logits.argmax())


@dataclass
class Decoded:
    """Tokens after the prompt, and the accepted drafts of every verification (empty for plain decoding)."""

    tokens: list[int]
    accepted: list[int] = field(default_factory=list)


@torch.no_grad()
def plain_decode(network: Network, prompt: list[int], count: int, temperature: float, seed: int) -> Decoded:
    """Decodes up to `count` tokens one at a time; ends after a stop token."""
    output = network(torch.tensor([prompt]), Cache.empty(network.config.num_layers))
    tokens = [draw(network.logits(output.hidden[0, -1]), temperature, seed, len(prompt))]
    while len(tokens) < count and tokens[-1] not in STOP:
        output = network(torch.tensor([tokens[-1:]]), output.cache)
        tokens.append(draw(network.logits(output.hidden[0, -1]), temperature, seed, len(prompt) + len(tokens)))
    return Decoded(tokens)


class Speculator:
    """Speculative decoding of one request at a time.

    `selector` False drafts as DFlash does: each slot's best token. `shared_noise` False drafts greedily at every
    temperature, as vLLM does by default: a draft is then accepted with the target's probability of it. `ignore_stop`
    goes on after a stop token.
    """

    def __init__(
        self,
        network: Network,
        drafter: Drafter,
        selector: bool = True,
        shared_noise: bool = True,
        ignore_stop: bool = False,
    ) -> None:
        self.network, self.drafter, self.selector = network, drafter, selector
        self.shared_noise = shared_noise
        self.stop: tuple[int, ...] = () if ignore_stop else STOP

    def _draft(
        self, anchor: int, position: int, context: list[tuple[Tensor, Tensor]], temperature: float, seed: int
    ) -> list[int]:
        c = self.drafter.config
        ids = torch.tensor([anchor] + [MASK_ID] * (c.block - 1))
        embedded = F.embedding(ids, self.network.parameter("model.embed_tokens.weight"))[None, None]
        positions = torch.arange(position, position + c.block)
        keys = torch.arange(position + c.block)
        # A window reaches to both sides; inside the block everything is seen.
        mask = (keys[None] > positions[:, None] - c.window) & (keys[None] < positions[:, None] + c.window)
        hidden = self.drafter(embedded, positions[None, None], context, mask[None])[0, 0, 1:]
        logits = self.network.logits(hidden)
        noise = None
        if not self.shared_noise:
            temperature = 0.0
        if temperature > 0:
            rows = [gumbel_noise(seed, position + slot, c.vocab_size) for slot in range(1, c.block)]
            noise = torch.stack(rows)
        if not self.selector:
            scores = logits if noise is None else logits / temperature + noise
            return scores.argmax(-1).tolist()
        return self.drafter.walk(hidden, logits, anchor, temperature, noise)

    @torch.no_grad()
    def decode(self, prompt: list[int], count: int, temperature: float, seed: int) -> Decoded:
        """Decodes up to `count` tokens: draft 7, verify 8 rows, accept on equality, replay the accepted prefix."""
        taps = self.drafter.config.target_layers
        output = self.network(torch.tensor([prompt]), Cache.empty(self.network.config.num_layers), taps)
        cache, position = output.cache, len(prompt)
        context = self.drafter.context(torch.cat(output.taps, -1), torch.arange(position))
        tokens = [draw(self.network.logits(output.hidden[0, -1]), temperature, seed, position)]
        accepted: list[int] = []
        while len(tokens) < count and tokens[-1] not in self.stop:
            drafts = self._draft(tokens[-1], position, context, temperature, seed)
            block = torch.tensor([[tokens[-1], *drafts]])
            logits = self.network.logits(self.network(block, cache).hidden[0])
            drawn: list[int] = []
            for row in range(block.shape[1]):
                drawn.append(draw(logits[row], temperature, seed, position + 1 + row))
                if row == len(drafts) or drafts[row] != drawn[-1] or drawn[-1] in self.stop:
                    break
            # The state after rejected rows is not kept: the accepted ones are computed again from the old cache.
            kept = len(drawn)
            replay = self.network(block[:, :kept], cache, taps)
            new = self.drafter.context(torch.cat(replay.taps, -1), torch.arange(position, position + kept))
            context = [
                (torch.cat((keys, k), 1), torch.cat((values, v), 1))
                for (keys, values), (k, v) in zip(context, new, strict=True)
            ]
            cache, position = replay.cache, position + kept
            # A stop token that was drafted right ends the block early: it counts as accepted.
            accepted.append(sum(a == b for a, b in zip(drafts, drawn, strict=False)))
            tokens += drawn
        return Decoded(tokens[:count], accepted)
