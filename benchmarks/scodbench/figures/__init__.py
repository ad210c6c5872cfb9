"""The paper's figures, and some it lacks; all of them read rows, and nothing else."""

from scodbench.figures.draw import FIGURES, draw

__all__ = ["FIGURES", "draw"]
