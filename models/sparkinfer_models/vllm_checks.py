"""The reference models inside vLLM on a GPU: what its drafters accept there, and its answers from our quantised forms.

A start of vLLM takes minutes, so all servers start at once, each with a small share of the device's memory, and outlive
the command that started them. The commands share a folder. `prepare` and `judge` need no GPU and may run elsewhere, so
that the host of the GPU does nothing but serve; `measure` goes on where it was interrupted.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sparkinfer.console import command_line
from sparkinfer.errors import ConfigError, EnvironmentProblem, SparkinferError
from sparkinfer.identity import engine_digest, model_digest
from sparkinfer_models import vllm_acceptance as acceptance
from sparkinfer_models.measured import GREEDY, origin, portable, prompts_digest
from sparkinfer_models.vllm_server import EAGER, Server, causes, end_group, free_port, launch, server_command

ROOT = Path(__file__).resolve().parents[2]
MEMORY = ("--gpu-memory-utilization", "0.02", "--kv-cache-memory-bytes", "2G")
"""A fixed cache: vLLM's own measuring of free memory goes wrong beside servers that start at the same time."""
AT_ONCE = 64
TOKENS = 128
CONTEXT = 1024
ANSWER_TOKENS = 64
NOT_YET = 75
"""Exit code of `wait` when its time is over first (EX_TEMPFAIL)."""
ONE_CONFIG = Path(__file__).parent / "one_config"
VARIABLES = {"VLLM_USE_FLASHINFER_SAMPLER": "0", "OMP_NUM_THREADS": "1"}
"""No compiler of FlashInfer's; and no threads that wait for one another by spinning beside the other servers' own."""
COMPILER = "nvcc"
"""Not to be found by servers with a drafter: where it is, vLLM ranks the drafter's logits with FlashInfer's top-k, and
compiles that for minutes at the start; where it is not, with torch.topk."""
ACCURACY = str(ROOT / "eval" / "accuracy.py")
QUANTIZE = "import sys; from sparkinfer.cli import main; sys.exit(main(sys.argv[1:]))"


@dataclass(frozen=True, slots=True)
class Check:
    """One server: a target with its drafter, or a target in a quantised form."""

    target: str
    form: str | None = None
    extra: tuple[str, ...] = ()

    @property
    def served(self) -> str:
        """The model's name at the server, and of the quantised checkpoint's folder."""
        return f"{self.target}-{self.form}" if self.form else self.target

    def command(self, name: str, options: argparse.Namespace, port: int) -> list[str]:
        """How the server is started."""
        always = [*MEMORY, *EAGER, "--no-enable-prefix-caching", "--max-num-seqs", str(AT_ONCE), *self.extra]
        if self.form:
            model, length, speculative = checkpoint(options.state, name), CONTEXT + ANSWER_TOKENS + 64, None
        else:
            model, length = options.models / self.target, acceptance.MAX_MODEL_LEN
            speculative = acceptance.speculation(options.models / f"{self.target}-dflash2")
        always += options.vllm_arg
        return server_command(
            options.python,
            model,
            port,
            max_model_len=length,
            served=self.served,
            speculative=speculative,
            extra=always,
        )


# FP8: vLLM's default on Hopper rounds activations to FP8 as well. Marlin multiplies the stored weights with 16-bit
# activations, which is what the 16-bit form of the checkpoint can be compared with.
CHECKS = {
    "dense-dflash2": Check("spark-tiny-dense"),
    "moe-dflash2": Check("spark-tiny-moe"),
    "dense-nvfp4": Check("spark-tiny-dense", "nvfp4"),
    "moe-nvfp4": Check("spark-tiny-moe", "nvfp4"),
    "dense-fp8": Check("spark-tiny-dense", "fp8", ("--linear-backend", "marlin")),
    "moe-fp8": Check("spark-tiny-moe", "fp8", ("--linear-backend", "marlin")),
}


@dataclass(frozen=True, slots=True)
class Running:
    """A started server; `born` is the kernel's start time of the process, so that no other process is taken for it."""

    name: str
    pid: int
    born: int
    port: int
    begun: float
    command: list[str]

    @property
    def server(self) -> Server:
        """A client."""
        return Server(f"http://127.0.0.1:{self.port}", CHECKS[self.name].served)

    def alive(self) -> bool:
        """Whether the process runs still."""
        found = _born(self.pid)
        return found is not None and found == self.born


def _born(pid: int) -> int | None:
    """Start time in clock ticks since boot; None when the process is gone or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] == "Z" else int(fields[19])


def checkpoint(state: Path, name: str) -> Path:
    """Where the quantised form lies."""
    return state / "checkpoints" / CHECKS[name].served


def log_of(state: Path, name: str) -> Path:
    """A server's output. Its folder holds nothing that Python could import."""
    return state / "logs" / f"{name}.log"


SERVERS = "servers.json"


def read_running(state: Path) -> list[Running]:
    """What `start` started. Raises ConfigError."""
    try:
        return [Running(**entry) for entry in json.loads((state / SERVERS).read_text())]
    except FileNotFoundError as error:
        raise ConfigError(f"{state} has no {SERVERS}: run `start` with this --state first") from error


def write_running(state: Path, running: Sequence[Running]) -> None:
    """To a temporary name first."""
    temporary = state / f"{SERVERS}.part"
    temporary.write_text(json.dumps([asdict(one) for one in running], indent=1) + "\n")
    temporary.replace(state / SERVERS)


def prepare(options: argparse.Namespace) -> int:
    """Write the quantised forms that are not there yet, or were made otherwise: `sparkinfer quantize`."""
    for name in options.only:
        check, target = CHECKS[name], checkpoint(options.state, name)
        if check.form is None:
            continue
        made_from = {"source": model_digest((options.models / check.target).resolve()), "program": engine_digest()}
        note = target.parent / f"{check.served}.made_from.json"
        if (target / "config.json").is_file() and note.is_file() and json.loads(note.read_text()) == made_from:
            continue
        if target.exists():
            # Of another model, or of another state of the quantizer: its figures would be those of something else.
            print(f"{name}: {target} was not made from this model by this program: it is made anew", flush=True)
            shutil.rmtree(target)
        target.parent.mkdir(parents=True, exist_ok=True)
        arguments = ["quantize", str(options.models / check.target), str(target), "--format", check.form]
        result = subprocess.run([sys.executable, "-c", QUANTIZE, *arguments], check=False)
        if result.returncode:
            raise EnvironmentProblem(f"sparkinfer {' '.join(arguments)} ended with {result.returncode}")
        note.write_text(json.dumps(made_from) + "\n")
    return 0


def path_without(program: str, path: str) -> str:
    """The folders of `path` that do not hold `program`.

    Raises EnvironmentProblem when that takes the C compiler along, which Triton needs.
    """
    left = os.pathsep.join(folder for folder in path.split(os.pathsep) if shutil.which(program, path=folder) is None)
    for needed in ("cc", "gcc"):
        found = shutil.which(needed, path=path)
        if found and not shutil.which(needed, path=left):
            raise EnvironmentProblem(
                f"{found} lies in the same folder of PATH as {program}, which vLLM must not find: give PATH a folder of"
                f" links without {program} in its place"
            )
    return left


def variables_of(check: Check) -> dict[str, str]:
    """What a server's environment has besides this process's."""
    if check.form:
        return VARIABLES
    return {**VARIABLES, "PATH": path_without(COMPILER, os.environ.get("PATH", os.defpath))}


def start(options: argparse.Namespace) -> int:
    """Start all servers and return."""
    log_of(options.state, "").parent.mkdir(parents=True, exist_ok=True)
    if (options.state / SERVERS).exists() and any(s.alive() for s in read_running(options.state)):
        raise ConfigError(f"servers of {options.state} still run: `stop` them first")
    for name in options.only:
        if CHECKS[name].form and not (checkpoint(options.state, name) / "config.json").is_file():
            raise ConfigError(f"{checkpoint(options.state, name)} is no checkpoint: run `prepare` first")
    path = os.environ.get("PYTHONPATH", "") if options.vllm_path is None else options.vllm_path
    running: list[Running] = []
    for name in options.only:
        port = free_port()
        command = CHECKS[name].command(name, options, port)
        variables = variables_of(CHECKS[name])
        process = launch(command, log_of(options.state, name), variables, os.pathsep.join((str(ONE_CONFIG), path)))
        running.append(Running(name, process.pid, _born(process.pid) or 0, port, time.time(), command))
        write_running(options.state, running)
        print(f"{name}: started, port {port}", flush=True)
        time.sleep(options.apart)
    return 0


def wait(options: argparse.Namespace) -> int:
    """Wait until every server is up or dead. 0 all up, 3 one is dead, 75 not yet."""
    deadline = time.monotonic() + options.seconds
    pending = {server.name: server for server in read_running(options.state)}
    dead = 0
    while pending:
        for name, server in list(pending.items()):
            age = time.time() - server.begun
            if server.server.ready():
                print(f"{name}: up, seen after {age:.0f} s", flush=True)
            elif not server.alive():
                print(f"{name}: dead, seen after {age:.0f} s\n{causes(log_of(options.state, name))}", flush=True)
                dead += 1
            else:
                continue
            del pending[name]
        if pending and time.monotonic() > deadline:
            for name in pending:
                lines = log_of(options.state, name).read_text(errors="replace").splitlines()
                print(f"{name}: not up yet: {lines[-1][:200] if lines else 'no output'}", flush=True)
            return NOT_YET
        time.sleep(min(1.0, options.seconds / 10) if pending else 0)
    return 3 if dead else 0


def _measure_acceptance(running: Running, options: argparse.Namespace) -> str:
    """Row by row, those that are there already left out."""
    target = CHECKS[running.name].target
    prompts = acceptance.read_prompts(options.prompts)
    path = options.out / f"{running.name}.json"
    rows: list[dict[str, Any]] = json.loads(path.read_text())["rows"] if path.exists() else []
    missing = [t for t in options.temperatures if t not in [row["temperature"] for row in rows]]
    if missing:
        running.server.complete(prompts[0], TOKENS, 0.0, 0)
    for temperature in missing:
        begun = time.monotonic()
        row = acceptance.measure(running.server, prompts, TOKENS, temperature, AT_ONCE)
        rows.append(row)
        facts: dict[str, Any] = {"dtype": "bfloat16", "drafts": acceptance.DRAFTS, "tokens": TOKENS}
        facts |= {"draft_sample_method": GREEDY, "prompts_sha256": prompts_digest(prompts)}
        facts["command"] = shlex.join(portable(running.command))
        folder = options.models / f"{target}-dflash2"
        facts |= origin(options.models / target, folder, options.argv)
        content = acceptance.document(running.server, options.models / target, folder, rows, **facts)
        acceptance.write_document(path, content)
        shown = {key: value for key, value in row.items() if key != "sums"}
        print(f"{running.name}: {json.dumps(shown)} in {time.monotonic() - begun:.1f} s", flush=True)
    return f"{running.name}: {len(rows)} temperatures in {path}"


def _measure_accuracy(running: Running, options: argparse.Namespace) -> str:
    """Record what vLLM says about the held-out set: `judge` compares it later."""
    path = options.out / f"{running.name}.scores"
    if path.exists():
        return f"{running.name}: in {path} already"
    tokenizer = checkpoint(options.state, running.name)
    command = [ACCURACY, running.server.url, "--tokenizer", str(tokenizer), "--record", str(path)]
    result = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, check=False, timeout=options.seconds
    )
    if result.returncode:
        raise EnvironmentProblem(f"{' '.join(command)} ended with {result.returncode}: {result.stderr[-1000:]}")
    return f"{running.name}: {result.stdout.strip()}"


def comparisons(options: argparse.Namespace, name: str) -> dict[str, list[str]]:
    """File name of a record to arguments of `accuracy.py`, for what the server `name` said.

    Paths are relative to the state folder: they stand in the record, where another machine's would say nothing.
    """

    def relative(path: Path) -> str:
        return os.path.relpath(path.absolute(), options.state)

    served, form = CHECKS[name].served, relative(checkpoint(options.state, name))
    scores = f"scores:{relative(options.out / f'{name}.scores')}"
    found = {
        f"{served}-vllm-gpu.json": [form, scores],
        f"vllm-gpu-{served}-transformers.json": [scores, f"transformers:{form},form=16bit,device={options.device}"],
    }
    return {file: [*engines, "--json", relative(options.out / file)] for file, engines in found.items()}


def judge(options: argparse.Namespace) -> int:
    """Compare with what was recorded this engine on the same checkpoint, and transformers on its 16-bit form.

    0 all agree, 1 one differs.
    """
    worst = 0
    for name, check in CHECKS.items():
        if not check.form or not (options.out / f"{name}.scores").exists():
            continue
        for file, arguments in comparisons(options, name).items():
            print(f"{name}: {file}", flush=True)
            command = [sys.executable, ACCURACY, *arguments]
            worst = max(worst, subprocess.run(command, cwd=options.state, check=False).returncode)
    return worst


def measure(options: argparse.Namespace) -> int:
    """Measure every server that is up: acceptance first, as it is what no other machine can do, then the scores.

    0 when all were measured, 3 otherwise.
    """
    options.out.mkdir(parents=True, exist_ok=True)
    failed = 0

    def one(running: Running) -> str:
        if not running.server.ready():
            raise EnvironmentProblem(f"{running.name} is not up: {causes(log_of(options.state, running.name))[-300:]}")
        return (_measure_accuracy if CHECKS[running.name].form else _measure_acceptance)(running, options)

    servers = read_running(options.state)
    with ThreadPoolExecutor(len(servers)) as pool:
        for scored in (False, True):
            wave = [server for server in servers if bool(CHECKS[server.name].form) is scored]
            for name, future in [(server.name, pool.submit(one, server)) for server in wave]:
                try:
                    print(future.result(), flush=True)
                except (SparkinferError, subprocess.TimeoutExpired) as error:
                    print(f"{name}: not measured: {error}", file=sys.stderr, flush=True)
                    failed += 1
    return 3 if failed else 0


def stop(options: argparse.Namespace) -> int:
    """End all servers, at the same time: each may take its whole time."""
    # The leader of a group may be gone before its members.
    groups = [s.pid for s in read_running(options.state) if _born(s.pid) in (s.born, None)]
    with ThreadPoolExecutor(max(1, len(groups))) as pool:
        list(pool.map(end_group, groups))
    (options.state / SERVERS).unlink()
    return 0


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = top.add_subparsers(dest="command", required=True)
    found = {}
    for name, text in (
        ("prepare", "write the quantised forms"),
        ("start", "start all servers and return"),
        ("wait", "wait until all are up: 0 all are, 3 one is dead, 75 not yet"),
        ("measure", "measure those that are up"),
        ("stop", "end all servers"),
        ("judge", "compare what was recorded with this engine, and with transformers on the 16-bit forms"),
    ):
        found[name] = commands.add_parser(name, help=text)
        found[name].add_argument("--state", type=Path, required=True, help="folder that the commands share")
        found[name].add_argument("--models", type=Path, default=ROOT / "models", help="folder of the reference models")
    for name in ("prepare", "start"):
        found[name].add_argument("--only", nargs="+", choices=CHECKS, default=list(CHECKS), metavar="NAME")
    found["start"].add_argument("--python", default=sys.executable, help="interpreter that has vLLM")
    found["start"].add_argument("--vllm-path", metavar="PATHS", help="the servers' PYTHONPATH")
    found["start"].add_argument("--vllm-arg", action="append", default=[], metavar="ARG", help="for every server")
    found["start"].add_argument("--apart", type=float, default=0.0, help="seconds between two starts")
    found["judge"].add_argument("--device", default="cpu", help="of transformers (default %(default)s)")
    found["wait"].add_argument("seconds", type=float)
    found["measure"].add_argument("--prompts", type=Path, required=True, help="of `vllm_acceptance.py prompts`")
    for name in ("measure", "judge"):
        found[name].add_argument("--out", type=Path, required=True, help="folder of the results")
    found["measure"].add_argument("--temperatures", type=float, nargs="+", default=list(acceptance.TEMPERATURES))
    found["measure"].add_argument("--seconds", type=float, default=300.0, help="limit (default %(default)s)")
    return top


@command_line
def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit code: 2 bad input, 3 a server cannot be had, 75 `wait` ended first."""
    options = parser().parse_args(argv)
    options.argv = ["vllm_checks.py", *(sys.argv[1:] if argv is None else argv)]
    options.state = options.state.absolute()
    try:
        commands = {"prepare": prepare, "start": start, "wait": wait, "measure": measure, "stop": stop, "judge": judge}
        return commands[options.command](options)
    except SparkinferError as error:
        print(f"vllm_checks.py: {error}", file=sys.stderr)
        return error.exit_code
