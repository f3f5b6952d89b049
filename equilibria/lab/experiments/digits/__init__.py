"""The demo on small digits."""
