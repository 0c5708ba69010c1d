"""`sparkinfer quantize SRC DST --format {nvfp4,fp8}`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tqdm import tqdm

from sparkinfer.errors import ConfigError
from sparkinfer.quantization.choices import Rule
from sparkinfer.quantization.quantizer import Options, Quantizer
from sparkinfer.quantization.schemes import Format

KEEP = "keep"


def parse_rule(text: str) -> Rule:
    """`PATTERN=FORMAT`. Raises ConfigError."""
    pattern, _, name = text.rpartition("=")
    choices = {kind.value: kind for kind in Format}
    if not pattern or (name != KEEP and name not in choices):
        raise ConfigError(f"--module {text}: expected PATTERN=FORMAT with nvfp4, fp8 or keep, as in lm_head=nvfp4")
    return pattern, choices.get(name)


class _Bar:
    """One bar for each kind of work."""

    def __init__(self) -> None:
        self._bar: tqdm[None] | None = None
        self._what = ""

    def __call__(self, what: str, done: int, total: int) -> None:
        if what != self._what:
            self.close()
            in_bytes = what == "quantising"
            self._bar = tqdm(
                total=total, desc=what, unit="B" if in_bytes else "layer", unit_scale=in_bytes, disable=None
            )
            self._what = what
        assert self._bar is not None
        self._bar.update(done - self._bar.n)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


def run(options: argparse.Namespace) -> int:
    """Entry point of the command; returns the exit code."""
    if options.calibration_tokens < 1 or options.shard_mib < 1:
        raise ConfigError("--calibration-tokens and --shard-mib must be at least 1")
    from sparkinfer.engine.build import pick_device
    from sparkinfer.models.hub import resolve_model

    bar = _Bar()
    quantizer = Quantizer(
        resolve_model(options.source),
        Path(options.target),
        Options(
            format=Format(options.format),
            rules=tuple(parse_rule(text) for text in options.module),
            calibration=tuple(Path(name) for name in options.calibration),
            calibration_tokens=options.calibration_tokens,
            search=not options.no_search,
            device=pick_device(options.device),
            shard_bytes=options.shard_mib << 20,
        ),
        bar,
    )
    for note in quantizer.choices.notes:
        print(f"note: {note}", file=sys.stderr)
    try:
        result = quantizer.run()
    finally:
        bar.close()
    if result.resumed:
        print(f"taken up again: {result.resumed} files were done", file=sys.stderr)
    counts = ", ".join(f"{count} {name}" for name, count in sorted(result.modules.items()))
    print(
        f"{options.target}: {counts} linear layers; {result.source_bytes / 2**20:.1f} MiB of weights are now"
        f" {result.bytes / 2**20:.1f} MiB"
    )
    return 0
