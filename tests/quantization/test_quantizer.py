"""The quantizer: what it writes, that a kill costs at most a file, that memory does not grow with the checkpoint."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from sparkinfer_models.real_shapes import shape_config

from sparkinfer import cli
from sparkinfer.errors import CheckpointError, ConfigError, EnvironmentProblem
from sparkinfer.models import safetensors_file
from sparkinfer.models.config import load_config, parse_config
from sparkinfer.models.loader import SafetensorsSource
from sparkinfer.models.tensors import Role, language_tensors
from sparkinfer.quantization import quantizer
from sparkinfer.quantization.choices import Choices
from sparkinfer.quantization.cli import parse_rule
from sparkinfer.quantization.dequantise import dequantise_checkpoint
from sparkinfer.quantization.quantizer import Options, Quantizer
from sparkinfer.quantization.schemes import Format

ROOT = Path(__file__).resolve().parents[2]


def all_tensors(folder):
    return {name: value for path in sorted(folder.glob("*.safetensors")) for name, value in load_file(path).items()}


def digests(folder):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


@pytest.mark.parametrize("shape", ["toy-dense", "toy-moe"])
@pytest.mark.parametrize("kind", ["nvfp4", "fp8"])
def test_round_trip(source, quantise, tmp_path, shape, kind):
    folder = source(shape)
    result = quantise(folder, tmp_path / "q", kind)
    assert result.modules[kind] > 15
    assert result.bytes < 0.9 * result.source_bytes
    before, config = all_tensors(folder), load_config(tmp_path / "q")
    after = SafetensorsSource(tmp_path / "q", config)
    for spec in language_tensors(config):
        value, parts = after.get(spec.name, spec.shape), after.quantised(spec.name, spec.shape)
        kept = spec.role is not Role.LINEAR or spec.module.endswith(("lm_head", "in_proj_a", "in_proj_b"))
        assert (parts is None) == kept, spec.name
        if parts is None:
            assert torch.equal(value, before[spec.name])
        else:
            error = (value.float() - before[spec.name].float()).norm() / before[spec.name].float().norm()
            assert 0.001 < float(error) < (0.09 if kind == "nvfp4" else 0.03)
    after.finish()
    assert (tmp_path / "q" / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()


def test_fused_layers_share_their_scales(source, quantise, tmp_path):
    quantise(source("toy-moe"), tmp_path / "q")
    tensors = all_tensors(tmp_path / "q")
    groups = [
        ["model.layers.3.self_attn." + name for name in ("q_proj", "k_proj", "v_proj")],
        ["model.layers.0.linear_attn." + name for name in ("in_proj_qkv", "in_proj_z")],
        ["model.layers.1.mlp.experts.5." + name for name in ("gate_proj", "up_proj")],
        ["model.layers.1.mlp.shared_expert." + name for name in ("gate_proj", "up_proj")],
    ]
    for group in groups:
        for part in ("weight_scale_2", "input_scale"):
            assert len({float(tensors[f"{module}.{part}"]) for module in group}) == 1
    # vLLM takes the largest input scale of all experts: they are the same.
    for name in ("gate_proj", "down_proj"):
        assert len({float(tensors[f"model.layers.1.mlp.experts.{e}.{name}.input_scale"]) for e in range(16)}) == 1


def test_groups_of_rows_do_not_change_the_result(source, quantise, tmp_path):
    for kind in ("nvfp4", "fp8"):
        quantise(source(), tmp_path / f"{kind}-whole", kind, rules=(("lm_head", Format.NVFP4),))
        quantise(source(), tmp_path / f"{kind}-rows", kind, rules=(("lm_head", Format.NVFP4),), elements=1 << 15)
        assert digests(tmp_path / f"{kind}-whole") == digests(tmp_path / f"{kind}-rows")


def test_shards_hold_the_same_as_one_file(source, quantise, tmp_path):
    quantise(source(), tmp_path / "one")
    quantise(source(shard_bytes=1 << 20), tmp_path / "many", shard_bytes=1 << 18)
    one, many = all_tensors(tmp_path / "one"), all_tensors(tmp_path / "many")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 5
    assert one.keys() == many.keys()
    assert all(
        torch.equal(one[name].view(torch.uint8), many[name].view(torch.uint8)) for name in one if one[name].dim()
    )
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(one)


def fuse_experts(folder, target):
    shutil.copytree(folder, target)
    tensors = all_tensors(target)
    for layer in range(4):
        prefix = f"model.layers.{layer}.mlp.experts."
        parts = [[tensors.pop(f"{prefix}{e}.{p}_proj.weight") for e in range(16)] for p in ("gate", "up", "down")]
        gate, up, down = (torch.stack(part) for part in parts)
        tensors[f"{prefix}gate_up_proj"], tensors[f"{prefix}down_proj"] = torch.cat([gate, up], 1), down
    save_file(tensors, target / "model.safetensors")


def test_fused_experts_give_the_same(source, quantise, tmp_path):
    fuse_experts(source("toy-moe"), tmp_path / "fused")
    for kind in ("nvfp4", "fp8"):
        quantise(source("toy-moe"), tmp_path / f"{kind}-1", kind)
        quantise(tmp_path / "fused", tmp_path / f"{kind}-2", kind)
        one, two = all_tensors(tmp_path / f"{kind}-1"), all_tensors(tmp_path / f"{kind}-2")
        assert one.keys() == two.keys()
        assert all(torch.equal(one[name].float(), two[name].float()) for name in one)


def test_multimodal_source_keeps_its_names_and_its_other_parts(source, multimodal, quantise, text, tmp_path, capsys):
    folder = multimodal()
    arguments = ["--format", "nvfp4", "--calibration", str(text), "--calibration-tokens", "512"]
    assert cli.main(["quantize", str(folder), str(tmp_path / "q"), *arguments]) == 0
    said = "note: only the language model is quantised: 11 other tensors (mtp, visual) are copied as they are"
    assert said in capsys.readouterr().err
    before, written = all_tensors(folder), all_tensors(tmp_path / "q")
    assert torch.equal(
        written["model.visual.blocks.0.attn.qkv.weight"], before["model.visual.blocks.0.attn.qkv.weight"]
    )
    assert written["mtp.fc.weight"].dtype == torch.bfloat16
    assert "model.language_model.layers.0.mlp.up_proj.weight_scale_2" in written
    assert {"model.visual*", "mtp*", "model.language_model.layers.0.linear_attn.in_proj_a"} <= set(kept(tmp_path / "q"))
    quantise(source(), tmp_path / "plain")
    one = SafetensorsSource(tmp_path / "q", load_config(tmp_path / "q"))
    two = SafetensorsSource(tmp_path / "plain", load_config(tmp_path / "plain"))
    name, shape = "model.layers.3.self_attn.q_proj.weight", (1024, 256)
    assert torch.equal(one.get(name, shape), two.get(name, shape))


def kept(folder):
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    return config.get("ignore") or config["modules_to_not_convert"]


def test_an_fp8_list_holds_every_copied_layer_by_its_whole_name(multimodal, quantise, tmp_path):
    quantise(multimodal(), tmp_path / "q", "fp8")
    assert kept(tmp_path / "q")[-8:] == [
        "model.visual.blocks.0.attn.qkv",
        "model.visual.merger.linear_fc1",
        "mtp.fc",
        "mtp.layers.0.mlp.experts",
        "mtp.layers.0.mlp.shared_expert.down_proj",
        *(f"mtp.layers.0.self_attn.{name}_proj" for name in "kqv"),
    ]


def test_a_text_only_source_lists_the_other_parts_that_it_has(source, quantise, tmp_path):
    folder = changed(source(), tmp_path / "mtp", {"mtp.fc.weight": torch.ones(4, 16)})
    quantise(folder, tmp_path / "nvfp4")
    quantise(folder, tmp_path / "fp8", "fp8")
    assert kept(tmp_path / "nvfp4")[-1] == "mtp*"
    assert kept(tmp_path / "fp8")[-1] == "mtp.fc"
    quantise(source(), tmp_path / "plain")
    assert "mtp*" not in kept(tmp_path / "plain")


def changed(folder, target, tensors):
    """A copy with some tensors put in, or left out (None)."""
    shutil.copytree(folder, target)
    found = {name: value for name, value in {**all_tensors(target), **tensors}.items() if value is not None}
    save_file(found, target / "model.safetensors")
    return target


def test_tied_embeddings_stay_one_tensor_in_16_bits(source, quantise, tmp_path):
    folder = source(tie_word_embeddings=True)
    quantise(folder, tmp_path / "q")
    before, after = all_tensors(folder), all_tensors(tmp_path / "q")
    assert not [name for name in [*before, *after] if name.startswith("lm_head")]
    assert torch.equal(after["model.embed_tokens.weight"], before["model.embed_tokens.weight"])
    config = load_config(tmp_path / "q")
    found = SafetensorsSource(tmp_path / "q", config)
    for spec in language_tensors(config):
        found.get(spec.name, spec.shape)
    found.finish()
    with pytest.raises(ConfigError, match="'lm_head' matches no linear layer"):
        quantise(folder, tmp_path / "head", rules=(("lm_head", Format.NVFP4),))


def test_mixed_formats(source, quantise, tmp_path):
    rules = (("self_attn", Format.FP8), ("mlp.shared_expert", None), ("lm_head", Format.NVFP4))
    result = quantise(source("toy-moe"), tmp_path / "q", rules=rules)
    assert set(result.modules) == {"nvfp4", "fp8", "kept"}
    config = json.loads((tmp_path / "q" / "config.json").read_text())["quantization_config"]
    assert config["quant_algo"] == "MIXED_PRECISION"
    assert config["quantized_layers"]["model.layers.0.mlp.experts"]["quant_algo"] == "NVFP4"
    dequantise_checkpoint(tmp_path / "q", tmp_path / "plain")
    before, after = all_tensors(source("toy-moe")), all_tensors(tmp_path / "plain")
    assert before.keys() == after.keys()
    for name, limit in (("lm_head", 0.09), ("model.layers.3.self_attn.o_proj", 0.03)):
        value, reference = after[f"{name}.weight"].float(), before[f"{name}.weight"].float()
        assert 0 < float((value - reference).norm() / reference.norm()) < limit
    assert torch.equal(
        after["model.layers.0.mlp.shared_expert.up_proj.weight"],
        before["model.layers.0.mlp.shared_expert.up_proj.weight"],
    )


def test_dequantised_form_is_what_the_loader_gives(source, quantise, tmp_path):
    quantise(source("toy-moe"), tmp_path / "q", "fp8")
    dequantise_checkpoint(tmp_path / "q", tmp_path / "plain", shard_bytes=1 << 20)
    config = load_config(tmp_path / "q")
    one, two = (
        SafetensorsSource(tmp_path / "q", config),
        SafetensorsSource(tmp_path / "plain", load_config(tmp_path / "plain")),
    )
    for spec in language_tensors(config):
        assert torch.equal(one.get(spec.name, spec.shape), two.get(spec.name, spec.shape))
    with pytest.raises(CheckpointError, match="is not quantised"):
        dequantise_checkpoint(tmp_path / "plain", tmp_path / "again")
    with pytest.raises(ConfigError, match="not empty"):
        dequantise_checkpoint(tmp_path / "q", tmp_path / "plain")


def test_what_is_refused(source, quantise, tmp_path):
    folder = source()
    quantise(folder, tmp_path / "q")
    with pytest.raises(CheckpointError, match=r"is quantised already \(modelopt NVFP4\)"):
        quantise(tmp_path / "q", tmp_path / "qq")
    with pytest.raises(ConfigError, match="exists and is not empty"):
        quantise(folder, tmp_path / "q")
    with pytest.raises(ConfigError, match="is the source"):
        quantise(folder, folder)
    with pytest.raises(ConfigError, match="no layer is left"):
        quantise(folder, tmp_path / "none", rules=(("*", None),))
    (tmp_path / "short.txt").write_text("w1 w2")
    with pytest.raises(ConfigError, match="fewer than one sequence"):
        quantise(folder, tmp_path / "short", calibration=(tmp_path / "short.txt",))
    with pytest.raises(ConfigError, match="cannot be read"):
        quantise(folder, tmp_path / "absent", calibration=(tmp_path / "absent.txt",))
    for rule in ("lm_head", "=fp8", "lm_head=int4"):
        with pytest.raises(ConfigError, match="expected PATTERN=FORMAT"):
            parse_rule(rule)


@pytest.mark.parametrize("kind", ["nvfp4", "fp8"])
def test_nan_is_refused_with_the_tensor_and_leaves_no_half_file(source, quantise, tmp_path, kind):
    folder = tmp_path / "bad"
    shutil.copytree(source(), folder)
    tensors = all_tensors(folder)
    tensors["model.layers.2.mlp.up_proj.weight"][5, 7] = float("nan")
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.layers\.2\.mlp\.up_proj"):
        quantise(folder, tmp_path / "q", kind)
    assert not list((tmp_path / "q").glob("*.safetensors*"))
    assert not (tmp_path / "q" / "config.json").exists()


def command(folder, target, text, *more):
    return [
        *(sys.executable, "-m", "sparkinfer.cli", "quantize", str(folder), str(target), "--format", "nvfp4"),
        *("--calibration", str(text), "--calibration-tokens", "512", "--shard-mib", "1", *more),
    ]


def environment():
    path = os.pathsep.join(str(ROOT / part) for part in (".", "kernels"))
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


def test_killed_run_is_taken_up_again(source, text, tmp_path):
    folder = source(num_hidden_layers=24, layer_types=None)
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    subprocess.run(command(folder, whole, text), env=environment(), check=True, capture_output=True)
    process = subprocess.Popen(command(folder, killed, text), env=environment(), stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while len(list(killed.glob("*.safetensors"))) < 2:
        assert process.poll() is None, "it was done before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.wait()
    finished = {path.name: path.stat().st_mtime_ns for path in killed.glob("*.safetensors")}
    total = len(list(whole.glob("*.safetensors")))
    assert 2 <= len(finished) < total
    assert not (killed / "config.json").exists()
    with pytest.raises(ConfigError, match="unfinished run with other options"):
        Quantizer(folder, killed, Options(format=Format.FP8)).run()
    done = subprocess.run(command(folder, killed, text), env=environment(), check=True, capture_output=True, text=True)
    assert f"taken up again: {len(finished)} files" in done.stderr
    assert {name: (killed / name).stat().st_mtime_ns for name in finished} == finished
    assert digests(killed) == digests(whole)


class Screen(io.StringIO):
    def isatty(self):
        return True


def test_a_bar_shows_the_progress_on_a_screen(source, text, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "stderr", Screen())
    arguments = ["--format", "nvfp4", "--calibration", str(text), "--calibration-tokens", "512", "--shard-mib", "1"]
    assert cli.main(["quantize", str(source()), str(tmp_path / "q"), *arguments]) == 0
    shown = sys.stderr.getvalue()
    assert re.search(r"calibrating: 100%.* 4/4 ", shown)
    assert re.search(r"quantising: 100%", shown)


def test_one_run_at_a_time_in_a_folder(source, quantise, tmp_path):
    (tmp_path / "q").mkdir()
    folder = os.open(tmp_path / "q", os.O_RDONLY)
    fcntl.flock(folder, fcntl.LOCK_EX)
    with pytest.raises(ConfigError, match="another run writes to"):
        quantise(source(), tmp_path / "q", "fp8")
    os.close(folder)
    quantise(source(), tmp_path / "q", "fp8")


def test_a_folder_that_cannot_be_written(source, quantise, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    with pytest.raises(EnvironmentProblem, match=r"file.* cannot be written \(Not a directory\)"):
        quantise(source(), tmp_path / "file" / "q", "fp8")

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(safetensors_file, "_write_all", full)
        with pytest.raises(EnvironmentProblem, match="No space left on device"):
            quantise(source(), tmp_path / "q", "fp8")
    assert not list((tmp_path / "q").glob("*.part"))
    # The same command goes on once there is room.
    quantise(source(), tmp_path / "q", "fp8")


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_a_run_is_not_taken_up_with_another_model_s_files(source, text, tmp_path, name):
    folder = tmp_path / "source"
    shutil.copytree(source(), folder)
    options = Options(format=Format.FP8)
    Quantizer(folder, tmp_path / "q", options)._prepare_target()
    (folder / name).write_text((folder / name).read_text() + "\n")
    with pytest.raises(ConfigError, match="unfinished run with other options"):
        Quantizer(folder, tmp_path / "q", options).run()


def test_a_run_is_not_taken_up_by_another_program(source, tmp_path, monkeypatch):
    Quantizer(source(), tmp_path / "q", Options(format=Format.FP8))._prepare_target()
    monkeypatch.setattr(quantizer, "source_digest", lambda: "sha256:0")
    with pytest.raises(ConfigError, match="another version of this program"):
        Quantizer(source(), tmp_path / "q", Options(format=Format.FP8)).run()


def test_inputs_that_are_not_finite_are_refused_by_module(source, quantise, tmp_path):
    folder = tmp_path / "bad"
    shutil.copytree(source(), folder)
    tensors = all_tensors(folder)
    tensors["model.layers.2.input_layernorm.weight"][3] = float("inf")
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.layers\.2\.linear_attn\.in_proj_qkv: its inputs are NaN"):
        quantise(folder, tmp_path / "q")
    saved = sorted(path.name for path in (tmp_path / "q" / ".quantize").glob("calibration-0*"))
    assert saved == ["calibration-000.safetensors", "calibration-001.safetensors"]


NORM, HEAD = "model.norm.weight", "lm_head.weight"


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({NORM: None}, r"tensor model\.norm\.weight is missing"),
        ({NORM: torch.ones(3)}, r"tensor model\.norm\.weight has shape \[3\]"),
        ({HEAD: torch.ones(512, 256, dtype=torch.uint8)}, r"tensor lm_head\.weight has dtype U8"),
        ({"model.layers.0.foo": torch.ones(3)}, r"tensor model\.layers\.0\.foo has no place"),
        ({"model.layers.0.mlp.up_proj.weight": None}, r"tensor model\.layers\.0\.mlp\.up_proj\.weight is missing"),
    ],
)
def test_what_is_merely_copied_must_be_loadable_too(source, quantise, tmp_path, tensors, message):
    folder = changed(source(), tmp_path / "bad", tensors)
    with pytest.raises(CheckpointError, match=message):
        quantise(folder, tmp_path / "q", "fp8")
    assert not (tmp_path / "q").exists()


@pytest.mark.parametrize("name", [HEAD, "mtp.fc.weight"])
def test_nan_in_a_copied_tensor_is_refused(source, quantise, tmp_path, name):
    tensor = torch.ones(480, 256, dtype=torch.bfloat16)
    tensor[-1, -1] = float("nan")
    folder = changed(source(), tmp_path / "bad", {name: all_tensors(source()).get(name, tensor) * tensor[-1, -1]})
    with pytest.raises(CheckpointError, match=f"tensor {name} holds NaN or infinity"):
        quantise(folder, tmp_path / "q", "fp8")
    assert not list((tmp_path / "q").glob("*.safetensors*"))


def test_a_run_that_was_killed_before_its_plan(source, quantise, tmp_path):
    (tmp_path / "q" / ".quantize").mkdir(parents=True)
    (tmp_path / "q" / ".quantize" / "plan.json.part").write_text("{")
    assert quantise(source(), tmp_path / "q", "fp8").resumed == 0


def test_a_file_that_is_not_whole_is_written_again(source, tmp_path):
    options = Options(format=Format.FP8)
    Quantizer(source(), tmp_path / "whole", options).run()
    Quantizer(source(), tmp_path / "q", options)._prepare_target()
    whole = (tmp_path / "whole" / "model.safetensors").read_bytes()
    for content in (b"", whole[:-1], b"\0" * len(whole)):
        (tmp_path / "q" / "model.safetensors").write_bytes(content)
        unfinished = Quantizer(source(), tmp_path / "q", options)
        unfinished._finish = lambda: None
        assert unfinished.run().resumed == 0
    assert Quantizer(source(), tmp_path / "q", options).run().resumed == 1
    assert digests(tmp_path / "q") == digests(tmp_path / "whole")


def test_another_text_can_follow_one_that_was_too_short(source, quantise, tmp_path):
    (tmp_path / "short.txt").write_text("w1 w2")
    with pytest.raises(ConfigError, match="fewer than one sequence"):
        quantise(source(), tmp_path / "q", calibration=(tmp_path / "short.txt",))
    quantise(source(), tmp_path / "q")


def test_a_calibration_goes_on_after_its_last_layer(source, text, tmp_path):
    options = Options(format=Format.NVFP4, calibration=(text,), calibration_tokens=512)
    Quantizer(source(), tmp_path / "whole", options).run()
    done = []

    def stop(what, layer, _):
        done.append((what, layer))
        if done[-1] == ("calibrating", 2):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Quantizer(source(), tmp_path / "q", options, stop).run()
    done.clear()
    Quantizer(source(), tmp_path / "q", options, lambda what, layer, _: done.append((what, layer))).run()
    assert [layer for what, layer in done if what == "calibrating"] == [3, 4]
    assert digests(tmp_path / "q") == digests(tmp_path / "whole")


def test_no_tokenizer(source, quantise, tmp_path):
    folder = tmp_path / "bad"
    shutil.copytree(source(), folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"tokenizer\.json does not exist"):
        quantise(folder, tmp_path / "q")


def test_examples_of_the_help_can_be_given(capsys):
    with pytest.raises(SystemExit):
        cli.main(["quantize", "--help"])
    examples = re.findall(r"[\w.*?]+=(?:nvfp4|fp8|keep)", " ".join(capsys.readouterr().out.split()))
    assert len(examples) == 4
    for example in examples:
        config = parse_config(shape_config("toy-moe") | {"num_hidden_layers": 16, "layer_types": None})
        Choices(config, Format.NVFP4, [parse_rule(example)])


MEASURE = """
import sys, resource
from pathlib import Path
from sparkinfer.quantization.quantizer import Options, Quantizer
from sparkinfer.quantization.schemes import Format
import torch
torch.set_num_threads(1)
folder, target, text, kind = sys.argv[1:]
options = Options(Format(kind), calibration=(Path(text),), calibration_tokens=512, search=False, shard_bytes=8 << 20,
                  elements=1 << 19)
Quantizer(Path(folder), Path(target), options).run()
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@pytest.mark.parametrize("kind", ["nvfp4", "fp8"])
def test_memory_does_not_grow_with_the_checkpoint(source, text, tmp_path, kind):
    """Ten times the layers, in many shards: the same peak but for a few MiB of names."""
    peaks, sizes = [], []
    for number, layers in enumerate((4, 40)):
        folder = source(
            shard_bytes=8 << 20, num_hidden_layers=layers, layer_types=None, hidden_size=512, intermediate_size=1024
        )
        sizes.append(sum(path.stat().st_size for path in folder.glob("*.safetensors")) / 2**20)
        command = [sys.executable, "-c", MEASURE, str(folder), str(tmp_path / str(number)), str(text), kind]
        done = subprocess.run(command, env=environment(), check=True, capture_output=True, text=True)
        peaks.append(int(done.stdout) / 1024)
    print(f"{kind}: checkpoints of {sizes[0]:.0f} and {sizes[1]:.0f} MiB, peaks {peaks[0]:.0f} and {peaks[1]:.0f} MiB")
    assert sizes[1] - sizes[0] > 150
    assert peaks[1] - peaks[0] < 0.2 * (sizes[1] - sizes[0])
