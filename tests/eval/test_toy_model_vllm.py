"""Generated checkpoints load in the baseline and answer: exact lengths, the same prompt count as ours, varied text."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path

import httpx
import pytest
from fake_openai_server import free_port
from sparkinfer_eval.prompts import ChatCounter
from sparkinfer_eval.toy_model import generate

PYTHON = Path(__file__).resolve().parents[2] / ".venvs" / "vllm" / "bin" / "python"
TEXT = "A module can contain executable statements as well as function definitions."


def wait_until_ready(server: subprocess.Popen[bytes], url: str, log: Path, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        assert server.poll() is None, f"vLLM ended: {log.read_text(errors='replace')[-2000:]}"
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{url}/health", timeout=5, trust_env=False).status_code == 200:
                return
        time.sleep(1)
    raise AssertionError(f"not ready after {seconds:g} s: {log.read_text(errors='replace')[-2000:]}")


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_loads_and_answers_in_vllm(kind: str, tmp_path: Path) -> None:
    model, log, port = tmp_path / f"spark-tiny-{kind}", tmp_path / "log", free_port()
    generate(kind, model)
    url = f"http://127.0.0.1:{port}"
    settings = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CACHE_ROOT": str(tmp_path / "cache"),
    }
    words = [str(PYTHON), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--port", str(port)]
    words += ["--served-model-name", "toy", "--host", "127.0.0.1", "--max-model-len", "2048", "--dtype", "bfloat16"]
    with log.open("wb") as output:
        server = subprocess.Popen(
            words, env=os.environ | settings, stdout=output, stderr=output, cwd=tmp_path, start_new_session=True
        )
    try:
        wait_until_ready(server, url, log, 400)
        body = {
            "model": "toy",
            "messages": [{"role": "user", "content": TEXT}],
            "max_completion_tokens": 48,
            "temperature": 0.0,
            "ignore_eos": True,
        }
        answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60, trust_env=False).json()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGTERM)
        try:
            server.wait(timeout=20)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait(timeout=20)
    assert answer["usage"]["prompt_tokens"] == ChatCounter(model).count(TEXT)
    assert answer["usage"]["completion_tokens"] == 48
    assert answer["choices"][0]["finish_reason"] == "length"
    assert len(set(answer["choices"][0]["message"]["content"].split())) > 10
