"""Each kind of file gives its text; each kind of bad file gives a reason."""

import io
import json
import time
import zipfile
from pathlib import Path

import pytest

from kvweave.corpus.parsers import ENDINGS, ParsedRecord, ParseLimits, parse, read_bytes
from kvweave.errors import CorpusError

LIMITS = ParseLimits()


def read(name: str, data: bytes | str, limits: ParseLimits = LIMITS) -> list[ParsedRecord]:
    return parse(Path(name), data.encode() if isinstance(data, str) else data, limits)


def make_pdf(*pages: str, password: str | None = None, title: str = "") -> bytes:
    """A PDF with a text layer, written by hand: pypdf reads but does not draw."""
    objects = [b"<< /Type /Catalog /Pages 2 0 R >>", b""]
    kids = []
    for text in pages:
        stream = f"BT /F1 12 Tf 72 720 Td ({text}) Tj ET".encode()
        objects.append(b"<< /Length %d >>\nstream\n%s\nendstream" % (len(stream), stream))
        font = b"<< /Font << /F1 << /Type /Font /Subtype /Type1 /BaseFont /Helvetica >> >> >>"
        objects.append(
            b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents %d 0 R"
            b" /Resources %s >>" % (len(objects), font)
        )
        kids.append(b"%d 0 R" % len(objects))
    objects[1] = b"<< /Type /Pages /Kids [%s] /Count %d >>" % (b" ".join(kids), len(pages))
    out, offsets = bytearray(b"%PDF-1.4\n"), []
    for number, body in enumerate(objects, start=1):
        offsets.append(len(out))
        out += b"%d 0 obj\n%s\nendobj\n" % (number, body)
    table = len(out)
    out += b"xref\n0 %d\n0000000000 65535 f \n" % (len(objects) + 1)
    out += b"".join(b"%010d 00000 n \n" % offset for offset in offsets)
    said = f" /Info << /Title ({title}) >>".encode() if title else b""
    out += b"trailer << /Size %d /Root 1 0 R%s >>\n" % (len(objects) + 1, said)
    out += b"startxref\n%d\n%%%%EOF" % table
    if password is None:
        return bytes(out)
    from pypdf import PdfReader, PdfWriter

    writer = PdfWriter(clone_from=PdfReader(io.BytesIO(bytes(out))))
    writer.encrypt(password, algorithm="RC4-128")
    sealed = io.BytesIO()
    writer.write(sealed)
    return sealed.getvalue()


def make_docx() -> bytes:
    import docx

    document = docx.Document()
    document.add_heading("Drain", level=1)
    document.add_paragraph("Cordon the node.")
    table = document.add_table(rows=1, cols=2)
    table.rows[0].cells[0].text, table.rows[0].cells[1].text = "node", "ready"
    document.add_paragraph("Then evict.")
    out = io.BytesIO()
    document.save(out)
    return out.getvalue()


def test_plain_text_is_taken_as_it_is_and_named_after_the_file() -> None:
    assert read("notes.txt", "a\r\nb\n") == [ParsedRecord("", "notes", "a\nb\n")]


@pytest.mark.parametrize(
    "text",
    [
        f"# x{' ' * 60_000}y",
        f"# x{' #' * 30_000}y",
        f"---\ntitle: x{' ' * 60_000}y\n---\ntext",
        f"---{' ' * 60_000}y\n" * 3,
        "\n#" * 60_000,
    ],
)
def test_a_title_is_found_in_a_time_that_grows_with_the_text(text: str) -> None:
    """Twice the blanks took four times as long: 22 s for the first of these."""
    began_s = time.process_time()
    read("x.md", text)
    assert time.process_time() - began_s < 1.0


def test_markdown_takes_its_title_from_front_matter_or_the_first_heading() -> None:
    assert read("x.md", "# Drain a node\n\ntext")[0].title == "Drain a node"
    assert read("x.md", "text\n## Second\n#no\n#\tFirst ## \n# Next")[0].title == "First"
    assert read("x.md", "#   \n# ##\n")[0].title == "#"
    assert read("x.md", "---\ntitle:  \n---\ntext\n# Other")[0].title == "Other"
    assert read("x.md", "no heading # here")[0].title == "x"
    assert read("x.md", '---\ntitle: "Taints"\n---\n# Other\n') == [
        ParsedRecord("", "Taints", "# Other\n")
    ]


def test_html_keeps_headings_lists_code_and_tables_and_drops_scripts_and_menus() -> None:
    page = """<html><head><title>Site</title><script>bad()</script></head><body><nav>menu</nav>
    <h1>Drain  a <b>node</b></h1><p>First cordon.<br>Then <a href=x>evict</a>.</p>tail
    <ul><li>one<li>two</ul><pre>if x:\n    y()</pre>
    <table><tr><th>a</th><th>b</th></tr><tr><td>1</td><td>2</td></tr></table></body></html>"""
    (record,) = read("x.html", page)
    assert record.title == "Drain a node"
    assert record.text == (
        "# Drain a node\n\nFirst cordon.\nThen evict.\n\ntail\n\n- one\n- two\n\n"
        "if x:\n    y()\n\na | b\n1 | 2"
    )


def test_html_nested_deeper_than_python_recurses_is_no_trouble() -> None:
    assert read("x.html", "<div>" * 4000 + "deep")[0].text == "deep"


def test_html_in_a_declared_encoding_is_read_in_it() -> None:
    page = '<meta charset="iso-8859-1"><p>Größe</p>'.encode("latin-1")
    assert read("x.html", page)[0].text == "Größe"


FILLERS = ["untitled", "Untitled-1", "\\(anonymous\\)", "Microsoft Word - minutes.doc", "Document1"]


@pytest.mark.parametrize("filler", [*FILLERS, "untitled.pdf", " . ", "PowerPoint Presentation"])
def test_a_pdf_with_a_fillers_title_is_called_by_its_file(filler: str) -> None:
    (record,) = read("minutes.pdf", make_pdf("Cordon the node", title=filler))
    assert record.title == "minutes"
    (record,) = read("minutes.pdf", make_pdf("Cordon the node", title="Document of the valley"))
    assert record.title == "Document of the valley"


def test_an_anchor_is_no_part_of_a_title() -> None:
    assert read("x.md", "# Drain a node {#drain}\n\ntext")[0].title == "Drain a node"
    assert read("x.md", "# Drain {#drain .new} ##\n\ntext")[0].title == "Drain"
    assert read("x.md", "# Sets {a, b}\n\ntext")[0].title == "Sets {a, b}"


def test_a_pdf_gives_the_text_of_all_its_pages() -> None:
    (record,) = read("x.pdf", make_pdf("Cordon the node", "Then evict"))
    assert record.text.split() == ["Cordon", "the", "node", "Then", "evict"]


def test_a_table_with_a_text_column_is_a_document_per_row() -> None:
    records = read("x.csv", 'id,title,text\n7,Drain,Cordon first\n8,Taint,"a, b"\n')
    assert records == [
        ParsedRecord("id:7", "Drain", "Cordon first"),
        ParsedRecord("id:8", "Taint", "a, b"),
    ]


def test_rows_carry_metadata_of_their_own() -> None:
    table = "text,metadata.year,Metadata.kind,metadata\nA zorb.,2024,tool,x\nA blint.,,,\n"
    first, second = read("x.csv", table)
    assert (json.loads(first.metadata), second.metadata) == ({"kind": "tool", "year": 2024}, "")
    rows = [{"text": "A zorb.", "metadata": {"year": 2024, "kind": "7"}}, {"text": "A blint."}]
    for name, data in (
        ("x.jsonl", "\n".join(map(json.dumps, rows))),
        ("x.json", json.dumps(rows)),
    ):
        first, second = read(name, data)
        assert json.loads(first.metadata) == {"kind": "7", "year": 2024}, "a text stays one"
        assert second.metadata == ""


@pytest.mark.parametrize(
    ("name", "data", "says"),
    [
        ("x.jsonl", '"a"\n{"text": "b", "metadata": "c"}', "line 2: metadata is no object"),
        ("x.jsonl", '{"text": "b", "metadata": {"a b": 1}}', "line 1: 'a b' is no key"),
        ("x.json", '[{"text": "b", "metadata": {"a": [1]}}]', "object 1: "),
        ("x.csv", "text,metadata.a b\nx,1\n", "row 1: 'a b' is no key"),
    ],
)
def test_metadata_that_cannot_be_names_its_row(name: str, data: str, says: str) -> None:
    with pytest.raises(CorpusError) as seen:
        read(name, data)
    assert says in str(seen.value)


def test_another_table_is_one_document_with_a_line_per_row() -> None:
    (record,) = read("nodes.csv", "name;state\nn1;ready\nn2;\n")
    assert record == ParsedRecord("", "nodes", "name: n1; state: ready\nname: n2")


def test_json_lines_are_a_document_each_and_keep_their_keys_when_others_move() -> None:
    a, b = '{"title": "A", "text": "alpha"}', '{"content": "beta"}'
    first, second = read("x.jsonl", f"{a}\n\n{b}\n")
    assert (first.title, first.text, second.title, second.text) == ("A", "alpha", "x", "beta")
    assert set(read("x.jsonl", f'{b}\n"gamma"\n{a}')) > {first, second}


def test_two_equal_lines_are_two_records() -> None:
    assert len({r.key for r in read("x.jsonl", '{"text": "a"}\n{"text": "a"}\n"a"')}) == 3


def test_a_word_document_gives_paragraphs_and_tables_in_order() -> None:
    (record,) = read("x.docx", make_docx())
    assert record == ParsedRecord(
        "", "Drain", "# Drain\n\nCordon the node.\n\nnode | ready\n\nThen evict."
    )


def test_utf_16_with_its_mark_is_read() -> None:
    assert read("x.txt", "Größe".encode("utf-16"))[0].text == "Größe"


@pytest.mark.parametrize(
    ("name", "data", "reason"),
    [
        ("x.pdf", make_pdf("secret", password="s3cret"), "encrypted PDF; remove its password"),
        ("x.pdf", make_pdf("text")[:200], "broken PDF"),
        ("x.pdf", bytes(range(256)) * 40, "broken PDF"),
        ("x.pdf", make_pdf(""), "without a text layer"),
        ("x.txt", bytes(range(256)) * 4, "binary data"),
        ("x.txt", b"\x01\x02\x03\x7f" * 50, "binary data"),
        ("x.txt", b"caf\xe9 au lait", r"not valid UTF-8 \(byte 3\)"),
        ("x.md", b" \n\t\n", "no text"),
        ("x.html", b"<p>caf\xe9</p>", "not valid UTF-8"),
        ("x.html", b"<script>only()</script>", "no text"),
        ("x.html", b"<div>" * 100_000, "nested over 4,096 deep"),
        ("x.csv", "a,b\n1,2\n3\n", "line 3 has 1 fields, the header has 2"),
        ("x.csv", "a,b\n1,2,3\n", "line 2 has 3 fields, the header has 2"),
        ("x.csv", 'a,b\n1,"2', "not valid CSV"),
        ("x.csv", "\n\n", "no header row"),
        ("x.csv", "id,text\n1,\n", "no text"),
        ("x.jsonl", '{"text": "ok"}\n{broken', "line 2 is not JSON"),
        ("x.jsonl", '{"text": "ok"}\n{"title": "no"}', "line 2 has no text"),
        ("x.jsonl", '{"text": "half \\ud800 pair"}', "surrogate"),
        ("x.jsonl", "[" * 100_000, "line 1 is not JSON"),
        ("x.docx", b"PK\x03\x04 not a zip", "broken Word document"),
        ("x.xyz", "text", r"no parser for \.xyz; known: \.txt"),
    ],
)
def test_a_bad_file_gives_its_reason(name: str, data: bytes | str, reason: str) -> None:
    with pytest.raises(CorpusError, match=reason):
        read(name, data)


def test_a_zip_bomb_is_refused_before_it_is_unpacked() -> None:
    bomb = io.BytesIO()
    with zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("word/document.xml", b" " * 4_000_000)
    with pytest.raises(CorpusError, match="unpacks to 4 MiB"):
        read("x.docx", bomb.getvalue(), ParseLimits(text_chars=1_000_000))


def test_a_file_over_the_limit_is_refused_without_reading_it(tmp_path: Path) -> None:
    huge = tmp_path / "huge.txt"
    with huge.open("wb") as file:
        file.truncate(200 << 20)  # 200 MiB, sparse
    with pytest.raises(CorpusError, match="200 MiB is over the limit of 64 MiB"):
        read_bytes(huge, LIMITS)


def test_an_empty_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").touch()
    with pytest.raises(CorpusError, match="empty"):
        read_bytes(tmp_path / "empty.txt", LIMITS)
    with pytest.raises(CorpusError, match="not a regular file"):
        read_bytes(tmp_path, LIMITS)


def test_every_ending_has_its_parser() -> None:
    for ending in ENDINGS:
        with pytest.raises(CorpusError):
            read(f"x{ending}", b"\0")


def test_a_form_is_part_of_the_page() -> None:
    (record,) = read("a.html", "<form><p>Fill in the claim.</p><button>Send</button></form>")
    assert record.text == "Fill in the claim."


def test_a_page_with_an_impossible_encoding_is_refused() -> None:
    with pytest.raises(CorpusError, match="the encoding that the page declares"):
        read("a.html", b"<meta charset=undefined><p>caf\xe9</p>")


@pytest.mark.parametrize("text", ['{"a": 1}', "[1]", "5", "true"])
def test_text_that_is_no_string_is_refused_by_line(text: str) -> None:
    with pytest.raises(CorpusError, match="line 2: the text is not a string"):
        read("a.jsonl", f'{{"text": "fine"}}\n{{"text": {text}}}\n')


def test_half_a_surrogate_pair_in_an_id_does_not_matter() -> None:
    rows = '{"id": "\\ud800", "text": "one"}\n{"id": "\\ud801", "text": "two"}\n'
    records = read("a.jsonl", rows)
    assert [record.text for record in records] == ["one", "two"]
    assert len({record.key.encode() for record in records}) == 2


def test_a_table_keeps_long_cells_and_columns_of_one_name() -> None:
    long = "x" * 200_000
    (record,) = read("a.csv", f"price,price,note\n1,2,{long}\n")
    assert record.text == f"price: 1; price 2: 2; note: {long}"
