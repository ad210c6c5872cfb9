"""``python -m scodkit``: the command, for ``torchrun -m scodkit fit ...``."""

from scodkit.cli import main

main()
