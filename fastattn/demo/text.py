"""The demo's own sentences, and the reading of the user's."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fastattn.demo._errors import DemoError


@dataclass(frozen=True)
class Line:
    """One sentence and where it came from."""

    text: str
    source: str  #: for messages, such as "line 12 of notes.txt"


QUERIES = (
    "How do plants make their food?",
    "a person who is playing an instrument",
    "Why do prices go up?",
    "What should I do to stay healthy?",
)

SENTENCES = (
    # Sky and space
    "Jupiter is the largest planet of the solar system.",
    "The Moon circles the Earth once in about twenty-seven days.",
    "Light from the Sun takes a little more than eight minutes to reach us.",
    "Galileo turned a small telescope to the sky and saw four moons beside Jupiter, which showed that not "
    "everything in the heavens revolves around the Earth.",
    # Living things
    "With the energy of sunlight, leaves turn water and carbon dioxide into sugar and oxygen.",
    "Bees dance to tell the others where the flowers are.",
    "The blue whale is the heaviest animal that has ever lived.",
    "Penguins cannot fly, but they are excellent swimmers.",
    "A cat sleeps for most of the day.",
    "The dog was too tired to chase the ball because it had been running all morning.",
    "Mushrooms are neither plants nor animals.",
    # The body and its health
    "Walking for half an hour every day is good for the heart.",
    "Most adults need between seven and nine hours of sleep.",
    "Vaccines teach the immune system to recognise a disease before it strikes.",
    "Wash your hands with soap before you eat.",
    # Food
    "Bread rises because yeast gives off gas as it feeds on the dough's sugars.",
    "Boil the pasta in plenty of salted water until it is firm to the bite.",
    "Coffee was first grown for drinking in Yemen.",
    "Chocolate is made from the roasted seeds of the cacao tree.",
    # History
    "The Berlin Wall fell in November 1989.",
    "Gutenberg's press made books cheap enough for ordinary people to own.",
    "The Great Wall of China was built over many centuries by several dynasties to keep out raiders from "
    "the north.",
    "In 1969 two astronauts walked on the lunar surface while a third waited in orbit.",
    "The Roman Empire once reached from Britain to Egypt.",
    # Places
    "Mount Everest stands on the border between Nepal and China.",
    "The Amazon carries more water than any other river.",
    "Paris is the capital of France.",
    "Very little rain falls in the Sahara.",
    "Tokyo's trains are famous for being on time.",
    # Computing
    "A compiler translates a program into instructions that the processor understands.",
    "Always keep a backup of the files you cannot afford to lose.",
    "Neural networks learn by adjusting millions of weights, a little at a time, until their answers agree "
    "with the examples they were shown.",
    "The password must contain at least twelve characters.",
    # Music and art
    "A woman plays the violin in the street.",
    "Mozart wrote his first symphony when he was eight years old.",
    "Visitors from all over the world queue to see the Mona Lisa in the Louvre.",
    "The band tuned their guitars before the concert.",
    # Sport
    "The match ended in a draw after extra time.",
    "A marathon is a little over forty-two kilometres long.",
    "She won the chess tournament without losing a game.",
    # Money
    "When more money chases the same amount of goods, inflation follows.",
    "The central bank raised interest rates by a quarter of a point.",
    "He put a tenth of his salary aside every month.",
    # Weather
    "Heavy snow closed the mountain pass overnight.",
    "Warm, moist air rises, cools, and forms clouds.",
)


def built_in_sentences() -> list[Line]:
    """The sentences the demo searches when it is given no file."""
    return [Line(text, f"built-in sentence {number}") for number, text in enumerate(SENTENCES, 1)]


def read_lines(path: Path) -> list[Line]:
    """The lines of a UTF-8 text file that are not blank, without surrounding white space.

    Raises
    ------
    DemoError
        If the file is missing, cannot be read, is not text, or has only blank lines.
    """
    try:
        with path.open(encoding="utf-8-sig") as file:
            text = file.read()
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise DemoError(
            f"--file {path} is not UTF-8 text: byte 0x{byte:02x} at position {error.start} "
            "cannot be decoded. Save it as UTF-8 first."
        ) from None
    except OSError as error:
        raise DemoError(f"--file {path} cannot be read: {error.strerror}") from None
    if "\0" in text:
        raise DemoError(f"--file {path} is not text: it contains NUL bytes")

    lines = [
        Line(line.strip(), f"line {number} of {path.name}")
        for number, line in enumerate(text.split("\n"), 1)
        if line.strip()
    ]
    if not lines:
        raise DemoError(f"--file {path} has no sentence in it: it is empty, or every line is blank")
    return lines
