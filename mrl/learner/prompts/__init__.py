"""Which prompts of the order a policy samples: `curriculum`."""
