"""Start, failure and end of a server: exit codes, messages, and that no process is left."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from running_server import ROOT, SCRATCH, Running, environment, start, start_echo

from sparkinfer.cli import main
from sparkinfer.errors import EnvironmentProblem
from sparkinfer.server.serve import take_port

MODEL_S = (("--max-model-len",), ("--backlog-chunk",))
"""Settings that only the model can show to be wrong."""
SLOW = '{"step_s": 0.05}'
BODY: dict[str, Any] = {"prompt": [5, 6, 7], "ignore_eos": True, "stream": True}


def cli(*arguments: str, **extra: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "sparkinfer.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT, env=environment(**extra))


def wait_gone(pid: int, seconds: float = 5.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.02)
    return False


class Stream(threading.Thread):
    """Reads one stream beside the test."""

    def __init__(self, running: Running, max_tokens: int) -> None:
        super().__init__(daemon=True)
        self.first = threading.Event()
        self.events: list[str] = []
        self._args = (running.url + "/v1/completions", {**BODY, "max_tokens": max_tokens})
        self.start()
        assert self.first.wait(20)

    def run(self) -> None:
        url, body = self._args
        try:
            with httpx.stream("POST", url, json=body, timeout=60) as response:
                for line in response.iter_lines():
                    if line:
                        self.events.append(line.removeprefix("data: "))
                        self.first.set()
        except httpx.RemoteProtocolError:
            self.events.append("broken off")

    def end(self) -> list[str]:
        self.join(30)
        assert not self.is_alive()
        return self.events


def test_missing_model() -> None:
    result = cli("serve", "no/such/folder")
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1
    assert "no/such/folder" in result.stderr


@pytest.mark.parametrize("command", ["serve", "doctor", "quantize"])
@pytest.mark.parametrize("model", ["n" * 300, "~no-such-user-here/x", "no-\udcff"])
def test_impossible_model_folders_are_named(
    command: str, model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = [str(tmp_path / "out"), "--format", "fp8"] if command == "quantize" else []
    assert main([command, model, *more]) == 2
    said = "".join(capsys.readouterr())
    assert "no model folder" in said
    assert model[:10].replace("\udcff", "\\udcff") in said


def test_a_folder_whose_name_is_not_utf8_is_refused(model_dir: Path, tmp_path: Path) -> None:
    folder = tmp_path / "m\udcff"
    folder.symlink_to(model_dir)
    result = cli("serve", str(folder), "--port", "0")
    assert (result.returncode, result.stderr.count("\n")) == (2, 1), result.stderr
    assert "is not UTF-8" in result.stderr


def test_incomplete_model(model_dir: Path, tmp_path: Path) -> None:
    folder = tmp_path / "cut"
    folder.mkdir()
    for file in model_dir.iterdir():
        if file.suffix != ".safetensors":
            (folder / file.name).write_bytes(file.read_bytes())
    result = cli("serve", str(folder), "--port", "0")
    assert result.returncode == 2, result.stderr
    assert "safetensors" in result.stderr.splitlines()[-1]
    (folder / "tokenizer.json").unlink()
    result = cli("serve", str(folder), "--port", "0")
    assert (result.returncode, result.stderr.count("\n")) == (2, 1)
    assert "tokenizer.json" in result.stderr


def test_broken_tokenizer(model_dir: Path, tmp_path: Path) -> None:
    folder = tmp_path / "broken"
    folder.mkdir()
    for file in model_dir.iterdir():
        (folder / file.name).write_bytes(b"{}" if file.name == "tokenizer.json" else file.read_bytes())
    result = cli("serve", str(folder), "--port", "0")
    assert result.returncode == 2, result.stderr
    assert "tokenizer" in result.stderr.splitlines()[-1]


def test_impossible_hosts_are_named() -> None:
    for host in ("no-such-host.invalid", "a" * 300):
        with pytest.raises(EnvironmentProblem, match=host[:20]):
            take_port(host, 0)


def test_port_in_use_is_said_before_loading(model_dir: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        began = time.monotonic()
        result = cli("serve", str(model_dir), "--port", str(port))
        assert result.returncode == 3
        assert result.stderr.count("\n") == 1
        assert f"port {port}" in result.stderr
        assert "--port" in result.stderr
        assert "loading" not in result.stdout
        assert time.monotonic() - began < 20


@pytest.mark.parametrize(
    ("flags", "variables", "words"),
    [
        ((), {"SPARKINFER_MAX_QUEU": "5"}, "did you mean SPARKINFER_MAX_QUEUE?"),
        ((), {"SPARKINFER_MAX_QUEUE": "many"}, "SPARKINFER_MAX_QUEUE: 'many' is not a whole number"),
        (("--mixed-chunk", "5"), {}, "SPARKINFER_MIXED_CHUNK=5 is below 64 tokens"),
        (("--draft-model", "x"), {}, "not in this release"),
        (("--port", "70000"), {}, "65535"),
        (("--max-model-len", "4096"), {}, "2048"),
        (("--backlog-chunk", "512"), {}, "SPARKINFER_BACKLOG_CHUNK=512 is not above 1024"),
        (("--seed", str(1 << 63)), {}, "does not fit in 64 bits"),
        (("--device", "tpu"), {}, "tpu"),
        (("--device", "cpu\udcff"), {}, "--device: 'cpu\\udcff' is not UTF-8"),
        ((), {"SPARKINFER_SERVED_MODEL_NAME": "m\udcff"}, "SPARKINFER_SERVED_MODEL_NAME: 'm\\udcff' is not UTF-8"),
        ((), {"SPARKINFER_STEP_TRACE": "/dev"}, "SPARKINFER_STEP_TRACE: /dev is a folder"),
        ((), {"SPARKINFER_STEP_TRACE": "no/such/folder/x"}, "no/such/folder/x: its folder does not exist"),
    ],
)
def test_contradictions_are_refused(
    model_dir: Path, flags: tuple[str, ...], variables: dict[str, str], words: str
) -> None:
    result = cli("serve", str(model_dir), *(("--port", "0") if "--port" not in flags else ()), *flags, **variables)
    assert result.returncode == 2, result.stderr
    assert words in result.stderr
    assert "Traceback" not in result.stderr
    # What the model has no part in is said before it is loaded.
    assert ("listening" in result.stdout) == (flags[:1] in MODEL_S or flags == ("--device", "tpu"))


def test_killed_engine_ends_streams_and_server(model_dir: Path, tmp_path: Path) -> None:
    with start_echo(model_dir, tmp_path / "log", SLOW) as running:
        stream = Stream(running, 2000)
        running.engine().kill()
        error = json.loads(stream.end()[-1])["error"]
        assert "killed by signal 9" in error["message"]
        assert running.process.wait(20) == 1
        assert "killed by signal 9" in running.text().splitlines()[-1]


def test_failing_engine_says_why(model_dir: Path, tmp_path: Path) -> None:
    with start_echo(model_dir, tmp_path / "log", '{"raise_at_step": 3}') as running:
        answer = running.post("/v1/completions", {**BODY, "stream": False, "max_tokens": 50})
        assert answer.status_code == 500
        assert answer.json()["error"]["message"] == "scripted failure"
        assert running.process.wait(20) == 1
        assert "scripted failure" in running.text().splitlines()[-1]


def test_sigterm_drains(model_dir: Path, tmp_path: Path) -> None:
    with start_echo(model_dir, tmp_path / "log", SLOW) as running:
        engine = running.engine().pid
        stream = Stream(running, 40)
        os.kill(running.process.pid, signal.SIGTERM)
        time.sleep(0.5)
        with pytest.raises(httpx.HTTPError):
            httpx.get(running.url + "/health")
        events = stream.end()
        assert events[-1] == "[DONE]"
        assert json.loads(events[-2])["choices"][0]["finish_reason"] == "length"
        assert running.process.wait(20) == 0
        assert wait_gone(engine)


def test_grace_period_ends(model_dir: Path, tmp_path: Path) -> None:
    with start_echo(model_dir, tmp_path / "log", SLOW, ("--shutdown-grace-s", "0.5")) as running:
        stream = Stream(running, 2000)
        began = time.monotonic()
        os.kill(running.process.pid, signal.SIGTERM)
        assert "grace period" in json.loads(stream.end()[-1])["error"]["message"]
        assert running.process.wait(20) == 0
        assert time.monotonic() - began < 8


def test_second_signal_ends_at_once(model_dir: Path, tmp_path: Path) -> None:
    with start_echo(model_dir, tmp_path / "log", SLOW) as running:
        engine = running.engine().pid
        Stream(running, 2000)
        os.kill(running.process.pid, signal.SIGINT)
        os.kill(running.process.pid, signal.SIGINT)  # the same stop, sent to the process and to its group
        time.sleep(0.8)
        assert running.process.poll() is None
        os.kill(running.process.pid, signal.SIGINT)
        assert running.process.wait(3) == 128 + signal.SIGINT
        assert wait_gone(engine)


def test_killed_server_takes_the_engine_along(model_dir: Path, tmp_path: Path) -> None:
    scratch = Path(tempfile.mkdtemp(prefix="si-", dir=SCRATCH))  # a socket's name has at most 107 bytes
    command = [str(Path(__file__).with_name("scripted.py")), "serve", str(model_dir), "--port", "0"]
    caches = str(tmp_path / "inductor")  # torch's own folder, made at import where Triton is installed
    with start(command, tmp_path / "log", SCRIPT=SLOW, TMPDIR=str(scratch), TORCHINDUCTOR_CACHE_DIR=caches) as running:
        engine = running.engine().pid
        Stream(running, 2000)
        running.process.kill()
        assert wait_gone(engine, 3.0)
        assert list(scratch.iterdir()) == []


def test_folder_too_long_for_a_socket_is_named(model_dir: Path, tmp_path: Path) -> None:
    scratch = tmp_path / ("long" * 25)
    scratch.mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "sparkinfer.cli", "serve", str(model_dir), "--port", "0"],
        env=environment(TMPDIR=str(scratch)), capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 3, done.stderr
    assert "set TMPDIR to a folder with a shorter name" in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(scratch.glob("sparkinfer-*"))


def test_not_ready_is_503_and_a_signal_ends_the_loading(model_dir: Path, tmp_path: Path) -> None:
    command = ["-m", "sparkinfer.cli", "serve", str(model_dir), "--port", "0"]
    with start(command, tmp_path / "log", wait=False) as running:
        while "listening on " not in running.text():
            assert running.process.poll() is None
            time.sleep(0.01)
        url = running.text().split("listening on ")[1].split(",")[0]
        answer = running.http.get(url + "/health")
        assert (answer.status_code, answer.json()["reason"]) == (503, "the model is loading")
        assert running.http.post(url + "/v1/completions", json=BODY).status_code == 503
        assert running.http.get(url + "/v1/models").json()["data"]
        os.kill(running.process.pid, signal.SIGTERM)
        assert running.process.wait(20) == 0


@pytest.mark.parametrize(("number", "delay_s"), [(signal.SIGINT, 0.0), (signal.SIGTERM, 0.5)])
def test_a_signal_to_the_group_ends_the_loading_in_order(
    model_dir: Path, tmp_path: Path, number: signal.Signals, delay_s: float
) -> None:
    """Ctrl-C in a terminal, and timeout(1): the engine gets the signal too, while it has hardly begun."""
    command = ["-m", "sparkinfer.cli", "serve", str(model_dir), "--port", "0"]
    with start(command, tmp_path / "log", wait=False, session=True) as running:
        while not (children := psutil.Process(running.process.pid).children()):
            assert running.process.poll() is None, running.text()
            time.sleep(0.005)
        time.sleep(delay_s)
        assert "ready on" not in running.text()
        os.killpg(running.process.pid, number)
        assert running.process.wait(20) == 0, running.text()
        assert "Traceback" not in running.text()
        assert "killed" not in running.text()
        assert all(wait_gone(child.pid) for child in children)


def test_doctor(
    model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["doctor", str(model_dir)]) == 0
    assert "MiB of weights" in capsys.readouterr().out
    assert main(["doctor", str(tmp_path)]) == 2
    weights = next(model_dir.glob("*.safetensors")).read_bytes()
    for file in model_dir.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    for kept in (len(weights) - 100, 0):
        next(tmp_path.glob("*.safetensors")).write_bytes(weights[:kept])
        assert main(["doctor", str(tmp_path)]) == 2
        assert "cut off" in capsys.readouterr().out
    next(tmp_path.glob("*.safetensors")).write_bytes(weights)
    for config, words in (('{"architectures": ["LlamaForCausalLM"]}', "LlamaForCausalLM"), ("[]", "JSON object")):
        (tmp_path / "config.json").write_text(config, encoding="utf-8")
        assert main(["doctor", str(tmp_path)]) == 2
        assert words in capsys.readouterr().out
    monkeypatch.setenv("SPARKINFER_NOPE", "1")
    assert main(["doctor"]) == 2
    assert "SPARKINFER_NOPE" in capsys.readouterr().out
    monkeypatch.delenv("SPARKINFER_NOPE")
    monkeypatch.setenv("SPARKINFER_MAX_QUEUE", "many")
    assert main(["doctor"]) == 2
    assert "'many' is not a whole number" in capsys.readouterr().out


def test_chat_against_a_url(echo: Running) -> None:
    command = [sys.executable, "-m", "sparkinfer.cli", "chat", echo.url, "--max-tokens", "5"]
    result = subprocess.run(
        command,
        input="hello there\n/new\nagain\n/quit\n",
        capture_output=True,
        text=True,
        timeout=60,
        env=environment(),
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("> ") == 4
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        nobody = f"http://127.0.0.1:{free.getsockname()[1]}"
        failed = subprocess.run(
            [*command[:4], nobody], input="hello\n", capture_output=True, text=True, timeout=60, env=environment()
        )
    assert failed.returncode == 3
    assert "no answer" in failed.stderr
    for target, code in (("http://[::", 3), ("no-such-folder", 2)):
        failed = subprocess.run(
            [*command[:4], target], input="hello\n", capture_output=True, text=True, timeout=60, env=environment()
        )
        assert (failed.returncode, "Traceback" in failed.stderr) == (code, False), failed.stderr


def test_ctrl_c_stops_an_answer_and_not_the_server_of_a_chat(model_dir: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "sparkinfer.cli", "chat", str(model_dir), "--max-tokens", "1500"]
    log = tmp_path / "log"

    def until(shown: Callable[[str], bool]) -> None:
        deadline = time.monotonic() + 240  # a busy machine generates slowly
        while not shown(log.read_text()):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.02)

    with (
        log.open("w") as output,
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=output, stderr=subprocess.STDOUT, text=True, start_new_session=True,
            env=environment(PYTHONUNBUFFERED="1"),
            # As from a terminal: tests that a script runs in the background inherit a signal that is ignored.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        ) as process,
    ):  # fmt: skip
        assert process.stdin is not None
        try:
            until(lambda text: text.endswith("> "))
            opening = log.read_text()
            (server,) = psutil.Process(process.pid).children()
            print("hello", file=process.stdin, flush=True)
            # At the first words: a random model may end its answer by itself later.
            until(lambda text: len(text) > len(opening))
            os.killpg(process.pid, signal.SIGINT)
            until(lambda text: "[stopped]" in text)
            assert not wait_gone(server.pid, 1.0)
            process.kill()
            assert wait_gone(server.pid, 20), "the server ends with a chat that was killed"
        finally:
            process.kill()


def test_no_socket_folder_is_left() -> None:
    assert list(SCRATCH.glob("sparkinfer-*")) == []
