"""Documents in which no two words are the same, so that it shows which of them a model was trained on.

A word is `WORD` tokens: a space, the number of the document and the place in it. The last word of a document
is a letter shorter, and the separator that the data pipeline puts behind a document takes its place. As rows
are whole words long, a row ends where a word does, while documents go over the ends of rows.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from dataloader_dispatch import open_documents, split_documents
from llama_pretrain import ByteTokenizer

WORD = 8
ROW = 8 * WORD
IGNORED = -100
_END = ByteTokenizer.eos_token_id
_SPACE = ord(" ")
_LONGEST = 99


class Word(NamedTuple):
    """A word of a document."""

    document: int
    place: int


def write_documents(path: Path, count: int, seed: int) -> None:
    """Write documents of 3 to 40 words, one a line, into a `.jsonl` file."""
    generator = random.Random(seed)
    lengths = [generator.randint(3, 40) for _ in range(count)]
    texts = [_text(document, length) for document, length in enumerate(lengths)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def words_to_train_on(path: Path, held_out: float, seed: int) -> frozenset[Word]:
    """All words of the documents that `train` does not hold out."""
    documents, _ = split_documents(open_documents(str(path)), held_out, seed)
    texts = [str(documents[number]) for number in range(len(documents))]
    return frozenset(Word(int(text[1:4]), place) for text in texts for place in range(len(text) // WORD + 1))


def words_of(targets: Sequence[int]) -> list[Word]:
    """The words among the targets of losses.

    Args:
        targets: Those of whole rows, one behind the other. The target of a position is the token behind it,
            so the first token of a row is nobody's target; `IGNORED` does not count.

    Raises:
        ValueError: If they are not whole words of these documents.
    """
    if len(targets) % ROW:
        raise ValueError(f"{len(targets)} targets are not rows of {ROW}")
    words = []
    for start in range(0, len(targets), WORD):
        *letters, behind = targets[start : start + WORD]
        begins_next = (start + WORD) % ROW != 0
        if all(letter == IGNORED for letter in letters):
            if behind != IGNORED:
                raise ValueError(f"a target follows targets that do not count: {list(letters)}, {behind}")
            continue
        words.append(_word(letters))
        if behind not in ((_SPACE, IGNORED) if begins_next else (IGNORED,)):
            raise ValueError(f"behind {words[-1]} comes the target {behind}")
    return words


class Passes(NamedTuple):
    """How often a run has gone over its documents."""

    whole: int
    """Epochs in which every word came exactly once."""
    begun: int
    """Words of the epoch after them, each at most once."""


def count_passes(steps: Mapping[int, Iterable[Word]], words: frozenset[Word]) -> Passes:
    """Go through the words of all steps, and make sure that in each epoch none is missing and none repeated.

    Args:
        steps: The words that each step was trained on, by its number.
        words: Those of an epoch.

    Raises:
        ValueError: If a word comes a second time while others have not come yet, or is none of these.
    """
    whole, seen = 0, set[Word]()
    for step in sorted(steps):
        for word in steps[step]:
            if word not in words:
                raise ValueError(f"step {step}: {word} is not a word to train on")
            if word in seen:
                missing = sorted(words - seen)
                raise ValueError(
                    f"step {step}: {word} comes a second time in epoch {whole}, "
                    f"in which {len(missing)} have not come, such as {missing[0]}"
                )
            seen.add(word)
            if len(seen) == len(words):
                whole, seen = whole + 1, set()
    return Passes(whole, len(seen))


def _text(document: int, length: int) -> str:
    if length > _LONGEST:
        raise ValueError(f"length={length}: a document has at most {_LONGEST} words")
    words = [f" {document:03d}.{place:03d}" for place in range(length)]
    return "".join(words[:-1]) + f" {document:03d}.{length - 1:02d}"


def _word(letters: Sequence[int]) -> Word:
    ends = letters[-1] == _END
    text = "".join(map(chr, letters[:-1] if ends else letters))
    document, _, place = text.partition(".")
    if len(document) != 3 or len(place) != 3 - ends or not (document + place).isdecimal():
        raise ValueError(f"the targets {list(letters)} are not a word")
    return Word(int(document), int(place))
