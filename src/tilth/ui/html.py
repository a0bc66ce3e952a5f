"""Render pages and pictures from the templates beside this module; values are escaped."""

import json
from functools import cache
from importlib.resources import files

from jinja2 import DictLoader, Environment, StrictUndefined, UndefinedError
from markupsafe import Markup

from tilth.ui import format


def text_of(name: str) -> str:
    """Read a file in the folder of templates."""
    return (files("tilth.ui") / "templates" / name).read_text(encoding="utf-8")


@cache
def _environment() -> Environment:
    """Load the templates without line ends and indents, so that there is no text between elements."""
    names = [file.name for file in (files("tilth.ui") / "templates").iterdir()]
    texts = {name: "".join(line.lstrip() for line in text_of(name).splitlines()) for name in names}
    found = Environment(loader=DictLoader(texts), autoescape=True, undefined=StrictUndefined)
    plain = (format.part, format.share, format.number, format.timed, format.size, format.figure, format.phase_name)
    more = (format.bounds, format.unclear, format.amount, format.date, format.ago)
    figures = (format.behind, format.generation, format.steps)
    found.filters |= {function.__name__: function for function in (*plain, *more, *figures)}
    found.filters |= {"g": "{:g}".format, "counted": format.count}
    found.globals["zip"] = zip
    return found


def render(template: str, **values: object) -> Markup:
    """Return a template with these values. LookupError: it uses one that is not there."""
    try:
        return Markup(_environment().get_template(template).render(values))
    except UndefinedError as error:
        raise LookupError(f"{template}: {error}") from error


def embed(value: object) -> Markup:
    """Return JSON for a script element of type application/json; no text in it can end the element."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return Markup(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))
