"""The tokenizer agrees with transformers on what it saves and loads, and says what is wrong with what it cannot."""

import json

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import models, pre_tokenizers, processors

from tilth.core.errors import DataError
from tilth.data.tokenizer import Tokenizer

SUMS = "0123456789+="


def test_characters_have_stable_ids():
    tokenizer = Tokenizer.characters("cab")
    assert tokenizer.encode("abc") == [2, 3, 4] and Tokenizer.characters("abcabc").encode("abc") == [2, 3, 4]
    assert (tokenizer.pad_id, tokenizer.eos_id, tokenizer.stop_ids, tokenizer.vocab_size) == (0, 1, (1,), 5)


@given(st.text("01+=ä \n\té€𝄞\\[]^-", max_size=20))
def test_characters_round_trip(text):
    tokenizer = Tokenizer.characters("01+=ä \n\té€𝄞\\[]^-")
    ids = tokenizer.encode(text)
    assert len(ids) == len(text) and tokenizer.decode(ids) == text


def test_decode_leaves_special_tokens_out_unless_asked():
    tokenizer = Tokenizer.characters(SUMS)
    ids = [*tokenizer.encode("1+2="), tokenizer.eos_id]
    assert tokenizer.decode(ids) == "1+2=" and tokenizer.decode(ids, special=True) == "1+2=<eos>"


def test_encode_all_is_encode_of_each():
    tokenizer = Tokenizer.characters(SUMS)
    texts = ["1", "", "12+34="]
    assert tokenizer.encode_all(texts) == [tokenizer.encode(t) for t in texts]


def test_unknown_character_is_named():
    with pytest.raises(DataError, match=r"no token for 'x' in '1x2'"):
        Tokenizer.characters(SUMS).encode("1x2")


@pytest.mark.parametrize("texts", [["123+456=", "0579", "0 1", ""]])
def test_saved_directory_loads_in_transformers_with_equal_ids(tmp_path, texts):
    transformers = pytest.importorskip("transformers")
    tokenizer = Tokenizer.characters(SUMS + " ")
    tokenizer.save(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for text in texts:
        assert theirs(text)["input_ids"] == tokenizer.encode(text)
        assert theirs.decode(tokenizer.encode(text), skip_special_tokens=True) == text
    assert (theirs.eos_token_id, theirs.pad_token_id, len(theirs)) == (1, 0, tokenizer.vocab_size)


def test_saved_directory_loads_again(tmp_path):
    first = Tokenizer.characters(SUMS)
    first.save(tmp_path / "a")
    second = Tokenizer.load(tmp_path / "a")
    assert second.encode("9+9=") == first.encode("9+9=") and (second.eos_id, second.pad_id) == (1, 0)
    second.save(tmp_path / "b")
    for file in (tmp_path / "a").iterdir():
        assert file.read_bytes() == (tmp_path / "b" / file.name).read_bytes()


# -- directories of real models --------------------------------------------------------------------------------------


def write_model_tokenizer(folder, **files):
    """A tokenizer such as Llama's: words, and a begin token put before every text."""
    vocabulary = {t: i for i, t in enumerate(["<s>", "</s>", "<|im_end|>", "one", "two", "+"])}
    core = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="one"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    core.add_special_tokens(["<s>", "</s>", "<|im_end|>"])
    core.post_processor = processors.TemplateProcessing("<s> $A", None, [("<s>", 0)])
    folder.mkdir(exist_ok=True)
    core.save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def test_begin_token_with_special_only(tmp_path):
    tokenizer = Tokenizer.load(write_model_tokenizer(tmp_path, tokenizer_config={"eos_token": "</s>"}))
    assert tokenizer.encode("one two") == [0, 3, 4] and tokenizer.encode("one two", special=False) == [3, 4]


def test_ids_equal_those_of_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = {"eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast"}
    folder = write_model_tokenizer(tmp_path, tokenizer_config=config)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    assert theirs("two + one")["input_ids"] == Tokenizer.load(folder).encode("two + one") == [0, 4, 5, 3]


def test_file_and_directory_are_the_same(tmp_path):
    folder = write_model_tokenizer(tmp_path, tokenizer_config={"eos_token": "</s>"})
    assert Tokenizer.load(folder / "tokenizer.json").eos_id == Tokenizer.load(str(folder)).eos_id == 1


@pytest.mark.parametrize(
    ("files", "eos", "stops"),
    [
        ({"tokenizer_config": {"eos_token": "</s>"}}, 1, (1,)),
        ({"tokenizer_config": {"eos_token": {"content": "</s>", "lstrip": False}}}, 1, (1,)),
        ({"special_tokens_map": {"eos_token": "</s>"}}, 1, (1,)),
        ({"generation_config": {"eos_token_id": [2, 1]}}, 2, (2, 1)),
        ({"tokenizer_config": {"eos_token": "</s>"}, "generation_config": {"eos_token_id": [2, 1]}}, 1, (1, 2)),
        ({"config": {"eos_token_id": 1}}, 1, (1,)),
        ({}, 2, (2,)),
    ],
)
def test_where_the_end_token_comes_from(tmp_path, files, eos, stops):
    tokenizer = Tokenizer.load(write_model_tokenizer(tmp_path, **files))
    assert (tokenizer.eos_id, tokenizer.stop_ids) == (eos, stops)


def test_padding_is_the_end_token_if_there_is_none(tmp_path):
    config = {"eos_token": "</s>", "pad_token": "<s>"}
    assert Tokenizer.load(write_model_tokenizer(tmp_path / "a", tokenizer_config=config)).pad_id == 0
    del config["pad_token"]
    assert Tokenizer.load(write_model_tokenizer(tmp_path / "b", tokenizer_config=config)).pad_id == 1


def test_chat_template_is_kept_and_the_model_files_are_not(tmp_path):
    folder = write_model_tokenizer(tmp_path / "a", config={"eos_token_id": 1})
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    Tokenizer.load(folder).save(tmp_path / "b")
    assert (tmp_path / "b" / "chat_template.jinja").read_text() == "{{ messages }}"
    assert not (tmp_path / "b" / "config.json").exists()
    assert Tokenizer.load(tmp_path / "b").eos_id == 1


def test_all_ends_of_a_text_are_kept(tmp_path):
    Tokenizer.load(write_model_tokenizer(tmp_path / "a", generation_config={"eos_token_id": [2, 1]})).save(
        tmp_path / "b"
    )
    assert Tokenizer.load(tmp_path / "b").stop_ids == (2, 1)


def test_vocab_size_covers_the_greatest_id(tmp_path):
    core = tokenizers.Tokenizer(models.WordLevel({"</s>": 7, "a": 3}))
    core.save(str(tmp_path / "tokenizer.json"))
    assert Tokenizer.load(tmp_path).vocab_size == 8


# -- what can be wrong -----------------------------------------------------------------------------------------------


def failure(path):
    with pytest.raises(DataError) as caught:
        Tokenizer.load(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_missing(tmp_path):
    assert failure(tmp_path / "none").startswith("no tokenizer at ")
    assert failure(tmp_path).startswith("no tokenizer at ")


@pytest.mark.parametrize("content", ["", "{}", "[1]", '{"model": {"type": "Nothing"}}'])
def test_not_a_tokenizer(tmp_path, content):
    (tmp_path / "tokenizer.json").write_text(content)
    assert "is not a tokenizer" in failure(tmp_path)


def test_broken_configuration(tmp_path):
    folder = write_model_tokenizer(tmp_path)
    (folder / "tokenizer_config.json").write_text("{")
    assert "tokenizer_config.json is not JSON" in failure(folder)
    (folder / "tokenizer_config.json").write_text("[]")
    assert "tokenizer_config.json holds a list, not an object" in failure(folder)


def test_no_end_token(tmp_path):
    tokenizers.Tokenizer(models.WordLevel({"a": 0})).save(str(tmp_path / "tokenizer.json"))
    assert "does not say which token ends a text" in failure(tmp_path)
