"""Numbers that docs/ quote are those of the code, and commands that they show can be typed.

`QUOTED` has, for each default or constant that a page names, the words around it and where the code
has it. Change one side and this fails; a page that quotes a new number gets a row here.
"""

import importlib
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import click
import pytest

from kvweave.cli import COMMANDS, cli
from kvweave.reasons import Reason

ROOT = Path(__file__).resolve().parents[1]
PAGES = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md"]
TYPED_PAGES = [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "bench" / "README.md"]
WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
TENS = {20: "twenty", 50: "fifty"}


def word(number: float) -> str:
    """A number as prose writes it."""
    assert number == int(number), f"{number} is no whole number"
    return TENS.get(int(number)) or WORDS[int(number)]


class Quoted(NamedTuple):
    """A passage of a page, with a format field for each value. One without fields says a number in
    words: its values are what then has to be true."""

    page: str
    words: str  # line breaks count as spaces
    values: tuple[str, ...]  # "module:expression", the module below kvweave

    def __str__(self) -> str:
        return f"{self.page}: {self.words[:50]}"

    @property
    def in_words(self) -> bool:
        return "{" not in self.words


def value_of(where: str) -> Any:
    module, _, expression = where.partition(":")
    names = {"word": word, **vars(importlib.import_module(f"kvweave.{module}"))}
    return eval(expression, names)


def quoted(page: str, *rows: tuple[str, ...]) -> list[Quoted]:
    return [Quoted(page, words, values) for words, *values in rows]  # type: ignore[arg-type]


QUOTED = [
    *quoted(
        "faq.md",
        ("by {} nats per token at most in the mean", "config:QualitySettings().bound"),
        ("Below {} stored tokens nothing is fused", "plan.options:MIN_HIT_TOKENS"),
        ("it gets {} % of the time", "config:round(LibrarySettings().background_share * 100)"),
    ),
    *quoted("upgrading.md", ("Schema {} of the catalogue", "corpus.migrations:len(MIGRATIONS)")),
    *quoted("clients.md", ("Both find {} chunks unless", "app.answer.question:TOP_K")),
    *quoted(
        "corpus.md",
        ("up to {} keys with a text", "corpus.metadata:MOST_KEYS"),
        ("Up to {} vectors of matching", "corpus.search:SCANNED"),
        ("as are wanted, {} at least", "corpus.search:LEAST_RERANKED"),
        ("of its own host ({:,} at most)", "cli.web_pages:MOST_PAGES"),
        ("its turn comes ({:g} s,", "cli.web_pages:TIMEOUT_S"),
    ),
    *quoted("server.md", ("The last {} of each tenant that are", "serve.uploads.jobs:KEPT")),
    *quoted("cli.md", ("({} lines, readable by you alone)", "cli.chat:MOST_LINES")),
    *quoted(
        "config.md",
        (
            "the same words, {} tokens at most, have come {} times in a row or more and for {} ",
            "text.detokenizer:LONGEST_PERIOD",
            "text.detokenizer:LEAST_REPEATS",
            "text.detokenizer:LEAST_TOKENS",
        ),
    ),
    *quoted(
        "security.md",
        ("from the first byte on | {:g} s;", "serve.access.limits:Limits().header_s"),
        ("(`server.connections`, {})", "serve.access.limits:Limits().connections"),
        ("`server.body_bytes` ({} MiB)", "serve.access.limits:Limits().body_bytes >> 20"),
        ("`server.upload_bytes` ({} MiB)", "serve.access.limits:Limits().upload_bytes >> 20"),
        (
            "{:g} KiB/s after {:g} s |",
            "serve.access.limits:Limits().body_rate / 1024",
            "serve.access.limits:Limits().body_s",
        ),
        (
            "{:,} commas, brackets and braces; {} fields of an object",
            "serve.access.body_limit:MOST_VALUES",
            "serve.wire.base:MOST_FIELDS",
        ),
        (
            "{} messages of {} parts together, {} documents, {} characters per token",
            "serve.wire.base:MOST_MESSAGES",
            "serve.wire.base:MOST_PARTS",
            "serve.wire.base:MOST_DOCUMENTS",
            "text.prompt:MOST_CHARS",
        ),
        (
            "| {:,} characters; {:,} characters of {} texts together",
            "serve.routes.kb:LONGEST_QUERY",
            "serve.wire.openai:MOST_CHARS",
            "serve.wire.openai:MOST_TEXTS",
        ),
        (
            "{:g} s and {} GiB for its parser",
            "corpus.parsers.base:ParseLimits().seconds",
            "corpus.parsers.base:ParseLimits().memory_bytes >> 30",
        ),
        ("| a chat template | {:g} s |", "text.tokenizer:RENDER_S"),
        ("in a sandbox and for {:g} s", "text.tokenizer:RENDER_S"),
        ("(a step over `server.engine_s`, {:g} s)", "config:ServerSettings().engine_s"),
        ("the process ends with code {}:", "cli.serve:BROKEN_CODE"),
    ),
    *quoted(
        "corpus.md",
        (
            "`library.parse_s` ({:g} s) or `library.parse_bytes` ({} GiB)",
            "config:LibrarySettings().parse_s",
            "config:LibrarySettings().parse_bytes >> 30",
        ),
        ("leaves when there was none for {:g} s.", "corpus.parsers.child:IDLE_S"),
        ("Texts of up to {} KiB are parsed", "corpus.parsers.parser_process:SHORT_BYTES >> 10"),
    ),
    *quoted("server.md", ("| `messages` | {} at most;", "serve.wire.base:MOST_MESSAGES")),
    *quoted("server.md", ("the model may call, {} at most:", "text.tool_calls:MOST_TOOLS")),
    *quoted("fleet.md", ("at most {:g} times the mean", "config:GatewaySettings().load_factor")),
    *quoted(
        "gateway.md",
        ("within `--load-factor` ({:g}) of the mean", "config:GatewaySettings().load_factor"),
        ("chunk KV counts {:g} of an exact one", "gateway.fleet:FUSED_WORTH"),
        ("Differences below a tenth of the prompt", "gateway.fleet:LEAST_SHARE == 0.1"),
        ("Two retries at most (`--retries`)", "config:GatewaySettings().retries == 2"),
        ("a fifth of the requests, and {} at once", "config:GatewaySettings().retry_reserve"),
        ("a fifth of the requests", "config:GatewaySettings().retry_share == 1 / 5"),
        ("come back within ten seconds", "gateway.fleet:REFILL_S == 10"),
        ("looked at every {:g} s.", "config:GatewaySettings().health_s"),
        ("says nothing twice in a row", "gateway.fleet:MOST_SILENT == 2"),
        ("Five failures in a row", "config:GatewaySettings().breaker_failures == 5"),
        ("rest a replica for a second", "config:GatewaySettings().breaker_rest_s == 1"),
        ("A request waits {:g} s for a replica", "config:GatewaySettings().wait_s"),
    ),
    *quoted(
        "cli.md",
        (
            "({} for each upstream, {} at most)",
            "cli.gateway:RUNNING_PER_UPSTREAM",
            "cli.gateway:MOST_RUNNING",
        ),
    ),
    *quoted("cli.md", ("for {:g} seconds at most, and a second", "cli.interrupts:PATIENCE_S")),
    *quoted(
        "audit.md",
        ("(`quality.audit_share`, {:g} %; 0: none)", "config:QualitySettings().audit_share * 100"),
        ("`quality.audit_per_minute` ({}) begin", "config:QualitySettings().audit_per_minute"),
        ("with fewer than {} audits", "app.audit.audit_log:ENOUGH"),
        ("of its first {} tokens", "app.audit.auditor:WATCHED_TOKENS"),
        ("the last {} answers of each", "app.audit.audit_log:WINDOW"),
        ("flips, in {} audits", "app.audit.audited_gate:ROOMY"),
        ("used half the bound at most", "app.audit.audited_gate:ROOM == 1 / 2"),
        ("four answers at most wait", "app.audit.auditor:MOST_OUTSTANDING == 4"),
    ),
    *quoted(
        "ui.md",
        ("Kept for the last {} answers", "serve.access.limits:USUAL.kept_answers"),
        ("`weave` at {:g} %", "app.dial:FAST_RATIO * 100"),
        (
            "exact | `prefix` | answers as full prefill gives them",
            "app.dial:[p.reuse for p in DIAL][0] == 'prefix'",
        ),
        ("auto | `auto` | the fastest way", "app.dial:DIAL[1].reuse == 'auto'"),
        ("fastest | `reuse` | stored", "app.dial:DIAL[3].reuse == 'reuse'"),
        ("and three questions", "app.libraries.sample:len(sample_questions()) == 3"),
    ),
    *quoted(
        "planner.md",
        ("Where a fifth of the requests are", "plan.recent_requests:LIKELY_TURNS == 1 / 5"),
        ("and four such paths wait at a time", "app.auto.auto_planner:MOST_FED_PATHS == 4"),
        ("The {} prompts used last are kept up", "app.library.kv_behind:MOST_PREAMBLES"),
        ("take half of the model's context at most", "app.answer.answerer:HISTORY_SHARE == 2"),
        ("of more than {} tokens is not stored", "app.library.kv_behind:MOST_TOKENS"),
        ("process lives ({} GiB,", "config:LibrarySettings().remembered_bytes >> 30"),
        (
            "must win by {:g} % of what the exact way takes",
            "plan.planner:MIN_GAIN_SHARE * 100",
        ),
        (
            "`gain below {:g} %`",
            "plan.planner:MIN_GAIN_SHARE * 100",
        ),
        ("| nats per token, {} |", "calibrate.gate:BOUND"),
        ("| requests, {} |", "plan.ordering:PROMOTION"),
        (
            "matches at least {} tokens and {:g} % more than yours",
            "plan.ordering:MIN_GAIN_TOKENS",
            "plan.ordering:MIN_GAIN_SHARE * 100",
        ),
        (
            "({:,} of them, {:g} million chunk tokens in all",
            "app.answer.conversations:MAX_CONVERSATIONS",
            "app.answer.conversations:MAX_TOKENS / 1e6",
        ),
        ("| fewer than {} |", "plan.options:MIN_HIT_TOKENS"),
        ("by a quarter of the way, at once", "plan.profile:GAIN == 1 / 4"),
        ("took more than {} times its price", "plan.profile:word(FARTHEST)"),
        ("Every {} seconds it is", "app.auto.measurements:word(SAVE_EVERY_S)"),
        ("no fused answer came for {},", "plan.profile:word(LONG_AGO)"),
        ("a tier's share is {}:", "plan.loading_cost:UNCHECKED"),
        ("or the tier is back at {}.", "plan.loading_cost:UNCHECKED"),
        ("Of the last {} the second highest counts", "plan.loading_cost:word(WINDOW)"),
        (
            "every half hour without a load the highest share is forgotten",
            "plan.loading_cost:FORGET_S == 1800",
        ),
        ("waits a quarter of a second for it", "app.auto.lessons:WAIT_S == 1 / 4"),
        (
            "rests for {} seconds, then ten, up to {} minutes",
            "app.auto.lessons:word(FIRST_REST_S)",
            "app.auto.lessons:word(LONGEST_REST_S / 60)",
        ),
        ("nothing came from for an hour", "app.auto.lessons:STALE_S == 3600"),
    ),
    *quoted(
        "engine.md",
        ("at most {} requests that came later overtake any other", "engine.waiting_queue:WINDOW"),
        ("At most an eighth of the pool's bytes", "engine.offload:POOL_SHARE == 8"),
        ("and {} GiB, is on its way", "engine.offload:MOST_BYTES >> 30"),
        (
            "tokens per page: {} on a CPU, {} on a GPU",
            "engine.config:ON_CPU['page_tokens']",
            "engine.config:ON_DEVICE['page_tokens']",
        ),
        ("a quarter of the memory by default", "engine.config:EngineConfig().pool_share == 1 / 4"),
        ("requests computed at once, {} |", "engine.config:EngineConfig().max_running"),
        (
            "while none does: {} and {:,} on a CPU, {:,} and {:,} on a GPU",
            "engine.config:ON_CPU['step_rows']",
            "engine.config:ON_CPU['alone_rows']",
            "engine.config:ON_DEVICE['step_rows']",
            "engine.config:ON_DEVICE['alone_rows']",
        ),
        (
            "so soon a wrong guess ends; {} on a CPU, {} elsewhere",
            "engine.config:ON_CPU['guess_rows']",
            "engine.config:ON_DEVICE['guess_rows']",
        ),
        ("may keep, {}; 0 turns it off", "engine.config:EngineConfig().tree_share"),
        ("when it leaves a GPU; {} times the pool", "engine.prefixes:word(HOST_SHARE)"),
        ("played from CUDA graphs, {};", "engine.config:EngineConfig().recorded_rows"),
    ),
    *quoted(
        "speculation.md",
        ("one prompt of at least {} computed tokens", "app.answer.guessing:FEWEST_ROWS"),
        ("counts as {} times the usual one", "app.answer.guessing:OUTLIER"),
        (
            "at most {} stages, each of at least {:g} ms",
            "app.answer.guessing:MAX_STAGES",
            "app.answer.guessing:STAGE_S * 1e3",
        ),
        ("searched in less than {:g} ms stays plain", "app.answer.guessing:2 * STAGE_S * 1e3"),
        ("(flat up to {:,} chunks", "corpus.index:FLAT_LIMIT"),
        ("`{}` is the default everywhere", "config:SpeculationSettings().mode"),
        (
            "it is {} prompt on a CPU and {} on a GPU",
            "app.answer.engine_target:GUESSES_ON_CPU",
            "app.answer.engine_target:GUESSES_ON_DEVICE",
        ),
        ("walked with a quarter of the effort", "corpus.index.base:_efforts(1, 2) == [32, 128]"),
        ("The first {} searches that could have stages", "app.answer.guessing:TRIED"),
        ("one for each {} chunks that it reads", "corpus.search:READ_AT_ONCE"),
    ),
    *quoted(
        "store.md",
        ("(the newest {} MiB)", "kv.tiers.config:DiskTierConfig('').quarantine_bytes >> 20"),
        (
            "the tier rests ({:g} s, doubling to a minute)",
            "kv.tiers.config:StoreConfig().breaker_rest_s",
        ),
        ("doubling to a minute", "kv.tier_slot:_LONGEST_REST_S == 60"),
        ("`remote_budget_s` ({:g} s)", "kv.tiers.config:StoreConfig().remote_budget_s"),
        ("`local_budget_s` ({:g} s)", "kv.tiers.config:StoreConfig().local_budget_s"),
        ("after `write_deadline_s` ({:g} s)", "kv.tiers.config:StoreConfig().write_deadline_s"),
        ("after {:g} s nobody waits for it", "kv.removal:DELETE_S"),
        ("or `{}` (the default:", "kv.tiers.config:StoreConfig().policy"),
        ("a {} KiB header", "kv.format.header:ALIGN >> 10"),
        ("each on a {} KiB boundary", "kv.format.header:ALIGN >> 10"),
        ("from S3 the first {} KiB", "kv.tiers.s3:_PRELUDE_BYTES >> 10"),
    ),
    *quoted(
        "corpus.md",
        ("A chunk has at most {} tokens", "corpus.settings:CHUNK_TOKENS"),
        ("over `--max-file-mb` ({})", "corpus.parsers:ParseLimits().file_bytes >> 20"),
        ("everything up to {:,} chunks", "corpus.index:FLAT_LIMIT"),
        ("up to {} million, and uses IVF", "corpus.index:word(HNSW_LIMIT / 1e6)"),
        (
            "compacted when a quarter of it is removed",
            "corpus.index.faiss_index:REBUILD_SHARE == 1 / 4",
        ),
        ("Notes of removals go after a week", "corpus.removals:KEEP_S == 7 * 24 * 3600"),
    ),
    *quoted(
        "calibration.md",
        ("greedily ({} tokens at most)", "calibrate.measure:MAX_ANSWER_TOKENS"),
        (
            "of its {:g} % interval: {:,} resamples",
            "calibrate.bootstrap:LEVEL * 100",
            "calibrate.bootstrap:NUM_RESAMPLES",
        ),
        ("(`--bound`, {} nats per token)", "calibrate.gate:BOUND"),
        ("changes at most {:g} % of first tokens", "calibrate.gate:MAX_FLIPS * 100"),
        ("most {:g} % of first tokens", "calibrate.gate:MAX_FLIPS * 100"),
        ("decides alone from {} questions on", "calibrate.gate:ENOUGH_QUESTIONS"),
        ("(tables of fewer than {} questions", "calibrate.gate:ENOUGH_QUESTIONS"),
        ("whose choice at {} nats costs", "calibrate.gate:BOUND"),
        ("below a tenth of `--bound`", "calibrate.measure:NOISE_SHARE == 1 / 10"),
        ("filled up to {:,} tokens", "cli.calibrate:MIN_CONTEXT_TOKENS"),
        ("KVzip anchors ({:g} %)", "fuse.encode.extras:SHARE * 100"),
        ("in the best {:g} %", "calibrate.layer_profile:BUDGET * 100"),
        ("adds less than half a point", "calibrate.layer_profile:WORTH == 0.5 / 100"),
        (
            "Of versions {} to {} the layers are read",
            "calibrate.profiles:OLD_TABLES[0]",
            "calibrate.profiles:OLD_TABLES[-1]",
        ),
    ),
    *quoted(
        "server.md",
        ("and none ended within {:g} s,", "engine.background:QUIET_S if QUIET_S else 0.5"),
        ("told it takes {:g} % of the time", "engine.background:BUSY_SHARE * 100"),
        ("embedding takes {:g} % of the time", "app.libraries.embedders:BUSY_SHARE * 100"),
        ("in the making, {:g} ms at a time", "app.libraries.embedders:SLICE_S * 1000"),
        ("a quarter of that while somebody", "engine.background:AWAITED == 1 / 4"),
        ("It works {:g} ms at a time", "engine.background:SLICE_S * 1e3"),
        ("is taken behind it, {:g} s at most", "engine.background:MOST_SAVED_S"),
        ("out every {:g} s in which nothing else does", "serve.wire.sse:HEARTBEAT_S"),
        ("chunks of this knowledge base ({}),", "app.answer.question:TOP_K"),
        ("answers to the prompt, {} at most", "serve.access.limits:Limits().choices"),
        ("a list of either; {} at most", "serve.access.limits:Limits().choices"),
        ("two names of the same; {} unless given", "serve.routes.chat:DEFAULT_MAX_TOKENS"),
        ("`max_tokens` is {} unless given", "serve.routes.completions:DEFAULT_MAX_TOKENS"),
        ("a string, or up to {};", "serve.wire.base:word(MOST_STOPS)"),
        ("up to {} alternatives", "engine.sampling:MAX_TOP_LOGPROBS"),
        (
            "nothing of the body came for {:g} s, or after that less than {} KiB a second",
            "serve.access.limits:Limits().body_s",
            "serve.access.limits:Limits().body_rate >> 10",
        ),
        ("than `--max-body-mb` ({})", "serve.access.limits:Limits().body_bytes >> 20"),
        ("than `--max-upload-mb` ({})", "serve.access.limits:Limits().upload_bytes >> 20"),
        (
            "{} answers are running and {} waiting",
            "serve.access.limits:Limits().running",
            "serve.access.limits:Limits().waiting",
        ),
        (
            "or {0} uploads, or {0} searches",
            "serve.access.limits:Limits().tasks + Limits().waiting_tasks",
        ),
        ("within `--timeout` ({:g} s)", "serve.access.limits:Limits().request_s"),
        ("`--open-kbs N` ({})", "app.libraries.libraries:LibrariesConfig().open_most"),
        (
            "`--host-gb G` ({}, or a quarter of the machine's where that is more)",
            "app.libraries.libraries:LEAST_HOST_BYTES >> 30",
        ),
        ("the request waits {} seconds", "app.libraries.libraries:word(LibrariesConfig().wait_s)"),
        ("embeddings run on {} threads", "serve.access.limits:word(Limits().tasks)"),
        ("for `--lame` seconds ({:g})", "config:ServerSettings().lame_s"),
        ("for `--grace` seconds ({:g})", "config:ServerSettings().grace_s"),
        ("The last {} chat answers", "config:ServerSettings().kept_answers"),
        ("`?limit=` ({} at most)", "serve.routes.kb:MOST_LISTED"),
        ("(`?limit=`, {})", "serve.routes.kb:HOT"),
        ("hour in steps of {} s", "serve.observe.tenant_series:STEP_S"),
        ("first tokens ({} at most)", "app.libraries.quality_view:WATCHED"),
        (
            "the server: {} of each tenant, {} MiB each",
            "app.libraries.saved_conversations:MOST",
            "app.libraries.saved_conversations:MOST_BYTES >> 20",
        ),
        (
            "for longer than {:g} s; nothing was changed",
            "app.libraries.libraries:LibrariesConfig().wait_s",
        ),
        ("http://{}:{}/v1", "config:ServerSettings().host", "config:ServerSettings().port"),
    ),
    *quoted(
        "cli.md",
        ("to put in front of the question ({})", "config:LibrarySettings().k"),
        ("to put in front of a question ({})", "config:LibrarySettings().k"),
        ("per token that reuse may cost ({})", "calibrate.gate:BOUND"),
        ("must stay below ({})", "calibrate.gate:BOUND"),
        ("length of the answer at most ({})", "engine.sampling:Sampling().max_tokens"),
        ("tokens per chunk at most ({})", "corpus.settings:CHUNK_TOKENS"),
        ("a hub id (`{}`); fixed likewise", "config:LibrarySettings().embedder"),
        ("larger files are skipped ({})", "corpus.parsers:ParseLimits().file_bytes >> 20"),
        ("| `--host` | {} unless given", "config:ServerSettings().host"),
        ("| `--port` | {} unless given", "config:ServerSettings().port"),
        (
            "answers at once ({}), and behind them ({})",
            "config:ServerSettings().running",
            "config:ServerSettings().waiting",
        ),
        (
            "of a request ({}), of an upload ({})",
            "config:ServerSettings().body_bytes >> 20",
            "config:ServerSettings().upload_bytes >> 20",
        ),
        ("seconds for an answer ({:g})", "config:ServerSettings().request_s"),
        (
            "open at a time ({}), and host memory for chunk KV of all of them ({}, or a quarter",
            "config:ServerSettings().open_kbs",
            "app.libraries.libraries:LEAST_HOST_BYTES >> 30",
        ),
        (
            "after Ctrl-C ({:g}), and before that, in which `/readyz` says 503 ({:g})",
            "config:ServerSettings().grace_s",
            "config:ServerSettings().lame_s",
        ),
        ("(`layers`: {})", "cli.calibrate:MIN_CONTEXT_TOKENS"),
        ("an embedded name (`{}`", "model.files.embedded:DEFAULT"),
        ("found for the model, else {};", "fuse.encode.contexts:DEFAULT_SIZES['neighbours']"),
        ("`{}` the first time |", "fuse.encode.preparation:DEFAULT_ENCODING"),
    ),
    *quoted(
        "models.md",
        (
            "takes no connection in {:g} seconds, or is silent for {:g},",
            "model.files.hub_file:_REACH_S",
            "model.files.hub_file:_SILENCE_S",
        ),
        (
            "temperature {:g}, top-p {:g}, top-k {}, repetition penalty {:g}.",
            "model.files.embedded:SMALL_MODEL['temperature']",
            "model.files.embedded:SMALL_MODEL['top_p']",
            "model.files.embedded:SMALL_MODEL['top_k']",
            "model.files.embedded:SMALL_MODEL['repetition_penalty']",
        ),
    ),
    *quoted(
        "fusion.md",
        (
            "| `{}:{}` (default)",
            "fuse.encode.preparation:DEFAULT_ENCODING",
            "fuse.encode.contexts:DEFAULT_SIZES['filler']",
        ),
        ("(1 at the front, {:g} at the end)", "fuse.selectors.weave:1 + LATE"),
        ("moved by half of the mean change", "fuse.drift:STRENGTH == 1 / 2"),
        ("only a fifth of the rows", "fuse.selectors.weave:STAYING == 1 / 5"),
    ),
    *quoted(
        "neighbours.md",
        ("and {} if it found none", "fuse.encode.contexts:DEFAULT_SIZES['neighbours']"),
    ),
    *quoted(
        "gpu.md",
        ("`EngineConfig.recorded_rows` rows ({};", "engine.config:EngineConfig().recorded_rows"),
        ("`gpu/segments.py`, for up to {} rows", "kernels.segments:KERNEL_ROWS"),
        (
            "more than {} chunks per row and {} besides",
            "model.step_attention:CHUNKS",
            "model.step_attention:SPARE_CHUNKS",
        ),
        (
            "then up to {} in at most {} MiB",
            "fuse.transfer.pipeline:word(GROUP_LAYERS)",
            "fuse.transfer.pipeline:GROUP_BYTES >> 20",
        ),
        ("within {} GiB of slots", "fuse.transfer.ring:RING_BYTES >> 30"),
        ("For up to {:,} rows it is recorded too", "fuse.recorded_layers:MOST_ROWS"),
    ),
    *quoted(
        "cpu.md",
        ("for models of {} million weights", "model.load:round(SMALLEST_ROUNDED / 1e6)"),
        ("A model of {} million weights and more", "model.load:round(SMALLEST_ROUNDED / 1e6)"),
        ("costs less than {} nats per token on", "model.load:AUTO_KL"),
        ("(up to {} MiB)", "kernels.freed_memory:KEPT_BYTES >> 20"),
        ("an eighth more columns at most", "kernels.rounded:extra_columns(512) == 64"),
        ("with {} million weights or more in", "corpus.bert_encoder:LEAST_WEIGHTS // 10**6"),
        ("split over {} columns more", "corpus.bert_encoder:LEAST_EXTRA"),
    ),
    *quoted("calibration.md", ("costs less than {} nats per token", "model.decoder:SMALL_KL")),
    *quoted(
        "vllm.md",
        (
            "If fusing computes more than {} of the rows that vLLM would, or saves fewer than {}",
            "hosts.vllm.scheduler_half:WORTH",
            "hosts.vllm.scheduler_half:LEAST_SAVED",
        ),
        ("and for a tenth of the time otherwise", "hosts.vllm.chunk_maker:BUSY_SHARE == 0.1"),
        ("the disk folder is `vllm-kv` in", "hosts.vllm.settings:FOLDER == 'vllm-kv'"),
        (
            "not stored are encoded by themselves: `{0[0]}` or `{0[1]}`",
            "hosts.vllm.settings:MAKING",
        ),
        ("stands before: `weave:0.15` | [`{}`](#the-gate) |", "hosts.vllm.reuse_request:AUTO"),
        ("nats per token | {} |", "config:QualitySettings().bound"),
    ),
]


def flat(page: str) -> str:
    return " ".join((ROOT / "docs" / page).read_text().split())


@pytest.mark.parametrize("quote", QUOTED, ids=str)
def test_a_page_quotes_what_the_code_has(quote: Quoted) -> None:
    values = [value_of(where) for where in quote.values]
    if quote.in_words:
        assert values == [True] * len(values), f"not any more: {', '.join(quote.values)}"
    expected = quote.words.format(*values)
    assert expected in flat(quote.page), (
        f"docs/{quote.page} does not say {expected!r}; put the page or the code right"
    )


def test_the_planner_page_lists_every_reason_once() -> None:
    page = (ROOT / "docs" / "planner.md").read_text()
    table = page.split("| reason | what it means |")[1].split("\n\n")[0]
    cells = re.findall(r"^\| ([^|]*) \|", table, re.MULTILINE)
    reasons = [reason for cell in cells for reason in re.findall(r"`` ?(.+?) ?``|`([^`]+)`", cell)]
    assert sorted(one or other for one, other in reasons) == sorted(Reason)


def test_every_page_of_settings_is_quoted() -> None:
    settled = {quote.page for quote in QUOTED}
    # by scripts, from results
    made = {"reliability.md", "licences.md", "results.md", "coverage.md"}
    run = {"tutorial.md"}  # by tests/test_tutorial.py
    notes = {"vllm_upstream.md"}  # to others, without settings
    prose = {page.name for page in PAGES} - {"README.md", *made, *run, *notes}
    assert settled == prose


# ── commands ─────────────────────────────────────────────────────────────────


def command_of(words: list[str]) -> tuple[click.Command, list[str]] | None:
    """The command that `kvweave WORDS` runs, and what is left; None if no command is named."""
    if not words or words[0] not in COMMANDS:
        return None
    command: click.Command = importlib.import_module(COMMANDS[words[0]]).command
    left = words[1:]
    while isinstance(command, click.Group) and left and left[0] in command.commands:
        command, left = command.commands[left[0]], left[1:]
    return command, left


def options_of(command: click.Command) -> set[str]:
    found = {o for p in command.params for o in [*p.opts, *p.secondary_opts] if o[0] == "-"}
    return found | {"--help"}


def block_lines(text: str) -> Iterator[str]:
    """Lines of code blocks; one that goes on below is one line."""
    for block in re.findall(r"^```[^\n]*\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        yield from block.replace("\\\n", " ").splitlines()


def typed_lines(text: str) -> Iterator[str]:
    """What a page shows as typed: lines of code blocks, and code within a line."""
    yield from block_lines(text)
    prose = re.sub(r"^```[^\n]*\n.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    yield from (" ".join(code.split()) for code in re.findall(r"`([^`]+)`", prose))


def shown_commands(page: Path) -> Iterator[list[str]]:
    """The words behind `kvweave`, for every call that a page shows."""
    for line in typed_lines(page.read_text()):
        for part in re.split(r"[|;]|&&", line):
            match = re.search(r"(?:^|[\s$])kvweave\s+(\S.*)", part)
            if match is None:
                continue
            try:
                words = shlex.split(match[1], comments=True)
            except ValueError:  # prose in a block, such as "doesn't"
                continue
            yield words


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_that_a_page_shows_can_be_typed(page: Path) -> None:
    wrong = []
    for words in shown_commands(page):
        found = command_of(words)
        if found is None:
            if re.fullmatch(r"[a-z]+", words[0]) and len(words) > 1 and words[1][:2] == "--":
                wrong.append(f"kvweave {words[0]}: no such command")
            continue
        command, left = found
        if command.context_settings.get(
            "ignore_unknown_options"
        ):  # it passes on what it does not know
            continue
        known = options_of(command)
        for each in left:
            flag = each.partition("=")[0]
            if re.fullmatch(r"--?[a-z][a-z-]*", flag) and flag not in known:
                wrong.append(f"kvweave {' '.join(words)}: {command.name} has no {flag}")
    assert wrong == []


def test_the_pages_show_commands_of_many_kinds() -> None:
    shown = {words[0] for page in PAGES for words in shown_commands(page) if command_of(words)}
    assert shown >= {"ask", "ingest", "plan", "serve", "calibrate", "cache", "docs", "config"}


def commands_of_blocks(page: Path) -> Iterator[list[str]]:
    """The words behind `kvweave` of each line in a block that is to be typed as it stands."""
    for line in block_lines(page.read_text()):
        typed = re.match(r"(?:\$ )?(?:\w+=\S+ )*(?:\.venv/bin/)?kvweave (.+)", line)
        output = typed is not None and typed[1].startswith("serves ")  # the server's greeting
        if typed is not None and not output:
            yield shlex.split(re.split(r" [|>&]", typed[1])[0], comments=True)


@pytest.mark.parametrize("page", TYPED_PAGES, ids=lambda page: page.name)
def test_the_command_line_takes_what_a_block_shows(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By click itself: command, options, their values and the number of arguments. Files that the
    page's reader would have are the only thing that may be missing."""
    monkeypatch.chdir(tmp_path)
    for words in commands_of_blocks(page):
        context = cli.make_context("kvweave", words, resilient_parsing=False)
        command: click.Command = cli
        while isinstance(command, click.Group):
            name, command, words = command.resolve_command(context, words)
            try:
                context = command.make_context(name, words, parent=context)
            except click.BadParameter as error:
                if "does not exist" not in error.message:
                    raise
                break
            words = [*context._protected_args, *context.args]


def test_every_make_target_that_a_page_shows_is_there() -> None:
    targets = set(re.findall(r"^([a-z-]+):.*##", (ROOT / "Makefile").read_text(), re.MULTILINE))
    shown = {
        (page.name, target)
        for page in TYPED_PAGES
        for line in typed_lines(page.read_text())
        for target in re.findall(r"^(?:\$ )?make ([a-z-]+)", line)
    }
    assert len(shown) > 15
    assert {(page, target) for page, target in shown if target not in targets} == set()
