"""Prompts cut into spans: what is exact, what is reused, what must be computed."""

import json

import numpy as np
import pytest

from kvweave.fuse.request import FuseRequest, State, classify
from kvweave.kv.format.keys import ChunkKey
from kvweave.model.decoder import Decoder
from kvweave.model.load import load_decoder
from kvweave.text.prompt import Document, Prompt, build_prompt
from kvweave.text.tokenizer import Tokenizer
from worlds.fuse import SELECTING, World, assert_same, assert_same_kv
from worlds.tiny_models import make_chat_model_folder

A, B, C = (ChunkKey(bytes([i]) * 32) for i in range(3))


def make_request(present: set[ChunkKey], *, first_is_exact: bool = True) -> FuseRequest:
    chunks = [(A, [1, 2]), (B, [3]), (C, [4, 5, 6])]
    return classify([7, 8], chunks, [9, 10], present=present, first_is_exact=first_is_exact)


def test_spans_lie_behind_each_other_and_cover_the_prompt() -> None:
    request = make_request({A, B, C})
    assert request.prompt_ids == (7, 8, 1, 2, 3, 4, 5, 6, 9, 10)
    assert [(span.start, span.end) for span in request.spans] == [(2, 4), (4, 5), (5, 8)]
    assert (request.preamble_len, request.question_start) == (2, 8)
    assert request.asked == range(8, 10)


def test_the_first_chunk_is_exact_and_no_candidate() -> None:
    request = make_request({A, B, C})
    assert [s.state for s in request.spans] == [State.EXACT, State.REUSED, State.REUSED]
    assert request.hits == [4, 5, 6, 7]
    assert request.must_compute == [8, 9]
    fused = make_request({A, B, C}, first_is_exact=False)
    assert [s.state for s in fused.spans] == [State.REUSED] * 3
    assert fused.hits == [2, 3, 4, 5, 6, 7]


def test_a_hit_behind_a_missing_first_chunk_is_not_exact() -> None:
    request = make_request({B, C})
    assert [s.state for s in request.spans] == [State.COMPUTED, State.REUSED, State.REUSED]
    assert request.must_compute == [2, 3, 8, 9]
    assert [s.key for s in request.placed] == [B, C]


def test_hits_misses_and_exact_spans_share_the_prompt_without_overlap() -> None:
    for present in ({A}, {B}, {A, C}, set(), {A, B, C}):
        request = make_request(set(present))
        exact = [p for s in request.spans if s.state is State.EXACT for p in range(s.start, s.end)]
        parts = [*range(2), *exact, *request.hits, *request.must_compute]
        assert sorted(parts) == list(range(10))


@pytest.mark.parametrize("packed", [False, True])
def test_ids_of_few_positions_and_of_many_are_the_prompts(packed: bool) -> None:
    ids = [1_000_003 * i for i in range(100)]
    request = classify(ids[:3], [(A, ids[3:90])], ids[90:], present={A}, first_is_exact=True)
    if packed:
        _ = request.ids
    for positions in ([99], [0, 50, 99], list(range(0, 100, 2)), list(range(100))):
        found = request.ids_at(np.array(positions))
        assert (found.dtype, found.tolist()) == (np.int64, [ids[i] for i in positions])


def test_the_users_words_are_part_of_the_question() -> None:
    request = classify([7], [(A, [1])], [2, 3, 4], present={A}, first_is_exact=True, asked=(1, 2))
    assert request.asked == range(3, 4)
    for asked in ((0, 0), (2, 1), (0, 4), (-1, 2)):
        with pytest.raises(AssertionError, match="inside the question"):
            classify([7], [], [2, 3, 4], present=(), first_is_exact=True, asked=asked)


# ── tokenizers with and without BOS ─────────────────────────────────────────────────────────────

DOCUMENTS = [
    Document("The quick brown fox jumps over the lazy dog.", "Fox"),
    Document("Drain the node, then restart it."),
    Document("<|endoftext|>Be brief <|im_start|>and exact."),
]
WHAT = ["template", "bos", "nothing"]


@pytest.fixture(scope="module", params=WHAT)
def chat(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Tokenizer, Decoder]:
    folder = make_chat_model_folder(tmp_path_factory.mktemp("chat"))
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    if request.param != "template":
        del config["chat_template"]
    if request.param == "bos":
        config["bos_token"] = "<|endoftext|>"
    path.write_text(json.dumps(config))
    return Tokenizer(folder), load_decoder(folder, device="cpu", dtype="float32")


def world_of(decoder: Decoder, prompt: Prompt) -> World:
    return World(decoder, prompt.preamble, prompt.chunks, prompt.question, asked=prompt.asked)


@pytest.mark.parametrize("system", ["Be brief.", ""])
def test_real_prompts_fuse_exactly_with_and_without_bos(
    chat: tuple[Tokenizer, Decoder], system: str
) -> None:
    tokenizer, decoder = chat
    prompt = build_prompt(tokenizer, "how do I drain a node?", DOCUMENTS, system)
    world = world_of(decoder, prompt)
    assert list(world.request.prompt_ids) == prompt.token_ids
    full = world.full
    for name in SELECTING:
        fused, ours = world.fuse(name, 0.2)
        assert fused.recomputed
        assert_same_kv(ours, full, slice(0, world.request.spans[0].end))
        assert_same(world.fuse(name, 1.0)[1], full)


def test_a_bos_stands_in_the_preamble_or_nowhere(chat: tuple[Tokenizer, Decoder]) -> None:
    tokenizer, _ = chat
    prompt = build_prompt(tokenizer, "how?", DOCUMENTS)
    alone = build_prompt(tokenizer, "why?", DOCUMENTS[1:2])
    assert prompt.chunks[1] == alone.chunks[0]  # the same ids wherever it stands
    assert prompt.preamble == alone.preamble
    bos = tokenizer.bos_id
    assert (prompt.preamble[0] == bos) is (bos is not None)
    specials = tokenizer.special_ids
    assert not any(i in specials for chunk in prompt.chunks for i in chunk)
    bare = build_prompt(tokenizer, "how?", DOCUMENTS, system="")
    if not tokenizer.has_chat_template:
        assert bare.preamble == (() if bos is None else (bos,))


def test_the_users_words_are_found_behind_the_label(chat: tuple[Tokenizer, Decoder]) -> None:
    tokenizer, _ = chat
    prompt = build_prompt(tokenizer, "how do I drain a node?", DOCUMENTS)
    words = tokenizer.decode(prompt.question[slice(*prompt.asked)])
    assert words.strip() == "how do I drain a node?"
