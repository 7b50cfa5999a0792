"""Measure training steps of a shape, and compare them with the plan and with the time of the same layers when nothing waits."""
