"""`eval/accuracy.py`: score, compare, judge, write.

Exit codes: 0 all rows within their limits, 1 one is not or an engine gives no numbers, 2 bad input, 3 the machine or a
server cannot do it, 4 an engine does not take this checkpoint.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sparkinfer.console import command_line
from sparkinfer.errors import ConfigError, SparkinferError
from sparkinfer.identity import engine_digest, model_digest
from sparkinfer.models.hub import HUB, resolve_model
from sparkinfer.output import require_file, write_text
from sparkinfer_eval.check_program import (
    DIFFERENCE,
    ENVIRONMENT,
    PASS,
    SCHEMA,
    CheckRow,
    NotApplicable,
    table,
)
from sparkinfer_eval.report.machine import machine_facts, source_facts

from .compare import TOP1_OF_EXACT, Figures, Limits, figures, limits_for
from .engines import SPEC_HELP, Recorded, Scorer, Spec, opened, parse_spec
from .held_out import Task, make_task
from .scores import NotFinite, Scores, require_finite, write_scores
from .server import METHODS

CHECK = "accuracy"
CONTEXT = 1024
ANSWER_TOKENS = 64
ROOT = Path(__file__).resolve().parents[3]
UNPRINTED = ("kind", "engine_digest", "machine")
"""Facts of an engine that only the JSON has."""
UNKNOWN = 1e9
"""Stands in the JSON for a distance that is not known because a token is not among the alternatives."""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(
        prog="accuracy.py", description=f"Compare two engines on held-out text. ENGINE is {SPEC_HELP}."
    )
    top.add_argument("engine_a", metavar="ENGINE_A")
    top.add_argument("engine_b", metavar="ENGINE_B", nargs="?", help="the reference; may be left out with --record")
    top.add_argument("--json", metavar="F", type=Path, help="write rows and figures as JSON there")
    top.add_argument("--record", metavar="F", type=Path, help="keep ENGINE_A's scores, for scores:F later")
    top.add_argument(
        "--tokenizer", metavar="MODEL", help=f"tokenizer's folder or {HUB} (default: that of a named model)"
    )
    top.add_argument("--model", metavar="MODEL", help=f"model folder, or {HUB}, that the JSON names by digest")
    top.add_argument("--model-a", metavar="NAME", help="model to ask server A for (default: the first it lists)")
    top.add_argument("--model-b", metavar="NAME", help="model to ask server B for")
    top.add_argument("--method", choices=METHODS, default="auto", help="how servers score a text (default %(default)s)")
    top.add_argument("--context", type=int, default=CONTEXT, help="longest window in tokens (default %(default)s)")
    top.add_argument(
        "--answer-tokens", type=int, default=ANSWER_TOKENS, help="length of greedy answers (default %(default)s)"
    )
    top.add_argument("--limit", type=int, default=0, help="take so many texts and chats only (default: all)")
    limits = Limits()
    group = top.add_argument_group("limits")
    group.add_argument(
        "--top1", type=float, default=limits.top1, help="least top-1 agreement, exact ties aside (default %(default)s)"
    )
    text = f"""least top-1 agreement with exact ties counted as differences (default {limits.top1_plain}, against a
        reference in float32 {TOP1_OF_EXACT})"""
    group.add_argument("--top1-plain", type=float, help=text)
    group.add_argument("--kl", type=float, default=limits.kl, help="most mean KL, nats (default %(default)s)")
    group.add_argument(
        "--loss", type=float, default=limits.loss, help="most difference of the losses (default %(default)s)"
    )
    group.add_argument("--gap", type=float, default=limits.gap, help="a near-tie's width in nats (default %(default)s)")
    text = "most share of positions whose top-1 difference is no near-tie (default %(default)s)"
    group.add_argument("--beyond", type=float, default=limits.beyond, help=text)
    text = "most share of greedy answers that part at no near-tie (default %(default)s)"
    group.add_argument("--parted", type=float, default=limits.parted, help=text)
    return top


def rows(found: Figures, limits: Limits) -> list[CheckRow]:
    """The judged rows."""
    result = [
        CheckRow("top-1 agreement, exact ties aside", found.top1, limits.top1, found.top1 >= limits.top1),
        CheckRow(
            "top-1 agreement, ties counted", found.top1_plain, limits.top1_plain, found.top1_plain >= limits.top1_plain
        ),
        CheckRow("KL, mean (nats)", found.kl, limits.kl, found.kl <= limits.kl),
    ]
    if found.loss_difference is not None:
        ok = found.loss_difference <= limits.loss
        result.append(CheckRow("loss difference (nats)", found.loss_difference, limits.loss, ok))
    result.append(
        CheckRow("top-1 differences beyond near-ties", found.beyond, limits.beyond, found.beyond <= limits.beyond)
    )
    if found.answers:
        ok = found.parted <= limits.parted
        result.append(CheckRow("answers that part beyond near-ties", found.parted, limits.parted, ok))
    return result


def summary(a: Scores, b: Scores, found: Figures) -> str:
    """What was compared, and the figures that are not judged."""
    lines = []
    for letter, scores, loss in (("A", a, found.loss_a), ("B", b, found.loss_b)):
        about = ", ".join(f"{k} {v}" for k, v in scores.engine.items() if k not in UNPRINTED)
        perplexity = "not reported for every token" if loss is None else f"{math.exp(loss):.4f}"
        lines.append(f"{letter}: {scores.engine['kind']} ({about}); {scores.method}; perplexity {perplexity}")
    lines.append(
        f"{found.positions} positions; top-1 differs at {found.differing}, {found.near_ties} of them near-ties "
        f"(largest gap {found.gap:.3g}), beside {found.ties} exact ties ({found.top1_plain:.4f} with them); "
        f"KL p99 {found.kl_p99:.2g}, largest {found.kl_max:.2g}, over {found.mass:.2%} of the probability"
    )
    if found.answers:
        gap = "unknown" if found.answer_gap >= UNKNOWN else f"{found.answer_gap:.3g}"
        parted = (
            "" if found.parted_at is None else f"; others part at token {found.parted_at:g} (median), largest gap {gap}"
        )
        lines.append(f"{found.answers_equal} of {found.answers} greedy answers are equal{parted}")
    return "\n".join(lines)


def document(
    options: argparse.Namespace, command: Sequence[str], task: Task, a: Scores, b: Scores, found: Figures,
    judged: list[CheckRow], folder: Path | None,
) -> dict[str, Any]:  # fmt: skip
    """The JSON of a comparison: the form of every check, and beside it engines, figures and where it ran."""
    about = a.engine
    return {
        "schema": SCHEMA,
        "check": CHECK,
        "model_digest": model_digest(folder.resolve()) if folder else about.get("model_digest"),
        "engine_digest": about.get("engine_digest") or engine_digest(),
        "device": about.get("device"),
        "dtype": about.get("dtype"),
        "rows": [asdict(row) for row in judged],
        "ok": all(row.ok for row in judged),
        "engines": {"a": {**a.engine, "method": a.method}, "b": {**b.engine, "method": b.method}},
        "figures": {**asdict(found), "answer_gap": min(found.answer_gap, UNKNOWN)},
        "held_out": task.digest,
        "settings": task.settings(),
        "command": shlex.join(["eval/accuracy.py", *command]),
        "machine": machine_facts(),
        "source": source_facts(ROOT),
        "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
    }


def write_json(path: Path, content: dict[str, Any]) -> None:
    """One line for each key, to a temporary name first. Raises EnvironmentProblem."""
    lines = ",\n".join(f" {json.dumps(key)}: {json.dumps(value, allow_nan=False)}" for key, value in content.items())
    write_text(path, f"{{\n{lines}\n}}\n")


def _task(options: argparse.Namespace, engines: list[Scorer], folder: Path | None) -> Task:
    """The recorded task where there is one, else the held-out set in the context that all engines have."""
    for engine in engines:
        if isinstance(engine, Recorded):
            return engine.task
    tokenizer = resolve_model(options.tokenizer) if options.tokenizer else folder
    if tokenizer is None:
        raise ConfigError("which tokenizer? give --tokenizer MODEL, the folder of the model that is served")
    context = min([options.context + options.answer_tokens] + [e.context for e in engines if e.context is not None])
    return make_task(tokenizer, min(options.context, context - 1), options.answer_tokens, options.limit)


def compare_engines(options: argparse.Namespace, command: Sequence[str]) -> int:
    """The whole comparison. Raises SparkinferError."""
    for flag, path in (("--json", options.json), ("--record", options.record)):
        if path is not None:
            require_file(path, flag)
    specs = [parse_spec(options.engine_a)] + ([parse_spec(options.engine_b)] if options.engine_b else [])
    if len(specs) == 1 and options.record is None:
        raise ConfigError("give ENGINE_B to compare with, or --record F to keep ENGINE_A's scores")
    given = {field.name: getattr(options, field.name) for field in fields(Limits)}
    limits = Limits(**{name: value for name, value in given.items() if value is not None})
    for name, limit in asdict(limits).items():
        if not math.isfinite(limit):
            raise ConfigError(f"--{name.replace('_', '-')} {limit}: a limit is a finite number")
    for name in ("limit", "answer_tokens"):
        if getattr(options, name) < 0:
            raise ConfigError(f"--{name.replace('_', '-')} {getattr(options, name)}: must be at least 0")
    named = next((spec.folder for spec in specs if spec.folder), None)
    folder = resolve_model(options.model) if options.model else named
    context = options.context + options.answer_tokens
    names: list[tuple[Spec, str | None]] = list(zip(specs, (options.model_a, options.model_b), strict=False))
    with contextlib.ExitStack() as stack:
        engines = [stack.enter_context(opened(spec, context, name, options.method)) for spec, name in names]
        task = _task(options, engines, folder)
        scored = []
        for text, engine in zip((options.engine_a, options.engine_b), engines, strict=False):
            scored.append(engine.score(task))
            require_finite(text, scored[-1])
    a, *others = scored
    if options.record is not None:
        # Where it was recorded: the comparison may be made elsewhere.
        write_scores(options.record, task, replace(a, engine={**a.engine, "machine": machine_facts()}))
    if not others:
        print(
            f"{CHECK}: scores of {len(task.windows)} windows and {len(task.prompts)} answers kept in {options.record}"
        )
        return PASS
    b = others[0]
    if options.top1_plain is None:
        limits = limits_for(b.engine, limits)
    found = figures(a, b, task, limits.gap)
    judged = rows(found, limits)
    print(summary(a, b, found), table(judged), sep="\n")
    if options.json is not None:
        write_json(options.json, document(options, command, task, a, b, found, judged, folder))
    failed = sum(not row.ok for row in judged)
    print(f"{CHECK}: {failed} of {len(judged)} rows differ" if failed else f"{CHECK}: all {len(judged)} rows agree")
    return DIFFERENCE if failed else PASS


@command_line
def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    command = list(sys.argv[1:] if arguments is None else arguments)
    options = parser().parse_args(command)
    try:
        return compare_engines(options, command)
    except (NotApplicable, NotFinite) as error:
        print(f"{CHECK}: {error}", file=sys.stderr)
        return error.exit_code
    except SparkinferError as error:
        print(f"{CHECK}: {error}", file=sys.stderr)
        # A plain SparkinferError has exit code 1, which here would mean a difference.
        return error.exit_code if error.exit_code != DIFFERENCE else ENVIRONMENT
