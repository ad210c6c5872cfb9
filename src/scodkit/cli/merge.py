"""``scod merge``: monitors fitted on parts of the data, into one of all of it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Context, Option

from scodkit.cli import options
from scodkit.cli import output as shown
from scodkit.cli.inspect import show_fit
from scodkit.errors import OptionError


def merge(  # noqa: PLR0913 (each a choice of its own)
    ctx: Context,
    model: options.ModelArgument,
    parts: Annotated[list[Path], Argument(metavar="PARTS...", help="Two monitors or more.")],
    output: Annotated[Path, Option("--output", "-o", help="Where the whole goes.")],
    weights: options.WeightsOption = None,
    device: options.DeviceOption = "cpu",
    config: options.ConfigOption = None,
    force: options.ForceOption = False,
    as_json: options.JsonOption = False,
) -> None:
    """Add up monitors of one model, fitted on different data.

    The result is that of one fit on all of the data. They must have been fitted with the same
    options. The model is needed to check that they belong to it; calibrate the result anew.

    \b
    scod merge model.py:net part-*.scod -o whole.scod
    """  # noqa: D301, DOC501 (\b keeps the lines of the examples; shown as help)
    from tqdm.auto import tqdm

    from scodkit.cli.loading import load_model, load_monitor

    with shown.stoppable(f"{output} was not written; type the same command again"):
        shown.check_output(output, ctx.params)
        if len(set(map(Path.resolve, parts))) < max(2, len(parts)):
            raise OptionError(
                "expected two different monitors or more to add up, got "
                f"{', '.join(map(str, parts))}, where a part that is there twice would count "
                "twice; type each part once"
            )
        network = load_model(model, weights, device)
        whole = load_monitor(parts[0], network, weights)
        notes = [whole.notes]
        for path in tqdm(parts[1:], "merging", unit="part", disable=None):
            part = load_monitor(path, network, weights)
            whole.merge(part)
            notes.append(part.notes)
        whole.notes = {**notes[0], "merge": options.noted_options(ctx), "parts": notes}
        whole.notes.pop("calibrate", None)
        whole.save(output)
    show_fit(output, whole, as_json, ctx.params)
