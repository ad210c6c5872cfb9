"""Build the wheel and the sdist, check both, and try the wheel in empty environments.

Run by ``make dist``, in some ten minutes; ``python tests/try_dist.py plots cli`` tries only
these two. Each has an environment of its own in a temporary folder, with the versions of
constraints.txt, and does there what the extra is for. So does "pytorch-ood", which is no extra,
with what its page says to type. Nothing is published.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[1]
DIST = ROOT / "dist"
PAGES = (ROOT / "README.md", ROOT / "docs" / "guides" / "overview.md")
README = (str(ROOT / "tests" / "support" / "readme_blocks.py"), *map(str, PAGES))

# what the programs begin with
MADE = """
import torch
from scodkit import Gaussian, Monitor
x = torch.randn(100, 3)
net = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).eval()
monitor = Monitor(net, Gaussian()).fit(x[:80], progress=False).calibrate(x[80:], progress=False)
"""

# without any extra: all but a figure, whose error says both things to type
ALONE = """
from scodkit.errors import MissingPeerError
monitor.save("monitor.scod")
assert torch.equal(Monitor.load("monitor.scod", net).score(x), monitor.score(x))
assert monitor.flag(x, false_alarm=0.1).shape == (100,)
try:
    monitor.explain(x).layers.plot()
except MissingPeerError as error:
    for hint in ('pip install "scodkit[plots]"', 'pip install ".[plots]"'):
        assert hint in str(error), error
else:
    raise SystemExit("matplotlib is here without the extra that installs it")
"""

ALARMS = """
from scodkit import discoveries
assert discoveries(monitor(10 * x[:5]), fdr=0.5).all()
assert monitor.calibration.threshold(0.3, confidence=0.9) > 0
"""

REPORT = """
from scodkit.report import Report, ScoredSet
known = ScoredSet.of(monitor, "known", x, known=True)
Report(monitor, [known, ScoredSet.of(monitor, "far", 9 * x, known=False)]).save("page.html")
"""

PEERS = """
from scodkit.baselines import KFACLaplace
assert KFACLaplace(net, Gaussian()).fit([x], progress=False).score(x).shape == (100,)
"""

# the extras for a host
ADAPTERS = ("scikit-learn", "mlflow", "lightning", "hugging-face", "onnx")


class Environment:
    """An empty environment, in a folder that goes with it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        subprocess.run([sys.executable, "-m", "venv", str(folder / "env")], check=True)
        self.programs = folder / "env" / ("Scripts" if os.name == "nt" else "bin")
        self.python = str(self.programs / "python")

    def run(self, *command: str, folder: Path | None = None) -> None:
        """Run a command, by default away from the tree: what is installed is imported."""
        variables = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        subprocess.run(command, cwd=folder or self.folder, env=variables, check=True)

    def install(self, *what: str, pins: bool = True) -> None:
        """Install packages, with the versions of constraints.txt."""
        options = ["--quiet", "--disable-pip-version-check", "--no-compile"]
        options += ["-c", str(ROOT / "constraints.txt")] if pins else []
        self.run(self.python, "-m", "pip", "install", *options, *what)

    def program(self, text: str) -> None:
        """Run a Python program."""
        self.run(self.python, "-c", MADE + text)

    def scod(self, *words: str) -> None:
        """Run the command line."""
        self.run(str(self.programs / "scod"), *words)


def build(env: Environment) -> None:
    """Build what would be published, and check it: the sdist, and the wheel from it."""
    shutil.rmtree(DIST, ignore_errors=True)
    env.install("build", "twine")
    env.run(env.python, "-m", "build", "--outdir", str(DIST), str(ROOT))
    env.run(env.python, "-m", "twine", "check", "--strict", *map(str, DIST.iterdir()))


def try_cli(env: Environment) -> None:
    """Inspect a saved monitor."""
    env.program('monitor.save("monitor.scod")')
    env.scod("inspect", "monitor.scod")


def try_peers(env: Environment) -> None:
    """Install what is installed without its dependencies, and use it."""
    env.install("--no-deps", "-r", str(ROOT / "peers.txt"), pins=False)
    env.program(PEERS)


def try_adapters(env: Environment, *names: str) -> None:
    """Fit and score through adapters, in their hosts."""
    program = str(ROOT / "tests" / "support" / "adapter_trials.py")
    env.run(env.python, program, *names)


def try_pytorch_ood(env: Environment) -> None:
    """Type the two lines of the page, which leave torch alone; use the library, test it."""
    version = (env.python, "-c", "import torch; print(torch.__version__)")
    before = subprocess.check_output(version)
    page = (ROOT / "docs" / "guides" / "adapters.md").read_text(encoding="utf-8")
    for line in re.findall("^pip (install .*)", page, re.MULTILINE):
        env.run(env.python, "-m", "pip", *shlex.split(line))
    assert subprocess.check_output(version) == before
    try_adapters(env, "pytorch-ood")
    env.install("pytest", "scikit-learn")  # which some of its detectors need
    tests = ("tests/adapters/test_pytorch_ood.py", "tests/baselines/test_features_peers.py")
    env.run(env.python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests, folder=ROOT)


def try_docs(env: Environment) -> None:
    """Make the pages."""
    site = str(env.folder / "site")
    env.run(
        env.python, "-m", "sphinx", "-q", "-W", "-c", "docs/_site", "docs", site, folder=ROOT
    )


def try_dev(env: Environment) -> None:
    """Run some tests of the sdist, which has all they read."""
    with tarfile.open(next(DIST.glob("*.tar.gz"))) as archive:
        archive.extractall(env.folder, filter="data")
    (unpacked,) = env.folder.glob("scodkit-*")
    tests = ("tests/test_documented_names.py", "tests/test_readme.py", "tests/sketch")
    env.run(
        env.python,
        "-m",
        "pytest",
        "-q",
        "-m",
        "not slow and not hosts",
        *tests,
        folder=unpacked,
    )


# what is done with each extra; alone is without any, hosts has all adapters in one environment,
# clone is the tree instead of the wheel
TRIALS: dict[str, Callable[[Environment], None]] = {
    "alone": lambda env: env.program(ALONE),
    "alarms": lambda env: env.program(ALARMS),
    "plots": lambda env: env.run(env.python, *README),
    "cli": try_cli,
    **{extra: lambda env, extra=extra: try_adapters(env, extra) for extra in ADAPTERS},
    "hosts": lambda env: try_adapters(env, *ADAPTERS),
    "pytorch-ood": try_pytorch_ood,
    "report": lambda env: env.program(REPORT),
    "demo": lambda env: env.scod("demo", "-o", "demo.html"),
    "peers": try_peers,
    "docs": try_docs,
    "dev": try_dev,
    "clone": lambda env: env.run(env.python, *README),
}


def main(names: list[str]) -> None:
    """Build, then make each trial.

    Args:
        names: Of the trials; all for none.
    """
    with tempfile.TemporaryDirectory() as folder:
        build(Environment(Path(folder)))
    (wheel,) = DIST.glob("*.whl")
    installed = {"alone": f"{wheel}", "pytorch-ood": f"{wheel}", "clone": f"{ROOT}[plots]"}
    for name in names or TRIALS:
        requirement = installed.get(name, f"{wheel}[{name}]")
        print(f"== {requirement}", flush=True)  # noqa: T201
        with tempfile.TemporaryDirectory() as folder:
            env = Environment(Path(folder))
            env.install(requirement)
            TRIALS[name](env)


if __name__ == "__main__":
    main(sys.argv[1:])
