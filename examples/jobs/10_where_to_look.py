"""10. Where to look: a page of docs/ for each question, and the name that ``help`` tells of."""

import pkgutil
from pathlib import Path

PAGES = {
    "How many held-out samples? Which alarm?": ("guides/alarms.md", "scodkit.Calibration"),
    "Which rank, and is it enough?": ("ideas/method.md", "scodkit.Monitor.summary"),
    "Which method for my network?": ("results/index.md", "scodkit.Fused"),
    "How long will it take, how much memory?": ("results/speed.md", "scodkit.Monitor.plan"),
    "A large network, thousands of outputs?": ("guides/large.md", "scodkit.LastLayers"),
    "Several machines, data in parts?": ("guides/scaling.md", "scodkit.parts.Shard"),
    "Why is this score so high?": ("guides/explain.md", "scodkit.Monitor.explain"),
    "Other methods on the same network?": ("guides/compare.md", "scodkit.compare"),
    "What does this error mean?": ("guides/failures.md", "scodkit.errors"),
    "Without Python?": ("reference/cli.md", "scodkit.cli"),
    "May I share a saved file? Will it load later?": (
        "reference/stability.md",
        "scodkit.Monitor.save",
    ),
    "Every public name?": ("reference/index.md", "scodkit"),
}

docs = Path(__file__).parents[2] / "docs"
for question, (page, name) in PAGES.items():
    title = (docs / page).read_text().splitlines()[0].removeprefix("# ")
    first = (pkgutil.resolve_name(name).__doc__ or "").strip().splitlines()[0]
    print(f"{question}\n    docs/{page}: {title}\n    help({name}): {first}")
