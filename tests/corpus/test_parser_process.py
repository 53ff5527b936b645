"""A file has a bound in time, memory and size, whatever its parser does with it."""

import os
import signal
import time
from pathlib import Path

import pytest

from kvweave.corpus.parsers import ParsedRecord, ParseLimits, parse
from kvweave.corpus.parsers.parser_process import (
    SHORT_BYTES,
    ParserChild,
    ParserPool,
    parse_in_child,
    read_fields,
)
from kvweave.errors import CorpusError
from worlds.bombs import many_paragraphs, shared_pages, wide_cell

LIMITS = ParseLimits()


def test_columns_of_one_name_are_numbered_in_a_time_that_grows_with_the_table() -> None:
    """2,000 of them took 65 s."""
    began_s = time.process_time()
    names = ",".join(["a"] * 2_000 + ["a 2", "b", "b 2", "b"])
    values = ",".join(str(i) for i in range(2_004))
    (record,) = parse(Path("x.csv"), f"{names}\n{values}\n".encode(), LIMITS)
    assert time.process_time() - began_s < 3.0
    shown = record.text.split("; ")
    assert shown[:3] == ["a: 0", "a 2: 1", "a 3: 2"]
    assert shown[-4:] == ["a 2 2: 2000", "b: 2001", "b 2: 2002", "b 3: 2003"]


def test_lines_of_one_text_have_keys_in_a_time_that_grows_with_the_file() -> None:
    """10,000 of them took 34 s. The keys are those that they always had."""
    began_s = time.process_time()
    records = parse(Path("x.jsonl"), b'"a"\n' * 10_000, LIMITS)
    assert time.process_time() - began_s < 5.0
    first = records[0].key
    numbered = [f"{first}:{copy}" for copy in range(2, 10_000)]
    assert [record.key for record in records] == [first, f"{first}:{first}", *numbered]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("x.csv", "id,text,title\n7,tëxt,日本\n"),
        ("x.html", "<h1>日本</h1><p>tëxt"),
        ("x.jsonl", '{"text": "tëxt\\n", "title": "日本"}\n"b"\n'),
    ],
)
def test_a_child_gives_what_the_parser_gives(name: str, text: str) -> None:
    data = text.encode()
    assert parse_in_child(Path(name), data, LIMITS) == parse(Path(name), data, LIMITS)


def test_a_long_text_is_parsed_by_a_child() -> None:
    text = f"# Title\n{'word ' * SHORT_BYTES}"
    records = parse_in_child(Path("x.md"), text.encode(), LIMITS)
    assert records == [ParsedRecord("", "Title", text)]


def test_a_bad_file_gives_the_reason_and_the_next_is_read() -> None:
    with pytest.raises(CorpusError, match="line 2 has 1 fields, the header has 2"):
        parse_in_child(Path("x.csv"), b"a,b\n1\n", LIMITS)
    assert parse_in_child(Path("x.csv"), b"a\n1\n", LIMITS)[0].text == "a: 1"


def test_a_kind_without_a_parser_is_refused() -> None:
    with pytest.raises(CorpusError, match=r"no parser for \.exe"):
        parse_in_child(Path("x.exe"), b"MZ", LIMITS)


@pytest.mark.parametrize(
    ("name", "data"), [("x.pdf", shared_pages(3_000)), ("x.docx", many_paragraphs(300_000))]
)
def test_a_file_that_takes_too_long_is_given_up(name: str, data: bytes) -> None:
    began_s = time.monotonic()
    with pytest.raises(CorpusError, match=r"longer than 1 s; split it, or raise library\.parse_s"):
        parse_in_child(Path(name), data, ParseLimits(seconds=1.0))
    assert time.monotonic() - began_s < 10.0
    assert parse_in_child(Path("x.csv"), b"a\n1\n", LIMITS)[0].text == "a: 1"


def test_a_file_that_takes_too_much_memory_is_given_up() -> None:
    with pytest.raises(CorpusError, match=r"more than 512 MiB of memory|its parser died of it"):
        parse_in_child(Path("x.docx"), wide_cell(400_000_000), ParseLimits(memory_bytes=512 << 20))


def test_a_file_that_gives_too_much_text_is_given_up() -> None:
    data = f"{'n' * 50_000}\n".encode() + b"1\n" * 1_500  # 75 MB, above ROOM_BYTES
    with pytest.raises(CorpusError, match="more than 1,000 characters of text"):
        parse_in_child(Path("x.csv"), data, ParseLimits(text_chars=1_000))


def test_what_the_caller_raises_while_it_waits_ends_the_parsing() -> None:
    def stop() -> None:
        raise KeyboardInterrupt

    began_s = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        parse_in_child(Path("x.pdf"), shared_pages(3_000), LIMITS, stop)
    assert time.monotonic() - began_s < 10.0


def test_a_parser_that_dies_is_the_fault_of_its_file(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = ParserPool()
    children: list[ParserChild] = []
    monkeypatch.setattr(ParserPool, "_take", lambda self: children[-1])
    children.append(ParserChild())

    def kill() -> None:
        os.kill(children[-1].pid, signal.SIGSEGV)

    with pytest.raises(CorpusError, match=r"its parser died of it \(SIGSEGV\)"):
        pool.ask("x.pdf", shared_pages(3_000), LIMITS, kill)
    assert not children[-1].is_alive


def test_a_child_that_left_by_itself_is_replaced() -> None:
    pool = ParserPool()
    try:
        assert pool.ask("x.csv", b"a\n1\n", LIMITS, lambda: None)[0].text == "a: 1"
        (child,) = pool.idle
        child.let_go()
        assert pool.ask("x.csv", b"a\n2\n", LIMITS, lambda: None)[0].text == "a: 2"
        assert pool.idle != [child]
    finally:
        pool.close()


def test_fields_of_json_are_read_by_a_child() -> None:
    assert read_fields('{"text": "tëxt", "k": 5, "title": null}'.encode()) == {
        "text": "tëxt",
        "k": 5,
        "title": None,
    }
    with pytest.raises(CorpusError, match="not valid JSON"):
        read_fields(b"[" * 100_000)
    with pytest.raises(CorpusError, match="valid Unicode"):
        read_fields(b'{"text": "\\ud800"}')
