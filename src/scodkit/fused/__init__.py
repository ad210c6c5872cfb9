"""One score for people who do not want to choose: evidence of several kinds, fused."""

from scodkit.fused.choose import Budget as Budget
from scodkit.fused.fused import Fused as Fused
from scodkit.fused.standard import FusedExplanation as FusedExplanation
