"""Names, patterns and `quantization_config`: which module is stored how."""

from __future__ import annotations

import pytest
from sparkinfer_models.real_shapes import shape_config

from sparkinfer.errors import CheckpointError, ConfigError
from sparkinfer.models.config import load_config, parse_config
from sparkinfer.models.tensors import Role, language_tensors
from sparkinfer.quantization.choices import Choices
from sparkinfer.quantization.patterns import NameList, listed, matches
from sparkinfer.quantization.schemes import (
    FP8_BLOCK,
    NVFP4,
    NVFP4_A16,
    PACKED,
    PACKED_A16,
    Format,
    parse_quantization,
)


@pytest.mark.parametrize(
    ("pattern", "module", "expected"),
    [
        ("mlp.gate", "model.layers.0.mlp.gate", True),
        ("mlp.gate", "model.layers.0.mlp.gate_up_proj", False),
        ("mlp.gate", "model.layers.0.mlp.gate_proj", False),
        ("mlp.gate", "model.layers.0.mlp.shared_expert_gate", False),
        ("gate", "model.layers.0.mlp.gate", True),
        ("layers.1", "model.layers.1.mlp.up_proj", True),
        ("layers.1", "model.layers.11.mlp.up_proj", False),
        ("layers.1?", "model.layers.11.mlp.up_proj", True),
        ("experts.*.down_proj", "model.layers.0.mlp.experts.7.down_proj", True),
        ("experts.*.down_proj", "model.layers.0.mlp.experts.7.up_proj", False),
        ("lm_head", "lm_head", True),
        ("model.layers.0.mlp.up_proj.extra", "model.layers.0.mlp.up_proj", False),
    ],
)
def test_patterns_match_whole_components(pattern, module, expected):
    assert matches(pattern, module) is expected
    if "*" not in pattern and "?" not in pattern:
        # Globs of a checkpoint's list are for the whole name, those of the command line for a component.
        assert listed(pattern, module) is expected
        assert (module in NameList([pattern])) is expected


@pytest.mark.parametrize(
    ("entry", "module", "expected"),
    [
        ("model.layers.0.linear_attn*", "model.layers.0.linear_attn.out_proj", True),
        ("model.layers.0.mlp.gate*", "model.layers.0.mlp.gate_proj", True),
        ("model.layers.0.mlp.gate*", "model.layers.0.mlp.up_proj", False),
        ("model.layers.0.linear_attn.in_proj_*", "model.layers.0.linear_attn.in_proj_qkv", True),
        ("linear_attn.in_proj_*", "model.layers.0.linear_attn.in_proj_b", True),
        ("model.layers.0.linear_attn.in_proj_*", "model.layers.0.linear_attn.out_proj", False),
        ("model.layers.1*", "model.layers.11.mlp.up_proj", True),
        ("model.layers.1.*", "model.layers.11.mlp.up_proj", False),
        ("*", "model.layers.0.mlp.up_proj", True),
        ("model.layers.0.mlp.gate*", "model.layers.0.mlp.gate", True),
        ("*lm_head*", "lm_head", True),
        ("model.visual.*", "model.visual.blocks.0", True),
        (r"re:.*mlp\.gate$", "model.layers.3.mlp.gate", True),
        (r"re:.*mlp\.gate$", "model.layers.3.mlp.gate_proj", False),
        (r"re:.*linear_attn\..*", "model.layers.3.linear_attn.out_proj", True),
    ],
)
def test_entries_of_published_lists(entry, module, expected):
    assert listed(entry, module) is expected
    assert (module in NameList([entry])) is expected


MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
WEIGHTS = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
BLOCKS = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]}


def packed(**group):
    group = {"targets": ["Linear"], "weights": WEIGHTS, "input_activations": {"num_bits": 4}, **group}
    return {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized", "config_groups": {"group_0": group}}


@pytest.mark.parametrize(
    ("config", "scheme"),
    [
        (MODELOPT, NVFP4),
        ({"quantization": {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": []}}, NVFP4),
        ({**MODELOPT, "quant_algo": "w4a16_nvfp4"}, NVFP4_A16),
        ({**MODELOPT, "config_groups": {"g": {"input_activations": None, "weights": {"group_size": 16}}}}, NVFP4_A16),
        ({"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}, FP8_BLOCK),
        (packed(), PACKED),
        (packed(input_activations=None), PACKED_A16),
        (packed(weights=BLOCKS), FP8_BLOCK),
        ({"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3"}, FP8_BLOCK),
        ({**packed(format="nvfp4-pack-quantized"), "format": "mixed-precision"}, PACKED),
        ({**packed(weights=BLOCKS), "format": "float-quantized"}, FP8_BLOCK),
        ({**packed(), "transform_config": {}, "sparsity_config": {"format": "dense", "targets": []}}, PACKED),
        ({**packed(), "transform_config": {"config_groups": {}}, "sparsity_config": {}}, PACKED),
    ],
)
def test_methods_that_are_read(config, scheme):
    found = parse_quantization(config, "config.json")
    assert found.scheme_of("model.layers.0.mlp.up_proj") is scheme
    for module in ("model.embed_tokens", "model.layers.0.mlp.gate", "model.layers.0.linear_attn.conv1d", "model.norm"):
        assert found.scheme_of(module) is None


def test_lists_decide_by_module():
    ignore = ["lm_head", "model.language_model.layers.0.mlp", r"re:.*self_attn\.o_proj"]
    found = parse_quantization({**MODELOPT, "ignore": ignore}, "config.json")
    quantised = {
        name: found.scheme_of(name) is not None
        for name in (
            "lm_head",
            "model.layers.0.mlp.up_proj",
            "model.layers.1.mlp.up_proj",
            "model.layers.3.self_attn.o_proj",
            "model.layers.3.self_attn.q_proj",
        )
    }
    assert list(quantised.values()) == [False, False, True, False, True]


def test_groups_with_names_go_before_the_class():
    config = packed()
    config["config_groups"]["group_1"] = {"targets": [r"re:.*self_attn\..*"], "weights": BLOCKS}
    found = parse_quantization(config, "config.json")
    assert found.scheme_of("model.layers.3.self_attn.q_proj") is FP8_BLOCK
    assert found.scheme_of("model.layers.3.mlp.up_proj") is PACKED


def test_mixed_precision_names_layers():
    layers = {
        "model.language_model.layers.0.mlp.experts": {"quant_algo": "NVFP4", "group_size": 16},
        "model.layers.3.self_attn.q_proj": {"quant_algo": "FP8_PB_WO"},
    }
    found = parse_quantization(
        {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}, "config.json"
    )
    assert found.scheme_of("model.layers.0.mlp.experts.5.up_proj") is NVFP4
    assert found.scheme_of("model.layers.3.self_attn.q_proj") is FP8_BLOCK
    assert found.scheme_of("model.layers.3.self_attn.k_proj") is None


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "awq"}, "quant_method 'awq' is not supported"),
        ({}, "quant_method None"),
        ([], "expected an object"),
        ({**MODELOPT, "quant_algo": "FP8"}, "quant_algo 'FP8' is not supported"),
        ({**MODELOPT, "group_size": 32}, "group_size 32"),
        ({**MODELOPT, "ignore": "lm_head"}, "`ignore` is no list"),
        ({**MODELOPT, "quant_algo": "MIXED_PRECISION"}, "needs `quantized_layers`"),
        (
            {**MODELOPT, "quant_algo": "MIXED_PRECISION", "quantized_layers": {"a.up_proj": {"quant_algo": "INT4"}}},
            "a.up_proj has quant_algo 'INT4'",
        ),
        ({**MODELOPT, "config_groups": {"g": 5}}, "config_groups.g is 5"),
        ({**MODELOPT, "ignore": ["re:("]}, r"holds '\(', no regular expression"),
        (packed(targets=["re:["]), "no regular expression"),
        ({"quant_method": "fp8"}, "weight_block_size is None"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "static"}, "activation_scheme"),
        ({"quant_method": "compressed-tensors"}, "`config_groups` is missing"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e5m2"}, "fmt is 'e5m2'; only 'e4m3'"),
        ({**MODELOPT, "config_groups": {"g": {"weights": {"num_bits": 8}}}}, r"config_groups\.g: weights of 8 bits"),
        ({**MODELOPT, "config_groups": {"g": {"weights": {"num_bits": 4, "type": "int"}}}}, "type 'int' contradict"),
        ({**packed(), "format": "dense"}, "format 'dense' is not supported"),
        (packed(format="float-quantized"), "group_0: format 'float-quantized' is not supported for NVFP4 weights"),
        ({**packed(), "transform_config": {"config_groups": {"u": {"type": "hadamard"}}}}, "transform_config is not"),
        ({**packed(), "sparsity_config": {"format": "sparse-24-bitmask"}}, "format 'sparse-24-bitmask' is not"),
        (packed(weights={**WEIGHTS, "group_size": 32}), "config_groups.group_0: weights of 4 bits"),
        (packed(weights={"num_bits": 8, "type": "int", "strategy": "channel"}), "8 bits, type 'int'"),
    ],
)
def test_what_is_not_supported_is_named(config, message):
    with pytest.raises(CheckpointError, match=message):
        parse_quantization(config, "config.json: quantization_config")


def test_legacy_file_of_modelopt(tmp_path):
    import json

    (tmp_path / "config.json").write_text(json.dumps(shape_config("toy-dense")))
    legacy = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4", "exclude_modules": ["lm_head"]}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(legacy))
    found = load_config(tmp_path).quantization
    assert found is not None
    assert found.scheme_of("model.layers.0.mlp.up_proj") is NVFP4
    assert found.scheme_of("lm_head") is None


@pytest.mark.parametrize("shape", ["toy-dense", "toy-moe"])
@pytest.mark.parametrize("multimodal", [False, True])
@pytest.mark.parametrize(
    "rules",
    [
        (),
        (("lm_head", Format.NVFP4),),
        (("self_attn", Format.FP8), ("layers.0", None)),
        (("*", Format.FP8), ("linear_attn", None)),
    ],
)
def test_written_config_is_read_back_module_by_module(shape, multimodal, rules):
    data = shape_config(shape)
    if multimodal:
        name = data["architectures"][0].replace("ForCausalLM", "ForConditionalGeneration")
        data = {"architectures": [name], "text_config": data}
    choices = Choices(parse_config(data), Format.NVFP4, rules)
    back = parse_quantization(choices.quantization_config(), "config.json")
    for spec in language_tensors(choices.config):
        scheme = back.scheme_of(spec.module)
        expected = choices.formats[spec.module] if spec.role is Role.LINEAR else None
        assert (None if scheme is None else scheme.format) is expected, spec.module


def test_choices_that_cannot_be():
    config = parse_config(shape_config("toy-moe"))
    with pytest.raises(ConfigError, match=r"'mlp\.gate' matches no linear layer"):
        Choices(config, Format.NVFP4, [("mlp.gate", None)])
    with pytest.raises(ConfigError, match=r"q_proj would be nvfp4 and .*k_proj kept"):
        Choices(config, Format.NVFP4, [("k_proj", None)])
    with pytest.raises(ConfigError, match=r"experts\.0\..* would be nvfp4 and .*experts\.3\..* kept"):
        Choices(config, Format.NVFP4, [("experts.3", None)])


def test_shapes_that_no_block_fits_are_left_and_told():
    data = {**shape_config("toy-moe"), "moe_intermediate_size": 64}
    choices = Choices(parse_config(data), Format.FP8)
    assert choices.formats["model.layers.0.mlp.experts.3.down_proj"] is None
    assert choices.formats["model.layers.0.mlp.shared_expert.up_proj"] is Format.FP8
    assert any(note.startswith("mlp.experts.0.gate_proj [64, 256]") for note in choices.notes)
