"""Requests for proofs: many, of different kinds and lengths, the same in every run.

The prompts are made-up sentences, or passages of the books in a directory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

SHORTEST_TOKENS = 5
"""Of plain prompts; a chat template takes more than this by itself."""

CHARS_PER_TOKEN = 8
"""More than any tokenizer needs on average, so that a passage of this many is long enough to be cut."""

GOLDEN = 0.6180339887
"""Its multiples, modulo 1, spread evenly, however many are taken."""

SUBJECTS = (
    "the captain", "a young gardener", "every second letter", "the smallest engine", "our neighbour's dog",
    "the clockmaker of the town", "a box of 144 lamps", "the committee", "rain from the west", "my grandmother",
)  # fmt: skip
VERBS = ("carried", "forgot", "measured", "painted", "repaired", "watched", "wrote about", "sold", "hid", "found")
OBJECTS = (
    "seven silver spoons", "the map of the island", "a poem about bread", "its own shadow", "the longest bridge",
    "two of the three keys", "an argument in favour of winter", "the price of wool", "nothing at all", "x = 3 * y",
)  # fmt: skip
PLACES = ("before noon", "behind the mill", "at the harbour", "in 1887", "without a word", "for the third time")

POLICIES: tuple[Mapping[str, Any], ...] = tuple(
    {"policy": name, "budget_tokens": 32, "protect_sinks": 4, "protect_recent": 12, "interval_tokens": 8}
    for name in ("streaming_llm", "random")
)
"""A small budget and a short interval: a request of 60 tokens decides three times at least."""


@dataclass(frozen=True, slots=True)
class Request:
    """A greedy request of fixed length.

    Attributes:
        prompt: token ids. tokens: to generate. options: its vToken options.
    """

    prompt: list[int]
    tokens: int
    options: Mapping[str, Any]

    def sampling(self, *, plain: bool = False) -> dict[str, Any]:
        """Arguments of SamplingParams; `plain`: without vToken's options."""
        extra = {} if plain else {"extra_args": {"vtoken": dict(self.options)}}
        return {"max_tokens": self.tokens, "ignore_eos": True, **extra}


@dataclass(frozen=True, slots=True)
class RequestMaker:
    """Cuts prompts out of passages.

    Attributes:
        tokenizer: transformers' tokenizer of the model, with its chat template.
        book: text that passages are taken from; empty: made-up sentences.
    """

    tokenizer: Any
    book: str = ""

    @classmethod
    def of_model(cls, model: str, data: str | None) -> RequestMaker:
        """For a model directory, with the books in the directory `data`, if it is named and has some."""
        from transformers import AutoTokenizer

        return cls(AutoTokenizer.from_pretrained(model), book_of(data))

    def requests(self, count: int, longest_tokens: int, tokens: int) -> list[Request]:
        """`count` requests: plain continuations and chat in turn, two of either policy in turn.

        Prompt lengths are log-uniform from SHORTEST_TOKENS (chat: besides the template's) to `longest_tokens`. The
        requests generate between `tokens - 9` and `tokens` tokens, so that they do not all end together.
        """
        return [
            Request(
                self._chat(index, longest_tokens) if index % 2 else self._plain(index, longest_tokens),
                tokens - 3 * (index % 4),
                POLICIES[index // 2 % len(POLICIES)],
            )
            for index in range(count)
        ]

    def exact(self, index: int, tokens: int) -> list[int]:
        """Plain prompt `index`, of exactly so many tokens."""
        return self._ids(self._passage(Random(index), tokens))[:tokens]

    def _plain(self, index: int, longest_tokens: int) -> list[int]:
        return self.exact(index, _length(index, longest_tokens))

    def _chat(self, index: int, longest_tokens: int) -> list[int]:
        content = self._plain(index, longest_tokens - len(self._ids(self._templated(""))))
        return self._ids(self._templated(self.tokenizer.decode(content)))

    def _passage(self, random: Random, tokens: int) -> str:
        """Text of at least so many tokens."""
        if self.book:
            start = random.randrange(max(len(self.book) - CHARS_PER_TOKEN * tokens, 1))
            return self.book[start : start + CHARS_PER_TOKEN * tokens]
        return " ".join(_sentence(random) for _ in range(tokens))

    def _templated(self, content: str) -> str:
        message = {"role": "user", "content": content}
        text: str = self.tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=True)
        return text

    def _ids(self, text: str) -> list[int]:
        ids: Sequence[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return list(ids)


def book_of(directory: str | None) -> str:
    """All text files in a directory and below it, one after another; empty without one."""
    files = sorted(Path(directory).rglob("*.txt")) if directory else []
    return "\n\n".join(file.read_text(encoding="utf-8", errors="replace") for file in files)


def _length(index: int, longest_tokens: int) -> int:
    """The length of prompt `index`: log-uniform up to `longest_tokens`."""
    tokens: float = SHORTEST_TOKENS * (longest_tokens / SHORTEST_TOKENS) ** (index * GOLDEN % 1)
    return round(tokens)


def _sentence(random: Random) -> str:
    parts = [random.choice(words) for words in (SUBJECTS, VERBS, OBJECTS, PLACES)]
    return " ".join(parts).capitalize() + "."
