"""The web pages for operators."""
