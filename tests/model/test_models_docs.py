"""docs/models.md tells the truth about what can be read."""

import re
from pathlib import Path

from kvweave.model.files.embedded import EMBEDDED
from kvweave.model.files.gguf.config import ARCHITECTURES
from kvweave.model.files.gguf.packings import PACKINGS

PAGE = (Path(__file__).parents[2] / "docs" / "models.md").read_text(encoding="utf-8")


def item(heading: str) -> str:
    """One bullet of the page, its lines joined."""
    found = re.search(rf"- \*\*{heading}\*\*: (.*?)\n(?=- |\n)", PAGE, re.DOTALL)
    assert found is not None, heading
    return " ".join(found[1].split())


def test_the_page_names_every_tensor_type_and_no_other() -> None:
    assert set(item("Types").rstrip(".").split(", ")) == {p.name for p in PACKINGS.values()}


def test_the_page_names_every_architecture_and_no_other() -> None:
    assert set(re.findall(r"`(\w+)`", item("Architectures"))) == set(ARCHITECTURES)


def test_the_page_has_a_row_for_every_embedded_model() -> None:
    for model in EMBEDDED.values():
        facts = f"| {model.licence} | `{model.wheel}` {model.version} |"
        rows = [line for line in PAGE.splitlines() if line.startswith(f"| `{model.name}` | ")]
        assert any(facts in row for row in rows), model.name
