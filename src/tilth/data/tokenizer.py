"""Text to token ids and back, by the ``tokenizers`` library; directories are those of Hugging Face."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from tilth.core.errors import DataError

PAD, EOS = "<pad>", "<eos>"

_BESIDE = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "config.json",
    "chat_template.jinja",
)
_KEPT = ("tokenizer_config.json", "special_tokens_map.json", "generation_config.json", "chat_template.jinja")
_USUAL_ENDS = ("<|im_end|>", "<|eot_id|>", "<|endoftext|>", "<|end_of_text|>", "</s>", EOS)


class Tokenizer:
    """A tokenizer with its end and padding tokens.

    ``stop_ids`` are all tokens that end a completion (instruction-tuned models have several), ``eos_id`` first.
    """

    def __init__(self, core: tokenizers.Tokenizer, eos: str, pad: str, files: dict[str, str] | None = None) -> None:
        self._core = core
        self._files = files if files is not None else _config_files(eos, pad)
        self.eos_id = self._id(eos)
        self.pad_id = self._id(pad)
        self.stop_ids: tuple[int, ...] = (self.eos_id,)

    @classmethod
    def characters(cls, alphabet: Iterable[str]) -> "Tokenizer":
        """One token per character: padding 0, end 1, then the alphabet in sorted order."""
        letters = sorted(set(alphabet))
        vocabulary = {token: i for i, token in enumerate([PAD, EOS, *letters])}
        core = tokenizers.Tokenizer(models.WordLevel(vocabulary))
        core.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
        core.decoder = decoders.Fuse()
        core.add_special_tokens([PAD, EOS])
        return cls(core, EOS, PAD)

    @classmethod
    def load(cls, path: str | Path) -> "Tokenizer":
        """From a directory with ``tokenizer.json`` or from that file. Raises ``DataError``."""
        file = Path(path) / "tokenizer.json" if Path(path).is_dir() else Path(path)
        if not file.is_file():
            raise DataError(f"no tokenizer at {str(path)!r}; give a tokenizer.json or its directory")
        core = _parse(file)
        files = {name: (file.parent / name).read_text("utf-8") for name in _BESIDE if (file.parent / name).is_file()}
        config = {name: _json(file.parent / name, text) for name, text in files.items() if name.endswith(".json")}
        eos = _end(core, config, file)
        pad = _special(config, "pad_token")
        tokenizer = cls(core, eos, pad if core.token_to_id(pad) is not None else eos, _kept(files, eos))
        ends = [tokenizer.eos_id, *_ids(config.get("generation_config.json", {}).get("eos_token_id"))]
        tokenizer.stop_ids = tuple(dict.fromkeys(ends))
        return tokenizer

    @property
    def vocab_size(self) -> int:
        """One more than the greatest token id; a model's embedding may be larger, never smaller."""
        return max(self._core.get_vocab(with_added_tokens=True).values()) + 1

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Token ids. ``special``: with the tokens that the tokenizer puts around a text, such as a begin token."""
        return self.encode_all([text], special)[0]

    def encode_all(self, texts: Sequence[str], special: bool = True) -> list[list[int]]:
        """Token ids of each text; ``DataError`` names a text that has characters without a token."""
        try:
            return [e.ids for e in self._core.encode_batch_fast(list(texts), add_special_tokens=special)]
        except Exception as error:  # noqa: BLE001 - the library raises bare Exception for a token it does not have
            raise self._unknown(texts, error) from None

    def decode(self, ids: Iterable[int], special: bool = False) -> str:
        """Text of token ids; ``special``: with end tokens and the like spelled out."""
        return self._core.decode([int(i) for i in ids], skip_special_tokens=not special)

    def save(self, directory: str | Path) -> None:
        """Write ``tokenizer.json`` and the files beside it, so that ``transformers.AutoTokenizer`` loads them."""
        folder = Path(directory)
        folder.mkdir(parents=True, exist_ok=True)
        self._core.save(str(folder / "tokenizer.json"))
        for name, text in self._files.items():
            (folder / name).write_text(text, "utf-8")

    def _id(self, token: str) -> int:
        found = self._core.token_to_id(token)
        if found is None:
            raise DataError(f"tokenizer has no token {token!r}, which its configuration names as end or padding")
        return int(found)

    def _unknown(self, texts: Sequence[str], error: Exception) -> DataError:
        vocabulary = self._core.get_vocab(with_added_tokens=True)
        for text in texts:
            missing = sorted(set(text) - vocabulary.keys())
            if missing:
                return DataError(f"the tokenizer has no token for {missing[0]!r} in {text[:60]!r}")
        return DataError(f"the tokenizer failed: {error}")


def _parse(file: Path) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # noqa: BLE001 - the library raises bare Exception for whatever it cannot parse
        raise DataError(f"{file} is not a tokenizer: {error}") from None


def _json(file: Path, text: str) -> dict[str, Any]:
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError(f"{file} is not JSON: {error}") from None
    if not isinstance(data, dict):
        raise DataError(f"{file} holds a {type(data).__name__}, not an object")
    return data


def _special(config: dict[str, dict[str, Any]], name: str) -> str:
    """The text of a special token, which is a string or an object with ``content``; empty if there is none."""
    for file in ("tokenizer_config.json", "special_tokens_map.json"):
        token = config.get(file, {}).get(name)
        if token:
            return str(token["content"] if isinstance(token, dict) else token)
    return ""


def _ids(value: Any) -> list[int]:
    return [value] if isinstance(value, int) else list(value or [])


def _end(core: tokenizers.Tokenizer, config: dict[str, dict[str, Any]], file: Path) -> str:
    named = [_special(config, "eos_token")]
    for name in ("generation_config.json", "config.json"):
        named += [core.id_to_token(i) or "" for i in _ids(config.get(name, {}).get("eos_token_id"))]
    for token in [*filter(None, named), *_USUAL_ENDS]:
        if core.token_to_id(token) is not None:
            return token
    raise DataError(f"{file} does not say which token ends a text; name eos_token in tokenizer_config.json beside it")


def _kept(files: dict[str, str], eos: str) -> dict[str, str]:
    """What ``save`` writes again: all that tells how to read and to end a text, nothing about the model."""
    kept = {name: text for name, text in files.items() if name in _KEPT}
    return kept if "tokenizer_config.json" in kept else {**_config_files(eos, eos), **kept}


def _config_files(eos: str, pad: str) -> dict[str, str]:
    special = {"eos_token": eos, "pad_token": pad}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **special}
    return {
        "tokenizer_config.json": json.dumps(config, indent=2) + "\n",
        "special_tokens_map.json": json.dumps(special, indent=2) + "\n",
    }
