"""Budgets: what may be spent, what is held of it, and what was spent."""
