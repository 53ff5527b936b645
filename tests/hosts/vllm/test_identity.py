"""Whose chunk KV it is: packed weights are named by their folder, and by how they are packed."""

import json
from pathlib import Path

import pytest
import torch

from kvweave.errors import KVWeaveError
from kvweave.fuse.encode.preparation import Preparation
from kvweave.hosts.vllm.identity import ModelIdentity, ServedModel, identify
from kvweave.model.load import load_decoder
from worlds.gptq import make_gptq_folder
from worlds.tiny_models import make_chat_model_folder


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("plain")
    return make_chat_model_folder(root, intermediate_size=64)


@pytest.fixture
def packed(plain: Path, tmp_path: Path) -> Path:
    return make_gptq_folder(plain, tmp_path / "packed")


def identity_of(folder: Path, quantization: str | None) -> ModelIdentity:
    served = ServedModel(str(folder), None, torch.float32, quantization)
    return identify(served, Preparation.parse("isolated"), "raw")


def test_packed_weights_have_names_of_their_own(plain: Path, packed: Path) -> None:
    of_plain, of_packed = identity_of(plain, None), identity_of(packed, "auto_gptq")
    assert of_packed.spec == of_plain.spec
    assert of_packed.weights != of_plain.weights
    named = {of_plain.context.model, identity_of(plain, "fp8").context.model}
    named |= {of_packed.context.model, identity_of(packed, "other").context.model}
    assert len(named) == 4
    assert identity_of(packed, "auto_gptq").context == of_packed.context, "in either process"
    config = json.loads((packed / "config.json").read_text())
    config["quantization_config"]["bits"] = 8
    (packed / "config.json").write_text(json.dumps(config))
    assert identity_of(packed, "auto_gptq").context.model not in named


def test_kvweaves_own_decoder_still_refuses_them(packed: Path) -> None:
    with pytest.raises(KVWeaveError, match="quantised with 'gptq'"):
        load_decoder(packed, device="cpu", dtype="float32")


def test_a_rank_has_a_share_of_the_heads_and_names_of_its_own(plain: Path) -> None:
    whole = identity_of(plain, None)
    assert whole.of_rank(0, 1) is whole
    ranks = [whole.of_rank(rank, 4) for rank in range(4)]
    assert {(r.spec.num_heads, r.spec.num_kv_heads) for r in ranks} == {(1, 1)}, "2 KV heads, twice"
    pair = [whole.of_rank(rank, 2) for rank in range(2)]
    assert len({each.context.model for each in (whole, *pair, *ranks)}) == 7
    assert {each.weights for each in (whole, *ranks)} == {whole.weights}, "tables are of all heads"


def test_the_way_to_tables_is_a_command_where_kvweave_can_load_the_weights(
    plain: Path, packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVWEAVE_HOME", str(tmp_path / "with space"))
    command = identity_of(plain, None).calibration
    assert command.startswith(f"KVWEAVE_HOME='{tmp_path}/with space' kvweave calibrate ")
    assert f"--model {plain} --dtype float32 --encodings isolated" in command
    assert "name a strategy" in identity_of(packed, "auto_gptq").calibration
