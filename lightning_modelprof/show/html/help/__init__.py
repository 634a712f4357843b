"""The definitions beside figures."""
