"""Text as it comes equals text at the end, however it is cut; hypothesis looks for exceptions."""

import json
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, normalizers, trainers

from kvweave.text.detokenizer import UNFINISHED, WINDOW, Detokenizer, StopMatcher
from kvweave.text.tokenizer import Tokenizer
from worlds.tiny_models import CHAT_TEXT, make_tokenizer_files


class Tokens(NamedTuple):
    tokenizer: Tokenizer
    byte_ids: list[int]  # the token that is this one byte


@cache
def byte_level() -> Tokens:
    """Tokens are runs of bytes, as in GPT, Llama 3, Qwen and SmolLM."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]  # bytes that stand for themselves
    others = [b for b in range(256) if b not in shown]
    letters = {b: chr(b) for b in shown} | {b: chr(256 + i) for i, b in enumerate(others)}
    with TemporaryDirectory() as folder:
        fast = make_tokenizer_files(Path(folder))
        byte_ids = [fast.token_to_id(letters[b]) for b in range(256)]
        return Tokens(Tokenizer(Path(folder)), byte_ids)


@cache
def sentence_piece() -> Tokens:
    """A space is ▁, the first is stripped; rare characters are byte tokens, as in Llama 2."""
    special = ["<unk>", "<s>", "</s>"]
    byte_tokens = [f"<0x{b:02X}>" for b in range(256)]
    fast = FastTokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    fast.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    fast.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=[*special, *byte_tokens], show_progress=False
    )
    fast.train_from_iterator([CHAT_TEXT.encode("ascii", "ignore").decode()] * 2, trainer)
    with TemporaryDirectory() as folder:
        fast.save(f"{folder}/tokenizer.json")
        # Training can only add the byte tokens as special ones, which they are not.
        path = Path(folder) / "tokenizer.json"
        config = json.loads(path.read_text())
        config["added_tokens"] = [t for t in config["added_tokens"] if t["content"] in special]
        path.write_text(json.dumps(config))
        tokenizer = Tokenizer(Path(folder))
    return Tokens(tokenizer, [fast.token_to_id(token) for token in byte_tokens])


def pieces_of(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer)
    return [*(detokenizer.push(i) for i in ids), detokenizer.flush()]


SNIPPETS = ["node", " drain", "ß", "東京", "😀", "👩‍🚀", " ", "\n", "e\u0301", "the lazy dog. "]
TEXTS = st.text(st.characters(exclude_categories=["Cs"])) | st.lists(
    st.sampled_from(SNIPPETS), max_size=40
).map("".join)


@settings(deadline=None)
@given(st.lists(st.integers(0, byte_level().tokenizer.vocab_size - 1), max_size=100))
def test_pieces_join_to_the_whole_whatever_the_ids(ids: list[int]) -> None:
    tokenizer = byte_level().tokenizer
    assert "".join(pieces_of(tokenizer, ids)) == tokenizer.decode(ids, skip_special=True)


@settings(deadline=None)
@given(st.lists(st.sampled_from([*"😀ßA".encode(), 0x80, 0xFF]), max_size=60))
def test_bytes_that_are_nearly_text_join_to_the_whole(data: list[int]) -> None:
    tokenizer, byte_ids = byte_level()
    pieces = pieces_of(tokenizer, [byte_ids[b] for b in data])
    assert "".join(pieces) == bytes(data).decode(errors="replace")
    assert not any(piece.endswith(UNFINISHED) for piece in pieces[:-1])


@pytest.mark.parametrize("make", [byte_level, sentence_piece])
@settings(deadline=None)
@given(text=TEXTS)
def test_text_comes_in_whole_characters(make: Callable[[], Tokens], text: str) -> None:
    tokenizer, _ = make()
    ids = tokenizer.encode(text)
    whole = tokenizer.decode(ids, skip_special=True)
    pieces = pieces_of(tokenizer, ids)
    assert "".join(pieces) == whole
    assert UNFINISHED in whole or not any(UNFINISHED in piece for piece in pieces)


@pytest.mark.parametrize("make", [byte_level, sentence_piece])
@settings(deadline=None)
@given(text=TEXTS, special=st.integers(0, 2), step=st.integers(1, 5))
def test_special_tokens_come_between_and_change_nothing(
    make: Callable[[], Tokens], text: str, special: int, step: int
) -> None:
    tokenizer, _ = make()
    ids = tokenizer.encode(text)
    mixed = [j for n, i in enumerate(ids) for j in ([special, i] if n % step == 0 else [i])]
    assert "".join(pieces_of(tokenizer, mixed)) == "".join(pieces_of(tokenizer, ids))


def test_a_word_behind_many_special_tokens_keeps_its_space() -> None:
    tokenizer, _ = sentence_piece()
    drain, node = tokenizer.encode("drain"), tokenizer.encode("node")  # each with a ▁ in front
    assert "".join(pieces_of(tokenizer, [*drain, *[1] * 100, *node])) == "drain node"


@pytest.mark.parametrize("character", ["😀", "東", "ß", "a"])
@pytest.mark.parametrize("make", [byte_level, sentence_piece])
def test_a_long_run_is_decoded_a_few_tokens_at_a_time(
    make: Callable[[], Tokens], character: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer, byte_ids = make()
    ids = [byte_ids[b] for b in character.encode()] * 200
    lengths: list[int] = []
    decode = Tokenizer.decode

    def counting(self: Tokenizer, ids: list[int], *, skip_special: bool = False) -> str:
        lengths.append(len(ids))
        return decode(self, ids, skip_special=skip_special)

    monkeypatch.setattr(Tokenizer, "decode", counting)
    assert "".join(pieces_of(tokenizer, ids)) == character * 200
    assert max(lengths) <= WINDOW + 4


def first_stop(text: str, stops: list[str]) -> str | None:
    """The definition: what stands in front of the stop that is complete first, longest first."""
    for end in range(len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end - max(map(len, found))]
    return None


LETTERS = st.text("ab", max_size=12)


@settings(deadline=None, max_examples=300)
@example(text="aba", stops=["aba", "b"], cuts=[])  # "b" is complete first
@example(text="aba", stops=["aba", "ba"], cuts=[2])  # both at once: the longer one
@given(
    text=LETTERS,
    stops=st.lists(st.text("ab", min_size=1, max_size=4), max_size=4),
    cuts=st.lists(st.integers(0, 12)),
)
def test_a_stop_cuts_the_same_however_the_text_is_split(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    matcher, out, stopped = StopMatcher(stops), "", False
    bounds = sorted({0, len(text), *(c for c in cuts if c < len(text))})
    for start, end in pairwise(bounds):
        cut = matcher.push(text[start:end])
        out += cut.text
        assert not any(stop in out for stop in stops)
        if stopped := cut.stopped:
            break
    out += matcher.flush()
    expected = first_stop(text, stops)
    assert stopped == (expected is not None)
    assert out == (text if expected is None else expected)


def test_only_what_may_become_a_stop_is_held_back() -> None:
    matcher = StopMatcher(["</s>"])
    assert matcher.push("abc<").text == "abc"
    assert matcher.push("b").text == "<b"
    assert matcher.push("</").text == ""
    assert matcher.flush() == "</"
