"""LeRobotDatasets: metadata, tables, images, integrity checks, and a writer."""
