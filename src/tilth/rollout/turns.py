"""Words and tool calls of one turn of the policy, and the stop string that ended it."""

from collections.abc import Collection

from tilth.core.trajectory import Trajectory
from tilth.engines.stops import Decodes, SpelledText, StopStrings
from tilth.envs.calls import ToolCall, cut_out, find_calls


def split_turn(
    tokenizer: Decodes, turn: Trajectory, stop_tokens: Collection[int], start: int = 0
) -> tuple[str, list[ToolCall]]:
    """Return what a turn says beside its calls, without special tokens, and the calls; broken ones with their problem.

    A stop string ends both. Tags of calls may be special tokens, which the text of a trajectory is without. start:
    first token of the turn.
    """
    ids = turn.tokens[start:][turn.mask[start:] == 1].tolist()
    ended = bool(ids) and ids[-1] in stop_tokens
    ids = ids[:-1] if ended else ids
    spans, calls = find_calls(tokenizer.decode(ids, special=True))
    if not calls:
        return turn.text, []
    both, longest = SpelledText(tokenizer), len(turn.text)
    for id in ids:
        both.push(id)
    if turn.finish == "stop" and not ended:
        spans, calls = find_calls(both.spelled_until(longest))
    said = cut_out(turn.text, [(min(both.place(a), longest), min(both.place(b), longest)) for a, b in spans])
    return said.rstrip() if calls else turn.text, calls


def stop_string(
    tokenizer: Decodes, turn: Trajectory, stop_tokens: Collection[int], wanted: Collection[str], start: int = 0
) -> str | None:
    """Return the one of the wanted stop strings that ended a turn, the shortest of several; None if none did.

    start: first token of the turn.
    """
    ids = turn.tokens[start:][turn.mask[start:] == 1].tolist()
    if not wanted or turn.finish != "stop" or (ids and ids[-1] in stop_tokens):
        return None
    watch = StopStrings((*wanted,), tokenizer, tokenizer.special(), len(ids) - 1)  # its last token has ended it
    watch.push(ids)
    return watch.found.string if watch.found is not None and watch.found.place == len(turn.text) else None
