"""The embedded model, for real: the answers of transformers, and no more memory than needed."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kvweave.engine.generate import generate
from kvweave.engine.sampling import Sampling
from kvweave.model.decoder import Decoder, Rows
from kvweave.model.embedded import EMBEDDED
from kvweave.model.load import load_decoder
from kvweave.model.locate import locate
from kvweave.tokenizer import Tokenizer

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
    from transformers import AutoModelForCausalLM, GenerationConfig

    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    theirs.generation_config = GenerationConfig(max_new_tokens=64, do_sample=False, pad_token_id=0)
    tokenizer = Tokenizer(folder)
    for prompt in PROMPTS:
        ids = tokenizer.encode(prompt)
        ours = [c.token_id for c in generate(decoder, ids, Sampling(max_tokens=64), eos_ids=())]
        attend_all = torch.ones(1, len(ids), dtype=torch.long)
        out = theirs.generate(torch.tensor([ids]), attention_mask=attend_all)
        assert len(ours) == 64
        assert ours == out[0, len(ids) :].tolist()


def test_loading_peaks_below_2_2_times_the_weights(folder: Path) -> None:
    script = f"""
import resource, torch
from pathlib import Path
from kvweave.model.load import load_decoder
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
decoder = load_decoder(Path({str(folder)!r}), device="cpu", dtype="float32")
after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print((after - before) * 1024)
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
    assert 0 < kl < 0.2
