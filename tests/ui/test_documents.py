"""Documents: upload, look through, search, delete."""

from pathlib import Path

import httpx
from playwright.sync_api import expect

from worlds.browsing import Visiting
from worlds.page_servers import bring
from worlds.serving import KbServer


def test_documents_can_be_looked_through_and_searched(
    visit: Visiting, tiny: KbServer, notes: str
) -> None:
    with visit(tiny.url) as v:
        page = v.go(f"documents/{notes}")
        row = page.get_by_role("row").filter(has_text="Quotas")
        expect(row).to_contain_text("ready")
        page.get_by_label(f"Search {notes}").fill("quota limits namespace")
        page.get_by_role("button", name="Search").click()
        expect(page.locator(".hit").first).to_contain_text("A quota limits the pods")
        page.get_by_role("button", name="Clear").click()
        row.get_by_role("link", name="Quotas").click()
        page.locator(".chunk-list a").first.click()
        expect(page.locator(".chunk-text")).to_contain_text("A quota limits the pods")
        expect(page.get_by_text("Most alike")).to_be_visible()


def test_a_document_is_deleted_only_after_a_yes(visit: Visiting, empty: KbServer) -> None:
    for title in ("Keep", "Drop"):
        bring(empty.url, "box", title, f"{title} this passage about nodes.")
    with visit(empty.url) as v:
        page = v.go("documents/box")
        page.get_by_role("button", name="Delete Drop").click()
        dialog = page.get_by_role("dialog")
        expect(dialog).to_contain_text("“Drop” goes with its 1 chunk")
        expect(dialog.get_by_role("button", name="Keep")).to_be_focused()
        dialog.get_by_role("button", name="Keep").click()
        expect(page.get_by_role("row")).to_have_count(3)
        page.get_by_role("button", name="Delete Drop").click()
        dialog.get_by_role("button", name="Delete").click()
        expect(page.get_by_role("row")).to_have_count(2)
        listed = httpx.get(f"{empty.url}/v1/kb/box/documents").json()["data"]
        assert [each["title"] for each in listed] == ["Keep"]


def test_a_knowledge_base_is_deleted_only_after_a_yes(visit: Visiting, empty: KbServer) -> None:
    bring(empty.url, "old", "Only", "One passage about nodes.")
    with visit(empty.url) as v:
        page = v.go("documents/old")
        page.get_by_role("button", name="Delete the knowledge base old").click()
        page.get_by_role("dialog").get_by_role("button", name="Delete all of it").click()
        expect(page.get_by_role("heading", name="Make your first knowledge base")).to_be_visible()
        assert httpx.get(f"{empty.url}/v1/kb").json()["data"] == []


def test_a_file_that_cannot_be_read_is_named_with_the_reason(
    visit: Visiting, empty: KbServer, tmp_path: Path
) -> None:
    good, bad = tmp_path / "good.md", tmp_path / "bad.pdf"
    good.write_text("# Good\n\nA passage about nodes.\n")
    bad.write_bytes(b"this is no pdf")
    with visit(empty.url) as v:
        page = v.go("documents/mixed")
        page.locator("input[type=file]").set_input_files([good, bad])
        expect(page.locator(".upload")).to_contain_text("1 document added, 1 skipped")
        expect(page.locator(".upload")).to_contain_text("bad.pdf")


def test_when_all_files_are_refused_nothing_is_called_ready(
    visit: Visiting, empty: KbServer, tmp_path: Path
) -> None:
    bad = tmp_path / "bad.pdf"
    bad.write_bytes(b"this is no pdf")
    with visit(empty.url) as v:
        page = v.go("documents/refused")
        page.locator("input[type=file]").set_input_files([bad])
        told = page.locator(".upload")
        expect(told.get_by_role("alert")).to_contain_text(
            "Nothing was taken in: 1 file could not be read."
        )
        expect(told).to_contain_text("bad.pdf: broken PDF")
        expect(told).not_to_contain_text("Ready to be asked")
        v.keep("all-refused")


def test_endings_of_files_are_shown_on_a_click(visit: Visiting, empty: KbServer) -> None:
    with visit(empty.url) as v:
        page = v.go("documents/fresh")
        expect(page.locator(".drop")).to_contain_text("PDF, Word, Markdown, HTML")
        endings = page.locator(".drop details p")
        expect(endings).to_be_hidden()
        page.get_by_text("PDF, Word, Markdown, HTML").click()
        expect(endings).to_contain_text(".pdf")
        expect(endings).to_be_visible()


def test_files_can_be_dropped(visit: Visiting, empty: KbServer) -> None:
    drop = """(box) => { const transfer = new DataTransfer();
      transfer.items.add(new File(["# Dropped\\n\\nA passage about pods."], "dropped.md"));
      const options = { dataTransfer: transfer, bubbles: true, cancelable: true };
      box.dispatchEvent(new DragEvent("drop", options)); }"""
    with visit(empty.url) as v:
        page = v.go("documents/dropped")
        page.locator(".drop").evaluate(drop)
        expect(page.get_by_role("row").filter(has_text="Dropped")).to_be_visible()


def test_missing_kv_says_when_it_will_be_there_and_can_be_hurried(
    visit: Visiting, empty: KbServer
) -> None:
    """How long it takes is not in a test's hands, so what the server says of it is changed here."""
    bring(empty.url, "slow", "Only", "One passage about nodes.")
    told = httpx.get(f"{empty.url}/v1/kb/slow").json()
    making = {"state": "making", "chunks_done": 3, "chunks_total": 150, "eta_s": 700.0}
    told["kv"] |= making
    with visit(empty.url) as v:
        page = v.page
        page.route("**/v1/kb/slow", lambda route: route.fulfill(json=told))
        v.go("documents/slow")
        state = page.locator(".kv-state")
        expect(state).to_contain_text("3 of 150 chunks (2.0 %), about 12 min left")
        v.keep("kv-making")
        with page.expect_response("**/v1/kb/slow/prepare") as answered:
            state.get_by_role("button", name="Prepare now").click()
        assert answered.value.status == 202
        told["kv"]["hurried"] = True
        expect(state).to_contain_text("answers meanwhile are slower")
        expect(state.get_by_role("button", name="Prepare now")).to_have_count(0)


def test_whether_passages_may_move_is_chosen_there(visit: Visiting, empty: KbServer) -> None:
    bring(empty.url, "box", "Only", "One passage about nodes.")
    with visit(empty.url) as v:
        page = v.go("documents/box")
        page.get_by_label("Order of passages").select_option("free")
        expect(
            page.get_by_role("status").filter(has_text="Order of passages: free")
        ).to_be_attached()
        assert httpx.get(f"{empty.url}/v1/kb/box").json()["order"] == "free"
