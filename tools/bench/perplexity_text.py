"""Text for tools/bench/perplexity_bench.py, from files that a machine without a network has, and its tokens."""

from __future__ import annotations

import dataclasses
import hashlib
import pathlib
import sysconfig
from collections.abc import Iterable, Sequence
from typing import Any

import tokenizers
import torch
import transformers

SUFFIXES = frozenset({".md", ".py", ".pyi", ".rst", ".txt"})

_LEAST_BYTES, _MOST_BYTES = 200, 1 << 20
"""Smaller files have little text, and larger ones are mostly tables of data."""

_TEXT_BYTES = 150_000_000
"""Of all files that are read: more than some minutes of training need."""

_TOKENIZER_BYTES = 20_000_000
"""Of text from which the tokenizer is trained."""

_END = "<|end|>"
"""The token after each document."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Documents:
    """Files without duplicates, in an order that depends on their contents alone."""

    train: list[str]
    held_out: list[str]

    def facts(self) -> dict[str, Any]:
        """What the text is, as JSON values."""
        digest = hashlib.sha256()
        for document in (*self.train, *self.held_out):
            digest.update(document.encode())
        return {
            "files": {"train": len(self.train), "held_out": len(self.held_out)},
            "characters": {"train": sum(map(len, self.train)), "held_out": sum(map(len, self.held_out))},
            "sha256": digest.hexdigest(),
        }


def machine_folders() -> list[pathlib.Path]:
    """Python's standard library and the installed packages, torch's among them."""
    paths = sysconfig.get_paths()
    folders = [paths["stdlib"], paths["purelib"], paths["platlib"], str(pathlib.Path(torch.__file__).parents[1])]
    return [pathlib.Path(folder) for folder in dict.fromkeys(folders)]


def read(folders: Iterable[pathlib.Path], held_out_share: float) -> Documents:
    """The files of some folders; the digest of its text decides whether a file is held out.

    Raises:
      ValueError: one of both sets would be empty.
    """
    folders = list(folders)
    paths = {path for folder in folders for path in folder.rglob("*") if path.suffix in SUFFIXES}
    texts: dict[str, str] = {}
    num_bytes = 0
    for path in sorted(paths, key=lambda path: hashlib.sha256(bytes(path)).digest()):  # a sample, if there are too many
        if not (path.is_file() and _LEAST_BYTES <= path.stat().st_size <= _MOST_BYTES):
            continue
        if num_bytes > _TEXT_BYTES:
            break
        data = path.read_bytes()
        num_bytes += len(data)
        try:
            texts[hashlib.sha256(data).hexdigest()] = data.decode()
        except UnicodeDecodeError:
            continue  # tests of encodings
    least = f"{int(held_out_share * 2**32):08x}"
    documents = Documents(
        train=[texts[digest] for digest in sorted(texts) if digest >= least],
        held_out=[texts[digest] for digest in sorted(texts) if digest < least],
    )
    if not (documents.train and documents.held_out):
        raise ValueError(
            f"{', '.join(map(str, folders))} must have text files for training and for evaluation, and have "
            f"{len(documents.train)} and {len(documents.held_out)}; pass other folders"
        )
    return documents


def train_tokenizer(documents: Sequence[str], vocabulary: int) -> transformers.PreTrainedTokenizerFast:
    """Byte-level BPE, from the first documents."""
    sample, num_bytes = [], 0
    for document in documents:
        sample.append(document)
        num_bytes += len(document)
        if num_bytes >= _TOKENIZER_BYTES:
            break
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[_END],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(sample, trainer)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=_END)


def encode(
    tokenizer: transformers.PreTrainedTokenizerFast, documents: Sequence[str]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens of all documents, each with its end, and the number of the document of each token, both in int32."""
    backend, end = tokenizer.backend_tokenizer, tokenizer.eos_token_id
    tokens, lengths = [], []
    for begin in range(0, len(documents), 1000):
        for encoding in backend.encode_batch_fast(list(documents[begin : begin + 1000]), add_special_tokens=False):
            ids = [*encoding.ids, end]
            tokens.append(torch.tensor(ids, dtype=torch.int32))
            lengths.append(len(ids))
    numbers = torch.arange(len(documents), dtype=torch.int32)
    return torch.cat(tokens), numbers.repeat_interleave(torch.tensor(lengths))
