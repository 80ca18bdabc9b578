"""The guarded HTTPS client, its address and URL rules, and signatures. Does not know the database."""
