"""Our decoder equals transformers, and every road through it gives the same answer."""

import random
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kvweave.model.decoder import Decoder
from kvweave.model.load import load_decoder
from kvweave.model.rows import Rows
from worlds.tiny_models import VARIANTS, make_model_folder, reference_logits

PROMPT = random.Random(7).choices(range(97), k=70)


@pytest.fixture(scope="module", params=sorted(VARIANTS))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("models"), request.param)


@pytest.fixture(scope="module")
def decoder(folder: Path) -> Decoder:
    return load_decoder(folder, device="cpu", dtype="float32")


def all_logits(decoder: Decoder, ids: list[int]) -> Tensor:
    rows = Rows(ids, range(len(ids)), decoder.new_kv(len(ids)), range(len(ids)))
    return decoder.forward([rows])


def test_logits_match_transformers(folder: Path, decoder: Decoder) -> None:
    ours = all_logits(decoder, PROMPT)
    torch.testing.assert_close(ours, reference_logits(folder, PROMPT), atol=1e-4, rtol=1e-4)


def test_incremental_decode_equals_one_shot(decoder: Decoder) -> None:
    ids = PROMPT[:25]
    kv = decoder.new_kv(4)  # too small on purpose: it has to grow
    steps = [decoder.forward([Rows(ids[:9], range(9), kv, range(9))])]
    steps += [decoder.forward([Rows([ids[i]], [i], kv, [0])]) for i in range(9, len(ids))]
    torch.testing.assert_close(torch.cat(steps), all_logits(decoder, ids), atol=1e-4, rtol=1e-4)


def test_prefill_in_slices_equals_one_shot(decoder: Decoder) -> None:
    kv = decoder.new_kv(len(PROMPT))
    slices = [(0, 1), (1, 30), (30, 31), (31, 70)]
    parts = [decoder.forward([Rows(PROMPT[a:b], range(a, b), kv, range(b - a))]) for a, b in slices]
    torch.testing.assert_close(torch.cat(parts), all_logits(decoder, PROMPT), atol=1e-4, rtol=1e-4)


def test_a_batch_of_ragged_prompts_equals_one_by_one(decoder: Decoder) -> None:
    prompts = [PROMPT[:1], PROMPT[3:40], PROMPT[10:13], PROMPT]
    running = decoder.new_kv(32)  # and one sequence that is already decoding
    decoder.forward([Rows(PROMPT[:20], range(20), running, [])])
    batch = [Rows(p, range(len(p)), decoder.new_kv(len(p)), [len(p) - 1]) for p in prompts]
    batch.insert(2, Rows([PROMPT[20]], [20], running, [0]))
    together = decoder.forward(batch)
    alone = [all_logits(decoder, p)[-1] for p in prompts]
    alone.insert(2, all_logits(decoder, PROMPT[:21])[-1])
    torch.testing.assert_close(together, torch.stack(alone), atol=1e-4, rtol=1e-4)


def test_recomputing_scattered_rows_changes_nothing_when_the_cache_is_exact(
    decoder: Decoder,
) -> None:
    kv = decoder.new_kv(len(PROMPT))
    decoder.forward([Rows(PROMPT, range(len(PROMPT)), kv, [])])
    picked = [3, 4, 17, 40, 69]
    again = decoder.forward([Rows([PROMPT[i] for i in picked], picked, kv, range(len(picked)))])
    torch.testing.assert_close(again, all_logits(decoder, PROMPT)[picked], atol=1e-4, rtol=1e-4)


def test_a_later_token_never_changes_an_earlier_row(decoder: Decoder) -> None:
    changed = [*PROMPT[:50], (PROMPT[50] + 1) % 97, *PROMPT[51:]]
    before, after = all_logits(decoder, PROMPT), all_logits(decoder, changed)
    # not bit by bit: experts group other rows, and products round by their shape
    torch.testing.assert_close(before[:50], after[:50], atol=1e-4, rtol=1e-5)
    assert (before[50:] - after[50:]).abs().amax() > 0.1


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_stays_near_float32(folder: Path, decoder: Decoder, dtype: str) -> None:
    exact = reference_logits(folder, PROMPT)
    ours = all_logits(load_decoder(folder, device="cpu", dtype=dtype), PROMPT)
    theirs = reference_logits(folder, PROMPT, getattr(torch, dtype))
    # As far from float32 as transformers itself is in this dtype, give or take. With experts only
    # the best row counts: where rounding sends one row to another expert, all that see it follow.
    share = 0.0 if decoder.spec.experts else 0.5
    assert off(ours - exact, share) < 1.5 * off(theirs - exact, share) + 2e-3


def off(gap: Tensor, share: float) -> Tensor:
    """Mean error of the row at that share of the rows, best first."""
    return gap.abs().mean(dim=1).quantile(share)
