"""What a row gets in a model with 8-bit weights does not depend on slices, on the rows beside it or
on where its pages lie: not a bit of it. So an exact prefix gives what full prefill gives."""

import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kvweave.kernels.native.library import CompiledLibrary
from kvweave.kernels.native.product import NativeProduct
from kvweave.kernels.rounded import round_weight, split_dims
from kvweave.model.decoder import Decoder
from kvweave.model.load import load_decoder
from kvweave.model.paged_kv import KVPool, PagedKV
from kvweave.model.rows import Rows
from worlds.tiny_models import make_model_folder

FAMILIES = ("llama", "llama-biases", "llama-mha", "qwen2-yarn")
PAGE, PAGES, LONGEST = 16, 80, 600


@pytest.fixture(scope="module", params=FAMILIES)
def served(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    library: CompiledLibrary,
) -> Decoder:
    """As a server has it: the first and the last layer in float32, all else in 8 bits."""
    folder = make_model_folder(tmp_path_factory.mktemp("models"), request.param)
    exact = load_decoder(folder, device="cpu", dtype="float32")
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


class Prefilled:
    """One prompt in pages drawn at random, prefilled in slices beside another sequence."""

    def __init__(self, decoder: Decoder, rng: random.Random, prompt: list[int]) -> None:
        pool = KVPool(decoder.spec, PAGES, PAGE, torch.float32, torch.device("cpu"))
        for part in (pool.keys, pool.values):
            part.fill_(torch.nan)  # what nobody wrote is never looked at
        pages = rng.sample(range(PAGES), PAGES)
        if rng.random() < 0.3:
            pages.sort()
        count = -(-len(prompt) // PAGE)
        self._pool, self._table = pool, pages[:count]
        self._own, self._other = PagedKV(pool, self._table), PagedKV(pool, pages[count:])
        self._room = (PAGES - count) * PAGE
        self._decoder, self._rng, self._prompt = decoder, rng, prompt

    def in_slices(self, ends: list[int], *, beside: bool) -> Tensor:
        """Return the logits of the prompt's last token. `beside`: another sequence takes rows."""
        rng, start, other = self._rng, 0, 0
        found = torch.empty(0)
        for end in ends:
            is_last = end == len(self._prompt)
            wanted = [end - start - 1] if is_last else []
            if is_last and rng.random() < 0.3:
                wanted = list(range(end - start))
            batch = [Rows(self._prompt[start:end], range(start, end), self._own, wanted)]
            count = min(rng.choice([1, 1, 2, 5, 30]), self._room - other)
            if beside and count > 0:
                ids = [rng.randrange(97) for _ in range(count)]
                also = Rows(ids, range(other, other + count), self._other, [])
                batch.insert(rng.randrange(2), also)
                other += count
            found, start = self._decoder.forward(batch), end
        return found[-1]

    def kv(self) -> Tensor:
        """Keys and values of the prompt, by position."""
        slots = [page * PAGE + i for page in self._table for i in range(PAGE)]
        at = torch.tensor(slots[: len(self._prompt)])
        parts = (self._pool.keys, self._pool.values)
        layers = range(self._decoder.spec.num_layers)
        return torch.stack([part[n].flatten(0, 1)[at] for part in parts for n in layers])


def count_different(decoder: Decoder, num_pairs: int, seed: int) -> int:
    """Prompts whose KV or logits differ from one prefill of the same prompt, alone."""
    rng, different = random.Random(seed), 0
    for _ in range(num_pairs):
        length = rng.choice([rng.randint(2, 40), rng.randint(2, LONGEST)])
        prompt = [rng.randrange(97) for _ in range(length)]
        alone = Prefilled(decoder, rng, prompt)
        right = alone.in_slices([length], beside=False)
        cuts = rng.sample(range(1, length), min(length - 1, rng.choice([0, 1, 2, 5])))
        if rng.random() < 0.3:
            cuts.append(length - 1)
        other = Prefilled(decoder, rng, prompt)
        found = other.in_slices(sorted({*cuts, length}), beside=rng.random() < 0.6)
        same = torch.equal(found, right) and torch.equal(other.kv(), alone.kv())
        different += not same
    return different


def test_slices_neighbours_and_pages_change_no_bit(served: Decoder) -> None:
    assert count_different(served, 40, seed=1) == 0


@pytest.mark.slow
def test_no_bit_changes_in_many_more_pairs(served: Decoder) -> None:
    assert count_different(served, 500, seed=2) == 0
