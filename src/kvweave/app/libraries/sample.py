"""The sample that comes with kvweave, as documents for a first knowledge base."""

from kvweave.demo import PASSAGES, SHOWN, read_questions
from kvweave.ingest.sources import FileBytes

NAME = "demo"  # of the knowledge base


def sample_documents() -> list[FileBytes]:
    """Its passages. The same names each time: brought twice, they are there once."""
    return [FileBytes(path.name, path.read_bytes()) for path in sorted(PASSAGES.glob("*.md"))]


def sample_questions() -> list[str]:
    """Three that its passages answer."""
    questions = read_questions()
    return [questions[place].question for place in SHOWN]
