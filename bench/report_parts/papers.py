"""Every figure, table and headline number of the five papers, and what answers it here.

`{FILE:name}` in `ours` is a figure of report_parts/shown.py: no number of ours is typed. Where
nothing answers a figure, `ours` says why, and the verdict is "not had here".
"""

from typing import NamedTuple

VERDICTS = ("better", "equal", "worse", "contradicted", "mixed", "not had here")
NONE = "none"  # no command of the repository answers it


class Claim(NamedTuple):
    """One row of the coverage page."""

    where: str  # the figure, table or section
    says: str  # what the paper shows there, in short
    ours: str  # our number, or why there is none
    command: str  # what prints it, or NONE
    verdict: str  # one of VERDICTS, more words behind a comma


QUALITY = "bench/quality/run.py"
TTFT = "bench/ttft/run.py"
TTFT_GPU = "bench/ttft/run.py --device cuda"
FIGURES = "bench/figures/run.py --part"
NO_LARGE = "no bench scores answers of models of 7B or more; the 0.5B's are in quality_models-h200"

FUSIONRAG = (
    Claim(
        "abstract, Fig. 14a",
        "first token 5.22 to 9.39 times sooner at 0 %, 2.66 to 3.94 at 15 %, 27K tokens",
        "host memory, 32K: {ttft-h200:reuse_32k} and (EPIC / FusionRAG / QCFuse / weave) "
        "{ttft-h200:15_32k}; on the device {gpu_shared-h200:32k_reuse} and "
        "{gpu_shared-h200:32k_15}",
        f"{TTFT_GPU}`, `bench/gpu_shared.py",
        "better, as a ratio: an H200 for an L20, random weights, not through the server",
    ),
    Claim(
        "abstract, as a user meets it",
        "the same, end to end",
        "CPU, SmolLM2: skewed {product-cpu:skewed}, orders never seen {product-cpu:novel}; default "
        "model {product-cpu:skewed_default} and {product-cpu:novel_default}, at the gate's ratio; "
        "H200 over HTTP {product-h200:8k} and {product-h200:32k} (full prefill's)",
        "bench/product.py`, `bench/serve_gpu.py",
        "mixed, better on a CPU; on a GPU better at 27,000 tokens, less at 6,900, random weights",
    ),
    Claim(
        "abstract, Fig. 13",
        "normalised F1 up to 70 % above baselines; 12 of 20 cells keep 80 %; EM within 0.03 in 14",
        "KL gap recovered behind neighbours at 15 %: {quality-h200:fusionrag_near}; full prefill's "
        "F1 is {quality-h200:full_f1}",
        QUALITY,
        f"not had here as F1: {NO_LARGE}. TriviaQA is missing too",
    ),
    Claim(
        "Fig. 2a",
        "a 7B model with CacheBlend or Cache-Craft falls to the level of a 3B one",
        "no two sizes of one family are scored side by side with and without reuse",
        NONE,
        "not had here",
    ),
    Claim(
        "section 2.2.1",
        "reuse without recomputing costs up to 55 % of F1",
        "{quality-h200:reuse_kl} nats per token, {quality-h200:reuse_flips} of first tokens change",
        QUALITY,
        "equal, in direction: another metric",
    ),
    Claim(
        "section 1",
        "prefill is 95.5 % of the time to the first token",
        "{ttft-cpu:computing}",
        TTFT,
        "equal, on a CPU",
    ),
    Claim(
        "Fig. 3a, 3b",
        "an oracle at 15 % leaves more than half of the KV deviation; where deviation lies",
        "an oracle at 15 % leaves (all layers / layer 2) {figures-cpu:left}. Layer 2 by place in "
        "the chunk {figures-cpu:deviation_place}, from its second chunk to the fifth "
        "{figures-cpu:deviation_chunk} of the mean. An oracle of KL recovers {quality-h200:oracle}",
        f"{FIGURES} deviation",
        "equal, in direction: SmolLM2, 12 questions, five chunks",
    ),
    Claim(
        "Fig. 7a",
        "related chunks are retrieved together, over half at 2 and 80 % at 10",
        "at 2 / 5 / 10, a passage with one of its nearest beside it: HotpotQA "
        "{figures-cpu:together}, 2Wiki {figures-cpu:together_2wiki}, NQ {figures-cpu:together_nq}; "
        "questions with such a pair {figures-cpu:together_questions} on HotpotQA",
        f"{FIGURES} together",
        "mixed, MiniLM over a sample of 9,728 passages: at 10 nearly every question has such a "
        "pair, at 2 fewer than half have",
    ),
    Claim(
        "Fig. 7b",
        "70 % less deviation in layer 2 behind neighbours",
        "gone behind a filler / 2 / 5 / 10 / 15 neighbours: {figures-cpu:near_deviation}; KL gap "
        "recovered behind three with nothing recomputed: {quality-h200:reuse_near}",
        f"{FIGURES} neighbours",
        "mixed: equal in direction in KL; in deviation not, on 4 questions and a sample of the "
        "base, where the filler alone takes off most",
    ),
    Claim(
        "Fig. 8",
        "where critical tokens lie",
        "CacheBlend / FusionRAG / QCFuse choose the first four tokens of a chunk "
        "{figures-cpu:chosen_first} as often as tokens at large, the second chunk "
        "{figures-cpu:chosen_second}, the fifth {figures-cpu:chosen_last}",
        f"{FIGURES} places",
        "mixed: CacheBlend leans to heads of chunks and the last one as they say, QCFuse more so "
        "to the last; 12 questions, means of their ratios, which short chunks raise (the bench "
        "pools counts since)",
    ),
    Claim(
        "Fig. 9",
        "a 1B model recovers F1 and EM on TriviaQA",
        "TriviaQA is not among our sets",
        NONE,
        "not had here",
    ),
    Claim(
        "section 3.1",
        "0.218 s to preprocess a chunk, 275 a minute",
        "SmolLM2 on two cores, beside a full ingest: {background_ingest-cpu:kv}; a rate of a "
        "GPU is in no results file",
        "bench/background_ingest.py",
        "not had here at 7B",
    ),
    Claim(
        "Table 2",
        "faithfulness of two 32B models",
        "no bench has a judge of answers, or a model of 32B",
        NONE,
        "not had here",
    ),
    Claim(
        "Fig. 14b",
        "the kernel at 15 % of 32K: 4.2 times FlashAttention, 2.69 times SDPA",
        "{gpu_attention-h200:cudnn} cuDNN, {gpu_attention-h200:sdpa} SDPA with a mask; all rows "
        "{gpu_attention-h200:all_rows}",
        "bench/gpu/attention.py",
        "better",
    ),
    Claim(
        "section 4.3",
        "FlexAttention's mask takes 16 GB and 2 s",
        "{gpu_attention-h200:flex} FlexAttention without the time of its mask",
        "bench/gpu/attention.py",
        "better, in time; the mask itself is not measured",
    ),
    Claim(
        "Fig. 15",
        "throughput 1.2 to 4.3 times that of full prefill and CacheBlend",
        "H200 {gpu_shared-h200:throughput} at 15 %, {gpu_shared-h200:throughput_0} at 0 %; CPU "
        "{throughput-cpu:auto} ({throughput-cpu:completed} by requests completed); CacheBlend's "
        "throughput is not measured",
        "bench/gpu_shared.py --parts throughput`, `bench/throughput/run.py",
        "equal, over full prefill: the upper end of theirs",
    ),
    Claim(
        "Fig. 16",
        "neighbours lift CacheBlend and Cache-Craft by 21 to 49 points, FusionRAG stays ahead by 3 "
        "to 18",
        "CacheBlend {quality-h200:cacheblend} → {quality-h200:cacheblend_near}; FusionRAG "
        "{quality-h200:fusionrag_near}. CacheBlend / Cache-Craft-like / FusionRAG on 4 "
        "questions: {figures-cpu:near_15_isolated} → behind ten {figures-cpu:near_15}",
        f"{QUALITY} --encodings neighbours:3`, `{FIGURES} neighbours",
        "equal, on KL; Cache-Craft on 4 questions alone",
    ),
    Claim(
        "Fig. 17",
        "0, 2, 5, 10 and 15 neighbours",
        "KL gap recovered, isolated / behind a filler / 2 / 5 / 10 / 15 neighbours: at 0 % "
        "{figures-cpu:near_reuse}, FusionRAG at 5 % {figures-cpu:near_5}",
        f"{FIGURES} neighbours",
        "not had here: 4 questions do not tell the counts apart",
    ),
    Claim(
        "Fig. 18, quality",
        "F1 0.722 with reuse, 0.822 with 15 %, 0.860 with preprocessing",
        "KL gap: 0 → {quality-h200:fusionrag} → {quality-h200:fusionrag_near}",
        QUALITY,
        "equal, on KL",
    ),
    Claim(
        "Fig. 18, time",
        "asynchronous scheduling takes 11 % off at batch 10",
        "prompts per second {gpu_idle-h200:rate}; on a CPU the p95 gap between tokens falls "
        "{beside-cpu:gap}",
        "bench/gpu/idle.py`, `bench/beside.py",
        "worse, on the GPU",
    ),
    Claim(
        "section 5.3.3",
        "storage −71 %, recomputations −82.3 %, hit rate 77.9 %",
        "−{altpath-cpu:storage}, −{altpath-cpu:recomputed}, {altpath-cpu:hits}",
        "bench/altpath.py",
        "better, simulated: what the product stores, by its own rules",
    ),
    Claim(
        "Fig. 19, host memory",
        "10K to 27K: 2.9 to 5.4 times full prefill, 2.3 to 3 times CacheBlend",
        "8K (EPIC / FusionRAG / QCFuse / weave) {ttft-h200:15_8k}, 32K {ttft-h200:15_32k}; "
        "CacheBlend does not run there",
        TTFT_GPU,
        "equal, over full prefill: two lengths",
    ),
    Claim(
        "Fig. 19, SSD",
        "sooner at all lengths; CacheBlend gains nothing below 17K",
        "cold disk, raw / int8 / int4: 8K {ttft-h200:disk_8k}, 32K {ttft-h200:disk_32k}",
        TTFT_GPU,
        "worse, at 8K with the default codec (int8): slower than full prefill",
    ),
)

QCFUSE_DEMO = (
    Claim(
        "headline",
        "first token twice as soon as full prefill",
        "QCFuse at 15 %, 32K / 8K: {ttft-h200:qcfuse}",
        TTFT_GPU,
        "better, at 15 % and not at equal quality",
    ),
    Claim(
        "headline",
        "40 % less latency than fusion baselines at equal accuracy",
        "at the KL of CacheBlend / EPIC / FusionRAG at 30 % QCFuse computes "
        "{figures-cpu:costs_others} their rows; `weave` computes {figures-cpu:costs_weave} those "
        "of QCFuse at its KL; no time is taken",
        f"{FIGURES} stored",
        "equal, in rows through layers; less for EPIC",
    ),
    Claim(
        "Fig. 3",
        "ROUGE-L against time at 10 to 50 %: 2.3 to 3.5 above CacheBlend, full quality at 40 %",
        "KL gap at 15 %: QCFuse {quality-h200:qcfuse}, CacheBlend {quality-h200:cacheblend}; "
        "QCFuse at 50 % {quality-h200:qcfuse_50}, behind a filler {quality-h200:qcfuse_50_filler}",
        QUALITY,
        "worse, without a filler; ahead of CacheBlend as they say. ROUGE-L is not had here",
    ),
    Claim(
        "overlap",
        "more than 70 % of retrieved chunks overlap",
        "MMLU (10,000 requests) / NQ (5,025) / MTRAG (343), passages by words: "
        "{ordering-cpu:union}",
        "bench/ordering.py",
        "mixed, on other data: as they say on MMLU's questions, less on the others",
    ),
    Claim(
        "Fig. 4",
        "two scenarios of the demonstration",
        "both are walked through in a browser by tests/ui/test_scenarios.py",
        "make test-ui",
        "equal",
    ),
)

QCFUSE = (
    Claim(
        "abstract, Fig. 10, 11",
        "1.7 times full prefill, 1.5 times ProphetKV at matched quality, 4 models and 6 sets",
        "for ProphetKV's KL at 10 / 15 / 30 % QCFuse needs {figures-cpu:needs} of the rows, "
        "{figures-cpu:costs} its work; behind a filler {figures-cpu:costs_filler}. First token at "
        "15 %, CPU (CacheBlend / FusionRAG / QCFuse / ProphetKV): {ttft-cpu:published}",
        f"{FIGURES} stored`, `{TTFT}",
        "mixed: isolated QCFuse needs more rows than ProphetKV, behind a filler fewer; ours scores "
        "at the one layer of SmolLM2's profile, the paper's at three",
    ),
    Claim(
        "Fig. 1",
        "at 30 % ProphetKV chooses rows for 34 % of the time",
        "at 15 %, QCFuse / ProphetKV: {ttft-cpu:selecting} of the first token",
        TTFT,
        "equal, in direction: half the ratio, on a CPU",
    ),
    Claim(
        "Fig. 5",
        "attention mass on few tokens; middle layers agree most with all layers",
        "the top 1 / 5 / 10 / 20 % of tokens hold {figures-cpu:mass}; a layer of the first / "
        "middle / last third shares {figures-cpu:agreement} of its top 10 %; most: layers "
        "{figures-cpu:agree_most} of 30",
        f"{FIGURES} attention",
        "mixed: mass is concentrated as they say; the layers that agree most lie before the "
        "middle, 12 questions",
    ),
    Claim(
        "Fig. 6",
        "anchors by sink, key norm and KVzip, by share kept",
        "tokens of the answer found by first tokens / key norm / KVzip / no anchors / the full "
        "context, at all layers as in the paper: {figures-cpu:recall_all_layers}, at the "
        "profile's {figures-cpu:recall}; KVzip with "
        "5 / 10 / 20 / 50 % {figures-cpu:recall_share}; the full context's rows chosen "
        "{figures-cpu:recall_same}; {figures-cpu:recall_n} questions",
        f"{FIGURES} recall",
        "mixed, not told apart on 7 questions: by the paper's scoring over all layers KVzip at a "
        "tenth is not ahead; at the one layer of SmolLM2's profile it finds what the full "
        "context finds",
    ),
    Claim(
        "Fig. 7",
        "the best single layers are in the middle",
        "layer 16 of 28 of the 1.5B model, by its packaged profile; weak on 0.5B and SmolLM2",
        "kvweave calibrate layers",
        "equal, on one of three models",
    ),
    Claim(
        "Fig. 8",
        "three layers take most of what all take",
        "on the 1.5B model one layer finds more than two or three, by the profile it was chosen "
        "with",
        "kvweave calibrate layers",
        "contradicted",
    ),
    Claim(
        "Fig. 12",
        "RULER: several queries and values, variable tracing, length",
        "the tasks are written (`bench/quality/needles.py`) and a part asks them, on the default "
        "model; it was not run",
        f"{FIGURES} needles",
        "not had here",
    ),
    Claim(
        "Fig. 13",
        "over 3 GB/s ProphetKV is slower than full prefill and QCFuse faster",
        "each second of loading costs choosing {bandwidth-h200:slope} s (QCFuse / ProphetKV); "
        "first token at 3 GB/s {bandwidth-h200:3gb}, at 1 GB/s {bandwidth-h200:1gb}",
        "bench/bandwidth/run.py",
        "mixed, the slope is theirs, the crossing is not: at 3 GB/s full prefill is the fastest",
    ),
    Claim(
        "Fig. 14",
        "throughput of full prefill, ProphetKV and QCFuse at 50 %",
        "neither is loaded at 50 % on the GPU",
        NONE,
        "not had here",
    ),
    Claim(
        "Fig. 15",
        "share of anchors",
        "KL gap recovered at 15 %, no anchors / 5 / 10 / 20 / 50 % by KVzip / the full context: "
        "{figures-cpu:anchor_share}; 10 % by first tokens / key norm / KVzip "
        "{figures-cpu:anchor_rule}",
        f"{FIGURES} anchors",
        "mixed, on 12 questions with wide intervals: a tenth by KVzip shows no gain over no "
        "anchors, a fifth does",
    ),
    Claim(
        "Fig. 16",
        "first, middle, last, all or profiled layers",
        "KL gap recovered at 15 %: {figures-cpu:layers} (first / middle / last / all / best of the "
        "profile / its best three); the middle {figures-cpu:layer_middle}, the best of the profile "
        "{figures-cpu:layer_profiled}",
        f"{FIGURES} layers",
        "contradicted, on 12 questions: the best layer of the profile is behind all layers, and "
        "not ahead of the middle or the last",
    ),
)

RAGCACHE = (
    Claim(
        "abstract, Fig. 15",
        "first token 1.2 to 4 times, throughput 1.3 to 2.1 times vLLM with Faiss",
        "over vLLM with its prefix cache: the same documents {product-cpu:vllm_again}, chat "
        "{product-cpu:vllm_chat}, orders never seen {product-cpu:vllm_novel}, of "
        "which {prefill-cpu:rounded_arm} is 8 bits against its float32; over our own full "
        "prefill exact prefixes serve {throughput-cpu:prefix} (CPU) and {throughput-h200:prefix} "
        "(H200); inside vLLM on an H200, orders never seen, first token {vllm-h200:8k_reuse} and "
        "{vllm-h200:32k_reuse} at 8K and 32K with stored KV as it is, {vllm-h200:8k} and "
        "{vllm-h200:32k} at 15 %, requests {vllm-h200:rate} (15 % / as it is)",
        "bench/product.py`, `bench/vllm_gpu.py`, `bench/throughput/run.py",
        "better in the first token; throughput of 15 % as theirs, as it is better",
    ),
    Claim(
        "section 7.2",
        "1.1 to 3.5 times the first token and 1.2 to 1.8 times the throughput of SGLang",
        "no bench starts SGLang",
        NONE,
        "not had here",
    ),
    Claim(
        "Fig. 1, 3, 4",
        "breakdown of the time, by length; lengths of documents",
        "retrieval takes {ttft-cpu:retrieving} of a full prefill's first token, computing "
        "{ttft-cpu:computing}",
        f"{TTFT}`, `bench/machine_profile.py",
        "equal, for one length",
    ),
    Claim(
        "Fig. 5, 6",
        "60 % of requests go to 3 % of documents, whatever embedder or index",
        "first hits at the hottest 3 % of all passages, by words / vectors, flat / IVF / HNSW / "
        "if all were as likely, MMLU; NQ: {skew-cpu:all}; of those found: {skew-cpu:found}. "
        "1,024 questions over 9,728 passages, one embedder",
        "bench/skew.py",
        "worse: of the passages that were found at all, which is what the paper counts, 3 % have "
        "13 to 16 %. Of all passages they have as much as there, a third of it by chance",
    ),
    Claim(
        "Fig. 7",
        "a cached prefix is 11.5 times as fast, 3.9 with its transfer",
        "{product-cpu:again} in all, {product-cpu:again_share} on the documents' share",
        "bench/product.py",
        "better, as a ratio, on a CPU",
    ),
    Claim(
        "Fig. 8",
        "95 % of requests are final after 13 % of the search",
        "IVF / HNSW: {retrieval-cpu:early} of the search; {retrieval-cpu:late}. Ours is the "
        "ordered top 5 of a search that looks into the nearest quarter of the clusters to begin "
        "with; theirs a top 2, of a search whose clusters the paper does not number",
        "bench/retrieval.py",
        "worse",
    ),
    Claim(
        "Fig. 16, 17",
        "a production set: first token 1.9 to 2.6 times, time between tokens",
        "no bench has that set; time between tokens, full / shared: {gpu_shared-h200:tbt}",
        "bench/gpu_shared.py",
        "not had here",
    ),
    Claim(
        "Fig. 18",
        "top-1, 3 and 5: first token 1.7 to 3.1 times",
        "priced, no queue, 16 GiB of host memory, top 1 / 3 / 5, MMLU; NQ: {top_k-cpu:gain}; "
        "hit rate {top_k-cpu:hits}",
        "bench/top_k.py",
        "worse, without a queue, and with fewer hits: 3,000 requests, passages by words",
    ),
    Claim(
        "Fig. 19",
        "Mixtral and a 70B model on two GPUs: 1.4 to 2.1 times",
        "one GPU was to be had, and experts are not fused inside vLLM",
        NONE,
        "not had here",
    ),
    Claim(
        "Fig. 20",
        "hit rate of PGDSF 1.02 to 1.32 times GDSF's, 1.06 to 1.62 LRU's, 1.06 to 1.75 LFU's",
        "{hitrate-cpu:over}; where subjects move on {hitrate-cpu:drift}. The tree goes by the "
        "better of PGDSF and GDSF: over the best of each setting {hitrate-cpu:auto}",
        "bench/hitrate.py",
        "mixed: PGDSF is behind GDSF where subjects move on; `auto` is level with the best or near",
    ),
    Claim(
        "Table 2",
        "first token 1.05 to 1.29 times by policy",
        "{hitrate-cpu:ttft}",
        "bench/hitrate.py",
        "worse",
    ),
    Claim(
        "Fig. 21",
        "reordering of waiting requests: 1.2 to 2.1 times",
        "CPU, SmolLM2, top-2, against first come first served with all else the same, by rate: "
        "mean {reordering-cpu:mean}, 95th percentile {reordering-cpu:p95}",
        "bench/reordering.py",
        "better by the mean; at the 95th percentile as soon",
    ),
    Claim(
        "Fig. 22",
        "speculation: first token up to 1.6 times",
        "best and worst row: H200 {speculation-h200:best}; CPU by length of search "
        "{speculation-cpu:ttft}",
        "bench/speculation/gpu.py`, `bench/speculation/run.py",
        "worse",
    ),
    Claim(
        "Table 3",
        "search that is not overlapped: 1.5 to 4.3 times less",
        "H200, least and most: {speculation-h200:cut}; CPU by length of search "
        "{speculation-cpu:auto}",
        "bench/speculation/gpu.py`, `bench/speculation/run.py",
        "mixed, better for long searches on a CPU, worse on the H200",
    ),
    Claim(
        "section 7.5",
        "scheduling takes 0.872 to 0.906 ms",
        "median / p99: {planner-cpu:p50}",
        "bench/planner.py",
        "equal, by the median: ours is a plan alone, theirs updates a tree and reorders",
    ),
    Claim(
        "section 6",
        "replication of hot nodes, retries",
        "{fault_matrix-h200:faults} faults of a device, {fault_matrix-h200:wrong} wrong answers; "
        "nothing is replicated",
        "bench/fault_matrix.py",
        "mixed, what is lost is computed again instead",
    ),
)

CRAFT = (
    Claim(
        "abstract, Fig. 11",
        "first token 1.2 to 1.6 times, BERTScore the same, 6 sets and 3 models",
        "the bench is there and was not run: it wants a quiet machine",
        "bench/order_ttft.py --data DATA --time",
        "not had here",
    ),
    Claim(
        "Fig. 1",
        "what a cached prefix saves",
        "{product-cpu:again} on the same documents asked again",
        "bench/product.py",
        "equal, in direction",
    ),
    Claim(
        "Fig. 3",
        "11 % of chunks agree as a prefix, 43 % are shared",
        "MMLU (10,000 requests) / NQ (5,025) / MTRAG (343), passages by words: "
        "{ordering-cpu:aligned}; {ordering-cpu:shared}",
        "bench/ordering.py",
        "equal, on MMLU's questions; less is shared on the others",
    ),
    Claim(
        "Fig. 5",
        "a hundred orders do not change BERTScore and F1",
        "HotpotQA, Qwen2.5-Coder-0.5B, F1 as found / three drawn orders, difference: "
        "{orders-cpu:order_f1}; ROUGE-L {orders-cpu:order_rouge_l}; answers that stay the same, "
        "here / in Fig. 7 (questions): {orders-cpu:same}",
        "bench/quality/orders.py",
        "mixed: no difference found among 12 questions, where the interval is wide; most answers "
        "are not the same words",
    ),
    Claim(
        "Fig. 6b",
        "21 % of a turn's chunks were there before",
        "{ordering-cpu:repeats} of the tokens, MTRAG",
        "bench/ordering.py",
        "equal, on one set",
    ),
    Claim(
        "Fig. 7",
        "what a conversation repeats can be left out (p = 0.47)",
        "MTRAG, F1 with repeats / without, difference: {orders-cpu:repeats_f1}; ROUGE-L "
        "{orders-cpu:repeats_rouge_l}",
        "bench/quality/orders.py",
        "equal, among 12 turns: the interval holds 0",
    ),
    Claim(
        "Fig. 12",
        "19 to 38 % of KV is not computed",
        "MMLU (10,000 requests) / NQ (5,025) / MTRAG (343), unbounded tree; 4 GiB: "
        "{ordering-cpu:avoided}; by frequency, in powers of two, there {ordering-cpu:craft}; "
        "MTRAG with nothing sent twice {ordering-cpu:dedup}. Of the first 2,000 requests the most "
        "that any order can find; aligned as found; found by ours; by frequencies known "
        "beforehand: {ordering-cpu:apart}; points lost to the order; to 4 GiB; to the window: "
        "{ordering-cpu:lost}. ContextPilot, ours beside it: {ordering-cpu:contextpilot}",
        "bench/ordering.py",
        "mixed: in their range on MMLU's 10,000 requests, in 4 GiB just below it (18.9 %); worse "
        "on NQ and MTRAG, where less is shared; ahead of a plain order by frequency and of "
        "ContextPilot's",
    ),
    Claim(
        "overhead",
        "access table below 1 MB, tree of tens of MB",
        "{ordering-cpu:books}",
        "bench/ordering.py",
        "equal",
    ),
    Claim(
        "Fig. 13",
        "by request rate, batch and number of chunks",
        "the bench of Fig. 11 takes the number of passages and of answers at once; it was not run",
        "bench/order_ttft.py --data DATA --time --k 3 5 10 --at-once 1 4",
        "not had here",
    ),
    Claim(
        "Fig. 14, 15",
        "length of the window; threshold of promotion",
        "KV avoided by a window of 50 / 200 / 1,000 / 2,000, MMLU; NQ; CRAFT's order MMLU; NQ: "
        "{ordering-cpu:window}. By a threshold of 1 / 2 / 3 / 5, unbounded MMLU; NQ; 4 GiB MMLU; "
        "NQ: {ordering-cpu:uses}",
        "bench/ordering.py",
        "mixed: the window and 3 or 5 uses as theirs, over shares and not times; 1 use, which they "
        "do not show, is ahead of 2 in an unbounded tree and level in a small one; no window is "
        "too long",
    ),
    Claim(
        "Fig. 16",
        "CacheBlend in CRAFT's order: 1.29 times",
        "the bench of Fig. 11 has CacheBlend and our selector in both orders; it was not run",
        "bench/order_ttft.py --data DATA --time",
        "not had here",
    ),
)

PAPERS = {
    "FusionRAG": FUSIONRAG,
    "QCFuse, demonstration": QCFUSE_DEMO,
    "QCFuse": QCFUSE,
    "RAGCache": RAGCACHE,
    "CRAFT": CRAFT,
}
