"""Training curves as a small PNG."""

from __future__ import annotations

import io
import json
from pathlib import Path

from sparkinfer.errors import ConfigError


def draw_curve(folder: Path) -> Path:
    """Draws `training_log.jsonl` of a model or drafter folder into `training_curve.png`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from sparkinfer_eval.drawing import palette

    path = folder / "training_log.jsonl"
    if not path.is_file():
        raise ConfigError(f"{path} is missing: there is no curve to draw")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    figure, axis = pyplot.subplots(figsize=(6, 3.4), dpi=90)
    if "tokens" in rows[0]:
        axis.plot([r["tokens"] / 1e6 for r in rows], [r["loss"] for r in rows], lw=1, label="training")
        held = [r for r in rows if "held_out_loss" in r]
        axis.plot([r["tokens"] / 1e6 for r in held], [r["held_out_loss"] for r in held], "o-", ms=3, label="held out")
        axis.set_xlabel("tokens, million")
        axis.set_ylabel("loss, nats per token")
        axis.set_ylim(1.2, 4.0)
        long = next((r for r in rows if r["length"] > rows[0]["length"]), None)
        if long is not None:
            axis.axvline(long["tokens"] / 1e6, color="grey", lw=0.8, ls=":", label=f"windows of {long['length']}")
    else:
        axis.plot([r["step"] for r in rows], [r["teacher_forced_accepted"] for r in rows], lw=1, label="training texts")
        axis.set_xlabel("step")
        axis.set_ylabel("leading slots right of 7, teacher-forced")
    axis.grid(alpha=0.3)
    axis.legend(frameon=False)
    figure.tight_layout()
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png", metadata={"Software": None})
    pyplot.close(figure)
    out = folder / "training_curve.png"
    out.write_bytes(palette(drawn))
    return out
