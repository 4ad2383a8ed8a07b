"""What the demo trains."""
