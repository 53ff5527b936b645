"""Our own encoder of plain BERT folders gives the vectors of sentence-transformers."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvweave.corpus.bert_encoder import (
    BertEncoder,
    BertFolder,
    PaddedAttention,
    attend_each,
    batches,
)
from kvweave.corpus.embedder import SentenceEmbedder
from kvweave.model.files.locate import locate
from worlds.tiny_embedder import PROSE, make_embedder_folder

TEXTS = [
    "Drain the node.",
    "",
    "  evict\tthe\n\nnode  ",
    "ÄÖÜ émigré, Straße; İstanbul",
    "中文 and [SEP] in the middle of [MASK]",
    "a zero\u200bwidth space and a \x00 byte",
    "an unbroken " + "x" * 400,
    "the node " * 300,  # longer than any window
    *(f"text {i} " + "the drained node is evicted and comes back " * (i % 9) for i in range(40)),
]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_embedder_folder(tmp_path_factory.mktemp("bert"))


def minilm() -> Path:
    return Path(locate("minilm"))


@pytest.mark.parametrize("name", ["tiny", "minilm"])
def test_vectors_and_token_counts_equal_those_of_sentence_transformers(
    name: str, tiny: Path
) -> None:
    folder = tiny if name == "tiny" else minilm()
    texts = TEXTS if name == "tiny" else TEXTS[:16]  # the real one takes its time
    read = BertFolder.read(folder)
    assert read is not None
    ours, theirs = BertEncoder(read, "cpu"), SentenceEmbedder(folder, device="cpu").model
    wanted = theirs.encode(texts, normalize_embeddings=True, show_progress_bar=False)
    np.testing.assert_allclose(ours.encode(texts, 32), wanted, atol=1e-5)
    np.testing.assert_allclose(ours.encode(texts, 7), wanted, atol=1e-5)
    counts = [len(theirs.preprocess([text])["input_ids"][0]) for text in texts]
    assert [ours.num_tokens(text) for text in texts] == counts
    assert max(counts) == read.max_tokens, "a text that is cut off"


def test_a_plain_folder_needs_no_heavy_library(tiny: Path) -> None:
    script = (
        "import sys\n"
        "for name in ('sentence_transformers', 'transformers'): sys.modules[name] = None\n"
        "from kvweave.corpus.embedder import SentenceEmbedder\n"
        f"embedder = SentenceEmbedder({str(tiny)!r})\n"
        "print(embedder.embed_query('drain').shape, embedder.num_tokens('drain'), embedder.dim)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout.split("\n")[0] == "(16,) 3 16", done.stderr


def test_an_instruction_is_read_as_sentence_transformers_reads_it(tiny: Path) -> None:
    embedder = SentenceEmbedder(tiny, name="e5-tiny")
    assert embedder.instructions.query == "query: "
    theirs = embedder.model.encode(["drain"], prompt="query: ", normalize_embeddings=True)
    np.testing.assert_allclose(embedder.embed_query("drain"), theirs[0], atol=1e-5)


@pytest.fixture(scope="module")
def exact() -> BertEncoder:
    read = BertFolder.read(minilm())
    assert read is not None
    return BertEncoder(read, "cpu")


def test_an_exact_vector_hardly_depends_on_what_is_beside_it(exact: BertEncoder) -> None:
    together = exact.encode(PROSE, 32)
    alone = np.concatenate([exact.encode([text], 32) for text in PROSE])
    np.testing.assert_allclose(together, alone, atol=1e-6)


def test_padding_for_a_gpu_changes_nothing() -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = [7, 3, 3, 1]
    rows = torch.randn(sum(lengths), 3, 2, 8, generator=generator)
    padded = PaddedAttention(lengths, rows.device)
    np.testing.assert_allclose(padded(rows), attend_each(lengths, rows), atol=1e-6)
    even = PaddedAttention([7, 7], rows.device)  # nothing to mask
    np.testing.assert_allclose(even(rows), attend_each([7, 7], rows), atol=1e-6)


def test_batches_hold_every_text_once_within_their_bounds() -> None:
    lengths = [5, 300, 2, 2000, 7, 300, 300]
    found = list(batches(lengths, 2, 600))
    assert found == [[3], [1, 5], [6, 4], [0, 2]]
    assert list(batches([3, 3, 3], 2, None)) == [[0, 1], [2]]
    assert list(batches([], 2, 600)) == []


def _set(file: str, **values: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        told = json.loads((folder / file).read_text())
        (folder / file).write_text(json.dumps(told | values))

    return change


def _add_dense(folder: Path) -> None:
    modules = json.loads((folder / "modules.json").read_text())
    dense = {"idx": 2, "name": "2", "path": "2_Dense", "type": "sentence_transformers.models.Dense"}
    (folder / "modules.json").write_text(json.dumps([*modules, dense]))


def _halve(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    save_file({name: each.half() for name, each in weights.items()}, folder / "model.safetensors")


@pytest.mark.parametrize(
    "change",
    [
        _set("1_Pooling/config.json", pooling_mode="cls"),
        _set("1_Pooling/config.json", include_prompt=False),
        _set("config.json", model_type="xlm-roberta"),
        _set("config.json", hidden_act="relu"),
        _set("config.json", position_embedding_type="relative_key"),
        _set("config.json", architectures=["BertForMaskedLM"]),
        _set("sentence_bert_config.json", do_lower_case=True),
        _set("tokenizer_config.json", do_lower_case=False),
        _add_dense,
        _halve,
        lambda folder: (folder / "modules.json").unlink(),
        lambda folder: (folder / "modules.json").write_text("{"),
        lambda folder: (folder / "model.safetensors").rename(folder / "model.bin"),
    ],
)
def test_any_other_folder_is_left_to_sentence_transformers(
    change: Callable[[Path], None], tiny: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(tiny, tmp_path / "model"))
    assert BertFolder.read(folder) is not None
    change(folder)
    assert BertFolder.read(folder) is None


def test_the_window_is_the_smallest_that_any_file_names(tiny: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny, tmp_path / "model"))
    _set("sentence_bert_config.json", max_seq_length=8)(folder)
    read = BertFolder.read(folder)
    assert read is not None
    assert read.max_tokens == 8
    theirs = SentenceEmbedder(folder, device="cpu").model.encode(TEXTS, normalize_embeddings=True)
    np.testing.assert_allclose(BertEncoder(read, "cpu").encode(TEXTS, 4), theirs, atol=1e-5)
