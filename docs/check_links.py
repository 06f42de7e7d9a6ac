"""Whether the links of a built site lead to what it has: ``python docs/check_links.py SITE``.

Sphinx looks at references while it builds; this looks at what came out, navigation and included pages
with it. Links to other sites are not followed.
"""

from __future__ import annotations

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class Page(HTMLParser):
    """The links of a page, and the places in it that links may name."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: set[str] = set()
        self.places: set[str] = {"", "top"}
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        for name, value in attributes:
            if name in ("href", "src") and value is not None:
                self.links.add(value)
            elif name == "id" or (name == "name" and tag == "a"):
                self.places.add(value or "")


def broken_links(site: Path) -> list[str]:
    """Each link that leads nowhere, after the page that has it."""
    pages = {path.resolve(): Page(path.read_text("utf-8")) for path in site.rglob("*.html")}
    found = []
    for path, page in sorted(pages.items()):
        for link in sorted(page.links):
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            is_place = target not in pages or unquote(parts.fragment) in pages[target].places
            if not (target.exists() and is_place):
                found.append(f"{path.relative_to(site.resolve())}: {link}")
    return found


if __name__ == "__main__":
    site = Path(sys.argv[1])
    if not list(site.glob("index.html")):
        sys.exit(f"{site} has no index.html")
    if broken := broken_links(site):
        sys.exit("\n".join(["Links that lead nowhere:", *broken]))
    print("all links lead somewhere")
