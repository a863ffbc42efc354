"""What was measured, held against the plan and against theory."""
