"""paceline inside Ray."""
