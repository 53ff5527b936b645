"""Rotation: right angles, additive in the position, true to transformers' own frequencies."""

from typing import Any

import pytest
import torch

from kvweave.errors import UnsupportedModel
from kvweave.kernels.rope import make_angles, per_head, rotate
from kvweave.model.rope import frequencies, read_rope
from worlds.tiny_models import LLAMA3, YARN

ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 10_000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 3.0},
    "llama3": LLAMA3,
    "yarn": YARN,
    "yarn-mscale": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.3},
    "yarn-explicit": {**YARN, "attention_factor": 1.25, "truncate": False},
}


def make_config(name: str, **more: Any) -> dict[str, Any]:
    return {"max_position_embeddings": 256, "rope_parameters": ROPES[name], **more}


def turned(name: str, x: torch.Tensor, positions: torch.Tensor, **more: Any) -> torch.Tensor:
    rope = read_rope(make_config(name, **more), x.shape[-1])
    angles = make_angles(positions, frequencies(rope).double(), rope.attention_factor, x.dtype)
    return rotate(x, angles)


@pytest.mark.parametrize("name", sorted(ROPES))
def test_frequencies_equal_those_of_transformers(name: str) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = read_rope(make_config(name), 64)
    config = LlamaConfig(
        hidden_size=64,
        num_attention_heads=1,
        max_position_embeddings=256,
        rope_parameters=dict(ROPES[name]),
    )
    kind = ROPES[name]["rope_type"]
    if kind == "default":
        theirs, scale = 1.0 / 10_000.0 ** (torch.arange(0, 64, 2) / 64), 1.0
    else:
        theirs, scale = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    torch.testing.assert_close(frequencies(rope), theirs)
    assert rope.attention_factor == pytest.approx(scale)


@pytest.mark.parametrize("name", sorted(ROPES))
def test_old_and_new_config_forms_mean_the_same(name: str) -> None:
    scaling = {k: v for k, v in ROPES[name].items() if k != "rope_theta"}
    scaling["type"] = scaling.pop("rope_type")
    old = {
        "max_position_embeddings": 256,
        "rope_theta": ROPES[name]["rope_theta"],
        "rope_scaling": scaling,
    }
    assert read_rope(old, 64) == read_rope(make_config(name), 64)


@pytest.mark.parametrize("name", sorted(ROPES))
def test_turning_twice_equals_turning_once_by_the_sum(name: str) -> None:
    x = torch.randn(5, 2, 16, dtype=torch.float64)
    rope = read_rope(make_config(name), 16)
    inv_freq = frequencies(rope).double()
    first, second = torch.tensor([0, 1, 7, 90, 3]), torch.tensor([4, 0, 250, 5, 5])
    once = turned(name, x, first + second)
    delta = make_angles(second, inv_freq, 1.0, torch.float64)  # a second turn carries no scale
    torch.testing.assert_close(rotate(turned(name, x, first), delta), once, atol=1e-4, rtol=1e-4)


def test_a_part_of_the_head_turns_and_the_rest_passes_through() -> None:
    from transformers.models.phi3.modeling_phi3 import apply_rotary_pos_emb

    x = torch.randn(6, 3, 16)
    positions = torch.arange(6) * 11
    rope = read_rope(make_config("default", partial_rotary_factor=0.5), 16)
    angles = make_angles(positions, frequencies(rope), 1.0, torch.float32)
    ours = rotate(x, angles)
    cos, sin = (torch.cat([a[:, 0], a[:, 0]], dim=-1)[None] for a in angles)
    theirs, _ = apply_rotary_pos_emb(x.transpose(0, 1)[None], x.transpose(0, 1)[None], cos, sin)
    torch.testing.assert_close(ours, theirs[0].transpose(0, 1))
    assert torch.equal(ours[..., 8:], x[..., 8:])


def test_angles_are_exact_far_into_the_context() -> None:
    rope = read_rope(make_config("default"), 64)
    position = torch.tensor([100_000])
    angles = make_angles(position, frequencies(rope), 1.0, torch.float32)
    truth = (100_000 * frequencies(rope).double()).cos()
    torch.testing.assert_close(angles.cos[0, 0].double(), truth, atol=5e-3, rtol=0)


def test_rotating_into_a_buffer_writes_there_and_nowhere_else() -> None:
    x = torch.randn(4, 2, 8)
    angles = make_angles(torch.arange(4), torch.rand(4), 1.0, torch.float32)
    buffer = torch.full((6, 2, 8), 7.0)
    rotate(x, angles, out=buffer[1:5])
    assert torch.equal(buffer[1:5], rotate(x, angles))
    assert (buffer[[0, 5]] == 7.0).all()


@pytest.mark.parametrize("kind", ["dynamic", "longrope", "mrope", "su"])
def test_a_rope_that_cannot_be_restored_is_refused_by_name(kind: str) -> None:
    config = {"max_position_embeddings": 256, "rope_scaling": {"type": kind, "factor": 2.0}}
    with pytest.raises(UnsupportedModel, match=f"'{kind}' is refused.*accepted: default, linear"):
        read_rope(config, 64)


def test_angles_laid_out_per_head_turn_the_same() -> None:
    x = torch.randn(5, 3, 8, generator=torch.Generator().manual_seed(0))
    angles = make_angles(torch.tensor([0, 3, 4, 90, 1000]), torch.rand(4), 1.0, torch.float32)
    wide = per_head(angles, 3)
    assert wide.cos.shape == (5, 3, 4)
    assert torch.equal(rotate(x, wide), rotate(x, angles))
