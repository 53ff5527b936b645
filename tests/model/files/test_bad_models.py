"""A model we cannot use is refused in one line that names the thing and the way out."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvweave.errors import ConfigError, KVWeaveError, ModelCorrupt, ModelNotFound, UnsupportedModel
from kvweave.model.files.tensor_files import TensorFiles
from kvweave.model.load import load_decoder
from kvweave.model.spec import read_spec, spec_from_config
from worlds.tiny_models import SHAPE, make_model_folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_model_folder(tmp_path, "llama")


def make_config(model_type: str = "llama", **changes: Any) -> dict[str, Any]:
    return {**SHAPE, "model_type": model_type, "rms_norm_eps": 1e-5, **changes}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model_type": "gpt2"}, "model type 'gpt2' is not supported; supported: llama, mistral"),
        ({"hidden_act": "gelu"}, "activation 'gelu' is not supported"),
        ({"model_type": "mistral", "sliding_window": 128}, "sliding_window=128 is active"),
        (
            {"model_type": "qwen2", "sliding_window": 64, "use_sliding_window": True},
            "sliding_window=64 is active",
        ),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantised with 'gptq'"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope type 'dynamic' is refused"),
    ],
)
def test_what_the_decoder_cannot_do_is_refused_by_name(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(UnsupportedModel, match=says):
        spec_from_config(make_config(**changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "mistral", "sliding_window": 256},  # as long as the context
        {"model_type": "mistral", "sliding_window": None},
        {"model_type": "qwen2", "sliding_window": 64, "use_sliding_window": False},
    ],
)
def test_a_window_that_never_bites_is_accepted(changes: dict[str, Any]) -> None:
    assert spec_from_config(make_config(**changes)).num_layers == 3


def test_a_folder_without_a_config_says_so(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"no config\.json"):
        read_spec(tmp_path)


def test_a_config_without_a_field_names_it(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    del config["num_hidden_layers"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelCorrupt, match="has no 'num_hidden_layers'"):
        read_spec(folder)


def test_a_missing_tensor_is_named(folder: Path) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, path)
    with pytest.raises(ModelCorrupt, match=r"'model\.layers\.1\.mlp\.up_proj\.weight' is missing"):
        load_decoder(folder, device="cpu")


def test_a_tensor_of_another_shape_is_named(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["intermediate_size"] = 50
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelCorrupt, match=r"shape \[48, 32\], config\.json wants \[50, 32\]"):
        load_decoder(folder, device="cpu")


@pytest.mark.parametrize(
    "changes",
    [
        {"num_hidden_layers": "x"},
        {"hidden_size": None},
        {"num_attention_heads": 0},
        {"num_key_value_heads": 3},
        {"rms_norm_eps": "small"},
        {"rope_parameters": "linear"},
        {"rope_parameters": {"rope_type": "linear", "factor": "abc"}},
        {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1}},
        {"max_position_embeddings": -1},
        {"vocab_size": 1.5},
    ],
)
def test_values_that_make_no_sense_are_refused_in_one_line(
    folder: Path, changes: dict[str, Any]
) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    with pytest.raises((ModelCorrupt, UnsupportedModel)) as caught:
        load_decoder(folder, device="cpu")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": 3}', '{"weight_map": [1]}'])
def test_a_broken_index_of_shards_is_refused(folder: Path, text: str) -> None:
    (folder / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ModelCorrupt, match=r"index\.json is broken"):
        load_decoder(folder, device="cpu")


@pytest.mark.parametrize("keep", [0, 4, 9, 100, 5_000, -1])
def test_truncated_weights_are_noticed_before_anything_is_computed(folder: Path, keep: int) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ModelCorrupt, match="truncated or not a safetensors file"):
        load_decoder(folder, device="cpu")


def test_bytes_behind_the_last_tensor_are_refused(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes() + bytes(8))
    with pytest.raises(ModelCorrupt, match="truncated or not a safetensors file"):
        load_decoder(folder, device="cpu")


def end_of_file(table: dict[str, Any]) -> int:
    return max(row["data_offsets"][1] for row in table.values())


@pytest.mark.parametrize(
    "change",
    [
        lambda table: table.pop("model.norm.weight"),  # leaves a gap
        lambda table: table["model.norm.weight"].update(shape=[1 << 62]),
        lambda table: table["model.norm.weight"].update(shape=[-1]),
        lambda table: table["model.norm.weight"].update(data_offsets=[0, 128]),  # another's bytes
        lambda table: table["model.norm.weight"].update(data_offsets=[1 << 62, (1 << 62) + 128]),
        lambda table: table["model.norm.weight"].update(dtype="F31"),
        lambda table: table["model.norm.weight"].pop("shape"),
        lambda table: table.update(
            more={"dtype": "F32", "shape": [9], "data_offsets": [end_of_file(table)] * 2}
        ),
        lambda table: table.update(more=[]),
    ],
)
def test_a_table_that_does_not_describe_its_file_is_refused(folder: Path, change: Any) -> None:
    path = folder / "model.safetensors"
    data = path.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    table = json.loads(data[8 : 8 + size])
    table.pop("__metadata__", None)
    change(table)
    text = json.dumps(table).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + size :])
    with pytest.raises(ModelCorrupt, match="truncated or not a safetensors file") as caught:
        load_decoder(folder, device="cpu")
    assert "\n" not in str(caught.value)


def test_a_tensor_of_a_type_that_is_not_read_is_named(folder: Path) -> None:
    path = folder / "model.safetensors"
    save_file(load_file(path) | {"position_ids": torch.arange(4)}, path)
    with pytest.raises(ModelCorrupt, match=r"'position_ids' is I64; kvweave reads F32, F16, BF16"):
        load_decoder(folder, device="cpu")


def test_a_shard_that_is_not_there_is_named(folder: Path) -> None:
    index = {"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelCorrupt, match="lacks model-00001-of-00002"):
        load_decoder(folder, device="cpu")


def test_an_index_cannot_reach_outside_its_folder(folder: Path) -> None:
    index = {"weight_map": {"model.norm.weight": "../secret.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelCorrupt, match="outside its folder"):
        load_decoder(folder, device="cpu")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"dtype": "int4"}, "dtype 'int4' is unknown; known: auto, float32"),
        ({"device": "cpu:x"}, "device 'cpu:x' is unknown"),
        ({"device": "tpu"}, "device 'tpu' is unknown; known: auto, cpu, cuda"),
        ({"quant": "int3"}, "quant 'int3' is unknown; known: auto, none, int8"),
        ({"quant": "int8", "dtype": "bfloat16"}, "quant='int8' is for CPUs with dtype float32"),
    ],
)
def test_unknown_options_list_the_known_ones(
    folder: Path, options: dict[str, str], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        load_decoder(folder, **{"device": "cpu", **options})


def test_every_refusal_is_one_line(folder: Path) -> None:
    (folder / "config.json").write_text("{")
    with pytest.raises(KVWeaveError) as caught:
        load_decoder(folder)
    assert "\n" not in str(caught.value)


def test_the_fingerprint_follows_the_weights(tmp_path: Path, folder: Path) -> None:
    again = make_model_folder(tmp_path / "again", "llama")
    other = make_model_folder(tmp_path / "other", "llama", seed=1)
    assert TensorFiles(folder).fingerprint() == TensorFiles(again).fingerprint()
    assert TensorFiles(folder).fingerprint() != TensorFiles(other).fingerprint()


def test_the_fingerprint_notices_a_change_in_the_middle_of_a_tensor(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path, "llama", vocab_size=40_000)  # an embedding of 5 MB
    before = TensorFiles(folder).fingerprint()
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    middle = len(data) // 2
    data[middle : middle + (1 << 20)] = bytes(1 << 20)
    path.write_bytes(data)
    assert TensorFiles(folder).fingerprint() != before
