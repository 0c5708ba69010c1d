"""Settings of the scheduler, with the arithmetic that refuses contradictions."""

from __future__ import annotations

from dataclasses import dataclass

from sparkinfer.errors import ConfigError
from sparkinfer.scheduling.types import CHUNK_ALIGN, KV_BLOCK_TOKENS


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Sizes and policies. Counts are tokens unless a name says otherwise. `validate()` is called by the scheduler.

    `num_kv_blocks` are usable device blocks, ids 0 to num_kv_blocks - 1, and `max_num_seqs` are usable
    recurrent-state slots: a runner that wants a dummy block or slot for padding adds its own beyond them.
    """

    max_num_seqs: int
    """Requests that run at once = recurrent-state slots."""
    num_kv_blocks: int
    """KV blocks of 16 tokens on the device."""
    max_model_len: int
    """Longest sequence, prompt and output together."""

    prefill_chunk: int = 8192
    """Prompt tokens in a pass without decoding requests."""
    chunk_align: int = CHUNK_ALIGN
    """A chunk that does not end its prompt ends at a multiple of this, the scan kernels' chunk: results then
    do not depend on where a prompt was cut."""
    prefill_passes_per_decode: int = 1
    """Prefill passes in a row while requests decode; bounds the gap between two tokens of a request."""

    mixed_chunk: int = 1024
    """Prompt tokens that a step carries beside decoding requests (4096 pays on MoE); 0: separate passes."""
    mixed_max_prompts: int = 8
    """Prompts that one mixed step carries, oldest first."""
    backlog_chunk: int = 0
    """Prompt tokens that a step carries beside decoding requests while more than half as many wait; 0: always
    `mixed_chunk`. Pays where small passes cost more per token: see `passes.backlog_applies`."""
    own_pass_tokens: int = 2048
    """A prompt with more tokens left than this is prefilled in passes of its own: faster for it."""
    drafter_loaded: bool = False
    """A drafter serves small loads: see `spec_load_limit`."""
    spec_load_limit: int = 8
    """With a drafter, loads of at most this many requests verify drafts and take no mixed steps."""
    draft_tokens: int = 7
    """Drafts that a step verifies for a request: what a block of 8 of the drafter yields."""

    pack_prefill: bool = True
    """A burst of prompts shares prefill passes."""
    pack_moe: bool = True
    """The same for a MoE model."""
    is_moe: bool = False
    """The model routes tokens to experts."""
    pack_max_prompts: int = 64
    """Prompts that one packed pass carries."""

    aging_steps: int = 1000
    """Steps of waiting that are worth one priority level; 0: strict priority, which can starve low ones."""
    watermark: float = 0.01
    """Share of the KV pool that admission leaves free for the growth of running requests."""

    num_snapshots: int = 0
    """Recurrent-state snapshots of the prefix cache; 0: no prefix cache."""
    num_host_blocks: int = 0
    """KV blocks in host memory for cached prefixes that leave the device."""
    kv_block_bytes: int = 1
    """Bytes of one KV block, all layers."""
    snapshot_bytes: int = 1
    """Bytes of one snapshot, all layers."""
    checkpoint_interval: int = 4096
    """Extra checkpoints inside a long prompt, at multiples of this; 0: none."""
    branch_min_tokens: int = 64
    """Least distance of a checkpoint inside a prompt to its neighbours."""
    decode_checkpoint_interval: int = 256
    """Checkpoints while generating, for the next turn of a chat, at multiples of this; 0: none."""
    attention_cost_tokens: int = 32768
    """Context at which a token costs twice what it costs at position 0 (recompute cost in eviction)."""

    idle_check_interval_s: float = 600.0
    """Least seconds between two checks of the conservation laws, made when the engine runs out of work; 0: none.
    A check takes tens of milliseconds on a large pool, which the next request would wait for."""

    max_in_flight: int = 1
    """Plans that may be scheduled and not yet committed: 1, or 2 when the host prepares the next step early."""

    @property
    def packs(self) -> bool:
        """Whether prefill passes carry several prompts."""
        return self.pack_prefill and (self.pack_moe or not self.is_moe)

    @property
    def watermark_blocks(self) -> int:
        """Blocks that admission leaves free while other requests run."""
        return int(self.num_kv_blocks * self.watermark)

    @property
    def blocks_per_max_request(self) -> int:
        """Blocks of the longest allowed request."""
        return -(-self.max_model_len // KV_BLOCK_TOKENS)

    def validate(self) -> None:
        """Raises ConfigError, the arithmetic shown, on the first contradiction."""
        self._check_ranges()
        self._check_multiples()
        need = self.blocks_per_max_request
        if need > self.num_kv_blocks:
            raise ConfigError(
                f"context beyond the KV pool: max_model_len {self.max_model_len} needs "
                f"ceil({self.max_model_len}/{KV_BLOCK_TOKENS}) = {need} KV blocks, but num_kv_blocks is "
                f"{self.num_kv_blocks} ({self.num_kv_blocks * KV_BLOCK_TOKENS} tokens). Lower max_model_len to "
                f"{self.num_kv_blocks * KV_BLOCK_TOKENS} or give the KV pool more memory."
            )
        for name, budget in (("prefill_chunk", self.prefill_chunk), ("mixed_chunk", self.mixed_chunk)):
            if name == "mixed_chunk" and budget == 0:
                continue
            if budget < KV_BLOCK_TOKENS:
                raise ConfigError(
                    f"budget below a block: {name} is {budget} tokens, a KV block holds {KV_BLOCK_TOKENS}. "
                    f"Set {name} to at least {max(KV_BLOCK_TOKENS, self.chunk_align)}"
                    + (" or to 0 to turn mixed steps off." if name == "mixed_chunk" else ".")
                )
            if budget < self.chunk_align:
                raise ConfigError(
                    f"{name} {budget} is below chunk_align {self.chunk_align}: no chunk could end on an aligned "
                    f"position. Set {name} to at least {self.chunk_align} or lower chunk_align."
                )
        if self.backlog_chunk:
            self._check_backlog()
        if self.num_host_blocks and not self.num_snapshots:
            raise ConfigError(
                f"num_host_blocks is {self.num_host_blocks} but num_snapshots is 0: host KV is only used by the "
                f"prefix cache, which needs snapshots. Enlarge the snapshot pool or set num_host_blocks to 0."
            )

    def _check_backlog(self) -> None:
        if not self.mixed_chunk:
            raise ConfigError(
                f"backlog_chunk is {self.backlog_chunk} but mixed_chunk is 0: no step is mixed, so none can carry more "
                f"of a backlog. Set backlog_chunk to 0 too, or mixed_chunk to at least {self.chunk_align}."
            )
        if not self.mixed_chunk < self.backlog_chunk <= self.prefill_chunk:
            raise ConfigError(
                f"backlog_chunk is {self.backlog_chunk}: it must be more than mixed_chunk, {self.mixed_chunk}, and at "
                f"most prefill_chunk, {self.prefill_chunk}, the largest pass there is; 0 turns it off."
            )

    def _check_ranges(self) -> None:
        at_least_one = (
            "max_num_seqs", "num_kv_blocks", "max_model_len", "prefill_chunk", "mixed_max_prompts",
            "own_pass_tokens", "pack_max_prompts", "prefill_passes_per_decode", "kv_block_bytes", "snapshot_bytes",
            "attention_cost_tokens", "draft_tokens",
        )  # fmt: skip
        not_negative = (
            "mixed_chunk", "backlog_chunk", "spec_load_limit", "aging_steps", "num_snapshots", "num_host_blocks",
            "checkpoint_interval", "branch_min_tokens", "decode_checkpoint_interval",
        )  # fmt: skip
        for names, low in ((at_least_one, 1), (not_negative, 0)):
            for name in names:
                if getattr(self, name) < low:
                    raise ConfigError(f"{name} is {getattr(self, name)}: it must be at least {low}.")
        if not 0 <= self.watermark < 0.5:
            raise ConfigError(f"watermark is {self.watermark}: it must lie in [0, 0.5).")
        if self.idle_check_interval_s < 0:
            raise ConfigError(f"idle_check_interval_s is {self.idle_check_interval_s}: it must be at least 0.")
        if self.max_in_flight not in (1, 2):
            raise ConfigError(f"max_in_flight is {self.max_in_flight}: it must be 1 or 2.")
        if self.max_model_len < 2:
            raise ConfigError(f"max_model_len is {self.max_model_len}: one prompt and one output token need 2.")

    def _check_multiples(self) -> None:
        for name in ("chunk_align", "checkpoint_interval", "decode_checkpoint_interval"):
            value = getattr(self, name)
            if value % KV_BLOCK_TOKENS or (name == "chunk_align" and value < KV_BLOCK_TOKENS):
                raise ConfigError(
                    f"{name} is {value}: it must be a multiple of the KV block, {KV_BLOCK_TOKENS} tokens "
                    f"(nearest: {max(1, round(value / KV_BLOCK_TOKENS)) * KV_BLOCK_TOKENS})."
                )
