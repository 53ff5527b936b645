"""Says what is installed to serve kvweave: python .ci/sbom.py --out build/sbom.json [--table]

A software bill of materials in CycloneDX 1.5 JSON, made from the metadata of installed packages:
kvweave with the extras of the container image, and what they need in turn on this machine. --table
prints package, version and licence for docs/licences.md instead.
"""

import argparse
import json
import re
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime
from email.message import Message
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

EXTRAS = ("serve", "rag", "remote")  # of the container image, see Dockerfile
# packages whose metadata name no licence → what their source says
KNOWN: dict[str, str] = {}
# how metadata say it → SPDX
SPDX = {
    "apache 2.0": "Apache-2.0",
    "apache 2.0 license": "Apache-2.0",
    "apache license 2.0": "Apache-2.0",
    "apache license, version 2.0": "Apache-2.0",
    "apache-2.0 license": "Apache-2.0",
    "apache software license": "Apache-2.0",
    "apache": "Apache-2.0",
    "bsd": "BSD-3-Clause",
    "bsd license": "BSD-3-Clause",
    "bsd 3-clause": "BSD-3-Clause",
    "bsd-3-clause license": "BSD-3-Clause",
    "mit license": "MIT",
    "mozilla public license 2.0 (mpl 2.0)": "MPL-2.0",
    "python software foundation license": "PSF-2.0",
    "isc license (iscl)": "ISC",
}


def needed(name: str = "kvweave", extras: tuple[str, ...] = EXTRAS) -> list[Distribution]:
    """The package and what it needs, each once, by name."""
    found: dict[str, Distribution] = {}
    todo = [(name, extras)]
    seen: set[tuple[str, str]] = set()
    while todo:
        package, wanted = todo.pop()
        key = canonical(package)
        try:
            there = distribution(package)
        except PackageNotFoundError:
            continue  # an extra that is not installed here
        found[key] = there
        for extra in ("", *wanted):
            if (key, extra) in seen:
                continue
            seen.add((key, extra))
            todo += list(requirements(there, extra))
    return [found[key] for key in sorted(found)]


def requirements(of: Distribution, extra: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    for line in of.requires or ():
        requirement = Requirement(line)
        marker = requirement.marker
        plain = marker is None or marker.evaluate({"extra": ""})
        if plain if not extra else (not plain and marker and marker.evaluate({"extra": extra})):
            yield requirement.name, tuple(sorted(requirement.extras))


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def licence_of(package: Distribution) -> str:
    """As SPDX has it where that is known; else as the package says it, in one line."""
    said: Message = package.metadata  # type: ignore[assignment]
    name = canonical(str(said["Name"]))
    if name in KNOWN:
        return KNOWN[name]
    if expression := said.get("License-Expression"):
        return str(expression)
    classifiers = [
        str(each).rpartition("::")[2].strip()
        for each in said.get_all("Classifier") or ()
        if str(each).startswith("License ::")
    ]
    text = str(said.get("License") or "").strip().splitlines()
    first = text[0].strip() if text else ""
    for words in (first, *classifiers):
        if words.lower() in SPDX:
            return SPDX[words.lower()]
    if first and len(first) < 60 and first.upper() != "UNKNOWN":
        return first
    return classifiers[0] if classifiers else "unknown"


def bill(packages: list[Distribution]) -> dict[str, Any]:
    """The bill of materials, for machines."""
    components = []
    own: dict[str, Any] = {}
    for package in packages:
        name, version = canonical(package.metadata["Name"]), package.version
        component = {
            "type": "library",
            "bom-ref": f"pkg:pypi/{name}@{version}",
            "name": name,
            "version": version,
            "purl": f"pkg:pypi/{name}@{version}",
            "licenses": [_licence(licence_of(package))],
        }
        if name == "kvweave":
            own = {**component, "type": "application"}
        else:
            components.append(component)
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "serialNumber": f"urn:uuid:{uuid.uuid4()}",
        "version": 1,
        "metadata": {
            "timestamp": datetime.now(UTC).isoformat(timespec="seconds"),
            "component": own,
        },
        "components": components,
    }


def _licence(words: str) -> dict[str, Any]:
    if re.search(r"\b(AND|OR|WITH)\b", words):
        return {"expression": words}
    kind = "id" if words in SPDX.values() or re.fullmatch(r"[A-Za-z0-9.+-]+", words) else "name"
    return {"license": {kind: words}}


def table(packages: list[Distribution]) -> str:
    """For people: docs/licences.md."""
    rows = [
        f"| {canonical(p.metadata['Name'])} | {p.version} | {licence_of(p)} |"
        for p in packages
        if canonical(p.metadata["Name"]) != "kvweave"
    ]
    return "\n".join(["| package | version | licence |", "|---|---|---|", *rows])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="file for the bill of materials")
    parser.add_argument("--table", action="store_true", help="print a table for people instead")
    args = parser.parse_args()
    packages = needed()
    if args.table:
        print(table(packages))
        return
    text = json.dumps(bill(packages), indent=1)
    if args.out is None:
        print(text)
        return
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(text + "\n")
    print(f"{len(packages)} packages in {args.out}")


if __name__ == "__main__":
    main()
