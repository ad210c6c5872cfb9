"""One TOML file instead of flags; flags win.

Top-level keys are for every verb that has such an option, tables (``[fit]``) for one verb.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

from scodkit.errors import OptionError

# about how a command talks, not about what it does
_NOT_KEPT = {"config", "as_json", "force"}


def _use(ctx: typer.Context, path: Path | None) -> Path | None:
    """Return the path, after taking what is not on the command line from the file there."""
    if path is not None and not ctx.resilient_parsing:
        ctx.default_map = _defaults(path, ctx)
    return path


ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE.toml",
        callback=_use,
        is_eager=True,
        help="Options in a TOML file; those on the command line win.",
        rich_help_panel="Other",
    ),
]


def resolved(ctx: typer.Context) -> dict[str, Any]:
    """Return the options of a command as plain data: flags, file and defaults together.

    Args:
        ctx: Of the command.
    """
    return {
        name: _plain(value)
        for name, value in ctx.params.items()
        if value not in (None, (), []) and name not in _NOT_KEPT
    }


def _defaults(path: Path, ctx: typer.Context) -> dict[str, Any]:
    """Return the options in a file that a verb has.

    Raises:
        OptionError: If the file cannot be read, or has keys that no verb knows.
    """
    verb = str(ctx.info_name)
    verbs: Any = ctx.parent and ctx.parent.command
    known = {
        name: {
            str(option.name): option
            for option in verbs.get_command(ctx.parent, name).params
            if option.name != "config"
        }
        for name in verbs.list_commands(ctx.parent)
        if not verbs.get_command(ctx.parent, name).hidden
    }
    own, shared = known[verb], set().union(*known.values())
    found: dict[str, Any] = {}
    for key, value in _read(path).items():
        name = key.replace("-", "_")
        if isinstance(value, dict):
            _check(path, f"table [{key}]", key, known)
            for option in value:
                _check(path, f"key in [{key}]", option.replace("-", "_"), known[key])
        else:
            _check(path, "key", name, shared)
            found |= {name: value} if name in own else {}
    table = _read(path).get(verb, {})
    found |= {key.replace("-", "_"): value for key, value in table.items()}
    return {
        name: [value] if _takes_several(own[name]) and not isinstance(value, list) else value
        for name, value in found.items()
    }


def _takes_several(option: Any) -> bool:
    return bool(getattr(option, "multiple", False) or option.nargs == -1)


def _read(path: Path) -> dict[str, Any]:
    from scodkit.cli.files import check_regular

    check_regular(path)
    toml: Any = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    try:
        read: dict[str, Any] = toml.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # numbers too long, lists too deep
        raise OptionError(f"expected TOML in {path}, but it cannot be read: {error}") from error
    return read


def _check(path: Path, what: str, name: str, known: Mapping[str, Any] | set[str]) -> None:
    if name not in known:
        raise OptionError(
            f"expected a {what} of {path} among {', '.join(sorted(known))}, got {name}"
        )


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Path):
        return str(value)
    return [_plain(part) for part in value] if isinstance(value, (list, tuple)) else value
