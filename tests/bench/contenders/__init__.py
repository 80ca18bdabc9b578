"""The contenders, each a process: a request says how many deliveries to make, the answer how long it took.

Before the answer comes a line that says that all work is committed.
"""
