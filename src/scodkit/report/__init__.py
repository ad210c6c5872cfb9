"""One page that shows a monitor at work."""

from scodkit.report.method_line import MethodLine
from scodkit.report.report import Report, check_installed
from scodkit.report.scored_set import ScoredSet
from scodkit.report.watched_stream import WatchedStream

__all__ = ["MethodLine", "Report", "ScoredSet", "WatchedStream", "check_installed"]
