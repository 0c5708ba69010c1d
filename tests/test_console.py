"""Command lines on Ctrl-C, or whose output is not read to the end: no traceback, and no other fault hidden."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from sparkinfer.console import INTERRUPTED, READER_GONE

ROOT = Path(__file__).parents[1]
PROGRAM = """
import os, sys
from sparkinfer.console import command_line

@command_line
def main() -> int:
    {body}
    return 0

sys.exit(main())
"""


def unread(command: list[str], *, errors_too: bool = False) -> subprocess.CompletedProcess[str]:
    """Run a command whose stdout (and with `errors_too` stderr) is a pipe that nobody reads."""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        return subprocess.run(
            command,
            stdout=writer,
            stderr=writer if errors_too else subprocess.PIPE,
            text=True,
            check=False,
            timeout=60,
            env={**os.environ, "PYTHONUNBUFFERED": "", "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
        )
    finally:
        os.close(writer)


@pytest.mark.parametrize(
    "body",
    [
        "print('x')",  # held back until the end
        "print('x' * 100_000)",  # fails in the middle
        "import argparse; argparse.ArgumentParser().parse_args(['--help'])",
    ],
)
@pytest.mark.parametrize("unbuffered", [False, True])
def test_output_that_nobody_reads_ends_the_program_quietly(body: str, unbuffered: bool) -> None:
    made = unread([sys.executable, *(["-u"] if unbuffered else []), "-c", PROGRAM.format(body=body)])
    # argparse itself swallows the error of a write, so that an unbuffered --help has nothing left to fail.
    expected = {READER_GONE, 0} if unbuffered and "argparse" in body else {READER_GONE}
    assert (made.returncode in expected, made.stderr) == (True, "")


def test_an_error_message_that_nobody_reads() -> None:
    program = PROGRAM.format(body="print('error', file=sys.stderr)")
    assert unread([sys.executable, "-c", program], errors_too=True).returncode == READER_GONE


def test_ctrl_c(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    body = """import time
    try:
        print('begun', flush=True)
        time.sleep(60)
    finally:
        print('tidied up')"""
    program.write_text(PROGRAM.format(body=body), "utf-8")
    with subprocess.Popen(
        [sys.executable, str(program)], env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        # As from a terminal: tests that a script runs in the background inherit a signal that is ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=60) == ("tidied up\n", "program.py: interrupted\n")
    assert process.returncode == INTERRUPTED == 130


def test_a_pipe_that_breaks_elsewhere_is_still_an_error() -> None:
    program = PROGRAM.format(body="raise BrokenPipeError('of a socket')")
    made = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False, timeout=60
    )
    assert made.returncode == 1
    assert "of a socket" in made.stderr


def test_the_engine_s_own_command_line() -> None:
    made = unread([sys.executable, "-m", "sparkinfer.cli", "--help"])
    assert (made.returncode, made.stderr) == (READER_GONE, "")


def _main_of(path: Path) -> ast.FunctionDef | None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name == "main":
            return node
        if isinstance(node, ast.ImportFrom) and node.module and any(name.name == "main" for name in node.names):
            return _main_of(path.parent.joinpath(*node.module.split(".")).with_suffix(".py"))
    return None


PROGRAMS = [
    *ROOT.glob("eval/*.py"),
    *ROOT.glob("models/*.py"),
    ROOT / "sparkinfer" / "cli.py",
    ROOT / "containers" / "sparkinfer_containers" / "cli.py",
]


@pytest.mark.parametrize("path", sorted(PROGRAMS), ids=lambda path: "-".join(path.parts[-2:]))
def test_every_program_command_line(path: Path) -> None:
    found = _main_of(path)
    assert found is not None, f"{path.name} has no main"
    assert [ast.unparse(item) for item in found.decorator_list] == ["command_line"]


def test_a_check_writes_its_document_before_its_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from sparkinfer_eval import check_program

    written = []

    def leave(*_: object) -> None:
        raise BrokenPipeError

    monkeypatch.setattr(check_program, "write_json", lambda *given: written.append(given))
    monkeypatch.setattr(check_program, "table", leave)
    options = check_program.parser("x", "x").parse_args([str(tmp_path), "--json", str(tmp_path / "x.json")])
    with pytest.raises(BrokenPipeError):
        check_program.run("x", options, lambda _: ("float32", []))
    assert written
