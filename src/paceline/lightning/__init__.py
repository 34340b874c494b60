"""paceline inside Lightning."""
