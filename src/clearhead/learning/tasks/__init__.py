"""The exercises themselves: texts, cases, and mistakes with their formulas."""
