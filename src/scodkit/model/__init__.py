"""The user's network: its inputs, its weights, and the copy that is run in its place."""
