"""A report as one HTML file: readable from a mail or on a machine without a network, with and without JavaScript.

Pages are made from the report's JSON alone. Names in it come from a model that nobody vouches for: every text goes
through `markup.text`, and the page's own policy lets no other script run and no request leave (document.py).
"""
