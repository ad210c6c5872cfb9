"""The paper's six domains, from data to tables."""
