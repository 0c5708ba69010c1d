"""Scheduler, prefix cache and the real model runner together: tokens do not depend on anything but the request.

fp32 on a small random model: every request, run alone and without cache, gives the tokens that it gives in a crowd
with mixed steps, chunks, hits, evictions, moves to the host, preemptions, and one or two plans in flight.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from sparkinfer.engine.core import EngineCore
from sparkinfer.scheduling.config import SchedulerConfig
from sparkinfer.scheduling.invariants import check_integrity
from sparkinfer.scheduling.types import Request, SamplingParams
from tests.models.conftest import build_reference

VOCAB = 199


@pytest.fixture(scope="module", params=["dense", "moe"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / request.param
    build_reference(request.param).save_pretrained(folder)
    return folder


def settings(in_flight: int, snapshots: int, blocks: int) -> SchedulerConfig:
    return SchedulerConfig(
        max_num_seqs=5, num_kv_blocks=blocks, max_model_len=256, prefill_chunk=128, mixed_chunk=64, own_pass_tokens=100,
        chunk_align=64, num_snapshots=snapshots, num_host_blocks=12 if snapshots else 0, checkpoint_interval=64,
        branch_min_tokens=16, decode_checkpoint_interval=32, max_in_flight=in_flight,
    )  # fmt: skip


def engine(model: Path, config: SchedulerConfig) -> EngineCore:
    from sparkinfer.runner.model_runner import ModelRunner

    runner = ModelRunner(
        model,
        dtype="float32",
        max_num_seqs=config.max_num_seqs,
        num_kv_blocks=config.num_kv_blocks,
        max_model_len=config.max_model_len,
        num_snapshots=config.num_snapshots,
        num_host_blocks=config.num_host_blocks,
    )
    return EngineCore(runner, config)


def load() -> list[Request]:
    """Shared beginnings of several lengths, repeats, greedy and seeded."""
    rng = random.Random(7)
    stems = [[rng.randrange(VOCAB) for _ in range(170)] for _ in range(2)]
    requests = []
    for number in range(16):
        stem = stems[number % 2][: rng.choice([40, 64, 120, 170])]
        prompt = stem + [rng.randrange(VOCAB) for _ in range(rng.choice([0, 1, 15, 30]))]
        temperature = 0.8 if number % 3 == 0 else 0.0
        sampling = SamplingParams(rng.choice([3, 20, 50]), temperature=temperature, top_k=20, seed=number)
        requests.append(Request(f"r{number}", prompt, sampling, frozenset({2})))
    return requests


def run(core: EngineCore, requests: list[Request], gap: int) -> dict[str, list[int]]:
    waiting = list(requests)
    while waiting or core.has_work:
        if waiting:
            core.add(waiting.pop(0))
        for _ in range(gap):
            core.step()
    check_integrity(core.scheduler)
    return {request.id: list(request.output) for request in requests}


@pytest.fixture(scope="module")
def alone(model: Path) -> dict[str, list[int]]:
    """Each request by itself, without cache, in a roomy engine."""
    core = engine(model, settings(1, 0, 64))
    tokens: dict[str, list[int]] = {}
    for request in load():
        tokens |= run(core, [request], 1)
    return tokens


@pytest.mark.parametrize(("in_flight", "snapshots", "blocks", "gap"), [(1, 12, 64, 2), (1, 6, 22, 1), (2, 8, 22, 1)])
def test_crowd_gives_the_tokens_of_each_alone(
    model: Path, alone: dict[str, list[int]], in_flight: int, snapshots: int, blocks: int, gap: int
) -> None:
    core = engine(model, settings(in_flight, snapshots, blocks))
    assert run(core, load(), gap) == alone
    warm = run(core, load(), gap)
    assert warm == alone, "a second time, with a warm cache"
    stats = core.stats()
    assert stats.prefix_hits_tokens > 0
    if blocks == 22:
        assert stats.preemptions > 0
        assert core.scheduler.cache.counters.moves_to_device > 0
