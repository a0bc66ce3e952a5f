"""Render pages and pictures from the templates beside this module; values are escaped."""

import json
from collections.abc import Callable
from functools import cache
from importlib.resources import files

from jinja2 import BaseLoader, Environment, StrictUndefined
from markupsafe import Markup

from tilth.ui import format


class _Templates(BaseLoader):
    """Load templates without line ends and indents, so that there is no text between elements."""

    def get_source(self, environment: Environment, template: str) -> tuple[str, str, Callable[[], bool]]:
        """Return text and name of a template, and that it never changes."""
        return "".join(line.lstrip() for line in text_of(template).splitlines()), template, lambda: True


def text_of(name: str) -> str:
    """Read a file in the folder of templates."""
    return (files("tilth.ui") / "templates" / name).read_text(encoding="utf-8")


@cache
def _environment() -> Environment:
    found = Environment(loader=_Templates(), autoescape=True, undefined=StrictUndefined)
    found.filters |= {"part": format.part, "share": format.share, "number": format.number, "g": "{:g}".format}
    found.globals["zip"] = zip
    return found


def render(template: str, **values: object) -> Markup:
    """Render a template with these values."""
    return Markup(_environment().get_template(template).render(values))


def embed(value: object) -> Markup:
    """Return JSON for a script element of type application/json; no text in it can end the element."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return Markup(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))
