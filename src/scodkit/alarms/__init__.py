"""Decisions from scores and p-values: which samples, when a stream drifts, which rollouts."""

from scodkit.alarms.discoveries import OnlineDiscoveries, discoveries
from scodkit.alarms.drift import DriftAlarm
from scodkit.alarms.rollouts import RolloutAlarm

__all__ = ["DriftAlarm", "OnlineDiscoveries", "RolloutAlarm", "discoveries"]
