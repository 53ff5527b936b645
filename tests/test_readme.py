"""What the front pages promise is there."""

import re
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[1]
PAGES = [REPO / "README.md", REPO / "ARCHITECTURE.md", REPO / "CONTRIBUTING.md"]
PAGES += sorted((REPO / "docs").glob("*.md"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_relative_link_leads_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


def anchors_of(page: Path) -> set[str]:
    """As GitHub and the site make them of headings."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    plain = (re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading) for heading in headings)
    return {re.sub(r"[^\w\- ]", "", each.lower()).strip().replace(" ", "-") for each in plain}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_to_a_heading_finds_it(page: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#:]*)#([^)]+)\)", page.read_text()):
        to = page.parent / target if target else page
        assert anchor in anchors_of(to), f"{page.name} links to {target}#{anchor}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_page_has_a_hole_in_it(page: Path) -> None:
    assert not re.search(r"^NUMBERS$|@@\w+@@|\bTBD\b|lorem ipsum", page.read_text(), re.MULTILINE)


def test_every_file_the_map_names_exists() -> None:
    text = (REPO / "ARCHITECTURE.md").read_text()
    named = set(re.findall(r"`((?:[a-z_]+/)+[a-z_]+\.py)`", text))
    assert len(named) > 15
    for name in named:
        places = [REPO / "src" / "kvweave" / name, REPO / name]
        assert any(place.is_file() for place in places), f"ARCHITECTURE.md names {name}"


def test_the_front_page_counts_what_the_default_model_was_measured_on() -> None:
    page = (REPO / "docs" / "calibration.md").read_text()
    section = page.split("## What Qwen2.5-Coder-0.5B comes with")[1].split("\n## ")[0]
    counts = [
        int(n) for n in re.findall(r"^\| [^|]*[A-Za-z][^|]* \| (\d+) \|", section, re.MULTILINE)
    ]
    assert len(counts) == 10
    assert f"measured on {sum(counts):,} prompts" in (REPO / "README.md").read_text()
