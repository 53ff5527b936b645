"""A real sentence-transformers folder, tiny and untrained."""

from collections.abc import Sequence
from pathlib import Path

WORDS = [
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "[MASK]",
    "drain",
    "the",
    "node",
    "evict",
    "query",
    ":",
]
# short and long, of several kinds
PROSE = [
    "The ferry leaves the harbour at 6:40 and reaches the island before eight.",
    "Drain the node.",
    "How do I evict a pod that was drained?",
    "Chunk KV is computed behind the preamble, and keys are stored before rotation. " * 8,
    "Kubernetes marks the node as unschedulable; pods are evicted one by one. " * 15,
    "def mean(values): return sum(values) / len(values)",
]


def make_embedder_folder(
    folder: Path,
    *,
    seed: int = 0,
    prompts: dict[str, str] | None = None,
    words: Sequence[str] = (),
) -> Path:
    """One layer of width 16, mean pooling. Knows `words` besides its own."""
    import torch
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
    from transformers import BertConfig, BertModel, BertTokenizerFast

    torch.manual_seed(seed)
    bert = folder / "bert"
    bert.mkdir(parents=True)
    known = list(dict.fromkeys([*WORDS, *words]))
    (bert / "vocab.txt").write_text("\n".join(known))
    BertTokenizerFast(vocab=str(bert / "vocab.txt")).save_pretrained(bert)
    config = BertConfig(
        vocab_size=len(known),
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=64,
    )
    BertModel(config).save_pretrained(bert)
    transformer = Transformer(str(bert), max_seq_length=32)
    model = SentenceTransformer(modules=[transformer, Pooling(16)], prompts=prompts, device="cpu")
    model.save(str(folder / "model"), create_model_card=False)
    return folder / "model"
