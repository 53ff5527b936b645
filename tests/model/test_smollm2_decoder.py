"""The embedded model, for real: the answers of transformers, and no more memory than needed."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kvweave.engine.sampling import Sampling
from kvweave.model.decoder import Decoder
from kvweave.model.files.embedded import EMBEDDED
from kvweave.model.files.locate import locate
from kvweave.model.load import load_decoder
from kvweave.model.rows import Rows
from kvweave.text.tokenizer import Tokenizer
from worlds.plain_loop import generate

PROMPTS = [
    "The capital of France is",
    "<|im_start|>user\nWrite a haiku about the sea.<|im_end|>\n<|im_start|>assistant\n",
    "def fibonacci(n):\n",
    "Photosynthesis is the process by which plants, algae and some bacteria turn light into",
    "<|im_start|>user\nWas ist 17 + 25? Erkläre es kurz. 🙂<|im_end|>\n<|im_start|>assistant\n",
]


@pytest.fixture(scope="module")
def folder() -> Path:
    assert "smollm2" in EMBEDDED
    return locate("smollm2")


@pytest.fixture(scope="module")
def decoder(folder: Path) -> Decoder:
    return load_decoder(folder, device="cpu", dtype="float32")


def test_64_greedy_tokens_are_identical_to_transformers(folder: Path, decoder: Decoder) -> None:
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    prompts = [Tokenizer(folder).encode(prompt) for prompt in PROMPTS]
    for prompt, answer in zip(prompts, greedy(decoder, prompts, 64), strict=True):
        # Their choice at every position, given our tokens before it. If the first differing token
        # existed, it would differ here too: by induction their 64 greedy tokens are ours.
        with torch.inference_mode():
            logits = theirs(torch.tensor([prompt + answer])).logits[0]
        assert logits.argmax(-1)[len(prompt) - 1 : -1].tolist() == answer


def greedy(decoder: Decoder, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    """Greedy continuations of all prompts, decoded together as one ragged batch."""
    kvs = [decoder.new_kv(len(p) + num_tokens) for p in prompts]
    batch = [Rows(p, range(len(p)), kv, [len(p) - 1]) for p, kv in zip(prompts, kvs, strict=True)]
    answers: list[list[int]] = [[] for _ in prompts]
    for _ in range(num_tokens):
        for answer, token in zip(answers, decoder.forward(batch).argmax(-1).tolist(), strict=True):
            answer.append(token)
        batch = [
            Rows(a[-1:], [len(p) + len(a) - 1], kv, [0])
            for p, a, kv in zip(prompts, answers, kvs, strict=True)
        ]
    return answers


def test_the_plain_loop_gives_the_same_tokens_as_the_batch(folder: Path, decoder: Decoder) -> None:
    ids = Tokenizer(folder).encode(PROMPTS[1])
    alone = [c.token_id for c in generate(decoder, ids, Sampling(max_tokens=16), eos_ids=())]
    assert alone == greedy(decoder, [ids], 16)[0]


def test_loading_peaks_below_2_2_times_the_weights(folder: Path) -> None:
    script = f"""
from pathlib import Path
from kvweave.model.load import load_decoder

def peak_kib():  # not ru_maxrss: that one starts from the parent's
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))

before = peak_kib()
decoder = load_decoder(Path({str(folder)!r}), device="cpu", dtype="float32")
print((peak_kib() - before) * 1024)
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    weights_bytes = (folder / "model.safetensors").stat().st_size
    assert 0.9 < int(run.stdout) / weights_bytes < 2.2


def test_int8_changes_little(folder: Path, decoder: Decoder) -> None:
    ids = Tokenizer(folder).encode(PROMPTS[3])
    int8 = load_decoder(folder, device="cpu", quant="int8")
    exact, rough = (
        d.forward([Rows(ids, range(len(ids)), d.new_kv(len(ids)), range(len(ids)))]).log_softmax(-1)
        for d in (decoder, int8)
    )
    kl = (exact.exp() * (exact - rough)).sum(-1).mean()
    assert -1e-6 < kl < 0.03  # 0 where float32 is the fastest way for every product
