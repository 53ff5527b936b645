"""Measuring against full prefill: noise where nothing differs, void where something must not."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvweave.calibrate import measure as measuring
from kvweave.calibrate.case import Case, hash_cases
from kvweave.calibrate.encodings import KVZIP, ContextPrefixes, FixedContext
from kvweave.calibrate.gate import Cell
from kvweave.calibrate.measure import CaseOutcomes, Outcome, Setting, measure
from kvweave.calibrate.questions import Passage, QuestionRecord, make_case, repeat_ids
from kvweave.calibrate.tabulate import TableOrigin, tabulate
from kvweave.calibrate.trials import TrialScore
from kvweave.errors import ConfigError, ModelError
from kvweave.fuse.encode.chunk_pass import encode_chunks, encode_prefix
from kvweave.fuse.selectors.strategies import open_strategy
from kvweave.fuse.sources import ComputedChunks
from kvweave.fuse.strategy import ModelFacts
from kvweave.fuse.taper import Taper
from kvweave.kv.format.codec import LayerKV
from kvweave.model.decoder import Decoder
from kvweave.model.load import load_decoder
from kvweave.text.tokenizer import Tokenizer
from worlds.tiny_corpus import make_text

FACTS = ModelFacts(3, (1, 2))
SETTINGS = [
    Setting(open_strategy("reuse", FACTS), 0.0),
    Setting(open_strategy("epic", FACTS), 0.3),
    Setting(open_strategy("cacheblend", FACTS), 0.3),
    Setting(open_strategy("qcfuse", FACTS), 0.3),
    Setting(open_strategy("weave", FACTS), 0.97),
]
ORIGIN = TableOrigin("revision", "float32", "questions.txt", "hash", "isolated", "preamble", 60)


@pytest.fixture(scope="module")
def decoder(chat_model_folder: Path) -> Decoder:
    return load_decoder(chat_model_folder, device="cpu", dtype="float32")


@pytest.fixture(scope="module")
def tokenizer(chat_model_folder: Path) -> Tokenizer:
    return Tokenizer(chat_model_folder)


@pytest.fixture(scope="module")
def cases(tokenizer: Tokenizer) -> list[Case]:
    texts = [
        "Drain the node, then restart it.",
        "The quick brown fox jumps.",
        "Größe, naïve, 東京.",
    ]
    passages = tuple(Passage(text, "A note") for text in texts)
    asked = QuestionRecord("how do I drain a node?", ("drain it", "restart"), passages)
    return [
        make_case(tokenizer, asked),
        make_case(tokenizer, QuestionRecord("why?", (), passages[:2])),
    ]


@pytest.fixture(scope="module")
def isolated(decoder: Decoder, tokenizer: Tokenizer) -> FixedContext:
    return FixedContext(decoder, ContextPrefixes(decoder), "isolated", (), repeat_ids(tokenizer))


@pytest.fixture(scope="module")
def answered(
    decoder: Decoder, tokenizer: Tokenizer, cases: list[Case], isolated: FixedContext
) -> list[CaseOutcomes]:
    filler = tokenizer.encode_text("The lazy dog. ")
    behind = FixedContext(
        decoder, ContextPrefixes(decoder), "filler:1", filler, repeat_ids(tokenizer)
    )
    return measure(decoder, tokenizer, cases, [isolated, behind], SETTINGS)


def test_the_table_has_every_setting_and_plain_reuse_recovers_nothing(
    answered: list[CaseOutcomes],
) -> None:
    table = tabulate(answered, SETTINGS, "isolated", ORIGIN)
    named = [(cell.strategy, cell.ratio) for cell in table.cells]
    assert named == [(s.strategy.name, s.ratio) for s in SETTINGS]
    reuse, *_, nearly_all = table.cells
    assert reuse.recovered == 0.0
    assert reuse.kl > 1e-4
    assert reuse.kl_low <= reuse.kl <= reuse.kl_high
    assert nearly_all.kl < reuse.kl
    assert (table.num_questions, table.num_with_answers) == (2, 1)
    assert 0.0 <= table.noise < 1e-5
    assert (table.context, table.preamble, table.num_chunk_tokens) == ("isolated", "preamble", 60)
    assert table.full_f1 is not None


def test_a_cell_takes_the_least_lead_that_keeps_its_first_tokens() -> None:
    """Of 100 questions three flip: at a lead of 0.25 nats, which the narrow lead lets through."""

    def outcome(margin: float, *, flips: bool) -> Outcome:
        judged = TrialScore(0.01, 0.01, 0.02, 0.5, 1.0, flips, 0.0, margin)
        return Outcome(judged, 0.0, 0.3, None)

    def cell_of(num_flips: int, margin: float) -> Cell:
        some = [outcome(margin, flips=True)] * num_flips
        rows = some + [outcome(1.0, flips=False)] * (100 - num_flips)
        made = [CaseOutcomes(100, 2, None, {"isolated": [row]}, {"isolated": 0.0}) for row in rows]
        (cell,) = tabulate(made, SETTINGS[1:2], "isolated", ORIGIN).cells
        return cell

    few = cell_of(2, 0.25)
    assert (few.flips, few.close, few.close_call) == (0.02, 0.0, None)
    more = cell_of(3, 0.25)
    assert (more.flips, more.close, more.close_call) == (0.0, 0.03, 0.3)
    assert more.kl == pytest.approx(0.97 * 0.01), "a close call differs in nothing"
    hopeless = cell_of(3, 0.5)
    assert (hopeless.flips, hopeless.close, hopeless.close_call) == (0.03, 0.0, None)


def test_work_counts_rows_probes_and_full_width_layers(
    answered: list[CaseOutcomes], cases: list[Case]
) -> None:
    reuse, epic, blend, qcfuse, _ = answered[0].outcomes["isolated"]
    case = cases[0]
    assert reuse.work == pytest.approx(len(case.question) / case.num_tokens)
    assert reuse.work < epic.work < blend.work  # cacheblend runs every hit through layer 0
    assert epic.work < qcfuse.work  # the question goes through the layers once more


def test_a_strategy_is_measured_with_its_taper(
    decoder: Decoder, tokenizer: Tokenizer, cases: list[Case], isolated: FixedContext
) -> None:
    weave = open_strategy("weave", FACTS)
    tapers = (None, Taper(0, 0.1))
    settings = [Setting(replace(weave, taper=taper), 0.5) for taper in tapers]
    (found,) = measure(decoder, tokenizer, cases[:1], [isolated], settings)
    plain, tapered = found.outcomes["isolated"]
    assert tapered.work < plain.work
    assert tapered.judged.kl_mean != plain.judged.kl_mean


def test_encodings_are_measured_apart(answered: list[CaseOutcomes]) -> None:
    one, other = (
        tabulate(answered, SETTINGS, name, ORIGIN).cells[0] for name in ("isolated", "filler:1")
    )
    assert one.kl != other.kl


def test_trials_in_small_batches_say_the_same(
    decoder: Decoder,
    tokenizer: Tokenizer,
    cases: list[Case],
    isolated: FixedContext,
    answered: list[CaseOutcomes],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(measuring, "BATCH_BYTES", 1)
    alone = measure(decoder, tokenizer, cases[:1], [isolated], SETTINGS)
    for one, many in zip(
        alone[0].outcomes["isolated"], answered[0].outcomes["isolated"], strict=True
    ):
        assert one.judged == pytest.approx(many.judged, abs=1e-5)
        assert one.gold == pytest.approx(many.gold, abs=1e-5)


def test_a_run_in_which_recomputing_everything_differs_is_void(
    decoder: Decoder, tokenizer: Tokenizer, cases: list[Case], isolated: FixedContext
) -> None:
    class SaysExact:
        """Passes off a first chunk that was encoded behind other text as exact."""

        name = "wrong"

        def prepare(self, case: Case, extras: Sequence[str]) -> ComputedChunks:
            wrong = encode_prefix(decoder, [*case.preamble, *range(5, 25)])
            beside = {KVZIP: isolated.prepare(case, [KVZIP]).blobs[KVZIP]}
            return ComputedChunks(encode_chunks(decoder, wrong, case.chunks), beside)

    with pytest.raises(ModelError, match="calibration is void"):
        measure(decoder, tokenizer, cases, [SaysExact()], SETTINGS)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_half_type_whose_rounding_uses_up_the_bound_cannot_be_calibrated_to_it(
    chat_model_folder: Path, tokenizer: Tokenizer, cases: list[Case], dtype: str
) -> None:
    """Where products of many rows and of few are added in the same order, recomputing everything is
    full prefill to the bit, and there is no noise. So what is stored is one rounding off."""
    half = load_decoder(chat_model_folder, device="cpu", dtype=dtype)
    prefixes = ContextPrefixes(half)
    eps = torch.finfo(getattr(torch, dtype)).eps

    class RoundedAgain:
        name = "isolated"

        def prepare(self, case: Case, extras: Sequence[str]) -> ComputedChunks:
            chunks = encode_chunks(half, prefixes.prefix_for(case.preamble), case.chunks)
            return ComputedChunks(
                [[LayerKV(kv.k * (1 + eps), kv.v * (1 + eps)) for kv in each] for each in chunks]
            )

    def noise_within(bound: float) -> float:
        answered = measure(half, tokenizer, cases, [RoundedAgain()], SETTINGS[:1], bound=bound)
        return sum(each.noise["isolated"] for each in answered) / len(answered)

    noise = noise_within(1e3)
    assert noise > 0.0
    assert noise_within(11 * noise) == pytest.approx(noise)
    with pytest.raises(ConfigError, match=f"{dtype} cannot be calibrated to .* take float32"):
        noise_within(9 * noise)


def test_float32_is_calibrated_to_any_bound(
    decoder: Decoder, tokenizer: Tokenizer, cases: list[Case], isolated: FixedContext
) -> None:
    assert measure(decoder, tokenizer, cases[:1], [isolated], SETTINGS[:1], bound=0.0)


def test_another_question_is_another_hash(cases: list[Case]) -> None:
    assert hash_cases(cases) == hash_cases(list(cases))
    assert hash_cases(cases) != hash_cases(cases[:1])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_half_type_loses_by_fusing_what_float32_loses(
    chat_model_folder: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    """Tables in float32 speak for it (`own_evidence.py`). Of first tokens, because a model without
    favourites goes on otherwise where numbers are rounded otherwise."""
    monkeypatch.setattr(measuring, "MAX_ANSWER_TOKENS", 1)
    asked = "how do I drain node {}?"
    cases = [
        make_case(
            tokenizer,
            QuestionRecord(
                asked.format(n),
                (),
                tuple(Passage(make_text(8, seed=10 * n + i), "A note") for i in range(3)),
            ),
        )
        for n in range(4)
    ]

    def loss(dtype: str) -> list[float]:
        decoder = load_decoder(chat_model_folder, device="cpu", dtype=dtype)
        isolated = FixedContext(
            decoder, ContextPrefixes(decoder), "isolated", (), repeat_ids(tokenizer)
        )
        setting = Setting(open_strategy("weave", FACTS), 0.3)
        found = measure(decoder, tokenizer, cases, [isolated], [setting], bound=1.0)
        return [each.outcomes["isolated"][0].judged.kl_mean for each in found]

    exact = loss("float32")
    assert min(exact) > 1e-3, "fusing costs something"
    assert sum(loss(dtype)) == pytest.approx(sum(exact), rel=0.1)
