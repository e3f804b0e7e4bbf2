"""Groups whose processes are forked: no actors of Ray, but children of one per node that passes their calls on."""
