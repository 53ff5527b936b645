"""Tokenizers rebuilt from a GGUF vocabulary cut text as the model's own tokenizer did."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, normalizers, trainers

from kvweave.errors import ModelCorrupt
from kvweave.model.files.gguf.file import GGUFFile
from kvweave.model.files.gguf.tokenizer import TokenizerFiles, read_tokenizer
from worlds.gguf_files import CORPUS, SPECIALS, bpe_metadata, trained_bpe, write_gguf

ODD_TEXTS = [
    "Hello world 12345, it's 3.14!",
    "naïve café ☕ 日本語 𝒳 👩‍👩‍👧‍👦 e\u0301",
    "  def f(x):\n\t\treturn x   \n\n\n",
    "I'LL we're DON'T",
    "مرحبا שלום हिन्दी ไทย",
    "\r\n\r\n  \u00a0\u3000x\u0000\u0007",
    "௧௨௩ ①② ½ x²",
    "",
    " ",
]


def files_of(tmp_path: Path, metadata: dict[str, Any]) -> TokenizerFiles:
    tensors = {"unused": np.zeros(1, np.float32)}
    return read_tokenizer(GGUFFile(write_gguf(tmp_path / "vocab.gguf", metadata, tensors)), 512)


def fast_of(tmp_path: Path, metadata: dict[str, Any]) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_str(files_of(tmp_path, metadata).tokenizer_json)


PRES = ["default", "gpt-2", "smollm", "llama-bpe", "qwen2", "tekken"]


@pytest.mark.parametrize("pre", PRES)
@pytest.mark.parametrize("text", ODD_TEXTS)
def test_text_comes_back_as_it_went_in(pre: str, text: str, tmp_path: Path) -> None:
    fast = fast_of(tmp_path, bpe_metadata(pre))
    back = fast.decode(fast.encode(text, add_special_tokens=False).ids)
    assert back == (text.replace("e\u0301", "é") if pre == "qwen2" else text)  # qwen2 composes


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("gpt-2", ["it", "'s", " 12345", "  ", " x"]),
        ("smollm", ["it", "'s", " ", "1", "2", "3", "4", "5", "  ", " x"]),
        ("llama-bpe", ["it", "'s", " ", "123", "45", "  ", " x"]),
        ("qwen2", ["it", "'s", " ", "1", "2", "3", "4", "5", "  ", " x"]),
        ("tekken", ["it", "'s", " ", "1", "2", "3", "4", "5", "  ", " x"]),
    ],
)
def test_text_is_cut_by_the_named_rule(pre: str, expected: list[str], tmp_path: Path) -> None:
    cuts = fast_of(tmp_path, bpe_metadata(pre)).pre_tokenizer.pre_tokenize_str("it's 12345   x")
    assert [piece.replace("Ġ", " ") for piece, _ in cuts] == expected


def test_capitals_are_cut_apart_by_tekken_alone(tmp_path: Path) -> None:
    def cuts(pre: str) -> list[str]:
        cutter = fast_of(tmp_path, bpe_metadata(pre)).pre_tokenizer
        return [piece for piece, _ in cutter.pre_tokenize_str("camelCaseWord DON'T")]

    assert cuts("tekken") == ["camel", "Case", "Word", "ĠDON", "'T"]
    assert cuts("llama-bpe") == ["camelCaseWord", "ĠDON", "'T"]
    assert cuts("gpt-2") == ["camelCaseWord", "ĠDON", "'", "T"]


def test_special_tokens_are_found_inside_text(tmp_path: Path) -> None:
    fast = fast_of(tmp_path, bpe_metadata())
    ids = fast.encode("<|im_start|>user\nthe fox<|im_end|>\n", add_special_tokens=False).ids
    assert (ids[0], ids[-2]) == (1, 2)
    assert ids.count(1) == ids.count(2) == 1
    added = fast.get_added_tokens_decoder()
    assert {token.content: token.special for token in added.values()} == dict.fromkeys(
        SPECIALS, True
    )
    assert fast.decode(ids, skip_special_tokens=True) == "user\nthe fox\n"


def test_user_defined_tokens_are_found_but_not_special(tmp_path: Path) -> None:
    metadata = bpe_metadata()
    types = list(metadata["tokenizer.ggml.token_type"])
    types[0] = 4
    fast = fast_of(tmp_path, metadata | {"tokenizer.ggml.token_type": types})
    ids = fast.encode("the<|endoftext|>fox", add_special_tokens=False).ids
    assert 0 in ids
    assert fast.decode(ids, skip_special_tokens=True) == "the<|endoftext|>fox"


@pytest.mark.parametrize(
    ("pre", "flag", "expected"),
    [
        ("gpt-2", None, False),
        ("gpt-2", True, True),
        ("llama-bpe", None, True),
        ("qwen2", None, False),
        ("llama-bpe", False, False),
    ],
)
def test_a_bos_is_added_when_the_file_or_the_rule_says_so(
    pre: str, flag: bool | None, expected: bool, tmp_path: Path
) -> None:
    metadata = bpe_metadata(pre)
    if flag is not None:
        metadata["tokenizer.ggml.add_bos_token"] = flag
    assert (fast_of(tmp_path, metadata).encode("fox").ids[0] == 1) is expected


def test_a_token_that_ends_a_turn_in_the_template_ends_an_answer(tmp_path: Path) -> None:
    assert files_of(tmp_path, bpe_metadata()).eos_ids == [2]
    metadata = bpe_metadata() | {"tokenizer.ggml.eos_token_id": 0}
    assert files_of(tmp_path, metadata).eos_ids == [0, 2]
    metadata["tokenizer.chat_template"] = "{{ messages[0]['content'] }}"
    assert files_of(tmp_path, metadata).eos_ids == [0]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tokenizer.ggml.eos_token_id": 9999}, "eos_token_id is 9999, outside the 320 tokens"),
        ({"tokenizer.ggml.token_type": [1, 1]}, "320 tokens but 2 token types"),
        ({"tokenizer.ggml.merges": ["qq zz"]}, "a broken merge at 0"),
        ({"tokenizer.ggml.merges": ["threewords"]}, "a broken merge at 0"),
        ({"tokenizer.ggml.tokens": ["a"] * 320}, "token 'a' twice"),
    ],
)
def test_a_broken_vocabulary_is_corrupt(
    changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelCorrupt, match=words):
        files_of(tmp_path, bpe_metadata() | changes)


def sentencepiece_like() -> tuple[tokenizers.Tokenizer, dict[str, Any]]:
    """A BPE over ▁-marked text with byte fallback, and the same as scores in GGUF metadata."""
    control = ["<unk>", "<s>", "</s>"]
    byte_tokens = [f"<0x{value:02X}>" for value in range(256)]
    fast = tokenizers.Tokenizer(
        tokenizers.models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
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
    words = [f" {word}" for line in CORPUS for word in line.split()]
    trainer = trainers.BpeTrainer(
        vocab_size=450, special_tokens=control + byte_tokens, show_progress=False
    )
    trained = tokenizers.Tokenizer(tokenizers.models.BPE())
    trained.normalizer = normalizers.Replace(" ", "▁")
    trained.train_from_iterator(words, trainer)
    model = json.loads(trained.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    fast.model = tokenizers.models.BPE(
        vocab=model["vocab"],
        merges=[tuple(pair) for pair in model["merges"]],
        unk_token="<unk>",
        fuse_unk=True,
        byte_fallback=True,
    )
    rank = {"".join(pair): i for i, pair in enumerate(model["merges"])}
    types = [2, 3, 3] + [6] * 256 + [1] * (len(tokens) - 259)
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [-float(rank.get(token, 1e6)) for token in tokens],
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    return fast, metadata


@pytest.mark.parametrize("text", [*CORPUS[:3], *ODD_TEXTS])
def test_merges_from_scores_give_the_tokens_of_the_original(text: str, tmp_path: Path) -> None:
    original, metadata = sentencepiece_like()
    rebuilt = fast_of(tmp_path, metadata)
    ids = rebuilt.encode(text, add_special_tokens=False).ids
    assert ids == original.encode(text, add_special_tokens=False).ids
    assert rebuilt.decode(ids) == text
    assert rebuilt.encode(text).ids == [1, *ids]


def test_without_a_space_prefix_nothing_is_put_in_front(tmp_path: Path) -> None:
    _, metadata = sentencepiece_like()
    fast = fast_of(tmp_path, metadata | {"tokenizer.ggml.add_space_prefix": False})
    ids = fast.encode("the fox", add_special_tokens=False).ids
    assert fast.id_to_token(ids[0]).startswith("t")
    assert fast.decode(ids) == "the fox"


def test_ids_are_those_of_the_file(tmp_path: Path) -> None:
    vocab = fast_of(tmp_path, bpe_metadata()).get_vocab(with_added_tokens=True)
    assert sorted(vocab, key=vocab.__getitem__) == trained_bpe()[0]
