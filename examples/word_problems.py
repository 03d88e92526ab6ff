"""Synthetic one-step word problems with answers in GSM8K's format.

Every problem asks for one addition, subtraction, multiplication or exact division. The
equations are split once and for all by a stable hash, so the held-out ones never appear
among the training problems, whatever the seed.
"""

import hashlib
import random
import re
from collections.abc import Iterator
from typing import NamedTuple

HELDOUT_PERCENT = 15

NAMES = (
    "Ada", "Ben", "Chloe", "Dan", "Elif", "Finn", "Grace", "Hugo", "Ines", "Jon", "Kira", "Leo",
    "Mia", "Noah", "Olga", "Pia", "Ravi", "Sara", "Tom", "Uma",
)  # fmt: skip
OBJECTS = (
    "apples", "books", "cards", "coins", "cups", "eggs", "hats", "keys", "lamps", "nuts", "pens",
    "plums", "rocks", "shells", "stamps", "toys",
)  # fmt: skip
TEMPLATES = {
    "+": (
        "{name} has {a} {things} and buys {b} more. How many {things} does {name} have now?",
        "{name} finds {a} {things} on Monday and {b} on Tuesday. How many {things} is that?",
        "There are {a} {things} in a box and {b} in a bag. How many {things} are there?",
        "What is {a} plus {b}?",
    ),
    "-": (
        "{name} has {a} {things} and gives away {b}. How many {things} are left?",
        "A shop has {a} {things}. It sells {b} of them. How many {things} remain?",
        "{name} had {a} {things} but lost {b}. How many {things} does {name} have now?",
        "What is {a} minus {b}?",
    ),
    "*": (
        "{name} has {a} boxes with {b} {things} in each. How many {things} does {name} have?",
        "{name} buys {a} bags. Every bag holds {b} {things}. How many {things} is that?",
        "There are {a} rows of {b} {things}. How many {things} are there?",
        "What is {a} times {b}?",
    ),
    "/": (
        "{name} shares {a} {things} equally among {b} friends. How many does each friend get?",
        "{name} packs {a} {things} into {b} equal boxes. How many {things} are in each box?",
        "There are {a} {things} in {b} equal rows. How many {things} are in one row?",
        "What is {a} divided by {b}?",
    ),
}
FORMAT = re.compile(r"(?P<left>[^=<>\n]+)=<<(?P=left)=(?P<n>-?\d+)>>(?P=n)\n#### (?P=n)")
FINAL = re.compile(r"#### (-?\d[\d,]*(?:\.\d+)?)")


class Problem(NamedTuple):
    """A word problem, the expression that solves it and the expression's value."""

    question: str
    expression: str
    result: int

    @property
    def answer(self) -> str:
        """Return the reference answer in GSM8K's format."""
        return format_answer(self.expression, self.result)


def format_answer(expression: str, result: int) -> str:
    """Write an expression and its result the way GSM8K writes answers.

    Args:
        expression: The arithmetic expression, such as `7+5`.
        result: The number claimed for it, right or wrong.

    Returns:
        Two lines: the annotated equation, then `#### ` and the number.
    """
    return f"{expression}=<<{expression}={result}>>{result}\n#### {result}"


def final_number(text: str) -> float | None:
    """Return the number after the first `#### ` of a text, or None if there is none."""
    match = FINAL.search(text)
    return float(match.group(1).replace(",", "")) if match else None


def follows_format(text: str) -> bool:
    """Tell whether a whole text is one answer in GSM8K's format, right or wrong."""
    return FORMAT.fullmatch(text.strip()) is not None


def is_correct(problem: Problem, text: str) -> bool:
    """Tell whether the final number of a text is the problem's result."""
    return final_number(text) == problem.result


def is_heldout(expression: str) -> bool:
    """Tell whether an expression belongs to the held-out split."""
    digest = hashlib.sha256(expression.encode()).digest()
    return int.from_bytes(digest[:4], "big") % 100 < HELDOUT_PERCENT


def all_expressions() -> dict[str, int]:
    """Return every expression that a problem can have, with its value."""
    found = {f"{a}+{b}": a + b for a in range(2, 19) for b in range(2, 19)}
    found |= {f"{a}-{b}": a - b for a in range(3, 25) for b in range(2, min(a, 19))}
    found |= {f"{a}*{b}": a * b for a in range(2, 11) for b in range(2, 11)}
    found |= {f"{a * b}/{b}": a for a in range(2, 11) for b in range(2, 11)}
    return found


def train_problems(seed: int) -> Iterator[Problem]:
    """Yield training problems without end.

    Args:
        seed: The seed of the draws; equal seeds give equal problems.

    Yields:
        Problems whose expressions are not held out.
    """
    yield from _problems(seed, heldout=False)


def heldout_problems(count: int, seed: int) -> list[Problem]:
    """Draw held-out problems.

    Args:
        count: How many problems to draw.
        seed: The seed of the draws; equal seeds give equal problems.

    Returns:
        Problems whose expressions never appear among the training problems.
    """
    source = _problems(seed, heldout=True)
    return [next(source) for _ in range(count)]


def _problems(seed: int, *, heldout: bool) -> Iterator[Problem]:
    """Yield problems of one split; the four operations are equally likely."""
    rng = random.Random(f"{seed}-{heldout}")
    pools: dict[str, list[tuple[str, int]]] = {operator: [] for operator in TEMPLATES}
    for expression, result in all_expressions().items():
        if is_heldout(expression) == heldout:
            pools[_operator(expression)].append((expression, result))
    while True:
        operator = rng.choice(tuple(TEMPLATES))
        expression, result = rng.choice(pools[operator])
        left, right = expression.split(operator)
        question = rng.choice(TEMPLATES[operator]).format(
            name=rng.choice(NAMES), things=rng.choice(OBJECTS), a=left, b=right
        )
        yield Problem(question, expression, result)


def _operator(expression: str) -> str:
    """Return the operator of an expression."""
    return next(character for character in expression if character in TEMPLATES)
