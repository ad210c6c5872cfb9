"""Ctrl-C: nothing is half written, and a fit goes on where it was."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from command_line import Run, ended, own_folder, scod, start

pytestmark = pytest.mark.slow

FIT = ("fit", "model.py:net", "model.py:slowly", "--likelihood", "categorical")


def interrupt(run: subprocess.Popen[str]) -> Run:
    run.send_signal(signal.SIGINT)
    return ended(run)


def wait_for(path: Path, run: subprocess.Popen[str]) -> None:
    for _ in range(1200):
        if path.exists() or run.poll() is not None:
            return
        time.sleep(0.05)


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if path.name != "__pycache__"}


def test_a_stopped_fit_goes_on_where_it_was(tmp_path: Path) -> None:
    own_folder(tmp_path)
    before = names(tmp_path)
    words = (*FIT, "-o", "m.scod", "--checkpoint", "fit.ckpt", "--every", "2")
    run = start(*words, cwd=tmp_path)
    wait_for(tmp_path / "fit.ckpt", run)
    found = interrupt(run)
    assert found.code == 130
    assert found.out == ""
    assert "the same command goes on from the last checkpoint in fit.ckpt" in found.err
    assert "Traceback" not in found.err
    assert names(tmp_path) - before == {"fit.ckpt"}
    done = load_file(tmp_path / "fit.ckpt")
    assert done
    assert scod(*words, cwd=tmp_path).code == 0
    assert not (tmp_path / "fit.ckpt").exists()
    assert scod(*FIT, "-o", "whole.scod", cwd=tmp_path).code == 0
    resumed, whole = (load_file(tmp_path / name) for name in ("m.scod", "whole.scod"))
    assert resumed.keys() == whole.keys()
    assert all(torch.equal(resumed[name], whole[name]) for name in whole)


def test_a_stopped_fit_without_checkpoint_says_how_to_have_one(tmp_path: Path) -> None:
    own_folder(tmp_path)
    text = (tmp_path / "model.py").read_text()
    marked = text.replace("time.sleep(0.2)", "time.sleep(0.2); open('begun', 'w').close()")
    (tmp_path / "model.py").write_text(marked)
    before = names(tmp_path)
    run = start(*FIT, "-o", "m.scod", cwd=tmp_path)
    wait_for(tmp_path / "begun", run)
    found = interrupt(run)
    assert found.code == 130
    assert "with --checkpoint F a stopped fit goes on from F" in found.err
    assert names(tmp_path) - before == {"begun"}


def test_a_stopped_stream_ends_quietly(tmp_path: Path) -> None:
    own_folder(tmp_path)
    words = ("fit", "model.py:net", "train.npy", "-o", "m.scod", "--likelihood", "categorical")
    assert scod(*words, cwd=tmp_path).code == 0
    run = start("score", "m.scod", "model.py:net", "-", cwd=tmp_path)
    assert run.stdin is not None
    assert run.stdout is not None
    run.stdin.write("[1, 2, 3]\n")
    run.stdin.flush()
    assert '"score"' in run.stdout.readline()
    found = interrupt(run)
    assert found.code == 130
    assert "scod: stopped" in found.err
    assert "Traceback" not in found.err


def test_a_reader_that_has_had_enough_is_no_error(tmp_path: Path) -> None:
    own_folder(tmp_path)
    words = ("fit", "model.py:net", "train.npy", "-o", "m.scod", "--likelihood", "categorical")
    assert scod(*words, cwd=tmp_path).code == 0
    reader, writer = os.pipe()
    os.close(reader)
    run = ended(start("inspect", "m.scod", cwd=tmp_path, stdout=writer))
    os.close(writer)
    assert run == Run(1, "", "")
