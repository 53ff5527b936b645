"""The tables of README: beside what people use today, and its claims, a figure each.

The first is of the newest `bench/product.py --instead`; until one is stored its cells are dashes. A
claim names its figure as report_parts/shown.py does.
"""

from collections.abc import Collection, Sequence

from common.files import REPO
from kvweave.model.files.embedded import DEFAULT
from product_parts.instead_table import COLUMNS, WORDS, cells_of
from report_parts.coverage_page import fill_in
from report_parts.figures import Run, runs_of
from report_parts.results_page import OLDER, RunKey, key_of

FILE = "product-cpu"
PAGE = REPO / "README.md"
CLAIMS = (  # what, the figure, the command
    (
        "CPU: own documents, question after question from the upload on: median first token by "
        "default against full prefill's",
        "{ordinary_hour-cpu:all}",
        "bench/ordinary_hour.py",
    ),
    ("… in the second half of those minutes", "{ordinary_hour-cpu:second_half}", ""),
    ("… until the first fused answer (aim 60 s)", "{ordinary_hour-cpu:first_fused}", ""),
    (
        "CPU: decoding with copied tokens against plain: question / long answer / summary / quote "
        "/ conversation",
        "{copy_decode-cpu:median}",
        "bench/copy_decode.py",
    ),
    (
        "CPU: of 40 questions with known answers, right in full / by `auto`",
        "{answers-cpu:right}",
        "bench/answers.py",
    ),
    (
        "CPU: inside a stock vLLM, 2,949 tokens in orders never seen, 15 % of the rows against "
        "vLLM cold",
        "{vllm_ttft-cpu:15}",
        "bench/vllm_ttft.py",
    ),
    (
        "CPU: our prefill against transformers, float32, 1,024 tokens",
        "{prefill-cpu:transformers}",
        "bench/prefill.py",
    ),
    (
        "CPU: decode in 8 bits against llama.cpp on its 4-bit file, nothing copied",
        "{prefill-cpu:llamacpp}",
        "",
    ),
    (
        "a newcomer's first answer from a bare clone, two cores, install and download included",
        "{first_minutes-cpu:first}",
        "bench/first_minutes.py",
    ),
    (
        "GPU: first token over HTTP by default, 8B shape with random weights and a permission to "
        "recompute 15 %, 27,000 / 6,900 tokens, against full prefill (aim 0.20 / 0.25)",
        "{product-h200:32k} / {product-h200:8k}",
        "bench/serve_gpu.py",
    ),
    (
        "… requests per second at equal p95, 6,900 tokens, at least (aim 4×)",
        "{product-h200:load}",
        "",
    ),
    (
        "… a loss: Qwen2.5-Coder-0.5B in bfloat16, whose gate is shut there",
        "{product-h200:small}",
        "",
    ),
    (
        "GPU: inside stock vLLM, orders never seen: its prefix cache over the connector's first "
        "token, 15 % of the rows, 32K / 8K (aim 5× / 4×)",
        "{vllm-h200:32k} / {vllm-h200:8k}",
        "bench/vllm_gpu.py",
    ),
    (
        "… requests per second at equal p95, 15 % / none recomputed (aim 3× at 15 %)",
        "{vllm-h200:rate}",
        "",
    ),
    ("… a loss: where nothing can be reused, 8K / 32K", "{vllm-h200:nothing}", ""),
    (
        "GPU, random weights: first token at 15 % of 32K, KV in host memory: EPIC / FusionRAG "
        "/ QCFuse / `weave`, against full prefill",
        "{ttft-h200:15_32k}",
        "bench/ttft/run.py --device cuda",
    ),
    (
        "GPU: requests that fit at once with one copy of every chunk in 8 bits, nothing / 15 % "
        "recomputed, against a copy each",
        "{gpu_shared-h200:capacity}",
        "bench/gpu_shared.py",
    ),
    (
        "quality: highest upper end of KL, default model in float32, sets never calibrated on "
        "(bound 0.02)",
        "{gate-h200:kl}",
        "bench/gate.py",
    ),
    ("… a loss: SmolLM2", "{gate-h200:kl_smollm2}", ""),
    (
        "quality: points of F1 that `auto` is off full prefill's, 290 questions of seven sets, "
        "bfloat16: behind another prompt than was measured (half the bound) / behind that one",
        "{quality_models-h200:served} / {quality_models-h200:auto}",
        "bench/quality/scored.py",
    ),
    (
        "quality: share of plain reuse's KL gap that `weave` recovers at 15 %, 2Wiki / HotpotQA / "
        "MuSiQue",
        "{quality-h200:weave}",
        "bench/quality/run.py",
    ),
    (
        "… ProphetKV; QCFuse; CacheBlend; FusionRAG",
        "{quality-h200:prophetkv}; {quality-h200:qcfuse}; {quality-h200:cacheblend}; "
        "{quality-h200:fusionrag}",
        "",
    ),
    (
        "quality: nats per token that stored KV in 8 / fp8 / 4 bits costs",
        "{codec_kl-cpu:kl}",
        "bench/codec_kl.py",
    ),
    (
        "CPU: one plan, 10,000 cached nodes, 20 chunks: median / p99 (aim 1 ms)",
        "{planner-cpu:p50}",
        "bench/planner.py",
    ),
    (
        "ten minutes, 64 clients that stream, leave, upload and send nonsense: requests; wrong "
        "replies",
        "{soak-cpu:requests}; {soak-cpu:wrong}",
        "bench/soak/run.py",
    ),
    (
        "wrong answers / lost documents / stuck requests, whatever broke",
        "{fault_matrix-cpu:wrong}",
        "bench/fault_matrix.py",
    ),
)


def render(older: Collection[RunKey]) -> str:
    """README with its tables as they should be; nothing else in it is touched."""
    runs = [run for run in runs_of(FILE) if is_whole(run)]
    table = table_of(runs[-1], key_of(FILE, runs[-1]) in older) if runs else empty_table()
    text = replace(PAGE.read_text(), "instead", table)
    rows = [
        [claim, fill_in(figure, older), f"`{command}`" if command else "the same"]
        for claim, figure, command in CLAIMS
    ]
    return replace(text, "claims", lines_of(["claim", "figure", "command"], rows))


def is_whole(run: Run) -> bool:
    """Whether a run compared all of them as the bench does by itself; parts of it are for tries."""
    return {row["system"] for row in run.get("instead", ())} == WORDS.keys() and (
        run["config"]["model"] == DEFAULT and all(row["requests_per_s"] for row in run["instead"])
    )


def replace(text: str, name: str, table: str) -> str:
    """Put a table between its marks; without them nothing is changed."""
    begin, end = f"<!-- {name}: made by `make results` -->\n", f"<!-- end of {name} -->\n"
    before, mark, rest = text.partition(begin)
    _, _, behind = rest.partition(end)
    return f"{before}{mark}{table}{end}{behind}" if mark else text


def table_of(run: Run, is_older: bool) -> str:
    config = run["config"]
    mark = f" {OLDER} The code was changed since." if is_older else ""
    return lines_of(COLUMNS, [cells_of(row) for row in run["instead"]]) + (
        f"\n{config['model']}, {run['device']}, {run['date'][:10]}, commit {run['commit']}: "
        f"{config['questions']} questions one by one, {config['load_questions']} more by "
        f"{config['clients']} clients at a time. kvweave copies tokens of its passages, "
        f"as it does by default; the others draft nothing.{mark}\n"
    )


def empty_table() -> str:
    rows = [[*words, *["–"] * (len(COLUMNS) - 2)] for words in WORDS.values()]
    return lines_of(COLUMNS, rows) + "\nNot measured yet.\n"


def lines_of(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)
