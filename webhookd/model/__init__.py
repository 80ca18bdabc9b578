"""Pure types: ids, states, outcomes, errors. Imports nothing of ours and nothing that does anything."""
