"""8. Several methods on one network, with the figures papers show."""

from given import batches, digits, small_cnn, trained

from scodkit import Categorical, Fused, Monitor
from scodkit.baselines import KNN, Energy, KFACLaplace, Mahalanobis, MaxSoftmax, ViM
from scodkit.report.separation import separation

known, labels, unknown = digits()
train_loader = batches(known[:500], labels[:500], shuffle=True)
test = known[700:]
model = trained(small_cnn(), train_loader)

aurocs = {}
for method in (Fused, Monitor, KFACLaplace, Energy, MaxSoftmax, KNN, Mahalanobis, ViM):
    fitted = method(model, Categorical()).fit(train_loader)
    if method is Fused:
        fitted.calibrate(known[500:700])
    apart = separation(fitted.score(test), fitted.score(unknown), resamples=200)
    aurocs[method.__name__] = apart.auroc
    interval = f"({apart.auroc_low:.3f} to {apart.auroc_high:.3f})"
    print(f"{method.__name__:12} AUROC {apart.auroc:.3f} {interval}  FPR95 {apart.fpr95:.1%}")
