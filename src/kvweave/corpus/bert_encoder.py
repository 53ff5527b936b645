"""A plain BERT sentence encoder with torch, safetensors and tokenizers alone.

MiniLM and its kin: a BERT encoder, the mean of its rows, length one. To import
sentence-transformers for that takes longer than to answer the first question; this file reads the
same folder and gives the same vectors. `BertFolder.read` takes only what it computes exactly;
any other folder is None, and sentence-transformers has it.

Shapes: B texts of a batch, R tokens of all of them, T of the longest, E width, H heads, D width of
a head.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from kvweave.kernels.linear import Linear, Projection

    Attend = Callable[[Tensor], Tensor]  # [R, 3, H, D] to [R, H, D]

MODULES = (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"])
# what an absent key means → the only value that is computed here
BERT = {
    "model_type": ("", "bert"),
    "hidden_act": ("gelu", "gelu"),
    "position_embedding_type": ("absolute", "absolute"),
    "is_decoder": (False, False),
    "add_cross_attention": (False, False),
    "architectures": (["BertModel"], ["BertModel"]),
}
EncoderWeights = Literal["auto", "float32"]
BATCH_ROWS = 1024  # what lies between two products stays in the cache: Neoverse-N1, MiniLM
QKV = "qkv"  # query, key and value in one product
LEAST_WEIGHTS = 4_000_000  # of all products: fewer are fast enough in float32
LEAST_EXTRA = 64  # columns that the large dims of a product are split into, or as a decoder's are
HEAD = ("pooler.", "embeddings.position_ids")  # tensors that vectors do not depend on


class BertFolder(NamedTuple):
    """A sentence-transformers folder whose vectors `BertEncoder` computes."""

    path: Path
    config: dict[str, Any]  # config.json
    max_tokens: int  # of a text, with the two around it; the rest is cut off

    @classmethod
    def read(cls, path: Path) -> "BertFolder | None":
        """None for any other kind of model, and for a folder that is damaged: the library that
        most models are made for says better what is wrong with it."""
        try:
            modules = _json(path / "modules.json")
            if [module["type"].rpartition(".")[2] for module in modules] not in MODULES:
                return None
            if modules[0]["path"] or not _is_mean(_json(path / modules[1]["path"] / "config.json")):
                return None
            config, own = _json(path / "config.json"), _json(path / "sentence_bert_config.json")
            words, table = _json(path / "tokenizer_config.json"), _json(path / "tokenizer.json")
            is_plain = all(config.get(key, absent) == ours for key, (absent, ours) in BERT.items())
            is_plain &= own.get("transformer_task", "feature-extraction") == "feature-extraction"
            is_plain &= not own.get("do_lower_case") and _normalises_alike(words, table)
            longest = int(config["max_position_embeddings"])
            given = own.get("max_seq_length") or words.get("model_max_length") or longest
            max_tokens = min(int(given), longest)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None
        if not is_plain or not _has_weights(path / "model.safetensors"):
            return None
        return cls(path, config, max_tokens)


class BertEncoder:
    """Texts to vectors of length one. Any thread, one call at a time.

    Rows of a batch lie one behind the other, without padding, and only attention knows where a text
    ends. So a vector does not depend on the texts beside it, up to the order of sums; to the last
    bit where all products are rounded and multiplied in one way.
    """

    def __init__(
        self, folder: BertFolder, device: str | None = None, *, weights: EncoderWeights = "float32"
    ) -> None:
        """Reads the weights. `device` None is CUDA where there is one. `weights`: "auto" multiplies
        in 8 bits on a CPU, where that is faster."""
        import torch
        from safetensors.torch import load_file
        from tokenizers import Tokenizer

        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        tensors = load_file(folder.path / "model.safetensors", device=device)
        self._weights = {k: v.float() for k, v in tensors.items() if not k.startswith(HEAD)}
        self._num_heads = int(folder.config["num_attention_heads"])
        self._eps = float(folder.config.get("layer_norm_eps", 1e-12))
        self.dim = int(folder.config["hidden_size"])
        self._tokenizer: Tokenizer = Tokenizer.from_file(str(folder.path / "tokenizer.json"))
        self._tokenizer.no_padding()  # a file may ask for both, for another length
        self._tokenizer.enable_truncation(folder.max_tokens)
        self._layers = [
            f"encoder.layer.{layer}." for layer in range(int(folder.config["num_hidden_layers"]))
        ]
        exact = {name: self._linear(name) for layer in self._layers for name in _products(layer)}
        self._products: Mapping[str, Projection] = exact
        is_on_cpu = device == "cpu"
        self._most_rows = BATCH_ROWS if is_on_cpu else None
        if weights == "auto" and is_on_cpu:
            self._products = round_products(exact, self._sample)
        self._num_rounded = sum(self._products[name] is not exact[name] for name in exact)

    @property
    def weights_words(self) -> str:
        """How products are computed, in words."""
        if not self._num_rounded:
            return "float32"
        return f"{self._num_rounded} of {len(self._products)} products in 8 bits"

    def encode(self, texts: Sequence[str], batch_size: int) -> NDArray[np.float32]:
        """[N, E] in the order of `texts`. Texts of like length are computed together."""
        import torch

        read = [each.ids for each in self._tokenizer.encode_batch(list(texts))]
        vectors = np.empty((len(texts), self.dim), dtype=np.float32)
        with torch.inference_mode():
            for batch in batches([len(ids) for ids in read], batch_size, self._most_rows):
                found = self._embed([read[i] for i in batch], self._products)
                vectors[batch] = found.cpu().numpy()
        return vectors

    def num_tokens(self, text: str) -> int:
        """The number of tokens of a text, with the two around it."""
        return len(self._tokenizer.encode(text).ids)

    def _embed(
        self, batch: Sequence[Sequence[int]], products: "Mapping[str, Projection]"
    ) -> "Tensor":
        """[B, E]"""
        import torch
        from torch.nn import functional as F

        words = self._weights["embeddings.word_embeddings.weight"]
        lengths = [len(ids) for ids in batch]
        ids = torch.tensor([each for ids in batch for each in ids], device=words.device)  # [R]
        places = torch.cat([torch.arange(length) for length in lengths]).to(words.device)
        x = F.embedding(ids, words)  # [R, E]
        x = x + self._weights["embeddings.position_embeddings.weight"][places]
        x = x + self._weights["embeddings.token_type_embeddings.weight"][0]
        x = self._norm(x, "embeddings.LayerNorm")
        attend = PaddedAttention(lengths, x.device) if x.is_cuda else partial(attend_each, lengths)
        for layer in self._layers:
            x = self._layer(x, attend, layer, products)
        sums = torch.stack([rows.sum(dim=0) for rows in torch.split(x, lengths)])
        return F.normalize(sums, dim=-1)  # the mean, at length one

    def _layer(
        self, x: "Tensor", attend: "Attend", layer: str, products: "Mapping[str, Projection]"
    ) -> "Tensor":
        from torch.nn import functional as F

        qkv, out, widen, narrow = (products[name] for name in _products(layer))
        rows = qkv(x).view(len(x), 3, self._num_heads, -1)
        out.add_to(x, attend(rows).reshape(x.shape))
        x = self._norm(x, f"{layer}attention.output.LayerNorm")
        narrow.add_to(x, F.gelu(widen(x)))
        return self._norm(x, f"{layer}output.LayerNorm")

    def _sample(self, products: "Mapping[str, Projection]") -> None:
        """Carry a text, and its lines as short ones, through `products`: rounding goes by them."""
        import torch

        from kvweave.kernels.integer_products import TEXT

        texts = [TEXT, *TEXT.splitlines()]
        read = [each.ids for each in self._tokenizer.encode_batch(texts)]
        with torch.inference_mode():
            self._embed(read, products)

    def _norm(self, x: "Tensor", name: str) -> "Tensor":
        from torch.nn import functional as F

        weight, bias = self._weights[f"{name}.weight"], self._weights[f"{name}.bias"]
        return F.layer_norm(x, (self.dim,), weight, bias, self._eps)

    def _linear(self, name: str) -> "Linear":
        """A product; query, key and value are one."""
        import torch

        from kvweave.kernels.linear import Linear

        parts = [name]
        if name.endswith(QKV):
            parts = [name.removesuffix(QKV) + part for part in ("query", "key", "value")]
        weight, bias = (
            torch.cat([self._weights.pop(f"{part}.{kind}") for part in parts])
            for kind in ("weight", "bias")
        )
        return Linear(weight, bias)


def _products(layer: str) -> tuple[str, str, str, str]:
    """Names of a layer's products, in their order."""
    attention = f"{layer}attention."
    return (
        f"{attention}self.{QKV}",
        f"{attention}output.dense",
        f"{layer}intermediate.dense",
        f"{layer}output.dense",
    )


def round_products(
    exact: "Mapping[str, Linear]", run: "Callable[[Mapping[str, Projection]], None]"
) -> "Mapping[str, Projection]":
    """Return the products by the same names, in 8 bits where this CPU multiplies integers. `run`
    carries a text through the products that it is given.

    Weights and rows are rounded and large dims are split as a decoder's are (model/rounding.py).
    Large dims are those of a short text that goes through the exact products first. That takes as
    long as embedding a few passages, so nothing is kept on disk, and the same weights are rounded
    alike at every start. Dims are not evened out: what is best for so short a text was seen to be
    worse than nothing for others (MiniLM). A small model stays in float32.
    """
    from kvweave.kernels.integer_products import Tap, integer_kernels, round_linear
    from kvweave.kernels.rounded import extra_columns, split_dims

    if sum(linear.weight.numel() for linear in exact.values()) < LEAST_WEIGHTS:
        return exact
    library = integer_kernels()
    if library is None:
        return exact
    taps = {name: Tap(linear) for name, linear in exact.items()}
    run(taps)
    found: dict[str, Projection] = {}
    for name, linear in exact.items():
        largest = taps[name].rows.abs().amax(dim=0)
        parts = split_dims(largest, max(LEAST_EXTRA, extra_columns(len(largest))))
        found[name] = round_linear(linear, library, parts)
    return found


def attend_each(lengths: list[int], rows: "Tensor") -> "Tensor":
    """[R, H, D]: every row over all rows of its text, out of queries, keys and values
    [R, 3, H, D]."""
    import torch
    from torch.nn import functional as F

    seen = torch.empty_like(rows[:, 0])
    for text, place in zip(torch.split(rows, lengths), torch.split(seen, lengths), strict=True):
        q, k, v = text.permute(1, 2, 0, 3)[:, None]  # [1, H, T, D]
        place.copy_(F.scaled_dot_product_attention(q, k, v)[0].transpose(0, 1))
    return seen


class PaddedAttention:
    """Attends to one batch in one call, padded to the longest: calls for each text leave a GPU
    waiting, and so does asking it where rows are. That is looked up once."""

    def __init__(self, lengths: list[int], device: "torch.device") -> None:
        import torch

        here = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]  # [B, T]
        self._shape = here.shape
        self._at = here.flatten().nonzero()[:, 0].to(device)  # [R] places of rows in B * T
        self._mask = None if here.all() else here[:, None, None].to(device)

    def __call__(self, rows: "Tensor") -> "Tensor":
        from torch.nn import functional as F

        padded = rows.new_zeros(self._shape.numel(), *rows.shape[1:])
        padded = padded.index_copy(0, self._at, rows).view(*self._shape, *rows.shape[1:])
        q, k, v = padded.permute(2, 0, 3, 1, 4)  # [B, H, T, D]
        found = F.scaled_dot_product_attention(q, k, v, attn_mask=self._mask)
        return found.transpose(1, 2).flatten(0, 1)[self._at]


def batches(lengths: Sequence[int], size: int, most_rows: int | None) -> Iterator[list[int]]:
    """Indices of texts, longest first, up to `size` at a time and, if more than one, `most_rows`
    tokens."""
    most = most_rows or sum(lengths)
    batch: list[int] = []
    num_rows = 0
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if batch and (len(batch) == size or num_rows + lengths[i] > most):
            yield batch
            batch, num_rows = [], 0
        batch.append(i)
        num_rows += lengths[i]
    if batch:
        yield batch


def _json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def _has_weights(path: Path) -> bool:
    """Whether they are there by the names and in the type that `BertEncoder` reads: old files have
    others."""
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        return False
    try:
        with safe_open(path, "np") as file:
            table = file.get_slice("embeddings.LayerNorm.weight")
            return bool(table.get_dtype() == "F32")
    except (SafetensorError, OSError):
        return False


def _is_mean(pooling: dict[str, Any]) -> bool:
    """Whether vectors are the mean of all rows, an instruction's too."""
    old = [key for key, is_on in pooling.items() if key.startswith("pooling_mode_") and is_on]
    means = pooling.get("pooling_mode") == "mean" or old == ["pooling_mode_mean_tokens"]
    return means and bool(pooling.get("include_prompt", True))


def _normalises_alike(words: dict[str, Any], table: dict[str, Any]) -> bool:
    """Whether tokenizer.json does to a text what tokenizer_config.json says: of the two files
    transformers believes the second one."""
    normalizer = table["normalizer"]
    return bool(
        table["model"]["type"] == "WordPiece"
        and normalizer["type"] == "BertNormalizer"
        and table["pre_tokenizer"]["type"] == "BertPreTokenizer"
        and normalizer["lowercase"] == words.get("do_lower_case", True)
        and normalizer["strip_accents"] == words.get("strip_accents")
        and normalizer["handle_chinese_chars"] == words.get("tokenize_chinese_chars", True)
    )
