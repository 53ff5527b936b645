"""Figures outlive the process, and no file keeps answers from being given."""

import json
import logging
import threading
from pathlib import Path

import pytest

from kvweave.app.audit.audit_log import WINDOW, AuditLog, AuditSubject

MINE = AuditSubject("model a", "filler:4 int8")
OTHER = AuditSubject("model b", "filler:4 int8")


def test_what_was_found_is_found_again_by_the_same_subject_alone(tmp_path: Path) -> None:
    path = tmp_path / "audit.json"
    for subject, kl in ((MINE, 0.5), (OTHER, 0.001)):
        found = AuditLog(subject, path=path)
        for _ in range(10):
            found.add("weave", 0.15, kl, flipped=False)
        found.move("weave", 0.02, 0.15, 0.3)
        found.save()
    again = AuditLog(MINE, path=path)
    assert again.figures("weave", 0.15).kl == pytest.approx(0.5)
    assert again.is_over("weave", 0.15, 0.02)
    assert not again.move("weave", 0.02, 0.15, 0.3), "it had moved there before"
    assert not AuditLog(OTHER, path=path).is_over("weave", 0.15, 0.02)
    assert not list(tmp_path.glob("*.tmp"))


def test_a_question_is_open_until_there_are_enough_audits_or_they_are_sure() -> None:
    found = AuditLog(MINE)
    assert found.is_open_question("weave", 0.15, 0.02)
    for _ in range(8):
        found.add("weave", 0.15, 0.021, flipped=False)
    assert found.is_open_question("weave", 0.15, 0.02), "over the bound, as it seems"
    assert not found.is_open_question("weave", 0.15, 0.05)
    for _ in range(20):
        found.add("weave", 0.15, 0.2, flipped=False)
    assert found.is_over("weave", 0.15, 0.02)
    assert not found.is_open_question("weave", 0.15, 0.02)


def test_the_newest_answers_count(tmp_path: Path) -> None:
    found = AuditLog(MINE)
    for kl in (1.0, 0.0):
        for _ in range(WINDOW):
            found.add("weave", 0.15, kl, flipped=False)
    assert found.figures("weave", 0.15).kl == 0.0
    assert found.total("weave", 0.15) == 2 * WINDOW
    assert not found.is_over("weave", 0.15, 0.02)


@pytest.mark.parametrize(
    "damage",
    ["", "{", "[]", '{"version": 9}', '{"version": 1, "audits": [{"model": "model a"}]}',
     json.dumps({"version": 1, "audits": [{**MINE._asdict(), "gate": [], "cells": [
         {"strategy": "weave", "ratio": 0.1, "total": 1, "reopened": 0, "kl": ["x"], "flips": [0]}
     ]}]})],
)  # fmt: skip
def test_a_damaged_file_costs_one_warning_and_starts_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    path = tmp_path / "audit.json"
    path.write_text(damage)
    with caplog.at_level(logging.WARNING):
        found = AuditLog(MINE, path=path)
        found.add("weave", 0.15, 0.1, flipped=True)
        found.save()
    assert len(caplog.records) == 1
    assert str(path) in caplog.text
    assert AuditLog(MINE, path=path).figures("weave", 0.15).flips == 1


def test_a_folder_that_cannot_be_written_costs_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    found = AuditLog(MINE, path=tmp_path / "file" / "audit.json")
    for _ in range(3):
        found.add("weave", 0.15, 0.1, flipped=False)
        found.save()
    assert len(caplog.records) == 1
    assert found.figures("weave", 0.15).answers == 3


def test_many_threads_add_up(tmp_path: Path) -> None:
    found = AuditLog(MINE, path=tmp_path / "audit.json")

    def work() -> None:
        for _ in range(20):
            found.add("weave", 0.15, 0.01, flipped=False)
        found.save()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert AuditLog(MINE, path=tmp_path / "audit.json").total("weave", 0.15) == 80
