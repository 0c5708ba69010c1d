"""AIPerf as the load generator of the closed-loop cells: its command line, its offline set-up, its run.

AIPerf runs in an environment of its own, works offline with the model folder's tokenizer (laid out as a hub cache,
since it refuses a local folder there: aiperf #1339), in a scratch folder that also holds its temporary files, under
`timeout -k`, and dies with this process.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import gzip
import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from sparkinfer.errors import ConfigError, EnvironmentProblem

from . import gates, server_probe
from .aiperf_export import SUMMARY, Export, read_export, recomputed
from .cells import Cell
from .lease.process import become_subreaper, die_with_parent, kill_descendants, namespace_prefix
from .prompts import TOKENIZER_FILES, PromptSet
from .records import RawResult
from .result_folder import Target, check_prompts, staged, write_result

KILL_AFTER_S = 10
LOG = "aiperf.log"
PROMPTS_NAME = "prompts.jsonl"
ARTIFACTS = "aiperf"
RAW = "profile_export_raw.jsonl"
# A hub cache names snapshots by a commit; a local folder has none.
SNAPSHOT = "0" * 40


@dataclass(frozen=True)
class Load:
    """One AIPerf run: where to send the cell's prompts, and with which executable and seed.

    `model` is the folder whose tokenizer AIPerf loads.
    """

    url: str
    served_name: str
    model: Path
    cell: Cell
    prompts: PromptSet
    seed: int
    executable: Path


def tokenizer_home(model: Path, home: Path) -> str:
    """Lay the model's tokenizer out as a hub cache below `home`; returns the name AIPerf takes (`local/<folder>`).

    Raises ConfigError when the folder has no tokenizer.
    """
    if not (model / "tokenizer.json").is_file():
        raise ConfigError(f"{model} has no tokenizer.json: name a model folder")
    folder = home / "hub" / f"models--local--{model.name}"
    snapshot = folder / "snapshots" / SNAPSHOT
    snapshot.mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(SNAPSHOT, encoding="utf-8")
    for name in (*TOKENIZER_FILES, "config.json"):
        if (model / name).is_file():
            shutil.copy(model / name, snapshot / name)
    return f"local/{model.name}"


def command(load: Load, tokenizer: str) -> list[str]:
    """AIPerf's command line, relative to its scratch folder. Raises ConfigError for a cell that is not closed-loop."""
    cell = load.cell
    if cell.kind != "closed":
        raise ConfigError(f"cell {cell.id} is {cell.kind}: AIPerf runs closed-loop cells, use spec_open_arrivals.py")
    extra = {"ignore_eos": str(cell.ignore_eos).lower(), **cell.sampling}
    return [
        "aiperf",
        "profile",
        *("--model", load.served_name),
        *("--url", load.url),
        *("--endpoint-type", cell.endpoint),
        *(("--streaming",) if cell.streaming else ()),
        *("--concurrency", str(cell.concurrency)),
        *("--request-count", str(cell.requests)),
        *("--warmup-request-count", str(cell.warmup_requests)),
        *("--input-file", PROMPTS_NAME),
        *("--custom-dataset-type", "single_turn"),
        *("--dataset-sampling-strategy", "sequential"),
        *(word for name, value in extra.items() for word in ("--extra-inputs", f"{name}:{value}")),
        "--use-server-token-count",
        *("--request-timeout-seconds", str(cell.request_timeout_s)),
        *("--random-seed", str(load.seed)),
        *("--tokenizer", tokenizer),
        *("--artifact-dir", ARTIFACTS),
        *("--export-level", "raw"),
        *("--ui", "none"),
        "--no-gpu-telemetry",
        "--no-server-metrics",
    ]


def execute(load: Load, words: list[str], scratch: Path) -> None:
    """Run AIPerf in `scratch`; its output goes to `aiperf.log` there.

    Raises EnvironmentProblem when it cannot be started, gates.InvalidRun when it fails or does not end in time.
    """
    if not load.executable.is_file():
        raise EnvironmentProblem(f"{load.executable} does not exist: make the AIPerf environment first (make setup)")
    temporary = scratch / "t"
    temporary.mkdir()
    env = os.environ | {"HF_HOME": str(scratch / "hf"), "HF_HUB_OFFLINE": "1", "TMPDIR": str(temporary)}
    # Proxy settings must not send the load elsewhere, nor a PYTHONPATH put our modules into AIPerf's environment.
    for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "PYTHONPATH"):
        env.pop(name, None)
    limit = ["timeout", "-k", str(KILL_AFTER_S), str(load.cell.timeout_s), str(load.executable), *words[1:]]
    # In a process namespace of its own, where allowed, no worker of AIPerf survives even a SIGKILL of this process.
    limit = [*namespace_prefix(), *limit]
    become_subreaper()
    with (scratch / LOG).open("wb") as log:
        child = subprocess.Popen(
            limit,
            cwd=scratch,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )
        try:
            code = child.wait()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            kill_descendants()
    if code in (124, 137):
        raise gates.InvalidRun(
            f"AIPerf did not end within {load.cell.timeout_s} s: does the server answer? (timeout_s of the scale)"
        )
    if code:
        raise gates.InvalidRun(f"AIPerf ended with exit code {code}: {_last_words(scratch)}")


def _last_words(scratch: Path) -> str:
    """Why AIPerf failed: the first failed request's error, else its last ERROR line, else its last line."""
    export = scratch / ARTIFACTS / "profile_export.jsonl"
    if export.is_file():
        with export.open(encoding="utf-8", errors="replace") as handle:
            for line in handle:
                if '"error"' in line:
                    with contextlib.suppress(json.JSONDecodeError):
                        failure = json.loads(line).get("error") or {}
                        return f"requests failed, the first with: {str(failure.get('message') or failure)[:300]}"
    lines = (scratch / LOG).read_text(encoding="utf-8", errors="replace").splitlines()
    plain = [text for text in (re.sub(r"\x1b\[[0-9;]*m", "", line).strip() for line in lines) if text]
    marked = [text for text in plain if re.search(r"\bERROR\b|\bCRITICAL\b", text)]
    return (marked or plain or ["it printed nothing"])[-1][:400]


def aiperf_gates(export: Export, load: Load) -> list[gates.Gate]:
    """The gates on AIPerf's own summary: whole, of this run, timely, and equal to what its records say."""
    cell, summary = load.cell, export.summary
    faults = []
    if summary.get("is_complete") is not True or summary.get("was_cancelled") is not False:
        faults.append("AIPerf calls the run incomplete or cancelled")
    if summary.get("error_summary"):
        faults.append(f"AIPerf lists errors: {str(summary['error_summary'])[:200]}")
    ran = summary.get("run_info", {})
    if ran.get("random_seed") != load.seed or load.url not in ran.get("cli_command", ""):
        faults.append("the export names another seed or another server: a stale export")
    if export.missing_raw:
        faults.append(f"{export.missing_raw} requests have no raw record")
    delay = summary.get("credit_to_start_latency", {}).get("avg")
    ours, theirs = recomputed(export), export.summary_figures()
    return [
        gates.count_gate("export", faults, "faults"),
        gates.start_delay(delay, theirs["request_latency_ms/mean"], cell.gates["start_delay_share"]),
        gates.agreement("summary_agreement", ours, theirs, cell.gates["summary_agreement"]),
    ]


def measure(load: Load, target: Target) -> RawResult:
    """Run one closed-loop cell and publish its result folder.

    Raises gates.InvalidRun when the run may not become a result (the evidence is kept beside it), ConfigError on
    input that does not fit together, EnvironmentProblem when the machine cannot do it.
    """
    check_prompts(load.cell, load.prompts, target.block)
    with staged(target) as staging, tempfile.TemporaryDirectory(prefix="sparkinfer-") as name:
        scratch = Path(name)
        (scratch / PROMPTS_NAME).symlink_to(load.prompts.path.resolve())
        words = command(load, tokenizer_home(load.model, scratch / "hf"))
        server_probe.reset_prefix_cache(load.url)
        hits = server_probe.prefix_hits(load.url)
        started, begin_ns = dt.datetime.now(dt.UTC), time.time_ns()
        try:
            execute(load, words, scratch)
        finally:
            end_ns = time.time_ns()
            _keep(scratch, staging / ARTIFACTS)
        export = read_export(staging / ARTIFACTS, load.prompts)
        found = [
            *gates.common(load.cell, load.prompts, export.records, begin_ns, end_ns),
            *aiperf_gates(export, load),
            gates.prefix_cache(
                hits,
                server_probe.prefix_hits(load.url),
                export.records,
                load.cell.gates["prefix_cache_hits"],
            ),
        ]
        checks = gates.require(found, f"cell {load.cell.id} of {target.engine}")
        _compress(staging / ARTIFACTS / RAW)
        tool = {"name": "aiperf", "version": str(export.summary.get("aiperf_version", ""))}
        kept = {key: export.summary[key] for key in SUMMARY if key in export.summary}
        return write_result(
            staging, target, load.cell, load.prompts, export.records, words, started, tool, kept, checks
        )


def _keep(scratch: Path, artifacts: Path) -> None:
    """Move AIPerf's export and log into the staging folder; the prompts (inputs.json) are kept by digest."""
    if (scratch / ARTIFACTS).is_dir():
        shutil.move(scratch / ARTIFACTS, artifacts)
        (artifacts / "inputs.json").unlink(missing_ok=True)
    artifacts.mkdir(exist_ok=True)
    if (scratch / LOG).is_file():
        shutil.move(scratch / LOG, artifacts / LOG)


def _compress(path: Path) -> None:
    """Replace the raw export (every streamed chunk) by its gzip, about a twentieth of it."""
    with path.open("rb") as source, gzip.GzipFile(path.with_name(path.name + ".gz"), "wb", mtime=0) as packed:
        shutil.copyfileobj(source, packed)
    path.unlink()
