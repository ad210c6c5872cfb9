"""Other libraries some baselines stand on: imported when they are used, not before."""

from __future__ import annotations

import importlib
import warnings
from types import ModuleType

from scodkit.errors import MissingPeerError

# without their dependencies: they list torchvision, of which nothing is used
_INSTALL = {
    "laplace": "laplace-torch==0.3 curvlinops-for-pytorch==3.0.1 asdfghjkl==0.1a4 "
    "backpack-for-pytorch==1.7.1 unfoldNd==0.2.3 einconv==0.1.0",
}


def peer(name: str) -> ModuleType:
    """Return another library's module.

    Args:
        name: Of the module: ``laplace`` or one of its submodules.

    Raises:
        MissingPeerError: If it is not installed, with what to type.
    """
    try:
        with warnings.catch_warnings():
            # one of laplace-torch's backends, of which nothing is used, asks for it
            warnings.filterwarnings("ignore", "`torch.jit.script`", DeprecationWarning)
            return importlib.import_module(name)
    except ImportError as error:
        packages = _INSTALL[name.split(".")[0]]
        raise MissingPeerError(
            f"expected the module {name}, which this baseline stands on, got: {error}; type "
            f"pip install 'scodkit[peers]' && pip install --no-deps {packages}"
        ) from error
