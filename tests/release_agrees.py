"""What a release says of itself in four places is the same: the tag, the version, the changelog and the citation.

    python tests/release_agrees.py v0.2.0 [--notes FILE]      # what the changelog says of it goes into FILE

The standard library is enough, so that the workflow runs it before anything is built.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def found(pattern: str, path: str) -> str:
    """What the one place of a file says."""
    said = re.findall(pattern, (ROOT / path).read_text(encoding="utf-8"), re.MULTILINE)
    if len(said) != 1:
        raise SystemExit(f"{path} says {len(said)} times what it should say once: {pattern}")
    return said[0]


def changes(version: str) -> tuple[str, str]:
    """The date that the changelog gives a version, and what it says of it."""
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    heading = re.search(rf"^## {re.escape(version)} \((.+)\)$", text, re.MULTILINE)
    if heading is None:
        raise SystemExit(f"CHANGELOG.md has no heading '## {version} (date)'")
    return heading[1], text[heading.end() :].split("\n## ", 1)[0].strip() + "\n"


def disagreements(tag: str) -> list[str]:
    """What does not fit, in words."""
    version = found(r'^__version__ = "(.+)"$', "src/clearhead/__init__.py")
    said = [] if tag == f"v{version}" else [f"the tag is {tag}, the version {version}"]
    cited = found(r"^version: (.+)$", "CITATION.cff")
    if cited != version:
        said.append(f"CITATION.cff has {cited}, the version is {version}")
    date, day = changes(version)[0], found(r'^date-released: "(.+)"$', "CITATION.cff")
    if not re.fullmatch(r"\d{4}-\d\d-\d\d", date):
        said.append(f"CHANGELOG.md has no date for {version}: {date}")
    elif date != day:
        said.append(f"CITATION.cff has {day}, CHANGELOG.md {date}")
    return said


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("tag")
    parser.add_argument("--notes", type=Path)
    options = parser.parse_args()
    if said := disagreements(options.tag):
        sys.exit("; ".join(said))
    if options.notes:
        options.notes.write_text(changes(options.tag.removeprefix("v"))[1], encoding="utf-8")
    print(f"{options.tag}: tag, version, changelog and citation agree")


if __name__ == "__main__":
    main()
