"""The HTTP server that every API resource and page is built on: routes, bodies, auth, problems, OpenAPI."""
