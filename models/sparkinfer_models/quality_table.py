"""Quality of quantised checkpoints: one record and one table out of the comparisons that `eval/accuracy.py` wrote.

Each comparison is of a quantised form (A) with the checkpoint that it was made from (B), in the same engine.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from sparkinfer.console import command_line
from sparkinfer.errors import ConfigError, SparkinferError
from sparkinfer.identity import model_digest

RECORD = "results.json"
BEGIN, END = "<!-- quality: begin -->", "<!-- quality: end -->"
"""The table's place in README.md."""
FORMATS = {"nvfp4-nosearch": "nvfp4 --no-search", "nvfp4": "nvfp4", "fp8": "fp8"}
"""Ends of checkpoints' names, and the quantizer's options that they stand for."""
LABELS = {
    "nvfp4": "NVFP4",
    "nvfp4 --no-search": "NVFP4, block scales amax / 6 (`--no-search`)",
    "fp8": "FP8 blocks",
}
HEAD = """| model | weights | MiB | perplexity | KL, mean | KL, 99th percentile | top-1, ties aside | ties counted | \
answers equal | others part at token |
|---|---|---:|---:|---:|---:|---:|---:|---:|---:|
"""


@dataclass(frozen=True, slots=True)
class Quality:
    """One quantised form against its source. KL in nats; answers are greedy, `parted_at` is a median."""

    model: str
    format: str
    model_digest: str
    uncalibrated_digest: str
    """Of all tensors but input scales: without a search, the same on every CPU."""
    cpu_capability: str
    """The instructions that torch's kernels used: calibration's sums, and with them what follows from it, differ in
    their last bits between kinds of CPU."""
    source_digest: str
    engine_digest: str
    weights_mib: float
    source_mib: float
    perplexity: float
    perplexity_source: float
    positions: int
    kl: float
    kl_p99: float
    kl_max: float
    top1: float
    top1_plain: float
    near_ties: int
    answers: int
    answers_equal: int
    answer_tokens: int
    parted_at: float | None
    held_out: str
    date: str
    commit: str | None
    command: str


def weights_mib(folder: Path) -> float:
    """Size of a checkpoint's weight files. Raises ConfigError when it has none."""
    files = list(folder.glob("*.safetensors"))
    if not files:
        raise ConfigError(f"{folder} holds no weights: name the folder of the checkpoint that was scored")
    return sum(path.stat().st_size for path in files) / 2**20


def uncalibrated_digest(folder: Path) -> str:
    """SHA-256 over names and bytes of a checkpoint's tensors but input scales, in order of their names."""
    digest = hashlib.sha256()
    tensors: dict[str, torch.Tensor] = {}
    for path in folder.glob("*.safetensors"):
        tensors |= load_file(path)
    for name, tensor in sorted(tensors.items()):
        if not name.endswith("input_scale"):
            digest.update(name.encode() + b"\0" + tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return f"sha256:{digest.hexdigest()}"


def read_quality(path: Path, checkpoints: Path, sources: Path) -> Quality:
    """One comparison, checked against the folders that it names.

    Args:
        path: what `accuracy.py QUANTISED scores:SOURCE --json` wrote.
        checkpoints, sources: where the quantised forms and the models that they were made from lie.

    Raises:
        ConfigError: it is something else, or a folder holds other files than those that were scored.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        ours, theirs, f = document["engines"]["a"], document["engines"]["b"], document["figures"]
        name, source = ours["model"], theirs["model"]
        kind = name.removeprefix(f"{source}-")
        if kind not in FORMATS or f["loss_a"] is None or f["loss_b"] is None:
            raise KeyError(f"{name} is no quantised form of {source}, or has no perplexity")
        figures = {key: f[key] for key in ("positions", "kl", "kl_p99", "kl_max", "top1", "top1_plain", "near_ties")}
        figures |= {key: f[key] for key in ("answers", "answers_equal", "parted_at")}
        digests = ours["model_digest"], theirs["model_digest"]
        more = document["settings"]["answer_tokens"], document["source"]["commit"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is no comparison of a quantised form with its source: {error}") from error
    folders = checkpoints / name, sources / source
    for folder, digest in zip(folders, digests, strict=True):
        if model_digest(folder) != digest:
            raise ConfigError(f"{folder} is not what {path} scored: quantise and score again")
    return Quality(
        model=source,
        format=FORMATS[kind],
        model_digest=digests[0],
        uncalibrated_digest=uncalibrated_digest(folders[0]),
        cpu_capability=torch.backends.cpu.get_cpu_capability(),
        source_digest=digests[1],
        engine_digest=ours["engine_digest"],
        weights_mib=round(weights_mib(folders[0]), 1),
        source_mib=round(weights_mib(folders[1]), 1),
        perplexity=math.exp(f["loss_a"]),
        perplexity_source=math.exp(f["loss_b"]),
        **figures,
        answer_tokens=more[0],
        held_out=document["held_out"],
        date=document["date"],
        commit=more[1],
        command=document["command"],
    )


def table(found: Sequence[dict[str, Any]]) -> str:
    """Markdown of a record's entries, each model's forms below the model itself."""
    lines, model = [], None
    for q in found:
        if q["model"] != model:
            model = q["model"]
            lines.append(f"| `{model}` | BF16 | {q['source_mib']} | {q['perplexity_source']:.3f} | | | | | | |")
        parted = "" if q["parted_at"] is None else f"{q['parted_at']:g}"
        cells = [
            "", LABELS[q["format"]], str(q["weights_mib"]), f"{q['perplexity']:.3f}", f"{q['kl']:.4f}",
            f"{q['kl_p99']:.3f}", f"{100 * q['top1']:.1f} %", f"{100 * q['top1_plain']:.1f} %",
            f"{q['answers_equal']} of {q['answers']}", parted,
        ]  # fmt: skip
        lines.append("| " + " | ".join(cells).lstrip() + " |")
    return HEAD + "\n".join(lines) + "\n"


def fill(readme: Path, text: str) -> None:
    """Put the table into its place. Raises ConfigError when README.md has none."""
    before, begin, rest = readme.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ConfigError(f"{readme} has no place for the table: a line {BEGIN} and one {END}")
    readme.write_text(f"{before}{BEGIN}\n{text}{END}{after}", encoding="utf-8")


@command_line
def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    parser = argparse.ArgumentParser(prog="quality_table.py", description=__doc__)
    parser.add_argument("comparisons", type=Path, nargs="+", help="JSON files of accuracy.py")
    parser.add_argument("--checkpoints", type=Path, required=True, help="folder of the quantised forms")
    parser.add_argument("--sources", type=Path, default=Path("models"), help="folder of the models (default: models)")
    parser.add_argument("--out", type=Path, required=True, help=f"folder of {RECORD} and README.md")
    options = parser.parse_args(arguments)
    try:
        found = [asdict(read_quality(path, options.checkpoints, options.sources)) for path in options.comparisons]
        fill(options.out / "README.md", table(found))
    except SparkinferError as error:
        print(f"quality_table: {error}", file=sys.stderr)
        return error.exit_code
    lines = ",\n".join(map(json.dumps, found))
    (options.out / RECORD).write_text(f"[\n{lines}\n]\n", encoding="utf-8")
    return 0
