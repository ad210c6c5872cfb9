"""The networks of the SCOD paper's domains, with its parameter counts to the last digit."""

from scodkit.bench.nets.densenet import DenseNet121
from scodkit.bench.nets.first_outputs import FirstOutputs
from scodkit.bench.nets.resnet import ResNet18
from scodkit.bench.nets.small import digits_net, wine_net

__all__ = ["DenseNet121", "FirstOutputs", "ResNet18", "digits_net", "wine_net"]
