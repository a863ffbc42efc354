"""Which ranks train, and how processes that stand for them keep in step."""
