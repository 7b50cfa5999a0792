"""The planner: where units live, what layers keep, how a step is cut, and its memory and time, before anything is allocated."""
