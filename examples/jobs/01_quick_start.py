"""1. Quick start: an alarm for a network of your own, here one for the digits 0-4."""

from given import batches, digits, small_cnn, trained

from scodkit import Categorical, Monitor

known, labels, unknown = digits()
train_loader = batches(known[:500], labels[:500], shuffle=True)
heldout_loader = batches(known[500:700], labels[500:700])
test = known[700:]
model = trained(small_cnn(), train_loader)

monitor = Monitor(model, Categorical(), rank=50)
monitor.fit(train_loader)
monitor.calibrate(heldout_loader)

scored = monitor(unknown[:5])
print(scored.output.argmax(1), scored.score, scored.p_value)

false_alarms = monitor.flag(test, false_alarm=0.05).float().mean()
caught = monitor.flag(unknown, false_alarm=0.05).float().mean()
print(f"alarms: {false_alarms:.1%} of new digits 0-4, {caught:.1%} of the digits 5-9")

told = monitor.explain(unknown[:1])
told.layers.plot().savefig("layers.png")
print(monitor.summary())

monitor.save("monitor.scod")
again = Monitor.load("monitor.scod", model)
