"""Command line of `models/train_drafter.py`."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import fields, replace
from pathlib import Path

import torch

from sparkinfer.console import command_line
from sparkinfer.errors import ConfigError, SparkinferError
from sparkinfer.identity import file_sha256, model_digest
from sparkinfer_models.acceptance import add_measure, measure
from sparkinfer_models.checkpoint import check_unused, load_network, load_training, training_device
from sparkinfer_models.dataset import read_stream
from sparkinfer_models.drafter import DrafterConfig
from sparkinfer_models.drafter_trainer import DrafterRecipe, DrafterTrainer, write_rollouts


def drafter_config(target_layers: int, hidden: int, vocab: int, max_positions: int) -> DrafterConfig:
    """The drafter's shapes for a target of this size."""
    base = DrafterConfig()
    if (target_layers, hidden, vocab) == (base.num_target_layers, base.hidden_size, base.vocab_size):
        return replace(base, max_positions=max_positions)
    taps = tuple(range(max(0, target_layers - 3), target_layers))
    small = replace(base, hidden_size=hidden, vocab_size=vocab, num_target_layers=target_layers, target_layers=taps)
    return replace(small, num_layers=2, head_dim=16, intermediate_size=32, selector_rank=8, max_positions=max_positions)


def _add_run(commands: argparse._SubParsersAction) -> None:
    run = commands.add_parser("run", help="write the target's texts, then train the drafter on them")
    run.add_argument("--target", type=Path, required=True, help="model folder")
    run.add_argument("--data", type=Path, required=True, help="folder that `train.py prepare` wrote")
    run.add_argument("--out", type=Path, required=True)
    run.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    run.add_argument("--compile", action="store_true")
    run.add_argument("--resume", action="store_true", help="continue from OUT/training.pt")
    run.add_argument("--stop-at", type=int, default=0, help="write a checkpoint after this step and end")
    run.add_argument("--log-every", type=int, default=50)
    for field in fields(DrafterRecipe):
        kind = {"int": int, "float": float}[str(field.type)]
        run.add_argument("--" + field.name.replace("_", "-"), type=kind, default=field.default)


def _recipe(args: argparse.Namespace, origin: dict[str, str], device: torch.device) -> DrafterRecipe:
    """The recipe: the saved one of a run that goes on, as the texts follow from it.

    Raises ConfigError when that run learned from another target or other data, or OUT is used and `--resume` is absent.
    """
    if not args.resume:
        check_unused(args.out)
        return DrafterRecipe(**{field.name: getattr(args, field.name) for field in fields(DrafterRecipe)})
    saved = load_training(args.out / "training.pt", device)
    for name, digest in origin.items():
        if saved.get("origin", {}).get(name) != digest:
            raise ConfigError(
                f"--resume: {args.out} was begun with another --{name} than {getattr(args, name)}: give that one"
            )
    return DrafterRecipe(**saved["recipe"])


def _run(args: argparse.Namespace) -> None:
    device = training_device(args.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    origin = {
        "target": model_digest(args.target.resolve()),
        "data": file_sha256(args.data / "train.u16.xz"),
    }
    recipe = _recipe(args, origin, device)
    target = load_network(args.target, dtype, device, args.compile).requires_grad_(False)
    # Decoding has other shapes with every step: it runs uncompiled.
    writer = load_network(args.target, dtype, device).requires_grad_(False)
    ids = read_stream(args.data / "train.u16.xz")
    ids = ids[ids < target.config.vocab_size]
    texts = write_rollouts(writer, ids, recipe, device)
    c = target.config
    config = drafter_config(c.num_layers, c.hidden_size, c.vocab_size, c.max_positions)
    trainer = DrafterTrainer(target, config, recipe, texts, args.out, device, origin)
    if args.resume:
        trainer.resume()
    print(json.dumps({"parameters": sum(p.numel() for p in trainer.parameters), "texts": len(texts)}), flush=True)
    trainer.run(log_every=args.log_every, stop_at=args.stop_at)


@command_line
def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit code (2 for bad input)."""
    parser = argparse.ArgumentParser(description="Training and measuring of the DFlash2 drafters.")
    commands = parser.add_subparsers(dest="command", required=True)
    _add_run(commands)
    add_measure(commands)
    args = parser.parse_args(argv)
    args.argv = ["train_drafter.py", *(sys.argv[1:] if argv is None else argv)]
    try:
        {"run": _run, "measure": measure}[args.command](args)
    except SparkinferError as error:
        print(f"train_drafter.py: {error}", file=sys.stderr)
        return error.exit_code
    return 0
