"""Command line of eval/gpu_host.py. What needs packages that `setup` brings is imported late."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from sparkinfer.arguments import name_or_path
from sparkinfer.console import command_line
from sparkinfer.errors import ConfigError, SparkinferError
from sparkinfer.output import require_folder
from sparkinfer_eval.host import servers
from sparkinfer_eval.host.site import Host, install_wheels, load_caches, program, save_caches, unpack
from sparkinfer_eval.host.tokenizer import SOURCE, write_text_tokenizer

CHECKS = ("pack_ckpt_check", "prefix_check", "mixed_conc_check")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="gpu_host.py", description="Evaluate on a bare GPU host, one phase a call.")
    parser.add_argument("--work", type=Path, default=Path("gpu-host-work"), help="folder for all that is made")
    phases = parser.add_subparsers(dest="phase", required=True, metavar="PHASE")
    setup = phases.add_parser("setup", help="install wheels that came along, unpack vLLM and AIPerf")
    setup.add_argument("--wheels", type=Path, action="append", default=[], help="folder of wheels")
    setup.add_argument("--vllm", type=Path, help="folder with the parts of the vLLM bundle")
    setup.add_argument("--aiperf", type=Path, help="folder with the parts of the AIPerf bundle")
    made = phases.add_parser("checkpoint", help="write a seeded random checkpoint of real shape")
    made.add_argument("--shape", choices=("27b", "35b"), required=True)
    made.add_argument("--format", choices=("nvfp4", "fp8", "bf16"), default="nvfp4")
    made.add_argument("--layers", type=int, help="keep only so many layers")
    made.add_argument("--scales", choices=("flat", "depth"), default="flat", help="of the weights; depth: for checks")
    check = phases.add_parser("check", help="run correctness programs on the GPU")
    check.add_argument("--only", default=",".join(CHECKS), help="which (default %(default)s)")
    for name in ("bench", "profile"):
        one = phases.add_parser(name, help=f"sparkinfer {name} of a model", add_help=True)
        one.add_argument("rest", nargs=argparse.REMAINDER, help="-- and more flags")
    serve = phases.add_parser("serve", help="start a server and wait for it; again: go on waiting")
    cells = phases.add_parser("cells", help="measure cells of the running server")
    for one in (check, phases.choices["bench"], phases.choices["profile"], serve):
        one.add_argument("--model", type=name_or_path, required=True, help="name or folder")
        one.add_argument("--timeout", type=float, default=300.0, help="seconds (default %(default)s)")
    serve.add_argument("--engine", choices=("sparkinfer", "vllm"), required=True)
    serve.add_argument("--column", choices=("exact", "fast"), default="exact")
    serve.add_argument("--port", type=int, default=8100)
    serve.add_argument("rest", nargs=argparse.REMAINDER, help="-- and more flags of the server")
    cells.add_argument("--load", choices=("tokens", "aiperf"), default="tokens")
    cells.add_argument("--rep", type=int, default=1)
    cells.add_argument("--within", type=float, default=float("inf"), help="begin no cell after so many seconds")
    burst = phases.add_parser("burst", help="prompts per second of 32 prompts that reach the running server together")
    burst.add_argument("--sizes", type=int, nargs="+", default=[128, 1024], help="tokens of each prompt")
    burst.add_argument("--repeats", type=int, default=3)
    prompts = phases.add_parser("prompts", help="write the prompts that AIPerf sends, the same for every engine")
    prompts.add_argument("--model", type=name_or_path, required=True, help="name or folder")
    collect = phases.add_parser("collect", help="pack a run's raw results into one archive")
    collect.add_argument("--out", type=Path, required=True, help="folder of the archive")
    collect.add_argument("--statement", required=True, help="one sentence about the run's scale, for its report")
    collect.add_argument("--checks", default="", help="check programs that belong to the run, separated by commas")
    for one in (prompts, cells):
        one.add_argument("--cells", default="all", help="cell ids separated by commas (default %(default)s)")
    for one in (prompts, cells, burst):
        one.add_argument("--seed", type=int, default=0)
    for one in (prompts, cells, collect):
        one.add_argument("--overrides", type=json.loads, default={}, help="JSON object of changes to the full scale")
    for one in (cells, burst, collect, phases.add_parser("table", help="ratios of the cells that both engines have")):
        one.add_argument("--run", default="quick", help="run name (default %(default)s)")
    caches = phases.add_parser("caches", help="pack what was compiled, or unpack it on the next host")
    which = caches.add_mutually_exclusive_group(required=True)
    which.add_argument("--save", type=Path, metavar="FOLDER")
    which.add_argument("--load", type=Path, metavar="FOLDER", dest="bring")
    phases.add_parser("warm", help="warm the running server up")
    phases.add_parser("stop", help="end the running server")
    bring = phases.add_parser("import", help="on another machine: an archive of `collect` becomes results/<run>")
    bring.add_argument("archive", type=Path)
    bring.add_argument("--results", type=Path, default=Path("results"))
    return parser


def _programs(host: Host, options: argparse.Namespace) -> int:
    """Phases that run programs of ours on a model."""
    model, logs = host.model(options.model), host.work / "logs"
    if options.phase != "check":
        rest = [part for part in options.rest if part != "--"]
        report = str(logs / f"{options.phase}-{model.name}.json")
        arguments = ["-m", "sparkinfer.cli", options.phase, str(model), "--device", "cuda", "--json", report, *rest]
        return program(host, options.phase, arguments, logs / f"{options.phase}-{model.name}.log", options.timeout)
    unknown = [name for name in options.only.split(",") if name not in CHECKS]
    if unknown:
        raise ConfigError(f"--only {','.join(unknown)}: no such check; there are {', '.join(CHECKS)}")
    codes = []
    for name in options.only.split(","):
        report = str(logs / f"{name}-{model.name}.json")
        arguments = [f"eval/{name}.py", str(model), "--device", "cuda", "--json", report]
        codes.append(program(host, name, arguments, logs / f"{name}-{model.name}.log", options.timeout))
    return max(codes)


def _run(host: Host, options: argparse.Namespace) -> int:
    match options.phase:
        case "setup":
            for wheels in options.wheels:
                install_wheels(host, wheels)
            for parts, target in ((options.vllm, host.vllm), (options.aiperf, host.aiperf)):
                if parts is not None:
                    unpack(parts, target)
        case "checkpoint":
            if options.layers is not None and options.layers < 1:
                raise ConfigError(f"--layers {options.layers}: keep at least 1 layer")
            name = f"{options.shape}-{options.format}" + (f"-l{options.layers}" if options.layers else "")
            name += f"-{options.scales}" if options.scales != "flat" else ""
            more = ["--layers", str(options.layers)] if options.layers else []
            arguments = ["models/random_checkpoint.py", str(host.work / "models" / name), "--shape", options.shape]
            arguments += ["--format", options.format, "--scales", options.scales, *more]
            code = program(host, "checkpoint", arguments, host.work / "logs" / f"checkpoint-{name}.log", 300)
            if code == 0:
                write_text_tokenizer(host.work / "models" / name, host.root / "models" / SOURCE)
            return code
        case "check" | "bench" | "profile":
            return _programs(host, options)
        case "serve":
            rest = [part for part in options.rest if part != "--"]
            model = host.model(options.model).resolve()
            servers.start(host, options.engine, model, options.port, options.column, rest, options.timeout)
        case "prompts":
            from sparkinfer_eval.host.cells import cells_of, make_prompts

            found = cells_of(host, options.cells, options.overrides)
            return make_prompts(host, options.model, found, options.overrides, options.seed)
        case "cells":
            from sparkinfer_eval.host.cells import Sitting, cells_of, measure_cells

            until = time.monotonic() + options.within
            sitting = Sitting(host, options.run, servers.running(host), options.rep, options.seed)
            found = cells_of(host, options.cells, options.overrides)
            if options.load == "tokens" and options.cells == "all":
                found = [cell for cell in found if cell.kind == "closed"]  # Planned arrivals are sent as text.
            return measure_cells(sitting, found, options.load, until)
        case "burst":
            from sparkinfer_eval.host.burst import measure_bursts

            measure_bursts(host, options.run, servers.running(host), options.sizes, options.repeats, options.seed)
        case "collect":
            from sparkinfer_eval.host.collect import pack

            checks = [name for name in options.checks.split(",") if name]
            archive = pack(host, options.run, options.out, options.statement, options.overrides, checks)
            print(f"{archive}: {archive.stat().st_size / 2**20:.1f} MiB")
        case "import":
            from sparkinfer_eval.host.collect import bring_in

            print(bring_in(host.root, options.archive, options.results))
        case "table":
            from sparkinfer_eval.host.cells import table

            print(*table(host, options.run), sep="\n")
        case "caches":
            if options.save is not None:
                print(*(f"{path}: {path.stat().st_size / 2**20:.1f} MiB" for path in save_caches(host, options.save)))
            else:
                load_caches(host, options.bring)
        case "warm":
            from sparkinfer_eval.host.cells import warm_up

            warm_up(host, servers.running(host))
        case "stop":
            servers.stop(host)
    return 0


@command_line
def main(root: Path, arguments: list[str] | None = None) -> int:
    """Entry point; returns the exit code: 0 done, 1 a check failed, 2 bad input, 3 the machine cannot do it."""
    options = _parser().parse_args(arguments)
    host = Host(root, options.work.resolve())
    sys.path.append(str(host.site))
    try:
        require_folder(host.work, "--work")
        if options.phase == "collect":
            require_folder(options.out, "--out")
        if options.phase == "caches" and options.save is not None:
            require_folder(options.save, "--save")
        host.work.mkdir(parents=True, exist_ok=True)
        return _run(host, options)
    except SparkinferError as error:
        print(f"gpu_host.py: {error}", file=sys.stderr)
        return error.exit_code
