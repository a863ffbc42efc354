"""How servers are reached, from a file, so that credentials are on no command line."""

import json
from pathlib import Path
from typing import Any

from cellfeed import FormatError, PathError

__all__ = ["read_storage_options"]


def read_storage_options(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; errors quote nothing of it.

    Raises
    ------
    PathError
        The file cannot be read.
    FormatError
        It is not a JSON object.
    """
    try:
        text = path.read_text("utf-8")
    except OSError as error:
        msg = f"{path}: cannot be read ({error.strerror}); give a JSON file of storage options"
        raise PathError(msg) from None
    except UnicodeDecodeError:
        text = ""
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        msg = f'{path}: not a JSON object; write storage options such as {{"region": "eu-west-1"}}'
        raise FormatError(msg)
    return found
