"""The web console at `/`, and the same pages for one customer at `/portal`.

A page is rendered on the server from responses of the API (api_calls.py), so it has no queries of its own and
no rights that the API would not give. It works without JavaScript. sessions.py decides what a visitor may do.
"""
