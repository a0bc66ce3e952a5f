"""Work of contenders: their seconds are compared only where they did the same.

A benchmark counts what each contender has done (tokens that came out, bytes that were written, steps that were made),
from what it returned and not from what it was asked for, and calls ``same_work`` before it prints or writes a ratio.
"""

import math
from collections.abc import Mapping

Work = Mapping[str, float]
"""What a contender has done: "generated_tokens", "bytes", "steps" -> amount."""


class UnequalWork(AssertionError):
    """Contenders of a benchmark have done different amounts of work."""


def same_work(work: Mapping[str, Work], within: float = 0.0) -> None:
    """Compare what contenders have done, by their names. within: relative difference that is allowed.

    Raises UnequalWork, which names the contenders and the amounts, for other kinds or amounts than the first one's.
    """
    (first, wanted), *others = work.items()
    for name, done in others:
        for kind in sorted({*wanted, *done}):
            mine, theirs = wanted.get(kind, math.nan), done.get(kind, math.nan)
            if not abs(mine - theirs) <= within * abs(mine):  # nor is anything like nan
                raise UnequalWork(f"{first} has done {mine:g} {kind}, {name} {theirs:g}: no ratio of their times")
