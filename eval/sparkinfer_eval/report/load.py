"""Read one run's raw results, checks and ledger into memory, refusing whatever does not belong together."""

from __future__ import annotations

import dataclasses
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparkinfer.errors import ConfigError
from sparkinfer_eval import metrics
from sparkinfer_eval.records import RawResult, Record, read_records, read_result
from sparkinfer_eval.report.failures import Failure, read_failures
from sparkinfer_eval.report.run_info import read_run_info

ENGINE_ORDER = ("previous", "sparkinfer", "vllm")
BASELINE = "vllm"
THIS = "sparkinfer"


@dataclass(frozen=True, slots=True)
class Measurement:
    """One raw result: an engine's pass through one cell. `records` holds profiling requests only."""

    folder: Path
    result: RawResult
    records: list[Record]
    warmup: list[Record]
    command_text: str


@dataclass(frozen=True, slots=True)
class CheckOutput:
    """What a check program said about one model; `data` None when the file is missing."""

    check: str
    model: str
    data: dict[str, Any] | None

    @property
    def ok(self) -> bool | None:
        """Passed, failed, or None: missing or not applicable."""
        return None if self.data is None else self.data.get("ok")


@dataclass(frozen=True, slots=True)
class Missing:
    """A measurement that was asked for and does not exist, with the reason known."""

    block: int
    engine: str
    model: str
    cell: str
    rep: int
    reason: str


@dataclass(frozen=True, slots=True)
class RunData:
    """Everything the report is made from."""

    info: dict[str, Any]
    measurements: list[Measurement]
    checks: list[CheckOutput]
    missing: list[Missing]
    failures: list[Failure]
    servers: list[dict[str, Any]]
    """What each server said of itself when it was ready: engine, version, digest, seconds to ready, resolved info."""

    @property
    def engines(self) -> list[dict[str, Any]]:
        """The run's engines in column order: previous, this, baseline, then any other."""
        order = {name: index for index, name in enumerate(ENGINE_ORDER)}
        return sorted(self.info["engines"], key=lambda e: (order.get(e["name"], len(order)), e["name"]))

    def engine(self, name: str) -> dict[str, Any] | None:
        """The declaration of one engine, None when it is not part of the run."""
        return next((e for e in self.info["engines"] if e["name"] == name), None)


def _expect(path: Path, what: str, found: object, expected: object) -> None:
    if found != expected:
        raise ConfigError(
            f"{path}: {what} is {found!r}, but {expected!r} was expected; "
            "the result does not belong to this run: remove it and measure the cell again"
        )


def _read_measurement(folder: Path, info: dict[str, Any]) -> Measurement:
    """Read one r<rep> folder and check it against its own path and the run's declaration."""
    path = folder / "result.json"
    try:
        result = read_result(folder)
    except (ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} is corrupt ({error}): remove {folder} and measure the cell again") from error
    cell_folder = folder.parent
    block, engine, model = (cell_folder.parents[i].name for i in (2, 1, 0))
    path_says = (info["run"], block, engine, model, cell_folder.name, folder.name)
    result_says = (result.run, f"b{result.block}", result.engine, result.model, result.cell, f"r{result.rep}")
    _expect(path, "run, block, engine, model, cell and rep", result_says, path_says)
    declared_engine = next((e for e in info["engines"] if e["name"] == engine), None)
    declared_model = next((m for m in info["models"] if m["name"] == model), None)
    if declared_engine is None or declared_model is None:
        raise ConfigError(f"{path}: engine {engine!r} or model {model!r} is not declared in run.json")
    _expect(path, "engine_digest", result.engine_digest, declared_engine["digest"])
    _expect(path, "model_digest", result.model_digest, declared_model["digest"])
    records_path = folder / "records.jsonl"
    try:
        # No figure needs the single tokens' times, which are most of a large run's memory.
        records = [dataclasses.replace(r, token_ns=None) for r in read_records(records_path)]
    except FileNotFoundError as error:
        raise ConfigError(f"{records_path} does not exist: remove {folder} and measure the cell again") from error
    except ValueError as error:
        raise ConfigError(f"{error}: remove {folder} and measure the cell again") from error
    profiling = [r for r in records if r.phase == "profiling"]
    if not profiling:
        raise ConfigError(f"{records_path} holds no profiling request: remove {folder} and measure the cell again")
    try:
        metrics.duration_s(profiling)
    except ValueError as error:
        raise ConfigError(f"{records_path}: {error}: remove {folder} and measure the cell again") from error
    command = folder / "command.txt"
    text = command.read_text(encoding="utf-8") if command.is_file() else ""
    return Measurement(folder, result, profiling, [r for r in records if r.phase != "profiling"], text)


def _read_checks(run_folder: Path, info: dict[str, Any]) -> list[CheckOutput]:
    """Every check asked for, on every model of the run, missing ones included."""
    found = []
    for check in info["checks"]:
        for model in info["models"]:
            path = run_folder / "checks" / f"{check}-{model['name']}.json"
            data = None
            if path.is_file():
                try:
                    data = json.loads(path.read_text(encoding="utf-8"))
                except ValueError as error:
                    raise ConfigError(f"{path} is not JSON ({error}): run {check} again") from error
                if not isinstance(data, dict) or not isinstance(data.get("rows"), list) or "ok" not in data:
                    raise ConfigError(f"{path} is not a check output (needs rows and ok): run {check} again")
                if data.get("model_digest") not in (None, model["digest"]):
                    raise ConfigError(f"{path}: checked model {data['model_digest']}, the run has {model['digest']}")
            found.append(CheckOutput(check, model["name"], data))
    return found


def _read_servers(run_folder: Path) -> list[dict[str, Any]]:
    """The facts that the workflow kept of each server it started, by file name."""
    found = []
    for path in sorted((run_folder / "servers").glob("*.json")):
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            facts = {key: data[key] for key in ("engine", "version", "engine_digest", "ready_s", "info")}
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path} is no record of a server ({error!r}): measure its cells again") from error
        found.append({"name": path.stem, **facts})
    return found


def _find_missing(info: dict[str, Any], present: set[tuple], failures: list[Failure]) -> list[Missing]:
    """All combinations asked for less those present, each with the newest recorded reason."""
    reasons = {(f.block, f.engine, f.model, f.cell, f.rep): f.reason for f in failures}
    missing = []
    for model in info["models"]:
        for cell in info["cells"]:
            for engine in info["engines"]:
                for block in range(1, info["blocks"] + 1):
                    for rep in range(1, info["reps"] + 1):
                        key = (block, engine["name"], model["name"], cell, rep)
                        if key not in present:
                            reason = reasons.get(key, "no result and no recorded attempt")
                            missing.append(Missing(*key, reason=reason))
    return missing


def _check_comparable(measurements: list[Measurement]) -> None:
    """Within a block, model, cell and rep all engines must have had the same cell and the same prompts."""
    first: dict[tuple, RawResult] = {}
    for m in measurements:
        r = m.result
        other = first.setdefault((r.block, r.model, r.cell, r.rep), r)
        for field in ("cell_digest", "prompts_sha256"):
            if getattr(r, field) != getattr(other, field):
                raise ConfigError(
                    f"{r.cell} of {r.model}, block {r.block}, rep {r.rep}: {field} of {r.engine} and {other.engine} "
                    "differ, so the two are no comparison: measure both again from one cell definition"
                )


def load_run(run_folder: Path) -> RunData:
    """Read `results/<run>`. Raises ConfigError naming the file at fault and what to do."""
    if not run_folder.is_dir():
        raise ConfigError(f"{run_folder} does not exist: give a run's raw-result folder, results/<run>")
    info = read_run_info(run_folder / "run.json")
    if info["run"] != run_folder.name:
        raise ConfigError(f"{run_folder / 'run.json'} names run {info['run']!r}: the folder must have that name")
    names = [e["name"] for e in info["engines"]]
    if len(set(names)) != len(names) or THIS not in names:
        raise ConfigError(f"{run_folder / 'run.json'}: engines must be distinct and include {THIS!r}, got {names}")
    # Evidence of failed attempts lies beside results (r1.failed): only r<number> is a result.
    found = (p.parent for p in run_folder.glob("b*/*/*/*/r*/result.json"))
    folders = sorted(folder for folder in found if re.fullmatch(r"r\d+", folder.name))
    measurements = [_read_measurement(folder, info) for folder in folders]
    if not measurements:
        raise ConfigError(f"{run_folder} holds no finished result (b*/engine/model/cell/r*/result.json)")
    order = {cell: index for index, cell in enumerate(info["cells"])}
    unknown = sorted({m.result.cell for m in measurements} - set(order))
    if unknown:
        raise ConfigError(f"{run_folder} holds results of cells that run.json does not list: {', '.join(unknown)}")
    measurements.sort(
        key=lambda m: (m.result.model, order[m.result.cell], m.result.engine, m.result.block, m.result.rep)
    )
    _check_comparable(measurements)
    present = {(m.result.block, m.result.engine, m.result.model, m.result.cell, m.result.rep) for m in measurements}
    failures = read_failures(run_folder)
    checks, missing = _read_checks(run_folder, info), _find_missing(info, present, failures)
    return RunData(info, measurements, checks, missing, failures, _read_servers(run_folder))
