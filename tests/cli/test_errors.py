"""What every verb does with bad input: one clear message, exit code 2, nothing changed."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import nn

from command_line import contents, ended, own_folder, said_in_three_lines, scod, start

GOOD = {
    "fit": "fit model.py:net train.npy -o out.scod --likelihood categorical",
    "calibrate": "calibrate m.scod model.py:net heldout.npy",
    "score": "score m.scod model.py:net heldout.npy -o out.csv",
    "explain": "explain m.scod model.py:net heldout.npy --plot out.png",
    "merge": "merge model.py:net m.scod n.scod -o out.scod",
    "inspect": "inspect m.scod",
}
DATA = ("fit", "calibrate", "score", "explain")
MODEL = (*DATA, "merge")
SAVED = ("calibrate", "score", "explain", "merge", "inspect")
FITTED = ("calibrate", "score", "explain")

# the verbs, what to replace in (or add to) their commands, and what they must say
BAD: list[tuple[tuple[str, ...], str, str]] = [
    (DATA, "{data}=nowhere.npy", "expected a file or folder at nowhere.npy, got no file"),
    (DATA, "{data}=notes.txt", "expected a file that ends in .npy, .npz, .csv"),
    (DATA, "{data}=wide.npy", "can be run on, got it failed on these (RuntimeError: "),
    (FITTED, "{data}=flat.npy", "expected samples of shape (3,), as at the fit"),
    (FITTED, "{data}=named.csv", "got a, d, c, without b; name the columns as at the fit"),
    (FITTED, "{data}=nameless.csv", "got 4 without names"),
    (DATA, "{data}=nan.npy", "or an empty cell in sample 3"),
    (DATA, "{data}=gap.csv", "or an empty cell in sample 1"),
    (DATA, "{data}=words.csv", "expected a number in line 3, column b of words.csv, got 'x'"),
    (DATA, "{data}=twice.csv", "in the first line of twice.csv, got a more than once"),
    (DATA, "{data}=grouped.csv", "expected a number in line 3, column b of grouped.csv, got"),
    (("fit",), "{data}=target.csv", "as --target y or --drop y: the inputs were the 4 columns"),
    (DATA, "{data}=deep", "one that pillow calls F at deep/a.tif; save it in 8 bits"),
    (DATA, "{data}=pipe", "expected a file or folder at pipe, got a pipe"),
    (DATA, "{data}=ragged.csv", "expected 3 cells in line 3 of ragged.csv"),
    (DATA, "{data}=empty.csv", "expected samples in empty.csv, got none"),
    (DATA, "{data}=blob.csv", "expected text in blob.csv"),
    (DATA, "{data}=text.npy", "expected real numbers of shape (samples, ...) in text.npy"),
    (DATA, "{data}=pickled.npy", "expected an array of numbers in pickled.npy"),
    (DATA, "{data}=blob.npz", "expected an array of numbers in blob.npz"),
    (DATA, "{data}=many.npz", "expected one array in many.npz, or one named x, got a, b"),
    (FITTED, "{data}=whole.npy", "expected numbers in float32, as at the fit, got int64"),
    (("fit",), "{data}=whole.npy", "expected inputs that the model can be run on"),
    (DATA, "{data}=shots", "expected samples in shots, got none"),
    (DATA, "{data}=torn", "expected an image at torn/a.png"),
    (DATA, "{data}=model.py:absent", "absent in model.py, got net, other, ready, pictures"),
    (DATA, "{data}=model.py:number", "to return a tensor, a Dataset or an iterable of batches"),
    (("fit",), "{data}=model.py:nan_batches", "in the inputs or output of sample 32"),
    (("calibrate",), "{data}=model.py:nan_batches", "expected finite held-out scores"),
    (("explain",), "{data}=model.py:batches", "expected inputs that can be read one by one"),
    (MODEL, "model.py:net=model.py", "expected a model as package.module:callable"),
    (MODEL, "model.py:net=model.py:nothing", "in model.py, got net, other, ready, pictures"),
    (MODEL, "model.py:net=absent.py:net", "a Python file at absent.py, got no file there"),
    (MODEL, "model.py:net=broken.py:net", "got it raised (SyntaxError"),
    (MODEL, "model.py:net=absent.nets:net", "a module named absent.nets, got none here"),
    (MODEL, "model.py:net=model.py:needs", "without arguments, got it takes (argument"),
    (MODEL, "model.py:net=model.py:fails", "got it raised (ValueError: no such luck"),
    (MODEL, "model.py:net=model.py:number", "to return an nn.Module, got a int"),
    (MODEL, "+--weights absent.pt", "file of weights at absent.pt, got no file there"),
    (MODEL, "+--weights notes.txt", "got what cannot be read without running code in it"),
    (MODEL, "+--weights cut.safetensors", "got what cannot be read without running code in it"),
    (MODEL, "+--weights pickled.pt", "got what cannot be read without running code in it"),
    (MODEL, "+--weights narrow.safetensors", "expected the weights of this model in narrow"),
    (MODEL, "+--weights nested.pt", "got a dict with epoch, model"),
    (MODEL, "+--device abacus", "expected a device that torch finds here, got 'abacus'"),
    (tuple(GOOD), "+--flavour mint", ", got --flavour; scod "),
    (SAVED, "m.scod=nowhere.scod", "expected a saved monitor at nowhere.scod, got no file"),
    (SAVED, "m.scod=cut.scod", "expected a whole file at cut.scod"),
    (SAVED, "m.scod=forged.scod", "do not match their digest"),
    (SAVED, "m.scod=narrow.safetensors", "expected a scodkit header in narrow.safetensors"),
    (("calibrate", "score", "explain", "merge"), "model.py:net=model.py:other",
     "the chosen weights differ; --weights with the file of the fit, if it was left out"),
    (("fit", "merge"), "out.scod=absent/out.scod", "got absent; mkdir -p absent"),
    (("fit", "merge"), "out.scod=/proc/out.scod", "(/proc"),
    (("fit", "merge"), "out.scod=shots", "expected the name of a file to write, got a folder"),
    (("fit", "merge"), "out.scod=/dev/full", "got a device, /dev/full"),
    (("calibrate",), "+-o absent/out.scod", "got absent; mkdir -p absent"),
    (("score",), "out.csv=absent/out.csv", "got absent; mkdir -p absent"),
    (("explain",), "out.png=absent/out.png", "got absent; mkdir -p absent"),
    (("explain",), "out.png=out.xls", "expected a file that ends in .png, .svg, .pdf"),
    (("explain",), "+--sample 60", "expected a sample from 0 to 59, got 60"),
    (("explain",), "+--references nowhere.npy", "expected a file or folder at nowhere.npy"),
    (("fit", "calibrate", "score", "explain", "merge"), "+--config absent.toml", "absent.toml"),
    (("fit",), "+--config notes.txt", "expected TOML in notes.txt"),
    (("fit",), "+--config deep.toml", "expected TOML in deep.toml, got it cannot be read"),
    (("fit",), "+--config pipe", "expected a TOML file at pipe, got a pipe"),
    (("fit",), "+--weights pipe", "expected a file of weights at pipe, got a pipe"),
    (("score", "explain", "merge", "inspect"), "m.scod=pipe",
     "expected a saved monitor at pipe, got a pipe"),
    (("calibrate",), "m.scod=pipe", "expected the name of a file to write, got a pipe, pipe"),
    (("fit",), "+--config odd.toml", "expected a key in [fit] of odd.toml among"),
    (("score",), "+--config strange.toml", "expected a key of strange.toml among"),
    (("fit",), "+--config typed.toml", "--rank to be a valid integer, got many; scod fit"),
    (("fit",), "+--checkpoint out.scod", "expected another file for the checkpoint"),
    (("fit",), "+--checkpoint absent/fit.ckpt", "got absent; mkdir -p absent"),
    (("fit",), "+--checkpoint m.scod", "expected a saved checkpoint at m.scod"),
    (("fit",), "categorical=poisson", "gaussian, bernoulli, heteroscedastic, got poisson"),
    (("fit",), "+--variance 2", "expected no --variance with --likelihood categorical"),
    (("fit",), "+--sketch exact --size 9", "expected no --size with --sketch exact"),
    (("fit",), "+--last-layers 1 --parameters 0.*", "got --last-layers and --parameters"),
    (("fit",), "+--last-fraction 2", "expected 0 < fraction <= 1, got 2.0"),
    (("fit",), "+--parameters head.*", "head.*"),
    (("fit",), "+--rank 0", "expected --rank to be "),
    (("fit",), "+--prior-scale -1", "expected a positive, finite prior_scale"),
    (("fit",), "+--columns a,z train.npy", "fit MODEL DATA and options, got train.npy besides"),
    (("score",), "+--false-alarm 2", "expected 0 < false_alarm < 1, got 2.0"),
    (("score",), "+--false-alarm 0.001", "calibrate with at least 999 samples"),
    (("score",), "m.scod=n.scod --false-alarm 0.1", "expected a calibrated monitor for alarms"),
    (("score",), "{data}=-", "a stream, which is answered on stdout; > out.csv instead"),
    (("merge",), "n.scod=m.scod", "where a part that is there twice would count twice"),
    (("merge",), " n.scod=", "expected two different monitors or more"),
    (("merge",), "out.scod=n.scod", "expected another file to write to than one that is read"),
    (("merge",), "n.scod=gaussian.scod", "the likelihoods are"),
    (("merge",), "n.scod=half.scod", "48 of 48 samples to be added are in the fit"),
    (("fit",), "+--shard 9/8", "as INDEX/COUNT, from 1/8 to 8/8, got '9/8'"),
    (("fit",), "+--shard half", "as INDEX/COUNT, from 1/8 to 8/8, got 'half'"),
]  # fmt: skip
CASES = [(verb, change, said) for verbs, change, said in BAD for verb in verbs]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder with good things and bad ones."""
    place = own_folder(tmp_path_factory.mktemp("own"))
    values = np.load(place / "heldout.npy")
    save = {
        "wide.npy": np.zeros((9, 5), np.float32),
        "flat.npy": values[0],
        "nan.npy": np.where(np.arange(60)[:, None] == 3, np.nan, values),
        "text.npy": np.array([["a", "b", "c"]]),
        "whole.npy": np.ones((9, 3), np.int64),
    }
    for name, array in save.items():
        np.save(place / name, array)
    np.save(place / "pickled.npy", np.array([[1, {}, 3]], object), allow_pickle=True)
    np.savez(place / "many.npz", a=values, b=values)
    texts = {
        "notes.txt": "not a model, not TOML, not data\n",
        "broken.py": "def net(:\n",
        "named.csv": "a,d,c\n1,2,3\n",
        "nameless.csv": "1,2,3,4\n",
        "gap.csv": "a,b,c\n1,2,3\n4,,6\n",
        "words.csv": "a,b,c\n1,2,3\n4,x,6\n",
        "twice.csv": "a,a,c\n1,2,3\n",
        "grouped.csv": "a,b,c\n1,2,3\n4,1_000,6\n",
        "target.csv": "a,b,c,y\n1,2,3,0\n4,5,6,1\n",
        "deep.toml": f"a = {'[' * 100_000}",
        "ragged.csv": "a,b,c\n1,2,3\n4,5\n",
        "empty.csv": "a,b,c\n",
        "odd.toml": "[fit]\nranc = 3\n",
        "strange.toml": "flavour = 'mint'\n",
        "typed.toml": "[fit]\nrank = 'many'\n",
        "torn/a.png": "not a picture",
    }
    os.mkfifo(place / "pipe")
    (place / "deep").mkdir()
    Image.fromarray(np.zeros((2, 2), np.float32)).save(place / "deep" / "a.tif")
    (place / "shots").mkdir()
    (place / "torn").mkdir()
    for name, text in texts.items():
        (place / name).write_text(text)
    (place / "blob.csv").write_bytes(b"\xff\xfe\x00\x81,")
    (place / "blob.npz").write_bytes(b"PK\x03\x04 cut off")
    torch.save({"weight": Intruder()}, place / "pickled.pt")
    torch.save({"epoch": 3, "model": {}}, place / "nested.pt")
    save_file(nn.Linear(2, 2).state_dict(), place / "narrow.safetensors")
    (place / "cut.safetensors").write_bytes((place / "narrow.safetensors").read_bytes()[:-9])
    for name, likelihood in {
        "m": "categorical",
        "n": "categorical",
        "gaussian": "gaussian",
    }.items():
        words = f"fit model.py:net {'train' if name == 'm' else 'heldout'}.csv -o {name}.scod"
        assert scod(*words.split(), "--likelihood", likelihood, cwd=place).code == 0
    half = "fit model.py:net train.csv -o half.scod --likelihood categorical --shard 2/2"
    assert scod(*half.split(), cwd=place).code == 0
    assert scod(*GOOD["calibrate"].split(), cwd=place).code == 0
    saved = bytearray((place / "m.scod").read_bytes())
    (place / "cut.scod").write_bytes(saved[:-100])
    saved[-100] ^= 1
    (place / "forged.scod").write_bytes(saved)
    return place


class Intruder:
    """What a pickle may do when it is loaded: anything; here it makes a file."""

    def __reduce__(self) -> tuple[object, ...]:
        return open, ("intruder", "w")


def changed(verb: str, change: str) -> list[str]:
    """Return a good command with something bad in it."""
    words = GOOD[verb]
    if change.startswith("+"):
        return f"{words} {change[1:]}".split()
    old, _, new = change.partition("=")
    old = ("train.npy" if verb == "fit" else "heldout.npy") if old == "{data}" else old
    assert old in words
    return words.replace(old, new, 1).split()


@pytest.mark.parametrize(("verb", "change", "said"), CASES)
def test_bad_input(verb: str, change: str, said: str, folder: Path) -> None:
    before = contents(folder)
    found = scod(*changed(verb, change), cwd=folder)
    assert found.code == 2
    assert found.out == ""
    assert contents(folder) == before
    assert "Traceback" not in found.err
    assert said in said_in_three_lines(found.err)


FULL = {
    "fit": "could not be written",
    "calibrate": "could not be written",
    "merge": "could not be written",
    "score": "File too large",
    "explain": "File too large",
}


@pytest.mark.parametrize("verb", FULL)
def test_full_disk(verb: str, folder: Path) -> None:
    before = contents(folder)
    found = scod(*GOOD[verb].split(), cwd=folder, largest_file=700)
    assert found.code == 2
    assert contents(folder) == before
    assert FULL[verb] in found.err
    assert "nothing was changed" in found.err
    assert said_in_three_lines(found.err)


@pytest.mark.parametrize("words", ["inspect m.scod", "score m.scod model.py:net new.npy"])
def test_results_that_cannot_be_printed(words: str, folder: Path) -> None:
    with open("/dev/full", "w") as full:
        found = ended(start(*words.split(), cwd=folder, stdout=full))
    assert found.code != 0
    said = said_in_three_lines(found.err)
    assert "got No space left on device; nothing was changed: free some space" in said
    assert "Traceback" not in found.err


def test_debug_shows_where(folder: Path) -> None:
    found = scod("--debug", "fit", "model.py:fails", *GOOD["fit"].split()[2:], cwd=folder)
    assert found.code == 2
    assert "Traceback" in found.err
    assert 'raise ValueError("no such luck")' in found.err
    again = "scod --debug fit model.py:fails train.npy -o out.scod --likelihood categorical"
    *_, expected, _, advice, _ = found.err.splitlines()
    assert expected == "scod: expected model.py:fails to run"
    assert advice == f"      try      to see where, type: {again}"


def test_what_nobody_foresaw_has_a_code_of_its_own(folder: Path) -> None:
    (folder / "odd_model.py").write_text(
        "from model import net, train\nimport scodkit\nscodkit.Monitor.save = None\n"
    )
    found = ended(start("fit", "odd_model.py:net", *GOOD["fit"].split()[2:], cwd=folder))
    (folder / "odd_model.py").unlink()
    assert found.code == 1
    assert "found    an error nobody foresaw (TypeError: 'NoneType'" in found.err
    assert "Traceback" not in found.err


def test_bad_samples_can_be_left_out_or_flagged(folder: Path) -> None:
    words = (
        "fit model.py:net nan.npy -o skipped.scod --likelihood categorical --on-bad skip --json"
    )
    fitted = scod(*words.split(), cwd=folder)
    assert (fitted.document["samples"], fitted.document["skipped"]) == (59, 1)
    words = "score m.scod model.py:net nan.npy --on-bad alarm --json"
    scored = scod(*words.split(), cwd=folder)
    assert scored.code == 0
    bad = [document["input"] for document in scored.documents if document["score"] is None]
    assert bad == [3]
    assert scored.documents[3]["alarm"] is True
