"""What the tests stand on: servers, databases, and ways to see a backend wait."""
