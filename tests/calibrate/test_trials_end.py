"""Trials side by side: greedy answers end where each of them ends."""

from pathlib import Path

import pytest
import torch

from kvweave.calibrate.case import Case
from kvweave.calibrate.encodings import ContextPrefixes
from kvweave.calibrate.trials import Trials
from kvweave.fuse.fuse import fuse
from kvweave.fuse.sources import ComputedChunks
from kvweave.fuse.stitched import Stitched
from kvweave.model.decoder import Decoder
from kvweave.model.load import load_decoder
from kvweave.model.rows import Rows

ROOM = 6


@pytest.fixture(scope="module")
def decoder(chat_model_folder: Path) -> Decoder:
    return load_decoder(chat_model_folder, device="cpu", dtype="float32")


@pytest.fixture(scope="module")
def prefilled(decoder: Decoder) -> tuple[Trials, torch.Tensor]:
    """Two prompts of one length, as two trials."""
    trials, logits = Trials(decoder, 2, 9, ROOM), []
    for number, chunk in enumerate(((5, 6, 7, 8), (9, 10, 11, 12))):
        case = Case((1, 2), (chunk,), (13, 14, 15), (0, 3))
        request = case.request((), first_is_exact=False)
        kv, preamble = trials.kv(number), ContextPrefixes(decoder).of(case.preamble)
        stitched = Stitched(decoder, request, preamble, ComputedChunks([]), kv)
        logits.append(fuse(stitched).logits)
    return trials, torch.stack(logits)


def test_a_trial_can_be_prefilled_by_a_plain_forward_pass(decoder: Decoder) -> None:
    ids = (1, 2, 5, 6, 7, 8, 13, 14, 15)
    whole = [len(ids) - 1]
    trial, own = Trials(decoder, 1, len(ids), ROOM).kv(0), decoder.new_kv(len(ids))
    got = decoder.forward([Rows(ids, range(len(ids)), trial, whole)])
    assert torch.equal(got, decoder.forward([Rows(ids, range(len(ids)), own, whole)]))
    assert torch.equal(trial.keys(1), own.keys(1))


def test_without_end_tokens_every_answer_has_full_length(
    prefilled: tuple[Trials, torch.Tensor],
) -> None:
    trials, first = prefilled
    answers = trials.greedy(first, (), ROOM)
    assert [len(answer) for answer in answers] == [ROOM, ROOM]
    assert answers[0] != answers[1]


def test_an_answer_ends_with_its_first_end_token_and_the_others_go_on(
    prefilled: tuple[Trials, torch.Tensor],
) -> None:
    trials, first = prefilled
    one, other = trials.greedy(first, (), ROOM)
    end = one[1]
    cut, whole = trials.greedy(first, (end,), ROOM)
    assert cut == one[: one.index(end) + 1]
    assert whole == (other[: other.index(end) + 1] if end in other else other)


def test_decoding_stops_when_every_answer_has_ended(
    prefilled: tuple[Trials, torch.Tensor], decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    trials, first = prefilled
    steps: list[int] = []
    whole = decoder.logits
    monkeypatch.setattr(decoder, "logits", lambda h: steps.append(len(h)) or whole(h))
    ended = trials.greedy(first, range(decoder.spec.vocab_size), ROOM)
    assert [len(answer) for answer in ended] == [1, 1]
    assert steps == []
