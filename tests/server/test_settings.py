"""The settings table: parsing, refusals, and that its page is current."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from sparkinfer import cli
from sparkinfer.errors import ConfigError
from sparkinfer.settings import Settings, page, resolve

ROOT = Path(__file__).resolve().parents[2]


def test_page_is_current() -> None:
    text = (ROOT / "docs" / "settings.md").read_text(encoding="utf-8")
    assert text == page(), "run: python -m sparkinfer.settings > docs/settings.md"


def test_flag_beats_environment_beats_default() -> None:
    assert resolve({}) == Settings()
    settings = resolve({"SPARKINFER_MAX_QUEUE": "7", "SPARKINFER_PACK_MOE": "0"}, {"max_queue": "3", "threads": None})
    assert (settings.max_queue, settings.pack_moe, settings.threads) == (3, False, None)
    assert resolve({"SPARKINFER_MAX_MODEL_LEN": "auto"}).max_model_len is None
    assert settings.as_dict()["SPARKINFER_MAX_QUEUE"] == 3


def test_other_variables_are_left_alone() -> None:
    resolve({"PATH": "/bin", "SPARKINFER_IMAGE_DIGEST": "sha256:00"})


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"SPARKINFER_MIXED_CHUNKS": "1"}, "did you mean SPARKINFER_MIXED_CHUNK"),
        ({"SPARKINFER_XYZZY": "1"}, "unknown setting SPARKINFER_XYZZY"),
        ({"SPARKINFER_PACK_MOE": "maybe"}, "neither on nor off"),
        ({"SPARKINFER_MAX_NUM_SEQS": "0"}, "least value, 1"),
        ({"SPARKINFER_MAX_NUM_SEQS": "1.5"}, "whole number"),
        ({"SPARKINFER_REQUEST_TIMEOUT_S": "nan"}, "finite"),
        ({"SPARKINFER_LOG_LEVEL": "loud"}, "one of debug"),
        ({"SPARKINFER_MIXED_CHUNK": "15"}, r"MIXED_CHUNK=15 is below 64 .* use 0 \(off\) or at least 64"),
        ({"SPARKINFER_MIXED_CHUNK": "16"}, "SPARKINFER_MIXED_CHUNK=16 is below 64"),
        ({"SPARKINFER_PREFILL_CHUNK": "16"}, "SPARKINFER_PREFILL_CHUNK: 16 is below the least value, 64"),
        ({"SPARKINFER_CHECKPOINT_INTERVAL": "100"}, "SPARKINFER_CHECKPOINT_INTERVAL=100 .* use 96"),
        ({"SPARKINFER_DECODE_CHECKPOINT_INTERVAL": "3"}, "DECODE_CHECKPOINT_INTERVAL=3 .* use 16"),
        ({"SPARKINFER_STEPS_IN_FLIGHT": "3"}, "SPARKINFER_STEPS_IN_FLIGHT=3: at most 2"),
        ({"SPARKINFER_DETERMINISTIC": "1", "SPARKINFER_MIXED_CHUNK": "1024"}, "MIXED_CHUNK=1024 asks for them"),
        ({"SPARKINFER_PREFIX_CACHE": "0", "SPARKINFER_SNAPSHOT_POOL_MB": "4096"}, "leave one of the two out"),
        ({"SPARKINFER_MIXED_MAX_PROMPTS": "100", "SPARKINFER_MAX_NUM_SEQS": "4"}, "lower it to at most 4"),
        ({"SPARKINFER_WATERMARK": "0.5"}, "less than 0.5"),
        ({"SPARKINFER_THREADS": "1000000"}, "any host's CPUs"),
        ({"SPARKINFER_PREFIX_CACHE": "0", "SPARKINFER_PREFIX_CACHE_HOST_KV_MB": "9"}, "needs the prefix cache"),
        ({"SPARKINFER_MIXED_CHUNK": "0", "SPARKINFER_BACKLOG_CHUNK": "2048"}, "needs mixed steps"),
        ({"SPARKINFER_MIXED_CHUNK": "2048", "SPARKINFER_BACKLOG_CHUNK": "2048"}, "or more than 2048"),
        ({"SPARKINFER_DETERMINISTIC": "1", "SPARKINFER_BACKLOG_CHUNK": "2048"}, "BACKLOG_CHUNK=2048 asks for prompts"),
        ({"SPARKINFER_SERVED_MODEL_NAME": "m\udcff"}, r"SPARKINFER_SERVED_MODEL_NAME: .* is not UTF-8 text"),
        ({"SPARKINFER_PREFIX_CACHE_SALT": "\ud800"}, r"SPARKINFER_PREFIX_CACHE_SALT: .* is not UTF-8 text"),
        ({"SPARKINFER_MAX_QUEUE": "1\udcff"}, r"SPARKINFER_MAX_QUEUE: .* is not UTF-8 text"),
        ({"SPARKINFER_\udcff": "1"}, r"unknown setting SPARKINFER_\\udcff"),
        ({"SPARKINFER_IMAGE_DIGEST": "sha256:\udcff"}, r"SPARKINFER_IMAGE_DIGEST: .* is not UTF-8 text"),
        ({"SPARKINFER_BACKLOG_CHUNK": "9000"}, "above SPARKINFER_PREFILL_CHUNK=8192"),
    ],
)
def test_refusals(environ: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        resolve(environ)


def test_what_the_defaults_and_the_checks_allow() -> None:
    resolve({"SPARKINFER_MAX_NUM_SEQS": "4"})
    resolve({"SPARKINFER_DETERMINISTIC": "1", "SPARKINFER_MIXED_CHUNK": "0", "SPARKINFER_BACKLOG_CHUNK": "0"})
    resolve({"SPARKINFER_MIXED_CHUNK": "64", "SPARKINFER_PREFILL_CHUNK": "64", "SPARKINFER_CHECKPOINT_INTERVAL": "0"})
    resolve({"SPARKINFER_MIXED_MAX_PROMPTS": "100", "SPARKINFER_MAX_NUM_SEQS": "100"})


def test_a_secret_is_not_shown() -> None:
    settings = resolve({"SPARKINFER_PREFIX_CACHE_SALT": "pepper"})
    assert settings.prefix_cache_salt == "pepper"
    assert settings.as_dict()["SPARKINFER_PREFIX_CACHE_SALT"] == "set"
    assert Settings().as_dict()["SPARKINFER_PREFIX_CACHE_SALT"] == ""


def test_help_names_every_setting() -> None:
    command = [sys.executable, "-m", "sparkinfer.cli", "serve", "--help"]
    text = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT, timeout=60).stdout
    for name in Settings().as_dict():
        assert name in text
        assert "--" + name.removeprefix("SPARKINFER_").lower().replace("_", "-") in text


@pytest.mark.parametrize("command", ["serve", "chat", "doctor", "quantize"])
def test_help_names_both_forms_of_a_model(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main([command, "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "folder" in text
    assert "OWNER/NAME@COMMIT of the Hugging Face hub" in text


def test_import_needs_no_torch() -> None:
    code = "import sys, sparkinfer.settings, sparkinfer.cli; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=60)
