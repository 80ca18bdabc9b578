"""What is compared, each a process of its own: told how many to do by a line, answers with a line."""
