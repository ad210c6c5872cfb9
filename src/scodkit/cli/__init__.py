"""The command ``scod``: one file per verb."""
