"""The loop of `speculate.Speculator` for many prompts at once, on any device: the same tokens, the same acceptance.

Rows stand at positions of their own. A verification keeps what each of its rows would leave behind (delta-rule states,
convolution inputs, keys and values), so that the accepted prefix is chosen afterwards instead of being computed again.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from sparkinfer_models import delta_rule
from sparkinfer_models.drafter import Drafter
from sparkinfer_models.network import (
    ATTENTION_NAMES,
    DELTA_NAMES,
    MLP_NAMES,
    MOE_NAMES,
    Cache,
    Network,
    attention_inputs,
    attention_output,
    delta_inputs,
    delta_output,
    dense_mlp,
    moe_mlp,
    rotary_tables,
    zero_centred_norm,
)
from sparkinfer_models.speculate import STOP, Decoded
from sparkinfer_models.tokenizer import MASK_ID

_GOLDEN = 0x9E3779B97F4A7C15 - 2**64


def _shifted(x: Tensor, by: int) -> Tensor:
    """Logical right shift of int64 taken as unsigned."""
    return (x >> by) & ((1 << (64 - by)) - 1)


def _mix(x: Tensor) -> Tensor:
    """`speculate._mix` on int64, whose products wrap as uint64's do."""
    x = (x ^ _shifted(x, 30)) * (0xBF58476D1CE4E5B9 - 2**64)
    x = (x ^ _shifted(x, 27)) * (0x94D049BB133111EB - 2**64)
    return x ^ _shifted(x, 31)


def gumbel_rows(seeds: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """`speculate.gumbel_noise` for int64 seeds and positions of one shape: [..., vocab] float32."""
    key = _mix(seeds * _GOLDEN + positions)
    tokens = torch.arange(1, vocab_size + 1, device=seeds.device)
    bits = _mix(key.unsqueeze(-1) + tokens * _GOLDEN)
    uniform = (_shifted(bits, 11).double() + 0.5) * 2.0**-53
    return -(-uniform.log()).log().float()


@dataclass
class _Delta:
    """A Gated DeltaNet layer's window [batch, taps - 1, channels] and state [batch, heads, dim_k, dim_v]."""

    window: Tensor
    state: Tensor
    history: Tensor | None = None
    states: list[Tensor] = field(default_factory=list)

    def commit(self, kept: Tensor) -> None:
        """Take what stands after `kept` [batch] tokens of the last block; 0 leaves a row as it was."""
        assert self.history is not None
        rows = torch.arange(len(kept), device=kept.device)
        every = torch.stack([self.state, *self.states])
        self.state = every[kept, rows]
        places = kept[:, None] + torch.arange(self.window.shape[1], device=kept.device)
        self.window = self.history[rows[:, None], places]
        self.history, self.states = None, []


@dataclass
class _Attention:
    """A layer's keys and values, [batch, kv heads, length, dim]."""

    keys: Tensor
    values: Tensor

    def write(self, keys: Tensor, values: Tensor, positions: Tensor) -> None:
        """keys, values [batch, rows, kv heads, dim] go to `positions` [batch, rows]."""
        index = positions[:, None, :, None].expand(-1, keys.shape[2], -1, keys.shape[3])
        self.keys.scatter_(2, index, keys.transpose(1, 2))
        self.values.scatter_(2, index, values.transpose(1, 2))


class _Target:
    """The target's caches for a batch, and its pass over one block of each row."""

    def __init__(self, network: Network, prompts: Tensor, room: int, taps: tuple[int, ...]) -> None:
        self.network, self.taps = network, taps
        batch, length = prompts.shape
        output = network(prompts, Cache.empty(network.config.num_layers), taps)
        assert output.cache is not None
        self.hidden, self.tapped = output.hidden, torch.cat(output.taps, -1)
        self.position = torch.full((batch,), length, device=prompts.device)
        self.layers: list[_Delta | _Attention] = []
        for kind, entry in zip(network.config.layer_types, output.cache.layers, strict=True):
            assert entry.first is not None
            assert entry.second is not None
            if kind == "linear_attention":
                self.layers.append(_Delta(entry.first, entry.second))
            else:
                self.layers.append(_Attention(*(F.pad(t, (0, 0, 0, room)) for t in (entry.first, entry.second))))

    def block(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Hidden states after the final norm and tapped outputs of ids [batch, rows]; caches wait for `commit`."""
        net, c = self.network, self.network.config
        shape = ids.shape
        positions = self.position[:, None] + torch.arange(shape[1], device=ids.device)
        tables = rotary_tables(positions.flatten(), c.rotary_dim)
        x = F.embedding(ids, net.parameter("model.embed_tokens.weight")).to(net.dtype)
        tapped = {}
        for index, layer in enumerate(self.layers):
            if isinstance(layer, _Delta):
                x = self._delta(index, layer, x)
            else:
                x = self._attend(index, layer, x, tables, positions)
            rows = x.flatten(0, 1)
            if c.is_moe:
                rows, _ = moe_mlp(rows, net.layer(index, MOE_NAMES), c.eps, c.experts_per_token)
            else:
                rows = dense_mlp(rows, net.layer(index, MLP_NAMES), c.eps)
            x = rows.view_as(x)
            tapped[index] = x
        hidden = zero_centred_norm(x, net.parameter("model.norm.weight"), c.eps)
        return hidden, torch.cat([tapped[index] for index in self.taps], -1)

    def _delta(self, index: int, layer: _Delta, x: Tensor) -> Tensor:
        c = self.network.config
        p = self.network.layer(index, DELTA_NAMES)
        heads = (c.linear_k_heads, c.linear_v_heads, c.linear_dim)
        q, k, v, beta, g, z, raw = delta_inputs(x, p, layer.window, heads, c.eps)
        state, core = layer.state, []
        for t in range(x.shape[1]):
            q_row, k_row, v_row = (s[:, t].float() for s in (q, k, v))
            row, state = delta_rule.step(q_row, k_row, v_row, beta[:, t], g[:, t], state)
            core.append(row)
            layer.states.append(state)
        layer.history = torch.cat((layer.window.to(raw.dtype), raw), 1)
        rows = torch.stack(core, 1).to(x.dtype).flatten(0, 1)
        return delta_output(x.flatten(0, 1), rows, z.flatten(0, 1), p, c.eps).view_as(x)

    def _attend(
        self, index: int, layer: _Attention, x: Tensor, tables: tuple[Tensor, Tensor], positions: Tensor
    ) -> Tensor:
        c = self.network.config
        p = self.network.layer(index, ATTENTION_NAMES)
        # As one long row: the rotary tables are given per row of it.
        flat = attention_inputs(x.flatten(0, 1)[None], p, *tables, c.head_dim, c.eps)
        q, k, v, gate = (t[0].unflatten(0, x.shape[:2]) for t in flat)
        layer.write(k, v, positions)
        groups = c.num_heads // c.num_kv_heads
        length = layer.keys.shape[2]
        mask = torch.arange(length, device=x.device) <= positions[:, None, :, None]
        core = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            layer.keys.repeat_interleave(groups, 1),
            layer.values.repeat_interleave(groups, 1),
            attn_mask=mask,
        )
        rows = core.transpose(1, 2).flatten(2).flatten(0, 1)
        return attention_output(x.flatten(0, 1), rows, gate.flatten(0, 1), p["o"]).view_as(x)

    def commit(self, kept: Tensor) -> None:
        """Keep the first `kept` [batch] tokens of the last block."""
        for layer in self.layers:
            if isinstance(layer, _Delta):
                layer.commit(kept)
        self.position = self.position + kept


class _Context:
    """The drafter's context keys and values, [batch, length, kv heads, dim] a layer."""

    def __init__(self, drafter: Drafter, tapped: Tensor, room: int) -> None:
        self.drafter = drafter
        pairs = drafter.context(tapped, torch.arange(tapped.shape[1], device=tapped.device))
        self.pairs = [tuple(F.pad(t, (0, 0, 0, 0, 0, room)) for t in pair) for pair in pairs]

    def write(self, tapped: Tensor, positions: Tensor) -> None:
        """tapped [batch, rows, taps x hidden] at `positions` [batch, rows]."""
        pairs = self.drafter.context(tapped.flatten(0, 1)[None], positions.flatten())
        for pair, new in zip(self.pairs, pairs, strict=True):
            for buffer, values in zip(pair, new, strict=True):
                rows = values[0].unflatten(0, positions.shape)
                buffer.scatter_(1, positions[:, :, None, None].expand_as(rows), rows)


class BatchedSpeculator:
    """Speculative decoding of prompts of one length; the options are `Speculator`'s."""

    def __init__(
        self, network: Network, drafter: Drafter, selector: bool = True, shared_noise: bool = True,
        ignore_stop: bool = False,
    ) -> None:  # fmt: skip
        self.network, self.drafter, self.selector = network, drafter, selector
        self.shared_noise = shared_noise
        self.stop: tuple[int, ...] = () if ignore_stop else STOP

    def _draft(self, anchors: Tensor, position: Tensor, context: _Context, temperature: float, seeds: Tensor) -> Tensor:
        """Drafts [batch, block - 1] for the tokens after `anchors` [batch], which stand at `position`."""
        c, device = self.drafter.config, anchors.device
        ids = torch.full((len(anchors), c.block), MASK_ID, device=device)
        ids[:, 0] = anchors
        embedded = F.embedding(ids, self.network.parameter("model.embed_tokens.weight"))[:, None]
        positions = position[:, None] + torch.arange(c.block, device=device)
        past = torch.arange(context.pairs[0][0].shape[1], device=device).expand(len(anchors), -1)
        keys = torch.cat((past, positions), 1)
        known = torch.cat((past < position[:, None], torch.ones_like(positions, dtype=torch.bool)), 1)
        mask = known[:, None] & ((keys[:, None] - positions[:, :, None]).abs() < c.window)
        pairs = [(pair[0], pair[1]) for pair in context.pairs]
        hidden = self.drafter(embedded, positions[:, None], pairs, mask)[:, 0, 1:]
        logits = self.network.logits(hidden)
        noise = None
        if temperature > 0 and self.shared_noise:
            noise = gumbel_rows(seeds[:, None].expand(-1, c.block - 1), positions[:, 1:], c.vocab_size)
        if not self.selector:
            return (logits if noise is None else logits / temperature + noise).argmax(-1)
        top, candidates = logits.topk(c.selector_top_k, -1)
        codes = self.drafter.parameter("candidate_selector.successor_codebook").to(hidden.dtype)
        drafts, previous = [], anchors
        for slot in range(c.block - 1):
            term = self.drafter.edge_terms(hidden[:, slot], previous)
            scores = top[:, slot] + (codes[candidates[:, slot]] @ term.unsqueeze(-1)).squeeze(-1).float()
            if noise is not None:
                scores = scores / temperature + noise[:, slot].gather(1, candidates[:, slot])
            previous = candidates[:, slot].gather(1, scores.argmax(-1, keepdim=True))[:, 0]
            drafts.append(previous)
        return torch.stack(drafts, 1)

    def _drawn(self, hidden: Tensor, positions: Tensor, temperature: float, seeds: Tensor) -> Tensor:
        """The target's tokens [batch, rows] at `positions`, after hidden states [batch, rows, hidden]."""
        logits = self.network.logits(hidden)
        if temperature > 0:
            noise = gumbel_rows(seeds[:, None].expand_as(positions), positions, logits.shape[-1])
            logits = logits / temperature + noise
        return logits.argmax(-1)

    @torch.no_grad()
    def decode(self, prompts: list[list[int]], count: int, temperature: float, seeds: list[int]) -> list[Decoded]:
        """Decodes up to `count` tokens of every prompt."""
        device = self.network.parameter("model.norm.weight").device
        c, seed = self.drafter.config, torch.tensor(seeds, device=device)
        # A row that has ended stays where its last step put it, up to a block beyond `count`.
        room = count + 2 * c.block
        target = _Target(self.network, torch.tensor(prompts, device=device), room, c.target_layers)
        context = _Context(self.drafter, target.tapped, room)
        anchors = self._drawn(target.hidden[:, -1:], target.position[:, None], temperature, seed)[:, 0]
        found = [Decoded([token]) for token in anchors.tolist()]
        going = torch.tensor([len(d.tokens) < count and d.tokens[-1] not in self.stop for d in found], device=device)
        stop = torch.tensor(self.stop, dtype=torch.int64, device=device)
        places = torch.arange(c.block, device=device)
        while bool(going.any()):
            drafts = self._draft(anchors, target.position, context, temperature, seed)
            hidden, tapped = target.block(torch.cat((anchors[:, None], drafts), 1))
            positions = target.position[:, None] + places
            drawn = self._drawn(hidden, positions + 1, temperature, seed)
            equal = (drafts == drawn[:, :-1]).long().cumprod(1)
            # A stop token ends the block; one that was drafted right counts as accepted.
            ended = F.pad(torch.isin(drawn, stop)[:, :-1], (1, 0)).long().cumsum(1) > 0
            kept = ((places <= equal.sum(1, keepdim=True)) & ~ended).sum(1) * going
            accepted = (equal * (places[:-1] < kept[:, None])).sum(1)
            context.write(tapped, positions)
            target.commit(kept)
            anchors = torch.where(going, drawn.gather(1, (kept - 1).clamp_min(0)[:, None])[:, 0], anchors)
            for row, (number, right, tokens) in enumerate(
                zip(kept.tolist(), accepted.tolist(), drawn.tolist(), strict=True)
            ):
                if number:
                    found[row].tokens += tokens[:number]
                    found[row].accepted.append(right)
            going = torch.tensor(
                [len(d.tokens) < count and d.tokens[-1] not in self.stop for d in found], device=device
            )
        return [Decoded(d.tokens[:count], d.accepted) for d in found]
