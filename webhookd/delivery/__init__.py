"""Jobs to requests to reports: leases what it can start, sends it, and tells the database what happened."""
