"""docs/models.md tells the truth about what can be read."""

import re
from pathlib import Path

from kvweave.config import known_keys
from kvweave.model.files.embedded import DEFAULT, EMBEDDED, FALLBACK
from kvweave.model.files.gguf.config import ARCHITECTURES
from kvweave.model.files.gguf.packings import PACKINGS
from kvweave.model.files.hub_file import HubFile
from kvweave.model.files.sources import Source
from kvweave.model.files.wheels import JoinedWheels, WholeWheel

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
        rows = [line for line in PAGE.splitlines() if line.startswith(f"| `{model.name}` | ")]
        assert any(f"| {model.licence} |" in row for row in rows), model.name
        for source in model.sources:
            assert any(_named(source) in row for row in rows), source.label


def _named(source: Source) -> str:
    """As the page writes it."""
    if isinstance(source, HubFile):
        return f"`{source.repo}`"
    wheels = [source.wheel] if isinstance(source, WholeWheel) else []
    wheels += [part.wheel for part in source.parts] if isinstance(source, JoinedWheels) else []
    names = f"`{wheels[0].name}`" + (f" … `-part{len(wheels)}`" if len(wheels) > 1 else "")
    return f"{names} {wheels[0].version}"


def test_the_page_and_the_settings_name_the_default_and_the_fallback() -> None:
    assert f"`{DEFAULT}` answers where you name no model" in PAGE
    assert known_keys()["model.model"].unset.split(" ")[:3] == [f"{DEFAULT},", "or", FALLBACK]
