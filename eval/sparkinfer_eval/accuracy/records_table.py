"""`eval/accuracy_table.py FOLDER`: one table over the JSON documents that `eval/accuracy.py --json` wrote there."""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sparkinfer.console import command_line
from sparkinfer.errors import ConfigError, SparkinferError
from sparkinfer.output import require_folder, write_text

from .cli import CHECK, rows
from .compare import TOP1_OF_EXACT, Figures, Limits, limits_for

HEAD = """# Accuracy records

Made by `eval/accuracy_table.py` from the JSON files beside it; [docs/accuracy.md](../../docs/accuracy.md) defines the
figures and says why there are two of top-1: "ties aside" leaves out positions whose two best 16-bit logits are exactly
equal, "ties counted" takes them as differences. KL and gaps in nats; "beyond" counts
top-1 differences that are no near-ties. `--limit` "all" is the whole held-out set. Each
record says how its engines were scored.

Limits: {limits}.

{columns}
|---|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---|
"""
COLUMNS = (
    "A", "B, the reference", "`--context`, `--limit`, `--answer-tokens`", "positions", "top-1, ties aside",
    "top-1, ties counted", "KL, mean", "perplexity A, B", "largest gap", "beyond", "equal answers", "within limits",
)  # fmt: skip


def read_documents(folder: Path) -> dict[str, dict[str, Any]]:
    """The documents of a folder by file name. Raises ConfigError when there is none or one is something else."""
    found = {}
    for path in sorted(folder.glob("*.json")):
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
            if document["check"] != CHECK:
                raise KeyError(f"check is {document['check']!r}")
            # What the page takes from it, so that a document that lacks something is named.
            line(document), provenance(path.name, document)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ConfigError(f"{path} was not written by accuracy.py --json ({error}): take it away") from error
        found[path.name] = document
    if not found:
        raise ConfigError(f"{folder} holds no JSON of accuracy.py: write one with --json")
    return found


def engine_name(engine: dict[str, Any]) -> str:
    """An engine in a few words."""
    kind = engine.get("name") or engine["kind"]
    where = " server" if engine["kind"] == "server" else ""
    device = engine.get("device")
    gpus = [gpu["name"] for gpu in engine.get("machine", {}).get("gpus") or []]
    on = f"on {gpus[0]}" if gpus else f"on {device.partition(':')[0]}" if device and device != "cpu" else None
    release = f"as of {engine['release']}" if "release" in engine else None
    parts = [f"{kind}{where}", engine.get("version"), release, engine.get("model"), engine.get("dtype"), on]
    return " ".join(str(part) for part in parts if part)


def scope(settings: dict[str, Any]) -> str:
    """How much of the held-out set was scored."""
    return f"{settings['context']}, {settings['limit'] or 'all'}, {settings['answer_tokens']}"


def line(document: dict[str, Any]) -> str:
    """One row, judged by the limits of today."""
    f = document["figures"]
    failed = [row.name for row in rows(Figures(**f), limits_for(document["engines"]["b"])) if not row.ok]
    losses = [f["loss_a"], f["loss_b"]]
    perplexity = ", ".join("–" if loss is None else f"{math.exp(loss):.4f}" for loss in losses)
    verdict = "**no**: " + ", ".join(failed) if failed else "yes"
    cells = [
        engine_name(document["engines"]["a"]), engine_name(document["engines"]["b"]),
        scope(document["settings"]), f"{f['positions']}", f"{f['top1']:.4f}", f"{f['top1_plain']:.4f}",
        f"{f['kl']:.2e}", perplexity, f"{f['gap']:.3f}",
        f"{f['differing'] - f['near_ties']}", f"{f['answers_equal']} of {f['answers']}", verdict,
    ]  # fmt: skip
    return "| " + " | ".join(cells) + " |"


def _any(documents: dict[str, dict[str, Any]]) -> Figures:
    """Figures of a document with the most rows to judge."""
    found = (Figures(**document["figures"]) for document in documents.values())
    return max(found, key=lambda figures: len(rows(figures, Limits())))


def place(machine: dict[str, Any]) -> str:
    """A machine in a few words."""
    gpus = [gpu["name"] for gpu in machine.get("gpus") or []]
    return ", ".join([f"{machine['cpu_model']}, {machine['cpus_usable']} CPUs", *gpus])


def elsewhere(letter: str, engine: dict[str, Any]) -> str:
    """Where an engine's scores were recorded, if that was not where they were compared."""
    return f"; {letter.upper()} on {place(engine['machine'])}" if "machine" in engine else ""


def provenance(name: str, document: dict[str, Any]) -> str:
    """How one record came about."""
    machine, source, limits = document["machine"], document["source"], Limits()
    changed = {row["name"]: row["limit"] for row in document["rows"]}
    usual = {limits.top1, limits.top1_plain, limits.kl, limits.loss, limits.beyond, limits.parted}
    other = "" if set(changed.values()) <= usual else f"; limits {changed}"
    command = re.sub(r" --json \S+", "", document["command"])
    where = place(machine) + "".join(elsewhere(letter, document["engines"][letter]) for letter in ("a", "b"))
    commit = (source.get("commit") or "unknown")[:12] + (" with changes" if source.get("dirty") else "")
    return f"- [{name}]({name}): {document['date']}, commit {commit}, {where}{other}\n  `{command}`"


@command_line
def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    parser = argparse.ArgumentParser(prog="accuracy_table.py", description=__doc__)
    parser.add_argument("folder", type=Path)
    options = parser.parse_args(arguments)
    try:
        require_folder(options.folder, "FOLDER")
        documents = read_documents(options.folder)
        path = write_table(options.folder, documents)
    except SparkinferError as error:
        print(f"accuracy_table: {error}", file=sys.stderr)
        return error.exit_code
    print(f"{len(documents)} records in {path}")
    return 0


def write_table(folder: Path, documents: dict[str, dict[str, Any]]) -> Path:
    """Write the folder's README.md; returns its path. Raises EnvironmentProblem."""
    lines = "\n".join(map(line, documents.values()))
    limits = "; ".join(f"{row.name} {row.limit:g}" for row in rows(_any(documents), Limits()))
    limits += f"; ties counted against a reference in float32 {TOP1_OF_EXACT:g}"
    head = HEAD.format(limits=limits, columns="| " + " | ".join(COLUMNS) + " |")
    records = "\n".join(provenance(name, document) for name, document in documents.items())
    path = folder / "README.md"
    write_text(path, f"{head}{lines}\n\n## Records\n\n{records}\n")
    return path
