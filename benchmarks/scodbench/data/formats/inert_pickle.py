"""Reading a pickle's contents without ever unpickling it.

A pickle is a small program; `pickle.load` runs it, and it may call anything. Here the program
is only read: `pickletools.genops` splits it into instructions, and those that build numbers,
strings, tuples, lists and dicts are followed. An instruction to import becomes a `Name`, one to
call becomes a `Call`, both plain records of text: nothing is imported, looked up, called or
given a state. Whoever wants what a call would have made has to recognise the record.

Instructions are those that Python 2 writes in protocol 2, as the published CIFAR-10 files were
written; any other is refused.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from scodbench.data.errors import FormatError


@dataclass(frozen=True)
class Name:
    """Something a pickle wants imported; it is not."""

    module: str
    name: str


@dataclass
class Call:
    """Something a pickle wants called, and its result filled; neither is done.

    Args:
        function: What to call, as the pickle says it.
        arguments: With what.
        state: What to fill the result with.
    """

    function: object
    arguments: object
    state: object = None


def read_inert(pickled: bytes) -> Any:
    r"""Return what a pickle holds, with imports and calls as records.

    Args:
        pickled: The pickle.

    Returns:
        Numbers, bytes, tuples, lists and dicts, `Name` and `Call`.

    Raises:
        FormatError: If it is cut off, or uses an instruction that plain data does not need.

    Examples:
        >>> read_inert(b"\x80\x02}U\x06labels]K\x05as.")
        {b'labels': [5]}
        >>> read_inert(b"\x80\x02cos\nsystem\nU\x02ls\x85R.")
        Call(function=Name(module='os', name='system'), arguments=(b'ls',), state=None)
    """
    try:
        return _follow(pickled)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise FormatError(f"expected a whole pickle of plain data, got: {error}") from error


def _follow(pickled: bytes) -> Any:
    reader = _Reader()
    for instruction, argument, _ in pickletools.genops(pickled):
        if instruction.name not in _ACTIONS:
            raise ValueError(f"the instruction {instruction.name}")
        _ACTIONS[instruction.name](reader, argument)
    (result,) = reader.stack
    return result


class _Reader:
    """The stack such a program works on."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}

    def since_mark(self) -> list[Any]:
        """Return everything above the last mark, taken off the stack."""
        mark = self.marks.pop()
        taken = self.stack[mark:]
        del self.stack[mark:]
        return taken

    def push(self, value: object) -> None:
        self.stack.append(value)

    def push_string(self, text: str) -> None:
        # genops shows the bytes of Python 2 strings as text, one character each
        self.push(text.encode("latin-1"))

    def push_name(self, text: str) -> None:
        self.push(Name(*text.split(" ", 1)))

    def push_tuple(self, size: int) -> None:
        values = tuple(self.stack[-size:])
        del self.stack[-size:]
        self.push(values)

    def mark(self) -> None:
        self.marks.append(len(self.stack))

    def remember(self, place: int) -> None:
        self.memo[place] = self.stack[-1]

    def call(self) -> None:
        arguments, function = self.stack.pop(), self.stack.pop()
        self.push(Call(function, arguments))

    def build(self) -> None:
        state = self.stack.pop()
        self.stack[-1].state = state

    def extend(self, values: list[Any]) -> None:
        self.stack[-1].extend(values)

    def set_items(self, items: list[Any]) -> None:
        self.stack[-1].update(zip(items[::2], items[1::2], strict=True))


_ACTIONS: dict[str, Callable[[_Reader, Any], None]] = {
    "PROTO": lambda reader, _: None,
    "STOP": lambda reader, _: None,
    "MARK": lambda reader, _: reader.mark(),
    "NONE": lambda reader, _: reader.push(None),
    "NEWTRUE": lambda reader, _: reader.push(True),
    "NEWFALSE": lambda reader, _: reader.push(False),
    "BININT": _Reader.push,
    "BININT1": _Reader.push,
    "BININT2": _Reader.push,
    "SHORT_BINSTRING": _Reader.push_string,
    "BINSTRING": _Reader.push_string,
    "EMPTY_TUPLE": lambda reader, _: reader.push(()),
    "TUPLE1": lambda reader, _: reader.push_tuple(1),
    "TUPLE2": lambda reader, _: reader.push_tuple(2),
    "TUPLE3": lambda reader, _: reader.push_tuple(3),
    "TUPLE": lambda reader, _: reader.push(tuple(reader.since_mark())),
    "EMPTY_LIST": lambda reader, _: reader.push([]),
    "APPEND": lambda reader, _: reader.extend([reader.stack.pop()]),
    "APPENDS": lambda reader, _: reader.extend(reader.since_mark()),
    "EMPTY_DICT": lambda reader, _: reader.push({}),
    "SETITEM": lambda reader, _: reader.set_items([reader.stack.pop(-2), reader.stack.pop()]),
    "SETITEMS": lambda reader, _: reader.set_items(reader.since_mark()),
    "BINPUT": _Reader.remember,
    "LONG_BINPUT": _Reader.remember,
    "BINGET": lambda reader, place: reader.push(reader.memo[place]),
    "LONG_BINGET": lambda reader, place: reader.push(reader.memo[place]),
    "GLOBAL": _Reader.push_name,
    "REDUCE": lambda reader, _: reader.call(),
    "BUILD": lambda reader, _: reader.build(),
}
