"""Tests of the console's and the portal's pages over HTTP. tests/browser has those with a browser."""
