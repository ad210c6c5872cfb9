"""6. numpy in and numpy out, as those who come from scikit-learn have their data."""

import numpy as np
from given import batches, digits, small_cnn, trained
from sklearn.metrics import roc_auc_score

from scodkit import Categorical, Monitor

known, labels, unknown = digits()
model = trained(small_cnn(), batches(known[:500], labels[:500], shuffle=True))
X, y, X_unknown = known.numpy(), labels.numpy(), unknown.numpy()

monitor = Monitor(model, Categorical()).fit(X[:500]).calibrate(X[500:700])
scores, scores_unknown = monitor.score(X[700:]), monitor.score(X_unknown)
assert isinstance(scores, np.ndarray)

truth = np.repeat([0, 1], [len(scores), len(scores_unknown)])
auroc = roc_auc_score(truth, np.concatenate([scores, scores_unknown]))
print(f"AUROC {auroc:.3f}; {monitor.flag(X_unknown).mean():.1%} of the unknown flagged")

rows = X[700:703].tolist()  # lists of rows, too
assert np.allclose(monitor.score(rows), scores[:3], rtol=1e-4)
