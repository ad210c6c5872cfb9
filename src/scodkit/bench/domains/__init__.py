"""The paper's six domains, one file each."""

from scodkit.bench.domain import Domain
from scodkit.bench.domains.binary_mnist import BINARY_MNIST
from scodkit.bench.domains.cifar10 import CIFAR10
from scodkit.bench.domains.mnist import MNIST
from scodkit.bench.domains.rotated_mnist import ROTATED_MNIST
from scodkit.bench.domains.taxinet import TAXINET
from scodkit.bench.domains.wine import WINE

DOMAINS: dict[str, Domain] = {
    domain.name: domain
    for domain in (WINE, ROTATED_MNIST, TAXINET, BINARY_MNIST, MNIST, CIFAR10)
}

__all__ = ["DOMAINS"]
