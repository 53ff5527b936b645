"""A plain BERT sentence encoder with torch, safetensors and tokenizers alone.

MiniLM and its kin: a BERT encoder, the mean of its rows, length one. To import
sentence-transformers for that takes longer than to answer the first question; this file reads the
same folder and gives the same vectors. `BertFolder.read` takes only what it computes exactly;
any other folder is None, and sentence-transformers has it.

Shapes: B texts of a batch, T tokens of the longest, E width, H heads, D width of a head.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from tokenizers import Encoding
    from torch import Tensor

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
    """Texts to vectors of length one. Any thread, one call at a time."""

    def __init__(self, folder: BertFolder, device: str | None = None) -> None:
        """Reads the weights. `device` None is CUDA where there is one."""
        import torch
        from safetensors.torch import load_file
        from tokenizers import Tokenizer

        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        weights = load_file(folder.path / "model.safetensors", device=device)
        self._weights = {k: v.float() for k, v in weights.items() if not k.startswith(HEAD)}
        self._num_layers = int(folder.config["num_hidden_layers"])
        self._num_heads = int(folder.config["num_attention_heads"])
        self._eps = float(folder.config.get("layer_norm_eps", 1e-12))
        for layer in range(self._num_layers):
            self._join_projections(f"encoder.layer.{layer}.attention.self.")
        self.dim = int(folder.config["hidden_size"])
        self._tokenizer: Tokenizer = Tokenizer.from_file(str(folder.path / "tokenizer.json"))
        self._tokenizer.no_padding()  # a file may ask for both, for another length
        self._tokenizer.enable_truncation(folder.max_tokens)

    def encode(self, texts: Sequence[str], batch_size: int) -> NDArray[np.float32]:
        """[N, E] in the order of `texts`. Texts of like length are computed together."""
        import torch

        read = self._tokenizer.encode_batch(list(texts))
        vectors = np.empty((len(texts), self.dim), dtype=np.float32)
        with torch.inference_mode():
            for batch in _batches([len(each.ids) for each in read], batch_size):
                vectors[batch] = self._embed([read[i] for i in batch]).cpu().numpy()
        return vectors

    def num_tokens(self, text: str) -> int:
        """Of a text, with the two around it."""
        return len(self._tokenizer.encode(text).ids)

    def _embed(self, batch: "Sequence[Encoding]") -> "Tensor":
        """[B, E]"""
        import torch
        from torch.nn import functional as F

        words = self._weights["embeddings.word_embeddings.weight"]
        lengths = [len(each.ids) for each in batch]
        longest = max(lengths)
        ids = torch.zeros((len(batch), longest), dtype=torch.int64)  # [B, T]
        for row, each in enumerate(batch):
            ids[row, : len(each.ids)] = torch.tensor(each.ids)
        mask = torch.arange(longest) < torch.tensor(lengths)[:, None]  # [B, T]
        ids, mask = ids.to(words.device), mask.to(words.device)
        x = F.embedding(ids, words)  # [B, T, E]
        x = x + self._weights["embeddings.position_embeddings.weight"][:longest]
        x = x + self._weights["embeddings.token_type_embeddings.weight"][0]
        x = self._norm(x, "embeddings.LayerNorm")
        is_even = min(lengths) == longest  # no mask: attention has a faster way then
        for layer in range(self._num_layers):
            x = self._layer(x, None if is_even else mask[:, None, None], f"encoder.layer.{layer}.")
        if not is_even:
            x = x * mask[..., None]
        return F.normalize(x.sum(dim=1), dim=-1)  # the mean, at length one

    def _layer(self, x: "Tensor", mask: "Tensor | None", name: str) -> "Tensor":
        from torch.nn import functional as F

        b, t, e = x.shape
        qkv = self._linear(x, f"{name}attention.self.qkv")  # [B, T, 3E]
        q, k, v = qkv.view(b, t, 3, self._num_heads, -1).permute(2, 0, 3, 1, 4)  # [B, H, T, D]
        seen = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        seen = seen.transpose(1, 2).reshape(b, t, e)
        seen = self._linear(seen, f"{name}attention.output.dense")
        x = self._norm(x + seen, f"{name}attention.output.LayerNorm")
        wide = F.gelu(self._linear(x, f"{name}intermediate.dense"))
        return self._norm(x + self._linear(wide, f"{name}output.dense"), f"{name}output.LayerNorm")

    def _linear(self, x: "Tensor", name: str) -> "Tensor":
        from torch.nn import functional as F

        return F.linear(x, self._weights[f"{name}.weight"], self._weights[f"{name}.bias"])

    def _norm(self, x: "Tensor", name: str) -> "Tensor":
        from torch.nn import functional as F

        weight, bias = self._weights[f"{name}.weight"], self._weights[f"{name}.bias"]
        return F.layer_norm(x, (self.dim,), weight, bias, self._eps)

    def _join_projections(self, name: str) -> None:
        """One product for query, key and value."""
        import torch

        for kind in ("weight", "bias"):
            parts = [
                self._weights.pop(f"{name}{part}.{kind}") for part in ("query", "key", "value")
            ]
            self._weights[f"{name}qkv.{kind}"] = torch.cat(parts)


def _batches(lengths: Sequence[int], size: int) -> Iterator[list[int]]:
    """Indices of texts, longest first, `size` at a time."""
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    return (order[start : start + size] for start in range(0, len(order), size))


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
