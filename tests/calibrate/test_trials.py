"""Trials side by side equal the decoder one by one, and are judged by figures one can check."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kvweave.calibrate.case import Case
from kvweave.calibrate.encodings import ContextPrefixes
from kvweave.calibrate.trials import Trials, judge
from kvweave.fuse.fuse import fuse
from kvweave.fuse.sources import ComputedChunks
from kvweave.fuse.stitched import stitch
from kvweave.model.decoder import Decoder
from kvweave.model.load import load_decoder
from kvweave.model.rows import Rows
from kvweave.model.sequence_kv import SequenceKV
from worlds.fuse import World
from worlds.tiny_models import make_model_folder

ANSWER = [4, 8, 15, 16, 23, 42]
SETTINGS = [("reuse", 0.0), ("epic", 0.3), ("fusionrag", 1.0)]


@pytest.fixture(scope="module", params=["llama", "qwen3", "mixtral"])
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> World:
    folder = make_model_folder(tmp_path_factory.mktemp("models"), request.param)
    return World(load_decoder(folder, device="cpu", dtype="float32"))


def run(world: World, room: int) -> tuple[Trials, Tensor, list[SequenceKV]]:
    """The same three settings twice: in one batch, and each in a buffer of its own."""
    decoder, request = world.decoder, world.request
    trials = Trials(decoder, len(SETTINGS), len(request.prompt_ids), room)
    logits, alone = [], []
    for i, (name, ratio) in enumerate(SETTINGS):
        kv = trials.kv(i)
        stitched = stitch(decoder, request, world.prefix, world.source, kv)
        strategy = replace(world.strategy(name), drift=0.0, taper=None)
        logits.append(fuse(stitched, strategy, ratio).logits)
        own = decoder.new_kv(1)
        fuse(world.stitched(own), strategy, ratio)
        alone.append(own)
    return trials, torch.stack(logits), alone


def step(decoder: Decoder, kv: SequenceKV, token: int, at: int) -> Tensor:
    return decoder.forward([Rows([token], [at], kv, [0])])[0]


def test_following_an_answer_equals_feeding_it_token_by_token(world: World) -> None:
    trials, first, alone = run(world, len(ANSWER))
    ours = trials.follow(first, ANSWER)
    assert ours.shape == (len(SETTINGS), len(ANSWER), first.shape[1])
    start = len(world.request.prompt_ids)
    for i, kv in enumerate(alone):
        logits = [first[i]]
        logits += [step(world.decoder, kv, t, start + j) for j, t in enumerate(ANSWER[:-1])]
        want = torch.stack(logits).log_softmax(-1)
        torch.testing.assert_close(ours[i], want, atol=1e-4, rtol=1e-4)
    assert not torch.allclose(ours[0], ours[2], atol=1e-2)  # the ways do differ


def test_following_one_token_needs_no_step(world: World) -> None:
    trials, first, _ = run(world, 0)
    ours = trials.follow(first, ANSWER[:1])
    torch.testing.assert_close(ours[:, 0], first.log_softmax(-1))


def test_following_twice_gives_the_same(world: World) -> None:
    trials, first, _ = run(world, len(ANSWER))
    once = trials.follow(first, ANSWER)
    trials.follow(first, list(reversed(ANSWER)))
    assert torch.equal(once, trials.follow(first, ANSWER))


def test_greedy_answers_equal_decoding_one_by_one(world: World) -> None:
    trials, first, alone = run(world, 8)
    start = len(world.request.prompt_ids)
    want = []
    for i, kv in enumerate(alone):
        tokens = [int(first[i].argmax())]
        for j in range(7):
            tokens.append(int(step(world.decoder, kv, tokens[-1], start + j).argmax()))
        want.append(tokens)
    assert trials.greedy(first, (), 8) == want
    end = want[0][3]
    cut = [tokens[: tokens.index(end) + 1] if end in tokens else tokens for tokens in want]
    assert trials.greedy(first, {end}, 8) == cut
    assert trials.greedy(first, (), 1) == [tokens[:1] for tokens in want]


def test_fewer_logits_than_room_follow_the_first_trials(world: World) -> None:
    trials, first, _ = run(world, len(ANSWER))
    whole = trials.follow(first, ANSWER)
    torch.testing.assert_close(trials.follow(first[:2], ANSWER), whole[:2])


def test_a_trial_has_no_more_room_than_it_was_given(world: World) -> None:
    trials = Trials(world.decoder, 1, 10, 2)
    trials.kv(0).reserve(12)
    with pytest.raises(AssertionError, match="room"):
        trials.kv(0).reserve(13)


def test_trials_of_a_half_precision_model_are_half_precision(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path, "llama")
    half = World(load_decoder(folder, device="cpu", dtype="bfloat16"))
    trials, first, _ = run(half, len(ANSWER))
    assert trials.kv(0).keys(0).dtype == torch.bfloat16
    ours = trials.follow(first, ANSWER)
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours.exp().sum(-1), torch.ones(3, len(ANSWER)))


def test_judged_figures_are_those_of_a_hand_calculation() -> None:
    full = torch.tensor([[0.5, 0.25, 0.25], [0.1, 0.8, 0.1]]).log()
    trial = torch.tensor([[0.25, 0.5, 0.25], [0.2, 0.6, 0.2]]).log()
    judged = judge(full, trial, [0, 1])
    first = 0.5 * math.log(2) - 0.25 * math.log(2)
    second = 0.8 * math.log(0.8 / 0.6) + 2 * 0.1 * math.log(0.5)
    assert judged.kl_first == pytest.approx(first, abs=1e-6)
    assert judged.kl_mean == pytest.approx((first + second) / 2, abs=1e-6)
    assert judged.kl_max == pytest.approx(first, abs=1e-6)
    assert judged.nll == pytest.approx(-(math.log(0.25) + math.log(0.6)) / 2, abs=1e-6)
    assert judged.top1 == 0.5
    assert judged.first_flips


def test_full_prefill_judged_against_itself_is_perfect() -> None:
    full = torch.randn(5, 40, generator=torch.Generator().manual_seed(0)).log_softmax(-1)
    judged = judge(full, full, [1, 2, 3, 4, 5])
    assert (judged.kl_mean, judged.kl_first, judged.kl_max) == (0.0, 0.0, 0.0)
    assert judged.top1 == 1.0
    assert not judged.first_flips


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
        kv, preamble = trials.kv(number), ContextPrefixes(decoder).prefix_for(case.preamble)
        stitched = stitch(decoder, request, preamble, ComputedChunks([]), kv)
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
