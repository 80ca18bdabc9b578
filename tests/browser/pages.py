"""The pages of the console, for the tests that visit all of them."""

# With the ids of the demo data, in which the first event, delivery and endpoint exist.
PAGES = (
    "/",
    "/events",
    "/events/1",
    "/deliveries",
    "/deliveries/1",
    "/endpoints",
    "/endpoints/1",
    "/dead-letters",
    "/tenants",
    "/jobs",
    "/live",
)
