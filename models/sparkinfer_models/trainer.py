"""The training loop of the language models: seeded, resumable bit for bit, bounded by steps or by wall-clock time."""

from __future__ import annotations

import json
import math
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from sparkinfer.errors import ConfigError
from sparkinfer_models.checkpoint import load_training, save_model, save_training
from sparkinfer_models.config import ModelConfig
from sparkinfer_models.dataset import Position, WindowSampler, write_summary
from sparkinfer_models.network import Network, initialise
from sparkinfer_models.optimizer import make_optimizers, set_rate, trapezoid

# Seconds kept for compiling the long windows' shapes.
COMPILE_RESERVE = 20.0


@dataclass(frozen=True)
class Recipe:
    """Everything that decides the result, apart from the data. `steps` 0: chosen from `max_seconds` by measured speed.

    The last `long_share` of the steps reads windows of `long_length` tokens, as many tokens a step as before.
    """

    seed: int = 1
    length: int = 1024
    batch: int = 64
    long_length: int = 8192
    long_share: float = 0.08
    steps: int = 0
    max_seconds: float = 0.0
    warmup: int = 60
    decay_share: float = 0.5
    muon_lr: float = 0.02
    adam_lr: float = 0.004
    clip: float = 1.0
    balance_weight: float = 0.01

    @property
    def long_batch(self) -> int:
        return max(1, self.batch * self.length // self.long_length)


def language_loss(hidden: Tensor, head: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy in nats, float32, of hidden states [rows, hidden]."""
    return F.cross_entropy(F.linear(hidden, head.to(hidden.dtype)).float(), targets)


@dataclass
class _Captured:
    """A CUDA graph of forward and backward for one shape, with the tensors that it reads and writes."""

    graph: torch.cuda.CUDAGraph
    rows: Tensor
    loss: Tensor
    grads: list[Tensor]


class Trainer:
    """Owns network, optimizers and position; `run` trains to the end of the recipe or to `stop_at`."""

    def __init__(
        self,
        config: ModelConfig,
        recipe: Recipe,
        streams: tuple[np.ndarray, np.ndarray],
        folder: Path,
        device: torch.device,
        compiled: bool = False,
        graphs: bool = False,
    ) -> None:
        if not recipe.steps and not recipe.max_seconds:
            raise ConfigError("give --steps or --max-seconds: training has no end otherwise")
        if graphs and device.type != "cuda":
            raise ConfigError("--cuda-graphs needs --device cuda")
        self.recipe, self.folder, self.device, self.graphs = recipe, folder, device, graphs
        self.sampler, self.held = WindowSampler(streams[0], recipe.seed), WindowSampler(streams[1], 0)
        self.network = Network(config, torch.bfloat16 if device.type == "cuda" else torch.float32, compiled)
        initialise(self.network, recipe.seed)
        self.network.to(device)
        self.parameters = list(self.network.parameters())
        self.optimizers = make_optimizers(
            dict(self.network.checkpoint()), recipe.muon_lr, recipe.adam_lr, device.type == "cuda"
        )
        self.position, self.step_index, self.tokens = Position({}), 0, 0
        self.loss_function = torch.compile(language_loss, dynamic=False) if compiled else language_loss
        self._captured: dict[torch.Size, _Captured] = {}
        folder.mkdir(parents=True, exist_ok=True)

    # -- state

    def save(self) -> None:
        """Writes `training.pt`: weights, optimizer states, recipe with its decided steps, exact data position."""
        save_training(
            self.folder / "training.pt",
            {
                "weights": {name: value.detach() for name, value in self.network.checkpoint().items()},
                "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
                "recipe": asdict(self.recipe),
                "windows": dict(self.position.windows),
                "step": self.step_index,
                "tokens": self.tokens,
            },
        )

    def resume(self) -> None:
        """Continues from `training.pt`; the recipe saved there replaces the given one."""
        state = load_training(self.folder / "training.pt", self.device)
        self.recipe = Recipe(**state["recipe"])
        self.sampler.seed = self.recipe.seed
        with torch.no_grad():
            for name, value in self.network.checkpoint().items():
                value.copy_(state["weights"][name])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.position = Position(state["windows"])
        self.step_index, self.tokens = state["step"], state["tokens"]

    # -- steps

    def _shape(self) -> tuple[int, int]:
        recipe = self.recipe
        is_long = bool(recipe.steps) and self.step_index >= recipe.steps * (1 - recipe.long_share)
        return (recipe.long_length, recipe.long_batch) if is_long else (recipe.length, recipe.batch)

    def _backward(self, rows: Tensor) -> Tensor:
        """Forward and backward on windows [batch, length + 1]; returns the language loss."""
        output = self.network(rows[:, :-1])
        head = self.network.parameter("lm_head.weight")
        loss = self.loss_function(output.hidden.flatten(0, 1), head, rows[:, 1:].reshape(-1))
        total = loss if output.balance is None else loss + self.recipe.balance_weight * output.balance
        total.backward()
        return loss.detach()

    def _capture(self, rows: Tensor) -> _Captured:
        static = rows.clone()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):  # compiles, and lets libraries allocate their workspaces outside the capture
                self._backward(static)
                self.network.zero_grad(set_to_none=True)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            loss = self._backward(static)
        grads = [parameter.grad for parameter in self.parameters]
        assert all(grad is not None for grad in grads)
        return _Captured(graph, static, loss, grads)  # type: ignore[arg-type]

    def gradients(self, rows: np.ndarray) -> Tensor:
        """Sets every parameter's gradient for these windows; returns the loss (reading it waits for the device)."""
        windows = torch.from_numpy(rows)
        if self.device.type == "cuda":
            windows = windows.pin_memory().to(self.device, non_blocking=True)
        if not self.graphs:
            self.network.zero_grad(set_to_none=True)
            return self._backward(windows)
        captured = self._captured.get(windows.shape)
        if captured is None:
            self.network.zero_grad(set_to_none=True)
            captured = self._captured[windows.shape] = self._capture(windows)
        captured.rows.copy_(windows)
        captured.graph.replay()
        for parameter, grad in zip(self.parameters, captured.grads, strict=True):
            parameter.grad = grad
        return captured.loss

    def train_step(self) -> Tensor:
        """One optimizer step; returns the loss (a tensor: reading it waits for the device)."""
        length, count = self._shape()
        loss = self.gradients(self.sampler.batch(self.position, length, count))
        torch.nn.utils.clip_grad_norm_(self.parameters, self.recipe.clip, foreach=True)
        total_steps = self.recipe.steps or 10**9
        set_rate(self.optimizers, trapezoid(self.step_index, total_steps, self.recipe.warmup, self.recipe.decay_share))
        for optimizer in self.optimizers:
            optimizer.step()
        self.position = self.position.advanced(length, count)
        self.step_index += 1
        self.tokens += length * count
        return loss

    def held_out_loss(self, batches: int = 4) -> float:
        """Mean loss in nats over the first held-out windows (fixed ones), at the present window shape.

        Runs the training pass, whose compiled form exists; the gradients are dropped with the next step.
        """
        length, count = self._shape()
        fit = (len(self.held.ids) - 1 - length) // length // count
        position, losses = Position({}), []
        for _ in range(max(1, min(batches, fit))):
            losses.append(float(self.gradients(self.held.batch(position, length, count))))
            position = position.advanced(length, count)
        return sum(losses) / len(losses)

    def _decide_steps(self, elapsed: float, seconds: float) -> None:
        """Turns what is left of `max_seconds` into a number of steps.

        Called again until 0.4 of the time has passed, and never close to the decay. Before it, nothing depends on the
        number, so the whole run is still a function of the recipe with the last one, which every checkpoint holds.
        """
        recipe = self.recipe
        if recipe.steps and self.step_index > 0.9 * (1 - recipe.decay_share) * recipe.steps:
            return
        # The long windows' steps cost about twice the others', and their shapes have to compile.
        left = recipe.max_seconds * 0.97 - elapsed - min(COMPILE_RESERVE, 0.1 * recipe.max_seconds)
        steps = self.step_index + int(left / seconds / (1 + recipe.long_share))
        self.recipe = replace(recipe, steps=max(self.step_index + 10, steps))

    def _log(self, log: TextIO, loss: float, started: float, held: float | None) -> None:
        record: dict[str, Any] = {
            "step": self.step_index,
            "tokens": self.tokens,
            "loss": round(loss, 5),
            "seconds": round(time.monotonic() - started, 2),
            "lr": round(self.optimizers[0].param_groups[0]["lr"], 6),
            "length": self._shape()[0],
            "planned_steps": self.recipe.steps,
        }
        if held is not None:
            record["held_out_loss"] = round(held, 5)
        if not math.isfinite(loss):
            raise ConfigError(f"the loss is {loss} at step {self.step_index}: lower the learning rates")
        line = json.dumps(record)
        print(line, flush=True)
        log.write(line + "\n")
        log.flush()

    def run(self, log_every: int = 50, held_every: int = 500, save_every: int = 2000, stop_at: int = 0) -> None:
        """Trains; ends early (with a checkpoint) after step `stop_at`, or when `max_seconds` have passed."""
        started = marked = time.monotonic()
        limit, marked_step = self.recipe.max_seconds, self.step_index
        with open(self.folder / "training_log.jsonl", "a") as log:
            while not self.recipe.steps or self.step_index < self.recipe.steps:
                loss = self.train_step()
                last = self.step_index == self.recipe.steps
                if self.step_index % log_every == 0 or last:
                    held = self.held_out_loss() if self.step_index % held_every == 0 or last else None
                    self._log(log, float(loss), started, held)
                    now = time.monotonic()
                    if limit and now - started > limit:
                        print(json.dumps({"stopped": "max_seconds", "step": self.step_index}), flush=True)
                        break
                    # The first interval holds compilation: it is no measure of speed.
                    if limit and marked_step and now - started < 0.4 * limit:
                        self._decide_steps(now - started, (now - marked) / (self.step_index - marked_step))
                    marked, marked_step = time.monotonic(), self.step_index
                if self.step_index % save_every == 0 or self.step_index == stop_at:
                    self.save()
                if self.step_index == stop_at:
                    break
        self.save()
        save_model(self.network, self.folder)
        write_summary(self.folder / "recipe.json", asdict(self.recipe))
