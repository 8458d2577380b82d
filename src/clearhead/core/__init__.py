"""What a call means: the formula, the arguments as values, and what can be observed."""
