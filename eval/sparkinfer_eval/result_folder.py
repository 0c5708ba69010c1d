"""How a measurement becomes a raw-result folder: staged under a temporary name, checked, then renamed.

A run that fails leaves no result: its evidence goes to `<result>.failed` (`.failed-2`, ...) with `reason.txt`.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import json
import shlex
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparkinfer.errors import ConfigError, EnvironmentProblem
from sparkinfer.identity import model_digest

from .cells import Cell, cell_digest
from .prompts import PromptSet
from .records import RawResult, Record, write_records


@dataclass(frozen=True)
class Target:
    """What is measured and where the result goes: identities of run, engine, model, and the final folder."""

    run: str
    block: int
    rep: int
    engine: str
    engine_version: str
    engine_digest: str
    model_name: str
    model: Path
    out: Path
    model_digest: str | None = None
    """Of the model folder, where the caller knows it; else it is computed for each result."""

    def __post_init__(self) -> None:
        for name in ("run", "engine", "engine_version", "engine_digest", "model_name"):
            if not getattr(self, name):
                raise ConfigError(f"--{name.replace('_', '-')} is empty: a result without it could not be told apart")

    def result(
        self,
        cell: Cell,
        *,
        prompts_sha256: str,
        command: Sequence[str],
        started_at: dt.datetime,
        tool: Mapping[str, str],
        **more: Any,
    ) -> RawResult:
        """What result.json says of this target and a cell; `more`: further fields of `RawResult`."""
        return RawResult(
            run=self.run,
            block=self.block,
            engine=self.engine,
            engine_version=self.engine_version,
            engine_digest=self.engine_digest,
            model=self.model_name,
            model_digest=self.model_digest or model_digest(self.model),
            cell=cell.id,
            rep=self.rep,
            cell_definition=cell.definition(),
            cell_digest=cell_digest(cell),
            prompts_sha256=prompts_sha256,
            command=list(command),
            started_at=started_at.isoformat(timespec="seconds"),
            tool=dict(tool),
            **more,
        )


@contextmanager
def staged(target: Target) -> Iterator[Path]:
    """A staging folder that becomes `target.out` when the block ends well, else `<out>.failed`.

    Raises ConfigError when the result exists already (a finished result is never overwritten), EnvironmentProblem
    when the disk does not take it.
    """
    out = target.out
    if out.exists():
        raise ConfigError(f"{out} exists already: a finished result is not measured again; remove it to do so")
    staging = out.with_name(f".{out.name}.part")
    try:
        if staging.exists():
            shutil.rmtree(staging)
        staging.mkdir(parents=True)
        yield staging
        staging.rename(out)
    except BaseException as error:
        problem: BaseException = error
        if isinstance(error, OSError):
            problem = EnvironmentProblem(f"the result could not be written: {error}: free space or fix the path")
        if staging.exists():
            _keep_evidence(staging, out, str(problem) or type(problem).__name__)
        if problem is error:
            raise
        raise problem from error


def _keep_evidence(staging: Path, out: Path, reason: str) -> None:
    """Move the staging folder aside; a disk that takes no more text still lets it be renamed."""
    number = 1
    failed = out.with_name(f"{out.name}.failed")
    while failed.exists():
        number += 1
        failed = out.with_name(f"{out.name}.failed-{number}")
    staging.rename(failed)
    try:
        (failed / "reason.txt").write_text(reason + "\n", encoding="utf-8")
    except OSError:
        # Full disk: the reason is on standard error and in the ledger; the evidence is in place.
        return


def write_result(
    staging: Path,
    target: Target,
    cell: Cell,
    prompts: PromptSet,
    records: Sequence[Record],
    command: Sequence[str],
    started_at: dt.datetime,
    tool: Mapping[str, str],
    tool_summary: Mapping[str, Any],
    checks: Sequence[Mapping[str, Any]],
) -> RawResult:
    """Write records.jsonl, command.txt and result.json (last) into the staging folder."""
    result = target.result(
        cell,
        prompts_sha256=prompts.sha256,
        command=command,
        started_at=started_at,
        tool=tool,
        tool_summary=dict(tool_summary),
        checks=[dict(check) for check in checks],
    )
    write_records(staging / "records.jsonl", records)
    (staging / "command.txt").write_text(shlex.join(command) + "\n", encoding="utf-8")
    text = json.dumps(dataclasses.asdict(result), indent=2, allow_nan=False)
    (staging / "result.json").write_text(text + "\n", encoding="utf-8")
    return result


def check_prompts(cell: Cell, prompts: PromptSet, block: int) -> None:
    """Raise ConfigError when the prompts file was made for another definition of the cell or another block."""
    if prompts.meta["cell_digest"] != cell_digest(cell):
        raise ConfigError(
            f"{prompts.path} was made for another definition of cell {prompts.meta['cell']} than {cell.id} has now: "
            f"make it again with eval/make_prompts.py"
        )
    if prompts.meta["block"] != block:
        raise ConfigError(f"{prompts.path} was made for block {prompts.meta['block']}, not {block}")
