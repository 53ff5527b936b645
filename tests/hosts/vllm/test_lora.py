"""Adapters: what names them, what cannot be fused, and what is added to a product."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvweave.errors import RequestError
from kvweave.hosts.vllm.lora import AdapterNames, add_adapter, find_slot
from worlds.lora import make_adapter

FILE = "adapter_model.safetensors"


@pytest.fixture
def folder(chat_model_folder: Path, tmp_path: Path) -> Path:
    return make_adapter(chat_model_folder, tmp_path / "one", seed=1)


def request_for(number: int, folder: Path, **more: object) -> SimpleNamespace:
    return SimpleNamespace(lora_int_id=number, lora_path=str(folder), **more)


def test_an_adapter_is_named_by_its_files(
    folder: Path, chat_model_folder: Path, tmp_path: Path
) -> None:
    names = AdapterNames()
    one = names.name(request_for(1, folder))
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    assert names.name(request_for(2, copy)).digest == one.digest
    other = make_adapter(chat_model_folder, tmp_path / "two", seed=2)
    assert names.name(request_for(3, other)).digest != one.digest
    (copy / "adapter_config.json").write_text('{"r": 4, "lora_alpha": 16}')
    assert names.name(request_for(4, copy)).digest != one.digest, "another strength"
    assert names.name(request_for(3, copy)).digest != names.name(request_for(3, other)).digest, (
        "a number that was given away again"
    )
    shutil.rmtree(folder)
    assert names.name(request_for(1, folder)) == one, "it is loaded by then"


@pytest.mark.parametrize("module", ["model.embed_tokens.lora_embedding_A", "lm_head.lora_A.weight"])
def test_what_is_not_added_is_refused_by_name(folder: Path, module: str) -> None:
    tensors = load_file(folder / FILE)
    name = f"base_model.model.{module}"
    save_file({**tensors, name: torch.ones(4, 8)}, folder / FILE)
    with pytest.raises(RequestError, match=module):
        AdapterNames().name(request_for(1, folder))


def test_an_adapter_that_cannot_be_read_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="in a folder here"):
        AdapterNames().name(request_for(1, tmp_path / "hub" / "id"))
    (folder / FILE).write_bytes(b"no tensors")
    with pytest.raises(RequestError, match="readable"):
        AdapterNames().name(request_for(1, folder))
    with pytest.raises(RequestError, match="in place"):
        AdapterNames().name(request_for(1, folder, load_inplace=True))


def test_the_slot_of_an_adapter_is_added_to_each_slice() -> None:
    """As vLLM stacks them: [slots, 1, rank, in] and [slots, 1, out, rank], by slice."""
    down = tuple(torch.randn(3, 1, 2, 8) for _ in range(2))
    up = torch.randn(3, 1, 6, 2), torch.randn(3, 1, 4, 2)
    module = SimpleNamespace(lora_a_stacked=down, lora_b_stacked=up)
    x, made = torch.randn(5, 8), torch.zeros(5, 10)
    add_adapter(made, x, module, 2)
    wanted = [x @ a[2, 0].t() @ b[2, 0].t() for a, b in zip(down, up, strict=True)]
    torch.testing.assert_close(made, torch.cat(wanted, 1))
    model = SimpleNamespace(lora_manager=SimpleNamespace(lora_index_to_id=[7, None, 9]))
    assert find_slot(model, 9) == 2
    with pytest.raises(ValueError, match="8"):
        find_slot(model, 8)
