"""The blocks of README.md and docs/, and the commands in them, as they stand there."""

import re
import shlex
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = ("README.md", *sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("docs/**/*.md")))
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
_COMMAND = re.compile(
    r"(\$ )?(?:tilth|make|pip|python3?|ray|export|mkdir|scp|torchrun|srun|hf|cd|cp|printf|source|\.)\s"
)


@dataclass(frozen=True)
class Command:
    """A line of a block of commands, without its comment."""

    page: str
    text: str

    @cached_property
    def words(self) -> list[str]:
        """The line as a shell divides it."""
        return shlex.split(self.text)

    @property
    def own(self) -> list[str]:
        """What follows ``tilth``, also where a launcher stands before it; empty where it is no command of ours."""
        for at, word in enumerate(self.words):
            if word in ("tilth", "tilth)"):
                return self.words[at + 1 :]
        return []


@dataclass(frozen=True)
class Block:
    """A fenced block."""

    page: str
    language: str
    text: str

    @property
    def first(self) -> str:
        """Its first line, which names it."""
        return self.text.partition("\n")[0]

    @property
    def commands(self) -> list[Command]:
        """Of a block of commands; where they follow a ``$`` the other lines are what they print."""
        lines = self.text.replace("\\\n", " ").splitlines()
        if self.language or not _COMMAND.match(lines[0]):
            return []
        if lines[0].startswith("$ "):
            lines = [line[2:] for line in lines if line.startswith("$ ")]
        return [Command(self.page, found) for line in lines if (found := _bare(line))]


def _bare(line: str) -> str:
    """Without the comment: a # that stands behind a space and outside of quotes."""
    lexer = shlex.shlex(line, posix=False, punctuation_chars=False)
    lexer.whitespace_split, lexer.commenters = True, "#"
    return " ".join(lexer)


def blocks(page: str) -> list[Block]:
    """All fenced blocks of a page, in order."""
    return [Block(page, *found) for found in _BLOCK.findall((ROOT / page).read_text())]
