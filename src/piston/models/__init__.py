"""The networks: π0, π0.5 and π0-FAST."""
