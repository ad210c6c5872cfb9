"""Copy measured tables into the pages that show them, so that the pages read well anywhere.

A page says where a table stands and which file it is::

    <!-- table: results/headline.md -->
    ...
    <!-- end table -->

``make tables`` replaces what is between; ``--check`` only names pages that are behind.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
TABLE = re.compile(r"(<!-- table: (\S+) -->\n).*?(<!-- end table -->)", re.DOTALL)


def filled(page: str) -> str:
    """Return the text of a page with its tables as they are in their files.

    Args:
        page: Text in Markdown.
    """
    return TABLE.sub(lambda m: f"{m[1]}\n{_read(ROOT / m[2])}\n\n{m[3]}", page)


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8").strip()


def main(check: bool) -> None:
    """Fill all pages, or exit with the names of those that are behind.

    Args:
        check: Whether to write nothing.
    """
    behind = []
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        text = path.read_text(encoding="utf-8")
        if (new := filled(text)) != text:
            behind.append(str(path.relative_to(ROOT)))
            if not check:
                path.write_text(new, encoding="utf-8")
    if check and behind:
        sys.exit(f"tables are out of date in {', '.join(behind)}; type: make tables")


if __name__ == "__main__":
    main("--check" in sys.argv)
