"""``tilth data show``: what a model will see of a recipe's data, and what would stop the run; and ``data tokenize``."""

import json
from collections.abc import Iterator
from dataclasses import asdict
from itertools import groupby
from operator import itemgetter

import typer
from rich.table import Table
from rich.text import Text

from tilth.cli.main import DataShowCommand, DataTokenizeCommand
from tilth.cli.tables import Terminal, new_table
from tilth.cli.tables import show as show_parts
from tilth.config.schema import Recipe
from tilth.launch.data_balance import BalanceReport
from tilth.launch.data_view import MixtureShare, ShownExample, View, look, tokenise
from tilth.ui import format

SHOWN = 600  # most tokens of an example in the terminal


def show(options: DataShowCommand, recipe: Recipe) -> None:
    """Print the findings and ``n`` examples. Exit code 1: something would stop the run."""
    view = look(recipe, options.n)
    if options.as_json:
        typer.echo(json.dumps(asdict(view), ensure_ascii=False))
    else:
        on_terminal = Terminal().is_terminal
        tables = balance_tables(view.balance) if view.balance else []
        show_parts(*lines(view), *tables, *(coloured(one) if on_terminal else plain(one) for one in view.examples))
    if view.problems:
        raise typer.Exit(1)


def tokenize(options: DataTokenizeCommand, recipe: Recipe) -> None:
    """Build the caches, and print a row for each source."""
    rows, notes = tokenise(recipe)
    if options.as_json:
        typer.echo(json.dumps([row._asdict() for row in rows]))
        return
    for row in rows:
        typer.echo(f"{row.source:<20} {row.samples:>12,} samples {row.tokens or 0:>15,} tokens {row.weight:>7.1%}")
    for note in notes:
        typer.echo(note)


# ---- printing ----


def lines(view: View) -> list[str]:
    """Return the findings, without the examples, as lines."""
    ends = " ".join(view.stops)
    what = "documents" if view.flow == "pretrain" else "prompts"
    of = f"{view.seen:,} of {view.train:,}" if what == "prompts" and view.seen < view.train else "all"
    rows = [
        ("data", f"{view.source}: {view.train:,} {what} to train on, {view.heldout:,} held out; figures are of {of}"),
        *(("mixture", _share(one)) for one in view.mixture),
        ("tokenizer", f"{view.tokenizer}, {view.vocabulary:,} tokens"),
        ("template", f"{view.template}; completions end with {ends}" + (view.stable and f"; {view.stable}")),
        ("context", f"{view.context} tokens"),
        *((f"{name} length", _lengths(view, name)) for name in view.lengths),
    ]
    if view.loss_share is not None:
        rows.append(("loss", f"on {view.loss_share:.1%} of all tokens"))
    if view.packing:
        p = view.packing
        text = f"{p.rows:,} a step in {p.micro_batches:.1f} micro-batches of {p.room:,} tokens, {p.fill:.0%} full"
        rows.append(("packing", f"{text}; padded rows would be {p.padding:.0%} padding"))
    rows += [("", note) for note in view.notes]
    rows += [("would stop", problem) for problem in view.problems]
    return [f"{name:<14} {text}" for name, text in rows]


def balance_tables(found: BalanceReport) -> list[Table | str]:
    """Return the histogram of lengths, and the balance of layouts."""
    shares = [(f"{b.least:,} to {b.most:,}", *map(format.part, (b.rows, b.tokens, b.cost))) for b in found.lengths]
    names = "tokens", "of sequences", "of tokens", "of cost"
    titles = "layout", "balance", "spread", "idle", "padding", "update"
    rows = [
        (
            " ".join(f"{axis}={n}" for axis, n in one.layout.items()) or "one device",
            one.balance,
            f"{one.spread:.2f}",
            format.part(one.idle),
            format.part(one.padding),
            format.brief(one.seconds),
        )
        for one in found.layouts
    ]
    error = "" if found.error is None else f", error {found.error:.1%}"
    return [
        "",
        new_table(*names, right=names[1:], rows=shares),
        f"\npredicted before any training, by {found.source}{error}; the recipe's layout first:",
        new_table(*titles, right=titles[2:], rows=rows),
    ]


def _share(one: MixtureShare) -> str:
    text = f"{one.source}: {one.samples:,} samples to train on, {one.weight:.1%} of the first step"
    return text if one.drawn is None else f"{text}; the run draws {one.drawn:,}, {one.drawn / one.samples:.2g} epochs"


def _lengths(view: View, name: str) -> str:
    found = view.lengths[name]
    longer = view.longer.get(name, 0)
    text = f"least {found.least:,}, median {found.median:,.0f}, p95 {found.p95:,.0f}, most {found.most:,} tokens"
    return text + (f"; {longer:,} too long" if longer else "")


def runs(example: ShownExample, most: int = SHOWN) -> Iterator[tuple[int, list[str]]]:
    """Group neighbouring tokens with the same mask: (mask, their texts)."""
    for mask, group in groupby(zip(example.mask[:most], example.texts), key=itemgetter(0)):
        yield mask, [text for _, text in group]


def _frame(example: ShownExample) -> tuple[str, str]:
    """Return a title, and a line that counts the tokens left out."""
    left = len(example.tokens) - SHOWN
    title = f"\n[{example.index}] {len(example.tokens):,} tokens, {sum(example.mask):,} with loss"
    return title, f"\n  and {left:,} tokens more" if left > 0 else ""


def plain(example: ShownExample) -> str:
    """Join tokens by a dot, with ``+`` before those with loss."""
    title, rest = _frame(example)
    parts = [f"{'+' if mask else ' '} {_visible('·'.join(texts))}" for mask, texts in runs(example)]
    return "\n".join([title, *parts]) + rest


def coloured(example: ShownExample) -> Text:
    """Colour tokens with loss green, the others grey; every other token is underlined."""
    title, rest = _frame(example)
    text = Text(f"{title}\n", style="bold")
    for i, (mask, token) in enumerate(zip(example.mask[:SHOWN], example.texts)):
        style = "not bold green" if mask else "not bold bright_black"
        text.append(_visible(token, "\n"), style=f"{style} underline" if i % 2 else style)
    return text.append(rest, style="not bold")


def _visible(text: str, after: str = "") -> str:
    """Replace line breaks and characters that would move the cursor."""
    shown = "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)
    return shown.replace("\n", f"⏎{after}")
