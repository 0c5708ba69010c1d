"""Run inside the vLLM environment: loads a drafter with vLLM's own classes and compares every part with ours.

Usage: drafter_in_vllm.py TARGET DRAFTER. Prints one JSON object of relative errors.

vLLM's CPU build does not start with DFlash2 as shipped (reports/acceptance/README.md says what it takes), and parts are
compared here, not answers: the engine is not started, the module is built by vLLM's loader, its attention kernel is
replaced by plain attention over the context that it stored, and the rest (projections, norms, rotary, convolutions,
MLP, candidates, selector) is vLLM's code.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from unittest import mock

os.environ.update(HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", VLLM_CPU_KVCACHE_SPACE="1")

import torch
import torch.nn.functional as F
from sparkinfer_models.checkpoint import load_network
from sparkinfer_models.drafter import load_drafter
from sparkinfer_models.drafter_trainer import block_mask
from sparkinfer_models.tokenizer import MASK_ID
from torch import Tensor, nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
from vllm.model_executor.model_loader import get_model
from vllm.platforms import current_platform

CONTEXT, BLOCK, ANCHOR = 50, 8, 50


class PlainAttention(nn.Module):
    """Attention of one block over stored context keys and values, and over itself."""

    def __init__(self, heads: int, kv_heads: int, dim: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.dim = heads, kv_heads, dim
        self.keys = self.values = torch.empty(0)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [block, heads x dim]; k, v [block, kv heads x dim]."""
        rows = q.view(-1, self.heads, self.dim).transpose(0, 1)
        pairs = []
        for stored, new in ((self.keys, k), (self.values, v)):
            joined = torch.cat((stored, new.view(-1, self.kv_heads, self.dim)))
            pairs.append(joined.transpose(0, 1).repeat_interleave(self.heads // self.kv_heads, 0))
        return F.scaled_dot_product_attention(rows, *pairs).transpose(0, 1).flatten(1)


def build(target: str, drafter: str) -> nn.Module:
    """vLLM's drafter module, loaded by vLLM."""
    # The check that the runner knows DFlash2 is the runner's; no runner is started here.
    VllmConfig._is_dflash2_draft = lambda self: False  # type: ignore[method-assign]
    speculative = {"method": "dflash", "model": drafter, "num_speculative_tokens": BLOCK - 1}
    config = EngineArgs(
        model=target, dtype="float32", max_model_len=512, enforce_eager=True, speculative_config=speculative
    ).create_engine_config()
    with set_current_vllm_config(config):
        with tempfile.NamedTemporaryFile() as file:
            init_distributed_environment(1, 0, f"file://{file.name}", 0, "gloo")
            initialize_model_parallel(1, 1)
        return get_model(vllm_config=config, model_config=config.speculative_config.draft_model_config)


def relative_error(theirs: Tensor, ours: Tensor) -> float:
    """||theirs - ours|| / ||ours||."""
    return float((theirs.float() - ours.float()).norm() / ours.float().norm())


@torch.no_grad()
def main() -> None:
    target_path, drafter_path = sys.argv[1:3]
    model = build(target_path, drafter_path)
    network = load_network(Path(target_path), torch.float32)
    ours = load_drafter(Path(drafter_path), torch.float32)
    c = ours.config
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(4, c.vocab_size, (1, CONTEXT + 1), generator=generator)
    taps = torch.cat(network(ids[:, :CONTEXT], taps=c.target_layers).taps, -1)
    errors: dict[str, float] = {"architecture_is_ours": float(type(model).__name__ != "DFlash2Qwen3ForCausalLM")}

    context = ours.context(taps, torch.arange(CONTEXT))
    attention = []
    for layer in model.model.layers:
        plain = PlainAttention(c.num_heads, c.num_kv_heads, c.head_dim)

        def store(_: object, keys: Tensor, values: Tensor, *rest: object, into: PlainAttention = plain) -> None:
            into.keys, into.values = keys.clone(), values.clone()

        layer.self_attn.attn.impl.do_kv_cache_update = store
        layer.self_attn.attn.kv_cache = torch.empty(0)
        attention.append(plain)
    combined = model.combine_hidden_states(taps[0])
    # The CPU build's rms_norm takes one weight for all layers where the GPU's takes one for each (vLLM 0.30): vLLM's
    # own loop over layers, which it keeps for another platform, is right here too.
    with mock.patch.object(type(current_platform), "is_xpu", return_value=True):
        model.precompute_and_store_context_kv(combined, torch.arange(CONTEXT), torch.arange(CONTEXT))
    for index, (plain, (keys, values)) in enumerate(zip(attention, context, strict=True)):
        errors[f"context_keys_{index}"] = relative_error(plain.keys, keys[0])
        errors[f"context_values_{index}"] = relative_error(plain.values, values[0])
        model.model.layers[index].self_attn.attn = plain

    block = torch.full((BLOCK,), MASK_ID)
    block[0] = ids[0, -1]
    positions = torch.arange(ANCHOR, ANCHOR + BLOCK)
    table = network.parameter("model.embed_tokens.weight")
    mask = block_mask(torch.tensor([[ANCHOR]]), CONTEXT, BLOCK, c.window)
    hidden = ours(F.embedding(block, table)[None, None], positions[None, None], context, mask)[0, 0, 1:]
    # Sharing with the target, as vLLM's runner does it.
    model.model.embed_tokens.weight.data = table.clone()
    model.lm_head.weight.data = network.parameter("lm_head.weight").clone()
    dispatch_cpu_unquantized_gemm(model.lm_head, remove_weight=False)  # packs the head's weight again
    theirs = model.model.forward(block, positions)[1:]
    errors["hidden"] = relative_error(theirs, hidden)

    logits = network.logits(hidden)
    candidates, unary = model.compute_candidates(theirs)
    top = logits.topk(c.selector_top_k, -1)
    errors["candidates"] = float((candidates.sort(-1).values != top.indices.sort(-1).values).float().mean())
    errors["unary"] = relative_error(unary.sort(-1, descending=True).values, top.values)
    selector = model.model.candidate_selector
    scores = selector.forward(candidates[None], unary[None], theirs[None], ids[:, -1])[0]
    walked, previous = [], 0
    for slot in range(BLOCK - 1):
        previous = int(scores[slot, previous].argmax())
        walked.append(int(candidates[slot, previous]))
    errors["walk"] = float(walked != ours.walk(hidden, logits, int(ids[0, -1]), 0.0, None))
    print("RESULT " + json.dumps(errors))


if __name__ == "__main__":
    main()
