"""The DFlash2 drafter in plain torch; tensor names and config are those of vLLM 0.30's `DFlash2Qwen3ForCausalLM`.

DFlash: block-diffusion drafting (arXiv 2602.06036): hidden states of some target layers become the drafter's context
keys and values; a block [anchor, mask x 7] is read in one pass, bidirectionally. DFlash2 adds a two-tap grouped dynamic
convolution around attention and MLP, and a selector that walks the best candidates of each slot.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from sparkinfer.errors import CheckpointError, ConfigError
from sparkinfer_models.checkpoint import save_tensors
from sparkinfer_models.network import apply_rotary, linear, rotary_tables
from sparkinfer_models.tokenizer import MASK_ID


@dataclass(frozen=True)
class DrafterConfig:
    """Shapes of a drafter; hidden size and vocabulary are its target's, whose embedding and head it shares.

    `block` counts the anchor: 8 gives 7 drafts. `target_layers` are 0-based; their outputs are tapped.
    """

    vocab_size: int = 2048
    hidden_size: int = 128
    num_layers: int = 3
    num_heads: int = 2
    num_kv_heads: int = 1
    head_dim: int = 128
    intermediate_size: int = 128
    target_layers: tuple[int, ...] = (1, 3, 5, 6, 7)
    num_target_layers: int = 8
    block: int = 8
    window: int = 2048
    conv_taps: int = 2
    conv_group: int = 16
    selector_rank: int = 32
    selector_top_k: int = 16
    max_positions: int = 16384
    theta: float = 10_000_000.0
    eps: float = 1e-6

    def to_hf(self) -> dict[str, Any]:
        """The `config.json` that vLLM reads. `causal` is said outright: its default for sliding layers is causal."""
        return {
            "architectures": ["DFlash2DraftModel"],
            "model_type": "qwen3",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.intermediate_size,
            "hidden_act": "silu",
            "rms_norm_eps": self.eps,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "max_position_embeddings": self.max_positions,
            "rope_parameters": {"rope_type": "default", "rope_theta": self.theta},
            "layer_types": ["sliding_attention"] * self.num_layers,
            "sliding_window": self.window,
            "use_sliding_window": True,
            "max_window_layers": 0,
            "tie_word_embeddings": False,
            "dtype": "bfloat16",
            "block_size": self.block,
            "num_target_layers": self.num_target_layers,
            "dflash_config": {
                "mask_token_id": MASK_ID,
                "target_layer_ids": list(self.target_layers),
                "causal": False,
                "conv_kernel_size": self.conv_taps,
                "conv_group_size": self.conv_group,
                "selector_rank": self.selector_rank,
                "selector_top_k": self.selector_top_k,
                "input_embedding_scale": 1.0,
                "output_multiplier": 1.0,
                "final_logit_softcapping": 0.0,
            },
        }

    @classmethod
    def from_hf(cls, folder: Path) -> DrafterConfig:
        """Reads the `config.json` of a drafter folder.

        Raises:
            ConfigError: the file is missing, or asks for something this implementation lacks.
        """
        path = folder / "config.json"
        if not path.is_file():
            raise ConfigError(f"{path} is missing: {folder} is no drafter folder")
        hf = json.loads(path.read_text())
        flash = hf.get("dflash_config", {})
        if hf.get("architectures") != ["DFlash2DraftModel"] or flash.get("causal") is not False:
            raise ConfigError(f"{path}: expected a DFlash2DraftModel with dflash_config.causal false")
        return cls(
            vocab_size=hf["vocab_size"],
            hidden_size=hf["hidden_size"],
            num_layers=hf["num_hidden_layers"],
            num_heads=hf["num_attention_heads"],
            num_kv_heads=hf["num_key_value_heads"],
            head_dim=hf["head_dim"],
            intermediate_size=hf["intermediate_size"],
            target_layers=tuple(flash["target_layer_ids"]),
            num_target_layers=hf["num_target_layers"],
            block=hf["block_size"],
            window=hf["sliding_window"],
            conv_taps=flash["conv_kernel_size"],
            conv_group=flash["conv_group_size"],
            selector_rank=flash["selector_rank"],
            selector_top_k=flash["selector_top_k"],
            max_positions=hf["max_position_embeddings"],
            theta=hf["rope_parameters"]["rope_theta"],
            eps=hf["rms_norm_eps"],
        )


def drafter_shapes(c: DrafterConfig) -> dict[str, tuple[int, ...]]:
    """Checkpoint name to shape."""
    h, q, kv = c.hidden_size, c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (h, len(c.target_layers) * h), "hidden_norm.weight": (h,)}
    for index in range(c.num_layers):
        layer: dict[str, tuple[int, ...]] = {
            "input_layernorm.weight": (h,),
            "self_attn.q_proj.weight": (q, h),
            "self_attn.k_proj.weight": (kv, h),
            "self_attn.v_proj.weight": (kv, h),
            "self_attn.o_proj.weight": (h, q),
            "self_attn.q_norm.weight": (c.head_dim,),
            "self_attn.k_norm.weight": (c.head_dim,),
            "post_attention_layernorm.weight": (h,),
            "mlp.gate_proj.weight": (c.intermediate_size, h),
            "mlp.up_proj.weight": (c.intermediate_size, h),
            "mlp.down_proj.weight": (h, c.intermediate_size),
        }
        for conv in ("attention_conv", "mlp_conv"):
            layer[f"{conv}.base_kernel"] = (2, c.conv_taps, h)
            layer[f"{conv}.kernel_projection.weight"] = (2 * c.conv_taps * (h // c.conv_group), h)
        shapes |= {f"layers.{index}.{name}": shape for name, shape in layer.items()}
    shapes["norm.weight"] = (h,)
    for name in ("predecessor_codebook", "successor_codebook"):
        shapes[f"candidate_selector.{name}"] = (c.vocab_size, c.selector_rank)
    shapes["candidate_selector.hidden_projection.weight"] = (c.selector_rank, h)
    return shapes


def plain_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm times weight (Qwen3's, not zero-centred), in float32, returned in x's dtype."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)


def block_convolution(x: Tensor, delta: Tensor, base: Tensor) -> Tensor:
    """Grouped dynamic convolution inside a block, zero before its first position.

    Args:
        x: [..., block, hidden].
        delta: [..., block, taps, groups], what the projection adds to the coefficients.
        base: [taps, hidden].
    """
    taps, groups = delta.shape[-2:]
    width = x.shape[-1] // groups
    blocks = x.unflatten(-1, (groups, width))
    coefficients = base.to(x.dtype).unflatten(-1, (groups, width)) + delta.unsqueeze(-1)
    output = coefficients[..., 0, :, :] * blocks
    for tap in range(1, taps):
        shifted = F.pad(blocks, (0, 0, 0, 0, tap, 0))[..., : x.shape[-2], :, :]
        output = output + coefficients[..., tap, :, :] * shifted
    return output.flatten(-2)


class Drafter(nn.Module):
    """The drafter without embedding and head: those are the target's, passed in where needed."""

    def __init__(self, config: DrafterConfig, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.config, self.dtype = config, dtype
        self.weights = nn.ParameterDict(
            {name.replace(".", "/"): nn.Parameter(torch.empty(s)) for name, s in drafter_shapes(config).items()}
        )

    def parameter(self, name: str) -> Tensor:
        """The parameter of this checkpoint name."""
        return self.weights[name.replace(".", "/")]

    def checkpoint(self) -> dict[str, Tensor]:
        """Checkpoint name to parameter."""
        return {name.replace("/", "."): value for name, value in self.weights.items()}

    def initialise(self, seed: int) -> None:
        """Fills the parameters; the convolutions begin as the identity, the selector as nothing."""
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, value in self.checkpoint().items():
                if name.endswith("norm.weight"):
                    value.fill_(1.0)
                elif name.endswith("base_kernel"):
                    value.zero_()
                    value[:, 0] = 1.0
                elif name.endswith("kernel_projection.weight"):
                    value.zero_()
                elif name.endswith("codebook"):
                    value.copy_(torch.randn(value.shape, generator=generator) * 0.1)
                else:
                    std = 0.5 * value.shape[-1] ** -0.5 / (3 if "o_proj" in name or "down_proj" in name else 1)
                    value.copy_(torch.randn(value.shape, generator=generator) * std)

    def context(self, taps: Tensor, positions: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Keys and values of context tokens for every layer.

        Args:
            taps: [batch, time, target layers x hidden], concatenated outputs of the tapped layers.
            positions: [time].

        Returns:
            Per layer: keys (normed, rotated) and values, [batch, time, kv heads, head_dim].
        """
        c = self.config
        states = linear(taps.to(self.dtype), self.parameter("fc.weight"))
        states = plain_norm(states, self.parameter("hidden_norm.weight"), c.eps)
        tables = rotary_tables(positions, c.head_dim, c.theta)
        pairs = []
        for index in range(c.num_layers):
            prefix = f"layers.{index}.self_attn."
            keys = linear(states, self.parameter(prefix + "k_proj.weight")).unflatten(-1, (-1, c.head_dim))
            keys = plain_norm(keys, self.parameter(prefix + "k_norm.weight"), c.eps)
            values = linear(states, self.parameter(prefix + "v_proj.weight")).unflatten(-1, (-1, c.head_dim))
            pairs.append((apply_rotary(keys, *tables), values))
        return pairs

    def _convolved(self, index: int, name: str, normed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The convolved input, and coefficients and base for the output side."""
        c = self.config
        projected = linear(normed, self.parameter(f"layers.{index}.{name}.kernel_projection.weight"))
        delta = projected.unflatten(-1, (2, c.conv_taps, c.hidden_size // c.conv_group))
        base = self.parameter(f"layers.{index}.{name}.base_kernel")
        return block_convolution(normed, delta[..., 0, :, :], base[0]), delta[..., 1, :, :], base[1]

    def forward(
        self, embedded: Tensor, positions: Tensor, context: list[tuple[Tensor, Tensor]], mask: Tensor
    ) -> Tensor:
        """Hidden states of query blocks, after the final norm.

        Args:
            embedded: [batch, blocks, block, hidden], the target's embeddings of [anchor, mask, ...].
            positions: [batch, blocks, block].
            context: what `context` returned.
            mask: bool [batch, blocks x block, time + blocks x block], True where a query sees a key: its context, then
                all blocks' own keys.
        """
        c = self.config
        x = embedded.to(self.dtype)
        shape = x.shape
        tables = rotary_tables(positions.flatten(), c.head_dim, c.theta)
        cos, sin = (t.unflatten(0, (shape[0], -1)).unsqueeze(2) for t in tables)

        def rotate(y: Tensor) -> Tensor:
            first, second = y.float().chunk(2, -1)
            return (y.float() * cos + torch.cat((-second, first), -1) * sin).to(y.dtype)

        for index in range(c.num_layers):
            layer = f"layers.{index}."
            normed = plain_norm(x, self.parameter(layer + "input_layernorm.weight"), c.eps)
            inside, delta, base = self._convolved(index, "attention_conv", normed)
            rows = inside.flatten(1, 2)
            q, k, v = (
                linear(rows, self.parameter(f"{layer}self_attn.{n}_proj.weight")).unflatten(-1, (-1, c.head_dim))
                for n in "qkv"
            )
            q = rotate(plain_norm(q, self.parameter(layer + "self_attn.q_norm.weight"), c.eps))
            k = rotate(plain_norm(k, self.parameter(layer + "self_attn.k_norm.weight"), c.eps))
            keys, values = (torch.cat((past, new), 1) for past, new in zip(context[index], (k, v), strict=True))
            groups = c.num_heads // c.num_kv_heads
            core = F.scaled_dot_product_attention(
                q.transpose(1, 2),
                keys.transpose(1, 2).repeat_interleave(groups, 1),
                values.transpose(1, 2).repeat_interleave(groups, 1),
                attn_mask=mask.unsqueeze(1),
            )
            out = linear(core.transpose(1, 2).flatten(2), self.parameter(layer + "self_attn.o_proj.weight"))
            x = x + block_convolution(out.view(shape), delta, base)
            normed = plain_norm(x, self.parameter(layer + "post_attention_layernorm.weight"), c.eps)
            inside, delta, base = self._convolved(index, "mlp_conv", normed)
            gate, up = (linear(inside, self.parameter(f"{layer}mlp.{n}_proj.weight")) for n in ("gate", "up"))
            out = linear(F.silu(gate) * up, self.parameter(layer + "mlp.down_proj.weight"))
            x = x + block_convolution(out, delta, base)
        return plain_norm(x, self.parameter("norm.weight"), c.eps)

    def edge_terms(self, hidden: Tensor, predecessors: Tensor) -> Tensor:
        """A[p] * W h, [..., rank]: what is multiplied with the successors' codes."""
        projected = linear(hidden, self.parameter("candidate_selector.hidden_projection.weight"))
        return self.parameter("candidate_selector.predecessor_codebook")[predecessors].to(hidden.dtype) * projected

    def walk(self, hidden: Tensor, logits: Tensor, anchor: int, temperature: float, noise: Tensor | None) -> list[int]:
        """Walks the selector from the anchor and returns the drafts.

        Args:
            hidden: [drafts, hidden] of the mask slots.
            logits: [drafts, vocab] float32, the target head's (unary scores).
            anchor: the token before the first draft.
            temperature: 0 for greedy.
            noise: [drafts, vocab] Gumbel noise, the same that the target adds at these positions; None at 0.
        """
        top, candidates = logits.topk(self.config.selector_top_k, -1)
        codes = self.parameter("candidate_selector.successor_codebook").to(hidden.dtype)
        drafts, previous = [], anchor
        for slot in range(hidden.shape[0]):
            term = self.edge_terms(hidden[slot], torch.tensor(previous, device=hidden.device))
            scores = top[slot] + (codes[candidates[slot]] @ term).float()
            if temperature > 0:
                assert noise is not None
                scores = scores / temperature + noise[slot][candidates[slot]]
            previous = int(candidates[slot][scores.argmax()])
            drafts.append(previous)
        return drafts


def save_drafter(drafter: Drafter, folder: Path) -> None:
    """Writes `model.safetensors` (BF16) and `config.json`."""
    save_tensors(drafter.checkpoint(), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(drafter.config.to_hf(), indent=2) + "\n")


def load_drafter(folder: Path, dtype: torch.dtype, device: torch.device | str = "cpu") -> Drafter:
    """Reads a drafter folder.

    Raises:
        CheckpointError: a tensor is missing, unknown or of another shape.
    """
    drafter = Drafter(DrafterConfig.from_hf(folder), dtype)
    path = folder / "model.safetensors"
    if not path.is_file():
        raise CheckpointError(f"{path} is missing")
    tensors = load_file(str(path))
    if tensors.keys() != drafter.checkpoint().keys():
        raise CheckpointError(f"{path}: tensors differ: {sorted(tensors.keys() ^ drafter.checkpoint().keys())[:4]}")
    with torch.no_grad():
        for name, value in drafter.checkpoint().items():
            if tensors[name].shape != value.shape:
                raise CheckpointError(f"{path}: {name} is {tuple(tensors[name].shape)}, not {tuple(value.shape)}")
            value.copy_(tensors[name].float())
    return drafter.to(device)
