"""HTML that is escaped by construction: whatever is not ``Html`` is text."""

import html
import json
from collections.abc import Iterable


class Html(str):
    """Markup made by ``tag``, ``join`` or this program itself; never made of a run's data directly."""

    __slots__ = ()


def escape(value: object) -> Html:
    """``Html`` as it is, anything else as text."""
    return value if isinstance(value, Html) else Html(html.escape(str(value)))


def join(parts: Iterable[object]) -> Html:
    """Parts one after another; None is nothing."""
    return Html("".join(escape(p) for p in parts if p is not None))


def tag(name: str, *children: object, **attributes: object) -> Html:
    """An element. ``class_`` and ``data_x`` become class and data-x; None leaves an attribute out, True is bare."""
    shown = []
    for key, value in attributes.items():
        key = key.rstrip("_").replace("_", "-")
        if value is True:
            shown.append(f" {key}")
        elif value is not None and value is not False:
            shown.append(f' {key}="{html.escape(str(value))}"')
    return Html(f"<{name}{''.join(shown)}>{join(children)}</{name}>")


def embed(value: object) -> Html:
    """JSON for a script element of type application/json: no text in it can end the element."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return Html(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))
