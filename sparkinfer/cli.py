"""`sparkinfer`: serve a model, talk to it, measure it, check the host. Sub-commands import what they need, late."""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from collections.abc import Sequence

import sparkinfer
from sparkinfer.arguments import seed, temperature
from sparkinfer.console import command_line
from sparkinfer.errors import ConfigError, SparkinferError
from sparkinfer.models.hub import HUB
from sparkinfer.settings import Settings, default_text, flag_name, resolve
from sparkinfer.settings_check import env_name

DTYPES = ("auto", "float32", "bfloat16", "float16")
LOAD_FORMATS = ("auto", "safetensors", "dummy")


def _serve_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "serve",
        help="serve a model over an OpenAI-compatible HTTP API",
        description="Serve a model over an OpenAI-compatible HTTP API (docs/api.md). Every setting is also an "
        "environment variable (docs/settings.md); the flag wins.",
    )
    parser.add_argument("model", metavar="MODEL", help=f"folder: config.json, *.safetensors, tokenizer.json; or {HUB}")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default %(default)s)")
    parser.add_argument("--port", type=int, default=8000, help="port; 0 takes a free one (default %(default)s)")
    parser.add_argument("--dtype", choices=DTYPES, default="auto", help="arithmetic; auto: the checkpoint's own")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N (default %(default)s)")
    parser.add_argument(
        "--seed", type=seed, default=0, help="source of the seeds of requests without one, and of dummy weights"
    )
    parser.add_argument(
        "--draft-model", metavar="FOLDER", help="drafter for speculative decoding (not in this release)"
    )
    parser.add_argument(
        "--load-format", choices=LOAD_FORMATS, default="auto", help="dummy: random weights of the shape"
    )
    group = parser.add_argument_group("settings")
    for field in dataclasses.fields(Settings):
        text = f"{field.metadata['text']} [{env_name(field.name)}; default {default_text(field)}]"
        group.add_argument(
            flag_name(field.name), dest=f"set_{field.name}", metavar="VALUE", help=text.replace("%", "%%")
        )
    parser.set_defaults(run=_serve)


def _serve(options: argparse.Namespace) -> int:
    if options.draft_model is not None:
        raise ConfigError("--draft-model: speculative decoding is not in this release; leave the flag out")
    if not 0 <= options.port <= 65535:
        raise ConfigError(f"--port {options.port}: ports run from 0 (any free one) to 65535")
    flags = {field.name: getattr(options, f"set_{field.name}") for field in dataclasses.fields(Settings)}
    settings = resolve(os.environ, flags)
    from sparkinfer.server.serve import ServeOptions, run

    return run(
        ServeOptions(
            model=options.model,
            host=options.host,
            port=options.port,
            settings=settings,
            dtype=options.dtype,
            device=options.device,
            seed=options.seed,
            load_format=options.load_format,
        )
    )


def _quantize_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "quantize",
        help="write a checkpoint with NVFP4 or block FP8 weights",
        description="Quantise a checkpoint piece by piece (docs/quantization.md): memory does not grow with its size, "
        "and a run that was killed goes on where it was.",
    )
    parser.add_argument("source", metavar="SRC", help=f"folder of a BF16, FP16 or FP32 checkpoint, or {HUB}")
    parser.add_argument("target", metavar="DST", help="folder to write; an unfinished run is taken up again")
    parser.add_argument("--format", choices=("nvfp4", "fp8"), required=True, help="of linear layers")
    parser.add_argument(
        "--module",
        action="append",
        default=[],
        metavar="PATTERN=FORMAT",
        help="format of the layers a pattern means: nvfp4, fp8 or keep. A pattern is whole name components, each a "
        "glob, found anywhere in the name: lm_head=nvfp4, layers.0=keep, self_attn=fp8, 'layers.1?.mlp=keep'. "
        "The last that fits wins. Kept unless named: lm_head, in_proj_a, in_proj_b",
    )
    parser.add_argument(
        "--calibration",
        action="append",
        default=[],
        metavar="FILE",
        help="UTF-8 text to calibrate NVFP4 with (default: the topics of Python's manual)",
    )
    parser.add_argument("--calibration-tokens", type=int, default=8192, metavar="N", help="default %(default)s")
    parser.add_argument(
        "--no-search", action="store_true", help="block scales are amax / 6; do not search for the least error"
    )
    parser.add_argument("--device", default="cpu", help="cpu or cuda[:N]: where to calibrate and quantise")
    parser.add_argument("--shard-mib", type=int, default=4096, metavar="N", help="size of a file (default %(default)s)")
    parser.set_defaults(run=_quantize)


def _quantize(options: argparse.Namespace) -> int:
    from sparkinfer.quantization.cli import run

    return run(options)


def _chat(options: argparse.Namespace) -> int:
    from sparkinfer.chat import chat

    return chat(options.target, options.system, options.temperature, options.max_tokens)


def _doctor(options: argparse.Namespace) -> int:
    from sparkinfer.doctor import doctor

    return doctor(options.model)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="sparkinfer", description=sparkinfer.__doc__)
    parser.add_argument("--version", action="version", version=f"sparkinfer {sparkinfer.__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _serve_parser(commands)
    chat = commands.add_parser("chat", help="chat in the terminal with a running server, or with a model")
    chat.add_argument(
        "target", metavar="MODEL|URL", help=f"http://host:port of a server, or a model to serve: a folder, or {HUB}"
    )
    chat.add_argument("--system", help="system message")
    chat.add_argument("--temperature", type=temperature, default=0.7)
    chat.add_argument("--max-tokens", type=int, default=512)
    chat.set_defaults(run=_chat)
    doctor = commands.add_parser("doctor", help="check this machine, and a model, for serving")
    doctor.add_argument("model", metavar="MODEL", nargs="?", help=f"model to check too: a folder, or {HUB}")
    doctor.set_defaults(run=_doctor)
    _quantize_parser(commands)
    commands.add_parser("bench", help="measure the engine without a server", add_help=False)
    commands.add_parser("profile", help="trace steps of the engine, and a table of time by kernel", add_help=False)
    return parser


@command_line
def main(arguments: Sequence[str] | None = None) -> int:
    """Command line. Exit codes: 0 ok, 2 bad input, 3 the machine cannot do it, 130 interrupted, 1 anything else."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    try:
        if arguments[:1] == ["bench"]:
            from sparkinfer.bench import main as bench

            return int(bench(arguments[1:]) or 0)
        if arguments[:1] == ["profile"]:
            from sparkinfer.profiling import main as profile

            return int(profile(arguments[1:]) or 0)
        options = _parser().parse_args(arguments)
        return int(options.run(options))
    except SparkinferError as error:
        print(f"sparkinfer: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
