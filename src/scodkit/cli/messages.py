"""What ``scod`` says: errors in a few lines, names that were meant, commands to paste.

The library's messages are for Python: "expected ..., got ...; type fit(..., on_bad='skip')".
Here they are split into what was expected, what was found and what to try, and what to try is
said in options of the command. A clause that has no such translation is left out.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import typer

program = "scod"  # that is running; set where the command starts

UsageError: Any = typer.BadParameter.__base__

_FOUND = re.compile(r",? (?:but|got|found|and (?=the model failed))(?: |$)|; found ")
_ADVICE = re.compile(r"; |(?<=\?) (?=[A-Z])")  # where it begins: a question has its answer
_JOINTS = re.compile(r"; (?:or )?|,? or (?=type |\w*[(=\[])")
_PYTHON = re.compile(r"([\w\]]\(|\blambda\b|\w=(?!=)|\w\[\w|\b(monitor|fused)\.\w)")
_OPTIONS_OF_CLASSES = {
    "Nystrom": "--sketch nystrom",
    "FrequentDirections": "--sketch frequent-directions",
    "TwoSided": "--sketch two-sided",
    "Exact": "--sketch exact",
    "Gaussian": "--likelihood gaussian",
    "HeteroscedasticGaussian": "--likelihood heteroscedastic",
    "Bernoulli": "--likelihood bernoulli",
    "Categorical": "--likelihood categorical",
}
# Python of the library's advice, and what does the same here
_IN_THE_SHELL: list[tuple[str, Any]] = [
    (r"(?:fit\(\.\.\., )?on_bad='skip'\)?", "--on-bad skip"),
    (r"(?:fit\(\.\.\., )?check_deterministic=False\)?", "--no-check-deterministic"),
    (r"(?:fit\(\.\.\., )?products=False\)?", "--rows"),
    (r"products=True", "--products"),
    (r"saliency=False", "the same without --saliency"),
    (r"(?:parameters=)?LastLayers\(fraction=([\d.]+)\)", r"--last-fraction \1"),
    (r"(?:parameters=)?LastLayers\(count=(\d+)\)", r"--last-layers \1"),
    (r"parameters='all', or names from .*", "the same without --parameters"),
    (r"weights, likelihood and parameters=\.\.\.", "weights, likelihood and --parameters"),
    (r"Categorical\(directions=(\d+)\)", r"--directions \1"),
    (r"Categorical\(class_dim=(-?\d+)\)", r"--class-dim \1"),
    (r"class_dim to Categorical", "--class-dim"),
    (r"Gaussian\(variance=[^)]*\)", "--likelihood gaussian --variance NUMBER"),
    (r"(?:Nystrom|FrequentDirections|TwoSided)\(size=(\d+)\)", r"--size \1"),
    (rf"(?:sketch=)?({'|'.join(_OPTIONS_OF_CLASSES)})\(\)",
     lambda found: _OPTIONS_OF_CLASSES[found[1]]),
    (r"(?:Monitor\(\.\.\., )?rank=(\d+)\)?", r"--rank \1"),
    (r"\brank=(?=$|,)", "--rank"),
    (r"\b(false_alarm|confidence|prior_scale)=([\d.]+)",
     lambda found: f"--{found[1].replace('_', '-')} {found[2]}"),
    (r".*monitor\.calibrate\b.*", "scod calibrate MONITOR MODEL HELD_OUT_DATA"),
    (r".*\.fit\((?:train_)?loader\).*", "scod fit MODEL DATA --output FILE --likelihood NAME"),
    (r".*monitor\.save\b.*", "scod fit, which writes a monitor that is complete"),
    (r".*outputs=(?:lambda p: p\.log\(\)|torch\.logit).*", ""),
    (r".*outputs=.*", "let MODEL return a module whose output is the prediction alone"),
    (r".*inputs=.*", "let DATA yield what the model takes, and nothing else"),
    (r".*x\[None\].*", "save it with one more axis in front: a sample along the first"),
    (r".*\bx\.(?:astype|to)\(.*", "save the numbers in the dtype of the training"),
    (r".*DataLoader\(\.\.\., shuffle=False.*", "let DATA return batches in a fixed order"),
    (r".*\b(?:DataLoader|Dataset)\b.*\(.*", "let DATA return a Dataset, or batches"),
    (r".*Monitor\.load.*", "do this in Python: it was made with functions of yours"),
]  # fmt: skip
# options of a command that its next one has, too, with the defaults that need not be typed
_CARRIED = {"weights": None, "device": "cpu", "batch_size": 64, "drop": None, "target": None,
            "id": None}  # fmt: skip
_HELD_OUT = re.compile(r"held|valid|(?<![a-z])val(?![a-z])|calib", re.IGNORECASE)
_LISTED = 8  # files of a folder that are named
PLACEHOLDER, OTHER_PARTS = "HELD_OUT_DATA", "OTHER_PARTS"


def in_parts(text: str) -> tuple[str, str, str]:
    """Return what a message expected, what it found, and what to try in a shell.

    Args:
        text: As errors of the library have it; others have nothing that was found.

    Examples:
        >>> in_parts("expected finite numbers, got a NaN; type fit(..., on_bad='skip')")
        ('expected finite numbers', 'a NaN', '--on-bad skip')
        >>> in_parts("expected a float, got an int; type x.astype('float32')")[2]
        'save the numbers in the dtype of the training'
    """
    told, advice = _told_and_advice(text)
    between = _FOUND.search(told)
    expected, found = told, "none of the kind"
    if not told.startswith("expected"):
        found = ""
    elif between is not None:
        expected, found = told[: between.start()], told[between.end() :]
    return expected, found, advice


def one_line(text: str) -> str:
    """Return a message on one line, with its advice for a shell."""
    return "; ".join(_told_and_advice(text))


def _told_and_advice(text: str) -> tuple[str, str]:
    """Return a message without its advice, and the advice for a shell."""
    text = " ".join(text.split())
    cuts = list(_ADVICE.finditer(text))
    cut = next((cut for cut in cuts if _outside(text, cut.start())), cuts[-1] if cuts else None)
    told, advice = (text[: cut.start()], text[cut.end() :]) if cut else (text, "")
    return told, _translated(advice) or f"{_typed_verb()} --help"


def _outside(text: str, place: int) -> bool:
    """Return whether a place in a text is outside parentheses, which may quote other errors."""
    depth = 0
    for letter in text[:place]:
        depth += (letter in "([{") - (letter in ")]}" and depth > 0)
    return depth == 0


def _translated(advice: str) -> str:
    """Return advice for a shell, without the clauses that are about Python."""
    clauses, joints, start = [], [""], 0
    for joint in _JOINTS.finditer(advice):
        if _outside(advice, joint.start()):
            clauses.append(advice[start : joint.start()])
            joints.append("or " if "or" in joint[0] else "")
            start = joint.end()
    text = ""
    for joint_word, clause in zip(joints, [*clauses, advice[start:]], strict=True):
        clause = re.sub(r"^(or )?type:? ", "", clause.strip())
        if not re.search(rf"(^|: )({re.escape(program)}|pip|mkdir) ", clause):  # a command
            for pattern, instead in _IN_THE_SHELL:
                clause = re.sub(pattern, instead, clause)
            clause = "" if _PYTHON.search(clause) else clause
        if clause:
            text += f"; {joint_word}{clause}" if text else clause
    return text


def usage_text(error: Any) -> str:
    """Return a message on what was typed: what was expected, what came, what to type.

    Args:
        error: Of the parser of the command line.
    """
    ctx, command = error.ctx, getattr(error.ctx, "command", None)
    kind, message = type(error).__name__, error.format_message()
    if kind == "BadOptionUsage":
        return f"expected a value after {error.option_name}, got none; {_typed_verb()} --help"
    if command is None:
        return f"expected a command, got one that cannot be read ({message})"
    path = ctx.command_path
    if kind == "MissingParameter":
        return _missing(ctx)
    if kind == "NoSuchOption":
        known = [name for option in command.params for name in getattr(option, "opts", ())]
        near = nearest(error.option_name, [name for name in known if name.startswith("--")])
        return f"expected an option of {path}, got {error.option_name}; {_or_help(near, error)}"
    if "No such command" in message:
        wrong = message.partition("'")[2].partition("'")[0]
        near = nearest(wrong, command.commands)
        return f"expected a verb of {path}, got {wrong}; {_or_help(near, error, wrong)}"
    if "unexpected extra" in message:
        places = " ".join(_shown_name(p) for p in command.params if not _is_option(p))
        extra = message.rpartition("(")[2].rstrip(").")
        return (
            f"expected {path} {places} and options, got {extra} besides; put quotes around "
            "names with spaces"
        )
    return _bad_value(error)


def _bad_value(error: Any) -> str:
    option = _shown_name(error.param)
    wrong = _typed_value(error.param, error.ctx)
    told = re.search(r"(?:should be|is not in the range|is not) (.*)", error.message)
    right = "another" if told is None else told[1].replace("'", "").rstrip(".")
    if not right.startswith("one of"):
        right = right.partition(",")[0]
    near = nearest(wrong, re.findall(r"[\w-]+", right))
    return f"expected {option} to be {right}, got {wrong}; {_or_help(near, error, wrong)}"


def _typed_value(param: Any, ctx: Any) -> str:
    """Return what was given for an option, on the command line or in a file."""
    words = _words()
    for place, word in enumerate(words):
        option, equals, value = word.partition("=")
        if option in param.opts:
            return value if equals else words[place + 1]
    return str(ctx.lookup_default(param.name) or "another value")


def _missing(ctx: Any) -> str:
    """Return the message on everything required that is missing, in the order of the help."""
    absent = [
        param
        for param in ctx.command.params
        if param.required
        and ctx.params.get(param.name) in (None, (), [])
        and ctx.lookup_default(param.name) is None
    ]
    words = _words()
    for param in sorted(absent, key=_is_option):
        value = "FILE" if param.name == "output" else param.metavar or "NAME"
        words += [_shown_name(param), *([value] if _is_option(param) else [])]
    names = ", ".join(map(_shown_name, absent))
    given = "nothing for it" if len(absent) == 1 else "nothing for any of them"
    return f"expected {names}, got {given}; type: {shlex.join(words)}"


def _is_option(param: Any) -> bool:
    return bool(param.param_type_name == "option")


def _shown_name(param: Any) -> str:
    if _is_option(param):
        return str(max(param.opts, key=len))
    return str(param.metavar or param.name.upper())


def _or_help(near: str | None, error: Any, wrong: str = "") -> str:
    if near is None:
        return f"type {error.ctx.command_path} --help"
    return f"type: {corrected(wrong or error.option_name, near)}"


def nearest(wrong: str, known: Iterable[str], alike: float = 0.6) -> str | None:
    """Return the known name that was probably meant, in any case; None if none is like it.

    Examples:
        >>> nearest("guassian", ["gaussian", "bernoulli"]), nearest("x", ["gaussian"])
        ('gaussian', None)
    """
    names = {name.lower(): name for name in known}
    near = get_close_matches(wrong.lower(), names, 1, alike)
    return names[near[0]] if near else None


def file_advice(path: str) -> str:
    """Return what to type where there is no such file: the command with one of a like name."""
    folder, name = os.path.split(path)
    names = sorted(os.listdir(folder or ".")) if os.path.isdir(folder or ".") else []
    near = nearest(name, names, 0.7)  # suffixes alone are alike
    if near is not None:
        return f"type: {corrected(path, os.path.join(folder, near))}"
    listed = ", ".join([name for name in names if name[0] not in "._"][:_LISTED])
    return f"type the name of a file that is there: {listed or 'the folder has none'}"


def corrected(wrong: str, right: str) -> str:
    """Return the command that was typed with a word put right, to be pasted.

    Args:
        wrong: A word of it, or the part of one between ``=``, ``:`` and commas.
        right: What to put there.
    """
    words = _words()
    for place, word in enumerate(words):
        alone = re.search(rf"(^|[=:,]){re.escape(wrong)}($|[:,])", word)
        if alone is not None:
            start = alone.end(1)
            words[place] = word[:start] + right + word[start + len(wrong) :]
            return shlex.join(words)
    return f"{right}, if that was meant"


def debug_command() -> str:
    """Return the command that was typed, to be pasted, with its traceback shown."""
    return shlex.join([program, "--debug", *(w for w in _words()[1:] if w != "--debug")])


def _words() -> list[str]:
    """Return the command line, beginning with the name of the program."""
    return [program, *sys.argv[1:]]


def _typed_verb() -> str:
    """Return the program and its verb, as far as they were typed."""
    words = _words()
    return " ".join(words[:1] + [word for word in words[1:] if word.isalpha()][:1])


def follow_up(verb: str, monitor: object, given: Mapping[str, Any], *data: str) -> str:
    """Return the next command, to be pasted: with the names and options that were typed.

    Args:
        verb: What to do next.
        monitor: The saved monitor.
        given: Options of the command that ran, or of the fit as its monitor has noted them.
        data: What else the verb takes.

    Examples:
        >>> given = {"model": "my nets.py:net", "weights": "w.pt", "device": "cpu"}
        >>> follow_up("score", "m.scod", given, "new.csv")
        "scod score m.scod 'my nets.py:net' new.csv --weights w.pt"
    """
    return _pasted([verb, str(monitor), str(given["model"]), *data], given)


def _pasted(words: list[str], given: Mapping[str, Any]) -> str:
    """Return a command of words, and of the options that were typed and it has, too."""
    for name, default in _CARRIED.items():
        value = given.get(name)
        if value is not None and value != default:
            words += [f"--{name.replace('_', '-')}", str(value)]
    return shlex.join(["scod", *words])


def merge_command(part: Path, given: Mapping[str, Any]) -> tuple[str, str]:
    """Return the command that adds up the parts of a fit, and what its user has to know of it.

    Args:
        part: One of them.
        given: The model and its weights, as they were typed.
    """
    plain = {name: given.get(name) for name in ("weights", "device")}
    whole = str(part.with_name("whole.scod"))
    words = ["merge", str(given["model"]), str(part), OTHER_PARTS, "-o", whole]
    return _pasted(words, plain), f"with the other parts in the place of {OTHER_PARTS}"


def calibrate_command(
    monitor: object, given: Mapping[str, Any], notes: Mapping[str, Any]
) -> tuple[str, str]:
    """Return the command that calibrates a monitor, and what its user has to know of it.

    Args:
        monitor: Where it is.
        given: The model and its weights, as they were typed.
        notes: Of the monitor, which may name its training data; what columns are for is there.
    """
    plain = {name: given.get(name) for name in ("model", "weights", "device", "batch_size")}
    heldout = _held_out_beside(str(notes.get("fit", {}).get("data", "")))
    command = follow_up("calibrate", monitor, plain, heldout)
    there = f" in the place of {PLACEHOLDER}" * (heldout == PLACEHOLDER)
    return command, f"with data the fit has not seen{there}"


def _held_out_beside(data: str) -> str:
    """Return held-out data by its name, beside training data; a placeholder if there is none.

    Args:
        data: A file, a folder, or a callable of a module that has been imported.
    """
    path = Path(data)
    if path.exists():
        alike = [
            other for other in sorted(path.parent.iterdir()) if other.suffix == path.suffix
        ]
        alike = [other for other in alike if _HELD_OUT.search(other.name) and other != path]
        return str(alike[0]) if alike else PLACEHOLDER
    where, colon, name = data.rpartition(":")
    if not colon:
        return PLACEHOLDER
    module = sys.modules.get(where) or sys.modules.get(Path(where).stem)
    names = [n for n, value in vars(module).items() if callable(value)] if module else []
    alike_names = [n for n in names if _HELD_OUT.search(n) and n != name]
    return f"{where}:{alike_names[0]}" if alike_names else PLACEHOLDER
