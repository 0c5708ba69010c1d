"""The Qwen3.5 / 3.6 / 3.8 language model, dense and mixture of experts: the whole forward pass.

A pass takes a flat batch of tokens: first one token for each decoding request, then the prompts' shares one after
another. Every layer is a token mixer and a feed-forward block, each behind a norm and added to the residual stream.
The mixer is Gated DeltaNet (linear attention, a recurrent state per request) in most layers and full attention (paged
KV) in every fourth. `Batch` says which token belongs to whom; `Caches` holds what outlives the pass. Weights are fused
at load so that a sublayer reads its input once. Shapes: T tokens, the first n of them decode; H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from sparkinfer_kernels.attention.reference import DecodeGroup, PrefillSpan
from sparkinfer_kernels.dispatch import Ops
from sparkinfer_kernels.gated_delta_rule.reference import ChunkLayout
from sparkinfer_kernels.linear.reference import BlockedWeight
from sparkinfer_kernels.rotary.reference import rotary_table

from sparkinfer.models.config import FULL, ModelConfig
from sparkinfer.models.loader import WeightSource
from sparkinfer.models.output_matrix import OutputMatrix

PackedWeight = torch.Tensor | BlockedWeight
"""What `ops.pack_linear` makes of a weight and `ops.linear` takes."""
WIDTH_MULTIPLE = 16
"""A projection as wide as a multiple of this has no remainder in oneDNN's kernel: a fifth faster than four more."""

Save = tuple[int, int, int]
"""(sequence of the pass, tokens of its share, snapshot): where a checkpoint is taken."""


@dataclass(frozen=True, slots=True)
class Prefill:
    """The prompts' part of a pass: R sequences, most chunks first."""

    slots: torch.Tensor
    """[R] int64."""
    lengths: list[int]
    spans: list[PrefillSpan]
    """`first` counts from the first prefill token."""
    chunks: ChunkLayout
    saves: list[Save]


@dataclass(slots=True)
class Batch:
    """One pass, as the layers see it. Index tensors live on the model's device."""

    tokens: torch.Tensor
    """[T] int64."""
    positions: torch.Tensor
    """[T] int64."""
    num_decode: int
    kv_positions: torch.Tensor
    """[T] int64: flat position in the KV cache of every token."""
    decode_groups: list[DecodeGroup]
    decode_runs: list[tuple[int, int, int]]
    """(row, slot, count): the decode rows as runs of neighbouring slots."""
    prefill: Prefill | None
    outputs: torch.Tensor | None
    """[m] int64: tokens whose logits are wanted, None for all."""


@dataclass(slots=True)
class Caches:
    """What outlives a pass. Ll linear layers, Lf full-attention layers."""

    kv: torch.Tensor
    """[Lf, 2, blocks, block_tokens, Hkv, D], keys and values."""
    state: torch.Tensor
    """[Ll, slots, Hv, K, V] fp32."""
    window: torch.Tensor
    """[Ll, slots, W-1, C]."""
    snapshot_state: torch.Tensor
    """[snapshots, Ll, Hv, K, V] fp32, in host memory."""
    snapshot_window: torch.Tensor
    """[snapshots, Ll, W-1, C], in host memory."""


class Weights:
    """Takes tensors from a source and brings them to the model's device and dtype."""

    def __init__(
        self, source: WeightSource, device: torch.device, dtype: torch.dtype, ops: Ops, *, steady: bool = False
    ) -> None:
        """`steady`: see `ops.pack_linear`."""
        self.source, self.device, self.dtype, self.ops, self.steady = source, device, dtype, ops, steady

    def get(self, name: str, *shape: int) -> torch.Tensor:
        """A matrix in the model's dtype."""
        return self.source.get(name, shape).to(device=self.device, dtype=self.dtype)

    def fp32(self, name: str, *shape: int) -> torch.Tensor:
        """A vector kept in fp32: norm weights and decay constants."""
        return self.source.get(name, shape).to(device=self.device, dtype=torch.float32)

    def norm1(self, name: str, size: int) -> torch.Tensor:
        """A zero-centred norm weight plus one."""
        return self.fp32(name, size) + 1.0

    def linear(self, name: str, rows: int, columns: int) -> PackedWeight:
        """A projection [out, in], laid out for `ops.linear`."""
        return self.pack(self.get(name, rows, columns))

    def pack(self, weight: torch.Tensor) -> PackedWeight:
        """Lay out a projection [out, in] for `ops.linear`."""
        return self.ops.pack_linear(weight, self.steady)

    def stack(self, parts: Sequence[tuple[str, int]], columns: int, unused: int = 0) -> PackedWeight:
        """Projections of the same input as one: [sum of outs, in], laid out for `ops.linear`; zeros fill `unused`."""
        matrices = [self.get(name, rows, columns) for name, rows in parts]
        return self.pack(F.pad(torch.cat(matrices), (0, 0, 0, unused)))


class GatedDeltaNet:
    """Linear attention with a decaying, error-correcting state (arXiv 2412.06464)."""

    def __init__(self, config: ModelConfig, weights: Weights, prefix: str, index: int, ops: Ops) -> None:
        self.ops, self.index, self.eps = ops, index, config.rms_norm_eps
        self.key_heads, self.value_heads = config.linear_key_heads, config.linear_value_heads
        self.dk, self.dv = config.linear_key_dim, config.linear_value_dim
        # Convolution and chunk scan are steady in fp32.
        self.steady = config.steady
        values = self.value_heads * self.dv
        channels, hidden = config.conv_channels, config.hidden_size
        parts = [("qkv", channels), ("z", values), ("b", self.value_heads), ("a", self.value_heads)]
        unused = -sum(rows for _, rows in parts) % WIDTH_MULTIPLE
        self.sizes = [channels, values, 2 * self.value_heads, unused]
        named = [(f"{prefix}in_proj_{name}.weight", rows) for name, rows in parts]
        self.in_proj = weights.stack(named, hidden, unused)
        conv = weights.fp32(f"{prefix}conv1d.weight", channels, 1, config.conv_width)
        self.conv = conv.squeeze(1).t().contiguous()
        self.dt_bias = weights.fp32(f"{prefix}dt_bias", self.value_heads)
        self.neg_exp_a_log = -weights.fp32(f"{prefix}A_log", self.value_heads).exp()
        self.norm = weights.fp32(f"{prefix}norm.weight", self.dv)
        self.out_proj = weights.linear(f"{prefix}out_proj.weight", hidden, values)
        # Normalised heads come out with length sqrt(dk): bring both to 1, queries on to dk**-0.5.
        scale = torch.full((2 * self.key_heads, 1), self.dk**-0.5, device=weights.device)
        scale[: self.key_heads] *= self.dk**-0.5
        self.qk_scale = scale

    def __call__(self, x: torch.Tensor, batch: Batch, caches: Caches) -> torch.Tensor:
        """[T, H] to [T, H]; advances the states and windows of all requests of the pass."""
        qkv, z, gates, _ = self.ops.linear(x, self.in_proj).split(self.sizes, dim=-1)
        b, a = gates.float().chunk(2, dim=-1)
        g, beta = self.ops.decay_and_beta(b, a, self.neg_exp_a_log, self.dt_bias)
        n = batch.num_decode
        if batch.prefill is None:
            out = self._decode(qkv, g, beta, batch, caches)
        elif n == 0:
            out = self._prefill(qkv, g, beta, batch.prefill, caches)
        else:
            # Each part writes its rows: joining them afterwards would copy the prompts' once more.
            out = torch.empty(x.shape[0], self.value_heads, self.dv, dtype=torch.float32, device=x.device)
            out[:n] = self._decode(qkv[:n], g[:n], beta[:n], batch, caches)
            self._prefill(qkv[n:], g[n:], beta[n:], batch.prefill, caches, out[n:])
        out = self.ops.gated_rms_norm(out, z.unflatten(-1, (self.value_heads, self.dv)), self.norm, self.eps)
        return self.ops.linear(out.flatten(1), self.out_proj)

    def _heads(self, mixed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries with keys [T, 2 * Hk, K], normalised, and values [T, Hv, V] out of the convolution's channels."""
        keys = 2 * self.key_heads * self.dk
        qk = mixed[:, :keys].unflatten(-1, (2 * self.key_heads, self.dk))
        return self.ops.normalise_qk(qk, self.qk_scale), mixed[:, keys:].unflatten(-1, (self.value_heads, self.dv))

    def _decode(
        self, qkv: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, batch: Batch, caches: Caches
    ) -> torch.Tensor:
        mixed = self.ops.causal_conv1d_update(qkv, caches.window[self.index], self.conv, batch.decode_runs, self.steady)
        qk, v = self._heads(mixed)
        return self.ops.recurrent_gated_delta_rule(qk, v, g, beta, caches.state[self.index], batch.decode_runs)

    def _prefill(
        self,
        qkv: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        prefill: Prefill,
        caches: Caches,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        windows, states = caches.window[self.index], caches.state[self.index]
        window = windows.index_select(0, prefill.slots)
        state = states.index_select(0, prefill.slots)
        window_saves = [(row, count, caches.snapshot_window[snap, self.index]) for row, count, snap in prefill.saves]
        state_saves = [caches.snapshot_state[snap, self.index] for _, _, snap in prefill.saves]
        mixed = self.ops.causal_conv1d_varlen(qkv, window, self.conv, prefill.lengths, window_saves, self.steady)
        qk, v = self._heads(mixed)
        v = v.float() if self.steady else v
        out = self.ops.chunk_gated_delta_rule(qk, v, g, beta, state, prefill.chunks, state_saves, out)
        windows.index_copy_(0, prefill.slots, window)
        states.index_copy_(0, prefill.slots, state)
        return out


class Attention:
    """Full attention with grouped queries, per-head norms, partial rotary embedding and an output gate."""

    def __init__(self, config: ModelConfig, weights: Weights, prefix: str, index: int, ops: Ops) -> None:
        self.ops, self.index, self.eps = ops, index, config.rms_norm_eps
        self.heads, self.kv_heads, self.d = config.num_heads, config.num_kv_heads, config.head_dim
        self.steady = config.steady
        hidden = config.hidden_size
        # q_proj interleaves query and gate per head; stacked as queries, keys, gates, values the queries and keys
        # come out side by side and share their norm and rotation.
        q_gate = weights.get(f"{prefix}q_proj.weight", self.heads * 2 * self.d, hidden)
        query, gate = q_gate.view(self.heads, 2, self.d, hidden).unbind(1)
        key = weights.get(f"{prefix}k_proj.weight", self.kv_heads * self.d, hidden)
        value = weights.get(f"{prefix}v_proj.weight", self.kv_heads * self.d, hidden)
        self.in_proj = weights.pack(torch.cat([query.reshape(-1, hidden), key, gate.reshape(-1, hidden), value]))
        self.sizes = [(self.heads + self.kv_heads) * self.d, self.heads * self.d, self.kv_heads * self.d]
        q_norm = weights.norm1(f"{prefix}q_norm.weight", self.d).expand(self.heads, -1)
        k_norm = weights.norm1(f"{prefix}k_norm.weight", self.d).expand(self.kv_heads, -1)
        self.norm1 = torch.cat([q_norm, k_norm])
        self.o_proj = weights.linear(f"{prefix}o_proj.weight", hidden, self.heads * self.d)

    def __call__(
        self, x: torch.Tensor, batch: Batch, caches: Caches, cos: torch.Tensor, sin: torch.Tensor
    ) -> torch.Tensor:
        """[T, H] to [T, H]; stores the pass's keys and values. cos and sin are the tokens' [T, 1, rot / 2]."""
        qk, gate, v = self.ops.linear(x, self.in_proj).split(self.sizes, dim=-1)
        qk = self.ops.qk_norm_rotary(qk.unflatten(-1, (-1, self.d)), self.norm1, cos, sin, self.eps)
        q, k = qk.split((self.heads, self.kv_heads), dim=1)
        v = v.unflatten(-1, (self.kv_heads, self.d))
        k_cache, v_cache = caches.kv[self.index]
        self.ops.write_kv(k, v, k_cache, v_cache, batch.kv_positions)
        n, scale = batch.num_decode, self.d**-0.5
        if batch.prefill is None:
            out = self.ops.attention_decode(q, k_cache, v_cache, batch.decode_groups, scale)
        else:
            out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
            if n:
                out[:n] = self.ops.attention_decode(q[:n], k_cache, v_cache, batch.decode_groups, scale)
            spans, rows = batch.prefill.spans, (q[n:], k[n:], v[n:])
            self.ops.attention_prefill(*rows, k_cache, v_cache, spans, scale, self.steady, out[n:])
        return self.ops.linear(out.flatten(1).mul_(torch.sigmoid(gate)), self.o_proj)


class DenseMlp:
    """SwiGLU feed-forward block."""

    def __init__(self, config: ModelConfig, weights: Weights, prefix: str, ops: Ops) -> None:
        self.ops, hidden, inner = ops, config.hidden_size, config.intermediate_size
        parts = [(f"{prefix}gate_proj.weight", inner), (f"{prefix}up_proj.weight", inner)]
        self.gate_up = weights.stack(parts, hidden)
        self.down = weights.linear(f"{prefix}down_proj.weight", hidden, inner)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, H] to [T, H]."""
        return self.ops.linear(self.ops.swiglu(self.ops.linear(x, self.gate_up)), self.down)


class MoeMlp:
    """Routed experts and one shared expert behind a sigmoid gate."""

    def __init__(self, config: ModelConfig, weights: Weights, prefix: str, ops: Ops) -> None:
        self.ops, self.top_k = ops, config.experts_per_token
        hidden, shared = config.hidden_size, config.shared_intermediate_size
        router = [(f"{prefix}gate.weight", config.num_experts), (f"{prefix}shared_expert_gate.weight", 1)]
        self.router = weights.stack(router, hidden)
        self.gate_up, self.down = self._experts(config, weights, f"{prefix}experts.")
        shared_parts = [(f"{prefix}shared_expert.{name}_proj.weight", shared) for name in ("gate", "up")]
        self.shared_gate_up = weights.stack(shared_parts, hidden)
        self.shared_down = weights.linear(f"{prefix}shared_expert.down_proj.weight", hidden, shared)

    @staticmethod
    def _experts(config: ModelConfig, weights: Weights, prefix: str) -> tuple[torch.Tensor, torch.Tensor]:
        """All experts' matrices [E, H, 2 * I] and [E, I, H]: stored fused, or expert by expert."""
        count, inner, hidden = config.num_experts, config.moe_intermediate_size, config.hidden_size
        if weights.source.has(f"{prefix}gate_up_proj"):
            gate_up = weights.get(f"{prefix}gate_up_proj", count, 2 * inner, hidden).transpose(1, 2).contiguous()
            return gate_up, weights.get(f"{prefix}down_proj", count, hidden, inner).transpose(1, 2).contiguous()
        gate_up = torch.empty(count, hidden, 2 * inner, dtype=weights.dtype, device=weights.device)
        down = torch.empty(count, inner, hidden, dtype=weights.dtype, device=weights.device)
        for expert in range(count):
            one = f"{prefix}{expert}."
            gate_up[expert, :, :inner] = weights.get(f"{one}gate_proj.weight", inner, hidden).t()
            gate_up[expert, :, inner:] = weights.get(f"{one}up_proj.weight", inner, hidden).t()
            down[expert] = weights.get(f"{one}down_proj.weight", hidden, inner).t()
        return gate_up, down

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, H] to [T, H]."""
        return self.ops.moe(x, self.router, self.gate_up, self.down, self.shared_gate_up, self.shared_down, self.top_k)


@dataclass(slots=True)
class Layer:
    """One decoder layer's parts."""

    mixer: GatedDeltaNet | Attention
    mlp: DenseMlp | MoeMlp
    norm1_mixer: torch.Tensor
    norm1_mlp: torch.Tensor


class Qwen35Model:
    """The language model with its output matrix."""

    def __init__(
        self,
        config: ModelConfig,
        source: WeightSource,
        *,
        device: torch.device,
        dtype: torch.dtype,
        ops: Ops,
        max_positions: int,
    ) -> None:
        """Take all weights from `source`.

        Raises:
            CheckpointError: naming the tensor that is missing, misshapen or left over.
        """
        self.config, self.ops, self.eps = config, ops, config.rms_norm_eps
        weights = Weights(source, device, dtype, ops, steady=config.steady)
        hidden, vocab = config.hidden_size, config.vocab_size
        self.embedding = weights.get("model.embed_tokens.weight", vocab, hidden)
        tied = config.tie_word_embeddings
        self.lm_head = OutputMatrix(self.embedding if tied else weights.get("lm_head.weight", vocab, hidden))
        self.norm1 = weights.norm1("model.norm.weight", hidden)
        self.rotary = rotary_table(max_positions, config.rotary_dim, config.rope_theta, device)
        self.layers = [self._layer(number, weights) for number in range(config.num_layers)]
        source.finish()

    def _layer(self, number: int, weights: Weights) -> Layer:
        config, prefix = self.config, f"model.layers.{number}."
        # A layer's place in its own cache: how many of its kind come before it.
        index = config.layer_types[:number].count(config.layer_types[number])
        mixer: GatedDeltaNet | Attention
        if config.layer_types[number] == FULL:
            mixer = Attention(config, weights, f"{prefix}self_attn.", index, self.ops)
        else:
            mixer = GatedDeltaNet(config, weights, f"{prefix}linear_attn.", index, self.ops)
        block = MoeMlp if config.num_experts else DenseMlp
        return Layer(
            mixer=mixer,
            mlp=block(config, weights, f"{prefix}mlp.", self.ops),
            norm1_mixer=weights.norm1(f"{prefix}input_layernorm.weight", config.hidden_size),
            norm1_mlp=weights.norm1(f"{prefix}post_attention_layernorm.weight", config.hidden_size),
        )

    def forward(self, batch: Batch, caches: Caches) -> torch.Tensor:
        """Run one pass.

        Returns:
            [m, V] fp32 logits of the tokens in `batch.outputs` (of all T when that is None).
        """
        return self.logits(self.hidden(batch, caches))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[m, H] final hidden states to [m, V] fp32 logits."""
        if hidden.shape[0] == 0:
            return torch.empty(0, self.config.vocab_size, device=hidden.device)
        return self.lm_head(hidden)

    def hidden(self, batch: Batch, caches: Caches) -> torch.Tensor:
        """Run one pass up to the output matrix: [m, H], normed, of the tokens in `batch.outputs` (or of all T)."""
        residual = F.embedding(batch.tokens, self.embedding)
        cos, sin = self.rotary.index_select(0, batch.positions).unsqueeze(2).unbind(1)
        x = self.ops.rms_norm(residual, self.layers[0].norm1_mixer, self.eps)
        last = len(self.layers) - 1
        for number, layer in enumerate(self.layers):
            if isinstance(layer.mixer, Attention):
                x = layer.mixer(x, batch, caches, cos, sin)
            else:
                x = layer.mixer(x, batch, caches)
            if number == last and batch.outputs is not None:
                # Nothing after the last mixer looks at other tokens: go on with those that are asked for.
                if batch.outputs.shape[0] == 0:
                    return x[:0]
                x, residual = x.index_select(0, batch.outputs), residual.index_select(0, batch.outputs)
            x, residual = self.ops.add_rms_norm(x, residual, layer.norm1_mlp, self.eps)
            x = layer.mlp(x)
            following = self.norm1 if number == last else self.layers[number + 1].norm1_mixer
            x, residual = self.ops.add_rms_norm(x, residual, following, self.eps)
        return x
