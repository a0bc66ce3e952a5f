"""Verdict on copies that differ between ranks: digests of all ranks -> who holds the odd one.

Silent corruption leaves no error. Copies that must be equal find it at the end of the step (``checkpoint.copies``):
with three or more of them the odd one is named, with two nobody can tell which is right. Tensors that one rank alone
holds have no copy to compare with.
"""

from collections import Counter
from collections.abc import Iterable, Mapping

from tilth.guard.verdict import Verdict

NAMED = 4
"""Most tensors in the evidence."""


def compare(digests: Mapping[int, Mapping[int, int]], role: str = "") -> Verdict | None:
    """Return the verdict on copies that differ, or None. digests: rank -> its ``Copies.digests``."""
    odd, unsure = set[int](), list[set[int]]()
    for holders in {holders for own in digests.values() for holders in own}:
        found = {rank: own[holders] for rank, own in digests.items() if holders in own}
        (usual, most), *others = Counter(found.values()).most_common()
        if not others:
            continue
        if 2 * most > len(found):
            odd |= {rank for rank, digest in found.items() if digest != usual}
        else:
            unsure.append(set(found))
    if not odd and not unsure:
        return None
    open_ = [ranks for ranks in unsure if not ranks & odd]  # who differs elsewhere explains it
    ranks = tuple(sorted(odd.union(*open_)))
    listed = ", ".join(map(str, ranks))
    if open_:
        evidence = f"{role} copies on ranks {listed} differ, and there is no majority to tell which are right"
    else:
        evidence = f"{role} copies on rank{'s' if len(ranks) > 1 else ''} {listed} differ from those on most ranks"
    return Verdict("corruption", ranks, evidence.strip(), {"majority": not open_})


def differing(tensors: Iterable[Mapping[str, tuple[int, int]]]) -> list[str]:
    """Return the tensors of which copies differ, sorted. tensors: of each rank, as ``Copies.tensors`` has them."""
    seen: dict[tuple[str, int], set[int]] = {}
    for own in tensors:
        for name, (holders, value) in own.items():
            seen.setdefault((name, holders), set()).add(value)
    return sorted({name for (name, _), values in seen.items() if len(values) > 1})


def shortened(names: list[str]) -> str:
    """Return the first names as text, and how many there are."""
    return ", ".join(names[:NAMED]) + (f" and {len(names) - NAMED} more" if len(names) > NAMED else "")
