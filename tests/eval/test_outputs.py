"""Outputs that cannot be written: refused with exit code 2 by every program, before it loads or measures anything."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from sparkinfer_eval import (
    arrivals_cli,
    check_record,
    mixed_conc,
    pack_ckpt,
    prefix_check,
    scheduling_figures,
    step_breakdown,
)
from sparkinfer_eval.accuracy import cli as accuracy
from sparkinfer_eval.accuracy import records_table
from sparkinfer_eval.host import cli as gpu_host
from sparkinfer_eval.simulate import cli as simulate

from sparkinfer.cli import main as sparkinfer
from sparkinfer.errors import ConfigError, EnvironmentProblem
from sparkinfer.output import require_appendable, require_file, require_folder, write_text

ROOT = Path(__file__).resolve().parents[2]


def _gpu_host(arguments: Sequence[str]) -> int:
    return gpu_host.main(ROOT, list(arguments))


def _arrivals(arguments: Sequence[str]) -> int:
    return arrivals_cli.main(ROOT, list(arguments))


PROGRAMS: list[tuple[Callable[[Sequence[str]], int], str]] = [
    (pack_ckpt.main, "{there} --json {folder}"),
    (mixed_conc.main, "{there} --json {below}"),
    (prefix_check.main, "{there} --json /dev/null"),
    (simulate.main, "--costs absent.json --out {below}"),
    (simulate.main, "--costs absent.json --save {folder}"),
    (simulate.main, "--costs absent.json --save {below}"),
    (check_record.main, "absent --out {file}"),
    (scheduling_figures.main, "absent --busy --out {below}"),
    (scheduling_figures.main, "absent --busy --out {there} --record {below}"),
    (accuracy.main, "absent absent --json {folder}"),
    (accuracy.main, "absent absent --record {below}"),
    (records_table.main, "{file}"),
    (lambda words: step_breakdown.main(list(words)), "absent absent --config absent --json {folder}"),
    (sparkinfer, "bench absent --json {folder}"),
    (sparkinfer, "profile absent --json {below}"),
    (sparkinfer, "profile absent --trace {below}"),
    (_gpu_host, "--work {below} stop"),
    (_gpu_host, "--work {there} collect --statement x --out {file}"),
    (_gpu_host, "--work {there} caches --save {below}"),
    (_arrivals, "--url http://127.0.0.1:9 --json {folder}"),
]


@pytest.mark.parametrize(("program", "words"), PROGRAMS, ids=[words for _, words in PROGRAMS])
def test_every_program_refuses_first(
    program: Callable[[Sequence[str]], int], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    there, file, folder = tmp_path / "there", tmp_path / "file", tmp_path / "folder"
    there.mkdir()
    folder.mkdir()
    file.write_text("kept")
    names = {"there": there, "file": file, "folder": folder, "below": file / "below"}
    arguments = words.format(**names).split()
    assert program(arguments) == 2
    said = capsys.readouterr().err
    assert any(path in said for path in (str(file), str(folder), "/dev/null")), said
    assert "Traceback" not in said
    assert sorted(tmp_path.rglob("*")) == [file, folder, there], "a refusal leaves nothing"
    assert file.read_text() == "kept"


@pytest.mark.parametrize(
    "words",
    [
        "make_prompts.py --scale cpu --model absent --block 1 --out {below}",
        "run_info.py --spec absent --output {folder}",
    ],
)
def test_scripts_refuse_too(words: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("kept")
    script, *arguments = words.format(below=tmp_path / "file" / "below", folder=tmp_path).split()
    path = os.pathsep.join(str(ROOT / part) for part in ("", "eval", "kernels", "models"))
    done = subprocess.run(
        [sys.executable, str(ROOT / "eval" / script), *arguments],
        capture_output=True, text=True, timeout=60, env={**os.environ, "PYTHONPATH": path}, check=False,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert arguments[-1] in done.stderr
    assert done.stderr.count("\n") == 1, done.stderr


def test_numbers_that_cannot_be_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url = ["--url", "http://127.0.0.1:9"]
    cases: list[tuple[Callable[[Sequence[str]], int], list[str], str]] = [
        (scheduling_figures.main, ["absent", "--busy", "--out", str(tmp_path), "--steps", "0"], "--steps 0"),
        (sparkinfer, ["bench", "absent", "--steps", "0"], "--steps 0"),
        (sparkinfer, ["bench", "absent", "--repeats", "-1"], "--repeats -1"),
        (sparkinfer, ["bench", "absent", "--threads", "0"], "--threads 0"),
        (sparkinfer, ["profile", "absent", "--context", "0"], "--context 0"),
        (sparkinfer, ["profile", "absent", "--decode", "4", "0"], "--decode 0"),
        (_arrivals, [*url, "--rate", "1", "nan"], "a finite rate above 0"),
        (_arrivals, [*url, "--requests", "0"], "2 requests or more"),
        (_arrivals, [*url, "--long-tokens", "9", "8"], "the range in order"),
        (_arrivals, [*url, "--prompt-tokens", "0"], "--prompt-tokens 0"),
        (_arrivals, [*url, "--timeout", "nan"], "--timeout nan"),
    ]
    for program, arguments, words in cases:
        assert program(arguments) == 2, arguments
        assert words in capsys.readouterr().err


@pytest.fixture
def closed(tmp_path: Path) -> Iterator[Path]:
    """A folder that this process may not enter; root becomes nobody meanwhile, since nothing is closed to it."""
    folder, user = tmp_path / "closed", os.geteuid()
    folder.mkdir()
    (folder / "there").write_text("kept")
    folder.chmod(0o000)
    if user == 0:
        os.seteuid(65534)
    yield folder
    if user == 0:
        os.seteuid(user)
    folder.chmod(0o700)


@pytest.mark.parametrize("check", [require_file, require_folder, require_appendable])
def test_folders_without_permission(check: Callable[[Path, str], None], closed: Path) -> None:
    for path in (closed / "there", closed / "new"):
        with pytest.raises(ConfigError, match="Permission denied"):
            check(path, "--out")


def test_a_pipe_without_a_reader_is_no_file_to_continue(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="cannot be written"):
        require_appendable(tmp_path / "pipe", "--trace")


def test_what_can_be_written_is_let_through_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("old")
    (tmp_path / "x.json.tmp").write_text("of a killed run")
    require_file(tmp_path / "x.json", "--json")
    require_file(tmp_path / "new" / "x.json", "--save", make_folder=True)
    require_folder(tmp_path / "new" / "deep", "--out")
    require_appendable(tmp_path / "x.json", "--trace")
    require_appendable(Path("/dev/null"), "--trace")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.json", "x.json.tmp"]
    write_text(tmp_path / "x.json", json.dumps("new"))
    assert [path.name for path in tmp_path.iterdir()] == ["x.json"]
    for path in (Path("/proc/x"), tmp_path / ("n" * 300)):
        with pytest.raises(ConfigError, match="cannot be written"):
            require_file(path, "--json")


def test_a_place_that_is_lost_meanwhile_is_the_machine_s_fault(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(EnvironmentProblem, match="folder cannot be written"):
        write_text(tmp_path / "folder", "x")
