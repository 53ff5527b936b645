"""What does each codec cost in answer quality?

For each question: full prefill gives a greedy answer; then the same answer is scored over context
KV that went through a codec, and the distributions are compared, KL(full || codec) per token.

- `quantised`: the prompt's own exact KV through the codec. Rounding alone, nothing else.
- `reused`: isolated chunk KV through the codec, laid side by side (ratio 0): rounding on top of
  what reuse itself costs.

    python bench/codec_kl.py --data ../shared/data --out bench/results/codec_kl-cpu.json
"""

import argparse
import statistics
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from common.files import read_jsonl
from common.results import finish, result_header
from kvweave.fuse.encode.chunk_pass import encode_chunks, encode_prefix
from kvweave.fuse.fuse import fuse
from kvweave.fuse.protocol import Prefix
from kvweave.fuse.request import classify
from kvweave.fuse.sources import ComputedChunks
from kvweave.fuse.stitched import stitch
from kvweave.kv.format.codec import CODECS, LayerKV
from kvweave.kv.format.keys import ChunkKey, KeyContext, make_chunk_key
from kvweave.kv.format.objects import layer_of, pack_chunk
from kvweave.model.decoder import Decoder
from kvweave.model.files.locate import locate
from kvweave.model.load import load_decoder
from kvweave.model.rows import Rows
from kvweave.text.prompt import Document, Prompt, build_prompt
from kvweave.text.tokenizer import Tokenizer

KINDS = ("quantised", "reused")


def main() -> None:
    args = parse_args()
    torch.set_num_threads(args.threads)
    folder = locate(args.model)
    tokenizer, decoder = Tokenizer(folder), load_decoder(folder, device=args.device)
    prompts = read_prompts(args.data, tokenizer, args.prompts)
    kl: dict[tuple[str, str], list[float]] = {(k, c): [] for k in KINDS for c in CODECS}
    for prompt in track(prompts, "scoring", transient=True):
        for cell, value in score(decoder, prompt, args.answer_tokens).items():
            kl[cell].append(value)
    table = Table(title=f"{args.model}: KL to full prefill, nats per token, {len(prompts)} prompts")
    for column in ("codec", "bytes per token", *KINDS):
        table.add_column(column, justify="left" if column == "codec" else "right")
    results = {}
    for codec in CODECS:
        size = bytes_per_token(decoder, codec)
        means = {kind: statistics.fmean(kl[kind, codec]) for kind in KINDS}
        results[codec] = {"bytes_per_token": size, **{k: round(v, 6) for k, v in means.items()}}
        table.add_row(codec, f"{size:,.0f}", *(f"{means[kind]:.5f}" for kind in KINDS))
    Console().print(table)
    config = {k: v for k, v in vars(args).items() if k != "out"} | {"data": "hotpotqa"}
    header = result_header("codec_kl", args.device)
    finish(__doc__, {**header, "config": config, "kl_nats": results}, args.out)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder with hotpotqa/")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--prompts", type=int, default=50)
    parser.add_argument("--answer-tokens", type=int, default=16)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, help="also write the JSON here")
    return parser.parse_args()


def read_prompts(data: Path, tokenizer: Tokenizer, count: int) -> list[Prompt]:
    prompts = []
    records = read_jsonl(data / "hotpotqa" / "hotpotqa_distractor.jsonl.gz")
    for record in islice(records, count):
        documents = [Document(p["text"], p["title"]) for p in record["passages"]]
        prompts.append(build_prompt(tokenizer, record["question"], documents))
    return prompts


def score(decoder: Decoder, prompt: Prompt, num_tokens: int) -> dict[tuple[str, str], float]:
    """KL of every kind and codec on one prompt."""
    answer, exact = full_answer(decoder, prompt.token_ids, num_tokens)
    nothing = Prefix((), ())
    (whole,) = encode_chunks(decoder, nothing, [prompt.token_ids])
    preamble = encode_prefix(decoder, prompt.preamble)
    start, spans = len(prompt.preamble), []
    for ids in prompt.chunks:
        spans.append((start, start + len(ids)))
        start += len(ids)
    layers = {
        "quantised": [[LayerKV(kv.k[a:b], kv.v[a:b]) for kv in whole] for a, b in spans],
        "reused": encode_chunks(decoder, preamble, prompt.chunks),
    }
    found = {}
    for kind, chunks in layers.items():
        for codec in CODECS:
            got = answer_over(decoder, prompt, preamble, chunks, codec, answer)
            divergence = (exact.exp() * (exact - got)).sum(-1)
            found[kind, codec] = float(divergence.mean())
    return found


def full_answer(
    decoder: Decoder, ids: Sequence[int], num_tokens: int
) -> tuple[list[int], torch.Tensor]:
    """Greedy answer under full prefill and its log probabilities [A, V]."""
    kv = decoder.new_kv(len(ids) + num_tokens)
    logits = decoder.forward([Rows(ids, range(len(ids)), kv, [len(ids) - 1])])
    answer, rows = [], []
    for step in range(num_tokens):
        rows.append(logits[0])
        answer.append(int(logits[0].argmax()))
        logits = decoder.forward([Rows(answer[-1:], [len(ids) + step], kv, [0])])
    return answer, torch.stack(rows).log_softmax(-1)


def answer_over(
    decoder: Decoder,
    prompt: Prompt,
    preamble: Prefix,
    chunks: Sequence[Sequence[LayerKV]],
    codec: str,
    answer: Sequence[int],
) -> torch.Tensor:
    """Log probabilities [A, V] of `answer` when the chunks' KV went through `codec`."""
    context = KeyContext("bench", "any", codec, "any", prompt.preamble, "any")
    # numbered: a passage may stand in a prompt twice, and its exact KV then differs
    keys = [make_chunk_key(context, [*ids, i]) for i, ids in enumerate(prompt.chunks)]
    request = classify(
        prompt.preamble,
        list(zip(keys, prompt.chunks, strict=True)),
        prompt.question,
        present=keys,
        first_is_exact=True,
        asked=prompt.asked,
    )
    ids = request.prompt_ids
    kv = decoder.new_kv(len(ids) + len(answer))
    stored = [through(key, layers, codec) for key, layers in zip(keys, chunks, strict=True)]
    stitched = stitch(decoder, request, preamble, ComputedChunks(stored), kv)
    first = fuse(stitched).logits
    positions = range(len(ids), len(ids) + len(answer) - 1)
    rest = decoder.forward([Rows(answer[:-1], positions, kv, range(len(answer) - 1))])
    return torch.cat([first[None], rest]).log_softmax(-1)


def through(key: ChunkKey, layers: Sequence[LayerKV], codec: str) -> list[LayerKV]:
    """What a chunk's KV reads as after it was stored."""
    packed = pack_chunk(key, layers, codec)
    device = layers[0].k.device
    read = (layer_of(packed.header, packed.memory, i).decode() for i in range(len(layers)))
    return [LayerKV(kv.k.to(device), kv.v.to(device)) for kv in read]


def bytes_per_token(decoder: Decoder, codec: str, num_tokens: int = 256) -> float:
    spec = decoder.spec
    zeros = torch.zeros(num_tokens, spec.num_kv_heads, spec.head_dim, dtype=decoder.dtype)
    context = KeyContext("bench", "any", codec, "any", (), "any")
    layers = [LayerKV(zeros, zeros)] * spec.num_layers
    return pack_chunk(make_chunk_key(context, [0]), layers, codec).header.total_bytes / num_tokens


if __name__ == "__main__":
    main()
