"""The domains, one file each: the paper's six, then what is ours."""

from scodbench.domain import Domain
from scodbench.domains.binary_mnist import BINARY_MNIST
from scodbench.domains.cifar10 import CIFAR10, CIFAR10_ALL
from scodbench.domains.digit_kinds import KINDS
from scodbench.domains.mnist import MNIST
from scodbench.domains.rotated_mnist import ROTATED_MNIST
from scodbench.domains.taxinet import TAXINET
from scodbench.domains.taxinet_frames import TAXINET_TINY
from scodbench.domains.taxinet_xplane import TAXINET_XPLANE
from scodbench.domains.wine import WINE

DOMAINS: dict[str, Domain] = {
    domain.name: domain
    for domain in (WINE, ROTATED_MNIST, TAXINET, BINARY_MNIST, MNIST, CIFAR10, TAXINET_TINY)
}

# on data that only some users have, or beside one of the above
OPTIONAL_DOMAINS: dict[str, Domain] = {
    **{domain.name: domain for domain in (TAXINET_XPLANE, CIFAR10_ALL)},
    **KINDS,
}

__all__ = ["DOMAINS", "OPTIONAL_DOMAINS"]
