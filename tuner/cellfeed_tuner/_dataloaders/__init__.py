"""Settings of any `torch.utils.data.DataLoader`: made again, timed in this process, chosen."""
