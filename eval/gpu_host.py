"""Build, check, time and compare on a bare GPU host, one short phase a call: `python eval/gpu_host.py PHASE --help`.

Phases: setup, caches, checkpoint, prompts, check, bench, profile, serve, warm, cells, stop, table, collect. Servers
outlive a call. `import`, on another machine, makes what `collect` packed a run under results/ that
eval/render_report.py reads.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / folder) for folder in ("", "eval", "kernels", "models")]

from sparkinfer_eval.host.cli import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main(ROOT))
