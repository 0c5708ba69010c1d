"""How far each setting that trades accuracy for speed moves a model's numbers on a GPU, layer by layer.

Several random prompts are prefilled and then continued by the same random tokens with every variant. The residual
stream after each sublayer (the mixer and the feed-forward block of each layer) is compared with that of the default
arithmetic: || x - exact || / || exact ||, Frobenius norms over all tokens. `rounding` is the default arithmetic too,
its prompts and decode rows one by one: what the order of sums alone does. Then the logits: KL(exact || variant) in
nats and how often the likeliest token is the same. Nothing is judged: `eval/accuracy.py` is the gate.
"""

from __future__ import annotations

import argparse
import gc
import json
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from sparkinfer.arguments import seed
from sparkinfer.console import command_line
from sparkinfer.errors import CheckpointError, ConfigError, SparkinferError
from sparkinfer.identity import engine_digest, model_digest
from sparkinfer.models.config import FULL, ModelConfig, load_config
from sparkinfer.models.qwen3_5_gpu import GpuOptions
from sparkinfer.output import require_file, write_text
from sparkinfer.runner.gpu_runner import GpuRunner
from sparkinfer.runner.gpu_sizes import PassLimits
from sparkinfer.runner.open_runner import open_runner
from sparkinfer.scheduling.types import KV_BLOCK_TOKENS, Request, Row, SamplingParams, StepPlan
from sparkinfer_eval.report.machine import machine_facts, source_facts

SCHEMA = "sparkinfer/error-study/v1"
ROOT = Path(__file__).resolve().parents[2]
VARIANTS = {
    "rounding": GpuOptions(),
    "state bfloat16": GpuOptions(bf16_state=True),
    "KV fp8": GpuOptions(fp8_kv=True),
    "prefill fp8": GpuOptions(fp8_prefill=True),
    "head fp8": GpuOptions(fp8_head=True),
    "all four": GpuOptions(fp8_prefill=True, fp8_kv=True, bf16_state=True, fp8_head=True),
}
Open = Callable[[Path, GpuOptions, PassLimits, int], GpuRunner]


@dataclass(frozen=True, slots=True)
class Phase:
    """What one variant computed for the prompts, or in all decode steps."""

    layers: list[torch.Tensor]
    """Residuals [tokens, H] after each sublayer, two a layer."""
    logits: torch.Tensor
    """[tokens, V] fp32."""


@dataclass(frozen=True, slots=True)
class LogitError:
    """Of a variant against the default arithmetic, over `positions` tokens."""

    positions: int
    kl: float
    """Mean KL(exact || variant), nats, over the whole vocabulary."""
    top1: float
    """Share of positions with the same likeliest token."""


@dataclass(frozen=True, slots=True)
class Study:
    """One variant. `*_layers`: relative error of the residual after each sublayer, two a layer."""

    variant: str
    prompt_layers: list[float]
    decode_layers: list[float]
    prompt: LogitError
    decode: LogitError


class Spy:
    """Stands for `add_rms_norm` and keeps what it leaves in the residual: two a layer."""

    def __init__(self, runner: GpuRunner) -> None:
        self.kept: list[torch.Tensor] = []
        self._inner = runner.model.ops.add_rms_norm
        runner.model.ops = replace(runner.model.ops, add_rms_norm=self)

    def __call__(self, *arguments: Any, **named: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """As the operation."""
        out, residual = self._inner(*arguments, **named)
        self.kept.append(residual.clone())
        return out, residual

    def take(self, count: int) -> list[torch.Tensor]:
        """The first `count` rows of each residual of the last pass, in order; behind them lies padding."""
        kept, self.kept = [residual[:count] for residual in self.kept], []
        return kept


class Requests:
    """Prompts with slots and KV blocks of their own on one runner."""

    def __init__(self, runner: GpuRunner, prompts: Sequence[list[int]], longest: int) -> None:
        self.runner, self.step, self.per = runner, 0, -(-longest // KV_BLOCK_TOKENS)
        sampling = SamplingParams(max_tokens=longest, temperature=0.0)
        self.requests = [Request(str(index), list(prompt), sampling) for index, prompt in enumerate(prompts)]

    def rows(self, decode: bool) -> list[Row]:
        """Everything known of each request (prompts), or its last token (decode)."""
        return [
            Row(
                request=request,
                slot=slot,
                blocks=list(range(slot * self.per, (slot + 1) * self.per)),
                start=request.num_tokens - 1 if decode else 0,
                length=1 if decode else len(request.prompt),
                is_decode=decode,
                samples=True,
                output_index=len(request.output),
            )
            for slot, request in enumerate(self.requests)
        ]

    def run(self, rows: list[Row]) -> torch.Tensor:
        """Logits [tokens, V] fp32 of one pass."""
        self.step += 1
        return self.runner.logits(StepPlan(self.step, rows))


def phase(work: Requests, spy: Spy, passes: Iterable[list[Row]]) -> Phase:
    """Run passes one after the other and put what they leave together."""
    parts, logits = [], []
    for rows in passes:
        logits.append(work.run(rows))
        parts.append(spy.take(sum(row.length for row in rows)))
    return Phase([torch.cat(layer) for layer in zip(*parts, strict=True)], torch.cat(logits))


def trace(runner: GpuRunner, prompts: Sequence[list[int]], forced: torch.Tensor, alone: bool) -> tuple[Phase, Phase]:
    """Prefill all prompts, in one pass or each `alone`, then `forced` [steps, prompts] tokens one step each."""
    spy, work = Spy(runner), Requests(runner, prompts, len(prompts[0]) + len(forced) + 1)

    def passes(decode: bool) -> list[list[Row]]:
        rows = work.rows(decode)
        return [[row] for row in rows] if alone else [rows]

    def steps() -> Iterator[list[Row]]:
        for tokens in forced.tolist():
            for request, token in zip(work.requests, tokens, strict=True):
                request.output.append(token)
            yield from passes(decode=True)

    return phase(work, spy, passes(decode=False)), phase(work, spy, steps())


def relative(got: Sequence[torch.Tensor], exact: Sequence[torch.Tensor]) -> list[float]:
    """|| got - exact || / || exact || of each pair."""
    return [
        float((a.float() - b.float()).norm() / b.float().norm().clamp_min(1e-30))
        for a, b in zip(got, exact, strict=True)
    ]


def logit_error(got: torch.Tensor, exact: torch.Tensor) -> LogitError:
    """Compare [n, V] logits, some rows at a time."""
    kl, same = 0.0, 0
    for a, b in zip(got.split(64), exact.split(64), strict=True):
        p, q = b.float().log_softmax(-1), a.float().log_softmax(-1)
        kl += float((p.exp() * (p - q)).sum())
        same += int((p.argmax(-1) == q.argmax(-1)).sum())
    return LogitError(len(got), max(kl, 0.0) / len(got), same / len(got))


def open_on(device: str) -> Open:
    """How runners are opened on a GPU."""

    def opened(folder: Path, options: GpuOptions, limits: PassLimits, longest: int) -> GpuRunner:
        blocks = limits.max_num_seqs * -(-longest // KV_BLOCK_TOKENS)
        runner = open_runner(
            folder, device=device, options=options, limits=limits, max_num_seqs=limits.max_num_seqs,
            num_kv_blocks=blocks, max_model_len=-(-longest // KV_BLOCK_TOKENS) * KV_BLOCK_TOKENS,
        )  # fmt: skip
        assert isinstance(runner, GpuRunner)
        return runner

    return opened


def study(options: argparse.Namespace, config: ModelConfig, opened: Open) -> list[Study]:
    """All variants. Raises SparkinferError."""
    generator = torch.Generator().manual_seed(options.seed)
    size, count = (options.prompts, options.tokens), config.vocab_size
    prompts = torch.randint(0, count, size, generator=generator).tolist()
    forced = torch.randint(0, count, (options.steps, options.prompts), generator=generator)
    longest = options.tokens + options.steps + 1
    limits = PassLimits(options.prompts, options.prompts * options.tokens, 0, 1, options.prompts)
    exact: tuple[Phase, Phase] | None = None
    found = []
    for name, choice in {"exact": GpuOptions(), **VARIANTS}.items():
        runner = opened(options.model, choice, limits, longest)
        with torch.inference_mode():
            got = trace(runner, prompts, forced, alone=name == "rounding")
        del runner
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        if exact is None:
            exact = got
            continue
        prompt, decode = zip(got, exact, strict=True)
        layers = [relative(one.layers, other.layers) for one, other in (prompt, decode)]
        logits = [logit_error(one.logits, other.logits) for one, other in (prompt, decode)]
        found.append(Study(name, layers[0], layers[1], logits[0], logits[1]))
    return found


def table(config: ModelConfig, found: Sequence[Study]) -> str:
    """Markdown: relative errors after chosen layers, then the logits."""
    last = config.num_layers - 1
    layers = sorted({0, 1, 3, *(last * part // 4 for part in (1, 2, 3)), last} & set(range(last + 1)))
    kinds = {n: "attention" if config.layer_types[n] == FULL else "GDN" for n in layers}
    heads = [f"layer {n} ({kinds[n]})" for n in layers]
    lines = []
    for phase in ("prompt", "decode"):
        lines += [
            f"Relative error of the residual, {phase}",
            "",
            f"| variant | {' | '.join(heads)} | KL, nats | same top-1 |",
            "|---|" + "---:|" * (len(heads) + 2),
        ]
        for one in found:
            errors = getattr(one, f"{phase}_layers")
            cells = [f"{errors[2 * n + 1]:.2e}" for n in layers]
            logits: LogitError = getattr(one, phase)
            lines.append(f"| {one.variant} | {' | '.join(cells)} | {logits.kl:.2e} | {logits.top1:.4f} |")
        lines.append("")
    return "\n".join(lines)


def _parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="error_study.py", description=(__doc__ or "").splitlines()[0])
    top.add_argument("model", metavar="MODEL", type=Path, help="model folder")
    top.add_argument("--device", default="cuda", help="cuda or cuda:N (default %(default)s)")
    top.add_argument("--prompts", type=int, default=4, help="(default %(default)s)")
    top.add_argument("--tokens", type=int, default=512, help="of each prompt (default %(default)s)")
    top.add_argument("--steps", type=int, default=64, help="decode steps (default %(default)s)")
    top.add_argument("--seed", type=seed, default=0, help="of prompts and continuations (default %(default)s)")
    top.add_argument("--json", metavar="F", type=Path, help="write all layers' errors there")
    return top


def _study(options: argparse.Namespace, command: Sequence[str], opened: Open | None) -> None:
    for name in ("prompts", "tokens", "steps"):
        if getattr(options, name) < 1:
            raise ConfigError(f"--{name} {getattr(options, name)}: must be at least 1")
    if options.json is not None:
        require_file(options.json, "--json")
    if not options.model.is_dir():
        raise CheckpointError(f"{options.model} is not a folder: give a model folder")
    if options.device == "cpu":
        raise ConfigError("--device cpu: these settings are for a GPU; give --device cuda")
    config = load_config(options.model)
    if options.tokens + options.steps + 1 > config.max_positions:
        raise ConfigError(
            f"--tokens {options.tokens} and --steps {options.steps} are more than the model's {config.max_positions} "
            "positions"
        )
    found = study(options, config, opened or open_on(options.device))
    if options.json is not None:
        document = {
            "schema": SCHEMA,
            "model": options.model.name,
            "model_digest": model_digest(options.model),
            "engine_digest": engine_digest(),
            "prompts": options.prompts,
            "tokens": options.tokens,
            "steps": options.steps,
            "seed": options.seed,
            "variants": [asdict(one) for one in found],
            "command": shlex.join(["eval/error_study.py", *command]),
            "machine": machine_facts(),
            "source": source_facts(ROOT),
            "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        }
        write_text(options.json, json.dumps(document, allow_nan=False) + "\n")
    print(table(config, found))


@command_line
def main(arguments: Sequence[str] | None = None, opened: Open | None = None) -> int:
    """Entry point; returns the exit code: 0 done, 2 bad input, 3 the machine cannot do it."""
    command = list(sys.argv[1:] if arguments is None else arguments)
    options = _parser().parse_args(command)
    try:
        _study(options, command, opened)
    except SparkinferError as error:
        print(f"error_study: {error}", file=sys.stderr)
        return error.exit_code if error.exit_code != 1 else 3
    return 0
