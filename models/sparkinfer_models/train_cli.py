"""Command line of `models/train.py`."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import torch

from sparkinfer.console import command_line
from sparkinfer.errors import ConfigError, SparkinferError
from sparkinfer_models.checkpoint import check_unused, training_device
from sparkinfer_models.config import MODELS, toy
from sparkinfer_models.dataset import read_stream
from sparkinfer_models.trainer import Recipe, Trainer

PACKAGES = Path(".cache/spark-tiny/packages")


def _add_run(commands: argparse._SubParsersAction) -> None:
    run = commands.add_parser("run", help="train a language model")
    run.add_argument("--model", choices=sorted(MODELS), required=True)
    run.add_argument("--data", type=Path, required=True, help="folder that `prepare` wrote")
    run.add_argument("--out", type=Path, required=True, help="checkpoints, log, and the model at the end")
    run.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    run.add_argument("--compile", action="store_true", help="torch.compile the sub-blocks (for a GPU)")
    run.add_argument("--cuda-graphs", action="store_true", help="replay forward and backward as one CUDA graph")
    run.add_argument("--resume", action="store_true", help="continue from OUT/training.pt")
    run.add_argument("--stop-at", type=int, default=0, help="write a checkpoint after this step and end")
    run.add_argument(
        "--toy", action="store_true", help="a tiny shape, for a CPU; data ids are folded into its vocabulary"
    )
    run.add_argument("--log-every", type=int, default=50)
    for field in fields(Recipe):
        kind = {"int": int, "float": float}[str(field.type)]
        run.add_argument("--" + field.name.replace("_", "-"), type=kind, default=field.default)


def _run(args: argparse.Namespace) -> None:
    for name in ("length", "batch", "long_length"):
        if getattr(args, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')} {getattr(args, name)}: give at least 1")
    device = training_device(args.device)
    if not args.resume:
        check_unused(args.out)
    config = MODELS[args.model]
    train, held = (read_stream(args.data / f"{name}.u16.xz") for name in ("train", "held_out"))
    if args.toy:
        config = replace(toy(config), max_positions=max(256, args.long_length))
        train, held = (np.minimum(ids, config.vocab_size - 1) for ids in (train, held))
    recipe = Recipe(**{field.name: getattr(args, field.name) for field in fields(Recipe)})
    trainer = Trainer(config, recipe, (train, held), args.out, device, args.compile, args.cuda_graphs)
    if args.resume:
        trainer.resume()
    parameters = sum(p.numel() for p in trainer.network.parameters())
    print(json.dumps({"model": args.model, "parameters": parameters, "train_tokens": len(train)}), flush=True)
    trainer.run(log_every=args.log_every, stop_at=args.stop_at)


def _prepare(args: argparse.Namespace) -> None:
    from sparkinfer_models.prepare import prepare

    summary = prepare(args.packages, args.out, args.tokenizer, args.doc_siblings)
    print(json.dumps({key: value for key, value in summary.items() if key != "sources"}, indent=2))


def _evaluate(args: argparse.Namespace) -> None:
    from sparkinfer_models.evaluate import evaluate, evaluate_packages

    contexts = tuple(args.context)
    if args.package:
        result = evaluate_packages(args.model, args.package, args.packages, args.device, contexts, args.limit)
    elif args.data is not None:
        result = evaluate(args.model, args.data, args.device, contexts, args.limit, not args.no_ngram)
    else:
        raise ConfigError("give --data, the folder that `train.py prepare` wrote, or --package NAME")
    text = json.dumps(result, indent=2)
    print(text)
    if args.json:
        args.json.write_text(text + "\n")


def _add_evaluate(commands: argparse._SubParsersAction) -> None:
    command = commands.add_parser("evaluate", help="perplexity and top-1 on held-out text, beside a 5-gram's")
    command.add_argument("--model", type=Path, required=True, help="model folder")
    command.add_argument("--data", type=Path, help="folder that `prepare` wrote")
    text = "in place of --data: score these packages, each alone and all together, without their licence texts"
    command.add_argument("--package", nargs="+", metavar="NAME", help=text)
    command.add_argument("--packages", type=Path, default=PACKAGES, help="where package files are, or are fetched to")
    command.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    command.add_argument("--context", type=int, nargs="+", default=[1024, 8192])
    command.add_argument("--limit", type=int, default=0, help="take only this many tokens of each stream")
    command.add_argument("--no-ngram", action="store_true")
    command.add_argument("--json", type=Path)


def _repetition(args: argparse.Namespace) -> None:
    from sparkinfer_models.repetition import measure, write_line

    sentence = measure(args.model).sentence()
    print(sentence)
    write_line(args.model / "samples.md", sentence)


def _card(args: argparse.Namespace) -> None:
    from sparkinfer_models.card import drafter_card, language_model_card, write_card

    run = {"command": args.run_command, "machine": args.machine, "software": args.software, "date": args.date}
    if args.target:
        text = drafter_card(args.folder, args.target, run)
    else:
        text = language_model_card(args.folder, args.data / "corpus.json", run)
    write_card(args.folder, text)


def _add_card(commands: argparse._SubParsersAction) -> None:
    command = commands.add_parser("card", help="write the model card and the curve of a model or drafter folder")
    command.add_argument("folder", type=Path)
    command.add_argument("--data", type=Path, default=Path(), help="folder that `prepare` wrote")
    command.add_argument("--target", help="the target's name: the folder is a drafter's")
    for name in ("run-command", "machine", "software", "date"):
        command.add_argument(f"--{name}", required=True, help="as it was when the weights were trained")


@command_line
def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit code (2 for bad input)."""
    parser = argparse.ArgumentParser(description="Corpus, tokenizer and training of the reference language models.")
    commands = parser.add_subparsers(dest="command", required=True)
    prepare = commands.add_parser("prepare", help="fetch the packages, build the corpus, train the tokenizer")
    prepare.add_argument("--packages", type=Path, default=PACKAGES)
    prepare.add_argument("--out", type=Path, required=True)
    text = "train on the manuals of unseen packages too (python-werkzeug-doc), as the shipped models were"
    prepare.add_argument("--doc-siblings", action="store_true", help=text)
    prepare.add_argument("--tokenizer", type=Path, help="use this tokenizer.json instead of training one")
    _add_run(commands)
    _add_evaluate(commands)
    repetition = commands.add_parser("repetition", help="how much sampled answers repeat themselves, into samples.md")
    repetition.add_argument("--model", type=Path, required=True, help="model folder")
    _add_card(commands)
    args = parser.parse_args(argv)
    try:
        calls = {"prepare": _prepare, "run": _run, "evaluate": _evaluate, "repetition": _repetition, "card": _card}
        calls[args.command](args)
    except SparkinferError as error:
        print(f"train.py: {error}", file=sys.stderr)
        return error.exit_code
    return 0
