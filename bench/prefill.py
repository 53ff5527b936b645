"""How fast is our own prefill and decode, beside transformers with the same weights?

Every later speed-up is measured against our full prefill, so it must not be a weak baseline. Runs
take turns in one process; the figure is the ratio of medians. Then the opt-in int8 products, with
the price in KL beside the speed.

    python bench/prefill.py --tokens 3000 --out bench/results/prefill-cpu.json
"""

import argparse
import os
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from common.files import REPO
from common.measuring import alternate, medians
from common.results import device_words, finish, result_header
from kvweave.kernels.linear import Int8Linear
from kvweave.model.decoder import Decoder
from kvweave.model.files.locate import locate
from kvweave.model.load import load_decoder
from kvweave.model.rows import Rows
from kvweave.text.tokenizer import Tokenizer


def main() -> None:
    args = parse_args()
    torch.set_num_threads(args.threads)
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    folder = locate(args.model)
    ids = real_text_ids(Tokenizer(folder), args.tokens)
    ours = load_decoder(folder, device="cpu", dtype=args.dtype)
    int8 = load_decoder(folder, device="cpu", quant="int8") if args.dtype == "float32" else None
    theirs = load_transformers(str(folder), args.dtype)

    runs = {
        "transformers": lambda: prefill_transformers(theirs, ids),
        "kvweave": lambda: prefill(ours, ids),
    }
    if int8 is not None:
        runs["kvweave int8"] = lambda: prefill(int8, ids)
    prefill_s = medians(alternate(runs, args.repeats))

    steps = {"transformers": lambda: decode_transformers(theirs, ids[: args.context], args.steps)}
    steps["kvweave"] = lambda: decode(ours, ids[: args.context], args.steps)
    if int8 is not None:
        steps["kvweave int8"] = lambda: decode(int8, ids[: args.context], args.steps)
    decode_s = medians(alternate(steps, args.repeats))

    table = Table(title=f"{args.model}, {args.tokens} tokens, {args.dtype}, {device_words()}")
    for column in ("", "prefill tok/s", "÷ transformers", "decode tok/s", "KL to fp32"):
        table.add_column(column, justify="left" if column == "" else "right")
    divergence = None if int8 is None else mean_kl(ours, int8, ids[:1024])
    rows = {}
    for name, seconds in prefill_s.items():
        rows[name] = {
            "prefill_tok_s": round(args.tokens / seconds, 1),
            "ratio": round(prefill_s["transformers"] / seconds, 3),
            "decode_tok_s": round(args.steps / decode_s[name], 1),
        }
        price = f"{divergence:.4f}" if "int8" in name and divergence is not None else "–"
        r = rows[name]
        table.add_row(
            name, f"{r['prefill_tok_s']}", f"{r['ratio']:.2f}", f"{r['decode_tok_s']}", price
        )
    Console().print(table)
    finish(
        __doc__,
        {
            **result_header("prefill", "cpu"),
            "config": {name: value for name, value in vars(args).items() if name != "out"},
            "ratio": rows["kvweave"]["ratio"],
            "int8_ratio": rows.get("kvweave int8", {}).get("ratio"),
            "int8_over_fp32": None
            if int8 is None
            else round(prefill_s["kvweave"] / prefill_s["kvweave int8"], 3),
            "int8_kl_nats": None if divergence is None else round(divergence, 5),
            "rows": rows,
        },
        args.out,
    )


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tokens", type=int, default=3000, help="prompt length")
    parser.add_argument("--context", type=int, default=512, help="prompt length before decoding")
    parser.add_argument("--steps", type=int, default=64, help="tokens to decode")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, help="add the run to this result file")
    return parser.parse_args()


def real_text_ids(tokenizer: Tokenizer, num_tokens: int) -> list[int]:
    """Prose from this repository, repeated until it is long enough."""
    text = "\n\n".join((REPO / name).read_text() for name in ("LICENSE", "ARCHITECTURE.md"))
    ids = tokenizer.encode(text)
    return (ids * (num_tokens // len(ids) + 1))[:num_tokens]


def load_transformers(folder: str, dtype: str) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    return AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()


def prefill(decoder: Decoder, ids: list[int]) -> torch.Tensor:
    kv = decoder.new_kv(len(ids))
    return decoder.forward([Rows(ids, range(len(ids)), kv, [len(ids) - 1])])


@torch.inference_mode()
def prefill_transformers(model: torch.nn.Module, ids: list[int]) -> torch.Tensor:
    return model(torch.tensor([ids]), use_cache=True, logits_to_keep=1).logits


def decode(decoder: Decoder, ids: list[int], steps: int) -> None:
    """`steps` greedy tokens behind a prefilled prompt; the prefill is computed once and kept."""
    kv, start = CACHED.setdefault(id(decoder), (decoder.new_kv(len(ids) + steps), len(ids)))
    if kv.num_tokens < start:
        decoder.forward([Rows(ids, range(start), kv, [])])
    token = ids[-1]
    for position in range(start, start + steps):
        token = int(decoder.forward([Rows([token], [position], kv, [0])])[0].argmax())


@torch.inference_mode()
def decode_transformers(model: torch.nn.Module, ids: list[int], steps: int) -> None:
    if id(model) not in CACHED:
        CACHED[id(model)] = model(torch.tensor([ids]), use_cache=True).past_key_values
    past = CACHED[id(model)]
    token = torch.tensor([[ids[-1]]])
    for _ in range(steps):
        logits = model(token, past_key_values=past, use_cache=True).logits
        token = logits[:, -1].argmax(-1, keepdim=True)
    past.crop(-steps)


def mean_kl(exact: Decoder, other: Decoder, ids: list[int]) -> float:
    """Mean KL(exact || other) of the next token over all positions of a prompt, in nats."""
    assert isinstance(other.weights.layers[0].qkv, Int8Linear), "nothing was quantised"
    logprobs = [
        d.forward([Rows(ids, range(len(ids)), d.new_kv(len(ids)), range(len(ids)))]).log_softmax(-1)
        for d in (exact, other)
    ]
    return float((logprobs[0].exp() * (logprobs[0] - logprobs[1])).sum(-1).mean())


CACHED: dict[int, object] = {}

if __name__ == "__main__":
    main()
