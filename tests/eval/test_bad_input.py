"""Files, addresses and numbers that no program can use: exit code 2 and a sentence that names them, no traceback."""

from __future__ import annotations

import lzma
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from sparkinfer_eval import arrivals_cli, run_cell
from sparkinfer_eval.accuracy import cli as accuracy
from sparkinfer_eval.accuracy import records_table
from sparkinfer_eval.host import cli as gpu_host
from sparkinfer_eval.simulate import cli as simulate

ROOT = Path(__file__).resolve().parents[2]
CELL = "--cell chat-c1 --scale cpu --model x --prompts x --run x --engine x --engine-version x --engine-digest x"
LONG = 256 * "x"
Program = Callable[[Sequence[str]], int]


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """Files that are something else than what is asked for."""
    (tmp_path / "deep").write_text("[" * 100_000)
    (tmp_path / "binary").write_bytes(b"\x80\xff\x00")
    (tmp_path / "scores").write_bytes(
        lzma.compress(b'{"schema": "sparkinfer/accuracy-scores/v1", "engine": {}, "method": 1, "windows": []}')
    )
    for name, text in (("short", '{"check": "accuracy"}'), ("other", '{"check": "accuracy", "figures": {"x": 1}}')):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.json").write_text(text)
    return tmp_path


def _of_root(program: Callable[[Path, list[str]], int]) -> Program:
    return lambda words: program(ROOT, list(words))


PROGRAMS: list[tuple[Program, str, str]] = [
    (simulate.main, "--costs {files}/deep --cell chat-c1", "deep is not a cost model"),
    (simulate.main, "--steps {files}/deep", "deep holds no steps"),
    (simulate.main, "--costs x --requests {files}/deep", "x is not a cost model"),
    (accuracy.main, "scores:{files}/scores scores:x", "scores is not a record of scores"),
    (accuracy.main, "scores:{files} scores:x", "is not a record of scores"),
    (accuracy.main, "http://[:: scores:x", "'http://[::' is no URL"),
    (accuracy.main, "scores:x scores:x --kl nan", "--kl nan"),
    (accuracy.main, "scores:x scores:x --limit -1", "--limit -1"),
    (accuracy.main, "scores:x scores:x --answer-tokens -1", "--answer-tokens -1"),
    (records_table.main, "{files}/short", "short/a.json was not written by accuracy.py"),
    (records_table.main, "{files}/other", "other/a.json was not written by accuracy.py"),
    (_of_root(arrivals_cli.main), "--url http://[::", "'http://[::' is no URL"),
    (_of_root(arrivals_cli.main), "--url x", "'x' is no URL of a server"),
    (_of_root(arrivals_cli.main), "--url http://127.0.0.1:9 --temperature nan", "--temperature nan"),
    (_of_root(run_cell.main), f"--url http://[:: {CELL} --model-name x --out {{files}}/out", "'http://[::' is no URL"),
    (
        _of_root(gpu_host.main),
        "--work {files}/w import {files}/binary --results {files}/r",
        "binary cannot be unpacked",
    ),
    (
        _of_root(gpu_host.main),
        "--work {files}/w import {files}/absent --results {files}/r",
        "absent cannot be unpacked",
    ),
    (_of_root(gpu_host.main), "--work {files}/w checkpoint --shape 27b --layers 0", "--layers 0"),
    (_of_root(gpu_host.main), "--work {files}/w check --only foo --model {files}/model", "--only foo"),
]


@pytest.mark.parametrize(("program", "words", "said"), PROGRAMS, ids=[words for _, words, _ in PROGRAMS])
def test_refused_by_name(
    program: Program, words: str, said: str, files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (files / "model").mkdir()
    (files / "model" / "config.json").write_text("{}")
    assert program(words.format(files=files).split()) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("eval/run_info.py --output {files}/run.json --spec {files}/binary", "binary is neither JSON nor YAML"),
        ("eval/run_info.py --output {files}/run.json --spec {files}/deep", "deep is neither JSON nor YAML"),
        ("eval/run_info.py --output {files}/run.json --spec {files}", "cannot be read (Is a directory)"),
        ("eval/make_prompts.py --scale cpu --model x --block 0 --out {files}/p", "--block 0"),
        ("eval/make_prompts.py --scale cpu --model x --block 1 --out {files}/p --overrides []", "--overrides []"),
        ("models/random_checkpoint.py {files}/out --shape 27b --layers 0", "must be at least 1"),
        (f"models/random_checkpoint.py {{files}}/out --shape toy-dense --seed {1 << 63}", "does not fit in 64 bits"),
        (f"models/generate.py dense {{files}}/out --seed -{1 << 64}", "does not fit in 64 bits"),
        (f"eval/make_prompts.py --scale cpu --block 1 --out {{files}}/p --model {LONG}", "File name too long"),
        (f"eval/render_report.py {LONG}", "File name too long"),
        (f"eval/changelog.py --repository {LONG} check", "File name too long"),
        (f"eval/gpu_host.py --work {{files}}/w prompts --model {LONG}", "File name too long"),
        (f"eval/simulate.py --run {LONG}", "File name too long"),
        (f"eval/accuracy.py {LONG} {LONG}", "File name too long"),
        (f"eval/accuracy.py scores:{LONG} scores:{LONG}", "File name too long"),
        ("eval/changelog.py --repository {files} check", "has no folder changes/"),
        ("-m sparkinfer.cli chat http://127.0.0.1:9 --temperature nan", "nan: must be a finite number"),
        ("-m sparkinfer.cli chat http://127.0.0.1:9 --temperature -1", "-1: must be a finite number"),
        ("-m sparkinfer.cli chat http://127.0.0.1:9", "standard input"),
    ],
)
def test_scripts_refuse_too(words: str, said: str, files: Path) -> None:
    arguments = words.format(files=files).split()
    path = os.pathsep.join(str(ROOT / part) for part in ("", "eval", "kernels", "models"))
    done = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, stdin=(files / "binary").open(), capture_output=True, text=True,
        timeout=60, env={**os.environ, "PYTHONPATH": path}, check=False,
    )  # fmt: skip
    assert (done.returncode, "Traceback" in done.stderr) == (2, False), done.stderr
    assert said in done.stderr
