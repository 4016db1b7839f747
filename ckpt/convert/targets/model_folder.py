"""What stands next to the weights in a model folder of Hugging Face: config, tokenizer, templates.

`transformers`, vLLM and SGLang look for these files by name, so others are not copied, code and
weights least of all. What is copied is checked: readers of the folder trust it.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

from ckpt.convert.sources.opening import open_source
from ckpt.convert.sources.source import SourceTensor
from ckpt.convert.sources.torch_pickle import SUFFIXES
from ckpt.errors import CheckpointError, NoCheckpoint
from storage import KeyNotFoundError, StoreLike, TooLargeError, open_store
from storage.location import is_url, url_of

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
# As `save_pretrained` of models, tokenizers and processors names them.
_OTHERS = """
    generation_config.json tokenizer.json tokenizer_config.json special_tokens_map.json
    added_tokens.json vocab.json merges.txt vocab.txt tokenizer.model spiece.model
    sentencepiece.bpe.model source.spm target.spm tiktoken.model tekken.json chat_template.jinja
    chat_template.json processor_config.json preprocessor_config.json image_processor_config.json
    video_preprocessor_config.json audio_tokenizer_config.json
"""
COPIED = (CONFIG, *_OTHERS.split())
COPIED_NBYTES_MAX = 256 << 20  # the largest tokenizers have some tens of MiB
SHARD_NBYTES_MAX = 5 * 10**9  # of one file of weights: readers take files as units
_BINARY = (".model", ".spm")
_PICKLE, _ZIP = b"\x80", b"PK\x03\x04"  # how a pickle begins, and a zip with one
# What wrappers put in front of names; no class of `transformers` has them.
_WRAPPERS = ("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
_DOUBLED = ("model", "transformer")
_ROWS_OF_VOCABULARY = ("model.embed_tokens.weight", "transformer.wte.weight", "lm_head.weight")


@dataclass(frozen=True, slots=True)
class DescribingFiles:
    """The files to copy, by name, and what the config says. `known` are the names of the weights
    that the folder already has next to its config, () when it has none.
    """

    files: Mapping[str, bytes] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    known: Collection[str] = ()

    @property
    def unties(self) -> bool:
        """Whether the config says that readers do not tie: then every name needs its tensor."""
        # Models with images or sound keep the settings of their language model there.
        text = self.config.get("text_config")
        owners = (self.config, text if isinstance(text, dict) else {})
        return any(owner.get("tie_word_embeddings") is False for owner in owners)

    def of_dtype(self, dtype: str) -> DescribingFiles:
        """With a config that names `dtype`: readers convert what they load to the one it names."""
        if not self.config:
            return self
        # Newer versions of transformers write `dtype`, older ones `torch_dtype`.
        name = "dtype" if "dtype" in self.config else "torch_dtype"
        config = {**self.config, name: dtype}
        files = {**self.files, CONFIG: json.dumps(config, indent=2).encode() + b"\n"}
        return DescribingFiles(files, config, self.known)


def read_beside(config: StoreLike | None, options: Mapping[str, Any]) -> DescribingFiles:
    """The files at `config`: a folder with a config.json, or that file alone, under any name.

    Raises CheckpointError for what no reader of the folder should trust, NoCheckpoint when there is
    no config.
    """
    if config is None:
        return DescribingFiles()
    folder, name = config, ""  # of a config file in it, "" for the folder's own
    if is_url(config):
        url = url_of(config)
        parent, _, last = url.rstrip("/").rpartition("/")
        if last.endswith(".json"):
            folder, name = parent or ("/" if url.startswith("/") else "."), last
        elif last.endswith((".safetensors", *SUFFIXES)):
            raise CheckpointError(f"config={url!r} is a file of weights; name its folder")
    with closing(open_store(folder, **options)) as store:
        # A config alone may lie in a folder of anything, so nothing else there counts.
        names = {name: CONFIG} if name else {each: each for each in COPIED}
        files = {}
        for old, new in names.items():
            try:
                files[new] = store.get_bounded(old, COPIED_NBYTES_MAX)
            except KeyNotFoundError:
                continue
            except TooLargeError as error:
                raise CheckpointError(f"config=: {error}") from error
        if CONFIG not in files:
            raise NoCheckpoint(
                f"config=: {store.url} has no {name or CONFIG}; name a folder as save_pretrained "
                "writes it, or a config.json"
            )
        for old, new in names.items():
            if new in files:
                _check(f"{store.url}/{old}", new, files[new])
        parsed = json.loads(files[CONFIG])
        if not parsed.get("model_type") and not parsed.get("architectures"):
            raise CheckpointError(
                f"{store.url}/{name or CONFIG} has neither model_type nor architectures, so no "
                "library can tell what the weights are of; is it another library's config?"
            )
        known: Collection[str] = ()
        is_whole = False
        if not name and store.exists(index := f"{WEIGHTS}.index.json"):
            weight_map = json.loads(store.get_bounded(index, COPIED_NBYTES_MAX))
            known = frozenset(weight_map.get("weight_map", {}))
        else:
            is_whole = not name and store.exists(WEIGHTS)
    if is_whole:  # by their header
        weights = f"{url_of(folder)}/{WEIGHTS}" if is_url(folder) else folder
        with closing(open_source(weights)) as source:
            known = frozenset(source.contents.tensors)
    return DescribingFiles(files, parsed, known)


def _check(where: str, name: str, data: bytes) -> None:
    """Raise CheckpointError unless `data` is what a file of that name may be."""
    if data.startswith((_PICKLE, _ZIP)):
        raise CheckpointError(
            f"{where} is a pickle or a zip file, which is not copied next to a model"
        )
    if name.endswith(_BINARY):
        return
    try:
        text = data.decode()
        parsed = json.loads(text) if name.endswith(".json") else {}
    except ValueError as error:
        raise CheckpointError(f"{where} is no {name.rpartition('.')[2]} file: {error}") from error
    if not isinstance(parsed, dict | list) or (name == CONFIG and not isinstance(parsed, dict)):
        raise CheckpointError(f"{where} has {type(parsed).__name__} where a map is expected")


# Names --------------------------------------------------------------------------------------


def check_names(beside: DescribingFiles, tensors: Mapping[str, SourceTensor]) -> None:
    """Raise CheckpointError where `tensors`, by their names in the folder, are not what the class
    that the config names would look for, as far as that is known without the class.
    """
    if not beside.config:
        return
    problem = _wrapped(tensors) or _moved(tensors, beside.known)
    if problem:
        raise CheckpointError(f"names of the export are not those of the model's class: {problem}")
    rows = beside.config.get("vocab_size")
    for name in _ROWS_OF_VOCABULARY if isinstance(rows, int) else ():
        tensor = tensors.get(name)
        if tensor is not None and tensor.shape[:1] != (rows,):
            raise CheckpointError(
                f"{name} has the shape {tensor.shape} and the config's vocab_size is {rows}: give "
                "the config of the model that was trained"
            )


def _wrapped(names: Collection[str]) -> str:
    """What wrappers have left in `names`; "" where nothing is seen."""
    for name in names:
        parts = name.split(".")
        for part in parts:
            # In front, `module` is DDP's; further on a model may have a part of that name.
            if part in _WRAPPERS[1:] or (part == _WRAPPERS[0] and part == parts[0]):
                return f"{name!r} has {part!r} in it, which is a wrapper's; {_rule(f'{part}=')}"
    for first in _DOUBLED:
        doubled = f"{first}.{first}."
        if 2 * sum(name.startswith(doubled) for name in names) > len(names):
            return f"most begin with {doubled!r}; {_rule(f'{first}=')}"
    return ""


def _moved(names: Collection[str], known: Collection[str]) -> str:
    """The beginning that `names` have too many or too few of, compared with `known`."""
    if not known:
        return ""
    alike = len(frozenset(known) & frozenset(names))
    for beginning, count, rule in (
        (*_beginning(names, known), "{}="),
        (*_beginning(known, names), "={}"),
    ):
        # Only where more names would match by the rule than do without it.
        if count > alike:
            return (
                f"{alike} of the {len(known)} names of the weights next to the config are among "
                f"them, and {count} would be: {_rule(rule.format(beginning))}"
            )
    return ""


def _rule(rule: str) -> str:
    return f"pass rename=['{rule}'] (--rename {rule})"


def _beginning(longer: Collection[str], shorter: Collection[str]) -> tuple[str, int]:
    """The beginning without which most of `longer` are among `shorter`, and how many are."""
    counts: Counter[str] = Counter()
    wanted = frozenset(shorter)
    for name in longer:
        parts = name.split(".")
        counts.update(
            ".".join(parts[:count])
            for count in range(1, len(parts))
            if ".".join(parts[count:]) in wanted
        )
    return counts.most_common(1)[0] if counts else ("", 0)
