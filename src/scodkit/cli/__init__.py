"""``scod``: the command line of scodkit, which needs the libraries of ``scodkit[cli]``."""

from __future__ import annotations

import sys

from scodkit.errors import MissingPeerError, optional


def main() -> None:
    """Run ``scod``."""
    try:
        for library in ("typer", "rich"):
            optional(library, "cli")
    except MissingPeerError as error:
        sys.exit(f"scod: {error}")
    from scodkit.cli.app import app, run_app

    run_app("scod", app)
