"""Print the hand-written words of each page, most first: `python docs/words.py`.

A word is what white space separates and what has a letter or a digit, so borders of tables do not
count. Pages that a program writes say so in their first lines and do not count either.
"""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_WRITTEN_BY_A_PROGRAM = re.compile(r"^Written by [^\n]*do not\s+edit", re.MULTILINE | re.DOTALL)
_HEAD_CHARACTERS = 400


def hand_written_pages() -> list[Path]:
    """Return the pages at the top and in `docs/` that people write."""
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    written = []
    for page in pages:
        is_built = "_build" in page.parts
        head = page.read_text(encoding="utf-8")[:_HEAD_CHARACTERS]
        if not is_built and not _WRITTEN_BY_A_PROGRAM.search(head):
            written.append(page)
    return sorted(written)


def count_words(text: str) -> int:
    """Count the parts between white space that have a letter or a digit."""
    return sum(1 for part in text.split() if any(letter.isalnum() for letter in part))


def words_by_page() -> dict[str, int]:
    """Return the words of each hand-written page by its path from the root."""
    counted = {}
    for page in hand_written_pages():
        name = page.relative_to(ROOT).as_posix()
        counted[name] = count_words(page.read_text(encoding="utf-8"))
    return counted


if __name__ == "__main__":
    counts = words_by_page()
    for page_name, words in sorted(counts.items(), key=lambda pair: -pair[1]):
        print(f"{words:7,}  {page_name}")
    print(f"{sum(counts.values()):7,}  in all")
