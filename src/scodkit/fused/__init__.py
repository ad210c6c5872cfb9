"""`Fused`: one score that combines several kinds of evidence, without choices to make."""

from scodkit.fused.choose import Budget as Budget
from scodkit.fused.fused import Fused as Fused
from scodkit.fused.standard import FusedExplanation as FusedExplanation
