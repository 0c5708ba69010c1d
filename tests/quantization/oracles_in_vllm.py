"""Run inside the vLLM environment: what other readers make of our checkpoints.

Usage: oracles_in_vllm.py NVFP4 FP8 MIXED [MORE ...] [--run].

Prints one line `RESULT {...}`: compressed-tensors' own unpacking of our codes, vLLM's decision for every layer of
all folders, and what vLLM says when a CPU is asked to run NVFP4 and FP8.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

os.environ.update(HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", VLLM_CPU_KVCACHE_SPACE="1", VLLM_LOGGING_LEVEL="ERROR")

import torch
from compressed_tensors.compressors.nvfp4.helpers import pack_fp4_to_uint8, unpack_fp4_from_uint8
from compressed_tensors.quantization.lifecycle.forward import dequantize
from safetensors.torch import load_file
from vllm.model_executor.layers.quantization.fp8 import Fp8Config
from vllm.model_executor.layers.quantization.modelopt import (
    ModelOptMixedPrecisionConfig,
    ModelOptNvFp4Config,
)
from vllm.model_executor.layers.quantization.utils.quant_utils import is_layer_skipped
from vllm.model_executor.models import qwen3_5

from sparkinfer.models.config import load_config
from sparkinfer.models.loader import IGNORED_PREFIXES, SafetensorsSource
from sparkinfer.models.safetensors_file import read_entries
from sparkinfer.models.tensors import Role, language_tensors


def compressed_tensors(folder: Path) -> dict[str, float]:
    """Largest difference between their unpacking and ours, and the number of matrices."""
    tensors = load_file(folder / "model.safetensors")
    source = SafetensorsSource(folder, load_config(folder))
    worst, count, repacked = 0.0, 0, True
    for name in [name for name in tensors if name.endswith(".weight_scale_2")]:
        module = name.removesuffix(".weight_scale_2")
        packed, scale = tensors[f"{module}.weight"], tensors[f"{module}.weight_scale"]
        rows, columns = packed.shape[0], packed.shape[1] * 2
        codes = unpack_fp4_from_uint8(packed, rows, columns, torch.float32)
        theirs = dequantize(
            x_q=codes, scale=scale.float(), global_scale=tensors[name].reciprocal().reshape(1), dtype=torch.float32
        )
        parts = source.quantised(f"{module}.weight")
        worst = max(worst, float((theirs - parts.dequantise()).abs().max() / theirs.abs().max()))
        repacked = repacked and torch.equal(pack_fp4_to_uint8(codes), packed)
        count += 1
    return {"worst": worst, "count": count, "repacked": repacked}


def fused_name(module: str, mapping: dict[str, list[str]]) -> str:
    """The layer under which vLLM runs a module."""
    if ".experts." in module:
        return module.partition(".experts.")[0] + ".experts"
    parent, _, name = module.rpartition(".")
    for fused, members in mapping.items():
        if name in members:
            return f"{parent}.{fused}" if parent else fused
    return module


def decisions(folder: Path) -> dict[str, object]:
    """Modules for which vLLM decides otherwise than our loader."""
    config, whole = load_config(folder), json.loads((folder / "config.json").read_text())
    model, data = getattr(qwen3_5, whole["architectures"][0]), whole["quantization_config"]
    algorithm = data.get("quant_algo")
    kind = {"NVFP4": ModelOptNvFp4Config, "MIXED_PRECISION": ModelOptMixedPrecisionConfig}.get(algorithm, Fp8Config)
    theirs = kind.from_config(data)
    fused = theirs.packed_modules_mapping = model.packed_modules_mapping
    mapper = model.hf_to_vllm_mapper.get_rename_mapper()
    theirs.apply_vllm_mapper(mapper)
    stored = SafetensorsSource(folder, config).stored
    # vLLM runs routers without a quantization config whatever the list says.
    linear = [spec.module for spec in language_tensors(config) if spec.role is Role.LINEAR]
    schemes = {stored(f"{module}.weight"): config.quantization.scheme_of(module) for module in linear}
    others = {
        name: None
        for name, entry in read_entries(folder).items()
        if name.startswith(IGNORED_PREFIXES) and len(entry.shape) == 2
    }
    wrong = []
    count = 0
    for name, scheme in {**schemes, **others}.items():
        layer = fused_name(mapper.apply_list([name])[0].removesuffix(".weight"), fused)
        if algorithm == "MIXED_PRECISION":
            found = None if theirs.is_layer_excluded(layer) else theirs._resolve_quant_algo(layer)
            same = {None: None, "NVFP4": "nvfp4", "FP8_PB_WO": "fp8"}[found] == (scheme and scheme.format.value)
        elif algorithm == "NVFP4":
            same = theirs.is_layer_excluded(layer) == (scheme is None)
        else:
            skipped = layer.endswith("lm_head") or is_layer_skipped(layer, theirs.ignored_layers, fused)
            same = skipped == (scheme is None)
        count += 1
        if not same:
            wrong.append(layer)
    return {"count": count, "others": len(others), "wrong": wrong[:10]}


def on_a_cpu(folder: Path) -> str:
    """What vLLM's CPU build answers."""
    from vllm import LLM

    try:
        LLM(str(folder), enforce_eager=True, max_model_len=128, disable_log_stats=True)
    except (RuntimeError, ValueError, NotImplementedError, AssertionError, AttributeError, KeyError) as error:
        return f"{type(error).__name__}: {error}"
    return "runs"


def main() -> None:
    """Everything, as one line."""
    folders = [Path(name) for name in sys.argv[1:] if name != "--run"]
    nvfp4, fp8 = folders[:2]
    result: dict[str, object] = {
        "compressed_tensors": compressed_tensors(nvfp4),
        "decisions": {str(folder.name): decisions(folder) for folder in folders},
    }
    if "--run" in sys.argv:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        result["cpu"] = {str(folder.name): on_a_cpu(folder) for folder in (nvfp4, fp8)}
    print("RESULT " + json.dumps(result))


if __name__ == "__main__":
    main()
