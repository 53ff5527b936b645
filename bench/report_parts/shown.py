"""What the results page shows of each result file, and which code that file measures.

One entry a file, in the order of the table of bench/README.md, which has question, command and
device. `measures` are git pathspecs: a result is older than its code when a commit touched them
after the run. They name what a figure depends on, not everything that ran.
"""

from collections.abc import Sequence
from functools import partial

from product_parts.instead_table import WORDS
from report_parts.figures import (
    Figure,
    Result,
    Run,
    listed,
    of_full,
    only,
    percent,
    pick,
    runs_of,
    times,
)
from report_parts.shown_figures import FIGURES_CPU


def code(*rooms: str) -> tuple[str, ...]:
    return tuple(
        f":(exclude)src/kvweave/{room[1:]}" if room.startswith("!") else f"src/kvweave/{room}"
        for room in rooms
    )


CPU = ("kernels", "!kernels/gpu", "model", "!model/files")  # what computes on a CPU
GPU = ("kernels", "!kernels/native", "model", "!model/files")  # … and on a GPU
FUSED = ("fuse", "kv")
ANSWERED = ("engine", "plan", "app/auto", "app/answer", "app/library")
SHAPE = "random:llama-3.1-8b"
SMALL = "qwen2.5-coder-0.5b"
SETS = ("2wiki", "hotpot", "musique")
PUBLISHED = ("cacheblend", "fusionrag", "qcfuse", "prophetkv")
SCORED = (("cacheblend", "CacheBlend"), ("epic", "EPIC"), ("fusionrag", "FusionRAG"))
WEAVE = "weave-through:0.15"
WAYS = ("epic", "fusionrag", "qcfuse", "weave")
POLICIES = ("gdsf", "lru", "lfu")
STREAMS = ("mmlu", "nq_open", "mtrag")


def recovered(run: Run, strategy: str, encoding: str, ratio: float = 0.15) -> str:
    """Per cent of plain reuse's KL gap, on 2Wiki / HotpotQA / MuSiQue."""
    wanted = {"strategy": strategy, "encoding": encoding, "ratio": ratio}
    return listed([f"{pick(run['cells'], set=s, **wanted)['recovered']:.0f}" for s in SETS]) + " %"


def copied_over_plain(run: Run) -> str:
    kinds = ("question", "long answer", "summary", "quote", "conversation")
    return listed([times(run["models"][SMALL][f"{kind} x1"]["over_plain"]) for kind in kinds])


def scored(run: Run, way: str, field: str) -> str:
    """Points of F1 less than full prefill has with their 95 % interval, or another field."""
    row = pick(run["rows"], set="all", way=way)
    if field != "f1":
        return f"{row[field]:.3f}"
    mean, low, high = row["less"]["f1"]
    return f"{mean:+.1f} ({low:+.1f} to {high:+.1f})"


def plain_reuse(run: Run, field: str) -> str:
    cells = [pick(run["cells"], set=s, strategy="reuse", encoding="isolated")[field] for s in SETS]
    return listed([percent(c) if field == "flips" else f"{c:.3f}" for c in cells])


def disk_speedup(run: Run, size: str, codec: str) -> str:
    full = pick(run["cells"], size=size, way="full")["ttft_ms"]
    cell = pick(run["cells"], size=size, tier="disk cold", codec=codec, way="reuse")
    return times(full / cell["ttft_ms"])


def over_prefix(run: Run, way: str, stock: str) -> str:
    """Stock vLLM's median first token over the connector's."""
    alone = {name: rows["alone"] for name, rows in run["systems"].items()}
    return times(alone["stock"][stock]["p50_ms"] / alone["connector"][way]["p50_ms"])


def rate_over_prefix(run: Run, way: str) -> str:
    """Requests a second that the connector keeps the bound at, over stock vLLM's."""
    loads = {name: rows["load"] for name, rows in run["systems"].items()}
    return times(
        loads["connector"][f"connector_{way}_8k"]["rate"] / loads["stock"]["prefix_8k"]["rate"]
    )


def over_vllm(run: Run, group: str) -> str:
    vllm, ours = (
        pick(run["cells"], group=group, arm=arm)["ttft_p50_ms"] for arm in ("vllm", "default")
    )
    return times(vllm / ours)


def highest_kl(run: Run) -> str:
    """The upper end of the interval of mean KL on the set where it is highest."""
    return f"{max(found['kl_high'] for found in run['sets'].values()):.4f} nats"


def instead_of(run: Run, system: str) -> str:
    """First token, requests a second and right answers of a system that people would use."""
    row = pick(run["instead"], system=system)
    right = f"{row['right']} of {row['asked']} right"
    return f"{row['ttft_p50_ms'] / 1e3:.2f} s, {row['requests_per_s']:.2f} a second, {right}"


def flag_of(run: Run, wanted: str, value: str) -> str:
    """The value, from a run that was asked for `wanted`."""
    if wanted not in " ".join(run["args"]):
        raise LookupError(f"not asked for {wanted}")
    return value


COPIED = (
    "tokens per second over plain decoding, one answer at a time: question / long answer / "
    "summary / quote / conversation",
    copied_over_plain,
)
# none before the first run of `bench/product.py --instead` is stored
INSTEAD = tuple(
    Figure(
        f"instead_{name}", f"{words}: first token, p50; requests", partial(instead_of, system=name)
    )
    for name, (words, _) in WORDS.items()
    if any(
        row["system"] == name for run in runs_of("product-cpu") for row in run.get("instead", ())
    )
)


def _paired(run: Run, part: str, score: str) -> str:
    found = run["parts"][part][score]
    low, high = found["interval"]
    means = listed([f"{100 * found[each]:.1f}" for each in ("given", "others")])
    return f"{means}; {100 * found['difference']:+.1f} ({100 * low:+.1f} to {100 * high:+.1f})"


def _skew(run: Run, stream: str, field: str) -> str:
    ways = ("words", "flat", "ivf", "hnsw", "no favourites")
    return listed([percent(pick(run["rows"], set=stream, way=way)[field]) for way in ways])


SHOWN = (
    Result(
        "product-cpu",
        code(*CPU, *FUSED, *ANSWERED, "serve"),
        (
            Figure(
                "skewed",
                "SmolLM2, questions over skewed passages: full prefill's first token over ours",
                lambda r: times(only(r, model="smollm2", quick=False)["skewed_stream_speedup"]),
            ),
            Figure(
                "novel",
                "… passages in orders never seen",
                lambda r: times(only(r, model="smollm2", quick=False)["novel_orders_speedup"]),
            ),
            Figure(
                "again",
                "… the same documents asked again",
                lambda r: times(1 / only(r, model="smollm2", quick=False)["over_full"]["second"]),
            ),
            Figure(
                "again_share",
                "… the same, the documents' share of the first token alone",
                lambda r: times(only(r, model="smollm2", quick=False)["same_documents_speedup"]),
            ),
            Figure(
                "vllm_again",
                "… vLLM's CPU build with its prefix cache over ours, the same documents again",
                lambda r: over_vllm(only(r, model="smollm2", quick=False), "second"),
            ),
            Figure(
                "vllm_novel",
                "… vLLM over ours, orders never seen",
                lambda r: over_vllm(only(r, model="smollm2", quick=False), "novel"),
            ),
            Figure(
                "vllm_chat",
                "… vLLM over ours, chat",
                lambda r: over_vllm(only(r, model="smollm2", quick=False), "chat"),
            ),
            Figure(
                "skewed_default",
                "Qwen2.5-Coder-0.5B, the default model, skewed passages, a short run",
                lambda r: times(only(r, model="qwen2.5-coder-0.5b")["skewed_stream_speedup"]),
            ),
            Figure(
                "novel_default",
                "… orders never seen",
                lambda r: times(only(r, model="qwen2.5-coder-0.5b")["novel_orders_speedup"]),
            ),
            *INSTEAD,
        ),
        "RAGCache, first token over vLLM with Faiss on A10G and H800: 1.2 to 4 times. Ours is "
        "on two CPU cores; vLLM computed in float32 there and we in 8 bits, which alone is more "
        "than a factor of two (prefill-cpu).",
    ),
    Result(
        "first_minutes-cpu",
        code(*CPU, *ANSWERED, "ingest", "corpus"),
        (
            Figure(
                "first", "the first answer from a bare clone", lambda r: _s(r, "first_answer_s")
            ),
            Figure("own", "the first from own documents", lambda r: _s(r, "own_documents_s")),
            Figure("fused", "the first fused answer", lambda r: _s(r, "fused_s")),
        ),
    ),
    Result(
        "product-h200",
        code(*GPU, *FUSED, *ANSWERED, "serve"),
        (
            Figure(
                "8k",
                "8B shape, random weights, prompts of 6,900 tokens over HTTP: our median first "
                "token over full prefill's",
                lambda r: of_full(_shape(r)["20x400"]["p50_over_full"]),
            ),
            Figure(
                "32k",
                "… prompts of 27,000 tokens",
                lambda r: of_full(_shape(r)["20x1600"]["p50_over_full"]),
            ),
            Figure(
                "load",
                "… requests per second of 6,900 tokens over full prefill's at equal p95, at least",
                lambda r: times(r["models"][SHAPE]["load"]["over_full"]),
            ),
            Figure(
                "small",
                "Qwen2.5-Coder-0.5B in bfloat16, 5 chunks of 400 / 20 of 400 / 20 of 1,600 tokens, "
                "its gate shut",
                lambda r: listed(
                    [
                        of_full(r["models"][SMALL]["ttft"][name]["p50_over_full"])
                        for name in ("5x400", "20x400", "20x1600")
                    ]
                ),
            ),
        ),
    ),
    Result("copy_decode-cpu", code(*CPU, "engine"), (Figure("median", *COPIED),)),
    Result(
        "copy_decode-h200",
        code(*GPU, "engine"),
        (
            Figure("median", *COPIED),
            Figure(
                "different",
                "answers of 70 that differ; both in float32 and beside tests on the same GPU",
                lambda r: str(r["different_answers"]),
            ),
        ),
    ),
    Result(
        "copy_identity-h200",
        code(*GPU, "engine"),
        (
            Figure(
                "different",
                "answers of so many that differ, 8 at a time, in float32",
                lambda r: f"{r['different_answers']} of {r['answers']:,}",
            ),
        ),
    ),
    Result(
        "vllm-h200",
        code("hosts", *GPU, *FUSED),
        (
            Figure(
                "8k",
                "8B shape, 20 chunks of 400 tokens in orders never seen, vLLM's first token with "
                "its prefix cache over the connector's with 15 % of the rows",
                partial(over_prefix, way="connector_15_8k", stock="prefix_8k"),
            ),
            Figure(
                "8k_reuse",
                "… with none recomputed",
                partial(over_prefix, way="connector_0_8k", stock="prefix_8k"),
            ),
            Figure(
                "32k",
                "20 chunks of 1,600 tokens, 15 % of the rows",
                partial(over_prefix, way="connector_15_32k", stock="prefix_32k"),
            ),
            Figure(
                "32k_reuse",
                "… with none recomputed",
                partial(over_prefix, way="connector_0_32k", stock="prefix_32k"),
            ),
            Figure(
                "nothing",
                "where nothing can be reused, 8,000 and 32,000 tokens, 3 requests each",
                lambda r: listed(
                    [over_prefix(r, way=each, stock=each) for each in ("nothing_8k", "nothing_32k")]
                ),
            ),
            Figure(
                "rate",
                "requests a second of 8,000 tokens at equal p95, 15 % of the rows over vLLM's "
                "prefix cache; none recomputed",
                lambda r: listed([rate_over_prefix(r, way) for way in ("15", "0")]),
            ),
        ),
    ),
    Result(
        "ordinary_hour-cpu",
        code(*CPU, *FUSED, *ANSWERED, "serve"),
        (
            Figure(
                "all",
                "our median first token over full prefill's, a quiet machine",
                lambda r: of_full(only(r, load=0)["hour"]["ratio"]),
            ),
            Figure(
                "second_half",
                "… in the second half",
                lambda r: of_full(only(r, load=0)["second_half"]["ratio"]),
            ),
            Figure(
                "busy",
                "… beside two busy loops",
                lambda r: of_full(only(r, load=2)["hour"]["ratio"]),
            ),
            Figure(
                "first_fused",
                "the first fused answer, a quiet machine",
                lambda r: _s(only(r, load=0), "first_fused_s"),
            ),
        ),
    ),
    Result(
        "ttft-cpu",
        code(*CPU, *FUSED),
        (
            Figure(
                "reuse", "stored KV as it is, over full prefill", lambda r: times(r["speedup_0"])
            ),
            Figure("weave", "`weave` at 15 %", lambda r: times(r["speedup_15"])),
            Figure(
                "auto",
                "`auto`'s first token over full prefill's: host memory / warm / cold disk",
                lambda r: listed(
                    [f"{r['auto_over_full'][t]:.2f}" for t in ("host", "disk warm", "disk cold")]
                ),
            ),
            Figure(
                "published",
                "CacheBlend / FusionRAG / QCFuse / ProphetKV at 15 %",
                lambda r: listed([_cell(r, s) for s in PUBLISHED]),
            ),
            Figure(
                "selecting",
                "share of the first token spent on choosing rows: QCFuse / ProphetKV",
                lambda r: listed([_select(r, s) for s in ("qcfuse", "prophetkv")]),
            ),
            Figure(
                "computing",
                "share of a full prefill's first token that is computing",
                lambda r: percent(
                    pick(r["cells"], way="full", tier="host")["stages_ms"]["compute"]
                    / pick(r["cells"], way="full", tier="host")["ttft_ms"]
                ),
            ),
            Figure(
                "retrieving",
                "milliseconds of retrieval in it",
                lambda r: (
                    f"{pick(r['cells'], way='full', tier='host')['stages_ms']['retrieve']} ms"
                ),
            ),
        ),
    ),
    Result(
        "ttft-h200",
        code(*GPU, *FUSED),
        (
            Figure(
                "reuse_32k",
                "32K, KV in host memory, stored KV as it is, over full prefill",
                lambda r: times(r["speedup_0_32k_host"]),
            ),
            Figure(
                "15_32k",
                "… EPIC / FusionRAG / QCFuse / `weave` at 15 %",
                lambda r: listed([times(r["speedup_15_by_way"]["32k_host"][w]) for w in WAYS]),
            ),
            Figure(
                "15_8k",
                "… the same at 8K",
                lambda r: listed([times(r["speedup_15_by_way"]["8k_host"][w]) for w in WAYS]),
            ),
            Figure(
                "qcfuse",
                "… QCFuse alone: 32K / 8K",
                lambda r: listed(
                    [times(r["speedup_15_by_way"][s]["qcfuse"]) for s in ("32k_host", "8k_host")]
                ),
            ),
            Figure(
                "disk_8k",
                "8K from a cold disk, stored KV as it is: raw / int8 / int4",
                lambda r: listed([disk_speedup(r, "8k", c) for c in ("raw", "int8", "int4")]),
            ),
            Figure(
                "disk_32k",
                "… 32K",
                lambda r: listed([disk_speedup(r, "32k", c) for c in ("raw", "int8", "int4")]),
            ),
        ),
        "FusionRAG, 27K tokens on an L20: 5.22 to 9.39 times at 0 %, 2.66 to 3.94 at 15 %. Ours "
        "is an H200, 32K, an 8B shape with random weights.",
    ),
    Result(
        "throughput-cpu",
        code(*CPU, *FUSED, *ANSWERED),
        (
            Figure(
                "auto",
                "`auto` over full prefill, within the bound",
                lambda r: times(r["auto_over_full"]),
            ),
            Figure(
                "completed", "… by requests completed", lambda r: times(r["completed_over_full"])
            ),
            Figure(
                "prefix", "exact prefixes over full prefill", lambda r: times(r["prefix_over_full"])
            ),
        ),
        "RAGCache over vLLM with Faiss: 1.3 to 2.1 times; FusionRAG: 1.2 to 4.3 times over full "
        "prefill and CacheBlend. Ours is over our own full prefill.",
    ),
    Result(
        "throughput-h200",
        code(*GPU, *FUSED, *ANSWERED),
        (
            Figure(
                "auto",
                "FusionRAG at 15 % behind exact prefixes over full prefill, within the bound",
                lambda r: times(r["auto_over_full"]),
            ),
            Figure(
                "completed", "… by requests completed", lambda r: times(r["completed_over_full"])
            ),
            Figure(
                "prefix", "exact prefixes over full prefill", lambda r: times(r["prefix_over_full"])
            ),
        ),
        "FusionRAG: 1.2 to 4.3 times over full prefill and CacheBlend.",
    ),
    Result(
        "vllm_ttft-cpu",
        code("hosts", *FUSED),
        (
            Figure(
                "reuse", "stored KV as it is, over vLLM cold", lambda r: times(r["fused_0_speedup"])
            ),
            Figure("15", "15 % of the rows recomputed", lambda r: times(r["fused_15_speedup"])),
        ),
    ),
    Result(
        "bandwidth-h200",
        code(*GPU, *FUSED),
        (
            Figure(
                "slope",
                "seconds later that rows are known, for each second that loading takes longer: "
                "QCFuse / ProphetKV",
                lambda r: listed(
                    [f"{r['selection_slope'][w]:.2f}" for w in ("qcfuse", "prophetkv")]
                ),
            ),
            Figure(
                "3gb",
                "first token over a link of 3 GB/s: QCFuse / ProphetKV",
                lambda r: listed([_at(r, w, 3) for w in ("qcfuse", "prophetkv")]),
            ),
            Figure(
                "1gb",
                "… of 1 GB/s",
                lambda r: listed([_at(r, w, 1) for w in ("qcfuse", "prophetkv")]),
            ),
        ),
        "QCFuse, half of the rows: at 3 GB/s ProphetKV is slower than full prefill, QCFuse "
        "faster. Ours recomputes 15 %.",
    ),
    Result(
        "beside-cpu",
        code(*CPU, "fuse", "engine"),
        (
            Figure(
                "gap",
                "gap between two tokens, p95: a step of its own over joined to others' steps",
                lambda r: times(r["gap_p95_ratio"]),
            ),
        ),
    ),
    Result(
        "speculation-cpu",
        code(*CPU, "engine", "app/answer", "corpus"),
        (
            Figure(
                "auto",
                "search time left in the first token is so many times less, `auto`, by length of "
                "search",
                lambda r: listed([times(v) for v in r["cut"]["elsewhere"]["auto"]]),
            ),
            Figure(
                "ttft",
                "first token without speculation over with it, `auto`, by length of search",
                lambda r: listed(
                    [
                        times(row["off"]["ttft_ms"] / row["auto"]["ttft_ms"])
                        for row in r["rows"]
                        if row["where"] == "elsewhere"
                    ]
                ),
            ),
        ),
        "RAGCache: search that is not overlapped 1.5 to 4.3 times less, first token up to 1.6 "
        "times sooner.",
    ),
    Result(
        "speculation-h200",
        code(*GPU, "engine", "app/answer"),
        (
            Figure(
                "best",
                "first token without speculation over with it, the best and the worst row",
                lambda r: listed(
                    [times(r["speculation_over_plain"]), times(r["speculation_worst"])]
                ),
            ),
            Figure(
                "cut",
                "search time left, so many times less, `auto`: least and most",
                lambda r: listed(
                    [times(f(row["auto"]["cut"] for row in r["rows"])) for f in (min, max)]
                ),
            ),
        ),
        "RAGCache: up to 1.6 times sooner, search left 1.5 to 4.3 times less.",
    ),
    Result(
        "quality-h200",
        code("fuse", "calibrate", "!calibrate/packaged"),
        (
            Figure(
                "weave",
                "KL gap of plain reuse that `weave` at 15 % recovers, 2Wiki / HotpotQA / MuSiQue",
                lambda r: recovered(r, "weave", "isolated"),
            ),
            Figure("cacheblend", "… CacheBlend", lambda r: recovered(r, "cacheblend", "isolated")),
            Figure("fusionrag", "… FusionRAG", lambda r: recovered(r, "fusionrag", "isolated")),
            Figure("prophetkv", "… ProphetKV", lambda r: recovered(r, "prophetkv", "isolated")),
            Figure("qcfuse", "… QCFuse", lambda r: recovered(r, "qcfuse", "isolated")),
            Figure(
                "qcfuse_50", "… QCFuse at 50 %", lambda r: recovered(r, "qcfuse", "isolated", 0.5)
            ),
            Figure(
                "qcfuse_50_filler",
                "… QCFuse at 50 % behind a filler",
                lambda r: recovered(r, "qcfuse", "filler:4", 0.5),
            ),
            Figure(
                "weave_near",
                "… `weave` behind neighbours",
                lambda r: recovered(r, "weave", "neighbours:3"),
            ),
            Figure(
                "fusionrag_near",
                "… FusionRAG behind neighbours",
                lambda r: recovered(r, "fusionrag", "neighbours:3"),
            ),
            Figure(
                "cacheblend_near",
                "… CacheBlend behind neighbours",
                lambda r: recovered(r, "cacheblend", "neighbours:3"),
            ),
            Figure(
                "reuse_near",
                "… plain reuse behind neighbours",
                lambda r: recovered(r, "reuse", "neighbours:3", 0.0),
            ),
            Figure(
                "oracle",
                "… an oracle that knows what each row brings in KL",
                lambda r: recovered(r, "oracle", "isolated"),
            ),
            Figure("reuse_kl", "plain reuse's KL, nats per token", lambda r: plain_reuse(r, "kl")),
            Figure(
                "reuse_flips",
                "answers whose first token it changes",
                lambda r: plain_reuse(r, "flips"),
            ),
            Figure(
                "full_f1",
                "F1 of full prefill on this small model: too low to compare by",
                lambda r: listed(
                    [f"{pick(r['cells'], set=s, strategy='full')['f1']:.3f}" for s in SETS]
                ),
            ),
        ),
        "The papers give F1, EM or ROUGE-L of 7B to 32B models; ours is the KL divergence from "
        "full prefill of SmolLM2-135M on the same kinds of questions.",
    ),
    Result(
        "quality_models-h200",
        code("fuse", "calibrate", "!calibrate/packaged"),
        (
            Figure(
                "full_f1",
                "F1 of full prefill, Qwen2.5-Coder-0.5B in bfloat16, 290 questions of seven sets",
                lambda r: f"{pick(r['rows'], set='all', way='full')['f1']:.1f}",
            ),
            Figure(
                "served",
                "points of F1 over full prefill's, with 95 % interval: what is served behind these "
                "prompts",
                lambda r: scored(r, "auto-half", "f1"),
            ),
            Figure(
                "auto",
                "… what is served behind the prompt that was measured (twice the bound)",
                lambda r: scored(r, "auto", "f1"),
            ),
            Figure("weave", "… `weave-through` at 15 %", lambda r: scored(r, WEAVE, "f1")),
            *(
                Figure(name, f"… {says} at 15 %", partial(scored, way=f"{name}:0.15", field="f1"))
                for name, says in SCORED
            ),
            Figure("reuse", "… stored KV as it is", lambda r: scored(r, "reuse", "f1")),
            Figure(
                "kl",
                "KL of the two that are served, nats per token",
                lambda r: listed([scored(r, "auto-half", "kl"), scored(r, "auto", "kl")]),
            ),
            Figure(
                "kl_published",
                "… of `weave-through` / CacheBlend / EPIC / FusionRAG at 15 %",
                lambda r: listed(
                    [scored(r, w, "kl") for w in (WEAVE, *(f"{n}:0.15" for n, _ in SCORED))]
                ),
            ),
        ),
        "The papers score models of 7B and more.",
    ),
    FIGURES_CPU,
    Result(
        "ladder-cpu",
        code("fuse", "calibrate", "!calibrate/packaged"),
        (
            Figure(
                "rung",
                "what a close call costs if 60 % of its rows are computed anew first, the default "
                "model, in full prefills (exact at once: 1)",
                lambda r: f"{_rung(r)['rows']:.2f}",
            ),
        ),
    ),
    Result(
        "gate-h200",
        code("calibrate"),
        (
            Figure(
                "within",
                "sets on which the mean KL stays within the bound, the default model, newest run",
                lambda r: f"{sum(s['within'] for s in r['sets'].values())} of {len(r['sets'])}",
            ),
            Figure(
                "kl",
                "highest upper end of an interval of the mean KL (bound: 0.02)",
                highest_kl,
            ),
            Figure("kl_smollm2", "… SmolLM2", lambda r: highest_kl(pick([r], model="smollm2"))),
        ),
    ),
    Result(
        "answers-cpu",
        code(*FUSED, *ANSWERED, "calibrate"),
        (
            Figure(
                "right",
                "of 40 questions answered rightly, default model: full prefill / `auto`",
                lambda r: listed(
                    [
                        f"{r['models']['qwen2.5-coder-0.5b'][way]['right']:.1%}"
                        for way in ("full", "auto")
                    ]
                ).replace("%", " %"),
            ),
        ),
    ),
    Result(
        "codec_kl-cpu",
        code("kv/format"),
        (
            Figure(
                "kl",
                "nats per token that rounding alone costs: int8 / fp8 / int4",
                lambda r: listed(
                    [f"{r['kl_nats'][c]['quantised']:.5f}" for c in ("int8", "fp8", "int4")]
                ),
            ),
        ),
    ),
    Result(
        "audit-cpu",
        code("app/audit"),
        (Figure("n", "requests until corrected", lambda r: str(r["requests_until_corrected"])),),
    ),
    Result(
        "own_evidence-cpu",
        code("app/auto", "calibrate"),
        (
            Figure(
                "ratio",
                "recomputed before / after its own questions, by base",
                lambda r: listed(
                    [
                        f"{base}: {found['ratio_before']:.0%} / {found['ratio_after']:.0%}"
                        for base, found in r["bases"].items()
                    ]
                ).replace("%", " %"),
            ),
            Figure(
                "kl",
                "nats per token that real questions lose then, by base",
                lambda r: listed([f"{found['after']['kl']:.4f}" for found in r["bases"].values()]),
            ),
        ),
    ),
    Result(
        "prefill-cpu",
        code(*CPU),
        (
            Figure(
                "own",
                "prefill in 8 bits over float32, x86-64, 1,024 / 3,000 / 8,000 tokens",
                lambda r: listed(
                    [times(v["quant_over_fp32"]) for v in r["prefill_tok_s_by_length"].values()]
                ),
            ),
            Figure(
                "transformers",
                "float32 prefill over transformers, x86-64",
                lambda r: times(only(r, device="x86_64")["ratio"]),
            ),
            Figure(
                "rounded_arm",
                "prefill in 8 bits over float32, Arm, 1,024 tokens",
                lambda r: times(only(r, device="aarch64")["quant_over_fp32"]),
            ),
            Figure(
                "llamacpp",
                "decode in 8 bits over llama.cpp on its 4-bit file: x86-64",
                lambda r: times(only(r, device="x86_64")["decode_over_llamacpp"]),
            ),
            Figure(
                "llamacpp_arm",
                "… Arm",
                lambda r: times(only(r, device="aarch64")["decode_over_llamacpp"]),
            ),
        ),
    ),
    Result(
        "gpu_prefill-h200",
        code(*GPU),
        (
            Figure(
                "fixed",
                "full prefill in one fixed order (`engine.exact`) over the usual: 8K / 32K",
                lambda r: listed(
                    [
                        times(r[f"prefill_{n}"]["fixed_ms"] / r[f"prefill_{n}"]["kernels_ms"])
                        for n in ("8k", "32k")
                    ]
                ),
            ),
            Figure(
                "over_plain",
                "full prefill over plain PyTorch: 8K / 32K",
                lambda r: listed(
                    [
                        times(r[f"prefill_{n}"]["plain_ms"] / r[f"prefill_{n}"]["kernels_ms"])
                        for n in ("8k", "32k")
                    ]
                ),
            ),
        ),
    ),
    Result(
        "gpu_attention-h200",
        code("kernels/gpu", "kernels/attention.py", "kernels/dispatch.py"),
        (
            Figure(
                "cudnn",
                "15 % of the rows of 32K, over cuDNN's full attention",
                lambda r: times(r["speedup_15_32k"]),
            ),
            Figure("sdpa", "… over SDPA with a mask", lambda r: _attention(r, "sdpa_mask_ms")),
            Figure(
                "flex",
                "… over FlexAttention, its mask not timed",
                lambda r: _attention(r, "flex_ms"),
            ),
            Figure(
                "all_rows", "all rows, over cuDNN", lambda r: times(r["rows_100_32k"]["speedup"])
            ),
        ),
        "FusionRAG at 15 % of 32K: 4.2 times over FlashAttention, 2.69 over SDPA.",
    ),
    Result(
        "gpu_decode-h200",
        code("model", "!model/files", "kernels/recording.py", "kernels/gpu"),
        (
            Figure(
                "speedup",
                "recorded over plain steps at 8K: 1 / 8 / 32 sequences",
                lambda r: listed([times(r[f"speedup_b{n}"]) for n in (1, 8, 32)]),
            ),
        ),
    ),
    Result(
        "gpu_shared-h200",
        code(*GPU, *FUSED, "engine"),
        (
            Figure(
                "32k_reuse",
                "32K on the device, stored KV as it is, over full prefill",
                lambda r: times(r["ttft_32k_0"]),
            ),
            Figure("32k_15", "… 15 % recomputed", lambda r: times(r["ttft_32k_15"])),
            Figure("8k_15", "… 8K", lambda r: times(r["ttft_8k_15"])),
            Figure(
                "throughput",
                "requests per second within the bound over full prefill, 15 %",
                lambda r: flag_of(r, "throughput", times(r["throughput_over_full"])),
            ),
            Figure(
                "throughput_0",
                "… nothing recomputed, chunks in 8 bits",
                lambda r: times(r["throughput_over_full_at_0"]),
            ),
            Figure(
                "tbt",
                "mean time between tokens at the first rate within the bound: full prefill / "
                "shared, 15 %",
                lambda r: listed(
                    [
                        f"{pick(r['throughput'], mode=m, within=True)['tbt_ms']['mean']} ms"
                        for m in ("full", "shared")
                    ]
                ),
            ),
            Figure(
                "capacity",
                "requests that fit at once over copies, nothing / 15 % recomputed",
                lambda r: listed([times(r["capacity_0"]), times(r["capacity_15"])]),
            ),
        ),
        "FusionRAG's throughput: 1.2 to 4.3 times over full prefill and CacheBlend.",
    ),
    Result(
        "shared_drift-cpu",
        code("fuse", "engine"),
        (
            Figure(
                "kl",
                "nats of later tokens: over a copy / over shared chunks",
                lambda r: listed(
                    [f"{pick(r['rows'], way=w)['later_tokens_nats']}" for w in ("copied", "shared")]
                ),
            ),
        ),
    ),
    Result(
        "shared_drift-h200",
        code("fuse", "engine"),
        (
            Figure(
                "kl",
                "nats of later tokens: over a copy / over shared chunks",
                lambda r: listed(
                    [f"{pick(r['rows'], way=w)['later_tokens_nats']}" for w in ("copied", "shared")]
                ),
            ),
        ),
    ),
    Result(
        "gpu_idle-h200",
        code(*GPU, "fuse", "engine"),
        (
            Figure(
                "idle",
                "share of time that the GPU stands still: waited for / one prompt a step / two",
                lambda r: listed([percent(m["idle"]) for m in r["modes"]]),
            ),
            Figure(
                "rate",
                "prompts per second over waited for: one a step / two",
                lambda r: listed(
                    [
                        times(m["prompts_per_s"] / r["modes"][0]["prompts_per_s"])
                        for m in r["modes"][1:]
                    ]
                ),
            ),
        ),
        "FusionRAG: asynchronous scheduling takes 11 % off the first token at batch 10.",
    ),
    Result(
        "gpu_stalls-h200",
        code("kernels/gpu", "engine/warm_up.py"),
        (
            Figure(
                "compiled",
                "kernels compiled after the warm-up",
                lambda r: str(r["compiled_after_warm_up"]),
            ),
        ),
    ),
    Result(
        "gpu_host-h200",
        code("fuse", "kernels/recording.py"),
        (
            Figure(
                "wall",
                "8K, wall time of a pass: `reuse` / EPIC / `weave`",
                lambda r: listed(
                    [f"{r[f'8k_{w}']['numbers']['wall_ms']} ms" for w in ("reuse", "epic", "weave")]
                ),
            ),
        ),
    ),
    Result(
        "host_time-cpu",
        code("fuse", "kv"),
        (
            Figure(
                "host",
                "host time of a pass besides its layers: `reuse` / EPIC / `weave`",
                lambda r: listed([f"{r['ms'][w]['host']} ms" for w in ("reuse", "epic", "weave")]),
            ),
        ),
    ),
    Result(
        "tiers-cpu",
        code("kv"),
        (
            Figure(
                "warm",
                "GB/s of one chunk, warm page cache: read by hand / our disk tier, checked",
                lambda r: listed([_load(r, "readinto"), _load(r, "disk")]),
            ),
            Figure(
                "bytes",
                "bytes per token of float32: int8 / int4",
                lambda r: listed(
                    [percent(pick(r["codecs"], codec=c)["of_raw"]) for c in ("int8", "int4")]
                ),
            ),
        ),
    ),
    Result(
        "hitrate-cpu",
        code("kv/tree", "kv/policies.py"),
        (
            Figure(
                "auto",
                "hit rate of `auto`, the default, over the best policy of each, mean (least "
                "to most), passages found by words: MMLU / NQ / MMLU by subject",
                lambda r: listed(
                    [
                        _spread(r["by_set"][s]["auto_over_best_of_each"])
                        for s in ("mmlu", "nq_open", "mmlu by subject")
                    ]
                ),
            ),
            Figure(
                "over",
                "hit rate of PGDSF over GDSF / LRU / LFU, mean (least to most)",
                lambda r: listed([_spread(_whole(r)["pgdsf_over"][p]) for p in POLICIES]),
            ),
            Figure(
                "drift",
                "… where the subject of questions moves on",
                lambda r: listed(
                    [
                        _spread(_whole(r)["by_set"]["mmlu by subject"]["pgdsf_over"][p])
                        for p in POLICIES
                    ]
                ),
            ),
            Figure(
                "ttft",
                "mean first token of GDSF / LRU / LFU over PGDSF's",
                lambda r: listed([_spread(_whole(r)["ttft_over_pgdsf"][p]) for p in POLICIES]),
            ),
        ),
        "RAGCache: 1.02 to 1.32, 1.06 to 1.62, 1.06 to 1.75; first token 1.05 to 1.29 times.",
    ),
    Result(
        "ordering-cpu",
        code("plan/ordering.py", "kv/tree"),
        (
            Figure(
                "aligned",
                "chunks that an earlier request had as the same prefix: MMLU / NQ / MTRAG",
                lambda r: listed([percent(r["overlap"][s]["prefix"]) for s in STREAMS]),
            ),
            Figure(
                "shared",
                "… that one earlier request had anywhere",
                lambda r: listed([percent(r["overlap"][s]["total"]) for s in STREAMS]),
            ),
            Figure(
                "union",
                "… that any earlier request had",
                lambda r: listed([percent(r["overlap"][s]["union"]) for s in STREAMS]),
            ),
            Figure(
                "avoided",
                "KV that need not be computed, by our planner, unbounded tree; in 4 GiB of host "
                "memory; passages found by words, MMLU 10,000, NQ 5,025 and MTRAG 343 requests",
                lambda r: "; ".join(
                    listed(
                        [
                            percent(_ordered(only(r, retrieved_by="BM25"), s, gib)["planner"])
                            for s in STREAMS
                        ]
                    )
                    for gib in (1024, 4)
                ),
            ),
            Figure(
                "dedup",
                "MTRAG with conversations that send nothing twice, unbounded tree",
                lambda r: percent(
                    pick(
                        r["rows"],
                        set="mtrag",
                        host_gib=1024,
                        dedup=True,
                        requests=r["config"]["requests"]["mtrag"],
                    )["planner"]
                ),
            ),
            Figure(
                "craft",
                "… by CRAFT's order and threshold, unbounded tree; in 4 GiB",
                lambda r: "; ".join(
                    listed(
                        [
                            percent(_ordered(only(r, retrieved_by="BM25"), s, gib)["frequency"])
                            for s in STREAMS
                        ]
                    )
                    for gib in (1024, 4)
                ),
            ),
            Figure(
                "apart",
                "first 2,000 requests, of all chunk tokens: the most that any order can find; "
                "aligned as found; by our order, unbounded tree; by frequencies that are known "
                "beforehand",
                lambda r: "; ".join(
                    listed([percent(r["decomposition"][s][part]) for s in STREAMS])
                    for part in ("most", "aligned", "ordered", "foreseen")
                ),
            ),
            Figure(
                "lost",
                "… lost to the order; to the budget of 4 GiB; to the window of 1,000",
                lambda r: "; ".join(
                    listed([_points(r["decomposition"][s][part]) for s in STREAMS])
                    for part in ("lost_to_order", "lost_to_budget", "lost_to_window")
                ),
            ),
            Figure(
                "window",
                "… avoided by a window of 50 / 200 / 1,000 / 2,000 requests, unbounded tree: MMLU; "
                "NQ; by CRAFT's order: MMLU; NQ",
                lambda r: "; ".join(
                    _swept(r, s, "window", kind, ("50", "200", "1000", "2000"))
                    for kind in ("planner", "frequency")
                    for s in ("mmlu", "nq_open")
                ),
            ),
            Figure(
                "uses",
                "… avoided by a threshold of 1 / 2 / 3 / 5 uses, unbounded tree: MMLU; NQ; in "
                "4 GiB: MMLU; NQ",
                lambda r: "; ".join(
                    _swept(r, s, "uses", "planner", ("1", "2", "3", "5"), gib)
                    for gib in ("1024", "4")
                    for s in ("mmlu", "nq_open")
                ),
            ),
            Figure(
                "tail",
                "… avoided where the rest is never put in order / once the device is full (as "
                "users get it) / once host memory is too / and with two uses then, 4 GiB: MMLU; NQ",
                lambda r: "; ".join(
                    listed(
                        [
                            f"{share:.1%}".replace("%", " %")
                            for share in r["sweeps"][s]["4"]["tail"].values()
                        ]
                    )
                    for s in ("mmlu", "nq_open")
                ),
            ),
            Figure(
                "books",
                "MB of the access table / of the tree's books; KV that the tree then holds, "
                "MMLU, 2,000 requests",
                lambda r: listed(
                    [f"{r['books']['mmlu'][part]:.1f} MB" for part in ("table_mb", "tree_mb")]
                    + [f"{r['books']['mmlu']['kv_mb'] / 1000:.0f} GB"]
                ),
            ),
            Figure(
                "contextpilot",
                "… by ContextPilot's order (900 requests of MMLU and NQ), and ours there",
                lambda r: listed([_beside(r, s) for s in STREAMS]),
            ),
            Figure(
                "repeats",
                "MTRAG: KV that conversations repeat",
                lambda r: percent(
                    pick(r["rows"], set="mtrag", host_gib=1024, dedup=True)["planner"]
                ),
            ),
        ),
        "CRAFT: 11 % prefix-aligned, 43 % shared, 19 to 38 % of KV not computed, 21 % repeated.",
    ),
    Result(
        "orders-cpu",
        code(*CPU, "text/prompt.py"),
        (
            *(
                Figure(
                    f"{part}_{score}",
                    f"{says}, {name}: as found / else; difference with its 95 % interval",
                    partial(_paired, part=part, score=score),
                )
                for part, says in (
                    ("order", "HotpotQA, five passages in drawn orders"),
                    ("repeats", "MTRAG turns without what their conversation holds"),
                )
                for score, name in (("f1", "F1"), ("rouge_l", "ROUGE-L"))
            ),
            Figure(
                "same",
                "answers that stay the same, word for word: another order / without repeats; of "
                "so many questions",
                lambda r: listed(
                    [
                        f"{percent(r['parts'][part]['same_answer'])} "
                        f"({r['parts'][part]['questions']})"
                        for part in ("order", "repeats")
                    ]
                ),
            ),
        ),
        "CRAFT: no measurable change, BERTScore and F1; 7B models, 100 orders of 20 questions.",
    ),
    Result(
        "skew-cpu",
        code("corpus/index"),
        (
            Figure(
                "all",
                "first hits that go to the hottest 3 % of all passages, by words / vectors, flat / "
                "IVF / HNSW / if all were as likely: MMLU; NQ",
                lambda r: "; ".join(_skew(r, s, "first_0.03") for s in ("mmlu", "nq_open")),
            ),
            Figure(
                "found",
                "… to the hottest 3 % of those that were found",
                lambda r: "; ".join(
                    _skew(r, s, "first_0.03_of_found") for s in ("mmlu", "nq_open")
                ),
            ),
        ),
        "RAGCache: 60 % of MMLU's requests at 3 % of documents, whatever embedder or index.",
    ),
    Result(
        "top_k-cpu",
        code("kv/tree", "kv/policies.py"),
        (
            Figure(
                "gain",
                "priced first token without a cache over with one, 16 GiB of host memory, top 1 / "
                "3 / 5: MMLU; NQ",
                lambda r: "; ".join(
                    listed(
                        [
                            times(pick(r["rows"], set=s, top_k=k, host_gib=16)["over_no_cache"])
                            for k in (1, 3, 5)
                        ]
                    )
                    for s in ("mmlu", "nq_open")
                ),
            ),
            Figure(
                "hits",
                "… hit rate",
                lambda r: "; ".join(
                    listed(
                        [
                            percent(pick(r["rows"], set=s, top_k=k, host_gib=16)["hit_rate"])
                            for k in (1, 3, 5)
                        ]
                    )
                    for s in ("mmlu", "nq_open")
                ),
            ),
        ),
        "RAGCache: 1.7 to 3.1 times sooner over vLLM at 0.8 to 1 requests per second.",
    ),
    Result(
        "reordering-cpu",
        code("engine", "kv/tree"),
        (
            Figure(
                "mean",
                "mean first token, first come first served over reordered, by rate (times what is "
                "answered one at a time); each draw in brackets",
                lambda r: listed(
                    [
                        f"{row['times']:g}: {row['mean']:.2f} "
                        f"({', '.join(f'{each:.2f}' for each in row['mean_of_each'])})"
                        for row in r["over"]
                    ]
                ),
            ),
            Figure(
                "p95",
                "… 95th percentile",
                lambda r: listed([f"{row['times']:g}: {row['p95']:.2f}" for row in r["over"]]),
            ),
        ),
        "RAGCache: 1.2 to 2.1 times sooner, above capacity.",
    ),
    Result(
        "altpath-cpu",
        code(
            "plan/other_paths.py", "kv/tree", "app/library/kv_behind.py", "app/library/front_kv.py"
        ),
        (
            Figure("storage", "storage saved, simulated", lambda r: percent(r["storage_saved"])),
            Figure(
                "recomputed",
                "recomputations avoided",
                lambda r: percent(r["recomputations_avoided"]),
            ),
            Figure("hits", "hit rate", lambda r: percent(r["hit_rate"])),
        ),
        "FusionRAG: 71 %, 82.3 %, 77.9 %. Ours is simulated: the product's rules say what is "
        "stored, copies are counted and not bytes.",
    ),
    Result(
        "planner-cpu",
        code("plan"),
        (
            Figure(
                "p50",
                "one plan, 10,000 nodes, top-20, x86-64: median / p99",
                lambda r: listed([f"{r['p50_ms']:.2f} ms", f"{r['p99_ms']:.2f} ms"]),
            ),
        ),
        "RAGCache: 0.872 to 0.906 ms, with updates of its tree and reordering.",
    ),
    Result(
        "machine_profile-cpu",
        code(*CPU, "plan/profile.py"),
        (
            Figure(
                "error",
                "worst error of a price between measured sizes",
                lambda r: percent(r["worst_interpolation_error"]),
            ),
        ),
    ),
    Result(
        "retrieval-cpu",
        code("corpus"),
        (
            Figure(
                "recall",
                "recall@5, flat index: NQ / HotpotQA",
                lambda r: listed(
                    [
                        f"{pick(r['results']['rows'], set=s, method='flat')['recall@5']:.3f}"
                        for s in ("nq", "hotpotqa")
                    ]
                ),
            ),
            Figure(
                "early",
                "NQ: requests whose result is final after the first stage of a search: IVF / HNSW",
                lambda r: listed([_early(r, "nq/ivf", 0), _early(r, "nq/hnsw", 0)]),
            ),
            Figure(
                "late",
                "… first stage after which nine tenths are: IVF / HNSW",
                lambda r: listed([_nearly_all(r, "nq/ivf"), _nearly_all(r, "nq/hnsw")]),
            ),
        ),
        "RAGCache: 95 % of requests are final after 13 % of the search.",
    ),
    Result(
        "embedding-cpu",
        code("corpus/bert_encoder.py", "corpus/embedder.py", "kernels/native"),
        (
            Figure("speed", "8 bits over float32", lambda r: times(r["times"]["speed_up"])),
            Figure(
                "recall",
                "recall@5 of SQuAD questions: float32 / 8 bits",
                lambda r: listed(
                    [
                        f"{pick(r['recall']['rows'], kind='squad')[w]['recall@5']:.3f}"
                        for w in ("float32", "auto")
                    ]
                ),
            ),
        ),
    ),
    Result(
        "ingest-cpu",
        code("ingest", "corpus"),
        (
            Figure(
                "ratio",
                "time of the bare embedder over ingest's, median of six",
                lambda r: times(r["results"]["ratio"]),
            ),
        ),
    ),
    Result(
        "background_ingest-cpu",
        code("ingest", "corpus", "engine/background.py", "app/library"),
        (
            Figure(
                "ratio",
                "a whole answer, p95, beside an ingest over before it: chat / over documents",
                lambda r: listed([times(r["ratio_p95"][k]) for k in ("chat", "kb")]),
            ),
            Figure(
                "kv",
                "chunks whose KV was made meanwhile / in so long",
                lambda r: listed([f"{r['kv']['chunks_done']:,} chunks", f"{r['ingest_s']:,.0f} s"]),
            ),
        ),
    ),
    Result(
        "shared_tier-cpu",
        code("kv/tiers", "app/library"),
        (
            Figure("encoded", "chunks that it encodes", lambda r: str(r["encoded_chunks"])),
            Figure(
                "first",
                "its first fused answer / full prefill",
                lambda r: listed([f"{r['first_ms']:.0f} ms", f"{r['full_ms']:.0f} ms"]),
            ),
        ),
    ),
    Result(
        "shared_tier_fleet-cpu",
        code("kv/tiers", "app/library", "gateway"),
        (
            Figure(
                "fused",
                "later answers that are fused",
                lambda r: f"{r['later_fused']} of {r['later_answers']}",
            ),
        ),
    ),
    Result(
        "gateway-cpu",
        code("gateway"),
        (
            Figure(
                "added",
                "added to a request: median / p99",
                lambda r: listed([f"{r['added_p50_ms']} ms", f"{r['added_p99_ms']} ms"]),
            ),
            Figure(
                "hits",
                "hit rate over taking turns",
                lambda r: times(r["hits_over_round_robin"]),
            ),
        ),
    ),
    Result(
        "ui_cost-cpu",
        code("app/answer/answer_details.py", "app/answer/kept_answers.py"),
        (Figure("share", "added to the first token", lambda r: f"{100 * r['added_share']:.1f} %"),),
    ),
    Result(
        "fleet_sim-simulated",
        code("gateway", "plan"),
        (
            Figure(
                "auto",
                "requests per second of one replica: full prefill / `auto`, simulated",
                lambda r: listed([f"{r['check'][w]['simulated']}" for w in ("full", "auto")]),
            ),
            Figure(
                "measured",
                "… as throughput-h200 measured them",
                lambda r: listed([f"{r['check'][w]['measured']:.1f}" for w in ("full", "auto")]),
            ),
        ),
    ),
    Result(
        "fault_matrix-cpu",
        code("serve", "engine", "app", "kv", "corpus"),
        (
            Figure(
                "faults",
                "faults / kills / power cuts, all runs together",
                lambda r: listed(
                    [str(r["summary"][what]) for what in ("faults", "kills", "power_cuts")]
                ),
            ),
            Figure(
                "wrong",
                "… wrong answers / lost documents / stuck requests",
                lambda r: listed(
                    [
                        str(r["summary"][what])
                        for what in ("wrong_answers", "lost_documents", "stuck_requests")
                    ]
                ),
            ),
        ),
    ),
    Result(
        "fault_matrix-h200",
        code("engine", "kernels/gpu"),
        (
            Figure("faults", "faults, all runs together", lambda r: str(r["summary"]["faults"])),
            Figure("wrong", "… wrong answers", lambda r: str(r["summary"]["wrong_answers"])),
        ),
    ),
    Result(
        "restart-cpu",
        code("serve/keeper.py", "serve/access/held.py", "app/answer"),
        (
            Figure(
                "back",
                "killed process: seconds until it answers again",
                lambda r: f"{pick([r['restart']], how='kill')['seconds_until_answers']} s",
            ),
            Figure(
                "lost",
                "… answers under way that were lost, of six",
                lambda r: str(
                    pick([r["restart"]], how="kill")["under_way"].get("connection lost", 0)
                ),
            ),
        ),
    ),
    Result(
        "soak-cpu",
        code("serve", "engine"),
        (
            Figure("requests", "requests in ten minutes", lambda r: f"{r['requests']:,}"),
            Figure("wrong", "wrong replies", lambda r: str(len(r["wrong"]))),
        ),
    ),
    Result(
        "purity-cpu",
        code("engine", "fuse", "kv"),
        (
            Figure("exact", "exact answers", lambda r: f"{r['requests']['exact']:,}"),
            Figure("wrong", "… that differ", lambda r: str(len(r["wrong"]))),
        ),
    ),
    Result(
        "memory-cpu",
        code("app/libraries", "serve", "engine"),
        (Figure("kb", "kB left per opening", lambda r: str(r["kb_per_opening"])),),
    ),
    Result(
        "novelty-cpu",
        code(*CPU, *FUSED, *ANSWERED),
        (
            Figure(
                "thirds",
                "full prefill's first token over ours: first third / last third",
                lambda r: listed([times(r["first_third"]), times(r["last_third"])]),
            ),
        ),
    ),
)


def _s(run: Run, field: str) -> str:
    if run[field] is None:
        raise LookupError(field)
    return f"{run[field]:.0f} s"


def _whole(run: Run) -> Run:
    """A run over all of its 32 settings."""
    return only(run, host_gib=[1, 4, 8, 16], top_k=[1, 2, 3, 5])


def _shape(run: Run) -> Run:
    found: Run = run["models"][SHAPE]["ttft"]
    return found


def _cell(run: Run, strategy: str) -> str:
    return times(pick(run["cells"], way=f"{strategy} 0.15", tier="host")["speedup"])


def _select(run: Run, strategy: str) -> str:
    cell = pick(run["cells"], way=f"{strategy} 0.15", tier="host")
    return percent(cell["stages_ms"]["select"] / cell["ttft_ms"])


def _at(run: Run, way: str, gb_s: int) -> str:
    return f"{pick(run['cells'], way=way, gb_s=gb_s)['ttft_ms'] / 1000:.2f} s"


def _attention(run: Run, other: str) -> str:
    return times(run["rows_15_32k"][other] / run["rows_15_32k"]["ms"])


def _rung(run: Run) -> Run:
    return pick(run["by_lead"]["0.2"]["rungs"], way="anew 0.6", lead=0.1)


def _load(run: Run, load: str) -> str:
    row = pick(run["loads"], load=load, cache="warm", chunks_per_request=1)
    return f"{row['gb_per_s']}"


def _spread(row: Run) -> str:
    return f"{row['mean']:.2f} ({row['min']:.2f}–{row['max']:.2f})"


def _ordered(run: Run, stream: str, host_gib: int = 1024) -> Run:
    requests = run["config"]["requests"][stream]
    return pick(run["rows"], set=stream, host_gib=host_gib, dedup=False, requests=requests)


def _swept(
    run: Run, stream: str, what: str, kind: str, values: Sequence[str], host_gib: str = "1024"
) -> str:
    found = run["sweeps"][stream][host_gib][what][kind]
    return listed([f"{found[value]:.1%}".replace("%", " %") for value in values])


def _points(share: float) -> str:
    return f"{100 * share:+.1f}"


def _beside(run: Run, stream: str) -> str:
    requests = min(900, run["config"]["requests"][stream])
    row = pick(run["rows"], set=stream, host_gib=1024, dedup=False, requests=requests)
    return f"{percent(row['contextpilot'])}, {percent(row['planner'])}"


def _early(run: Run, index: str, stage: int) -> str:
    row = run["results"]["standing"][index][stage]
    return f"{percent(row['final'])} after {percent(row['share_of_time'])}"


def _nearly_all(run: Run, index: str) -> str:
    stages = run["results"]["standing"][index]
    return _early(run, index, next(i for i, s in enumerate(stages) if s["final"] >= 0.9))
