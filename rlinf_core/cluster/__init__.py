"""The use of Ray: starting or joining it, facts about its nodes, and the placement of processes."""
