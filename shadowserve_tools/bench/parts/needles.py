"""Synthetic retrieval in the manner of RULER: sentences hidden in a long text, and questions about them."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from shadowserve_tools.bench.parts.real_model import RealModel

Tensor = Any
TASKS: Final = ("single", "multi_key", "variables")
NEEDLES: Final = {"single": 1, "multi_key": 8, "variables": 2}
"""Hidden sentences, or chains of assignments; the others of a question's own distract."""
_QUESTIONS: Final = 2
_WORDS: Final = (
    "amber basil cedar delta ember fjord grove heron ivory jade koala lemon maple nectar olive pearl quartz raven "
    "sage tulip umber velvet willow zephyr"
).split()
_NUMBER: Final = "The special magic number for {} is: {}.\n"
_ASK_NUMBER: Final = (
    "\nWhat is the special magic number for {0} that the text mentions?",
    "The special magic number for {0} is:",
)
_ASK_VALUE: Final = ("\nWhich number is the value of VAR {0}?", "Each VAR has a value. The value of VAR {0} is:")


@dataclass(frozen=True)
class Question:
    """Tokens behind the stored prompt: question and answer, of which the last ``answer`` are scored."""

    tokens: list[int]
    answer: int

    def right(self, model: RealModel, kv: Tensor) -> bool:
        """Return whether greedy decoding on top of ``kv`` gives the answer."""
        likeliest = model.predict(kv, self.tokens[:-1])[-self.answer :].argmax(dim=-1).tolist()
        return bool(likeliest == self.tokens[-self.answer :])


def contexts(
    model: RealModel, haystack: Sequence[int], length: int, count: int
) -> Iterator[tuple[str, list[int], list[Question]]]:
    """Yield ``count`` prompts of ``length`` tokens for each task: its name, the prompt, and questions about it."""
    chance = random.Random(length)
    before, behind = model.chat("Read this text. It has some facts that you have to remember.\n")
    opening, closing = before + model.tokens("\n"), behind
    for _ in range(count):
        for task in TASKS:
            hidden, asked = _facts(task, chance)
            first = chance.randrange(max(1, len(haystack) - length))
            prompt = opening + list(haystack[first : first + length])
            places = sorted(chance.sample(range(len(opening), length - 40 * len(hidden) - 8), len(hidden)))
            for place, sentence in reversed(list(zip(places, hidden, strict=True))):
                prompt[place:place] = model.tokens("\n" + sentence)
            yield task, prompt[:length], [_question(model, closing, each) for each in asked]


def _question(model: RealModel, closing: list[int], fact: tuple[str, ...]) -> Question:
    ask, lead, answer = fact
    start = model.tokens(ask) + closing + model.tokens(lead)
    digits = model.tokens(f" {answer}")
    return Question(start + digits, len(digits))


def _facts(task: str, chance: random.Random) -> tuple[list[str], list[tuple[str, ...]]]:
    """Return sentences to hide, in order, and what is asked: question, beginning of the answer, number."""
    names = chance.sample(_WORDS, 8)
    numbers = [str(chance.randrange(10**4, 10**5)) for _ in names]
    if task != "variables":
        pairs = list(zip(names, numbers, strict=True))[: NEEDLES[task]]
        texts = [_NUMBER.format(*pair) for pair in pairs]
        return texts, [(*(each.format(name) for each in _ASK_NUMBER), number) for name, number in pairs[:_QUESTIONS]]
    sentences: list[str] = []
    asked: list[tuple[str, ...]] = []
    for chain in range(NEEDLES[task]):
        one, two = names[2 * chain].upper(), names[2 * chain + 1].upper()
        sentences += [f"VAR {one} = {numbers[chain]}.\n", f"VAR {two} = VAR {one}.\n"]
        asked.append((*(each.format(two) for each in _ASK_VALUE), numbers[chain]))
    return sentences, asked
