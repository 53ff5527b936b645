"""What the probe says the question looks at is what the model looks at."""

import random
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from kvweave.calibrate.case import Case
from kvweave.calibrate.encodings import ContextPrefixes, FixedContext
from kvweave.calibrate.trials import Trials
from kvweave.fuse.selector import Scene
from kvweave.fuse.selectors import query_attention
from kvweave.fuse.selectors.query_attention import QueryAttention
from kvweave.fuse.stitched import stitch
from kvweave.model.load import load_decoder
from worlds.tiny_models import make_model_folder


@pytest.mark.parametrize(("variant", "at_once"), [("llama", 12), ("qwen3", 12), ("llama", 2)])
def test_scores_of_every_layer_are_the_attention_of_transformers(
    tmp_path: Path, variant: str, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One chunk right behind the preamble is exact: the probe must see what full prefill sees.

    However many layers are scored together: a deep model has more than fit at once.
    """
    monkeypatch.setattr(query_attention, "LAYERS_AT_ONCE", at_once)
    rng = random.Random(5)
    chunk = tuple(rng.randrange(97) for _ in range(40))
    case = Case((1, 2, 3), (chunk,), (50, 51, 52, 53, 54), (1, 4))
    folder = make_model_folder(tmp_path, variant)
    decoder = load_decoder(folder, device="cpu", dtype="float32")
    prefixes = ContextPrefixes(decoder)
    source = FixedContext(decoder, prefixes, "isolated", (), ()).prepare(case, [])
    request = case.request(case.keys, first_is_exact=False)
    kv = Trials(decoder, 1, case.num_tokens, 0).kv(0)
    stitched = stitch(decoder, request, prefixes.prefix_for(case.preamble), source, kv)
    scene = Scene(stitched, torch.tensor(request.hits))
    whole = QueryAttention(view="full", layers=(0, 1, 2), rows="mean", heads="mean")
    scores = whole.layer_scores(scene)  # [L, H]

    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    with torch.inference_mode():
        seen = model(torch.tensor([request.prompt_ids]), output_attentions=True).attentions
    asked, columns = list(request.asked), request.hits
    wanted = torch.stack([layer[0][:, asked][:, :, columns].mean((0, 1)) for layer in seen])
    torch.testing.assert_close(scores, wanted, rtol=1e-4, atol=1e-5)
