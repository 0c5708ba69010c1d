"""Properties of the repository as a whole."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

import sparkinfer

ROOT = Path(__file__).resolve().parents[1]
IMPORT_ROOTS = ("kernels", "eval", "containers", "models")
NO_PACKAGE = (*IMPORT_ROOTS, "workflow", "config", "docs", "tests", "changes", "reports")
LONGEST_FILE = 500
BINARY = {".png", ".gz", ".xz", ".zst", ".parquet", ".safetensors", ".bin", ".bz2"}
# Written in pieces, so that this file does not hold what it forbids.
FORBIDDEN = re.compile(r"(?<![\w.~$}/-])/(?:" + "|".join(("ro" + "ot", "ho" + "me", "op" + "t", "wo" + "rk")) + r")/")


def tracked() -> list[Path]:
    """Files that git tracks and that exist; skips outside a checkout."""
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip("not a git checkout")
    return [ROOT / name for name in done.stdout.split("\0") if name and (ROOT / name).is_file()]


def test_the_tracked_tree_stays_below_28_mib():
    assert sum(path.lstat().st_size for path in tracked()) < 28 * 2**20


def test_raw_records_of_a_report_stay_below_4_mib():
    records = {path for path in tracked() if path.name == "requests.parquet"}
    assert records
    assert {path for path in records if path.stat().st_size >= 4 * 2**20} == set()


def run_python(program: str) -> str:
    """Run a program from the repository's root, as a user would: the root is on sys.path."""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_transformers_is_undisturbed_by_our_folder_names():
    program = (
        "from transformers.utils import is_kernels_available\n"
        "from transformers import AutoModelForCausalLM, Qwen3_5ForCausalLM\n"
        "print(is_kernels_available(), AutoModelForCausalLM.__name__)"
    )
    installed = "kernels" in importlib.metadata.packages_distributions()
    assert run_python(program) == f"{installed} AutoModelForCausalLM"


def test_builtin_eval_and_standard_library_are_undisturbed():
    assert run_python("import statistics, types, profile, json; print(eval('1+1'))") == "2"


def test_folders_that_hold_packages_are_none_themselves():
    assert [name for name in NO_PACKAGE if (ROOT / name / "__init__.py").exists()] == []


def test_our_import_names_belong_to_us_alone():
    names = {p.parent.name for folder in (".", *IMPORT_ROOTS) for p in (ROOT / folder).glob("sparkinfer*/__init__.py")}
    assert {"sparkinfer", "sparkinfer_kernels", "sparkinfer_eval"} <= names
    owners = importlib.metadata.packages_distributions()
    foreign = {name: owners[name] for name in names if set(owners.get(name, [])) - {"sparkinfer"}}
    assert foreign == {}


@pytest.mark.parametrize("folder", IMPORT_ROOTS)
def test_no_program_hides_a_standard_module(folder):
    names = {p.stem for p in (ROOT / folder).glob("*.py")}
    assert names & set(sys.stdlib_module_names) == set()


def test_no_program_hides_an_installed_package():
    names = {p.stem for folder in IMPORT_ROOTS for p in (ROOT / folder).glob("*.py")}
    assert names & (set(importlib.metadata.packages_distributions()) - {"sparkinfer"}) == set()


def test_no_tracked_file_names_a_path_of_somebodys_machine():
    found = []
    for path in tracked():
        if path.suffix in BINARY:
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
            if FORBIDDEN.search(line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:120]}")
    assert found == []


def test_python_files_stay_readable_in_one_sitting():
    long = {
        str(path.relative_to(ROOT)): lines
        for path in tracked()
        if path.suffix == ".py" and (lines := len(path.read_text(encoding="utf-8").splitlines())) > LONGEST_FILE
    }
    assert long == {}


def test_one_version_everywhere():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert project["version"] == sparkinfer.__version__ == citation["version"]
    assert project["license"] == citation["license"] == "Apache-2.0"
    sections = re.findall(r"^## \[([^\]]+)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert sections[0] == "Unreleased"
    assert len(set(sections)) == len(sections)

    def order(version: str) -> list[int]:
        return [int(part) for part in version.split("-")[0].split(".")]

    assert all(order(s) <= order(project["version"]) for s in sections[1:])


def test_open_fragments_parse_and_claim_nothing():
    done = subprocess.run(
        [sys.executable, "eval/changelog.py", "check"], cwd=ROOT, capture_output=True, text=True, check=False,
        env={"PYTHONPATH": f"{ROOT}:{ROOT / 'eval'}", "PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "config/README.md"])
def test_links_between_documents_lead_somewhere(name):
    check_links(ROOT / name)


def test_links_in_docs_lead_somewhere():
    for page in sorted((ROOT / "docs").rglob("*.md")):
        check_links(page)


def check_links(page: Path) -> None:
    """Every relative Markdown link of a page names an existing file."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    targets = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text)
    missing = [t for t in targets if "://" not in t and not t.startswith("mailto:") and not (page.parent / t).exists()]
    assert missing == [], f"{page.name} links to files that do not exist"


def test_license_is_complete():
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text
    assert "END OF TERMS AND CONDITIONS" in text


def test_files_named_in_documents_exist():
    names = ["/" + path.relative_to(ROOT).as_posix() for path in tracked()]
    pages = [ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "config/README.md")]
    missing = []
    for page in [*pages, *sorted((ROOT / "docs").rglob("*.md"))]:
        for name in re.findall(r"`([\w./-]+\.(?:py|yaml|smk))`", page.read_text(encoding="utf-8")):
            if not any(n.endswith("/" + name) for n in names):
                missing.append(f"{page.relative_to(ROOT)}: {name}")
    assert missing == []
