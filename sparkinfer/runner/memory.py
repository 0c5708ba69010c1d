"""How much memory a model needs beside its weights, computed before anything is allocated."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path

from sparkinfer.errors import ConfigError
from sparkinfer.models.config import ModelConfig, load_config
from sparkinfer.scheduling.types import KV_BLOCK_TOKENS

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
STATE_BYTES = 4
"""The recurrent state is fp32 whatever the model's dtype, unless a GPU is told to keep it in bfloat16."""
MIB = 1 << 20
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3
"""Parameters of glibc's mallopt(3)."""


def resolve_dtype(config: ModelConfig, dtype: str) -> str:
    """`auto` is the checkpoint's own dtype. Raises ConfigError for a name that is not supported."""
    name = config.dtype if dtype == "auto" else dtype
    if name not in DTYPE_BYTES:
        raise ConfigError(f"dtype {dtype!r} is not supported: choose auto, {', '.join(DTYPE_BYTES)}")
    return name


def keep_freed_memory() -> None:
    """Have glibc keep up to a GiB of what this process frees, instead of giving it back to the kernel.

    Every pass on a CPU makes and frees the same large tensors; fresh pages for them cost as much as the arithmetic of
    a cheap operation. Other C libraries have no such call: there nothing changes.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for parameter, value in ((M_MMAP_THRESHOLD, 32 * MIB), (M_TRIM_THRESHOLD, 1024 * MIB), (M_TOP_PAD, 64 * MIB)):
            mallopt(parameter, value)


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes of every pool, and the counts they were sized for."""

    kv_block_bytes: int
    slot_bytes: int
    """Recurrent state and conv window of one running request."""
    snapshot_bytes: int
    """The same of one checkpoint; equal to `slot_bytes`, but in host memory."""
    num_kv_blocks: int
    num_slots: int
    num_snapshots: int
    num_host_blocks: int

    @classmethod
    def for_model(
        cls,
        config: ModelConfig,
        *,
        dtype: str = "auto",
        num_slots: int,
        num_kv_blocks: int = 0,
        num_snapshots: int = 0,
        num_host_blocks: int = 0,
        kv_bytes: int | None = None,
        state_bytes: int = STATE_BYTES,
    ) -> MemoryPlan:
        """Plan for a model's shape; no tensor is made. `kv_bytes` (default: the dtype's) and `state_bytes` are those of
        one element. Raises ConfigError for an unknown dtype.
        """
        width = DTYPE_BYTES[resolve_dtype(config, dtype)]
        kv = 2 * config.num_full_layers * KV_BLOCK_TOKENS * config.num_kv_heads * config.head_dim * (kv_bytes or width)
        state = config.linear_value_heads * config.linear_key_dim * config.linear_value_dim * state_bytes
        window = (config.conv_width - 1) * config.conv_channels * width
        slot = config.num_linear_layers * (state + window)
        return cls(kv, slot, slot, num_kv_blocks, num_slots, num_snapshots, num_host_blocks)

    @classmethod
    def for_folder(cls, folder: Path, **counts: int | str) -> MemoryPlan:
        """As `for_model`, reading the folder's config.json."""
        return cls.for_model(load_config(folder), **counts)  # type: ignore[arg-type]

    def kv_blocks_in(self, budget_bytes: int) -> int:
        """KV blocks that fit into `budget_bytes`. Raises ConfigError, with the sum, when not even one does."""
        blocks = budget_bytes // self.kv_block_bytes if self.kv_block_bytes else 0
        if blocks < 1:
            raise ConfigError(
                f"the KV budget of {budget_bytes} bytes holds no block: one block of {KV_BLOCK_TOKENS} tokens takes"
                f" {self.kv_block_bytes} bytes; raise the KV memory setting"
            )
        return blocks

    def snapshots_in(self, budget_bytes: int) -> int:
        """Snapshots that fit into `budget_bytes`; 0 when none does."""
        return budget_bytes // self.snapshot_bytes if self.snapshot_bytes else 0

    @property
    def device_bytes(self) -> int:
        """KV blocks and slots."""
        return self.num_kv_blocks * self.kv_block_bytes + self.num_slots * self.slot_bytes

    @property
    def host_bytes(self) -> int:
        """Snapshots and host KV blocks."""
        return self.num_snapshots * self.snapshot_bytes + self.num_host_blocks * self.kv_block_bytes

    def describe(self) -> str:
        """The arithmetic in one line, for the log."""
        return (
            f"KV {_product(self.num_kv_blocks, 'blocks', self.kv_block_bytes)}"
            f" ({self.num_kv_blocks * KV_BLOCK_TOKENS} tokens);"
            f" recurrent state {_product(self.num_slots, 'slots', self.slot_bytes)};"
            f" host: {_product(self.num_snapshots, 'snapshots', self.snapshot_bytes)},"
            f" KV {_product(self.num_host_blocks, 'blocks', self.kv_block_bytes)}"
        )


def _product(count: int, what: str, size: int) -> str:
    """`3 blocks x 1024 B = 0.0 MiB`."""
    return f"{count} {what} x {size} B = {count * size / MIB:.1f} MiB"
