"""Which samples are atypical, with a stated share of mistakes among those named.

A flag at a false-alarm rate of 5 % is wrong for 5 % of all good samples: where atypical ones
are rare, most flags are wrong. The rules here bound the share of wrong ones among the flags
(the false discovery rate, FDR) instead.

They need p-values of the same calibration. Such p-values depend on each other through the
held-out scores, but positively, regression dependent on the true nulls (Bates, Candes, Lei,
Romano and Sesia, Annals of Statistics 2023, for scores without ties); for that kind of
dependence both rules are proven.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from scodkit.alarms.alarm import Numbers, Resumable, one_number, p_values_in
from scodkit.calibration import check_share
from scodkit.errors import CalibrationError, CalibrationWarning, OptionError, optional
from scodkit.numerics.artifact import FLAG, SHARE, maybe, number, whole


def discoveries(given: Numbers, fdr: float = 0.1) -> Tensor:
    """Return which of a batch are atypical (Benjamini and Hochberg 1995).

    Args:
        given: p-values ``(B,)`` in [0, 1], small = atypical; or a scored batch that has some,
            ``monitor(x)``.
        fdr: Accepted share of good samples among those named, on average, in (0, 1).

    Returns:
        ``(B,)`` booleans on the p-values' device, True = named as atypical.

    Raises:
        CalibrationError: If the p-values have another form.
        OptionError: If ``fdr`` is not in (0, 1).

    Examples:
        >>> discoveries(torch.tensor([0.001, 0.9, 0.04, 0.3, 0.02]), fdr=0.1)
        tensor([ True, False,  True, False,  True])
    """
    check_share("fdr", fdr, 0.1)
    p_values = p_values_in(given)
    if p_values.dim() != 1:
        raise CalibrationError(
            f"expected p-values of shape (B,), got {tuple(p_values.shape)}; type "
            "discoveries(p_values.flatten())"
        )
    values = p_values.detach().cpu().double()
    bad = int((~((values >= 0) & (values <= 1))).sum())
    if bad:
        raise CalibrationError(
            f"expected p-values in [0, 1], got {bad} of {values.numel()} that are not; type "
            "discoveries(calibration.p_value(scores))"
        )
    if values.numel() == 0:
        return torch.zeros_like(p_values, dtype=torch.bool)
    stats = optional("scipy.stats", "alarms")
    adjusted = stats.false_discovery_control(values.numpy(), method="bh")
    # conformal p-values are fractions that often meet the level exactly: 1e-12 for rounding
    return (torch.from_numpy(adjusted) <= fdr * (1 + 1e-12)).to(p_values.device)


class OnlineDiscoveries(Resumable):
    """Names atypical samples of a stream, one p-value at a time (LOND).

    The ``t``-th p-value is compared with ``fdr * g(t) * (d + 1)``, where ``d`` is the number of
    discoveries so far and ``g`` how ``fdr`` is spent over time (Javanmard and Montanari 2015):

        g(t) = 1/(1 + log t) - 1/(1 + log(t + 1))

    which sums to 1 and falls like ``1/(t log(t)^2)``. At every moment the share of good samples
    among the named ones is at most ``fdr`` on average, also for p-values that depend on each
    other positively (Zrnic, Ramdas and Jordan 2021), as those of one calibration do. Rules with
    more power exist, but are proven for independent p-values only.

    The level falls while nothing is discovered, and p-values of ``n`` held-out samples are at
    least ``1/(n + 1)``: for long streams calibrate with many.

    Args:
        fdr: Accepted share of good samples among those named, on average, in (0, 1).
        smallest: The smallest p-value there can be, ``1 / (calibration.num_data + 1)``: a
            `CalibrationWarning` then says, once, when nothing can be discovered any more.

    Examples:
        >>> stream = OnlineDiscoveries(fdr=0.1)
        >>> [stream.push(p) for p in (0.001, 0.5, 0.002, 0.9)]
        [True, False, True, False]
        >>> stream.num_seen, stream.num_found, round(stream.level, 4)
        (4, 2, 0.0075)
    """

    kind = "online discoveries"
    plain: ClassVar = {
        "fdr": SHARE,
        "smallest": maybe(number("a number in (0, 1]", lambda value: 0 < value <= 1)),
        "num_seen": whole(),
        "num_found": whole(),
        "_warned": FLAG,
    }

    def __init__(self, fdr: float = 0.1, smallest: float | None = None) -> None:
        check_share("fdr", fdr, 0.1)
        if smallest is not None and not 0 < smallest <= 1:
            raise OptionError(
                f"expected 0 < smallest <= 1, got {smallest}; type "
                "smallest=1 / (calibration.num_data + 1)"
            )
        self.fdr = fdr
        self.smallest = smallest
        self.num_seen = 0
        self.num_found = 0
        self._warned = False
        self._warn_if_blind()

    @property
    def level(self) -> float:
        """What the next p-value must not exceed to be a discovery, in (0, 1)."""
        return self.fdr * _spent(self.num_seen + 1) * (self.num_found + 1)

    def push(self, p_value: Numbers) -> bool:
        """Return whether the next sample of the stream is named as atypical.

        Args:
            p_value: In [0, 1], a number or a tensor of one; or the sample scored:
                ``push(monitor(x))``.

        Raises:
            CalibrationError: If it is not in [0, 1]; nothing has changed then.
        """
        number = one_number(p_values_in(p_value))
        if not 0 <= number <= 1:
            raise CalibrationError(
                f"expected a p-value in [0, 1], got {number}; type "
                "push(calibration.p_value(score))"
            )
        discovered = number <= self.level
        self.num_seen += 1
        self.num_found += discovered
        self._warn_if_blind()
        return discovered

    def __repr__(self) -> str:
        return f"OnlineDiscoveries(fdr={self.fdr}, {self.num_found} of {self.num_seen} found)"

    def _warn_if_blind(self) -> None:
        if self.smallest is None or self._warned or self.level >= self.smallest:
            return
        self._warned = True
        warnings.warn(
            f"expected a level of at least {self.smallest:.3g}, the smallest p-value there can "
            f"be, got {self.level:.3g} after {self.num_seen} p-values: nothing can be "
            "discovered any more; calibrate with more held-out samples and start a new "
            "OnlineDiscoveries",
            CalibrationWarning,
            stacklevel=3,
        )

    def _unpack(self, header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> bool:
        return self.num_found <= self.num_seen


def _spent(step: int) -> float:
    """Return ``g`` of a step, counted from 1; written so that nothing cancels."""
    return math.log1p(1 / step) / ((1 + math.log(step)) * (1 + math.log(step + 1)))
