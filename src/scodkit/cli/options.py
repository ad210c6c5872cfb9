"""Arguments and options that several verbs share, and the TOML file that stands for them.

In the file, top-level keys are for every verb that has such an option, tables (``[fit]``) for
one verb; options on the command line win.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Collection, Iterable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Context, Option

from scodkit.errors import OptionError
from scodkit.numerics.files import file_errors, regular_file

DATA_FORMS = (
    "a file of arrays (.npy, .npz, .csv), a folder of images, or package.module:callable or "
    "file.py:callable, which returns a tensor, a Dataset or batches"
)
# options that say how a command reports, not what it does
_NOT_NOTED = {"config", "as_json", "force"}
_other = partial(Option, rich_help_panel="Other")

MonitorArgument = Annotated[Path, Argument(metavar="MONITOR", help="A saved monitor.")]
ModelArgument = Annotated[
    str,
    Argument(
        metavar="MODEL",
        help="Your model: package.module:callable or file.py:callable, without arguments, "
        "which returns an nn.Module.",
    ),
]
TrainingDataArgument = Annotated[
    str, Argument(metavar="DATA", help=f"Training data: {DATA_FORMS}.")
]
OtherOutputOption = Annotated[
    Path | None, Option("--output", "-o", help="Another file for the result.")
]
WeightsOption = Annotated[
    Path | None,
    Option(help="Weights of the model: .safetensors, or a state dict of torch.save."),
]
_columns = partial(Option, rich_help_panel="Columns of a .csv with names", metavar="NAMES")
ColumnsOption = Annotated[str | None, _columns(help="Only these, in this order, as a,b,c.")]
DropOption = Annotated[str | None, _columns(help="All but these, as a,b,c.")]
TargetOption = Annotated[
    str | None,
    _columns(
        metavar="NAME",
        help="What the model predicts: no input, but shown beside predictions.",
    ),
]
IdOption = Annotated[
    str | None,
    _columns(metavar="NAME", help="What samples are called: no input, but given back."),
]
DeviceOption = Annotated[str, Option(help="Where the model runs: cpu, cuda, mps.")]
BatchSizeOption = Annotated[
    int, Option(min=1, help="Samples at a time, of data that is not in batches yet.")
]
JsonOption = Annotated[bool, _other("--json", help="JSON for machines, on stdout.")]
ForceOption = Annotated[
    bool,
    _other(
        "--force",
        help="Replace what is there, even if it is no earlier result; never an input.",
    ),
]


def _use_config(ctx: Context, path: Path | None) -> Path | None:
    """Return the path of a file, whose options become the defaults of the command."""
    if path is not None and not ctx.resilient_parsing:
        ctx.default_map = _config_defaults(path, ctx)
    return path


ConfigOption = Annotated[
    Path | None,
    _other(
        metavar="FILE.toml",
        callback=_use_config,
        is_eager=True,
        help="Options in a TOML file; those on the command line win.",
    ),
]


def noted_options(ctx: Context) -> dict[str, Any]:
    """Return the options of a command as plain data: flags, file and defaults together.

    Args:
        ctx: The command's context.
    """
    given = {
        name: value
        for name, value in ctx.params.items()
        if value not in (None, (), []) and name not in _NOT_NOTED
    }
    options: dict[str, Any] = json.loads(json.dumps(given, default=str))  # paths become text
    return options


def _config_defaults(path: Path, ctx: Context) -> dict[str, Any]:
    """Return the options in a file that this verb has.

    Raises:
        OptionError: If the file cannot be read, or has keys that no verb knows.
    """
    group: Any = ctx.parent and ctx.parent.command
    verbs = [group.get_command(ctx.parent, name) for name in group.list_commands(ctx.parent)]
    known = {verb.name: {str(option.name): option for option in verb.params} for verb in verbs}
    document = _read_toml(path)
    tables = {key: value for key, value in document.items() if isinstance(value, dict)}
    given = {key: value for key, value in document.items() if key not in tables}
    _check_keys(path, "table", tables, known)
    _check_keys(path, "key", given, set().union(*known.values()))
    for verb, table in tables.items():
        _check_keys(path, f"key in [{verb}]", table, known[verb])
    options = known[str(ctx.info_name)]
    defaults = {}
    for key, value in {**given, **tables.get(str(ctx.info_name), {})}.items():
        option = options.get(key.replace("-", "_"))
        if option is not None:
            several = getattr(option, "multiple", False) or option.nargs == -1
            alone = several and not isinstance(value, list)
            defaults[str(option.name)] = [value] if alone else value
    return defaults


def _read_toml(path: Path) -> dict[str, Any]:
    toml: Any = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    try:
        with file_errors(path, "read"):
            text = regular_file(path, "TOML file").read_text(encoding="utf-8")
        read: dict[str, Any] = toml.loads(text)
    except (ValueError, RecursionError) as error:  # numbers too long, lists too deep
        raise OptionError(f"expected TOML in {path}, but it cannot be read: {error}") from error
    return read


def _check_keys(path: Path, what: str, keys: Iterable[str], known: Collection[str]) -> None:
    for key in keys:
        if key == "config" or key.replace("-", "_") not in known:
            names = sorted({*known} - {"config"})
            raise OptionError(
                f"expected a {what} of {path} among {', '.join(names)}, got {key}"
            )
