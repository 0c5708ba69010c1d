"""A server over the real engine process, loop, scheduler and protocol, whose model only echoes its prompt.

`python scripted.py serve MODEL [flags of sparkinfer serve]` starts it; it starts itself again as the engine process.
Output token number k is prompt token k modulo the prompt's length. `SCRIPT` holds JSON: `step_s` seconds per step,
`raise_at_step` a step at which the engine fails.
"""

from __future__ import annotations

import json
import os
import sys
import time
from unittest import mock

from sparkinfer.cli import main
from sparkinfer.engine.core import EngineCore
from sparkinfer.engine.ipc import EngineOptions
from sparkinfer.engine.process import Engine, serve_engine
from sparkinfer.errors import SparkinferError
from sparkinfer.scheduling.config import SchedulerConfig
from sparkinfer.scheduling.types import StepPlan, StepResult, TokenLogprobs
from sparkinfer.server import serve

SCRIPT = json.loads(os.environ.get("SCRIPT", "{}"))
VOCAB_SIZE = 1024
EOS = 2


class EchoRunner:
    """Executes plans without tensors."""

    def __init__(self) -> None:
        self._step_s = SCRIPT.get("step_s", 0.0)
        self._raise_at = SCRIPT.get("raise_at_step")
        self._steps = 0

    def execute(self, plan: StepPlan) -> StepResult:
        self._steps += 1
        if self._steps == self._raise_at:
            raise SparkinferError("scripted failure")
        if self._step_s:
            time.sleep(self._step_s)
        tokens, logprobs = [], []
        for row in plan.rows:
            if row.samples:
                prompt, asked = row.request.prompt, row.request.sampling.logprobs
                token = prompt[row.output_index % len(prompt)]
                tokens.append(token)
                top = list(range(asked or 0))
                logprobs.append(None if asked is None else TokenLogprobs(-0.5, 1, top, [-1.0 - t for t in top]))
        return StepResult(plan.step_id, tokens, logprobs)


def build(options: EngineOptions) -> Engine:
    settings = options.settings
    length = settings.max_model_len or 4096
    config = SchedulerConfig(
        max_num_seqs=settings.max_num_seqs, num_kv_blocks=settings.max_num_seqs * length // 16, max_model_len=length
    )
    limits = {"max_model_len": length, "max_num_seqs": settings.max_num_seqs, "vocab_size": VOCAB_SIZE}
    return Engine(EngineCore(EchoRunner(), config), frozenset({EOS}), {"device": "script", "limits": limits})


if __name__ == "__main__":
    if sys.argv[1:] == ["engine"]:
        sys.exit(serve_engine(build))
    command = (sys.executable, __file__, "engine")
    original = serve.run
    with mock.patch.object(serve, "run", lambda options: original(options, command)):
        sys.exit(main(sys.argv[1:]))
