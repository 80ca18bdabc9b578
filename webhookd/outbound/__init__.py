"""The way out: the guarded HTTPS client, its address and URL rules, and the signatures.

For deliveries and for verification alike. Knows nothing of the database.
"""
