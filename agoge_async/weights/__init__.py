"""Weights on their way from a trainer's ranks to engines: what is sent, how, and by which steps."""
