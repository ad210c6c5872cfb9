"""The README as a package index shows it, made when the package is built.

An index shows the text alone, so links and pictures need whole addresses. They are made of
``Repository`` in ``[project.urls]`` of pyproject.toml; as long as there is none, links become
their words, and pictures what they show.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

# [words](page), <img src="file" alt="words">; addresses and anchors stay as they are
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((?!\w+:|#)([^)]+)\)")
IMAGE = re.compile(r'<img src="(?!\w+:)([^"]+)"([^>]*?) alt="([^"]*)">')
COMMENT = re.compile(r"<!--.*?-->\n+", re.DOTALL)


class ReadmeHook(MetadataHookInterface):
    """Sets ``readme``, which pyproject.toml calls dynamic."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Add the README to the metadata of the project.

        Args:
            metadata: Of the project; changed.
        """
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        repository = metadata.get("urls", {}).get("Repository", "")
        readme = for_index(text, repository.removesuffix("/"))
        metadata["readme"] = {"content-type": "text/markdown", "text": readme}


def for_index(text: str, repository: str) -> str:
    """Return a README that needs no files beside it.

    Args:
        text: In Markdown, with links that are relative to the root of the repository.
        repository: Its address, as of GitHub; "" for none.
    """
    text = COMMENT.sub("", text)
    if not repository:
        return LINK.sub(r"\1", IMAGE.sub(r"*\3*", text))
    image = rf'<img src="{repository}/raw/HEAD/\1"\2 alt="\3">'
    return LINK.sub(rf"[\1]({repository}/blob/HEAD/\2)", IMAGE.sub(image, text))
