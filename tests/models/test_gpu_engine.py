"""The GPU engine from settings to tokens, on twins of its kernels: same answers as the CPU engine."""

from __future__ import annotations

import torch

from sparkinfer.engine import build
from sparkinfer.engine.ipc import EngineOptions
from sparkinfer.models.loader import open_source
from sparkinfer.models.qwen3_5_gpu import GpuModel
from sparkinfer.scheduling.types import Request, SamplingParams
from sparkinfer.settings import Settings

from .gpu_twins import twin_ops

SETTINGS = Settings(max_num_seqs=3, max_model_len=256, prefill_chunk=128, mixed_chunk=64, snapshot_pool_mb=1, threads=1)


def answers(engine, prompt) -> list[list[int]]:
    shared = prompt(40, 3)
    requests = [
        Request(f"r{number}", shared + prompt(length, number), SamplingParams(12, temperature=temperature, seed=number))
        for number, (length, temperature) in enumerate([(100, 0.0), (3, 0.0), (30, 0.9), (60, 0.0), (1, 0.0)])
    ]
    core = engine.core
    for request in requests:
        core.add(request)
        core.step()
    while core.has_work:
        core.step()
    again = Request("again", requests[0].prompt, SamplingParams(12, temperature=0.0))
    core.add(again)
    while core.has_work:
        core.step()
    assert again.num_cached > 0
    return [request.output for request in [*requests, again]]


def test_answers_equal_those_of_the_cpu_engine(checkpoint, prompt, monkeypatch) -> None:
    folder, _ = checkpoint("moe")
    options = EngineOptions(str(folder), SETTINGS, dtype="float32", device="cpu")
    expected = answers(build.build_engine(options), prompt)

    def load(options, config, device, limits, gpu):
        with torch.inference_mode():
            return GpuModel(
                config, open_source(folder, config), device=torch.device("cpu"), ops=twin_ops(), options=gpu,
                max_positions=256, max_rows=limits.max_rows, dtype=torch.float32,
            )  # fmt: skip

    monkeypatch.setattr(build, "load_on_gpu", load)
    monkeypatch.setattr(build, "pick_device", lambda name: "cuda:0")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (8 << 30, 16 << 30))
    engine = build.build_engine(options)
    assert engine.core.scheduler.config.max_in_flight == 2
    assert answers(engine, prompt) == expected
