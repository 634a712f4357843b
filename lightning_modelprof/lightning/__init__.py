"""All that knows Lightning."""
