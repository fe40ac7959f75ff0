"""Imports what an adapter needs and the core does not: with an error that says what to install.

Called by the adapters' entry points, when an environment is made and not before: the module of an adapter
imports without its library.
"""

from __future__ import annotations

import importlib
from types import ModuleType


def load_extra(module: str, extra: str, environment: str) -> ModuleType:
    """Imports an optional library.

    Args:
        module: what to import, for example `aiohttp`.
        extra: the extra of this distribution that brings it, for example `http`.
        environment: name of the environment that needs it, for the message.

    Raises:
        ModuleNotFoundError: it is not installed; the text has the command that installs it.
        ImportError: it is installed and cannot be imported, as it says.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module.partition(".")[0]:
            raise
        raise ModuleNotFoundError(
            f"the environment {environment!r} needs {module}, which is not installed; "
            f"install it: pip install 'asyncrl[{extra}]'",
            name=error.name,
        ) from None
