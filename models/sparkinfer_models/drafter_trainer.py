"""Distils a target into its DFlash2 drafter: the target's own texts, its hidden states, its distributions."""

from __future__ import annotations

import json
import math
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from sparkinfer.errors import ConfigError
from sparkinfer_models.checkpoint import load_training, save_training
from sparkinfer_models.dataset import write_summary
from sparkinfer_models.drafter import Drafter, DrafterConfig, save_drafter
from sparkinfer_models.network import Network
from sparkinfer_models.optimizer import make_optimizers, set_rate, trapezoid
from sparkinfer_models.rollout import generate, prompts
from sparkinfer_models.tokenizer import MASK_ID


@dataclass(frozen=True)
class DrafterRecipe:
    """Everything that decides the result apart from target and data. `steps` 0: chosen from `max_seconds`.

    `rollouts` batches of `rollout_batch` texts are written first: prompts of `prompt` tokens, `answer` tokens more, a
    half of them greedy, a quarter each at temperatures 0.7 and 1.
    """

    seed: int = 1
    rollouts: int = 8
    rollout_batch: int = 2048
    prompt: int = 128
    answer: int = 384
    chat_share: float = 0.4
    batch: int = 64
    anchors: int = 32
    steps: int = 0
    max_seconds: float = 0.0
    warmup: int = 50
    decay_share: float = 0.6
    muon_lr: float = 0.02
    adam_lr: float = 0.004
    clip: float = 1.0
    unary_weight: float = 0.3
    position_decay: float = 4.0


def write_rollouts(network: Network, ids: np.ndarray, recipe: DrafterRecipe, device: torch.device) -> np.ndarray:
    """[rollouts x batch, prompt + answer] uint16 texts of the target."""
    random = np.random.default_rng((recipe.seed, 17))
    generator = torch.Generator(device).manual_seed(recipe.seed)
    pattern = torch.tensor([0.0, 0.7, 0.0, 1.0], device=device)
    temperatures = pattern.repeat(math.ceil(recipe.rollout_batch / 4))[: recipe.rollout_batch]
    parts = []
    for index in range(recipe.rollouts):
        rows = prompts(ids, recipe.rollout_batch, recipe.prompt, recipe.chat_share, random)
        random.shuffle(rows)  # or the chat prompts would all stand at the front
        start = torch.from_numpy(rows).to(device)
        texts = generate(network, start, recipe.answer, temperatures, generator)
        parts.append(texts.to(torch.int32).cpu().numpy().astype(np.uint16))
        print(json.dumps({"rollout": index + 1, "tokens": sum(p.size for p in parts)}), flush=True)
    return np.concatenate(parts)


def block_mask(anchors: Tensor, time: int, block: int, window: int) -> Tensor:
    """bool [batch, blocks x block, time + blocks x block]: a block sees the context before its anchor, and itself.

    Args:
        anchors: [batch, blocks] positions of the anchors.
    """
    batch, blocks = anchors.shape
    device = anchors.device
    query = (anchors[..., None] + torch.arange(block, device=device)).flatten(1)
    first = anchors.repeat_interleave(block, 1)
    keys = torch.arange(time, device=device)
    context = (keys < first[..., None]) & (keys > query[..., None] - window)
    owner = torch.arange(blocks, device=device).repeat_interleave(block)
    own = (owner[:, None] == owner[None]).expand(batch, -1, -1)
    return torch.cat((context, own), -1)


class DrafterTrainer:
    """Owns drafter, optimizers and the target's texts; every step is a function of (recipe, step)."""

    def __init__(
        self,
        target: Network,
        config: DrafterConfig,
        recipe: DrafterRecipe,
        texts: np.ndarray,
        folder: Path,
        device: torch.device,
        origin: dict[str, str] | None = None,
    ) -> None:
        """`origin`: digests of what the texts follow from beside the recipe, kept with the training state."""
        if not recipe.steps and not recipe.max_seconds:
            raise ConfigError("give --steps or --max-seconds: training has no end otherwise")
        self.target, self.recipe, self.folder, self.device = target, recipe, folder, device
        self.texts = torch.from_numpy(texts.astype(np.int32)).to(device)
        self.drafter = Drafter(config, target.dtype)
        self.drafter.initialise(recipe.seed)
        self.drafter.to(device)
        self.parameters = list(self.drafter.parameters())
        self.optimizers = make_optimizers(
            dict(self.drafter.checkpoint()), recipe.muon_lr, recipe.adam_lr, device.type == "cuda"
        )
        self.step_index, self.origin = 0, origin or {}
        folder.mkdir(parents=True, exist_ok=True)

    def save(self) -> None:
        """Writes `training.pt` (the texts are not in it: they follow from the recipe)."""
        save_training(
            self.folder / "training.pt",
            {
                "weights": {name: value.detach() for name, value in self.drafter.checkpoint().items()},
                "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
                "recipe": asdict(self.recipe),
                "origin": self.origin,
                "step": self.step_index,
            },
        )

    def resume(self) -> None:
        """Continues from `training.pt`; the recipe saved there replaces the given one."""
        state = load_training(self.folder / "training.pt", self.device)
        self.recipe, self.step_index = DrafterRecipe(**state["recipe"]), state["step"]
        with torch.no_grad():
            for name, value in self.drafter.checkpoint().items():
                value.copy_(state["weights"][name])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)

    def _batch(self) -> tuple[Tensor, Tensor]:
        """Token rows [batch, time] and anchor positions [batch, anchors] of this step."""
        recipe, block = self.recipe, self.drafter.config.block
        random = np.random.default_rng((recipe.seed, 29, self.step_index))
        rows = random.integers(len(self.texts), size=recipe.batch)
        # Anchors lie in the target's own text, with a whole block after them.
        high = self.texts.shape[1] - block + 1
        anchors = random.integers(recipe.prompt, high, size=(recipe.batch, recipe.anchors))
        ids = self.texts[torch.from_numpy(rows).to(self.device)].long()
        return ids, torch.from_numpy(anchors).to(self.device)

    def block_loss(self, ids: Tensor, anchors: Tensor, taps: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor]:
        """Loss, and mean number of leading slots whose greedy edge choice is the text's token (teacher-forced).

        Args:
            ids: [batch, time]; anchors: [batch, blocks].
            taps: [batch, time, taps x hidden] of the target.
            teacher: [batch, time, hidden], the target's final hidden states: its distribution is the soft label.
        """
        c, recipe = self.drafter.config, self.recipe
        time = ids.shape[1]
        positions = anchors[..., None] + torch.arange(c.block, device=ids.device)
        tokens = ids.gather(1, positions.flatten(1)).view(positions.shape)
        inputs = torch.full_like(tokens, MASK_ID)
        inputs[..., 0] = tokens[..., 0]
        embedded = F.embedding(inputs, self.target.parameter("model.embed_tokens.weight"))
        context = self.drafter.context(taps, torch.arange(time, device=ids.device))
        hidden = self.drafter(embedded, positions, context, block_mask(anchors, time, c.block, c.window))[..., 1:, :]
        # Slot k holds the token at anchor + k, which the target predicts from position anchor + k - 1.
        before = positions[..., :-1].flatten(1)
        states = teacher.gather(1, before[..., None].expand(-1, -1, teacher.shape[-1])).view(hidden.shape)
        soft = self.target.logits(states).softmax(-1)
        unary = self.target.logits(hidden)
        codes = self.drafter.parameter("candidate_selector.successor_codebook").to(hidden.dtype)
        edges = unary + F.linear(self.drafter.edge_terms(hidden, tokens[..., :-1]), codes).float()
        weights = torch.exp(-torch.arange(c.block - 1, device=ids.device) / recipe.position_decay)
        weights = weights / weights.sum()
        losses = [-(soft * scores.log_softmax(-1)).sum(-1) for scores in (edges, unary)]
        per_slot = (losses[0] + recipe.unary_weight * losses[1]).flatten(0, 1).mean(0)
        right = (edges.argmax(-1) == tokens[..., 1:]).cumprod(-1).sum(-1).float().mean()
        return (per_slot * weights).sum(), right.detach()

    def train_step(self) -> tuple[Tensor, Tensor]:
        """One optimizer step; returns loss and teacher-forced accepted length as tensors."""
        ids, anchors = self._batch()
        with torch.no_grad():
            output = self.target(ids, taps=self.drafter.config.target_layers)
            taps = torch.cat(output.taps, -1)
        loss, right = self.block_loss(ids, anchors, taps, output.hidden)
        self.drafter.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.parameters, self.recipe.clip, foreach=True)
        total = self.recipe.steps or 10**9
        set_rate(self.optimizers, trapezoid(self.step_index, total, self.recipe.warmup, self.recipe.decay_share))
        for optimizer in self.optimizers:
            optimizer.step()
        self.step_index += 1
        return loss.detach(), right

    def _decide_steps(self, elapsed: float, seconds: float) -> None:
        recipe = self.recipe
        if recipe.steps and self.step_index > 0.9 * (1 - recipe.decay_share) * recipe.steps:
            return
        steps = self.step_index + int((recipe.max_seconds * 0.97 - elapsed) / seconds)
        self.recipe = replace(recipe, steps=max(self.step_index + 10, steps))

    def run(self, log_every: int = 50, save_every: int = 2000, stop_at: int = 0) -> None:
        """Trains to the end of the recipe, to step `stop_at`, or until `max_seconds` have passed."""
        started = marked = time.monotonic()
        limit, marked_step = self.recipe.max_seconds, self.step_index
        with open(self.folder / "training_log.jsonl", "a") as log:
            while not self.recipe.steps or self.step_index < self.recipe.steps:
                loss, right = self.train_step()
                if self.step_index % log_every == 0 or self.step_index == self.recipe.steps:
                    now = time.monotonic()
                    record: dict[str, Any] = {
                        "step": self.step_index,
                        "loss": round(float(loss), 5),
                        "teacher_forced_accepted": round(float(right), 4),
                        "seconds": round(now - started, 2),
                        "lr": round(self.optimizers[0].param_groups[0]["lr"], 6),
                        "planned_steps": self.recipe.steps,
                    }
                    print(json.dumps(record), flush=True)
                    log.write(json.dumps(record) + "\n")
                    log.flush()
                    if not math.isfinite(record["loss"]):
                        raise ConfigError(f"the loss is {record['loss']} at step {self.step_index}: lower the rates")
                    if limit and now - started > limit:
                        print(json.dumps({"stopped": "max_seconds", "step": self.step_index}), flush=True)
                        break
                    if limit and marked_step and now - started < 0.3 * limit:
                        self._decide_steps(now - started, (now - marked) / (self.step_index - marked_step))
                    marked, marked_step = now, self.step_index
                if self.step_index % save_every == 0 or self.step_index == stop_at:
                    self.save()
                if self.step_index == stop_at:
                    break
        self.save()
        save_drafter(self.drafter, self.folder)
        write_summary(self.folder / "recipe.json", asdict(self.recipe))
