"""Quantised checkpoints: every layout is read module by module, and every damage is refused with the tensor's name."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from sparkinfer_models.random_checkpoint import write_checkpoint
from sparkinfer_models.real_shapes import shape_config

from sparkinfer.errors import CheckpointError
from sparkinfer.models.config import load_config
from sparkinfer.models.dummy import DummySource
from sparkinfer.models.loader import SafetensorsSource, open_source
from sparkinfer.models.reader import MappedReader, StreamingReader
from sparkinfer.models.safetensors_file import read_entries
from sparkinfer.models.tensors import Role, language_tensors
from sparkinfer.quantization.dequantise import dequantise_checkpoint
from sparkinfer.quantization.fp8 import Fp8BlockParts
from sparkinfer.quantization.nvfp4 import Nvfp4Parts
from sparkinfer.quantization.schemes import Format

UP = "model.layers.0.mlp.up_proj"
SHAPE = (512, 256)


@pytest.fixture(scope="session")
def written(tmp_path_factory):
    """A random checkpoint of a shape and format, written once."""
    root, made = tmp_path_factory.mktemp("quantised"), {}

    def make(shape="toy-dense", kind="nvfp4", shard_bytes=4 << 30):
        key = (shape, kind, shard_bytes)
        if key not in made:
            made[key] = root / str(len(made))
            choice = None if kind == "bf16" else Format(kind)
            write_checkpoint(made[key], shape_config(shape), choice, seed=1, threads=1, shard_bytes=shard_bytes)
        return made[key]

    return make


@pytest.fixture
def copy(written, tmp_path):
    def make(*arguments):
        folder = tmp_path / "copy"
        shutil.copytree(written(*arguments), folder)
        return folder

    return make


def edit(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def edit_config(folder, change):
    data = json.loads((folder / "config.json").read_text())
    change(data)
    (folder / "config.json").write_text(json.dumps(data))


def opened(folder):
    return SafetensorsSource(folder, load_config(folder))


def load_all(source, config):
    """All weights, as a model asks for them."""
    found = {spec.name: source.get(spec.name, spec.shape) for spec in language_tensors(config)}
    source.finish()
    return found


def as_packed(tensors):
    """ModelOpt's tensors as compressed-tensors stores them."""
    for name in [name for name in tensors if name.endswith(".weight_scale_2")]:
        module = name.removesuffix(".weight_scale_2")
        tensors[f"{module}.weight_packed"] = tensors.pop(f"{module}.weight")
        tensors[f"{module}.weight_global_scale"] = tensors.pop(name).reciprocal().reshape(1)
        tensors[f"{module}.input_global_scale"] = tensors.pop(f"{module}.input_scale").reciprocal().reshape(1)


def packed_config(data, activations=True):
    ignore = data["quantization_config"]["ignore"]
    args = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
    group = {"targets": ["Linear"], "weights": args, "input_activations": args if activations else None}
    data["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized",
        "config_groups": {"group_0": group},
        "ignore": ignore,
    }


@pytest.mark.parametrize("shape", ["toy-dense", "toy-moe"])
def test_both_nvfp4_layouts_are_the_same(written, copy, shape):
    folder = copy(shape)
    edit(folder, as_packed)
    edit_config(folder, packed_config)
    config = load_config(folder)
    one, two = load_all(opened(written(shape)), config), load_all(opened(folder), config)
    for name, value in one.items():
        # Two roundings of a reciprocal may move the scale by a unit in the last place of fp32.
        assert torch.allclose(value.float(), two[name].float(), rtol=2**-8), name
    parts = opened(folder).quantised(
        f"{UP}.weight" if shape == "toy-dense" else "model.layers.0.mlp.experts.3.up_proj.weight"
    )
    assert parts is not None
    assert float(parts.input_scale) == pytest.approx(10 / 2688)


def test_weights_only_nvfp4_needs_no_input_scale(copy):
    folder = copy()
    edit(folder, as_packed)
    edit(folder, lambda t: [t.pop(name) for name in list(t) if name.endswith("input_global_scale")])
    edit_config(folder, lambda data: packed_config(data, activations=False))
    parts = opened(folder).quantised(f"{UP}.weight", SHAPE)
    assert isinstance(parts, Nvfp4Parts)
    assert parts.input_scale is None


@pytest.mark.parametrize("kind", ["nvfp4", "fp8"])
def test_parts_and_values_agree(written, kind):
    source = opened(written("toy-dense", kind))
    parts = source.quantised(f"{UP}.weight", SHAPE)
    assert isinstance(parts, Nvfp4Parts if kind == "nvfp4" else Fp8BlockParts)
    assert parts.shape == SHAPE
    assert torch.equal(source.get(f"{UP}.weight", SHAPE), parts.dequantise(torch.bfloat16))
    assert torch.equal(source.quantised(f"{UP}.weight").dequantise(), parts.dequantise())
    assert source.quantised("lm_head.weight", (512, 256)) is None
    assert source.quantised("model.norm.weight", (256,)) is None


@pytest.mark.parametrize(("shape", "kind"), [("toy-dense", "nvfp4"), ("toy-dense", "fp8"), ("toy-moe", "nvfp4")])
def test_logits_are_those_of_the_dequantised_checkpoint(written, tmp_path, make_driver, prompt, shape, kind):
    folder = written(shape, kind)
    dequantise_checkpoint(folder, tmp_path / "plain")
    results = []
    for each in (folder, tmp_path / "plain"):
        driver = make_driver(each)
        results.append(driver.logits([driver.row(driver.add(prompt(40, 1)))]))
    assert torch.isfinite(results[0]).all()
    assert torch.equal(*results)


def test_fused_fp8_experts(written, copy):
    folder = copy("toy-moe", "fp8")

    def fuse(tensors):
        for layer in range(4):
            prefix = f"model.layers.{layer}.mlp.experts."
            for suffix, new in (("weight", ""), ("weight_scale_inv", "_scale_inv")):
                gate, up, down = (
                    torch.stack([tensors.pop(f"{prefix}{e}.{p}_proj.{suffix}").view(torch.uint8) for e in range(16)])
                    for p in ("gate", "up", "down")
                )
                dtype = torch.float8_e4m3fn if suffix == "weight" else torch.float32
                tensors[f"{prefix}gate_up_proj{new}"] = torch.cat([gate, up], 1).view(dtype)
                tensors[f"{prefix}down_proj{new}"] = down.view(dtype)

    edit(folder, fuse)
    one, two = opened(written("toy-moe", "fp8")), opened(folder)
    name = "model.layers.1.mlp.experts."
    assert two.has(f"{name}gate_up_proj")
    assert not one.has(f"{name}gate_up_proj")
    fused = two.get(f"{name}gate_up_proj", (16, 256, 256))
    for expert in (0, 15):
        parts = [one.get(f"{name}{expert}.{p}_proj.weight", (128, 256)) for p in ("gate", "up")]
        assert torch.equal(fused[expert], torch.cat(parts))


def set_value(name, index, value):
    def change(tensors):
        raw = tensors[name].view(torch.uint8) if tensors[name].dtype == torch.float8_e4m3fn else tensors[name]
        raw[index] = value

    return change


DAMAGES = [
    ("nvfp4", lambda t: t.pop(f"{UP}.weight_scale"), rf"{UP}\.weight_scale is missing, but quantization_config"),
    ("nvfp4", lambda t: t.pop(f"{UP}.weight_scale_2"), rf"{UP}\.weight_scale_2 is missing"),
    ("nvfp4", lambda t: t.pop(f"{UP}.input_scale"), rf"{UP}\.input_scale is missing"),
    ("nvfp4", lambda t: t.pop(f"{UP}.weight"), rf"{UP}\.weight is missing"),
    ("nvfp4", lambda t: t.update({f"{UP}.weight": torch.zeros(SHAPE)}), rf"{UP}\.weight has dtype F32, expected U8"),
    (
        "nvfp4",
        lambda t: t.update({f"{UP}.weight_scale": torch.ones(512, 16)}),
        rf"{UP}\.weight_scale has dtype F32, expected F8_E4M3",
    ),
    (
        "nvfp4",
        lambda t: t.update({f"{UP}.weight": t[f"{UP}.weight"][:, :-8].contiguous()}),
        rf"{UP}\.weight has shape \[512, 120\], but its module's shape and format call for \[512, 128\]",
    ),
    (
        "nvfp4",
        lambda t: t.update({f"{UP}.weight_scale": t[f"{UP}.weight_scale"][:-1].clone()}),
        rf"{UP}\.weight_scale has shape \[511, 16\]",
    ),
    (
        "nvfp4",
        lambda t: t.update({f"{UP}.weight_scale_2": torch.ones(2)}),
        rf"{UP}\.weight_scale_2 has shape \[2\]",
    ),
    ("nvfp4", set_value(f"{UP}.weight_scale", (3, 4), 0x7F), rf"{UP}\.weight_scale holds a scale that is NaN"),
    ("nvfp4", set_value(f"{UP}.weight_scale", (3, 4), 0x00), rf"{UP}\.weight_scale holds a scale"),
    ("nvfp4", set_value(f"{UP}.weight_scale", (3, 4), 0x92), rf"{UP}\.weight_scale holds a scale"),
    ("nvfp4", set_value(f"{UP}.weight_scale_2", (), float("nan")), rf"{UP}\.weight_scale_2 holds a scale"),
    ("nvfp4", set_value(f"{UP}.weight_scale_2", (), 0.0), rf"{UP}\.weight_scale_2 holds a scale"),
    ("nvfp4", set_value(f"{UP}.input_scale", (), float("inf")), rf"{UP}\.input_scale holds a scale"),
    # Finite, but not times the largest code and block scale.
    ("nvfp4", set_value(f"{UP}.weight_scale_2", (), 3e38), rf"{UP}\.weight_scale_2 holds a scale"),
    ("nvfp4", set_value(f"{UP}.input_scale", (), -1.0), rf"{UP}\.input_scale holds a scale"),
    ("fp8", lambda t: t.pop(f"{UP}.weight_scale_inv"), rf"{UP}\.weight_scale_inv is missing"),
    (
        "fp8",
        lambda t: t.update({f"{UP}.weight_scale_inv": torch.ones(4, 1)}),
        rf"{UP}\.weight_scale_inv has shape \[4, 1\], but .* \[4, 2\]",
    ),
    (
        "fp8",
        lambda t: t.update({f"{UP}.weight_scale_inv": torch.ones(4, 2, dtype=torch.float16)}),
        rf"{UP}\.weight_scale_inv has dtype F16",
    ),
    ("fp8", set_value(f"{UP}.weight_scale_inv", (1, 1), float("nan")), rf"{UP}\.weight_scale_inv holds a scale"),
    ("fp8", set_value(f"{UP}.weight_scale_inv", (1, 1), 0.0), rf"{UP}\.weight_scale_inv holds a scale"),
    ("fp8", set_value(f"{UP}.weight_scale_inv", (1, 1), 1e38), rf"{UP}\.weight_scale_inv holds a scale"),
    ("fp8", set_value(f"{UP}.weight", (511, 255), 0x7F), rf"{UP}\.weight holds NaN"),
    ("fp8", set_value(f"{UP}.weight", (0, 0), 0xFF), rf"{UP}\.weight holds NaN"),
    ("fp8", lambda t: t.update({f"{UP}.weight": torch.zeros(SHAPE)}), rf"{UP}\.weight has dtype F32, expected F8_E4M3"),
    (
        "nvfp4",
        lambda t: t.update({"lm_head.weight": torch.zeros(512, 128, dtype=torch.uint8)}),
        r"lm_head\.weight has dtype U8.*does not say that it is quantised",
    ),
    ("nvfp4", lambda t: t.update({f"{UP}.extra": torch.ones(2)}), rf"{UP}\.extra has no place"),
]


@pytest.mark.parametrize(("kind", "change", "message"), DAMAGES)
def test_damage_is_refused_with_the_tensor(copy, kind, change, message):
    folder = copy("toy-dense", kind)
    edit(folder, change)
    with pytest.raises(CheckpointError, match=message):
        load_all(opened(folder), load_config(folder))


PACKED_DAMAGES = [
    (lambda t: t.pop(f"{UP}.weight_packed"), rf"{UP}\.weight_packed is missing"),
    (lambda t: t.pop(f"{UP}.weight_scale"), rf"{UP}\.weight_scale is missing, but quantization_config"),
    (lambda t: t.pop(f"{UP}.weight_global_scale"), rf"{UP}\.weight_global_scale is missing, but quantization_config"),
    (lambda t: t.pop(f"{UP}.input_global_scale"), rf"{UP}\.input_global_scale is missing, but quantization_config"),
    (set_value(f"{UP}.weight_global_scale", 0, float("nan")), rf"{UP}\.weight_global_scale holds a scale that is NaN"),
    # Its reciprocal would be infinite.
    (set_value(f"{UP}.weight_global_scale", 0, 0.0), rf"{UP}\.weight_global_scale holds a scale"),
    (set_value(f"{UP}.weight_global_scale", 0, 1e-40), rf"{UP}\.weight_global_scale holds a scale"),
    (set_value(f"{UP}.input_global_scale", 0, 1e-37), rf"{UP}\.input_global_scale holds a scale"),
    (set_value(f"{UP}.input_global_scale", 0, float("inf")), rf"{UP}\.input_global_scale holds a scale"),
    (
        lambda t: t.update({f"{UP}.weight_packed": torch.zeros(512, 128, dtype=torch.int8)}),
        rf"{UP}\.weight_packed has dtype I8, expected U8",
    ),
    (
        lambda t: t.update({f"{UP}.weight_global_scale": torch.ones(1, dtype=torch.bfloat16)}),
        rf"{UP}\.weight_global_scale has dtype BF16, expected F32",
    ),
    (
        lambda t: t.update({f"{UP}.weight_packed": t[f"{UP}.weight_packed"][:-1].clone()}),
        rf"{UP}\.weight_packed has shape \[511, 128\]",
    ),
]


@pytest.mark.parametrize(("change", "message"), PACKED_DAMAGES)
def test_damage_of_the_packed_layout_is_refused_with_the_tensor(copy, change, message):
    folder = copy()
    edit(folder, as_packed)
    edit_config(folder, packed_config)
    load_all(opened(folder), load_config(folder))
    edit(folder, change)
    with pytest.raises(CheckpointError, match=message):
        load_all(opened(folder), load_config(folder))


def test_a_zero_scale_of_a_block_of_zeros_is_fine(copy):
    folder = copy()

    def change(tensors):
        tensors[f"{UP}.weight_scale"].view(torch.uint8)[3, 4] = 0
        tensors[f"{UP}.weight"][3, 32:40] = 0x08

    edit(folder, change)
    load_all(opened(folder), load_config(folder))


def test_index_and_shards_that_disagree(tmp_path, written):
    folder = tmp_path / "copy"
    shutil.copytree(written("toy-dense", "nvfp4", 1 << 19), folder)
    load_all(opened(folder), load_config(folder))
    index = folder / "model.safetensors.index.json"
    data = json.loads(index.read_text())
    places = list(data["weight_map"].values())
    name, file = next((name, file) for name, file in data["weight_map"].items() if places.count(file) > 1)
    for change, message in (
        (lambda m: m.pop(name), rf"{name} is here, but the index places it elsewhere"),
        (lambda m: m.__setitem__(name, "../" + file), r"outside the folder"),
        (lambda m: m.__setitem__(name, "model-00009-of-00002.safetensors"), r"does not exist"),
    ):
        changed = json.loads(json.dumps(data))
        change(changed["weight_map"])
        index.write_text(json.dumps(changed))
        with pytest.raises(CheckpointError, match=message):
            read_entries(folder)


def test_header_whose_sizes_do_not_add_up(copy):
    path = copy() / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data.replace(b'"shape":[512,128]', b'"shape":[512,127]', 1))
    with pytest.raises(CheckpointError, match=r"tensor [\w.]+ has 65536 bytes, but dtype U8 and shape \[512, 127\]"):
        read_entries(path.parent)


def test_kv_cache_scales_are_left_out(copy, caplog):
    folder = copy()
    edit(folder, lambda t: t.update({"model.layers.3.self_attn.k_proj.k_scale": torch.ones(())}))
    with caplog.at_level(logging.INFO):
        load_all(opened(folder), load_config(folder))
    assert "KV cache scales not loaded: 1;" in caplog.text
    assert "language model only" not in caplog.text


@pytest.mark.parametrize("kind", ["bf16", "nvfp4"])
def test_streamed_tensors_are_those_of_the_file(written, kind):
    """The reader of devices, on a CPU: small pieces, several threads, layers ahead."""
    folder = written("toy-moe", kind, 1 << 20)
    entries = read_entries(folder)
    order = sorted(entries.values(), key=lambda entry: entry.name)
    streaming = StreamingReader(order, torch.device("cpu"), piece=5000, readers=3)
    mapped = MappedReader()
    for entry in [*order, order[3]]:
        one, two = streaming.read(entry), mapped.read(entry)
        assert one.dtype == two.dtype
        assert one.data_ptr() % 16 == 0
        assert torch.equal(one.view(-1).view(torch.uint8), two.view(-1).view(torch.uint8))
        assert len(streaming._loading) <= 3
    streaming.close()


def test_streaming_refuses_a_file_that_shrank(copy):
    folder = copy()
    entries = read_entries(folder)
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:200000])
    last = max(entries.values(), key=lambda entry: entry.end)
    for reader in (StreamingReader(entries.values(), torch.device("cpu")), MappedReader()):
        with pytest.raises(CheckpointError, match=r"model\.safetensors.*tensor"):
            reader.read(last)
        reader.close()


@pytest.mark.parametrize(("shape", "kind"), [("toy-dense", "nvfp4"), ("toy-dense", "fp8"), ("toy-moe", "nvfp4")])
def test_dummy_weights_follow_the_config(written, shape, kind, make_driver, prompt):
    folder = written(shape, kind)
    config = load_config(folder)
    source = open_source(folder, config, "dummy", seed=5)
    assert isinstance(source, DummySource)
    real = opened(folder)
    for spec in language_tensors(config):
        parts = source.quantised(spec.name, spec.shape)
        stored = real.quantised(spec.name, spec.shape)
        assert type(parts) is type(stored), spec.name
        assert source.has(spec.name) == real.has(spec.name)
        if parts is not None and spec.role is Role.LINEAR:
            assert parts.shape == stored.shape
            assert float(parts.dequantise().std()) == pytest.approx(0.02, rel=0.05)
    driver = make_driver(folder, load_format="dummy")
    assert torch.isfinite(driver.logits([driver.row(driver.add(prompt(30, 2)))])).all()


def test_tensors_are_read_where_the_file_does_not_align_them(tmp_path):
    header = {
        "a": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]},
        "b": {"dtype": "F32", "shape": [2], "data_offsets": [3, 11]},
    }
    text = json.dumps(header).encode()
    path = Path(tmp_path / "model.safetensors")
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"abc" + torch.tensor([1.5, -2.0]).numpy().tobytes())
    entries = read_entries(tmp_path)
    for reader in (MappedReader(), StreamingReader(entries.values(), torch.device("cpu"))):
        assert reader.read(entries["b"]).tolist() == [1.5, -2.0]
        reader.close()


def header_file(folder, text):
    """A weight file with this header and 64 bytes of data."""
    data = text.encode()
    (folder / "model.safetensors").write_bytes(len(data).to_bytes(8, "little") + data + bytes(64))


def tensor(start, stop, shape="[16]"):
    return f'{{"dtype":"F16","shape":{shape},"data_offsets":[{start},{stop}]}}'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 200_000, "malformed safetensors header"),
        (f'{{"b":{tensor(0, 32, "[1e999]")}}}', "malformed safetensors header: tensor b is .* expected dtype, shape"),
        (f'{{"b":{tensor(0, 32, "[[16]]")}}}', "tensor b is "),
        (f'{{"b":{tensor(0, "1e999")}}}', "tensor b is "),
        ('{"b":{"dtype":"F16","shape":[16],"data_offsets":[1]}}', "tensor b is "),
        ('{"b":{"dtype":"F16","data_offsets":[0,32]}}', "tensor b is "),
        ('{"b":{"dtype":null,"shape":[16],"data_offsets":[0,32]}}', "tensor b is "),
        ('{"b":null}', "tensor b is None, expected"),
        (f'{{"a":{tensor(0, 32)},"a":{tensor(32, 64)}}}', "a is there twice"),
        (f'{{"a":{tensor(0, 32)},"b":{tensor(16, 48)}}}', "tensors a and b share bytes"),
    ],
)
def test_headers_that_mislead(tmp_path, text, message):
    header_file(tmp_path, text)
    with pytest.raises(CheckpointError, match=message):
        read_entries(tmp_path)


def test_a_folder_in_a_file_s_place(tmp_path):
    (tmp_path / "model.safetensors").mkdir()
    with pytest.raises(CheckpointError, match=r"model\.safetensors is no file"):
        read_entries(tmp_path)


def test_fused_nvfp4_experts_are_refused_by_name(written, copy):
    folder = copy("toy-moe", "nvfp4")
    name = "model.layers.0.mlp.experts.gate_up_proj"
    edit(folder, lambda tensors: tensors.update({name: torch.zeros(16, 64, 64, dtype=torch.uint8)}))
    with pytest.raises(CheckpointError, match=r"experts\.gate_up_proj of shape \[16, 64, 64\] holds several"):
        opened(folder).quantised(name, (16, 64, 128))
    with pytest.raises(CheckpointError, match="holds several"):
        opened(folder).quantised(name)


def test_checks_do_not_keep_layers_alive(written):
    """On a device they are made together, but a second look holds the layer's tensors."""
    source, held = opened(written()), []
    source._check_now = lambda: source._checks.clear()

    class Good:
        device = torch.device("cuda")

    for layer in range(6):
        for part in ("q_proj", "k_proj"):
            source._check_later(f"model.layers.{layer}.self_attn.{part}.weight_scale", Good(), lambda: True)
            held.append({name.split(".")[2] for name, *_ in source._checks})
    assert held == [{str(layer)} for layer in range(6) for _ in range(2)]
