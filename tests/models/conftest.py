"""Random checkpoints written by transformers, and a driver that feeds plans to a runner."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from sparkinfer.runner.model_runner import ModelRunner
from sparkinfer.scheduling.types import (
    KV_BLOCK_TOKENS,
    Checkpoint,
    Request,
    Row,
    SamplingParams,
    StepPlan,
    StepResult,
)

# Products this small gain nothing from a second thread, and waiting threads would take the core from other tests.
torch.set_num_threads(1)

SMALL = {
    "vocab_size": 199,
    "hidden_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "max_position_embeddings": 512,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "dense": {"num_hidden_layers": 4, "intermediate_size": 80},
    "dense-odd": {
        "num_hidden_layers": 6,
        "intermediate_size": 56,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "linear_num_key_heads": 3,
        "linear_num_value_heads": 3,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.5},
    },
    "dense-linear-only": {"num_hidden_layers": 3, "intermediate_size": 40, "linear_num_value_heads": 6},
    "dense-attention-first": {
        "num_hidden_layers": 3,
        "intermediate_size": 40,
        "layer_types": ["full_attention", "linear_attention", "full_attention"],
        "num_attention_heads": 6,
        "num_key_value_heads": 6,
        "linear_conv_kernel_dim": 3,
    },
    "moe": {
        "num_hidden_layers": 4,
        "num_experts": 7,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 40,
    },
    "moe-odd": {
        "num_hidden_layers": 5,
        "num_experts": 5,
        "num_experts_per_tok": 5,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 24,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    },
}


def build_reference(name: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A transformers model whose weights are large enough that every part of it matters to the logits."""
    import transformers

    settings = {**SMALL, **VARIANTS[name], **changes}
    kind = "Qwen3_5Moe" if "num_experts" in settings else "Qwen3_5"
    config = getattr(transformers, f"{kind}TextConfig")(**settings)
    torch.manual_seed(sum(map(ord, name)))
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.endswith("A_log"):
                parameter.uniform_(-4.0, 1.0)
            elif key.endswith("dt_bias"):
                parameter.normal_(0.0, 1.0)
            elif key.endswith("norm.weight"):
                parameter.add_(torch.randn_like(parameter) * 0.2)
            else:
                parameter.normal_(0.0, 1.4 * parameter.shape[-1] ** -0.5)
    return model.to(dtype)


@dataclass
class Checkpoints:
    """Writes each variant once and keeps the reference model beside it."""

    root: Path
    made: dict[tuple[str, torch.dtype], tuple[Path, Any]] = field(default_factory=dict)

    def __call__(self, name: str, dtype: torch.dtype = torch.float32) -> tuple[Path, Any]:
        key = (name, dtype)
        if key not in self.made:
            model = build_reference(name, dtype)
            folder = self.root / f"{name}-{str(dtype).removeprefix('torch.')}"
            model.save_pretrained(folder)
            self.made[key] = folder, model
        return self.made[key]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return Checkpoints(tmp_path_factory.mktemp("checkpoints"))


class Driver:
    """Gives requests slots and scattered blocks, and runs hand-made plans on a runner."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self.step = 0
        self.slot_of: dict[Request, int] = {}
        self.blocks_of: dict[Request, list[int]] = {}
        self.free_slots = list(range(runner.memory.num_slots))
        # Scattered on purpose: neighbours in a sequence are no neighbours in memory.
        generator = torch.Generator().manual_seed(1)
        self.free_blocks = torch.randperm(runner.memory.num_kv_blocks, generator=generator).tolist()

    def add(self, prompt: list[int], slot: int | None = None, **sampling: Any) -> Request:
        params = {"max_tokens": 1000, "temperature": 0.0, **sampling}
        request = Request(id=f"r{len(self.slot_of)}", prompt=list(prompt), sampling=SamplingParams(**params))
        self.slot_of[request] = self.free_slots.pop(0) if slot is None else slot
        if slot is not None:
            self.free_slots.remove(slot)
        self.blocks_of[request] = []
        return request

    def release(self, request: Request) -> None:
        self.free_slots.append(self.slot_of.pop(request))
        self.free_blocks.extend(self.blocks_of.pop(request))

    def row(self, request: Request, length: int | None = None, **fields: Any) -> Row:
        """The request's next share: `length` tokens (default: all that are known)."""
        start = fields.pop("start", request.num_computed)
        length = request.num_tokens - start if length is None else length
        blocks = self.blocks_of[request]
        while len(blocks) * KV_BLOCK_TOKENS < start + length:
            blocks.append(self.free_blocks.pop())
        is_decode = fields.pop("is_decode", length == 1 and len(request.output) > 0)
        samples = fields.pop("samples", is_decode or start + length == request.num_tokens)
        marks = fields.pop("marks", ())
        return Row(
            request=request,
            slot=self.slot_of[request],
            blocks=list(blocks),
            start=start,
            length=length,
            is_decode=is_decode,
            samples=samples,
            output_index=len(request.output),
            checkpoints=tuple(Checkpoint(position, snapshot) for position, snapshot in marks),
            **fields,
        )

    def run(self, rows: list[Row]) -> StepResult:
        """Execute rows as one plan (decode rows first) and commit the tokens."""
        rows = [row for row in rows if row.is_decode] + [row for row in rows if not row.is_decode]
        self.step += 1
        result = self.runner.execute(StepPlan(self.step, rows))
        tokens = iter(result.tokens)
        for row in rows:
            row.request.num_computed = row.start + row.length
            if row.samples:
                row.request.output.append(next(tokens))
        return result

    def logits(self, rows: list[Row]) -> torch.Tensor:
        """As `run`, but returns all logits and commits nothing to the outputs."""
        self.step += 1
        result = self.runner.logits(StepPlan(self.step, rows))
        for row in rows:
            row.request.num_computed = row.start + row.length
        return result


MakeDriver = Callable[..., Driver]


@pytest.fixture
def make_driver() -> MakeDriver:
    def make(folder: Path, **settings: Any) -> Driver:
        settings = {
            "max_num_seqs": 6,
            "num_kv_blocks": 160,
            "max_model_len": 400,
            "num_snapshots": 4,
            "dtype": "float32",
            **settings,
        }
        return Driver(ModelRunner(folder, **settings))

    return make


def random_prompt(length: int, seed: int, vocab: int = SMALL["vocab_size"]) -> list[int]:
    return torch.randint(3, vocab, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.fixture
def prompt() -> Callable[..., list[int]]:
    return random_prompt
