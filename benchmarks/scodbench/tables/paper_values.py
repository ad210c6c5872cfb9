"""What the SCOD paper reports (UAI 2021, appendix): beside our own rows, never instead."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Reported:
    """A line of the paper's table.

    Args:
        ms: Runtime a sample at batch 1, on the authors' GPU.
        auroc: Area under the ROC curve.
        aupr: Area under the precision-recall curve, by the trapezoidal rule: 0.75 for a
            constant score, where average precision has 0.5.
    """

    ms: float
    auroc: float
    aupr: float


PAPER_TABLE: dict[tuple[str, str], Reported] = {
    ("wine", "scod"): Reported(1.214, 0.966, 0.962),
    ("wine", "scod_ll"): Reported(1.023, 0.963, 0.961),
    ("wine", "deep_ensemble"): Reported(1.985, 0.870, 0.896),
    ("wine", "local_ensemble"): Reported(0.983, 0.933, 0.931),
    ("wine", "kfac_laplace"): Reported(6.226, 0.945, 0.949),
    ("wine", "naive"): Reported(0.244, 0.500, 0.750),
    ("rotated_mnist", "scod"): Reported(1.906, 0.909, 0.920),
    ("rotated_mnist", "scod_ll"): Reported(1.170, 0.952, 0.940),
    ("rotated_mnist", "deep_ensemble"): Reported(3.794, 0.788, 0.789),
    ("rotated_mnist", "local_ensemble"): Reported(1.726, 0.677, 0.674),
    ("rotated_mnist", "kfac_laplace"): Reported(11.650, 0.779, 0.775),
    ("rotated_mnist", "naive"): Reported(0.477, 0.500, 0.750),
    ("taxinet", "scod"): Reported(18.074, 0.995, 0.994),
    ("taxinet", "scod_ll"): Reported(7.344, 1.000, 1.000),
    ("taxinet", "deep_ensemble"): Reported(30.786, 1.000, 1.000),
    ("taxinet", "local_ensemble"): Reported(13.857, 0.842, 0.820),
    ("taxinet", "kfac_laplace"): Reported(106.839, 0.994, 0.994),
    ("taxinet", "naive"): Reported(2.134, 0.500, 0.750),
    ("binary_mnist", "scod"): Reported(1.679, 0.983, 0.982),
    ("binary_mnist", "scod_ll"): Reported(1.185, 0.985, 0.985),
    ("binary_mnist", "deep_ensemble"): Reported(3.258, 0.982, 0.981),
    ("binary_mnist", "local_ensemble"): Reported(3.111, 0.974, 0.971),
    ("binary_mnist", "kfac_laplace"): Reported(9.566, 0.972, 0.970),
    ("binary_mnist", "naive"): Reported(0.492, 0.972, 0.970),
    ("mnist", "scod"): Reported(6.093, 0.963, 0.961),
    ("mnist", "scod_ll"): Reported(4.309, 0.964, 0.966),
    ("mnist", "deep_ensemble"): Reported(3.179, 0.965, 0.969),
    ("mnist", "local_ensemble"): Reported(6.258, 0.957, 0.956),
    ("mnist", "kfac_laplace"): Reported(9.631, 0.957, 0.961),
    ("mnist", "naive"): Reported(0.436, 0.958, 0.962),
    ("cifar10", "scod"): Reported(140.624, 0.908, 0.864),
    ("cifar10", "scod_ll"): Reported(56.677, 0.932, 0.905),
    ("cifar10", "local_ensemble"): Reported(152.154, 0.919, 0.881),
    ("cifar10", "kfac_laplace"): Reported(840.195, 0.920, 0.915),
    ("cifar10", "naive"): Reported(10.929, 0.922, 0.917),
}

PAPER_DOMAINS = tuple(dict.fromkeys(domain for domain, _ in PAPER_TABLE))

# the set of unknown inputs the paper's figure is over; everything else is over all of them
PAPER_SET = {"cifar10": "tinyimagenet"}
