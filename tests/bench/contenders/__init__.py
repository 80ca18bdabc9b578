"""The contenders, each a process: a request says how many deliveries to make, the answer how long it took."""
