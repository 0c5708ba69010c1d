"""Perplexity and next-token accuracy of a trained model on held-out streams, beside the 5-gram's."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from sparkinfer.identity import file_sha256
from sparkinfer_models.checkpoint import load_network
from sparkinfer_models.dataset import read_stream
from sparkinfer_models.network import Network
from sparkinfer_models.ngram import ORDER, KneserNey

STREAMS = ("held_out", "unseen", "held_out_chat")


@dataclass(frozen=True)
class Score:
    """Mean loss in nats per token, and what follows from it; `top1` is the share of tokens that were the argmax."""

    stream: str
    context: int
    tokens: int
    loss: float
    perplexity: float
    bits_per_byte: float
    top1: float | None


def score(stream: str, context: int, tokens: int, loss: float, bytes_per_token: float, top1: float | None) -> Score:
    """Fills in perplexity and bits per byte."""
    return Score(stream, context, tokens, loss, math.exp(loss), loss / math.log(2) / bytes_per_token, top1)


@torch.no_grad()
def network_loss(network: Network, ids: np.ndarray, context: int, batch_tokens: int = 65536) -> tuple[float, float]:
    """Loss and top-1 over the whole stream, read in windows of `context` that do not overlap (the last may be short).

    Returns:
        Mean nats per token, share of tokens predicted right. The first token of every window has no prediction.
    """
    device = network.parameter("lm_head.weight").device
    total, right, count = 0.0, 0, 0
    full = (len(ids) - 1) // context
    rows = [ids[i * context : (i + 1) * context + 1] for i in range(full)]
    batches = [rows[i : i + max(1, batch_tokens // context)] for i in range(0, full, max(1, batch_tokens // context))]
    if len(ids) - 1 > full * context:
        batches.append([ids[full * context :]])
    for batch in batches:
        windows = torch.from_numpy(np.stack(batch).astype(np.int64)).to(device)
        logits = network.logits(network(windows[:, :-1]).hidden).flatten(0, 1)
        targets = windows[:, 1:].flatten()
        total += float(F.cross_entropy(logits, targets, reduction="sum"))
        right += int((logits.argmax(-1) == targets).sum())
        count += targets.numel()
    return total / count, right / count


def evaluate(
    model: Path, data: Path, device: str, contexts: tuple[int, ...], limit: int, with_ngram: bool
) -> dict[str, object]:
    """Scores a model folder on every held-out stream; `limit` > 0 takes that many tokens of each only."""
    sizes = json.loads((data / "corpus.json").read_text())["streams"]
    network = load_network(model, torch.float32, device)
    streams = {name: read_stream(data / f"{name}.u16.xz")[: limit or None] for name in STREAMS}
    ratio = {name: sizes[name]["bytes"] / sizes[name]["tokens"] for name in STREAMS}
    rows = []
    for name, ids in streams.items():
        for context in contexts:
            loss, top1 = network_loss(network, ids, context)
            rows.append(asdict(score(name, context, len(ids) - 1, loss, ratio[name], top1)))
    result: dict[str, object] = {
        "model": model.name,
        "weights_sha256": file_sha256(model / "model.safetensors"),
        "parameters": sum(p.numel() for p in network.parameters()),
        "dtype": "float32",
        "device": device,
        "device_name": torch.cuda.get_device_name() if device.startswith("cuda") else "a CPU",
        "scores": rows,
    }
    if with_ngram:
        yardstick = KneserNey(read_stream(data / "train.u16.xz"), network.config.vocab_size)
        result["five_gram"] = [
            asdict(score(name, ORDER - 1, len(ids) - ORDER + 1, yardstick.loss(ids), ratio[name], None))
            for name, ids in streams.items()
        ]
    return result
