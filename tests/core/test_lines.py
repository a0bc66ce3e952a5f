"""Opening a file of lines keeps its whole lines up to the last object, wherever blocks of reading end."""

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tilth.core import lines
from tilth.core.lines import Lines

PARTS = st.lists(st.sampled_from([b'{"a": 1}\n', b'{"b": "' + 30 * b"x" + b'"}\n', b"7\n", b"\n", b'{"t', b"z" * 40]))


def whole(data, text):
    """What stays of these bytes: computed from the front."""
    complete = data.splitlines(keepends=True)
    if complete and not complete[-1].endswith(b"\n"):
        complete.pop()
    while not text and complete and not lines._is_object(complete[-1]):
        complete.pop()
    return b"".join(complete)


@settings(max_examples=examples(200), deadline=None)
@given(PARTS.map(b"".join), st.booleans(), st.integers(1, 70))
def test_what_follows_the_last_object_is_dropped(tmp_path_factory, data, text, block):
    path, before = tmp_path_factory.mktemp("lines") / "some.jsonl", lines._BLOCK
    path.write_bytes(data)
    lines._BLOCK = block
    try:
        opened = Lines(path, text=text)
    finally:
        lines._BLOCK = before
    opened.append('{"new": 1}')
    opened.close()
    kept = whole(data, text)
    assert opened.dropped == data[len(kept) :] and path.read_bytes() == kept + b'{"new": 1}\n'
