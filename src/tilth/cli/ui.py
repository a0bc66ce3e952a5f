"""``tilth ui``: the page of the runs of a folder."""

import os
import sys
import threading
import webbrowser

import typer

from tilth.cli.main import UiCommand
from tilth.core.errors import PluginError

NEEDED = ("fastapi", "uvicorn", "plotly")
"""Modules of the extra."""


def serve(options: UiCommand) -> None:
    """Serve the page until a signal, and open it in a browser where there is one. PluginError: the extra is missing."""
    os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")  # its own keeps 80 MB of what searches took
    try:
        import plotly  # noqa: F401  (imported when the first chart is asked for)

        from tilth.ui.web.app import PageServer
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in NEEDED:
            raise
        message = f"tilth ui needs {error.name}, which is not installed; in Tilth's folder: pip install '.[ui]'"
        raise PluginError(message, key="ui.extra") from error
    server = PageServer(options.folder, options.host, options.port, options.token)
    typer.echo(f"{options.folder} at {server.address}; Ctrl-C ends it", err=True)
    screen = sys.platform in ("darwin", "win32") or os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    if screen and not options.no_open:
        threading.Thread(target=webbrowser.open, args=(server.address,), daemon=True).start()
    server.run_here()
