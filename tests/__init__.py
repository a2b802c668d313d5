"""What must hold: every test is named as the claim it checks."""
