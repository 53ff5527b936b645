"""What a row gets on a CPU with compiled kernels does not depend on slices, on the rows beside it,
on where its pages lie or on being preempted: not a bit of it, in float32 and in 8 bits. So an exact
prefix gives what full prefill gives."""

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kvweave.engine.config import EngineConfig
from kvweave.engine.engine import Engine
from kvweave.engine.request import EngineRequest, Ticket
from kvweave.kernels.linear import Linear
from kvweave.kernels.native.library import CompiledLibrary
from kvweave.kernels.native.product import NativeProduct
from kvweave.kernels.rope import make_angles
from kvweave.kernels.rounded import round_weight, split_dims
from kvweave.model.decoder import Decoder
from kvweave.model.load import load_decoder
from kvweave.model.paged_kv import KVPool, PagedKV
from kvweave.model.rows import Rows
from worlds.engine import SMALL, alone, ids, plain, with_chunks
from worlds.tiny_models import make_model_folder

FAMILIES = ("llama", "llama-biases", "llama-mha", "qwen2-yarn")
MODELS = [
    *((family, "8 bits") for family in FAMILIES),
    *((family, "float32") for family in (*FAMILIES, "qwen3", "mixtral", "qwen3_moe-mixed")),
]
ROOM, LONGEST = 1280, 600  # tokens: of a pool, of a prompt
PAGES = (1, 4, 16, 32)  # tokens of one


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


class Prefilled:
    """One prompt in pages drawn at random, prefilled in slices beside another sequence."""

    def __init__(self, decoder: Decoder, rng: random.Random, prompt: list[int]) -> None:
        self._page = rng.choice(PAGES)
        num_pages = ROOM // self._page
        pool = KVPool(decoder.spec, num_pages, self._page, torch.float32, torch.device("cpu"))
        for part in (pool.keys, pool.values):
            part.fill_(torch.nan)  # what nobody wrote is never looked at
        self._free = rng.sample(range(num_pages), num_pages)
        if rng.random() < 0.3:
            self._free.sort()
        self._pool, self._decoder, self._rng, self._prompt = pool, decoder, rng, prompt
        self._table: list[int] = []
        self._admit()
        self._room = (ROOM - LONGEST) // self._page // 2 * self._page  # of the other sequence
        self._other = PagedKV(pool, self._take(self._room))

    def in_slices(
        self, ends: list[int], *, beside: bool, preempted_at: int | None = None
    ) -> Tensor:
        """Return the logits of the prompt's last token. `beside`: another sequence takes rows.
        `preempted_at`: behind so many slices its pages are taken away, once."""
        rng, start, other = self._rng, 0, 0
        found, left = torch.empty(0), list(ends)
        while left:
            if len(ends) - len(left) == preempted_at:
                preempted_at = None
                self._free += self._table
                rng.shuffle(self._free)
                self._admit()
                start, left = 0, list(ends) if rng.random() < 0.5 else left
            end = left.pop(0)
            is_last = end == len(self._prompt)
            wanted = [end - start - 1] if is_last else []
            if is_last and rng.random() < 0.3:
                wanted = list(range(end - start))
            batch = [Rows(self._prompt[start:end], range(start, end), self._own, wanted)]
            count = min(rng.choice([1, 1, 2, 5, 30]), self._room - other)
            if beside and count > 0:
                drawn = [rng.randrange(97) for _ in range(count)]
                also = Rows(drawn, range(other, other + count), self._other, [])
                batch.insert(rng.randrange(2), also)
                other += count
            found, start = self._decoder.forward(batch), end
        return found[-1]

    def kv(self) -> Tensor:
        """Keys and values of the prompt, by position."""
        slots = [page * self._page + i for page in self._table for i in range(self._page)]
        at = torch.tensor(slots[: len(self._prompt)])
        parts = (self._pool.keys, self._pool.values)
        layers = range(self._decoder.spec.num_layers)
        return torch.stack([part[n].flatten(0, 1)[at] for part in parts for n in layers])

    def _admit(self) -> None:
        self._table = self._take(len(self._prompt))
        self._own = PagedKV(self._pool, self._table)

    def _take(self, num_tokens: int) -> list[int]:
        count = -(-num_tokens // self._page)
        taken, self._free = self._free[:count], self._free[count:]
        return taken


def count_different(decoder: Decoder, num_pairs: int, seed: int) -> int:
    """Prompts whose KV or logits differ from one prefill of the same prompt, alone."""
    rng, different = random.Random(seed), 0
    for _ in range(num_pairs):
        length = rng.choice([rng.randint(2, 40), rng.randint(2, LONGEST)])
        prompt = [rng.randrange(97) for _ in range(length)]
        alone = Prefilled(decoder, rng, prompt)
        right = alone.in_slices([length], beside=False)
        cuts = rng.sample(range(1, length), min(length - 1, rng.choice([0, 1, 2, 5])))
        if rng.random() < 0.3:  # decoded: a few rows by themselves
            cuts += range(max(1, length - rng.choice([1, 3])), length)
        ends = sorted({*cuts, length})
        other = Prefilled(decoder, rng, prompt)
        preempted_at = rng.randrange(len(ends)) if rng.random() < 0.4 else None
        found = other.in_slices(ends, beside=rng.random() < 0.6, preempted_at=preempted_at)
        same = torch.equal(found, right) and torch.equal(other.kv(), alone.kv())
        different += not same
    return different


def test_slices_neighbours_pages_and_preemption_change_no_bit(served: Decoder) -> None:
    assert count_different(served, 40, seed=1) == 0


@pytest.mark.slow
def test_no_bit_changes_in_many_more_pairs(served: Decoder) -> None:
    assert count_different(served, 500, seed=2) == 0


def make_request(rng: random.Random, chunks: Sequence[Sequence[int]]) -> EngineRequest:
    """A prompt whose answer says how likely its tokens were."""
    if rng.random() < 0.3:
        request = plain(ids(rng, rng.randint(1, 60)))
    else:
        chosen = [rng.choice(chunks) for _ in range(rng.randint(0, 4))]
        use_tree = rng.random() < 0.8
        request = with_chunks(chunks[0], chosen, ids(rng, rng.randint(1, 6)), use_tree=use_tree)
    sampling = replace(request.sampling, max_tokens=rng.randint(1, 40), logprobs=3)
    return replace(request, sampling=sampling)


def count_different_answers(decoder: Decoder, cfg: EngineConfig, seed: int) -> tuple[int, int]:
    """Answers of one crowded engine that differ from the same prompt prefilled at once and decoded
    alone, by a token or by a bit of a probability; and how often somebody was preempted."""
    rng = random.Random(seed)
    chunks = [ids(rng, rng.randint(1, 30)) for _ in range(4)]
    requests = [make_request(rng, chunks) for _ in range(10)]
    with Engine(Decoder(decoder.spec, decoder.weights), cfg) as engine:
        tickets: list[Ticket] = [engine.submit(request) for request in requests]
        answers = [list(ticket) for ticket in tickets]
        preemptions = engine.stats()["preemptions"]
    right = [alone(decoder, request) for request in requests]
    return sum(a != b for a, b in zip(answers, right, strict=True)), int(preemptions)


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
