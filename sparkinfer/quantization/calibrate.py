"""What the inputs of linear layers look like on a text: their largest magnitude, and the mean square of each column.

The model runs layer by layer over all sequences at once, so that only one layer's weights are in memory. Magnitudes
become input scales; mean squares weigh the error of block scales, since a column's error counts as its input does.
"""

from __future__ import annotations

import dataclasses
import math
import pydoc_data.topics
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from sparkinfer_kernels.attention.reference import PrefillSpan
from sparkinfer_kernels.dispatch import Ops, torch_ops
from sparkinfer_kernels.gated_delta_rule.reference import chunk_layout
from sparkinfer_kernels.moe.reference import route, swiglu
from sparkinfer_kernels.rotary.reference import rotary_table
from tokenizers import Tokenizer

from sparkinfer.errors import CheckpointError, ConfigError
from sparkinfer.models.config import FULL, ModelConfig
from sparkinfer.models.loader import SafetensorsSource
from sparkinfer.models.qwen3_5 import (
    Attention,
    Batch,
    Caches,
    DenseMlp,
    GatedDeltaNet,
    MoeMlp,
    PackedWeight,
    Prefill,
    Weights,
)
from sparkinfer.models.reader import CopyingReader, MappedReader
from sparkinfer.quantization.saved import InputStatistics, SavedLayers

SEQUENCE = 512
"""Tokens of a calibration sequence, a multiple of the KV block."""
BLOCK = 16
PRIOR = 64
"""Tokens that the layer's mean counts for in an expert's, of which the text may route few tokens to it."""


Progress = Callable[[int, int], None]
"""Told (layers done, layers in all)."""


def calibration_text(files: list[Path]) -> str:
    """The content of the files, or the topics of Python's own manual, which every Python brings along.

    Raises:
        ConfigError: a file cannot be read as UTF-8 text.
    """
    if not files:
        return "\n\n".join(pydoc_data.topics.topics.values())
    parts = []
    for path in files:
        try:
            parts.append(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"calibration text {path} cannot be read: {error}") from error
    return "\n\n".join(parts)


def calibration_tokens(folder: Path, text: str, tokens: int) -> torch.Tensor:
    """[n, SEQUENCE] int64: sequences from all over the text, `tokens` in all or as many as there are.

    Raises:
        ConfigError: the text is shorter than one sequence.
        CheckpointError: the folder has no tokenizer.
    """
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise CheckpointError(f"{file} does not exist: NVFP4 is calibrated on text, which needs the tokenizer")
    ids = Tokenizer.from_file(str(file)).encode(text, add_special_tokens=False).ids
    available = len(ids) // SEQUENCE
    if available == 0:
        raise ConfigError(
            f"the calibration text has {len(ids)} tokens, fewer than one sequence of {SEQUENCE}: give a longer one"
        )
    count = min(available, max(1, tokens // SEQUENCE))
    chosen = [number * available // count for number in range(count)]
    table = torch.tensor(ids[: available * SEQUENCE]).view(available, SEQUENCE)
    return table[torch.tensor(chosen)]


class _Observer:
    """Records the inputs of linear layers while a layer runs."""

    def __init__(self, ops: Ops) -> None:
        self.found: dict[str, InputStatistics] = {}
        self._linear = ops.linear
        self._modules: dict[int, list[str]] = {}
        self._prefix = ""
        self.ops = dataclasses.replace(ops, linear=self.linear, moe=self.moe)

    def watch(self, packed: PackedWeight, *modules: str) -> None:
        """Inputs of the product with `packed` belong to `modules`."""
        self._modules[id(packed)] = list(modules)

    def watch_experts(self, prefix: str) -> None:
        """`moe` belongs to the layer whose modules begin with `prefix`."""
        self._prefix = prefix

    def forget(self) -> None:
        """The layer is done."""
        self._modules.clear()

    def linear(self, x: torch.Tensor, packed: PackedWeight) -> torch.Tensor:
        """`Ops.linear`, observed."""
        modules = self._modules.get(id(packed), ())
        if modules:
            statistics = InputStatistics(float(x.abs().max()), _mean_square(x))
            self.found.update(dict.fromkeys(modules, statistics))
        return self._linear(x, packed)

    def moe(
        self,
        x: torch.Tensor,
        router: PackedWeight,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        shared_gate_up: PackedWeight,
        shared_down: PackedWeight,
        top_k: int,
    ) -> torch.Tensor:
        """`Ops.moe` expert by expert, observed; experts share their magnitudes, as engines let them."""
        logits = self._linear(x, router)
        weights, experts = route(logits[:, :-1], top_k)
        out = torch.zeros(x.shape, device=x.device)
        inner_amax, sums = 0.0, []
        for expert in range(gate_up.shape[0]):
            tokens, places = torch.where(experts == expert)
            rows = x.index_select(0, tokens)
            inner = swiglu(rows @ gate_up[expert])
            if len(tokens):
                inner_amax = max(inner_amax, float(inner.abs().max()))
                out.index_add_(0, tokens, (inner @ down[expert]).float() * weights[tokens, places].unsqueeze(1))
            sums.append((len(tokens), rows.float().square().sum(0), inner.float().square().sum(0)))
        self._expert_statistics(float(x.abs().max()), inner_amax, sums)
        shared = self.linear(swiglu(self.linear(x, shared_gate_up)), shared_down)
        return (out + shared * torch.sigmoid(logits[:, -1:])).to(x.dtype)

    def _expert_statistics(
        self, amax: float, inner_amax: float, sums: list[tuple[int, torch.Tensor, torch.Tensor]]
    ) -> None:
        total = sum(count for count, _, _ in sums)
        means = [sum(entry[side] for entry in sums) / total for side in (1, 2)]
        for expert, (count, outer, inner) in enumerate(sums):
            outer = (outer + PRIOR * means[0]) / (count + PRIOR)
            inner = (inner + PRIOR * means[1]) / (count + PRIOR)
            for name in ("gate_proj", "up_proj"):
                self.found[f"{self._prefix}experts.{expert}.{name}"] = InputStatistics(amax, outer.cpu())
            self.found[f"{self._prefix}experts.{expert}.down_proj"] = InputStatistics(inner_amax, inner.cpu())


def _mean_square(x: torch.Tensor) -> torch.Tensor:
    return x.float().square().mean(0).cpu()


@torch.inference_mode()
def calibrate(
    folder: Path,
    config: ModelConfig,
    tokens: torch.Tensor,
    device: torch.device,
    progress: Progress | None = None,
    saved: SavedLayers | None = None,
) -> dict[str, InputStatistics]:
    """Statistics of every linear layer's input, by module name.

    Args:
        folder, config: an unquantised checkpoint.
        tokens: [n, length] int64, length a multiple of 16.
        device: where layers run.
        progress: told after every layer.
        saved: where layers are kept, and taken from if they are done.

    Raises:
        CheckpointError: a tensor is missing or damaged.
    """
    observer = _Observer(torch_ops())
    ops, dtype = observer.ops, getattr(torch, config.dtype)
    source = SafetensorsSource(folder, config, reader=CopyingReader())
    weights = Weights(source, device, dtype, ops)
    count, length = tokens.shape
    batch = _batch(count, length, device)
    rotary = rotary_table(length, config.rotary_dim, config.rope_theta, device)
    cos, sin = rotary.index_select(0, batch.positions).unsqueeze(2).unbind(1)
    x: torch.Tensor | None
    before = saved.load() if saved is not None else None
    if before is None:
        done, x, residual = 0, None, _embed(folder, config, tokens).to(device, dtype)
    else:
        done, observer.found = before[:2]
        x, residual = (value.to(device) for value in before[2:])
    for number, kind in list(enumerate(config.layer_types))[done:]:
        prefix = f"model.layers.{number}."
        norm = weights.norm1(f"{prefix}input_layernorm.weight", config.hidden_size)
        if x is None:
            x = ops.rms_norm(residual, norm, config.rms_norm_eps)
        else:
            x, residual = ops.add_rms_norm(x, residual, norm, config.rms_norm_eps)
        caches = _caches(config, count, length, dtype, device)
        if kind == FULL:
            attention = Attention(config, weights, f"{prefix}self_attn.", 0, ops)
            _watch(observer, attention.in_proj, f"{prefix}self_attn.", "q_proj", "k_proj", "v_proj")
            _watch(observer, attention.o_proj, f"{prefix}self_attn.", "o_proj")
            x = attention(x, batch, caches, cos, sin)
        else:
            delta = GatedDeltaNet(config, weights, f"{prefix}linear_attn.", 0, ops)
            names = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
            _watch(observer, delta.in_proj, f"{prefix}linear_attn.", *names)
            _watch(observer, delta.out_proj, f"{prefix}linear_attn.", "out_proj")
            x = delta(x, batch, caches)
        norm = weights.norm1(f"{prefix}post_attention_layernorm.weight", config.hidden_size)
        x, residual = ops.add_rms_norm(x, residual, norm, config.rms_norm_eps)
        x = _mlp(config, weights, observer, f"{prefix}mlp.")(x)
        new = {name: one for name, one in observer.found.items() if name.startswith(prefix)}
        check_finite(new)
        observer.forget()
        if saved is not None:
            saved.save(number, new, x, residual)
        if progress is not None:
            progress(number + 1, config.num_layers)
    assert x is not None
    norm = weights.norm1("model.norm.weight", config.hidden_size)
    x, residual = ops.add_rms_norm(x, residual, norm, config.rms_norm_eps)
    observer.found["lm_head"] = InputStatistics(float(x.abs().max()), _mean_square(x))
    check_finite(observer.found)
    return observer.found


class NotFiniteError(CheckpointError):
    """The inputs of a layer hold NaN or infinity on the calibration text."""


def check_finite(found: Mapping[str, InputStatistics]) -> None:
    """Raises NotFiniteError naming the first module whose inputs held NaN or infinity: its scales would, too."""
    for module, one in found.items():
        if not math.isfinite(one.amax) or not bool(torch.isfinite(one.mean_square).all()):
            raise NotFiniteError(
                f"{module}: its inputs are NaN or infinite on the calibration text: the weights before it are damaged,"
                " or too large for the checkpoint's dtype"
            )


def _watch(observer: _Observer, packed: PackedWeight, prefix: str, *names: str) -> None:
    observer.watch(packed, *(prefix + name for name in names))


def _mlp(config: ModelConfig, weights: Weights, observer: _Observer, prefix: str) -> DenseMlp | MoeMlp:
    if not config.num_experts:
        dense = DenseMlp(config, weights, prefix, observer.ops)
        _watch(observer, dense.gate_up, prefix, "gate_proj", "up_proj")
        _watch(observer, dense.down, prefix, "down_proj")
        return dense
    mixture = MoeMlp(config, weights, prefix, observer.ops)
    observer.watch_experts(prefix)
    _watch(observer, mixture.shared_gate_up, f"{prefix}shared_expert.", "gate_proj", "up_proj")
    _watch(observer, mixture.shared_down, f"{prefix}shared_expert.", "down_proj")
    return mixture


def _embed(folder: Path, config: ModelConfig, tokens: torch.Tensor) -> torch.Tensor:
    """[T, H]: only the pages of the tokens' rows are read."""
    source = SafetensorsSource(folder, config, reader=MappedReader())
    table = source.get("model.embed_tokens.weight", (config.vocab_size, config.hidden_size))
    return F.embedding(tokens.flatten(), table)


def _batch(count: int, length: int, device: torch.device) -> Batch:
    """A prefill pass of `count` sequences of `length` tokens."""
    positions = torch.arange(length).repeat(count)
    prefill = Prefill(
        slots=torch.arange(count, device=device),
        lengths=[length] * count,
        spans=[PrefillSpan(number * length, length, 0, None) for number in range(count)],
        chunks=chunk_layout([0] * count, [length] * count, [[] for _ in range(count)], device),
        saves=[],
    )
    return Batch(
        tokens=torch.empty(0, dtype=torch.int64, device=device),
        positions=positions.to(device),
        num_decode=0,
        kv_positions=torch.arange(count * length, device=device),
        decode_groups=[],
        decode_runs=[],
        prefill=prefill,
        outputs=None,
    )


def _caches(config: ModelConfig, count: int, length: int, dtype: torch.dtype, device: torch.device) -> Caches:
    """Zeroed caches of a single layer of either kind."""

    def zeros(*shape: int, kind: torch.dtype = dtype) -> Any:
        return torch.zeros(shape, dtype=kind, device=device)

    heads = config.linear_value_heads, config.linear_key_dim, config.linear_value_dim
    return Caches(
        kv=zeros(1, 2, count * length // BLOCK, BLOCK, config.num_kv_heads, config.head_dim),
        state=zeros(1, count, *heads, kind=torch.float32),
        window=zeros(1, count, config.conv_width - 1, config.conv_channels),
        snapshot_state=zeros(0, 1, *heads, kind=torch.float32),
        snapshot_window=zeros(0, 1, config.conv_width - 1, config.conv_channels),
    )
