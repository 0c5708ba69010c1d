"""How a GPU's memory is divided, computed before anything is allocated, with the arithmetic in words. No torch here."""

from __future__ import annotations

from dataclasses import dataclass

from sparkinfer.errors import ConfigError
from sparkinfer.models.config import ModelConfig
from sparkinfer.runner.gpu_sizes import PassLimits
from sparkinfer.runner.memory import MIB, MemoryPlan
from sparkinfer.scheduling.types import MAX_PASS_CHECKPOINTS

RESERVE_SHARE = 0.04
"""Share of the card that stays free: the driver, libraries' workspaces, fragmentation."""
GRAPH_MB = 24
"""Device memory of one captured pass beside its activations."""
RING_ENTRIES = 8
"""Checkpoints that may be on their way to the host."""
COPY_SHARE = 0.55
"""Share of the free memory that weights and their bf16 copy may take together."""
CHUNK_TOKENS = 64
"""Tokens of a chunk of the linear-attention scan."""
LOGIT_BYTES = 4 + 4 + 2 + 2
"""Of a logit: itself in float32, the sampler's scaled copy, a bf16 product before it (matrices in FP8, many rows), and
the sampler's sums."""


@dataclass(frozen=True, slots=True)
class Item:
    """One line of the account."""

    name: str
    bytes: int


@dataclass(frozen=True, slots=True)
class GpuBudget:
    """What is free once the weights are on the card, and what is taken from it before KV blocks."""

    free_bytes: int
    total_bytes: int
    items: tuple[Item, ...]

    @property
    def kv_bytes(self) -> int:
        """Bytes left for KV blocks; negative when nothing is."""
        return self.free_bytes - int(RESERVE_SHARE * self.total_bytes) - sum(item.bytes for item in self.items)

    def describe(self) -> str:
        """The arithmetic in one line."""
        taken = " - ".join(f"{item.name} {item.bytes // MIB}" for item in self.items)
        reserve = int(RESERVE_SHARE * self.total_bytes) // MIB
        return (
            f"MiB: free beside the weights {self.free_bytes // MIB} - reserve {reserve}"
            f" ({RESERVE_SHARE:.0%} of {self.total_bytes // MIB}) - {taken} = KV cache {self.kv_bytes // MIB}"
        )

    def require_kv(self) -> int:
        """`kv_bytes`. Raises ConfigError with the arithmetic when nothing is left."""
        if self.kv_bytes <= 0:
            raise ConfigError(
                f"no device memory is left for the KV cache ({self.describe()}); lower SPARKINFER_MAX_NUM_SEQS or "
                "SPARKINFER_PREFILL_CHUNK, or use a larger card"
            )
        return self.kv_bytes


def checkpoint_entries(num_snapshots: int) -> int:
    """Checkpoints that one pass may save."""
    return min(num_snapshots, MAX_PASS_CHECKPOINTS)


def pass_bytes(config: ModelConfig, limits: PassLimits) -> int:
    """Device memory of the largest pass: activations of one layer, the scan's buffers, logits."""
    rows, hidden = limits.max_rows, config.hidden_size
    outputs = max(shape.outputs for shape in limits.shapes())
    gdn = config.conv_channels + config.linear_value_heads * (config.linear_value_dim + 2)
    attention = 2 * (config.num_heads + config.num_kv_heads) * config.head_dim
    if config.num_experts:
        # Routed rows are padded to blocks of 128 for each expert.
        routed = rows * config.experts_per_token + 128 * config.num_experts
        inner = 3 * (config.moe_intermediate_size * routed + config.shared_intermediate_size * rows)
        inner += 2 * hidden * routed
    else:
        inner = 3 * config.intermediate_size * rows
    # bf16, and FP8 copies beside; the residual, the norm's output and the sublayer's own.
    layer = 3 * (max(inner, 2 * gdn * rows, 2 * attention * rows) + 4 * hidden * rows)
    chunks = -(-rows // CHUNK_TOKENS) + 2 * max(shape.sequences for shape in limits.shapes())
    per_head = CHUNK_TOKENS * (4 + 2 * config.linear_key_dim + 2 * config.linear_value_dim)
    per_head += 2 * config.linear_key_dim * config.linear_value_dim
    scan = chunks * config.linear_value_heads * per_head + 2 * rows * config.conv_channels
    return layer + scan + LOGIT_BYTES * outputs * config.vocab_size


def gpu_budget(
    config: ModelConfig, memory: MemoryPlan, limits: PassLimits, num_snapshots: int, free: int, total: int
) -> GpuBudget:
    """The account once the weights are loaded.

    Args:
        config: the model.
        memory: bytes of a slot and of a snapshot.
        limits: the most that a pass holds.
        num_snapshots: checkpoints of the pool in host memory.
        free, total: device memory in bytes.
    """
    entries = checkpoint_entries(num_snapshots)
    ring = min(RING_ENTRIES, num_snapshots)
    items = (
        Item(f"{memory.num_slots} + 1 recurrent states", (memory.num_slots + 1) * memory.slot_bytes),
        Item(f"{entries} + {ring} checkpoints under way", (entries + ring) * memory.snapshot_bytes),
        Item(f"a pass of {limits.max_rows} tokens", pass_bytes(config, limits)),
        Item(f"{len(limits.shapes())} captured passes", len(limits.shapes()) * GRAPH_MB * MIB),
    )
    return GpuBudget(free, total, items)


def copied_bytes(config: ModelConfig) -> int:
    """Bytes of a bf16 copy of all projections but the routed experts' and the output matrix."""
    hidden, values = config.hidden_size, config.linear_value_heads * config.linear_value_dim
    gdn = hidden * (config.conv_channels + 2 * values)
    attention = hidden * config.head_dim * (3 * config.num_heads + 2 * config.num_kv_heads)
    mlp = 0 if config.num_experts else 3 * hidden * config.intermediate_size * config.num_layers
    return 2 * (gdn * config.num_linear_layers + attention * config.num_full_layers + mlp)


def expert_bytes(config: ModelConfig) -> int:
    """Bytes of the routed experts in bf16: their own form, or the copy beside NVFP4."""
    return 6 * config.hidden_size * config.moe_intermediate_size * config.num_experts * config.num_layers


def affords_copy(config: ModelConfig, stored: int, free: int) -> bool:
    """Whether weights of `stored` bytes and a bf16 copy leave enough of the free memory to caches and passes."""
    return stored + copied_bytes(config) <= COPY_SHARE * free


def refuse_large_checkpoint(name: str, weight_bytes: int, free: int, total: int) -> None:
    """Raise ConfigError, with the numbers, when a checkpoint's weights alone do not fit on the card."""
    reserve = int(RESERVE_SHARE * total)
    if weight_bytes > free - reserve:
        raise ConfigError(
            f"{name} does not fit: its weights take {weight_bytes // MIB} MiB on the device, the card has "
            f"{free // MIB} MiB free of {total // MIB} MiB, less {reserve // MIB} MiB reserve; use a quantised "
            "checkpoint, a card with more memory, or --device cpu"
        )
