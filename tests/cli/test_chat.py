"""A conversation says what the model says, never tokenises a turn twice, and ends only what it is told to end."""

import os
import pty
import select
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from tests.cli import speaking
from tests.examples import examples
from tilth.cli import chat
from tilth.cli.chat import Chat, Conversation
from tilth.cli.main import ChatCommand, GenerateCommand, app
from tilth.core.trajectory import Trajectory
from tilth.data.columns import Prompt
from tilth.data.template import make_template
from tilth.data.tokenizer import Tokenizer
from tilth.runs.models import load_model
from tilth.serve.choices import StreamedText


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "plain"
    return folder, *speaking.directory(folder)


@pytest.fixture(scope="module")
def chatty(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "chatml"
    return folder, *speaking.directory(folder, template="chatml")


def say(folder, text, *options):
    return CliRunner().invoke(
        app, ["chat", str(folder), "--temperature", "0", "--max-tokens", "12", *options], input=text
    )


def said(tokenizer, ids):
    return tokenizer.decode(ids)


# ---- what is said ----


def test_turns_are_put_together_as_they_stand_without_a_template(plain):
    folder, model, tokenizer = plain
    result = say(folder, "How are you?\n12+34=\n")
    assert result.exit_code == 0, result.output
    ids = tokenizer.encode("How are you?")
    first = speaking.greedy(model, ids, 12, tokenizer.stop_ids)
    ids += [t for t in first if t not in tokenizer.stop_ids] + tokenizer.encode("12+34=", special=False)
    second = speaking.greedy(model, ids, 12, tokenizer.stop_ids)
    assert result.stdout == f"{said(tokenizer, first)}\n{said(tokenizer, second)}\n"
    assert "turns are put together as they stand" in result.stderr


def test_turns_go_through_the_model_s_template(chatty):
    folder, model, tokenizer = chatty
    result = say(folder, "How are you?\n12+34=\n", "--system", "I am well")
    template = make_template("model", tokenizer)
    words, newline = tokenizer.vocabulary(), tokenizer.encode("\n")
    begin, end = words["<|im_start|>"], words["<|im_end|>"]
    system = {"role": "system", "content": "I am well"}
    ids = template.prompts([Prompt(0, "", messages=(system, {"role": "user", "content": "How are you?"}))])[0]
    first = speaking.greedy(model, ids, 12, template.stops)
    ids = [*ids, *first, *([] if first[-1] in template.stops else [end]), *newline, begin]
    ids += [*tokenizer.encode("user\n12+34="), end, *newline]
    ids += [begin, *tokenizer.encode("assistant\n")]
    second = speaking.greedy(model, ids, 12, template.stops)
    assert result.stdout == f"{said(tokenizer, first)}\n{said(tokenizer, second)}\n"
    assert "by its chat template" in result.stderr


def test_reset_forgets_and_quit_ends(plain):
    folder = plain[0]
    once = say(folder, "How are you?\n").stdout
    again = say(folder, "How are you?\n12\n\n/reset\nHow are you?\n/quit\nnever said\n").stdout.splitlines()
    assert again[0] == again[2] == once.rstrip("\n") and len(again) == 3 and again[1] != again[0]


def test_the_same_seed_says_the_same(plain):
    talk = [say(plain[0], "How\nare\n", "--temperature", "1", "--seed", seed).stdout for seed in "112"]
    assert talk[0] == talk[1] != talk[2]


def test_commands_are_told_and_not_said(plain):
    result = say(plain[0], "/help\n/what\n")
    assert result.stdout == "" and "/reset   begin anew" in result.stderr and "no command /what" in result.stderr


def test_a_line_that_cannot_be_read_is_told_and_the_next_one_answered(tmp_path):
    model, tokenizer = speaking.directory(tmp_path / "m", tokenizer=Tokenizer.characters("0123456789+="))
    result = say(tmp_path / "m", "what?\n1+2=\n")
    assert result.exit_code == 0 and "error: the tokenizer has no token for" in result.stderr
    assert result.stdout == said(tokenizer, speaking.greedy(model, tokenizer.encode("1+2="), 12, (1,))) + "\n"


def test_a_full_context_is_told_with_what_to_do(tmp_path):
    speaking.directory(tmp_path / "m", context=16, tokenizer=Tokenizer.characters("0123456789+="))
    result = say(tmp_path / "m", "1+2=\n1+2+3+4+5+6=\n/reset\n1+2=\n")
    assert "than the context of 16 has room for; /reset begins anew" in result.stderr
    assert len(result.stdout.splitlines()) == 2
    assert "the context of 16 tokens is full; /reset" in say(tmp_path / "m", "1+2=1+2=1+2=\n").stderr
    cut = say(tmp_path / "m", "1+2=\n", "--max-tokens", "2").stderr
    assert "cut after 2 tokens, see --max-tokens" in cut or len(result.stdout) < 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--system", "be kind"], "has no chat template"),
        (["--template", "model"], "no chat template"),
        (["--template", "none.jinja"], "none.jinja"),
        (["--top-p", "7"], "top_p is 7.0"),
    ],
)
def test_what_cannot_be(plain, options, message):
    result = say(plain[0], "How\n", *options)
    assert result.exit_code == 2 and message in result.stderr


# ---- ids ----


def trajectory(ids, said_ids, text=""):
    mask = np.r_[np.zeros(len(ids), np.uint8), np.ones(len(said_ids), np.uint8)]
    tokens = np.array([*ids, *said_ids], np.int64)
    return Trajectory(0, 0, 0, tokens, mask, np.zeros(len(tokens), np.float32), text=text)


FORGETS_THOUGHTS = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['role'] == 'assistant' and not loop.last %}{{ m['content'].split('they')[-1] }}"
    "{% else %}{{ m['content'] }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""As Qwen3's does: what was thought is left out of earlier turns, so no conversation begins as its beginning did."""


@pytest.mark.parametrize("source", ["chatml", FORGETS_THOUGHTS])
def test_earlier_turns_keep_their_very_ids(source, tmp_path):
    """Also an answer whose ids are not those that its text would get, and one that the template would shorten."""
    tokenizer = Tokenizer.train(speaking.TEXTS, 300)
    if source != "chatml":
        (tmp_path / "t.jinja").write_text(source)
        source = str(tmp_path / "t.jinja")
    conversation = Conversation(make_template(source, tokenizer), tokenizer)
    end = tokenizer.vocabulary()["<|im_end|>"]
    odd = [i for letter in "so are they well" for i in tokenizer.encode(letter, special=False)]
    assert odd != tokenizer.encode("so are they well")
    first = conversation.ask("How are you?")
    conversation.keep(trajectory(first, [*odd, end], "so are they well"))
    second = conversation.ask("12+34=")
    assert second[: len(first) + len(odd) + 1] == [*first, *odd, end]
    rest = tokenizer.decode(second[len(first) + len(odd) + 1 :], special=True)
    assert rest == "\n<|im_start|>user\n12+34=<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("ended", [True, False])
def test_an_answer_that_was_cut_gets_its_end(ended):
    tokenizer = Tokenizer.train(speaking.TEXTS, 300)
    conversation = Conversation(make_template("chatml", tokenizer), tokenizer)
    end = tokenizer.vocabulary()["<|im_end|>"]
    first = conversation.ask("How?")
    words = tokenizer.encode("I am")
    conversation.keep(trajectory(first, [*words, *([end] if ended else [])], "I am"))
    text = tokenizer.decode(conversation.ask("12"), special=True)
    assert text.count("I am<|im_end|>\n<|im_start|>user\n12<|im_end|>") == 1


def test_a_turn_is_what_the_template_makes_of_the_whole_conversation():
    """Where answers tokenise as they were said, ids are those of the template itself."""
    tokenizer = Tokenizer.train(speaking.TEXTS, 300)
    template = make_template("chatml", tokenizer)
    conversation, messages = (
        Conversation(template, tokenizer, "I am well"),
        [{"role": "system", "content": "I am well"}],
    )
    for question, answer in (("How?", "so"), ("12+34=", "46"), ("what?", "it")):
        messages.append({"role": "user", "content": question})
        ids = conversation.ask(question)
        assert ids == template.prompts([Prompt(0, question, messages=tuple(messages))])[0]
        said_ids = [*tokenizer.encode(answer, special=False), tokenizer.vocabulary()["<|im_end|>"]]
        conversation.keep(trajectory(ids, said_ids, answer))
        messages.append({"role": "assistant", "content": answer})


TRAINED = Tokenizer.train(speaking.TEXTS, 300)
turns = st.lists(
    st.tuples(st.text(min_size=1, max_size=8), st.lists(st.integers(4, 299), max_size=5), st.booleans()), max_size=4
)


@settings(max_examples=examples(60), deadline=None)
@given(turns)
def test_any_conversation_reads_as_its_template_says_and_only_grows(turns):
    """Whatever is asked and said, ended or cut, in ids that no tokeniser would give."""
    conversation = Conversation(make_template("chatml", TRAINED), TRAINED)
    end, text = TRAINED.vocabulary()["<|im_end|>"], ""
    for question, ids, ended in turns:
        before = list(conversation.ids)
        asked = conversation.ask(question)
        assert asked[: len(before)] == before
        text += f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
        assert TRAINED.decode(asked, special=True) == TRAINED.decode(TRAINED.encode(text), special=True)
        ids = [i for i in ids if i < TRAINED.vocab_size and TRAINED.decode([i]).isascii()]
        conversation.keep(trajectory(asked, [*ids, *([end] if ended else [])], TRAINED.decode(ids)))
        text += TRAINED.decode(ids) + "<|im_end|>\n"


# ---- what is written ----


class Bytes:
    def decode(self, ids, special=False):
        return bytes(ids).decode(errors="replace")


@pytest.mark.parametrize("text", ["plain", "größer 世界 🙂", "��x"])
def test_what_is_heard_piece_by_piece_is_the_text(text):
    heard = StreamedText(Bytes(), (0,), ())
    parts = [heard.send(heard.hear(np.array([byte]))) for byte in text.encode()]
    assert "".join(parts) + heard.send(text) == text and sum(map(bool, parts)) > 1 - (text[0] == "�")
    assert all("�" not in p for p in parts) or "�" in text


def test_a_beginning_of_a_stop_string_is_held_back():
    heard = StreamedText(Bytes(), (0,), ("END",))
    parts = [heard.send(heard.hear(np.array([byte]))) for byte in b"abcEN"]
    assert "".join(parts) == "abc" and not heard.send("abc")


def test_nothing_said_steers_the_terminal(capsys):
    chat.write("a\x1b[2Jb\tc\n")
    assert capsys.readouterr().out == "a�[2Jb\tc\n"


def test_streaming_changes_nothing(plain):
    """What was said while it was looked at, token by token, is what an engine says that nobody looks at."""
    folder, _, tokenizer = plain
    wish = ChatCommand(str(folder), temperature=1.0, max_tokens=40, seed=3)
    talked = Chat(load_model(folder), wish)
    talked.turn("How are you?")
    from tilth.cli.generate import complete

    (alone,), _ = complete(GenerateCommand(str(folder), "How are you?", max_tokens=40, seed=3))
    expected = [t for t in alone.tokens.tolist() if t not in tokenizer.stop_ids]
    assert talked.conversation.ids == expected


# ---- Ctrl-C ----


def test_ctrl_c_ends_this_answer_only(plain, monkeypatch, capsys):
    talked = Chat(load_model(plain[0]), ChatCommand(str(plain[0]), temperature=1.0, max_tokens=200))
    before = signal.getsignal(signal.SIGINT)
    poll, steps = talked.engine.poll, []

    def interrupted():
        steps.append(1)
        if len(steps) == 5:
            os.kill(os.getpid(), signal.SIGINT)
        return poll()

    monkeypatch.setattr(talked.engine, "poll", interrupted)
    talked.turn("How are you?")
    assert len(steps) == 5 and talked.engine.pending == 0
    kept = list(talked.conversation.ids)
    assert len(kept) == len(plain[2].encode("How are you?")) + 5
    talked.turn("12+34=")
    assert talked.conversation.ids[: len(kept)] == kept and len(steps) > 6
    assert signal.getsignal(signal.SIGINT) is before
    assert len(capsys.readouterr().out.splitlines()) >= 2


def read_until(fd, text, seconds=60.0):
    """What comes from a terminal, up to a text."""
    found, end = "", time.monotonic() + seconds
    while text not in found:
        assert time.monotonic() < end, found
        if select.select([fd], [], [], 0.2)[0]:
            found += os.read(fd, 4096).decode(errors="replace")
    return found


@pytest.mark.slow
def test_at_a_terminal(plain):
    """A prompt, an answer, Ctrl-C at the prompt, Ctrl-D."""
    main, side = pty.openpty()
    command = [sys.executable, "-m", "tilth.cli.main", "chat", str(plain[0]), "--max-tokens", "5"]
    code = "import sys; from tilth.cli.main import main; sys.argv = sys.argv[1:]; main()"
    command = [sys.executable, "-c", code, *command[2:]]
    process = subprocess.Popen(command, stdin=side, stdout=side, stderr=side, start_new_session=True)
    os.close(side)
    try:
        read_until(main, "> ")
        os.write(main, b"How are you?\n")
        read_until(main, "> ")
        found = ""
        while "ends" not in found:  # the first may come before the prompt waits
            process.send_signal(signal.SIGINT)
            time.sleep(0.5)
            found += os.read(main, 4096).decode(errors="replace") if select.select([main], [], [], 5)[0] else ""
        os.write(main, b"\x04")
        assert process.wait(30) == 0
    finally:
        process.kill()
        os.close(main)


def test_help_names_the_commands():
    assert all(name in chat.HELP for name in ("/reset", "/quit", "/help", "Ctrl-C", "Ctrl-D"))
