"""What the gateway counts: every metric declared once, in one file."""
