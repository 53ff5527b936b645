"""JSON, YAML, reStructuredText, source code, workbooks, slides and books become text."""

import io
import json
import zipfile
from pathlib import Path

import pytest

from kvweave.corpus.parsers import ParsedRecord, ParseLimits, parse
from kvweave.errors import CorpusError

LIMITS = ParseLimits()


def read(name: str, data: bytes | str) -> list[ParsedRecord]:
    return parse(Path(name), data.encode() if isinstance(data, str) else data, LIMITS)


def test_a_list_of_objects_with_text_is_a_document_each() -> None:
    rows = [{"id": "z", "title": "Zorb", "text": "14 cm."}, {"id": "b", "text": "A blint."}]
    records = read("tools.json", json.dumps(rows))
    assert [(r.key, r.title, r.text) for r in records] == [
        ("id:z", "Zorb", "14 cm."),
        ("id:b", "tools", "A blint."),
    ]
    (z, b) = read("tools.yaml", "- {id: z, title: Zorb, text: 14 cm.}\n- {id: b, text: A blint.}")
    assert (z.title, b.text) == ("Zorb", "A blint.")


def test_other_values_are_lines_with_the_way_to_them() -> None:
    value = {"title": "Setup", "server": {"port": 8321, "hosts": ["a", "b"]}, "empty": None}
    (record,) = read("setup.json", json.dumps(value))
    assert record.title == "Setup"
    assert "server › port: 8321" in record.text
    assert "server › hosts › 2: b" in record.text
    assert "empty" not in record.text
    text = "title: Setup\nserver:\n  port: 8321\n  hosts: [a, b]\n"
    (same,) = read("setup.yml", text)
    assert same.text == record.text
    (two,) = read("two.yaml", "a: 1\n---\nb: 2\n")
    assert two.text == "1 › a: 1\n2 › b: 2"


@pytest.mark.parametrize(
    ("name", "data", "says"),
    [
        ("a.json", "{", "not valid JSON"),
        ("a.json", "[" * 5000 + "]" * 5000, "not valid JSON|nested over 200 deep"),
        ("a.json", "{}", "no text in it"),
        ("a.yaml", "a: [", "not valid YAML"),
        ("a.yaml", "!!python/object/apply:os.system ['true']", "not valid YAML"),
        ("a.yaml", "&a [*a]", "nested over 200 deep|more than"),
        ("a.xlsx", "no zip", "broken Excel workbook"),
        ("a.pptx", "no zip", "broken PowerPoint presentation"),
        ("a.epub", "no zip", "broken EPUB"),
    ],
)
def test_a_bad_file_gives_its_reason(name: str, data: str, says: str) -> None:
    with pytest.raises(CorpusError, match=says) as seen:
        read(name, data)
    assert "\n" not in str(seen.value)


def test_aliases_of_yaml_do_not_grow_without_bound() -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 9)]
    with pytest.raises(CorpusError, match="more than 1,000,000 values"):
        read("bomb.yaml", "\n".join(lines))


RST = """\
=======
Drains
=======

To drain a node, cordon it.

Pods
----
Evict the pods::

    kubectl drain
    ------

Why
~~~
Because.

Nodes
-----
They come back.
"""


def test_titles_of_restructured_text_are_headings() -> None:
    (record,) = read("drain.rst", RST)
    assert record.title == "Drains"
    lines = record.text.splitlines()
    for heading in ("# Drains", "## Pods", "### Why", "## Nodes"):
        assert heading in lines
    assert "    ------" in lines, "what is indented is no title"
    (plain,) = read("plain.rst", "Just text.\n")
    assert (plain.title, plain.text.strip()) == ("plain", "Just text.")


def test_source_code_stays_as_it_is_with_room_between_its_parts() -> None:
    code = "import os\ndef one():\n    return 1\n# of two\ndef two():\n    return 2\n"
    (record,) = read("tool.py", code)
    assert record.title == "tool.py"
    assert record.text == (
        "import os\n\ndef one():\n    return 1\n# of two\ndef two():\n    return 2"
    )
    for name in ("a.js", "a.ts", "a.go", "a.rs", "a.java", "a.c", "a.cpp", "a.h", "a.sh", "a.sql"):
        assert read(name, "func x")[0].text == "func x"


def test_a_workbook_is_a_document_for_each_sheet_or_row() -> None:
    openpyxl = pytest.importorskip("openpyxl", reason="make test installs it")
    book = openpyxl.Workbook()
    prices = book.active
    prices.title = "Prices"
    for row in (["tool", "price"], ["zorb", 14], ["blint", None]):
        prices.append(row)
    faq = book.create_sheet("FAQ")
    for row in (["id", "title", "text"], ["q1", "Width", "A zorb is 14 cm wide."]):
        faq.append(row)
    book.create_sheet("Empty")
    kept = io.BytesIO()
    book.save(kept)
    records = {r.title: r.text for r in read("shop.xlsx", kept.getvalue())}
    assert records == {
        "shop: Prices": "tool: zorb; price: 14\ntool: blint",
        "Width": "A zorb is 14 cm wide.",
    }


def test_slides_come_in_order_with_tables_and_notes() -> None:
    pptx = pytest.importorskip("pptx", reason="make test installs it")
    deck = pptx.Presentation()
    first = deck.slides.add_slide(deck.slide_layouts[1])
    first.shapes.title.text = "Zorbs"
    first.placeholders[1].text = "A zorb is 14 cm wide."
    first.notes_slide.notes_text_frame.text = "Say it slowly."
    second = deck.slides.add_slide(deck.slide_layouts[6])
    size = [pptx.util.Inches(n) for n in (1, 1, 4, 1)]
    table = second.shapes.add_table(1, 2, *size).table
    table.cell(0, 0).text, table.cell(0, 1).text = "zorb", "14"
    kept = io.BytesIO()
    deck.save(kept)
    (record,) = read("talk.pptx", kept.getvalue())
    parts = ["# Zorbs", "A zorb is 14 cm wide.", "Say it slowly.", "# Slide 2", "zorb | 14"]
    assert [part for part in record.text.split("\n\n") if part] == parts


CONTAINER = '<container><rootfiles><rootfile full-path="O/book.opf"/></rootfiles></container>'
PACKAGE = """<package xmlns="http://www.idpf.org/2007/opf"
 xmlns:dc="http://purl.org/dc/elements/1.1/"><metadata><dc:title>On zorbs</dc:title></metadata>
 <manifest><item id="b" href="two.xhtml" media-type="application/xhtml+xml"/>
 <item id="a" href="ch%201/one.xhtml" media-type="application/xhtml+xml"/>
 <item id="c" href="cover.xhtml" media-type="application/xhtml+xml"/>
 <item id="p" href="p.png" media-type="image/png"/></manifest>
 <spine><itemref idref="c"/><itemref idref="a"/><itemref idref="b"/><itemref idref="p"/></spine>
 </package>"""


def make_book(**changes: str) -> bytes:
    files = {
        "META-INF/container.xml": CONTAINER,
        "O/book.opf": PACKAGE,
        "O/ch 1/one.xhtml": "<html><body><h1>One</h1><p>A zorb.</p></body></html>",
        "O/two.xhtml": "<html><body><h1>Two</h1><p>A blint.</p></body></html>",
        "O/cover.xhtml": "<html><body><img src='p.png'/></body></html>",
        **changes,
    }
    kept = io.BytesIO()
    with zipfile.ZipFile(kept, "w") as book:
        for name, text in files.items():
            book.writestr(name, text)
    return kept.getvalue()


def test_a_book_is_read_in_its_own_order() -> None:
    (record,) = read("zorbs.epub", make_book())
    assert record.title == "On zorbs"
    assert record.text == "# One\n\nA zorb.\n\n# Two\n\nA blint."


def test_a_book_that_declares_entities_is_refused() -> None:
    bomb = '<!DOCTYPE x [<!ENTITY a "aaaa">]>' + PACKAGE
    with pytest.raises(CorpusError, match="declares entities"):
        read("bomb.epub", make_book(**{"O/book.opf": bomb}))


@pytest.mark.parametrize("name", ["a.xlsx", "a.pptx", "a.epub"])
def test_an_archive_that_unpacks_to_too_much_is_refused_before_it_is(name: str) -> None:
    kept = io.BytesIO()
    with zipfile.ZipFile(kept, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x", b"0" * (1 << 20))
    with pytest.raises(CorpusError, match="unpacks to 1 MiB"):
        parse(Path(name), kept.getvalue(), ParseLimits(text_chars=1000))
