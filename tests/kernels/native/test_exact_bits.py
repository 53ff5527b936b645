"""What a row gets on a CPU with compiled kernels does not depend on slices, on the rows beside it,
on where its pages lie or on being preempted: not a bit of it, in float32 and in 8 bits. So an exact
prefix gives what full prefill gives."""

import random
from dataclasses import replace

import pytest
import torch

from kvweave.kernels.linear import Linear
from kvweave.kernels.native.library import CompiledLibrary
from kvweave.kernels.native.product import NativeProduct
from kvweave.kernels.rope import make_angles
from kvweave.kernels.rounded import round_weight, split_dims
from kvweave.model.decoder import Decoder
from kvweave.model.load import load_decoder
from worlds.bits import count_different, count_different_answers
from worlds.engine import SMALL
from worlds.tiny_models import make_model_folder

FAMILIES = ("llama", "llama-biases", "llama-mha", "qwen2-yarn")
MODELS = [
    *((family, "8 bits") for family in FAMILIES),
    *((family, "float32") for family in (*FAMILIES, "qwen3", "mixtral", "qwen3_moe-mixed")),
]


@pytest.fixture(scope="module", params=MODELS, ids=lambda of: "-".join(of).replace(" ", "-"))
def served(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    library: CompiledLibrary,
) -> Decoder:
    """As a server has it: in float32, or all but the first and the last layer in 8 bits."""
    family, precision = request.param
    # a sum of 700 products is more than one chain
    folder = make_model_folder(tmp_path_factory.mktemp("models"), family, intermediate_size=700)
    exact = load_decoder(folder, device="cpu", dtype="float32")
    return exact if precision == "float32" else make_rounded(exact, library)


def make_rounded(exact: Decoder, library: CompiledLibrary) -> Decoder:
    layers = list(exact.weights.layers)
    for i in range(1, len(layers) - 1):
        made = {}
        for name in ("qkv", "out", "gate_up", "down"):
            linear = getattr(layers[i], name)
            parts = split_dims(torch.rand(linear.weight.shape[1]) + 0.1, 5)
            made[name] = NativeProduct(round_weight(linear.weight, linear.bias, parts), library)
        layers[i] = replace(layers[i], **made)
    assert len(layers) > 2, "no layer is rounded"
    weight = exact.weights.head.weight  # type: ignore[attr-defined]
    parts = split_dims(torch.rand(weight.shape[1]) + 0.1, 5)
    head = NativeProduct(round_weight(weight, None, parts), library)
    return Decoder(exact.spec, replace(exact.weights, layers=layers, head=head))


def test_slices_neighbours_pages_and_preemption_change_no_bit(served: Decoder) -> None:
    assert count_different(served, 40, seed=1) == 0


@pytest.mark.slow
def test_no_bit_changes_in_many_more_pairs(served: Decoder) -> None:
    assert count_different(served, 500, seed=2) == 0


@pytest.mark.parametrize("page_tokens", [1, 4, 32])
def test_a_crowded_engine_answers_with_the_same_bits(served: Decoder, page_tokens: int) -> None:
    cfg = replace(SMALL, page_tokens=page_tokens, pool_tokens=256, step_rows=23)
    found = [count_different_answers(served, cfg, seed) for seed in range(3)]
    assert sum(different for different, _ in found) == 0
    assert sum(preemptions for _, preemptions in found) > 0, "nobody was preempted"


@pytest.mark.parametrize(
    ("in_dim", "out_dim"), [(3, 5), (64, 48), (200, 131), (700, 96), (1530, 577)]
)
def test_a_row_of_a_product_is_the_same_beside_any_others(
    library: CompiledLibrary, in_dim: int, out_dim: int
) -> None:
    assert library is not None
    rng = random.Random(in_dim)
    torch.manual_seed(in_dim)
    linear = Linear(torch.randn(out_dim, in_dim), torch.randn(out_dim) if in_dim > 64 else None)
    x, h = torch.randn(600, in_dim), torch.randn(600, out_dim)
    right, total = linear(x), h.clone()
    linear.add_to(total, x)
    bias = 0 if linear.bias is None else linear.bias.double()
    exact = x.double() @ linear.weight.double().T + bias
    torch.testing.assert_close(right.double(), exact, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(total.double(), exact + h, rtol=1e-5, atol=1e-4)
    threads = torch.get_num_threads()
    try:
        for count in (*range(1, 14), 63, 64, 65, 300):
            torch.set_num_threads(rng.choice([1, threads]))
            first = rng.randrange(600 - count)
            rows = slice(first, first + count)
            part = h[rows].clone()
            linear.add_to(part, x[rows])
            assert torch.equal(linear(x[rows]), right[rows])
            assert torch.equal(part, total[rows])
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("half", [8, 20, 32, 64])
def test_the_angles_of_a_row_are_the_same_beside_any_others(half: int) -> None:
    """Torch computes them: the only part of a pass that compiled kernels do not."""
    rng = random.Random(half)
    inv_freq = 10_000.0 ** -(torch.arange(half) / half)
    every = make_angles(torch.arange(4096), inv_freq, 1.0, torch.float32)
    for _ in range(200):
        count = rng.choice([1, 2, 3, 17, 300, 2000])
        at = torch.tensor(sorted(rng.sample(range(4096), count)))
        found = make_angles(at, inv_freq, 1.0, torch.float32)
        assert torch.equal(found.cos, every.cos[at])
        assert torch.equal(found.sin, every.sin[at])
