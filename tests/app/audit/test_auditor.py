"""Answers are audited in idle time, and a table that lies is found out."""

import logging
import threading
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kvweave import Weave
from kvweave.app.answer.question import QuestionDefaults
from kvweave.app.answer.settings import AnswerSettings
from kvweave.app.audit import auditor
from kvweave.app.audit.audit_log import AuditLog
from kvweave.app.audit.auditor import Auditor, AuditSampler
from kvweave.app.weave import Answer, Sampling
from kvweave.calibrate.trials import TrialScore, judge
from kvweave.config import QualitySettings
from kvweave.model.decoder import Decoder
from kvweave.model.rows import Rows
from kvweave.reasons import Reason
from worlds.auto import GREEDY, TEXTS, World, model, world
from worlds.weaves import ingest_with_fronts

__all__ = ["model", "world"]

ALL = QualitySettings(audit_share=1.0, audit_per_minute=10_000)
BOUND = 0.02
SHORT = Sampling(max_tokens=2)
NOUNS = ("drain", "node", "evict", "pods", "cordon", "cluster", "taint", "label", "restart")


def question(i: int) -> str:
    """Many questions, none of which comes twice."""
    return f"{NOUNS[i % len(NOUNS)]} {NOUNS[i // 9 % len(NOUNS)]} number {i}?"


@pytest.fixture
def ready(world: World) -> World:
    """A world whose documents are ingested."""
    with world.open() as weave:
        ingest_with_fronts(weave, *TEXTS)
    world.set_machine()
    return world


def reopened(world: World, quality: QualitySettings = ALL, **settings: object) -> Weave:
    usual = QuestionDefaults(quality)
    return world.open(replace(AnswerSettings(usual=usual), **settings))  # type: ignore[arg-type]


def ask(weave: Weave, i: int, **options: object) -> Answer:
    options = {"sampling": SHORT, "order": "as_found", **options}
    return weave.ask(question(i), **options)  # type: ignore[arg-type]


def settled(weave: Weave) -> AuditLog:
    assert weave.auditor.wait(60)
    return weave.auditor.log


def test_an_audit_compares_what_full_prefill_thinks_of_the_given_answer(
    ready: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready.calibrate(("reuse", 0.0, 0.0))
    compared: list[tuple[Tensor, Tensor, tuple[int, ...]]] = []

    def judged(full: Tensor, fused: Tensor, answer: tuple[int, ...]) -> TrialScore:
        compared.append((full, fused, answer))
        return judge(full, fused, answer)

    monkeypatch.setattr(auditor, "judge", judged)
    with reopened(ready) as weave:
        answer = ask(weave, 1, reuse="auto", sampling=GREEDY)
        assert answer.explain is not None
        assert answer.explain.strategy == "reuse"
        assert answer.audit is not None
        assert answer.audit.is_chosen
        figures = settled(weave).figures("reuse", 0.0)
        assert weave.is_at_rest()
    ((full, fused, ids),) = compared
    assert fused.argmax(-1).tolist() == list(ids), "greedy: its own likeliest tokens"
    prompt = [*answer.explain.token_ids, *ids[:-1]]
    logits = teacher_forced(ready.decoder, prompt, len(ids))
    assert torch.allclose(full, logits.log_softmax(-1), atol=1e-4)
    kl = (full.exp() * (full - fused)).sum(-1).mean()
    assert figures.kl == pytest.approx(float(kl), rel=1e-4)
    assert figures.flips == (int(full[0].argmax()) != ids[0])


def teacher_forced(decoder: Decoder, ids: list[int], count: int) -> Tensor:
    """Logits [count, V] at the last places of a sequence, by one plain pass of the model."""
    rows = Rows(ids, range(len(ids)), decoder.new_kv(len(ids)), range(len(ids) - count, len(ids)))
    return decoder.forward([rows]).float()


def test_where_nothing_is_lost_an_audit_finds_nothing(ready: World) -> None:
    """All rows recomputed is full prefill, but for the first chunk: int8 rounded it."""
    with reopened(ready, replace(ALL, reuse="weave:1.0")) as weave:
        answer = ask(weave, 1)
        assert answer.audit is not None
        found = settled(weave)
    assert found.figures("weave", 1.0).answers == 1
    assert 0.0 < found.figures("weave", 1.0).kl < 1e-3


def test_a_table_that_lies_is_found_out_within_200_requests(
    ready: World, caplog: pytest.LogCaptureFixture
) -> None:
    """At the default share. Calibration says that plain reuse costs nothing."""
    ready.calibrate(("reuse", 0.0, 0.0))
    shipped = QualitySettings()
    assert shipped.audit_share == 0.05
    with reopened(ready, replace(shipped, audit_per_minute=10_000)) as weave:
        for asked in range(1, 201):
            answer = ask(weave, asked, reuse="auto", bound=BOUND)
            settled(weave)
            assert answer.decision is not None
            if answer.decision.plan.strategy is None:
                break
            weave.runtime.client.forget(None)  # or the audits themselves make its few paths exact
        assert asked < 200
        reasons = {o.name: o.reason for o in answer.decision.plan.options}
        assert reasons["fused reuse"] is Reason.AUDITED
        assert answer.audit is None, "an exact answer needs no audit"
        assert weave.auditor.log.metrics.value("audit_gate_moves_total") == 1
        assert "reuse is refused" in caplog.text
    # known from now on, audited or not
    with reopened(ready, QualitySettings(audit_share=0.0)) as weave:
        again = ask(weave, 700, reuse="auto", bound=BOUND)
        assert again.decision is not None
        assert again.decision.plan.strategy is None


def test_a_table_that_is_right_stays_open(ready: World) -> None:
    ready.calibrate(("weave", 0.97, 0.0))
    with reopened(ready) as weave:
        for asked in range(12):
            answer = ask(weave, asked, reuse="auto", bound=BOUND)
            settled(weave)
        assert answer.explain is not None
        assert (answer.explain.strategy, answer.explain.ratio) == ("weave", 0.97)
        figures = weave.auditor.log.figures("weave", 0.97)
        assert figures.answers >= 8
        assert figures.kl < BOUND


def test_a_strategy_that_the_server_names_is_audited_and_never_changed(
    ready: World, caplog: pytest.LogCaptureFixture
) -> None:
    quality = replace(ALL, reuse="reuse", bound=BOUND)
    with reopened(ready, quality) as weave, caplog.at_level(logging.WARNING):
        for asked in range(20):
            answer = ask(weave, asked)
            settled(weave)
        assert answer.explain is not None
        assert answer.explain.strategy == "reuse"
        assert weave.auditor.log.is_over("reuse", 0.0, BOUND)
        by_name = ask(weave, 50, reuse="reuse")
        assert by_name.audit is None, "who names a strategy wants no audit"
    assert len([r for r in caplog.records if "name a larger ratio" in r.message]) == 1


def test_an_audit_leaves_the_exact_path_behind(ready: World) -> None:
    ready.calibrate(("reuse", 0.0, 0.0))
    with reopened(ready) as weave:
        first = ask(weave, 1, reuse="auto")
        assert first.explain is not None
        assert first.explain.counts["reused"] > 0
        settled(weave)
        again = ask(weave, 1, reuse="auto")
        assert again.explain is not None
        assert again.explain.counts["reused"] == 0
        assert again.explain.counts["exact"] > first.explain.counts["exact"]


def test_what_was_deleted_meanwhile_is_not_computed_again(
    ready: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready.calibrate(("reuse", 0.0, 0.0))
    deleted, wait_for = threading.Event(), Auditor._wait_for
    # the engine may have written all of the answer when its first piece is read
    monkeypatch.setattr(
        Auditor, "_wait_for", lambda self, ticket: deleted.wait(60) and wait_for(self, ticket)
    )
    with reopened(ready) as weave:
        stream = weave.stream(question(1), reuse="auto", sampling=GREEDY)
        pieces = iter(stream)
        next(pieces)
        for document in weave.library.kb.documents():
            weave.remove(document.id)
        deleted.set()
        stream.finish()
        log = settled(weave)
        assert log.figures("reuse", 0.0).answers == 0
        assert log.metrics.value("audit_dropped_total", why="deleted") == 1
        assert weave.is_at_rest()


def test_closing_gives_up_what_is_under_way(ready: World) -> None:
    ready.calibrate(("reuse", 0.0, 0.0))
    weave = reopened(ready)
    streams = [weave.stream(question(i), reuse="auto", sampling=GREEDY) for i in range(3)]
    for stream in streams:
        next(iter(stream))
    weave.close()
    assert weave.auditor.wait(0)


def test_no_more_than_four_wait_and_none_beyond_the_budget(ready: World) -> None:
    ready.calibrate(("reuse", 0.0, 0.0))
    with reopened(ready, replace(ALL, audit_per_minute=2)) as weave:
        chosen = []
        for i in range(5):
            answer = ask(weave, i, reuse="auto")
            chosen.append(answer.audit is not None and answer.audit.is_chosen)
            settled(weave)
        assert sum(chosen) == 2


def test_distributions_are_dropped_after_the_audit(
    ready: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready.calibrate(("reuse", 0.0, 0.0))
    tickets = []
    with reopened(ready) as weave:
        submit = weave.engine.submit

        def kept(*args: object, **options: object) -> object:
            tickets.append(submit(*args, **options))  # type: ignore[arg-type]
            return tickets[-1]

        monkeypatch.setattr(weave.engine, "submit", kept)
        ask(weave, 1, reuse="auto")
        settled(weave)
    assert [ticket.request.background for ticket in tickets] == [False, True]
    assert [ticket.request.watched > 0 for ticket in tickets] == [True, True]
    assert not any(isinstance(d, torch.Tensor) for t in tickets for d in t.distributions)


def test_the_sample_is_a_share_of_all_and_meets_no_rhythm() -> None:
    sampler = AuditSampler(seed=0)
    drawn = [i for i in range(2000) if sampler.draw(0.05)]
    assert abs(len(drawn) - 100) <= 1
    assert len({i % 20 for i in drawn}) > 10
    assert [i for i in range(100) if AuditSampler(1).draw(0.0)] == []
    one, same = AuditSampler(7), AuditSampler(7)
    assert [one.draw(0.1) for _ in range(100)] == [same.draw(0.1) for _ in range(100)]
