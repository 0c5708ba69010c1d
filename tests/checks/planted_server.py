"""The real server with a fault in its mixed steps, which the variable PLANTED_FAULT names.

`python planted_server.py serve MODEL [flags]`; it starts itself again as the engine process.
"""

from __future__ import annotations

import os
import sys
from unittest import mock


def early_first_token():
    """A prompt's first token comes from the position before its last one."""
    from sparkinfer.runner import batch

    original = batch.BatchBuilder.build

    def build(self, plan):
        step = original(self, plan)
        outputs = step.batch.outputs
        if plan.prefill and step.batch.num_decode:
            prompts = outputs >= step.batch.num_decode
            outputs[prompts] -= 1
        return step

    batch.BatchBuilder.build = build


def neighbour_state():
    """The first decoding request goes on from the recurrent state of the next one's slot."""
    from sparkinfer.runner.model_runner import ModelRunner

    original = ModelRunner._begin

    def begin(self, plan):
        step = original(self, plan)
        if plan.prefill and len(plan.decode) > 1:
            first, second = plan.decode.slots[:2].tolist()
            self.caches.state[:, first] = self.caches.state[:, second]
        return step

    ModelRunner._begin = begin


def kv_row_off_by_one():
    """Decoding requests write their keys and values one row too early, over those of the token before."""
    from sparkinfer.runner import batch

    original = batch.BatchBuilder.build

    def build(self, plan):
        step = original(self, plan)
        if plan.prefill and step.batch.num_decode:
            rows = step.batch.kv_positions[: step.batch.num_decode]
            rows[rows % 16 > 0] -= 1
        return step

    batch.BatchBuilder.build = build


FAULTS = {plant.__name__: plant for plant in (early_first_token, neighbour_state, kv_row_off_by_one)}


if __name__ == "__main__":
    if sys.argv[1:] == ["engine"]:
        from sparkinfer.engine.build import build_engine
        from sparkinfer.engine.process import serve_engine

        FAULTS[os.environ["PLANTED_FAULT"]]()
        sys.exit(serve_engine(build_engine))
    from sparkinfer.cli import main
    from sparkinfer.server import serve

    run = serve.run
    with mock.patch.object(serve, "run", lambda options: run(options, (sys.executable, __file__, "engine"))):
        sys.exit(main(sys.argv[1:]))
