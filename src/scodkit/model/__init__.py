"""The user's network: its inputs, its weights, and how it is run without being touched."""
