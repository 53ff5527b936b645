"""tokenizer.json and tokenizer_config.json from the vocabulary inside a GGUF file.

Two kinds exist. "gpt2" is byte-level BPE: the file has the merges, and the name of the rule that
cuts text before them (`tokenizer.ggml.pre`). "llama" is SentencePiece BPE: the file has a score
per piece, and the merges follow from the scores.

How text is cut is code, not data, so a rule we do not know is refused: a guess would give almost
the right tokens, which is an error that does not show.
"""

import json
from collections.abc import Callable
from typing import Any, NamedTuple

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers import models as tokenizer_models
from tokenizers.processors import TemplateProcessing

from kvweave.errors import ModelCorrupt, UnsupportedModel
from kvweave.model.files.gguf.file import GGUFFile

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4  # token types; the others are ordinary pieces
# control tokens that end a turn in one chat format or another
_TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<|endoftext|>")

_CASELESS_SUFFIXES = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS_AND_SPACES = (
    r"|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3 = _CASELESS_SUFFIXES + _WORDS_AND_SPACES % r"\p{N}{1,3}"
_QWEN2 = _CASELESS_SUFFIXES + _WORDS_AND_SPACES % r"\p{N}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class _PreTokenizer(NamedTuple):
    """How text is cut before byte-level BPE."""

    make: Callable[[], Any]  # a pre-tokenizer
    nfc: bool = False  # compose characters first
    whole_words: bool = False  # a cut that is a token itself is taken before any merge
    adds_bos: bool = False  # when the file does not say


def _gpt2() -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _digits_then_gpt2() -> Any:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def _by(pattern: str) -> Callable[[], Any]:
    def make() -> Any:
        cut = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        return pre_tokenizers.Sequence([cut, byte_level])

    return make


_LLAMA3_PRE = _PreTokenizer(_by(_LLAMA3), whole_words=True, adds_bos=True)
_PRE_TOKENIZERS: dict[str, _PreTokenizer] = {
    "default": _PreTokenizer(_gpt2),
    "gpt-2": _PreTokenizer(_gpt2),
    "smollm": _PreTokenizer(_digits_then_gpt2),
    "starcoder": _PreTokenizer(_digits_then_gpt2),
    "llama-bpe": _LLAMA3_PRE,
    "llama3": _LLAMA3_PRE,
    "llama-v3": _LLAMA3_PRE,
    "qwen2": _PreTokenizer(_by(_QWEN2), nfc=True),
    "deepseek-r1-qwen": _PreTokenizer(_by(_QWEN2), nfc=True),
    "tekken": _PreTokenizer(_by(_TEKKEN), whole_words=True, adds_bos=True),
}


class TokenizerFiles(NamedTuple):
    """What goes beside the weights."""

    tokenizer_json: str
    tokenizer_config: dict[str, Any]
    eos_ids: list[int]  # every token that ends an answer, the file's own first


def read_tokenizer(gguf: GGUFFile, context_length: int) -> TokenizerFiles:
    vocab = _Vocab(gguf)
    fast, adds_bos = _byte_level(gguf, vocab) if vocab.kind == "gpt2" else _sentencepiece(vocab)
    fast.add_tokens(
        [
            AddedToken(text, special=kind != _USER_DEFINED, normalized=False)
            for text, kind in zip(vocab.tokens, vocab.types, strict=True)
            if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED)
        ]
    )
    specials = {name: vocab.special(name) for name in ("bos", "eos", "unknown", "padding")}
    bos = specials["bos"]
    if bos is not None and vocab.flag("add_bos_token", adds_bos):
        fast.post_processor = TemplateProcessing(
            single=f"{bos} $A",
            pair=f"{bos} $A {bos}:1 $B:1",
            special_tokens=[(bos, vocab.ids[bos])],
        )
    template = gguf.metadata.get("tokenizer.chat_template")
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": context_length,
        "bos_token": bos,
        "eos_token": specials["eos"],
        "unk_token": specials["unknown"],
        "pad_token": specials["padding"],
    }
    if isinstance(template, str):
        config["chat_template"] = template
    return TokenizerFiles(
        json.dumps(json.loads(fast.to_str()), ensure_ascii=False),
        {key: value for key, value in config.items() if value is not None},
        _answer_ends(vocab, template if isinstance(template, str) else ""),
    )


class _Vocab:
    """The token table, checked."""

    def __init__(self, gguf: GGUFFile) -> None:
        self.path = gguf.path
        self._metadata = gguf.metadata
        self.kind = self._metadata.get("tokenizer.ggml.model")
        if self.kind not in ("gpt2", "llama"):
            raise UnsupportedModel(
                f"{self.path} has a tokenizer of kind {self.kind!r}; supported: gpt2, llama; "
                "or pass a folder with a tokenizer.json instead"
            )
        self.tokens: list[str] = self.list_of("tokens", str)
        self.ids = {text: i for i, text in enumerate(self.tokens)}
        if len(self.ids) != len(self.tokens):
            twice = next(t for i, t in enumerate(self.tokens) if self.ids[t] != i)
            raise ModelCorrupt(f"{self.path} has token {twice!r} twice; download it again")
        self.types: list[int] = self.list_of("token_type", int)
        if len(self.types) != len(self.tokens):
            raise ModelCorrupt(
                f"{self.path} has {len(self.tokens)} tokens but {len(self.types)} token types; "
                "download it again"
            )

    def list_of(self, key: str, kind: type) -> list[Any]:
        values = self._metadata.get(f"tokenizer.ggml.{key}")
        if not isinstance(values, list) or not all(isinstance(v, kind) for v in values):
            raise ModelCorrupt(f"{self.path} has no usable tokenizer.ggml.{key}; download it again")
        return values

    def flag(self, key: str, default: bool) -> bool:
        return bool(self._metadata.get(f"tokenizer.ggml.{key}", default))

    def special(self, name: str) -> str | None:
        token_id = self._metadata.get(f"tokenizer.ggml.{name}_token_id")
        if token_id is None:
            return None
        if not isinstance(token_id, int) or not 0 <= token_id < len(self.tokens):
            raise ModelCorrupt(
                f"{self.path}: tokenizer.ggml.{name}_token_id is {token_id!r}, "
                f"outside the {len(self.tokens)} tokens; download it again"
            )
        return self.tokens[token_id]


def _byte_level(gguf: GGUFFile, vocab: _Vocab) -> tuple[Tokenizer, bool]:
    name = gguf.metadata.get("tokenizer.ggml.pre")
    pre = _PRE_TOKENIZERS.get(name) if isinstance(name, str) else None
    if pre is None:
        raise UnsupportedModel(
            f"{vocab.path} cuts text by rule {name!r}; known: {', '.join(_PRE_TOKENIZERS)}; "
            "pass a folder with a tokenizer.json instead"
        )
    merges = [tuple(merge.split(" ")) for merge in vocab.list_of("merges", str)]
    for i, pair in enumerate(merges):
        if len(pair) != 2 or not {*pair, "".join(pair)} <= vocab.ids.keys():
            raise ModelCorrupt(f"{vocab.path} has a broken merge at {i}; download it again")
    fast = Tokenizer(
        tokenizer_models.BPE(vocab=vocab.ids, merges=merges, ignore_merges=pre.whole_words)
    )
    if pre.nfc:
        fast.normalizer = normalizers.NFC()
    fast.pre_tokenizer = pre.make()
    fast.decoder = decoders.ByteLevel()
    return fast, pre.adds_bos


def _sentencepiece(vocab: _Vocab) -> tuple[Tokenizer, bool]:
    scores = vocab.list_of("scores", float)
    if len(scores) != len(vocab.tokens):
        raise ModelCorrupt(f"{vocab.path} has {len(scores)} scores; download it again")
    unknown = vocab.special("unknown")
    fast = Tokenizer(
        tokenizer_models.BPE(
            vocab=vocab.ids,
            merges=_merges_from_scores(vocab, scores),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefix = vocab.flag("add_space_prefix", True)
    fast.normalizer = normalizers.Sequence(
        ([normalizers.Prepend("▁")] if prefix else []) + [normalizers.Replace(" ", "▁")]
    )
    fast.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        + ([decoders.Strip(" ", 1, 0)] if prefix else [])
    )
    return fast, True


def _merges_from_scores(vocab: _Vocab, scores: list[float]) -> list[tuple[str, str]]:
    """Every way to build a piece from two others; pieces with higher scores are built first."""
    found: list[tuple[float, int, int, tuple[str, str]]] = []
    for i, piece in enumerate(vocab.tokens):
        if vocab.types[i] in (_UNKNOWN, _CONTROL):
            continue
        for cut in range(1, len(piece)):
            left, right = vocab.ids.get(piece[:cut]), vocab.ids.get(piece[cut:])
            if left is not None and right is not None:
                found.append((-scores[i], left, right, (piece[:cut], piece[cut:])))
    return [pair for *_, pair in sorted(found)]


def _answer_ends(vocab: _Vocab, template: str) -> list[int]:
    """The file's EOS, and the control tokens its chat template ends turns with."""
    names = [vocab.special("eos"), vocab.special("eot"), vocab.special("eom")]
    names += [
        text
        for text in _TURN_ENDS
        if text in template and text in vocab.ids and vocab.types[vocab.ids[text]] == _CONTROL
    ]
    return list(dict.fromkeys(vocab.ids[name] for name in names if name is not None))
