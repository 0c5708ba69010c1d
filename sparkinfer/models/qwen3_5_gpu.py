"""The forward pass of `qwen3_5` on a GPU, around fused kernels: dense and mixture of experts.

The same layers, caches and weights as in `qwen3_5`; what differs is that nothing depends on a length the host knows. A
pass has T padded rows (decode rows first, then the prompts' tokens), its lengths lie in device tensors, and every
kernel skips padding, so that a whole pass is captured once as a CUDA graph and replayed for any step that fits. Shapes:
n decode rows, T tokens in all, R prompts, H hidden size; `PassInputs` names the rest.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from sparkinfer_kernels.gpu_ops import GpuOps
from sparkinfer_kernels.rotary.reference import rotary_table

from sparkinfer.models.config import FULL, ModelConfig
from sparkinfer.models.gpu_moe import MoeMlp, Reader
from sparkinfer.models.gpu_weights import GpuWeights, Projection, Rows
from sparkinfer.models.loader import WeightSource
from sparkinfer.models.qwen3_5 import Caches


@dataclass(frozen=True, slots=True)
class GpuOptions:
    """Where speed may cost accuracy. The defaults compute as the checkpoint says."""

    fp8_prefill: bool = False
    """Passes of many rows multiply in FP8: FP8 blocks as they are stored, a second copy of NVFP4 weights; activations
    are scaled by block or row."""
    fp8_kv: bool = False
    """Keys and values are kept in FP8."""
    bf16_state: bool = False
    """Recurrent states are kept in bfloat16."""
    bf16_copy: bool = False
    """Passes of many rows multiply with a bf16 copy of NVFP4 weights instead of expanding them each time: the same
    numbers, for two more bytes a weight."""
    fp8_head: bool = False
    """The output matrix, where it is stored in 16 bits, is kept in FP8 with a scale for each row."""

    def kv_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Of the KV cache of a model of that dtype."""
        return torch.float8_e4m3fn if self.fp8_kv else dtype

    @property
    def state_dtype(self) -> torch.dtype:
        """Of the recurrent states."""
        return torch.bfloat16 if self.bf16_state else torch.float32


@dataclass(frozen=True, slots=True)
class CheckpointBuffer:
    """Where a pass writes the states that it saves: entries in the order of the pass's list."""

    state: torch.Tensor
    """[entries, Ll, Hv, K, V]."""
    window: torch.Tensor
    """[entries, Ll, W-1, C]."""

    def entry(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """State and window of one entry."""
        return self.state[index], self.window[index]


@dataclass(frozen=True, slots=True)
class PassInputs:
    """One pass of padded shape, on the device. All integers are int32."""

    num_decode: int
    tokens: torch.Tensor
    """[T]."""
    positions: torch.Tensor
    """[T]: place of each token in its sequence."""
    kv_positions: torch.Tensor
    """[T]: flat position in the KV cache."""
    slots: torch.Tensor
    """[n + R]: of the decode rows, then of the prompts."""
    cu_seqlens: torch.Tensor
    """[R + 1]: first row of each prompt, counted from the first prompt token."""
    starts: torch.Tensor
    """[R]: tokens that each prompt has in the caches already."""
    block_table: torch.Tensor
    """[n + R, max_blocks]."""
    outputs: torch.Tensor | None
    """[m]: rows whose logits are wanted; None for all."""
    checkpoint_sequences: torch.Tensor
    """[entries]: prompt of each checkpoint, -1 for none."""
    checkpoint_positions: torch.Tensor
    """[entries]."""
    checkpoints: CheckpointBuffer | None
    workspaces: Workspaces


@dataclass(frozen=True, slots=True)
class Workspaces:
    """Scratch memory of the kernels."""

    attention: object
    gdn_decode: object
    gdn_prefill: object
    moe: object


class GatedDeltaNet:
    """Linear attention: see `qwen3_5.GatedDeltaNet`."""

    def __init__(self, config: ModelConfig, weights: GpuWeights, prefix: str, index: int) -> None:
        self.ops, self.index, self.eps = weights.ops, index, config.rms_norm_eps
        values = config.linear_value_heads * config.linear_value_dim
        channels, hidden = config.conv_channels, config.hidden_size
        parts = [("qkv", channels), ("z", values), ("b", config.linear_value_heads), ("a", config.linear_value_heads)]
        self.in_proj = weights.projection([(f"{prefix}in_proj_{name}.weight", rows) for name, rows in parts], hidden)
        conv = weights.fp32(f"{prefix}conv1d.weight", channels, 1, config.conv_width)
        self.conv = conv.squeeze(1).t().contiguous()
        self.dt_bias = weights.fp32(f"{prefix}dt_bias", config.linear_value_heads)
        self.neg_exp_a_log = -weights.fp32(f"{prefix}A_log", config.linear_value_heads).exp()
        self.norm = weights.fp32(f"{prefix}norm.weight", config.linear_value_dim)
        self.out_proj = weights.projection([(f"{prefix}out_proj.weight", hidden)], values)
        self.width = values

    def __call__(self, x: Rows, inputs: PassInputs, caches: Caches) -> torch.Tensor:
        """[T, H] to [T, H]; advances the states and windows of all requests of the pass."""
        proj = self.in_proj(x)
        n, total = inputs.num_decode, proj.shape[0]
        out = torch.empty(total, self.width, dtype=proj.dtype, device=proj.device)
        window, state = caches.window[self.index], caches.state[self.index]
        constants = self.conv, self.neg_exp_a_log, self.dt_bias, self.norm, self.eps
        if n:
            self.ops.gdn_decode(
                proj[:n], window, state, inputs.slots[:n], *constants, out[:n], workspace=inputs.workspaces.gdn_decode
            )
        if total > n:
            self.ops.gdn_prefill(
                proj[n:], window, state, inputs.slots[n:], inputs.cu_seqlens, inputs.starts, *constants, out[n:],
                workspace=inputs.workspaces.gdn_prefill, checkpoints=self._checkpoints(inputs),
            )  # fmt: skip
        return self.out_proj(self.out_proj.rows(out))

    def _checkpoints(self, inputs: PassInputs) -> object:
        if inputs.checkpoints is None:
            return None
        buffer = inputs.checkpoints
        return self.ops.gdn_checkpoints(
            inputs.checkpoint_sequences,
            inputs.checkpoint_positions,
            buffer.state[:, self.index],
            buffer.window[:, self.index],
        )


class Attention:
    """Full attention with an output gate: see `qwen3_5.Attention`."""

    def __init__(self, config: ModelConfig, weights: GpuWeights, prefix: str, index: int) -> None:
        self.ops, self.index, self.eps = weights.ops, index, config.rms_norm_eps
        self.heads, self.kv_heads, self.d = config.num_heads, config.num_kv_heads, config.head_dim
        self.in_proj = weights.attention_projection(config, prefix)
        self.q_norm1 = weights.norm1(f"{prefix}q_norm.weight", self.d)
        self.k_norm1 = weights.norm1(f"{prefix}k_norm.weight", self.d)
        self.o_proj = weights.projection([(f"{prefix}o_proj.weight", config.hidden_size)], self.heads * self.d)
        self.kv_scales = weights.kv_scales(config)

    def __call__(self, x: Rows, inputs: PassInputs, caches: Caches, rotary: torch.Tensor) -> torch.Tensor:
        """[T, H] to [T, H]; stores the pass's keys and values."""
        proj = self.in_proj(x)
        n, total = inputs.num_decode, proj.shape[0]
        q = torch.empty(total, self.heads, self.d, dtype=proj.dtype, device=proj.device)
        out = torch.empty_like(q)
        k_cache, v_cache = caches.kv[self.index]
        self.ops.qk_norm_rotary_write(
            proj, inputs.positions, inputs.kv_positions, self.q_norm1, self.k_norm1, rotary, k_cache, v_cache,
            self.eps, q, kv_scales=self.kv_scales,
        )  # fmt: skip
        gate = self.ops.gate_view(proj, self.heads, self.kv_heads, self.d)
        scale, workspace = self.d**-0.5, inputs.workspaces.attention
        if n:
            self.ops.attention_decode(
                q[:n], gate[:n], k_cache, v_cache, inputs.block_table[:n], inputs.positions[:n], scale, workspace,
                out[:n], self.kv_scales,
            )  # fmt: skip
        if total > n:
            self.ops.attention_prefill(
                q[n:], gate[n:], k_cache, v_cache, inputs.block_table[n:], inputs.cu_seqlens, inputs.starts, scale,
                workspace, out[n:], self.kv_scales,
            )  # fmt: skip
        return self.o_proj(self.o_proj.rows(out.flatten(1)))


class DenseMlp:
    """SwiGLU feed-forward block."""

    def __init__(self, config: ModelConfig, weights: GpuWeights, prefix: str) -> None:
        hidden, inner = config.hidden_size, config.intermediate_size
        self.gate_up = weights.gate_up((f"{prefix}gate_proj.weight", inner), (f"{prefix}up_proj.weight", inner), hidden)
        self.down = weights.projection([(f"{prefix}down_proj.weight", hidden)], inner)

    @property
    def input(self) -> Projection:
        """What reads the norm's output."""
        return self.gate_up.projection

    def __call__(self, x: Rows, inputs: PassInputs) -> torch.Tensor:
        """[T, H] to [T, H]."""
        rows = self.down.empty_rows(x.count)
        self.gate_up(x, rows)
        return self.down(rows)


@dataclass(slots=True)
class Layer:
    """One decoder layer's parts."""

    mixer: GatedDeltaNet | Attention
    mlp: DenseMlp | MoeMlp
    norm1_mixer: torch.Tensor
    norm1_mlp: torch.Tensor


class GpuModel:
    """The language model with its output matrix, on one GPU."""

    def __init__(
        self,
        config: ModelConfig,
        source: WeightSource,
        *,
        device: torch.device,
        ops: GpuOps,
        options: GpuOptions,
        max_positions: int,
        max_rows: int,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        """Take all weights from `source`.

        `max_positions` bounds a sequence, `max_rows` a pass. The kernels take bfloat16 only; their twins any `dtype`.

        Raises:
            CheckpointError: naming the tensor that is missing, misshapen or left over.
        """
        self.config, self.ops, self.options, self.device, self.dtype = config, ops, options, device, dtype
        self.eps = config.rms_norm_eps
        weights = GpuWeights(
            source, device, dtype, ops, fp8_prefill=options.fp8_prefill, fp8_kv=options.fp8_kv,
            bf16_copy=options.bf16_copy, fp8_head=options.fp8_head,
        )  # fmt: skip
        hidden, vocab = config.hidden_size, config.vocab_size
        self.embedding = weights.get("model.embed_tokens.weight", vocab, hidden)
        tied = config.tie_word_embeddings
        head = "model.embed_tokens.weight" if tied else "lm_head.weight"
        self.lm_head = weights.output_matrix(head, vocab, hidden)
        self.norm1 = weights.norm1("model.norm.weight", hidden)
        self.rotary = rotary_table(max_positions, config.rotary_dim, config.rope_theta, device)
        self.layers = [self._layer(number, weights) for number in range(config.num_layers)]
        weights.allocate(max_rows)
        source.finish()

    def _layer(self, number: int, weights: GpuWeights) -> Layer:
        config, prefix = self.config, f"model.layers.{number}."
        # A layer's place in its own cache: how many of its kind come before it.
        index = config.layer_types[:number].count(config.layer_types[number])
        mixer: GatedDeltaNet | Attention
        if config.layer_types[number] == FULL:
            mixer = Attention(config, weights, f"{prefix}self_attn.", index)
        else:
            mixer = GatedDeltaNet(config, weights, f"{prefix}linear_attn.", index)
        block = MoeMlp if config.num_experts else DenseMlp
        return Layer(
            mixer=mixer,
            mlp=block(config, weights, f"{prefix}mlp."),
            norm1_mixer=weights.norm1(f"{prefix}input_layernorm.weight", config.hidden_size),
            norm1_mlp=weights.norm1(f"{prefix}post_attention_layernorm.weight", config.hidden_size),
        )

    def forward(self, inputs: PassInputs, caches: Caches, logits: torch.Tensor | None = None) -> torch.Tensor:
        """Run one pass.

        Args:
            inputs: the pass.
            caches: advanced in place.
            logits: [m, V] float32, written when given.

        Returns:
            [m, V] float32 logits of the rows in `inputs.outputs` (of all T when that is None).
        """
        return self.logits(self.hidden(inputs, caches), logits)

    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """The output matrix: [m, H] to [m, V] float32 (`docs/accuracy.md` says why), into `out` when given."""
        if out is None:
            out = torch.empty(hidden.shape[0], self.lm_head.n, dtype=torch.float32, device=hidden.device)
        return self.lm_head(self.lm_head.rows(hidden), out)

    def hidden(self, inputs: PassInputs, caches: Caches) -> torch.Tensor:
        """Run one pass up to the final norm: [m, H]."""
        self._plan(inputs)
        count, last = inputs.tokens.shape[0], len(self.layers) - 1
        residual = torch.empty(count, self.config.hidden_size, dtype=self.dtype, device=self.device)
        x = self.layers[0].mixer.in_proj.empty_rows(count)
        self.ops.embed_rms_norm(
            inputs.tokens, self.embedding, self.layers[0].norm1_mixer, self.eps, residual, x.bf16, x.fp8
        )
        for number, layer in enumerate(self.layers):
            if isinstance(layer.mixer, Attention):
                y = layer.mixer(x, inputs, caches, self.rotary)
            else:
                y = layer.mixer(x, inputs, caches)
            # Nothing after the last mixer looks at other tokens: go on with those that are asked for.
            picked = inputs.outputs if number == last else None
            x, residual = self._add_norm(y, residual, layer.norm1_mlp, layer.mlp.input, picked)
            y = layer.mlp(x, inputs)
            if number < last:
                following = self.layers[number + 1]
                x, residual = self._add_norm(y, residual, following.norm1_mixer, following.mixer.in_proj)
        final, _ = self.ops.add_rms_norm(y, residual, self.norm1, self.eps, torch.empty_like(y))
        return final

    def _add_norm(
        self,
        y: torch.Tensor,
        residual: torch.Tensor,
        norm1: torch.Tensor,
        reader: Reader,
        picked: torch.Tensor | None = None,
    ) -> tuple[Rows, torch.Tensor]:
        """Add a sublayer's output to the residual and norm the sum for the projection that reads it."""
        count = y.shape[0] if picked is None else picked.shape[0]
        kept = None if picked is None else torch.empty(count, y.shape[1], dtype=y.dtype, device=y.device)
        rows = reader.empty_rows(count)
        _, residual = self.ops.add_rms_norm(y, residual, norm1, self.eps, rows.bf16, rows.fp8, picked, kept)
        return rows, residual

    def _plan(self, inputs: PassInputs) -> None:
        """What all layers of a kind share: work lists of attention, chunks of the scan."""
        n, total = inputs.num_decode, inputs.tokens.shape[0]
        prompts = total > n
        if self.config.num_full_layers:
            self.ops.plan_attention(
                inputs.workspaces.attention,
                inputs.positions[:n] if n else None,
                inputs.cu_seqlens if prompts else None,
                inputs.starts if prompts else None,
            )
        if self.config.num_linear_layers and prompts:
            wanted = None
            if inputs.checkpoints is not None:
                buffer = inputs.checkpoints
                wanted = self.ops.gdn_checkpoints(
                    inputs.checkpoint_sequences, inputs.checkpoint_positions, buffer.state[:, 0], buffer.window[:, 0]
                )
            self.ops.plan_gdn_prefill(
                inputs.workspaces.gdn_prefill, inputs.cu_seqlens, inputs.starts, total - n, wanted
            )
