"""The real server with a fault: in a mixed step a prompt's first token comes from the position before its last one.

`python planted_server.py serve MODEL [flags]`; it starts itself again as the engine process.
"""

from __future__ import annotations

import sys
from unittest import mock


def plant() -> None:
    """Put the fault into this process."""
    from sparkinfer.runner import batch

    original = batch.BatchBuilder.build

    def build(self, plan):
        step = original(self, plan)
        outputs = step.batch.outputs
        if 0 < step.batch.num_decode < len(plan.rows):
            prompts = outputs >= step.batch.num_decode
            outputs[prompts] -= 1
        return step

    batch.BatchBuilder.build = build


if __name__ == "__main__":
    if sys.argv[1:] == ["engine"]:
        from sparkinfer.engine.build import build_engine
        from sparkinfer.engine.process import serve_engine

        plant()
        sys.exit(serve_engine(build_engine))
    from sparkinfer.cli import main
    from sparkinfer.server import serve

    run = serve.run
    with mock.patch.object(serve, "run", lambda options: run(options, (sys.executable, __file__, "engine"))):
        sys.exit(main(sys.argv[1:]))
