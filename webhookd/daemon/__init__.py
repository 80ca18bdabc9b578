"""`webhookd serve`: wires all services together, supervises, reloads and drains them."""
