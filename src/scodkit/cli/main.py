"""``scod``: the command itself."""

from __future__ import annotations

import sys

from scodkit.errors import ScodError

_NO_TYPER = "expected the command line's own libraries; type: pip install 'scodkit[cli]'"


def main() -> None:
    """Run the command; errors on purpose are one paragraph, and exit code 2.

    Raises:
        ImportError: If something else than the command line's own libraries is missing.
    """
    try:
        from scodkit.cli.app import app
    except ImportError as error:
        if error.name not in ("typer", "rich", "click"):
            raise
        sys.exit(_NO_TYPER)
    try:
        app()
    except ScodError as error:
        sys.stderr.write(f"scod: {error}\n")
        sys.exit(2)


if __name__ == "__main__":
    main()
