"""The phases of eval/gpu_host.py that need no GPU."""

from __future__ import annotations

import io
import json
import lzma
import os
import shutil
import tarfile
import time
from dataclasses import asdict
from pathlib import Path

import pytest
from fake_openai_server import Script, serving
from sparkinfer_eval import token_load
from sparkinfer_eval.cells import Cell
from sparkinfer_eval.host import cells as host_cells
from sparkinfer_eval.host import servers
from sparkinfer_eval.host.cli import main
from sparkinfer_eval.host.site import Host, load_caches, save_caches, unpack
from sparkinfer_eval.prompts import PromptSet
from sparkinfer_eval.records import Record, read_result, write_records
from sparkinfer_eval.report.failures import read_failures

from sparkinfer.errors import ConfigError, EnvironmentProblem

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(ROOT, tmp_path)


def test_a_split_archive_is_joined_and_unpacked_once(host: Host, tmp_path: Path) -> None:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as archive:
        for name in ("a/one.txt", "two.txt"):
            info = tarfile.TarInfo(name)
            info.size = 5000
            archive.addfile(info, io.BytesIO(name.encode() * 1000))
    packed = lzma.compress(data.getvalue())
    parts = tmp_path / "parts"
    parts.mkdir()
    for number, at in enumerate(range(0, len(packed), 100)):
        (parts / f"part-{number:03}").write_bytes(packed[at : at + 100])
    unpack(parts, host.vllm)
    assert (host.vllm / "a/one.txt").stat().st_size == 5000
    (host.vllm / "two.txt").unlink()
    unpack(parts, host.vllm)
    assert not (host.vllm / "two.txt").exists()
    (parts / "part-001").write_bytes(b"damaged")
    with pytest.raises(EnvironmentProblem, match="could not be unpacked"):
        unpack(parts, host.aiperf)
    with pytest.raises(ConfigError, match="neither part-"):
        unpack(tmp_path, host.aiperf)


def test_caches_go_to_the_next_host(host: Host, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="start a server first"):
        save_caches(host, tmp_path / "out")
    (host.caches / "triton" / "ab").mkdir(parents=True)
    (host.caches / "triton" / "ab" / "kernel.cubin").write_bytes(b"code")
    (host.caches / "vllm").mkdir()
    assert [path.name for path in save_caches(host, tmp_path / "out")] == ["cache-triton.tar.xz"]
    following = Host(ROOT, tmp_path / "next")
    load_caches(following, tmp_path / "out")
    assert (following.caches / "triton" / "ab" / "kernel.cubin").read_bytes() == b"code"
    (tmp_path / "out" / "cache-triton.tar.xz").write_bytes(b"damaged")
    with pytest.raises(EnvironmentProblem, match="could not be unpacked"):
        load_caches(following, tmp_path / "out")
    with pytest.raises(ConfigError, match="holds no cache-"):
        load_caches(following, tmp_path)


def test_both_engines_get_the_same_distinct_prompts() -> None:
    one, other = (token_load.jobs("chat-c4", "profiling", 5, 30, 7, 5000, 3) for _ in range(2))
    assert one == other
    assert len({tuple(job.prompt) for job in one}) == 5
    assert {len(job.prompt) for job in one} == {30}
    assert token_load.jobs("chat-c4", "warmup", 5, 30, 7, 5000, 3)[0].prompt != one[0].prompt


def test_cells_and_their_numbers(host: Host) -> None:
    found = host_cells.cells_of(host, "chat-c16,long_prompt-c1", {"requests": {"1": 3}})
    assert [(cell.id, cell.requests, cell.prompt_tokens) for cell in found] == [
        ("chat-c16", 128, 1024),
        ("long_prompt-c1", 3, 8192),
    ]
    assert len(host_cells.cells_of(host, "all", {})) == 14
    with pytest.raises(ConfigError, match="no cell poisson-r3"):
        host_cells.cells_of(host, "poisson-r3", {})


def test_planned_arrivals_are_measured_with_the_prompts_of_the_model(
    host: Host, model: Path, small_cells: dict[str, Cell], small_prompts: dict[str, PromptSet]
) -> None:
    """A cell that is no result is named in the run's ledger, and the next one is measured."""
    (host.work / "models").mkdir()
    (host.work / "models" / "toy").symlink_to(model)
    cell = small_cells["poisson-r1"]
    with serving(Script(cell.prompt_tokens)) as url:
        server = servers.Running("sparkinfer", "toy", "exact", int(url.rpartition(":")[2]), os.getpid(), "", 1.0)
        facts = host_cells.run_folder(host, "t") / "servers" / "sparkinfer-toy-1.json"
        facts.parent.mkdir(parents=True)
        facts.write_text(json.dumps({"version": "0.1", "engine_digest": f"sha256:{'1' * 64}"}))
        sitting = host_cells.Sitting(host, "t", server, 1, 0)
        assert host_cells.measure_cells(sitting, [cell], "aiperf", time.monotonic() + 60) == 1
        made = host_cells.prompts_of(host, "toy")
        made.mkdir(parents=True)
        for path in small_prompts["poisson-r1"].path.parent.glob("poisson-r1.*"):
            shutil.copy(path, made)
        assert host_cells.measure_cells(sitting, [cell], "tokens", time.monotonic() + 60) == 0
    result = read_result(host_cells.folder_of(host, "t", server, cell.id, 1))
    assert result.tool["name"] == "spec_open_arrivals"
    (failure,) = read_failures(host_cells.run_folder(host, "t"))
    assert "gpu_host.py prompts" in failure.reason


def test_the_table_compares_what_both_engines_have(host: Host) -> None:
    def put(engine: str, cell: str, seconds: float) -> None:
        running = servers.Running(engine, "m", "exact", 1, 1, "", 1.0)
        folder = host_cells.folder_of(host, "quick", running, cell, 1)
        folder.mkdir(parents=True)
        (folder / "result.json").write_text("{}")
        unit = int(seconds * 1e9)
        write_records(
            folder / "records.jsonl",
            [Record("r", "profiling", "x", 5, 10, 0, unit // 2, unit, "length", token_ns=[unit // 2, unit])],
        )

    put("vllm", "chat-c1", 2.0)
    put("sparkinfer", "chat-c1", 1.0)
    put("sparkinfer", "chat-c4", 1.0)
    lines = host_cells.table(host, "quick")
    assert len(lines) == 2
    assert lines[1].split() == ["sparkinfer", "m", "chat-c1", "10.0", "2.00", "500.0", "0.50"]


def test_a_phase_without_a_server_or_a_model_says_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    work = ["--work", str(tmp_path)]
    assert main(ROOT, [*work, "cells"]) == 2
    assert "start one with" in capsys.readouterr().err
    assert main(ROOT, [*work, "bench", "--model", "nothing"]) == 2
    assert "no model nothing" in capsys.readouterr().err
    assert main(ROOT, [*work, "stop"]) == 0
    gone = asdict(servers.Running("vllm", "m", "exact", 1, 2**22 + 1, "the log", 1.0))
    (tmp_path / "server.json").write_text(str(gone).replace("'", '"'))
    assert main(ROOT, [*work, "cells"]) == 2
    assert "has ended; its log is the log" in capsys.readouterr().err
