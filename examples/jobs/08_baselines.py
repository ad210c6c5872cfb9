"""8. Several methods on one network, with the figures papers show."""

from given import batches, digits, small_cnn, trained

import scodkit
from scodkit import Categorical, Fused, Monitor
from scodkit.baselines import KNN, Energy, KFACLaplace, Mahalanobis, MaxSoftmax, ViM

known, labels, unknown = digits()
train_loader = batches(known[:500], labels[:500], shuffle=True)
model = trained(small_cnn(), train_loader)

methods = {
    method.__name__: method(model, Categorical()).fit(train_loader)
    for method in (Fused, Monitor, KFACLaplace, Energy, MaxSoftmax, KNN, Mahalanobis, ViM)
}
methods["Fused"].calibrate(known[500:700])
found = scodkit.compare(methods, known=known[700:], unknown={"digits 5-9": unknown})
print(found)
found.plot().savefig("compare.png")
