"""``tilth top RUN``: watch a running run from another terminal."""

import json
import time

import typer
from rich.console import Console
from rich.live import Live
from rich.text import Text

from tilth.cli.main import TopCommand
from tilth.cli.show import check_run
from tilth.cli.tables import Terminal
from tilth.ui.live import PLAIN_EVERY, line
from tilth.ui.top import Look, RunWatcher, as_dict, drawn


def top(options: TopCommand) -> None:
    """Show a run until it ends."""
    check_run(options.run)
    watch, console = RunWatcher(options.run), Terminal(highlight=False)
    look = watch.look()
    if options.as_json:
        typer.echo(json.dumps(as_dict(look), allow_nan=False))
    elif options.once or not look.running:
        console.print(drawn(look, console.width))
    else:
        try:
            _follow(watch, look, console, options.every)
        except KeyboardInterrupt:  # the end of watching, not of the run
            return


def _follow(watch: RunWatcher, look: Look, console: Console, every: float) -> None:
    if not console.is_terminal:
        _lines(watch, look, console, every)
        return
    with Live(drawn(look, console.width), console=console, auto_refresh=False, vertical_overflow="crop") as live:
        while look.running:
            time.sleep(every)
            look = watch.look()
            live.update(drawn(look, console.width), refresh=True)


def _lines(watch: RunWatcher, look: Look, console: Console, every: float) -> None:
    """Print a line every few seconds, after new steps only, and the state at the end; for output without a terminal."""
    shown, after = 0, 0.0
    while True:
        step = look.progress.record.get("step", 0)
        if step != shown and (time.monotonic() >= after or not look.running):
            console.print(Text(line(look.progress)), soft_wrap=True)
            shown, after = step, time.monotonic() + PLAIN_EVERY
        if not look.running:
            console.print(Text(f"{look.run.name}: {look.state['state']}"), soft_wrap=True)
            return
        time.sleep(every)
        look = watch.look()
