"""HTML from the templates beside this module, escaped."""

from typing import Any

import jinja2

from cellfeed_tuner._reports import _wording
from cellfeed_tuner._result import AutotuneResult

__all__ = ["rendered"]

_TEMPLATES = jinja2.Environment(
    loader=jinja2.PackageLoader(__package__),
    autoescape=True,
    trim_blocks=True,
    lstrip_blocks=True,
    undefined=jinja2.StrictUndefined,
)


def rendered(template: str, result: AutotuneResult, **values: Any) -> str:
    """Return what a template makes of a result."""
    made = _TEMPLATES.get_template(template).render(
        result=result, words=_wording, key_figures=_wording.key_figures(result), **values
    )
    return made.encode("utf-8", "replace").decode()  # names of files need not be UTF-8
