"""What was found: record format, comparison, claims, report and plots."""
