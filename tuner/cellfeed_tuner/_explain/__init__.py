"""Why a configuration is as fast as it is, why it was chosen, and what storage would change."""
