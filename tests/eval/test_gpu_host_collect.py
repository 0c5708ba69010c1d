"""A run of a GPU host goes into one archive and comes out as a run that the report rules read."""

from __future__ import annotations

import io
import json
import tarfile
from dataclasses import asdict
from pathlib import Path

import pytest
from sparkinfer_eval.cells import Cell, cell_digest, load_cells, resolve_cells
from sparkinfer_eval.host import collect
from sparkinfer_eval.host.cells import prompts_of, run_folder
from sparkinfer_eval.host.facts import bundle_digest, plain
from sparkinfer_eval.host.site import Host
from sparkinfer_eval.host.tokenizer import write_text_tokenizer
from sparkinfer_eval.plan.identity import folder_digest, source_tree_digest
from sparkinfer_eval.records import RawResult, Record, write_records
from sparkinfer_eval.report.load import load_run

from sparkinfer.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
MODEL = "spark-tiny-dense"
COUNTS = {"requests": {"1": 2}}


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(ROOT, tmp_path / "work")


def measured(host: Host, engine: str, digest: str, cell: Cell, run: str = "t1") -> None:
    """A raw result and the facts of its server, as `cells` leaves them."""
    folder = run_folder(host, run) / "b1" / engine / MODEL / cell.id / "r1"
    folder.mkdir(parents=True)
    second = 1_000_000_000
    records = [
        Record(f"r{i}", "profiling", f"p{i}", cell.prompt_tokens, cell.output_tokens, i * second, i * second + 10,
               i * second + second // 2, "length", token_ns=[i * second + 10])
        for i in range(cell.requests)
    ]  # fmt: skip
    write_records(folder / "records.jsonl", records)
    (folder / "profile_export_raw.jsonl.gz").write_bytes(b"every chunk once more")
    result = RawResult(
        run=run, block=1, engine=engine, engine_version="0.1", engine_digest=digest, model=MODEL,
        model_digest=folder_digest(host.model(MODEL), host.work / "digests"), cell=cell.id, rep=1,
        cell_definition=cell.definition(), cell_digest=cell_digest(cell), prompts_sha256="0" * 64, command=["aiperf"],
        started_at="2026-12-02T00:00:00+00:00", tool={"name": "aiperf", "version": "0"},
    )  # fmt: skip
    (folder / "result.json").write_text(json.dumps(asdict(result)))
    servers = run_folder(host, run) / "servers"
    servers.mkdir(exist_ok=True)
    facts = {"engine": engine, "version": "0.1", "engine_digest": digest, "ready_s": 9.0, "info": {}, "command": ["x"]}
    (servers / f"{engine}-{MODEL}-1.json").write_text(json.dumps(facts))


def test_a_packed_run_is_read_by_the_report(host: Host, tmp_path: Path) -> None:
    cells = resolve_cells(load_cells(ROOT / "config" / "cells.yaml"), "full", COUNTS)
    ours = source_tree_digest(ROOT)
    for engine, digest in (("sparkinfer", ours), ("sparkinfer-fast", ours), ("vllm", f"sha256:{'1' * 64}")):
        measured(host, engine, digest, cells["chat-c1"])
    archive = collect.pack(host, "t1", tmp_path / "out", "A test.", COUNTS, [])
    with tarfile.open(archive) as packed:
        assert not any("raw" in name for name in packed.getnames())
    folder = collect.bring_in(ROOT, archive, tmp_path / "results")
    run = load_run(folder)
    assert [engine["label"] for engine in run.engines] == ["sparkinfer 0.1", "vLLM 0.1", "sparkinfer 0.1 (fast)"]
    assert {m.result.engine for m in run.measurements} == {"sparkinfer", "sparkinfer-fast", "vllm"}
    assert run.info["scale"]["settings"]["requests"]["1"] == 2
    with pytest.raises(ConfigError, match="exists already"):
        collect.bring_in(ROOT, archive, tmp_path / "results")


@pytest.mark.parametrize("there", [{"commit": None, "dirty": None}, {"commit": "0" * 40, "dirty": True}])
def test_a_run_of_another_engine_is_refused(
    host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: dict[str, object]
) -> None:
    cells = resolve_cells(load_cells(ROOT / "config" / "cells.yaml"), "full", COUNTS)
    # As on a host whose copy of the tree has no git, or lies in a repository that knows nothing of its changes.
    monkeypatch.setattr("sparkinfer_eval.report.run_info.source_facts", lambda root: there)
    measured(host, "sparkinfer", f"sha256:{'2' * 64}", cells["chat-c1"])
    archive = collect.pack(host, "t1", tmp_path / "out", "A test.", COUNTS, [])
    with pytest.raises(ConfigError, match="from a checkout of the commit that was measured"):
        collect.bring_in(ROOT, archive, tmp_path / "results")
    assert not (tmp_path / "results" / "t1").exists()


def test_a_run_without_results_cannot_be_packed(host: Host, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no measured server"):
        collect.pack(host, "t1", tmp_path, "A test.", {}, [])


def test_text_reaches_a_random_checkpoint_and_every_id_is_visible(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 3000}))
    write_text_tokenizer(tmp_path, ROOT / "models" / MODEL)
    ours = AutoTokenizer.from_pretrained(tmp_path)
    reference = AutoTokenizer.from_pretrained(ROOT / "models" / MODEL)
    text = "It was the best of times, it was the worst of times."
    assert ours(text)["input_ids"] == reference(text)["input_ids"]
    assert len(ours) == 3000
    assert ours.decode([2999, 2048]) == " w2999 w2048"
    assert ours.chat_template == reference.chat_template
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 1000}))
    with pytest.raises(ConfigError, match="a vocabulary of 1000"):
        write_text_tokenizer(tmp_path, ROOT / "models" / MODEL)


def test_names_and_digests_of_bundles(host: Host, tmp_path: Path) -> None:
    assert plain(host, ["/usr/bin/python3", "-m", "x", f"{host.work}/models/a"]) == [
        "python",
        "-m",
        "x",
        "WORK/models/a",
    ]
    assert plain(host, ["x", f"{ROOT}/models/a"]) == ["x", "ROOT/models/a"]
    assert prompts_of(host, "a").name == "a"
    record = tmp_path / "a-1.dist-info" / "RECORD"
    record.parent.mkdir()
    record.write_bytes(io.BytesIO(b"a.py,sha256=x,1\n").getvalue())
    first = bundle_digest(tmp_path)
    record.write_bytes(b"a.py,sha256=y,1\n")
    assert bundle_digest(tmp_path) != first
    with pytest.raises(ConfigError, match="holds no installed distribution"):
        bundle_digest(tmp_path / "none")
