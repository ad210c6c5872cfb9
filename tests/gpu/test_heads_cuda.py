"""Heads and boxes on a GPU: the scores of the CPU, eager and recorded."""

from __future__ import annotations

import pytest
import torch

from detectors import HELDOUT, TEST, monitor_of

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_boxes_score_as_on_a_cpu() -> None:
    monitor = monitor_of("mask").calibrate([HELDOUT], progress=False)
    before, score = monitor.boxes(TEST), monitor.score(TEST)
    monitor.to("cuda")
    after = monitor.boxes(TEST.cuda())
    torch.testing.assert_close(after.score.cpu(), before.score, rtol=1e-8, atol=1e-10)
    assert after.p_value is not None
    assert before.p_value is not None
    torch.testing.assert_close(after.p_value.cpu(), before.p_value, rtol=0, atol=1.5 / 41)
    torch.testing.assert_close(monitor.score(TEST.cuda()).cpu(), score, rtol=1e-8, atol=1e-10)
    recorded = monitor.compile(TEST.cuda())(TEST.cuda())
    torch.testing.assert_close(recorded.score.cpu(), score, rtol=1e-8, atol=1e-10)
    assert recorded.output["box"].device.type == "cuda"
    heads = monitor.explain(TEST.cuda()).heads
    assert heads is not None
    torch.testing.assert_close(heads.values.sum(1).cpu(), score, rtol=1e-8, atol=1e-10)
