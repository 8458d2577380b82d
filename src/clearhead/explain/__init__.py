"""Every number of a call, step by step, and how it is shown."""
