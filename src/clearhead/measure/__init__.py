"""What a call costs: planned, counted on paper, measured."""
