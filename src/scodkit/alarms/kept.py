"""Alarms as files: their state is plain numbers and tensors, and comes back as it was."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor
from typing_extensions import Self

from scodkit import artifact


class Kept:
    """An alarm whose state can be saved, and resumed in another process.

    Attributes:
        kind: What its files are called.
        plain: Names of its attributes that go into a file as they are.
    """

    kind: ClassVar[str]
    plain: ClassVar[tuple[str, ...]]

    def save(self, path: str | Path) -> None:
        """Write the state to a file, atomically; see `load`.

        Args:
            path: Where to.
        """
        header = {name: getattr(self, name) for name in self.plain}
        others, tensors = self._packed()
        artifact.write(path, self.kind, {**header, **others}, tensors)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Return what `save` wrote, to go on where it was, bit for bit.

        Args:
            path: Where from.

        Raises:
            ArtifactError: As a subclass: a file cut off, altered, or of another kind.
        """
        header, tensors = artifact.read(path, cls.kind)
        alarm = cls.__new__(cls)
        for name in cls.plain:
            setattr(alarm, name, header[name])
        alarm._unpack(header, tensors)
        return alarm

    def _packed(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return the rest of the state: what a header can hold, and tensors."""
        return {}, {}

    def _unpack(self, header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Take back what `_packed` returned; the plain attributes are there already."""
