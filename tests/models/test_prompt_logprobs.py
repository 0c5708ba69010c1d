"""Log-probabilities of prompts equal those of transformers, whatever chunks and neighbours the prompts have."""

from __future__ import annotations

import pytest
import torch

from sparkinfer.engine.core import EngineCore
from sparkinfer.runner import prompt_logprobs
from sparkinfer.runner.model_runner import ModelRunner
from sparkinfer.scheduling.config import SchedulerConfig
from sparkinfer.scheduling.types import Request, SamplingParams

LENGTHS = [1, 2, 17, 64, 130]
TOP = 5


@pytest.mark.parametrize("name", ["dense", "moe"])
@pytest.mark.parametrize("chunk", [64, 512])
def test_every_position_equals_transformers(checkpoint, prompt, monkeypatch, name, chunk):
    folder, model = checkpoint(name)
    monkeypatch.setattr(prompt_logprobs, "CHUNK", 7)
    runner = ModelRunner(folder, max_num_seqs=8, num_kv_blocks=128, max_model_len=256)
    core = EngineCore(
        runner,
        SchedulerConfig(max_num_seqs=8, num_kv_blocks=128, max_model_len=256, prefill_chunk=chunk, mixed_chunk=64),
    )
    plain = Request("plain", prompt(40, 9), SamplingParams(max_tokens=4, temperature=0.0))
    requests = [
        Request(
            f"r{length}",
            prompt(length, length),
            SamplingParams(max_tokens=3, temperature=0.0, prompt_logprobs=TOP),
            use_cache=False,
        )
        for length in LENGTHS
    ]
    for request in [plain, *requests]:
        core.add(request)
    while core.has_work:
        core.step()
    assert plain.prompt_logprobs is None
    for request in requests:
        with torch.no_grad():
            expected = model(torch.tensor([request.prompt]), use_cache=False).logits[0].log_softmax(-1)
        found = request.prompt_logprobs or [None]
        assert found[0] is None
        assert len(found) == len(request.prompt)
        for position, entry in enumerate(found[1:], 1):
            row, token = expected[position - 1], request.prompt[position]
            assert entry is not None
            assert entry.logprob == pytest.approx(row[token].item(), abs=2e-4)
            assert entry.rank == pytest.approx(1 + (row > row[token]).sum().item(), abs=1)
            assert entry.top_logprobs == pytest.approx(row.topk(TOP).values.tolist(), abs=2e-4)
            assert len(entry.top_ids) == TOP
