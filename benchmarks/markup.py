"""Elements of an SVG as text that is escaped unless it is markup already."""

from collections.abc import Iterable

from markupsafe import Markup, escape


def join(parts: Iterable[object]) -> Markup:
    """Parts one after another; None is nothing."""
    return Markup("").join(escape(p) for p in parts if p is not None)


def tag(name: str, *children: object, **attributes: object) -> Markup:
    """An element. ``class_`` and ``stroke_width`` become class and stroke-width."""
    shown = "".join(f' {key.rstrip("_").replace("_", "-")}="{escape(value)}"' for key, value in attributes.items())
    return Markup(f"<{name}{shown}>{join(children)}</{name}>")
