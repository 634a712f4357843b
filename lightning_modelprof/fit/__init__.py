"""One fit, put together: what is measured is analysed, reported and shown. Only the doors look in here."""
