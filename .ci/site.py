"""Hooks of mkdocs.yml: pages of the repository's root join the site, and links fit it.

The pages are written for a reader of the repository. On the site README.md is the first page, the
pictures of results lie beside the pages, and what is in the repository alone is named, not linked.
"""

import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

REPO = Path(__file__).resolve().parents[1]
PAGES = {
    "README.md": "index.md",
    "ARCHITECTURE.md": "architecture.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "bench/README.md": "benches.md",
}
SOURCES = {site: source for source, site in PAGES.items()}
WORKER = ".ci/file_worker.js"  # in place of one that the theme takes from elsewhere
FOREIGN = re.compile(r"https://unpkg\.com/iframe-worker/shim")


def on_files(files: Files, config: Any) -> Files:
    for source, site in PAGES.items():
        files.append(File.generated(config, site, abs_src_path=str(REPO / source)))
    for picture in sorted((REPO / "bench" / "results").glob("*.svg")):
        name = f"results/{picture.name}"
        files.append(File.generated(config, name, abs_src_path=str(picture)))
    files.append(File.generated(config, "file_worker.js", abs_src_path=str(REPO / WORKER)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Point every relative link at its place on the site. The changelog, which has a word of
    everything, is found by its page and not by its words."""
    if page.file.src_uri == "changelog.md":
        page.meta["search"] = {"exclude": True}
    source = REPO / SOURCES.get(page.file.src_uri, f"docs/{page.file.src_uri}")

    def on_the_site(found: re.Match[str]) -> str:
        mark, words, target, anchor = found.groups("")
        path = (source.parent / target).resolve().relative_to(REPO).as_posix()
        if path in PAGES:
            return f"{mark}[{words}]({PAGES[path]}{anchor})"
        if path.startswith("docs/"):
            return f"{mark}[{words}]({path.removeprefix('docs/')}{anchor})"
        if path.startswith("bench/results/") and path.endswith(".svg"):
            return f"{mark}[{words}]({path.removeprefix('bench/')})"
        return words if path in words else f"{words} (`{path}`)"

    return re.sub(r"(!?)\[([^\[\]]*)\]\(([^)#:\s]+)(#[^)\s]*)?\)", on_the_site, markdown)


def on_post_page(output: str, **_: Any) -> str:
    return FOREIGN.sub("file_worker.js", output)


def on_post_template(output: str, **_: Any) -> str:
    """The page for addresses that lead nowhere, whose own links begin at the site's root."""
    return FOREIGN.sub("/file_worker.js", output)


def on_post_build(config: Any) -> None:
    """Refuse a site that a reader without a network, or one who is watched, could not read."""
    for page in Path(config.site_dir).rglob("*.html"):
        loaded = re.findall(
            r'<(?:script|img|link|iframe)[^>]+(?:src|href)="(?:https?:)?//[^"]+"', page.read_text()
        )
        if loaded:
            raise PluginError(f"{page.name} loads from elsewhere: {loaded[0]}")
