"""What a run trains: the seam, the registry, and the tasks that come with Keepstep."""
