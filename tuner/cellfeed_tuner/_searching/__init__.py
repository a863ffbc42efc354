"""Spending a time budget: what is known by now, what may be chosen, what a look would take."""
