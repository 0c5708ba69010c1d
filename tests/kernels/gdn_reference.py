"""A Gated DeltaNet layer between its projections, token by token in fp64, and inputs for it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

D = 128
EPS = 1e-6


@dataclass
class Layer:
    """Weights and caches of one layer. The last slot is the dummy."""

    hk: int
    hv: int
    window: torch.Tensor
    state: torch.Tensor
    conv_weight: torch.Tensor
    neg_exp_a_log: torch.Tensor
    dt_bias: torch.Tensor
    norm_weight: torch.Tensor

    @property
    def channels(self) -> int:
        return (2 * self.hk + self.hv) * D

    def weights(self) -> tuple[torch.Tensor, ...]:
        return self.conv_weight, self.neg_exp_a_log, self.dt_bias, self.norm_weight


def make_layer(hk: int, hv: int, slots: int, seed: int, device: str = "cpu", state_dtype=torch.float32) -> Layer:
    g = torch.Generator().manual_seed(seed)
    channels = (2 * hk + hv) * D
    # Decay rates from "keeps everything" to "forgets at once".
    rate = torch.logspace(-3, 1, hv)
    return Layer(
        hk,
        hv,
        torch.randn(slots, 3, channels, generator=g).to(device, torch.bfloat16),
        (torch.randn(slots, hv, D, D, generator=g) * 0.3).to(device, state_dtype),
        (torch.randn(4, channels, generator=g) * 0.5).to(device),
        -rate.to(device),
        torch.randn(hv, generator=g).to(device),
        (1 + 0.2 * torch.randn(D, generator=g)).to(device),
    )


def make_proj(layer: Layer, tokens: int, seed: int, repeat: bool = False) -> torch.Tensor:
    """[tokens, row] bf16. `repeat`: every token projects alike and writes with full strength: keys repeat."""
    g = torch.Generator().manual_seed(seed)
    row = layer.channels + layer.hv * D + 2 * layer.hv
    proj = torch.randn(tokens, row, generator=g)
    if repeat and tokens:
        proj[:] = proj[:1]
        proj[:, -2 * layer.hv : -layer.hv] = 6.0
        proj[:, -layer.hv :] = -8.0
    return proj.to(layer.conv_weight.device, torch.bfloat16)


def run(layer: Layer, proj: torch.Tensor, window: torch.Tensor, state: torch.Tensor):
    """One sequence. Returns (out [L, Hv * D], states after each token [L, Hv, D, D], windows after each) in fp64."""
    hk, hv, c = layer.hk, layer.hv, layer.channels
    x = proj.double()
    padded = torch.cat([window.double(), x[:, :c]])
    length = x.shape[0]
    weight = layer.conv_weight.double()
    mixed = F.silu(sum(padded[j : j + length] * weight[j] for j in range(4)))
    q, k, v = mixed.split([hk * D, hk * D, hv * D], dim=1)
    q, k = (h.view(length, hk, D) * (h.view(length, hk, D).pow(2).sum(-1, keepdim=True) + 1e-6).rsqrt() for h in (q, k))
    q, k = ((h.repeat_interleave(hv // hk, dim=1)) for h in (q * D**-0.5, k))
    v = v.view(length, hv, D)
    z, b, a = x[:, c:].split([hv * D, hv, hv], dim=1)
    g = layer.neg_exp_a_log.double() * F.softplus(a + layer.dt_bias.double())
    beta = torch.sigmoid(b)
    s, out, states = state.double().clone(), [], []
    for t in range(length):
        s = s * g[t].exp()[:, None, None]
        delta = beta[t][:, None] * (v[t] - torch.einsum("hkv,hk->hv", s, k[t]))
        s = s + k[t][:, :, None] * delta[:, None, :]
        states.append(s)
        o = torch.einsum("hkv,hk->hv", s, q[t])
        o = o * (o.pow(2).mean(-1, keepdim=True) + EPS).rsqrt() * layer.norm_weight.double()
        out.append((o * F.silu(z[t].view(hv, D))).reshape(-1))
    windows = torch.stack([padded[t + 1 : t + 4] for t in range(length)])
    return torch.stack(out), torch.stack(states), windows


def relative(got: torch.Tensor, expected: torch.Tensor) -> float:
    """||got - expected|| / ||expected||; infinite where anything is not finite."""
    if not torch.isfinite(got).all():
        return float("inf")
    return ((got.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-30)).item()
