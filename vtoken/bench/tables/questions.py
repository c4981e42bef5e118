"""The evaluation's questions, the commands that answer them, and what nothing answers yet."""

from __future__ import annotations

from dataclasses import dataclass

from vtoken.bench.tables.cells import bar, code, command_of
from vtoken.results.pages import Results, markdown


@dataclass(frozen=True, slots=True)
class Question:
    """One question of the evaluation.

    Attributes:
        ids: of the results that answer it. open: what they leave open.
    """

    id: str
    text: str
    ids: tuple[str, ...]
    open: str = ""


QUESTIONS = (
    Question("Q1", "how much is trapped? (Fig. 1)", ("waste",)),
    Question("Q2", "is it returned? (Fig. 7)", ("waste",)),
    Question("Q3", "does it serve more under a service level? (Fig. 8)", ("sla",), "one policy, `random`"),
    Question("Q4", "how many fit? (Fig. 9, 10)", ("frontier",)),
    Question("Q5", "what does it cost? (Fig. 11)", ("idle", "scoring"), "48 clients; `forced_sync`"),
    Question("Q6", "sensitivity", ("simulate-sensitivity",), "the same on the engine, in time"),
    Question("Q7", "prefix caching", ("prefix", "frontier"), "one policy, `random`"),
    Question("Q8", "correctness", ("identity", "soak")),
    Question("Q9", "bookkeeping at scale", ("bookkeeping",)),
    Question("Q10", "busy device", (), "**no command**: copies beside a load are a question for a GPU"),
    Question("Q11", "quality", ("quality", "needles")),
    Question("Q12", "crossover", ("speed",), "short outputs; standing aside by itself"),
    Question(
        "Q13", "fleet", ("simulate-study", "simulate-check", "pressure", "routing", "heartbeats"),
        "more than 64 replicas",
    ),
)  # fmt: skip


def questions(results: Results) -> str:
    """Every question with its commands, whether they were run, and what is open."""
    rows = [
        [question.id, question.text, ", ".join(_answer(name, results) for name in question.ids), question.open]
        for question in QUESTIONS
    ]
    return markdown(["", "question", "answered by", "open"], rows)


def _answer(name: str, results: Results) -> str:
    return f"{code(command_of(name))} ({bar(results[name]) if name in results else 'not run yet'})"
