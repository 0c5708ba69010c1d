"""Owns the model and every tensor that outlives a step, and executes step plans."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from pathlib import Path

import torch
from sparkinfer_kernels.dispatch import select_ops

from sparkinfer.errors import ConfigError, EnvironmentProblem
from sparkinfer.models.config import load_config
from sparkinfer.models.loader import open_source
from sparkinfer.models.qwen3_5 import Caches, Qwen35Model
from sparkinfer.runner import prompt_logprobs
from sparkinfer.runner.batch import BatchBuilder, StepTensors
from sparkinfer.runner.memory import MemoryPlan, keep_freed_memory, resolve_dtype
from sparkinfer.scheduling.types import (
    KV_BLOCK_TOKENS,
    BlockMove,
    MoveKind,
    Request,
    StepPlan,
    StepResult,
    TokenLogprobs,
)

log = logging.getLogger(__name__)


class PendingStep:
    """A step that is under way. `result` waits for it and may be called once."""

    def __init__(self, collect: Callable[[], StepResult]) -> None:
        self._collect = collect

    def result(self) -> StepResult:
        """The sampled tokens, on the host."""
        return self._collect()


class ModelRunner:
    """Executes `StepPlan`s: moves, restores, one forward pass, sampling, checkpoints.

    Slots run from 0 to max_num_seqs - 1, blocks from 0 to num_kv_blocks - 1, snapshots and host blocks likewise.
    Not safe to call from several threads at once.
    """

    def __init__(
        self,
        model_dir: Path | str,
        *,
        device: str = "cpu",
        dtype: str = "auto",
        max_num_seqs: int,
        num_kv_blocks: int,
        max_model_len: int,
        num_snapshots: int = 0,
        num_host_blocks: int = 0,
        load_format: str = "auto",
        seed: int = 0,
        backend: str | None = None,
    ) -> None:
        """Load the model and allocate all pools.

        Args:
            model_dir: folder of a `transformers` checkpoint.
            device: `cpu` or `cuda[:n]`.
            dtype: of weights, KV cache and conv windows: `auto` (the checkpoint's), `bfloat16`, `float16`, `float32`.
            max_num_seqs: recurrent-state slots.
            num_kv_blocks: KV blocks of 16 tokens.
            max_model_len: longest sequence in tokens.
            num_snapshots: recurrent-state checkpoints in host memory.
            num_host_blocks: KV blocks in host memory.
            load_format: `auto` or `safetensors`, or `dummy` for seeded random weights of real shape.
            seed: of the dummy weights.
            backend: kernels to use; None takes the device's own.

        Raises:
            CheckpointError: the folder is missing, incomplete or malformed.
            ConfigError: a count or length is impossible.
            EnvironmentProblem: the device is absent.
        """
        folder = Path(model_dir)
        self.config = load_config(folder)
        self.device = device_of(device)
        self.dtype_name = resolve_dtype(self.config, dtype)
        self.dtype = getattr(torch, self.dtype_name)
        if not 1 <= max_model_len <= self.config.max_positions:
            raise ConfigError(
                f"max_model_len {max_model_len} is outside 1 to {self.config.max_positions},"
                " the model's max_position_embeddings"
            )
        if max_num_seqs < 1 or num_kv_blocks < 1 or num_snapshots < 0 or num_host_blocks < 0:
            raise ConfigError(
                f"max_num_seqs {max_num_seqs} and num_kv_blocks {num_kv_blocks} must be at least 1,"
                f" num_snapshots {num_snapshots} and num_host_blocks {num_host_blocks} at least 0"
            )
        self.max_model_len = max_model_len
        self.memory = MemoryPlan.for_model(
            self.config,
            dtype=self.dtype_name,
            num_slots=max_num_seqs,
            num_kv_blocks=num_kv_blocks,
            num_snapshots=num_snapshots,
            num_host_blocks=num_host_blocks,
        )
        log.info("memory: %s", self.memory.describe())
        if self.device.type == "cpu":
            keep_freed_memory()
        try:
            self.ops = select_ops(self.device, backend)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        with torch.inference_mode():
            self.model = Qwen35Model(
                self.config,
                open_source(folder, self.config, load_format, seed, self.device),
                device=self.device,
                dtype=self.dtype,
                ops=self.ops,
                max_positions=max_model_len,
            )
            self._allocate()
        self._launched: deque[PendingStep] = deque()
        self._builder = BatchBuilder(max_num_seqs, max_model_len, self.dtype, self.device, steady=self.config.steady)

    def _allocate(self) -> None:
        """Make every pool once, zeroed, so that stale memory can never hold a NaN."""
        config, plan = self.config, self.memory
        pin = self.device.type == "cuda"
        kv = (2, plan.num_kv_blocks, KV_BLOCK_TOKENS, config.num_kv_heads, config.head_dim)
        host_kv = (config.num_full_layers, 2, KV_BLOCK_TOKENS, config.num_kv_heads, config.head_dim)
        state = (config.linear_value_heads, config.linear_key_dim, config.linear_value_dim)
        window = (config.conv_width - 1, config.conv_channels)
        linear, slots, snapshots = config.num_linear_layers, plan.num_slots, plan.num_snapshots
        fp32 = torch.float32
        self.caches = Caches(
            kv=torch.zeros(config.num_full_layers, *kv, dtype=self.dtype, device=self.device),
            state=torch.zeros(linear, slots, *state, dtype=fp32, device=self.device),
            window=torch.zeros(linear, slots, *window, dtype=self.dtype, device=self.device),
            snapshot_state=torch.zeros(snapshots, linear, *state, dtype=fp32, pin_memory=pin),
            snapshot_window=torch.zeros(snapshots, linear, *window, dtype=self.dtype, pin_memory=pin),
        )
        self.host_kv = torch.zeros(plan.num_host_blocks, *host_kv, dtype=self.dtype, pin_memory=pin)
        self.last_token = torch.zeros(slots, dtype=torch.int64, device=self.device)

    def execute(self, plan: StepPlan) -> StepResult:
        """Run a step to its end. Raises ValueError for a plan that contradicts its contract."""
        return self.submit(plan).result()

    def launch(self, plan: StepPlan) -> None:
        """Start a step whose result `collect` will give; steps are collected in the order of their launch."""
        self._launched.append(self.submit(plan))

    def collect(self) -> StepResult:
        """Wait for the oldest launched step. Raises IndexError when none is under way."""
        return self._launched.popleft().result()

    def submit(self, plan: StepPlan) -> PendingStep:
        """Start a step; on a GPU the host is free until `PendingStep.result`. Steps run in the order submitted."""
        with torch.inference_mode():
            self._move(plan.moves)
            if not plan.num_rows:
                return PendingStep(lambda: StepResult(plan.step_id, [], []))
            step = self._begin(plan)
            asked = prompt_logprobs.shares(plan, step.batch)
            if asked and step.batch.outputs is not None:
                places = prompt_logprobs.places(asked, self.device)
                step.batch.outputs = torch.cat([step.batch.outputs, places])
            hidden = self.model.hidden(step.batch, self.caches)
            for slot, snapshot in step.after:
                self._save(slot, snapshot)
            sampling = len(step.requests)
            pending = self._sample(plan.step_id, step, self.model.logits(hidden[:sampling] if asked else hidden))
            if not asked:
                return pending
            reports = prompt_logprobs.score(asked, hidden[sampling:], self.model.logits, self.ops.logprobs)

            def collect() -> StepResult:
                prompt_logprobs.store(asked, reports)
                return pending.result()

            return PendingStep(collect)

    def logits(self, plan: StepPlan) -> torch.Tensor:
        """Run a plan's pass and return the logits [T, V] fp32 of every token, in the order of the plan's rows.

        For checks; nothing is sampled, all states advance as in `execute`.
        """
        with torch.inference_mode():
            self._move(plan.moves)
            step = self._begin(plan)
            step.batch.outputs = None
            logits = self.model.forward(step.batch, self.caches)
            for slot, snapshot in step.after:
                self._save(slot, snapshot)
            first: dict[int, int] = {}
            decode = sorted(row.slot for row in plan.rows if row.is_decode)
            first.update({slot: index for index, slot in enumerate(decode)})
            prefill = step.batch.prefill
            if prefill is not None:
                for slot, span in zip(prefill.slots.tolist(), prefill.spans, strict=True):
                    first[slot] = len(decode) + span.first
            return torch.cat([logits[first[row.slot] : first[row.slot] + row.length] for row in plan.rows])

    def _begin(self, plan: StepPlan) -> StepTensors:
        """Build the pass and bring the slots into their starting state."""
        step = self._builder.build(plan)
        caches = self.caches
        if step.fresh:
            slots = torch.tensor(step.fresh, device=self.device)
            caches.state.index_fill_(1, slots, 0.0)
            caches.window.index_fill_(1, slots, 0.0)
        for slot, snapshot in step.restores:
            caches.state[:, slot].copy_(caches.snapshot_state[snapshot], non_blocking=True)
            caches.window[:, slot].copy_(caches.snapshot_window[snapshot], non_blocking=True)
        for slot, snapshot in step.before:
            self._save(slot, snapshot)
        if step.pending is not None:
            where, slots = step.pending
            step.batch.tokens.index_copy_(0, where, self.last_token.index_select(0, slots))
        return step

    def _save(self, slot: int, snapshot: int) -> None:
        """Copy a slot's state and window into a snapshot."""
        self.caches.snapshot_state[snapshot].copy_(self.caches.state[:, slot], non_blocking=True)
        self.caches.snapshot_window[snapshot].copy_(self.caches.window[:, slot], non_blocking=True)

    def _move(self, moves: list[BlockMove]) -> None:
        """Copy KV blocks between device and host, in order."""
        for move in moves:
            device = self.caches.kv[:, :, move.block]
            host = self.host_kv[move.host_block]
            if move.kind is MoveKind.TO_HOST:
                host.copy_(device, non_blocking=True)
            else:
                device.copy_(host, non_blocking=True)

    def _sample(self, step_id: int, step: StepTensors, logits: torch.Tensor) -> PendingStep:
        """Choose tokens for the sampling rows, keep them by slot, and start their way to the host."""
        requests = step.requests
        if not requests:
            return PendingStep(lambda: StepResult(step_id, [], []))
        asked = [index for index, request in enumerate(requests) if request.sampling.logprobs is not None]
        sampling = self._builder.sampling(requests, step.output_indices, self.config.vocab_size)
        raw = logits[asked] if asked else None
        tokens = self.ops.sample(logits, sampling)
        self.last_token.index_copy_(0, step.slots, tokens)
        report = None
        if raw is not None:
            top = max(request.sampling.logprobs or 0 for request in requests)
            report = self.ops.logprobs(raw, tokens[asked], top)
        return PendingStep(lambda: _collect(step_id, requests, tokens, asked, report))


def _collect(
    step_id: int,
    requests: list[Request],
    tokens: torch.Tensor,
    asked: list[int],
    report: tuple[torch.Tensor, ...] | None,
) -> StepResult:
    """Bring a step's tokens and log-probabilities to the host."""
    logprobs: list[TokenLogprobs | None] = [None] * len(requests)
    if report is not None:
        chosen, rank, ids, values = (part.tolist() for part in report)
        for place, index in enumerate(asked):
            count = requests[index].sampling.logprobs or 0
            logprobs[index] = TokenLogprobs(chosen[place], rank[place], ids[place][:count], values[place][:count])
    return StepResult(step_id, tokens.tolist(), logprobs)


def device_of(name: str) -> torch.device:
    """The torch device of that name. Raises ConfigError or EnvironmentProblem when there is none."""
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device {name!r} is not known: give cpu, cuda or cuda:<number>") from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device {name!r} is not supported: give cpu, cuda or cuda:<number>")
    if device.type == "cuda" and (not torch.cuda.is_available() or (device.index or 0) >= torch.cuda.device_count()):
        raise EnvironmentProblem(f"device {name!r} is not present: {torch.cuda.device_count()} CUDA devices found")
    return device
