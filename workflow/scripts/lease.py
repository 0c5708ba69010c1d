"""Hold an inference server for the workflow's jobs.

usage: lease.py run [server options] [--record ...] -- COMMAND...   get the server, then run the command beside it
       lease.py acquire [server options]                            get the server and print its state as JSON
       lease.py stop                                                stop the held server
       lease.py status                                              print the held server's state

In COMMAND, {url}, {served_name}, {version}, {engine_digest} and {state} (the state file) are replaced.
Exit codes: the command's own; 2 bad input, 3 the server cannot be had or ended, 130 interrupted.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "eval"), str(ROOT / "kernels")]

from sparkinfer_eval.lease import client  # noqa: E402
from sparkinfer_eval.lease.run import INTERRUPTED, run  # noqa: E402
from sparkinfer_eval.lease.state import ServerState, load_state, write_json  # noqa: E402
from sparkinfer_eval.plan.engines import load_engine  # noqa: E402
from sparkinfer_eval.report.failures import record_failure  # noqa: E402

from sparkinfer.errors import EnvironmentProblem, SparkinferError  # noqa: E402


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(description="Hold an inference server for the workflow's jobs.")
    top.add_argument("action", choices=("run", "acquire", "stop", "status"))
    top.add_argument(
        "--folder", type=Path, default=ROOT / "results" / ".server", help="where the server's state is kept"
    )
    top.add_argument("--owner-pid", type=int, help="process whose end stops the server (default: the workflow)")
    top.add_argument("--no-server", action="store_true", help="run: stop any held server, the command needs the device")
    top.add_argument(
        "--accept", type=int, nargs="+", default=[0], help="run: exit codes of the command that are no failure"
    )
    server = top.add_argument_group("the server")
    server.add_argument("--engine", type=Path, help="engine file, config/engines/NAME.yaml")
    server.add_argument("--schema", type=Path, default=ROOT / "workflow" / "schemas" / "engine.schema.yaml")
    server.add_argument("--python", type=Path, help="interpreter of the engine's environment")
    server.add_argument("--model", type=Path, help="model folder")
    server.add_argument("--served-name")
    server.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    server.add_argument("--dtype", default="bfloat16")
    server.add_argument("--max-model-len", type=int, default=4096)
    server.add_argument("--seed", type=int, default=0)
    server.add_argument("--session", default="", help="servers of different sessions are never shared")
    server.add_argument("--source", type=Path, default=ROOT, help="source tree that the engine runs from")
    server.add_argument("--cache", type=Path, default=ROOT / "results" / "cache")
    server.add_argument("--log", type=Path, help="file for the server's output")
    server.add_argument("--engine-digest", help="digest that the server has to report, or stands for when it has none")
    server.add_argument("--facts", type=Path, help="file that gets the server's state, version and resolved settings")
    server.add_argument("--port", type=int, help="fixed port (default: a free one)")
    record = top.add_argument_group("where a failed attempt is noted")
    record.add_argument("--record", type=Path, metavar="RUN_FOLDER")
    for name in ("--engine-name", "--model-name", "--cell"):
        record.add_argument(name, default="")
    record.add_argument("--block", type=int, default=0)
    record.add_argument("--rep", type=int, default=0)
    return top


def wanted(args: argparse.Namespace) -> client.Wanted:
    """The server that the options describe. Raises EnvironmentProblem when one is missing."""
    missing = [name for name in ("engine", "python", "model", "log") if getattr(args, name) is None]
    if missing:
        raise EnvironmentProblem("missing option: " + ", ".join("--" + name for name in missing))
    if not args.python.is_file():
        raise EnvironmentProblem(f"{args.python} does not exist: build the environments first (make setup)")
    return client.Wanted(
        engine=load_engine(args.engine, args.schema),
        python=args.python.absolute(),
        model=args.model.absolute(),
        served_name=args.served_name or args.model.name,
        device=args.device,
        dtype=args.dtype,
        max_model_len=args.max_model_len,
        seed=args.seed,
        session=args.session,
        source=args.source.absolute(),
        cache=args.cache.absolute(),
        log=args.log.absolute(),
        port=args.port,
        expected_digest=args.engine_digest,
        step_trace=None if args.facts is None else args.facts.absolute().with_suffix(".steps.jsonl"),
    )


def fill(command: list[str], state: ServerState | None, folder: Path) -> list[str]:
    """Put the server's facts into the command."""
    facts = {} if state is None else {
        "{url}": state.url,
        "{served_name}": state.served_name,
        "{version}": state.version or "",
        "{engine_digest}": state.engine_digest or "",
        "{state}": str(folder / "server.json"),
    }  # fmt: skip
    filled = []
    for item in command:
        for mark, value in facts.items():
            item = item.replace(mark, value)
        filled.append(item)
    return filled


def run_command(args: argparse.Namespace, command: list[str]) -> int:
    """Get the server, run the command, note a failure; returns the exit code."""
    owner = client.owner_of(args.owner_pid) if args.owner_pid else client.owner_from_environment()
    try:
        state = None
        if args.no_server:
            client.stop(args.folder)
        else:
            state = client.acquire(args.folder, wanted(args), owner)
            print(f"server: {state.engine} {state.version} at {state.url}, log {state.log}", flush=True)
            if args.facts is not None:
                args.facts.parent.mkdir(parents=True, exist_ok=True)
                write_json(args.facts, dataclasses.asdict(state))
        outcome = run(fill(command, state, args.folder), owner, args.folder, state, dict(os.environ))
        accepted = outcome.code in args.accept and outcome.finished
        code, reason = (0, None) if accepted else (outcome.code, outcome.reason)
    except SparkinferError as error:
        code, reason = error.exit_code, str(error)
    if reason is not None:
        print(reason if "error:" in reason.lower() else f"error: {reason}", file=sys.stderr)
        if args.record is not None and code != INTERRUPTED:
            record_failure(args.record, block=args.block, engine=args.engine_name, model=args.model_name,
                           cell=args.cell, rep=args.rep, reason=reason)  # fmt: skip
    return code


def main(argv: list[str]) -> int:
    """Entry point; returns the exit code."""
    options, _, command = (
        (argv, "", []) if "--" not in argv else (argv[: argv.index("--")], "--", argv[argv.index("--") + 1 :])
    )
    args = parser().parse_args(options)
    args.folder = args.folder.absolute()
    try:
        if args.action == "run":
            if not command:
                raise EnvironmentProblem("run needs a command after --")
            return run_command(args, command)
        if args.action == "acquire":
            owner = client.owner_of(args.owner_pid) if args.owner_pid else client.owner_from_environment()
            print(json.dumps(dataclasses.asdict(client.acquire(args.folder, wanted(args), owner)), indent=1))
        elif args.action == "stop":
            client.stop(args.folder)
        else:
            state = load_state(args.folder)
            print("no server is held" if state is None else json.dumps(dataclasses.asdict(state), indent=1))
    except SparkinferError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
