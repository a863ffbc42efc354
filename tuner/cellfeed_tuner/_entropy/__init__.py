"""How mixed minibatches are: the label entropy of replayed plans."""
