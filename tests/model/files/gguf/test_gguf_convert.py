"""A converted folder holds the model the GGUF file was made from, or the file is refused."""

import json
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from kvweave.errors import ModelCorrupt, ModelError, UnsupportedModel
from kvweave.model.files.gguf.convert import convert_gguf
from kvweave.model.spec import read_spec
from kvweave.text.tokenizer import Tokenizer
from worlds.gguf_files import VOCAB_SIZE, gguf_of
from worlds.tiny_models import make_model_folder, reference_logits

FAMILIES = ["llama", "llama-tied", "llama-mha", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe"]
SCALED = ["llama-linear", "llama-yarn", "qwen2-yarn"]
PROMPT = list(range(5, 60))


class DiskUsage(NamedTuple):
    free: int


def make_source(tmp_path: Path, variant: str = "llama", **changes: Any) -> Path:
    """A tiny model folder whose vocabulary is that of the test tokenizer."""
    return make_model_folder(tmp_path / "source", variant, vocab_size=VOCAB_SIZE, **changes)


def converted(path: Path) -> Path:
    folder = path.with_suffix(".converted")
    convert_gguf(path, folder)
    return folder


@pytest.mark.parametrize("variant", FAMILIES + SCALED)
def test_a_round_trip_gives_the_same_weights_and_logits(variant: str, tmp_path: Path) -> None:
    source = make_source(tmp_path, variant)
    folder = converted(gguf_of(tmp_path / "model.gguf", source))
    before, after = load_file(source / "model.safetensors"), load_file(folder / "model.safetensors")
    assert before.keys() == after.keys()
    for name, weight in before.items():
        np.testing.assert_array_equal(after[name], weight, err_msg=name)
    expected = reference_logits(source, PROMPT)
    torch.testing.assert_close(reference_logits(folder, PROMPT), expected)
    ours, theirs = read_spec(folder), read_spec(source)
    if variant == "mistral":  # GGUF calls it llama, and without a window it is
        theirs = replace(theirs, family="llama")
    assert ours == theirs


def test_biases_are_put_back_like_the_rows_they_belong_to(tmp_path: Path) -> None:
    source = make_source(tmp_path, "llama", attention_bias=True)
    folder = converted(gguf_of(tmp_path / "model.gguf", source))
    expected = reference_logits(source, PROMPT)
    torch.testing.assert_close(reference_logits(folder, PROMPT), expected)


@pytest.mark.parametrize("variant", ["llama", "qwen2", "qwen3"])
def test_quantised_weights_equal_what_transformers_reads(variant: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    source = make_source(tmp_path, variant, intermediate_size=64)
    quant = gguf.GGMLQuantizationType.Q4_1
    path = gguf_of(tmp_path / "model.gguf", source, quant=quant)
    weights = load_file(converted(path) / "model.safetensors")
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="model.gguf", dtype=torch.float32
    ).state_dict()
    for name, weight in weights.items():
        np.testing.assert_array_equal(weight, theirs[name].numpy(), err_msg=name)


@pytest.mark.parametrize("original", [32, 8192])
def test_llama3_scaling_is_found_again_in_its_tensor(original: int, tmp_path: Path) -> None:
    from transformers import AutoConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = {
        "rope_type": "llama3",
        "rope_theta": 500_000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": original,
    }
    changes = {"head_dim": 64, "max_position_embeddings": 131_072, "rope_parameters": rope}
    source = make_source(tmp_path, "llama", **changes)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](AutoConfig.from_pretrained(source), "cpu")
    plain = 500_000.0 ** -(torch.arange(0, 64, 2) / 64)
    path = gguf_of(
        tmp_path / "model.gguf", source, tensors={"rope_freqs.weight": (plain / scaled).numpy()}
    )
    if original == 32:  # no published model has this one: refused rather than guessed
        with pytest.raises(UnsupportedModel, match=r"rope_freqs\.weight follows no RoPE rule"):
            converted(path)
        return
    folder = converted(path)
    expected = reference_logits(source, PROMPT)
    torch.testing.assert_close(reference_logits(folder, PROMPT), expected)
    assert read_spec(folder) == read_spec(source)


def test_converting_twice_gives_the_same_bytes(tmp_path: Path) -> None:
    path = gguf_of(tmp_path / "model.gguf", make_source(tmp_path))
    first, second = tmp_path / "first", tmp_path / "second"
    convert_gguf(path, first)
    convert_gguf(path, second)
    names = sorted(p.name for p in first.iterdir())
    assert names == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    for name in names:
        assert (first / name).read_bytes() == (second / name).read_bytes(), name


def test_the_folder_opens_in_transformers_with_its_template(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    folder = converted(gguf_of(tmp_path / "model.gguf", make_source(tmp_path), pre="smollm"))
    messages = [{"role": "user", "content": "it's 12 345 ☕"}]
    theirs = AutoTokenizer.from_pretrained(folder)
    ours = Tokenizer(folder)
    text = ours.render_chat(messages)
    assert text == theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert ours.encode(text) == theirs(text, add_special_tokens=False)["input_ids"]
    assert (ours.bos_id, ours.eos_ids) == (1, {2})


@pytest.mark.parametrize(
    "name",
    ["token_embd.weight", "output_norm.weight", "blk.1.attn_k.weight", "blk.2.ffn_up.weight"],
)
def test_a_missing_tensor_is_named(name: str, tmp_path: Path) -> None:
    path = gguf_of(tmp_path / "model.gguf", make_source(tmp_path), drop=[name])
    with pytest.raises(ModelCorrupt, match=rf"model\.gguf has no tensor {name}; download"):
        converted(path)
    assert not list(tmp_path.glob("model.converted*"))


@pytest.mark.parametrize(
    "key", ["llama.block_count", "llama.attention.head_count", "tokenizer.ggml.tokens"]
)
def test_missing_metadata_is_named(key: str, tmp_path: Path) -> None:
    path = gguf_of(tmp_path / "model.gguf", make_source(tmp_path), drop=[key])
    with pytest.raises(ModelCorrupt, match=key):
        converted(path)


def test_an_unknown_architecture_lists_those_we_read(tmp_path: Path) -> None:
    path = gguf_of(tmp_path / "model.gguf", make_source(tmp_path))
    path.write_bytes(path.read_bytes().replace(b"llama", b"mamba", 1))
    with pytest.raises(UnsupportedModel, match="'mamba'; supported: llama, qwen2, qwen3, qwen3moe"):
        converted(path)


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({"llama.rope.scaling.type": "longrope", "llama.rope.scaling.factor": 2.0}, "'longrope'"),
        ({"llama.attention.sliding_window": 64}, "sliding window of 64"),
        ({"llama.rope.dimension_count": 4}, "partial rotary"),
        ({"llama.attention.value_length": 4}, "different head sizes"),
        ({"llama.final_logit_softcapping": 30.0}, "softcapping = 30.0"),
        ({"llama.attention.head_count_kv": [1, 2, 2]}, "differs from layer to layer"),
        ({"split.count": 3}, "one of 3 parts"),
        ({"tokenizer.ggml.pre": "martian"}, "rule 'martian'; known: .* tokenizer.json"),
        ({"tokenizer.ggml.model": "bert"}, "kind 'bert'"),
    ],
)
def test_what_would_change_the_result_is_refused_by_name(
    metadata: dict[str, Any], words: str, tmp_path: Path
) -> None:
    path = gguf_of(tmp_path / "model.gguf", make_source(tmp_path), metadata=metadata)
    with pytest.raises(UnsupportedModel, match=words):
        converted(path)


def test_a_window_as_long_as_the_context_is_no_window(tmp_path: Path) -> None:
    metadata = {"llama.attention.sliding_window": 256}
    folder = converted(gguf_of(tmp_path / "model.gguf", make_source(tmp_path), metadata=metadata))
    assert "sliding_window" not in json.loads((folder / "config.json").read_text())
    assert read_spec(folder).max_context == 256


def test_a_tensor_we_would_ignore_is_refused(tmp_path: Path) -> None:
    extra = {"blk.0.attn_sub_norm.weight": np.ones(32, np.float32)}
    path = gguf_of(tmp_path / "model.gguf", make_source(tmp_path), tensors=extra)
    with pytest.raises(UnsupportedModel, match=r"'blk\.0\.attn_sub_norm\.weight'"):
        converted(path)


def test_a_wrong_shape_is_named(tmp_path: Path) -> None:
    extra = {"blk.0.attn_v.weight": np.ones((8, 32), np.float32)}
    path = gguf_of(tmp_path / "model.gguf", make_source(tmp_path), tensors=extra)
    with pytest.raises(ModelCorrupt, match=r"blk\.0\.attn_v\.weight has shape \(8, 32\), not"):
        converted(path)


def test_a_file_cut_short_converts_to_nothing(tmp_path: Path) -> None:
    path = gguf_of(tmp_path / "model.gguf", make_source(tmp_path, "qwen2"))
    whole = path.read_bytes()
    for share in np.linspace(0.0, 0.999, 60):
        path.write_bytes(whole[: int(share * len(whole))])
        with pytest.raises(ModelError) as caught:
            converted(path)
        assert "\n" not in str(caught.value)
        assert not list(tmp_path.glob("model.converted*"))


def test_a_kill_during_conversion_is_cleaned_up_by_the_next(tmp_path: Path) -> None:
    path = gguf_of(tmp_path / "model.gguf", make_source(tmp_path))
    litter = tmp_path / "model.converted.part"
    litter.mkdir()
    (litter / "model.safetensors").write_text("half")
    converted(path)
    assert not litter.exists()


def test_memory_stays_far_below_the_weights(tmp_path: Path) -> None:
    source = make_source(tmp_path, hidden_size=512, intermediate_size=2048, num_hidden_layers=8)
    path = gguf_of(tmp_path / "model.gguf", source, quant=gguf.GGMLQuantizationType.Q8_0)
    tracemalloc.start()
    folder = converted(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    weights = (folder / "model.safetensors").stat().st_size
    assert weights > 100e6
    assert peak < 0.6 * weights, f"{peak / 1e6:.0f} MB for {weights / 1e6:.0f} MB of weights"


def test_progress_ends_at_the_total(tmp_path: Path) -> None:
    path = gguf_of(tmp_path / "model.gguf", make_source(tmp_path))
    seen: list[tuple[int, int]] = []
    convert_gguf(path, tmp_path / "folder", lambda done, total: seen.append((done, total)))
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    size = (tmp_path / "folder" / "model.safetensors").stat().st_size
    assert seen[-1] == (size, size)


def test_config_numbers_survive_float32(tmp_path: Path) -> None:
    folder = converted(gguf_of(tmp_path / "model.gguf", make_source(tmp_path, rms_norm_eps=1e-5)))
    assert json.loads((folder / "config.json").read_text())["rms_norm_eps"] == 1e-5


def test_a_model_that_cannot_fit_is_refused_before_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = gguf_of(tmp_path / "model.gguf", make_source(tmp_path))
    monkeypatch.setattr("shutil.disk_usage", lambda _: DiskUsage(free=1000))
    with pytest.raises(ModelError, match=r"model\.gguf takes .* GB as float32 .* KVWEAVE_HOME"):
        converted(path)
    assert not list(tmp_path.glob("model.converted*"))
