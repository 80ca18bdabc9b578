"""Reads a page as a browser does: its elements and its text."""

from html.parser import HTMLParser


class ParsedPage(HTMLParser):
    """The elements and the text of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Collect an element."""
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        """Collect text."""
        self.text += data

    @property
    def tags(self) -> set[str]:
        return {tag for tag, _ in self.elements}
