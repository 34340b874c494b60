"""paceline inside Hugging Face's Trainer and Accelerate."""
