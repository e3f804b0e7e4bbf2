"""LeRobotDatasets: their description, tables, pictures and faults, and writing them."""
