"""The requests of `vtoken bench identity`: many lengths and kinds, and the same every time."""

from __future__ import annotations

from pathlib import Path

import pytest

from vtoken.bench.prompts import SHORTEST_TOKENS, RequestMaker, book_of

BOOK = " ".join(f"Word{number} was the best of times, word{number} was the worst." for number in range(900))


class Words:
    """A tokenizer by words, with a chat template of four."""

    def __init__(self) -> None:
        self.known: list[str] = []

    def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
        words = text.split()
        self.known += [word for word in dict.fromkeys(words) if word not in self.known]
        return {"input_ids": [self.known.index(word) for word in words]}

    def decode(self, ids: list[int]) -> str:
        return " ".join(self.known[index] for index in ids)

    def apply_chat_template(self, messages: list[dict], tokenize: bool, add_generation_prompt: bool) -> str:
        return f"<user> says: {messages[0]['content']} <assistant> says:"


@pytest.mark.parametrize("book", ["", BOOK])
def test_lengths_span_the_range_and_kinds_alternate(book: str) -> None:
    words = Words()
    made = RequestMaker(words, book).requests(144, 400, 60)
    texts = [words.decode(request.prompt) for request in made]
    lengths = [len(request.prompt) for request in made]
    assert min(lengths) == SHORTEST_TOKENS
    assert 350 < max(lengths) <= 400
    assert sum(length < 50 for length in lengths) > 40
    assert [text.endswith("<assistant> says:") for text in texts] == [False, True] * 72
    assert len(set(texts)) == 144
    assert {request.options["policy"] for request in made[::2]} == {"streaming_llm", "random"}
    assert {request.tokens for request in made} == {51, 54, 57, 60}


def test_they_are_the_same_every_time() -> None:
    words = Words()
    assert RequestMaker(words).requests(20, 100, 30) == RequestMaker(words).requests(20, 100, 30)


def test_a_book_is_every_text_file_below_a_directory(tmp_path: Path) -> None:
    (tmp_path / "whales").mkdir()
    (tmp_path / "whales" / "one.txt").write_text("Call me Ishmael.", encoding="utf-8")
    (tmp_path / "two.txt").write_bytes(b"Caf\xe9")
    (tmp_path / "source.md").write_text("Not a book.", encoding="utf-8")
    assert book_of(str(tmp_path)) == "Caf\ufffd\n\nCall me Ishmael."
    assert not book_of(None)


def test_passages_come_from_the_book() -> None:
    words = Words()
    for request in RequestMaker(words, BOOK).requests(20, 100, 30)[::2]:
        assert words.decode(request.prompt)[1:-1] in BOOK
