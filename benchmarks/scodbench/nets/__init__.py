"""The networks of the SCOD paper's domains, with its parameter counts to the last digit."""

from scodbench.nets.densenet import DenseNet121
from scodbench.nets.first_outputs import FirstOutputs
from scodbench.nets.resnet import ResNet18
from scodbench.nets.small import digits_net, wine_net

__all__ = ["DenseNet121", "FirstOutputs", "ResNet18", "digits_net", "wine_net"]
