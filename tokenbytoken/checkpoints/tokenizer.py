"""Tokenizers: text to token ids and back, from tokenizer.json or from a GGUF file's own tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .._numbers import whole
from .._paths import read_json
from .gguf_fast import gguf_reader
from .gguf_file import field_value
from .sources import find

if TYPE_CHECKING:
    import gguf

__all__ = ["Tokenizer", "load_tokenizer"]


class Tokenizer:
    """Text to token ids and back, with the model's own chat template.

    Attributes: ``vocab_size``; ``eos_ids``, the ids that end a text; ``backend``, the ``tokenizers`` object.
    """

    def __init__(self, backend: Any, eos_ids: Sequence[int], template: str | None, special: Mapping[str, str]) -> None:
        self.backend = backend
        self.eos_ids = tuple(eos_ids)
        self.template = template
        self.special = dict(special)

    @property
    def vocab_size(self) -> int:
        return self.backend.get_vocab_size()

    def encode(self, text: str) -> list[int]:
        """Token ids of ``text``; markers such as ``<|im_start|>`` become their own ids, nothing is added."""
        return self.backend.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int], skip_special: bool = False) -> str:
        """The text of ``ids``. Bytes that are not whole characters yet show as U+FFFD."""
        return self.backend.decode(list(ids), skip_special_tokens=skip_special)

    def tokens(self, ids: Sequence[int]) -> list[str]:
        """Each id's own text, for looking at: a leading space is a space, a partial character U+FFFD."""
        return [self.decode([i]) for i in ids]

    def chat(self, messages: Sequence[Mapping[str, str]], *, reply: bool = True) -> str:
        """Render [{"role": "user", "content": …}, …] with the model's template, open for its reply.

        Raises ValueError for a model that has no template.
        """
        if self.template is None:
            raise ValueError("this model has no chat template, or none of several is named 'default'")
        from jinja2 import TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment  # a template is code from a file

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )

        def raise_exception(message: str) -> None:
            raise ValueError(f"the chat template refuses these messages: {message}")

        environment.globals["raise_exception"] = raise_exception
        try:
            template = environment.from_string(self.template)
            return template.render(messages=list(messages), add_generation_prompt=reply, **self.special)
        except TemplateError as error:
            raise ValueError(f"the chat template fails on these messages: {error}") from None


def load_tokenizer(source: str | Path) -> Tokenizer:
    """The tokenizer of ``source``, which is named as for :func:`~tokenbytoken.checkpoints.sources.load`.

    It comes from a directory's tokenizer.json, or from a GGUF file's own tables.
    """
    path = find(source)
    return _directory_tokenizer(path) if path.is_dir() else _gguf_tokenizer(path)


def _directory_tokenizer(path: Path) -> Tokenizer:
    from tokenizers import Tokenizer as Backend

    file = path / "tokenizer.json"
    if not file.exists():
        raise ValueError(f"{path.name}/ holds no tokenizer.json")
    try:
        backend = Backend.from_file(str(file))
    except Exception as error:  # the library raises plain Exceptions
        raise ValueError(f"{file.name} is not a readable tokenizer: {error}") from None
    config = _settings(path, "tokenizer_config.json")
    special = {}
    for key in ("bos_token", "eos_token", "unk_token", "pad_token"):
        value = config.get(key)
        text = value.get("content") if isinstance(value, dict) else value  # a dict is an AddedToken, written out
        if value is not None and not isinstance(text, str):
            raise ValueError(f"tokenizer_config.json: {key} = {value!r} is no token")
        if text is not None:
            special[key] = text
    return Tokenizer(backend, _eos_ids(path, backend, special), _chat_template(path, config), special)


def _settings(path: Path, name: str) -> dict[str, Any]:
    """The file ``name`` of a directory, empty if there is none; a null is a missing entry."""
    found = read_json(path / name) if (path / name).exists() else {}
    return {key: value for key, value in found.items() if value is not None}


def _eos_ids(path: Path, backend: Any, special: Mapping[str, str]) -> list[int]:
    """The ids that end a text: the first that generation_config.json, config.json or the tokenizer's own token says."""
    for name in ("generation_config.json", "config.json"):
        eos = _settings(path, name).get("eos_token_id")
        if eos is not None:
            ids = eos if isinstance(eos, list) else [eos]
            return [whole(f"{name}: eos_token_id", token, 0) for token in ids]
    if "eos_token" not in special:
        return []
    found = backend.token_to_id(special["eos_token"])
    if found is None:
        raise ValueError(f"tokenizer_config.json: eos_token {special['eos_token']!r} is not in the vocabulary")
    return [found]


def _chat_template(path: Path, config: Mapping[str, Any]) -> str | None:
    """The text of chat_template.jinja, else of tokenizer_config.json; of several named ones that of "default"."""
    if (path / "chat_template.jinja").exists():
        return (path / "chat_template.jinja").read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        template = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
    if isinstance(template, dict):
        template = template.get("default")
    if template is not None and not isinstance(template, str):
        raise ValueError(f"tokenizer_config.json: chat_template = {template!r} is no text")
    return template


def _gguf_list(reader: gguf.GGUFReader, key: str, kind: type) -> list[Any]:
    values = field_value(reader, key)
    if not isinstance(values, list) or not all(isinstance(value, kind) for value in values):
        raise ValueError(f"GGUF field {key} must be an array of {kind.__name__}")
    return values


def _gguf_tokenizer(path: Path) -> Tokenizer:
    from tokenizers import AddedToken, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Backend

    reader = gguf_reader(path)
    kind = (field_value(reader, "tokenizer.ggml.model"), field_value(reader, "tokenizer.ggml.pre", "default"))
    if kind != ("gpt2", "smollm"):
        raise ValueError(
            f"GGUF fields tokenizer.ggml.model, .pre = {kind} cannot be represented (only ('gpt2', 'smollm') can)"
        )
    tokens = _gguf_list(reader, "tokenizer.ggml.tokens", str)
    merges = [tuple(merge.split(" ")) for merge in _gguf_list(reader, "tokenizer.ggml.merges", str)]
    try:
        backend = Backend(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    except Exception as error:  # the library raises plain Exceptions
        raise ValueError(f"GGUF fields tokenizer.ggml.tokens and .merges make no vocabulary: {error}") from None
    # Every digit is a token of its own; the rest is split by GPT-2's pattern and mapped byte by byte.
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    types = _gguf_list(reader, "tokenizer.ggml.token_type", int)
    if len(types) != len(tokens):
        raise ValueError(f"GGUF field tokenizer.ggml.token_type has {len(types)} entries for {len(tokens)} tokens")
    markers = [token for token, type_ in zip(tokens, types, strict=True) if type_ == 3]  # 3: control, as <|im_end|>
    backend.add_special_tokens([AddedToken(marker, special=True, normalized=False) for marker in markers])
    names = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    ids = {name: field_value(reader, f"tokenizer.ggml.{name}_token_id", None) for name in names}
    for name, i in ids.items():
        if i is not None and whole(f"GGUF field tokenizer.ggml.{name}_token_id", i, 0) >= len(tokens):
            raise ValueError(f"GGUF field tokenizer.ggml.{name}_token_id = {i} is outside the {len(tokens)} tokens")
    special = {names[name]: tokens[i] for name, i in ids.items() if i is not None}
    eos_ids = [] if ids["eos"] is None else [ids["eos"]]
    return Tokenizer(backend, eos_ids, field_value(reader, "tokenizer.chat_template", None), special)
