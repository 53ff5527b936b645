"""The embedded chat model itself: its tokenizer always, its weights in the slow tests."""

import subprocess
import sys
from pathlib import Path

import pytest

from kvweave.errors import ModelNotFound
from kvweave.model.files.embedded import SMOLLM2
from kvweave.model.files.locate import locate
from kvweave.model.files.model_cache import no_progress
from kvweave.model.files.sources import Workplace, fetch_first
from kvweave.text.tokenizer import Tokenizer

# converts argv[1] into argv[2] and prints by how many bytes the peak of resident memory rose
CONVERT = """
import resource, sys
from pathlib import Path
from kvweave.model.files.gguf.convert import convert_gguf
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
convert_gguf(Path(sys.argv[1]), Path(sys.argv[2]))
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    try:
        return Tokenizer(locate("smollm2", pull=False))
    except ModelNotFound:
        pytest.fail("smollm2 is not there; run: make models")


@pytest.mark.parametrize(
    "text",
    [
        "it's 12345 and ½ of ①",
        "naïve café ☕ 日本語 𝒳 👩‍👩‍👧‍👦 e\u0301",
        "\tdef f(x):\r\n\n    return x  ",
        "مرحبا שלום हिन्दी ไทย",
        "\u0000\u0007 \u200b\ufeff",
    ],
)
def test_odd_text_comes_back_as_it_went_in(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_digits_are_tokens_of_their_own(tokenizer: Tokenizer) -> None:
    pieces = [tokenizer.decode([i]) for i in tokenizer.encode("in 2026, 3.14")]
    assert pieces == ["in", " ", "2", "0", "2", "6", ",", " ", "3", ".", "1", "4"]


def test_the_template_gives_special_tokens_and_a_default_system_prompt(
    tokenizer: Tokenizer,
) -> None:
    text = tokenizer.render_chat([{"role": "user", "content": "hi"}])
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert text.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    ids = tokenizer.encode(text)
    assert (ids.count(1), ids.count(2)) == (3, 2)
    assert tokenizer.eos_ids == {2}
    assert tokenizer.vocab_size == 49152


@pytest.mark.slow
@pytest.mark.net
def test_logits_equal_what_transformers_gets_from_the_gguf_file(tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    at = Workplace(tmp_path / "kept", tmp_path / "scratch", no_progress)
    at.kept.mkdir()
    at.scratch.mkdir()
    gguf = fetch_first(SMOLLM2.sources, SMOLLM2.sha256, "smollm2", at)
    gguf = gguf.rename(tmp_path / "smollm2.gguf")
    folder = tmp_path / "folder"
    done = subprocess.run(
        [sys.executable, "-c", CONVERT, str(gguf), str(folder)],
        env={"PYTHONPATH": str(Path(__file__).parents[2] / "src")},
        capture_output=True,
        text=True,
        check=True,
    )
    weights = (folder / "model.safetensors").stat().st_size
    assert int(done.stdout) < 0.5 * weights, "the conversion must stream"

    ours = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file=gguf.name, dtype=torch.float32
    )
    expected = theirs.state_dict()
    for name, weight in ours.state_dict().items():
        assert torch.equal(weight, expected[name]), name
    text = Tokenizer(folder).render_chat([{"role": "user", "content": "What is 2+2?"}])
    ids = AutoTokenizer.from_pretrained(folder)(text, return_tensors="pt")["input_ids"]
    assert ids[0].tolist() == Tokenizer(folder).encode(text)
    with torch.inference_mode():
        torch.testing.assert_close(ours(ids).logits, theirs(ids).logits)
