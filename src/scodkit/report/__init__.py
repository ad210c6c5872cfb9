"""One page that shows a monitor at work."""

from scodkit.report.report import MethodLine, Report, ScoredSet, WatchedStream, check_installed

__all__ = ["MethodLine", "Report", "ScoredSet", "WatchedStream", "check_installed"]
