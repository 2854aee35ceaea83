"""The room that a replica has for keys and values of its requests."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

__all__ = ["CACHES", "PAGED", "RESERVED", "CacheRoom"]

PAGED, RESERVED = "paged", "reserved"
CACHES = (PAGED, RESERVED)
PAGE = 16  # tokens, as vLLM has


@dataclass
class CacheRoom:
    """Counts ``tokens`` of room, in pages of 16 each of one request; ``used``, ``most_used``: now, and when most was.

    ``kind``: "paged" takes pages as a request grows, "reserved" all that it will ever need when it begins.
    """

    tokens: float
    kind: str
    used: int = 0
    most_used: int = 0

    @property
    def pages(self) -> float:
        """All pages."""
        return self.tokens // PAGE if self.tokens < inf else inf

    @staticmethod
    def needed(keys: int) -> int:
        """Pages for so many keys of one request."""
        return -(-keys // PAGE)

    def takes(self, pages: int) -> bool:
        """Take so many pages more, if there are."""
        if self.used + pages > self.pages:
            return False
        self.used += pages
        self.most_used = max(self.most_used, self.used)
        return True

    def gives_back(self, pages: int) -> None:
        """Give pages back."""
        self.used -= pages
