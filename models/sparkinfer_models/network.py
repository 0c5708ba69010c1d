"""The hybrid network in plain torch, for training: parameter names are those of transformers' Qwen3.5 classes.

Sub-blocks are pure functions of tensors, so that one compiled form serves all layers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparkinfer_models import delta_rule
from sparkinfer_models.config import ROPE_THETA, ModelConfig


def zero_centred_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm times (1 + weight), in float32, returned in x's dtype."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * (1.0 + weight.float())).to(x.dtype)


def _l2_normalised(x: Tensor) -> Tensor:
    wide = x.float()
    return wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + 1e-6)


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight.T with the weight in x's dtype (weights are kept in float32)."""
    return F.linear(x, weight.to(x.dtype))


def causal_conv(x: Tensor, weight: Tensor, window: Tensor | None) -> Tensor:
    """Depthwise causal convolution and SiLU. x [batch, time, channels], weight [channels, 1, taps]; `window` holds the
    taps - 1 inputs before x, zero when None."""
    taps = weight.shape[-1]
    padded = F.pad(x, (0, 0, taps - 1, 0)) if window is None else torch.cat((window.to(x.dtype), x), 1)
    time = x.shape[1]
    total = sum(padded[:, i : i + time].float() * weight[:, 0, i].float() for i in range(taps))
    return F.silu(total).to(x.dtype)  # type: ignore[arg-type]


def rotary_tables(positions: Tensor, rotary_dim: int, theta: float = ROPE_THETA) -> tuple[Tensor, Tensor]:
    """cos and sin, [positions, rotary_dim] float32. For text the three mrope sections hold the same positions."""
    exponent = torch.arange(0, rotary_dim, 2, dtype=torch.float32, device=positions.device) / rotary_dim
    angles = positions.float()[:, None] * (1.0 / theta**exponent)[None]
    angles = torch.cat((angles, angles), -1)
    return angles.cos(), angles.sin()


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the first dimensions of x [batch, time, heads, dim]; cos and sin are [time, rotary_dim]."""
    size = cos.shape[-1]
    turned, rest = x[..., :size].float(), x[..., size:]
    first, second = turned.chunk(2, -1)
    rotated = torch.cat((-second, first), -1)
    turned = turned * cos[None, :, None] + rotated * sin[None, :, None]
    return torch.cat((turned.to(x.dtype), rest), -1)


@dataclass
class LayerCache:
    """What one layer keeps between calls: (keys, values) or (convolution window, state)."""

    first: Tensor | None = None
    second: Tensor | None = None


@dataclass
class Cache:
    """Decode state of a batch whose rows all stand at `position`. Calls return a new one and leave the old intact."""

    layers: list[LayerCache]
    position: int = 0

    @classmethod
    def empty(cls, num_layers: int) -> Cache:
        return cls([LayerCache() for _ in range(num_layers)])


@dataclass
class Output:
    """Hidden states after the final norm, tapped layer outputs, load-balancing loss (MoE only), next cache."""

    hidden: Tensor
    taps: list[Tensor] = field(default_factory=list)
    balance: Tensor | None = None
    cache: Cache | None = None


def delta_inputs(
    x: Tensor, p: dict[str, Tensor], window: Tensor | None, shape: tuple[int, int, int], eps: float
) -> tuple[Tensor, ...]:
    """Everything of a gated DeltaNet layer before the delta rule; `shape` is (k heads, v heads, dim).

    Returns q, k, v [batch, time, v heads, dim], beta, g [batch, time, v heads] float32, z, and the raw projection that
    the convolution window is cut from.
    """
    k_heads, v_heads, dim = shape
    normed = zero_centred_norm(x, p["norm"], eps)
    raw = linear(normed, p["qkv"])
    z = linear(normed, p["z"])
    mixed = causal_conv(raw, p["conv"], window)
    q, k, v = mixed.split([k_heads * dim, k_heads * dim, v_heads * dim], -1)
    repeat = v_heads // k_heads
    q = (_l2_normalised(q.unflatten(-1, (k_heads, dim))) * dim**-0.5).to(x.dtype).repeat_interleave(repeat, 2)
    k = _l2_normalised(k.unflatten(-1, (k_heads, dim))).to(x.dtype).repeat_interleave(repeat, 2)
    beta = linear(normed, p["b"]).float().sigmoid()
    g = -p["A_log"].float().exp() * F.softplus(linear(normed, p["a"]).float() + p["dt_bias"].float())
    return q, k, v.unflatten(-1, (v_heads, dim)), beta, g, z, raw


def delta_chunk_terms(
    x: Tensor, p: dict[str, Tensor], window: Tensor | None, shape: tuple[int, int, int], eps: float
) -> tuple[tuple[Tensor, ...], Tensor, Tensor]:
    """`delta_inputs` cut into chunks, with the state-free parts of the delta rule: one function to compile."""
    q, k, v, beta, g, z, raw = delta_inputs(x, p, window, shape, eps)
    terms = delta_rule.chunk_terms(*(delta_rule.to_chunks(t) for t in (q, k, v, beta, g)))
    return terms, z, raw


def delta_output(x: Tensor, core: Tensor, z: Tensor, p: dict[str, Tensor], eps: float) -> Tensor:
    """Gated norm (plain weight, silu gate, float32), output projection and residual."""
    wide = core.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * p["gated_norm"].float()
    gated = wide.flatten(-2) * F.silu(z.float())
    return x + linear(gated.to(x.dtype), p["out"])


def attention_inputs(
    x: Tensor, p: dict[str, Tensor], cos: Tensor, sin: Tensor, head_dim: int, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v [batch, time, heads, head_dim] with norms and rotary applied, and the output gate."""
    normed = zero_centred_norm(x, p["norm"], eps)
    q, gate = linear(normed, p["q"]).unflatten(-1, (-1, 2 * head_dim)).chunk(2, -1)
    k = linear(normed, p["k"]).unflatten(-1, (-1, head_dim))
    v = linear(normed, p["v"]).unflatten(-1, (-1, head_dim))
    q = apply_rotary(zero_centred_norm(q, p["q_norm"], eps), cos, sin)
    k = apply_rotary(zero_centred_norm(k, p["k_norm"], eps), cos, sin)
    return q, k, v, gate.flatten(-2)


def attention_output(x: Tensor, core: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
    """Sigmoid gate, output projection and residual; all are [rows, features]."""
    return x + linear(core * gate.sigmoid(), weight)


def dense_mlp(x: Tensor, p: dict[str, Tensor], eps: float) -> Tensor:
    """SwiGLU block with its norm and residual."""
    normed = zero_centred_norm(x, p["norm"], eps)
    return x + linear(F.silu(linear(normed, p["gate"])) * linear(normed, p["up"]), p["down"])


def moe_mlp(x: Tensor, p: dict[str, Tensor], eps: float, top_k: int) -> tuple[Tensor, Tensor]:
    """Mixture of experts with a shared expert; returns the block's output and its load-balancing loss.

    All experts are computed as one wide MLP whose activations are multiplied by the routing weights, zero for experts
    not chosen: with few small experts this is cheaper than gathering tokens, and the same sum.
    """
    normed = zero_centred_norm(x, p["norm"], eps)
    probabilities = linear(normed, p["router"]).float().softmax(-1)
    values, chosen = probabilities.topk(top_k, -1)
    weights = torch.zeros_like(probabilities).scatter(-1, chosen, values / values.sum(-1, keepdim=True))
    experts, double, hidden = p["experts_in"].shape
    gate, up = linear(normed, p["experts_in"].reshape(-1, hidden)).unflatten(-1, (experts, double)).chunk(2, -1)
    activated = F.silu(gate) * up * weights.unsqueeze(-1).to(x.dtype)
    routed = linear(activated.flatten(-2), p["experts_out"].transpose(0, 1).reshape(hidden, -1))
    shared = linear(F.silu(linear(normed, p["gate"])) * linear(normed, p["up"]), p["down"])
    routed = routed + linear(normed, p["shared_gate"]).sigmoid() * shared
    used = (weights > 0).float().flatten(0, -2).mean(0) / top_k
    balance = experts * (used * probabilities.flatten(0, -2).mean(0)).sum()
    return x + routed, balance


class Network(nn.Module):
    """The language model. Parameters are float32; `dtype` is what activations are computed in."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype = torch.float32, compiled: bool = False) -> None:
        super().__init__()
        self.config, self.dtype = config, dtype
        self.weights = nn.ParameterDict()
        for name, shape in parameter_shapes(config).items():
            # ParameterDict keys may hold no dots.
            self.weights[name.replace(".", "/")] = nn.Parameter(torch.empty(shape))
        compile_: Callable[..., Any] = (
            partial(torch.compile, dynamic=False) if compiled else (lambda function: function)
        )
        self._delta_chunk_terms = compile_(delta_chunk_terms)
        self._delta_output = compile_(delta_output)
        self._attention_inputs = compile_(attention_inputs)
        self._attention_output = compile_(attention_output)
        self._dense_mlp, self._moe_mlp = compile_(dense_mlp), compile_(moe_mlp)
        self._final_norm = compile_(zero_centred_norm)

    def parameter(self, name: str) -> Tensor:
        """The parameter of this checkpoint name."""
        return self.weights[name.replace(".", "/")]

    def checkpoint(self) -> dict[str, Tensor]:
        """Checkpoint name to parameter."""
        return {name.replace("/", "."): value for name, value in self.weights.items()}

    def layer(self, index: int, names: dict[str, str]) -> dict[str, Tensor]:
        """A layer's parameters under short names."""
        return {short: self.parameter(f"model.layers.{index}.{name}") for short, name in names.items()}

    def _delta(self, index: int, x: Tensor, cache: LayerCache | None) -> tuple[Tensor, LayerCache | None]:
        c = self.config
        p = self.layer(index, DELTA_NAMES)
        shape = (c.linear_k_heads, c.linear_v_heads, c.linear_dim)
        window = cache.first if cache else None
        state = cache.second if cache else None
        time = x.shape[1]
        if state is not None and time < delta_rule.CHUNK:
            q, k, v, beta, g, z, raw = delta_inputs(x, p, window, shape, c.eps)
            rows = []
            for t in range(time):
                q_row, k_row, v_row = (s[:, t].float() for s in (q, k, v))
                row, state = delta_rule.step(q_row, k_row, v_row, beta[:, t], g[:, t], state)
                rows.append(row)
            core = torch.stack(rows, 1).to(x.dtype)
        else:
            terms, z, raw = self._delta_chunk_terms(x, p, window, shape, c.eps)
            chunks, state = delta_rule.chunk_scan(terms, state)
            core = delta_rule.from_chunks(chunks, time)
        new = None
        if cache is not None:
            keep = c.conv_kernel - 1
            history = F.pad(raw, (0, 0, keep, 0)) if window is None else torch.cat((window, raw), 1)
            new = LayerCache(history[:, -keep:], state)
        # Rows flattened: one compiled form then serves windows of every length.
        out = self._delta_output(x.flatten(0, 1), core.flatten(0, 1), z.flatten(0, 1), p, c.eps)
        return out.view_as(x), new

    def _attention(
        self, index: int, x: Tensor, tables: tuple[Tensor, Tensor], cache: LayerCache | None
    ) -> tuple[Tensor, LayerCache | None]:
        c = self.config
        p = self.layer(index, ATTENTION_NAMES)
        q, k, v, gate = self._attention_inputs(x, p, *tables, c.head_dim, c.eps)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        new = None
        if cache is not None:
            if cache.first is not None and cache.second is not None:
                k, v = torch.cat((cache.first, k), 2), torch.cat((cache.second, v), 2)
            new = LayerCache(k, v)
        groups = c.num_heads // c.num_kv_heads
        keys, values = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        past, time = k.shape[2] - q.shape[2], q.shape[2]
        mask = None
        if past and time > 1:
            mask = torch.ones(time, past + time, dtype=torch.bool, device=x.device).tril(past)
        core = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, is_causal=not past and time > 1)
        rows = core.transpose(1, 2).flatten(2).flatten(0, 1)
        return self._attention_output(x.flatten(0, 1), rows, gate.flatten(0, 1), p["o"]).view_as(x), new

    def forward(self, ids: Tensor, cache: Cache | None = None, taps: tuple[int, ...] = ()) -> Output:
        """ids [batch, time]. `taps` names layers whose outputs (the residual stream after them) are returned."""
        c = self.config
        x = F.embedding(ids, self.parameter("model.embed_tokens.weight")).to(self.dtype)
        start = cache.position if cache else 0
        positions = torch.arange(start, start + ids.shape[1], device=ids.device)
        tables = rotary_tables(positions, c.rotary_dim)
        layers: list[LayerCache] = []
        tapped: dict[int, Tensor] = {}
        balances: list[Tensor] = []
        for index, kind in enumerate(c.layer_types):
            entry = cache.layers[index] if cache else None
            if kind == "linear_attention":
                x, new = self._delta(index, x, entry)
            else:
                x, new = self._attention(index, x, tables, entry)
            if new is not None:
                layers.append(new)
            rows = x.flatten(0, 1)
            if c.is_moe:
                rows, balance = self._moe_mlp(rows, self.layer(index, MOE_NAMES), c.eps, c.experts_per_token)
                balances.append(balance)
            else:
                rows = self._dense_mlp(rows, self.layer(index, MLP_NAMES), c.eps)
            x = rows.view_as(x)
            if index in taps:
                tapped[index] = x
        hidden = self._final_norm(x.flatten(0, 1), self.parameter("model.norm.weight"), c.eps).view_as(x)
        return Output(
            hidden,
            [tapped[index] for index in taps],
            torch.stack(balances).mean() if balances else None,
            Cache(layers, start + ids.shape[1]) if cache else None,
        )

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 logits of hidden states."""
        return linear(hidden, self.parameter("lm_head.weight")).float()


DELTA_NAMES = {
    "norm": "input_layernorm.weight",
    "qkv": "linear_attn.in_proj_qkv.weight",
    "z": "linear_attn.in_proj_z.weight",
    "b": "linear_attn.in_proj_b.weight",
    "a": "linear_attn.in_proj_a.weight",
    "conv": "linear_attn.conv1d.weight",
    "A_log": "linear_attn.A_log",
    "dt_bias": "linear_attn.dt_bias",
    "gated_norm": "linear_attn.norm.weight",
    "out": "linear_attn.out_proj.weight",
}
ATTENTION_NAMES = {
    "norm": "input_layernorm.weight",
    "q": "self_attn.q_proj.weight",
    "k": "self_attn.k_proj.weight",
    "v": "self_attn.v_proj.weight",
    "o": "self_attn.o_proj.weight",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
}
MLP_NAMES = {
    "norm": "post_attention_layernorm.weight",
    "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight",
    "down": "mlp.down_proj.weight",
}
MOE_NAMES = {
    "norm": "post_attention_layernorm.weight",
    "router": "mlp.gate.weight",
    "experts_in": "mlp.experts.gate_up_proj",
    "experts_out": "mlp.experts.down_proj",
    "gate": "mlp.shared_expert.gate_proj.weight",
    "up": "mlp.shared_expert.up_proj.weight",
    "down": "mlp.shared_expert.down_proj.weight",
    "shared_gate": "mlp.shared_expert_gate.weight",
}


def _layer_shapes(c: ModelConfig, kind: str) -> dict[str, tuple[int, ...]]:
    h, conv = c.hidden_size, 2 * c.key_dim + c.value_dim
    shapes: dict[str, tuple[int, ...]] = {"input_layernorm.weight": (h,), "post_attention_layernorm.weight": (h,)}
    if kind == "linear_attention":
        shapes |= {
            "linear_attn.in_proj_qkv.weight": (conv, h),
            "linear_attn.in_proj_z.weight": (c.value_dim, h),
            "linear_attn.in_proj_b.weight": (c.linear_v_heads, h),
            "linear_attn.in_proj_a.weight": (c.linear_v_heads, h),
            "linear_attn.conv1d.weight": (conv, 1, c.conv_kernel),
            "linear_attn.A_log": (c.linear_v_heads,),
            "linear_attn.dt_bias": (c.linear_v_heads,),
            "linear_attn.norm.weight": (c.linear_dim,),
            "linear_attn.out_proj.weight": (h, c.value_dim),
        }
    else:
        q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        shapes |= {
            "self_attn.q_proj.weight": (2 * q, h),
            "self_attn.k_proj.weight": (kv, h),
            "self_attn.v_proj.weight": (kv, h),
            "self_attn.o_proj.weight": (h, q),
            "self_attn.q_norm.weight": (c.head_dim,),
            "self_attn.k_norm.weight": (c.head_dim,),
        }
    prefix = "mlp.shared_expert" if c.is_moe else "mlp"
    shapes |= {
        f"{prefix}.gate_proj.weight": (c.intermediate_size, h),
        f"{prefix}.up_proj.weight": (c.intermediate_size, h),
        f"{prefix}.down_proj.weight": (h, c.intermediate_size),
    }
    if c.is_moe:
        shapes |= {
            "mlp.gate.weight": (c.num_experts, h),
            "mlp.experts.gate_up_proj": (c.num_experts, 2 * c.expert_size, h),
            "mlp.experts.down_proj": (c.num_experts, h, c.expert_size),
            "mlp.shared_expert_gate.weight": (1, h),
        }
    return shapes


def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Checkpoint name to shape, in file order."""
    h = config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, h)}
    for index, kind in enumerate(config.layer_types):
        for name, shape in _layer_shapes(config, kind).items():
            shapes[f"model.layers.{index}.{name}"] = shape
    return {**shapes, "model.norm.weight": (h,), "lm_head.weight": (config.vocab_size, h)}


def initialise(network: Network, seed: int) -> None:
    """Fills the parameters: normal matrices, residual outputs scaled down by depth, decays spread over time scales."""
    generator = torch.Generator().manual_seed(seed)
    config = network.config
    residual = 1 / math.sqrt(2 * config.num_layers)
    spans = torch.logspace(math.log10(8), math.log10(256), config.linear_v_heads)
    with torch.no_grad():
        for name, value in network.checkpoint().items():
            if name.endswith(("A_log", "dt_bias")):
                # decay per token exp(-A * softplus(dt_bias)) = exp(-1 / span)
                rate = 4.0
                step = 1 / (rate * spans)
                value.copy_(torch.full_like(spans, math.log(rate)) if name.endswith("A_log") else step.expm1().log())
            elif name.endswith("linear_attn.norm.weight"):
                value.fill_(1.0)
            elif name.endswith(("norm.weight", "layernorm.weight")):
                value.zero_()
            elif name.endswith("conv1d.weight"):
                value.copy_(torch.randn(value.shape, generator=generator) * 0.2)
                value[:, 0, -1] += 0.5
            else:
                fan_in = value.shape[-1]
                std = 0.1 if "embed" in name else fan_in**-0.5 * (0.5 if "lm_head" not in name else 0.1)
                if name.endswith(("out_proj.weight", "o_proj.weight", "down_proj.weight", "down_proj")):
                    std *= residual
                value.copy_(torch.randn(value.shape, generator=generator) * std)
