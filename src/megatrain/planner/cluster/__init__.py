"""Plans for `engine: mesh`: which layouts fit a cluster, how fast each is and why, by simulation before anything starts."""
