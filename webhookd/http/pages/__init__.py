"""HTML pages: markup helpers, the page layout, and the API reference at /docs."""
