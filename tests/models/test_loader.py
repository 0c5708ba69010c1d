"""Configs and weight files: what is accepted, and what is refused by name."""

from __future__ import annotations

import json
import logging
import re
import shutil
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from sparkinfer.errors import CheckpointError
from sparkinfer.models.config import load_config, parse_config
from sparkinfer.models.loader import open_source
from sparkinfer.models.safetensors_file import read_entries


@pytest.fixture
def copy(checkpoint, tmp_path):
    """A private copy of a checkpoint, to be damaged."""

    def make(name="dense"):
        folder, _ = checkpoint(name)
        shutil.copytree(folder, tmp_path / name)
        return tmp_path / name

    return make


def edit_config(folder, **changes):
    data = json.loads((folder / "config.json").read_text())
    for key, value in changes.items():
        data.pop(key, None) if value is ... else data.__setitem__(key, value)
    (folder / "config.json").write_text(json.dumps(data))


def edit_tensors(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def shard(folder):
    """Split the single file into two with an index."""
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    parts = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, members in parts.items():
        save_file({name: tensors[name] for name in members}, folder / file)
    weight_map = {name: file for file, members in parts.items() for name in members}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "model.safetensors").unlink()
    return parts


def logits(make_driver, folder, prompt, **settings):
    driver = make_driver(folder, **settings)
    return driver.logits([driver.row(driver.add(prompt(40, 1)))])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "architectures"),
        ({"architectures": ...}, "architectures"),
        ({"hidden_size": ...}, "`hidden_size` is missing"),
        ({"hidden_size": "48"}, "`hidden_size` is '48'"),
        ({"num_hidden_layers": 0}, "`num_hidden_layers` is 0"),
        ({"layer_types": ["linear_attention"]}, "`layer_types` must list"),
        ({"layer_types": ["sliding_attention"] * 4}, "sliding_attention"),
        ({"num_attention_heads": 5}, "`num_attention_heads` is 5"),
        ({"linear_num_value_heads": 3}, "`linear_num_value_heads` is 3"),
        ({"attention_bias": True}, "`attention_bias` is True"),
        ({"hidden_act": "gelu"}, "`hidden_act` is 'gelu'"),
        ({"rms_norm_eps": -1}, "`rms_norm_eps` is -1"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "yarn"),
        ({"rope_parameters": {"partial_rotary_factor": 0.1}}, "`partial_rotary_factor`"),
        ({"eos_token_id": "stop"}, "`eos_token_id`"),
        ({"dtype": "float8"}, "`dtype` is 'float8'"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
    ],
)
def test_bad_config_names_the_field(copy, changes, message):
    folder = copy()
    edit_config(folder, **changes)
    with pytest.raises(CheckpointError, match=message):
        load_config(folder)


@pytest.mark.parametrize("multimodal", [False, True])
def test_an_unknown_quantisation_names_a_tensor_that_cannot_be_read(copy, multimodal):
    folder = copy()
    edit_config(folder, quantization_config={"quant_method": "awq"})
    name = "model.layers.0.linear_attn.in_proj_qkv.weight"
    assert name in load_file(folder / "model.safetensors")
    if multimodal:
        data = json.loads((folder / "config.json").read_text())
        data.pop("architectures")
        outer = {"architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": data}
        (folder / "config.json").write_text(json.dumps(outer))
        name = name.replace("model.", "model.language_model.", 1)
    with pytest.raises(CheckpointError, match=rf"quant_method 'awq' is not supported.* tensor {re.escape(name)} "):
        load_config(folder)


def test_config_defaults_of_published_checkpoints():
    """The fields of a published multimodal MoE config: a nested text part, mrope, no layer_types."""
    text = {
        "hidden_size": 2048,
        "num_hidden_layers": 40,
        "full_attention_interval": 4,
        "vocab_size": 248320,
        "max_position_embeddings": 262144,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "attn_output_gate": True,
        "mamba_ssm_dtype": "float32",
        "eos_token_id": 248044,
        "dtype": "bfloat16",
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
            "rope_type": "default",
            "rope_theta": 10000000,
            "partial_rotary_factor": 0.25,
        },
    }
    data = {"architectures": ["Qwen3_5MoeForConditionalGeneration"], "text_config": text, "vision_config": {}}
    config = parse_config(data, generation={"eos_token_id": [248046, 248044]})
    assert (config.num_full_layers, config.num_linear_layers) == (10, 30)
    assert config.layer_types[3] == config.layer_types[39] == "full_attention"
    assert (config.rotary_dim, config.rope_theta) == (64, 1e7)
    assert config.eos_token_ids == (248046, 248044)
    assert config.multimodal
    assert not config.tie_word_embeddings


@pytest.mark.parametrize("text", ["[" * 200_000, '{"a": ' + "1" * 5000 + "}"])
def test_config_that_no_parser_takes(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match="cannot be read as JSON"):
        load_config(tmp_path)


@pytest.mark.parametrize("value", [[[]], [{}], [None]])
def test_an_architecture_that_is_no_name(copy, value):
    folder = copy()
    data = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**data, "architectures": value}))
    with pytest.raises(CheckpointError, match="`architectures` is"):
        load_config(folder)


def test_missing_or_malformed_config(tmp_path):
    with pytest.raises(CheckpointError, match="does not exist"):
        load_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="cannot be read as JSON"):
        load_config(tmp_path)


def test_shards_give_the_same_logits(checkpoint, copy, make_driver, prompt):
    folder = copy()
    shard(folder)
    assert torch.equal(logits(make_driver, folder, prompt), logits(make_driver, checkpoint("dense")[0], prompt))


def test_missing_shard_is_refused_with_a_tensor(copy, make_driver):
    folder = copy()
    parts = shard(folder)
    file, members = next(iter(parts.items()))
    (folder / file).unlink()
    with pytest.raises(CheckpointError, match=rf"{file} does not exist.*{members[0]}"):
        make_driver(folder)


def test_no_weights_at_all(copy, make_driver):
    folder = copy()
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=rf"neither model\.safetensors nor .*: tensor {EMBEDDING} cannot"):
        make_driver(folder)


NORM = "model.layers.1.input_layernorm.weight"
DOWN = "model.layers.1.mlp.down_proj.weight"
EMBEDDING = "model.embed_tokens.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(NORM), f"{NORM} is missing"),
        (lambda t: t.update({NORM: torch.zeros(7)}), rf"{NORM} has shape \[7\], but config.json calls for \[48\]"),
        (lambda t: t.update({NORM: torch.zeros(48, dtype=torch.int8)}), f"{NORM} has dtype I8"),
        (
            lambda t: t.update({DOWN: t[DOWN].half()}),
            f"{DOWN} has dtype F16, expected F32, since config.json names the dtype float32: the file is damaged",
        ),
        (lambda t: t.update({"model.layers.9.extra": torch.zeros(2)}), r"model\.layers\.9\.extra has no place"),
        (lambda t: t.update({"lm_head.bias": torch.zeros(2)}), r"lm_head\.bias has no place"),
        (lambda t: t.update({"lm_head.weight_scale_inv": torch.zeros(2, 2)}), r"lm_head\.weight_scale_inv has no pl"),
    ],
)
def test_wrong_tensors_are_refused_by_name(copy, make_driver, change, message):
    folder = copy()
    edit_tensors(folder, change)
    with pytest.raises(CheckpointError, match=message):
        make_driver(folder)


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("own", [torch.bfloat16, torch.float16, torch.float32])
def test_only_the_checkpoint_s_own_16_bit_type_is_taken(copy, make_driver, prompt, own, named):
    folder = copy()
    edit_config(folder, dtype=str(own).removeprefix("torch.") if named else ...)
    # Published checkpoints have fp32 for norms and decays.
    edit_tensors(folder, lambda t: t.update({n: v.to(own) for n, v in t.items() if n != NORM and "A_log" not in n}))
    assert torch.isfinite(logits(make_driver, folder, prompt)).all()
    for other in {torch.bfloat16, torch.float16} - {own}:
        # As after one changed word of the header: the bytes stay.
        edit_tensors(folder, lambda t, other=other: t.update({DOWN: t[DOWN].to(torch.float16).view(other)}))
        if own == torch.float32 and not named:
            # The only 16-bit tensor: nothing contradicts it.
            make_driver(folder)
            continue
        with pytest.raises(
            CheckpointError, match=rf"{DOWN} has dtype B?F16, expected .*, or set `dtype` in config\.json"
        ):
            make_driver(folder)


def test_a_tied_checkpoint_may_hold_its_output_matrix(copy, make_driver):
    folder = copy()
    edit_config(folder, tie_word_embeddings=True)
    assert "lm_head.weight" in load_file(folder / "model.safetensors")
    make_driver(folder)


def test_truncated_file_is_refused_with_the_tensor(copy, make_driver):
    folder = copy()
    path = folder / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:-10])
    with pytest.raises(CheckpointError, match=r"truncated at \d+ bytes: tensor [\w.]+ is incomplete"):
        make_driver(folder)
    # No name can be read there: one that config.json calls for is given.
    path.write_bytes(data[:100])
    with pytest.raises(CheckpointError, match=rf"truncated or no .*: tensor {EMBEDDING} cannot be read"):
        make_driver(folder)
    path.write_bytes(struct.pack("<Q", 4) + b"oops")
    with pytest.raises(CheckpointError, match=rf"malformed safetensors header .*: tensor {EMBEDDING} cannot be read"):
        make_driver(folder)


@pytest.mark.parametrize("file", ["a" * 400, "a\0b", "."])
def test_a_shard_s_name_that_no_file_can_have(copy, file):
    folder = copy()
    shard(folder)
    index = folder / "model.safetensors.index.json"
    data = json.loads(index.read_text())
    data["weight_map"][NORM] = file
    index.write_text(json.dumps(data))
    with pytest.raises(CheckpointError, match=NORM):
        read_entries(folder)


def test_a_shard_that_cannot_be_opened(copy, monkeypatch):
    folder = copy()
    parts = shard(folder)
    file, members = next(iter(parts.items()))
    real = Path.open

    def closed(self, *arguments, **options):
        if self.suffix == ".safetensors":
            raise PermissionError(13, "Permission denied", str(self))
        return real(self, *arguments, **options)

    monkeypatch.setattr(Path, "open", closed)
    with pytest.raises(CheckpointError, match=rf"{file}: tensor {members[0]} cannot be read: .*Permission denied"):
        read_entries(folder)


def test_index_that_names_an_absent_tensor(copy, make_driver):
    folder = copy()
    parts = shard(folder)
    index = folder / "model.safetensors.index.json"
    data = json.loads(index.read_text())
    data["weight_map"]["model.ghost"] = next(iter(parts))
    index.write_text(json.dumps(data))
    with pytest.raises(CheckpointError, match=r"model\.ghost is missing, but the index"):
        make_driver(folder)


def test_language_part_of_a_multimodal_checkpoint(checkpoint, copy, make_driver, prompt, caplog):
    folder = copy()
    data = json.loads((folder / "config.json").read_text())
    data.pop("architectures")
    outer = {"architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": data, "vision_config": {}}
    (folder / "config.json").write_text(json.dumps(outer))

    def rename(tensors):
        for name in list(tensors):
            if name.startswith("model."):
                tensors["model.language_model." + name.removeprefix("model.")] = tensors.pop(name)
        tensors["model.visual.patch_embed.weight"] = torch.zeros(3)
        tensors["mtp.fc.weight"] = torch.zeros(3)

    edit_tensors(folder, rename)
    with caplog.at_level(logging.INFO):
        got = logits(make_driver, folder, prompt)
    assert torch.equal(got, logits(make_driver, checkpoint("dense")[0], prompt))
    assert "2 tensors not loaded (mtp, visual)" in caplog.text


def test_fused_and_single_expert_layouts_are_the_same(checkpoint, copy, make_driver, prompt):
    """transformers holds experts fused in memory; its files may have either layout."""
    folder = copy("moe")
    single = "model.layers.0.mlp.experts.0.gate_proj.weight"
    was_single = single in load_file(folder / "model.safetensors")

    def convert(tensors):
        for layer in range(4):
            prefix = f"model.layers.{layer}.mlp.experts."
            if was_single:
                parts = [
                    [tensors.pop(f"{prefix}{e}.{p}_proj.weight") for e in range(7)] for p in ("gate", "up", "down")
                ]
                gate, up, down = (torch.stack(part) for part in parts)
                tensors[f"{prefix}gate_up_proj"] = torch.cat([gate, up], dim=1).contiguous()
                tensors[f"{prefix}down_proj"] = down
            else:
                fused, down = tensors.pop(f"{prefix}gate_up_proj"), tensors.pop(f"{prefix}down_proj")
                for e in range(7):
                    gate, up = fused[e].chunk(2)
                    for name, value in (("gate", gate), ("up", up), ("down", down[e])):
                        tensors[f"{prefix}{e}.{name}_proj.weight"] = value.clone()

    edit_tensors(folder, convert)
    assert torch.equal(logits(make_driver, folder, prompt), logits(make_driver, checkpoint("moe")[0], prompt))


def test_dummy_weights_are_seeded_and_finite(checkpoint, copy, make_driver, prompt):
    folder = copy("moe")
    (folder / "model.safetensors").unlink()
    first = logits(make_driver, folder, prompt, load_format="dummy", seed=3)
    assert torch.isfinite(first).all()
    assert torch.equal(first, logits(make_driver, folder, prompt, load_format="dummy", seed=3))
    assert not torch.equal(first, logits(make_driver, folder, prompt, load_format="dummy", seed=4))


def test_unknown_load_format(checkpoint):
    folder, _ = checkpoint("dense")
    with pytest.raises(CheckpointError, match="load format 'gguf'"):
        open_source(folder, load_config(folder), "gguf")
