"""Executes step plans on a GPU: one copy in, one captured pass, one captured choice of tokens, one copy out.

The host fills one block of pinned memory for each step and never waits for the device before it needs a result, so the
next step is launched while the one before still runs; its input tokens come from a table on the device. Blocks of
pinned memory are reused only after the event of the copy that reads them.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass

import numpy as np
import torch

from sparkinfer.models.qwen3_5 import Caches
from sparkinfer.models.qwen3_5_gpu import GpuModel
from sparkinfer.runner import prompt_logprobs
from sparkinfer.runner.gpu_memory import RING_ENTRIES, checkpoint_entries
from sparkinfer.runner.gpu_metadata import MetadataBuilder, StepMetadata
from sparkinfer.runner.gpu_passes import Passes
from sparkinfer.runner.gpu_queue import Event, Queue
from sparkinfer.runner.gpu_sizes import PassLimits
from sparkinfer.runner.gpu_snapshots import SnapshotPool, StatePair
from sparkinfer.runner.memory import MemoryPlan
from sparkinfer.runner.model_runner import PendingStep
from sparkinfer.scheduling.types import (
    KV_BLOCK_TOKENS,
    BlockMove,
    MoveKind,
    StepPlan,
    StepResult,
    TokenLogprobs,
)

log = logging.getLogger(__name__)

STAGES = 3
"""Pinned blocks of step inputs and of results: one more than steps in flight."""


@dataclass(slots=True)
class _Stage:
    """Pinned memory of one step."""

    words: torch.Tensor
    array: np.ndarray
    tokens: torch.Tensor
    copied: Event = None
    """When the device has taken `words`."""


class GpuRunner:
    """The runner of `sparkinfer.runner.model_runner` for a GPU: same plans, same results.

    Slots run from 0 to max_num_seqs - 1 and blocks from 0 to num_kv_blocks - 1; one more of each, the last, takes what
    padding writes. Not safe to call from several threads at once.
    """

    def __init__(self, model: GpuModel, memory: MemoryPlan, limits: PassLimits, *, max_model_len: int) -> None:
        """Allocate all pools for a loaded model; `memory` holds their counts."""
        self.model, self.config, self.memory, self.limits = model, model.config, memory, limits
        self.device, self.max_model_len = model.device, max_model_len
        self.dtype_name = str(model.dtype).removeprefix("torch.")
        self.queue = Queue(self.device)
        log.info("memory: %s", memory.describe())
        entries = checkpoint_entries(memory.num_snapshots)
        self.builder = MetadataBuilder(limits, max_model_len, memory.num_kv_blocks, self.config.vocab_size, entries)
        with torch.inference_mode(), self.queue.on(self.queue.main):
            self._allocate()
            width = self.builder.tables.array.shape[1]
            slots = memory.num_slots + 1
            self.last_token = torch.zeros(slots, dtype=torch.int32, device=self.device)
            self.table = torch.full((slots, width), memory.num_kv_blocks, dtype=torch.int32, device=self.device)
            words = torch.zeros(self.builder.max_words, dtype=torch.int32, device=self.device)
            self.passes = Passes(model, self.caches, self.builder, words, self.last_token, self.table, self.queue)
        outputs = max(shape.outputs for shape in limits.shapes())
        self._stages = [self._stage(outputs) for _ in range(STAGES)]
        self._launched: deque[PendingStep] = deque()
        self._steps = 0

    def _stage(self, outputs: int) -> _Stage:
        words = self.queue.pinned(self.builder.max_words, dtype=torch.int32)
        return _Stage(words, words.numpy(), self.queue.pinned(outputs, dtype=torch.int32))

    def _allocate(self) -> None:
        """The pools. Each slot's layers lie together, so that a checkpoint is one copy; layers see strided views."""
        config, plan, model = self.config, self.memory, self.model
        linear, slots = config.num_linear_layers, plan.num_slots + 1
        state_size = (slots, linear, config.linear_value_heads, config.linear_key_dim, config.linear_value_dim)
        window_size = (slots, linear, config.conv_width - 1, config.conv_channels)
        kv_size = (plan.num_kv_blocks + 1, KV_BLOCK_TOKENS, config.num_kv_heads, config.head_dim)
        state = torch.zeros(state_size, dtype=model.options.state_dtype, device=self.device)
        window = torch.zeros(window_size, dtype=model.dtype, device=self.device)
        kv_dtype = model.options.kv_dtype(model.dtype)
        kv = torch.zeros(config.num_full_layers, 2, *kv_size, dtype=kv_dtype, device=self.device)
        ring = min(RING_ENTRIES, plan.num_snapshots)
        self.snapshots = SnapshotPool(self.queue, (state[0], window[0]), plan.num_snapshots, ring)
        self.caches = Caches(
            kv, state.transpose(0, 1), window.transpose(0, 1), self.snapshots.state, self.snapshots.window
        )
        self._state, self._window = state, window
        host = (plan.num_host_blocks, config.num_full_layers, 2, *kv_size[1:])
        self.host_kv = self.queue.pinned(*host, dtype=kv_dtype)

    def warm_up(self, threads: int = 1) -> None:
        """Compile, by that many threads, and capture every shape that the limits allow."""
        with torch.inference_mode():
            self.passes.capture_all(threads)

    def execute(self, plan: StepPlan) -> StepResult:
        """Run a step to its end, checkpoints included. Raises ValueError for a plan that contradicts its contract."""
        result = self.submit(plan).result()
        self.queue.drain()
        return result

    def launch(self, plan: StepPlan) -> None:
        """Start a step whose result `collect` will give; steps are collected in the order of their launch."""
        if len(self._launched) == STAGES - 1:
            raise ValueError(f"{STAGES - 1} steps are under way already: collect one first")
        self._launched.append(self.submit(plan))

    def collect(self) -> StepResult:
        """Wait for the oldest launched step. Raises IndexError when none is under way."""
        return self._launched.popleft().result()

    def submit(self, plan: StepPlan) -> PendingStep:
        """Start a step; the host is free until `PendingStep.result`. Steps run in the order submitted."""
        with torch.inference_mode(), self.queue.on(self.queue.main):
            self._move(plan.moves)
            if not plan.num_rows:
                return PendingStep(lambda: StepResult(plan.step_id, [], []))
            stage, step = self._begin(plan)
            asked = _prompt_shares(plan, step)
            if asked:
                reports = self._score_prompts(asked, step)
            else:
                self.passes.run(step.layout.shape)
            self._save_after(step)
            pending = self._choose(plan.step_id, stage, step)
            if not asked:
                return pending
            scored = self.queue.mark(self.queue.main)

        def collect() -> StepResult:
            self.queue.host_wait(scored)
            prompt_logprobs.store(asked, reports)
            return pending.result()

        return PendingStep(collect)

    def _score_prompts(self, asked: list[prompt_logprobs.Share], step: StepMetadata) -> list[prompt_logprobs.Report]:
        """Run the pass, and put the prompts' tokens through the output matrix; the reports are on their way to pinned
        memory."""
        hidden = self.passes.run_for_hidden(step.layout.shape)
        places = prompt_logprobs.places(asked, self.device)
        reports = prompt_logprobs.score(asked, hidden[places], self.model.logits, self.passes.report)
        return [tuple(self._to_host(part) for part in report) for report in reports]  # type: ignore[misc]

    def logits(self, plan: StepPlan) -> torch.Tensor:
        """Run a plan's pass and return the logits [T, V] fp32 of every token, in the order of the plan's rows.

        For checks; nothing is sampled, all states advance as in `execute`.
        """
        with torch.inference_mode(), self.queue.on(self.queue.main):
            self._move(plan.moves)
            _, step = self._begin(plan)
            hidden = self.passes.run_for_hidden(step.layout.shape)
            self._save_after(step)
            rows = torch.cat([hidden[first : first + count] for first, count in step.row_tokens])
            picked = torch.cat([self.model.logits(part) for part in rows.split(prompt_logprobs.CHUNK)])
        self.queue.drain()
        return picked

    def _begin(self, plan: StepPlan) -> tuple[_Stage, StepMetadata]:
        """Fill the step's words, bring the slots into their starting state, start the copy in."""
        stage = self._stages[self._steps % STAGES]
        self._steps += 1
        self.queue.host_wait(stage.copied)
        step = self.builder.build(plan, stage.array)
        for slot, snapshot in step.restores:
            self.snapshots.restore(self._slot(slot), snapshot)
        if step.before:
            self._zero_fresh(plan, {slot for slot, _ in step.before})
            self.snapshots.save((self._slot(slot), snapshot) for slot, snapshot in step.before)
        count = step.layout.words
        self.passes.words[:count].copy_(stage.words[:count], non_blocking=True)
        stage.copied = self.queue.mark(self.queue.main)
        if self.builder.tables.changes:
            # More changed than a pass has room for (a long prefix taken over at once): rare enough to be slow.
            places, blocks = self.builder.tables.take(self.table.numel())
            where = torch.from_numpy(places).to(self.device).long()
            self.table.view(-1)[where] = torch.from_numpy(blocks).to(self.device)
        return stage, step

    def _zero_fresh(self, plan: StepPlan, wanted: set[int]) -> None:
        """Zero the slots of new sequences whose state is saved before their first token."""
        for row in plan.prefill:
            if row.slot in wanted and row.start == 0 and row.restore is None:
                for part in self._slot(row.slot):
                    part.zero_()

    def _slot(self, slot: int) -> StatePair:
        return self._state[slot], self._window[slot]

    def _save_after(self, step: StepMetadata) -> None:
        """Checkpoints of decode rows, and those that the pass wrote into its buffer."""
        if step.after:
            self.snapshots.save((self._slot(slot), snapshot) for slot, snapshot in step.after)
        if step.inside:
            written = self.passes.checkpoints
            assert written is not None
            self.snapshots.save((written.entry(index), snapshot) for index, snapshot in enumerate(step.inside))

    def _move(self, moves: list[BlockMove]) -> None:
        """Copy KV blocks between device and host, in order."""
        for move in moves:
            device = self.caches.kv[:, :, move.block]
            host = self.host_kv[move.host_block]
            if move.kind is MoveKind.TO_HOST:
                host.copy_(device, non_blocking=True)
            else:
                device.copy_(host, non_blocking=True)

    def _choose(self, step_id: int, stage: _Stage, step: StepMetadata) -> PendingStep:
        """Choose tokens for the sampling rows, keep them by slot, and start their way to the host."""
        count = len(step.requests)
        if not count:
            return PendingStep(lambda: StepResult(step_id, [], []))
        chosen = self.passes.choose(step)
        report = None
        if step.asked:
            most = max(step.requests[index].sampling.logprobs or 0 for index in step.asked)
            report = tuple(self._to_host(part) for part in self.passes.logprobs(step, chosen, most))
        stage.tokens[:count].copy_(chosen[:count], non_blocking=True)
        ready = self.queue.mark(self.queue.main)

        def collect() -> StepResult:
            self.queue.host_wait(ready)
            return _result(step_id, step, stage.tokens[:count].tolist(), report)

        return PendingStep(collect)

    def _to_host(self, part: torch.Tensor) -> torch.Tensor:
        """A copy on its way to pinned memory."""
        host = self.queue.pinned(*part.shape, dtype=part.dtype)
        return host.copy_(part, non_blocking=True)


def _prompt_shares(plan: StepPlan, step: StepMetadata) -> list[prompt_logprobs.Share]:
    """The prompt positions whose log-probabilities a pass yields; empty for nearly every pass."""
    found = []
    for row, (first, _) in zip(plan.prefill, step.row_tokens[len(plan.decode) :], strict=True):
        request = row.request
        if request.sampling.prompt_logprobs is not None and not request.output:
            # The last token's row predicts the first output, which is reported as such.
            count = min(row.length, len(request.prompt) - 1 - row.start)
            if count > 0:
                found.append(prompt_logprobs.Share(request, row.start + 1, count, first))
    return found


def _result(step_id: int, step: StepMetadata, tokens: list[int], report: tuple[torch.Tensor, ...] | None) -> StepResult:
    """A step's tokens with the log-probabilities that were asked for."""
    logprobs: list[TokenLogprobs | None] = [None] * len(tokens)
    if report is not None:
        chosen, rank, ids, values = (part.tolist() for part in report)
        for index in step.asked:
            most = step.requests[index].sampling.logprobs or 0
            logprobs[index] = TokenLogprobs(chosen[index], rank[index], ids[index][:most], values[index][:most])
    return StepResult(step_id, tokens, logprobs)
