"""Small files that ask a parser for minutes or gigabytes."""

import io
import zipfile

WORD = "http://schemas.openxmlformats.org/wordprocessingml/2006/main"
TYPES = (
    '<Types xmlns="http://schemas.openxmlformats.org/package/2006/content-types">'
    '<Default Extension="rels" '
    'ContentType="application/vnd.openxmlformats-package.relationships+xml"/>'
    '<Override PartName="/word/document.xml" ContentType="application/vnd.openxmlformats-'
    'officedocument.wordprocessingml.document.main+xml"/></Types>'
)
RELATIONS = (
    '<Relationships xmlns="http://schemas.openxmlformats.org/package/2006/relationships">'
    '<Relationship Id="r1" Type="http://schemas.openxmlformats.org/officeDocument/2006/'
    'relationships/officeDocument" Target="word/document.xml"/></Relationships>'
)


def make_word_file(body: str) -> bytes:
    """A .docx whose document has this body."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("[Content_Types].xml", TYPES)
        archive.writestr("_rels/.rels", RELATIONS)
        archive.writestr(
            "word/document.xml",
            f'<w:document xmlns:w="{WORD}"><w:body>{body}</w:body></w:document>',
        )
    return file.getvalue()


def wide_cell(columns: int) -> bytes:
    """A table of one cell that says it spans so many columns."""
    span = f'<w:tcPr><w:gridSpan w:val="{columns}"/></w:tcPr>'
    cell = f"<w:tc>{span}<w:p><w:r><w:t>x</w:t></w:r></w:p></w:tc>"
    return make_word_file(f"<w:tbl><w:tr>{cell}</w:tr></w:tbl>")


def many_paragraphs(num: int) -> bytes:
    return make_word_file("<w:p/>" * num)


def shared_pages(num: int, words: int = 20_000) -> bytes:
    """A PDF of many pages that share one stream of text."""
    stream = b"BT /F1 12 Tf 72 720 Td " + b"(word) Tj 0 -1 Td " * words + b"ET"
    kids = b" ".join(b"5 0 R" for _ in range(num))
    font = b"<< /Font << /F1 << /Type /Font /Subtype /Type1 /BaseFont /Helvetica >> >> >>"
    objects = [
        b"<< /Type /Catalog /Pages 2 0 R >>",
        b"<< /Type /Pages /Kids [%s] /Count %d >>" % (kids, num),
        b"<< /Length %d >>\nstream\n%s\nendstream" % (len(stream), stream),
        b"<< >>",
        b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents 3 0 R /Resources %s >>"
        % font,
    ]
    out, places = bytearray(b"%PDF-1.4\n"), []
    for number, each in enumerate(objects, 1):
        places.append(len(out))
        out += b"%d 0 obj\n%s\nendobj\n" % (number, each)
    start = len(out)
    out += b"xref\n0 %d\n0000000000 65535 f \n" % (len(objects) + 1)
    out += b"".join(b"%010d 00000 n \n" % place for place in places)
    out += b"trailer\n<< /Size %d /Root 1 0 R >>\nstartxref\n%d\n%%%%EOF\n" % (
        len(objects) + 1,
        start,
    )
    return bytes(out)
