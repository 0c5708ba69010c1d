"""The workflow itself: style, dry runs of every profile without a GPU, and what a user sees of a wrong setting."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from .conftest import ROOT

Run = Callable[..., subprocess.CompletedProcess[str]]


def counts(text: str) -> dict[str, int]:
    """Jobs by rule from a dry run's table."""
    return {name: int(number) for name, number in re.findall(r"^(\w+)\s+(\d+)$", text, re.MULTILINE)}


def test_lint_and_format(snakemake: Run) -> None:
    done = snakemake("--lint")
    assert done.returncode == 0, done.stdout
    assert "good condition" in done.stdout
    files = [str(ROOT / "Snakefile"), str(ROOT / "workflow/rules")]
    form = subprocess.run([str(ROOT / ".venvs/snakemake/bin/snakefmt"), "--check", *files], check=False)
    assert form.returncode == 0


def test_plain_release_takes_the_cpu_profile_and_says_so(snakemake: Run) -> None:
    done = snakemake("release", "-n", PATH="/usr/bin:/bin")
    assert done.returncode == 0, done.stdout
    assert "profile cpu (no nvidia-smi on this host)" in done.stdout
    jobs = counts(done.stdout)
    assert (jobs["sweep"], jobs["arrivals"], jobs["prompts"]) == (24, 4, 14)
    assert jobs["environment"] == 3


@pytest.mark.parametrize("profile", ["h200", "rtx5090", "kubernetes"])
def test_gpu_profiles_dry_run_without_a_gpu(snakemake: Run, profile: str) -> None:
    done = snakemake("release", "-n", "--profile", f"workflow/profiles/{profile}")
    assert done.returncode == 0, done.stdout
    jobs = counts(done.stdout)
    # Two models, two engines, two blocks: 12 closed-loop cells and two arrival rates each.
    assert (jobs["sweep"], jobs["arrivals"], jobs["model"]) == (96, 16, 2)
    assert "does not exist: a run will stop there" in done.stdout


def test_slurm_gets_all_that_needs_the_device_as_one_job(snakemake: Run) -> None:
    done = snakemake("release", "-n", "--profile", "workflow/profiles/slurm")
    assert done.returncode == 0, done.stdout
    jobs = counts(done.stdout)
    assert (jobs["sweep"], jobs["arrivals"], jobs["model"]) == (96, 16, 2)
    (start,) = re.finditer(r"Group job (\w+) ", done.stdout)
    assert start.group(1) == "measure"
    measured = ("check", "scores", "sweep", "arrivals")
    # Jobs of a group are indented below its line.
    grouped = re.findall(r"^    rule (\w+):$", done.stdout[start.end() :], re.MULTILINE)
    assert {name: grouped.count(name) for name in set(grouped)} == {name: jobs[name] for name in measured}
    assert len(re.findall(r"gpu=1", done.stdout)) == len(grouped)


def test_kubernetes_job_has_what_a_release_needs() -> None:
    job = yaml.safe_load((ROOT / "workflow/kubernetes/release.yaml").read_text(encoding="utf-8"))
    assert (job["apiVersion"], job["kind"]) == ("batch/v1", "Job")
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    profile = re.search(r'ARGS="--profile (\S+)"', container["args"][0])
    assert profile
    assert (ROOT / profile.group(1) / "config.yaml").is_file()
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "1"
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounts.keys() == {volume["name"] for volume in pod["volumes"]}
    state = {item["name"]: item["value"] for item in container["env"]}["ATTEST_STATE"]
    # Keys of the private instance are refused inside a work tree.
    assert not state.startswith(container["workingDir"])
    assert state.startswith(mounts["workspace"])


def test_gpu_is_found_by_compute_capability(snakemake: Run, tmp_path: Path) -> None:
    for capability, profile in (("9.0", "h200"), ("12.0", "rtx5090")):
        folder = tmp_path / capability
        folder.mkdir()
        tool = folder / "nvidia-smi"
        tool.write_text(f"#!/bin/sh\necho 'NVIDIA Test, {capability}'\n")
        tool.chmod(0o755)
        done = snakemake("release", "-n", PATH=f"{folder}:/usr/bin:/bin")
        assert f"profile {profile} (NVIDIA Test, compute capability {capability})" in done.stdout
    tool.write_text("#!/bin/sh\necho 'NVIDIA Old, 7.5'\n")
    done = snakemake("release", "-n", PATH=f"{folder}:/usr/bin:/bin")
    assert done.returncode != 0
    assert "no profile is made for NVIDIA Old" in done.stdout


def test_wrong_settings_end_at_once(snakemake: Run) -> None:
    done = snakemake("release", "-n", "--config", "bloks=3")
    assert done.returncode != 0
    assert "unknown key 'bloks': did you mean 'blocks'?" in done.stdout
    done = snakemake("release", "-n", "--config", "scale=cpus")
    assert done.returncode != 0
    assert "unknown scale 'cpus'" in done.stdout


def test_missing_model_stops_before_any_server(snakemake: Run) -> None:
    model = "{name: m, source: {folder: nowhere/at-all}, dtype: bfloat16}"
    done = snakemake(
        "smoke", "--until", "model", "--config", f"models=[{model}]", "checks=[]", "--retries", "0", timeout_s=180
    )
    assert done.returncode != 0
    assert "nowhere/at-all does not exist: put the checkpoint there" in done.stdout


def test_finished_cells_stay_finished_whatever_is_made_anew(checkout: Path, snakemake: Run) -> None:
    """Environment records present, renewed or gone: a measured cell is not measured again, a missing one always is."""
    planned = snakemake("smoke", "-n", "--config", "profile=cpu").stdout
    made = sorted(set(re.findall(r"results/\S+?/result\.json", planned)))
    total = counts(planned)["sweep"] + counts(planned)["arrivals"]
    assert len(made) == total > 2
    finished = checkout / made[0]
    finished.parent.mkdir(parents=True)
    finished.write_text("{}")

    def left() -> int:
        jobs = counts(snakemake("smoke", "-n", "--config", "profile=cpu").stdout)
        assert jobs["report"] == jobs["verdict"] == jobs["smoke"] == 1
        return jobs["sweep"] + jobs["arrivals"]

    assert left() == total - 1
    records = sorted(set(re.findall(r"results/environments/\S+?\.json", planned)))
    assert len(records) == 3
    for record in records:
        (checkout / record).parent.mkdir(parents=True, exist_ok=True)
        (checkout / record).write_text("{}")
    assert left() == total - 1
    (checkout / records[0]).unlink()
    assert left() == total - 1
