"""A trace as a timeline, and what facts about it share."""
