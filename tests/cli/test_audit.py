"""`kvweave audit` shows what was found, without a model."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvweave.app.audit.audit_log import FILE, AuditLog, AuditSubject
from kvweave.cli.audit import command
from kvweave.errors import CorpusError
from worlds.tiny_corpus import make_tokenizer, open_kb


@pytest.fixture
def kb(tmp_path: Path) -> Path:
    open_kb(tmp_path / "kb", make_tokenizer(tmp_path)).close()
    return tmp_path / "kb"


def run(*options: str) -> str:
    result = CliRunner().invoke(command, options, catch_exceptions=False)
    assert result.exit_code == 0
    return result.output


def find(kb: Path) -> None:
    found = AuditLog(AuditSubject("model", "filler:4 int8"), path=kb / FILE)
    for i in range(10):
        found.add("weave", 0.15, 0.1, flipped=i == 0)
    found.add("weave", 0.3, 0.001, flipped=False)
    found.move("weave", 0.02, 0.15, 0.3)
    found.save()


def test_figures_and_what_the_gate_made_of_them(kb: Path) -> None:
    find(kb)
    told = json.loads(run("--kb", str(kb), "--json"))["audits"][0]
    assert [(c["strategy"], c["ratio"], c["answers"]) for c in told["cells"]] == [
        ("weave", 0.15, 10),
        ("weave", 0.3, 1),
    ]
    assert told["cells"][0]["kl"] == pytest.approx(0.1)
    assert told["cells"][0]["flips"] == 1
    assert told["cells"][1]["kl_high"] is None
    assert (told["gate"][0]["calibrated"], told["gate"][0]["ratio"]) == (0.15, 0.3)
    shown = " ".join(run("--kb", str(kb)).split())
    assert "0.1000" in shown
    assert "0.3 taken" in shown


def test_before_the_first_audit_it_says_who_audits(kb: Path) -> None:
    assert "no answer was audited yet" in run("--kb", str(kb))
    assert json.loads(run("--kb", str(kb), "--json"))["audits"] == []


def test_a_damaged_file_is_one_line_with_the_way_out(kb: Path) -> None:
    (kb / FILE).write_text("{")
    with pytest.raises(CorpusError, match="--forget` starts anew"):
        run("--kb", str(kb))
    run("--kb", str(kb), "--forget")
    assert "no answer was audited yet" in run("--kb", str(kb))


def test_what_is_forgotten_is_gone(kb: Path) -> None:
    find(kb)
    run("--kb", str(kb), "--forget")
    assert json.loads(run("--kb", str(kb), "--json"))["audits"] == []
