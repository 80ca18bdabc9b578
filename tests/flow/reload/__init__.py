"""SIGHUP: which settings a reload applies, which need a restart, and which files it rejects."""
