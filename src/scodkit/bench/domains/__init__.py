"""The domains, one file each: the paper's six, then what is ours."""

from scodkit.bench.domain import Domain
from scodkit.bench.domains.binary_mnist import BINARY_MNIST
from scodkit.bench.domains.cifar10 import CIFAR10
from scodkit.bench.domains.mnist import MNIST
from scodkit.bench.domains.rotated_mnist import ROTATED_MNIST
from scodkit.bench.domains.taxinet import TAXINET
from scodkit.bench.domains.taxinet_frames import TAXINET_TINY
from scodkit.bench.domains.taxinet_xplane import TAXINET_XPLANE
from scodkit.bench.domains.wine import WINE

DOMAINS: dict[str, Domain] = {
    domain.name: domain
    for domain in (WINE, ROTATED_MNIST, TAXINET, BINARY_MNIST, MNIST, CIFAR10, TAXINET_TINY)
}

# on data that only some users have
OPTIONAL_DOMAINS: dict[str, Domain] = {TAXINET_XPLANE.name: TAXINET_XPLANE}

__all__ = ["DOMAINS", "OPTIONAL_DOMAINS"]
