"""Transports that hand trained weights to engines. Must not import train, rollout or ray."""
