"""How mixed minibatches are: label entropy by replay of the plan, over the real labels."""
