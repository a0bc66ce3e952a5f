"""Work of reading a body that is wrong: it must not grow faster than the body."""

import json

import pytest

from tilth.serve import errors
from tilth.serve.errors import MOST, HttpError, read
from tilth.serve.schemas import ChatBody, CompletionBody, DetokenizeBody


class Branch(str):
    """Name of a branch of a union in the place of an error, which counts what it is compared with."""

    compared = 0
    __hash__ = str.__hash__

    def __eq__(self, other):
        Branch.compared += 1
        return str.__eq__(self, other)


def test_the_name_of_a_branch_is_not_sought_in_a_list():
    place = {"type": "literal_error", "loc": ("content", Branch("list[part]"), 3, "type")}
    assert errors._path(place, {"content": [{"type": "x"}] * 1000}) == ["content", "3", "type"]
    assert Branch.compared == 0


MANY = {f"x{i}": 1 for i in range(20_000)}
WRONG = [
    (CompletionBody, {"prompt": [True] * 20_000}, "prompt.0"),
    (CompletionBody, {"prompt": [[1], [True] * 20_000]}, "prompt.1.0"),
    (DetokenizeBody, {"tokens": [True] * 20_000}, "tokens.0"),
    (ChatBody, {"messages": [{"role": "user", "content": [{"type": "x"}] * 20_000}]}, "messages.0.content.0.type"),
    (CompletionBody, {"prompt": "a", "metadata": MANY}, "body"),
    (DetokenizeBody, {"tokens": [1], **MANY}, "body"),
]


@pytest.mark.parametrize("schema, body, param", WRONG)
def test_few_of_many_wrong_fields_are_looked_at(schema, body, param, monkeypatch):
    seen = []
    whole = errors._path
    monkeypatch.setattr(errors, "_path", lambda wrong, value: seen.append(wrong) or whole(wrong, value))
    with pytest.raises(HttpError) as caught:
        read(schema, json.dumps({"model": "m", **body}).encode())
    assert (caught.value.status, caught.value.param) == (400, param) and len(seen) <= MOST
