"""Sixteen chat requests, written for the demo."""

from __future__ import annotations

SYSTEM = "You are a patient teacher. Answer in long, detailed paragraphs."

QUESTIONS = (
    "Explain how a lighthouse works, from the lamp to the lens to the keeper's daily duties.",
    "Tell the story of a ship that is lost in the fog and finds its way home.",
    "How is bread made? Describe each step from the field to the table.",
    "What happens in a forest during the four seasons of the year?",
    "Describe a railway journey across a large country, with the people on the train.",
    "Explain to a child why the sky is blue and why sunsets are red.",
    "Write a long letter from an explorer at the South Pole to her brother.",
    "How does a library keep track of a million books?",
    "Describe the life of a river from its spring in the mountains to the sea.",
    "What would a day in a city without any cars look like?",
    "Tell the story of an old clockmaker and the clock that he could not repair.",
    "Explain how bees find flowers and tell each other about them.",
    "Describe a market in a harbour town early in the morning.",
    "How did people send messages before there were telephones?",
    "Write a long fairy tale about a stone that wanted to become a mountain.",
    "Explain how a bridge is planned, built and tested.",
)


def conversation(index: int) -> list[dict[str, str]]:
    """Messages of one chat request; `index` may exceed the number of questions."""
    return [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": QUESTIONS[index % len(QUESTIONS)]},
    ]
