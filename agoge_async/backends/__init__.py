"""What the router can send requests to; `base` is the contract, every other module keeps it."""
