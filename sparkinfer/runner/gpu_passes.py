"""Captured passes: one CUDA graph for each padded shape, one for each way of choosing tokens.

All graphs share one memory pool, since only one of them runs at a time; what must outlive a pass (logits, chosen
tokens, checkpoints) lies in tensors of its own. On a CPU, where the logic is tested, passes run as they are.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from sparkinfer.models.qwen3_5 import Caches
from sparkinfer.models.qwen3_5_gpu import CheckpointBuffer, GpuModel, PassInputs, Workspaces
from sparkinfer.runner.gpu_compile import compile_ahead
from sparkinfer.runner.gpu_metadata import FLOATS, Layout, MetadataBuilder, Mode, StepMetadata
from sparkinfer.runner.gpu_queue import Queue
from sparkinfer.runner.gpu_sizes import PassShape

log = logging.getLogger(__name__)

MODES: tuple[Mode, ...] = ("greedy", "sample", "filter")
REPORTED = (1, 20)
"""Numbers of likely tokens that log-probabilities are computed with: each takes kernels of its own."""


class Passes:
    """Owns the tensors of a pass, and its graphs."""

    def __init__(
        self,
        model: GpuModel,
        caches: Caches,
        builder: MetadataBuilder,
        words: torch.Tensor,
        last_token: torch.Tensor,
        table: torch.Tensor,
        queue: Queue,
    ) -> None:
        """`words` is what a step's inputs are copied into, `table` every slot's KV blocks."""
        self.model, self.caches, self.builder, self.queue = model, caches, builder, queue
        self.words, self.last_token, self.table = words, last_token, table
        shapes = builder.limits.shapes()
        config, device = model.config, model.device
        self.outputs = max(shape.outputs for shape in shapes)
        self._logits = torch.zeros(self.outputs, config.vocab_size, dtype=torch.float32, device=device)
        self._chosen = torch.zeros(self.outputs, dtype=torch.int32, device=device)
        self._sampler = model.ops.make_sampler_workspace(self.outputs, config.vocab_size, device)
        self.checkpoints = self._checkpoint_buffer(builder.entries)
        self._shared = self._workspaces(shapes)
        requests = max(shape.decode + shape.sequences for shape in shapes)
        self._block_table = torch.zeros(requests, table.shape[1], dtype=torch.int32, device=device)
        self._inputs: dict[PassShape, PassInputs] = {}
        self._attention: Any = None
        self._graphs: dict[object, torch.cuda.CUDAGraph] = {}
        self._pool: Any = None

    def _checkpoint_buffer(self, entries: int) -> CheckpointBuffer | None:
        if not entries:
            return None
        state, window = self.caches.state, self.caches.window
        linear = state.shape[0]
        return CheckpointBuffer(
            torch.zeros(entries, linear, *state.shape[2:], dtype=state.dtype, device=state.device),
            torch.zeros(entries, linear, *window.shape[2:], dtype=window.dtype, device=window.device),
        )

    def _workspaces(self, shapes: list[PassShape]) -> Workspaces:
        """Scratch that all shapes share; attention's is made for each shape."""
        model, config = self.model, self.model.config
        ops, device = model.ops, model.device
        most = max(shape.tokens for shape in shapes)
        decode = prefill = None
        if config.num_linear_layers:
            heads = ops.gdn_heads(config.linear_key_heads, config.linear_value_heads)
            decode = ops.make_gdn_decode_workspace(max(shape.decode for shape in shapes), heads.key, device)
            prefill = ops.make_gdn_prefill_workspace(most, max(shape.sequences for shape in shapes), heads, device)
        moe = (
            ops.make_moe_workspace(config, max(shape.rows for shape in shapes), device) if config.num_experts else None
        )
        return Workspaces(None, decode, prefill, moe)

    def inputs(self, shape: PassShape) -> PassInputs:
        """A shape's tensors: views of `words`, and its work lists."""
        if shape not in self._inputs:
            self._inputs[shape] = self._make_inputs(self.builder.layout(shape))
        return self._inputs[shape]

    def _make_inputs(self, layout: Layout) -> PassInputs:
        shape, fields = layout.shape, self._fields(layout)
        config = self.model.config
        attention = None
        if config.num_full_layers:
            attention = self.model.ops.make_attention_workspace(
                shape.decode, shape.tokens, shape.sequences, config.num_heads, config.num_kv_heads, config.head_dim,
                self.model.device, fp8_cache=self.model.options.fp8_kv,
                independent=self.builder.limits.deterministic, share=self._attention,
            )  # fmt: skip
            self._attention = attention
        return PassInputs(
            num_decode=shape.decode,
            tokens=fields["tokens"],
            positions=fields["positions"],
            kv_positions=fields["kv_positions"],
            slots=fields["slots"],
            cu_seqlens=fields["cu_seqlens"],
            starts=fields["starts"],
            block_table=self._block_table[: shape.decode + shape.sequences],
            outputs=fields["outputs"],
            checkpoint_sequences=fields["checkpoint_sequences"],
            checkpoint_positions=fields["checkpoint_positions"],
            checkpoints=self.checkpoints if shape.tokens else None,
            workspaces=replace(self._shared, attention=attention),
        )

    def _fields(self, layout: Layout) -> dict[str, torch.Tensor]:
        """Views of `words`."""
        views = {}
        for name, (first, size) in layout.fields.items():
            view = self.words[first : first + int(np.prod(size))].view(size)
            views[name] = view.view(torch.float32) if name in FLOATS else view
        return views

    def run(self, shape: PassShape) -> None:
        """Run the pass whose words have been copied in; its logits stay until the next pass."""
        self._replay(shape, lambda: self._forward(shape))

    def run_for_hidden(self, shape: PassShape) -> torch.Tensor:
        """Run the pass uncaptured and return the final hidden states [rows, H] of every padded row.

        The logits of the pass's outputs are there afterwards, as after `run`.
        """
        inputs = self.inputs(shape)
        self._prepare(inputs, self._fields(self.builder.layout(shape)))
        hidden = self.model.hidden(replace(inputs, outputs=None), self.caches)
        assert inputs.outputs is not None
        self.model.logits(hidden.index_select(0, inputs.outputs), self._logits[: shape.outputs])
        return hidden

    def _prepare(self, inputs: PassInputs, fields: dict[str, torch.Tensor]) -> None:
        self.model.ops.prepare_step(
            inputs.tokens, inputs.slots, inputs.num_decode, self.last_token, self.table, fields["update_places"],
            fields["update_blocks"], inputs.block_table,
        )  # fmt: skip

    def _forward(self, shape: PassShape) -> None:
        inputs = self.inputs(shape)
        self._prepare(inputs, self._fields(self.builder.layout(shape)))
        self.model.forward(inputs, self.caches, self._logits[: shape.outputs])

    def choose(self, step: StepMetadata) -> torch.Tensor:
        """Choose the tokens of a pass's outputs [m] and keep them by slot."""
        layout = step.layout
        outputs = layout.shape.outputs
        if step.more_banned:
            rows, tokens = (
                torch.tensor(part, device=self._logits.device) for part in zip(*step.more_banned, strict=True)
            )
            self._logits[rows, tokens] = -torch.inf
        # A pass's part for the choice has the same place whatever its other numbers are.
        self._replay((outputs, step.mode), lambda: self._choose(layout, step.mode))
        return self._chosen[:outputs]

    def _choose(self, layout: Layout, mode: Mode) -> None:
        ops, fields, outputs = self.model.ops, self._fields(layout), layout.shape.outputs
        banned = (fields["banned_rows"], fields["banned_tokens"]) if mode == "filter" else (None, None)
        tensors = ops.sampling_tensors(
            fields["temperature"], fields["keys"], fields["top_k"], fields["top_p"], fields["min_p"], *banned
        )
        chosen = self._chosen[:outputs]
        ops.sample(self._logits[:outputs], tensors, mode, self._sampler, chosen)
        ops.keep_tokens(chosen, fields["output_slots"], self.last_token)

    def logprobs(self, step: StepMetadata, chosen: torch.Tensor, most: int) -> tuple[torch.Tensor, ...]:
        """Log-probabilities of the newest pass's rows: of the chosen tokens, and of the `most` likely ones."""
        return self.report(self._logits[: step.layout.shape.outputs], chosen, most)

    def report(
        self, logits: torch.Tensor, tokens: torch.Tensor, most: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """As the operation `logprobs`, for any number of rows; at least the `most` likely tokens."""
        step, tokens = self.outputs, tokens.to(torch.int32)
        count = next((size for size in REPORTED if size >= most), most)
        parts = [
            self.model.ops.logprobs(logits[at : at + step], tokens[at : at + step], count, self._sampler)
            for at in range(0, logits.shape[0], step)
        ]
        chosen, rank, ids, values = (torch.cat(part) for part in zip(*parts, strict=True))
        return chosen, rank, ids, values

    def _replay(self, key: object, run: Callable[[], None]) -> None:
        """Replay the graph of that key; capture it first if it is new. On a CPU, just run."""
        if not self.queue.cuda:
            run()
            return
        if key not in self._graphs:
            self._capture(key, run)
        self._graphs[key].replay()

    def _capture(self, key: object, run: Callable[[], None]) -> None:
        """Run once, which compiles what is new, and once more for the record. The inputs must not be real ones.

        Running twice would advance states twice: so the words are those of padding while it happens.
        """
        kept = self.words.clone()
        self._pad(key)
        run()
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        # Not torch.cuda.graph(): it collects garbage and empties the allocator's cache each time, seconds in all.
        graph.capture_begin(pool=self._pool)
        run()
        graph.capture_end()
        self._pool = self._pool or graph.pool()
        self._graphs[key] = graph
        self.words.copy_(kept)

    def _trial(self, shapes: list[PassShape], layouts: list[Layout]) -> None:
        """Launch every kernel of every pass and choice, with the layers of one period of the model: others only repeat
        them. The words are those of padding."""
        model, every = self.model, self.model.layers
        kinds = model.config.layer_types
        period = 1 + max(kinds.index(kind) for kind in set(kinds))
        model.layers = every[:period]
        try:
            for shape in shapes:
                self._pad(shape)
                self._forward(shape)
        finally:
            model.layers = every
        for layout in layouts:
            for mode in MODES:
                self._choose(layout, mode)
            outputs = layout.shape.outputs
            for count in REPORTED:
                self.report(self._logits[:outputs], self._chosen[:outputs], count)

    def _pad(self, key: object) -> None:
        """Fill the words with padding of a shape (of nothing, for a choice: all zeros names no real slot)."""
        if isinstance(key, PassShape):
            layout = self.builder.layout(key)
            array = np.zeros(layout.words, dtype=np.int32)
            self.builder.fill_padding(layout, array)
            self.words[: layout.words].copy_(torch.from_numpy(array))
            return
        assert isinstance(key, tuple)
        outputs: int = key[0]
        layout = next(self.builder.layout(shape) for shape in self.builder.limits.shapes() if shape.outputs == outputs)
        self._pad(layout.shape)

    def capture_all(self, threads: int = 1) -> None:
        """Compile, by that many threads, and capture everything the limits allow, largest first."""
        if not self.queue.cuda:
            return
        started = time.monotonic()
        shapes = self.builder.limits.shapes()
        layouts = list({shape.outputs: self.builder.layout(shape) for shape in shapes}.values())
        with self.queue.on(self.queue.main):
            if threads > 1:
                count = compile_ahead(lambda: self._trial(shapes, layouts), threads)
                log.info("%d kernels ready after %.1f s", count, time.monotonic() - started)
            for shape in shapes:
                if shape not in self._graphs:
                    self._capture(shape, lambda shape=shape: self._forward(shape))  # type: ignore[misc]
            for layout in layouts:
                for mode in MODES:
                    self._capture((layout.shape.outputs, mode), lambda x=layout, y=mode: self._choose(x, y))  # type: ignore[misc]
        self.queue.drain()
        torch.cuda.empty_cache()
        log.info("captured %d passes in %.1f s", len(self._graphs), time.monotonic() - started)
