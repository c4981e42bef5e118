"""Texts for quality measurements, cut out of the books in a directory: the same in every run.

    measure      prompt                                                            what is looked at
    perplexity   a passage                                                         each token's probability
    needle       a passage with one needle sentence in it, then the question       the number in the answer
    chat         a question in the model's chat template                           the answer's words

A needle's haystack is a whole number of chunks, so the question is a chunk of its own: when a policy decides what
to forget of the haystack, nobody has asked yet.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any

from vtoken.bench.prompts import CHARS_PER_TOKEN, GOLDEN, book_of
from vtoken.core.errors import ConfigError

CHUNK_TOKENS = 64
"""Prompts are computed in chunks of so many tokens, one request at a time, so chunks end at the same tokens for all."""

NEEDLE = " The magic number of Zanzibar is {number}."
QUESTION = " The magic number of Zanzibar is"
DIGITS = 5

QUESTIONS = (
    "Why does the moon look larger when it is close to the horizon?",
    "Describe three ways to keep bread fresh, and say which one you would choose.",
    "What is the difference between a violin and a cello?",
    "Write a short story about a letter that arrives forty years late.",
    "How do ships find their way at night?",
    "Explain what a budget is to a child who gets her first pocket money.",
    "What should somebody pack for a week of walking in the mountains?",
    "Describe how a seed becomes a tree.",
)


@dataclass(frozen=True, slots=True)
class Needle:
    """One question whose answer stands in the prompt.

    Attributes:
        prompt: token ids. number: the answer.
        depth: where the needle begins, as a share of the haystack.
    """

    prompt: list[int]
    number: str
    depth: float

    def found_in(self, answer: str) -> bool:
        """Whether the answer says the number; digits may be grouped."""
        return self.number in answer.replace(",", "").replace(" ", "")


@dataclass(frozen=True, slots=True)
class Texts:
    """Cuts prompts out of a book.

    Attributes:
        tokenizer: transformers' tokenizer of the model.
        book: all the text there is.
        directory: where it came from, for messages.
    """

    tokenizer: Any
    book: str
    directory: str = ""

    @classmethod
    def of_directory(cls, model: str, directory: str | None) -> Texts:
        """The books (all *.txt) in a directory and below it.

        Raises:
            ConfigError: no directory, or none with text in it.
        """
        book = book_of(directory)
        if not book:
            raise ConfigError(
                "--data", directory, "a directory with text files (*.txt) of real prose",
                "Perplexity of made-up sentences says nothing; VTOKEN_DATA names the directory, too.",
            )  # fmt: skip
        from transformers import AutoTokenizer

        return cls(AutoTokenizer.from_pretrained(model), book, str(directory))

    def passages(self, count: int, tokens: int) -> list[list[int]]:
        """`count` passages of `tokens` tokens each, spread evenly over the book.

        Raises:
            ConfigError: the book is too short for them not to overlap.
        """
        length = CHARS_PER_TOKEN * tokens
        if len(self.book) < count * length:
            raise ConfigError(
                "--data", self.directory,
                f"a directory with at least {count * length:,} characters of text (found: {len(self.book):,})",
            )  # fmt: skip
        starts = [round((index + 0.5) * len(self.book) / count - length / 2) for index in range(count)]
        return [self.ids(self._from_word(start, length))[:tokens] for start in starts]

    def needles(self, count: int, shortest_tokens: int, longest_tokens: int) -> list[Needle]:
        """`count` needles in haystacks of `shortest_tokens` to `longest_tokens` (log-uniform, whole chunks)."""
        ratio = longest_tokens / shortest_tokens
        lengths = [shortest_tokens * ratio ** ((index + 0.5) / count) for index in range(count)]
        passages = self.passages(count, longest_tokens)
        return [
            self._needle(index, passage, CHUNK_TOKENS * round(length / CHUNK_TOKENS))
            for index, (passage, length) in enumerate(zip(passages, lengths, strict=True))
        ]

    def _needle(self, index: int, passage: list[int], tokens: int) -> Needle:
        """Haystack of `tokens` tokens with a needle behind the first sentence end at or after its depth."""
        random = Random(index)
        number = "".join(str(random.randrange(1, 10)) for _ in range(DIGITS))
        needle = self.ids(NEEDLE.format(number=number))
        hay = passage[: tokens - len(needle)]
        place = int(index * GOLDEN % 1 * len(hay))
        ends = (end for end in range(place, len(hay)) if "." in self.tokenizer.decode(hay[end : end + 1]))
        place = next(ends, len(hay) - 1) + 1
        return Needle([*hay[:place], *needle, *hay[place:], *self.ids(QUESTION)], number, place / tokens)

    def chats(self, count: int) -> list[list[int]]:
        """`count` questions in the chat template."""
        return [self.ids(self._templated(question)) for question in QUESTIONS[:count]]

    def _templated(self, question: str) -> str:
        message = {"role": "user", "content": question}
        text: str = self.tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=True)
        return text

    def _from_word(self, start: int, length: int) -> str:
        """The book from the first word that begins behind `start`."""
        return self.book[start : start + length].partition(" ")[2]

    def ids(self, text: str) -> list[int]:
        """Token ids of a text."""
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])
