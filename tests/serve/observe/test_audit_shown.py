"""Audits show in `explain` and on the metrics page, by knowledge base."""

from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families

from kvweave.app.answer.question import QuestionDefaults
from kvweave.app.libraries.libraries import Libraries, LibrariesConfig
from kvweave.app.library.library_kv import KVOptions
from kvweave.app.weave import Weave
from kvweave.config import QualitySettings
from worlds.serving import serving, user
from worlds.tiny_corpus import WordEmbedder

# two: the first of a prompt is exact right behind the preamble
NOTES = (
    {"title": "Drain", "text": "To drain a node, cordon it first, then evict its pods."},
    {"title": "Taint", "text": "A taint keeps pods off a node; drain it before you remove it."},
)


def test_an_audited_answer_shows_in_explain_and_in_the_metrics(
    weave: Weave, tmp_path: Path
) -> None:
    config = LibrariesConfig(
        root=tmp_path,
        embedder="words",
        kv=KVOptions("isolated"),
        # as `kvweave serve --reuse reuse`
        usual=QuestionDefaults(QualitySettings(reuse="reuse", audit_share=1.0)),
    )
    libraries = Libraries(weave, config, open_embedder=lambda name: WordEmbedder())
    with serving(weave, libraries=libraries) as url:
        for note in NOTES:
            httpx.post(f"{url}/v1/kb/notes/documents?wait_for_kv=true", json=note, timeout=60)
        body = {"messages": user("drain?"), "max_tokens": 4, "kb": "notes", "explain": True}

        def explained() -> dict[str, object]:
            told = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60).json()
            return dict(told["explain"]["audit"])

        assert explained() == {
            "chosen": True, "answers": 0, "kl": None, "kl_low": None, "kl_high": None, "flips": 0,
        }  # fmt: skip
        with libraries.use("", "notes") as opened:
            assert opened.auditor.wait(60)
            figures = opened.auditor.log.figures("reuse", 0.0)
        assert explained()["answers"] == 1
        page = httpx.get(f"{url}/metrics").text
    libraries.close()
    samples = {
        s.name: s.value
        for family in text_string_to_metric_families(page)
        for s in family.samples
        if s.labels.get("kb") == "notes" and s.labels.get("strategy") == "reuse"
    }
    assert samples["kvweave_audit_answers_total"] >= 1
    assert samples["kvweave_audit_flips_total"] >= figures.flips
    assert samples["kvweave_audit_kl_nats"] >= 0.0
    assert (tmp_path / "notes" / "audit.json").exists()
