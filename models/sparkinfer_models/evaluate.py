"""Perplexity and next-token accuracy of a trained model on held-out streams, beside the 5-gram's."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer

from sparkinfer.errors import ConfigError
from sparkinfer.identity import file_sha256
from sparkinfer_models.checkpoint import load_network
from sparkinfer_models.config import ModelConfig
from sparkinfer_models.dataset import encode_stream, read_stream
from sparkinfer_models.network import Network
from sparkinfer_models.ngram import ORDER, KneserNey
from sparkinfer_models.sources import documents, fetch, is_licence, load_sources

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
    streams = {name: read_stream(data / f"{name}.u16.xz")[: limit or None] for name in STREAMS}
    ratio = {name: sizes[name]["bytes"] / sizes[name]["tokens"] for name in STREAMS}
    result = _scored(model, device, contexts, streams, ratio)
    if with_ngram:
        yardstick = KneserNey(read_stream(data / "train.u16.xz"), ModelConfig.from_hf(model).vocab_size)
        result["five_gram"] = [
            asdict(score(name, ORDER - 1, len(ids) - ORDER + 1, yardstick.loss(ids), ratio[name], None))
            for name, ids in streams.items()
        ]
    return result


def evaluate_packages(
    model: Path, names: list[str], packages: Path, device: str, contexts: tuple[int, ...], limit: int
) -> dict[str, object]:
    """Scores a model folder on whole packages of `sources.json`, each alone and all together, without licence texts.

    Raises ConfigError for a package that is not there or holds no readable document.
    """
    sources = {source.name: source for source in load_sources()}
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    encoded = {}
    for name in names:
        if name not in sources:
            raise ConfigError(f"--package {name}: sources.json has no such package")
        found = [
            d.text for d in documents(sources[name], fetch(sources[name], packages.resolve())) if not is_licence(d)
        ]
        if not found:
            raise ConfigError(f"--package {name}: no readable document besides its licence")
        encoded[name] = encode_stream(tokenizer, iter(found))
    streams = {name: ids[: limit or None] for name, (ids, _) in encoded.items()}
    ratio = {name: size / len(ids) for name, (ids, size) in encoded.items()}
    if len(names) > 1:
        name = " and ".join(names)
        streams[name] = np.concatenate([ids for ids, _ in encoded.values()])[: limit or None]
        ratio[name] = sum(size for _, size in encoded.values()) / sum(len(ids) for ids, _ in encoded.values())
    return _scored(model, device, contexts, streams, ratio)


def _scored(
    model: Path, device: str, contexts: tuple[int, ...], streams: dict[str, np.ndarray], ratio: dict[str, float]
) -> dict[str, object]:
    """Figures of every stream and context, and what they were measured with; `ratio` is bytes a token."""
    network = load_network(model, torch.float32, device)
    rows = []
    for name, ids in streams.items():
        for context in contexts:
            loss, top1 = network_loss(network, ids, context)
            rows.append(asdict(score(name, context, len(ids) - 1, loss, ratio[name], top1)))
    return {
        "model": model.name,
        "weights_sha256": file_sha256(model / "model.safetensors"),
        "parameters": sum(p.numel() for p in network.parameters()),
        "dtype": "float32",
        "device": device,
        "device_name": torch.cuda.get_device_name() if device.startswith("cuda") else "a CPU",
        "scores": rows,
    }
